//! The bounds that keep a hostile image from filling memory or disk.

/// Bounds on what one image may contain. Reaching one is an [`Error::Limit`](crate::Error::Limit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Layers in a manifest.
    pub layers: usize,
    /// Archive entries over all layers.
    pub entries: u64,
    /// Bytes of names, link targets and extended attributes held in memory.
    pub metadata_bytes: u64,
    /// Decompressed bytes over all layers, bytes of these as they are stored, and bytes of the finished image.
    pub content_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            layers: 512,
            entries: 2_000_000,
            metadata_bytes: 512 << 20,
            content_bytes: 64 << 30,
        }
    }
}

/// A manifest, index or configuration (the distribution-spec's own floor for manifests is 4 MiB).
pub(crate) const MAX_DOCUMENT: u64 = 4 << 20;
/// An error body or token reply of a registry.
pub(crate) const MAX_REPLY: u64 = 256 << 10;
/// An entry name or link target (Linux `PATH_MAX`, without the terminator).
pub(crate) const MAX_PATH: usize = 4095;
/// One component of a path.
pub(crate) const MAX_NAME: usize = 255;
/// One PAX header or GNU long name.
pub(crate) const MAX_EXTENSION: u64 = 1 << 20;
/// One extended attribute's value (EROFS stores the length in 16 bits).
pub(crate) const MAX_XATTR_VALUE: usize = 65_535;
/// All extended attributes of one file, encoded.
pub(crate) const MAX_XATTRS: usize = 240 << 10;
/// Data extents of one sparse file.
pub(crate) const MAX_SPARSE_EXTENTS: usize = 1 << 17;
/// Symlinks followed while resolving one path (Linux follows 40).
pub(crate) const MAX_SYMLINKS: usize = 40;
/// Components of the targets of those symlinks, together. As many as one path can have; no image comes near, but one
/// whose every entry goes through forty long links would take hours.
pub(crate) const MAX_DETOUR: usize = MAX_PATH / 2;
/// Indexes inside indexes.
pub(crate) const MAX_INDEX_DEPTH: usize = 4;
/// Manifests and indexes looked at until the image is found: an index may list the same one again and again.
pub(crate) const MAX_MANIFESTS: usize = 1000;
/// The same, for all images of an archive or layout that are loaded together.
pub(crate) const MAX_LAYOUT_MANIFESTS: usize = 10_000;
/// Names of an archive or layout that are loaded together: each may be an image of its own with the [`Limits`] of one.
pub(crate) const MAX_LOADED_NAMES: usize = 1000;
/// Entries of an image archive (blobs, not files of the image).
pub(crate) const MAX_ARCHIVE_ENTRIES: usize = 100_000;
