//! One virtual machine: engines, boot, vCPU threads and device wiring.
//!
//! [`Vm::start`] turns a [`VmConfig`] into a running guest and returns at once; the guest is
//! reached over its [`Vsock`](bantam_virtio::vsock::Vsock). Two engines exist behind one seam:
//!
//! * **native**: our own virtual machine monitor over `bantam-hypervisor`; devices sit on
//!   virtio-mmio, queue notifications and interrupts travel over ioeventfd and irqfd;
//! * **emulated**: a QEMU child process runs the CPU, the memory and the interrupt controller
//!   (TCG), and reaches the very same device code over vhost-user.
//!
//! Nothing here knows of images, records or commands; nothing prints, exits or installs signal
//! handlers (see `bantam-hypervisor` for the one real-time signal that interrupts a vCPU).

mod cmdline;
mod config;
mod console;
mod devices;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod emulated;
mod engine;
mod error;
mod inherited;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod native;
mod network;
mod peer;
mod timeline;
mod vm;

pub use config::{Disk, GuestKernel, MemorySize, VmConfig};
pub use console::ConsoleLog;
pub use engine::{Availability, EngineChoice, EngineKind, EngineReport, emulator, probe_engines};
pub use error::VmmError;
pub use inherited::inherit_nothing;
pub use peer::peer_process;
pub use timeline::{Phase, Timeline};
pub use vm::{ExitCause, Halted, Vm};
