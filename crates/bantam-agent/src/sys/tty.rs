//! Pseudo-terminals by descriptor: no path of the guest is trusted but `/dev/ptmx`.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use bantam_protocol::Size;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::Mode;
use nix::sys::termios::{InputFlags, SetArg, tcgetattr, tcsetattr};

/// Opens a pseudo-terminal of the given size: the non-blocking master and the slave.
///
/// # Errors
/// As the kernel says.
pub(crate) fn open_pty(size: Size) -> nix::Result<(OwnedFd, OwnedFd)> {
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let master = open("/dev/ptmx", flags | OFlag::O_NONBLOCK, Mode::empty())?;
    let unlocked: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads one int, which outlives the call.
    Errno::result(unsafe {
        libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked)
    })?;
    // SAFETY: TIOCGPTPEER takes open flags by value and touches no memory.
    let slave =
        Errno::result(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags.bits()) })?;
    // SAFETY: the kernel has just returned this descriptor and no one else has it.
    let slave = unsafe { OwnedFd::from_raw_fd(slave) };
    set_size(&master, size)?;
    // Erasing a character must erase all its bytes.
    let mut attributes = tcgetattr(&slave)?;
    attributes.input_flags |= InputFlags::IUTF8;
    tcsetattr(&slave, SetArg::TCSANOW, &attributes)?;
    Ok((master, slave))
}

/// Sets a terminal's size; its foreground process group gets SIGWINCH if it changes.
///
/// # Errors
/// As the kernel says.
pub(crate) fn set_size(tty: &impl AsFd, size: Size) -> nix::Result<()> {
    let size = libc::winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCSWINSZ reads one winsize, which outlives the call.
    Errno::result(unsafe {
        libc::ioctl(tty.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size)
    })
    .map(drop)
}

/// Bytes that can be read from a pipe now.
///
/// # Errors
/// As the kernel says.
pub(crate) fn readable_bytes(pipe: &impl AsFd) -> nix::Result<usize> {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int, which outlives the call.
    Errno::result(unsafe {
        libc::ioctl(pipe.as_fd().as_raw_fd(), libc::FIONREAD, &raw mut count)
    })?;
    Ok(usize::try_from(count).unwrap_or_default())
}
