//! A native start in virtual time, among the measurements: `cargo xtask virtual-time` makes the numbers.

use super::results::{Measurement, Part, Place, Report};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::virtual_time::{self, VirtualTimeArgs};

/// What `--filter` looks at.
pub(super) const ENTRY: &str = "virtual-time";
/// Every third boot or so takes 0.4 ms more: of three, all may be such.
const BOOTS: u32 = 6;
/// No "ms": what the host is busy with leaves it as it is.
const UNIT: &str = "virtual ms";
const NANOSECONDS: f64 = 1e6;
/// Words of a boot's line, and what they are called here.
const NAMES: [(&str, &str); 3] = [
    ("first_run", "virtual time: start to first vCPU run"),
    ("guest_init", "virtual time: start to the guest's /init"),
    ("teardown_cpu", "virtual time: teardown, CPU"),
];

/// Whether a filter means these numbers alone: no other entry has such a name.
pub(super) fn is_named(filter: &str) -> bool {
    filter.starts_with("virtual") && ENTRY.starts_with(filter)
}

/// Boots machines in an outer machine of its own.
pub(super) fn measure(progress: &Progress) -> Result<Part> {
    let lines = virtual_time::boots(&VirtualTimeArgs::boots(BOOTS), None, progress)?;
    let results = NAMES.iter().map(|(word, name)| result(word, name, &lines));
    Ok(Part {
        place: Place::Rig,
        report: Report {
            results: results.collect::<Result<_>>()?,
            ..Report::default()
        },
    })
}

fn result(word: &str, name: &str, lines: &[String]) -> Result<Measurement> {
    // All of them, or none.
    let values: Option<Vec<f64>> = lines.iter().map(|line| value(word, line)).collect();
    let measured = values.and_then(|values| Measurement::of(name, "native", UNIT, values));
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
