//! What one more machine costs its host beside the guest's memory, by the host kernel's own account.
//!
//! A control group is charged for whatever its processes make the kernel take, for themselves and
//! within the kernel: page tables, KVM's among them, stacks, sockets, structures. Pages of a file
//! are charged to who brought them into memory, so a first machine brings in what all share, and
//! those after it pay for what is theirs.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use bantam::{EngineChoice, Home, Machine, MachineName, Machines};

use crate::machine::{self, run_true};
use crate::memory::Usage;
use crate::program::{Bench, MEMORY_MIB};
use crate::report::{Profile, Report, median_of, sorted};
use crate::{Error, Progress};

/// Machines that are started after the first, and stay.
const FURTHER: u32 = 3;
/// Where control groups (version 2) are.
const GROUPS: &str = "/sys/fs/cgroup";
/// Numbers of `memory.stat` that together are all that is charged, and those that are part of
/// `kernel`, by what they are called here.
const WHOLE: [(&str, &str); 3] = [
    ("anon", "anonymous"),
    ("file", "files"),
    ("sock", "socket buffers"),
];
const KERNEL: [(&str, &str); 6] = [
    ("kernel_stack", "kernel: stacks"),
    ("pagetables", "kernel: page tables"),
    ("sec_pagetables", "kernel: KVM's page tables"),
    ("percpu", "kernel: per CPU"),
    ("vmalloc", "kernel: vmalloc"),
    ("slab", "kernel: slab"),
];
const REST: &str = "kernel: other";
const ANONYMOUS: &str = WHOLE[0].1;

/// Bytes by what they are for.
type Parts = BTreeMap<&'static str, u64>;

/// A control group, there while this is.
struct Group(PathBuf);

impl Group {
    fn new(name: &str) -> Result<Self, Error> {
        let root = Path::new(GROUPS);
        let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        if !controllers.split_whitespace().any(|one| one == "memory") {
            return Err(Error::Other(format!(
                "{GROUPS} has no account of memory (cgroup version 2)"
            )));
        }
        write(&root.join("cgroup.subtree_control"), "+memory")?;
        let group = root.join(format!("{}{name}", prefix()));
        fs::create_dir(&group).map_err(Error::file("creating", &group))?;
        Ok(Self(group))
    }

    /// Takes this process in, for what it asks for from now on.
    fn enter(&self) -> Result<(), Error> {
        write(&self.0.join("cgroup.procs"), "0")
    }

    /// What it is charged, in bytes.
    fn charged(&self) -> Result<Parts, Error> {
        let path = self.0.join("memory.stat");
        let text = fs::read_to_string(&path).map_err(Error::file("reading", &path))?;
        parts(&text).ok_or_else(|| Error::Other(format!("{} lacks numbers", path.display())))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // One whose processes are still ending stays, empty; it does no harm.
        let _ = fs::remove_dir(&self.0);
    }
}

fn prefix() -> String {
    format!("bantam-bench-{}-", std::process::id())
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(Error::file("writing", path))
}

fn parts(stat: &str) -> Option<Parts> {
    let number = |name: &str| -> Option<u64> {
        let of = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
        stat.lines().find_map(of)
    };
    let mut parts = Parts::new();
    for (name, called) in WHOLE {
        parts.insert(called, number(name)?);
    }
    let mut rest = number("kernel")?;
    for (name, called) in KERNEL {
        // A kernel older than a number counts it nowhere or in `kernel`.
        let bytes = number(name).unwrap_or(0);
        rest = rest.saturating_sub(bytes);
        parts.insert(called, bytes);
    }
    parts.insert(REST, rest);
    Some(parts)
}

/// Further named machines, each with a process; then further ones of this process's own.
pub(crate) fn measure(bench: &Bench, report: &mut Report, progress: Progress) -> Result<(), Error> {
    progress.say("one more named machine");
    let engine = bench.engine.name();
    add(
        report,
        engine,
        "one more machine: host memory beside the guest's",
        named(bench)?,
    );
    progress.say("one more machine of a program");
    add(
        report,
        engine,
        "one more machine of a program: host memory beside the guest's",
        own(bench)?,
    );
    Ok(())
}

fn add(report: &mut Report, engine: &'static str, name: &str, further: Vec<Parts>) {
    let profiles: Vec<_> = (further.into_iter())
        .map(|parts| Profile {
            name: name.to_owned(),
            engine,
            unit: "bytes",
            total: parts.values().sum(),
            parts: sorted(parts.into_iter().map(|(part, n)| (part.to_owned(), n))),
            ..Profile::default()
        })
        .collect();
    let mib = |profile: &Profile| profile.total as f64 / f64::from(1 << 20);
    report.add(name, engine, "MiB", profiles.iter().map(mib).collect());
    report.profiles.extend(median_of(profiles));
}

