//! Local images: OCI layout directories, and archives of a layout or from `docker save`.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{Mode, OFlags};
use serde::Deserialize;

use crate::config::or_default;
use crate::convert::LayerBlobs;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::layer::{Bounded, Compression, EntryKind, TarReader, decoder, read_failed};
use crate::limits::{Limits, MAX_ARCHIVE_ENTRIES, MAX_DOCUMENT, MAX_LAYOUT_MANIFESTS};
use crate::manifest::{
    Chosen, Descriptor, Document, Documents, Layer, OCI_CONFIG, OCI_INDEX, Received,
    check_document_size, choose_named, diff_ids, parse_config,
};
use crate::platform::Platform;
use crate::reference::Reference;

/// Which image of a layout or archive is wanted.
pub(crate) struct Wanted<'a> {
    pub(crate) name: Option<&'a str>,
    pub(crate) platform: &'a Platform,
    pub(crate) limits: &'a Limits,
}

/// A layout in a directory or an archive.
pub(crate) struct Layout<F> {
    files: F,
    what: String,
    /// The entries of `index.json`, once it was read.
    index: OnceLock<Vec<Descriptor>>,
    /// Manifests that were asked for, for all images chosen.
    manifests: AtomicUsize,
}

/// Files by their path in a layout.
pub(crate) trait Files: Sync {
    fn open(&self, path: &str) -> Result<Box<dyn Read + Send + '_>>;
}

impl<F: Files> Layout<F> {
    fn new(files: F, what: String) -> Self {
        Self {
            files,
            what,
            index: OnceLock::new(),
            manifests: AtomicUsize::new(0),
        }
    }

    /// The names its images have, each once.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let names = self.entries()?.iter().filter_map(Descriptor::name);
        Ok(unique(names.map(str::to_owned).collect()))
    }

    /// Chooses an image of the layout.
    pub(crate) fn choose(&self, wanted: &Wanted<'_>) -> Result<Chosen> {
        let entries = self.entries()?;
        if entries.is_empty() {
            return Err(Error::malformed(&self.what, "holds no image"));
        }
        choose_named(
            self,
            &self.what,
            entries,
            wanted.name,
            wanted.platform,
            wanted.limits,
        )
    }

    fn entries(&self) -> Result<&[Descriptor]> {
        if let Some(entries) = self.index.get() {
            return Ok(entries);
        }
        let index = read_document(&self.files, "index.json")?;
        let what = format!("{}: index.json", self.what);
        match Document::parse(&what, &index, OCI_INDEX)? {
            Document::Index(entries) => Ok(self.index.get_or_init(|| entries)),
            Document::Manifest(_) => {
                Err(Error::malformed(what, "a manifest where an index belongs"))
            }
        }
    }
}

impl<F: Files> Documents for Layout<F> {
    fn manifest(&self, descriptor: &Descriptor) -> Result<(Vec<u8>, String)> {
        if self.manifests.fetch_add(1, Ordering::Relaxed) >= MAX_LAYOUT_MANIFESTS {
            return Err(Error::Limit {
                what: self.what.clone(),
                limit: MAX_LAYOUT_MANIFESTS as u64,
                unit: "manifests to look at for all of its images",
            });
        }
        Ok((self.config(descriptor)?, String::new()))
    }

    fn config(&self, descriptor: &Descriptor) -> Result<Vec<u8>> {
        let digest = descriptor.digest()?;
        check_document_size(&format!("{}: {digest}", self.what), descriptor.size)?;
        read_document(&self.files, &blob_path(&digest))
    }
}

impl<F: Files> LayerBlobs for Layout<F> {
    fn open(&self, _: usize, layer: &Layer) -> Result<Box<dyn Read + Send + '_>> {
        let blob = layer
            .blob
            .as_ref()
            .ok_or_else(|| Error::malformed(&self.what, "a layer without a blob"))?;
        self.files.open(&blob_path(&blob.digest()?))
    }
}

fn blob_path(digest: &Digest) -> String {
    format!("blobs/{}/{}", digest.algorithm().name(), digest.hex())
}

