//! The control stream: one for each guest, for as long as the guest lives.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::frame::{encode_bytes, encode_value};
use crate::{Error, Frame, Kind};

/// What the guest says on the control stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestControl {
    /// The root filesystem is ready and the exec port is open.
    Hello(Hello),
    /// The boot failed; the text names the step. The guest powers off. It can
    /// follow `Hello`: what no one needs to see in order to connect comes after it.
    BootFailed(String),
    /// Every process has ended and everything is written back. The guest powers
    /// off when the host hangs up, or soon after by itself.
    ShuttingDown,
}

/// The first message of a guest that booted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`](crate::PROTOCOL_VERSION) of the agent.
    pub protocol_version: u32,
    /// The agent's own version.
    pub agent_version: String,
    /// The kernel's release, as `uname -r` shows it.
    pub kernel_release: String,
    /// When the steps of the boot happened.
    pub timings: BootTimings,
}

/// Moments of the boot in nanoseconds of the guest's monotonic clock, which
/// starts with its kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootTimings {
    /// The first instruction of the agent's `main`.
    pub init_ns: u64,
    /// The root filesystem is mounted and switched to.
    pub rootfs_ns: u64,
    /// The control stream is connected and `Hello` about to be written.
    pub hello_ns: u64,
}

impl GuestControl {
    /// The message as one frame.
    ///
    /// # Errors
    /// [`Error::TooLong`] when a text is longer than its frame may be.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        match self {
            Self::Hello(hello) => encode_value(Kind::Hello, hello),
            Self::BootFailed(message) => encode_value(Kind::BootFailed, message),
            Self::ShuttingDown => encode_bytes(Kind::ShuttingDown, &[]),
        }
    }

    /// The message in `frame`.
    ///
    /// # Errors
    /// [`Error::Malformed`], or [`Error::Unexpected`] when it is not one a guest sends here.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, Error> {
        match frame.kind {
            Kind::Hello => frame.parse().map(Self::Hello),
            Kind::BootFailed => frame.parse().map(Self::BootFailed),
            Kind::ShuttingDown => frame.empty(Self::ShuttingDown),
            kind => Err(Error::Unexpected(kind)),
        }
    }
}

/// What the host says on the control stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostControl {
    /// The answer to `Hello`. The guest takes exec streams only after it.
    Configure(Configure),
    /// End every process, write everything back, power off. Processes get
    /// SIGTERM, and SIGKILL when the grace is over.
    Shutdown {
        /// Milliseconds between the two signals; 0 sends SIGKILL at once.
        grace_ms: u32,
    },
    /// Set the wall clock: the guest was paused, or the host slept.
    SetClock {
        /// Nanoseconds since 1970-01-01 00:00 UTC.
        wall_clock_ns: u64,
    },
}

/// What a guest cannot know by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configure {
    /// The guest's host name; must resolve to the loopback address inside.
    pub hostname: String,
    /// The wall clock: nanoseconds since 1970-01-01 00:00 UTC.
    pub wall_clock_ns: u64,
    /// How to set up the network card, if there is one.
    pub network: Option<GuestNetwork>,
}

/// The guest's place in its network. The card itself says its Ethernet address and its MTU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNetwork {
    /// The guest's addresses, each with the length of its prefix in bits.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Where everything else is reached; at most one of each family.
    pub gateways: Vec<IpAddr>,
    /// Name servers, for `/etc/resolv.conf`.
    pub name_servers: Vec<IpAddr>,
    /// Search domains, for `/etc/resolv.conf`.
    pub search: Vec<String>,
    /// Names that resolve without a name server, for `/etc/hosts`.
    pub hosts: Vec<(IpAddr, String)>,
    /// Packets for 127.0.0.1 may come from the card: ports of the host lead to servers that listen
    /// only there.
    pub route_loopback: bool,
}

impl HostControl {
    /// The message as one frame.
    ///
    /// # Errors
    /// [`Error::TooLong`] when a text is longer than its frame may be.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        match self {
            Self::Configure(configure) => encode_value(Kind::Configure, configure),
            Self::Shutdown { grace_ms } => encode_value(Kind::Shutdown, grace_ms),
            Self::SetClock { wall_clock_ns } => encode_value(Kind::SetClock, wall_clock_ns),
        }
    }

    /// The message in `frame`.
    ///
    /// # Errors
    /// [`Error::Malformed`], or [`Error::Unexpected`] when it is not one a host sends here.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, Error> {
        match frame.kind {
            Kind::Configure => frame.parse().map(Self::Configure),
            Kind::Shutdown => frame.parse().map(|grace_ms| Self::Shutdown { grace_ms }),
            Kind::SetClock => frame
                .parse()
                .map(|wall_clock_ns| Self::SetClock { wall_clock_ns }),
            kind => Err(Error::Unexpected(kind)),
        }
    }
}
