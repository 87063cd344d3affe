//! The image store: content-addressed, shared by all processes of a user.
//!
//! ```text
//! images/v1/<digest>/rootfs.erofs   a finished image
//! images/v1/<digest>/image.json     its configuration and size
//! blobs/<algorithm>/<hex>           layers as registries hold them
//! refs/<hash>.json                  what a registry reference last meant
//! sources/<hash>.json               what a local file held, by path, inode, size and times
//! locks/                            one lock file for each thing that is made only once
//! tmp/                              unfinished work; each piece is locked by the process that does it
//! ```
//!
//! Things appear under their names complete and synced, by rename. A process that is killed leaves only its
//! directory in `tmp`, which the next one to work there removes, as it finds it unlocked.

mod files;
mod work;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub(crate) use self::files::{BlobDir, publish};
pub(crate) use self::work::{WorkDir, lock};
use crate::config::ImageConfig;
use crate::convert::{LayerBlobs, layers_to_erofs};
use crate::digest::Digest;
use crate::erofs::Summary;
use crate::error::{Error, Result};
use crate::layout::{self, Archive, Opened, SavedLayers, Wanted};
use crate::limits::Limits;
use crate::manifest::Chosen;
use crate::platform::Platform;
use crate::progress::Progress;
use crate::reference::Reference;
use crate::registry::{self, Registries};
use crate::rootdir;
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
    /// Which registries may be talked to in the clear.
    pub registries: Registries,
}

/// An image that is ready to boot from.
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
}

/// `image.json`.
#[derive(Serialize, Deserialize)]
struct Record {
    digest: String,
    size: u64,
    config: ImageConfig,
}

/// `refs/*.json` and `sources/*.json`.
#[derive(Serialize, Deserialize)]
struct Pointer {
    /// What the file's name is the hash of, for people.
    key: String,
    digest: String,
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
        let job = Job {
            store: self,
            options,
            progress,
        };
        match source {
            ImageSource::Registry(reference) => job.registry(reference),
            ImageSource::OciLayoutDir(path) => job.layout_dir(path),
            ImageSource::Archive(path) => job.archive(path),
            ImageSource::Stdin => job.stdin(),
            ImageSource::RootDir(path) => job.root_dir(path),
        }
    }

    /// The image with this digest, if it is here and whole.
    pub fn stored(&self, digest: &str) -> Result<Option<Image>> {
        self.find(&Digest::parse(digest)?)
    }

    fn find(&self, digest: &Digest) -> Result<Option<Image>> {
        let dir = self.image_dir(digest);
        let Some(record) = files::read_json::<Record>(&dir.join("image.json"))? else {
            return Ok(None);
        };
        let rootfs = dir.join("rootfs.erofs");
        match fs::metadata(&rootfs) {
            Ok(meta) if meta.len() == record.size && record.digest == digest.to_string() => {
                Ok(Some(Image {
                    digest: record.digest,
                    rootfs,
                    size: record.size,
                    config: record.config,
                }))
            }
            Ok(_) => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::path("look at", &rootfs)(e)),
        }
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
        };
        let work = WorkDir::new(&self.dir)?;
        let temporary = work.path().join("pointer.json");
        files::write_json(&temporary, &pointer)?;
        files::publish(&temporary, &path)
    }
}

/// One call of [`Store::resolve`].
struct Job<'a> {
    store: &'a Store,
    options: &'a ResolveOptions,
    progress: &'a dyn Progress,
}

