//! Where a kernel's bytes come from: a file, or memory once unpacked.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::{MapFile, Segment};
use crate::x86_64::layout::PAGE;
use crate::{ArchError, GuestRam, Result};

/// Puts `len` bytes of `file` from `offset` on into guest memory at `at`: whole pages by `mapper`
/// where it can, all else copied.
pub(in crate::x86_64) fn place_file(
    ram: &GuestRam,
    file: &mut File,
    offset: u64,
    at: GuestAddress,
    len: usize,
    mapper: &dyn MapFile,
) -> io::Result<()> {
    let page = usize::try_from(PAGE).unwrap_or(usize::MAX);
    let whole = len / page * page;
    let aligned = offset.is_multiple_of(PAGE) && at.0.is_multiple_of(PAGE);
    let mapped =
        aligned && whole > 0 && ram.check_range(at, len) && mapper.map(file, offset, at, whole)?;
    let done = if mapped { whole } else { 0 };
    if done == len {
        return Ok(());
    }
    // A fresh range: neither overflows, as the end of the file and of RAM are beyond.
    let (done_u64, rest) = (done as u64, len - done);
    file.seek(SeekFrom::Start(offset.saturating_add(done_u64)))?;
    let at = GuestAddress(at.0.saturating_add(done_u64));
    ram.read_exact_volatile_from(at, file, rest)
        .map_err(io::Error::other)
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

    /// Puts one segment into guest memory: whole pages by `mapper` where it can, all else copied.
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
                place_file(ram, &mut file, segment.file_offset, at, file_len, mapper).map_err(
                    |_| ArchError::kernel("the file changed or could not be read to its end"),
                )
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
