//! What a measurement gives, as JSON. `docs/performance.md` describes the format.

use std::time::Duration;

use serde::Serialize;

use crate::Error;
use crate::facts::Facts;

/// From how many values on a 95th percentile says anything.
const P95_FROM: usize = 20;

/// All results of one run of the program.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// Whose measurements are left out, if some are.
    #[serde(skip)]
    engine: &'static str,
    /// Where it ran; filled in at the end.
    pub(crate) host: Option<Facts>,
    pub(crate) results: Vec<Measurement>,
    pub(crate) profiles: Vec<Profile>,
    /// Measurements that this host cannot make: it lacks what they need. Nothing was tried.
    pub(crate) skipped: Vec<LeftOut>,
    /// Measurements that were tried and went wrong.
    pub(crate) failed: Vec<LeftOut>,
}

/// One number, measured `n` times.
#[derive(Debug, Serialize)]
pub(crate) struct Measurement {
    pub(crate) name: String,
    /// Which engine, or which kind of it a peer uses.
    pub(crate) engine: &'static str,
    /// The other program that was measured, if it was not bantam.
    pub(crate) peer: Option<&'static str>,
    pub(crate) unit: &'static str,
    n: usize,
    min: f64,
    median: f64,
    p95: Option<f64>,
    max: f64,
    /// In the order of measuring.
    values: Vec<f64>,
}

/// What one count is made of: kernel functions, kinds of exits, names of system calls, mappings.
/// It is named like the measurement; of several runs it is the median one.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Profile {
    pub(crate) name: String,
    pub(crate) engine: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) total: u64,
    /// The count until each phase began.
    pub(crate) marks: Vec<Count>,
    /// Largest first.
    pub(crate) parts: Vec<Count>,
    /// Parts that only wait for a clock or another CPU.
    pub(crate) waits: Vec<Count>,
}

#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) name: String,
    pub(crate) count: u64,
}

/// Largest first.
pub(crate) fn sorted(counts: impl IntoIterator<Item = (String, u64)>) -> Vec<Count> {
    let mut parts: Vec<_> = counts
        .into_iter()
        .filter(|(_, count)| *count > 0)
        .map(|(name, count)| Count { name, count })
        .collect();
    parts.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.name.cmp(&b.name)));
    parts
}

/// The median run: one example that really happened.
pub(crate) fn median_of(mut profiles: Vec<Profile>) -> Option<Profile> {
    profiles.sort_by_key(|profile| profile.total);
    let middle = profiles.len().checked_sub(1)? / 2;
    profiles.into_iter().nth(middle)
}

/// A measurement that there is not, and why.
#[derive(Debug, Serialize)]
pub(crate) struct LeftOut {
    /// What `--filter` calls it, or what of it is missing.
    pub(crate) name: String,
    /// As of a result.
    pub(crate) engine: &'static str,
    pub(crate) reason: String,
}

impl Report {
    /// An empty one of an engine, or of "any".
    pub(crate) fn of(engine: &'static str) -> Self {
        Self {
            engine,
            ..Self::default()
        }
    }

    /// Adds a number of ours.
    pub(crate) fn add(
        &mut self,
        name: impl Into<String>,
        engine: &'static str,
        unit: &'static str,
        values: Vec<f64>,
    ) {
        self.results
            .extend(Measurement::new(name, engine, unit, values));
    }

    /// Adds the same number of another program: `name`, `engine` and `unit` are those of ours, so
    /// that the table can set one beside the other.
    pub(crate) fn add_peer(
        &mut self,
        peer: &'static str,
        name: impl Into<String>,
        engine: &'static str,
        unit: &'static str,
        values: Vec<f64>,
    ) {
        let of_peer = Measurement::new(name, engine, unit, values).map(|of_peer| Measurement {
            peer: Some(peer),
            ..of_peer
        });
        self.results.extend(of_peer);
    }

    /// Says what this host lacks for a measurement.
    pub(crate) fn skip(&mut self, name: impl Into<String>, reason: impl Into<String>) {
        self.skipped.push(LeftOut {
            name: name.into(),
            engine: self.engine,
            reason: reason.into(),
        });
    }

    /// Says why there is no measurement: what the host lacks is skipped, all else has failed.
    pub(crate) fn left_out(&mut self, name: impl Into<String>, error: &Error) {
        match error {
            Error::Missing(what) => self.skip(name, what),
            error => self.failed.push(LeftOut {
                name: name.into(),
                engine: self.engine,
                reason: error.to_string(),
            }),
        }
    }
}

impl Measurement {
    /// Sums up `values`; `None` if there are none.
    pub(crate) fn new(
        name: impl Into<String>,
        engine: &'static str,
        unit: &'static str,
        values: Vec<f64>,
    ) -> Option<Self> {
        let mut sorted = values.clone();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        Some(Self {
            name: name.into(),
            engine,
            peer: None,
            unit,
            n,
            min: *sorted.first()?,
            median: rank(&sorted, 50)?,
            p95: (n >= P95_FROM).then(|| rank(&sorted, 95)).flatten(),
            max: *sorted.last()?,
            values,
        })
    }
}

/// The nearest-rank percentile of sorted values.
fn rank(sorted: &[f64], percent: usize) -> Option<f64> {
    let index = (sorted.len() * percent).div_ceil(100).checked_sub(1)?;
    sorted.get(index).copied()
}

pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_a_value_that_was_measured() {
        let m = Measurement::new("m", "e", "ms", vec![9.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((m.min, m.median, m.max, m.p95), (1.0, 2.0, 9.0, None));
    }

    #[test]
    fn a_percentile_needs_twenty_values() {
        let values: Vec<f64> = (1..=20).map(f64::from).collect();
        let m = Measurement::new("m", "e", "ms", values).unwrap();
        assert_eq!(m.p95, Some(19.0));
    }

    #[test]
    fn no_values_are_no_measurement() {
        assert!(Measurement::new("m", "e", "ms", Vec::new()).is_none());
    }
}
