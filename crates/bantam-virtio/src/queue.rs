//! Virtqueues: guest-written registers, and the running queue they become.
//!
//! [`QueueConfig`] is what the driver may write. [`QueueConfig::activate`] consumes it into an
//! [`ActiveQueue`], after which nothing the driver writes to registers reaches the queue. The split
//! ring itself is the `virtio-queue` crate's; this module decides what a malformed ring or chain
//! means (virtio 1.3 §2.7).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions, VolatileSlice};

use crate::{Error, EventFd, GuestRam, Interrupt, Result, features};

/// Most buffers taken from one chain; a longer chain is malformed. Linux stays below 130 for disks
/// and sockets.
pub const MAX_CHAIN_SEGMENTS: usize = 1024;

/// The driver-written registers of a queue, before DRIVER_OK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueConfig {
    /// Number of descriptors: a power of two.
    pub size: u16,
    /// The driver finished with this queue.
    pub ready: bool,
    /// Guest physical address of the descriptor table, 16-byte aligned.
    pub desc_table: u64,
    /// Guest physical address of the available ring ("driver area"), 2-byte aligned.
    pub avail_ring: u64,
    /// Guest physical address of the used ring ("device area"), 4-byte aligned.
    pub used_ring: u64,
}

/// Where a ring has got to. Plain data, enough to go on with the ring elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCursor {
    /// The next entry of the available ring to take.
    pub next_avail: u16,
    /// The next entry of the used ring to fill.
    pub next_used: u16,
}

/// A [`QueueCursor`] that a worker keeps up to date and a transport reads. Exact once the worker is
/// stopped.
#[derive(Debug, Default)]
pub struct SharedCursor(AtomicU32);

impl SharedCursor {
    /// A cursor at `at`.
    pub fn new(at: QueueCursor) -> SharedCursor {
        let shared = SharedCursor::default();
        shared.set(at);
        shared
    }

    /// The current position.
    pub fn get(&self) -> QueueCursor {
        let [a, b, c, d] = self.0.load(Ordering::Acquire).to_le_bytes();
        QueueCursor {
            next_avail: u16::from_le_bytes([a, b]),
            next_used: u16::from_le_bytes([c, d]),
        }
    }

    pub(crate) fn set(&self, at: QueueCursor) {
        let packed = u32::from(at.next_avail) | u32::from(at.next_used) << 16;
        self.0.store(packed, Ordering::Release);
    }
}

/// What belongs to a queue besides its registers.
pub struct QueueWiring {
    /// The queue's index.
    pub index: u16,
    /// The largest size the device allows.
    pub max_size: u16,
    /// Guest memory.
    pub memory: Arc<GuestRam>,
    /// The features the driver accepted.
    pub features: u64,
    /// Signalled when the driver made buffers available.
    pub kick: EventFd,
    /// The way back to the driver.
    pub interrupt: Arc<dyn Interrupt>,
    /// Where to begin, and where the position is kept.
    pub cursor: Arc<SharedCursor>,
}

impl QueueConfig {
    /// Validates the registers and makes a running queue out of them.
    ///
    /// # Errors
    /// [`Error::InvalidQueue`] when the size is not a power of two up to the maximum, an address is
    /// misaligned, or a ring does not lie wholly in guest RAM.
    pub fn activate(self, wiring: QueueWiring) -> Result<ActiveQueue> {
        let index = wiring.index;
        let invalid = |reason| Error::InvalidQueue { index, reason };
        if !self.ready {
            return Err(invalid("it is not ready"));
        }
        let mut queue = Queue::new(wiring.max_size).map_err(|_| invalid("bad maximum size"))?;
        queue
            .try_set_size(self.size)
            .map_err(|_| invalid("its size is not a power of two up to the maximum"))?;
        queue
            .try_set_desc_table_address(GuestAddress(self.desc_table))
            .map_err(|_| invalid("its descriptor table is not 16-byte aligned"))?;
        queue
            .try_set_avail_ring_address(GuestAddress(self.avail_ring))
            .map_err(|_| invalid("its available ring is not 2-byte aligned"))?;
        queue
            .try_set_used_ring_address(GuestAddress(self.used_ring))
            .map_err(|_| invalid("its used ring is not 4-byte aligned"))?;
        // The ring crate takes address 0 for "not set up".
        if self.avail_ring == 0 {
            return Err(invalid("its available ring is at address 0"));
        }
        let size = u64::from(self.size);
        let in_ram = |start, len| in_ram(&wiring.memory, start, len);
        // Six bytes: flags, index, and the event field at the end.
        if !in_ram(self.desc_table, 16 * size)
            || !in_ram(self.avail_ring, 6 + 2 * size)
            || !in_ram(self.used_ring, 6 + 8 * size)
        {
            return Err(invalid("its rings do not lie in guest memory"));
        }
        let cursor = wiring.cursor.get();
        queue.set_next_avail(cursor.next_avail);
        queue.set_next_used(cursor.next_used);
        queue.set_event_idx(wiring.features & features::RING_EVENT_IDX != 0);
        queue.set_ready(true);
        Ok(ActiveQueue {
            index,
            queue,
            memory: wiring.memory,
            kick: wiring.kick,
            interrupt: wiring.interrupt,
            cursor: wiring.cursor,
            broken: false,
            untold: 0,
            spare: Vec::new(),
        })
    }
}

