use std::io;
use std::net::SocketAddr;

use crate::Protocol;

/// What can go wrong before a machine's network runs. Once it runs, failures are the guest's: it
/// sees resets, unreachable hosts and silence, as on any network.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A rule that cannot be understood.
    #[error("rule {rule:?}: {reason}")]
    Rule {
        /// The rule as written.
        rule: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A port of the host that cannot be listened on.
    #[error("listening on {protocol} port {address}")]
    Listen {
        /// TCP or UDP.
        protocol: Protocol,
        /// The host's address and port.
        address: SocketAddr,
        /// Why: taken, forbidden, no such address.
        #[source]
        source: io::Error,
    },
    /// A setting out of its bounds.
    #[error("network setting {name}: {reason}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The host did not give what the event loop needs.
    #[error("setting up the network's event loop")]
    Setup(#[source] io::Error),
}

/// A result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
