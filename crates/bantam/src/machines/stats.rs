//! What a running machine uses.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use bantam_protocol::GuestStats;

/// What a running machine uses, by its guest's account and by the host's.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MachineStats {
    /// What the guest's kernel says; it is the guest's word.
    pub guest: GuestStats,
    /// The machine's process.
    pub pid: u32,
    /// How many processes there are on the host: that one, and QEMU on the emulated engine.
    pub processes: u32,
    /// Memory of theirs that is resident, in bytes: what the guest has touched of its own, and
    /// what they need beside that. Pages that two of them share count twice.
    pub resident_bytes: u64,
    /// Processor time they have used.
    pub cpu: Duration,
    /// What the machine's disk takes of the host's, in bytes.
    pub disk_bytes: u64,
}

/// What the host says of the process `pid` and its children.
pub(super) fn of_process(pid: u32, disk: &Path, guest: GuestStats) -> MachineStats {
    let mut stats = MachineStats {
        guest,
        pid,
        processes: 0,
        resident_bytes: 0,
        cpu: Duration::ZERO,
        disk_bytes: fs::metadata(disk).map_or(0, |meta| meta.blocks().saturating_mul(512)),
    };
    for pid in std::iter::once(pid).chain(children(pid)) {
        // One that has just ended uses nothing.
        let Some((resident, cpu)) = usage(pid) else {
            continue;
        };
        stats.processes += 1;
        stats.resident_bytes = stats.resident_bytes.saturating_add(resident);
        stats.cpu = stats.cpu.saturating_add(cpu);
    }
    stats
}

/// The children of a process, whichever of its threads started them.
fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    tasks
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<u32>>()
        })
        .collect()
}

/// Resident bytes and processor time.
fn usage(pid: u32) -> Option<(u64, Duration)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(
        &stat,
        rustix::param::page_size() as u64,
        rustix::param::clock_ticks_per_second(),
    )
}

/// Fields 14, 15 and 24 of proc_pid_stat(5). The name before them may hold anything but ends with
/// the last parenthesis.
fn parse_stat(stat: &str, page: u64, ticks_per_second: u64) -> Option<(u64, Duration)> {
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<_> = fields.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let ticks = field(14)?.checked_add(field(15)?)?;
    let millis = ticks.saturating_mul(1000) / ticks_per_second.max(1);
    Some((
        field(24)?.saturating_mul(page),
        Duration::from_millis(millis),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_an_odd_name_is_understood() {
        let line = "42 (a) 9 (b) S 1 1 1 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 1 0 100 1000000 77 \
                    18446744073709551615 1 1";
        let (resident, cpu) = parse_stat(line, 4096, 100).unwrap();
        assert_eq!(resident, 77 * 4096);
        assert_eq!(cpu, Duration::from_secs(3));
        assert!(parse_stat("42 (a) S 1", 4096, 100).is_none());
        assert!(parse_stat("", 4096, 100).is_none());
    }

    #[test]
    fn this_process_uses_something() {
        let (resident, _) = usage(std::process::id()).unwrap();
        assert!(resident > 100_000);
    }
}
