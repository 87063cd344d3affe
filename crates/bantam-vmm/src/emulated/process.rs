//! Starting QEMU so that it cannot outlive us.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::io::FdFlags;
use rustix::process::Signal;

/// Starts `program` with `inherited` descriptors under their own numbers.
///
/// The calling thread must live until the child has ended: the kernel kills the child when the
/// thread that started it dies, by whatever cause.
pub(super) fn spawn(program: &Path, args: &[OsString], inherited: &[RawFd]) -> io::Result<Child> {
    let inherited = inherited.to_vec();
    let owner = rustix::process::getpid();
    let mut command = Command::new(program);
    command
        .args(args)
        .env_clear()
        // A terminal's Ctrl-C is for the owner to act on, not for QEMU.
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let prepare = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The owner may have died before the line above took effect.
        if rustix::process::getppid() != Some(owner) {
            return Err(io::Error::from(rustix::io::Errno::SRCH));
        }
        for &fd in &inherited {
            // SAFETY: the numbers come from descriptors that the caller of `spawn` still owns;
            // in the child, after fork, nothing else can close them.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only: no allocation, no lock, no environment; that
    // is what is allowed between fork and exec of a process with threads.
    unsafe { command.pre_exec(prepare) };
    command.spawn()
}
