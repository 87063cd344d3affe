//! Packets that we make ourselves: datagrams, echo replies, errors, ARP and neighbour
//! advertisements.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, Icmpv4Packet, Icmpv4Repr, Icmpv6Packet,
    Icmpv6Repr, IpProtocol, NdiscNeighborFlags, NdiscRepr, UdpPacket, UdpRepr,
};

use super::output::{IPV4, IPV6, Output};

/// Bytes of a UDP header.
const UDP: usize = 8;
/// Bytes of an ICMP or ICMPv6 header of the kinds used here.
const ICMP: usize = 8;
/// Bytes of the guest's packet in an error, after its IP header: enough for every transport's
/// header (RFC 792 asks for 8).
const QUOTE: usize = 128;

/// Why a packet did not get where it was to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreachable {
    /// The host has no way there.
    Network,
    /// Nobody answers there.
    Host,
    /// Nobody listens on the port.
    Port,
    /// The policy forbids it.
    Prohibited,
}

impl Unreachable {
    /// The code in ICMP (RFC 1812 §5.2.7.1).
    fn v4(self) -> u8 {
        match self {
            Unreachable::Network => 0,
            Unreachable::Host => 1,
            Unreachable::Port => 3,
            Unreachable::Prohibited => 13,
        }
    }

    /// The code in ICMPv6 (RFC 4443 §3.1).
    fn v6(self) -> u8 {
        match self {
            Unreachable::Network => 0,
            Unreachable::Prohibited => 1,
            Unreachable::Host => 3,
            Unreachable::Port => 4,
        }
    }
}

/// Sends a datagram to the guest.
pub(super) fn udp(output: &mut Output, from: SocketAddr, to: SocketAddr, data: &[u8]) {
    let repr = UdpRepr {
        src_port: from.port(),
        dst_port: to.port(),
    };
    // The length fields have 16 bits; IPv6's does not count its header.
    let header = if from.is_ipv4() { IPV4 } else { 0 };
    if data.len() > usize::from(u16::MAX) - UDP - header {
        return;
    }
    let mut bytes = vec![0; UDP + data.len()];
    repr.emit(
        &mut UdpPacket::new_unchecked(&mut bytes[..]),
        &from.ip().into(),
        &to.ip().into(),
        data.len(),
        |place| place.copy_from_slice(data),
        &ChecksumCapabilities::default(),
    );
    output.push_ip(from.ip(), to.ip(), IpProtocol::Udp, &bytes);
}

/// Sends an echo reply to the guest.
pub(super) fn echo(
    output: &mut Output,
    from: IpAddr,
    to: IpAddr,
    ident: u16,
    seq_no: u16,
    data: &[u8],
) {
    let checksums = ChecksumCapabilities::default();
    let mut bytes = vec![0; ICMP + data.len()];
    match (from, to) {
        (IpAddr::V4(_), IpAddr::V4(_)) => {
            let repr = Icmpv4Repr::EchoReply {
                ident,
                seq_no,
                data,
            };
            repr.emit(&mut Icmpv4Packet::new_unchecked(&mut bytes[..]), &checksums);
            output.push_ip(from, to, IpProtocol::Icmp, &bytes);
        }
        (IpAddr::V6(from6), IpAddr::V6(to6)) => {
            let repr = Icmpv6Repr::EchoReply {
                ident,
                seq_no,
                data,
            };
            let mut packet = Icmpv6Packet::new_unchecked(&mut bytes[..]);
            repr.emit(&from6, &to6, &mut packet, &checksums);
            output.push_ip(from, to, IpProtocol::Icmpv6, &bytes);
        }
        _ => {}
    }
}

