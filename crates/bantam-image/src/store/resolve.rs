//! From a source to an image of the store.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use super::content::Content;
use super::files;
use super::work::{self, WorkDir};
use super::{Image, PullPolicy, Record, ResolveOptions, Store, now};
use crate::config::ImageConfig;
use crate::convert::{LayerBlobs, layers_to_erofs};
use crate::digest::Digest;
use crate::erofs::Summary;
use crate::error::{Error, Result};
use crate::layout::{self, Archive, Opened, SavedLayers, Wanted};
use crate::manifest::Chosen;
use crate::progress::Progress;
use crate::reference::Reference;
use crate::registry;
use crate::rootdir;
use crate::source::ImageSource;

/// The name of the lock that those who add hold shared, and those who remove exclusively.
pub(super) const STORE_LOCK: &str = "store";

/// One call of [`Store::resolve`], [`Store::pull`] or [`Store::load`].
pub(super) struct Job<'a> {
    pub(super) store: &'a Store,
    options: &'a ResolveOptions,
    progress: &'a dyn Progress,
    /// Whether the image's blobs must be in the store.
    keep: bool,
}

impl<'a> Job<'a> {
    pub(super) fn new(
        store: &'a Store,
        options: &'a ResolveOptions,
        progress: &'a dyn Progress,
    ) -> Self {
        Self {
            store,
            options,
            progress,
            keep: false,
        }
    }

    /// A job that puts the image's blobs into the store as well.
    pub(super) fn keeping(
        store: &'a Store,
        options: &'a ResolveOptions,
        progress: &'a dyn Progress,
    ) -> Self {
        Self {
            keep: true,
            ..Self::new(store, options, progress)
        }
    }

    pub(super) fn resolve(&self, source: &ImageSource) -> Result<Image> {
        match source {
            ImageSource::Registry(reference) => self.registry(reference),
            ImageSource::Stored(digest) => {
                let image = self.store.find(digest)?;
                image.ok_or_else(|| Error::NoSuchImage {
                    image: digest.to_string(),
                })
            }
            ImageSource::OciLayoutDir(path) => self.layout_dir(path),
            ImageSource::Archive(path) => self.archive(path),
            ImageSource::Stdin => self.open_archive(stdin()?, STDIN),
            ImageSource::RootDir(path) => self.root_dir(path),
        }
    }

    pub(super) fn wanted<'b>(&'b self, name: Option<&'b str>) -> Wanted<'b> {
        Wanted {
            name,
            platform: &self.options.platform,
            limits: &self.options.limits,
        }
    }

    pub(super) fn registry(&self, reference: &Reference) -> Result<Image> {
        let key = self.key(reference);
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
        let client =
            registry::Client::new(reference, &self.options.registries)?.telling(self.progress);
        let chosen = client.choose(&self.options.platform, &self.options.limits)?;
        let blobs = self.store.blobs();
        let keep = || -> Result<Content> {
            client
                .fetch(&chosen, &blobs, &self.store.dir, self.progress)
                .map_err(|error| error.at(&self.store.dir))?;
            blobs.keep_fetched(&self.store.dir, &chosen)
        };
        let image = self.once(&chosen, &blobs, Some(&keep))?;
        if self.keep || self.store.recall("refs", &key)?.as_ref() != Some(&image) {
            self.store.remember("refs", &key, &image.digest)?;
        }
        Ok(image)
    }

    /// What `refs` knows the reference by.
    pub(super) fn key(&self, reference: &Reference) -> String {
        format!("{reference} {}", self.options.platform)
    }

