//! EROFS images, written uncompressed and without privileges.
//!
//! The on-disk format is that of Linux `fs/erofs/erofs_fs.h`. What this writer chooses from it:
//!
//! - 4 KiB blocks; block 0 holds the superblock (with its CRC-32C), then come file contents in the order in which
//!   they arrived, then directory blocks, then inodes. Metadata last is what lets contents stream: nothing but
//!   metadata is held in memory.
//! - Every inode is the 64-byte kind: the 32-byte kind has no modification time of its own.
//! - Files are flat. Those below [`TAIL_PACKED_BELOW`] bytes keep their last partial block beside the inode;
//!   larger ones are whole blocks, so that a guest can map them straight from the image (DAX).
//! - Contents that a later layer replaced or removed are punched out of the finished file: they cost no space and
//!   read as zeros. Zero blocks and the holes of sparse files are never written, so they are holes on the host too.
//! - Nothing comes from the clock or a random source. The UUID is derived from all metadata and the caller's seed;
//!   the same input gives the same bytes.

mod data;
mod format;
mod tree;
mod write;
mod xattr;

pub use data::{ContentWriter, DataArea, Extent, TAIL_PACKED_BELOW};
pub use format::{BLOCK, device};
pub use tree::{Attributes, InodeId, Kind, Tree};
pub use write::{Summary, write};
pub use xattr::Xattrs;
