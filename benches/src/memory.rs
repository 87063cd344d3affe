//! Resident memory, from `/proc`.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::Error;

/// What a process has in memory, in KiB.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    guest: u64,
    /// Of it, what is no file's.
    guest_anonymous: u64,
    /// By the name of the mapping.
    beside: BTreeMap<String, u64>,
    private: u64,
}

/// What has neither a file nor a name: heaps, buffers, stacks of threads.
const ANONYMOUS: &str = "[anonymous]";

/// One mapping of a process.
struct Mapping<'a> {
    range: Range<u64>,
    name: &'a str,
    resident: u64,
    /// Of these, what is this process's alone: no file's, and nobody else's.
    anonymous: u64,
    /// Writable and made without reserving memory for it, as guest memory is.
    unreserved: bool,
}

impl Mapping<'_> {
    fn kib(&self) -> u64 {
        (self.range.end - self.range.start) >> 10
    }
}

impl Usage {
    /// Guest memory is a mapping of a memfd, or, natively, mappings without a gap that are together
    /// its size: into the RAM, kernel and initramfs are mapped. An allocator's may lie behind it.
    pub(crate) fn of(pid: u32, guest_mib: u32) -> Result<Self, Error> {
        let path = PathBuf::from(format!("/proc/{pid}/smaps"));
        let text = fs::read_to_string(&path).map_err(Error::file("reading", &path))?;
        Ok(Self::parse(&text, u64::from(guest_mib) << 10))
    }

    fn parse(smaps: &str, guest_kib: u64) -> Self {
        let mappings = mappings(smaps);
        let runs = mappings.chunk_by(|one, next| {
            one.range.end == next.range.start && one.unreserved && next.unreserved
        });
        let mut usage = Self::default();
        for run in runs {
            let kib: u64 = run.iter().map(Mapping::kib).sum();
            // Of several machines, RAM may lie beside RAM.
            let machines = kib.checked_div(guest_kib).unwrap_or(0);
            let mut ram_kib = if run.iter().all(|m| m.unreserved) {
                machines * guest_kib
            } else {
                0
            };
            for mapping in run {
                let is_ram = ram_kib > 0;
                ram_kib = ram_kib.saturating_sub(mapping.kib());
                if is_ram || mapping.name.starts_with("/memfd:memory-backend") {
                    usage.guest += mapping.resident;
                    usage.guest_anonymous += mapping.anonymous;
                } else {
                    let name = mapping.name.to_owned();
                    *usage.beside.entry(name).or_default() += mapping.resident;
                    usage.private += mapping.anonymous;
                }
            }
        }
        usage
    }

    /// What is beside the guest's memory and would not be there without this process, in KiB: not
    /// programs' and libraries' pages, which are in the host's page cache once for all.
    pub(crate) fn private_kib(&self) -> u64 {
        self.private
    }

    /// Guest memory that is not shared with other machines by a file.
    pub(crate) fn guest_anonymous_kib(&self) -> u64 {
        self.guest_anonymous
    }

    pub(crate) fn guest_mib(&self) -> f64 {
        self.guest as f64 / 1024.0
    }

    pub(crate) fn beside_guest_kib(&self) -> u64 {
        self.beside.values().sum()
    }

    pub(crate) fn beside_guest_mib(&self) -> f64 {
        self.beside_guest_kib() as f64 / 1024.0
    }

    /// What is beside the guest's memory, by the mapped file's name without its folder, in KiB.
    pub(crate) fn mappings(self) -> BTreeMap<String, u64> {
        let mut files = BTreeMap::new();
        for (path, kib) in self.beside {
            let name = path.rsplit('/').next().unwrap_or(&path);
            *files.entry(name.to_owned()).or_default() += kib;
        }
        files
    }
}

fn mappings(smaps: &str) -> Vec<Mapping<'_>> {
    let mut mappings: Vec<Mapping<'_>> = Vec::new();
    for line in smaps.lines() {
        if let Some(range) = range(line) {
            mappings.push(Mapping {
                range,
                // ADDRESSES MODE OFFSET DEVICE INODE NAME
                name: line.split_ascii_whitespace().nth(5).unwrap_or(ANONYMOUS),
                resident: 0,
                anonymous: 0,
                unreserved: false,
            });
        } else if let Some(mapping) = mappings.last_mut() {
            if let Some(resident) = field(line, "Rss:") {
                mapping.resident = resident;
            } else if let Some(anonymous) = field(line, "Anonymous:") {
                mapping.anonymous = anonymous;
            } else if let Some(flags) = line.strip_prefix("VmFlags:") {
                let has = |wanted| flags.split_ascii_whitespace().any(|flag| flag == wanted);
                mapping.unreserved = has("nr") && has("wr");
            }
        }
    }
    mappings
}

fn range(line: &str) -> Option<Range<u64>> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(number(start)?..number(end)?)
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
5500000000-5500001000 r-xp 00000000 08:01 7 /usr/bin/x-y\n\
Size:                 64 kB\nRss:                  32 kB\nAnonymous: 0 kB\nVmFlags: rd ex\n\
7f0000000000-7f0008000000 rw-s 00000000 00:01 5 /memfd:memory-backend-memfd (deleted)\n\
Size:             131072 kB\nRss:                4096 kB\nVmFlags: rd wr sh\n\
7f1000000000-7f1001000000 rw-p 00000000 00:00 0 \n\
Rss:                2048 kB\nAnonymous: 2048 kB\nVmFlags: rd wr nr\n\
7f1001000000-7f1002000000 rw-p 00000000 08:01 9 /usr/share/bantam/vmlinux\n\
Rss:                1024 kB\nAnonymous: 24 kB\nVmFlags: rd wr nr\n\
7f1002000000-7f1010000000 rw-p 00000000 00:00 0 \n\
Rss:                1024 kB\nAnonymous: 1024 kB\nVmFlags: rd wr nr\n\
7f1010000000-7f1010002000 rw-p 00000000 00:00 0 \n\
Rss:                   8 kB\nAnonymous: 8 kB\nVmFlags: rd wr nr\n\
7f1010002000-7f1014000000 ---p 00000000 00:00 0 \n\
Rss:                   0 kB\nAnonymous: 0 kB\nVmFlags: mr mw nr\n";
        let usage = Usage::parse(smaps, 256 << 10);
        assert_eq!(
            usage,
            Usage {
                guest: 8192,
                guest_anonymous: 3096,
                beside: BTreeMap::from([
                    ("/usr/bin/x-y".to_owned(), 32),
                    (ANONYMOUS.to_owned(), 8)
                ]),
                private: 8,
            }
        );
    }

    #[test]
    fn this_process_has_a_parent_and_memory() {
        assert!(parent(std::process::id()).is_some());
        assert!(anonymous_kib().unwrap() > 0);
    }
}
