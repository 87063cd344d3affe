//! Layers: decompression, archive reading, and application to a tree (OCI image-spec layer.md).

mod apply;
mod archive;
mod decode;
mod header;
mod pax;

pub(crate) use apply::Applier;
pub(crate) use archive::{EntryKind, TarReader};
pub(crate) use decode::{Bounded, Compression, decoder, read_failed};
