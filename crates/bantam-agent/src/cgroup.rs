//! One cgroup for each command: to kill all of it, and to know what memory did to it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

/// Where cgroup2 is mounted.
pub(crate) const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// The controllers a command's cgroup gets, as far as the kernel has them.
const CONTROLLERS: [&str; 4] = ["cpu", "io", "memory", "pids"];

/// The directory under which commands get theirs.
pub(crate) struct CgroupRoot {
    dir: OwnedFd,
}

impl CgroupRoot {
    /// Opens the mounted cgroup2 and turns its controllers on for children.
    ///
    /// # Errors
    /// As the kernel says; without the directory there are no cgroups.
    pub(crate) fn open() -> nix::Result<Self> {
        let root = Self {
            dir: nix::fcntl::open(CGROUP_ROOT, directory(), Mode::empty())?,
        };
        let available = read_small(&root.dir, "cgroup.controllers");
        let mut enable = String::new();
        for controller in CONTROLLERS {
            if available.split_whitespace().any(|name| name == controller) {
                enable.push('+');
                enable.push_str(controller);
                enable.push(' ');
            }
        }
        if !enable.is_empty() {
            write_small(&root.dir, "cgroup.subtree_control", enable.trim_end())?;
        }
        Ok(root)
    }

    /// Makes the cgroup of exec number `id`.
    ///
    /// # Errors
    /// As the kernel says.
    pub(crate) fn create(&self, id: u64) -> nix::Result<Cgroup> {
        let name = format!("exec-{id}");
        mkdirat(&self.dir, name.as_str(), Mode::from_bits_truncate(0o755))?;
        match openat(&self.dir, name.as_str(), directory(), Mode::empty()) {
            Ok(dir) => Ok(Cgroup { name, dir }),
            Err(error) => {
                let _ = unlinkat(&self.dir, name.as_str(), UnlinkatFlags::RemoveDir);
                Err(error)
            }
        }
    }

    /// Removes a cgroup; gives it back while processes are left in it.
    pub(crate) fn remove(&self, group: Cgroup) -> Option<Cgroup> {
        match unlinkat(&self.dir, group.name.as_str(), UnlinkatFlags::RemoveDir) {
            Err(Errno::EBUSY) => Some(group),
            _ => None,
        }
    }
}

/// The cgroup of one command.
pub(crate) struct Cgroup {
    name: String,
    dir: OwnedFd,
}

impl Cgroup {
    /// Sends SIGKILL to every process in it, however it got there.
    pub(crate) fn kill(&self) {
        // It fails only when the cgroup is being removed, that is, empty.
        let _ = write_small(&self.dir, "cgroup.kill", "1");
    }

    /// Whether the kernel killed a process in it for want of memory.
    pub(crate) fn oom_killed(&self) -> bool {
        counts_oom_kill(&read_small(&self.dir, "memory.events"))
    }
}

impl AsFd for Cgroup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

fn counts_oom_kill(memory_events: &str) -> bool {
    memory_events
        .lines()
        .filter_map(|line| line.strip_prefix("oom_kill "))
        .any(|count| count != "0")
}

fn directory() -> OFlag {
    OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC
}

/// Reads a control file; one that is missing is empty. They are a few lines long.
fn read_small(dir: &OwnedFd, name: &str) -> String {
    let mut text = String::new();
    if let Ok(fd) = openat(dir, name, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()) {
        let _ = File::from(fd).take(4096).read_to_string(&mut text);
    }
    text
}

fn write_small(dir: &OwnedFd, name: &str, text: &str) -> nix::Result<()> {
    let fd = openat(dir, name, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty())?;
    File::from(fd)
        .write_all(text.as_bytes())
        .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_counted_oom_kill_is_one() {
        let quiet = "low 0\nhigh 3\nmax 9\noom 2\noom_kill 0\noom_group_kill 0\n";
        assert!(!counts_oom_kill(quiet));
        assert!(counts_oom_kill(&quiet.replace("oom_kill 0", "oom_kill 1")));
        assert!(!counts_oom_kill(""));
    }
}
