//! Where a kernel's bytes come from: a file, or memory once unpacked.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::{MapFile, Segment};
use crate::x86_64::layout::PAGE;
use crate::{ArchError, GuestRam, Result};

/// Copies `len` bytes of `file` from `offset` on into guest memory at `at`.
pub(in crate::x86_64) fn copy_file(
    ram: &GuestRam,
    file: &mut File,
    offset: u64,
    at: GuestAddress,
    len: usize,
) -> io::Result<()> {
    file.seek(SeekFrom::Start(offset))?;
    ram.read_exact_volatile_from(at, file, len)
        .map_err(io::Error::other)
}

/// Offers the whole pages of a read-only segment to `mapper`. Returns how many bytes it took, from
/// the segment's beginning on.
fn map_pages(
    ram: &GuestRam,
    file: &File,
    segment: &Segment,
    len: usize,
    mapper: &dyn MapFile,
) -> io::Result<usize> {
    let page = usize::try_from(PAGE).unwrap_or(usize::MAX);
    let whole = len / page * page;
    let at = GuestAddress(segment.guest_addr);
    let aligned = segment.file_offset.is_multiple_of(PAGE) && at.0.is_multiple_of(PAGE);
    let can = !segment.writable && aligned && whole > 0 && ram.check_range(at, len);
    let mapped = can && mapper.map(file, segment.file_offset, at, whole)?;
    Ok(if mapped { whole } else { 0 })
}

#[derive(Debug)]
pub(super) enum Source {
    /// The lock guards the file's position.
    File {
        file: Mutex<File>,
        len: u64,
    },
    Bytes(Vec<u8>),
}

impl Source {
    pub(super) fn file(file: File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is not a regular file",
            ));
        }
        Ok(Self::File {
            file: Mutex::new(file),
            len: metadata.len(),
        })
    }

    pub(super) fn len(&self) -> u64 {
        match self {
            Self::File { len, .. } => *len,
            Self::Bytes(bytes) => bytes.len() as u64,
        }
    }

    /// Fills `buffer` from `offset`.
    pub(super) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let failed = || ArchError::kernel(format!("it ends before offset {offset:#x} is complete"));
        match self {
            Self::File { file, .. } => {
                let file = file.lock().unwrap_or_else(PoisonError::into_inner);
                file.read_exact_at(buffer, offset).map_err(|_| failed())
            }
            Self::Bytes(bytes) => {
                let range = usize::try_from(offset)
                    .ok()
                    .and_then(|start| Some(start..start.checked_add(buffer.len())?))
                    .and_then(|range| bytes.get(range))
                    .ok_or_else(failed)?;
                buffer.copy_from_slice(range);
                Ok(())
            }
        }
    }

    /// The bytes `offset..offset + len`, which are checked to exist before they are allocated.
    pub(super) fn read_vec(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len());
        let len = usize::try_from(len)
            .ok()
            .filter(|_| inside)
            .ok_or_else(|| {
                ArchError::kernel(format!(
                    "{len:#x} bytes at offset {offset:#x} are not in the file"
                ))
            })?;
        let mut bytes = vec![0; len];
        self.read_at(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Puts one segment into guest memory: whole pages of a read-only one by `mapper` where it can, all
    /// else copied.
    pub(super) fn load(
        &self,
        ram: &GuestRam,
        segment: &Segment,
        mapper: &dyn MapFile,
    ) -> Result<()> {
        let at = GuestAddress(segment.guest_addr);
        let no_room = || ArchError::Memory {
            what: "a kernel segment",
            addr: segment.guest_addr,
            len: segment.mem_len,
        };
        let mem_len = usize::try_from(segment.mem_len).map_err(|_| no_room())?;
        let file_len = usize::try_from(segment.file_len).map_err(|_| no_room())?;
        if !ram.check_range(at, mem_len) {
            return Err(no_room());
        }
        match self {
            Self::File { file, .. } => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                let mut place = || {
                    let done = map_pages(ram, &file, segment, file_len, mapper)?;
                    // A part of a range in the file and in RAM: neither sum overflows.
                    let offset = segment.file_offset.saturating_add(done as u64);
                    let rest = GuestAddress(at.0.saturating_add(done as u64));
                    copy_file(ram, &mut file, offset, rest, file_len.saturating_sub(done))
                };
                place().map_err(|_| {
                    ArchError::kernel("the file changed or could not be read to its end")
                })
            }
            Self::Bytes(bytes) => {
                let range = usize::try_from(segment.file_offset)
                    .ok()
                    .and_then(|start| Some(start..start.checked_add(file_len)?))
                    .and_then(|range| bytes.get(range))
                    .ok_or_else(|| ArchError::kernel("a segment is not in the file"))?;
                ram.write_slice(range, at).map_err(|_| no_room())
            }
        }
    }
}
