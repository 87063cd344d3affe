//! `cargo xtask test`: every check and every test of the project, one table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use crate::bench;
use crate::error::{Error, Result};
use crate::fuzz::{self, FuzzArgs};
use crate::guest;
use crate::host;
use crate::image::{self, Which};
use crate::kernel::{GUEST, Options};
use crate::libtest::{self, Results};
use crate::progress::{Progress, clock};
use crate::rig::{self, RigArgs};

/// Which tests to run.
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Only these suites (repeatable; default: all, in this order)
    #[arg(long, value_name = "SUITE")]
    suite: Vec<Suite>,
    /// Only tests whose name contains this; leaves out format, lint and deny
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
}

/// The suites, in the order in which they run.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// cargo fmt
    Format,
    /// clippy, warnings are errors
    Lint,
    /// Licences, duplicate crates, sources, advisories (cargo-deny)
    Deny,
    /// Unit, harness and KVM payload tests of all crates
    Unit,
    /// Debian images through this crate and other programs (some minutes)
    RealImages,
    /// Fuzz targets, 20 seconds each
    Fuzz,
    /// The program from outside, machines emulated by QEMU
    E2e,
    /// Counts of a boot against benches/budgets, emulated and in the nested rig
    Budgets,
    /// Hypervisor tests on a real KVM, in the nested rig
    RigUnit,
    /// The program from outside, native machines, in the nested rig
    RigE2e,
}

impl Suite {
    const ALL: [Self; 10] = [
        Self::Format,
        Self::Lint,
        Self::Deny,
        Self::Unit,
        Self::RealImages,
        Self::Fuzz,
        Self::E2e,
        Self::Budgets,
        Self::RigUnit,
        Self::RigE2e,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Format => "format",
            Self::Lint => "lint",
            Self::Deny => "deny",
            Self::Unit => "unit",
            Self::RealImages => "real images",
            Self::Fuzz => "fuzz",
            Self::E2e => "e2e (emulated)",
            Self::Budgets => "budgets",
            Self::RigUnit => "hypervisor (rig)",
            Self::RigE2e => "e2e (native, rig)",
        }
    }

    fn is_a_check(self) -> bool {
        matches!(self, Self::Format | Self::Lint | Self::Deny)
    }
}

/// Longest time of one test program in the rig, whose CPU is emulated.
const RIG_SECONDS: u64 = 1800;

/// The tests of the suite of that name, in `bantam-image`.
const REAL_IMAGES: &str = "real_images::";

/// Package of the end-to-end tests.
const E2E: &str = "bantam-e2e";

/// A suite's row in the table.
struct Row {
    name: &'static str,
    results: Results,
    took: Duration,
    /// What to show of a suite that failed.
    said: String,
}

/// `cargo xtask test`.
pub(crate) fn run(args: &TestArgs) -> Result<ExitCode> {
    let suites: Vec<Suite> = Suite::ALL
        .into_iter()
        .filter(|suite| args.suite.is_empty() || args.suite.contains(suite))
        .filter(|suite| args.filter.is_none() || !suite.is_a_check())
        // libtest knows one filter, which here names the suite.
        .filter(|suite| {
            args.filter.is_none() || *suite != Suite::RealImages || args.suite.contains(suite)
        })
        .collect();
    let runner = Runner {
        filter: args.filter.as_deref(),
        progress: Progress::new(),
    };
    let mut rows = Vec::new();
    for suite in suites {
        let row = runner.suite(suite);
        let r = &row.results;
        runner.progress.finish(
            row.name,
            &format!(
                "{} passed, {} failed, {} skipped ({})",
                r.passed,
                r.failed,
                r.skipped.len(),
                clock(row.took)
            ),
        );
        if !row.said.is_empty() {
            runner.progress.say(&row.said);
        }
        rows.push(row);
    }
    let (table, failed) = table(&rows);
    let _ = io::stdout().write_all(table.as_bytes());
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

struct Runner<'a> {
    filter: Option<&'a str>,
    progress: Progress,
}

