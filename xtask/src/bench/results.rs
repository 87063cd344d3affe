//! The results as `docs/performance.md` describes their JSON.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::host;

/// The version of the JSON format. Raise it when a field changes its meaning.
pub(super) const SCHEMA: u32 = 2;

/// Everything that one run of `cargo xtask bench` measured.
#[derive(Serialize, Deserialize)]
pub(super) struct Results {
    pub(super) schema: u32,
    /// When and of what.
    pub(super) run: Run,
    /// Bytes of what a machine is made of.
    #[serde(default)]
    pub(super) sizes: BTreeMap<String, u64>,
    pub(super) parts: Vec<Part>,
}

/// When it was measured, and which state of the repository.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) date: String,
    pub(super) commit: String,
    pub(super) qemu: String,
}

/// The results of one engine at one place.
#[derive(Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) place: Place,
    pub(super) report: Report,
}

/// Where something was measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Place {
    Host,
    /// In the nested rig, whose CPU is emulated.
    Rig,
}

/// What `bantam-bench` prints.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) host: Option<Facts>,
    pub(super) results: Vec<Measurement>,
    pub(super) profiles: Vec<Profile>,
    pub(super) skipped: Vec<LeftOut>,
    /// Earlier programs had these among the skipped.
    #[serde(default)]
    pub(super) failed: Vec<LeftOut>,
}

/// The machine that measured.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Facts {
    pub(super) cpu: String,
    pub(super) cores: usize,
    pub(super) kernel: String,
    pub(super) mitigations: BTreeMap<String, String>,
    pub(super) load: String,
}

/// One number, measured `n` times.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Measurement {
    pub(super) name: String,
    pub(super) engine: String,
    pub(super) peer: Option<String>,
    pub(super) unit: String,
    pub(super) n: usize,
    pub(super) min: f64,
    pub(super) median: f64,
    pub(super) p95: Option<f64>,
    pub(super) max: f64,
    pub(super) values: Vec<f64>,
}

/// What one count is made of.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(super) struct Profile {
    pub(super) name: String,
    pub(super) engine: String,
    pub(super) unit: String,
    pub(super) total: u64,
    pub(super) marks: Vec<Count>,
    pub(super) parts: Vec<Count>,
    pub(super) waits: Vec<Count>,
}

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Count {
    pub(super) name: String,
    pub(super) count: u64,
}

/// What was not measured, and why.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct LeftOut {
    /// What `--filter` calls it, or what of it is missing.
    pub(super) name: String,
    /// Empty if an earlier program wrote it.
    #[serde(default)]
    pub(super) engine: String,
    pub(super) reason: String,
}

impl LeftOut {
    /// What it is, for people.
    pub(super) fn title(&self) -> String {
        match self.engine.as_str() {
            "" => self.name.clone(),
            engine => format!("{} ({engine})", self.name),
        }
    }
}

impl Results {
    /// Reads what an earlier run wrote.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = host::read(path)?;
        let refused = |error: String| Error::other(format!("reading {}: {error}", path.display()));
        let any: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| refused(error.to_string()))?;
        if any["schema"] != SCHEMA {
            return Err(refused(format!(
                "its schema is {}, this program knows {SCHEMA}: measure the old commit again",
                any["schema"]
            )));
        }
        serde_json::from_value(any).map_err(|error| refused(error.to_string()))
    }

    /// All numbers with the place where each was measured.
    pub(super) fn measurements(&self) -> impl Iterator<Item = (Place, &Measurement)> {
        (self.parts.iter()).flat_map(|part| {
            part.report
                .results
                .iter()
                .map(|result| (part.place, result))
        })
    }

    pub(super) fn profiles(&self) -> impl Iterator<Item = &Profile> {
        self.parts.iter().flat_map(|part| &part.report.profiles)
    }

    /// What this host cannot measure.
    pub(super) fn skipped(&self) -> impl Iterator<Item = &LeftOut> {
        self.parts.iter().flat_map(|part| &part.report.skipped)
    }

    /// What was tried and went wrong.
    pub(super) fn failed(&self) -> impl Iterator<Item = &LeftOut> {
        self.parts.iter().flat_map(|part| &part.report.failed)
    }

    /// Ours of this name on this engine.
    pub(super) fn find(&self, name: &str, engine: &str) -> Option<&Measurement> {
        self.measurements()
            .map(|(_, result)| result)
            .find(|m| m.name == name && m.engine == engine && m.peer.is_none())
    }
}

