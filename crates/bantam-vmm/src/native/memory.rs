//! Guest RAM of the native engine.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use bantam_arch::x86_64::{MapFile, layout};
use bantam_hypervisor::{MemorySlot, Vm};
use bantam_virtio::GuestRam;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::{MemorySize, VmmError};

/// Reserves RAM; the host gives each page when the guest first touches it.
pub(super) fn reserve(size: MemorySize) -> Result<Arc<GuestRam>, VmmError> {
    let fail = |reason: String| VmmError::Memory {
        mib: size.mib(),
        reason,
    };
    let ranges = layout::memory_regions(size.bytes())?
        .into_iter()
        .map(|(start, len)| {
            let len = usize::try_from(len).map_err(|error| fail(error.to_string()))?;
            Ok((start, len))
        })
        .collect::<Result<Vec<_>, VmmError>>()?;
    let ram = GuestRam::from_ranges(&ranges).map_err(|error| fail(error.to_string()))?;
    Ok(Arc::new(ram))
}

/// Puts reserved RAM into the guest's address space.
///
/// # Safety
/// `ram` must outlive `vm` and all its vCPUs.
pub(super) unsafe fn map(vm: &dyn Vm, ram: &GuestRam) -> Result<(), VmmError> {
    for (slot, region) in (0..).zip(ram.iter()) {
        let slot = MemorySlot {
            slot,
            guest_addr: region.start_addr().0,
            host_addr: region.as_ptr(),
            len: region.size(),
            read_only: false,
        };
        // SAFETY: the region is mapped readable and writable while `ram` lives, which the caller
        // promises to be longer than `vm`. All access to it goes through vm-memory's volatile
        // accessors, never a reference.
        unsafe { vm.map_memory(slot) }?;
    }
    Ok(())
}

/// Maps files into RAM, private and copied on write, where that is safe: machines then share the
/// host's page cache, and only what a guest touches costs anything.
///
/// The guest would see later changes of a mapped file, and a file that became shorter would end
/// this process with a signal. So only files are mapped that nobody may write to, not even their
/// owner (mode bits): such a file is replaced, which leaves the old one to who has it, and not
/// changed. All others are copied.
pub(super) struct Mapper<'a>(pub(super) &'a Arc<GuestRam>);

/// The permission bits that let somebody write.
const WRITABLE: u32 = 0o222;

impl MapFile for Mapper<'_> {
    fn map(&self, file: &File, offset: u64, at: GuestAddress, len: usize) -> io::Result<bool> {
        let metadata = file.metadata()?;
        let end = offset.checked_add(len as u64);
        let stays = metadata.is_file()
            && metadata.mode() & WRITABLE == 0
            && end.is_some_and(|end| end <= metadata.len());
        // Within one region: two may lie anywhere in this process.
        match self.0.get_slice(at, len) {
            Ok(slice) if stays && slice.len() == len => {
                self.replace(slice.ptr_guard_mut().as_ptr().cast(), len, file, offset)
            }
            _ => Ok(false),
        }
    }
}

impl Mapper<'_> {
    /// Maps `file` over pages of RAM. If that fails they are fresh RAM again.
    fn replace(&self, host: *mut c_void, len: usize, file: &File, offset: u64) -> io::Result<bool> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: `host..host + len` is a part of a mapping that guest RAM owns, in whole pages, and
        // stays one of the same size and access, so what the owner unmaps at its end is still its
        // own. No reference to it exists: guest RAM is only reached through vm-memory's volatile
        // accessors.
        let mapped = unsafe { mmap(host, len, access, flags, file, offset) };
        if mapped.is_ok() {
            return Ok(true);
        }
        // SAFETY: as above. The call that failed may have unmapped the pages.
        let restored = unsafe { mmap_anonymous(host, len, access, flags) };
        if let Err(error) = restored {
            // The start fails with this. What may lie in the gap by then is not the RAM's to unmap.
            std::mem::forget(Arc::clone(self.0));
            return Err(error.into());
        }
        Ok(false)
    }
}
