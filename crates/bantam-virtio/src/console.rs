//! The console device (virtio 1.3 §5.3): one port, output only.
//!
//! Guest output goes to a sink; how much of it is kept, and at what rate, is the sink's affair.
//! [`ConsoleRing`] keeps the newest bytes and drops the rest, so that a guest that floods its
//! console costs the host nothing but the ring. There is no input: the receive queue is accepted
//! and left alone.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use crate::worker::{RequestHandler, Worker, serve_requests};
use crate::{Activation, Chain, DeviceType, Error, GuestRam, Result, VirtioDevice};

/// Bytes copied out of guest memory at a time.
const COPY: usize = 4096;
/// Most bytes taken from one chain; the rest of a longer one is dropped.
pub const MAX_BYTES_PER_CHAIN: u32 = 1 << 20;

const NAME: &str = "console";
const QUEUE_SIZES: &[u16] = &[16, 64];
const TRANSMIT: u16 = 1;

/// A console whose output goes to a sink.
pub struct ConsoleDevice {
    output: Arc<Mutex<Box<dyn Write + Send>>>,
    worker: Option<Worker>,
}

impl ConsoleDevice {
    /// An inactive console. Writes to `output` happen on the device's thread; they should not block,
    /// as stopping the device waits for the one in progress. Errors of `output` lose that output.
    pub fn new(output: Box<dyn Write + Send>) -> ConsoleDevice {
        ConsoleDevice {
            output: Arc::new(Mutex::new(output)),
            worker: None,
        }
    }
}

impl VirtioDevice for ConsoleDevice {
    fn device_type(&self) -> DeviceType {
        DeviceType::Console
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

    fn activate(&mut self, mut activation: Activation) -> Result<()> {
        if self.worker.is_some() {
            return Err(Error::AlreadyActive { device: NAME });
        }
        activation.queues.retain(|queue| queue.index() == TRANSMIT);
        let output = self.output.clone();
        self.worker = Some(Worker::spawn(NAME, move |stop| {
            serve_requests(stop, activation.queues, Output(output))
        })?);
        Ok(())
    }

    fn reset(&mut self) {
        self.worker = None;
    }
}

struct Output(Arc<Mutex<Box<dyn Write + Send>>>);

impl RequestHandler for Output {
    fn handle(&mut self, _queue: u16, chain: &Chain, memory: &GuestRam) -> io::Result<u32> {
        let mut sink = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = [0; COPY];
        let end = chain.readable().len().min(MAX_BYTES_PER_CHAIN);
        let mut offset = 0;
        while offset < end {
            let want = COPY.min((end - offset) as usize);
            let got = chain.readable().read_at(memory, offset, &mut bytes[..want]);
            if got == 0 {
                break;
            }
            if let Err(error) = sink.write_all(&bytes[..got]) {
                tracing::debug!(%error, "writing console output");
                break;
            }
            offset += u32::try_from(got).unwrap_or(end - offset);
        }
        Ok(0)
    }
}

/// The newest bytes of a console, up to a capacity; clones share them.
#[derive(Clone, Debug)]
pub struct ConsoleRing {
    bytes: Arc<Mutex<VecDeque<u8>>>,
    capacity: usize,
}

impl ConsoleRing {
    /// A ring that keeps `capacity` bytes.
    pub fn new(capacity: usize) -> ConsoleRing {
        ConsoleRing {
            bytes: Arc::new(Mutex::new(VecDeque::with_capacity(capacity))),
            capacity,
        }
    }

    /// What is kept now, oldest byte first.
    pub fn tail(&self) -> Vec<u8> {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bytes.iter().copied().collect()
    }
}

/// Never blocks and never fails.
impl Write for ConsoleRing {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let kept = &data[data.len().saturating_sub(self.capacity)..];
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let excess = (bytes.len() + kept.len()).saturating_sub(self.capacity);
        bytes.drain(..excess);
        bytes.extend(kept);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
