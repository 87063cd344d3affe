//! Manifests and indexes, and the choice of one image for a platform
//! (OCI image-spec manifest.md and image-index.md; Docker's equal but for the names of types).

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde::Deserialize;

use crate::config::{ConfigFile, or_default};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::limits::{Limits, MAX_DOCUMENT, MAX_INDEX_DEPTH, MAX_MANIFESTS};
use crate::platform::Platform;

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_SCHEMA1: &str = "application/vnd.docker.distribution.manifest.v1+";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

/// The annotation that names an image in a layout.
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The full reference that containerd and Docker write beside it.
pub(crate) const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// Points at a blob.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Descriptor {
    #[serde(rename = "mediaType", default, deserialize_with = "or_default")]
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default)]
    platform: Option<PlatformField>,
    #[serde(default, deserialize_with = "or_default")]
    annotations: BTreeMap<String, Option<String>>,
}

#[derive(Clone, Debug, Deserialize)]
struct PlatformField {
    #[serde(default, deserialize_with = "or_default")]
    architecture: String,
    #[serde(default, deserialize_with = "or_default")]
    os: String,
    #[serde(default, deserialize_with = "or_default")]
    variant: String,
}

impl Descriptor {
    /// A descriptor of which only digest and size are known.
    pub(crate) fn new(digest: &Digest, size: u64) -> Self {
        Self {
            media_type: String::new(),
            digest: digest.to_string(),
            size,
            platform: None,
            annotations: BTreeMap::new(),
        }
    }

    pub(crate) fn digest(&self) -> Result<Digest> {
        Digest::parse(&self.digest)
    }

    fn platform(&self) -> Option<Platform> {
        self.platform
            .as_ref()
            .map(|p| Platform::new(&p.os, &p.architecture, &p.variant))
    }

    fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.get(key)?.as_deref()
    }

    fn is_named(&self, name: &str) -> bool {
        self.annotation(REF_NAME) == Some(name) || self.annotation(CONTAINERD_NAME) == Some(name)
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.annotation(CONTAINERD_NAME)
            .or_else(|| self.annotation(REF_NAME))
    }
}

