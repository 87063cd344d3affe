//! Room on the machine's disk that its guest cannot fill.
//!
//! An overlay makes its work directory anew at each mount. Where a full disk keeps it from that it comes
//! up read-only, or not at all, and then nothing in the guest can make room any more. So some blocks
//! and inodes are held by files outside the overlay, which give way to a mount on a full disk and are
//! made again after it: the mount needs no more than what its last work directory held.
//!
//! ext4 itself keeps clusters back, for what it must write and cannot refuse: of a large file system
//! more than of a small one. One that was grown after its mount keeps back more at the next, and what
//! is free by then may be less than that. It keeps back none while the overlay is mounted.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, FallocateFlags, OFlag, fallocate, openat};
use nix::mount::MsFlags;
use nix::sys::stat::{Mode, fstatat, mkdirat};
use nix::sys::statvfs::{Statvfs, fstatvfs};
use nix::unistd::{UnlinkatFlags, syncfs, unlinkat};

use crate::boot::mount_at;

/// The directory, beside the overlay's.
const DIR: &str = "reserve";

/// Its files, and how long each is in bytes.
const FILES: usize = 8;
const FILE_LEN: i64 = 32 << 10;

/// A disk with less room than this, in bytes or inodes, counts as full.
const LOW_BYTES: u64 = 1 << 20;
const LOW_INODES: u64 = 64;

/// How many clusters ext4 keeps back of the machine's disk.
const KEPT_BACK: &str = "/sys/fs/ext4/vdb/reserved_clusters";

/// What gave way.
pub(crate) struct GivenWay {
    /// The clusters that ext4 kept back.
    kept_back: String,
}

/// Frees the reserve on the disk whose root is `disk`, and what ext4 keeps back, if the disk is full;
/// `None` if it is not.
///
/// # Errors
/// As the kernel says. A reserve that is not there is none.
pub(crate) fn give_way(disk: &OwnedFd) -> io::Result<Option<GivenWay>> {
    if !is_full(&fstatvfs(disk)?) {
        return Ok(None);
    }
    remove(disk)?;
    // Blocks that were freed can be had when the journal's transaction is over.
    syncfs(disk)?;
    mount_at("sysfs", "/sys", "sysfs", MsFlags::empty(), "").map_err(io::Error::other)?;
    let kept_back = fs::read_to_string(KEPT_BACK)?;
    fs::write(KEPT_BACK, "0")?;
    Ok(Some(GivenWay { kept_back }))
}

impl GivenWay {
    /// Has ext4 keep back what it did.
    ///
    /// # Errors
    /// As the kernel says.
    pub(crate) fn take_back(&self) -> io::Result<()> {
        fs::write(KEPT_BACK, self.kept_back.trim())
    }
}

fn is_full(disk: &Statvfs) -> bool {
    let bytes = disk.blocks_available().saturating_mul(disk.fragment_size());
    bytes < LOW_BYTES || disk.files_available() < LOW_INODES
}

fn remove(disk: &OwnedFd) -> nix::Result<()> {
    for number in 0..FILES {
        match unlinkat(disk, &*name(number), UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Makes the reserve of the disk whose root is `disk`, or what is missing of it.
///
/// # Errors
/// As the kernel says: there may be no room for all of it.
pub(crate) fn keep(disk: &OwnedFd) -> nix::Result<()> {
    // The last one is there only with the others.
    let last = name(FILES.saturating_sub(1));
    if fstatat(disk, &*last, AtFlags::AT_SYMLINK_NOFOLLOW).is_ok() {
        return Ok(());
    }
    match mkdirat(disk, DIR, Mode::from_bits_truncate(0o700)) {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(error) => return Err(error),
    }
    for number in 0..FILES {
        make(disk, &name(number))?;
    }
    Ok(())
}

fn make(disk: &OwnedFd, name: &str) -> nix::Result<()> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let file = match openat(disk, name, flags, Mode::from_bits_truncate(0o600)) {
        Ok(file) => file,
        Err(Errno::EEXIST) => return Ok(()),
        Err(error) => return Err(error),
    };
    fallocate(&file, FallocateFlags::empty(), 0, FILE_LEN).inspect_err(|_| {
        // An empty one keeps no room, and would be taken for one that does.
        let _ = unlinkat(disk, name, UnlinkatFlags::NoRemoveDir);
    })
}

fn name(number: usize) -> String {
    format!("{DIR}/{number}")
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_reserve_holds_blocks_and_inodes_and_is_made_whole_again() {
        let dir = tempfile::tempdir().unwrap();
        let disk = OwnedFd::from(File::open(dir.path()).unwrap());
        let held = || -> Vec<u64> {
            let entries = fs::read_dir(dir.path().join(DIR)).unwrap();
            let sizes = entries.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512);
            sizes.collect()
        };
        let is_whole = || held().len() == FILES && held().iter().all(|bytes| *bytes >= 32 << 10);
        remove(&disk).unwrap();
        keep(&disk).unwrap();
        assert!(is_whole(), "{:?}", held());
        keep(&disk).unwrap();
        assert!(is_whole(), "{:?}", held());
        // As after a boot that found room for a part of it.
        unlinkat(&disk, &*name(FILES - 1), UnlinkatFlags::NoRemoveDir).unwrap();
        keep(&disk).unwrap();
        assert!(is_whole(), "{:?}", held());
        remove(&disk).unwrap();
        assert!(held().is_empty());
    }
}
