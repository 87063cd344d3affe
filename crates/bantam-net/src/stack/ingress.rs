//! Frames from the guest: what they are and whom they are for.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetFrame, EthernetProtocol, Icmpv4Packet, Icmpv4Repr, Icmpv6Packet, Icmpv6Repr,
    IpProtocol, Ipv4Packet, Ipv6Packet, NdiscRepr, TcpPacket, UdpPacket,
};

use super::datagrams::{self, Carrier};
use super::frame::{Checksum, FrameInfo, MAX_FRAME};
use super::reassembly::Key as FragmentKey;
use super::tcp;
use super::{Stack, reply};
use crate::control::Counters;
use crate::dns::{MAX_QUERY, Origin};

const FRAGMENT_HEADER: u8 = 44;
const DNS_PORT: u16 = 53;

/// An IP packet of the guest's, its header checked.
#[derive(Clone, Copy)]
pub(super) struct Packet<'a> {
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
    protocol: IpProtocol,
    /// The transport's header and data.
    payload: &'a [u8],
    /// All of it; of a datagram that was put together, its first bytes are not there.
    pub(super) whole: &'a [u8],
    /// Its checksum stands and is to be verified.
    verify: bool,
}

impl Stack {
    /// Takes a frame that the guest sent. It is never refused: what cannot be taken now is lost, as
    /// on any link.
    pub fn receive(&mut self, frame: &[u8], info: &FrameInfo) {
        Counters::add(&self.shared.counters.frames_from_guest, 1);
        Counters::add(&self.shared.counters.bytes_from_guest, frame.len());
        if self.receive_frame(frame, info, Instant::now()).is_none() {
            Counters::add(&self.shared.counters.dropped, 1);
        }
    }

    /// `None` when the frame was dropped.
    fn receive_frame(&mut self, frame: &[u8], info: &FrameInfo, now: Instant) -> Option<()> {
        if frame.len() > MAX_FRAME {
            return None;
        }
        let ethernet = EthernetFrame::new_checked(frame).ok()?;
        let (to, from) = (ethernet.dst_addr(), ethernet.src_addr());
        if to != self.output.gateway_mac() && !to.is_multicast() && !to.is_broadcast() {
            return None;
        }
        if !from.is_unicast() {
            return None;
        }
        self.output.learn_guest_mac(from);
        let verify = matches!(info.checksum, Checksum::Complete);
        match ethernet.ethertype() {
            EthernetProtocol::Arp => {
                reply::arp(
                    &mut self.output,
                    ethernet.payload(),
                    self.addresses.gateway_v4,
                );
                Some(())
            }
            EthernetProtocol::Ipv4 => self.receive_v4(ethernet.payload(), verify, now),
            EthernetProtocol::Ipv6 => self.receive_v6(ethernet.payload(), verify, now),
            EthernetProtocol::Unknown(_) => None,
        }
    }

    fn receive_v4(&mut self, bytes: &[u8], verify: bool, now: Instant) -> Option<()> {
        let packet = Ipv4Packet::new_checked(bytes).ok()?;
        if packet.version() != 4 || !packet.verify_checksum() {
            return None;
        }
        let whole = bytes.get(..usize::from(packet.total_len()))?;
        let (from, to) = (packet.src_addr(), packet.dst_addr());
        let protocol = packet.next_header();
        let payload = whole.get(usize::from(packet.header_len())..)?;
        let arrived = Packet {
            from: from.into(),
            to: to.into(),
            protocol,
            payload,
            whole,
            verify,
        };
        if !packet.more_frags() && packet.frag_offset() == 0 {
            return self.receive_ip(&arrived, now);
        }
        let key = FragmentKey {
            from: from.into(),
            to: to.into(),
            protocol: protocol.into(),
            id: packet.ident().into(),
        };
        self.receive_fragment(
            &arrived,
            key,
            usize::from(packet.frag_offset()),
            packet.more_frags(),
            now,
        )
    }

