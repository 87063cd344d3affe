//! Guest RAM of the native engine.
#![allow(unsafe_code)]

use std::sync::Arc;

use bantam_arch::x86_64::layout;
use bantam_hypervisor::{MemorySlot, Vm};
use bantam_virtio::GuestRam;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::{MemorySize, VmmError};

/// Reserves RAM (the host gives each page when the guest first touches it) and puts it into the
/// guest's address space. Whoever holds the result must drop `vm` first.
pub(super) fn map(vm: &dyn Vm, size: MemorySize) -> Result<Arc<GuestRam>, VmmError> {
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
    for (slot, region) in (0..).zip(ram.iter()) {
        let len = usize::try_from(region.len()).map_err(|error| fail(error.to_string()))?;
        let slot = MemorySlot {
            slot,
            guest_addr: region.start_addr().0,
            host_addr: region.as_ptr(),
            len,
            read_only: false,
        };
        // SAFETY: the region is mapped readable and writable for as long as `ram` lives. The
        // machine's supervisor drops the vCPUs and the `Vm` before its reference to `ram`, and on
        // an early return from starting a machine the locals are dropped in that order, too. All
        // access to the region goes through vm-memory's volatile accessors, never a reference.
        unsafe { vm.map_memory(slot) }?;
    }
    Ok(Arc::new(ram))
}
