//! Kernel files: what they are, whether they are sane, and getting them into guest memory.
//!
//! A kernel file is foreign data. Every offset and length in it is checked against the file and
//! against named limits before it is used, and nothing is executed on the host. `linux-loader`
//! provides the structures; its loaders are not called, because they load whatever the program
//! headers say before anyone could look at them (it had a note parser that never ended,
//! GHSA-52h2-m2cf-9jh6), and because they know neither compressed payloads nor limits.

mod compress;
mod elf;
mod setup_header;
mod source;

use std::fs::File;
use std::io;
use std::path::Path;

use vm_memory::GuestAddress;

use crate::{ArchError, GuestRam, Result};
use compress::Compression;
use source::Source;
pub(super) use source::copy_file;

/// Largest kernel, compressed or not, in bytes. A distribution's kernel is some 70 MB unpacked.
const MAX_KERNEL: u64 = 512 << 20;

/// What kind of file a kernel came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// An uncompressed ELF file (`vmlinux`): nothing to unpack, the quickest.
    Elf,
    /// A compressed ELF file (`vmlinux.zst`), unpacked on the host.
    CompressedElf,
    /// A `bzImage` (`vmlinuz`), whose payload is unpacked on the host: the guest would need
    /// hundreds of millions of instructions for it.
    BzImage,
}

/// A range of the kernel file that belongs into guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where it is in the (unpacked) file.
    pub file_offset: u64,
    /// Bytes in the file.
    pub file_len: u64,
    /// Where it belongs in guest memory.
    pub guest_addr: u64,
    /// Bytes in guest memory, at least `file_len`; the rest is zero.
    pub mem_len: u64,
    /// The kernel says that it writes there.
    pub writable: bool,
}

/// A kernel that was found sane.
#[derive(Debug)]
pub struct Kernel {
    source: Source,
    format: Format,
    image: elf::Image,
}

/// A kernel in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadedKernel {
    /// First instruction, in 64-bit mode.
    pub entry: GuestAddress,
    /// Its first byte.
    pub start: GuestAddress,
    /// The first byte behind it, its bss included.
    pub end: GuestAddress,
}

/// Puts pages of a file into guest memory without copying them.
pub trait MapFile {
    /// Makes `len` bytes of guest memory at `at` show `file` from `offset` bytes on; what the guest
    /// writes there stays its own. All three are multiples of the page size, and the range is RAM.
    /// Says whether it did; if not, the memory is as it was.
    ///
    /// # Errors
    ///
    /// The memory is beyond use.
    fn map(&self, file: &File, offset: u64, at: GuestAddress, len: usize) -> io::Result<bool>;
}

/// Maps nothing, so that everything is copied.
#[derive(Debug, Clone, Copy)]
pub struct CopyOnly;

impl MapFile for CopyOnly {
    fn map(&self, _: &File, _: u64, _: GuestAddress, _: usize) -> io::Result<bool> {
        Ok(false)
    }
}

impl Kernel {
    /// Opens a kernel file and finds out what it is: an ELF file, as it is or compressed (gzip, xz,
    /// zstd), or a bzImage. An uncompressed ELF file stays on disk until it is loaded; anything else
    /// is unpacked here.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is none of these, or is damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |source| ArchError::KernelFile {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(failed)?;
        let source = Source::file(file).map_err(failed)?;
        Self::from_source(source).map_err(|error| match error {
            ArchError::Kernel { what } => ArchError::kernel(format!("{}: {what}", path.display())),
            other => other,
        })
    }

    /// The same for a kernel in memory.
    ///
    /// # Errors
    ///
    /// As for [`Self::open`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::from_source(Source::Bytes(bytes))
    }

    fn from_source(source: Source) -> Result<Self> {
        if source.len() > MAX_KERNEL {
            return Err(ArchError::Limit {
                what: "the kernel's size in bytes",
                value: source.len(),
                limit: MAX_KERNEL,
            });
        }
        let mut magic = [0; 6];
        source.read_at(0, &mut magic)?;
        let (source, format) = if elf::is_elf(&magic) {
            (source, Format::Elf)
        } else if let Some(compression) = Compression::of(&magic) {
            let packed = source.read_vec(0, source.len())?;
            (
                Source::Bytes(compression.unpack(&packed, MAX_KERNEL)?),
                Format::CompressedElf,
            )
        } else {
            let payload = setup_header::payload(&source)?;
            let packed = source.read_vec(payload.start, payload.end - payload.start)?;
            let unpacked = match Compression::of(&packed) {
                Some(compression) => compression.unpack(&packed, MAX_KERNEL)?,
                None => packed,
            };
            (Source::Bytes(unpacked), Format::BzImage)
        };
        let image = elf::parse(&source)?;
        Ok(Self {
            source,
            format,
            image,
        })
    }

    /// The ELF file inside, if the file was compressed or a bzImage: for someone who loads only ELF.
    pub fn unpacked(&self) -> Option<&[u8]> {
        match &self.source {
            Source::Bytes(bytes) => Some(bytes),
            Source::File { .. } => None,
        }
    }

    /// What kind of file it came in.
    pub fn format(&self) -> Format {
        self.format
    }

    /// What [`Self::load`] puts where.
    pub fn segments(&self) -> &[Segment] {
        &self.image.segments
    }

    /// Copies the kernel into guest memory, which must be fresh, that is, zero.
    ///
    /// # Errors
    ///
    /// If it does not fit into the RAM below the hole, or the file cannot be read.
    pub fn load(&self, ram: &GuestRam) -> Result<LoadedKernel> {
        self.load_with(ram, &CopyOnly)
    }

    /// The same, but the whole pages of an uncompressed kernel's read-only segments are offered to
    /// `mapper` first. To map what the guest writes would not save the copy: it would be made page by
    /// page, with an exit of the guest for each.
    ///
    /// # Errors
    ///
    /// As for [`Self::load`].
    pub fn load_with(&self, ram: &GuestRam, mapper: &dyn MapFile) -> Result<LoadedKernel> {
        for segment in &self.image.segments {
            self.source.load(ram, segment, mapper)?;
        }
        Ok(LoadedKernel {
            entry: GuestAddress(self.image.entry),
            start: GuestAddress(self.image.start),
            end: GuestAddress(self.image.end),
        })
    }
}

impl ArchError {
    fn kernel(what: impl Into<String>) -> Self {
        Self::Kernel { what: what.into() }
    }
}
