//! Starting, stopping, changing and removing named machines.

use std::io::{self, IsTerminal, Write};

use bantam::{Changes, MachineInfo, MachineName, MachineState, NetworkConfig, Stopped};

use super::args::{DeleteArgs, StartArgs, StopArgs, UpdateArgs};
use super::{command, run, text};
use crate::Outcome;
use crate::args::Global;
use crate::failure::Failure;
use crate::show::{out, printable, say};

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
    let after = machines.inspect(&name)?;
    if !already {
        warn_of_workload(global, &after);
    }
    let pid = after.pid;
    let how = if already {
        "already running"
    } else {
        "running"
    };
    let pid = pid.map_or_else(String::new, |pid| format!(" (PID: {pid})"));
    out(&format!("Machine '{name}' {how}{pid}\n"))?;
    Ok(0)
}

/// A machine runs although its workload cannot: that may be mended only from inside.
fn warn_of_workload(global: &Global, machine: &MachineInfo) {
    if let Some(error) = &machine.workload_error {
        let error = printable(error);
        say(
            global,
            &format!("warning: its workload does not run: {error}"),
        );
    }
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
    warn_of_workload(global, &machines.inspect(&name)?);
    out(&format!("Restarted machine: {name}\n"))?;
    Ok(0)
}

pub(super) fn delete(global: &Global, args: &DeleteArgs) -> Outcome {
    let machines = global.machines()?;
    let name = args.name.resolve()?;
    if !args.force && !args.cascade {
        // Of one that is damaged the question is the same.
        if let Err(error @ bantam::Error::NoSuchMachine { .. }) = machines.inspect(&name) {
            return Err(error.into());
        }
        if !confirmed(&name)? {
            out("Cancelled\n")?;
            return Ok(0);
        }
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
    let name = args.name.resolve()?;
    let before = machines.inspect(&name)?;
    let changes = changes(args, &before)?;
    if changes.is_empty() {
        out("No changes specified.\n")?;
        return Ok(0);
    }
    let after = machines.update(&name, &changes)?;
    let mut text = format!("Updated machine '{name}':\n");
    for line in changed_sizes(&before, &after)
        .into_iter()
        .chain(changed_settings(&changes))
    {
        text.push_str(&format!("  {}\n", printable(&line)));
    }
    text.push_str(&match after.state {
        MachineState::Running => "\nIn force now.\n".to_owned(),
        _ => format!("\nStart with: bantam machine start --name {name}\n"),
    });
    out(&text)?;
    Ok(0)
}

fn changes(args: &UpdateArgs, before: &MachineInfo) -> Result<Changes, Failure> {
    let mut env = Vec::new();
    for (name, value) in command::environment(&args.env)? {
        env.push((text(&name)?, text(&value)?));
    }
    Ok(Changes {
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
        network_was: Some(before.network.clone()),
    })
}

/// What is of another size now.
fn changed_sizes(before: &MachineInfo, after: &MachineInfo) -> Vec<String> {
    let sizes = [
        ("cpus", before.cpus.into(), after.cpus.into(), ""),
        ("memory", before.memory_mib, after.memory_mib, " MiB"),
        ("storage", before.disk_gib, after.disk_gib, " GiB"),
    ];
    sizes
        .into_iter()
        .filter(|(_, before, after, _)| before != after)
        .map(|(what, before, after, unit)| format!("{what}: {before}{unit} → {after}{unit}"))
        .collect()
}

/// What was set and what was taken back.
fn changed_settings(changes: &Changes) -> Vec<String> {
    let mut lines = Vec::new();
    // Their values may be secrets, and this may be a log that others read.
    lines.extend(changes.env.iter().map(|(name, _)| format!("env: {name}")));
    let removed = changes.remove_env.iter();
    lines.extend(removed.map(|name| format!("removed env: {name}")));
    lines.extend(changes.workdir.iter().map(|dir| format!("workdir: {dir}")));
    lines.extend(changes.user.iter().map(|user| format!("user: {user}")));
    let labels = changes.labels.iter();
    lines.extend(labels.map(|(key, value)| format!("label: {key}={value}")));
    let removed = changes.remove_labels.iter();
    lines.extend(removed.map(|key| format!("removed label: {key}")));
    let was = changes.network_was.as_ref().and_then(Option::as_ref);
    match (was, &changes.network) {
        (_, None) => {}
        (_, Some(None)) => lines.push("network: disabled".to_owned()),
        (None, Some(Some(_))) => lines.push("network: enabled".to_owned()),
        (Some(was), Some(Some(is))) => lines.extend(changed_network(was, is)),
    }
    lines
}

/// What is new in a network, and what is gone.
fn changed_network(was: &NetworkConfig, is: &NetworkConfig) -> Vec<String> {
    fn list<T: ToString>(rules: &[T]) -> Vec<String> {
        rules.iter().map(ToString::to_string).collect()
    }
    let words = |network: &NetworkConfig| {
        let policy = &network.policy;
        // With an allow rule it may reach what the rules name, and nothing else.
        let public = policy.enabled && !policy.is_restricted();
        let flag = |set: bool, word: &str| -> Vec<String> {
            set.then(|| word.to_owned()).into_iter().collect()
        };
        [
            ("may reach", flag(public, "public addresses")),
            ("may reach", flag(policy.allow_private, "private addresses")),
            ("may reach", flag(policy.allow_host_loopback, "this host")),
            ("allowed host", list(&policy.allow_hosts)),
            ("allowed addresses", list(&policy.allow_cidrs)),
            ("denied addresses", list(&policy.deny_cidrs)),
            ("name server", list(&network.dns_servers)),
            ("search domain", network.search.clone()),
            ("port", list(&network.port_list())),
        ]
    };
    let (before, after) = (words(was), words(is));
    let mut lines = Vec::new();
    for ((what, before), (_, after)) in before.iter().zip(&after) {
        let added = after.iter().filter(|word| !before.contains(word));
        lines.extend(added.map(|word| format!("{what}: {word}")));
        let removed = before.iter().filter(|word| !after.contains(word));
        lines.extend(removed.map(|word| format!("removed {what}: {word}")));
    }
    if lines.is_empty() && was != is {
        lines.push("network: changed".to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_is_told_without_the_values_of_variables() {
        let changes = Changes {
            env: vec![("TOKEN".into(), "hunter2".into())],
            remove_env: vec!["OLD".into()],
            labels: [("tier".to_owned(), "web".to_owned())].into(),
            network: Some(None),
            ..Changes::default()
        };
        assert_eq!(
            changed_settings(&changes),
            [
                "env: TOKEN",
                "removed env: OLD",
                "label: tier=web",
                "network: disabled"
            ]
        );
    }

    #[test]
    fn what_changed_of_a_network_is_named() {
        let was = NetworkConfig::public()
            .allow_host("a.example")
            .and_then(|network| network.allow_cidr("10.0.0.0/8:443"))
            .unwrap();
        let is = NetworkConfig::public()
            .allow_private()
            .allow_host("b.example")
            .and_then(|network| network.deny_cidr("10.1.0.0/16"))
            .and_then(|network| network.publish("8080:80"))
            .unwrap();
        let change = |was: &NetworkConfig, is: &NetworkConfig| {
            changed_settings(&Changes {
                network: Some(Some(is.clone())),
                network_was: Some(Some(was.clone())),
                ..Changes::default()
            })
        };
        assert_eq!(
            change(&was, &is),
            [
                "may reach: private addresses",
                "allowed host: b.example",
                "removed allowed host: a.example",
                "removed allowed addresses: 10.0.0.0/8:443",
                "denied addresses: 10.1.0.0/16",
                "port: 127.0.0.1:8080:80/tcp",
            ]
        );
        assert!(change(&is, &is).is_empty());
        // Who may reach something named may not reach all there is.
        let isolated = NetworkConfig::isolated();
        let named = isolated.clone().allow_host("a.example").unwrap();
        assert_eq!(change(&isolated, &named), ["allowed host: a.example"]);
        assert_eq!(
            change(&NetworkConfig::public(), &named),
            [
                "removed may reach: public addresses",
                "allowed host: a.example"
            ]
        );
    }
}