fn read_document(files: &dyn Files, path: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    files
        .open(path)?
        .take(MAX_DOCUMENT + 1)
        .read_to_end(&mut bytes)
        .map_err(read_failed(path))?;
    check_document_size(path, bytes.len() as u64)?;
    Ok(bytes)
}

fn unique(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names.dedup();
    names
}

/// A directory's files.
pub(crate) struct DirFiles(PathBuf);

impl Files for DirFiles {
    fn open(&self, path: &str) -> Result<Box<dyn Read + Send + '_>> {
        Ok(Box::new(open_regular(&self.0.join(path))?))
    }
}

/// Opens a file of a layout that strangers may have made. Links are followed, as build tools make layouts of them, but
/// only to regular files: a FIFO never has to get a writer, a device never has to end, and opening one may do things.
fn open_regular(path: &Path) -> Result<File> {
    let check = |meta: Metadata| {
        if meta.is_file() {
            return Ok(());
        }
        Err(Error::malformed(
            path.display().to_string(),
            "not a regular file",
        ))
    };
    check(fs::metadata(path).map_err(Error::path("open", path))?)?;
    // It may have been replaced meanwhile.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|e| Error::path("open", path)(e.into()))?;
    let file = File::from(fd);
    check(file.metadata().map_err(Error::path("look at", path))?)?;
    Ok(file)
}

/// Opens a layout directory.
pub(crate) fn open_dir(path: &Path) -> Layout<DirFiles> {
    Layout::new(DirFiles(path.to_owned()), path.display().to_string())
}

/// What an archive turned out to be.
pub(crate) enum Opened {
    Layout(Layout<Archive>),
    DockerSave(DockerSave),
}

/// The files of an archive, found by one pass over its headers and read in place.
pub(crate) struct Archive {
    file: File,
    entries: BTreeMap<Vec<u8>, Place>,
    what: String,
}

enum Place {
    File {
        offset: u64,
        len: u64,
    },
    /// Old `docker save` links equal layers to each other.
    Link(Vec<u8>),
}

impl Archive {
    /// Reads the headers of `file`, a plain archive.
    pub(crate) fn index(file: File, what: &str) -> Result<Self> {
        let mut entries = BTreeMap::new();
        let len = file
            .metadata()
            .map_err(Error::io(format!("cannot look at {what}")))?
            .len();
        if len == 0 {
            return Err(Error::malformed(what, "empty"));
        }
        let mut reader = TarReader::new(
            Section {
                file: &file,
                position: 0,
                end: len,
            },
            what,
        )
        .skipping_with(Section::skip);
        while let Some(entry) = reader.next_entry()? {
            if entries.len() >= MAX_ARCHIVE_ENTRIES {
                return Err(Error::Limit {
                    what: what.to_owned(),
                    limit: MAX_ARCHIVE_ENTRIES as u64,
                    unit: "entries (an image archive holds blobs, not files)",
                });
            }
            let path = normal(&[], &entry.path);
            let place = match entry.kind {
                EntryKind::File if !entry.is_contiguous() => {
                    return Err(Error::malformed(what, "a sparse file among its blobs"));
                }
                EntryKind::File => {
                    let offset = reader.data_offset();
                    if offset.checked_add(entry.size).is_none_or(|end| end > len) {
                        return Err(Error::malformed(what, "ends inside an entry"));
                    }
                    Place::File {
                        offset,
                        len: entry.size,
                    }
                }
                EntryKind::Symlink => {
                    let parent = path
                        .iter()
                        .rposition(|b| *b == b'/')
                        .map_or(&[][..], |i| &path[..i]);
                    Place::Link(normal(parent, &entry.link))
                }
                EntryKind::HardLink => Place::Link(normal(&[], &entry.link)),
                _ => continue,
            };
            entries.insert(path, place);
        }
        Ok(Self {
            file,
            entries,
            what: what.to_owned(),
        })
    }

    fn has(&self, path: &str) -> bool {
        self.entries.contains_key(path.as_bytes())
    }

