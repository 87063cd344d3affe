//! Virtio devices and their transports.
//!
//! A [`VirtioDevice`] is one device written once: it says what it is, offers features, answers
//! reads of its configuration space, and after [`VirtioDevice::activate`] serves its virtqueues on
//! one worker thread of its own. It knows nothing of how the guest reaches it. Two transports carry
//! the same device code:
//!
//! * [`mmio::MmioTransport`]: the virtio-mmio registers (virtio 1.3 §4.2), for a virtual machine
//!   whose exits we handle ourselves;
//! * [`vhost_user::serve`] (feature `vhost-user`, Linux): a vhost-user back-end, for a machine whose
//!   CPU, memory and interrupt controller belong to another process.
//!
//! # The life of a device
//!
//! 1. *Inactive.* The transport holds the guest-writable registers, one [`QueueConfig`] a queue.
//!    Nothing runs.
//! 2. *Activated* on DRIVER_OK. Each ready [`QueueConfig`] is validated and consumed into an
//!    [`ActiveQueue`], which nobody can reconfigure: writes to queue registers are ignored from now
//!    on. The device takes the queues by value and starts its worker.
//! 3. *Reset*, by the guest, by the transport going away, or by dropping the device.
//!    [`VirtioDevice::reset`] stops and joins the worker; it may be called at any time and any
//!    number of times. No request outlives it. The position of each ring stays readable in its
//!    [`QueueCursor`].
//!
//! # What a device may rely on, and what it must do
//!
//! * Every [`Chain`] lies wholly in guest RAM: a chain that does not, that loops, is longer than the
//!   ring allows or mixes up readable and writable parts, arrives with no buffers at all, and the
//!   device answers it as any chain that is too short: used length 0.
//! * A *ring* that is broken (the available index jumped by more than the queue size, a head index
//!   outside the table) stops that queue and sets DEVICE_NEEDS_RESET; the worker then sleeps until
//!   reset.
//! * Work between two looks at the stop signal is bounded, host allocations are bounded by named
//!   constants, and nothing the guest writes makes a worker panic or spin.
//!
//! # Order
//!
//! Devices are independent of each other; the order in which transports are created is the order in
//! which a Linux guest names disks (`vda`, `vdb`, ...). Create the vsock device's [`vsock::Vsock`]
//! listeners before the guest runs: a connection request to a port without a listener is reset.

mod device;
mod error;
mod interrupt;
mod queue;
mod sys;
mod warned;
mod worker;

pub mod block;
pub mod mmio;
pub mod net;
pub mod rng;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(all(feature = "vhost-user", target_os = "linux"))]
pub mod vhost_user;
pub mod vsock;

pub use block::BlockDevice;
pub use device::{Activation, DeviceType, VirtioDevice};
pub use error::{Error, Result};
pub use interrupt::{Interrupt, InterruptLine};
pub use mmio::MmioTransport;
pub use net::{NetBackend, NetDevice};
pub use queue::{
    ActiveQueue, Buffers, Chain, MAX_CHAIN_SEGMENTS, QueueConfig, QueueCursor, QueueWiring,
    Segment, SharedCursor,
};
pub use rng::RngDevice;
pub use sys::EventFd;
pub use vsock::{Vsock, VsockDevice, VsockListener};

/// Guest physical memory, shared by every device of a machine as `Arc<GuestRam>`.
pub type GuestRam = vm_memory::GuestMemoryMmap<()>;

/// Feature bits that belong to the ring and the transport rather than to a device
/// (virtio 1.3 §6).
pub mod features {
    use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
    use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

    /// Descriptors may refer to a table of descriptors.
    pub const RING_INDIRECT_DESC: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
    /// `used_event` and `avail_event` suppress notifications.
    pub const RING_EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
    /// Virtio 1.x. The mmio transport insists on it; a vhost-user front-end may serve a legacy driver.
    pub const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
    /// What every transport offers besides the device's own bits.
    pub const TRANSPORT: u64 = RING_INDIRECT_DESC | RING_EVENT_IDX | VERSION_1;
}
