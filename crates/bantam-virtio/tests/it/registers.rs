//! A driver that does what it must not: registers.

use bantam_virtio::testing::{Buffer, Guest, HIGH_END, LOW_END, MMIO_WINDOW, Transport};
use bantam_virtio::{MmioTransport, QueueConfig};

use crate::kinds::{KINDS, Kind};

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
        bad.push(QueueConfig { size, ..good });
    }
    for addr in [
        LOW_END - 16,
        LOW_END,
        HIGH_END - 16,
        MMIO_WINDOW,
        u64::MAX - 15,
    ] {
        bad.push(QueueConfig {
            desc_table: addr,
            ..good
        });
        bad.push(QueueConfig {
            avail_ring: addr,
            ..good
        });
        bad.push(QueueConfig {
            used_ring: addr,
            ..good
        });
    }
    bad.push(QueueConfig {
        desc_table: good.desc_table + 8,
        ..good
    });
    bad.push(QueueConfig {
        avail_ring: good.avail_ring + 1,
        ..good
    });
    bad.push(QueueConfig {
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
        let write = |mmio: &mut MmioTransport, offset, value: u32| {
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
