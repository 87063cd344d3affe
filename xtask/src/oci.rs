//! Writes the smallest OCI image there is: one uncompressed layer, a
//! configuration, a manifest and an index, as a tar archive of an OCI image
//! layout (image-spec `image-layout.md`), deterministic.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::host;

/// What an image says about itself.
pub(crate) struct Config<'a> {
    /// The tag in the index, such as `python:3`.
    pub(crate) reference: &'a str,
    /// The default command.
    pub(crate) cmd: &'a [&'a str],
    /// Environment as `NAME=value`.
    pub(crate) env: &'a [&'a str],
}

/// Turns the tar archive `layer` into the image archive `to`.
pub(crate) fn write_archive(layer: &Path, config: &Config<'_>, to: &Path) -> Result<()> {
    let (layer_hex, layer_size) = digest_file(layer)?;
    let layer_digest = format!("sha256:{layer_hex}");
    let image = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": { "Cmd": config.cmd, "Env": config.env },
        "rootfs": { "type": "layers", "diff_ids": [layer_digest] },
    })
    .to_string();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", &image),
        "layers": [{
            "mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": layer_digest,
            "size": layer_size,
        }],
    })
    .to_string();
    let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
    entry["annotations"] = json!({ "org.opencontainers.image.ref.name": config.reference });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [entry],
    })
    .to_string();

    let partial = host::partial_path(to);
    let file = File::create(&partial).map_err(Error::file("creating", &partial))?;
    let write = || -> io::Result<()> {
        let mut tar = tar::Builder::new(io::BufWriter::new(file));
        append(&mut tar, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        append(&mut tar, "index.json", index.as_bytes())?;
        for blob in [&manifest, &image] {
            append(
                &mut tar,
                &blob_path(&host::sha256(blob.as_bytes())),
                blob.as_bytes(),
            )?;
        }
        let contents = BufReader::new(File::open(layer)?);
        append_stream(&mut tar, &blob_path(&layer_hex), layer_size, contents)?;
        tar.into_inner()?.flush()
    };
    write().map_err(Error::file("writing", &partial))?;
    std::fs::rename(&partial, to).map_err(Error::file("renaming", &partial))
}

fn descriptor(media_type: &str, blob: &str) -> Value {
    json!({
        "mediaType": media_type,
        "digest": format!("sha256:{}", host::sha256(blob.as_bytes())),
        "size": blob.len(),
    })
}

fn blob_path(hex: &str) -> String {
    format!("blobs/sha256/{hex}")
}

fn append<W: Write>(tar: &mut tar::Builder<W>, path: &str, bytes: &[u8]) -> io::Result<()> {
    let size = u64::try_from(bytes.len()).map_err(io::Error::other)?;
    append_stream(tar, path, size, bytes)
}

fn append_stream<W: Write, R: Read>(
    tar: &mut tar::Builder<W>,
    path: &str,
    size: u64,
    contents: R,
) -> io::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_size(size);
    header.set_mode(0o644);
    header.set_mtime(0);
    tar.append_data(&mut header, path, contents)
}

/// SHA-256 (hex) and size of a file.
fn digest_file(path: &Path) -> Result<(String, u64)> {
    let file = File::open(path).map_err(Error::file("opening", path))?;
    let mut hasher = Sha256::new();
    let mut size = 0;
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let mut chunk = vec![0; 1 << 20];
    loop {
        let n = reader
            .read(&mut chunk)
            .map_err(Error::file("reading", path))?;
        if n == 0 {
            return Ok((host::hex(&hasher.finalize()), size));
        }
        hasher.update(&chunk[..n]);
        size += n as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn another_tool_reads_the_archive() {
        let dir = tempfile::tempdir().unwrap();
        let layer = dir.path().join("layer.tar");
        let mut tar = tar::Builder::new(File::create(&layer).unwrap());
        append(&mut tar, "hello", b"world").unwrap();
        tar.into_inner().unwrap();
        let image = dir.path().join("image.tar");
        let config = Config {
            reference: "tiny:1",
            cmd: &["sh"],
            env: &["A=b"],
        };
        write_archive(&layer, &config, &image).unwrap();
        let out = Command::new("skopeo")
            .arg("inspect")
            .arg("--config")
            .arg(format!("oci-archive:{}", image.display()))
            .output();
        let Ok(out) = out else {
            println!("skipped: another_tool_reads_the_archive: no skopeo on this machine");
            return;
        };
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{said}");
        let config: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(config["config"]["Cmd"], json!(["sh"]));
        assert_eq!(config["config"]["Env"], json!(["A=b"]));
    }
}
