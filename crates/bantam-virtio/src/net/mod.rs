//! The network card (virtio 1.3 §5.1): one receive and one transmit queue.
//!
//! What stands behind the card is a [`NetBackend`]: frames go in, frames come out, and it has a
//! descriptor and a timer. It has no thread of its own; the card's worker drives it, so that a frame
//! costs no hand-over between threads.

mod header;
mod worker;

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};

pub use self::header::{FrameHeader, PartialChecksum, Segmentation};
use self::worker::Rings;
use crate::device::read_config_bytes;
use crate::warned::Warned;
use crate::worker::Worker;
use crate::{Activation, DeviceType, Error, Result, VirtioDevice};

/// Longest frame in either direction, in bytes: an IP packet of 65,535 bytes in an Ethernet header.
/// The guest's longer ones are dropped.
pub const MAX_FRAME: u32 = 65_535 + 14;

const NAME: &str = "net";
const QUEUE_SIZES: &[u16] = &[256, 256];

/// The driver may leave checksums and segmentation of what it sends to us, and says whether it takes
/// frames of that kind. Buffers are merged, as 64 KiB for each frame would waste the guest's memory.
const FEATURES: u64 = 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_MTU
    | 1 << VIRTIO_NET_F_MAC
    | 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_TSO6
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO6
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_NET_F_STATUS;

/// What the driver takes in frames *to* the guest. Frames *from* the guest may always have partial
/// checksums and be long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetOffloads {
    /// Partial checksums.
    pub checksum: bool,
    /// Long TCP segments over IPv4 and IPv6. Only together with `checksum`.
    pub segmentation: bool,
}

/// The network behind a card.
///
/// The card's worker calls [`receive`](Self::receive) for frames of the guest, then
/// [`run`](Self::run), then [`take_frame`](Self::take_frame) while the guest has buffers, and so on
/// until nothing is left to do; then it sleeps until the descriptor or a queue is ready or the time
/// that `run` gave is over. Nothing may block.
pub trait NetBackend: Send {
    /// Readable when [`run`](Self::run) has something to do. The same for the backend's whole life;
    /// it is waited for, level-triggered, and never read.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// The driver was set up, for the first time or anew: whatever the backend holds for an earlier
    /// one is void.
    fn reset(&mut self, offloads: NetOffloads);

    /// Takes a frame of the guest, of at most [`MAX_FRAME`] bytes; it may be lost.
    fn receive(&mut self, frame: &[u8], header: &FrameHeader);

    /// Does what is due; gives the time after which it must be called again, if there is one. Zero
    /// only if there is something to do at once, even if no frame is taken.
    fn run(&mut self) -> Option<Duration>;

    /// Offers the oldest frame for the guest, of at most [`MAX_FRAME`] bytes, to `take`, which says
    /// whether it is done with it; if not, the frame stays. Gives what `take` gave, or false if there
    /// was no frame.
    fn take_frame(&mut self, take: &mut dyn FnMut(&[u8], &FrameHeader) -> bool) -> bool;
}

/// A network card.
pub struct NetDevice {
    backend: Arc<Mutex<Box<dyn NetBackend>>>,
    config: [u8; 12],
    worker: Option<Worker>,
    failed: Arc<Warned>,
}

impl NetDevice {
    /// An inactive card with the Ethernet address `mac`, whose link carries IP packets of up to `mtu`
    /// bytes.
    pub fn new(backend: Box<dyn NetBackend>, mac: [u8; 6], mtu: u16) -> NetDevice {
        NetDevice {
            backend: Arc::new(Mutex::new(backend)),
            config: config_space(mac, mtu),
            worker: None,
            failed: Arc::default(),
        }
    }
}

/// `struct virtio_net_config`, as far as the offered features reach.
fn config_space(mac: [u8; 6], mtu: u16) -> [u8; 12] {
    let mut config = [0; 12];
    let status = u16::try_from(VIRTIO_NET_S_LINK_UP).unwrap_or(1);
    config[..6].copy_from_slice(&mac);
    config[6..8].copy_from_slice(&status.to_le_bytes());
    // The number of queue pairs, valid only with a feature that is not offered.
    config[8..10].copy_from_slice(&1_u16.to_le_bytes());
    config[10..].copy_from_slice(&mtu.to_le_bytes());
    config
}

impl VirtioDevice for NetDevice {
    fn device_type(&self) -> DeviceType {
        DeviceType::Net
    }

    fn queue_max_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<()> {
        if self.worker.is_some() {
            return Err(Error::AlreadyActive { device: NAME });
        }
        let features = activation.features;
        let rings = Rings::new(activation.queues)?;
        let backend = self.backend.clone();
        self.worker = Some(Worker::spawn(NAME, &self.failed, move |stop| {
            // Only the one worker there is ever holds it.
            let mut backend = backend.lock().unwrap_or_else(PoisonError::into_inner);
            backend.reset(offloads(features));
            worker::run(stop, rings, features, backend.as_mut())
        })?);
        Ok(())
    }

    fn reset(&mut self) {
        self.worker = None;
    }
}

fn offloads(features: u64) -> NetOffloads {
    let has = |bit: u32| features & 1 << bit != 0;
    let checksum = has(VIRTIO_NET_F_GUEST_CSUM);
    NetOffloads {
        checksum,
        segmentation: checksum && has(VIRTIO_NET_F_GUEST_TSO4) && has(VIRTIO_NET_F_GUEST_TSO6),
    }
}