/// Whether `len` bytes at `start` are RAM, without a hole and without wrapping.
fn in_ram(memory: &GuestRam, start: u64, len: u64) -> bool {
    usize::try_from(len).is_ok_and(|len| {
        start.checked_add(len as u64).is_some()
            && GuestMemory::check_range(memory, GuestAddress(start), len, Permissions::ReadWrite)
    })
}

/// A validated queue whose registers nobody can change, owned by the device's worker.
pub struct ActiveQueue {
    index: u16,
    queue: Queue,
    memory: Arc<GuestRam>,
    kick: EventFd,
    interrupt: Arc<dyn Interrupt>,
    cursor: Arc<SharedCursor>,
    broken: bool,
    /// Chains returned since the driver was last told.
    untold: u16,
    /// Buffer lists of returned chains, to be filled again.
    spare: Vec<Vec<Segment>>,
}

impl ActiveQueue {
    /// The queue's index.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Signalled when the driver made buffers available.
    pub fn kick(&self) -> &EventFd {
        &self.kick
    }

    /// Guest memory.
    pub fn memory(&self) -> &Arc<GuestRam> {
        &self.memory
    }

    /// Whether the ring was found broken. Such a queue gives no more chains.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// The whole state of the ring, as plain data.
    pub fn state(&self) -> QueueState {
        self.queue.state()
    }

    /// The next chain the driver made available, if any.
    ///
    /// A malformed chain comes without buffers. A broken ring sets DEVICE_NEEDS_RESET, once, and
    /// gives nothing any more.
    pub fn pop(&mut self) -> Option<Chain> {
        if self.broken {
            return None;
        }
        let memory = self.memory.clone();
        let chain = match self.queue.iter(&*memory) {
            Ok(mut available) => available.next()?,
            Err(error) => {
                self.mark_broken(&error);
                return None;
            }
        };
        let head = chain.head_index();
        if head >= self.queue.size() {
            self.mark_broken(&"head index outside the descriptor table");
            return None;
        }
        let mut segments = self.spare.pop().unwrap_or_default();
        let readable = match collect(&memory, chain, &mut segments) {
            Ok(readable) => readable,
            Err(reason) => {
                tracing::debug!(queue = self.index, head, reason, "malformed chain");
                segments.clear();
                0
            }
        };
        self.save_cursor();
        Some(Chain {
            head,
            segments,
            readable,
        })
    }

    /// Puts the chain that was popped last back, to be popped again. Several are put back newest
    /// first; nothing may be popped in between.
    pub fn undo_pop(&mut self, chain: Chain) {
        self.queue.go_to_previous_position();
        self.recycle(chain);
        self.save_cursor();
    }

    /// Returns a chain to the driver, with the number of bytes written to it. Call
    /// [`notify`](Self::notify) after a batch.
    pub fn push_used(&mut self, chain: Chain, written: u32) {
        self.push_used_together([(chain, written)]);
    }

    /// Returns chains to the driver that it must see all at once or not at all: it may look at any
    /// moment. They are no more than the ring has.
    pub fn push_used_together(&mut self, chains: impl IntoIterator<Item = (Chain, u32)>) {
        let size = u64::from(self.queue.size());
        let mut next_used = self.queue.next_used();
        let mut last = None;
        for (chain, written) in chains {
            if let Some((head, written)) = last.replace((chain.head, written)) {
                let slot = u64::from(next_used) % size;
                let entry = GuestAddress(self.queue.used_ring() + 4 + 8 * slot);
                // `struct virtq_used_elem`: head and length.
                let element = u64::from(head) | u64::from(written) << 32;
                if let Err(error) = self.memory.write_obj(element.to_le(), entry) {
                    self.mark_broken(&error);
                }
                next_used = next_used.wrapping_add(1);
                self.untold = self.untold.wrapping_add(1);
            }
            self.recycle(chain);
        }
        // The last one publishes the index, and so all of them.
        if let Some((head, written)) = last {
            self.queue.set_next_used(next_used);
            if let Err(error) = self.queue.add_used(&*self.memory, head, written) {
                self.mark_broken(&error);
            }
            self.untold = self.untold.wrapping_add(1);
        }
        self.save_cursor();
    }

