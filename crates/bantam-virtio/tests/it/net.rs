//! The network card.

use std::time::{Duration, Instant};

use bantam_virtio::features;
use bantam_virtio::net::{FrameHeader, MAX_FRAME, NetOffloads, PartialChecksum, Segmentation};
use bantam_virtio::testing::{Buffer, Guest, MMIO_WINDOW, PATIENCE, Transport};

use crate::kinds::assert_stops_promptly;
use crate::net_driver::{MAC, MTU, card, start, transmit};

/// Long enough to see that nothing happens.
const NOTHING: Duration = Duration::from_millis(50);

fn frame(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(seed)).collect()
}

/// Posts a receive buffer of `len` bytes.
fn post(guest: &mut Guest, len: u32) -> u64 {
    let addr = guest.alloc(len.into());
    guest.submit(0, &[Buffer::writable(addr, len)]);
    addr
}

#[test]
fn the_configuration_says_address_link_and_mtu_and_is_read_only() {
    for transport in [Transport::Direct, Transport::Mmio] {
        let (mut guest, _network) = start(transport);
        if let Some(mmio) = guest.mmio() {
            for offset in 0..12 {
                mmio.write(0x100 + offset, &[0xff]);
            }
        }
        let mut config = [0xff; 16];
        guest.read_config(0, &mut config[..4]);
        guest.read_config(4, &mut config[4..8]);
        guest.read_config(8, &mut config[8..12]);
        guest.read_config(12, &mut config[12..]);
        assert_eq!(config[..6], MAC);
        assert_eq!(config[6..8], [1, 0], "the link is up");
        assert_eq!(config[10..12], MTU.to_le_bytes());
        assert_eq!(config[12..], [0; 4]);
    }
}

#[test]
fn frames_go_out_with_their_headers() {
    for &transport in Transport::ALL {
        let (mut guest, network) = start(transport);
        let sent = frame(60, 3);
        assert_eq!(transmit(&mut guest, &sent), 0);
        assert_eq!(network.received(), Some((sent, FrameHeader::default())));

        // TSO over IPv6, header and frame spread over buffers of a byte and a hole of none.
        let mut bytes = vec![1, 4, 74, 0, 0xa0, 5, 54, 0, 16, 0, 0, 0];
        let sent = frame(usize::from(u16::MAX) + 14, 7);
        bytes.extend(&sent);
        let addr = guest.place(&bytes);
        let mut chain: Vec<_> = (0..14).map(|i| Buffer::readable(addr + i, 1)).collect();
        chain.push(Buffer::readable(addr, 0));
        chain.push(Buffer::readable(addr + 14, bytes.len() as u32 - 14));
        guest.request(1, &chain);
        let header = FrameHeader {
            checksum: Some(PartialChecksum {
                start: 54,
                offset: 16,
            }),
            segmentation: Some(Segmentation {
                size: 1440,
                headers: 74,
                ipv6: true,
            }),
        };
        assert!(network.received() == Some((sent, header)));
    }
}

#[test]
fn the_driver_is_told_of_frames_that_are_gone_though_nothing_follows() {
    for &transport in Transport::ALL {
        let (mut guest, _network) = start(transport);
        let bytes = [&[0; 12][..], &frame(60, 3)].concat();
        let addr = guest.place(&bytes);
        guest.submit(1, &[Buffer::readable(addr, bytes.len() as u32)]);
        // An interrupt may be about something else, as for a driver that has just started.
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(guest.wait_interrupt(1, deadline));
            if guest.has_used(1) {
                break;
            }
        }
    }
}

