//! Frames on their way to the guest.

use std::collections::VecDeque;
use std::net::IpAddr;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetAddress, EthernetFrame, EthernetProtocol, IpProtocol, Ipv4Packet, Ipv6Packet,
};

use super::frame::{Checksum, FrameInfo, Offloads, Segmentation};
use crate::Addresses;

/// Bytes of an Ethernet header.
pub(super) const ETHERNET: usize = 14;
/// Bytes of an IPv4 header without options.
pub(super) const IPV4: usize = 20;
/// Bytes of an IPv6 header.
pub(super) const IPV6: usize = 40;
/// Bytes of an IPv6 fragment header (RFC 8200 §4.5).
const FRAGMENT: usize = 8;
const FRAGMENT_HEADER: u8 = 44;

/// Frames waiting for buffers of the guest, at which flows begin to wait.
const ROOM_FRAMES: usize = 256;
/// Bytes of them.
const ROOM_BYTES: usize = 2 << 20;
/// Frames at which even short answers are dropped.
const MAX_FRAMES: usize = 1024;
/// Buffers kept for later frames.
const SPARES: usize = 64;

struct Queued {
    buffer: Vec<u8>,
    len: usize,
    info: FrameInfo,
}

/// The link to the guest: a bounded queue of frames, and what it takes to make one.
pub(super) struct Output {
    frames: VecDeque<Queued>,
    bytes: usize,
    spares: Vec<Vec<u8>>,
    pub(super) offloads: Offloads,
    pub(super) mtu: usize,
    gateway_mac: EthernetAddress,
    guest_mac: EthernetAddress,
    fragment_id: u32,
    /// Frames that found no room.
    pub(super) dropped: usize,
}

impl Output {
    pub(super) fn new(addresses: &Addresses, mtu: u16) -> Output {
        Output {
            frames: VecDeque::new(),
            bytes: 0,
            spares: Vec::new(),
            offloads: Offloads::default(),
            mtu: usize::from(mtu),
            gateway_mac: EthernetAddress(addresses.gateway_mac),
            guest_mac: EthernetAddress(addresses.guest_mac),
            fragment_id: 0,
            dropped: 0,
        }
    }

    /// Bytes of the longest TCP packet: with segmentation left to the guest, it may fill a frame.
    pub(super) fn longest_packet(&self) -> usize {
        match self.offloads.segmentation {
            true => usize::from(u16::MAX),
            false => self.mtu,
        }
    }

    /// Whether a flow may add a frame now.
    pub(super) fn has_room(&self) -> bool {
        self.frames.len() < ROOM_FRAMES && self.bytes < ROOM_BYTES
    }

    /// The guest sends from this address now.
    pub(super) fn learn_guest_mac(&mut self, mac: EthernetAddress) {
        self.guest_mac = mac;
    }

    pub(super) fn gateway_mac(&self) -> EthernetAddress {
        self.gateway_mac
    }

