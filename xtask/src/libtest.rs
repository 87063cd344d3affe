//! Reads what Rust's test programs print.

use std::collections::BTreeMap;

/// Results of one or more test programs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Results {
    /// Tests that ran and held.
    pub(crate) passed: usize,
    /// Tests that failed.
    pub(crate) failed: usize,
    /// Tests that could not run here, with the reason each gave.
    pub(crate) skipped: BTreeMap<String, String>,
    /// Programs that printed a result line.
    pub(crate) programs: usize,
}

impl Results {
    /// Reads the output of programs run with `--show-output`. A test that
    /// cannot run prints `skipped: why` (or `skipped: NAME: why`) and
    /// returns, which the test program counts as passed; here it is skipped.
    pub(crate) fn parse(output: &str) -> Self {
        let mut results = Self::default();
        let mut test = None;
        let mut counted_as_passed = 0;
        for line in output.lines() {
            if let Some(name) = section(line) {
                test = Some(name.to_owned());
            } else if let Some(counts) = line.strip_prefix("test result: ") {
                results.passed += count(counts, "passed");
                results.failed += count(counts, "failed");
                results.programs += 1;
                test = None;
            } else if let Some((name, why)) = ignored(line) {
                results.skipped.insert(name.to_owned(), why.to_owned());
            } else if let (Some(why), Some(name)) = (line.strip_prefix("skipped: "), &test) {
                let why = reason(why, name).to_owned();
                if results.skipped.insert(name.clone(), why).is_none() {
                    counted_as_passed += 1;
                }
            }
        }
        results.passed = results.passed.saturating_sub(counted_as_passed);
        results
    }
}

/// The reason without the test's name before it.
fn reason<'a>(why: &'a str, name: &str) -> &'a str {
    let short = name.rsplit("::").next().unwrap_or(name);
    [name, short]
        .iter()
        .find_map(|name| why.strip_prefix(name)?.strip_prefix(": "))
        .unwrap_or(why)
}

/// `---- tests::name stdout ----` gives the test's name.
fn section(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// `test tests::name ... ignored, reason`.
fn ignored(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
    Some((name, rest.strip_prefix(", ").unwrap_or("ignored")))
}

/// The number before `word` in `ok. 3 passed; 0 failed; ...`.
fn count(counts: &str, word: &str) -> usize {
    counts
        .split(['.', ';'])
        .find_map(|part| part.trim().strip_suffix(word))
        .and_then(|number| number.trim().parse().ok())
        .unwrap_or(0)
}

/// The parts of the output that explain failures: from `failures:` to the
/// result line of each program that failed.
pub(crate) fn failures(output: &str) -> String {
    let mut text = String::new();
    let mut inside = false;
    for line in output.lines() {
        inside |= line == "failures:" || line.starts_with("error");
        if inside {
            text.push_str(line);
            text.push('\n');
        }
        inside &= !line.starts_with("test result: ");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "
running 4 tests
test a::holds ... ok
test a::cannot ... ok
test a::slow ... ignored, takes an hour
test a::breaks ... FAILED

successes:

---- a::cannot stdout ----
skipped: cannot: no /dev/kvm on this machine

successes:
    a::holds

failures:

---- a::breaks stdout ----
assertion failed

failures:
    a::breaks

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn a_test_that_says_skipped_is_not_counted_as_passed() {
        let results = Results::parse(OUTPUT);
        assert_eq!(
            (results.passed, results.failed, results.programs),
            (1, 1, 1)
        );
        assert_eq!(results.skipped["a::cannot"], "no /dev/kvm on this machine");
        assert_eq!(results.skipped["a::slow"], "takes an hour");
    }

    #[test]
    fn programs_add_up() {
        let results = Results::parse(&format!("{OUTPUT}{OUTPUT}"));
        assert_eq!((results.failed, results.programs), (2, 2));
    }

    #[test]
    fn failures_are_cut_out_of_the_output() {
        let text = failures(OUTPUT);
        assert!(text.starts_with("failures:\n"));
        assert!(text.contains("assertion failed"));
        assert!(!text.contains("successes"));
    }
}
