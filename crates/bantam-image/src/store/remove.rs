//! Removing images and what is left of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;

use super::lease::Retired;
use super::list::{Entry, Named, read_dir, source_path, space, users};
use super::resolve::STORE_LOCK;
use super::work::Lock;
use super::{Image, Store, WorkDir, files, work};
use crate::error::{Error, Result};
use crate::progress::Progress;

/// What [`Store::remove`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// References that mean nothing any more.
    pub names: Vec<String>,
    /// Digests of images that are gone.
    pub images: Vec<String>,
    /// Disk space that is free again, in bytes.
    pub bytes_freed: u64,
}

/// What [`Store::prune`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// References that mean nothing any more.
    pub names: Vec<String>,
    /// Digests of images that are gone.
    pub images: Vec<String>,
    /// How many blobs are gone.
    pub blobs: usize,
    /// Digests of images that would have gone, had they not been in use.
    pub in_use: Vec<String>,
    /// Disk space that is free again, in bytes.
    pub bytes_freed: u64,
}

impl Store {
    /// Holds an image in the store for `owner`, although no process uses it, until [`Store::unpin`]. An owner has one
    /// pin.
    ///
    /// # Errors
    /// If the store cannot be written.
    pub fn pin(&self, image: &Image, owner: &str) -> Result<()> {
        self.remember("pins", owner, &image.digest)
    }

