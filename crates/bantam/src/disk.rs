//! A machine's own disk: the ext4 file system that keeps what the machine writes.
//!
//! The disk is one raw, sparse file. It is made from a template, the beginning of a small empty
//! file system (`images/disk`), and is larger than that file system: the machine's kernel grows
//! it to the disk's size at the first start, and again after [`grow`]. No program of the host has
//! to know ext4 for that.
//!
//! While a machine runs it holds an exclusive lock on the file; two machines never write to one
//! disk, and [`grow`] refuses one that is in use.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Error;

/// The smallest disk, in GiB.
pub const MIN_GIB: u32 = 1;
/// The largest disk, in GiB: 1 TiB. The time in which Linux grows an ext4 file system rises with
/// the square of its size; for 20 GiB nobody notices, for 1 TiB it is seconds of the first start.
pub const MAX_GIB: u32 = 1024;

const GIB_SHIFT: u32 = 30;

/// More than any template has; a file that is larger is something else.
const MAX_TEMPLATE: u64 = 16 << 20;

/// Blocks of the template that are zero are left out of the file.
const BLOCK: usize = 4096;

/// Where an ext4 superblock has its magic number, and what it is.
const MAGIC_AT: usize = 1024 + 56;
const MAGIC: [u8; 2] = 0xef53_u16.to_le_bytes();

/// Makes a disk of `size_gib` GiB at `path` out of the template at `template` (see
/// [`find_disk_template`](crate::find_disk_template)). It takes some 100 KiB of the host's disk
/// until a machine writes to it. Only its owner can read it.
///
/// The file appears whole or not at all, and what it holds is on the host's disk by then. A crash
/// leaves at most a `.NAME.partial-*` beside it.
///
/// # Errors
/// [`Error::DiskSize`] outside [`MIN_GIB`]..=[`MAX_GIB`]; [`Error::Disk`] if `path` exists, the
/// template is none, or the host's file system refuses.
pub fn create(path: &Path, size_gib: u32, template: &Path) -> Result<(), Error> {
    let bytes = checked_size(size_gib)?;
    let template = read_template(template).map_err(failed("cannot use the template", template))?;
    let partial = partial_path(path);
    let written = write_partial(&partial, &template, bytes)
        // A link, unlike a rename, never replaces what is there.
        .and_then(|()| std::fs::hard_link(&partial, path))
        .and_then(|()| sync_parent(path));
    let removed = std::fs::remove_file(&partial);
    match written {
        Ok(()) => removed.map_err(failed("cannot remove", &partial)),
        Err(error) => Err(failed("cannot create the disk", path)(error)),
    }
}

/// Makes the disk at `path` larger; the machine's file system follows at its next start. A disk
/// that has this size already is left alone.
///
/// # Errors
/// [`Error::DiskSize`] outside [`MIN_GIB`]..=[`MAX_GIB`]; [`Error::Disk`] if a machine uses the
/// disk, if it is larger than that, or the host's file system refuses.
pub fn grow(path: &Path, size_gib: u32) -> Result<(), Error> {
    let bytes = checked_size(size_gib)?;
    grow_file(path, bytes).map_err(failed("cannot grow the disk", path))
}

fn grow_file(path: &Path, bytes: u64) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => {
            io::Error::new(ErrorKind::ResourceBusy, "a running machine uses it")
        }
        TryLockError::Error(error) => error,
    })?;
    let current = file.metadata()?.len();
    if current > bytes {
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            format!("it has {current} bytes, more than {bytes}, and a disk never becomes smaller"),
        ));
    }
    if current < bytes {
        file.set_len(bytes)?;
        file.sync_all()?;
    }
    // A copy of the descriptor in a child that is just being started must not keep the lock.
    file.unlock()
}

/// Refuses a size that no disk can have.
pub(crate) fn check_size(size_gib: u32) -> Result<(), Error> {
    checked_size(size_gib).map(drop)
}

fn checked_size(size_gib: u32) -> Result<u64, Error> {
    if (MIN_GIB..=MAX_GIB).contains(&size_gib) {
        Ok(u64::from(size_gib) << GIB_SHIFT)
    } else {
        Err(Error::DiskSize { gib: size_gib })
    }
}

fn read_template(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_TEMPLATE + 1)
        .read_to_end(&mut bytes)?;
    let magic = bytes.get(MAGIC_AT..MAGIC_AT + MAGIC.len());
    if magic != Some(&MAGIC) || u64::try_from(bytes.len()).is_ok_and(|len| len > MAX_TEMPLATE) {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            "it is not the beginning of a small ext4 file system",
        ));
    }
    Ok(bytes)
}

