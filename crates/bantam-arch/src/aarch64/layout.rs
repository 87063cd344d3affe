//! Guest-physical addresses of the aarch64 machine.
//!
//! RAM starts at 1 GiB, so that it is one range whatever its size; below it lie the interrupt
//! controller and the devices.

/// Start of RAM. The kernel image goes at its start, 2 MiB aligned (`Documentation/arch/arm64/
/// booting.rst`).
pub const RAM_START: u64 = 0x4000_0000;

/// GICv3 distributor, 64 KiB.
pub const GIC_DISTRIBUTOR: u64 = 0x0800_0000;
/// Bytes of the distributor's window.
pub const GIC_DISTRIBUTOR_SIZE: u64 = 0x1_0000;
/// GICv3 redistributors, [`GIC_REDISTRIBUTOR_SIZE`] per vCPU.
pub const GIC_REDISTRIBUTORS: u64 = 0x080a_0000;
/// Bytes of one vCPU's redistributor.
pub const GIC_REDISTRIBUTOR_SIZE: u64 = 0x2_0000;

/// First virtio-mmio window.
pub const MMIO_START: u64 = 0x0a00_0000;
/// Bytes of one virtio-mmio window.
pub const MMIO_SLOT_SIZE: u64 = 0x1000;
/// First shared peripheral interrupt of a virtio-mmio device (interrupt id 32 + this).
pub const MMIO_FIRST_SPI: u32 = 16;
