//! Descriptors that a process was started with.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::RawFd;

/// Closes every descriptor above standard error.
///
/// A program that is started to live on by itself must not hold what its starter's caller happened
/// to have open: somebody may wait for the end of a pipe among it. To be called first thing in
/// `main`, while the process has one thread and has opened nothing itself.
///
/// # Errors
/// If the process cannot see its own descriptors.
pub fn close_inherited_files() -> io::Result<()> {
    let entries: Vec<RawFd> = fs::read_dir("/proc/self/fd")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&fd| fd > 2)
        .collect();
    for fd in entries {
        // The one through which the directory was read is closed by now.
        if fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok() {
            // SAFETY: it was open before this process ran any code of its own, so nothing in it
            // owns it; there is no other thread that could open or close any.
            unsafe { rustix::io::close(fd) };
        }
    }
    Ok(())
}
