//! Descriptors that a process is started with.
#![allow(unsafe_code)]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Lets a command have its standard streams and no other descriptor of this process, whoever
/// opened them.
///
/// A process that is started to live on by itself must not hold what its starter's caller happened
/// to have open: somebody may wait for the end of a pipe among it.
pub fn inherit_nothing(command: &mut Command) {
    let close_on_exec = || {
        // SAFETY: the call takes three numbers and touches no memory.
        let done = unsafe {
            libc::syscall(
                libc::SYS_close_range,
                3_u32,
                u32::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            )
        };
        match done {
            0 => Ok(()),
            // Linux before 5.11 leaves open what was left open; nothing of ours was.
            _ => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
                error if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                error => Err(error),
            },
        }
    };
    // SAFETY: the closure makes one system call: no allocation, no lock; that is what is allowed
    // between fork and exec of a process with threads.
    unsafe { command.pre_exec(close_on_exec) };
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_descriptor_that_was_left_open_stays_here() {
        // A number that nothing in the child gets by itself.
        let file = File::open("/dev/null").unwrap();
        let file = rustix::io::fcntl_dupfd_cloexec(&file, 200).unwrap();
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
        let listed = |prepare: fn(&mut Command)| {
            let mut command = Command::new("/bin/ls");
            prepare(command.arg("/proc/self/fd"));
            let output = command.output().unwrap();
            let names = String::from_utf8(output.stdout).unwrap();
            names
                .split_whitespace()
                .any(|fd| fd == file.as_raw_fd().to_string())
        };
        assert!(listed(|_| {}), "the test shows nothing");
        assert!(!listed(inherit_nothing));
    }
}
