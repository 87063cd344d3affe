//! Measurements of the `bantam` program from outside.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use bantam::EngineKind;

use crate::report::{Report, milliseconds};
use crate::{Error, Progress};

/// Guest memory of every measured machine, in MiB.
pub(crate) const MEMORY_MIB: u32 = 256;

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

/// System calls of a whole `run`, of the program and of QEMU.
pub(crate) fn system_calls(
    bench: &Bench,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    find("strace")?;
    let temp = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
    let summary = temp.path().join("summary");
    let mut totals = Vec::new();
    for run in 1..=runs {
        progress.say(&format!("system calls: {run}/{runs}"));
        let plain = bench.run(1, &["true"]);
        let mut strace = Command::new("strace");
        strace
            .args(["-f", "-c", "-o"])
            .arg(&summary)
            .arg(plain.get_program())
            .args(plain.get_args());
        succeed(&mut strace)?;
        let text = std::fs::read_to_string(&summary).map_err(Error::file("reading", &summary))?;
        let total = total_calls(&text)
            .ok_or_else(|| Error::Other(format!("strace's summary has no total:\n{text}")))?;
        totals.push(total);
    }
    report.add(
        "host system calls of a run",
        bench.engine.name(),
        "calls",
        totals,
    );
    Ok(())
}

/// The number of calls in the line `100.00 SECONDS USECS/CALL CALLS ERRORS total`.
fn total_calls(summary: &str) -> Option<f64> {
    let line = summary.lines().rev().find(|line| line.ends_with("total"))?;
    line.split_ascii_whitespace().nth(3)?.parse().ok()
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
        .ok_or_else(|| Error::Other(format!("{name} is not installed")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_a_strace_summary_is_found_with_and_without_errors() {
        for (line, calls) in [
            (
                "100.00    0.035271          14      2482        94 total",
                2482.0,
            ),
            (
                "100.00    0.001000          10       100           total",
                100.0,
            ),
        ] {
            let summary = format!("% time seconds usecs/call calls errors syscall\n{line}\n");
            assert_eq!(total_calls(&summary), Some(calls));
        }
    }
}