/// Named machines, each in a group of its own from its process's first page on.
fn named(bench: &Bench) -> Result<Vec<Parts>, Error> {
    let home = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
    let program =
        std::path::absolute(&bench.program).map_err(Error::file("finding", &bench.program))?;
    // The second word is the machine's name. The process is made within the group, so that what the
    // kernel keeps of a process is charged, too. A shell's child has no input unless it is given.
    let launcher = home.path().join("launcher");
    let script = format!(
        "#!/bin/sh\nset -e\necho $$ >{GROUPS}/{}\"$2\"/cgroup.procs\n\
         exec 3<&0\n'{}' \"$@\" <&3 3<&- &\n",
        prefix(),
        program.display()
    );
    write(&launcher, &script)?;
    fs::set_permissions(&launcher, fs::Permissions::from_mode(0o755))
        .map_err(Error::file("changing", &launcher))?;
    let mut fleet = Fleet {
        machines: Machines::open(&Home::at(home.path())).vmm_program(launcher),
        started: Vec::new(),
    };
    let mut further = Vec::new();
    for number in 0..=FURTHER {
        let name = MachineName::parse(format!("more{number}").as_str())?;
        let group = Group::new(name.as_str())?;
        Machine::builder()
            .name(name.as_str())
            .image_source(bench.image_source()?)
            .memory_mib(MEMORY_MIB)
            .engine(EngineChoice::Only(bench.engine))
            .home(Home::at(home.path()))
            .create()?;
        fleet.started.push((name.clone(), group));
        run_true(&fleet.machines.start(&name)?)?;
        let pid = fleet.machines.inspect(&name)?.pid;
        let pid = pid.ok_or_else(|| Error::Other("the machine has no process".to_owned()))?;
        let charged = fleet.started.last().map(|(_, group)| group.charged());
        if let (Some(charged), 1..) = (charged, number) {
            further.push(without_guest(charged?, guest_bytes(pid)?));
        }
    }
    Ok(further)
}

/// Machines that run at the same time.
struct Fleet {
    machines: Machines,
    started: Vec<(MachineName, Group)>,
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for (name, _) in &self.started {
            // After a failure some may not run; without one there is nothing to remove.
            let _ = self.machines.delete(name);
        }
    }
}

/// Machines in this process.
fn own(bench: &Bench) -> Result<Vec<Parts>, Error> {
    let group = Group::new("own")?;
    group.enter()?;
    let further = further_own(bench, &group);
    write(&Path::new(GROUPS).join("cgroup.procs"), "0")?;
    further
}

fn further_own(bench: &Bench, group: &Group) -> Result<Vec<Parts>, Error> {
    let mut machines = Vec::new();
    let mut further = Vec::new();
    let mut before = Parts::new();
    for number in 0..=FURTHER {
        let machine = machine::start(bench)?;
        run_true(&machine)?;
        machines.push(machine);
        let now = without_guest(group.charged()?, guest_bytes(std::process::id())?);
        if number > 0 {
            let grown = |(part, bytes): (&&'static str, &u64)| {
                let was = before.get(part).copied().unwrap_or(0);
                (*part, bytes.saturating_sub(was))
            };
            further.push(now.iter().map(grown).collect());
        }
        before = now;
    }
    for machine in &machines {
        machine.kill();
    }
    Ok(further)
}

/// Guest memory that the process is charged for: pages that are no file's.
fn guest_bytes(pid: u32) -> Result<u64, Error> {
    Ok(Usage::of(pid, MEMORY_MIB)?.guest_anonymous_kib() << 10)
}

fn without_guest(mut charged: Parts, guest: u64) -> Parts {
    if let Some(anonymous) = charged.get_mut(ANONYMOUS) {
        *anonymous = anonymous.saturating_sub(guest);
    }
    charged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_all_that_is_charged_and_nothing_twice() {
        let stat = "anon 5000\nfile 300\nkernel 1000\nkernel_stack 100\npagetables 200\n\
            sec_pagetables 50\npercpu 0\nsock 7\nvmalloc 20\nshmem 300\nslab_reclaimable 1\n\
            slab 400\nanon_thp 4096\n";
        let found = parts(stat).unwrap();
        assert_eq!(found.values().sum::<u64>(), 5000 + 300 + 1000 + 7);
        assert_eq!(found[REST], 230);
        assert_eq!(without_guest(found, 4500)[ANONYMOUS], 500);
    }

    #[test]
    fn a_group_without_the_numbers_has_no_parts() {
        assert!(parts("anon 5\nfile 3\n").is_none());
    }
}
