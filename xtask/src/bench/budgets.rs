//! Budgets: counts that a change may not raise unnoticed. Each is a file in `benches/budgets`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::parts::{growth, parts};
use super::results::{LeftOut, Measurement, Profile, Results, number};
use crate::error::{Error, Result};
use crate::host;

/// Parts below this share of the whole are not in a budget's file.
const SMALLEST_SHARE: u64 = 2000;
/// How many parts that grew are named.
const NAMED: usize = 10;

/// One file. All but `measured` and `parts` is written by people.
#[derive(Serialize, Deserialize)]
pub(super) struct Budget {
    /// The measurement that has this budget.
    pub(super) name: String,
    pub(super) engine: String,
    pub(super) unit: String,
    /// What `--filter` makes the measurement with.
    pub(super) entry: String,
    /// The profile whose parts are remembered, so that a failure names what grew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) profile: Option<String>,
    /// What we want to reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) goal: Option<f64>,
    /// How much more than `measured` is allowed, as a share of it.
    pub(super) tolerance: f64,
    /// Why that much.
    pub(super) why: String,
    /// What it was when the budget was set: the least of some runs, because other work on the host
    /// only adds to counts.
    pub(super) measured: f64,
    /// What that was made of, as far as it matters.
    #[serde(default)]
    pub(super) parts: BTreeMap<String, u64>,
    #[serde(skip)]
    path: PathBuf,
}

/// What became of one budget.
pub(super) enum Verdict<'a> {
    Within(&'a Measurement),
    /// Too much, and what grew.
    Exceeded(&'a Measurement, Vec<String>),
    /// This host cannot measure it, and why.
    Skipped(&'a str),
    /// Measuring it went wrong, and how.
    Failed(&'a str),
    /// Nothing makes a measurement of that name.
    Missing,
}

fn dir() -> PathBuf {
    host::repo().join("benches/budgets")
}

/// All budgets, by the names of their files.
pub(super) fn all() -> Result<Vec<Budget>> {
    let dir = dir();
    let mut paths: Vec<PathBuf> = fs::read_dir(&dir)
        .map_err(Error::file("reading", &dir))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|ext| ext == "json"))
        .collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let refused =
                |error| Error::other(format!("reading the budget {}: {error}", path.display()));
            let budget: Budget = serde_json::from_slice(&host::read(&path)?).map_err(refused)?;
            Ok(Budget { path, ..budget })
        })
        .collect()
}

impl Budget {
    /// The most that is allowed.
    pub(super) fn limit(&self) -> f64 {
        self.measured * (1.0 + self.tolerance)
    }

    pub(super) fn verdict<'a>(&self, results: &'a Results) -> Verdict<'a> {
        let Some(found) = results.find(&self.name, &self.engine) else {
            // What boots no machine is left out of any engine, whatever its numbers are labelled.
            let is_this = |one: &&LeftOut| {
                one.name == self.entry
                    && [self.engine.as_str(), "any"].contains(&one.engine.as_str())
            };
            if let Some(failed) = results.failed().find(is_this) {
                return Verdict::Failed(&failed.reason);
            }
            let skipped = results.skipped().find(is_this);
            return skipped.map_or(Verdict::Missing, |one| Verdict::Skipped(&one.reason));
        };
        if found.min <= self.limit() {
            return Verdict::Within(found);
        }
        let profile = self.profile_in(results);
        let grown = profile.map(|now| growth(&self.parts, now, cutoff(&self.parts), NAMED));
        Verdict::Exceeded(found, grown.unwrap_or_default())
    }

    fn profile_in<'a>(&self, results: &'a Results) -> Option<&'a Profile> {
        let name = self.profile.as_ref()?;
        results
            .profiles()
            .find(|profile| profile.name == *name && profile.engine == self.engine)
    }

    /// Takes what was measured for the new budget; tells whether it was measured.
    fn update(&mut self, results: &Results) -> bool {
        let Some(found) = results.find(&self.name, &self.engine) else {
            return false;
        };
        self.measured = found.min;
        if let Some(profile) = self.profile_in(results) {
            self.parts = parts(profile, profile.total / SMALLEST_SHARE);
        }
        true
    }

    /// For people.
    fn title(&self) -> String {
        format!("{} ({})", self.name, self.engine)
    }

    /// The line for the one who reads why a test failed.
    fn exceeded(&self, found: &Measurement, grown: &[String]) -> String {
        let mut text = format!(
            "{}: {} {}, {} more than when its budget was set; at most {} is allowed\n",
            self.title(),
            number(found.min),
            self.unit,
            number(found.min - self.measured),
            number(self.limit())
        );
        for part in grown {
            let _ = writeln!(text, "    {part}");
        }
        let _ = writeln!(
            text,
            "    if that is worth it: cargo xtask bench --filter {} --update-budgets",
            self.entry
        );
        text
    }
}