impl Runner<'_> {
    /// Runs one suite. What keeps it from running at all is a failure of it.
    fn suite(&self, suite: Suite) -> Row {
        let start = Instant::now();
        let name = suite.name();
        self.progress.update(name, "running".to_owned());
        let (results, said) = match suite {
            Suite::Format => check(host::cargo().args(FORMAT)),
            Suite::Lint => check(host::cargo().args(LINT)),
            Suite::Deny => deny(),
            Suite::Unit => self.unit(),
            Suite::RealImages => self.real_images(),
            Suite::Fuzz => self.fuzz(name),
            Suite::E2e => self.e2e(),
            Suite::Budgets => bench::hold_budgets(self.filter, &self.progress),
            Suite::RigUnit => self.in_rig(name, "bantam-hypervisor", &[]),
            Suite::RigE2e => self.e2e_in_rig(name),
        }
        .unwrap_or_else(|error| (failure(), format!("error: {error}")));
        Row {
            name,
            results,
            took: start.elapsed(),
            said,
        }
    }

    fn unit(&self) -> Result<(Results, String)> {
        let kernel = GUEST.build(Options::default(), &self.progress)?.vmlinux;
        let mut cargo = host::cargo();
        cargo
            .args(["test", "--workspace", "--no-fail-fast"])
            .args(["--exclude", E2E, "--"])
            .args(self.test_args())
            .args(["--skip", REAL_IMAGES])
            // Some tests read a real kernel, or boot one.
            .env("BANTAM_TEST_KERNEL", &kernel)
            .env("BANTAM_TEST_KERNELS", &kernel);
        self.cargo_test(Suite::Unit.name(), &mut cargo)
    }

    fn real_images(&self) -> Result<(Results, String)> {
        let mut cargo = host::cargo();
        cargo
            .args(["test", "--package", "bantam-image", "--test", "it", "--"])
            // Each test holds some 600 MB of temporary files.
            .args(["--show-output", "--test-threads=1"])
            .arg(REAL_IMAGES);
        self.cargo_test(Suite::RealImages.name(), &mut cargo)
    }

    fn fuzz(&self, row: &str) -> Result<(Results, String)> {
        let targets = fuzz::targets(self.filter.unwrap_or_default());
        if targets.is_empty() {
            return Ok((Results::default(), String::new()));
        }
        let args = FuzzArgs {
            seconds: fuzz::SECONDS,
            targets,
        };
        fuzz::run(&args, row, &self.progress)
    }

    fn e2e(&self) -> Result<(Results, String)> {
        let environment = self.fixtures("emulated")?;
        let mut cargo = host::cargo();
        cargo
            .args(["test", "--no-fail-fast", "--package", E2E, "--"])
            .args(self.test_args())
            .envs(environment);
        self.cargo_test(Suite::E2e.name(), &mut cargo)
    }

    fn e2e_in_rig(&self, suite: &str) -> Result<(Results, String)> {
        let environment: Vec<String> = self
            .fixtures("native")?
            .into_iter()
            .map(|(name, value)| format!("{name}={}", value.display()))
            .collect();
        self.in_rig(suite, E2E, &environment)
    }

    /// What the end-to-end tests need, built, and where it is.
    fn fixtures(&self, engine: &str) -> Result<BTreeMap<&'static str, PathBuf>> {
        let guest = guest::build(Options::default(), &self.progress)?;
        let image = image::make(Which::Tiny, &self.progress)?;
        let network = image::make(Which::Network, &self.progress)?;
        host::run_quiet(host::cargo().args(["build", "--package", "bantam-cli"]))?;
        // Shared with the rig, which reads the images the first suite made.
        let home = host::target_dir().join("e2e");
        host::create_dir(&home)?;
        Ok(BTreeMap::from([
            ("BANTAM_E2E_ENGINE", PathBuf::from(engine)),
            (
                "BANTAM_E2E_PROGRAM",
                host::target_dir().join("debug/bantam"),
            ),
            ("BANTAM_E2E_IMAGE", image),
            ("BANTAM_E2E_NETWORK_IMAGE", network),
            ("BANTAM_GUEST_DIR", guest),
            ("BANTAM_HOME", home),
        ]))
    }

    /// Runs a package's test programs in the rig, one machine for each.
    fn in_rig(&self, suite: &str, package: &str, env: &[String]) -> Result<(Results, String)> {
        let mut output = String::new();
        let mut ended_well = 0;
        for program in test_programs(package)? {
            let mut command = vec![program.display().to_string()];
            // The machine has one CPU.
            command.push("--test-threads=1".to_owned());
            command.extend(self.test_args());
            let args = RigArgs {
                cpus: 1,
                mem: 2048,
                timeout: RIG_SECONDS,
                env: env.to_vec(),
                share: Vec::new(),
                command,
            };
            let out = Capture::default();
            let lines = Lines::new(&self.progress, suite, out.clone());
            let outcome = rig::run(&args, lines, out.clone(), &self.progress)?;
            let text = out.text();
            // A test program says 101 when a test failed, which it reports.
            let results = Results::parse(&text);
            if outcome.code == 0 || results.failed > 0 {
                ended_well += 1;
            } else {
                output.push_str(&format!(
                    "error: {} ended with {} in the rig\n{}\n",
                    program.display(),
                    outcome.code,
                    host::last_lines(&text, 40)
                ));
            }
            output.push_str(&text);
        }
        let mut results = Results::parse(&output);
        if ended_well == 0 {
            results.failed = results.failed.max(1);
        }
        let said = if output.contains("error: ") || results.failed > 0 {
            results.failed = results.failed.max(1);
            libtest::failures(&output)
        } else {
            String::new()
        };
        Ok((results, said))
    }

    /// Runs `cargo test` and counts.
    fn cargo_test(&self, suite: &str, cargo: &mut Command) -> Result<(Results, String)> {
        let out = Capture::default();
        let mut lines = Lines::new(&self.progress, suite, out.clone());
        // Compiler and tests talk on both; one pipe would need unsafe code or
        // a shell, so stderr is read by a thread.
        cargo
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = cargo.spawn().map_err(host::start_error(cargo))?;
        let errors = child.stderr.take().map(|stderr| {
            std::thread::spawn(move || {
                let mut text = String::new();
                for line in BufReader::new(stderr).lines().map_while(io::Result::ok) {
                    let _ = writeln!(text, "{line}");
                }
                text
            })
        });
        if let Some(mut stdout) = child.stdout.take() {
            io::copy(&mut stdout, &mut lines)
                .map_err(Error::file("reading", Path::new("cargo")))?;
        }
        let status = child
            .wait()
            .map_err(Error::file("waiting for", Path::new("cargo")))?;
        let errors = errors.and_then(|t| t.join().ok()).unwrap_or_default();
        let text = out.text();
        let mut results = Results::parse(&text);
        if status.success() {
            return Ok((results, String::new()));
        }
        // Did not compile, or a test program died without a result.
        results.failed = results.failed.max(1);
        let said = match libtest::failures(&text) {
            failures if failures.is_empty() => host::last_lines(&errors, 60),
            failures => failures,
        };
        Ok((results, said))
    }

    fn test_args(&self) -> Vec<String> {
        let mut args = vec!["--show-output".to_owned()];
        args.extend(self.filter.map(str::to_owned));
        args
    }
}

