//! Where a machine's packets may go. Pure: no sockets, no clock, no names but those it is given.
//!
//! # The order of questions
//!
//! 1. Is the network on? [`Policy::off`] refuses everything.
//! 2. Does a deny rule speak of the address and port? Then it is refused: deny beats allow. For an
//!    IPv6 address that leads to an IPv4 address (NAT64, 6to4, Teredo), rules about that count too;
//!    for the host, by whichever of its addresses, rules about 127.0.0.1 and ::1.
//! 3. Is its [`Range`] granted? Public addresses are; [`Policy::allow_private`] adds private,
//!    carrier and IPv4 link-local addresses; [`Policy::allow_host_loopback`] adds the host itself.
//!    An allow rule for addresses grants a special range when the rule lies *wholly inside* it:
//!    `10.1.0.0/16` grants a part of 10.0.0.0/8, `0.0.0.0/0` grants no special range, and metadata
//!    services are granted only by naming their very address. Some ranges cannot be granted:
//!    multicast, broadcast, unspecified, loopback by its own address, IPv6 link-local,
//!    IPv4-mapped, unallocated.
//! 4. Once there is any allow rule, one of them must speak of the address and port, or of a name
//!    that the machine got this address for. The host's loopback, when granted, needs no further
//!    rule.
//!
//! Names are decided by [`Policy::decide_name`]: without allow rules all may be looked up, with them
//! only those that an [`allow_host`](Policy::allow_hosts) rule speaks of.

mod range;
mod rule;
#[cfg(test)]
mod table;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use range::{Range, range};
pub(crate) use rule::normal_name;
pub use rule::{Cidr, CidrRule, HostRule, MAX_NAME, MAX_PORT_RANGES, Ports};

/// Where a machine's packets may go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Whether anything may be reached at all.
    pub enabled: bool,
    /// Private, carrier and IPv4 link-local addresses may be reached, as public ones may.
    pub allow_private: bool,
    /// The host's loopback (by the gateway's address) and the host's own addresses may be reached.
    pub allow_host_loopback: bool,
    /// Names whose addresses may be reached.
    pub allow_hosts: Vec<HostRule>,
    /// Addresses that may be reached.
    pub allow_cidrs: Vec<CidrRule>,
    /// Addresses that may not be reached, whatever else is said.
    pub deny_cidrs: Vec<CidrRule>,
}

/// What a packet is of, as far as rules distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP or ICMPv6 echo.
    Icmp,
    /// A name looked up at the gateway, over UDP or TCP.
    Dns,
}

impl Protocol {
    /// The word for it in messages.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Icmp => "icmp",
            Protocol::Dns => "dns",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is about to be connected to.
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    /// The address that the host's socket would connect to.
    pub address: IpAddr,
    /// The port; `None` for a protocol without ports.
    pub port: Option<u16>,
    /// Whether it is the host's loopback by way of the gateway, or an address of the host.
    pub host: bool,
    /// Names for which the machine was given the address, lower case.
    pub names: &'a [&'a str],
}

/// Why something is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The network is off.
    Off,
    /// The address is of a range that is not granted.
    Range(Range),
    /// A deny rule speaks of it.
    Denied(String),
    /// There are allow rules and none speaks of it.
    NotAllowed,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Off => f.write_str("the network is off"),
            Reason::Range(range) => write!(f, "{range} addresses are not granted"),
            Reason::Denied(rule) => write!(f, "denied by {rule}"),
            Reason::NotAllowed => f.write_str("no allow rule matches"),
        }
    }
}

impl Policy {
    /// Nothing may be reached.
    pub fn off() -> Policy {
        Policy::default()
    }

    /// Public addresses may be reached.
    pub fn public() -> Policy {
        Policy {
            enabled: true,
            ..Policy::default()
        }
    }

    /// Whether only what allow rules speak of may be reached.
    pub fn is_restricted(&self) -> bool {
        !self.allow_hosts.is_empty() || !self.allow_cidrs.is_empty()
    }

