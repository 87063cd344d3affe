//! `cargo xtask bench`: builds what is measured, runs the measurements of `benches/` for each
//! engine, prints one table. `docs/performance.md` says how each number is made.

mod budgets;
mod compare;
mod measure;
mod parts;
mod peers;
mod results;
mod table;
mod virtual_time;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::error::{Error, Result};
use crate::host;
use crate::libtest;
use crate::progress::Progress;

pub(crate) use self::measure::build_bench;

use self::measure::Request;
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
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
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

/// `cargo xtask bench`.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let progress = Progress::new();
    if args.list {
        return measure::list(&progress);
    }
    // Before minutes of measuring.
    let old = args.compare.as_deref().map(Results::read).transpose()?;
    let budgets = budgets::all()?;
    let results = match &args.read {
        Some(path) => Results::read(path)?,
        None => {
            let mut request = Request {
                engines: args.engine.clone(),
                filters: args.filter.clone(),
                runs: args.runs,
                peers: args.peers,
            };
            if args.update_budgets && request.filters.is_empty() {
                request.filters = entries(&budgets);
            }
            measure::all(&request, &progress)?
        }
    };
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&results)
            .map_err(|error| Error::other(format!("writing JSON: {error}")))?;
        host::write_atomic(path, text.as_bytes())?;
    }
    if let Some(path) = &args.markdown {
        host::write_atomic(path, table::markdown(&results).as_bytes())?;
    }
    let mut text = table::table(&results);
    text.push_str(&budgets::table(&budgets, &results));
    if let Some(old) = &old {
        text.push_str(&compare::compare(old, &results));
    }
    if args.update_budgets {
        for changed in budgets::update(budgets, &results)? {
            text.push_str(&changed);
            text.push('\n');
        }
    }
    let _ = io::stdout().write_all(text.as_bytes());
    Ok(())
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
    let has = |engine: &Engine| budgets.iter().any(|budget| budget.engine == engine.name());
    let request = Request {
        engines: Engine::value_variants()
            .iter()
            .copied()
            .filter(has)
            .collect(),
        filters: entries(&budgets),
        runs: measure::COUNTED,
        peers: false,
    };
    let results = measure::all(&request, progress)?;
    let outcome = budgets::check(&budgets, &results);
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
