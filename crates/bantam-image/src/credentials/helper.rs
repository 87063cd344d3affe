//! `docker-credential-NAME get` (the protocol of docker-credential-helpers).

use std::io::{ErrorKind, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::Credential;
use crate::config::or_default;
use crate::limits::MAX_REPLY;

#[derive(Deserialize)]
struct Reply {
    #[serde(rename = "Username", default, deserialize_with = "or_default")]
    username: String,
    #[serde(rename = "Secret", default, deserialize_with = "or_default")]
    secret: String,
}

/// The helper's file name.
pub(super) fn program(name: &str) -> String {
    format!("docker-credential-{name}")
}

/// Asks a helper for a server's credential. `None` when it has none. An error quotes nothing of its output.
pub(super) fn get(
    name: &str,
    server: &str,
    timeout: Duration,
) -> Result<Option<Credential>, String> {
    let program = program(name);
    if name.contains('/') {
        return Err(format!(
            "{program:?} is not the name of a credential helper"
        ));
    }
    let child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = match child {
        Ok(child) => Running(child),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            return Err(format!("credential helper {program} is not installed"));
        }
        Err(e) => return Err(format!("credential helper {program} does not start: {e}")),
    };
    let begun = Instant::now();
    // The name fits into a pipe. A helper that does not read it will be known by its output.
    if let Some(mut stdin) = child.0.stdin.take() {
        let _ = stdin.write_all(server.as_bytes());
    }
    let (send, output) = mpsc::channel();
    if let Some(stdout) = child.0.stdout.take() {
        // Ends with the pipe, which a child of the helper may hold open beyond the time-out.
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = stdout.take(MAX_REPLY).read_to_end(&mut bytes);
            let _ = send.send(read.map(|_| bytes));
        });
    }
    let too_late = || {
        let seconds = timeout.as_secs_f32();
        format!("credential helper {program} does not answer within {seconds} s")
    };
    let output = match output.recv_timeout(timeout) {
        Ok(Ok(output)) => output,
        Ok(Err(e)) => return Err(format!("credential helper {program} cannot be read: {e}")),
        Err(RecvTimeoutError::Timeout) => return Err(too_late()),
        Err(RecvTimeoutError::Disconnected) => {
            return Err(format!("credential helper {program} cannot be read"));
        }
    };
    let status = loop {
        match child.0.try_wait() {
            Ok(Some(status)) => break status,
            // It has closed its output and is about to end.
            Ok(None) if begun.elapsed() < timeout => thread::sleep(Duration::from_millis(1)),
            Ok(None) => return Err(too_late()),
            Err(e) => return Err(format!("credential helper {program} is lost: {e}")),
        }
    };
    if !status.success() {
        // The protocol has no other way to say so.
        let text = String::from_utf8_lossy(&output);
        return if text.contains("credentials not found") {
            Ok(None)
        } else {
            Err(format!("credential helper {program} fails ({status})"))
        };
    }
    let reply: Reply = serde_json::from_slice(&output)
        .map_err(|_| format!("credential helper {program} gives no valid answer"))?;
    Ok(Credential::from_pair(reply.username, reply.secret))
}

/// Leaves no process behind.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