    fn layout_dir(&self, path: &Path) -> Result<Image> {
        let layout = layout::open_dir(path);
        let chosen = layout.choose(&self.wanted(self.options.ref_name.as_deref()))?;
        self.once(&chosen, &layout, None)
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

    fn open_archive(&self, file: File, what: &str) -> Result<Image> {
        let work = WorkDir::new(&self.store.dir)?;
        let wanted = self.wanted(self.options.ref_name.as_deref());
        match self.recognise(file, what, &work)? {
            Opened::Layout(layout) => self.once(&layout.choose(&wanted)?, &layout, None),
            Opened::DockerSave(archive) => {
                let (chosen, paths) = archive.choose(&wanted)?;
                let layers = SavedLayers {
                    archive: &archive,
                    paths: &paths,
                };
                self.once(&chosen, &layers, None)
            }
        }
    }

    /// Finds out what an archive is, in a copy if it is compressed or a stream.
    pub(super) fn recognise(&self, file: File, what: &str, work: &WorkDir) -> Result<Opened> {
        let spool = || work.create("archive.tar");
        let file = layout::seekable(file, spool, what, &self.options.limits)?;
        Archive::index(file, what)?.recognise()
    }

    fn root_dir(&self, path: &Path) -> Result<Image> {
        let dir = rootdir::RootDir::open(path, &self.store.dir)?;
        let digest = dir.digest(&self.options.limits)?;
        if let Some(image) = self.store.find(&digest)? {
            return Ok(image);
        }
        self.made_once(&digest, || {
            if let Some(image) = self.store.find(&digest)? {
                return Ok(image);
            }
            let work = WorkDir::new(&self.store.dir)?;
            let (image, spool) = work.image_and_spool()?;
            let (file, summary) = dir
                .to_erofs(image, spool, &self.options.limits)
                .map_err(|error| error.at(&self.store.dir))?;
            if dir.digest(&self.options.limits)? != digest {
                self.progress.message(&format!(
                    "{} changed while it was being read",
                    path.display()
                ));
            }
            let config = rootdir::config(&self.options.platform);
            self.publish(&work, &file, &summary, &digest, config, None)
        })
    }

    /// Finds the image, or has it made by one process while others wait. `keep` puts its blobs into the store.
    pub(super) fn once(
        &self,
        chosen: &Chosen,
        blobs: &dyn LayerBlobs,
        keep: Option<&dyn Fn() -> Result<Content>>,
    ) -> Result<Image> {
        let digest = &chosen.digest;
        if let Some((image, record)) = self.store.find_with_record(digest)?
            && (!self.keep || self.store.has_content(&record))
        {
            return Ok(image);
        }
        self.made_once(digest, || {
            let found = self.store.find_with_record(digest)?;
            if let Some((image, record)) = found {
                if let (true, false, Some(keep)) =
                    (self.keep, self.store.has_content(&record), keep)
                {
                    let content = Some(keep()?);
                    self.amend(digest, &Record { content, ..record })?;
                }
                return Ok(image);
            }
            let content = keep.map(|keep| keep()).transpose()?;
            self.convert(blobs, chosen, content)
        })
    }

    /// Has the image made while no other process makes it and none removes anything.
    fn made_once(&self, digest: &Digest, make: impl FnOnce() -> Result<Image>) -> Result<Image> {
        let _adding = work::lock_shared(&self.store.dir, STORE_LOCK, || {
            self.progress
                .message("another process is removing images; waiting for it");
        })?;
        let _making = work::lock(&self.store.dir, &digest.file_name(), || {
            self.progress
                .message("another process is preparing this image; waiting for it");
        })?;
        make()
    }

    /// Replaces what is recorded of an image.
    fn amend(&self, digest: &Digest, record: &Record) -> Result<()> {
        let work = WorkDir::new(&self.store.dir)?;
        let temporary = work.path().join("image.json");
        files::write_json(&temporary, record)?;
        files::publish(&temporary, &self.store.image_dir(digest).join("image.json"))
    }

    fn convert(
        &self,
        blobs: &dyn LayerBlobs,
        chosen: &Chosen,
        content: Option<Content>,
    ) -> Result<Image> {
        let work = WorkDir::new(&self.store.dir)?;
        let (image, spool) = work.image_and_spool()?;
        let made = layers_to_erofs(
            blobs,
            chosen,
            image,
            spool,
            &self.options.limits,
            self.progress,
        );
        let (file, summary) = made.map_err(|error| error.at(&self.store.dir))?;
        let config = ImageConfig::from(chosen.config.clone());
        self.publish(&work, &file, &summary, &chosen.digest, config, content)
    }

    fn publish(
        &self,
        work: &WorkDir,
        file: &File,
        summary: &Summary,
        digest: &Digest,
        config: ImageConfig,
        content: Option<Content>,
    ) -> Result<Image> {
        // Nobody is meant to write to it again, this process included.
        file.set_permissions(fs::Permissions::from_mode(0o400))
            .and_then(|()| file.sync_all())
            .map_err(Error::io("cannot write the image to the store"))?;
        let record = Record {
            digest: digest.to_string(),
            size: summary.bytes,
            config,
            added_at: now(),
            content,
        };
        files::write_json(&work.image_dir().join("image.json"), &record)?;
        let dir = self.store.image_dir(digest);
        if dir.exists() {
            // A broken image of that name; whole ones have been found before.
            fs::rename(&dir, work.path().join("broken")).map_err(Error::path("move away", &dir))?;
        }
        files::publish(&work.image_dir(), &dir)?;
        // Nothing is removed before the lock on the store is released.
        self.store
            .find(digest)?
            .ok_or_else(|| Error::path("find again", &dir)(io::ErrorKind::NotFound.into()))
    }
}

pub(super) const STDIN: &str = "standard input";

/// Standard input as a file of its own.
pub(super) fn stdin() -> Result<File> {
    use std::os::fd::AsFd;
    let stdin = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(Error::io("cannot read standard input"))?;
    Ok(File::from(stdin))
}
