//! The entropy device (virtio 1.3 §5.4): host randomness into the guest's buffers.

use std::io;
use std::sync::Arc;

use crate::warned::Warned;
use crate::worker::{RequestHandler, Worker, serve_requests};
use crate::{Activation, Chain, DeviceType, Error, GuestRam, Result, VirtioDevice};

/// Most bytes given for one chain, whatever its length: bounds the work and the host's buffer. Linux
/// asks for at most a page.
pub const MAX_BYTES_PER_CHAIN: u32 = 4096;

const NAME: &str = "rng";
const QUEUE_SIZES: &[u16] = &[64];

/// An entropy device.
#[derive(Default)]
pub struct RngDevice {
    worker: Option<Worker>,
    failed: Arc<Warned>,
}

impl RngDevice {
    /// An inactive device.
    pub fn new() -> RngDevice {
        RngDevice::default()
    }
}

impl VirtioDevice for RngDevice {
    fn device_type(&self) -> DeviceType {
        DeviceType::Entropy
    }

    fn queue_max_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        0
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, activation: Activation) -> Result<()> {
        if self.worker.is_some() {
            return Err(Error::AlreadyActive { device: NAME });
        }
        self.worker = Some(Worker::spawn(NAME, &self.failed, move |stop| {
            serve_requests(stop, activation.queues, Entropy)
        })?);
        Ok(())
    }

    fn reset(&mut self) {
        self.worker = None;
    }
}

struct Entropy;

impl RequestHandler for Entropy {
    fn handle(&mut self, _queue: u16, chain: &Chain, memory: &GuestRam) -> io::Result<u32> {
        let mut bytes = [0; MAX_BYTES_PER_CHAIN as usize];
        let wanted = chain.writable().len().min(MAX_BYTES_PER_CHAIN);
        let bytes = &mut bytes[..wanted as usize];
        getrandom::fill(bytes).map_err(io::Error::from)?;
        let written = chain.writable().write_at(memory, 0, bytes);
        Ok(u32::try_from(written).unwrap_or(wanted))
    }
}
