//! What a machine's network refused.

use std::net::IpAddr;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

/// One thing that a machine tried to reach and was refused, or the same several times in a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EgressRecord {
    /// When it happened last: milliseconds since 1970.
    pub time_ms: u64,
    /// How often in a row.
    pub count: u64,
    /// `tcp`, `udp`, `icmp` or `dns`.
    pub protocol: String,
    /// Where it was meant to go; `None` for a name.
    pub address: Option<IpAddr>,
    /// The port, where the protocol has one.
    pub port: Option<u16>,
    /// The name, if it was a name, or the machine got the address for one.
    pub name: Option<String>,
    /// Why it was refused, for people.
    pub reason: String,
}

impl From<bantam_net::EgressEvent> for EgressRecord {
    fn from(event: bantam_net::EgressEvent) -> Self {
        let since = event.time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            time_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            count: event.count,
            protocol: event.protocol.to_string(),
            address: event.address,
            port: event.port,
            name: event.name,
            reason: event.reason.to_string(),
        }
    }
}
