//! The x86_64 guest: a PC without firmware, PCI, ACPI, PIT or RTC.
//!
//! What the guest kernel would otherwise probe or measure, it is told: CPUs and interrupts by the
//! MP table, memory by the boot protocol, the TSC's frequency by kvm-clock and CPUID, devices by
//! `virtio_mmio.device=` on the command line. The order of calls:
//!
//! 1. RAM over [`layout::memory_regions`];
//! 2. [`Kernel::open`], [`Kernel::load`], [`boot::load_initrd`];
//! 3. [`boot::prepare`], which writes everything else the kernel expects in memory;
//! 4. [`cpu::configure_vcpu`] on each vCPU's own thread.

pub mod boot;
pub mod cmdline;
pub mod cpu;
pub mod cpuid;
mod kernel;
pub mod layout;
mod mptable;

pub use boot::{Boot, Initrd};
pub use cpu::configure_vcpu;
pub use cpuid::CpuPolicy;
pub use kernel::{CopyOnly, Format, Kernel, LoadedKernel, MapFile, Segment};
