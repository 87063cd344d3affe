//! Images out of the store, as OCI archives.

use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::json;
use tar::{Builder, EntryType, Header};

use super::content::{Content, descriptor};
use super::{BlobInfo, Store};
use crate::digest::{Digest, HashingReader};
use crate::error::{Error, Result};
use crate::manifest::{CONTAINERD_NAME, OCI_INDEX, REF_NAME};
use crate::reference::Reference;

impl Store {
    /// Writes the image that `name` means (see [`Store::inspect`]) as an archive of an OCI layout (image-layout.md).
    /// Every blob is checked on its way. If `name` is a reference, the image has it in the archive too.
    ///
    /// The archive of an image that came from `docker save` holds a manifest that [`Store::load`] made, as `docker
    /// save` writes none; where it is loaded, the image goes by that manifest's digest.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the image's blobs are not in the store, as it was made from a root directory or only
    /// run from an archive. After any error what was written is not an archive.
    pub fn save(&self, name: &str, out: &mut dyn Write) -> Result<()> {
        let (entry, _) = self.look_up_one(name)?;
        // Its lease keeps the blobs here.
        let found = self.find_with_record(&entry.digest)?;
        let (_image, record) = found.ok_or_else(|| Error::NoSuchImage {
            image: name.to_owned(),
        })?;
        let complete = self.has_content(&record);
        let content = record.content.filter(|_| complete);
        let content = content.ok_or_else(|| Error::Unsupported {
            what: format!("saving {name}"),
            why: "its layers are not in the store, as it was made from a directory or run from an \
                  archive without loading it; pull or load it first"
                .to_owned(),
        })?;
        let reference = Reference::parse(name).ok();
        let reference = match reference {
            Some(reference) => self.means(&reference, &entry.digest)?.then_some(reference),
            None => None,
        };
        self.write_archive(&content, reference.as_ref(), out)
    }

    /// As [`Store::save`], into a file that appears when it is complete. What is no regular file, a pipe say, is
    /// written to directly.
    ///
    /// # Errors
    /// As [`Store::save`]; also if the file cannot be written.
    pub fn save_file(&self, name: &str, path: &Path) -> Result<()> {
        if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
            let file = File::options().write(true).open(path);
            let mut file = file.map_err(Error::path("open", path))?;
            return self.save(name, &mut file).map_err(|e| e.at(path));
        }
        let dir = match path.parent() {
            Some(dir) if dir != Path::new("") => dir,
            _ => Path::new("."),
        };
        let mut part = tempfile::Builder::new()
            .prefix(".bantam-save-")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(dir)
            .map_err(Error::path("make a file in", dir))?;
        self.save(name, &mut part)
            .and_then(|()| part.as_file().sync_all().map_err(write_failed()))
            .map_err(|e| e.at(path))?;
        part.persist(path)
            .map_err(|e| Error::path("write", path)(e.error))?;
        Ok(())
    }

    /// Whether the reference is a name of that image, and not a digest that looks like one.
    fn means(&self, reference: &Reference, digest: &Digest) -> Result<bool> {
        let full = reference.to_string();
        Ok(reference.digest().is_none()
            && self.pointers("refs")?.iter().any(|named| {
                named.means(digest) && named.reference().is_some_and(|(name, _)| name == full)
            }))
    }

    fn write_archive(
        &self,
        content: &Content,
        reference: Option<&Reference>,
        out: &mut dyn Write,
    ) -> Result<()> {
        let mut tar = Builder::new(BufWriter::with_capacity(128 * 1024, out));
        let mut entry = descriptor(&content.manifest);
        if let Some(reference) = reference {
            let name = reference.to_string();
            entry["annotations"] = json!({(REF_NAME): &name, (CONTAINERD_NAME): &name});
        }
        let index = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]});
        let layout = json!({"imageLayoutVersion": "1.0.0"});
        append(&mut tar, "oci-layout", layout.to_string().as_bytes())?;
        append(&mut tar, "index.json", index.to_string().as_bytes())?;
        let mut dirs = vec!["blobs/".to_owned()];
        for blob in content.blobs() {
            let digest = Digest::parse(&blob.digest)?;
            let dir = format!("blobs/{}/", digest.algorithm().name());
            if !dirs.contains(&dir) {
                dirs.push(dir);
            }
        }
        for dir in &dirs {
            let mut header = header(EntryType::Directory, 0o755, 0);
            tar.append_data(&mut header, dir, io::empty())
                .map_err(write_failed())?;
        }
        for blob in content.blobs() {
            self.append_blob(&mut tar, blob)?;
        }
        let mut out = tar.into_inner().map_err(write_failed())?;
        out.flush().map_err(write_failed())
    }

    fn append_blob(&self, tar: &mut Builder<impl Write>, blob: &BlobInfo) -> Result<()> {
        let digest = Digest::parse(&blob.digest)?;
        let path = self.blobs().path(&digest);
        let file = File::open(&path).map_err(Error::path("open", &path))?;
        let mut reader = HashingReader::new(file.take(blob.size), digest.algorithm());
        let name = format!("blobs/{}/{}", digest.algorithm().name(), digest.hex());
        let mut header = header(EntryType::Regular, 0o644, blob.size);
        tar.append_data(&mut header, name, &mut reader)
            .map_err(write_failed())?;
        digest.expect(&path.display().to_string(), &reader.finish().0)
    }
}

fn append(tar: &mut Builder<impl Write>, name: &str, bytes: &[u8]) -> Result<()> {
    let mut header = header(EntryType::Regular, 0o644, bytes.len() as u64);
    tar.append_data(&mut header, name, bytes)
        .map_err(write_failed())
}

/// Root's, and of the time 0: one image gives one archive.
fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn write_failed() -> impl FnOnce(io::Error) -> Error {
    Error::io("cannot write the archive")
}
