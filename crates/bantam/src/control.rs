//! The control stream: how a guest comes up and how it is asked to end.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bantam_protocol::{
    Configure, Frame, GuestControl, GuestNetwork, Hello, HostControl, PROTOCOL_VERSION,
};
use bantam_virtio::vsock::VsockListener;
use bantam_vmm::{Phase, Timeline};

use crate::Error;
use crate::wire::{self, FrameReceiver, FrameSender, ReceiveError};

/// Why the guest did not say hello.
pub(crate) enum HelloError {
    /// The text tells.
    Failed(String),
    /// The versions differ.
    Library(Error),
}

/// A guest that said hello. Any number of threads may talk to it; none waits longer than it says,
/// whatever the guest and the others do.
#[derive(Debug)]
pub(crate) struct Control {
    sender: FrameSender,
    /// Locked while somebody waits for what the guest says.
    receiver: Mutex<FrameReceiver>,
    /// What the guest said.
    pub(crate) hello: Hello,
}

impl Control {
    /// Waits for the guest's hello and answers it.
    pub(crate) fn accept(
        listener: &VsockListener,
        timeout: Duration,
        hostname: &str,
        network: Option<GuestNetwork>,
        timeline: &Timeline,
    ) -> Result<Self, HelloError> {
        // A timeout beyond what the clock can tell is none.
        let deadline = Instant::now().checked_add(timeout);
        let late = || HelloError::Failed(format!("no sign of life within {timeout:?}"));
        let stream = listener
            .accept_timeout(timeout)
            .map_err(|error| match error.kind() {
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => late(),
                _ => HelloError::Failed("the guest ended before its agent said hello".to_owned()),
            })?;
        let (sender, mut receiver) = wire::split(stream, wire::UNLIMITED);
        let hello = receiver.receive(deadline, decode);
        let hello = match hello {
            Ok(GuestControl::Hello(hello)) => hello,
            Ok(GuestControl::BootFailed(message)) => return Err(HelloError::Failed(message)),
            Ok(GuestControl::ShuttingDown) | Err(ReceiveError::Gone) => {
                return Err(HelloError::Failed(
                    "the guest ended before its agent said hello".to_owned(),
                ));
            }
            Err(ReceiveError::TimedOut) => return Err(late()),
            Err(ReceiveError::Protocol(error)) => {
                return Err(HelloError::Library(Error::Protocol(error.to_string())));
            }
        };
        if hello.protocol_version != PROTOCOL_VERSION {
            return Err(HelloError::Library(Error::AgentVersion {
                found: hello.protocol_version,
                expected: PROTOCOL_VERSION,
            }));
        }
        mark_boot(timeline, &hello);
        let control = Self {
            sender,
            receiver: Mutex::new(receiver),
            hello,
        };
        let left = deadline.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        });
        match control.configure(hostname, network, left) {
            Ok(()) => Ok(control),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(late()),
            Err(error) => Err(HelloError::Failed(format!("the agent hung up: {error}"))),
        }
    }

    fn configure(
        &self,
        hostname: &str,
        network: Option<GuestNetwork>,
        limit: Duration,
    ) -> io::Result<()> {
        let message = HostControl::Configure(Configure {
            hostname: hostname.to_owned(),
            wall_clock_ns: wall_clock_ns(),
            network,
        });
        self.send(&message, limit)
    }

    /// Gives the guest the host's wall clock once more: after the host slept, or the guest was
    /// paused, its own is behind. Does not wait for a guest that takes nothing: it is told nothing.
    ///
    /// # Errors
    /// `TimedOut` if it takes nothing now, others if it has hung up.
    pub(crate) fn set_clock(&self) -> io::Result<()> {
        let message = HostControl::SetClock {
            wall_clock_ns: wall_clock_ns(),
        };
        self.send(&message, Duration::ZERO)
    }

    /// The stream, to see when the guest hangs up.
    pub(crate) fn stream(&self) -> io::Result<UnixStream> {
        self.sender.stream().try_clone()
    }

    /// Sends a message, or nothing if the guest does not take it within `limit`.
    fn send(&self, message: &HostControl, limit: Duration) -> io::Result<()> {
        let bytes = message.encode().map_err(io::Error::other)?;
        self.sender.send_encoded(&bytes, limit)
    }

    /// Asks the guest to end its processes (by force after `grace`), write everything back and
    /// power off; then waits for its farewell, unless another thread does. Takes at most `limit`.
    ///
    /// # Errors
    /// If the guest cannot be asked: `TimedOut` if it takes nothing.
    pub(crate) fn shutdown(&self, grace: Duration, limit: Duration) -> io::Result<()> {
        let deadline = Instant::now().checked_add(limit);
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        self.send(&HostControl::Shutdown { grace_ms }, limit)?;
        // Whoever waits for the farewell already hangs up, too.
        if let Some(mut receiver) = self.try_receiver() {
            // Whatever comes, a farewell or none, the next step is to hang up: the guest waits for
            // it.
            let _ = receiver.receive(deadline, decode);
            self.sender.hang_up();
        }
        Ok(())
    }

    /// What the guest said about its own end, if it said anything.
    pub(crate) fn last_words(&self) -> Option<String> {
        let deadline = Instant::now().checked_add(Duration::from_millis(10));
        match self.try_receiver()?.receive(deadline, decode) {
            Ok(GuestControl::BootFailed(message)) => Some(message),
            _ => None,
        }
    }

    /// What the guest says, unless another thread listens.
    fn try_receiver(&self) -> Option<MutexGuard<'_, FrameReceiver>> {
        match self.receiver.try_lock() {
            Ok(receiver) => Some(receiver),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Nanoseconds since 1970.
fn wall_clock_ns() -> u64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

fn decode(frame: Frame<'_>) -> Result<GuestControl, ReceiveError> {
    GuestControl::decode(&frame).map_err(ReceiveError::from)
}

/// The host sees the hello; when `/init` began is known only by the guest's clock.
fn mark_boot(timeline: &Timeline, hello: &Hello) {
    timeline.mark(Phase::AgentHello);
    let agent = hello.timings.hello_ns.saturating_sub(hello.timings.init_ns);
    if let Some(at) = timeline
        .get(Phase::AgentHello)
        .and_then(|at| at.checked_sub(Duration::from_nanos(agent)))
    {
        timeline.mark_at(Phase::GuestInit, at);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;

    use bantam_protocol::{BootTimings, read_frame};

    use super::*;

    /// Far more than a busy host takes for what waits for nothing, and far less than for ever.
    const SOON: Duration = Duration::from_secs(20);

    /// A guest, by its end of the stream.
    fn guest() -> (Arc<Control>, UnixStream) {
        let (host, guest) = UnixStream::pair().unwrap();
        let (sender, receiver) = wire::split(host, wire::UNLIMITED);
        let hello = Hello {
            protocol_version: PROTOCOL_VERSION,
            agent_version: String::new(),
            kernel_release: String::new(),
            timings: BootTimings::default(),
        };
        let control = Control {
            sender,
            receiver: Mutex::new(receiver),
            hello,
        };
        (Arc::new(control), guest)
    }

    /// Tells the time until the guest takes no more. Gives how often it was told.
    fn fill(control: &Arc<Control>) -> u32 {
        let control = Arc::clone(control);
        soon(move || {
            let mut told = 0;
            while control.set_clock().is_ok() {
                told += 1;
            }
            told
        })
    }

    /// What `call` gives, which must not hang.
    fn soon<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
        let (ends, ended) = mpsc::channel();
        thread::spawn(move || ends.send(call()));
        ended.recv_timeout(SOON).expect("the call ends")
    }

    fn next(guest: &mut UnixStream) -> HostControl {
        let mut buffer = Vec::new();
        HostControl::decode(&read_frame(guest, &mut buffer).unwrap().unwrap()).unwrap()
    }

    #[test]
    fn a_guest_that_takes_nothing_hangs_no_call() {
        let (control, _guest) = guest();
        fill(&control);
        let limit = Duration::from_secs(1);
        let calls: [fn(&Control, Duration) -> io::Result<()>; 3] = [
            |control, _| control.set_clock(),
            |control, limit| control.shutdown(limit, limit),
            |control, limit| control.configure("host", None, limit),
        ];
        for call in calls {
            let control = Arc::clone(&control);
            let error = soon(move || call(&control, limit)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
        assert_eq!(soon(move || control.last_words()), None);
    }

    #[test]
    fn a_guest_that_takes_nothing_for_a_while_loses_no_frame() {
        let (control, mut guest) = guest();
        let told = fill(&control);
        for _ in 0..told {
            let message = next(&mut guest);
            assert!(
                matches!(message, HostControl::SetClock { .. }),
                "{message:?}"
            );
        }
        let farewell = thread::spawn(move || {
            let asked = next(&mut guest);
            let bytes = GuestControl::ShuttingDown.encode().unwrap();
            io::Write::write_all(&mut guest, &bytes).unwrap();
            // The host hangs up.
            assert!(read_frame(&mut guest, &mut Vec::new()).unwrap().is_none());
            asked
        });
        control.shutdown(Duration::from_millis(7), SOON).unwrap();
        let asked = farewell.join().unwrap();
        assert!(
            matches!(asked, HostControl::Shutdown { grace_ms: 7 }),
            "{asked:?}"
        );
    }

    #[test]
    fn the_limit_of_one_is_not_that_of_another() {
        let (control, guest) = guest();
        let patient = {
            let control = Arc::clone(&control);
            thread::spawn(move || control.shutdown(Duration::ZERO, Duration::MAX))
        };
        // It has asked, and waits for a farewell that does not come.
        while control.try_receiver().is_some() {
            thread::yield_now();
        }
        let hasty = Arc::clone(&control);
        soon(move || {
            hasty.set_clock().unwrap();
            let limit = Duration::from_millis(20);
            hasty.shutdown(Duration::ZERO, limit).unwrap();
            assert_eq!(hasty.last_words(), None);
        });
        assert!(!patient.is_finished());
        drop(guest);
        patient.join().unwrap().unwrap();
    }
}
