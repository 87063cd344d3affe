//! Questions about files, and changes to them that move no contents.

use serde::{Deserialize, Serialize};

/// What to do. Paths are absolute; symbolic links on the way are followed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileRequest {
    /// Describe a file: one `FileEntry`, without a name, then `FileDone`.
    Stat {
        /// The path.
        path: Vec<u8>,
        /// Describe what a symbolic link at the end leads to, not the link.
        follow_link: bool,
    },
    /// Describe what is in a directory: a `FileEntry` for each, then `FileDone`.
    List {
        /// The path; a symbolic link at the end is followed.
        path: Vec<u8>,
    },
    /// Make a directory; `FileDone`.
    MakeDir {
        /// The path.
        path: Vec<u8>,
        /// Permission bits (0 to 0o7777).
        mode: u32,
        /// Make missing parents, too, and be content with a directory that is there.
        parents: bool,
    },
    /// Remove a file, a symbolic link or an empty directory; `FileDone`.
    Remove {
        /// The path; a symbolic link at the end is not followed.
        path: Vec<u8>,
        /// Remove a directory with all that is in it.
        recursive: bool,
    },
    /// Give a file another name on the same filesystem, in the place of what has it; `FileDone`.
    Rename {
        /// The old path.
        from: Vec<u8>,
        /// The new path.
        to: Vec<u8>,
    },
}

/// A file's description.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name in its directory; any bytes but `/` and NUL.
    pub name: Vec<u8>,
    /// What it is.
    pub kind: FileKind,
    /// Permission bits (0 to 0o7777).
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its size in bytes.
    pub size: u64,
    /// When its contents changed, in seconds since 1970.
    pub modified: i64,
    /// Where a symbolic link leads.
    pub target: Option<Vec<u8>>,
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO, a socket or a device.
    Other,
}
