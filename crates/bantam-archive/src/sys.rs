//! What differs between operating systems.

use std::os::fd::BorrowedFd;

/// The usual umask, where the process's own cannot be had.
const USUAL_UMASK: u32 = 0o022;

/// The mode bits that the process does not want set. The system call that tells them sets them,
/// too, for all threads, so they are read elsewhere.
#[cfg(target_os = "linux")]
pub(crate) fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("Umask:"))
        .and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok())
        .unwrap_or(USUAL_UMASK)
}

/// The mode bits that the process does not want set.
#[cfg(not(target_os = "linux"))]
pub(crate) fn umask() -> u32 {
    USUAL_UMASK
}

/// Filesystems that the kernel makes up: what they hold belongs to the running system and is
/// no one's files. From linux/magic.h.
#[cfg(target_os = "linux")]
const MADE_UP: [u32; 12] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x1cd1,      // devpts
    0x1980_0202, // mqueue
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xcafe_4a11, // bpf
    0x6265_6570, // configfs
    0x4249_4e4d, // binfmt_misc
];

/// Whether a directory is of a filesystem that the kernel makes up.
#[cfg(target_os = "linux")]
pub(crate) fn is_made_up(dir: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(dir)
        .is_ok_and(|stat| u32::try_from(stat.f_type).is_ok_and(|kind| MADE_UP.contains(&kind)))
}

/// Whether a directory is of a filesystem that the kernel makes up.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_made_up(_dir: BorrowedFd<'_>) -> bool {
    false
}

/// Makes a FIFO.
///
/// # Errors
/// As the kernel says.
#[cfg(target_os = "linux")]
pub(crate) fn make_fifo(
    parent: BorrowedFd<'_>,
    name: &std::ffi::OsStr,
    mode: rustix::fs::Mode,
) -> Result<(), rustix::io::Errno> {
    rustix::fs::mkfifoat(parent, name, mode)
}

/// Makes a FIFO.
///
/// # Errors
/// Always: there is no call for one in an open directory.
#[cfg(not(target_os = "linux"))]
pub(crate) fn make_fifo(
    _parent: BorrowedFd<'_>,
    _name: &std::ffi::OsStr,
    _mode: rustix::fs::Mode,
) -> Result<(), rustix::io::Errno> {
    Err(rustix::io::Errno::NOTSUP)
}