/// An image manifest.
#[derive(Clone, Debug)]
pub(crate) struct Manifest {
    media_type: String,
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

/// What a manifest request can be answered with.
#[derive(Debug)]
pub(crate) enum Document {
    Index(Vec<Descriptor>),
    Manifest(Manifest),
}

#[derive(Deserialize)]
struct Raw {
    #[serde(rename = "schemaVersion", default, deserialize_with = "or_default")]
    schema_version: u64,
    #[serde(rename = "mediaType", default, deserialize_with = "or_default")]
    media_type: String,
    #[serde(rename = "artifactType", default, deserialize_with = "or_default")]
    artifact_type: String,
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
}

impl Document {
    /// Parses a document that was announced as `announced` (a Content-Type without parameters, or a descriptor's
    /// media type), which may be empty or say nothing.
    pub(crate) fn parse(what: &str, bytes: &[u8], announced: &str) -> Result<Self> {
        let announced = announced.split(';').next().unwrap_or("").trim();
        let raw: Raw = serde_json::from_slice(bytes)
            .map_err(|e| Error::malformed(what, format!("not a manifest: {e}")))?;
        let generic = announced.is_empty()
            || matches!(
                announced,
                "application/json" | "application/octet-stream" | "text/plain"
            );
        if raw.media_type.starts_with(DOCKER_SCHEMA1)
            || announced.starts_with(DOCKER_SCHEMA1)
            || raw.schema_version == 1
        {
            return Err(Error::Unsupported {
                what: what.to_owned(),
                why: "a Docker schema 1 manifest, obsolete since 2017; push the image again with a current tool"
                    .to_owned(),
            });
        }
        if !generic && !raw.media_type.is_empty() && raw.media_type != announced {
            // One digest must not mean two things to two readers (CVE-2021-41190).
            return Err(Error::malformed(
                what,
                format!(
                    "it says that it is {}, but was announced as {announced}",
                    raw.media_type
                ),
            ));
        }
        let kind = if raw.media_type.is_empty() && !generic {
            announced
        } else {
            raw.media_type.as_str()
        };
        let is_index = match kind {
            OCI_INDEX | DOCKER_LIST => true,
            OCI_MANIFEST | DOCKER_MANIFEST => false,
            "" => raw.manifests.is_some(),
            other => {
                return Err(Error::Unsupported {
                    what: what.to_owned(),
                    why: format!("media type {other}"),
                });
            }
        };
        if raw.manifests.is_some() && (raw.config.is_some() || raw.layers.is_some()) {
            return Err(Error::malformed(what, "both an index and a manifest"));
        }
        if is_index {
            return Ok(Self::Index(raw.manifests.unwrap_or_default()));
        }
        let config = raw
            .config
            .ok_or_else(|| Error::malformed(what, "a manifest without a configuration"))?;
        let is_image = matches!(config.media_type.as_str(), OCI_CONFIG | DOCKER_CONFIG | "");
        if !is_image || !raw.artifact_type.is_empty() && config.media_type != OCI_CONFIG {
            let kind = if raw.artifact_type.is_empty() {
                &config.media_type
            } else {
                &raw.artifact_type
            };
            return Err(Error::Unsupported {
                what: what.to_owned(),
                why: format!("an artifact of type {kind}, not a container image"),
            });
        }
        let media_type = if kind.is_empty() { OCI_MANIFEST } else { kind };
        Ok(Self::Manifest(Manifest {
            media_type: media_type.to_owned(),
            config,
            layers: raw.layers.unwrap_or_default(),
        }))
    }
}

/// Where manifests and configurations are read from.
pub(crate) trait Documents {
    /// The bytes of a manifest or index and what they were announced as; digest and size are checked by the caller.
    fn manifest(&self, descriptor: &Descriptor) -> Result<(Vec<u8>, String)>;
    /// The bytes of a configuration; likewise.
    fn config(&self, descriptor: &Descriptor) -> Result<Vec<u8>>;
}

/// One image, chosen and with all documents checked.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) digest: Digest,
    /// From the bottom.
    pub(crate) layers: Vec<Layer>,
    pub(crate) config: ConfigFile,
    /// `docker save` archives have none.
    pub(crate) manifest: Option<Received>,
    pub(crate) config_document: Received,
}

/// A document as it was received, checked.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) digest: Digest,
    pub(crate) media_type: String,
    pub(crate) bytes: Vec<u8>,
}

/// A layer of a chosen image.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    /// The blob; `docker save` archives have none, only a file.
    pub(crate) blob: Option<Descriptor>,
    /// The digest of the uncompressed layer.
    pub(crate) diff_id: Digest,
}

/// Chooses among the entries of a layout's `index.json`: by name if one is given, else the only image there is.
pub(crate) fn choose_named(
    source: &dyn Documents,
    what: &str,
    entries: &[Descriptor],
    name: Option<&str>,
    platform: &Platform,
    limits: &Limits,
) -> Result<Chosen> {
    let names = |entries: &[Descriptor]| -> Vec<String> {
        let mut names: Vec<_> = entries
            .iter()
            .filter_map(Descriptor::name)
            .map(str::to_owned)
            .collect();
        names.sort();
        names.dedup();
        names
    };
    let entries = match name {
        Some(name) => {
            let named: Vec<_> = entries
                .iter()
                .filter(|entry| entry.is_named(name))
                .cloned()
                .collect();
            if named.is_empty() {
                let all = names(entries).join(", ");
                return Err(Error::malformed(
                    what,
                    format!("holds no image named {name}; it holds: {all}"),
                ));
            }
            Cow::Owned(named)
        }
        None => {
            // Several names for several platforms of one image are no ambiguity; several images are.
            let fitting: Vec<Descriptor> = entries
                .iter()
                .filter(|e| {
                    e.platform()
                        .is_none_or(|offered| platform.rank(&offered).is_some())
                })
                .cloned()
                .collect();
            let mut digests: Vec<_> = fitting
                .iter()
                .filter(|e| e.name().is_some())
                .map(|e| &e.digest)
                .collect();
            digests.sort();
            digests.dedup();
            if digests.len() > 1 {
                return Err(Error::Ambiguous {
                    source_name: what.to_owned(),
                    names: names(&fitting),
                });
            }
            Cow::Borrowed(entries)
        }
    };
    choose(source, what, &entries, platform, limits)
}

