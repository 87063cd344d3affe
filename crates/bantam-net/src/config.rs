//! How a machine's network is set up.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::{Error, Policy, Protocol, Result};

/// Smallest MTU, in bytes: what IPv6 demands (RFC 8200 §5).
pub const MIN_MTU: u16 = 1280;
/// Largest MTU, in bytes.
pub const MAX_MTU: u16 = 65_520;
/// Most ports of the host that one machine may listen on.
pub const MAX_PORTS: usize = 1024;
/// Most name servers that are asked; the rest is ignored, as in resolv.conf(5).
pub const MAX_DNS_SERVERS: usize = 3;

/// Names by which the guest finds the host, when its loopback is granted.
pub const HOST_NAMES: &[&str] = &["host.bantam.internal", "host.smolvm.internal"];

/// The machine's network.
#[derive(Clone, Debug)]
pub struct Config {
    /// Who has which address.
    pub addresses: Addresses,
    /// Largest IP packet on the link, in bytes: [`MIN_MTU`] to [`MAX_MTU`]. With segmentation
    /// offload, 1500 costs no throughput.
    pub mtu: u16,
    /// Where packets may go.
    pub policy: Policy,
    /// Name servers to ask; when empty, those in the host's `/etc/resolv.conf`.
    pub dns_servers: Vec<SocketAddr>,
    /// Ports of the host that lead into the machine.
    pub ports: Vec<PortForward>,
    /// How much of the host a guest may use up.
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            addresses: Addresses::default(),
            mtu: 1500,
            policy: Policy::off(),
            dns_servers: Vec::new(),
            ports: Vec::new(),
            limits: Limits::default(),
        }
    }
}

impl Config {
    pub(crate) fn check(&self) -> Result<()> {
        let wrong = |name, reason| Err(Error::Setting { name, reason });
        if !(MIN_MTU..=MAX_MTU).contains(&self.mtu) {
            return wrong("mtu", "it is not between 1280 and 65520 bytes");
        }
        if self.ports.len() > MAX_PORTS {
            return wrong("ports", "there are more than 1024");
        }
        if self
            .ports
            .iter()
            .any(|port| !matches!(port.protocol, Protocol::Tcp | Protocol::Udp))
        {
            return wrong("ports", "only TCP and UDP have ports");
        }
        if self.ports.iter().any(|port| port.guest_port == 0) {
            return wrong("ports", "0 is not a port of the guest");
        }
        if self.dns_servers.iter().any(|server| server.port() == 0) {
            return wrong("dns", "0 is not a port of a name server");
        }
        Ok(())
    }
}

/// The two ends of a machine's link. Each machine is alone on its link, so all may use the same.
///
/// IPv4 is 10.231.118.0/30, a block of no common LAN, VPN or container engine; IPv6 is a unique local
/// /64 (its first bytes spell "bantam"). A host of that address on a LAN would be hidden from the
/// guest; nothing of the link exists on the host itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// The gateway's Ethernet address: locally administered.
    pub gateway_mac: [u8; 6],
    /// The guest's Ethernet address, for the device's configuration space.
    pub guest_mac: [u8; 6],
    /// Router, name server and, when granted, the host's 127.0.0.1.
    pub gateway_v4: Ipv4Addr,
    /// The guest's address.
    pub guest_v4: Ipv4Addr,
    /// Length of the IPv4 prefix.
    pub prefix_v4: u8,
    /// Router, name server and, when granted, the host's ::1.
    pub gateway_v6: Ipv6Addr,
    /// The guest's address.
    pub guest_v6: Ipv6Addr,
    /// Length of the IPv6 prefix.
    pub prefix_v6: u8,
}

impl Default for Addresses {
    fn default() -> Addresses {
        let v6 = |last| Ipv6Addr::new(0xfd62, 0x616e, 0x7461, 0x6d00, 0, 0, 0, last);
        Addresses {
            gateway_mac: [0x02, 0x62, 0x61, 0x6e, 0x74, 0x01],
            guest_mac: [0x02, 0x62, 0x61, 0x6e, 0x74, 0x02],
            gateway_v4: Ipv4Addr::new(10, 231, 118, 1),
            guest_v4: Ipv4Addr::new(10, 231, 118, 2),
            prefix_v4: 30,
            gateway_v6: v6(1),
            guest_v6: v6(2),
            prefix_v6: 64,
        }
    }
}

impl Addresses {
    /// Whether `address` is the guest's.
    pub fn is_guest(&self, address: IpAddr) -> bool {
        address == self.guest_v4 || address == self.guest_v6
    }

    /// Whether `address` is the gateway's.
    pub fn is_gateway(&self, address: IpAddr) -> bool {
        address == self.gateway_v4 || address == self.gateway_v6
    }

    /// The gateway's address in the family of `like`.
    pub(crate) fn gateway(&self, like: IpAddr) -> IpAddr {
        match like {
            IpAddr::V4(_) => self.gateway_v4.into(),
            IpAddr::V6(_) => self.gateway_v6.into(),
        }
    }
}

/// A port of the host that leads into the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortForward {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Where to listen on the host. Port 0 takes a free one; see
    /// [`Network::ports`](crate::Network::ports).
    pub listen: SocketAddr,
    /// The port in the guest.
    pub guest_port: u16,
    /// Send to 127.0.0.1 in the guest instead of its own address, for servers that listen only
    /// there. IPv4 only; the guest's kernel must have `route_localnet` set on the interface.
    pub guest_loopback: bool,
}

/// How much of the host a guest may use up. Every flow costs the host a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most TCP connections, both ways together; further ones are reset.
    pub tcp_flows: usize,
    /// Most of them whose host side is not connected yet; further SYNs are dropped, and the guest
    /// sends them again.
    pub tcp_connecting: usize,
    /// Most UDP flows and pings together; the one that was idle longest makes room.
    pub datagram_flows: usize,
    /// Most names being looked up at once; further queries are dropped.
    pub dns_queries: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            tcp_flows: 4096,
            tcp_connecting: 512,
            datagram_flows: 1024,
            dns_queries: 128,
        }
    }
}
