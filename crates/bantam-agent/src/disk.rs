//! The machine's own disk, an ext4 file system that keeps what is written: mounting it,
//! growing it to the size the host gave it, and leaving it clean.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use nix::unistd::{AccessFlags, access, chdir, chroot, fchdir};

use crate::boot::{StepFailed, mount_at};
use crate::log;
use crate::reserve::{self, GivenWay};
use crate::sys::disk::{freeze, resize_ext4};

/// The second disk; without one what is written stays in memory.
const DEVICE: &str = "/dev/vdb";

/// Where it is mounted in the initramfs.
pub(crate) const MOUNT_POINT: &str = "/disk";

/// `discard`: what is deleted leaves the host's file, too. Access times are left as they
/// are: the overlay above decides on them (`relatime`), whatever is said here.
const OPTIONS: &str = "discard";

/// Not worth growing for. Of what is left over at the end of a disk the kernel may be
/// unable to make a block group, and every boot would try in vain.
const LEAST_GROWTH: u64 = 128 << 20;

/// The mounted disk.
pub(crate) struct Disk {
    /// The initramfs's root, from where the mount can still be reached after the boot.
    initramfs: OwnedFd,
    /// It was full, and what was kept for that case gave way.
    given_way: Option<GivenWay>,
}

/// Mounts the disk if there is one, and grows what is on it to the disk's size.
///
/// # Errors
/// The mount as the step that failed, in words for who owns the disk.
pub(crate) fn mount_disk() -> Result<Option<Disk>, StepFailed> {
    if access(DEVICE, AccessFlags::F_OK).is_err() {
        return Ok(None);
    }
    mount_at(DEVICE, MOUNT_POINT, "ext4", MsFlags::empty(), OPTIONS).map_err(|failed| {
        failed.explained(
            "the machine's disk is not an ext4 file system, or is damaged \
             (on the host, `e2fsck -f` on the disk's file checks it)",
        )
    })?;
    // A disk that stays small is of more use than a machine that does not start.
    if let Err(error) = grow() {
        log(&format!("grow the disk: {error}"));
    }
    // The mount of the overlay tells whether it did without.
    let disk = open_dir_for_reading(MOUNT_POINT).map_err(StepFailed::at("open the disk"))?;
    let given_way = reserve::give_way(&disk).unwrap_or_else(|error| {
        log(&format!("free the disk's reserve: {error}"));
        None
    });
    let initramfs = open_dir("/").map_err(StepFailed::at("open the initramfs"))?;
    Ok(Some(Disk {
        initramfs,
        given_way,
    }))
}

/// Grows the file system if the disk is larger. Costs three system calls if it is not.
fn grow() -> io::Result<()> {
    let mut device = File::open(DEVICE)?;
    let mut superblock = [0; SUPERBLOCK_LEN];
    device.read_exact_at(&mut superblock, SUPERBLOCK_AT)?;
    let (blocks, block_size) = size_of(&superblock);
    let bytes = device.seek(SeekFrom::End(0))?;
    let wanted = bytes / block_size;
    if wanted.saturating_sub(blocks) < LEAST_GROWTH / block_size {
        return Ok(());
    }
    Ok(resize_ext4(&open_dir_for_reading(MOUNT_POINT)?, wanted)?)
}

/// Linux `Documentation/filesystems/ext4/super.rst`.
const SUPERBLOCK_AT: u64 = 1024;
const SUPERBLOCK_LEN: usize = 0x154;

/// The number of blocks in a file system and a block's size in bytes.
fn size_of(superblock: &[u8; SUPERBLOCK_LEN]) -> (u64, u64) {
    const INCOMPAT_64BIT: u32 = 0x80;
    let field = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&superblock[at..at + 4]);
        u32::from_le_bytes(bytes)
    };
    let high = if field(0x60) & INCOMPAT_64BIT == 0 {
        0
    } else {
        field(0x150)
    };
    let blocks = u64::from(high) << 32 | u64::from(field(4));
    // It is mounted, so the kernel has found this to be at most 6; a mask cannot panic.
    (blocks, 1024 << (field(0x18) & 7))
}

impl Disk {
    /// Keeps room for the next boot, as far as there is any.
    pub(crate) fn keep_reserve(&self) {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        // In the initramfs, where the disk is mounted.
        let path = MOUNT_POINT.trim_start_matches('/');
        let disk = openat(&self.initramfs, path, flags, Mode::empty());
        if let Err(error) = disk.and_then(|disk| reserve::keep(&disk)) {
            log(&format!("keep a reserve on the disk: {error}"));
        }
        if let Some(Err(error)) = self.given_way.as_ref().map(GivenWay::take_back) {
            log(&format!("have ext4 keep back what it did: {error}"));
        }
    }

    /// Leaves the image's file system with everything mounted below it, and makes the disk
    /// read-only, which writes back the rest. The processes are gone by now; this one can do
    /// nothing afterwards but power off.
    ///
    /// # Errors
    /// The step that failed. The next boot then needs the journal.
    pub(crate) fn leave(&self) -> Result<(), StepFailed> {
        // The overlay and, for example, a loop device whose file is in it hold the disk for
        // writing. With the tree all of them go that no stuck process keeps.
        if let Err(failed) = self.leave_root() {
            log(&failed.to_string());
        }
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        let none = None::<&str>;
        match mount(none, MOUNT_POINT, none, flags, none) {
            Ok(()) => Ok(()),
            // A frozen file system is whole, too.
            Err(Errno::EBUSY) => open_dir_for_reading(MOUNT_POINT)
                .and_then(|root| freeze(&root))
                .map_err(StepFailed::at("freeze the busy disk")),
            Err(error) => Err(StepFailed::at("remount the disk read-only")(error)),
        }
    }

    fn leave_root(&self) -> Result<(), StepFailed> {
        let root = open_dir("/").map_err(StepFailed::at("open the root filesystem"))?;
        fchdir(&self.initramfs)
            .and_then(|()| chroot("."))
            .map_err(StepFailed::at("go back to the initramfs"))?;
        // It lies over the initramfs's root, so that no path leads to it.
        fchdir(&root)
            .and_then(|()| umount2(".", MntFlags::MNT_DETACH))
            .map_err(StepFailed::at("unmount the root filesystem"))?;
        drop(root);
        chdir("/").map_err(StepFailed::at("leave the root filesystem"))
    }
}

fn open_dir(path: &str) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    open(path, flags, Mode::empty())
}

fn open_dir_for_reading(path: &str) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    open(path, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_read_from_both_halves_of_the_count() {
        let mut superblock = [0; SUPERBLOCK_LEN];
        superblock[4..8].copy_from_slice(&0x8000_0000_u32.to_le_bytes());
        superblock[0x18] = 2;
        superblock[0x150] = 1;
        assert_eq!(size_of(&superblock), (0x8000_0000, 4096));
        superblock[0x60] = 0x80;
        assert_eq!(size_of(&superblock), (0x1_8000_0000, 4096));
    }
}
