//! Requests to a mounted file system.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::libc;

/// `_IOW('f', 16, u64)`, Linux `fs/ext4/ext4.h`.
const EXT4_IOC_RESIZE_FS: libc::Ioctl = 0x4008_6610;
/// `_IOWR('X', 119, int)`, Linux `include/uapi/linux/fs.h`.
const FIFREEZE: libc::Ioctl = 0xc004_5877_u32 as libc::Ioctl;

/// Makes the mounted ext4 file system that `root` is in `blocks` of its blocks large.
///
/// # Errors
/// As the kernel says.
pub(crate) fn resize_ext4(root: &impl AsFd, blocks: u64) -> nix::Result<()> {
    // SAFETY: EXT4_IOC_RESIZE_FS reads one u64, which outlives the call.
    Errno::result(unsafe {
        libc::ioctl(
            root.as_fd().as_raw_fd(),
            EXT4_IOC_RESIZE_FS,
            &raw const blocks,
        )
    })
    .map(drop)
}

/// Writes back the file system that `root` is in and keeps everyone from writing to it.
///
/// # Errors
/// As the kernel says.
pub(crate) fn freeze(root: &impl AsFd) -> nix::Result<()> {
    let unused: libc::c_int = 0;
    // SAFETY: FIFREEZE ignores its argument; it gets one int, which outlives the call.
    Errno::result(unsafe { libc::ioctl(root.as_fd().as_raw_fd(), FIFREEZE, &raw const unused) })
        .map(drop)
}