    /// Tells an OCI layout from what `docker save` writes. Docker since version 25 writes both in one.
    pub(crate) fn recognise(self) -> Result<Opened> {
        let what = self.what.clone();
        if self.has("index.json") && self.has("oci-layout") {
            Ok(Opened::Layout(Layout::new(self, what)))
        } else if self.has("manifest.json") {
            Ok(Opened::DockerSave(DockerSave {
                archive: self,
                images: OnceLock::new(),
            }))
        } else {
            Err(Error::malformed(
                what,
                "neither an OCI layout nor a docker save archive (it has no index.json and no manifest.json)",
            ))
        }
    }

    /// Finds a file, through links.
    fn section(&self, path: &str) -> Result<Section<'_>> {
        let mut name = path.as_bytes();
        for _ in 0..8 {
            match self.entries.get(name) {
                Some(Place::Link(target)) => name = target,
                Some(Place::File { offset, len }) => {
                    return Ok(Section {
                        file: &self.file,
                        position: *offset,
                        end: offset + len,
                    });
                }
                None => break,
            }
        }
        Err(Error::malformed(&self.what, format!("has no file {path}")))
    }
}

impl Files for Archive {
    fn open(&self, path: &str) -> Result<Box<dyn Read + Send + '_>> {
        Ok(Box::new(self.section(path)?))
    }
}

/// Lexical path below the root of the archive.
fn normal(parent: &[u8], path: &[u8]) -> Vec<u8> {
    let mut out: Vec<&[u8]> = Vec::new();
    for component in parent
        .split(|b| *b == b'/')
        .chain(path.split(|b| *b == b'/'))
    {
        match component {
            b"" | b"." => {}
            b".." => {
                out.pop();
            }
            name => out.push(name),
        }
    }
    out.join(&b'/')
}

/// Part of a file, independent of the file's own position.
struct Section<'a> {
    file: &'a File,
    position: u64,
    end: u64,
}

impl Section<'_> {
    fn skip(&mut self, len: u64) -> io::Result<()> {
        if len > self.end.saturating_sub(self.position) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.position += len;
        Ok(())
    }
}

impl Read for Section<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let want = usize::try_from(self.end.saturating_sub(self.position))
            .map_or(buf.len(), |n| n.min(buf.len()));
        let n = self.file.read_at(&mut buf[..want], self.position)?;
        self.position += n as u64;
        Ok(n)
    }
}

/// What `docker save` writes.
pub(crate) struct DockerSave {
    archive: Archive,
    /// What `manifest.json` lists, once it was read.
    images: OnceLock<Vec<SavedImage>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SavedImage {
    config: String,
    #[serde(default, deserialize_with = "or_default")]
    repo_tags: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    layers: Vec<String>,
}

impl DockerSave {
    /// The names its images have, each once.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let tags = self.images()?.iter().flat_map(|image| &image.repo_tags);
        Ok(unique(tags.cloned().collect()))
    }

    fn images(&self) -> Result<&[SavedImage]> {
        if let Some(images) = self.images.get() {
            return Ok(images);
        }
        let bytes = read_document(&self.archive, "manifest.json")?;
        let images = serde_json::from_slice(&bytes).map_err(|e| {
            Error::malformed(
                &self.archive.what,
                format!("manifest.json is not what docker save writes: {e}"),
            )
        })?;
        Ok(self.images.get_or_init(|| images))
    }

