//! How the guest fares, as its kernel tells it.

use std::fs::File;
use std::io::{Read, Write};
use std::time::Duration;

use bantam_protocol::{DiskUse, GuestExec, GuestStats};
use nix::sys::statvfs::statvfs;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};

/// Most bytes read of a file of `/proc`; `/proc/stat` has a line for each interrupt.
const MAX_LEN: u64 = 1 << 20;

/// The parent of the kernel's own threads.
const KTHREADD: u32 = 2;

/// Answers the question.
pub(crate) fn send_stats(stream: &mut impl Write) {
    if let Ok(frame) = GuestExec::Stats(collect()).encode() {
        // A host that hung up does not want to know.
        let _ = stream.write_all(&frame);
    }
}

fn collect() -> GuestStats {
    let memory = text("/proc/meminfo");
    let stat = text("/proc/stat");
    let (cpu_ticks, cpus) = cpu_time(&stat);
    let ticks_per_second = sysconf(SysconfVar::CLK_TCK)
        .ok()
        .flatten()
        .and_then(|ticks| u64::try_from(ticks).ok())
        .unwrap_or(100)
        .max(1);
    let uptime = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
    GuestStats {
        memory_total: memory_bytes(&memory, "MemTotal:"),
        memory_available: memory_bytes(&memory, "MemAvailable:"),
        cpu_ns: cpu_ticks.saturating_mul(1_000_000_000 / ticks_per_second),
        cpus,
        load_hundredths: load(&text("/proc/loadavg")),
        uptime_ns: u64::try_from(uptime.as_nanos()).unwrap_or(u64::MAX),
        processes: processes(),
        disk: disk(),
    }
}

/// A value of `/proc/meminfo`, in bytes.
fn memory_bytes(meminfo: &str, name: &str) -> u64 {
    meminfo
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse::<u64>().ok())
        .unwrap_or_default()
        .saturating_mul(1024)
}

/// Ticks not spent idling, and the number of CPUs, of `/proc/stat`.
fn cpu_time(stat: &str) -> (u64, u32) {
    let mut busy = 0_u64;
    let mut cpus = 0;
    for line in stat.lines().filter(|line| line.starts_with("cpu")) {
        let mut fields = line.split_whitespace();
        if fields.next() != Some("cpu") {
            cpus += 1;
            continue;
        }
        // user nice system idle iowait irq softirq steal; guest time is in user already.
        for (at, field) in fields.take(8).enumerate() {
            if at != 3 && at != 4 {
                busy = busy.saturating_add(field.parse().unwrap_or_default());
            }
        }
    }
    (busy, cpus)
}

/// The averages of `/proc/loadavg`.
fn load(loadavg: &str) -> [u32; 3] {
    let mut load = [0; 3];
    for (to, field) in load.iter_mut().zip(loadavg.split_whitespace()) {
        // Always two digits after the point.
        *to = field.replace('.', "").parse().unwrap_or_default();
    }
    load
}

/// Processes but the kernel's threads and the one that asks.
fn processes() -> u32 {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return 0;
    };
    let me = std::process::id();
    let mut count = 0;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.parse::<u32>().ok());
        if let Some(pid) = pid.filter(|pid| *pid != me && *pid != KTHREADD)
            && parent(&text(&format!("/proc/{pid}/stat"))).is_some_and(|pid| pid != KTHREADD)
        {
            count += 1;
        }
    }
    count
}

/// The parent in a `/proc/PID/stat`, of which the second field is a name in parentheses.
fn parent(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

fn disk() -> DiskUse {
    let Ok(stat) = statvfs("/") else {
        return DiskUse::default();
    };
    let block = stat.fragment_size();
    DiskUse {
        total: stat.blocks().saturating_mul(block),
        used: stat
            .blocks()
            .saturating_sub(stat.blocks_free())
            .saturating_mul(block),
        available: stat.blocks_available().saturating_mul(block),
    }
}

/// A file of the kernel; one that is missing is empty.
fn text(path: &str) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(MAX_LEN).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_read_right() {
        let meminfo = "MemTotal:         500 kB\nMemFree: 1 kB\nMemAvailable:  300 kB\n";
        assert_eq!(memory_bytes(meminfo, "MemTotal:"), 512_000);
        assert_eq!(memory_bytes(meminfo, "MemAvailable:"), 307_200);
        assert_eq!(memory_bytes("", "MemTotal:"), 0);
        let stat = "cpu  1 2 4 1000 1000 8 16 32 64 128\ncpu0 1 2\ncpu1 1 2\nintr 9\n";
        assert_eq!(cpu_time(stat), (1 + 2 + 4 + 8 + 16 + 32, 2));
        assert_eq!(load("0.05 1.20 12.00 1/99 1234\n"), [5, 120, 1200]);
        assert_eq!(load(""), [0; 3]);
        assert_eq!(parent("7 (a) b) S 3 7 7"), Some(3));
        assert_eq!(parent(""), None);
    }
}
