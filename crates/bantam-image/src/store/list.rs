//! What is in the store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::content::Content;
use super::{BlobInfo, Pointer, Record, Store, files};
use crate::config::{ImageConfig, or_default};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::platform::Platform;
use crate::reference::Reference;

/// An image of the store. Sizes are bytes of disk space, holes not counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoredImage {
    /// See [`Image::digest`](super::Image::digest).
    pub digest: String,
    /// The references that mean it.
    pub names: Vec<String>,
    /// `OS/ARCH`.
    pub platform: String,
    /// The root file system to boot from.
    pub rootfs_bytes: u64,
    /// The manifest, configuration and layers that are kept for it.
    pub blob_bytes: u64,
    /// What other images use as well of `blob_bytes`.
    pub shared_bytes: u64,
    /// When it was put into the store, in unix seconds.
    pub added_at: u64,
    /// When the last of its names was pulled or loaded, in unix seconds; `None` without names.
    pub named_at: Option<u64>,
    /// Whether its blobs are here, so that it can be saved.
    pub can_save: bool,
    /// What holds it in the store although no process uses it; see [`Store::pin`].
    pub pinned_by: Vec<String>,
}

impl StoredImage {
    /// All disk space that it takes, shared or not.
    pub fn bytes(&self) -> u64 {
        self.rootfs_bytes.saturating_add(self.blob_bytes)
    }
}

/// All there is to say about an image of the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImageDetails {
    /// As [`Store::list`] tells it.
    #[serde(flatten)]
    pub image: StoredImage,
    /// The file to boot from.
    pub rootfs: PathBuf,
    /// The archives it was read from.
    pub sources: Vec<String>,
    /// When it was built, as its configuration says (RFC 3339).
    pub created: Option<String>,
    /// What runs in it.
    pub config: ImageConfig,
    /// Its manifest, where kept.
    pub manifest: Option<BlobInfo>,
    /// Its configuration, where kept.
    pub config_blob: Option<BlobInfo>,
    /// Its layers from the bottom, where kept.
    pub layers: Vec<BlobInfo>,
}

/// The disk space of the store in bytes, holes not counted, every blob once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Root file systems.
    pub rootfs_bytes: u64,
    /// Blobs that images use.
    pub blob_bytes: u64,
    /// Blobs that no image uses (any more, or yet).
    pub unused_blob_bytes: u64,
    /// Unfinished work of running and of killed processes.
    pub unfinished_bytes: u64,
}

impl Usage {
    /// All of it.
    pub fn bytes(&self) -> u64 {
        [
            self.blob_bytes,
            self.unused_blob_bytes,
            self.unfinished_bytes,
        ]
        .into_iter()
        .fold(self.rootfs_bytes, u64::saturating_add)
    }
}

/// A directory below `images/v1`.
pub(super) struct Entry {
    pub(super) digest: Digest,
    pub(super) dir: PathBuf,
    /// `None` if it is damaged.
    pub(super) record: Option<Record>,
}

impl Entry {
    fn rootfs(&self) -> PathBuf {
        self.dir.join("rootfs.erofs")
    }

    pub(super) fn content(&self) -> Option<&Content> {
        self.record.as_ref()?.content.as_ref()
    }
}

/// One of `refs`, `sources` or `pins`.
pub(super) struct Named {
    pub(super) path: PathBuf,
    /// `None` if it is damaged.
    pub(super) pointer: Option<Pointer>,
}

impl Named {
    pub(super) fn means(&self, digest: &Digest) -> bool {
        self.pointer
            .as_ref()
            .is_some_and(|pointer| pointer.digest == digest.to_string())
    }

    /// The reference and platform of one of `refs`.
    pub(super) fn reference(&self) -> Option<(&str, &str)> {
        self.pointer.as_ref()?.key.rsplit_once(' ')
    }
}

impl Store {
    /// The images of the store, the newest first.
    ///
    /// # Errors
    /// If the store cannot be read. Damaged images are left out.
    pub fn list(&self) -> Result<Vec<StoredImage>> {
        let entries = self.entries()?;
        let refs = self.pointers("refs")?;
        let pins = self.pointers("pins")?;
        let users = users(&entries);
        let mut images = Vec::new();
        for entry in &entries {
            if let Some(record) = &entry.record {
                images.push(self.describe(entry, record, &refs, &pins, &users)?);
            }
        }
        images.sort_by(|a, b| {
            (b.added_at, &a.names, &a.digest).cmp(&(a.added_at, &b.names, &b.digest))
        });
        Ok(images)
    }

