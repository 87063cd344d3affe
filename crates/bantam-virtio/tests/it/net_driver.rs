//! A network behind a card that remembers and does what it is told.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bantam_virtio::net::{FrameHeader, MAX_FRAME, NetOffloads};
use bantam_virtio::testing::{Buffer, Guest, Transport};
use bantam_virtio::{NetBackend, NetDevice};

/// The Ethernet address and the MTU of the card.
pub(crate) const MAC: [u8; 6] = [2, 1, 2, 3, 4, 5];
pub(crate) const MTU: u16 = 1500;

#[derive(Default)]
struct State {
    received: VecDeque<(Vec<u8>, FrameHeader)>,
    waiting: VecDeque<(Vec<u8>, FrameHeader)>,
    resets: Vec<NetOffloads>,
    /// Frames of the guest are sent back.
    echo: bool,
}

struct Backend {
    state: Arc<Mutex<State>>,
    woken: UnixStream,
}

impl NetBackend for Backend {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.woken.as_fd()
    }

    fn reset(&mut self, offloads: NetOffloads) {
        self.state.lock().unwrap().resets.push(offloads);
    }

    fn receive(&mut self, frame: &[u8], header: &FrameHeader) {
        assert!(frame.len() <= MAX_FRAME as usize);
        let mut state = self.state.lock().unwrap();
        let frame = (frame.to_vec(), *header);
        match state.echo {
            true => state.waiting.push_back(frame),
            false => state.received.push_back(frame),
        }
    }

    fn run(&mut self) -> Option<Duration> {
        let mut bytes = [0; 64];
        while matches!(self.woken.read(&mut bytes), Ok(1..)) {}
        None
    }

    fn take_frame(&mut self, take: &mut dyn FnMut(&[u8], &FrameHeader) -> bool) -> bool {
        let mut state = self.state.lock().unwrap();
        let Some((frame, header)) = state.waiting.front() else {
            return false;
        };
        let taken = take(frame, header);
        if taken {
            state.waiting.pop_front();
        }
        taken
    }
}

/// The other side of the backend.
pub(crate) struct Network {
    state: Arc<Mutex<State>>,
    wake: UnixStream,
}

impl Network {
    /// Has a frame wait for the guest.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        self.send_with(frame, FrameHeader::default());
    }

    pub(crate) fn send_with(&mut self, frame: &[u8], header: FrameHeader) {
        let frame = (frame.to_vec(), header);
        self.state.lock().unwrap().waiting.push_back(frame);
        self.wake.write_all(&[1]).unwrap();
    }

    /// The oldest frame that the guest sent and that was not looked at.
    pub(crate) fn received(&self) -> Option<(Vec<u8>, FrameHeader)> {
        self.state.lock().unwrap().received.pop_front()
    }

    /// Frames that wait for the guest.
    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().unwrap().waiting.len()
    }

    /// What each driver so far took.
    pub(crate) fn resets(&self) -> Vec<NetOffloads> {
        self.state.lock().unwrap().resets.clone()
    }

    pub(crate) fn echo(&self) {
        self.state.lock().unwrap().echo = true;
    }
}

/// A card and its network.
pub(crate) fn card() -> (NetDevice, Network) {
    let state = Arc::<Mutex<State>>::default();
    let (woken, wake) = UnixStream::pair().unwrap();
    woken.set_nonblocking(true).unwrap();
    let backend = Backend {
        state: state.clone(),
        woken,
    };
    let device = NetDevice::new(Box::new(backend), MAC, MTU);
    (device, Network { state, wake })
}

/// A guest with a running card.
pub(crate) fn start(transport: Transport) -> (Guest, Network) {
    let (device, network) = card();
    (Guest::start(transport, device), network)
}

/// A frame in a chain of its own, without a header of importance.
pub(crate) fn transmit(guest: &mut Guest, frame: &[u8]) -> u32 {
    let bytes = [&[0; 12], frame].concat();
    let addr = guest.place(&bytes);
    guest.request(1, &[Buffer::readable(addr, bytes.len() as u32)])
}