    /// Whether `to` may be reached.
    ///
    /// # Errors
    /// The reason why not.
    pub fn decide(&self, to: &Destination<'_>) -> Result<(), Reason> {
        if !self.enabled {
            return Err(Reason::Off);
        }
        self.check_denied(to.address, to.port)?;
        if let Some(v4) = range::embedded(to.address) {
            self.check_denied(IpAddr::V4(v4), to.port)?;
        }
        if to.host {
            // It has many addresses, and a rule about one is about what all of them lead to.
            self.check_denied(Ipv4Addr::LOCALHOST.into(), to.port)?;
            self.check_denied(Ipv6Addr::LOCALHOST.into(), to.port)?;
            return self.decide_host(to);
        }
        self.check_range(to)?;
        if self.is_restricted() && !self.is_listed(to) {
            return Err(Reason::NotAllowed);
        }
        Ok(())
    }

    /// Whether `name` (lower case, no final dot) may be looked up. Labels for services, such as
    /// `_http._tcp`, are not counted: who may reach a host may ask what services it has.
    ///
    /// # Errors
    /// The reason why not.
    pub fn decide_name(&self, name: &str) -> Result<(), Reason> {
        if !self.enabled {
            return Err(Reason::Off);
        }
        if !self.is_restricted() {
            return Ok(());
        }
        let mut host = name;
        while let Some((label, rest)) = host.split_once('.')
            && label.starts_with('_')
        {
            host = rest;
        }
        match self.allow_hosts.iter().any(|rule| rule.matches_name(host)) {
            true => Ok(()),
            false => Err(Reason::NotAllowed),
        }
    }

    fn check_denied(&self, address: IpAddr, port: Option<u16>) -> Result<(), Reason> {
        match self
            .deny_cidrs
            .iter()
            .find(|rule| rule.matches(address, port))
        {
            Some(rule) => Err(Reason::Denied(rule.to_string())),
            None => Ok(()),
        }
    }

    /// The host itself: its loopback, or one of its addresses.
    fn decide_host(&self, to: &Destination<'_>) -> Result<(), Reason> {
        let block = range::block(to.address);
        // Some hosts serve credentials to themselves, as a cloud would.
        if self.allow_host_loopback && block.range != Range::Metadata {
            return Ok(());
        }
        // Who names the host's address in a rule means the host. Its private addresses are private.
        let loopback = block.range == Range::Loopback;
        let named = self.allow_cidrs.iter().any(|rule| {
            rule.matches(to.address, to.port)
                && rule.cidr.prefix() > 0
                && block
                    .grantable
                    .is_some_and(|block| block.covers(&rule.cidr))
        });
        let private = self.allow_private
            && matches!(
                block.range,
                Range::Private | Range::Carrier | Range::LinkLocal
            )
            && (!self.is_restricted() || self.is_listed(to));
        match !loopback && (named || private) {
            true => Ok(()),
            false => Err(Reason::Range(Range::Host)),
        }
    }

    fn check_range(&self, to: &Destination<'_>) -> Result<(), Reason> {
        let block = range::block(to.address);
        let refused = Err(Reason::Range(block.range));
        match block.range {
            Range::Public => return Ok(()),
            Range::Private | Range::Carrier if self.allow_private => return Ok(()),
            Range::LinkLocal if self.allow_private && to.address.is_ipv4() => return Ok(()),
            _ => {}
        }
        let Some(grantable) = block.grantable else {
            return refused;
        };
        let granted = self
            .allow_cidrs
            .iter()
            .any(|rule| rule.matches(to.address, to.port) && grantable.covers(&rule.cidr));
        if !granted {
            return refused;
        }
        // It leads to an IPv4 address, which must be granted by itself.
        match range::embedded(to.address) {
            Some(v4) => self.check_range(&Destination {
                address: IpAddr::V4(v4),
                ..*to
            }),
            None => Ok(()),
        }
    }

    fn is_listed(&self, to: &Destination<'_>) -> bool {
        self.allow_cidrs
            .iter()
            .any(|rule| rule.matches(to.address, to.port))
            || self
                .allow_hosts
                .iter()
                .any(|rule| to.names.iter().any(|name| rule.matches(name, to.port)))
    }
}
