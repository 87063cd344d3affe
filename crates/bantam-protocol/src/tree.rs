//! Files and directories as tar archives, in `Stdin` and `Stdout` frames.

use serde::{Deserialize, Serialize};

/// A file or directory to send as a tar archive.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadTree {
    /// The absolute path. Names in the archive begin with its last component; if that is
    /// `.`, or the path is `/`, they are relative to the directory. A symbolic link on the
    /// way is followed; at the end only if a slash follows it, or `follow_link`.
    pub path: Vec<u8>,
    /// Send what a symbolic link at the end of the path leads to, under the link's name.
    pub follow_link: bool,
}

/// Where to extract the tar archive that follows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteTree {
    /// The absolute path; symbolic links on the way and at the end are followed.
    pub path: Vec<u8>,
    /// What `path` means for the archive.
    pub place: TreePlace,
    /// Give files the owners and the set-user-ID, set-group-ID and sticky bits that the
    /// archive names, instead of root and none.
    pub owners: bool,
}

/// How a path and the names in an archive go together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TreePlace {
    /// The path is a directory; the archive's names are relative to it.
    Inside,
    /// The same, and the directory is made if it is missing.
    Directory,
    /// All names begin with one component, the thing to copy. If the path is a directory
    /// it goes there under `name`; if not, the path is its new name.
    One {
        /// The thing's own name: one component.
        name: Vec<u8>,
        /// Whether it is a directory.
        directory: bool,
    },
}

/// What was moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeSummary {
    /// Files, directories, links and FIFOs.
    pub entries: u64,
    /// Bytes of file contents.
    pub bytes: u64,
    /// Sockets and devices, which are not copied.
    pub skipped: u64,
}
