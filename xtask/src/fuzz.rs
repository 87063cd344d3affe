//! `cargo xtask fuzz`: builds the targets of `fuzz/` with coverage counters and runs each for a
//! bounded time. Needs no nightly compiler and no cargo-fuzz: libFuzzer comes with a crate, the
//! counters are an LLVM pass that rustc can be told to run, and the stable toolchain holds the
//! runtime of AddressSanitizer, though it has to be told to let us use it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Args;

use crate::error::{Error, Result};
use crate::host;
use crate::libtest::Results;
use crate::progress::{Progress, say};

/// The targets, as `fuzz/Cargo.toml` names them.
const TARGETS: [&str; 7] = [
    "layers",
    "tree",
    "documents",
    "names",
    "kernel",
    "protocol",
    "frames",
];

/// How long each target runs where nobody says.
pub(crate) const SECONDS: u32 = 20;
/// Longest time of one input, and most memory of a target: more is a finding.
const INPUT_SECONDS: u32 = 10;
const MEMORY_MIB: u32 = 1024;
/// How much longer than it was told a target may run. libFuzzer counts neither its start nor the inputs that it begins
/// with, of which there are more each time.
const GRACE_SECONDS: u32 = 120;
/// Largest input that is tried.
const INPUT_BYTES: u32 = 64 << 10;

/// How long, and what.
#[derive(Args)]
pub(crate) struct FuzzArgs {
    /// How long each target runs
    #[arg(long, default_value_t = SECONDS)]
    pub(crate) seconds: u32,
    /// Which targets (default: all)
    #[arg(value_name = "TARGET", value_parser = TARGETS)]
    pub(crate) targets: Vec<String>,
}

/// `cargo xtask fuzz`.
pub(crate) fn command(args: &FuzzArgs) -> Result<ExitCode> {
    let (results, said) = run(args, "fuzz", &Progress::new())?;
    for (target, why) in &results.skipped {
        say(&format!("skipped: {target}: {why}"));
    }
    say(&format!(
        "{said}{} passed, {} failed, {} skipped",
        results.passed,
        results.failed,
        results.skipped.len()
    ));
    Ok(if results.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The targets whose names contain `text`.
pub(crate) fn targets(text: &str) -> Vec<String> {
    let targets = TARGETS.iter().filter(|name| name.contains(text));
    targets.map(|name| (*name).to_owned()).collect()
}

/// Runs the targets, a test each; also returns what those that failed said.
pub(crate) fn run(args: &FuzzArgs, row: &str, progress: &Progress) -> Result<(Results, String)> {
    let chosen: Vec<&str> = TARGETS
        .into_iter()
        .filter(|t| args.targets.is_empty() || args.targets.iter().any(|a| a == t))
        .collect();
    let (mut results, mut said) = (Results::default(), String::new());
    progress.update(row, "building".to_owned());
    let programs = match build()? {
        Ok(programs) => programs,
        Err(why) => {
            results.skipped = chosen
                .iter()
                .map(|target| ((*target).to_owned(), why.clone()))
                .collect();
            return Ok((results, said));
        }
    };
    for target in chosen {
        progress.update(row, format!("{target}, {} s", args.seconds));
        match run_target(&programs, target, args.seconds)? {
            None => results.passed += 1,
            Some(text) => {
                results.failed += 1;
                said.push_str(&text);
            }
        }
    }
    progress.forget(row);
    Ok((results, said))
}

/// The folder of the built targets, or why this machine cannot build them.
fn build() -> Result<std::result::Result<PathBuf, String>> {
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    if !host::has_program("c++") {
        return Ok(Err("no C++ compiler, which libFuzzer needs".to_owned()));
    }
    let manifest = host::repo().join("fuzz/Cargo.toml");
    let mut fetch = host::cargo();
    fetch
        .args(["fetch", "--locked", "--quiet", "--manifest-path"])
        .arg(&manifest);
    if let Err(Error::Program { tail, .. }) = host::run_quiet(&mut fetch) {
        let why = host::last_lines(&tail, 1);
        return Ok(Err(format!("its crates cannot be had: {why}")));
    }
    let dir = host::target_dir().join("fuzz");
    let flags = [
        "-Cpasses=sancov-module",
        "-Cllvm-args=-sanitizer-coverage-level=4",
        "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
        "-Cllvm-args=-sanitizer-coverage-pc-table",
        "-Cllvm-args=-sanitizer-coverage-trace-compares",
        "-Zsanitizer=address",
    ];
    let mut cargo = host::cargo();
    cargo
        .args(["build", "--locked", "--release", "--manifest-path"])
        .arg(&manifest)
        // With a target named, the flags leave build scripts alone, which could not link.
        .args(["--target", &triple, "--target-dir"])
        .arg(&dir)
        .env("RUSTFLAGS", flags.join(" "))
        // Lets a stable compiler take the last flag.
        .env("RUSTC_BOOTSTRAP", "1");
    host::run_quiet(&mut cargo)?;
    Ok(Ok(dir.join(triple).join("release")))
}

/// Runs one target; returns what it said if it found something.
fn run_target(programs: &Path, target: &str, seconds: u32) -> Result<Option<String>> {
    // Kept: the next run begins with what this one learned.
    let corpus = host::cache_dir()?.join("fuzz").join(target);
    let found = host::target_dir().join("fuzz/found").join(target);
    host::create_dir(&corpus)?;
    host::create_dir(&found)?;
    let log = found.join("log");
    let file = fs::File::create(&log).map_err(Error::file("creating", &log))?;
    let mut program = Command::new("timeout");
    program
        .arg("--kill-after=10")
        .arg(seconds.saturating_add(GRACE_SECONDS).to_string())
        .arg(programs.join(target))
        .arg(&corpus)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={INPUT_SECONDS}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
        .arg(format!("-max_len={INPUT_BYTES}"))
        .arg(format!("-artifact_prefix={}/", found.display()))
        .env("BANTAM_FUZZ_SEEDS", &corpus)
        .env("RUST_BACKTRACE", "1")
        // A leak is no error in Rust. Freed memory that is held back counts for the limit.
        .env("ASAN_OPTIONS", "detect_leaks=0:quarantine_size_mb=64")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(file);
    let status = program.status().map_err(host::start_error(&program))?;
    if status.success() {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&host::read(&log)?).into_owned();
    // What timeout(1) ends with, having killed the target.
    let status = match status.code() {
        Some(124 | 137) => "did not end".to_owned(),
        _ => status.to_string(),
    };
    Ok(Some(format!(
        "fuzz target {target} ({status}):\n{}\n",
        host::last_lines(&text, 40)
    )))
}