    /// Interrupts the driver if it wants to hear about what was returned since the last call.
    pub fn notify(&mut self) {
        let returned = std::mem::take(&mut self.untold);
        if self.broken || returned == 0 {
            return;
        }
        match self.wants_interrupt(returned) {
            Ok(true) => self.interrupt.used_queue(self.index),
            Ok(false) => {}
            Err(error) => self.mark_broken(&error),
        }
    }

    /// Whether the driver wants an interrupt for the last `returned` chains (virtio 1.3 §2.7.7.2).
    fn wants_interrupt(&self, returned: u16) -> Result<bool, vm_memory::GuestMemoryError> {
        // It writes what it wants, then looks at the used index, which was written before this.
        fence(Ordering::SeqCst);
        let avail = self.queue.avail_ring();
        let load = |offset: u64| -> Result<u16, vm_memory::GuestMemoryError> {
            let field = self
                .memory
                .load(GuestAddress(avail + offset), Ordering::Relaxed)?;
            Ok(u16::from_le(field))
        };
        if self.queue.event_idx_enabled() {
            let used_event = load(4 + 2 * u64::from(self.queue.size()))?;
            let since = self.queue.next_used().wrapping_sub(used_event);
            return Ok(since.wrapping_sub(1) < returned);
        }
        Ok(u32::from(load(0)?) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }

    /// Asks the driver not to kick while the queue is being worked on. A hint.
    pub fn disable_kicks(&mut self) {
        if !self.broken
            && let Err(error) = self.queue.disable_notification(&*self.memory)
        {
            self.mark_broken(&error);
        }
    }

    /// Asks for kicks again. True if something became available in the meantime: then no kick will
    /// come for it, and the caller must look again.
    pub fn enable_kicks(&mut self) -> bool {
        self.enable_kicks_after(0)
    }

    /// The same, but no kick is wanted for the next `expected` chains: they are served with the one
    /// behind them. Without RING_EVENT_IDX there are kicks for them, too.
    pub(crate) fn enable_kicks_after(&mut self, expected: u16) -> bool {
        if self.broken {
            return false;
        }
        let enabled = if expected > 0 && self.queue.event_idx_enabled() {
            self.want_kick_after(expected)
        } else {
            let enabled = self.queue.enable_notification(&*self.memory);
            enabled.map_err(|error| error.to_string())
        };
        match enabled {
            Ok(more) => more,
            Err(error) => {
                self.mark_broken(&error);
                false
            }
        }
    }

    /// Writes `avail_event` (virtio 1.3 §2.7.10), then looks whether it is too late for a kick.
    fn want_kick_after(&self, expected: u16) -> Result<bool, String> {
        let event = self.queue.next_avail().wrapping_add(expected);
        let at = self.queue.used_ring() + 4 + 8 * u64::from(self.queue.size());
        let index = GuestAddress(self.queue.avail_ring() + 2);
        self.memory
            .store(event.to_le(), GuestAddress(at), Ordering::Relaxed)
            .map_err(|error| error.to_string())?;
        // The driver publishes its index, then reads the event.
        fence(Ordering::SeqCst);
        let index: u16 = self
            .memory
            .load(index, Ordering::Acquire)
            .map_err(|error| error.to_string())?;
        let available = u16::from_le(index).wrapping_sub(self.queue.next_avail());
        Ok(available > expected)
    }

    /// Stops this queue and tells the driver that the device needs a reset.
    pub fn mark_broken(&mut self, reason: &dyn fmt::Display) {
        if !self.broken {
            // The guest can have this as often as it likes: the transport warns, once.
            tracing::debug!(queue = self.index, %reason, "virtqueue is broken");
            self.broken = true;
            self.interrupt.needs_reset();
        }
    }

    fn recycle(&mut self, mut chain: Chain) {
        // As many as a batch holds; the lists themselves are bounded by MAX_CHAIN_SEGMENTS.
        const SPARES: usize = 32;
        if self.spare.len() < SPARES {
            chain.segments.clear();
            self.spare.push(chain.segments);
        }
    }

    fn save_cursor(&self) {
        self.cursor.set(QueueCursor {
            next_avail: self.queue.next_avail(),
            next_used: self.queue.next_used(),
        });
    }
}

/// Walks a chain into `segments`; gives the number of readable ones, which come first.
fn collect(
    memory: &GuestRam,
    chain: impl Iterator<Item = Descriptor>,
    segments: &mut Vec<Segment>,
) -> Result<usize, &'static str> {
    segments.clear();
    let mut readable = 0;
    let mut walked = 0;
    let mut total: u32 = 0;
    // The ring crate ends a chain early when it is malformed, which shows in the last descriptor
    // announcing another one, or in there being none.
    let mut more = true;
    for descriptor in chain {
        walked += 1;
        if walked > MAX_CHAIN_SEGMENTS {
            return Err("too many buffers");
        }
        more = descriptor.has_next();
        let len = descriptor.len();
        let Some(sum) = total.checked_add(len) else {
            return Err("longer than 4 GiB");
        };
        total = sum;
        if len == 0 {
            continue;
        }
        let segment = Segment {
            addr: descriptor.addr().0,
            len,
        };
        if !in_ram(memory, segment.addr, u64::from(len)) {
            return Err("a buffer outside of guest memory");
        }
        if !descriptor.is_write_only() {
            if readable != segments.len() {
                return Err("a readable buffer after a writable one");
            }
            readable += 1;
        }
        segments.push(segment);
    }
    if more {
        return Err("no end");
    }
    Ok(readable)
}

