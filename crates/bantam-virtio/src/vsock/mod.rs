//! The socket device (virtio 1.3 §5.10): streams between host and guest, in user space.
//!
//! The host's end of each connection is a `UnixStream` of the caller's; its other end belongs to the
//! device's worker, the *muxer*, which moves bytes between it and the guest's rings under the credit
//! scheme of §5.10.6.3. A half-close passes in both directions. What the guest sent before it closed
//! or reset a connection reaches the host's stream; after that the stream is at its end.

mod awaited;
mod connection;
mod drain;
mod host;
mod muxer;
mod packet;

pub use host::{ConnectionId, Opened, Vsock, VsockListener};

use std::sync::Arc;

use crate::device::read_config_bytes;
use crate::warned::Warned;
use crate::worker::Worker;
use crate::{Activation, DeviceType, Error, Result, VirtioDevice};
use host::Shared;
use muxer::Slot;

/// The host's context identifier (§5.10.4).
pub const HOST_CID: u64 = 2;
/// Bytes of guest data held for a connection whose host side does not read: what the guest is told
/// as `buf_alloc`.
pub const BUF_ALLOC: u32 = 256 << 10;
/// Most bytes that are sent to the guest with a connection's request, before it has said how much room
/// it has ([`Vsock::connect_on_write`]).
pub const EARLY_DATA: u32 = 16 << 10;
/// Connections at a time, those still delivering their last bytes included. The guest's requests
/// beyond are reset.
pub const MAX_CONNECTIONS: usize = 512;
/// Connections that a listener holds before they are accepted.
pub const BACKLOG: usize = 128;

const NAME: &str = "vsock";
const QUEUE_SIZES: &[u16] = &[256, 256, 16];

/// A socket device.
pub struct VsockDevice {
    guest_cid: u32,
    shared: Arc<Shared>,
    muxer: Arc<Slot>,
    worker: Option<Worker>,
    failed: Arc<Warned>,
}

impl VsockDevice {
    /// An inactive device for the guest `guest_cid` (3 or more), and the host's handle to it.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new(guest_cid: u32) -> std::io::Result<(VsockDevice, Vsock)> {
        let shared = Arc::new(Shared::new()?);
        let muxer = Arc::<Slot>::default();
        let device = VsockDevice {
            guest_cid,
            shared: shared.clone(),
            muxer: muxer.clone(),
            worker: None,
            failed: Arc::default(),
        };
        Ok((device, Vsock::new(shared, muxer)))
    }
}

impl VirtioDevice for VsockDevice {
    fn device_type(&self) -> DeviceType {
        DeviceType::Vsock
    }

    fn queue_max_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        0
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&u64::from(self.guest_cid).to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<()> {
        if self.worker.is_some() {
            return Err(Error::AlreadyActive { device: NAME });
        }
        let guest_cid = u64::from(self.guest_cid);
        let (shared, muxer) = (self.shared.clone(), self.muxer.clone());
        let rings = muxer::Rings::new(activation.queues)?;
        self.worker = Some(Worker::spawn(NAME, &self.failed, move |stop| {
            muxer::run(stop, rings, &shared, &muxer, guest_cid)
        })?);
        Ok(())
    }

    fn reset(&mut self) {
        self.worker = None;
        // The worker took it away, unless it panicked. It has guest memory.
        *muxer::lock(&self.muxer) = None;
    }
}

impl Drop for VsockDevice {
    fn drop(&mut self) {
        self.reset();
        self.shared.close();
    }
}
