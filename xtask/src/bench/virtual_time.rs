//! A native start in virtual time, among the measurements: `cargo xtask virtual-time --profile` makes the numbers.

use super::results::{Count, Measurement, Part, Place, Profile, Report};
use crate::error::{Error, Result};
use crate::profile::Boot;
use crate::progress::Progress;
use crate::virtual_time::{self, VirtualTimeArgs};

/// What `--filter` looks at.
pub(super) const ENTRY: &str = "virtual-time";
/// A third of the boots takes 0.4 ms more: of three, all may be such.
const BOOTS: u32 = 6;
/// All are of this engine.
const ENGINE: &str = "native";
/// No "ms": what the host is busy with leaves it as it is.
const UNIT: &str = "virtual ms";
const NANOSECONDS: f64 = 1e6;
const INIT: &str = "virtual time: start to the guest's /init";
/// Words of a boot's line, and what they are called here.
const NAMES: [(&str, &str); 3] = [
    ("first_run", "virtual time: start to first vCPU run"),
    ("guest_init", INIT),
    ("teardown_cpu", "virtual time: teardown, CPU"),
];
const GUEST: &str = "virtual time: guest instructions to /init";
const HOST: &str = "virtual time: host instructions to /init";
const INSTRUCTIONS: &str = "instructions";
/// Those that the host's kernel answers by itself, too.
const EXITS: &str = "virtual time: all VM exits to /init";
const EXITS_UNIT: &str = "exits";

/// Whether a filter means these numbers alone: no other entry has such a name.
pub(super) fn is_named(filter: &str) -> bool {
    filter.starts_with("virtual") && ENTRY.starts_with(filter)
}

/// Boots machines in an outer machine of its own. Counting does not take virtual time.
pub(super) fn measure(progress: &Progress) -> Result<Part> {
    let boots = virtual_time::profiled(&VirtualTimeArgs::boots(BOOTS), progress)?;
    Ok(Part {
        place: Place::Rig,
        report: report(boots)?,
    })
}

/// Of the boots' lines and counts, one or more.
fn report(boots: Vec<(String, Boot)>) -> Result<Report> {
    let (lines, boots): (Vec<String>, Vec<Boot>) = boots.into_iter().unzip();
    let times = NAMES.iter().map(|(word, name)| result(word, name, &lines));
    let mut results: Vec<Measurement> = times.collect::<Result<_>>()?;
    let mut add = |name, unit, count: fn(&Boot) -> u64| {
        let values = boots.iter().map(|boot| count(boot) as f64).collect();
        results.extend(Measurement::of(name, ENGINE, unit, values));
    };
    add(GUEST, INSTRUCTIONS, Boot::guest_instructions);
    add(HOST, INSTRUCTIONS, Boot::host_instructions);
    add(EXITS, EXITS_UNIT, Boot::exits);
    let profiles = median(&boots, instructions).map(functions).into_iter();
    let profiles = profiles.chain(median(&boots, Boot::exits).map(exits));
    Ok(Report {
        results,
        profiles: profiles.collect(),
        ..Report::default()
    })
}

fn instructions(boot: &Boot) -> u64 {
    boot.host_instructions() + boot.guest_instructions()
}

/// The boot in the middle by a count.
fn median(boots: &[Boot], count: impl Fn(&Boot) -> u64) -> Option<&Boot> {
    let mut sorted: Vec<&Boot> = boots.iter().collect();
    sorted.sort_by_key(|boot| count(boot));
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

/// What the time to `/init` is made of: an instruction is a nanosecond.
fn functions(boot: &Boot) -> Profile {
    profile(INIT, INSTRUCTIONS, boot.functions())
}

fn exits(boot: &Boot) -> Profile {
    let handlers = boot.handlers.iter();
    let handlers = handlers.map(|(name, [exits, _])| (name.clone(), *exits));
    profile(EXITS, EXITS_UNIT, handlers)
}

fn profile(name: &str, unit: &str, parts: impl Iterator<Item = (String, u64)>) -> Profile {
    let mut parts: Vec<Count> = parts.map(|(name, count)| Count { name, count }).collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.count));
    Profile {
        name: name.to_owned(),
        engine: ENGINE.to_owned(),
        unit: unit.to_owned(),
        total: parts.iter().map(|part| part.count).sum(),
        parts,
        ..Profile::default()
    }
}

