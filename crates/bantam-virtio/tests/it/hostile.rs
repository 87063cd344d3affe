//! A driver that does what it must not. Each test is one class of bug that some virtual machine
//! monitor really had; every device answers for itself over every transport.

use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bantam_virtio::testing::{
    Buffer, Guest, HIGH_END, HIGH_START, INDIRECT, LOW_END, MMIO_WINDOW, NEXT, PATIENCE, Transport,
};
use bantam_virtio::{
    BlockDevice, ConsoleDevice, ConsoleRing, DeviceType, RngDevice, VirtioDevice, VsockDevice,
    features, rng,
};

use crate::vsock_driver::{CID, Driver, Packet, REQUEST, RST, RW};

/// How long stopping a device may take, whatever its rings look like.
const PROMPT: Duration = Duration::from_millis(100);

/// Every device there is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Block,
    Console,
    Rng,
    Vsock,
}

pub(crate) const KINDS: [Kind; 4] = [Kind::Block, Kind::Console, Kind::Rng, Kind::Vsock];

impl Kind {
    pub(crate) fn device(self) -> Box<dyn VirtioDevice> {
        match self {
            Kind::Block => {
                let file = tempfile::tempfile().unwrap();
                file.set_len(1 << 20).unwrap();
                Box::new(BlockDevice::new(file, false, "disk").unwrap())
            }
            Kind::Console => Box::new(ConsoleDevice::new(Box::new(ConsoleRing::new(4096)))),
            Kind::Rng => Box::new(RngDevice::new()),
            Kind::Vsock => Box::new(VsockDevice::new(CID).unwrap().0),
        }
    }

    /// The queue that the device looks at when it is kicked.
    pub(crate) fn queue(self) -> usize {
        match self {
            Kind::Block | Kind::Rng => 0,
            Kind::Console | Kind::Vsock => 1,
        }
    }

    fn start(self, transport: Transport) -> Guest {
        let mut guest = Guest::attach(transport, self.device(), 64);
        guest.activate(u64::MAX, &guest.configs());
        guest
    }