const FORMAT: [&str; 6] = ["fmt", "--all", "--check", "--", "--color", "never"];

const LINT: [&str; 7] = [
    "clippy",
    "--workspace",
    "--all-targets",
    "--quiet",
    "--",
    "--deny",
    "warnings",
];

/// A command that is one test: it succeeds or it does not.
fn check(command: &mut Command) -> Result<(Results, String)> {
    match host::capture(command) {
        Ok(_) => Ok((success(1), String::new())),
        Err(Error::Program { program, tail, .. }) => Ok((failure(), format!("{program}:\n{tail}"))),
        Err(error) => Err(error),
    }
}

/// cargo-deny; the part that needs the advisory database only where it can be
/// fetched.
fn deny() -> Result<(Results, String)> {
    let skipped = |why: &str, tests: &[&str]| Results {
        skipped: tests
            .iter()
            .map(|t| ((*t).to_owned(), why.to_owned()))
            .collect(),
        ..Results::default()
    };
    let installed = host::capture(host::cargo().args(["deny", "--version"])).is_ok();
    if !installed {
        let why = "cargo-deny is not installed (cargo install --locked cargo-deny)";
        return Ok((skipped(why, &["cargo deny"]), String::new()));
    }
    let (mut results, mut said) = check(host::cargo().args([
        "deny",
        "--log-level",
        "error",
        "check",
        "bans",
        "licenses",
        "sources",
    ]))?;
    let advisories =
        host::capture(host::cargo().args(["deny", "--log-level", "error", "check", "advisories"]));
    match advisories {
        Ok(_) => results.passed += 1,
        Err(Error::Program { tail, .. }) if tail.contains("failed to fetch advisory") => {
            let why = "the advisory database cannot be fetched from here";
            results.skipped = skipped(why, &["cargo deny check advisories"]).skipped;
        }
        Err(Error::Program { tail, .. }) => {
            results.failed += 1;
            said.push_str(&tail);
        }
        Err(error) => return Err(error),
    }
    Ok((results, said))
}