fn result(word: &str, name: &str, lines: &[String]) -> Result<Measurement> {
    // All of them, or none.
    let values: Option<Vec<f64>> = lines.iter().map(|line| value(word, line)).collect();
    let measured = values.and_then(|values| Measurement::of(name, ENGINE, UNIT, values));
    measured.ok_or_else(|| {
        Error::other(format!(
            "no `{word}=` for each of the boots in virtual time: {lines:?}"
        ))
    })
}

/// Milliseconds of a word such as `guest_init=17422102`.
fn value(word: &str, line: &str) -> Option<f64> {
    let words = line
        .split_whitespace()
        .filter_map(|pair| pair.split_once('='));
    let found = words.into_iter().find(|(name, _)| *name == word)?;
    Some(found.1.parse::<f64>().ok()? / NANOSECONDS)
}

#[cfg(test)]
mod tests {
    use super::super::budgets;
    use super::*;

    #[test]
    fn a_boots_words_become_milliseconds() {
        let lines = [
            "main=1 first_run=4107276 guest_init=17427336".to_owned(),
            "main=1 first_run=4102446 guest_init=17422102".to_owned(),
        ];
        let init = result("guest_init", "x", &lines).unwrap();
        assert_eq!(init.values, [17.427_336, 17.422_102]);
        assert_eq!((init.min, init.max, init.n), (17.422_102, 17.427_336, 2));
        assert!(init.is_count());
    }

    /// A boot of so many instructions of the guest, the host, and so many exits.
    fn boot(guest: u64, host: u64, exits: u64) -> (String, Boot) {
        let part = |name: &str, count| (name.to_owned(), count);
        let boot = Boot {
            guest: vec![part("memset", guest)],
            host: vec![part("memset", host), part("fault", 1)],
            handlers: vec![
                ("io_interception".to_owned(), [1, 9]),
                ("npf_interception".to_owned(), [exits - 1, 1000]),
            ],
            ..Boot::default()
        };
        let line = "first_run=1 guest_init=2 teardown_cpu=3".to_owned();
        (line, boot)
    }

    #[test]
    fn counts_of_all_boots_are_reported_and_what_the_middle_one_is_made_of() {
        let report = report(vec![boot(30, 3, 5), boot(10, 4, 7), boot(20, 5, 6)]).unwrap();
        let values = |name: &str| {
            let found = report.results.iter().find(|result| result.name == name);
            found.unwrap().values.clone()
        };
        assert_eq!(values(INIT), [2e-6, 2e-6, 2e-6]);
        assert_eq!(values(GUEST), [30.0, 10.0, 20.0]);
        assert_eq!(values(HOST), [4.0, 5.0, 6.0]);
        assert_eq!(values(EXITS), [5.0, 7.0, 6.0]);
        // By name and engine, which is where a budget looks.
        let parts = |name: &str| {
            let mut profiles = report.profiles.iter();
            let found = profiles.find(|p| p.name == name && p.engine == "native");
            let found = found.unwrap();
            let parts = found.parts.iter();
            let parts: Vec<_> = parts.map(|part| (part.name.as_str(), part.count)).collect();
            (found.total, parts)
        };
        let functions = vec![
            ("guest: memset", 20),
            ("host: memset", 5),
            ("host: fault", 1),
        ];
        assert_eq!(parts(INIT), (26, functions));
        let handlers = vec![("npf_interception", 5), ("io_interception", 1)];
        assert_eq!(parts(EXITS), (6, handlers));
    }

    #[test]
    fn each_budget_of_virtual_time_finds_its_number_and_what_that_is_made_of() {
        let report = report(vec![boot(30, 3, 5)]).unwrap();
        let budgets = budgets::all().unwrap();
        let ours: Vec<_> = budgets.iter().filter(|b| b.entry == ENTRY).collect();
        assert!(!ours.is_empty());
        for budget in ours {
            let name = &budget.name;
            assert_eq!(
                (&*budget.engine, &budget.profile),
                (ENGINE, &Some(name.clone()))
            );
            let mut results = report.results.iter();
            assert!(results.any(|r| r.name == *name && r.unit == budget.unit));
            assert!(report.profiles.iter().any(|p| p.name == *name), "{name}");
            assert!(!budget.parts.is_empty(), "{name}");
        }
    }

    #[test]
    fn a_boot_that_does_not_say_it_is_an_error() {
        let lines = ["guest_init=1".to_owned(), "guest_init=".to_owned()];
        for (word, lines) in [
            ("guest_init", &lines[..]),
            ("first_run", &lines[..1]),
            ("x", &[]),
        ] {
            let error = result(word, "x", lines).err().unwrap().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