    /// All about the image that `name` means: a reference, a digest, or the start of a digest's hex.
    ///
    /// # Errors
    /// [`Error::NoSuchImage`].
    pub fn inspect(&self, name: &str) -> Result<ImageDetails> {
        let (entry, record) = self.look_up_one(name)?;
        let entries = self.entries()?;
        let (refs, pins) = (self.pointers("refs")?, self.pointers("pins")?);
        let image = self.describe(&entry, &record, &refs, &pins, &users(&entries))?;
        let sources = self.pointers("sources")?;
        let sources = sources.iter().filter(|s| s.means(&entry.digest));
        let paths: BTreeSet<String> = sources
            .filter_map(|s| Some(source_path(&s.pointer.as_ref()?.key).to_owned()))
            .collect();
        let (manifest, config_blob, layers) = match record.content {
            Some(content) => (Some(content.manifest), Some(content.config), content.layers),
            None => (None, None, Vec::new()),
        };
        let created = match &config_blob {
            Some(blob) => self.created(blob)?,
            None => None,
        };
        Ok(ImageDetails {
            image,
            rootfs: entry.rootfs(),
            sources: paths.into_iter().collect(),
            created,
            config: record.config,
            manifest,
            config_blob,
            layers,
        })
    }

    /// The disk space that the store takes.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn usage(&self) -> Result<Usage> {
        let entries = self.entries()?;
        let users = users(&entries);
        let mut usage = Usage::default();
        for entry in &entries {
            usage.rootfs_bytes = usage.rootfs_bytes.saturating_add(space(&entry.dir)?);
        }
        for (path, digest) in self.all_blobs()? {
            let used = digest.is_some_and(|digest| users.contains_key(&digest.to_string()));
            let sum = if used {
                &mut usage.blob_bytes
            } else {
                &mut usage.unused_blob_bytes
            };
            *sum = sum.saturating_add(space(&path)?);
        }
        usage.unfinished_bytes = space(&self.dir.join("tmp"))?;
        Ok(usage)
    }

    fn describe(
        &self,
        entry: &Entry,
        record: &Record,
        refs: &[Named],
        pins: &[Named],
        users: &BTreeMap<String, usize>,
    ) -> Result<StoredImage> {
        let (mut blob_bytes, mut shared_bytes) = (0_u64, 0_u64);
        for blob in record.content.iter().flat_map(Content::blobs) {
            let bytes = space(&self.blobs().path(&Digest::parse(&blob.digest)?))?;
            blob_bytes = blob_bytes.saturating_add(bytes);
            if users.get(&blob.digest).is_some_and(|users| *users > 1) {
                shared_bytes = shared_bytes.saturating_add(bytes);
            }
        }
        let named = || refs.iter().filter(|named| named.means(&entry.digest));
        let names: BTreeSet<&str> = named().filter_map(|n| Some(n.reference()?.0)).collect();
        let pinned = pins.iter().filter(|pin| pin.means(&entry.digest));
        let platform = Platform::new(&record.config.os, &record.config.architecture, "");
        Ok(StoredImage {
            digest: record.digest.clone(),
            names: names.into_iter().map(str::to_owned).collect(),
            platform: platform.to_string(),
            rootfs_bytes: space(&entry.dir)?,
            blob_bytes,
            shared_bytes,
            added_at: record.added_at,
            named_at: named().filter_map(|n| Some(n.pointer.as_ref()?.at)).max(),
            can_save: self.has_content(record),
            pinned_by: pinned
                .filter_map(|pin| Some(pin.pointer.as_ref()?.key.clone()))
                .collect(),
        })
    }

    /// What the configuration says of the build.
    fn created(&self, config: &BlobInfo) -> Result<Option<String>> {
        #[derive(Deserialize)]
        struct Created {
            #[serde(default, deserialize_with = "or_default")]
            created: String,
        }
        let path = self.blobs().path(&Digest::parse(&config.digest)?);
        let created = files::read_json::<Created>(&path)?.map(|file| file.created);
        Ok(created.filter(|text| !text.is_empty()))
    }

    /// Every directory of an image.
    pub(super) fn entries(&self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for dir in read_dir(&self.dir.join("images/v1"))? {
            let name = dir.file_name().and_then(|name| name.to_str()).unwrap_or("");
            // Not this program's otherwise, and none of its business.
            let Ok(digest) = Digest::parse(&name.replacen('-', ":", 1)) else {
                continue;
            };
            let record = files::read_json::<Record>(&dir.join("image.json"))?;
            let record = record.filter(|record| {
                record.digest == digest.to_string()
                    && fs::metadata(dir.join("rootfs.erofs"))
                        .is_ok_and(|meta| meta.len() == record.size)
            });
            entries.push(Entry {
                digest,
                dir,
                record,
            });
        }
        Ok(entries)
    }

    pub(super) fn pointers(&self, kind: &str) -> Result<Vec<Named>> {
        let paths = read_dir(&self.dir.join(kind))?;
        let named = paths.into_iter().map(|path| {
            let pointer = files::read_json::<Pointer>(&path)?;
            Ok(Named { path, pointer })
        });
        named.collect()
    }

    /// Every file among the blobs; one that is not named as a blob has no digest.
    pub(super) fn all_blobs(&self) -> Result<Vec<(PathBuf, Option<Digest>)>> {
        let mut blobs = Vec::new();
        for dir in read_dir(&self.dir.join("blobs"))? {
            let algorithm = dir.file_name().and_then(|name| name.to_str()).unwrap_or("");
            for path in read_dir(&dir)? {
                let hex = path
                    .file_name()
                    .and_then(|name| name.to_str())
                    .unwrap_or("");
                let digest = Digest::parse(&format!("{algorithm}:{hex}")).ok();
                blobs.push((path, digest));
            }
        }
        Ok(blobs)
    }

    /// The images that `name` means, and those of `refs` that say so. Several, if the name is for several platforms.
    pub(super) fn look_up(&self, name: &str) -> Result<(Vec<Entry>, Vec<Named>)> {
        let missing = || Error::NoSuchImage {
            image: name.to_owned(),
        };
        let (entries, refs) = (self.entries()?, self.pointers("refs")?);
        let reference = Reference::parse(name);
        if let Ok(reference) = &reference {
            let full = reference.to_string();
            let (named, _): (Vec<_>, Vec<_>) = refs.into_iter().partition(|n| {
                n.reference()
                    .is_some_and(|(reference, _)| reference == full)
            });
            let meant: Vec<_> = entries
                .into_iter()
                .filter(|entry| named.iter().any(|named| named.means(&entry.digest)))
                .collect();
            if !meant.is_empty() {
                return Ok((meant, named));
            }
        }
        let (algorithm, hex) = match (&reference, name.split_once(':')) {
            (Ok(reference), _) if reference.digest().is_some() => {
                let digest = reference.digest().ok_or_else(missing)?;
                (Some(digest.algorithm().name()), digest.hex())
            }
            (_, Some((algorithm, hex))) => (Some(algorithm), hex),
            (_, None) => (None, name),
        };
        if hex.len() < MIN_HEX {
            return reference.and(Err(missing()));
        }
        let meant: Vec<_> = self
            .entries()?
            .into_iter()
            .filter(|entry| {
                algorithm.is_none_or(|name| entry.digest.algorithm().name() == name)
                    && entry.digest.hex().starts_with(hex)
            })
            .collect();
        match meant.len() {
            0 => Err(missing()),
            1 => {
                let mut named = self.pointers("refs")?;
                named.retain(|named| named.means(&meant[0].digest));
                Ok((meant, named))
            }
            _ => Err(Error::Ambiguous {
                source_name: format!("{name} in the image store"),
                names: meant.iter().map(|e| e.digest.to_string()).collect(),
            }),
        }
    }

    /// The one image that `name` means; of several platforms this host's.
    pub(super) fn look_up_one(&self, name: &str) -> Result<(Entry, Record)> {
        let (entries, refs) = self.look_up(name)?;
        let host = Platform::host().to_string();
        let for_host = |entry: &Entry| {
            refs.iter().any(|named| {
                named.means(&entry.digest) && named.reference().is_some_and(|(_, p)| p == host)
            })
        };
        let several = entries.len() > 1;
        let names = entries.iter().map(|e| e.digest.to_string()).collect();
        let chosen = entries
            .into_iter()
            .find(|entry| !several || for_host(entry));
        let Some(mut entry) = chosen else {
            return Err(Error::Ambiguous {
                source_name: format!("{name} in the image store"),
                names,
            });
        };
        match entry.record.take() {
            Some(record) => Ok((entry, record)),
            None => Err(Error::malformed(
                entry.dir.display().to_string(),
                "damaged; pull or load the image again",
            )),
        }
    }
}

