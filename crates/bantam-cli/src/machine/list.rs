//! What is known of machines: lists, states, logs.

use std::collections::BTreeMap;

use bantam::{LogOptions, MachineInfo, MachineState};
use serde::Serialize;

use super::args::{LogsArgs, LsArgs, NamedArgs, StatusArgs};
use crate::Outcome;
use crate::args::Global;
use crate::show::{ago, columns, json, out, printable, raw_stdout};

/// A machine in `ls --json` and `status --json`.
#[derive(Serialize)]
struct MachineObject<'a> {
    name: &'a str,
    state: &'static str,
    state_reason: Option<&'a str>,
    image: Option<&'a str>,
    image_digest: &'a str,
    pid: Option<u32>,
    cpus: u8,
    memory_mib: u32,
    network: bool,
    labels: &'a BTreeMap<String, String>,
    created_at: u64,
    started_at: Option<u64>,
    ephemeral: bool,
    mounts: usize,
    ports: usize,
    mount_list: [String; 0],
    port_list: Vec<String>,
    storage_gb: u32,
    overlay_gb: u32,
    backend: Option<&'static str>,
    kernel: Option<&'a str>,
    entrypoint: Vec<&'a str>,
    cmd: &'a [String],
    workload_exit_code: Option<u8>,
}

impl<'a> MachineObject<'a> {
    fn new(info: &'a MachineInfo) -> Self {
        let network = info.network.as_ref();
        let ports = network
            .map(|network| network.port_list())
            .unwrap_or_default();
        Self {
            name: info.name.as_str(),
            state: info.state.name(),
            state_reason: info.state_reason.as_deref(),
            image: Some(info.image.as_str()).filter(|image| !image.is_empty()),
            image_digest: &info.image_digest,
            pid: info.pid,
            cpus: info.cpus,
            memory_mib: info.memory_mib,
            network: info.network.is_some(),
            labels: &info.labels,
            created_at: info.created_at,
            started_at: info.started_at,
            ephemeral: info.ephemeral,
            // Nothing can be shared yet.
            mounts: 0,
            ports: ports.len(),
            mount_list: [],
            port_list: ports,
            storage_gb: info.disk_gib,
            overlay_gb: info.disk_gib,
            backend: info.engine.map(|engine| engine.name()),
            kernel: info.kernel_release.as_deref(),
            entrypoint: info.entrypoint.as_deref().into_iter().collect(),
            cmd: &info.command,
            workload_exit_code: info.workload_exit,
        }
    }
}

pub(super) fn ls(global: &Global, args: &LsArgs) -> Outcome {
    let list = global.machines()?.list()?;
    if args.json {
        let objects: Vec<_> = list.iter().map(MachineObject::new).collect();
        return json(&objects);
    }
    if global.quiet {
        let names = list.iter().map(|info| format!("{}\n", info.name));
        out(&names.collect::<String>())?;
    } else if list.is_empty() {
        out("No machines found\n")?;
    } else {
        out(&table(&list))?;
    }
    Ok(0)
}

fn table(list: &[MachineInfo]) -> String {
    let mut rows = vec![
        [
            "NAME", "STATE", "IMAGE", "CPUS", "MEMORY", "STORAGE", "CREATED",
        ]
        .map(str::to_owned),
    ];
    rows.extend(list.iter().map(|info| {
        let ephemeral = if info.ephemeral { " (eph)" } else { "" };
        [
            info.name.to_string(),
            format!("{}{ephemeral}", info.state.name()),
            printable(&info.image),
            info.cpus.to_string(),
            format!("{} MiB", info.memory_mib),
            format!("{} GiB", info.disk_gib),
            ago(info.created_at),
        ]
    }));
    columns(&rows)
}

pub(super) fn status(global: &Global, args: &StatusArgs) -> Outcome {
    let info = global.machines()?.inspect(&args.name.resolve()?)?;
    if args.json {
        return json(&MachineObject::new(&info));
    }
    let state = match info.pid {
        Some(pid) => format!("{} (PID: {pid})", info.state.name()),
        None => info.state.name().to_owned(),
    };
    let mut text = format!("Machine '{}': {state}\n", info.name);
    if let Some(reason) = &info.state_reason
        && info.state != MachineState::Stopped
    {
        text.push_str(&format!("  {}\n", printable(reason)));
    }
    out(&text)?;
    Ok(0)
}

pub(super) fn logs(global: &Global, args: &LogsArgs) -> Outcome {
    let mut options = LogOptions::new().follow(args.follow);
    if let Some(lines) = args.tail {
        options = options.tail(lines);
    }
    let name = args.name.resolve()?;
    global
        .machines()?
        .logs(&name, options, &mut raw_stdout()?)
        .map_err(super::command::output_failure)?;
    Ok(0)
}

pub(super) fn data_dir(global: &Global, args: &NamedArgs) -> Outcome {
    let dir = global.machines()?.data_dir(&args.name.resolve()?)?;
    out(&format!("{}\n", dir.display()))?;
    Ok(0)
}
