//! Finding the guest kernel and the initramfs.

use std::env;
use std::path::PathBuf;

use bantam_vmm::GuestKernel;

use crate::Error;
use crate::home::variable;

const KERNEL: &str = "vmlinux";
const INITRAMFS: &str = "initramfs.cpio";
const DISK_TEMPLATE: &str = "disk.ext4";

/// The directories in which the guest's files are looked for, best first:
/// `$BANTAM_GUEST_DIR` alone if it is set; otherwise `guest` beside the running program and
/// beside its directory, `share/bantam` beside its directory, and
/// `$XDG_DATA_HOME/bantam/guest` (`~/.local/share/bantam/guest`).
#[must_use]
pub fn guest_search_path() -> Vec<PathBuf> {
    if let Some(dir) = variable("BANTAM_GUEST_DIR") {
        return vec![dir];
    }
    let mut dirs = Vec::new();
    if let Ok(program) = env::current_exe()
        && let Some(dir) = program.parent()
    {
        dirs.push(dir.join("guest"));
        if let Some(parent) = dir.parent() {
            dirs.push(parent.join("guest"));
            dirs.push(parent.join("share/bantam"));
        }
    }
    let data = variable("XDG_DATA_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".local/share")));
    dirs.extend(data.map(|data| data.join("bantam/guest")));
    dirs
}

/// The first directory of [`guest_search_path`] that holds what is still needed. A kernel
/// that is given replaces only the kernel.
///
/// # Errors
/// [`Error::GuestNotFound`] naming every directory that was tried.
pub fn find_guest(kernel: Option<PathBuf>) -> Result<GuestKernel, Error> {
    let searched = guest_search_path();
    for dir in &searched {
        let candidate = GuestKernel {
            kernel: kernel.clone().unwrap_or_else(|| dir.join(KERNEL)),
            initramfs: dir.join(INITRAMFS),
        };
        if candidate.initramfs.is_file() && (kernel.is_some() || candidate.kernel.is_file()) {
            return Ok(candidate);
        }
    }
    Err(Error::GuestNotFound { searched })
}

/// The first template for [`disk::create`](crate::disk::create) in [`guest_search_path`].
///
/// # Errors
/// [`Error::DiskTemplateNotFound`] naming every directory that was tried.
pub fn find_disk_template() -> Result<PathBuf, Error> {
    let searched = guest_search_path();
    let mut candidates = searched.iter().map(|dir| dir.join(DISK_TEMPLATE));
    match candidates.find(|file| file.is_file()) {
        Some(file) => Ok(file),
        None => Err(Error::DiskTemplateNotFound { searched }),
    }
}