    /// Offers the oldest frame to `take`; gives what that gives, and `None` when there is no frame.
    /// The frame is gone unless `take` gives false.
    pub(super) fn take(&mut self, take: impl FnOnce(&[u8], &FrameInfo) -> bool) -> Option<bool> {
        let frame = self.frames.front()?;
        let taken = take(
            frame.buffer.get(..frame.len).unwrap_or_default(),
            &frame.info,
        );
        if taken && let Some(frame) = self.frames.pop_front() {
            self.bytes -= frame.len;
            if self.spares.len() < SPARES {
                self.spares.push(frame.buffer);
            }
        }
        Some(taken)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Forgets all frames.
    pub(super) fn clear(&mut self) {
        self.frames.clear();
        self.bytes = 0;
    }

    /// Adds a frame of `len` bytes after its Ethernet header, which `fill` writes and says what they
    /// are.
    fn push<R>(
        &mut self,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> (R, EthernetProtocol, FrameInfo),
    ) -> R {
        let total = ETHERNET + len;
        let mut buffer = self.spares.pop().unwrap_or_default();
        if buffer.len() < total {
            buffer.resize(total, 0);
        }
        let mut frame = EthernetFrame::new_unchecked(&mut buffer[..total]);
        frame.set_dst_addr(self.guest_mac);
        frame.set_src_addr(self.gateway_mac);
        let (result, protocol, info) = fill(frame.payload_mut());
        frame.set_ethertype(protocol);
        if self.frames.len() < MAX_FRAMES {
            self.bytes += total;
            self.frames.push_back(Queued {
                buffer,
                len: total,
                info,
            });
        } else {
            self.dropped += 1;
        }
        result
    }

    /// Adds an ARP packet.
    pub(super) fn push_arp(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) {
        self.push(len, |payload| {
            fill(payload);
            ((), EthernetProtocol::Arp, FrameInfo::default())
        });
    }

    /// Adds a TCP segment as smoltcp made it: `fill` writes the IP packet. `mss` is what the guest
    /// takes in one segment.
    pub(super) fn push_tcp<R>(
        &mut self,
        len: usize,
        mss: u16,
        fill: impl FnOnce(&mut [u8]) -> R,
    ) -> R {
        let checksum = self.offloads.checksum;
        self.push(len, |packet| {
            let result = fill(packet);
            let protocol = match packet.first().map(|byte| byte >> 4) {
                Some(6) => EthernetProtocol::Ipv6,
                _ => EthernetProtocol::Ipv4,
            };
            let info = if checksum {
                offload_tcp(packet, mss)
            } else {
                FrameInfo::default()
            };
            (result, protocol, info)
        })
    }

    /// Adds one IP packet, or several fragments of it, with `payload` whose checksum is right.
    /// Addresses are of one family; what does not fit into 64 KiB is dropped.
    pub(super) fn push_ip(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        protocol: IpProtocol,
        payload: &[u8],
    ) {
        match (from, to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let whole = IPV4 + payload.len() <= self.mtu;
                let step = if whole {
                    payload.len().max(1)
                } else {
                    (self.mtu - IPV4) & !7
                };
                let id = self.next_id();
                self.push_pieces(payload, step, |out, offset, piece, more| {
                    out.push(IPV4 + piece.len(), |bytes| {
                        let mut packet = Ipv4Packet::new_unchecked(bytes);
                        packet.set_version(4);
                        packet.set_header_len(20);
                        packet.set_dscp(0);
                        packet.set_ecn(0);
                        packet.set_total_len(clamp_u16(IPV4 + piece.len()));
                        packet.set_ident(clamp_u16((id & 0xffff) as usize));
                        packet.clear_flags();
                        packet.set_more_frags(more);
                        packet.set_dont_frag(false);
                        packet.set_frag_offset(clamp_u16(offset));
                        packet.set_hop_limit(64);
                        packet.set_next_header(protocol);
                        packet.set_src_addr(from);
                        packet.set_dst_addr(to);
                        packet.fill_checksum();
                        packet.payload_mut().copy_from_slice(piece);
                        ((), EthernetProtocol::Ipv4, FrameInfo::default())
                    });
                });
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let whole = IPV6 + payload.len() <= self.mtu;
                let extra = if whole { 0 } else { FRAGMENT };
                let step = if whole {
                    payload.len().max(1)
                } else {
                    (self.mtu - IPV6 - FRAGMENT) & !7
                };
                let id = self.next_id();
                self.push_pieces(payload, step, |out, offset, piece, more| {
                    let len = extra + piece.len();
                    out.push(IPV6 + len, |bytes| {
                        let mut packet = Ipv6Packet::new_unchecked(bytes);
                        packet.set_version(6);
                        packet.set_traffic_class(0);
                        packet.set_flow_label(0);
                        packet.set_payload_len(clamp_u16(len));
                        packet.set_next_header(if whole {
                            protocol
                        } else {
                            IpProtocol::from(FRAGMENT_HEADER)
                        });
                        packet.set_hop_limit(if protocol == IpProtocol::Icmpv6 {
                            255
                        } else {
                            64
                        });
                        packet.set_src_addr(from);
                        packet.set_dst_addr(to);
                        let (header, data) = packet.payload_mut().split_at_mut(extra);
                        if let [next, reserved, offset_high, offset_low, ident @ ..] = header {
                            *next = protocol.into();
                            *reserved = 0;
                            let field = clamp_u16(offset) | u16::from(more);
                            [*offset_high, *offset_low] = field.to_be_bytes();
                            ident.copy_from_slice(&id.to_be_bytes());
                        }
                        data.copy_from_slice(piece);
                        ((), EthernetProtocol::Ipv6, FrameInfo::default())
                    });
                });
            }
            _ => {}
        }
    }

