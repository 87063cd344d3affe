//! How often a short command in a warm machine wakes somebody up, on both sides.
//!
//! Counted are voluntary context switches: a thread that had nothing to do and then had.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bantam::{EngineChoice, Machine};

use crate::machine::run_true;
use crate::program::{Bench, MEMORY_MIB};
use crate::report::{Measurement, Report};
use crate::{Error, Progress};

/// How often the command is run.
const COMMANDS: u32 = 200;
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
    let threads = threads()?;
    for _ in 0..COMMANDS {
        run_true(&machine)?;
    }
    let threads_after = self::threads()?;
    let interrupts_after = in_guest(&machine, "/proc/interrupts")?;
    let agent_after = in_guest(&machine, "/proc/1/status")?;

    let mut add = |what: &str, unit, count: u64| {
        let each = count as f64 / f64::from(COMMANDS);
        let name = format!("exec `true`: {what}");
        let result = Measurement::new(name, bench.engine.name(), unit, vec![each]);
        report.results.extend(result);
    };
    let of = |threads: &BTreeMap<String, u64>, name: &str| threads.get(name).copied().unwrap_or(0);
    for name in ["caller", "vsock"] {
        let count = of(&threads_after, name).saturating_sub(of(&threads, name));
        add(&format!("wake-ups of the host's {name}"), "wake-ups", count);
    }
    // Between its two looks there are three commands more: two to look, and the first look's end.
    let count = switches(&agent_after).saturating_sub(switches(&agent));
    add("wake-ups of the guest's agent", "wake-ups", count);
    let count = vsock_interrupts(&interrupts_after).saturating_sub(vsock_interrupts(&interrupts));
    add("interrupts of the guest's vsock", "interrupts", count);
    Ok(())
}

fn in_guest(machine: &Machine, path: &str) -> Result<String, Error> {
    let output = machine.exec(["cat", path]).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Voluntary switches by thread name; the thread that calls is "caller".
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
            "caller"
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
        assert!(threads().unwrap().contains_key("caller"));
    }
}
