//! A tool for an agent: `bash -c` in a sandbox that the session keeps.
//!
//! Reads one command a line from standard input and answers each with one JSON line. The machine is
//! named after the session: the next process of the same session finds it again, with its files.
//!
//! ```sh
//! printf '%s\n' 'echo hello > note' 'cat note; ls /nowhere' |
//!     cargo run --example agent_sandbox -- session-1 debian:12
//! cargo run -p bantam-cli -- machine delete -f -n session-1
//! ```

use std::error::Error as StdError;
use std::io::{self, BufRead, Write};
use std::time::Duration;

use bantam::{Error, Home, Machine, MachineName, Machines};

/// What one command may take, and what the agent is shown of its output.
const TIMEOUT: Duration = Duration::from_secs(120);
const MAX_OUTPUT: u64 = 20_000;

fn main() -> Result<(), Box<dyn StdError>> {
    let mut args = std::env::args().skip(1);
    let (Some(session), Some(image)) = (args.next(), args.next()) else {
        return Err("usage: agent_sandbox SESSION IMAGE".into());
    };
    let machine = find_or_make(&session, &image)?;
    for line in io::stdin().lock().lines() {
        let answer = run(&machine, &line?)?;
        writeln!(io::stdout(), "{answer}")?;
    }
    // Dropping a named machine leaves it running for the rest of the session.
    Ok(())
}

/// The session's machine: running, stopped, or not there yet.
fn find_or_make(session: &str, image: &str) -> Result<Machine, Error> {
    let home = Home::from_env()?;
    let machines = Machines::open(&home);
    let name = MachineName::parse(session)?;
    match machines.start(&name) {
        Err(Error::NoSuchMachine { .. }) => Machine::builder()
            .name(session)
            .image(image)
            .home(home)
            .label("purpose", "agent")
            .start(),
        started => started,
    }
}

fn run(machine: &Machine, command: &str) -> Result<serde_json::Value, Error> {
    let result = machine
        .exec(["bash", "-c", command])
        .timeout(TIMEOUT)
        .max_output(MAX_OUTPUT)
        .output();
    match result {
        Ok(output) => Ok(serde_json::json!({
            "exit_code": output.status.exit_code(),
            "stdout": String::from_utf8_lossy(&output.stdout),
            "stderr": String::from_utf8_lossy(&output.stderr),
            "truncated": output.truncated,
            "timed_out": output.status.timed_out,
        })),
        // The agent can do something about a command that cannot be started.
        Err(error @ Error::Start { .. }) => Ok(serde_json::json!({
            "exit_code": error.exit_code(),
            "error": error.to_string(),
            "hint": error.hint(),
        })),
        Err(error) => Err(error),
    }
}
