//! Unfinished work and locks.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::files::{create, make_dir, open_or_create};
use crate::error::{Error, Result};

/// A directory of this process in the store's `tmp`. Removed when dropped, or by others once this process is dead.
pub(crate) struct WorkDir {
    dir: TempDir,
    /// Held as long as the work lasts; its release is what tells others that it is over.
    _lock: Lock,
}

/// A lock on a file, until dropped, or its process is dead.
pub(crate) struct Lock(File);

impl Lock {
    /// Takes charge of a lock that is held.
    pub(super) fn held(file: File) -> Self {
        Self(file)
    }

    pub(super) fn file(&self) -> &File {
        &self.0
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough: a program that another thread is just starting has a copy of the descriptor for a
        // moment, and the lock with it.
        let _ = self.0.unlock();
    }
}

impl WorkDir {
    pub(crate) fn new(store: &Path) -> Result<Self> {
        let tmp = store.join("tmp");
        make_dir(&tmp)?;
        // One process at a time looks around and makes a directory, so that none is seen before its lock is held.
        let _tidy = lock(store, "tmp", || {})?;
        remove_dead(&tmp);
        let dir = tempfile::Builder::new()
            .prefix("work-")
            .tempdir_in(&tmp)
            .map_err(Error::path("make a directory in", &tmp))?;
        let path = dir.path().join("lock");
        let lock = create(&path)?;
        lock.lock().map_err(Error::path("lock", &path))?;
        Ok(Self {
            dir,
            _lock: Lock::held(lock),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn create(&self, name: &str) -> Result<File> {
        create(&self.path().join(name))
    }

    /// The directory that becomes an image's.
    pub(super) fn image_dir(&self) -> PathBuf {
        self.path().join("image")
    }

    /// The files that [`erofs::DataArea`](crate::erofs::DataArea) wants.
    pub(super) fn image_and_spool(&self) -> Result<(File, File)> {
        make_dir(&self.image_dir())?;
        Ok((self.create("image/rootfs.erofs")?, self.create("spool")?))
    }
}

/// Removes directories whose process holds no lock on them any more.
fn remove_dead(tmp: &Path) {
    let Ok(entries) = fs::read_dir(tmp) else {
        return;
    };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let dead = match File::open(path.join("lock")) {
            Ok(lock) => lock.try_lock().is_ok(),
            // Killed before it had a lock.
            Err(e) => e.kind() == io::ErrorKind::NotFound,
        };
        if dead {
            tracing::info!(path = %path.display(), "removing work that a dead process left");
            if let Err(error) = fs::remove_dir_all(&path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove work that a dead process left");
            }
        }
    }
}

/// Takes the lock called `name`, calling `waiting` once if someone else has it. It is held until it is dropped.
pub(crate) fn lock(store: &Path, name: &str, waiting: impl FnOnce()) -> Result<Lock> {
    take(store, name, waiting, File::try_lock, File::lock)
}

/// As [`lock`], beside others who take it shared.
pub(super) fn lock_shared(store: &Path, name: &str, waiting: impl FnOnce()) -> Result<Lock> {
    take(
        store,
        name,
        waiting,
        File::try_lock_shared,
        File::lock_shared,
    )
}

fn take(
    store: &Path,
    name: &str,
    waiting: impl FnOnce(),
    now: impl FnOnce(&File) -> Result<(), TryLockError>,
    later: impl FnOnce(&File) -> io::Result<()>,
) -> Result<Lock> {
    let locks = store.join("locks");
    make_dir(&locks)?;
    let path = locks.join(name);
    let file = open_or_create(&path)?;
    match now(&file) {
        Ok(()) => return Ok(Lock::held(file)),
        Err(TryLockError::WouldBlock) => waiting(),
        Err(TryLockError::Error(e)) => return Err(Error::path("lock", &path)(e)),
    }
    later(&file).map_err(Error::path("lock", &path))?;
    Ok(Lock::held(file))
}
