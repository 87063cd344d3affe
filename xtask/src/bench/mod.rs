//! `cargo xtask bench`: builds what is measured, runs the measurements of `benches/` for each
//! engine, prints one table. `docs/performance.md` says how each number is made.

mod budgets;
mod compare;
mod measure;
mod parts;
mod peers;
mod plan;
mod results;
mod table;
mod virtual_time;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};

use crate::error::{Error, Result};
use crate::host;
use crate::libtest;
use crate::progress::{Progress, say};

pub(crate) use self::measure::build_bench;

use self::plan::{Known, Request};
use self::results::Results;

/// What to measure.
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Only machines of this engine (repeatable; default: both)
    ///
    /// Where the host has no usable KVM, native machines are measured in the nested rig.
    #[arg(long, value_name = "ENGINE")]
    engine: Vec<Engine>,
    /// Only measurements whose name contains this (repeatable; `--list` shows the names)
    #[arg(long, value_name = "NAME")]
    filter: Vec<String>,
    /// How often times are measured; counts at most three times, and times in the rig too
    #[arg(long, value_name = "N", default_value_t = 10)]
    runs: usize,
    /// Also measure other programs, side by side; what is missing is downloaded (needs pip and zstd)
    #[arg(long)]
    peers: bool,
    /// Print the names for --filter and end
    #[arg(long)]
    list: bool,
    /// Write all results to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the tables to FILE as Markdown, the short one for the README first
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Show what moved since an earlier run, whose JSON this is
    #[arg(long, value_name = "OLD")]
    compare: Option<PathBuf>,
    /// Measure nothing; take the results from an earlier run's JSON
    #[arg(long, value_name = "FILE", conflicts_with_all = ["engine", "filter", "runs", "peers", "json"])]
    read: Option<PathBuf>,
    /// Set the budgets in benches/budgets to what is measured
    ///
    /// Without --filter, only what has a budget is measured.
    #[arg(long)]
    update_budgets: bool,
}

/// The engines of a machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Engine {
    /// Our own monitor on KVM
    Native,
    /// QEMU's TCG with our devices
    Emulated,
}

impl Engine {
    fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Emulated => "emulated",
        }
    }
}

/// The exit status when a filter names nothing.
const USAGE: u8 = 2;

/// `cargo xtask bench`. The exit status is 1 if a measurement failed; the others are printed and written.
pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    let progress = Progress::new();
    let mut request = Request {
        engines: args.engine.clone(),
        filters: args.filter.clone(),
        runs: args.runs,
        peers: args.peers,
    };
    if args.list {
        let known = measure::known(&progress)?;
        let _ = writeln!(io::stdout(), "{}", request.names(&known).join("\n"));
        return Ok(ExitCode::SUCCESS);
    }
    // Before minutes of measuring.
    let old = args.compare.as_deref().map(Results::read).transpose()?;
    let budgets = budgets::all()?;
    let results = match &args.read {
        Some(path) => Results::read(path)?,
        None => {
            let known = measure::known(&progress)?;
            if let Some(error) = unknown_filters(&request, &known) {
                say(&error);
                return Ok(ExitCode::from(USAGE));
            }
            if args.update_budgets && request.filters.is_empty() {
                request.filters = entries(&budgets);
            }
            measure::all(&request, &known, &progress)?
        }
    };
    let mut text = table::table(&results);
    text.push_str(&budgets::table(&budgets, &results));
    if let Some(old) = &old {
        text.push_str(&compare::compare(old, &results));
    }
    // First of all: what cannot be written is at least seen.
    let _ = io::stdout().write_all(text.as_bytes());
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&results)
            .map_err(|error| Error::other(format!("writing JSON: {error}")))?;
        host::write_atomic(path, text.as_bytes())?;
    }
    if let Some(path) = &args.markdown {
        host::write_atomic(path, table::markdown(&results).as_bytes())?;
    }
    if args.update_budgets {
        for changed in budgets::update(budgets, &results)? {
            let _ = writeln!(io::stdout(), "{changed}");
        }
    }
    Ok(status(&results))
}

/// What to say of filters that name nothing for the engines that are asked for.
fn unknown_filters(request: &Request, known: &Known) -> Option<String> {
    let unknown = request.unknown(known);
    (!unknown.is_empty()).then(|| {
        format!(
            "error: `--filter {}` names nothing that is measured{}; there are: {}",
            unknown.join("`, `--filter "),
            match request.engines.as_slice() {
                [] => "",
                _ => " for this engine",
            },
            request.names(known).join(", ")
        )
    })
}

fn status(results: &Results) -> ExitCode {
    match results.failed().next() {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    }
}

/// The suite `budgets` of `cargo xtask test`: one test for each budget.
pub(crate) fn hold_budgets(
    filter: Option<&str>,
    progress: &Progress,
) -> Result<(libtest::Results, String)> {
    let mut budgets = budgets::all()?;
    budgets.retain(|budget| filter.is_none_or(|filter| budget.name.contains(filter)));
    let mut tests = libtest::Results::default();
    if budgets.is_empty() {
        return Ok((tests, String::new()));
    }
    let known = measure::known(progress)?;
    let measured = |budgets: &[budgets::Budget]| -> Result<Results> {
        let has = |engine: &Engine| budgets.iter().any(|budget| budget.engine == engine.name());
        let engines = Engine::value_variants().iter().copied();
        let request = Request {
            engines: engines.filter(has).collect(),
            filters: entries(budgets),
            runs: measure::COUNTED,
            peers: false,
        };
        measure::all(&request, &known, progress)
    };
    let outcome = budgets::hold(budgets, measured)?;
    tests.passed = outcome.kept;
    tests.failed = outcome.broken.len();
    tests.skipped = outcome.skipped.into_iter().collect();
    Ok((tests, outcome.broken.concat()))
}

/// What must be measured for these budgets.
fn entries(budgets: &[budgets::Budget]) -> Vec<String> {
    let mut entries: Vec<String> = budgets.iter().map(|budget| budget.entry.clone()).collect();
    entries.sort();
    entries.dedup();
    entries
}

#[cfg(test)]
mod tests {
    use super::plan::testing::{known, request};
    use super::results::testing::{left_out, measured, results};
    use super::*;

    #[test]
    fn a_failure_is_told_by_the_exit_status_and_a_skip_is_not() {
        let is = |results: &Results, code: ExitCode| {
            assert_eq!(format!("{:?}", status(results)), format!("{code:?}"));
        };
        let mut results = results(vec![measured("m", "ms", &[1.0])], Vec::new());
        results.parts[0]
            .report
            .skipped
            .push(left_out("a", "no strace"));
        is(&results, ExitCode::SUCCESS);
        results.parts[0]
            .report
            .failed
            .push(left_out("b", "it ended"));
        is(&results, ExitCode::FAILURE);
    }

    #[test]
    fn filters_that_name_nothing_are_told_with_what_there_is() {
        let error = |filters: &[&str]| {
            let request = request(&[Engine::Native], filters, false);
            unknown_filters(&request, &known())
        };
        assert!(error(&[]).is_none() && error(&["exits", "host"]).is_none());
        let error = error(&["exits", "boot", "x-y"]).unwrap();
        assert!(error.contains("`--filter boot`, `--filter x-y`"), "{error}");
        assert!(error.contains("host-side, pull, exits, exec"), "{error}");
    }
}
