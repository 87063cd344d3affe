//! Directory trees as tar archives, in both directions, whoever made them.
//!
//! [`pack`] writes a file or a directory as one archive; [`unpack`] makes files of one, as does
//! [`unpack_over`], which keeps a file that is there, and [`unpack_into`] writes its one file into
//! something open. Both sides of a machine use both: what one packs the other unpacks. Memory is
//! bounded by the depth of a tree, by the names in its largest directory, and by what is remembered for the sake
//! of hard links: 64 MiB of names at most where files with several names are packed, and 2^20
//! inode numbers where an archive is unpacked. What a file or an archive says of sizes bounds
//! nothing.
//!
//! An archive is hostile input. `unpack` works below one open directory and nowhere else:
//! every component of a name is opened by itself and without following symbolic links, so
//! that neither a name nor a link that the archive has just made, nor one that was there
//! before, leads out. It makes files, directories, symbolic and hard links and FIFOs, never
//! devices or sockets; a hard link leads only to what the same archive brought; owners and the
//! set-user-ID, set-group-ID and sticky bits are taken over only if asked for, and what the
//! process's umask forbids if wanted so. Where symbolic
//! links lead is the archive's own affair: they are made as they are, and not followed.
//!
//! The format is POSIX ustar with pax records for what does not fit (pax(1)); GNU's long names
//! are read, too. Only the header's layout is the `tar` crate's: its extraction works by path
//! and reads extensions of any length.
#![forbid(unsafe_code)]

mod dirs;
mod error;
mod header;
mod names;
mod pack;
mod pax;
mod reader;
mod sys;
mod through;
mod unpack;

pub use error::Error;
pub use pack::{Source, pack};
pub use through::unpack_into;
pub use unpack::{Place, Unpack, unpack, unpack_over};

/// The longest name of an entry and the longest target of a link, in bytes: what a path may
/// have on Linux.
pub const MAX_NAME: usize = 4096;

/// What was moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Files, directories, links and FIFOs.
    pub entries: u64,
    /// Bytes of file contents.
    pub bytes: u64,
    /// Sockets and devices, which are not copied.
    pub skipped: u64,
}
