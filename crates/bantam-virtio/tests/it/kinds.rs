//! Every device, in one loop.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use bantam_virtio::testing::{Buffer, Guest, PATIENCE, Transport};
use bantam_virtio::{BlockDevice, RngDevice, VirtioDevice, VsockDevice};

use crate::net_driver;
use crate::vsock_driver::{CID, Packet, RST};

/// How long stopping a device may take, whatever its rings look like.
const PROMPT: Duration = Duration::from_millis(100);

/// Every device there is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Block,
    Net,
    Rng,
    Vsock,
}

pub(crate) const KINDS: [Kind; 4] = [Kind::Block, Kind::Net, Kind::Rng, Kind::Vsock];

impl Kind {
    pub(crate) fn device(self) -> Box<dyn VirtioDevice> {
        match self {
            Kind::Block => {
                let file = tempfile::tempfile().unwrap();
                file.set_len(1 << 20).unwrap();
                Box::new(BlockDevice::new(file, false, "disk").unwrap())
            }
            Kind::Net => Box::new(net_driver::card().0),
            Kind::Rng => Box::new(RngDevice::new()),
            Kind::Vsock => Box::new(VsockDevice::new(CID).unwrap().0),
        }
    }

    /// The queue that the device looks at when it is kicked.
    pub(crate) fn queue(self) -> usize {
        match self {
            Kind::Block | Kind::Rng => 0,
            Kind::Net | Kind::Vsock => 1,
        }
    }

    pub(crate) fn start(self, transport: Transport) -> Guest {
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
            Kind::Net => net_driver::transmit(guest, b"frame"),
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
            Kind::Net | Kind::Vsock => 0,
        }
    }

    pub(crate) fn assert_alive(self, guest: &mut Guest) {
        assert_eq!(self.good_request(guest), self.good_answer(), "{self:?}");
    }
}

/// Runs `test` for every device over every transport.
pub(crate) fn everywhere(test: impl Fn(Kind, Transport)) {
    for kind in KINDS {
        for &transport in Transport::ALL {
            test(kind, transport);
        }
    }
}

pub(crate) fn assert_stops_promptly(what: impl Debug, guest: &mut Guest) {
    let (start, cpu_start) = (Instant::now(), cpu_time());
    guest.reset();
    let (took, cpu) = (start.elapsed(), cpu_time() - cpu_start);
    // On a busy machine a thread may wait that long for its turn; it has not worked then.
    assert!(
        took.min(cpu) < PROMPT && took < PATIENCE,
        "{what:?} took {took:?} ({cpu:?} of work) to stop"
    );
}

/// CPU time that this process has used.
fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(now).unwrap()
}