fn write_partial(path: &Path, template: &[u8], bytes: u64) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.set_len(bytes)?;
    let mut offset = 0;
    for block in template.chunks(BLOCK) {
        if block.iter().any(|byte| *byte != 0) {
            file.write_all_at(block, offset)?;
        }
        offset += BLOCK as u64;
    }
    file.sync_all()
}

/// A name beside `path` that no other call has.
fn partial_path(path: &Path) -> PathBuf {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".partial-{}-{call}", std::process::id()));
    path.with_file_name(name)
}

/// Makes a new name last.
fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Disk { what, path, source }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::testing::names;

    const GIB: u64 = 1 << 30;

    /// A directory with a template of five blocks, of which two are zero.
    fn template() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = vec![0; 5 * BLOCK];
        bytes[MAGIC_AT..MAGIC_AT + 2].copy_from_slice(&MAGIC);
        bytes[BLOCK] = 1;
        bytes[4 * BLOCK + 7] = 4;
        let path = dir.path().join("template");
        std::fs::write(&path, bytes).unwrap();
        (dir, path)
    }

    fn reason(error: &Error) -> String {
        format!("{error}: {}", error.source().unwrap())
    }

    #[test]
    fn a_new_disk_is_the_template_then_zeroes_and_takes_little_room() {
        let (dir, template) = template();
        let path = dir.path().join("disk");
        create(&path, 20, &template).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!(meta.len(), 20 * GIB);
        assert_eq!(meta.mode() & 0o777, 0o600);
        assert!(meta.blocks() * 512 <= 64 << 10, "{} blocks", meta.blocks());
        let expected = std::fs::read(&template).unwrap();
        let mut found = vec![9; expected.len() + BLOCK];
        let file = File::open(&path).unwrap();
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found[..expected.len()] == expected[..]);
        assert!(found[expected.len()..].iter().all(|byte| *byte == 0));
        assert_eq!(names(dir.path()).len(), 2);
    }

    #[test]
    fn what_is_at_the_path_already_is_not_replaced() {
        let (dir, template) = template();
        let path = dir.path().join("disk");
        std::fs::write(&path, "somebody's").unwrap();
        let error = create(&path, 1, &template).unwrap_err();
        assert!(reason(&error).contains(path.to_str().unwrap()), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"somebody's");
        assert_eq!(names(dir.path()).len(), 2, "a partial file stayed");
    }

    #[test]
    fn a_template_that_is_none_is_named_and_leaves_nothing() {
        let (dir, template) = template();
        for bytes in [&b""[..], b"not ext4", &[0; 8192]] {
            std::fs::write(&template, bytes).unwrap();
            let error = create(&dir.path().join("disk"), 1, &template).unwrap_err();
            assert!(
                reason(&error).contains(template.to_str().unwrap()),
                "{error}"
            );
        }
        std::fs::remove_file(&template).unwrap();
        assert!(create(&dir.path().join("disk"), 1, &template).is_err());
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn sizes_outside_the_limits_are_refused() {
        let (dir, template) = template();
        let path = dir.path().join("disk");
        for gib in [0, MAX_GIB + 1, u32::MAX] {
            let error = create(&path, gib, &template).unwrap_err();
            assert!(matches!(error, Error::DiskSize { .. }), "{error:?}");
            assert!(matches!(grow(&path, gib), Err(Error::DiskSize { .. })));
        }
        assert_eq!(names(dir.path()).len(), 1);
    }

    #[test]
    fn a_disk_grows_keeps_what_it_holds_and_never_shrinks() {
        let (dir, template) = template();
        let path = dir.path().join("disk");
        create(&path, 2, &template).unwrap();
        grow(&path, 2).unwrap();
        grow(&path, 5).unwrap();
        let error = grow(&path, 4).unwrap_err();
        assert!(reason(&error).contains("smaller"), "{}", reason(&error));
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!(meta.len(), 5 * GIB);
        assert!(meta.blocks() * 512 <= 64 << 10);
        let mut byte = [0];
        let file = File::open(&path).unwrap();
        file.read_exact_at(&mut byte, 4 * BLOCK as u64 + 7).unwrap();
        assert_eq!(byte, [4]);
    }

    #[test]
    fn a_disk_in_use_does_not_grow() {
        let (dir, template) = template();
        let path = dir.path().join("disk");
        create(&path, 1, &template).unwrap();
        let machine = OpenOptions::new().write(true).open(&path).unwrap();
        machine.try_lock().unwrap();
        let error = grow(&path, 2).unwrap_err();
        assert!(reason(&error).contains("uses it"), "{}", reason(&error));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), GIB);
        machine.unlock().unwrap();
        grow(&path, 2).unwrap();
        // The lock is gone with the call.
        machine.try_lock().unwrap();
    }
}
