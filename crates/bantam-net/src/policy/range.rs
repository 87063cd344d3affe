//! What kind of address an address is: the IANA special-purpose registries (RFC 6890 and what
//! followed), and the clouds' metadata services.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::rule::Cidr;

/// The kind of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Range {
    /// Globally reachable unicast.
    Public,
    /// RFC 1918, unique local (fc00::/7).
    Private,
    /// Shared address space of carriers (100.64.0.0/10), which overlay networks use, too.
    Carrier,
    /// 169.254.0.0/16 and fe80::/10.
    LinkLocal,
    /// A cloud's metadata service: credentials for whoever asks.
    Metadata,
    /// 127.0.0.0/8 and ::1.
    Loopback,
    /// An address of the host itself, whatever else it may be.
    Host,
    /// 224.0.0.0/4 and ff00::/8.
    Multicast,
    /// 255.255.255.255.
    Broadcast,
    /// 0.0.0.0/8 and ::.
    Unspecified,
    /// Set aside by IANA or not allocated.
    Reserved,
    /// For examples in documents.
    Documentation,
    /// For benchmarks of network gear (198.18.0.0/15, 2001:2::/48).
    Benchmark,
    /// An IPv6 address with an IPv4 address in it: mapped, compatible, NAT64, 6to4, Teredo.
    Embedded,
}

impl Range {
    /// The word for it in messages.
    pub fn name(self) -> &'static str {
        match self {
            Range::Public => "public",
            Range::Private => "private",
            Range::Carrier => "carrier",
            Range::LinkLocal => "link-local",
            Range::Metadata => "metadata",
            Range::Loopback => "loopback",
            Range::Host => "host",
            Range::Multicast => "multicast",
            Range::Broadcast => "broadcast",
            Range::Unspecified => "unspecified",
            Range::Reserved => "reserved",
            Range::Documentation => "documentation",
            Range::Benchmark => "benchmark",
            Range::Embedded => "embedded",
        }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An address's kind, and the block that makes it so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) range: Range,
    /// A rule must lie wholly inside this to grant it; `None`: no rule can.
    pub(super) grantable: Option<Cidr>,
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Cidr {
    Cidr::literal(IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix)
}

const fn v6(segments: [u16; 8], prefix: u8) -> Cidr {
    let [a, b, c, d, e, f, g, h] = segments;
    Cidr::literal(IpAddr::V6(Ipv6Addr::new(a, b, c, d, e, f, g, h)), prefix)
}

/// Blocks by kind; the first that holds an address counts. The last of each family is everything.
const BLOCKS: &[(Cidr, Range)] = &[
    // AWS, GCP, Azure, OpenStack and most others; ECS tasks; EKS pods; Tencent; Scaleway; Alibaba;
    // Oracle; Azure's wire server, on a public address.
    (v4(169, 254, 169, 254, 32), Range::Metadata),
    (v4(169, 254, 0, 23, 32), Range::Metadata),
    (v4(169, 254, 42, 42, 32), Range::Metadata),
    (v4(169, 254, 170, 2, 32), Range::Metadata),
    (v4(169, 254, 170, 23, 32), Range::Metadata),
    (v4(100, 100, 100, 200, 32), Range::Metadata),
    (v4(192, 0, 0, 192, 32), Range::Metadata),
    (v4(168, 63, 129, 16, 32), Range::Metadata),
    (v4(0, 0, 0, 0, 8), Range::Unspecified),
    (v4(10, 0, 0, 0, 8), Range::Private),
    (v4(100, 64, 0, 0, 10), Range::Carrier),
    (v4(127, 0, 0, 0, 8), Range::Loopback),
    (v4(169, 254, 0, 0, 16), Range::LinkLocal),
    (v4(172, 16, 0, 0, 12), Range::Private),
    (v4(192, 0, 0, 0, 24), Range::Reserved),
    (v4(192, 0, 2, 0, 24), Range::Documentation),
    (v4(192, 88, 99, 0, 24), Range::Reserved),
    (v4(192, 168, 0, 0, 16), Range::Private),
    (v4(198, 18, 0, 0, 15), Range::Benchmark),
    (v4(198, 51, 100, 0, 24), Range::Documentation),
    (v4(203, 0, 113, 0, 24), Range::Documentation),
    (v4(224, 0, 0, 0, 4), Range::Multicast),
    (v4(255, 255, 255, 255, 32), Range::Broadcast),
    (v4(240, 0, 0, 0, 4), Range::Reserved),
    (v4(0, 0, 0, 0, 0), Range::Public),
    // AWS (metadata, EKS pods), GCP, Scaleway.
    (
        v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128),
        Range::Metadata,
    ),
    (
        v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23], 128),
        Range::Metadata,
    ),
    (
        v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128),
        Range::Metadata,
    ),
    (
        v6([0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42], 128),
        Range::Metadata,
    ),
    (v6([0; 8], 128), Range::Unspecified),
    (v6([0, 0, 0, 0, 0, 0, 0, 1], 128), Range::Loopback),
    (v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96), Range::Embedded),
    (v6([0, 0, 0, 0, 0xffff, 0, 0, 0], 96), Range::Embedded),
    (v6([0; 8], 96), Range::Embedded),
    (v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96), Range::Embedded),
    (v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), Range::Embedded),
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 32), Range::Embedded),
    (v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16), Range::Embedded),
    (v6([0x2001, 2, 0, 0, 0, 0, 0, 0], 48), Range::Benchmark),
    (
        v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32),
        Range::Documentation,
    ),
    (v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), Range::Documentation),
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23), Range::Reserved),
    (v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), Range::Private),
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), Range::LinkLocal),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), Range::Multicast),
    (v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3), Range::Public),
    (v6([0; 8], 0), Range::Reserved),
];