/// One buffer of a chain. Made by [`ActiveQueue::pop`] only, so it lies in guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    addr: u64,
    len: u32,
}

/// A descriptor chain that the device has taken and owes back through
/// [`ActiveQueue::push_used`]. Every buffer lies in guest RAM; the buffers' total length fits 32
/// bits.
#[derive(Debug)]
#[must_use = "a chain that is not returned is lost to the driver"]
pub struct Chain {
    head: u16,
    segments: Vec<Segment>,
    readable: usize,
}

impl Chain {
    /// The index of the chain's first descriptor.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// The part that the driver wrote for the device.
    pub fn readable(&self) -> Buffers<'_> {
        Buffers(&self.segments[..self.readable])
    }

    /// The part that the device is to write.
    pub fn writable(&self) -> Buffers<'_> {
        Buffers(&self.segments[self.readable..])
    }
}

/// A run of buffers, addressed as one string of bytes.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a>(&'a [Segment]);

impl Buffers<'_> {
    /// Length in bytes.
    pub fn len(&self) -> u32 {
        self.0.iter().map(|segment| segment.len).sum()
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends to `out` the host's view of up to `len` bytes from `offset`, fewer if the buffers end
    /// before; gives how many.
    pub fn slices<'m>(
        &self,
        memory: &'m GuestRam,
        offset: u32,
        len: u32,
        out: &mut Vec<VolatileSlice<'m, ()>>,
    ) -> u32 {
        let (mut skip, mut left) = (offset, len);
        for segment in self.0 {
            if left == 0 {
                break;
            }
            if skip >= segment.len {
                skip -= segment.len;
                continue;
            }
            let take = (segment.len - skip).min(left);
            let start = GuestAddress(segment.addr + u64::from(skip));
            skip = 0;
            let Ok(parts) =
                GuestMemory::get_slices(memory, start, take as usize, Permissions::ReadWrite)
            else {
                break;
            };
            for part in parts {
                let Ok(part) = part else { return len - left };
                left -= u32::try_from(part.len()).unwrap_or(left).min(left);
                out.push(part);
            }
        }
        len - left
    }

    /// Copies bytes at `offset` out of guest memory; gives how many there were.
    pub fn read_at(&self, memory: &GuestRam, offset: u32, data: &mut [u8]) -> usize {
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let mut slices = Vec::with_capacity(2);
        self.slices(memory, offset, len, &mut slices);
        let mut done = 0;
        for slice in slices {
            done += slice.copy_to(&mut data[done..]);
        }
        done
    }

    /// Copies bytes into guest memory at `offset`; gives how many found room.
    pub fn write_at(&self, memory: &GuestRam, offset: u32, data: &[u8]) -> usize {
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let mut slices = Vec::with_capacity(2);
        self.slices(memory, offset, len, &mut slices);
        let mut done = 0;
        for slice in slices {
            slice.copy_from(&data[done..]);
            done += slice.len().min(data.len() - done);
        }
        done
    }
}
