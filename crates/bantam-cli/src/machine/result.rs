//! The result of a command as one JSON object, and the timings of a run.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::Duration;

use bantam::{EngineKind, Output, Timeline};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Serialize;

use crate::failure::Failure;

/// What the object says beside the command's own result.
pub(super) struct Around<'a> {
    pub(super) machine: Option<&'a str>,
    pub(super) image: &'a str,
    pub(super) engine: EngineKind,
    pub(super) took: Duration,
    pub(super) timeline: &'a Timeline,
    pub(super) network: bool,
    pub(super) notes: &'a [String],
}

/// The one object of `--json`.
#[derive(Serialize)]
struct ResultObject<'a> {
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

/// Writes the object to standard output, in one line.
pub(super) fn print(output: Output, around: &Around<'_>) -> Result<(), Failure> {
    let status = output.status;
    let object = ResultObject {
        ok: status.success(),
        exit_code: status.exit_code(),
        output: Streams::new(output.stdout, output.stderr),
        stdout_bytes: output.stdout_bytes,
        stderr_bytes: output.stderr_bytes,
        truncated: output.truncated,
        timed_out: status.timed_out,
        signal: status.signal,
        oom: status.oom,
        machine: around.machine,
        image: around.image,
        engine: around.engine.name(),
        network: around.network,
        seconds: around.took.as_secs_f64(),
        timings: timings_object(around.timeline),
        notes: around.notes,
    };
    let mut stdout = io::stdout().lock();
    serde_json::to_writer(&mut stdout, &object)
        .map_err(io::Error::from)
        .and_then(|()| stdout.write_all(b"\n"))
        .and_then(|()| stdout.flush())
        .map_err(Failure::Output)
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

/// Milliseconds since the call, by phase.
fn timings_object(timeline: &Timeline) -> serde_json::Map<String, serde_json::Value> {
    timeline
        .reached()
        .map(|(phase, at)| (format!("{}_ms", phase.name()), millis(at).into()))
        .collect()
}

fn millis(at: Duration) -> f64 {
    // Microseconds are as fine as these stamps mean anything.
    (at.as_secs_f64() * 1e6).round() / 1e3
}

/// The table of `--timings`.
pub(super) fn timings_table(timeline: &Timeline, engine: EngineKind, image: &str) -> String {
    let mut table = format!("timings ({engine} engine, image {image}), ms since the call:\n");
    let mut last = Duration::ZERO;
    for (phase, at) in timeline.reached() {
        let step = millis(at.saturating_sub(last));
        // Writing to a String cannot fail.
        let _ = writeln!(
            table,
            "  {:<14} {:>10.3}  {:>+10.3}",
            phase.name(),
            millis(at),
            step
        );
        last = at;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_not_text_are_also_given_exactly() {
        assert_eq!(text_or_base64(b"a\0b".to_vec()), ("a\0b".into(), None));
        let (text, exact) = text_or_base64(vec![0xff, b'x']);
        assert_eq!(text, "\u{fffd}x");
        assert_eq!(BASE64.decode(exact.unwrap()).unwrap(), [0xff, b'x']);
    }
}