/// Fewer digits of a digest are no name.
const MIN_HEX: usize = 6;

/// By how many images each blob is used.
pub(super) fn users(entries: &[Entry]) -> BTreeMap<String, usize> {
    let mut users = BTreeMap::new();
    for blob in entries
        .iter()
        .filter_map(Entry::content)
        .flat_map(Content::blobs)
    {
        *users.entry(blob.digest.clone()).or_insert(0) += 1;
    }
    users
}

/// The path in a key of `sources`.
pub(super) fn source_path(key: &str) -> &str {
    key.rsplit_once(" dev=").map_or(key, |(path, _)| path)
}

/// What is in a directory, by name; nothing if it is not there.
pub(super) fn read_dir(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::path("read directory", dir)(e)),
    };
    let paths: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut paths = paths.map_err(Error::path("read directory", dir))?;
    paths.sort();
    Ok(paths)
}

/// The disk space of a file, or of all files in a directory.
pub(super) fn space(path: &Path) -> Result<u64> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        // Removed meanwhile.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(Error::path("look at", path)(e)),
    };
    if !meta.is_dir() {
        return Ok(meta.blocks().saturating_mul(512));
    }
    let mut sum = 0_u64;
    for path in read_dir(path)? {
        sum = sum.saturating_add(space(&path)?);
    }
    Ok(sum)
}
