//! The exit counts that the engine logs when a vCPU ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// The field of the log line, and the crate that writes it.
const FIELD: &str = "exits";
const TARGET: &str = "bantam_vmm::native";

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

impl Subscriber for ExitLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target().starts_with(TARGET)
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut FieldReader(self));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
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

    #[test]
    fn the_counts_of_several_vcpus_are_added_up() {
        let log = ExitLog::default();
        let counts = |port_in: u64| format!("ExitCounts {{ port_in: {port_in}, halt: 0 }}");
        tracing::subscriber::with_default(log.clone(), || {
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
