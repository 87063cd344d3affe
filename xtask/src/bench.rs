//! `cargo xtask bench`: builds what is measured, runs the measurements of `benches/` for each
//! engine, prints one table. `docs/performance.md` says how each number is made.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use clap::Args;
use serde_json::{Map, Value, json};

use crate::demo;
use crate::error::{Error, Result};
use crate::guest;
use crate::host;
use crate::image::{self, Which};
use crate::kernel::{self, GUEST};
use crate::progress::Progress;
use crate::rig::{self, RigArgs};

/// The version of the JSON format. Raise it when a field changes its meaning.
const SCHEMA: u32 = 1;
/// How many functions of a profile the table shows.
const TOP: usize = 12;
/// In the rig everything takes some twenty times as long.
const RIG_RUNS: usize = 3;

/// What to measure.
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Write all results to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only measurements whose name contains this (repeatable)
    #[arg(long, value_name = "NAME")]
    filter: Vec<String>,
    /// How often times are measured
    #[arg(long, value_name = "N", default_value_t = 10)]
    runs: usize,
}

/// The results of one engine at one place.
struct Part {
    place: &'static str,
    report: Value,
}

/// Builds, measures, prints.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let progress = Progress::new();
    let what = Measured::build(&progress)?;
    let mut parts = vec![what.here("emulated", args)?];
    let native = if what.works_here("native")? {
        what.here("native", args)?
    } else {
        what.in_rig(args, &progress)?
    };
    parts.push(native);
    let mut all = json!({
        "schema": SCHEMA,
        "host": facts(),
        "parts": parts
            .iter()
            .map(|part| json!({"place": part.place, "report": part.report}))
            .collect::<Vec<_>>(),
    });
    if args.filter.is_empty() || args.filter.iter().any(|f| "sizes".contains(f)) {
        all["sizes"] = what.sizes()?;
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&all)
            .map_err(|error| Error::other(format!("writing JSON: {error}")))?;
        host::write_atomic(path, text.as_bytes())?;
    }
    let _ = io::stdout().write_all(table(&all).as_bytes());
    Ok(())
}

/// What is measured, built.
struct Measured {
    program: PathBuf,
    bench: PathBuf,
    image: PathBuf,
    /// What is pulled, if it has been made.
    pulled: PathBuf,
    guest: PathBuf,
    system_map: PathBuf,
}

impl Measured {
    fn build(progress: &Progress) -> Result<Self> {
        let guest = guest::build(kernel::Options::default(), progress)?;
        let kernel = GUEST.build(kernel::Options::default(), progress)?;
        let image = image::make(Which::Tiny, progress)?;
        let program = demo::build_program(progress)?;
        progress.update("measurements", "building".to_owned());
        let mut cargo = host::cargo();
        cargo.args(["build", "--release", "--package", "bantam-benches"]);
        host::run_quiet(&mut cargo)?;
        progress.forget("measurements");
        Ok(Self {
            program,
            bench: host::target_dir().join("release/bantam-bench"),
            image,
            pulled: host::cache_dir()?.join("demo/debian-12-python.tar"),
            guest,
            system_map: kernel.vmlinux.with_file_name("System.map"),
        })
    }

    fn words(&self, engine: &str, filters: &[String], runs: usize) -> Vec<String> {
        let path = |path: &Path| path.display().to_string();
        let mut words = vec![
            path(&self.bench),
            format!("--engine={engine}"),
            format!("--runs={runs}"),
            format!("--program={}", path(&self.program)),
            format!("--image={}", path(&self.image)),
            format!("--pull-image={}", path(&self.pulled)),
            format!("--system-map={}", path(&self.system_map)),
        ];
        words.extend(filters.iter().map(|filter| format!("--filter={filter}")));
        words
    }

    fn works_here(&self, engine: &str) -> Result<bool> {
        let mut check = Command::new(&self.bench);
        check.args(["--check", "--engine", engine]);
        let status = check.status().map_err(host::start_error(&check))?;
        Ok(status.success())
    }

    fn here(&self, engine: &str, args: &BenchArgs) -> Result<Part> {
        let words = self.words(engine, &args.filter, args.runs);
        let mut bench = Command::new(&words[0]);
        bench
            .args(&words[1..])
            .env("BANTAM_GUEST_DIR", &self.guest)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit());
        let out = bench.output().map_err(host::start_error(&bench))?;
        Ok(Part {
            place: "host",
            report: parsed(&out.stdout)?,
        })
    }

    fn in_rig(&self, args: &BenchArgs, progress: &Progress) -> Result<Part> {
        let rig = RigArgs {
            cpus: 1,
            mem: 2048,
            timeout: 900,
            env: vec![format!("BANTAM_GUEST_DIR={}", self.guest.display())],
            command: self.words("native", &args.filter, args.runs.min(RIG_RUNS)),
        };
        let out = Shared::default();
        rig::run(&rig, out.clone(), io::stderr(), progress)?;
        let bytes = out.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Part {
            place: "rig",
            report: parsed(&bytes)?,
        })
    }

    fn sizes(&self) -> Result<Value> {
        let agent = host::target_dir().join("agent/x86_64-unknown-linux-gnu/agent/bantam-agent");
        let mut sizes = Map::new();
        for (name, path) in [
            ("guest kernel", self.guest.join("vmlinux")),
            ("initramfs", self.guest.join("initramfs.cpio")),
            ("agent", agent),
            ("program", self.program.clone()),
        ] {
            let bytes = fs::metadata(&path)
                .map_err(Error::file("reading", &path))?
                .len();
            sizes.insert(name.to_owned(), bytes.into());
        }
        Ok(Value::Object(sizes))
    }
}

