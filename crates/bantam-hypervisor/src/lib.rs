//! Hypervisor traits and backends.
//!
//! A virtual machine is built in stages, and each stage only offers what is valid in it:
//!
//! 1. [`Hypervisor`]: the host's facility, opened once; says its [`Capabilities`];
//! 2. [`Vm`]: memory slots, the interrupt controller, event file descriptors;
//! 3. [`VcpuBinder`]: a created vCPU that may still be sent to another thread;
//! 4. [`Vcpu`]: bound to the thread that called [`VcpuBinder::bind`] for good (Apple's
//!    Hypervisor.framework demands this; KVM merely likes it). It is not `Send`.
//!
//! The traits assume neither KVM nor x86. What only one architecture has sits behind an accessor
//! that returns an `Option` ([`Vcpu::x86`]). No backend type appears in the public API.
//!
//! Backends: `kvm` (Linux, x86_64) and [`mock`] (scripted exits, for tests of the layers above).
//! [`probe`] tells what the host offers without creating a virtual machine.
//!
//! # Signals
//!
//! Another thread gets a vCPU out of the guest with [`VcpuKicker::kick`]. On KVM this takes a
//! signal, and this crate is a library, so it must leave the process's signals alone. It therefore
//! installs **no handler**. `bind` blocks one real-time signal (`kvm::kick_signal`, `SIGRTMIN + 9`)
//! on the vCPU's own thread, and `KVM_SET_SIGNAL_MASK` unblocks it for the time of `KVM_RUN` only. A
//! kick then makes `KVM_RUN` return `EINTR`, the signal is still pending and blocked, and `run`
//! takes it off the queue with `sigtimedwait`. No disposition, no other thread's mask and no other
//! signal changes; dropping the vCPU restores the thread's mask. The alternative, `immediate_exit`
//! in the shared `kvm_run` page plus a no-op handler, saves two mask switches for each exit to user
//! space (well under 1 % of such an exit) but needs a process-wide handler. An embedder must only
//! refrain from using that one signal number process-directed. A seccomp filter for vCPU threads
//! needs `ioctl`, `rt_sigprocmask`, `rt_sigtimedwait` and `gettid`; for kicking threads `getpid` and
//! `tgkill`.

mod error;
mod exit;
mod host;
pub mod mock;
mod sys;
mod traits;
pub mod x86;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub mod kvm;

pub use error::HypervisorError;
pub use exit::{Exit, ExitCounts, SystemEvent};
pub use host::{HostKind, HostProbe, HwExtension, UnusableReason};
pub use sys::EventFd;
pub use traits::{
    Capabilities, DataMatch, Gsi, Hypervisor, IoAddress, MemorySlot, Vcpu, VcpuBinder, VcpuKicker,
    Vm, VmConfig,
};

/// Result of this crate's calls.
pub type Result<T> = std::result::Result<T, HypervisorError>;

/// Says what the host's hypervisor can do. Creates no virtual machine, runs no guest code and never
/// blocks: it opens the device and asks for numbers.
pub fn probe() -> HostProbe {
    sys::probe()
}

/// Opens the host's hypervisor.
///
/// # Errors
///
/// [`HypervisorError::Unavailable`] with the same reason as [`probe`] gives. A software KVM opens:
/// whether that is good enough is the caller's decision, see [`HostProbe::kind`].
pub fn open() -> Result<Box<dyn Hypervisor>> {
    sys::open()
}
