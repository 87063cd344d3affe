//! The blobs of an image: manifest, configuration and layers as registries hold them.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::files::{BlobDir, create, publish, write_synced};
use super::{Record, Store, WorkDir};
use crate::convert::LayerBlobs;
use crate::digest::{Algorithm, Digest, HashingReader};
use crate::error::{Error, Result};
use crate::layer::{Compression, read_failed};
use crate::manifest::{Chosen, Layer, OCI_MANIFEST, Received, check_size};

/// A blob of an image, as a descriptor tells it (OCI image-spec descriptor.md).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobInfo {
    /// What it is; may be empty.
    pub media_type: String,
    /// The digest of its bytes.
    pub digest: String,
    /// Its size in bytes.
    pub size: u64,
}

/// The blobs that belong to an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Content {
    pub(super) manifest: BlobInfo,
    pub(super) config: BlobInfo,
    /// From the bottom; one may stand twice.
    pub(super) layers: Vec<BlobInfo>,
}

impl Content {
    /// Every blob once: the manifest, the configuration, the layers.
    pub(super) fn blobs(&self) -> Vec<&BlobInfo> {
        let mut seen = BTreeSet::new();
        [&self.manifest, &self.config]
            .into_iter()
            .chain(&self.layers)
            .filter(|blob| seen.insert(&blob.digest))
            .collect()
    }
}

impl Store {
    /// Whether all blobs of an image are here.
    pub(super) fn has_content(&self, record: &Record) -> bool {
        let blobs = self.blobs();
        record.content.as_ref().is_some_and(|content| {
            content.blobs().iter().all(|blob| {
                Digest::parse(&blob.digest).is_ok_and(|digest| blobs.has(&digest, blob.size))
            })
        })
    }
}

impl BlobDir {
    /// Adds the documents of an image whose layers are here.
    pub(super) fn keep_fetched(&self, store: &Path, chosen: &Chosen) -> Result<Content> {
        let layers = chosen.layers.iter().map(|layer| {
            let blob = layer.blob.as_ref();
            let blob = blob.ok_or_else(|| Error::malformed("image", "a layer without a blob"))?;
            Ok(BlobInfo {
                media_type: blob.media_type.clone(),
                digest: blob.digest()?.to_string(),
                size: blob.size,
            })
        });
        self.keep_documents(store, chosen, layers.collect::<Result<_>>()?)
    }

    /// Adds all blobs of an image of a layout or archive.
    pub(super) fn keep_local(
        &self,
        store: &Path,
        chosen: &Chosen,
        blobs: &dyn LayerBlobs,
    ) -> Result<Content> {
        let layers = chosen.layers.iter().enumerate();
        let layers = layers.map(|(index, layer)| self.keep_layer(store, index, layer, blobs));
        self.keep_documents(store, chosen, layers.collect::<Result<_>>()?)
    }

    fn keep_layer(
        &self,
        store: &Path,
        index: usize,
        layer: &Layer,
        blobs: &dyn LayerBlobs,
    ) -> Result<BlobInfo> {
        let want = match &layer.blob {
            Some(blob) => Some((blob.digest()?, blob.size)),
            None => None,
        };
        if let (Some((digest, size)), Some(blob)) = (&want, &layer.blob)
            && self.has(digest, *size)
        {
            return Ok(BlobInfo {
                media_type: blob.media_type.clone(),
                digest: digest.to_string(),
                size: *size,
            });
        }
        let what = match &want {
            Some((digest, _)) => format!("layer {digest}"),
            None => format!("layer {}", layer.diff_id),
        };
        let algorithm = want
            .as_ref()
            .map_or(Algorithm::Sha256, |(digest, _)| digest.algorithm());
        let mut reader = HashingReader::new(blobs.open(index, layer)?, algorithm);
        let work = WorkDir::new(store)?;
        let path = work.path().join("blob");
        let mut file = create(&path)?;
        let mut start = Vec::new();
        // One byte more than it should have shows that it is too long; an archive's own size bounds the rest.
        let limit = want
            .as_ref()
            .map_or(u64::MAX, |(_, size)| size.saturating_add(1));
        let mut bounded = reader.by_ref().take(limit);
        bounded
            .by_ref()
            .take(4)
            .read_to_end(&mut start)
            .map_err(read_failed(&what))?;
        let store_failed = || Error::path("write", &path);
        file.write_all(&start).map_err(store_failed())?;
        copy(&mut bounded, &mut file, &what, &path)?;
        let (digest, size) = reader.finish();
        if let Some((want, want_size)) = &want {
            check_size(&what, size, *want_size)?;
            want.expect(&what, &digest)?;
        }
        file.sync_all().map_err(store_failed())?;
        if !self.has(&digest, size) {
            publish(&path, &self.path(&digest))?;
        }
        let media_type = match &layer.blob {
            Some(blob) => blob.media_type.clone(),
            None => layer_type(&start).to_owned(),
        };
        Ok(BlobInfo {
            media_type,
            digest: digest.to_string(),
            size,
        })
    }

    fn keep_documents(
        &self,
        store: &Path,
        chosen: &Chosen,
        layers: Vec<BlobInfo>,
    ) -> Result<Content> {
        let config = self.keep(store, &chosen.config_document)?;
        let made;
        let manifest = match &chosen.manifest {
            Some(received) => received,
            // `docker save` has none: this is the one that pushing the image would make.
            None => {
                made = oci_manifest(&config, &layers);
                &made
            }
        };
        Ok(Content {
            manifest: self.keep(store, manifest)?,
            config,
            layers,
        })
    }

    fn keep(&self, store: &Path, document: &Received) -> Result<BlobInfo> {
        let size = document.bytes.len() as u64;
        if !self.has(&document.digest, size) {
            let work = WorkDir::new(store)?;
            let path = work.path().join("blob");
            write_synced(&mut create(&path)?, &document.bytes)
                .map_err(Error::path("write", &path))?;
            publish(&path, &self.path(&document.digest))?;
        }
        Ok(BlobInfo {
            media_type: document.media_type.clone(),
            digest: document.digest.to_string(),
            size,
        })
    }
}

/// Copies, and says which side failed.
pub(super) fn copy(
    from: &mut impl Read,
    to: &mut impl Write,
    what: &str,
    path: &Path,
) -> Result<u64> {
    let mut buf = vec![0; 128 * 1024];
    let mut copied = 0_u64;
    loop {
        match from.read(&mut buf) {
            Ok(0) => return Ok(copied),
            Ok(n) => {
                to.write_all(&buf[..n])
                    .map_err(Error::path("write", path))?;
                copied += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(read_failed(what)(e)),
        }
    }
}

fn layer_type(start: &[u8]) -> &'static str {
    match Compression::sniff(start) {
        Compression::None => "application/vnd.oci.image.layer.v1.tar",
        Compression::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
        Compression::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
    }
}

fn oci_manifest(config: &BlobInfo, layers: &[BlobInfo]) -> Received {
    let layers: Vec<_> = layers.iter().map(descriptor).collect();
    let bytes = json!({
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": descriptor(config),
        "layers": layers,
    })
    .to_string()
    .into_bytes();
    Received {
        digest: Digest::of(&bytes),
        media_type: OCI_MANIFEST.to_owned(),
        bytes,
    }
}

/// The blob as manifests and indexes write it.
pub(super) fn descriptor(blob: &BlobInfo) -> serde_json::Value {
    json!({"mediaType": blob.media_type, "digest": blob.digest, "size": blob.size})
}
