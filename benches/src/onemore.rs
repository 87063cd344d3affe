//! What one more machine costs its host beside the guest's memory, by the host kernel's own account.
//!
//! A control group is charged for whatever its processes make the kernel take, for themselves and
//! within the kernel: page tables, KVM's among them, stacks, sockets, structures. Pages of a file
//! are charged to who brought them into memory, so a first machine brings in what all share, and
//! those after it pay for what is theirs.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

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
/// Which accounts the groups below one have.
const CONTROL: &str = "cgroup.subtree_control";
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

/// The account of memory of the groups below the root, there while this is.
struct Account {
    /// Nobody had turned it on before.
    ours: bool,
}

impl Account {
    fn open() -> Result<Self, Error> {
        let root = Path::new(GROUPS);
        let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        if !has_memory(&controllers) {
            return Err(Error::Missing(format!(
                "{GROUPS} has no account of memory (cgroup version 2)"
            )));
        }
        drop(Group::new("probe").map_err(or_missing)?);
        let control = root.join(CONTROL);
        let on = fs::read_to_string(&control).map_err(Error::file("reading", &control))?;
        let ours = !has_memory(&on);
        if ours {
            write(&control, "+memory")?;
        }
        Ok(Self { ours })
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if self.ours {
            // Fails, and rightly, if a group has turned it on for those below itself meanwhile.
            let _ = write(&Path::new(GROUPS).join(CONTROL), "-memory");
        }
    }
}

/// Who may not make groups at all lacks what this needs.
fn or_missing(error: Error) -> Error {
    match error {
        Error::File { source, .. }
            if matches!(
                source.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            Error::Missing(format!(
                "control groups may not be made here (root may): {source}"
            ))
        }
        error => error,
    }
}

/// Is memory among these controllers?
fn has_memory(controllers: &str) -> bool {
    controllers.split_whitespace().any(|one| one == "memory")
}

/// A control group, there while this is.
struct Group(PathBuf);

impl Group {
    fn new(name: &str) -> Result<Self, Error> {
        let group = Path::new(GROUPS).join(format!("{}{name}", prefix()));
        fs::create_dir(&group).map_err(Error::file("creating", &group))?;
        Ok(Self(group))
    }

    /// Takes this process in, for what it asks for from now on.
    fn enter(&self) -> Result<(), Error> {
        enter(&self.0)
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
        // One that stays is empty and does no harm.
        let _ = while_busy(|| fs::remove_dir(&self.0));
    }
}

/// Tries again for up to a second: a machine is free for others before its process is gone, which
/// has to leave its group.
fn while_busy(mut remove: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    for _ in 0..100 {
        match remove() {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                thread::sleep(Duration::from_millis(10));
            }
            done => return done,
        }
    }
    remove()
}

fn enter(group: &Path) -> Result<(), Error> {
    write(&group.join("cgroup.procs"), "0")
}

/// The group in which this process is.
fn current() -> Result<PathBuf, Error> {
    let path = Path::new("/proc/self/cgroup");
    let text = fs::read_to_string(path).map_err(Error::file("reading", path))?;
    let group = unified(&text)
        .ok_or_else(|| Error::Other(format!("{} has no line of version 2", path.display())))?;
    Ok(Path::new(GROUPS).join(group))
}

/// The group of version 2 in a list of a process's groups, below the root.
fn unified(groups: &str) -> Option<&str> {
    groups.lines().find_map(|line| line.strip_prefix("0::/"))
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
    let _account = Account::open()?;
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
    let before = current()?;
    let group = Group::new("own")?;
    group.enter()?;
    let further = further_own(bench, &group);
    enter(&before)?;
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

    #[test]
    fn the_group_of_a_process_is_the_one_of_version_2() {
        let scope = "9:name=systemd:/a\n1:cpu:/\n0::/user.slice/session-1.scope\n";
        assert_eq!(unified(scope), Some("user.slice/session-1.scope"));
        assert_eq!(unified("0::/\n"), Some(""));
        assert_eq!(unified("4:memory:/a0::/b\n"), None);
    }

    #[test]
    fn who_may_not_make_groups_lacks_something_and_other_errors_are_failures() {
        let of = |kind: io::ErrorKind| {
            let error = Error::file("creating", Path::new(GROUPS))(kind.into());
            matches!(or_missing(error), Error::Missing(_))
        };
        assert!(of(io::ErrorKind::PermissionDenied) && of(io::ErrorKind::ReadOnlyFilesystem));
        assert!(!of(io::ErrorKind::AlreadyExists) && !of(io::ErrorKind::StorageFull));
    }

    #[test]
    fn a_controller_is_told_by_its_whole_name() {
        assert!(has_memory("cpu memory pids\n"));
        assert!(!has_memory("cpu memory_recursiveprot\n"));
    }

    #[test]
    fn a_busy_group_is_removed_later_and_other_errors_end_it() {
        let mut answers = vec![
            Ok(()),
            Err(io::ErrorKind::ResourceBusy.into()),
            Err(io::ErrorKind::ResourceBusy.into()),
        ];
        while_busy(|| answers.pop().unwrap()).unwrap();
        assert!(answers.is_empty());
        let mut calls = 0;
        let gone = while_busy(|| {
            calls += 1;
            Err(io::ErrorKind::NotFound.into())
        });
        assert_eq!(gone.unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(calls, 1);
    }
}
