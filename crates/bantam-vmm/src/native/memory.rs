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
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

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
    ram.iter().for_each(ask_for_huge_pages);
    Ok(Arc::new(ram))
}

/// Has the host give memory in pages of 2 MiB where a guest touches it. Each page that it gives costs
/// the guest an exit; a boot touches some 25 MiB in 4 KiB pages and 29 MiB in these.
fn ask_for_huge_pages(region: &GuestRegionMmap<()>) {
    let host: *mut c_void = region.as_ptr().cast();
    // SAFETY: the range is the region's own mapping, of anonymous memory. The advice changes how it is
    // given, not what is in it.
    let advised = unsafe { madvise(host, region.size(), Advice::LinuxHugepage) };
    if let Err(error) = advised {
        // A kernel built without them.
        tracing::debug!(%error, "no huge pages for guest memory");
    }
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

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use vm_memory::Bytes;

    use super::*;

    const PAGE: usize = 4096;

    fn ram() -> Arc<GuestRam> {
        reserve(MemorySize::from_mib(64).unwrap()).unwrap()
    }

    /// Two pages: of ones and of twos.
    fn file(mode: u32) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[[1; PAGE], [2; PAGE]].concat()).unwrap();
        file.as_file()
            .set_permissions(Permissions::from_mode(mode))
            .unwrap();
        file
    }

    fn page(ram: &GuestRam, at: u64) -> [u8; PAGE] {
        let mut bytes = [0; PAGE];
        ram.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    #[test]
    fn a_file_that_nobody_may_write_to_is_mapped_and_stays_as_it_is() {
        let (ram, file) = (ram(), file(0o444));
        let at = GuestAddress(0x10_0000);
        let mapped = Mapper(&ram).map(file.as_file(), PAGE as u64, at, PAGE);
        assert!(mapped.unwrap());
        assert_eq!(page(&ram, 0x10_0000), [2; PAGE]);
        for beside in [0x10_0000 - PAGE as u64, 0x10_0000 + PAGE as u64] {
            assert_eq!(page(&ram, beside), [0; PAGE]);
        }
        ram.write_obj(9u8, at).unwrap();
        assert_eq!(page(&ram, 0x10_0000)[..2], [9, 2]);
        let on_disk = std::fs::read(file.path()).unwrap();
        assert_eq!(on_disk[PAGE..], [2; PAGE]);
    }

    #[test]
    fn a_file_that_somebody_may_write_to_is_not_mapped() {
        let ram = ram();
        for mode in [0o644, 0o464, 0o446] {
            let file = file(mode);
            let at = GuestAddress(0x10_0000);
            let mapped = Mapper(&ram).map(file.as_file(), 0, at, PAGE);
            assert!(!mapped.unwrap(), "{mode:o}");
            assert_eq!(page(&ram, 0x10_0000), [0; PAGE]);
        }
    }

    #[test]
    fn nothing_beyond_the_end_of_a_file_or_of_memory_is_mapped() {
        let (ram, file) = (ram(), file(0o444));
        let map = |offset: usize, at: u64| {
            let mapper = Mapper(&ram);
            let mapped = mapper.map(file.as_file(), offset as u64, GuestAddress(at), PAGE * 2);
            mapped.unwrap()
        };
        assert!(!map(PAGE, 0x10_0000));
        assert!(!map(0, (64 << 20) - PAGE as u64));
        assert!(map(0, (64 << 20) - 2 * PAGE as u64));
    }
}
