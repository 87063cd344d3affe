//! Calls that differ between hosts.

use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Makes a range of a file read as zeros and, where the file system can, take no space.
pub(crate) fn punch_hole(file: &File, offset: u64, len: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::Errno;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(file, flags, offset, len) {
            Ok(()) => return Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(e) => return Err(e.into()),
        }
    }
    write_zeros(file, offset, len)
}

fn write_zeros(file: &File, mut offset: u64, mut len: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let zeros = vec![0; 64 * 1024];
    while len > 0 {
        let n = usize::try_from(len).map_or(zeros.len(), |len| len.min(zeros.len()));
        file.write_all_at(&zeros[..n], offset)?;
        offset += n as u64;
        len -= n as u64;
    }
    Ok(())
}

/// Extended attributes of `name` in `dir`, a symlink's own included. `path` is the same file, for hosts where a
/// path relative to a descriptor cannot be named.
pub(crate) fn xattrs(
    dir: BorrowedFd<'_>,
    name: &CStr,
    path: &Path,
) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    use rustix::fs::{lgetxattr, llistxattr};
    use rustix::io::Errno;

    let by_descriptor = Path::new("/proc/self/fd")
        .join(dir.as_raw_fd().to_string())
        .join(OsStr::from_bytes(name.to_bytes()));
    let path = if cfg!(target_os = "linux") && Path::new("/proc/self/fd").exists() {
        &by_descriptor
    } else {
        path
    };
    let names = match read_sized(|buf| llistxattr(path, buf)) {
        Ok(names) => names,
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Err(e) => return Err(e.into()),
    };
    let mut out = Vec::new();
    for name in names.split(|b| *b == 0).filter(|name| !name.is_empty()) {
        match read_sized(|buf| lgetxattr(path, name, buf)) {
            Ok(value) => out.push((name.to_vec(), value)),
            // Taken away since they were listed.
            Err(Errno::NODATA) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(out)
}

/// Linux's bound on one value and on the list of names.
const MAX_XATTR: usize = 64 * 1024;

fn read_sized(
    mut read: impl FnMut(&mut [u8]) -> rustix::io::Result<usize>,
) -> rustix::io::Result<Vec<u8>> {
    let mut buf = vec![0; 512];
    loop {
        match read(&mut buf) {
            Ok(n) => {
                buf.truncate(n);
                return Ok(buf);
            }
            Err(rustix::io::Errno::RANGE) if buf.len() < MAX_XATTR => buf.resize(MAX_XATTR, 0),
            Err(e) => return Err(e),
        }
    }
}