impl Measurement {
    /// A number of ours from what was measured in turn; none without values. For few: no percentile.
    pub(super) fn of(name: &str, engine: &str, unit: &str, values: Vec<f64>) -> Option<Self> {
        let mut sorted = values.clone();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            name: name.to_owned(),
            engine: engine.to_owned(),
            peer: None,
            unit: unit.to_owned(),
            n: sorted.len(),
            min: *sorted.first()?,
            median: sorted[(sorted.len() - 1) / 2],
            p95: None,
            max: *sorted.last()?,
            values,
        })
    }

    /// Whether the host's load leaves it as it is.
    pub(super) fn is_count(&self) -> bool {
        !matches!(self.unit.as_str(), "ms" | "us" | "s" | "ratio") && !self.unit.contains("/s")
    }

    /// How far values of one run lie apart: the middle half of many, all of a few.
    pub(super) fn spread(&self) -> f64 {
        const MANY: usize = 8;
        if self.values.len() < MANY {
            return self.max - self.min;
        }
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |quarter: usize| sorted[(sorted.len() - 1) * quarter / 4];
        at(3) - at(1)
    }
}

/// The weaknesses that the kernel works around, and those that it does not.
pub(super) fn mitigations(facts: &Facts) -> String {
    let named = |mitigated: bool| {
        let names: Vec<&str> = (facts.mitigations.iter())
            .filter(|(_, state)| state.starts_with("Mitigation") == mitigated)
            .map(|(name, _)| name.as_str())
            .collect();
        match names.as_slice() {
            [] => "none".to_owned(),
            names => names.join(", "),
        }
    };
    format!("{}; left open: {}", named(true), named(false))
}

/// A number with thin groups of three, or two decimals if it is small.
pub(super) fn number(n: f64) -> String {
    if n.fract() != 0.0 && n.abs() < 10_000.0 {
        return format!("{n:.2}");
    }
    let digits = format!("{:.0}", n.abs());
    let mut text = String::from(if n < 0.0 { "-" } else { "" });
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// A count, grouped.
pub(super) fn counted(n: u64) -> String {
    number(n as f64)
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// A number of ours.
    pub(in crate::bench) fn measured(name: &str, unit: &str, values: &[f64]) -> Measurement {
        Measurement::of(name, "emulated", unit, values.to_vec()).unwrap()
    }

    /// What one count is made of.
    pub(in crate::bench) fn profile(name: &str, parts: &[(&str, u64)]) -> Profile {
        Profile {
            name: name.to_owned(),
            engine: "emulated".to_owned(),
            unit: "instructions".to_owned(),
            total: parts.iter().map(|(_, count)| count).sum(),
            parts: (parts.iter())
                .map(|(name, count)| Count {
                    name: (*name).to_owned(),
                    count: *count,
                })
                .collect(),
            ..Profile::default()
        }
    }

    /// What was not measured of the emulated engine.
    pub(in crate::bench) fn left_out(name: &str, reason: &str) -> LeftOut {
        LeftOut {
            name: name.to_owned(),
            engine: "emulated".to_owned(),
            reason: reason.to_owned(),
        }
    }

    /// A whole run.
    pub(in crate::bench) fn results(results: Vec<Measurement>, profiles: Vec<Profile>) -> Results {
        Results {
            schema: SCHEMA,
            run: Run::default(),
            sizes: BTreeMap::new(),
            parts: vec![Part {
                place: Place::Host,
                report: Report {
                    results,
                    profiles,
                    ..Report::default()
                },
            }],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::measured;
    use super::*;

    #[test]
    fn large_numbers_are_grouped_and_small_ones_keep_decimals() {
        for (value, text) in [
            (159_236_586.0, "159 236 586"),
            (999.0, "999"),
            (1000.0, "1 000"),
            (3.289_93, "3.29"),
            (-12_345.6, "-12 346"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn the_spread_of_many_values_leaves_out_the_outliers() {
        let few = measured("few", "ms", &[1.0, 2.0, 9.0]);
        assert_eq!(few.spread(), 8.0);
        let many = measured(
            "many",
            "ms",
            &[1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 90.0],
        );
        assert_eq!(many.spread(), 1.0);
    }

    #[test]
    fn what_depends_on_the_load_is_no_count() {
        for (unit, count) in [
            ("instructions", true),
            ("KiB", true),
            ("ms", false),
            ("MB/s", false),
        ] {
            assert_eq!(measured("m", unit, &[1.0]).is_count(), count, "{unit}");
        }
    }
}
