//! `bantam stats`.

use std::time::Duration;

use bantam::{MachineStats, Machines};
use indicatif::HumanBytes;
use serde::Serialize;

use super::args::StatusArgs;
use crate::Outcome;
use crate::args::Global;
use crate::show::{columns, json, out};

/// What `stats --json` shows. Sizes are in bytes, times in seconds.
#[derive(Serialize)]
struct StatsObject<'a> {
    name: &'a str,
    guest: Guest,
    host: Host,
}

/// By the guest's own account.
#[derive(Serialize)]
struct Guest {
    cpus: u32,
    cpu_seconds: f64,
    load: [f64; 3],
    uptime_seconds: f64,
    memory_total: u64,
    memory_available: u64,
    processes: u32,
    disk_total: u64,
    disk_used: u64,
    disk_available: u64,
}

/// What the machine's processes take on the host.
#[derive(Serialize)]
struct Host {
    pid: u32,
    processes: u32,
    resident: u64,
    cpu_seconds: f64,
    disk: u64,
}

pub(super) fn stats(global: &Global, args: &StatusArgs) -> Outcome {
    let machines: Machines = global.machines()?;
    let name = args.name.resolve()?;
    let stats = machines.stats(&name)?;
    let object = object(name.as_str(), &stats);
    if args.json {
        return json(&object);
    }
    out(&table(&object))?;
    Ok(0)
}

fn object<'a>(name: &'a str, stats: &MachineStats) -> StatsObject<'a> {
    let seconds = |ns: u64| Duration::from_nanos(ns).as_secs_f64();
    let guest = &stats.guest;
    StatsObject {
        name,
        guest: Guest {
            cpus: guest.cpus,
            cpu_seconds: seconds(guest.cpu_ns),
            load: guest.load_hundredths.map(|load| f64::from(load) / 100.0),
            uptime_seconds: seconds(guest.uptime_ns),
            memory_total: guest.memory_total,
            memory_available: guest.memory_available,
            processes: guest.processes,
            disk_total: guest.disk.total,
            disk_used: guest.disk.used,
            disk_available: guest.disk.available,
        },
        host: Host {
            pid: stats.pid,
            processes: stats.processes,
            resident: stats.resident_bytes,
            cpu_seconds: stats.cpu.as_secs_f64(),
            disk: stats.disk_bytes,
        },
    }
}

fn table(object: &StatsObject<'_>) -> String {
    let (guest, host) = (&object.guest, &object.host);
    let used = guest.memory_total.saturating_sub(guest.memory_available);
    let of = |part: u64, all: u64| format!("{} of {}", HumanBytes(part), HumanBytes(all));
    let rows = [
        ["machine", object.name].map(str::to_owned),
        [
            "memory in the guest".to_owned(),
            of(used, guest.memory_total),
        ],
        [
            "disk in the guest".to_owned(),
            of(guest.disk_used, guest.disk_total),
        ],
        [
            "processes in the guest".to_owned(),
            guest.processes.to_string(),
        ],
        [
            "CPU time in the guest".to_owned(),
            format!(
                "{:.2} s on {} vCPUs in {:.0} s",
                guest.cpu_seconds, guest.cpus, guest.uptime_seconds
            ),
        ],
        [
            "memory on the host".to_owned(),
            format!(
                "{} in {} processes",
                HumanBytes(host.resident),
                host.processes
            ),
        ],
        [
            "disk on the host".to_owned(),
            HumanBytes(host.disk).to_string(),
        ],
        [
            "CPU time on the host".to_owned(),
            format!("{:.2} s", host.cpu_seconds),
        ],
    ];
    columns(&rows)
}