/// Tells the guest that `packet`, an IP packet of its own, cannot be delivered. It comes from
/// `gateway`.
pub(super) fn unreachable(
    output: &mut Output,
    gateway: IpAddr,
    guest: IpAddr,
    why: Unreachable,
    packet: &[u8],
) {
    let header = if gateway.is_ipv4() { IPV4 } else { IPV6 };
    let quote = packet
        .get(..packet.len().min(header + QUOTE))
        .unwrap_or_default();
    let mut bytes = vec![0; ICMP];
    bytes.extend(quote);
    match (gateway, guest) {
        (IpAddr::V4(_), IpAddr::V4(_)) => {
            bytes[..2].copy_from_slice(&[3, why.v4()]);
            Icmpv4Packet::new_unchecked(&mut bytes[..]).fill_checksum();
            output.push_ip(gateway, guest, IpProtocol::Icmp, &bytes);
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            bytes[..2].copy_from_slice(&[1, why.v6()]);
            Icmpv6Packet::new_unchecked(&mut bytes[..]).fill_checksum(&from, &to);
            output.push_ip(gateway, guest, IpProtocol::Icmpv6, &bytes);
        }
        _ => {}
    }
}

/// The head of a packet of the guest's that was not kept: enough for an error about it.
pub(super) fn head(from: SocketAddr, to: SocketAddr, protocol: IpProtocol) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(IPV6 + UDP);
    let number = u8::from(protocol);
    match (from.ip(), to.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            bytes.extend([0x45, 0, 0, 28, 0, 0, 0, 0, 64, number, 0, 0]);
            bytes.extend(src.octets());
            bytes.extend(dst.octets());
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            bytes.extend([0x60, 0, 0, 0, 0, 8, number, 64]);
            bytes.extend(src.octets());
            bytes.extend(dst.octets());
        }
        _ => {}
    }
    if matches!(protocol, IpProtocol::Icmp | IpProtocol::Icmpv6) {
        let kind = if protocol == IpProtocol::Icmp { 8 } else { 128 };
        bytes.extend([kind, 0, 0, 0]);
        bytes.extend(from.port().to_be_bytes());
        bytes.extend([0, 0]);
    } else {
        bytes.extend(from.port().to_be_bytes());
        bytes.extend(to.port().to_be_bytes());
        bytes.extend([0, 8, 0, 0]);
    }
    bytes
}

/// Answers an ARP request for the gateway.
pub(super) fn arp(output: &mut Output, payload: &[u8], gateway: Ipv4Addr) {
    let Ok(Ok(ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Request,
        source_hardware_addr,
        source_protocol_addr,
        target_protocol_addr,
        ..
    })) = ArpPacket::new_checked(payload).map(|packet| ArpRepr::parse(&packet))
    else {
        return;
    };
    if target_protocol_addr != gateway || !source_hardware_addr.is_unicast() {
        return;
    }
    let reply = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: output.gateway_mac(),
        source_protocol_addr: gateway,
        target_hardware_addr: source_hardware_addr,
        target_protocol_addr: source_protocol_addr,
    };
    output.push_arp(reply.buffer_len(), |bytes| {
        reply.emit(&mut ArpPacket::new_unchecked(bytes));
    });
}

/// Answers a neighbour solicitation for `target`, an address of the gateway (RFC 4861 §7.2.4).
pub(super) fn neighbour(output: &mut Output, target: Ipv6Addr, to: Ipv6Addr) {
    let mac: EthernetAddress = output.gateway_mac();
    let repr = Icmpv6Repr::Ndisc(NdiscRepr::NeighborAdvert {
        flags: NdiscNeighborFlags::ROUTER
            | NdiscNeighborFlags::SOLICITED
            | NdiscNeighborFlags::OVERRIDE,
        target_addr: target,
        lladdr: Some(mac.into()),
    });
    let mut bytes = vec![0; repr.buffer_len()];
    repr.emit(
        &target,
        &to,
        &mut Icmpv6Packet::new_unchecked(&mut bytes[..]),
        &ChecksumCapabilities::default(),
    );
    output.push_ip(target.into(), to.into(), IpProtocol::Icmpv6, &bytes);
}