/// Chooses the first entry that fits the platform best.
pub(crate) fn choose(
    source: &dyn Documents,
    what: &str,
    entries: &[Descriptor],
    platform: &Platform,
    limits: &Limits,
) -> Result<Chosen> {
    let mut chooser = Chooser {
        source,
        what,
        platform,
        limits,
        offered: Vec::new(),
        refused: None,
        looked_at: 0,
    };
    if let Some(chosen) = chooser.among(entries, 0)? {
        return Ok(chosen);
    }
    if let (Some(refused), true) = (chooser.refused, chooser.offered.is_empty()) {
        return Err(refused);
    }
    chooser.offered.sort();
    chooser.offered.dedup();
    Err(Error::NoPlatform {
        image: what.to_owned(),
        wanted: platform.to_string(),
        offered: chooser.offered,
    })
}

struct Chooser<'a> {
    source: &'a dyn Documents,
    what: &'a str,
    platform: &'a Platform,
    limits: &'a Limits,
    offered: Vec<String>,
    /// Why the last entry that was no image at all was passed over.
    refused: Option<Error>,
    looked_at: usize,
}

impl Chooser<'_> {
    fn among(&mut self, entries: &[Descriptor], depth: usize) -> Result<Option<Chosen>> {
        if depth > MAX_INDEX_DEPTH {
            return Err(Error::Limit {
                what: self.what.to_owned(),
                limit: MAX_INDEX_DEPTH as u64,
                unit: "indexes inside each other",
            });
        }
        let mut ranked = Vec::new();
        for entry in entries {
            // Types unknown here are other people's extensions.
            let known = matches!(
                entry.media_type.as_str(),
                OCI_INDEX | OCI_MANIFEST | DOCKER_LIST | DOCKER_MANIFEST | ""
            ) || entry.media_type.starts_with(DOCKER_SCHEMA1);
            let is_index = matches!(entry.media_type.as_str(), OCI_INDEX | DOCKER_LIST);
            match entry.platform() {
                _ if !known => {}
                // Attestations.
                Some(offered) if offered.os == "unknown" || offered.architecture == "unknown" => {}
                Some(offered) => match self.platform.rank(&offered) {
                    Some(rank) => ranked.push((rank, entry)),
                    None => self.offered.push(offered.to_string()),
                },
                // Only its configuration, or the entries inside, will tell.
                None => ranked.push((if is_index { 10 } else { 11 }, entry)),
            }
        }
        ranked.sort_by_key(|(rank, _)| *rank);
        for (_, entry) in ranked {
            if let Some(chosen) = self.entry(entry, depth, entries.len() == 1)? {
                return Ok(Some(chosen));
            }
        }
        Ok(None)
    }

    fn entry(&mut self, entry: &Descriptor, depth: usize, only: bool) -> Result<Option<Chosen>> {
        self.looked_at += 1;
        if self.looked_at > MAX_MANIFESTS {
            return Err(Error::Limit {
                what: self.what.to_owned(),
                limit: MAX_MANIFESTS as u64,
                unit: "manifests to look at",
            });
        }
        let digest = entry.digest()?;
        let what = format!("{}: manifest {digest}", self.what);
        let (manifest_bytes, announced) = self.source.manifest(entry)?;
        check(&what, entry, &digest, &manifest_bytes)?;
        let announced = if announced.is_empty() {
            &entry.media_type
        } else {
            &announced
        };
        let manifest = match Document::parse(&what, &manifest_bytes, announced) {
            Ok(Document::Index(entries)) => return self.among(&entries, depth + 1),
            Ok(Document::Manifest(manifest)) => manifest,
            // Beside images an index may list artifacts.
            Err(error @ Error::Unsupported { .. }) if !only => {
                self.refused = Some(error);
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if manifest.layers.len() > self.limits.layers {
            return Err(Error::Limit {
                what,
                limit: self.limits.layers as u64,
                unit: "layers",
            });
        }
        // Before any is fetched: what is larger as it is stored is no smaller decompressed.
        let sizes = manifest.layers.iter().map(|layer| layer.size);
        if sizes.fold(0, u64::saturating_add) > self.limits.content_bytes {
            return Err(Error::Limit {
                what,
                limit: self.limits.content_bytes,
                unit: "bytes of layers",
            });
        }
        let config_digest = manifest.config.digest()?;
        let config_what = format!("{}: configuration {config_digest}", self.what);
        let bytes = self.source.config(&manifest.config)?;
        check(&config_what, &manifest.config, &config_digest, &bytes)?;
        let config = parse_config(&config_what, &bytes)?;
        if let Some(offered) = config.platform()
            && !self.platform.fits_config(&offered)
        {
            self.offered.push(offered.to_string());
            return Ok(None);
        }
        let diff_ids = diff_ids(&config_what, &config, manifest.layers.len())?;
        let layers = manifest.layers.into_iter().zip(diff_ids);
        let layers = layers
            .map(|(blob, diff_id)| Layer {
                blob: Some(blob),
                diff_id,
            })
            .collect();
        Ok(Some(Chosen {
            digest: digest.clone(),
            layers,
            config,
            manifest: Some(Received {
                digest,
                media_type: manifest.media_type,
                bytes: manifest_bytes,
            }),
            config_document: Received {
                digest: config_digest,
                media_type: manifest.config.media_type,
                bytes,
            },
        }))
    }
}

/// Parses a configuration and refuses what is none.
pub(crate) fn parse_config(what: &str, bytes: &[u8]) -> Result<ConfigFile> {
    serde_json::from_slice(bytes)
        .map_err(|e| Error::malformed(what, format!("not an image configuration: {e}")))
}

/// The digests of the uncompressed layers; as many as there are layers.
pub(crate) fn diff_ids(what: &str, config: &ConfigFile, layers: usize) -> Result<Vec<Digest>> {
    let rootfs = config
        .rootfs
        .as_ref()
        .ok_or_else(|| Error::malformed(what, "not an image configuration: no rootfs"))?;
    if rootfs.kind != "layers" {
        return Err(Error::malformed(
            what,
            format!("rootfs is of type {:?}, not layers", rootfs.kind),
        ));
    }
    if rootfs.diff_ids.len() != layers {
        return Err(Error::malformed(
            what,
            format!(
                "lists {} layers, the manifest {layers}",
                rootfs.diff_ids.len()
            ),
        ));
    }
    rootfs.diff_ids.iter().map(|id| Digest::parse(id)).collect()
}

fn check(what: &str, descriptor: &Descriptor, digest: &Digest, bytes: &[u8]) -> Result<()> {
    check_size(what, bytes.len() as u64, descriptor.size)?;
    digest.check(what, bytes)
}

/// Fails unless a blob of which `has` bytes were read has the size that its descriptor `says`. Of one that is longer
/// not all need have been read.
pub(crate) fn check_size(what: &str, has: u64, says: u64) -> Result<()> {
    let why = match has.cmp(&says) {
        Ordering::Equal => return Ok(()),
        Ordering::Less => format!("has {has} bytes, its descriptor says {says}"),
        Ordering::Greater => format!("has more than the {says} bytes that its descriptor says"),
    };
    Err(Error::malformed(what, why))
}

/// Fails for a document whose announced size is beyond the bound, before it is read.
pub(crate) fn check_document_size(what: &str, size: u64) -> Result<()> {
    if size > MAX_DOCUMENT {
        return Err(Error::Limit {
            what: what.to_owned(),
            limit: MAX_DOCUMENT,
            unit: "bytes",
        });
    }
    Ok(())
}