/// Parts smaller than the smallest that is remembered were not written down.
fn cutoff(parts: &BTreeMap<String, u64>) -> u64 {
    parts.values().copied().min().unwrap_or(0)
}

/// Budgets that were kept, that were not or of which that is not known (in words), and that this host
/// cannot look at.
#[derive(Default)]
pub(super) struct Outcome {
    pub(super) kept: usize,
    pub(super) broken: Vec<String>,
    /// Name with engine, and reason.
    pub(super) skipped: Vec<(String, String)>,
}

/// Holds budgets against what `measure` finds for them. Those that are exceeded are measured once more:
/// other work on a host adds to counts, and does not add the same again.
pub(super) fn hold(
    budgets: Vec<Budget>,
    mut measure: impl FnMut(&[Budget]) -> Result<Results>,
) -> Result<Outcome> {
    let results = measure(&budgets)?;
    let exceeded = |budget: &Budget| matches!(budget.verdict(&results), Verdict::Exceeded(..));
    let (over, rest): (Vec<_>, Vec<_>) = budgets.into_iter().partition(exceeded);
    let mut outcome = check(&rest, &results);
    if !over.is_empty() {
        let again = check(&over, &measure(&over)?);
        outcome.kept += again.kept;
        outcome.broken.extend(again.broken);
        outcome.skipped.extend(again.skipped);
    }
    Ok(outcome)
}

/// Holds results against the budgets.
fn check(budgets: &[Budget], results: &Results) -> Outcome {
    let mut outcome = Outcome::default();
    let mut told = Vec::new();
    for budget in budgets {
        match budget.verdict(results) {
            Verdict::Within(_) => outcome.kept += 1,
            Verdict::Exceeded(found, grown) => {
                outcome.broken.push(budget.exceeded(found, &grown));
            }
            Verdict::Skipped(why) => outcome.skipped.push((budget.title(), why.to_owned())),
            Verdict::Failed(why) => {
                // One reason may be that of many, and have the end of a console in it.
                let words = match told.contains(&why) {
                    true => format!("as above: {}", why.lines().next().unwrap_or_default()),
                    false => why.to_owned(),
                };
                told.push(why);
                let title = budget.title();
                outcome
                    .broken
                    .push(format!("{title}: measuring failed: {words}\n"));
            }
            Verdict::Missing => outcome.broken.push(format!(
                "{}: `--filter {}` makes no measurement of this name; was it renamed?\n",
                budget.title(),
                budget.entry
            )),
        }
    }
    outcome
}

/// The table of those budgets whose counts were measured.
pub(super) fn table(budgets: &[Budget], results: &Results) -> String {
    let mut text = String::new();
    for budget in budgets {
        let (found, state) = match budget.verdict(results) {
            Verdict::Within(found) => (found, "kept"),
            Verdict::Exceeded(found, _) => (found, "EXCEEDED"),
            Verdict::Skipped(_) | Verdict::Failed(_) | Verdict::Missing => continue,
        };
        if text.is_empty() {
            let _ = writeln!(
                text,
                "\n{:58} {:9} {:>13} {:>13} {:9} {:>13} {:>13} goal",
                "budget", "engine", "least", "limit", "", "median", "goal"
            );
        }
        // The least is for finding out whether a change added something; a goal is for what users get.
        let goal = match budget.goal {
            None => "",
            Some(goal) if found.median <= goal => "met",
            Some(_) => "not met",
        };
        let _ = writeln!(
            text,
            "{:58} {:9} {:>13} {:>13} {state:9} {:>13} {:>13} {goal}",
            format!("{}, {}", budget.name, budget.unit),
            budget.engine,
            number(found.min),
            number(budget.limit()),
            number(found.median),
            budget.goal.map(number).unwrap_or_default(),
        );
    }
    text
}