    /// Takes an owner's pin away, if it has one.
    ///
    /// # Errors
    /// If the store cannot be written.
    pub fn unpin(&self, owner: &str) -> Result<()> {
        match fs::remove_file(self.pointer("pins", owner)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::path("remove", &self.pointer("pins", owner))(e))
            }
            _ => Ok(()),
        }
    }

    /// Removes what `name` means (see [`Store::inspect`]): of an image with several names only that name, otherwise
    /// the image with the blobs that are its alone. A digest removes the image with all its names.
    ///
    /// Waits while other processes add to the store.
    ///
    /// # Errors
    /// [`Error::NoSuchImage`]; [`Error::InUse`], and then nothing is removed.
    pub fn remove(&self, name: &str, progress: &dyn Progress) -> Result<Removed> {
        // Fails without a lock, so that a wrong name makes no store.
        self.look_up(name)?;
        let _removing = self.removing(progress)?;
        let (meant, named) = self.look_up(name)?;
        let refs = self.pointers("refs")?;
        let pins = self.pointers("pins")?;
        let mut going = Vec::new();
        for entry in meant {
            let stays = refs
                .iter()
                .any(|r| r.means(&entry.digest) && !named.iter().any(|n| n.path == r.path));
            if !stays {
                let retired = retire(&entry, &pins)?.map_err(|user| Error::InUse {
                    image: name.to_owned(),
                    user,
                })?;
                going.push((entry, retired));
            }
        }
        let mut removed = Removed {
            names: forget(&named)?,
            ..Removed::default()
        };
        let mut blobs = BTreeSet::new();
        for (entry, retired) in going {
            blobs.extend(
                entry
                    .content()
                    .into_iter()
                    .flat_map(|content| content.blobs())
                    .map(|blob| blob.digest.clone()),
            );
            removed.images.push(entry.digest.to_string());
            removed.bytes_freed = removed
                .bytes_freed
                .saturating_add(self.delete(&entry, retired)?);
        }
        let (_, bytes) = self.sweep(|digest| blobs.contains(digest))?;
        removed.bytes_freed = removed.bytes_freed.saturating_add(bytes);
        Ok(removed)
    }

    /// Removes what nothing refers to: images without a name (those that were run from archives and directories among
    /// them), blobs without an image, work of killed processes; with `all`, every image. What is in use or pinned stays.
    ///
    /// Waits while other processes add to the store.
    ///
    /// # Errors
    /// If the store cannot be written.
    pub fn prune(&self, all: bool, progress: &dyn Progress) -> Result<Pruned> {
        if !self.dir.exists() {
            return Ok(Pruned::default());
        }
        let _removing = self.removing(progress)?;
        let refs = self.pointers("refs")?;
        let pins = self.pointers("pins")?;
        let mut pruned = Pruned::default();
        for entry in self.entries()? {
            let named = || refs.iter().filter(|r| r.means(&entry.digest));
            if entry.record.is_some() && !all && named().next().is_some() {
                continue;
            }
            let Ok(retired) = retire(&entry, &pins)? else {
                pruned.in_use.push(entry.digest.to_string());
                continue;
            };
            pruned.names.extend(forget(named())?);
            pruned.images.push(entry.digest.to_string());
            let bytes = self.delete(&entry, retired)?;
            pruned.bytes_freed = pruned.bytes_freed.saturating_add(bytes);
        }
        let (blobs, bytes) = self.sweep(|_| true)?;
        pruned.blobs = blobs;
        pruned.bytes_freed = pruned.bytes_freed.saturating_add(bytes);
        pruned.names.extend(self.forget_stale()?);
        let bytes = self.tidy()?;
        pruned.bytes_freed = pruned.bytes_freed.saturating_add(bytes);
        Ok(pruned)
    }

    /// The right to remove, which nobody has who adds.
    fn removing(&self, progress: &dyn Progress) -> Result<Lock> {
        work::lock(&self.dir, STORE_LOCK, || {
            progress.message("another process is adding images or removing some; waiting for it");
        })
    }

    /// Removes an image and tells how much space that frees.
    fn delete(&self, entry: &Entry, retired: Retired) -> Result<u64> {
        let work = WorkDir::new(&self.dir)?;
        let bytes = space(&entry.dir)?;
        let gone = work.path().join("image");
        // All of it goes from sight at once; what a killed process leaves of it is dead work.
        fs::rename(&entry.dir, gone).map_err(Error::path("remove", &entry.dir))?;
        drop(retired);
        Ok(bytes)
    }

    /// Removes blobs that no image uses, of those that `which` tells by digest, and everything that is no blob.
    fn sweep(&self, which: impl Fn(&str) -> bool) -> Result<(usize, u64)> {
        let users: BTreeMap<String, usize> = users(&self.entries()?);
        let (mut count, mut bytes) = (0, 0_u64);
        for (path, digest) in self.all_blobs()? {
            let name = digest.map(|digest| digest.to_string()).unwrap_or_default();
            if users.contains_key(&name) || !which(&name) {
                continue;
            }
            let freed = space(&path)?;
            unlink(&path)?;
            count += 1;
            bytes = bytes.saturating_add(freed);
        }
        Ok((count, bytes))
    }

    /// Removes names of images that are gone, and what is known of files that are.
    fn forget_stale(&self) -> Result<Vec<String>> {
        let entries = self.entries()?;
        let stale = |named: &Named| !entries.iter().any(|entry| named.means(&entry.digest));
        let mut refs = self.pointers("refs")?;
        refs.retain(&stale);
        let mut sources = self.pointers("sources")?;
        sources.retain(|named| {
            let path = named.pointer.as_ref().map(|p| source_path(&p.key));
            stale(named) || path.is_none_or(|path| !Path::new(path).exists())
        });
        forget(&sources)?;
        forget(&refs)
    }

    /// Removes dead work, and lock files: whoever takes one of them holds the lock on the store first.
    fn tidy(&self) -> Result<u64> {
        let tmp = self.dir.join("tmp");
        let before = space(&tmp)?;
        drop(WorkDir::new(&self.dir)?);
        crate::registry::remove_partials(&self.dir, std::time::Duration::ZERO);
        let bytes = before.saturating_sub(space(&tmp)?);
        for path in read_dir(&self.dir.join("locks"))? {
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .unwrap_or("");
            if ["sha256-", "sha512-", "blob-"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
            {
                unlink(&path)?;
            }
        }
        Ok(bytes)
    }
}

/// The right to remove an image, or who uses it.
fn retire(entry: &Entry, pins: &[Named]) -> Result<Result<Retired, String>> {
    if let Some(pin) = pins.iter().find(|pin| pin.means(&entry.digest)) {
        let owner = pin.pointer.as_ref().map_or("", |pointer| &pointer.key);
        return Ok(Err(owner.to_owned()));
    }
    let retired = Retired::take(&entry.dir.join("rootfs.erofs"))?;
    Ok(retired.ok_or_else(|| "a running machine or another process".to_owned()))
}

/// Removes pointers and tells the references among them, each once.
fn forget<'a>(named: impl IntoIterator<Item = &'a Named>) -> Result<Vec<String>> {
    let mut names = BTreeSet::new();
    for named in named {
        unlink(&named.path)?;
        names.extend(named.reference().map(|(name, _)| name.to_owned()));
        if let Some(dir) = named.path.parent() {
            files::sync_dir(dir)?;
        }
    }
    Ok(names.into_iter().collect())
}

fn unlink(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map_err(Error::path("remove", path)),
    }
}