#[test]
fn frames_that_make_no_sense_are_dropped() {
    for &transport in Transport::ALL {
        let (mut guest, network) = start(transport);
        let mut send = |header: &[u8], len: usize| {
            let bytes = [header, &vec![1; len]].concat();
            let addr = guest.place(&bytes);
            let buffer = Buffer::readable(addr, bytes.len() as u32);
            assert_eq!(guest.request(1, &[buffer]), 0);
        };
        send(&[0; 11], 0);
        send(&[0; 12], MAX_FRAME as usize + 1);
        // UDP fragmentation; segments without a size; segments without a checksum.
        send(&[1, 3, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], 60);
        send(&[1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 60);
        send(&[0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], 60);
        let addr = guest.alloc(64);
        guest.request(1, &[Buffer::writable(addr, 64)]);
        transmit(&mut guest, b"good");
        assert_eq!(network.received().unwrap().0, b"good");
        assert_eq!(network.received(), None);
    }
}

#[test]
fn frames_come_in_with_their_headers() {
    for &transport in Transport::ALL {
        let (mut guest, mut network) = start(transport);
        let at = post(&mut guest, 1526);
        let header = FrameHeader {
            checksum: Some(PartialChecksum {
                start: 34,
                offset: 16,
            }),
            segmentation: Some(Segmentation {
                size: 1460,
                headers: 54,
                ipv6: false,
            }),
        };
        let sent = frame(60, 5);
        network.send_with(&sent, header);
        assert_eq!(guest.wait_used(0).1, 72);
        let bytes = guest.read(at, 72);
        assert_eq!(bytes[..12], [1, 1, 54, 0, 0xb4, 5, 34, 0, 16, 0, 1, 0]);
        assert_eq!(bytes[12..], sent);
    }
}

/// Row 12 of the bug classes: the header lies in as many pieces as the driver likes.
#[test]
fn a_header_may_be_written_over_buffers() {
    for &transport in Transport::ALL {
        let (mut guest, mut network) = start(transport);
        let at = guest.alloc(64);
        let mut chain: Vec<_> = (0..20).map(|i| Buffer::writable(at + i, 1)).collect();
        chain.push(Buffer::writable(at + 20, 44));
        guest.submit(0, &chain);
        network.send(&frame(52, 9));
        assert_eq!(guest.wait_used(0).1, 64);
        assert_eq!(guest.read(at, 12), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(guest.read(at + 12, 52), frame(52, 9));
    }
}

#[test]
fn a_long_frame_is_merged_from_chains() {
    for &transport in Transport::ALL {
        let (mut guest, mut network) = start(transport);
        let sent = frame(65_000, 11);
        network.send(&sent);
        let mut at = Vec::new();
        // The frame waits for the last one.
        for _ in 0..42 {
            at.push(post(&mut guest, 1536));
        }
        assert!(guest.wait_used_for(0, NOTHING).is_none());
        at.push(post(&mut guest, 1536));
        let mut bytes = Vec::new();
        for (i, at) in at.iter().enumerate() {
            let (_, written) = guest.wait_used(0);
            assert_eq!(written, if i < 42 { 1536 } else { 65_012 - 42 * 1536 });
            bytes.extend(guest.read(*at, written as usize));
        }
        assert_eq!(bytes[10..12], [43, 0]);
        assert!(bytes[12..] == sent);
    }
}

/// §5.1.6.4: a driver that looks at the used ring while the frame is delivered must not miss a part.
#[test]
fn a_merged_frame_appears_all_at_once() {
    for &transport in Transport::ALL {
        let (mut guest, mut network) = start(transport);
        let at = guest.alloc(64);
        for _ in 0..200 {
            for _ in 0..30 {
                guest.rings[0].add(&[Buffer::writable(at, 64)]);
            }
            guest.rings[0].kick();
            network.send(&frame(30 * 64 - 12, 1));
            let begun = Instant::now();
            while !guest.has_used(0) {
                assert!(begun.elapsed() < PATIENCE);
                std::hint::spin_loop();
            }
            for i in 0..30 {
                assert!(guest.has_used(0), "{i} of 30 were there");
                guest.rings[0].take_used();
            }
        }
    }
}

/// Row 16: both sides are full, then there is room again.
#[test]
fn starvation_is_survived_and_the_other_direction_goes_on() {
    for &transport in Transport::ALL {
        let (mut guest, mut network) = start(transport);
        for i in 0..200 {
            network.send(&frame(60, i));
        }
        for _ in 0..100 {
            transmit(&mut guest, b"on");
            assert_eq!(network.received().unwrap().0, b"on");
        }
        assert_eq!(network.waiting(), 200);
        for i in 0..200 {
            let at = post(&mut guest, 128);
            assert_eq!(guest.wait_used(0).1, 72);
            assert_eq!(guest.read(at + 12, 60), frame(60, i));
        }
        assert_eq!(network.waiting(), 0);
    }
}

#[test]
fn receive_buffers_of_no_use_come_back() {
    for &transport in Transport::ALL {
        let (mut guest, mut network) = start(transport);
        network.send(&frame(60, 1));
        let good = guest.alloc(64);
        for chain in [
            vec![Buffer::writable(good, 0)],
            vec![Buffer::writable(good, 11)],
            vec![Buffer::readable(good, 64)],
            vec![Buffer::writable(MMIO_WINDOW, 64)],
        ] {
            assert_eq!(guest.request(0, &chain), 0, "{chain:?}");
        }
        let at = post(&mut guest, 128);
        assert_eq!(guest.wait_used(0).1, 72);
        assert_eq!(guest.read(at + 12, 60), frame(60, 1));
        assert!(!guest.needs_reset());
    }
}

#[test]
fn a_frame_for_which_a_whole_ring_is_too_small_is_dropped() {
    for &transport in Transport::ALL {
        let (device, mut network) = card();
        let mut guest = Guest::attach(transport, Box::new(device), 16);
        guest.activate(u64::MAX, &guest.configs());
        let at = guest.alloc(16);
        for _ in 0..16 {
            guest.rings[0].add(&[Buffer::writable(at, 16)]);
        }
        guest.rings[0].kick();
        network.send(&frame(1000, 1));
        for _ in 0..16 {
            assert_eq!(guest.wait_used(0).1, 0);
        }
        network.send(&frame(60, 2));
        post(&mut guest, 128);
        assert_eq!(guest.wait_used(0).1, 72);
    }
}

#[test]
fn without_merged_buffers_a_frame_fits_its_chain_or_is_dropped() {
    for &transport in Transport::ALL {
        let (device, mut network) = card();
        let mut guest = Guest::attach(transport, Box::new(device), 64);
        guest.activate(!(1 << 15), &guest.configs());
        let small = post(&mut guest, 64);
        let large = post(&mut guest, 128);
        network.send(&frame(60, 1));
        network.send(&frame(61, 2));
        assert_eq!(guest.wait_used(0).1, 0);
        assert_eq!(guest.wait_used(0).1, 73);
        assert_eq!(guest.read(small, 64), [0; 64]);
        assert_eq!(guest.read(large + 10, 2), [1, 0]);
        assert_eq!(guest.read(large + 12, 61), frame(61, 2));
    }
}

/// QEMU's virtio-mmio serves drivers of before virtio 1.0.
#[test]
fn a_legacy_driver_has_shorter_headers() {
    for transport in [Transport::Direct, Transport::VhostUser] {
        let (device, mut network) = card();
        let mut guest = Guest::attach(transport, Box::new(device), 64);
        guest.activate(!(features::VERSION_1 | 1 << 15), &guest.configs());
        let at = post(&mut guest, 128);
        network.send(&frame(60, 1));
        assert_eq!(guest.wait_used(0).1, 70);
        assert_eq!(guest.read(at + 10, 60), frame(60, 1));
        let addr = guest.place(&[&[0; 10], &b"legacy"[..]].concat());
        guest.request(1, &[Buffer::readable(addr, 16)]);
        assert_eq!(network.received().unwrap().0, b"legacy");
    }
}

#[test]
fn the_network_is_told_of_each_driver_and_what_it_takes() {
    for &transport in Transport::ALL {
        let (mut guest, network) = start(transport);
        transmit(&mut guest, b"x");
        guest.reset();
        for ring in &mut guest.rings {
            ring.clear();
        }
        // Checksums, but only half of segmentation.
        guest.activate(!(1 << 8), &guest.configs());
        transmit(&mut guest, b"y");
        let offloads = |checksum, segmentation| NetOffloads {
            checksum,
            segmentation,
        };
        assert_eq!(
            network.resets(),
            [offloads(true, true), offloads(true, false)]
        );
    }
}

#[test]
fn a_card_that_waits_for_buffers_stops_promptly_and_begins_anew() {
    for &transport in Transport::ALL {
        let (mut guest, mut network) = start(transport);
        network.send(&frame(1000, 1));
        for _ in 0..8 {
            post(&mut guest, 64);
        }
        assert!(guest.wait_used_for(0, NOTHING).is_none());
        assert_stops_promptly(transport, &mut guest);
        guest.restart();
        let at = post(&mut guest, 2048);
        assert_eq!(guest.wait_used(0).1, 1012);
        assert_eq!(guest.read(at + 12, 1000), frame(1000, 1));
    }
}

/// A driver may hand over buffers for ever while we look.
#[test]
fn every_frame_that_is_echoed_arrives_in_order() {
    for &transport in Transport::ALL {
        let (mut guest, network) = start(transport);
        network.echo();
        let at = guest.alloc(64);
        let out = guest.alloc(64);
        for i in 0..2000_u32 {
            guest.rings[0].add(&[Buffer::writable(at, 64)]);
            guest.rings[0].kick();
            guest.write(out + 12, &i.to_le_bytes());
            guest.request(1, &[Buffer::readable(out, 16)]);
            assert_eq!(guest.wait_used(0).1, 16);
            assert_eq!(guest.read(at + 12, 4), i.to_le_bytes());
        }
    }
}