fn parsed(bytes: &[u8]) -> Result<Value> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::other(format!(
            "reading the measurements: {error} in `{}`",
            String::from_utf8_lossy(bytes)
        ))
    })
}

/// Bytes that a thread writes and another reads afterwards.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a reader must know of this machine to compare numbers.
fn facts() -> Value {
    let line = |program: &str, args: &[&str]| {
        host::first_line(Command::new(program).args(args)).unwrap_or_default()
    };
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("unknown", |(_, model)| model.trim());
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    json!({
        "date": line("date", &["--utc", "+%Y-%m-%dT%H:%MZ"]),
        "commit": line("git", &["rev-parse", "--short", "HEAD"]),
        "cpu": cpu,
        "cores": host::jobs(),
        "kernel": line("uname", &["-sr"]),
        "qemu": line("qemu-system-x86_64", &["--version"]),
        "load": load.split_whitespace().next().unwrap_or_default(),
    })
}

/// All results for people.
fn table(all: &Value) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        let _ = writeln!(text, "{words}");
    };
    if let Some(facts) = all["host"].as_object() {
        for (name, value) in facts {
            line(format!(
                "{name:8} {}",
                value
                    .as_str()
                    .map_or_else(|| value.to_string(), str::to_owned)
            ));
        }
    }
    line(String::new());
    line(format!(
        "{:60} {:14} {:>14} {:>14} {:>14} {:>4}",
        "what", "engine", "median", "p95", "min", "n"
    ));
    for part in array(&all["parts"]) {
        let place = part["place"].as_str().unwrap_or_default();
        for result in array(&part["report"]["results"]) {
            let word = |field: &str| result[field].as_str().unwrap_or_default();
            let engine = match place {
                "host" => word("engine").to_owned(),
                _ => format!("{} ({place})", word("engine")),
            };
            line(format!(
                "{:60} {engine:14} {:>14} {:>14} {:>14} {:>4}",
                format!("{}, {}", word("name"), word("unit")),
                number(&result["median"]),
                number(&result["p95"]),
                number(&result["min"]),
                result["n"]
            ));
        }
    }
    let sizes = all["sizes"].as_object();
    for (name, bytes) in sizes.into_iter().flatten() {
        line(format!(
            "{:60} {:14} {:>14}",
            format!("size: {name}, bytes"),
            "",
            number(bytes)
        ));
    }
    for part in array(&all["parts"]) {
        for profile in array(&part["report"]["profiles"]) {
            for text in profile_lines(profile) {
                line(text);
            }
        }
        for skipped in array(&part["report"]["skipped"]) {
            line(format!(
                "not measured: {}: {}",
                skipped["name"].as_str().unwrap_or_default(),
                skipped["reason"].as_str().unwrap_or_default()
            ));
        }
    }
    text
}

fn profile_lines(profile: &Value) -> Vec<String> {
    let total = profile["total"].as_u64().unwrap_or(0).max(1);
    let entry = |count: &Value| {
        let n = count["instructions"].as_u64().unwrap_or(0);
        let name = count["name"].as_str().unwrap_or_default();
        format!("{:>14} {:3} %  {name}", number(&n.into()), n * 100 / total)
    };
    let name = profile["name"].as_str().unwrap_or_default();
    let mut lines = vec![format!("\n{name}: until each mark, median run")];
    lines.extend(array(&profile["marks"]).iter().map(entry));
    lines.push(format!("{name}: most instructions themselves"));
    lines.extend(array(&profile["symbols"]).iter().take(TOP).map(entry));
    lines
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A number with thin groups of three, or two decimals if it is small.
fn number(value: &Value) -> String {
    match value.as_f64() {
        None => String::new(),
        Some(n) if n.fract() != 0.0 => format!("{n:.2}"),
        Some(n) => grouped(&format!("{n:.0}")),
    }
}

fn grouped(digits: &str) -> String {
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_numbers_are_grouped_and_small_ones_keep_decimals() {
        for (value, text) in [
            (json!(159_236_586.0), "159 236 586"),
            (json!(999), "999"),
            (json!(1000), "1 000"),
            (json!(3.289_93), "3.29"),
            (Value::Null, ""),
        ] {
            assert_eq!(number(&value), text);
        }
    }

    #[test]
    fn the_table_names_the_place_of_what_the_rig_measured() {
        let report = json!({"results": [{
            "name": "VM exits: halt", "engine": "native", "unit": "exits",
            "n": 3, "median": 7.0, "p95": null, "min": 6.0
        }]});
        let all = json!({"host": {}, "parts": [{"place": "rig", "report": report}]});
        let table = table(&all);
        assert!(table.contains("VM exits: halt, exits"), "{table}");
        assert!(table.contains("native (rig)"), "{table}");
    }
}
