//! A driver that does what it must not: rings and chains. Each test is one class of bug that some
//! virtual machine monitor really had; every device answers for itself over every transport.

use bantam_virtio::features;
use bantam_virtio::testing::{
    Buffer, Guest, HIGH_END, HIGH_START, INDIRECT, LOW_END, MMIO_WINDOW, NEXT, Transport,
};

use crate::kinds::{Kind, assert_stops_promptly, everywhere};

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
