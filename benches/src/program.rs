//! Measurements of the `bantam` program from outside.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use bantam::EngineKind;

use crate::report::{Profile, Report, median_of, milliseconds, sorted};
use crate::{Error, Progress};

/// Guest memory of every measured machine, in MiB.
pub(crate) const MEMORY_MIB: u32 = 256;

/// Cargo gives it to what it runs; the loader's search there is no part of a run.
const CARGOS_LIBRARIES: &str = "LD_LIBRARY_PATH";

/// What is measured.
pub(crate) struct Bench {
    pub(crate) engine: EngineKind,
    pub(crate) program: PathBuf,
    pub(crate) image: PathBuf,
    pub(crate) system_map: Option<PathBuf>,
}

impl Bench {
    /// `bantam run` of a command.
    pub(crate) fn run(&self, vcpus: u8, command: &[&str]) -> Command {
        let mut run = Command::new(&self.program);
        run.env_remove(CARGOS_LIBRARIES);
        run.args(["run", "--quiet", "--engine", self.engine.name()])
            .args(["--mem", &MEMORY_MIB.to_string()])
            .args(["--cpus", &vcpus.to_string()])
            .arg("--image")
            .arg(&self.image)
            .arg("--")
            .args(command)
            .stdin(Stdio::null());
        run
    }
}

/// From the start of the program to its first byte of output, and to its end.
pub(crate) fn first_output(
    bench: &Bench,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    let (mut first, mut end) = (Vec::new(), Vec::new());
    // The first run brings the image into the store and the files into the page cache.
    for run in 0..=runs {
        progress.say(&format!("start to first output: {run}/{runs}"));
        let mut command = bench.run(1, &["echo", "hello"]);
        let start = Instant::now();
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::start(&command))?;
        let mut byte = [0; 1];
        let got = match child.stdout.as_mut() {
            Some(stdout) => stdout.read(&mut byte).unwrap_or(0),
            None => 0,
        };
        let at_first = start.elapsed();
        let status = child.wait().map_err(Error::start(&command))?;
        let at_end = start.elapsed();
        if got == 0 || !status.success() {
            return Err(Error::Program {
                program: format!("{command:?}"),
                status: status.to_string(),
                said: String::new(),
            });
        }
        if run > 0 {
            first.push(milliseconds(at_first));
            end.push(milliseconds(at_end));
        }
    }
    let engine = bench.engine.name();
    for (name, values) in [
        ("start to first output", first),
        ("start to end of program", end),
    ] {
        report.add(name, engine, "ms", values);
    }
    Ok(())
}

/// What the system calls of a whole `run` read, of the program and of QEMU.
pub(crate) fn read_bytes(
    bench: &Bench,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    let mut read = Vec::new();
    // The first run brings the image into the store.
    for run in 0..=runs {
        progress.say(&format!("bytes read: {run}/{runs}"));
        let before = bytes_read()?;
        succeed(&mut bench.run(1, &["true"]))?;
        if run > 0 {
            read.push((bytes_read()? - before) as f64 / 1024.0);
        }
    }
    report.add("host bytes read by a run", bench.engine.name(), "KiB", read);
    Ok(())
}