/// The block `address` belongs to.
pub(super) fn block(address: IpAddr) -> Block {
    let found = BLOCKS.iter().find(|(block, _)| block.contains(address));
    // The tables end with everything, so this is not reached; refusing is the safe answer.
    let Some(&(block, range)) = found else {
        return Block {
            range: Range::Reserved,
            grantable: None,
        };
    };
    let grantable = match range {
        // No socket of ours can mean the guest's, or it would be the host's own.
        Range::Loopback
        | Range::Host
        | Range::Multicast
        | Range::Broadcast
        | Range::Unspecified => false,
        // Needs a zone, which the guest's frame cannot name.
        Range::LinkLocal => address.is_ipv4(),
        // A host would connect to the IPv4 address in it, by its own socket API.
        Range::Embedded => !is_socket_api_form(address),
        // Unallocated space, as a whole.
        Range::Reserved => block.prefix() > 0,
        _ => true,
    };
    Block {
        range,
        grantable: grantable.then_some(block),
    }
}

/// The kind of an address, as far as the address itself tells; [`Range::Host`] it cannot tell.
pub fn range(address: IpAddr) -> Range {
    block(address).range
}

/// IPv4-mapped, -translated and -compatible addresses.
fn is_socket_api_form(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if matches!(v6.segments(), [0, 0, 0, 0, 0, _, ..] | [0, 0, 0, 0, 0xffff, 0, ..]))
}

/// The IPv4 address to which an embedding address leads (RFC 6052, RFC 3056, RFC 4380).
pub(super) fn embedded(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(v6) = address else {
        return None;
    };
    let low = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        Ipv4Addr::new(a, b, c, d)
    };
    match v6.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, a, b] => Some(low(a, b)),
        // A prefix of a network's own; /96 is the only length in use with it.
        [0x64, 0xff9b, 1, _, _, _, a, b] => Some(low(a, b)),
        [0x2002, a, b, ..] => Some(low(a, b)),
        // The client's address is stored inverted.
        [0x2001, 0, _, _, _, _, a, b] => Some(low(!a, !b)),
        [0, 0, 0, 0, 0, 0 | 0xffff, a, b] | [0, 0, 0, 0, 0xffff, 0, a, b] => Some(low(a, b)),
        _ => None,
    }
}
