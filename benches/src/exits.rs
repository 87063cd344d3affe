//! The exit counts that the engine logs when a vCPU ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::Event;
use tracing::field::{Field, Visit};

use crate::events::Listen;

/// The field of the log line.
const FIELD: &str = "exits";

/// Exits by kind, summed over all vCPUs that ended since the last look.
#[derive(Clone, Default)]
pub(crate) struct ExitLog(Arc<Mutex<BTreeMap<String, u64>>>);

impl ExitLog {
    /// What was counted, which is then forgotten.
    pub(crate) fn take(&self) -> BTreeMap<String, u64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes `ExitCounts { port_in: 3, halt: 0 }`.
    fn add(&self, counts: &str) {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let inner = counts.split_once('{').map_or(counts, |(_, inner)| inner);
        for pair in inner.trim_end_matches([' ', '}']).split(',') {
            if let Some((kind, count)) = pair.split_once(':')
                && let Ok(count) = count.trim().parse::<u64>()
            {
                *sums.entry(kind.trim().to_owned()).or_default() += count;
            }
        }
    }
}

impl Listen for ExitLog {
    const TARGET: &'static str = "bantam_vmm::native";

    fn hear(&self, event: &Event<'_>) {
        event.record(&mut FieldReader(self));
    }
}

struct FieldReader<'a>(&'a ExitLog);

impl Visit for FieldReader<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == FIELD {
            self.0.add(&format!("{value:?}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Listening;

    #[test]
    fn the_counts_of_several_vcpus_are_added_up() {
        let log = ExitLog::default();
        let counts = |port_in: u64| format!("ExitCounts {{ port_in: {port_in}, halt: 0 }}");
        tracing::subscriber::with_default(Listening(log.clone()), || {
            for port_in in [3, 4] {
                let exits = counts(port_in);
                tracing::debug!(target: "bantam_vmm::native::vcpu", exits = %exits, "ended");
            }
            tracing::debug!(target: "other", exits = %counts(9), "not ours");
        });
        let sums = log.take();
        assert_eq!(sums.get("port_in"), Some(&7));
        assert_eq!(sums.get("halt"), Some(&0));
        assert!(log.take().is_empty());
    }
}