/// System calls of a whole `run`, of the program and of QEMU, by name.
pub(crate) fn system_calls(
    bench: &Bench,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    find("strace")?;
    let engine = bench.engine.name();
    let temp = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
    let summary = temp.path().join("summary");
    let (mut totals, mut without_waits, mut profiles) = (Vec::new(), Vec::new(), Vec::new());
    // Brings the image into the store and the files into the page cache.
    succeed(&mut bench.run(1, &["true"]))?;
    for run in 1..=runs {
        progress.say(&format!("system calls: {run}/{runs}"));
        let plain = bench.run(1, &["true"]);
        let mut strace = Command::new("strace");
        strace
            .env_remove(CARGOS_LIBRARIES)
            .args(["-f", "-c", "-o"])
            .arg(&summary)
            .arg(plain.get_program())
            .args(plain.get_args());
        succeed(&mut strace)?;
        let text = std::fs::read_to_string(&summary).map_err(Error::file("reading", &summary))?;
        let calls = calls_by_name(&text);
        if calls.is_empty() {
            return Err(Error::Other(format!("strace counted nothing:\n{text}")));
        }
        let total = calls.iter().map(|(_, calls)| calls).sum();
        let (waits, parts) = sorted(calls)
            .into_iter()
            .partition::<Vec<_>, _>(|part| WAITING_CALLS.contains(&part.name.as_str()));
        let profile = Profile {
            name: SYSTEM_CALLS.to_owned(),
            engine,
            unit: "calls",
            total,
            parts,
            waits,
            ..Profile::default()
        };
        totals.push(total as f64);
        let waited: u64 = profile.waits.iter().map(|wait| wait.count).sum();
        without_waits.push((total - waited) as f64);
        profiles.push(profile);
    }
    report.add(SYSTEM_CALLS, engine, "calls", totals);
    report.add(
        format!("{SYSTEM_CALLS}, without waits"),
        engine,
        "calls",
        without_waits,
    );
    report.profiles.extend(median_of(profiles));
    Ok(())
}

const SYSTEM_CALLS: &str = "host system calls of a run";
/// Calls that wait, or that are made again and again meanwhile: how often says how busy the host
/// was.
const WAITING_CALLS: [&str; 8] = [
    "clock_nanosleep",
    "epoll_pwait",
    "epoll_wait",
    "futex",
    "poll",
    "ppoll",
    "sched_yield",
    "wait4",
];

/// The lines `PERCENT SECONDS USECS/CALL CALLS [ERRORS] NAME` of a summary of strace.
fn calls_by_name(summary: &str) -> Vec<(String, u64)> {
    summary
        .lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let (name, calls) = (words.last()?, words.get(3)?);
            if words.len() < 5 || *name == "total" {
                return None;
            }
            Some(((*name).to_owned(), calls.parse().ok()?))
        })
        .collect()
}

/// What this process, its children and theirs have read by system calls so far, in bytes. The
/// kernel adds a child's when it is waited for.
fn bytes_read() -> Result<u64, Error> {
    let path = std::path::Path::new("/proc/self/io");
    let text = std::fs::read_to_string(path).map_err(Error::file("reading", path))?;
    text.lines()
        .find_map(|line| line.strip_prefix("rchar: ")?.parse().ok())
        .ok_or_else(|| Error::Other("/proc/self/io has no rchar".to_owned()))
}

/// Runs a program that must succeed; what it says is shown only if it does not.
pub(crate) fn succeed(command: &mut Command) -> Result<(), Error> {
    let out = command
        .stdin(Stdio::null())
        .output()
        .map_err(Error::start(command))?;
    if out.status.success() {
        return Ok(());
    }
    Err(Error::Program {
        program: format!("{command:?}"),
        status: out.status.to_string(),
        said: String::from_utf8_lossy(&out.stderr).into_owned(),
    })
}

/// A program on the path.
pub(crate) fn find(name: &str) -> Result<PathBuf, Error> {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
        .ok_or_else(|| Error::Missing(format!("{name} is not installed")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_a_strace_summary_are_found_with_and_without_errors() {
        let summary = "\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 61.29    0.023180          26       884        57 futex
  0.00    0.000000           0         2           getuid
------ ----------- ----------- --------- --------- ----------------
100.00    0.037818          14      2588       119 total
";
        let calls = calls_by_name(summary);
        assert_eq!(calls, [("futex".to_owned(), 884), ("getuid".to_owned(), 2)]);
    }

    #[test]
    fn bytes_that_a_child_read_count() {
        let before = bytes_read().unwrap();
        let mut head = Command::new("head");
        head.args(["-c", "1000000", "/dev/zero"]);
        succeed(&mut head).unwrap();
        assert!(bytes_read().unwrap() - before >= 1_000_000);
    }
}