    /// A chain that the device serves. Gives the bytes it writes.
    fn good_request(self, guest: &mut Guest) -> u32 {
        match self {
            Kind::Block => {
                let header = guest.place(&[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
                let room = guest.alloc(21);
                let buffers = [Buffer::readable(header, 16), Buffer::writable(room, 21)];
                guest.request(0, &buffers)
            }
            Kind::Console => {
                let text = guest.place(b"x");
                guest.request(1, &[Buffer::readable(text, 1)])
            }
            Kind::Rng => {
                let room = guest.alloc(8);
                guest.request(0, &[Buffer::writable(room, 8)])
            }
            Kind::Vsock => {
                let packet = Packet::new(RST, 1, 1).header();
                let addr = guest.place(&packet);
                guest.request(1, &[Buffer::readable(addr, packet.len() as u32)])
            }
        }
    }

    fn good_answer(self) -> u32 {
        match self {
            Kind::Block => 21,
            Kind::Rng => 8,
            Kind::Console | Kind::Vsock => 0,
        }
    }

    fn assert_alive(self, guest: &mut Guest) {
        assert_eq!(self.good_request(guest), self.good_answer(), "{self:?}");
    }
}

/// Runs `test` for every device over every transport.
fn everywhere(test: impl Fn(Kind, Transport)) {
    for kind in KINDS {
        for &transport in Transport::ALL {
            test(kind, transport);
        }
    }
}

fn assert_stops_promptly(kind: Kind, guest: &mut Guest) {
    let took = guest.reset();
    assert!(took < PROMPT, "{kind:?} took {took:?} to stop");
}

/// Row 1.
#[test]
fn a_running_queue_cannot_be_reconfigured() {
    for kind in KINDS {
        let mut guest = kind.start(Transport::Mmio);
        kind.assert_alive(&mut guest);
        let mmio = guest.mmio().unwrap();
        let before = mmio.state();
        for queue in 0..before.queues.len() as u32 {
            mmio.write(0x30, &queue.to_le_bytes());
            for offset in [0x38, 0x44, 0x80, 0x84, 0x90, 0x94, 0xa0, 0xa4, 0xc0] {
                for value in [0, 1, 3, u32::MAX] {
                    mmio.write(offset, &value.to_le_bytes());
                }
            }
        }
        mmio.write(0x24, &0_u32.to_le_bytes());
        mmio.write(0x20, &u32::MAX.to_le_bytes());
        mmio.write(0x30, &before.queue_sel.to_le_bytes());
        assert_eq!(mmio.state(), before);
        kind.assert_alive(&mut guest);
    }
}

/// Row 1, before activation.
#[test]
fn a_queue_that_cannot_work_is_not_activated() {
    let good = {
        let guest = Guest::attach(Transport::Direct, Kind::Rng.device(), 64);
        guest.configs()[0]
    };
    let mut bad = Vec::new();
    for size in [0, 3, 63, 4096, u16::MAX] {
        bad.push(bantam_virtio::QueueConfig { size, ..good });
    }
    for addr in [
        LOW_END - 16,
        LOW_END,
        HIGH_END - 16,
        MMIO_WINDOW,
        u64::MAX - 15,
    ] {
        bad.push(bantam_virtio::QueueConfig {
            desc_table: addr,
            ..good
        });
        bad.push(bantam_virtio::QueueConfig {
            avail_ring: addr,
            ..good
        });
        bad.push(bantam_virtio::QueueConfig {
            used_ring: addr,
            ..good
        });
    }
    bad.push(bantam_virtio::QueueConfig {
        desc_table: good.desc_table + 8,
        ..good
    });
    bad.push(bantam_virtio::QueueConfig {
        avail_ring: good.avail_ring + 1,
        ..good
    });
    bad.push(bantam_virtio::QueueConfig {
        used_ring: good.used_ring + 2,
        ..good
    });
    for transport in [Transport::Direct, Transport::VhostUser] {
        for config in &bad {
            let mut guest = Guest::attach(transport, Kind::Rng.device(), 64);
            guest.activate(u64::MAX, &[*config]);
            assert!(guest.needs_reset(), "{config:?}");
        }
    }
}

/// Row 1: what the transport itself refuses.
#[test]
fn features_that_were_not_offered_are_not_accepted() {
    for (low, high, accepted) in [
        (0, 1, true),
        (0, 0, false),
        (1 << 31, 1, false),
        (0, 3, false),
    ] {
        let mut guest = Guest::attach(Transport::Mmio, Kind::Rng.device(), 64);
        let mmio = guest.mmio().unwrap();
        let write = |mmio: &mut bantam_virtio::MmioTransport, offset, value: u32| {
            mmio.write(offset, &value.to_le_bytes());
        };
        write(mmio, 0x70, 3);
        write(mmio, 0x24, 0);
        write(mmio, 0x20, low);
        write(mmio, 0x24, 1);
        write(mmio, 0x20, high);
        write(mmio, 0x70, 11);
        assert_eq!(mmio.state().status & 8 != 0, accepted, "{low:x} {high:x}");
        // Without it there is no DRIVER_OK either.
        write(mmio, 0x70, 15);
        assert_eq!(mmio.state().status & 4 != 0, accepted, "{low:x} {high:x}");
    }
}

/// Rows 2, 12 and 13: buffers that are not RAM, or not all of them.
#[test]
fn buffers_outside_of_ram_come_back_unused() {
    let page = 4096;
    let table = [
        (LOW_END - 1, 2),
        (LOW_END, 1),
        (LOW_END - page, page as u32 + 1),
        (HIGH_START - 1, 1),
        (HIGH_START - 1, 2),
        (HIGH_END - 1, 2),
        (HIGH_END, 1),
        (MMIO_WINDOW, 64),
        (MMIO_WINDOW + 0x50, 4),
        (u64::MAX, 1),
        (u64::MAX - 15, 16),
        (u64::MAX - 15, 17),
        (0, u32::MAX),
    ];
    everywhere(|kind, transport| {
        let mut guest = kind.start(transport);
        let good = guest.alloc(64);
        for (addr, len) in table {
            for bad in [Buffer::readable(addr, len), Buffer::writable(addr, len)] {
                let (before, after) = (Buffer::readable(good, 44), Buffer::writable(good, 64));
                for chain in [vec![bad], vec![before, bad], vec![bad, after]] {
                    let written = guest.request(kind.queue(), &chain);
                    assert_eq!(written, 0, "{kind:?} {bad:?}");
                }
            }
        }
        assert!(!guest.needs_reset());
        kind.assert_alive(&mut guest);
    });
}

/// Row 2: the last byte of a region is still RAM.
#[test]
fn a_buffer_up_to_the_end_of_a_region_is_used() {
    for &transport in Transport::ALL {
        let mut guest = Kind::Rng.start(transport);
        for end in [LOW_END, HIGH_END] {
            assert_eq!(guest.request(0, &[Buffer::writable(end - 32, 32)]), 32);
        }
        assert_eq!(guest.request(0, &[Buffer::writable(HIGH_START, 32)]), 32);
    }
}

/// Row 12: a header need not lie in one piece.
#[test]
fn a_header_may_be_spread_over_buffers() {
    for &transport in Transport::ALL {
        let mut guest = Kind::Block.start(transport);
        let header = guest.place(&[0; 16]);
        let room = guest.alloc(513);
        let mut buffers: Vec<_> = (0..16).map(|i| Buffer::readable(header + i, 1)).collect();
        buffers.push(Buffer::writable(room, 512));
        buffers.push(Buffer::writable(room + 512, 1));
        assert_eq!(guest.request(0, &buffers), 513);
    }
}

/// Row 3.
#[test]
fn an_available_index_that_jumps_stops_the_queue() {
    everywhere(|kind, transport| {
        let mut guest = kind.start(transport);
        kind.assert_alive(&mut guest);
        let ring = &mut guest.rings[kind.queue()];
        let idx = ring.avail_idx();
        ring.set_avail_idx(idx.wrapping_add(ring.size() + 1));
        ring.kick();
        guest.wait_needs_reset();
        // Kicking a dead queue does nothing.
        guest.rings[kind.queue()].kick();
        assert_stops_promptly(kind, &mut guest);
        guest.restart();
        kind.assert_alive(&mut guest);
    });
}

/// Row 3: the work of one kick is what is in the ring.
#[test]
fn a_full_ring_is_served_once() {
    everywhere(|kind, transport| {
        let mut guest = kind.start(transport);
        let size = guest.rings[kind.queue()].size();
        let addr = guest.place(&[0; 64]);
        for _ in 0..size {
            guest.rings[kind.queue()].add(&[Buffer::readable(addr, 1)]);
        }
        guest.rings[kind.queue()].kick();
        for head in 0..u32::from(size) {
            assert_eq!(guest.wait_used(kind.queue()), (head, 0));
        }
        assert!(!guest.has_used(kind.queue()));
        kind.assert_alive(&mut guest);
    });
}

/// Row 4.
#[test]
fn malformed_chains_come_back_and_the_device_stops_promptly() {
    everywhere(|kind, transport| {
        let mut guest = kind.start(transport);
        let addr = guest.place(&[0; 64]);
        let table = guest.alloc(16 * 70);
        let r = Buffer::readable(addr, 16);
        let w = Buffer::writable(addr, 16);
        let ring = &guest.rings[kind.queue()];
        let size = ring.size();
        // A descriptor that is its own successor.
        ring.write_descriptor(0, r, NEXT, 0);
        // A cycle of two.
        ring.write_descriptor(1, r, NEXT, 2);
        ring.write_descriptor(2, w, NEXT, 1);
        // A successor outside the table.
        ring.write_descriptor(3, r, NEXT, size);
        ring.write_descriptor(4, r, NEXT, u16::MAX);
        // Readable after writable.
        ring.write_descriptor(5, w, NEXT, 6);
        ring.write_descriptor(6, r, 0, 0);
        // Indirect tables: not a whole number of descriptors, empty, within an indirect one, outside
        // of RAM, looping, too long.
        let indirect = |len| Buffer::readable(table, len);
        ring.write_descriptor(7, indirect(17), INDIRECT, 0);
        ring.write_descriptor(8, indirect(0), INDIRECT, 0);
        ring.write_descriptor(9, indirect(16), INDIRECT, 0);
        ring.write_descriptor_at(table, 0, indirect(16), INDIRECT, 0);
        ring.write_descriptor(10, Buffer::readable(MMIO_WINDOW, 160), INDIRECT, 0);
        let looping = guest.alloc(32);
        let ring = &guest.rings[kind.queue()];
        ring.write_descriptor_at(looping, 0, r, NEXT, 1);
        ring.write_descriptor_at(looping, 1, r, NEXT, 0);
        ring.write_descriptor(11, Buffer::readable(looping, 32), INDIRECT, 0);
        let long = guest.alloc(16 * 4000);
        let ring = &mut guest.rings[kind.queue()];
        for i in 0..4000 {
            ring.write_descriptor_at(long, i, r, if i < 3999 { NEXT } else { 0 }, i + 1);
        }
        ring.write_descriptor(12, Buffer::readable(long, 16 * 4000), INDIRECT, 0);
        for head in 0..=12 {
            if head == 2 || head == 6 {
                continue;
            }
            guest.rings[kind.queue()].publish(head);
            guest.rings[kind.queue()].kick();
            let used = guest.wait_used(kind.queue());
            assert_eq!(used, (head.into(), 0), "{kind:?}");
        }
        assert!(!guest.needs_reset());
        assert_stops_promptly(kind, &mut guest);
    });
}

/// Row 5.
#[test]
fn chains_too_short_for_an_answer_come_back() {
    everywhere(|kind, transport| {
        let mut guest = kind.start(transport);
        let addr = guest.place(&[0; 64]);
        for chain in [
            vec![Buffer::readable(addr, 16)],
            vec![Buffer::readable(addr, 1)],
            vec![Buffer::readable(addr, 0)],
            vec![Buffer::writable(addr, 0)],
            vec![Buffer::readable(addr, 0), Buffer::writable(addr, 0)],
        ] {
            assert_eq!(guest.request(kind.queue(), &chain), 0, "{kind:?}");
        }
        kind.assert_alive(&mut guest);
    });
}

/// Row 5: a disk's answer without a request.
#[test]
fn a_block_request_without_a_header_fails() {
    for &transport in Transport::ALL {
        let mut guest = Kind::Block.start(transport);
        let status = guest.place(&[0xff]);
        let header = guest.place(&[0; 15]);
        let status_only = [Buffer::writable(status, 1)];
        assert_eq!(guest.request(0, &status_only), 1);
        assert_eq!(guest.read(status, 1), [1]);
        let short = [Buffer::readable(header, 15), Buffer::writable(status, 1)];
        assert_eq!(guest.request(0, &short), 1);
        assert_eq!(guest.read(status, 1), [1]);
    }
}

/// Row 6.
#[test]
fn a_head_outside_the_table_stops_the_queue() {
    everywhere(|kind, transport| {
        for head in [64, 65, 0x7fff, u16::MAX] {
            let mut guest = kind.start(transport);
            guest.rings[kind.queue()].publish(head);
            guest.rings[kind.queue()].kick();
            guest.wait_needs_reset();
            assert_stops_promptly(kind, &mut guest);
        }
    });
}

/// Row 7.
#[test]
fn notifying_a_queue_that_does_not_exist_does_nothing() {
    for kind in KINDS {
        let mut guest = kind.start(Transport::Mmio);
        let mmio = guest.mmio().unwrap();
        for index in [3, 4, 0xffff, 0x8000_0000, u32::MAX] {
            mmio.write(0x50, &index.to_le_bytes());
            mmio.write(0x30, &index.to_le_bytes());
            for offset in [0x34, 0x44] {
                let mut data = [0xff; 4];
                mmio.read(offset, &mut data);
                assert_eq!(data, [0; 4]);
            }
        }
        kind.assert_alive(&mut guest);
    }
}

/// Row 7: a notification that traps does what an ioeventfd does.
#[test]
fn a_notification_by_register_is_served() {
    for kind in KINDS {
        let mut guest = kind.start(Transport::Mmio);
        let addr = guest.place(&[0; 64]);
        let queue = kind.queue();
        guest.rings[queue].add(&[Buffer::readable(addr, 1)]);
        let index = (queue as u32).to_le_bytes();
        guest.mmio().unwrap().write(0x50, &index);
        guest.wait_used(queue);
    }
}

/// Row 8: what a guest leaves unanswered is bounded by its ring and by the device's caps.
#[test]
fn a_guest_that_takes_no_answers_stops_being_served() {
    for &transport in Transport::ALL {
        let mut driver = Driver::start(transport);
        let _listener = driver.vsock.listen(1024).unwrap();
        let mut sent = 0;
        loop {
            let header = Packet::new(REQUEST, sent, 99).header();
            let addr = driver.guest.place(&header);
            let buffer = Buffer::readable(addr, header.len() as u32);
            driver.guest.submit(1, &[buffer]);
            sent += 1;
            let patience = if sent < 256 {
                PATIENCE
            } else {
                Duration::from_millis(50)
            };
            if driver.guest.wait_used_for(1, patience).is_none() {
                break;
            }
            assert!(sent < 10_000, "resets pile up without end");
        }
        let took = driver.guest.reset();
        assert!(took < PROMPT, "took {took:?} to stop");
    }
}

/// Rows 9 and 10: lengths that no host should allocate or copy for. The buffer is real, and
/// everything that can be is addressed many times over.
#[test]
fn giant_lengths_cost_no_more_than_the_caps() {
    everywhere(|kind, transport| {
        let mut guest = kind.start(transport);
        let all = (LOW_END - (2 << 20)) as u32;
        let start = 2 << 20;
        let w = Buffer::writable(start, all);
        let r = Buffer::readable(start, all);
        let begun = Instant::now();
        for chain in [vec![w; 40], vec![r; 40], vec![r, w], vec![r; 60]] {
            let written = guest.request(kind.queue(), &chain);
            assert!(written <= rng::MAX_BYTES_PER_CHAIN, "{kind:?} {written}");
        }
        assert!(begun.elapsed() < PATIENCE);
        // A sum that does not fit 32 bits.
        let table = guest.alloc(16 * 1000);
        let ring = &mut guest.rings[kind.queue()];
        for i in 0..1000 {
            ring.write_descriptor_at(table, i, w, if i < 999 { NEXT } else { 0 }, i + 1);
        }
        ring.write_descriptor(0, Buffer::readable(table, 16_000), INDIRECT, 0);
        ring.publish(0);
        ring.kick();
        assert_eq!(guest.wait_used(kind.queue()), (0, 0));
        assert_stops_promptly(kind, &mut guest);
    });
}

/// Row 9: a packet that says it is longer than it is.
#[test]
fn a_packet_shorter_than_it_says_is_reset() {
    for &transport in Transport::ALL {
        for len in [5, 65536, u32::MAX] {
            let mut driver = Driver::ready(transport);
            let _listener = driver.vsock.listen(1024).unwrap();
            driver.send(&Packet::new(REQUEST, 5000, 1024));
            driver.receive();
            let mut packet = Packet::new(RW, 5000, 1024).data(b"1234");
            packet.len = len;
            driver.send(&packet);
            driver.expect(RST);
        }
    }
}

/// Row 10: every access of every width at every offset, before, while and after the device runs.
#[test]
fn every_register_access_is_harmless() {
    for kind in KINDS {
        let mut guest = Guest::attach(Transport::Mmio, kind.device(), 64);
        for round in 0..2 {
            let mmio = guest.mmio().unwrap();
            for width in [0, 1, 2, 3, 4, 5, 8, 16, 64] {
                let offsets =
                    (0..0x120)
                        .chain(0xff0..0x1010)
                        .chain([u64::MAX - 70, u64::MAX - 3, u64::MAX]);
                for offset in offsets {
                    let mut data = vec![0xaa; width];
                    mmio.read(offset, &mut data);
                    if offset >= 0x1000 {
                        assert!(data.iter().all(|&byte| byte == 0));
                    }
                    // Status is not to be touched here: it resets or starts.
                    if offset.saturating_add(width as u64) <= 0x70 || offset >= 0x74 {
                        mmio.write(offset, &vec![0xff; width]);
                    }
                }
            }
            if round == 0 {
                guest.reset();
                guest.restart();
                kind.assert_alive(&mut guest);
            }
        }
    }
}

/// Row 10: partial and wide reads give the bytes of the registers they cover.
#[test]
fn odd_reads_give_the_bytes_of_the_registers() {
    let mut guest = Guest::attach(Transport::Mmio, Kind::Block.device(), 64);
    let mmio = guest.mmio().unwrap();
    let mut whole = [0; 16];
    mmio.read(0, &mut whole);
    assert_eq!(&whole[..8], b"virt\x02\0\0\0");
    assert_eq!(whole[8], 2, "a block device");
    let mut two = [0; 2];
    mmio.read(2, &mut two);
    assert_eq!(&two, b"rt");
    // Across the border to the configuration space: generation and capacity (2048 sectors).
    let mut border = [0xff; 8];
    mmio.read(0xfc, &mut border);
    assert_eq!(border, [0, 0, 0, 0, 0, 8, 0, 0]);
    // A write of part of a register is ignored, one of two registers does both.
    mmio.write(0x30, &[1]);
    assert_eq!(mmio.state().queue_sel, 0);
    mmio.write(0x2f, &[0, 7, 0, 0, 0, 0]);
    assert_eq!(mmio.state().queue_sel, 7);
}

/// Row 11: nothing happens to memory after a reset.
#[test]
fn a_reset_with_work_queued_leaves_memory_alone() {
    everywhere(|kind, transport| {
        for _ in 0..20 {
            let mut guest = kind.start(transport);
            let addr = guest.place(&[0; 64]);
            for _ in 0..32 {
                let chain = [Buffer::readable(addr, 44), Buffer::writable(addr, 20)];
                guest.rings[kind.queue()].add(&chain);
            }
            guest.rings[kind.queue()].kick();
            assert_stops_promptly(kind, &mut guest);
            let before = guest.read(0, 4 << 20);
            guest.rings[kind.queue()].kick();
            assert!(before == guest.read(0, 4 << 20));
        }
    });
}

/// Row 14: sectors whose byte offsets do not fit.
#[test]
fn block_addresses_that_overflow_fail() {
    let mut guest = Kind::Block.start(Transport::Direct);
    let room = guest.alloc(512);
    for kind in [0_u32, 1, 11, 13] {
        for sector in [
            2048,
            u64::MAX,
            u64::MAX / 512,
            u64::MAX / 512 + 1,
            1 << 55,
            1 << 63,
        ] {
            let mut header = kind.to_le_bytes().to_vec();
            header.extend([0; 4]);
            header.extend(sector.to_le_bytes());
            let header = guest.place(&header);
            let mut range = sector.to_le_bytes().to_vec();
            range.extend(u32::MAX.to_le_bytes());
            range.extend([0; 4]);
            let range = guest.place(&range);
            let status = guest.place(&[0xff]);
            let data = match kind {
                0 => Buffer::writable(room, 512),
                1 => Buffer::readable(room, 512),
                _ => Buffer::readable(range, 16),
            };
            let chain = [
                Buffer::readable(header, 16),
                data,
                Buffer::writable(status, 1),
            ];
            guest.request(0, &chain);
            assert_eq!(guest.read(status, 1), [1], "{kind} {sector}");
        }
    }
}

/// Row 15.
#[test]
fn request_types_nobody_needs_are_unsupported() {
    for &transport in Transport::ALL {
        let mut guest = Kind::Block.start(transport);
        let room = guest.alloc(512);
        // SCSI commands among them: 2, 3 and the out variants.
        for kind in [
            2,
            3,
            5,
            6,
            7,
            9,
            10,
            12,
            14,
            15,
            16,
            24,
            0x8000_0000,
            u32::MAX,
        ] {
            let mut header = kind.to_le_bytes().to_vec();
            header.extend([0; 12]);
            let header = guest.place(&header);
            let status = guest.place(&[0xff]);
            let chain = [
                Buffer::readable(header, 16),
                Buffer::writable(room, 512),
                Buffer::writable(status, 1),
            ];
            guest.request(0, &chain);
            assert_eq!(guest.read(status, 1), [2], "{kind}");
        }
    }
}

/// Row 15: what is offered is what is listed here.
#[test]
fn the_devices_offer_nothing_else() {
    let offered: Vec<_> = KINDS
        .iter()
        .map(|kind| {
            let device = kind.device();
            let id = device.device_type().id();
            (id, device.features(), device.queue_max_sizes().len())
        })
        .collect();
    let block = 1 << 2 | 1 << 9 | 1 << 13 | 1 << 14;
    assert_eq!(offered, [(2, block, 1), (3, 0, 2), (4, 0, 1), (19, 0, 3)]);
    assert_eq!(features::TRANSPORT, 1 << 28 | 1 << 29 | 1 << 32);
    assert_eq!(DeviceType::Vsock.id(), 19);
}

/// Row 17: there is no console input that could be flooded; the queue is left alone.
#[test]
fn console_input_buffers_are_never_used() {
    let mut guest = Kind::Console.start(Transport::Direct);
    let room = guest.alloc(64);
    guest.submit(0, &[Buffer::writable(room, 64)]);
    Kind::Console.assert_alive(&mut guest);
    assert!(!guest.has_used(0));
}

/// Counts what a console writes.
struct Counter(Arc<AtomicU64>);

impl Write for Counter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0.fetch_add(data.len() as u64, Ordering::SeqCst);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Row 18.
#[test]
fn a_console_flood_keeps_the_ring_and_the_cap() {
    for &transport in Transport::ALL {
        let ring = ConsoleRing::new(1024);
        let device = ConsoleDevice::new(Box::new(ring.clone()));
        let mut guest = Guest::start(transport, device);
        for _ in 0..64 {
            guest.request(1, &[Buffer::readable(1 << 20, 4 << 20)]);
        }
        assert_eq!(ring.tail().len(), 1024);
    }
    let count = Arc::new(AtomicU64::new(0));
    let device = ConsoleDevice::new(Box::new(Counter(count.clone())));
    let mut guest = Guest::start(Transport::Direct, device);
    guest.request(1, &[Buffer::readable(1 << 20, 4 << 20)]);
    assert_eq!(count.load(Ordering::SeqCst), 1 << 20);
}

/// Row 21, from below: a read-only disk is so whatever the driver accepts.
#[test]
fn a_read_only_disk_does_not_depend_on_the_feature_bit() {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&[1; 4096], 0).unwrap();
    let device = BlockDevice::new(file.try_clone().unwrap(), true, "").unwrap();
    let mut guest = Guest::attach(Transport::Direct, Box::new(device), 64);
    guest.activate(features::VERSION_1, &guest.configs());
    let header = guest.place(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let data = guest.place(&[9; 512]);
    let status = guest.place(&[0xff]);
    let chain = [
        Buffer::readable(header, 16),
        Buffer::readable(data, 512),
        Buffer::writable(status, 1),
    ];
    guest.request(0, &chain);
    assert_eq!(guest.read(status, 1), [1]);
    let mut bytes = [0; 512];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [1; 512]);
}

/// Row 33: a field of the ring is read in one piece while the driver writes it.
#[test]
fn indices_are_never_torn() {
    let mut guest = Kind::Rng.start(Transport::Direct);
    let room = guest.alloc(1);
    // Through the carry of the low byte and around the end of 16 bits; an index torn between two
    // bytes would jump by 256 and stop the queue.
    for _ in 0..70_000 {
        guest.rings[0].add(&[Buffer::writable(room, 1)]);
        guest.rings[0].kick();
        guest.wait_used(0);
    }
    assert!(!guest.needs_reset());
}

/// Without the two ring features things work as well, suppression by flags included.
#[test]
fn devices_work_without_optional_ring_features() {
    everywhere(|kind, transport| {
        let mut guest = Guest::attach(transport, kind.device(), 64);
        guest.activate(features::VERSION_1, &guest.configs());
        kind.assert_alive(&mut guest);
        kind.assert_alive(&mut guest);
    });
}