    /// Chooses an image. Its digest is that of its configuration: Docker's image ID.
    pub(crate) fn choose(&self, wanted: &Wanted<'_>) -> Result<(Chosen, Vec<String>)> {
        let what = &self.archive.what;
        let image = self.pick(self.images()?, wanted.name)?;
        if image.layers.len() > wanted.limits.layers {
            return Err(Error::Limit {
                what: what.clone(),
                limit: wanted.limits.layers as u64,
                unit: "layers",
            });
        }
        let mut stored = 0_u64;
        for path in &image.layers {
            let layer = self.layer(path)?;
            stored = stored.saturating_add(layer.end - layer.position);
        }
        // What is larger as it is stored is no smaller decompressed, and a hole in the archive's file costs nothing.
        if stored > wanted.limits.content_bytes {
            return Err(Error::Limit {
                what: what.clone(),
                limit: wanted.limits.content_bytes,
                unit: "bytes of layers",
            });
        }
        let bytes = read_document(&self.archive, &image.config)?;
        let config_what = format!("{what}: {}", image.config);
        let config = parse_config(&config_what, &bytes)?;
        if let Some(offered) = config.platform()
            && !wanted.platform.fits_config(&offered)
        {
            return Err(Error::NoPlatform {
                image: what.clone(),
                wanted: wanted.platform.to_string(),
                offered: vec![offered.to_string()],
            });
        }
        let diff_ids = diff_ids(&config_what, &config, image.layers.len())?;
        let digest = Digest::of(&bytes);
        let layers = diff_ids
            .into_iter()
            .map(|diff_id| Layer {
                blob: None,
                diff_id,
            })
            .collect();
        Ok((
            Chosen {
                digest: digest.clone(),
                layers,
                config,
                manifest: None,
                config_document: Received {
                    digest,
                    media_type: OCI_CONFIG.to_owned(),
                    bytes,
                },
            },
            image.layers.clone(),
        ))
    }

    fn pick<'a>(&self, images: &'a [SavedImage], name: Option<&str>) -> Result<&'a SavedImage> {
        let what = &self.archive.what;
        let names = || -> Vec<String> {
            let tags = images.iter().flat_map(|image| &image.repo_tags);
            tags.cloned().collect()
        };
        let wanted = name.and_then(|name| Reference::parse(name).ok());
        let mut fitting = images.iter().filter(|image| match name {
            None => true,
            Some(name) => image
                .repo_tags
                .iter()
                .any(|tag| tag == name || wanted.is_some() && Reference::parse(tag).ok() == wanted),
        });
        match (fitting.next(), name) {
            (Some(_), None) if images.len() > 1 => {
                let mut names = names();
                names.sort();
                Err(Error::Ambiguous {
                    source_name: what.clone(),
                    names,
                })
            }
            (Some(image), _) => Ok(image),
            (None, Some(name)) => Err(Error::malformed(
                what,
                format!(
                    "holds no image named {name}; it holds: {}",
                    names().join(", ")
                ),
            )),
            (None, None) => Err(Error::malformed(what, "holds no image")),
        }
    }

    /// The layer at a path that `manifest.json` gives.
    fn layer(&self, path: &str) -> Result<Section<'_>> {
        let path = normal(&[], path.as_bytes());
        self.archive.section(&String::from_utf8_lossy(&path))
    }
}

/// Reads the layers of a saved image.
pub(crate) struct SavedLayers<'a> {
    pub(crate) archive: &'a DockerSave,
    pub(crate) paths: &'a [String],
}

impl LayerBlobs for SavedLayers<'_> {
    fn open(&self, index: usize, _: &Layer) -> Result<Box<dyn Read + Send + '_>> {
        let path = self
            .paths
            .get(index)
            .ok_or_else(|| Error::malformed("docker save archive", "a layer too few"))?;
        Ok(Box::new(self.archive.layer(path)?))
    }
}

/// Makes a seekable, uncompressed archive of `input`: itself if it is one, else a copy in `spool`.
pub(crate) fn seekable(
    input: File,
    spool: impl FnOnce() -> Result<File>,
    what: &str,
    limits: &Limits,
) -> Result<File> {
    let meta = input
        .metadata()
        .map_err(Error::io(format!("cannot look at {what}")))?;
    if meta.is_file() {
        let mut start = [0; 4];
        let n = input
            .read_at(&mut start, 0)
            .map_err(Error::io(format!("cannot read {what}")))?;
        if Compression::sniff(&start[..n]) == Compression::None {
            return Ok(input);
        }
    }
    let mut left = limits.content_bytes;
    let decoder = decoder(input).map_err(read_failed(what))?;
    let mut reader = Bounded::new(decoder, &mut left, limits.content_bytes);
    let mut spool = spool()?;
    io::copy(&mut reader, &mut spool).map_err(read_failed(what))?;
    Ok(spool)
}
