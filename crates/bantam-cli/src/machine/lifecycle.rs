//! Starting, stopping, changing and removing named machines.

use std::io::{self, IsTerminal, Write};

use bantam::{Changes, MachineName, MachineState, Stopped};

use super::args::{DeleteArgs, StartArgs, StopArgs, UpdateArgs};
use super::{command, run, text};
use crate::Outcome;
use crate::args::Global;
use crate::failure::Failure;
use crate::show::{out, say};

pub(super) fn start(global: &Global, args: &StartArgs) -> Outcome {
    let machines = global.machines()?;
    let name = args.name.resolve()?;
    let before = machines.inspect(&name)?;
    let machine = match args.boot_timeout {
        Some(limit) => machines.start_within(&name, limit)?,
        None => machines.start(&name)?,
    };
    let already = before.state == MachineState::Running;
    if !already {
        for note in run::notes(machine.engine()) {
            say(global, &format!("note: {note}"));
        }
    }
    let pid = machines.inspect(&name)?.pid;
    let how = if already {
        "already running"
    } else {
        "running"
    };
    let pid = pid.map_or_else(String::new, |pid| format!(" (PID: {pid})"));
    out(&format!("Machine '{name}' {how}{pid}\n"))?;
    Ok(0)
}

pub(super) fn stop(global: &Global, args: &StopArgs) -> Outcome {
    let name = args.name.resolve()?;
    match global.machines()?.stop(&name, args.time)? {
        Stopped::Before(state) => out(&format!(
            "Machine '{name}' is not running (state: {})\n",
            state.name()
        ))?,
        _ => out(&format!("Stopped machine: {name}\n"))?,
    }
    Ok(0)
}

pub(super) fn restart(global: &Global, args: &StopArgs) -> Outcome {
    let machines = global.machines()?;
    let name = args.name.resolve()?;
    machines.stop(&name, args.time)?;
    machines.start(&name)?;
    out(&format!("Restarted machine: {name}\n"))?;
    Ok(0)
}

pub(super) fn delete(global: &Global, args: &DeleteArgs) -> Outcome {
    let machines = global.machines()?;
    let name = args.name.required()?;
    let exists = machines.list()?.iter().any(|info| info.name == name);
    if exists && !args.force && !confirmed(&name)? {
        out("Cancelled\n")?;
        return Ok(0);
    }
    machines.delete(&name)?;
    out(&format!("Deleted machine: {name}\n"))?;
    Ok(0)
}

fn confirmed(name: &MachineName) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::NotConfirmed(format!(
            "machine '{name}' needs confirmation but standard input is not a terminal"
        )));
    }
    let mut stderr = io::stderr();
    let asked = write!(
        stderr,
        "Delete machine '{name}' with everything it wrote? [y/N] "
    )
    .and_then(|()| stderr.flush());
    let mut answer = String::new();
    // What cannot be asked or read is no yes.
    let read = asked.and_then(|()| io::stdin().read_line(&mut answer));
    let answer = answer.trim().to_lowercase();
    Ok(read.is_ok() && (answer == "y" || answer == "yes"))
}

pub(super) fn update(global: &Global, args: &UpdateArgs) -> Outcome {
    args.later.check()?;
    let machines = global.machines()?;
    let name = args.name.required()?;
    let before = machines.inspect(&name)?;
    let mut env = Vec::new();
    for (name, value) in command::environment(&args.env)? {
        env.push((text(&name)?, text(&value)?));
    }
    let changes = Changes {
        cpus: args.cpus,
        memory_mib: args.mem,
        disk_gib: args.disk.gib(),
        env,
        remove_env: args.remove_env.clone(),
        workdir: args.workdir.clone(),
        user: args.user.clone(),
        labels: args.label.iter().cloned().collect(),
        remove_labels: args.remove_label.clone(),
        network: args.network.apply(before.network.clone())?,
    };
    if changes.is_empty() {
        out("No changes specified.\n")?;
        return Ok(0);
    }
    let after = machines.update(&name, &changes)?;
    let mut lines = format!("Updated machine '{name}':\n");
    let mut line = |what: &str, before: String, after: String| {
        if before != after {
            lines.push_str(&format!("  {what}: {before} → {after}\n"));
        }
    };
    line("cpus", before.cpus.to_string(), after.cpus.to_string());
    let mib = |mib: u32| format!("{mib} MiB");
    line("memory", mib(before.memory_mib), mib(after.memory_mib));
    let gib = |gib: u32| format!("{gib} GiB");
    line("storage", gib(before.disk_gib), gib(after.disk_gib));
    for (name, value) in &changes.env {
        lines.push_str(&format!("  env: {name}={value}\n"));
    }
    for name in &changes.remove_env {
        lines.push_str(&format!("  removed env: {name}\n"));
    }
    if let Some(dir) = &changes.workdir {
        lines.push_str(&format!("  workdir: {dir}\n"));
    }
    if let Some(user) = &changes.user {
        lines.push_str(&format!("  user: {user}\n"));
    }
    for (key, value) in &changes.labels {
        lines.push_str(&format!("  label: {key}={value}\n"));
    }
    for key in &changes.remove_labels {
        lines.push_str(&format!("  removed label: {key}\n"));
    }
    if let Some(network) = &changes.network {
        let state = if network.is_some() {
            "enabled"
        } else {
            "disabled"
        };
        lines.push_str(&format!("  network: {state}\n"));
    }
    if after.state == MachineState::Running {
        lines.push_str("\nIn force now.\n");
    } else {
        lines.push_str(&format!(
            "\nStart with: bantam machine start --name {name}\n"
        ));
    }
    out(&lines)?;
    Ok(0)
}
