//! Where a machine's virtual machine lives, seen from those who use the machine.

use std::fmt::Debug;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bantam_net::Network;
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

/// A virtual machine in this process ([`Local`](crate::local::Local)) or in one of its own
/// ([`Attached`](crate::machines::Attached)). A stream to its agent is the same in both cases:
/// the process that has the machine hands over its end.
pub(crate) trait Host: Debug + Send + Sync {
    /// A new stream to the agent's exec port. `BrokenPipe` when the machine has ended.
    fn connect_exec(&self) -> io::Result<UnixStream>;

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
