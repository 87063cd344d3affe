//! The image store: content-addressed, shared by all processes of a user.
//!
//! ```text
//! images/v1/<digest>/rootfs.erofs   a finished image; a shared lock on it is a lease
//! images/v1/<digest>/image.json     its configuration, size and blobs
//! blobs/<algorithm>/<hex>           manifests, configurations and layers as registries hold them
//! refs/<hash>.json                  what a name last meant, by reference and platform
//! sources/<hash>.json               what a local file held, by path, inode, size and times
//! pins/<hash>.json                  an image that must stay although no process uses it
//! locks/                            one lock file for each thing that is made only once
//! tmp/                              unfinished work; each piece is locked by the process that does it
//! ```
//!
//! Things appear under their names complete and synced, by rename. A process that is killed leaves only its
//! directory in `tmp`, which the next one to work there removes, as it finds it unlocked.
//!
//! # What is kept
//!
//! The blobs of an image that was pulled or loaded stay beside the EROFS file made from them: layers are shared
//! between images, a moved tag fetches only what is new, and [`Store::save`] needs them. An image that was made from
//! a root directory has no blobs, and one that was only run from an archive keeps none: the archive has them.
//! [`Store::list`] tells the space of the two apart, and what of it other images share.
//!
//! # What goes, and when
//!
//! Only [`Store::remove`] and [`Store::prune`] remove anything that is whole. They hold `locks/store` exclusively;
//! whoever adds holds it shared, from before the first blob until the image that names it is there. So a blob without
//! an image is garbage whenever they look. An [`Image`] holds a lease from the moment it was found or made: it is
//! not removed before it and its clones are dropped, or their process is dead. Finding an image takes no other lock
//! and writes nothing. Names go before images, and images before blobs, so that being killed in between leaves
//! nothing but garbage for the next prune.

mod content;
mod files;
mod lease;
mod list;
mod load;
mod remove;
mod resolve;
mod save;
mod work;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

pub use self::content::BlobInfo;
use self::content::Content;
pub(crate) use self::files::{BlobDir, open_or_create, publish};
use self::lease::Lease;
pub use self::list::{ImageDetails, StoredImage, Usage};
pub use self::load::Loaded;
pub use self::remove::{Pruned, Removed};
use self::resolve::Job;
pub(crate) use self::work::{WorkDir, lock};
use crate::config::ImageConfig;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::limits::Limits;
use crate::platform::Platform;
use crate::progress::Progress;
use crate::reference::Reference;
use crate::registry::Registries;
use crate::source::ImageSource;

/// When to ask a registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPolicy {
    /// Only for references that the store does not know.
    #[default]
    Missing,
    /// Every time; layers that are here are not fetched again.
    Always,
    /// Never.
    Never,
}

/// How to resolve a source.
#[derive(Clone, Debug, Default)]
pub struct ResolveOptions {
    /// The platform to choose from images for several; this host's architecture on Linux by default.
    pub platform: Platform,
    /// When to ask a registry.
    pub pull: PullPolicy,
    /// Which image of a layout or archive that holds several.
    pub ref_name: Option<String>,
    /// Bounds on the image.
    pub limits: Limits,
    /// How registries are reached: mirrors, credentials, authorities, time limits.
    pub registries: Registries,
}

/// An image that is ready to boot from. It is not removed from the store while this or a clone of it lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The manifest's digest. For `docker save` archives that of the configuration (the image ID), for a root
    /// directory one derived from its entries' names, owners, sizes and times.
    pub digest: String,
    /// The root file system: an EROFS image, whole 4 KiB blocks. Read-only; it belongs to the store.
    pub rootfs: PathBuf,
    /// Size of `rootfs` in bytes; parts of it may be holes.
    pub size: u64,
    /// What to run in it.
    pub config: ImageConfig,
    lease: Lease,
}

/// `image.json`.
#[derive(Clone, Serialize, Deserialize)]
struct Record {
    digest: String,
    size: u64,
    config: ImageConfig,
    /// When the image was made; unix seconds.
    #[serde(default)]
    added_at: u64,
    /// The blobs in the store that belong to the image.
    #[serde(default)]
    content: Option<Content>,
}

