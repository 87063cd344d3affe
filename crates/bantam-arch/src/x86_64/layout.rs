//! Guest-physical addresses.
//!
//! ```text
//! 0                      boot structures (GDT, zero page, page tables, seed, command line)
//! 0x9_fc00               reserved up to 1 MiB; the MP table at 0xf_0000
//! 0x10_0000              RAM: the kernel at its own address, the initial ramdisk at the end
//! 0xc000_0000            the hole: virtio-mmio windows, IOAPIC, local APIC, KVM's own pages
//! 0x1_0000_0000          the rest of RAM
//! ```

use bantam_hypervisor::Gsi;
use vm_memory::GuestAddress;

use crate::{ArchError, Result};

/// Size of a page in bytes.
pub const PAGE: u64 = 4096;

/// The GDT of the boot processor, six descriptors.
pub const GDT: GuestAddress = GuestAddress(0x500);
/// The Linux zero page (`struct boot_params`).
pub const ZERO_PAGE: GuestAddress = GuestAddress(0x7000);
/// End of the boot stack; it grows down from here.
pub const BOOT_STACK: GuestAddress = GuestAddress(0x8ff0);
/// Page tables: three pages that map the first GiB.
pub const PAGE_TABLES: GuestAddress = GuestAddress(0x9000);
/// `struct setup_data` with the random seed, in a page of its own.
pub const SETUP_DATA: GuestAddress = GuestAddress(0xc000);
/// The kernel command line.
pub const CMDLINE: GuestAddress = GuestAddress(0x2_0000);
/// Most bytes of a command line, without its terminating NUL (Linux `COMMAND_LINE_SIZE`).
pub const CMDLINE_MAX: usize = 2047;
/// Where conventional memory ends and the reserved range up to [`HIGH_MEMORY`] begins.
pub const LOW_MEMORY_END: GuestAddress = GuestAddress(0x9_fc00);
/// The MP floating pointer and the MP table. One of the places where a kernel must look (MPS 1.4,
/// chapter 4), and the one that has room for 254 CPUs.
pub const MP_TABLE: GuestAddress = GuestAddress(0xf_0000);
/// Start of RAM above 1 MiB; kernels lie here or higher.
pub const HIGH_MEMORY: GuestAddress = GuestAddress(0x10_0000);

/// Start of the hole below 4 GiB that is never RAM.
pub const HOLE_START: u64 = 0xc000_0000;
/// End of the hole.
pub const HOLE_END: u64 = 0x1_0000_0000;
/// The IOAPIC that KVM emulates.
pub const IOAPIC: u64 = 0xfec0_0000;
/// The local APICs that KVM emulates.
pub const LAPIC: u64 = 0xfee0_0000;

/// First virtio-mmio window.
pub const MMIO_START: u64 = 0xd000_0000;
/// Bytes of one virtio-mmio window.
pub const MMIO_SLOT_SIZE: u64 = PAGE;
/// First interrupt of a virtio-mmio device. 0 to 4 belong to the PC: timer, keyboard, cascade, UARTs.
pub const MMIO_FIRST_GSI: u32 = 5;
/// Last pin of the IOAPIC.
pub const LAST_GSI: u32 = 23;
/// Most virtio-mmio devices: one per interrupt, edges cannot be shared.
pub const MMIO_SLOTS: u32 = LAST_GSI - MMIO_FIRST_GSI + 1;

/// Most vCPUs: 8-bit APIC ids 0 to 253, then the IOAPIC's, then broadcast.
pub const MAX_VCPUS: u32 = 254;
/// Most RAM in bytes: 4 TiB less the hole keeps guest addresses within 42 bits, below what any
/// 64-bit CPU with virtualization decodes.
pub const MAX_MEMORY: u64 = (1 << 42) - (HOLE_END - HOLE_START);
/// Least RAM in bytes that a kernel could be loaded into.
pub const MIN_MEMORY: u64 = 2 << 20;