/// Writes what was measured into the files; returns what changed, in words.
pub(super) fn update(budgets: Vec<Budget>, results: &Results) -> Result<Vec<String>> {
    let mut changed = Vec::new();
    for mut budget in budgets {
        let was = budget.measured;
        if !budget.update(results) {
            continue;
        }
        let mut text = serde_json::to_string_pretty(&budget)
            .map_err(|error| Error::other(format!("writing a budget: {error}")))?;
        text.push('\n');
        host::write_atomic(&budget.path, text.as_bytes())?;
        changed.push(format!(
            "budget of {}: {} -> {}",
            budget.title(),
            number(was),
            number(budget.measured)
        ));
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::super::results::testing::{left_out, measured, profile, results};
    use super::*;

    fn budget() -> Budget {
        Budget {
            name: "boot".to_owned(),
            engine: "emulated".to_owned(),
            unit: "instructions".to_owned(),
            entry: "boot-instructions".to_owned(),
            profile: Some("boot".to_owned()),
            goal: Some(900.0),
            tolerance: 0.02,
            why: String::new(),
            measured: 1000.0,
            parts: BTreeMap::from([("sort_r".to_owned(), 300), ("strlen".to_owned(), 200)]),
            path: PathBuf::new(),
        }
    }

    fn run(total: f64, parts: &[(&str, u64)]) -> Results {
        results(
            vec![measured("boot", "instructions", &[total])],
            vec![profile("boot", parts)],
        )
    }

    #[test]
    fn a_budget_that_is_exceeded_names_the_functions_that_grew() {
        let now = run(
            1500.0,
            &[
                ("sort_r", 420),
                ("strlen", 200),
                ("new_thing", 580),
                ("x", 3),
            ],
        );
        let outcome = check(&[budget()], &now);
        assert_eq!((outcome.kept, outcome.broken.len()), (0, 1));
        let said = &outcome.broken[0];
        let new = said.find("+380  new_thing (less than 200 -> 580)").unwrap();
        let grown = said.find("+120  sort_r (300 -> 420)").unwrap();
        assert!(new < grown, "{said}");
        assert!(!said.contains("strlen"), "{said}");
        assert!(said.contains("500 more"), "{said}");
        assert!(said.contains("--update-budgets"), "{said}");
    }

    #[test]
    fn what_values_of_one_build_differ_by_is_allowed() {
        let outcome = check(&[budget()], &run(1020.0, &[]));
        assert_eq!((outcome.kept, outcome.broken.len()), (1, 0));
        let outcome = check(&[budget()], &run(1021.0, &[]));
        assert_eq!((outcome.kept, outcome.broken.len()), (0, 1));
    }

    #[test]
    fn an_exceeded_budget_is_measured_once_more_and_no_other() {
        let calm = || Budget {
            name: "calm".to_owned(),
            ..budget()
        };
        let held = |first: f64, second: f64| {
            let mut asked = Vec::new();
            let outcome = hold(vec![calm(), budget()], |budgets| {
                asked.push(budgets.len());
                let total = if asked.len() == 1 { first } else { second };
                let both = ["calm", "boot"].map(|name| {
                    let total = if name == "calm" { 1000.0 } else { total };
                    measured(name, "instructions", &[total])
                });
                Ok(results(both.into(), Vec::new()))
            });
            (counts(&outcome.unwrap()), asked)
        };
        assert_eq!(held(1000.0, 1500.0), ((2, 0, 0), vec![2]));
        assert_eq!(held(1500.0, 1000.0), ((2, 0, 0), vec![2, 1]));
        assert_eq!(held(1500.0, 1500.0), ((1, 1, 0), vec![2, 1]));
    }

    /// Kept, broken, skipped.
    fn counts(outcome: &Outcome) -> (usize, usize, usize) {
        (outcome.kept, outcome.broken.len(), outcome.skipped.len())
    }

    #[test]
    fn what_this_host_cannot_measure_is_skipped_and_what_nothing_measures_is_broken() {
        let mut now = results(Vec::new(), Vec::new());
        assert_eq!(counts(&check(&[budget()], &now)), (0, 1, 0));
        let skipped = left_out("boot-instructions", "no compiler");
        now.parts[0].report.skipped.push(skipped);
        let outcome = check(&[budget()], &now);
        assert_eq!(counts(&outcome), (0, 0, 1));
        assert_eq!(outcome.skipped[0].0, "boot (emulated)");
    }

    #[test]
    fn a_measurement_that_failed_breaks_its_budgets_with_the_reason() {
        let mut now = results(Vec::new(), Vec::new());
        let reason = "the rig ended\nlast line of its console";
        let report = &mut now.parts[0].report;
        report.failed.push(left_out("boot-instructions", reason));
        // One run may have been skipped.
        report
            .skipped
            .push(left_out("boot-instructions", "no compiler"));
        let outcome = check(&[budget(), budget()], &now);
        assert_eq!(counts(&outcome), (0, 2, 0));
        assert!(outcome.broken[0].contains(reason), "{}", outcome.broken[0]);
        let second = &outcome.broken[1];
        assert!(
            second.contains("boot (emulated)") && second.contains("the rig ended"),
            "{second}"
        );
        assert!(!second.contains("console"), "{second}");
    }

    #[test]
    fn what_another_engine_lacks_excuses_nothing() {
        let mut now = results(Vec::new(), Vec::new());
        let of_native = |reason| LeftOut {
            engine: "native".to_owned(),
            ..left_out("boot-instructions", reason)
        };
        let report = &mut now.parts[0].report;
        report.skipped.push(of_native("no KVM"));
        report.failed.push(of_native("the rig ended"));
        let outcome = check(&[budget()], &now);
        assert_eq!(counts(&outcome), (0, 1, 0));
        assert!(
            outcome.broken[0].contains("renamed"),
            "{}",
            outcome.broken[0]
        );
    }

    #[test]
    fn what_boots_no_machine_is_left_out_whatever_engine_its_budget_has() {
        let mut now = results(Vec::new(), Vec::new());
        now.parts[0].report.skipped.push(LeftOut {
            engine: "any".to_owned(),
            ..left_out("boot-instructions", "no KVM")
        });
        assert_eq!(counts(&check(&[budget()], &now)), (0, 0, 1));
    }

    #[test]
    fn two_engines_that_are_skipped_are_two_skips() {
        let mut now = results(Vec::new(), Vec::new());
        let other = Budget {
            engine: "native".to_owned(),
            ..budget()
        };
        for engine in ["emulated", "native"] {
            now.parts[0].report.skipped.push(LeftOut {
                engine: engine.to_owned(),
                ..left_out("boot-instructions", "no compiler")
            });
        }
        let skipped = check(&[budget(), other], &now).skipped;
        let by_name: BTreeMap<String, String> = skipped.into_iter().collect();
        assert_eq!(by_name.len(), 2);
    }

    #[test]
    fn the_table_says_whether_a_goal_is_met() {
        let text = table(&[budget()], &run(950.0, &[]));
        assert!(
            text.contains("kept") && text.trim_end().ends_with("not met"),
            "{text}"
        );
        let text = table(&[budget()], &run(850.0, &[]));
        assert!(
            text.trim_end().ends_with(" met") && !text.contains("not met"),
            "{text}"
        );
        let text = table(&[budget()], &run(2000.0, &[]));
        assert!(text.contains("EXCEEDED"), "{text}");
    }

    #[test]
    fn a_goal_is_met_by_the_median_and_a_budget_kept_by_the_least() {
        let values = [850.0, 950.0, 1500.0];
        let now = results(vec![measured("boot", "instructions", &values)], Vec::new());
        let text = table(&[budget()], &now);
        assert!(
            text.contains("kept") && text.trim_end().ends_with("not met"),
            "{text}"
        );
    }

    #[test]
    fn an_update_takes_what_matters_of_a_profile() {
        let mut budget = budget();
        let now = run(4000.0, &[("sort_r", 3000), ("strlen", 999), ("tiny", 1)]);
        assert!(budget.update(&now));
        assert_eq!(budget.measured, 4000.0);
        assert_eq!(budget.parts.len(), 2);
        assert!(!budget.update(&results(Vec::new(), Vec::new())));
    }

    #[test]
    fn every_budget_in_the_repository_can_be_read_says_why_and_keeps_within_its_goal() {
        let budgets = all().unwrap();
        assert!(!budgets.is_empty());
        for budget in budgets {
            assert!(budget.why.len() > 20, "{}", budget.name);
            assert!(
                budget.measured > 0.0,
                "{}: set it with --update-budgets",
                budget.name
            );
            assert!(budget.tolerance < 0.5, "{}", budget.name);
            let (limit, goal) = (budget.limit(), budget.goal.unwrap_or(f64::INFINITY));
            assert!(
                limit <= goal,
                "{}: its budget allows {limit}, which passes its goal of {goal}",
                budget.title()
            );
        }
    }
}
