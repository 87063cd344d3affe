//! Rings full of nonsense: every device ends its work, and stops when told.

use bantam_virtio::testing::{
    Buffer, Guest, HIGH_END, HIGH_START, LOW_END, MMIO_WINDOW, Transport,
};
use proptest::prelude::*;

use crate::kinds::{KINDS, assert_stops_promptly};

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