/// The guest-physical ranges of `bytes` of RAM (start, length): one below the hole, and, if that
/// does not suffice, one above it.
///
/// # Errors
///
/// If `bytes` is not a whole number of pages or not within [`MIN_MEMORY`] to [`MAX_MEMORY`].
pub fn memory_regions(bytes: u64) -> Result<Vec<(GuestAddress, u64)>> {
    if bytes > MAX_MEMORY {
        return Err(ArchError::Limit {
            what: "guest memory in bytes",
            value: bytes,
            limit: MAX_MEMORY,
        });
    }
    if bytes < MIN_MEMORY || !bytes.is_multiple_of(PAGE) {
        return Err(ArchError::Memory {
            what: "a kernel in RAM of an unusable size",
            addr: 0,
            len: bytes,
        });
    }
    let below = bytes.min(HOLE_START);
    let mut regions = vec![(GuestAddress(0), below)];
    if bytes > below {
        regions.push((GuestAddress(HOLE_END), bytes - below));
    }
    Ok(regions)
}

/// Where a virtio-mmio device sits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmioSlot {
    /// First address of its window of [`MMIO_SLOT_SIZE`] bytes.
    pub base: u64,
    /// Its interrupt, edge-triggered.
    pub gsi: Gsi,
}

/// The window and the interrupt of virtio-mmio device `index`; `None` from [`MMIO_SLOTS`] on.
pub fn mmio_slot(index: u32) -> Option<MmioSlot> {
    (index < MMIO_SLOTS).then(|| MmioSlot {
        base: MMIO_START + u64::from(index) * MMIO_SLOT_SIZE,
        gsi: Gsi(MMIO_FIRST_GSI + index),
    })
}

/// The virtio-mmio device whose window contains `addr`, and the offset in its window.
pub fn mmio_slot_at(addr: u64) -> Option<(u32, u64)> {
    let offset = addr.checked_sub(MMIO_START)?;
    let index = u32::try_from(offset / MMIO_SLOT_SIZE).ok()?;
    (index < MMIO_SLOTS).then_some((index, offset % MMIO_SLOT_SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn ram_has_a_hole_below_4_gib() {
        let low = GuestAddress(0);
        let high = GuestAddress(4 * GIB);
        assert_eq!(memory_regions(256 << 20).unwrap(), [(low, 256 << 20)]);
        assert_eq!(memory_regions(3 * GIB).unwrap(), [(low, 3 * GIB)]);
        assert_eq!(
            memory_regions(3 * GIB + PAGE).unwrap(),
            [(low, 3 * GIB), (high, PAGE)]
        );
        assert_eq!(
            memory_regions(5 * GIB).unwrap(),
            [(low, 3 * GIB), (high, 2 * GIB)]
        );
    }

    #[test]
    fn unusable_sizes_are_refused() {
        for bytes in [
            0,
            PAGE,
            MIN_MEMORY - PAGE,
            MIN_MEMORY + 1,
            MAX_MEMORY + PAGE,
            u64::MAX,
        ] {
            assert!(memory_regions(bytes).is_err(), "{bytes:#x}");
        }
        assert!(memory_regions(MAX_MEMORY).is_ok());
    }

    #[test]
    fn every_device_has_a_window_and_an_interrupt_of_its_own() {
        let slots: Vec<_> = (0..MMIO_SLOTS).map(|i| mmio_slot(i).unwrap()).collect();
        assert_eq!(slots.len(), 19);
        assert_eq!((slots[0].base, slots[0].gsi), (0xd000_0000, Gsi(5)));
        assert_eq!((slots[18].base, slots[18].gsi), (0xd001_2000, Gsi(23)));
        assert_eq!(mmio_slot(19), None);
        assert_eq!(mmio_slot(u32::MAX), None);
        for (index, slot) in (0..).zip(&slots) {
            assert_eq!(mmio_slot_at(slot.base), Some((index, 0)));
            assert_eq!(mmio_slot_at(slot.base + 0xfff), Some((index, 0xfff)));
        }
        assert_eq!(mmio_slot_at(MMIO_START - 1), None);
        assert_eq!(mmio_slot_at(slots[18].base + MMIO_SLOT_SIZE), None);
        assert_eq!(mmio_slot_at(u64::MAX), None);
    }
}
