//! How often a driver that does what it must not has the log warned. A machine's process keeps a
//! bounded log: whoever can repeat a warning at will uses it up.
//!
//! A process of its own, which counts the events of all threads.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation
)]

use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use bantam_virtio::testing::{Buffer, Guest, LOW_END, MMIO_WINDOW, NEXT, Transport};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

#[path = "it/kinds.rs"]
mod kinds;
#[path = "it/net_driver.rs"]
mod net_driver;
#[path = "it/vsock_driver.rs"]
mod vsock_driver;

use kinds::{Kind, everywhere};
use vsock_driver::{
    CREDIT_REQUEST, CREDIT_UPDATE, Driver, Packet, REQUEST, RESPONSE, RST, RW, SHUTDOWN,
};

/// How often a driver repeats itself.
const TIMES: u32 = 2000;
/// How much of it at once.
const BATCH: u32 = 25;
/// The same, where each time the device is set up anew, with a thread.
const RESTARTS: u32 = 200;

/// Warnings and errors so far, by what they are.
static EVENTS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

struct Count;

impl Subscriber for Count {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn event(&self, event: &Event<'_>) {
        lock(&EVENTS).push(event.metadata().name());
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Held while one device is looked at.
static ONE: Mutex<()> = Mutex::new(());

/// What the log is told while `test` has a device, which is gone at its end.
fn warnings(test: impl FnOnce()) -> Vec<&'static str> {
    static COUNTED: Once = Once::new();
    let _one = lock(&ONE);
    COUNTED.call_once(|| tracing::subscriber::set_global_default(Count).unwrap());
    lock(&EVENTS).clear();
    test();
    std::mem::take(&mut *lock(&EVENTS))
}

fn assert_once(what: impl Debug, test: impl FnOnce()) {
    let events = warnings(test);
    let (count, first) = (events.len(), events.iter().take(3));
    assert!(count <= 1, "{what:?}: {count} of {first:?}");
}

#[test]
fn a_warning_is_counted() {
    let count = || warnings(|| tracing::warn!("to be counted")).len();
    assert_eq!((count(), count()), (1, 1));
    // One that there should be: whoever looks into the log sees what is wrong with a machine.
    let events = warnings(|| {
        let mut guest = Kind::Rng.start(Transport::Mmio);
        break_ring(Kind::Rng, &mut guest);
    });
    assert_eq!(events.len(), 1, "{events:?}");
}

#[test]
fn chains_that_make_no_sense_do_not_fill_the_log() {
    everywhere(|kind, transport| {
        assert_once((kind, transport), || {
            let mut guest = kind.start(transport);
            let addr = guest.place(&[0xff; 4096]);
            let chains = [
                vec![Buffer::readable(MMIO_WINDOW, 64)],
                vec![Buffer::readable(addr, 44), Buffer::writable(LOW_END, 64)],
                vec![Buffer::readable(addr, 3)],
                vec![Buffer::readable(addr, 0)],
                vec![Buffer::writable(addr, 1)],
                // A header of ones, with and without what should come after it.
                vec![Buffer::readable(addr, 44)],
                vec![Buffer::readable(addr, 2048), Buffer::writable(addr, 2048)],
            ];
            let queue = kind.queue();
            for _ in 0..TIMES / BATCH {
                for turn in 0..BATCH as usize {
                    guest.rings[queue].add(&chains[turn % chains.len()]);
                }
                serve(&mut guest, queue);
            }
            // A chain without end.
            let ring = &guest.rings[queue];
            ring.write_descriptor(0, Buffer::readable(addr, 1), NEXT, 0);
            for _ in 0..TIMES / BATCH {
                for _ in 0..BATCH {
                    guest.rings[queue].publish(0);
                }
                serve(&mut guest, queue);
            }
        });
    });
}

/// Has the device serve a batch.
fn serve(guest: &mut Guest, queue: usize) {
    guest.rings[queue].kick();
    for _ in 0..BATCH {
        guest.wait_used(queue);
    }
}

/// A head outside of the table.
fn break_ring(kind: Kind, guest: &mut Guest) {
    guest.rings[kind.queue()].publish(u16::MAX);
    guest.rings[kind.queue()].kick();
    guest.wait_needs_reset();
}

#[test]
fn broken_rings_do_not_fill_the_log() {
    everywhere(|kind, transport| {
        assert_once((kind, transport), || {
            let mut guest = kind.start(transport);
            for _ in 0..RESTARTS {
                break_ring(kind, &mut guest);
                guest.reset();
                guest.restart();
            }
        });
    });
}

#[test]
fn rings_that_are_set_up_wrongly_do_not_fill_the_log() {
    everywhere(|kind, transport| {
        assert_once((kind, transport), || {
            let mut guest = Guest::attach(transport, kind.device(), 64);
            let mut configs = guest.configs();
            configs[0].size = 3;
            // A vhost-user back-end hangs up.
            let times = match transport {
                Transport::VhostUser => 1,
                _ => TIMES,
            };
            for _ in 0..times {
                guest.activate(u64::MAX, &configs);
                assert!(guest.needs_reset());
                guest.reset();
            }
        });
    });
}

#[test]
fn requests_that_a_disk_refuses_do_not_fill_the_log() {
    assert_once("disk", || {
        let mut guest = Kind::Block.start(Transport::Direct);
        let (data, status) = (guest.alloc(512), guest.alloc(1));
        let header = guest.alloc(16);
        // Reads and writes behind the end, discards of nonsense, what there is not.
        for kind in [0_u32, 1, 11, 13, 99, u32::MAX] {
            for _ in 0..TIMES / 4 {
                let bytes = [kind.to_le_bytes(), [0; 4], [0xff; 4], [0xff; 4]].concat();
                guest.write(header, &bytes);
                let buffer = match kind {
                    0 => Buffer::writable(data, 512),
                    _ => Buffer::readable(data, 512),
                };
                let buffers = [
                    Buffer::readable(header, 16),
                    buffer,
                    Buffer::writable(status, 1),
                ];
                guest.request(0, &buffers);
                assert_ne!(guest.read(status, 1), [0], "it was refused");
            }
        }
    });
}

/// The packets of one refused thing, the `n`th time.
type Packets = fn(u32) -> Vec<Packet>;

const REFUSED: [(&str, Packets); 10] = [
    ("a connection to a port where nobody listens", |n| {
        vec![Packet::new(REQUEST, 5000 + n, 1 + n % 7)]
    }),
    ("more connections than are accepted", |n| {
        vec![Packet::new(REQUEST, 5000 + n, PORT)]
    }),
    ("a connection twice", |n| {
        let request = Packet::new(REQUEST, 5000 + n, PORT);
        vec![request.clone(), request]
    }),
    ("packets of no connection", |n| {
        [RESPONSE, RST, SHUTDOWN, RW, CREDIT_UPDATE, CREDIT_REQUEST]
            .map(|op| Packet::new(op, 5000 + n, PORT))
            .to_vec()
    }),
    ("operations that there are not", |n| {
        vec![
            Packet::new(0, 5000, PORT),
            Packet::new(8 + n as u16, 5000, PORT),
        ]
    }),
    ("another kind of socket", |n| {
        let mut packet = Packet::new(REQUEST, 5000 + n, PORT);
        packet.kind = 2;
        vec![packet]
    }),
    ("another guest", |n| {
        let mut packet = Packet::new(REQUEST, 5000 + n, PORT);
        packet.dst_cid = u64::from(n) + 3;
        vec![packet]
    }),
    ("a false sender", |n| {
        let mut packet = Packet::new(REQUEST, 5000 + n, PORT);
        packet.src_cid = u64::from(n) + 4;
        vec![packet]
    }),
    ("a length that is not there", |n| {
        let mut packet = Packet::new(RW, 5000 + n, PORT).data(b"x");
        packet.len = 1000;
        vec![packet]
    }),
    ("data beyond the credit", |n| {
        let mut packets = vec![Packet::new(REQUEST, 5000 + n, PORT)];
        packets.extend(vec![Packet::new(RW, 5000 + n, PORT).data(&[1; 65_536]); 5]);
        packets
    }),
];

/// Where the host listens.
const PORT: u32 = 1024;

#[test]
fn what_the_socket_device_refuses_does_not_fill_the_log() {
    for (what, packets) in REFUSED {
        assert_once(what, || {
            let mut driver = Driver::ready(Transport::Direct);
            let listener = driver.vsock.listen(PORT).unwrap();
            // A host that accepts, and hangs up, and one that does not.
            let accepts = what != "more connections than are accepted";
            let times = if what == "data beyond the credit" {
                TIMES / 10
            } else {
                TIMES
            };
            for n in 0..times {
                for packet in packets(n) {
                    driver.send(&packet);
                }
                if accepts {
                    drop(listener.accept_timeout(Duration::ZERO));
                }
                while driver.guest.has_used(0) {
                    driver.receive();
                }
            }
        });
    }
}

#[test]
fn connections_that_the_guest_refuses_do_not_fill_the_log() {
    assert_once("refusals", || {
        let mut driver = Driver::ready(Transport::Direct);
        for n in 0..TIMES / 4 {
            let _stream = driver.vsock.connect(9).unwrap();
            let asked = loop {
                let packet = driver.receive();
                if packet.op == REQUEST {
                    break packet;
                }
            };
            // Refused, accepted twice, answered with nonsense.
            let answers: &[u16] = match n % 3 {
                0 => &[RST],
                1 => &[RESPONSE, RESPONSE],
                _ => &[RW],
            };
            for op in answers {
                driver.send(&Packet::new(*op, asked.guest_port, asked.host_port));
            }
        }
    });
}
