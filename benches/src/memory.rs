//! Resident memory, from `/proc`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;

/// What a process has in memory, in KiB.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    guest: u64,
    beside: u64,
}

impl Usage {
    /// Guest memory is a mapping of a memfd, or, natively, one of at least its size.
    pub(crate) fn of(pid: u32, guest_mib: u32) -> Result<Self, Error> {
        let path = PathBuf::from(format!("/proc/{pid}/smaps"));
        let text = fs::read_to_string(&path).map_err(Error::file("reading", &path))?;
        Ok(Self::parse(&text, u64::from(guest_mib) << 10))
    }

    fn parse(smaps: &str, guest_kib: u64) -> Self {
        let mut usage = Self::default();
        let mut is_guest = false;
        for line in smaps.lines() {
            if let Some(size) = field(line, "Size:") {
                is_guest = is_guest || size >= guest_kib;
            } else if let Some(resident) = field(line, "Rss:") {
                if is_guest {
                    usage.guest += resident;
                } else {
                    usage.beside += resident;
                }
            } else if line
                .split_once(' ')
                .is_some_and(|(range, _)| range.contains('-'))
            {
                is_guest = line.contains("/memfd:memory-backend");
            }
        }
        usage
    }

    pub(crate) fn guest_mib(&self) -> f64 {
        self.guest as f64 / 1024.0
    }

    pub(crate) fn beside_guest_mib(&self) -> f64 {
        self.beside as f64 / 1024.0
    }
}

fn field(line: &str, name: &str) -> Option<u64> {
    let (value, _) = line.strip_prefix(name)?.trim().split_once(' ')?;
    value.parse().ok()
}

/// This process's memory that is no file's and nobody else's, in KiB.
pub(crate) fn anonymous_kib() -> Result<u64, Error> {
    let path = Path::new("/proc/self/status");
    let text = fs::read_to_string(path).map_err(Error::file("reading", path))?;
    text.lines()
        .find_map(|line| field(line, "RssAnon:"))
        .ok_or_else(|| Error::Other("/proc/self/status has no RssAnon".to_owned()))
}

/// The processes that this one started.
pub(crate) fn children() -> Result<Vec<u32>, Error> {
    children_of(std::process::id())
}

/// The processes that `parent_pid` started.
pub(crate) fn children_of(parent_pid: u32) -> Result<Vec<u32>, Error> {
    let mut all = processes()?;
    all.retain(|pid| parent(*pid) == Some(parent_pid));
    Ok(all)
}

/// All processes of the host.
pub(crate) fn processes() -> Result<Vec<u32>, Error> {
    let proc = Path::new("/proc");
    let entries = fs::read_dir(proc).map_err(Error::file("reading", proc))?;
    Ok(entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect())
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_told_from_the_rest() {
        let smaps = "\
7f0000000000-7f0010000000 rw-s 00000000 00:01 5 /memfd:memory-backend-memfd (deleted)\n\
Size:             131072 kB\nRss:                4096 kB\n\
7f1000000000-7f1010000000 rw-p 00000000 00:00 0 \n\
Size:             262144 kB\nRss:                2048 kB\n\
5500000000-5500001000 r-xp 00000000 08:01 7 /usr/bin/x-y\n\
Size:                 64 kB\nRss:                  32 kB\nVmFlags: rd ex\n";
        let usage = Usage::parse(smaps, 256 << 10);
        assert_eq!(
            usage,
            Usage {
                guest: 6144,
                beside: 32
            }
        );
    }

    #[test]
    fn this_process_has_a_parent_and_memory() {
        assert!(parent(std::process::id()).is_some());
        assert!(anonymous_kib().unwrap() > 0);
    }
}