    fn receive_v6(&mut self, bytes: &[u8], verify: bool, now: Instant) -> Option<()> {
        let packet = Ipv6Packet::new_checked(bytes).ok()?;
        if packet.version() != 6 {
            return None;
        }
        let whole = bytes.get(..packet.total_len())?;
        let payload = whole.get(packet.header_len()..)?;
        let arrived = Packet {
            from: packet.src_addr().into(),
            to: packet.dst_addr().into(),
            protocol: packet.next_header(),
            payload,
            whole,
            verify,
        };
        if u8::from(arrived.protocol) != FRAGMENT_HEADER {
            return self.receive_ip(&arrived, now);
        }
        // RFC 8200 §4.5.
        let &[next, _, high, low, a, b, c, d, ref piece @ ..] = payload else {
            return None;
        };
        let field = u16::from_be_bytes([high, low]);
        let arrived = Packet {
            protocol: IpProtocol::from(next),
            payload: piece,
            ..arrived
        };
        let key = FragmentKey {
            from: arrived.from,
            to: arrived.to,
            protocol: next,
            id: u32::from_be_bytes([a, b, c, d]),
        };
        self.receive_fragment(&arrived, key, usize::from(field & !7), field & 1 != 0, now)
    }

    fn receive_fragment(
        &mut self,
        packet: &Packet<'_>,
        key: FragmentKey,
        offset: usize,
        more: bool,
        now: Instant,
    ) -> Option<()> {
        // Others are not worth the memory: TCP never fragments (RFC 6691), and nobody else may send.
        if packet.protocol == IpProtocol::Tcp || !self.addresses.is_guest(packet.from) {
            return None;
        }
        let whole = self.reassembly.add(key, offset, more, packet.payload, now);
        match whole {
            Some(payload) => self.receive_ip(
                &Packet {
                    payload: &payload,
                    // Fragments come without offload.
                    verify: true,
                    ..*packet
                },
                now,
            ),
            None => Some(()),
        }
    }

    fn receive_ip(&mut self, packet: &Packet<'_>, now: Instant) -> Option<()> {
        match packet.protocol {
            IpProtocol::Tcp => self.receive_tcp(packet, now),
            IpProtocol::Udp => self.receive_udp(packet, now),
            IpProtocol::Icmp if packet.from.is_ipv4() => self.receive_icmp(packet, now),
            IpProtocol::Icmpv6 if packet.from.is_ipv6() => self.receive_icmpv6(packet, now),
            _ => None,
        }
    }

    fn receive_tcp(&mut self, packet: &Packet<'_>, now: Instant) -> Option<()> {
        let tcp = TcpPacket::new_checked(packet.payload).ok()?;
        if packet.verify && !tcp.verify_checksum(&packet.from.into(), &packet.to.into()) {
            return None;
        }
        if tcp.src_port() == 0 || tcp.dst_port() == 0 || !is_unicast(packet.to) {
            return None;
        }
        let key = tcp::Key {
            guest: SocketAddr::new(packet.from, tcp.src_port()),
            peer: SocketAddr::new(packet.to, tcp.dst_port()),
        };
        if let Some(id) = self.tcp.find(&key) {
            self.tcp.deliver(&mut self.output, id, packet.whole, now);
            return Some(());
        }
        if !self.addresses.is_guest(packet.from) {
            return None;
        }
        if tcp.syn() && !tcp.ack() && !tcp.rst() && !tcp.fin() {
            self.open_tcp(key, packet.whole, now);
        } else {
            self.tcp.reject(&mut self.output, packet.whole, now);
        }
        Some(())
    }

