//! Where an image comes from.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::reference::Reference;

/// Where an image comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSource {
    /// A registry.
    Registry(Reference),
    /// An image that is in the store already.
    Stored(Digest),
    /// A directory in OCI image layout (image-layout.md).
    OciLayoutDir(PathBuf),
    /// A tar of an OCI image layout, or what `docker save` writes; perhaps gzip or zstd compressed.
    Archive(PathBuf),
    /// An archive on standard input.
    Stdin,
    /// A directory that is the root file system itself.
    RootDir(PathBuf),
}

impl ImageSource {
    /// Understands what users type.
    ///
    /// `-` is standard input. A whole digest is an image of the store. `oci:`, `oci-archive:`, `docker-archive:` and `dir:` say what a path is. Text that starts
    /// with `/` or `.`, an existing path with a slash in it, and an existing file with `.tar` or `.tgz` in its name are
    /// looked at: a directory with an `oci-layout` file is a layout, any other directory a root file system, a file an
    /// archive. The rest are references: a directory `python` that happens to be here does not hide the image.
    pub fn parse(text: &str) -> Result<Self> {
        if text == "-" {
            return Ok(Self::Stdin);
        }
        // No tag of a repository called sha256 is that long.
        if let Ok(digest) = Digest::parse(text) {
            return Ok(Self::Stored(digest));
        }
        type Make = fn(PathBuf) -> ImageSource;
        let prefixes: [(&str, Make); 4] = [
            ("oci:", Self::OciLayoutDir),
            ("oci-archive:", Self::Archive),
            ("docker-archive:", Self::Archive),
            ("dir:", Self::RootDir),
        ];
        for (prefix, make) in prefixes {
            if let Some(path) = text.strip_prefix(prefix) {
                if path.is_empty() {
                    return Err(Error::Name {
                        text: text.to_owned(),
                        why: format!("a path must follow {prefix}"),
                    });
                }
                fs::metadata(path).map_err(Error::path("find", Path::new(path)))?;
                return Ok(make(PathBuf::from(path)));
            }
        }
        let path = Path::new(text);
        let is_path = text.starts_with(['/', '.']);
        let may_be_path =
            is_path || text.contains('/') || text.contains(".tar") || text.ends_with(".tgz");
        match fs::metadata(path) {
            Ok(meta) if may_be_path && meta.is_dir() => {
                let is_layout = path.join("oci-layout").is_file();
                Ok(if is_layout {
                    Self::OciLayoutDir(path.into())
                } else {
                    Self::RootDir(path.into())
                })
            }
            Ok(_) if may_be_path => Ok(Self::Archive(path.to_owned())),
            Err(e) if is_path => Err(Error::path("find", path)(e)),
            _ => Reference::parse(text).map(Self::Registry),
        }
    }
}

impl fmt::Display for ImageSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registry(reference) => reference.fmt(f),
            Self::Stored(digest) => digest.fmt(f),
            Self::OciLayoutDir(path) => write!(f, "oci:{}", path.display()),
            Self::Archive(path) | Self::RootDir(path) => path.display().fmt(f),
            Self::Stdin => f.write_str("standard input"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let layout = dir.path().join("layout");
        let rootfs = dir.path().join("rootfs");
        let file = dir.path().join("x.tar");
        fs::create_dir_all(&layout).unwrap();
        fs::create_dir_all(&rootfs).unwrap();
        fs::write(layout.join("oci-layout"), "{}").unwrap();
        fs::write(&file, "").unwrap();
        let parse = |p: &Path| ImageSource::parse(p.to_str().unwrap()).unwrap();

        assert_eq!(ImageSource::parse("-").unwrap(), ImageSource::Stdin);
        let digest = Digest::of(b"");
        assert_eq!(
            ImageSource::parse(&digest.to_string()).unwrap(),
            ImageSource::Stored(digest)
        );
        assert!(matches!(
            ImageSource::parse("sha256:abc").unwrap(),
            ImageSource::Registry(_)
        ));
        assert_eq!(parse(&layout), ImageSource::OciLayoutDir(layout.clone()));
        assert_eq!(parse(&rootfs), ImageSource::RootDir(rootfs.clone()));
        assert_eq!(parse(&file), ImageSource::Archive(file.clone()));
        let prefixed = |prefix: &str, p: &Path| {
            ImageSource::parse(&format!("{prefix}{}", p.display())).unwrap()
        };
        assert_eq!(
            prefixed("dir:", &layout),
            ImageSource::RootDir(layout.clone())
        );
        assert_eq!(prefixed("oci:", &layout), ImageSource::OciLayoutDir(layout));
        assert_eq!(
            prefixed("oci-archive:", &file),
            ImageSource::Archive(file.clone())
        );
        assert_eq!(
            prefixed("docker-archive:", &file),
            ImageSource::Archive(file)
        );
        // The tests run in the crate's directory, which has one of that name.
        assert!(Path::new("src").is_dir());
        assert!(matches!(
            ImageSource::parse("src").unwrap(),
            ImageSource::Registry(_)
        ));
        assert!(matches!(
            ImageSource::parse("python:3.12-slim").unwrap(),
            ImageSource::Registry(_)
        ));
        assert!(matches!(
            ImageSource::parse("ghcr.io/a/b@sha256:00"),
            Err(Error::Name { .. })
        ));
    }

    #[test]
    fn a_missing_path_is_named() {
        for text in [
            "./missing.tar",
            "/no/such/dir",
            "../nope",
            "dir:/no/such",
            "oci:nowhere",
        ] {
            let error = ImageSource::parse(text).unwrap_err().to_string();
            let path = text.trim_start_matches("dir:").trim_start_matches("oci:");
            assert!(error.contains(path), "{error}");
        }
        assert!(ImageSource::parse("dir:").is_err());
    }
}