    fn push_pieces(
        &mut self,
        payload: &[u8],
        step: usize,
        mut push: impl FnMut(&mut Output, usize, &[u8], bool),
    ) {
        // The largest packet of both families has 65,535 bytes.
        if payload.len() > usize::from(u16::MAX) - IPV4 {
            self.dropped += 1;
            return;
        }
        for (i, piece) in payload.chunks(step).enumerate() {
            let offset = i * step;
            push(self, offset, piece, offset + piece.len() < payload.len());
        }
    }

    fn next_id(&mut self) -> u32 {
        self.fragment_id = self.fragment_id.wrapping_add(1);
        self.fragment_id
    }
}

fn clamp_u16(value: usize) -> u16 {
    u16::try_from(value).unwrap_or(u16::MAX)
}

/// Leaves checksum and segmentation of a TCP segment to the guest: the checksum field gets the sum of
/// the pseudo header (virtio 1.3 §5.1.6.2.1).
fn offload_tcp(packet: &mut [u8], mss: u16) -> FrameInfo {
    let (header, sum) = if packet.first().is_some_and(|byte| byte >> 4 == 6) {
        let Ok(ip) = Ipv6Packet::new_checked(&*packet) else {
            return FrameInfo::default();
        };
        let (from, to) = (ip.src_addr().octets(), ip.dst_addr().octets());
        (IPV6, pseudo_sum(&from, &to, ip.payload().len()))
    } else {
        let Ok(ip) = Ipv4Packet::new_checked(&*packet) else {
            return FrameInfo::default();
        };
        let (from, to) = (ip.src_addr().octets(), ip.dst_addr().octets());
        let header = usize::from(ip.header_len());
        (header, pseudo_sum(&from, &to, ip.payload().len()))
    };
    let Some(tcp) = packet.get_mut(header..) else {
        return FrameInfo::default();
    };
    let Some([high, low]) = tcp.get_mut(16..18) else {
        return FrameInfo::default();
    };
    [*high, *low] = sum.to_be_bytes();
    let tcp_header = tcp.get(12).map_or(20, |byte| usize::from(byte >> 4) * 4);
    let data = tcp.len().saturating_sub(tcp_header);
    FrameInfo {
        checksum: Checksum::Partial {
            start: clamp_u16(ETHERNET + header),
            offset: 16,
        },
        segmentation: (data > usize::from(mss)).then(|| Segmentation {
            size: mss,
            headers: clamp_u16(ETHERNET + header + tcp_header),
            ipv6: header == IPV6,
        }),
    }
}

/// The ones' complement sum of TCP's pseudo header, not inverted.
fn pseudo_sum(from: &[u8], to: &[u8], len: usize) -> u16 {
    let words = [from, to]
        .into_iter()
        .flat_map(|address| address.chunks_exact(2))
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let mut sum = words.sum::<u32>() + u32::from(clamp_u16(len)) + 6;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    clamp_u16(sum as usize)
}

/// Checksums of headers are ours, of TCP the guest's if it offered.
pub(super) fn checksums(offload: bool) -> ChecksumCapabilities {
    use smoltcp::phy::Checksum;
    let mut checksums = ChecksumCapabilities::default();
    // What the guest sends is checked before it gets to smoltcp.
    checksums.tcp = if offload {
        Checksum::None
    } else {
        Checksum::Tx
    };
    checksums
}