    fn receive_udp(&mut self, packet: &Packet<'_>, now: Instant) -> Option<()> {
        let udp = UdpPacket::new_checked(packet.payload).ok()?;
        if packet.verify && !udp.verify_checksum(&packet.from.into(), &packet.to.into()) {
            return None;
        }
        if udp.src_port() == 0 || udp.dst_port() == 0 || !is_unicast(packet.to) {
            return None;
        }
        let key = datagrams::Key {
            carrier: Carrier::Udp,
            guest: SocketAddr::new(packet.from, udp.src_port()),
            peer: SocketAddr::new(packet.to, udp.dst_port()),
        };
        if let Some(id) = self.datagrams.find(&key) {
            let data = udp.payload();
            self.datagrams.send(
                &mut self.output,
                &self.addresses,
                id,
                data,
                packet.whole,
                now,
            );
            return Some(());
        }
        if !self.addresses.is_guest(packet.from) {
            return None;
        }
        if self.addresses.is_gateway(packet.to) && udp.dst_port() == DNS_PORT {
            if udp.payload().len() > MAX_QUERY {
                return None;
            }
            let origin = Origin::Udp {
                guest: key.guest,
                gateway: key.peer,
            };
            self.ask(udp.payload(), origin, now);
            return Some(());
        }
        self.send_datagram(key, udp.payload(), packet, now);
        Some(())
    }

    fn receive_icmp(&mut self, packet: &Packet<'_>, now: Instant) -> Option<()> {
        let icmp = Icmpv4Packet::new_checked(packet.payload).ok()?;
        let checksums = ChecksumCapabilities::default();
        match Icmpv4Repr::parse(&icmp, &checksums).ok()? {
            Icmpv4Repr::EchoRequest {
                ident,
                seq_no,
                data,
            } => self.receive_echo(packet, ident, seq_no, data, now),
            // Errors about what we sent: nothing of the host's depends on them.
            _ => Some(()),
        }
    }

    fn receive_icmpv6(&mut self, packet: &Packet<'_>, now: Instant) -> Option<()> {
        let (IpAddr::V6(from), IpAddr::V6(to)) = (packet.from, packet.to) else {
            return None;
        };
        let icmp = Icmpv6Packet::new_checked(packet.payload).ok()?;
        let checksums = ChecksumCapabilities::default();
        match Icmpv6Repr::parse(&from, &to, &icmp, &checksums).ok()? {
            Icmpv6Repr::EchoRequest {
                ident,
                seq_no,
                data,
            } => self.receive_echo(packet, ident, seq_no, data, now),
            Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit { target_addr, .. }) => {
                // The unspecified address asks whether its address is taken; it is not.
                let from_guest =
                    packet.from == self.addresses.guest_v6 || from.is_unicast_link_local();
                if target_addr == self.addresses.gateway_v6 && from_guest {
                    reply::neighbour(&mut self.output, target_addr, from);
                }
                Some(())
            }
            _ => Some(()),
        }
    }

    fn receive_echo(
        &mut self,
        packet: &Packet<'_>,
        ident: u16,
        seq_no: u16,
        data: &[u8],
        now: Instant,
    ) -> Option<()> {
        if !self.addresses.is_guest(packet.from) || !is_unicast(packet.to) {
            return None;
        }
        if self.addresses.is_gateway(packet.to) {
            let (gateway, guest) = (packet.to, packet.from);
            reply::echo(&mut self.output, gateway, guest, ident, seq_no, data);
            return Some(());
        }
        let key = datagrams::Key {
            carrier: Carrier::Echo,
            guest: SocketAddr::new(packet.from, ident),
            peer: SocketAddr::new(packet.to, 0),
        };
        // The kernel fills in identifier and checksum.
        let [high, low] = seq_no.to_be_bytes();
        let kind = if packet.from.is_ipv4() { 8 } else { 128 };
        let mut message = vec![kind, 0, 0, 0, 0, 0, high, low];
        message.extend(data);
        self.send_datagram(key, &message, packet, now);
        Some(())
    }
}

/// Whether a flow can lead there at all. Multicast and broadcast packets, which every guest sends of
/// itself, end here.
fn is_unicast(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_multicast() && !v4.is_broadcast() && !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_multicast() && !v6.is_unspecified(),
    }
}