/// The test programs of a package, built.
fn test_programs(package: &str) -> Result<Vec<PathBuf>> {
    let out = host::capture(host::cargo().args([
        "test",
        "--no-run",
        "--package",
        package,
        "--message-format",
        "json",
    ]))?;
    let programs = String::from_utf8_lossy(&out)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["profile"]["test"] == true)
        .filter_map(|message| Some(PathBuf::from(message["executable"].as_str()?)))
        .collect();
    Ok(programs)
}

fn success(passed: usize) -> Results {
    Results {
        passed,
        ..Results::default()
    }
}

fn failure() -> Results {
    Results {
        failed: 1,
        ..Results::default()
    }
}

/// The table, and whether anything failed. The last line is for machines too.
fn table(rows: &[Row]) -> (String, bool) {
    let mut text = format!(
        "\n{:<20}{:>8}{:>8}{:>9}  time\n",
        "suite", "passed", "failed", "skipped"
    );
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for row in rows {
        let r = &row.results;
        let _ = writeln!(
            text,
            "{:<20}{:>8}{:>8}{:>9}  {}",
            row.name,
            r.passed,
            r.failed,
            r.skipped.len(),
            clock(row.took)
        );
        passed += r.passed;
        failed += r.failed;
        skipped += r.skipped.len();
    }
    text.push('\n');
    for row in rows {
        for (test, why) in &row.results.skipped {
            let _ = writeln!(text, "skipped: {}: {test}: {why}", row.name);
        }
    }
    let _ = writeln!(text, "{passed} passed, {failed} failed, {skipped} skipped");
    (text, failed > 0)
}

/// A buffer that several writers fill.
#[derive(Clone, Default)]
struct Capture(Arc<Mutex<Vec<u8>>>);

impl Capture {
    fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Write for Capture {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Passes bytes on and reports how many tests have ended.
struct Lines {
    to: Capture,
    progress: Progress,
    suite: String,
    line: Vec<u8>,
    ended: usize,
}

impl Lines {
    fn new(progress: &Progress, suite: &str, to: Capture) -> Self {
        Self {
            to,
            progress: progress.clone(),
            suite: suite.to_owned(),
            line: Vec::new(),
            ended: 0,
        }
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            if self.line.starts_with(b"test ") && self.line.windows(5).any(|w| w == b" ... ") {
                self.ended += 1;
                self.progress
                    .update(&self.suite, format!("{} tests", self.ended));
            }
            self.line.clear();
        }
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(passed: usize, failed: usize, skipped: &[(&str, &str)]) -> Row {
        Row {
            name: "unit",
            results: Results {
                passed,
                failed,
                skipped: skipped
                    .iter()
                    .map(|(test, why)| ((*test).to_owned(), (*why).to_owned()))
                    .collect(),
                programs: 1,
            },
            took: Duration::ZERO,
            said: String::new(),
        }
    }

    #[test]
    fn the_last_line_has_the_sums_and_each_skip_its_reason() {
        let rows = [row(2, 0, &[("a", "no KVM")]), row(3, 1, &[])];
        let (text, failed) = table(&rows);
        assert!(failed);
        assert!(text.contains("skipped: unit: a: no KVM\n"), "{text}");
        assert_eq!(text.lines().last(), Some("5 passed, 1 failed, 1 skipped"));
    }

    #[test]
    fn a_failing_check_is_a_failed_test() {
        let (results, said) = check(Command::new("sh").args(["-c", "echo why; exit 1"])).unwrap();
        assert_eq!((results.passed, results.failed), (0, 1));
        assert!(said.contains("why"), "{said}");
    }
}
