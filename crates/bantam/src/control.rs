//! The control stream: how a guest comes up and how it is asked to end.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bantam_protocol::{
    Configure, Frame, GuestControl, GuestNetwork, Hello, HostControl, PROTOCOL_VERSION,
};
use bantam_virtio::vsock::VsockListener;
use bantam_vmm::{Phase, Timeline};

use crate::Error;
use crate::wire::{FrameReceiver, ReceiveError};

/// Why the guest did not say hello.
pub(crate) enum HelloError {
    /// The text tells.
    Failed(String),
    /// The versions differ.
    Library(Error),
}

/// A guest that said hello.
#[derive(Debug)]
pub(crate) struct Control {
    stream: UnixStream,
    receiver: FrameReceiver,
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
                std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => late(),
                _ => HelloError::Failed("the guest ended before its agent said hello".to_owned()),
            })?;
        let reader = stream
            .try_clone()
            .map_err(|error| HelloError::Failed(error.to_string()))?;
        let mut receiver = FrameReceiver::new(reader);
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
        let mut control = Self {
            stream,
            receiver,
            hello,
        };
        control
            .configure(hostname, network)
            .map_err(|error| HelloError::Failed(format!("the agent hung up: {error}")))?;
        Ok(control)
    }

    fn configure(&mut self, hostname: &str, network: Option<GuestNetwork>) -> std::io::Result<()> {
        let message = HostControl::Configure(Configure {
            hostname: hostname.to_owned(),
            wall_clock_ns: wall_clock_ns(),
            network,
        });
        self.send(&message)
    }

    /// Gives the guest the host's wall clock once more: after the host slept, or the guest was
    /// paused, its own is behind.
    pub(crate) fn set_clock(&mut self) -> std::io::Result<()> {
        self.send(&HostControl::SetClock {
            wall_clock_ns: wall_clock_ns(),
        })
    }

    fn send(&mut self, message: &HostControl) -> std::io::Result<()> {
        let bytes = message.encode().map_err(std::io::Error::other)?;
        self.stream.write_all(&bytes)
    }

    /// Asks the guest to end its processes (by force after `grace`), write everything back and
    /// power off; then waits for its farewell, at most for `limit`.
    pub(crate) fn shutdown(&mut self, grace: Duration, limit: Duration) -> std::io::Result<()> {
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        self.send(&HostControl::Shutdown { grace_ms })?;
        let deadline = Instant::now().checked_add(limit);
        // Whatever comes, a farewell or none, the next step is to hang up: the guest waits for it.
        let _ = self.receiver.receive(deadline, decode);
        self.stream.shutdown(Shutdown::Both)
    }

    /// What the guest said about its own end, if it said anything.
    pub(crate) fn last_words(&mut self) -> Option<String> {
        let deadline = Instant::now().checked_add(Duration::from_millis(10));
        match self.receiver.receive(deadline, decode) {
            Ok(GuestControl::BootFailed(message)) => Some(message),
            _ => None,
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