impl Job<'_> {
    fn wanted(&self) -> Wanted<'_> {
        Wanted {
            name: self.options.ref_name.as_deref(),
            platform: &self.options.platform,
            limits: &self.options.limits,
        }
    }

    fn registry(&self, reference: &Reference) -> Result<Image> {
        let key = format!("{reference} {}", self.options.platform);
        // A manifest's digest says all there is to say, wherever the image came from.
        if self.options.pull != PullPolicy::Always
            && let Some(digest) = reference.digest()
            && let Some(image) = self.store.find(digest)?
        {
            return Ok(image);
        }
        if self.options.pull != PullPolicy::Always
            && let Some(image) = self.store.recall("refs", &key)?
        {
            return Ok(image);
        }
        if self.options.pull == PullPolicy::Never {
            return Err(Error::NotStored {
                image: reference.to_string(),
            });
        }
        let client = registry::Client::new(reference, &self.options.registries)?;
        let chosen = client.choose(&self.options.platform, &self.options.limits)?;
        let image = match self.store.find(&chosen.digest)? {
            Some(image) => image,
            None => self.once(&chosen.digest, || {
                let blobs = files::BlobDir::new(self.store.dir.join("blobs"));
                client.fetch(&chosen, &blobs, &self.store.dir, self.progress)?;
                self.convert(&blobs, &chosen)
            })?,
        };
        if self.store.recall("refs", &key)?.as_ref() != Some(&image) {
            self.store.remember("refs", &key, &image.digest)?;
        }
        Ok(image)
    }

    fn layout_dir(&self, path: &Path) -> Result<Image> {
        let layout = layout::open_dir(path);
        let chosen = layout.choose(&self.wanted())?;
        self.once(&chosen.digest, || self.convert(&layout, &chosen))
    }

    fn archive(&self, path: &Path) -> Result<Image> {
        let what = path.display().to_string();
        let file = File::open(path).map_err(Error::path("open", path))?;
        let meta = file.metadata().map_err(Error::path("look at", path))?;
        if meta.is_dir() {
            return Err(Error::malformed(what, "a directory, not an archive"));
        }
        if !meta.is_file() {
            // A pipe, say.
            return self.open_archive(file, &what);
        }
        let path = fs::canonicalize(path).map_err(Error::path("resolve", path))?;
        let key = format!(
            "{} dev={} ino={} size={} mtime={}.{:09} ctime={}.{:09} platform={} name={:?}",
            path.display(),
            meta.dev(),
            meta.ino(),
            meta.size(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.ctime(),
            meta.ctime_nsec(),
            self.options.platform,
            self.options.ref_name,
        );
        if let Some(image) = self.store.recall("sources", &key)? {
            return Ok(image);
        }
        let image = self.open_archive(file, &what)?;
        self.store.remember("sources", &key, &image.digest)?;
        Ok(image)
    }

    fn stdin(&self) -> Result<Image> {
        use std::os::fd::AsFd;
        let stdin = io::stdin()
            .as_fd()
            .try_clone_to_owned()
            .map_err(Error::io("cannot read standard input"))?;
        self.open_archive(File::from(stdin), "standard input")
    }

    fn open_archive(&self, file: File, what: &str) -> Result<Image> {
        let work = WorkDir::new(&self.store.dir)?;
        let file = layout::seekable(
            file,
            || work.create("archive.tar"),
            what,
            &self.options.limits,
        )?;
        match Archive::index(file, what)?.recognise()? {
            Opened::Layout(layout) => {
                let chosen = layout.choose(&self.wanted())?;
                self.once(&chosen.digest, || self.convert(&layout, &chosen))
            }
            Opened::DockerSave(archive) => {
                let (chosen, paths) = archive.choose(&self.wanted())?;
                let layers = SavedLayers {
                    archive: &archive,
                    paths: &paths,
                };
                self.once(&chosen.digest, || self.convert(&layers, &chosen))
            }
        }
    }

    fn root_dir(&self, path: &Path) -> Result<Image> {
        let dir = rootdir::RootDir::open(path, &self.store.dir)?;
        let digest = dir.digest(&self.options.limits)?;
        self.once(&digest, || {
            let work = WorkDir::new(&self.store.dir)?;
            let (image, spool) = work.image_and_spool()?;
            let (file, summary) = dir.to_erofs(image, spool, &self.options.limits)?;
            if dir.digest(&self.options.limits)? != digest {
                self.progress.message(&format!(
                    "{} changed while it was being read",
                    path.display()
                ));
            }
            self.publish(
                &work,
                &file,
                &summary,
                &digest,
                rootdir::config(&self.options.platform),
            )
        })
    }

    /// Finds the image, or has it made by one process while others wait.
    fn once(&self, digest: &Digest, make: impl FnOnce() -> Result<Image>) -> Result<Image> {
        if let Some(image) = self.store.find(digest)? {
            return Ok(image);
        }
        let _lock = work::lock(&self.store.dir, &digest.file_name(), || {
            self.progress
                .message("another process is preparing this image; waiting for it");
        })?;
        match self.store.find(digest)? {
            Some(image) => Ok(image),
            None => make(),
        }
    }

    fn convert(&self, blobs: &dyn LayerBlobs, chosen: &Chosen) -> Result<Image> {
        let work = WorkDir::new(&self.store.dir)?;
        let (image, spool) = work.image_and_spool()?;
        let (file, summary) = layers_to_erofs(
            blobs,
            chosen,
            image,
            spool,
            &self.options.limits,
            self.progress,
        )?;
        let config = ImageConfig::from(chosen.config.clone());
        self.publish(&work, &file, &summary, &chosen.digest, config)
    }

    fn publish(
        &self,
        work: &WorkDir,
        file: &File,
        summary: &Summary,
        digest: &Digest,
        config: ImageConfig,
    ) -> Result<Image> {
        // Nobody is meant to write to it again, this process included.
        file.set_permissions(fs::Permissions::from_mode(0o400))
            .and_then(|()| file.sync_all())
            .map_err(Error::io("cannot write the image to the store"))?;
        let record = Record {
            digest: digest.to_string(),
            size: summary.bytes,
            config,
        };
        files::write_json(&work.image_dir().join("image.json"), &record)?;
        let dir = self.store.image_dir(digest);
        if dir.exists() {
            // A broken image of that name; whole ones have been found before.
            fs::rename(&dir, work.path().join("broken")).map_err(Error::path("move away", &dir))?;
        }
        files::publish(&work.image_dir(), &dir)?;
        Ok(Image {
            digest: record.digest,
            rootfs: dir.join("rootfs.erofs"),
            size: record.size,
            config: record.config,
        })
    }
}

/// Writes all of `bytes` and syncs.
fn write_synced(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.sync_all()
}
