//! Memory layouts, boot protocols and CPU policy per architecture.
//!
//! Everything here is a function of plain data: guest RAM (a `vm-memory` map), a kernel file and a
//! vCPU count go in; bytes in guest RAM and register values come out. Nothing here creates a virtual
//! machine, and the only contact with a hypervisor is [`bantam_hypervisor::x86::X86Vcpu`].
//!
//! * [`x86_64`]: kernels (ELF, bzImage), the 64-bit Linux boot protocol, the MP table,
//!   CPUID and MSR policy;
//! * [`aarch64`]: the memory layout; the boot path does not exist yet.
//!
//! The host runs guests of its own architecture, so only that one's boot path is compiled.

pub mod aarch64;
mod error;
#[cfg(target_arch = "x86_64")]
pub mod x86_64;

pub use error::ArchError;

/// Result of this crate's calls.
pub type Result<T> = std::result::Result<T, ArchError>;

/// Guest RAM, as the whole project uses it.
pub type GuestRam = vm_memory::GuestMemoryMmap<()>;
