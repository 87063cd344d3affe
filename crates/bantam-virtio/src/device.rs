//! The contract between a device and its transport.

use std::sync::Arc;

use crate::{ActiveQueue, GuestRam, Result};

/// Virtio device identifiers (virtio 1.3 §5). The list is closed: what is not here does not exist
/// for a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum DeviceType {
    /// A network card (§5.1).
    Net = 1,
    /// A disk (§5.2).
    Block = 2,
    /// An entropy source (§5.4).
    Entropy = 4,
    /// A socket device (§5.10).
    Vsock = 19,
}

impl DeviceType {
    /// The identifier the guest sees.
    pub fn id(self) -> u32 {
        self as u32
    }
}

/// A device, running or not.
///
/// Calls come from one thread at a time. The order is: any number of configuration reads and
/// writes, `activate`, again configuration accesses, `reset`, and so on; dropping resets.
pub trait VirtioDevice: Send {
    /// What the device is.
    fn device_type(&self) -> DeviceType;

    /// The largest size the guest may choose for each queue, in descriptors; powers of two. Its
    /// length is the number of queues.
    fn queue_max_sizes(&self) -> &[u16];

    /// The device's own feature bits (0 to 23 and 50 upwards). The transport adds
    /// [`features::TRANSPORT`](crate::features::TRANSPORT).
    fn features(&self) -> u64;

    /// Reads the device-specific configuration space at `offset` bytes. Total: bytes beyond its end
    /// read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the device-specific configuration space. Fields that the driver may not write, and
    /// bytes beyond the end, are ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Starts serving `activation.queues`.
    ///
    /// The transport guarantees that `features` is a subset of what was offered with VERSION_1 in
    /// it, and that each queue was validated. On an error nothing runs and the queues are gone.
    fn activate(&mut self, activation: Activation) -> Result<()>;

    /// Stops the worker and waits for it, a matter of milliseconds even when the rings are
    /// malformed; no memory access and no interrupt happens afterwards. Does nothing to an inactive
    /// device. The device can be activated again.
    fn reset(&mut self);
}

/// What a device gets when the driver is ready.
pub struct Activation {
    /// Guest memory.
    pub memory: Arc<GuestRam>,
    /// The features the driver accepted.
    pub features: u64,
    /// The queues the driver set up, by ascending index; it may have left some out.
    pub queues: Vec<ActiveQueue>,
}

/// Serves a read at `offset` from a configuration space held as bytes.
pub(crate) fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let Some(rest) = usize::try_from(offset)
        .ok()
        .and_then(|offset| config.get(offset..))
    else {
        return;
    };
    let len = rest.len().min(data.len());
    data[..len].copy_from_slice(&rest[..len]);
}