/// `refs/*.json`, `sources/*.json` and `pins/*.json`.
#[derive(Serialize, Deserialize)]
struct Pointer {
    /// What the file's name is the hash of, for people.
    key: String,
    digest: String,
    /// When it was written; unix seconds.
    #[serde(default)]
    at: u64,
}

/// A directory of images.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
}

impl Store {
    /// Uses `dir`, which need not exist: it is made (mode 0700) when something is stored.
    pub fn open(dir: &Path) -> Result<Self> {
        let dir = std::path::absolute(dir).map_err(Error::path("make absolute", dir))?;
        match fs::metadata(&dir) {
            Ok(meta) if !meta.is_dir() => Err(Error::path("use as image store", &dir)(
                io::ErrorKind::NotADirectory.into(),
            )),
            Ok(_) => Ok(Self { dir }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Self { dir }),
            Err(e) => Err(Error::path("open image store", &dir)(e)),
        }
    }

    /// Where the store is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Makes an image ready: finds it in the store, or fetches and converts it.
    ///
    /// A hit writes nothing, so that it works on a store that is read-only.
    pub fn resolve(
        &self,
        source: &ImageSource,
        options: &ResolveOptions,
        progress: &dyn Progress,
    ) -> Result<Image> {
        Job::new(self, options, progress).resolve(source)
    }

    /// Asks the registry what `reference` means now, whatever [`ResolveOptions::pull`] says, and makes that image
    /// ready, its blobs included.
    pub fn pull(
        &self,
        reference: &Reference,
        options: &ResolveOptions,
        progress: &dyn Progress,
    ) -> Result<Image> {
        let options = ResolveOptions {
            pull: PullPolicy::Always,
            ..options.clone()
        };
        Job::keeping(self, &options, progress).registry(reference)
    }

    /// The image with this digest, if it is here and whole.
    pub fn stored(&self, digest: &str) -> Result<Option<Image>> {
        self.find(&Digest::parse(digest)?)
    }

    fn find(&self, digest: &Digest) -> Result<Option<Image>> {
        Ok(self.find_with_record(digest)?.map(|(image, _)| image))
    }

    fn find_with_record(&self, digest: &Digest) -> Result<Option<(Image, Record)>> {
        let dir = self.image_dir(digest);
        let rootfs = dir.join("rootfs.erofs");
        let Some((lease, len)) = Lease::take(&rootfs)? else {
            return Ok(None);
        };
        match files::read_json::<Record>(&dir.join("image.json"))? {
            Some(record) if len == record.size && record.digest == digest.to_string() => {
                let image = Image {
                    digest: record.digest.clone(),
                    rootfs,
                    size: record.size,
                    config: record.config.clone(),
                    lease,
                };
                Ok(Some((image, record)))
            }
            _ => Ok(None),
        }
    }

    fn blobs(&self) -> BlobDir {
        BlobDir::new(self.dir.join("blobs"))
    }

    fn image_dir(&self, digest: &Digest) -> PathBuf {
        self.dir.join("images/v1").join(digest.file_name())
    }

    fn pointer(&self, kind: &str, key: &str) -> PathBuf {
        self.dir
            .join(kind)
            .join(format!("{}.json", Digest::of(key.as_bytes()).hex()))
    }

    /// Follows a remembered key to an image that is here.
    fn recall(&self, kind: &str, key: &str) -> Result<Option<Image>> {
        match files::read_json::<Pointer>(&self.pointer(kind, key))? {
            Some(pointer) if pointer.key == key => self.find(&Digest::parse(&pointer.digest)?),
            _ => Ok(None),
        }
    }

    fn remember(&self, kind: &str, key: &str, digest: &str) -> Result<()> {
        let path = self.pointer(kind, key);
        let pointer = Pointer {
            key: key.to_owned(),
            digest: digest.to_owned(),
            at: now(),
        };
        let work = WorkDir::new(&self.dir)?;
        let temporary = work.path().join("pointer.json");
        files::write_json(&temporary, &pointer)?;
        files::publish(&temporary, &path)
    }
}

/// Unix seconds; 0 on a host whose clock is before 1970.
fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
