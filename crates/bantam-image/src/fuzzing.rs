//! What fuzz targets need beyond the public interface. Not part of it.

use std::fs::File;

use crate::config::ImageConfig;
use crate::erofs::{self, DataArea, Summary};
use crate::error::Result;
use crate::layer::{Applier, Bounded, TarReader, decoder, read_failed};
use crate::limits::Limits;
use crate::manifest::{self, Document};

/// Media types to announce a document by.
pub const MEDIA_TYPES: [&str; 7] = [
    "",
    "application/json; charset=utf-8",
    manifest::OCI_INDEX,
    manifest::OCI_MANIFEST,
    manifest::DOCKER_LIST,
    manifest::DOCKER_MANIFEST,
    "text/html",
];

/// Applies layers, stored in any way there is, as [`Store::resolve`](crate::Store::resolve) does it, but for their
/// digests. The files are empty ones.
pub fn apply(
    layers: &[&[u8]],
    limits: Limits,
    image: File,
    spool: File,
) -> Result<(File, Summary)> {
    let mut applier = Applier::new(DataArea::new(image, spool, limits.content_bytes), limits);
    let mut left = limits.content_bytes;
    for layer in layers {
        let decoded = decoder(*layer).map_err(read_failed("layer"))?;
        let bounded = Bounded::new(decoded, &mut left, limits.content_bytes);
        applier.apply(&mut TarReader::new(bounded, "layer"), "layer")?;
    }
    erofs::write(&applier.tree, applier.data, &[])
}

/// Parses a manifest or index, announced as `media_type`.
pub fn document(bytes: &[u8], media_type: &str) {
    if let Ok(Document::Manifest(manifest)) = Document::parse("document", bytes, media_type) {
        for descriptor in &manifest.layers {
            let _ = descriptor.digest();
        }
    }
}

/// Parses a configuration and derives a process from it.
pub fn configuration(bytes: &[u8]) {
    let Ok(file) = manifest::parse_config("configuration", bytes) else {
        return;
    };
    let _ = manifest::diff_ids("configuration", &file, 1);
    let _ = file.platform();
    let config = ImageConfig::from(file);
    let _ = config.process(&[b"argument".to_vec()], None);
    let _ = config.environment(&[(b"A".to_vec(), b"b".to_vec())]);
}
