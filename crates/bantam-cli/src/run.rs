//! `bantam run`.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::time::Instant;

use bantam::{Availability, EngineKind, Exec, Machine, Report, Timeline, probe_engines};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Serialize;

use crate::args::{Global, RunArgs};
use crate::failure::Failure;
use crate::{Outcome, progress, terminal};

pub(crate) fn run(global: &Global, args: Box<RunArgs>) -> Outcome {
    let started = Instant::now();
    if args.image == "-" && args.interactive {
        return Err(Failure::Usage(
            "standard input cannot be both the image (-I -) and the command's input (-i)".into(),
        ));
    }
    if args.tty {
        terminal::check()?;
    }
    let env = environment(&args.env)?;
    let reporter = progress::reporter(global.quiet);
    let mut builder = Machine::builder()
        .image(&args.image)
        .home(global.home()?)
        .pull(args.pull.into())
        .registries(global.registries())
        .cpus(args.cpus)
        .memory_mib(args.mem)
        .engine(args.engine)
        .progress(reporter);
    if let Some(platform) = &args.platform {
        builder = builder.platform(platform.clone());
    }
    if let Some(kernel) = &args.kernel {
        builder = builder.kernel(kernel);
    }
    if let Some(words) = &args.kernel_args {
        builder = builder.kernel_args(words);
    }
    let machine = builder.start()?;
    let notes = notes(&machine);
    if !global.quiet && !args.json {
        for note in &notes {
            // Notes are courtesy; a closed standard error does not matter.
            let _ = writeln!(io::stderr(), "note: {note}");
        }
    }
    let exec = command(&machine, &args, env)?;
    if args.json {
        return run_json(machine, exec, &args, notes, started);
    }
    let status = if args.tty {
        terminal::run(exec, args.interactive)
    } else {
        exec.pipe(&mut io::stdout().lock(), &mut io::stderr())
            .map(|finished| finished.status)
            .map_err(output_failure)
    };
    let report = machine.kill();
    show_timings(&args, &machine, &report);
    Ok(status?.exit_code())
}

fn show_timings(args: &RunArgs, machine: &Machine, report: &Report) {
    if args.timings {
        let table = timings_table(&report.timeline, report.engine, &machine.image().digest);
        // A closed standard error does not matter.
        let _ = write!(io::stderr(), "{table}");
    }
}

/// A closed standard output is the reader's choice, not an error to explain.
fn output_failure(error: bantam::Error) -> Failure {
    match error {
        bantam::Error::Io { source, .. } if source.kind() == io::ErrorKind::BrokenPipe => {
            Failure::Output(source)
        }
        other => other.into(),
    }
}

/// `NAME=value`, or `NAME` for the value it has here; a `NAME` that is not set here is left out.
fn environment(entries: &[OsString]) -> Result<Vec<(OsString, OsString)>, Failure> {
    let mut env = Vec::new();
    for entry in entries {
        let bytes = entry.as_bytes();
        let (name, value) = match bytes.iter().position(|&byte| byte == b'=') {
            Some(at) => {
                let value = OsStr::from_bytes(&bytes[at + 1..]);
                (OsStr::from_bytes(&bytes[..at]), Some(value.to_owned()))
            }
            None => (entry.as_os_str(), std::env::var_os(entry)),
        };
        if name.is_empty() {
            return Err(Failure::Usage(format!(
                "-e '{}' names no variable: use NAME=value",
                entry.display()
            )));
        }
        env.extend(value.map(|value| (name.to_owned(), value)));
    }
    Ok(env)
}

fn command(
    machine: &Machine,
    args: &RunArgs,
    env: Vec<(OsString, OsString)>,
) -> Result<Exec, Failure> {
    let mut exec = machine.workload(&args.command, args.entrypoint.as_deref())?;
    for (name, value) in env {
        exec = exec.env(name, value);
    }
    if let Some(dir) = &args.workdir {
        exec = exec.workdir(dir);
    }
    if let Some(user) = &args.user {
        exec = exec.user(user);
    }
    if let Some(timeout) = args.timeout {
        exec = exec.timeout(timeout);
    }
    if args.interactive && !args.tty {
        exec = exec.stdin_reader(io::stdin());
    }
    Ok(exec)
}

/// What the user should know about this run.
fn notes(machine: &Machine) -> Vec<String> {
    match machine.engine() {
        EngineKind::Native => Vec::new(),
        EngineKind::Emulated => {
            let why = match probe_engines().native {
                Availability::Ready(_) => "as asked".to_owned(),
                Availability::Unusable(reason) => reason,
            };
            vec![format!(
                "this machine runs under software emulation, many times slower than hardware: {why}"
            )]
        }
    }
}

