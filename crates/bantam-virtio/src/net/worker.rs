//! The worker: frames between the queues and the backend.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;

use super::header::{FrameHeader, header_len};
use super::{MAX_FRAME, NAME, NetBackend};
use crate::sys::{self, Interest, Poller};
use crate::worker::Stop;
use crate::{ActiveQueue, Chain, Error, GuestRam, Result, features};

/// Frames in each direction between two looks at the stop signal.
const BATCH: usize = 64;
/// For how long the driver may be left unaware that frames of its are gone. It only frees their
/// memory then, which it also does when it sends the next or receives one; so mostly the time goes by
/// and it no longer wants an interrupt.
const UNTOLD: Duration = Duration::from_millis(1);
/// Of how many at most: a socket in the guest may wait for the memory.
const MOST_UNTOLD: usize = 32;

const STOP: u64 = 0;
const RX_KICK: u64 = 1;
const TX_KICK: u64 = 2;
const BACKEND: u64 = 3;

/// The card's queues.
pub(super) struct Rings {
    rx: ActiveQueue,
    tx: ActiveQueue,
}

impl Rings {
    pub(super) fn new(queues: Vec<ActiveQueue>) -> Result<Rings> {
        let (mut rx, mut tx) = (None, None);
        for queue in queues {
            match queue.index() {
                0 => rx = Some(queue),
                _ => tx = Some(queue),
            }
        }
        let missing = |index| Error::MissingQueue {
            device: NAME,
            index,
        };
        Ok(Rings {
            rx: rx.ok_or_else(|| missing(0))?,
            tx: tx.ok_or_else(|| missing(1))?,
        })
    }
}

/// Serves `rings` until stopped.
pub(super) fn run(
    stop: &Stop,
    rings: Rings,
    features: u64,
    backend: &mut dyn NetBackend,
) -> io::Result<()> {
    let mut poller = Poller::new()?;
    poller.add(sys::event_as_fd(stop.event()), STOP, Interest::READ)?;
    poller.add(sys::event_as_fd(rings.rx.kick()), RX_KICK, Interest::READ)?;
    poller.add(sys::event_as_fd(rings.tx.kick()), TX_KICK, Interest::READ)?;
    poller.add(backend.descriptor(), BACKEND, Interest::READ)?;
    let mut port = Port {
        receiver: Receiver::new(rings.rx, features),
        transmitter: Transmitter::new(rings.tx, features),
        backend,
    };
    let mut ready = Vec::new();
    loop {
        let mut wait = port.pass();
        while wait == Some(Duration::ZERO) && !stop.requested() {
            wait = port.pass();
        }
        ready.clear();
        poller.wait(&mut ready, wait)?;
        if stop.requested() {
            port.transmitter.queue.notify();
            port.receiver.finish();
            return Ok(());
        }
        for event in &ready {
            let queue = match event.token {
                RX_KICK => &mut port.receiver.queue,
                TX_KICK => &mut port.transmitter.queue,
                _ => continue,
            };
            if event.hung_up || sys::drain(queue.kick()).is_err() {
                // Not a descriptor that can be waited for; level-triggered, it would never rest.
                queue.mark_broken(&"its kick descriptor failed");
                poller.remove(sys::event_as_fd(queue.kick()))?;
            }
        }
    }
}

struct Port<'a> {
    receiver: Receiver,
    transmitter: Transmitter,
    backend: &'a mut dyn NetBackend,
}

impl Port<'_> {
    /// A bounded piece of work in both directions. Gives the time until the next one, if nothing
    /// happens before.
    fn pass(&mut self) -> Option<Duration> {
        let (rx, tx) = (&mut self.receiver, &mut self.transmitter);
        tx.queue.disable_kicks();
        rx.queue.disable_kicks();
        let mut more = tx.serve(self.backend);
        let wait = self.backend.run();
        more |= rx.serve(self.backend);
        rx.queue.notify();
        let told = tx.tell();
        let wait = [wait, told].into_iter().flatten().min();
        if more {
            return Some(Duration::ZERO);
        }
        let tx_more = tx.queue.enable_kicks();
        // Receive buffers are of interest only while a frame waits for some.
        let rx_more = rx.starved && rx.queue.enable_kicks();
        match tx_more || rx_more {
            true => Some(Duration::ZERO),
            false => wait,
        }
    }
}

/// Frames from the guest.
struct Transmitter {
    queue: ActiveQueue,
    memory: Arc<GuestRam>,
    header_len: usize,
    /// A header and a frame: a copy, as the guest may write to its own while we look.
    buffer: Vec<u8>,
    /// Frames that are gone without the driver having been told.
    untold: usize,
    /// When the first of them went.
    since: Option<Instant>,
}

impl Transmitter {
    fn new(queue: ActiveQueue, features: u64) -> Transmitter {
        let header_len = header_len_of(features);
        Transmitter {
            memory: queue.memory().clone(),
            queue,
            header_len,
            buffer: vec![0; header_len + MAX_FRAME as usize],
            untold: 0,
            since: None,
        }
    }

