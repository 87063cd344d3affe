//! Leases: an image that is used is not removed.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use super::work::Lock;
use crate::error::{Error, Result};

/// A shared lock on an image's root file system, until it and its clones are dropped. The system drops it with the
/// process that holds it; it needs no permission to write.
#[derive(Clone)]
pub(super) struct Lease(#[expect(dead_code, reason = "held, not read")] Arc<Lock>);

impl Lease {
    /// Leases the file and tells its length; `None` if it is not there.
    pub(super) fn take(rootfs: &Path) -> Result<Option<(Self, u64)>> {
        loop {
            let Some(file) = open(rootfs)? else {
                return Ok(None);
            };
            // Someone who is about to remove it holds the lock for a moment only.
            file.lock_shared().map_err(Error::path("lock", rootfs))?;
            let lock = Lock::held(file);
            let held = lock
                .file()
                .metadata()
                .map_err(Error::path("look at", rootfs))?;
            match fs::metadata(rootfs) {
                Ok(there) if (there.dev(), there.ino()) == (held.dev(), held.ino()) => {
                    return Ok(Some((Self(Arc::new(lock)), held.len())));
                }
                // Removed, and perhaps made again, between opening and locking.
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(e) => return Err(Error::path("look at", rootfs)(e)),
            }
        }
    }
}

/// The right to remove an image: nobody leases it, and nobody can while this is held.
pub(super) struct Retired(#[expect(dead_code, reason = "held, not read")] Option<Lock>);

impl Retired {
    /// `None` while someone leases the image.
    pub(super) fn take(rootfs: &Path) -> Result<Option<Self>> {
        let Some(file) = open(rootfs)? else {
            return Ok(Some(Self(None)));
        };
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(Some(Lock::held(file))))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(Error::path("lock", rootfs)(e)),
        }
    }
}

fn open(rootfs: &Path) -> Result<Option<File>> {
    match File::open(rootfs) {
        Ok(file) => Ok(Some(file)),
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(None)
        }
        Err(e) => Err(Error::path("open", rootfs)(e)),
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lease")
    }
}

/// Images are equal whoever uses them.
impl PartialEq for Lease {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Lease {}
