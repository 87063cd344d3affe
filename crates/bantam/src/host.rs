//! Where a machine's virtual machine lives, seen from those who use the machine.

use std::fmt::Debug;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use bantam_net::Network;
use bantam_virtio::vsock::ConnectionId;
use bantam_vmm::ExitCause;

use crate::Error;

/// How many console lines an error carries.
pub(crate) const CONSOLE_LINES: usize = 15;

/// How a machine ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Why, for people.
    pub(crate) cause: String,
    /// The last lines of its console.
    pub(crate) console: Vec<String>,
}

/// A stream to the agent with a request on it.
pub(crate) struct ExecStream {
    pub(crate) stream: UnixStream,
    /// How much of the request is on its way.
    pub(crate) sent: usize,
    /// With this the stream can be given to [`Host::part`] in the end.
    pub(crate) id: Option<ConnectionId>,
}

/// A virtual machine in this process ([`Local`](crate::local::Local)) or in one of its own
/// ([`Attached`](crate::machines::Attached)). A stream to its agent is the same in both cases:
/// the process that has the machine hands over its end.
pub(crate) trait Host: Debug + Send + Sync {
    /// A new stream to the agent's exec port. `BrokenPipe` when the machine has ended.
    fn connect_exec(&self) -> io::Result<UnixStream>;

    /// The same, for a request whose bytes are there. What is not sent yet is the caller's to write.
    fn request_exec(&self, _request: &[u8]) -> io::Result<ExecStream> {
        Ok(ExecStream {
            stream: self.connect_exec()?,
            sent: 0,
            id: None,
        })
    }

    /// Ends a stream of [`request_exec`](Self::request_exec) whose command is over; nobody waits
    /// for that.
    fn part(&self, _id: ConnectionId, _stream: Arc<UnixStream>) {}

    /// How it ended, if it ends within `patience`.
    fn ended(&self, patience: Duration) -> Option<Ended>;

    /// Asks the guest to write everything back and power off, within `limit`; then by force.
    fn stop(&self, grace: Duration, limit: Duration) -> Result<ExitCause, Error>;

    /// Its network, if it has one and is of this process.
    fn network(&self) -> Option<Network> {
        None
    }

    /// Ends it at once.
    fn kill(&self) -> ExitCause;
}