    /// Passes on up to a batch. True if there may be more.
    fn serve(&mut self, backend: &mut dyn NetBackend) -> bool {
        for _ in 0..BATCH {
            let Some(chain) = self.queue.pop() else {
                return false;
            };
            if let Some((header, frame)) = self.read(&chain) {
                backend.receive(frame, &header);
            }
            self.queue.push_used(chain, 0);
            self.untold += 1;
        }
        true
    }

    /// Tells the driver that frames are gone, if it is time to. Gives the time until it is.
    fn tell(&mut self) -> Option<Duration> {
        if self.untold == 0 {
            return None;
        }
        let passed = self.since.get_or_insert_with(Instant::now).elapsed();
        if self.untold < MOST_UNTOLD && passed < UNTOLD {
            return Some(UNTOLD - passed);
        }
        self.queue.notify();
        self.untold = 0;
        self.since = None;
        None
    }

    /// The frame in `chain`, unless it is too short or too long or its header makes no sense.
    fn read(&mut self, chain: &Chain) -> Option<(FrameHeader, &[u8])> {
        let len = usize::try_from(chain.readable().len()).ok()?;
        let bytes = self.buffer.get_mut(..len)?;
        if chain.readable().read_at(&self.memory, 0, bytes) < len {
            return None;
        }
        let (header, frame) = bytes.split_at_checked(self.header_len)?;
        Some((FrameHeader::decode(header)?, frame))
    }
}

/// Frames to the guest.
struct Receiver {
    queue: ActiveQueue,
    memory: Arc<GuestRam>,
    header_len: usize,
    /// A frame may lie in several chains.
    mergeable: bool,
    /// Chains taken from the ring for a frame that needs more than there are. They are not put back
    /// until the end: the driver is asked for a kick when there are *more*.
    held: VecDeque<Chain>,
    /// Bytes that fit into them.
    room: u64,
    /// A frame waits for chains.
    starved: bool,
}

impl Receiver {
    fn new(queue: ActiveQueue, features: u64) -> Receiver {
        Receiver {
            memory: queue.memory().clone(),
            queue,
            header_len: header_len_of(features),
            mergeable: is_mergeable(features),
            held: VecDeque::new(),
            room: 0,
            starved: false,
        }
    }

    /// Delivers up to a batch. True if there may be more.
    fn serve(&mut self, backend: &mut dyn NetBackend) -> bool {
        self.starved = false;
        for done in 0..BATCH {
            let taken = backend.take_frame(&mut |frame, header| self.deliver(frame, header));
            if !taken {
                // After a frame was taken, the backend may have room to make another.
                return done > 0;
            }
        }
        true
    }

    /// Writes a frame to the driver's buffers. False if it must wait for some.
    fn deliver(&mut self, frame: &[u8], header: &FrameHeader) -> bool {
        let wanted = (self.header_len + frame.len()) as u64;
        let limit = usize::from(self.queue.state().size);
        let mut unusable = 0;
        while self.room < wanted {
            if self.held.len() >= limit {
                // All there ever will be, and too small.
                self.give_back_held();
                return true;
            }
            let Some(chain) = (unusable < limit).then(|| self.queue.pop()).flatten() else {
                self.starved = true;
                return false;
            };
            let room = u64::from(chain.writable().len());
            if self.held.is_empty() && room < self.header_len as u64 {
                // No buffer for frames at all. Others may be behind it, but not without end.
                self.queue.push_used(chain, 0);
                unusable += 1;
            } else if !self.mergeable && room < wanted {
                self.queue.push_used(chain, 0);
                return true;
            } else {
                self.held.push_back(chain);
                self.room += room;
            }
        }
        self.write(frame, header);
        true
    }

    /// Writes a frame to the chains held, which have room for it.
    fn write(&mut self, frame: &[u8], header: &FrameHeader) {
        let mut left = (self.header_len + frame.len()) as u64;
        let mut count: u16 = 0;
        for chain in &self.held {
            if left == 0 {
                break;
            }
            count = count.saturating_add(1);
            left = left.saturating_sub(chain.writable().len().into());
        }
        let header = header.encode(count);
        let header = header.get(..self.header_len).unwrap_or(&header);
        let mut rest = frame;
        let (memory, room) = (&self.memory, &mut self.room);
        let mut first = true;
        let chains = self.held.drain(..usize::from(count)).map(|chain| {
            let buffers = chain.writable();
            *room -= u64::from(buffers.len());
            let at = match std::mem::take(&mut first) {
                true => buffers.write_at(memory, 0, header),
                false => 0,
            };
            let offset = u32::try_from(at).unwrap_or(u32::MAX);
            let done = buffers.write_at(memory, offset, rest);
            rest = rest.get(done..).unwrap_or_default();
            (chain, u32::try_from(at + done).unwrap_or(u32::MAX))
        });
        self.queue.push_used_together(chains);
    }

    fn give_back_held(&mut self) {
        for chain in self.held.drain(..) {
            self.queue.push_used(chain, 0);
        }
        self.room = 0;
    }

    /// Puts what is held back to the ring, for whoever goes on with it.
    fn finish(mut self) {
        while let Some(chain) = self.held.pop_back() {
            self.queue.undo_pop(chain);
        }
    }
}

fn is_mergeable(features: u64) -> bool {
    features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0
}

fn header_len_of(features: u64) -> usize {
    header_len(features & features::VERSION_1 != 0, is_mergeable(features))
}
