//! Guest RAM of the native engine.
#![allow(unsafe_code)]

use std::sync::Arc;

use bantam_arch::x86_64::layout;
use bantam_hypervisor::{MemorySlot, Vm};
use bantam_virtio::GuestRam;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

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
