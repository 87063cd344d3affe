//! Rings full of nonsense: every device ends its work, and stops when told.

use std::io::{Read, Write};
use std::time::Duration;

use bantam_virtio::testing::{
    Buffer, Guest, HIGH_END, HIGH_START, LOW_END, MMIO_WINDOW, Transport,
};
use proptest::prelude::*;

use crate::kinds::{KINDS, assert_stops_promptly};
use crate::vsock_driver::{Driver, Packet};

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..LOW_END,
        1 => LOW_END - 64..LOW_END + 64,
        1 => HIGH_START - 64..HIGH_END + 64,
        1 => MMIO_WINDOW..MMIO_WINDOW + 0x1000,
        1 => any::<u64>(),
    ]
}

fn length() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0..64_u32, 2 => 0..8192_u32, 1 => any::<u32>()]
}

#[derive(Clone, Debug)]
struct Descriptor {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    let flags = prop_oneof![8 => 0..4_u16, 1 => 0..8_u16, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0..16_u16, 1 => any::<u16>()];
    (address(), length(), flags, next).prop_map(|(addr, len, flags, next)| Descriptor {
        addr,
        len,
        flags,
        next,
    })
}

/// Packets for a few connections, with fields that are mostly sensible.
fn packet() -> impl Strategy<Value = Packet> {
    let op = prop_oneof![20 => 1..8_u16, 1 => any::<u16>()];
    let guest_port = prop_oneof![1 => Just(9_u32), 3 => 5000..5004_u32];
    let host_port = prop_oneof![3 => Just(1024_u32), 2 => (1..4_u32).prop_map(|i| (1 << 30) + i)];
    let credit = prop_oneof![Just(0_u32), Just(100), Just(1 << 20), any::<u32>()];
    let fwd_cnt = prop_oneof![3 => 0..4096_u32, 1 => any::<u32>()];
    let len = prop_oneof![3 => 0..100_usize, 1 => 0..66_000_usize];
    let flags = prop_oneof![4 => 0..4_u32, 1 => any::<u32>()];
    (op, guest_port, host_port, credit, fwd_cnt, len, flags).prop_map(
        |(op, guest_port, host_port, credit, fwd_cnt, len, flags)| {
            Packet::new(op, guest_port, host_port)
                .credit(credit, fwd_cnt)
                .flags(flags)
                .data(&vec![7; len])
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_conversation_is_survived(
        packets in prop::collection::vec((packet(), 0..10_u8), 1..60),
    ) {
        let mut driver = Driver::start(Transport::Direct);
        driver.post(128);
        let listener = driver.vsock.listen(1024).unwrap();
        let mut streams = Vec::new();
        let mut calls = Vec::new();
        for (packet, action) in packets {
            driver.send(&packet);
            match action {
                0 => streams.extend(driver.vsock.connect(9)),
                1 => streams.extend(listener.accept_timeout(Duration::ZERO)),
                2 => {
                    for stream in &mut streams {
                        stream.set_nonblocking(true).unwrap();
                        let _ = stream.write(&[1; 5000]);
                    }
                }
                3 => {
                    for stream in &mut streams {
                        stream.set_nonblocking(true).unwrap();
                        let _ = stream.read(&mut [0; 70_000]);
                    }
                }
                4 => drop(streams.pop()),
                8 => calls.extend(driver.vsock.connect_with(9, &[1; 20_000])),
                9 => if let Some(call) = calls.pop() {
                    driver.vsock.part(call.id, call.stream.into());
                },
                5 => while driver.guest.has_used(0) {
                    driver.receive();
                },
                _ => {}
            }
        }
        // The device still answers.
        while driver.guest.has_used(0) {
            driver.receive();
        }
        driver.send(&Packet::new(7, 60_000, 60_000));
        while driver.receive().guest_port != 60_000 {}
        assert_stops_promptly("vsock", &mut driver.guest);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn any_ring_is_survived(
        descriptors in prop::collection::vec(descriptor(), 16),
        heads in prop::collection::vec(prop_oneof![12 => 0..16_u16, 1 => any::<u16>()], 1..16),
        noise in prop::collection::vec(any::<u8>(), 256),
        jump in prop_oneof![6 => Just(0_u16), 1 => any::<u16>()],
        requests in prop::collection::vec(0..16_u32, 16),
    ) {
        for kind in KINDS {
            for transport in [Transport::Direct, Transport::Mmio] {
                let mut guest = Guest::attach(transport, kind.device(), 16);
                // Something that looks like headers, in the places that are addressed most.
                guest.write(0x1000, &noise);
                for (i, request) in requests.iter().enumerate() {
                    guest.write(1 << 20 | (i as u64) << 6, &request.to_le_bytes());
                }
                for queue in 0..guest.rings.len() {
                    let ring = &mut guest.rings[queue];
                    for (i, d) in descriptors.iter().enumerate() {
                        let buffer = Buffer::readable(d.addr, d.len);
                        ring.write_descriptor(i as u16, buffer, d.flags, d.next);
                    }
                    for head in &heads {
                        ring.publish(*head);
                    }
                    let idx = ring.avail_idx();
                    ring.set_avail_idx(idx.wrapping_add(jump));
                    ring.kick();
                }
                // A worker serves what is there before anything else. Whatever becomes of the chains,
                // whose buffers may well be the rings themselves: it ends, and soon.
                guest.activate(u64::MAX, &guest.configs());
                assert_stops_promptly(kind, &mut guest);
            }
        }
    }
}
