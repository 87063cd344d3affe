//! How often a short command in a warm machine wakes somebody up, on both sides.
//!
//! Counted are voluntary context switches: a thread that had nothing to do and then had.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use bantam::{EngineChoice, Machine};

use crate::machine::run_true;
use crate::program::{Bench, MEMORY_MIB};
use crate::report::{Measurement, Report};
use crate::{Error, Progress};

/// How often the command is run.
const COMMANDS: u32 = ROUNDS * ROUND;
/// The host's threads are looked at after each round: a busy host disturbs some of them.
const ROUNDS: u32 = 4;
const ROUND: u32 = 50;
/// Commands with a pause before each, in which all that can wait is done.
const LONE_COMMANDS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(100);
/// The thread that calls; the socket device's.
const CALLER: &str = "caller";
const WORKER: &str = "vsock";
const SWITCHES: &str = "voluntary_ctxt_switches:";

/// Wake-ups of this process's threads, of the agent, and interrupts of the guest's socket device.
pub(crate) fn measure(bench: &Bench, report: &mut Report, progress: Progress) -> Result<(), Error> {
    progress.say("wake-ups of a command");
    let machine = Machine::builder()
        .image_source(bench.image_source()?)
        .memory_mib(MEMORY_MIB)
        .engine(EngineChoice::Only(bench.engine))
        .start()?;
    for _ in 0..5 {
        run_true(&machine)?;
    }
    let agent = in_guest(&machine, "/proc/1/status")?;
    let interrupts = in_guest(&machine, "/proc/interrupts")?;
    let mut counts = vec![threads()?];
    for _ in 0..ROUNDS {
        for _ in 0..ROUND {
            run_true(&machine)?;
        }
        counts.push(threads()?);
    }
    let interrupts_after = in_guest(&machine, "/proc/interrupts")?;
    let agent_after = in_guest(&machine, "/proc/1/status")?;
    let mut lone = 0;
    for _ in 0..LONE_COMMANDS {
        thread::sleep(PAUSE);
        let before = threads()?;
        run_true(&machine)?;
        thread::sleep(PAUSE);
        lone += grown(&before, &threads()?, WORKER);
    }

    let mut add = |what: &str, unit, values: Vec<f64>| {
        let name = format!("exec `true`: {what}");
        let result = Measurement::new(name, bench.engine.name(), unit, values);
        report.results.extend(result);
    };
    let each = |count: u64, commands: u32| count as f64 / f64::from(commands);
    for name in [CALLER, WORKER] {
        let rounds = counts.windows(2).map(|pair| match pair {
            [before, after] => each(grown(before, after, name), ROUND),
            _ => 0.0,
        });
        let what = format!("wake-ups of the host's {name}");
        add(&what, "wake-ups", rounds.collect());
    }
    add(
        "wake-ups of the host's vsock, after a pause",
        "wake-ups",
        vec![each(lone, LONE_COMMANDS)],
    );
    // Between its two looks there are three commands more: two to look, and the first look's end.
    let count = switches(&agent_after).saturating_sub(switches(&agent));
    add(
        "wake-ups of the guest's agent",
        "wake-ups",
        vec![each(count, COMMANDS)],
    );
    let count = vsock_interrupts(&interrupts_after).saturating_sub(vsock_interrupts(&interrupts));
    add(
        "interrupts of the guest's vsock",
        "interrupts",
        vec![each(count, COMMANDS)],
    );
    Ok(())
}

/// How many more of a thread's switches there are.
fn grown(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>, name: &str) -> u64 {
    let of = |threads: &BTreeMap<String, u64>| threads.get(name).copied().unwrap_or(0);
    of(after).saturating_sub(of(before))
}

fn in_guest(machine: &Machine, path: &str) -> Result<String, Error> {
    let output = machine.exec(["cat", path]).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Voluntary switches by thread name; the thread that calls is [`CALLER`].
fn threads() -> Result<BTreeMap<String, u64>, Error> {
    let dir = Path::new("/proc/self/task");
    let own = std::process::id().to_string();
    let mut counts = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(Error::file("reading", dir))? {
        let Ok(entry) = entry else { continue };
        // A thread may have ended meanwhile.
        let (Ok(name), Ok(status)) = (
            fs::read_to_string(entry.path().join("comm")),
            fs::read_to_string(entry.path().join("status")),
        ) else {
            continue;
        };
        let name = if entry.file_name().to_str() == Some(&own) {
            CALLER
        } else {
            name.trim()
        };
        *counts.entry(name.to_owned()).or_default() += switches(&status);
    }
    Ok(counts)
}

fn switches(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix(SWITCHES)?.trim().parse().ok())
        .unwrap_or(0)
}

/// Interrupts of the second virtio device, behind the image's disk; one CPU.
fn vsock_interrupts(table: &str) -> u64 {
    table
        .lines()
        .filter(|line| line.contains("virtio1"))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_and_interrupts_are_found_in_the_kernels_tables() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t4\n";
        assert_eq!(switches(status), 17);
        let table = "           CPU0\n  5:   12   IO-APIC   5-edge   virtio0\n\
            \x20 6:   34   IO-APIC   6-edge   virtio1\n";
        assert_eq!(vsock_interrupts(table), 34);
        assert!(threads().unwrap().contains_key(CALLER));
    }
}
