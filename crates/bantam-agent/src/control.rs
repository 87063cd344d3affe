//! The control stream, seen from the guest.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bantam_protocol::{Configure, GuestControl, HostControl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::EpollFlags;

use crate::connection::{Connection, Received};

/// How long the guest stays for the host to take its last message.
const FAREWELL: Duration = Duration::from_millis(500);

/// What the host wants of the event loop.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The guest is configured: take exec streams.
    Open,
    /// End.
    Shutdown {
        /// How long processes have between SIGTERM and SIGKILL.
        grace: Duration,
    },
}

/// The stream and what to do with a configuration.
pub(crate) struct Control {
    connection: Connection,
    configure: fn(&Configure),
    set_clock: fn(u64),
}

impl Control {
    /// Takes over the connected, non-blocking stream; `configure` applies a configuration,
    /// `set_clock` a new wall clock in nanoseconds since 1970.
    pub(crate) fn new(stream: OwnedFd, configure: fn(&Configure), set_clock: fn(u64)) -> Self {
        Self {
            connection: Connection::new(stream),
            configure,
            set_clock,
        }
    }

    /// Notes what epoll reported.
    pub(crate) fn note(&mut self, flags: EpollFlags) {
        self.connection.note(flags);
    }

    /// The next order, if one has come. A host that hung up or that is not understood
    /// wants a shutdown without grace.
    pub(crate) fn take_order(&mut self, scratch: &mut [u8]) -> Option<Order> {
        self.connection.flush();
        let mut order = None;
        loop {
            let mut bytes = match self.connection.receive(scratch) {
                Received::Bytes(count) => scratch.get(..count).unwrap_or_default(),
                Received::Nothing => return order,
                Received::End => return Some(NOW),
            };
            let mut decoder = std::mem::take(&mut self.connection.decoder);
            loop {
                match decoder
                    .next_frame(&mut bytes)
                    .map(|frame| frame.map(|frame| HostControl::decode(&frame)))
                {
                    Ok(Some(Ok(HostControl::Configure(configure)))) => {
                        (self.configure)(&configure);
                        order = Some(Order::Open);
                    }
                    Ok(Some(Ok(HostControl::Shutdown { grace_ms }))) => {
                        return Some(Order::Shutdown {
                            grace: Duration::from_millis(grace_ms.into()),
                        });
                    }
                    Ok(Some(Ok(HostControl::SetClock { wall_clock_ns }))) => {
                        (self.set_clock)(wall_clock_ns);
                    }
                    Ok(None) => break,
                    Ok(Some(Err(_))) | Err(_) => return Some(NOW),
                }
            }
            self.connection.decoder = decoder;
        }
    }

    /// Sends the guest's last message and waits for the host to hang up, so that the
    /// power-off does not overtake it.
    pub(crate) fn say_last(&mut self, message: &GuestControl) {
        self.connection.send_message(message.encode());
        let deadline = Instant::now() + FAREWELL;
        let mut buffer = [0; 64];
        while !self.connection.is_gone() {
            self.connection.flush();
            match self.connection.receive(&mut buffer) {
                Received::Bytes(_) => continue,
                Received::End => return,
                Received::Nothing => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let mut wanted = PollFlags::POLLIN;
            if !self.connection.is_clear() {
                wanted |= PollFlags::POLLOUT;
            }
            let mut fds = [PollFd::new(self.connection.as_fd(), wanted)];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            if left.is_zero() || poll(&mut fds, timeout) == Ok(0) {
                return;
            }
            self.connection
                .note(EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT);
        }
    }
}

const NOW: Order = Order::Shutdown {
    grace: Duration::ZERO,
};

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Orders of a host that sends `messages` and stays.
    fn order_after(messages: &[HostControl], set_clock: fn(u64)) -> Option<Order> {
        let (mut host, guest) = UnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        for message in messages {
            host.write_all(&message.encode().unwrap()).unwrap();
        }
        Control::new(guest.into(), |_| (), set_clock).take_order(&mut [0; 4096])
    }

    #[test]
    fn the_clock_is_set_as_often_as_it_is_sent_and_nothing_else_happens() {
        static SUM: AtomicU64 = AtomicU64::new(0);
        let set_clock = |now| {
            SUM.fetch_add(now, Ordering::Relaxed);
        };
        let at = |wall_clock_ns| HostControl::SetClock { wall_clock_ns };
        assert_eq!(order_after(&[at(40), at(2)], set_clock), None);
        assert_eq!(SUM.load(Ordering::Relaxed), 42);
        let shutdown = HostControl::Shutdown { grace_ms: 7 };
        let order = order_after(&[at(1), shutdown, at(1_000)], set_clock);
        let grace = Duration::from_millis(7);
        assert_eq!(order, Some(Order::Shutdown { grace }));
        assert_eq!(
            SUM.load(Ordering::Relaxed),
            43,
            "after the end comes nothing"
        );
    }

    #[test]
    fn a_host_that_is_gone_or_not_understood_wants_the_end() {
        let (host, guest) = UnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        drop(host);
        let mut control = Control::new(guest.into(), |_| (), |_| ());
        assert_eq!(control.take_order(&mut [0; 4096]), Some(NOW));
        let (mut host, guest) = UnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        host.write_all(b"not a frame").unwrap();
        let mut control = Control::new(guest.into(), |_| (), |_| ());
        assert_eq!(control.take_order(&mut [0; 4096]), Some(NOW));
    }
}
