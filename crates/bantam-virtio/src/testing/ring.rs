//! The driver's side of a virtqueue.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress};

use crate::{EventFd, GuestRam, QueueConfig};

/// `VIRTQ_DESC_F_NEXT`.
pub const NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`.
pub const WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`.
pub const INDIRECT: u16 = 4;

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Guest physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// The device writes it.
    pub writable: bool,
}

impl Buffer {
    /// A buffer for the device to read.
    pub fn readable(addr: u64, len: u32) -> Buffer {
        Buffer {
            addr,
            len,
            writable: false,
        }
    }

    /// A buffer for the device to write.
    pub fn writable(addr: u64, len: u32) -> Buffer {
        Buffer {
            addr,
            len,
            writable: true,
        }
    }
}

/// One virtqueue as the driver has it. Descriptors are handed out in turn and never freed: a test
/// keeps no more chains in flight than the ring has descriptors.
pub struct TestRing {
    memory: Arc<GuestRam>,
    size: u16,
    base: u64,
    next_desc: u16,
    avail_idx: u16,
    used_seen: u16,
    pub(crate) kick: EventFd,
}

const AVAIL: u64 = 0x4000;
const USED: u64 = 0x8000;

impl TestRing {
    /// Room that a ring takes, in bytes; enough for 1024 descriptors.
    pub const ROOM: u64 = 0x10000;

    pub(crate) fn new(memory: Arc<GuestRam>, base: u64, size: u16, kick: EventFd) -> TestRing {
        let mut ring = TestRing {
            memory,
            size,
            base,
            next_desc: 0,
            avail_idx: 0,
            used_seen: 0,
            kick,
        };
        ring.clear();
        ring
    }

    /// Begins again with an empty ring.
    pub fn clear(&mut self) {
        let zeroes = vec![0; usize::try_from(Self::ROOM).unwrap()];
        let base = GuestAddress(self.base);
        self.memory.write_slice(&zeroes, base).unwrap();
        self.next_desc = 0;
        self.avail_idx = 0;
        self.used_seen = 0;
    }

    /// The registers that describe this ring.
    pub fn config(&self) -> QueueConfig {
        QueueConfig {
            size: self.size,
            ready: true,
            desc_table: self.base,
            avail_ring: self.base + AVAIL,
            used_ring: self.base + USED,
        }
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Writes descriptor `index` of the table at `table`, as it is given.
    pub fn write_descriptor_at(
        &self,
        table: u64,
        index: u16,
        buffer: Buffer,
        flags: u16,
        next: u16,
    ) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&buffer.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&buffer.len.to_le_bytes());
        let write = if buffer.writable { WRITE } else { 0 };
        bytes[12..14].copy_from_slice(&(flags | write).to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        let addr = GuestAddress(table + 16 * u64::from(index));
        self.memory.write_slice(&bytes, addr).unwrap();
    }

    /// Writes descriptor `index` of the ring, as it is given.
    pub fn write_descriptor(&self, index: u16, buffer: Buffer, flags: u16, next: u16) {
        self.write_descriptor_at(self.base, index, buffer, flags, next);
    }

    /// Writes a chain without publishing it; gives its head.
    pub fn write_chain(&mut self, buffers: &[Buffer]) -> u16 {
        let head = self.next_desc;
        for (i, buffer) in buffers.iter().enumerate() {
            let index = self.next_desc;
            self.next_desc = (index + 1) % self.size;
            let last = i + 1 == buffers.len();
            let (flags, next) = if last { (0, 0) } else { (NEXT, self.next_desc) };
            self.write_descriptor(index, *buffer, flags, next);
        }
        head
    }

    /// Puts `head` into the available ring.
    pub fn publish(&mut self, head: u16) {
        let slot = u64::from(self.avail_idx % self.size);
        let entry = GuestAddress(self.base + AVAIL + 4 + 2 * slot);
        self.memory.write_obj(head.to_le(), entry).unwrap();
        self.set_avail_idx(self.avail_idx.wrapping_add(1));
    }

    /// Writes the available index, as it is given.
    pub fn set_avail_idx(&mut self, value: u16) {
        self.avail_idx = value;
        let addr = GuestAddress(self.base + AVAIL + 2);
        self.memory
            .store(value.to_le(), addr, Ordering::Release)
            .unwrap();
    }

    /// The available index.
    pub fn avail_idx(&self) -> u16 {
        self.avail_idx
    }

    /// Writes and publishes a chain; gives its head.
    pub fn add(&mut self, buffers: &[Buffer]) -> u16 {
        let head = self.write_chain(buffers);
        self.publish(head);
        head
    }

    /// Notifies the device, as an ioeventfd would.
    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// Whether the device wants a kick for what was published last (`avail_event`, with
    /// VIRTIO_F_EVENT_IDX).
    pub fn wants_kick(&self) -> bool {
        fence(Ordering::SeqCst);
        let event: u16 = self
            .memory
            .load(
                GuestAddress(self.base + USED + 4 + 8 * u64::from(self.size)),
                Ordering::Relaxed,
            )
            .unwrap();
        u16::from_le(event) == self.avail_idx.wrapping_sub(1)
    }

    /// Whether the device returned a chain that was not taken yet.
    pub fn has_used(&self) -> bool {
        let idx: u16 = self
            .memory
            .load(GuestAddress(self.base + USED + 2), Ordering::Acquire)
            .unwrap();
        u16::from_le(idx) != self.used_seen
    }

    /// The next chain that the device returned, if any: its head and the bytes written.
    pub fn take_used(&mut self) -> Option<(u32, u32)> {
        if !self.has_used() {
            // Ask for an interrupt at the next one, and look again.
            let used_event = GuestAddress(self.base + AVAIL + 4 + 2 * u64::from(self.size));
            self.memory
                .store(self.used_seen.to_le(), used_event, Ordering::Relaxed)
                .unwrap();
            fence(Ordering::SeqCst);
            if !self.has_used() {
                return None;
            }
        }
        let slot = u64::from(self.used_seen % self.size);
        let mut entry = [0; 8];
        self.memory
            .read_slice(&mut entry, GuestAddress(self.base + USED + 4 + 8 * slot))
            .unwrap();
        self.used_seen = self.used_seen.wrapping_add(1);
        let [a, b, c, d, e, f, g, h] = entry;
        Some((
            u32::from_le_bytes([a, b, c, d]),
            u32::from_le_bytes([e, f, g, h]),
        ))
    }
}
