//! Builds OCI layouts and applies them.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use bantam_image::{
    Digest, Error, Image, ImageSource, NoProgress, Platform, ResolveOptions, Store,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::erofs::Files;
use super::{read_erofs, run, tarball::Tar};

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

pub(crate) fn digest(bytes: &[u8]) -> String {
    Digest::of(bytes).to_string()
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An OCI layout in a temporary directory.
pub(crate) struct Layout {
    pub(crate) dir: TempDir,
    manifests: Vec<Value>,
}

impl Layout {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
        fs::write(
            dir.path().join("oci-layout"),
            r#"{"imageLayoutVersion":"1.0.0"}"#,
        )
        .unwrap();
        Self {
            dir,
            manifests: Vec::new(),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn blob_path(&self, digest: &str) -> PathBuf {
        self.path()
            .join("blobs/sha256")
            .join(digest.trim_start_matches("sha256:"))
    }

    /// Stores a blob and describes it.
    pub(crate) fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = digest(bytes);
        fs::write(self.blob_path(&digest), bytes).unwrap();
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    }

    pub(crate) fn json(&self, media_type: &str, value: &Value) -> Value {
        self.blob(media_type, value.to_string().as_bytes())
    }

    /// A configuration for this host.
    pub(crate) fn config(diff_ids: &[String]) -> Value {
        json!({
            "architecture": Platform::host().architecture, "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        })
    }

    /// A manifest of `layers`, each as stored and its diff_id.
    pub(crate) fn manifest(&self, layers: &[(Vec<u8>, String)], config: &Value) -> Value {
        let described: Vec<Value> = layers
            .iter()
            .map(|(blob, _)| self.blob(OCI_LAYER, blob))
            .collect();
        let config = self.json(OCI_CONFIG, config);
        self.json(
            OCI_MANIFEST,
            &json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": described}),
        )
    }

    /// Adds an image of plain layers.
    pub(crate) fn image(&mut self, layers: &[Vec<u8>]) -> Value {
        let layers: Vec<_> = layers.iter().map(|l| (l.clone(), digest(l))).collect();
        let ids: Vec<_> = layers.iter().map(|l| l.1.clone()).collect();
        let manifest = self.manifest(&layers, &Self::config(&ids));
        self.add(manifest.clone());
        manifest
    }

    /// Puts a descriptor into the index.
    pub(crate) fn add(&mut self, descriptor: Value) {
        self.manifests.push(descriptor);
        let index =
            json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": self.manifests});
        fs::write(self.path().join("index.json"), index.to_string()).unwrap();
    }

    /// Packs the layout into an archive, which is compressed if it is named `*.gz`.
    pub(crate) fn pack(&self, archive: &Path) {
        let (from, to) = (self.path().to_str().unwrap(), archive.to_str().unwrap());
        run("tar", &["-C", from, "-caf", to, "."]);
    }

    pub(crate) fn source(&self) -> ImageSource {
        ImageSource::OciLayoutDir(self.path().to_owned())
    }

    pub(crate) fn resolve(&self, options: &ResolveOptions) -> Result<(Image, TempDir), Error> {
        let store = tempfile::tempdir().unwrap();
        let image = Store::open(store.path())?.resolve(&self.source(), options, &NoProgress)?;
        Ok((image, store))
    }

    pub(crate) fn files(&self) -> Result<Files, Error> {
        let (image, _store) = self.resolve(&ResolveOptions::default())?;
        Ok(read_erofs(&image.rootfs))
    }
}

/// Applies archives as the layers of one image, lowest first.
pub(crate) fn apply(layers: &[Tar]) -> Result<Files, Error> {
    apply_with(layers, &ResolveOptions::default())
}

pub(crate) fn apply_with(layers: &[Tar], options: &ResolveOptions) -> Result<Files, Error> {
    let layers: Vec<Vec<u8>> = layers.iter().map(|l| l.clone().finish()).collect();
    let mut layout = Layout::new();
    layout.image(&layers);
    let (image, _store) = layout.resolve(options)?;
    Ok(read_erofs(&image.rootfs))
}
