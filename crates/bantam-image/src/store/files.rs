//! Reading and publishing files of the store.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::convert::LayerBlobs;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::limits::MAX_DOCUMENT;
use crate::manifest::Layer;

/// Makes a directory and its parents for this user only.
pub(crate) fn make_dir(path: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(Error::path("make directory", path))
}

/// Opens a new file for reading and writing.
pub(crate) fn create(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(Error::path("create", path))
}

/// Opens a file for reading and writing, and makes it if it is missing.
pub(crate) fn open_or_create(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(Error::path("open", path))
}

/// Reads a small JSON file. `None` when it is missing or not what this version writes.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    // Most fit, and are read with one call.
    let mut bytes = Vec::with_capacity(4096);
    match File::open(path) {
        Ok(file) => file
            .take(MAX_DOCUMENT * 2)
            .read_to_end(&mut bytes)
            .map_err(Error::path("read", path))?,
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(None);
        }
        Err(e) => return Err(Error::path("open", path)(e)),
    };
    match serde_json::from_slice(&bytes) {
        Ok(value) => Ok(Some(value)),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "ignoring a damaged file in the image store");
            Ok(None)
        }
    }
}

pub(super) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let bytes = serde_json::to_vec(value)
        .map_err(|e| Error::malformed(path.display().to_string(), e.to_string()))?;
    write_synced(&mut create(path)?, &bytes).map_err(Error::path("write", path))
}

/// Gives finished, synced work its name, durably.
pub(crate) fn publish(from: &Path, to: &Path) -> Result<()> {
    let parent = to
        .parent()
        .ok_or_else(|| Error::path("publish", to)(io::ErrorKind::InvalidInput.into()))?;
    make_dir(parent)?;
    if from.is_dir() {
        sync_dir(from)?;
    }
    fs::rename(from, to).map_err(Error::path("publish", to))?;
    sync_dir(parent)
}

pub(super) fn sync_dir(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|dir| dir.sync_all())
        .map_err(Error::path("sync", path))
}

/// Writes all of `bytes` and syncs.
pub(super) fn write_synced(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.sync_all()
}

/// Manifests, configurations and layers as registries hold them.
pub(crate) struct BlobDir(PathBuf);

impl BlobDir {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self(dir)
    }

    pub(crate) fn path(&self, digest: &Digest) -> PathBuf {
        self.0.join(digest.algorithm().name()).join(digest.hex())
    }

    /// Whether the blob is here with that size. Its digest was checked before it got its name, and is again
    /// when it is used.
    pub(crate) fn has(&self, digest: &Digest, size: u64) -> bool {
        fs::metadata(self.path(digest)).is_ok_and(|meta| meta.is_file() && meta.len() == size)
    }
}

impl LayerBlobs for BlobDir {
    fn open(&self, _: usize, layer: &Layer) -> Result<Box<dyn Read + Send + '_>> {
        let blob = layer
            .blob
            .as_ref()
            .ok_or_else(|| Error::malformed("image store", "a layer without a blob"))?;
        let path = self.path(&blob.digest()?);
        Ok(Box::new(
            File::open(&path).map_err(Error::path("open", &path))?,
        ))
    }
}
