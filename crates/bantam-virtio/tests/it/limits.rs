//! A driver that does what it must not: lengths, numbers, amounts and requests.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use bantam_virtio::testing::{Buffer, Guest, INDIRECT, LOW_END, NEXT, PATIENCE, Transport};
use bantam_virtio::{BlockDevice, DeviceType, features, rng};

use crate::kinds::{KINDS, Kind, assert_stops_promptly, everywhere};
use crate::vsock_driver::{Driver, Packet, REQUEST, RST, RW};

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
        assert_stops_promptly(transport, &mut driver.guest);
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
    let net = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 11 | 1 << 12;
    let net = net | 1 << 15 | 1 << 16;
    let expected = [(2, block, 1), (1, net, 2), (4, 0, 1), (19, 0, 3)];
    assert_eq!(offered, expected);
    assert_eq!(features::TRANSPORT, 1 << 28 | 1 << 29 | 1 << 32);
    assert_eq!(DeviceType::Vsock.id(), 19);
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
