use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Why a tree could not be packed or unpacked. Names may be a stranger's: they are quoted, and
/// what is in them cannot talk to a terminal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Something in the file system.
    #[error("cannot copy {path:?}: {source}")]
    File {
        /// What.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file became shorter while it was read.
    #[error("{0:?} became shorter while it was read")]
    Shrank(PathBuf),
    /// The archive is damaged, or holds what it must not.
    #[error("archive {what}{}", at(name))]
    Archive {
        /// What is wrong with it.
        what: &'static str,
        /// At which entry; empty if it is none's.
        name: Vec<u8>,
    },
    /// The archive could not be read or written.
    #[error("the archive could not be moved")]
    Stream(#[source] io::Error),
}

fn at(name: &[u8]) -> String {
    if name.is_empty() {
        return String::new();
    }
    format!(": {:?}", Path::new(OsStr::from_bytes(name)))
}

impl Error {
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let path = path.into();
        |error| Self::File {
            path,
            source: error.into(),
        }
    }

    pub(crate) fn archive(what: &'static str, name: &[u8]) -> Self {
        Self::Archive {
            what,
            name: name.to_vec(),
        }
    }
}