/// The one object of `--json`.
#[derive(Serialize)]
struct RunObject<'a> {
    ok: bool,
    exit_code: u8,
    #[serde(flatten)]
    output: Streams,
    stdout_bytes: u64,
    stderr_bytes: u64,
    truncated: bool,
    timed_out: bool,
    signal: Option<u8>,
    oom: bool,
    machine: Option<&'a str>,
    image: &'a str,
    engine: &'static str,
    network: bool,
    seconds: f64,
    timings: serde_json::Map<String, serde_json::Value>,
    notes: &'a [String],
}

#[derive(Serialize)]
struct Streams {
    stdout: String,
    stderr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout_b64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stderr_b64: Option<String>,
}

impl Streams {
    fn new(stdout: Vec<u8>, stderr: Vec<u8>) -> Self {
        let (stdout, stdout_b64) = text_or_base64(stdout);
        let (stderr, stderr_b64) = text_or_base64(stderr);
        Self {
            stdout,
            stderr,
            stdout_b64,
            stderr_b64,
        }
    }
}

/// Bytes as text; where they are not UTF-8, also exactly, in base64.
fn text_or_base64(bytes: Vec<u8>) -> (String, Option<String>) {
    match String::from_utf8(bytes) {
        Ok(text) => (text, None),
        Err(error) => {
            let bytes = error.into_bytes();
            let exact = BASE64.encode(&bytes);
            (String::from_utf8_lossy(&bytes).into_owned(), Some(exact))
        }
    }
}

fn run_json(
    machine: Machine,
    exec: Exec,
    args: &RunArgs,
    notes: Vec<String>,
    started: Instant,
) -> Outcome {
    let output = exec.max_output(args.max_output).output()?;
    let report = machine.kill();
    let status = output.status;
    let object = RunObject {
        ok: status.success(),
        exit_code: status.exit_code(),
        output: Streams::new(output.stdout, output.stderr),
        stdout_bytes: output.stdout_bytes,
        stderr_bytes: output.stderr_bytes,
        truncated: output.truncated,
        timed_out: status.timed_out,
        signal: status.signal,
        oom: status.oom,
        machine: None,
        image: &args.image,
        engine: report.engine.name(),
        network: false,
        seconds: started.elapsed().as_secs_f64(),
        timings: timings_object(&report.timeline),
        notes: &notes,
    };
    let mut stdout = io::stdout().lock();
    serde_json::to_writer(&mut stdout, &object)
        .map_err(io::Error::from)
        .and_then(|()| stdout.write_all(b"\n"))
        .and_then(|()| stdout.flush())
        .map_err(Failure::Output)?;
    show_timings(args, &machine, &report);
    Ok(status.exit_code())
}

/// Milliseconds since the call, by phase.
fn timings_object(timeline: &Timeline) -> serde_json::Map<String, serde_json::Value> {
    timeline
        .reached()
        .map(|(phase, at)| (format!("{}_ms", phase.name()), millis(at).into()))
        .collect()
}

fn millis(at: std::time::Duration) -> f64 {
    // Microseconds are as fine as these stamps mean anything.
    (at.as_secs_f64() * 1e6).round() / 1e3
}

fn timings_table(timeline: &Timeline, engine: EngineKind, image: &str) -> String {
    let mut table = format!("timings ({engine} engine, image {image}), ms since the call:\n");
    let mut last = std::time::Duration::ZERO;
    for (phase, at) in timeline.reached() {
        let step = millis(at.saturating_sub(last));
        table.push_str(&format!(
            "  {:<14} {:>10.3}  {:>+10.3}\n",
            phase.name(),
            millis(at),
            step
        ));
        last = at;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_without_a_value_is_taken_from_here() {
        let path = std::env::var_os("PATH").unwrap();
        let env = environment(&["PATH".into(), "A=b=c".into(), "E=".into()]).unwrap();
        assert_eq!(
            env,
            [
                ("PATH".into(), path),
                ("A".into(), "b=c".into()),
                ("E".into(), "".into())
            ]
        );
        assert_eq!(environment(&["BANTAM_NOT_SET_HERE".into()]).unwrap(), []);
        assert!(environment(&["=x".into()]).is_err());
    }

    #[test]
    fn bytes_that_are_not_text_are_also_given_exactly() {
        assert_eq!(text_or_base64(b"a\0b".to_vec()), ("a\0b".into(), None));
        let (text, exact) = text_or_base64(vec![0xff, b'x']);
        assert_eq!(text, "\u{fffd}x");
        assert_eq!(BASE64.decode(exact.unwrap()).unwrap(), [0xff, b'x']);
    }
}
