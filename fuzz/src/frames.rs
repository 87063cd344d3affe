//! A guest's frames with their headers, and what its peers and name servers answer, in any order.
//!
//! The policy lets nothing out but to one listener of this process: whatever the input says, no other
//! socket of the host and no other host is reached.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use bantam_net::{
    Checksum, Config, FrameInfo, Limits, MAX_FRAME, Network, Offloads, Policy, PortForward,
    Protocol, Segmentation, Stack, open,
};
use bantam_virtio::net::FrameHeader;

use crate::Input;

/// Most steps of one input.
const STEPS: usize = 64;
const FLOWS: usize = 8;

struct Rig {
    stack: Stack,
    network: Network,
    config: Config,
    offloads: Offloads,
    listener: TcpListener,
    names: UdpSocket,
    streams: Vec<TcpStream>,
    /// For each port of the guest: the next sequence number of the stack's, and of the guest's that
    /// the stack expects.
    sequences: HashMap<u16, (u32, u32)>,
}

pub fn run(data: &[u8]) {
    let mut rig = Rig::new();
    let mut input = Input(data);
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        rig.step(&mut input);
        rig.settle();
    }
}

impl Rig {
    fn new() -> Rig {
        let any = (Ipv4Addr::LOCALHOST, 0);
        let listener = TcpListener::bind(any).expect("a listener");
        listener.set_nonblocking(true).expect("a listener");
        let names = UdpSocket::bind(any).expect("a name server");
        names.set_nonblocking(true).expect("a name server");
        let port = listener.local_addr().expect("an address").port();
        let others = format!(
            "127.0.0.0/8:1-{},{}-65535",
            port - 1,
            port.saturating_add(1)
        );
        let rule = |rule: &str| rule.parse().expect("a rule");
        let config = Config {
            policy: Policy {
                allow_host_loopback: true,
                allow_hosts: vec!["a.test".parse().expect("a rule")],
                deny_cidrs: vec![rule(&others), rule("::/0")],
                ..Policy::public()
            },
            dns_servers: vec![names.local_addr().expect("an address")],
            ports: vec![PortForward {
                protocol: Protocol::Tcp,
                listen: any.into(),
                guest_port: 80,
                guest_loopback: false,
            }],
            limits: Limits {
                tcp_flows: FLOWS,
                tcp_connecting: FLOWS,
                datagram_flows: FLOWS,
                dns_queries: FLOWS,
            },
            ..Config::default()
        };
        let (network, stack) = open(&config).expect("a network");
        Rig {
            stack,
            network,
            config,
            offloads: Offloads::default(),
            listener,
            names,
            streams: Vec::new(),
            sequences: HashMap::new(),
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let what = input.byte();
        match what % 10 {
            // As it is.
            0 => {
                if let Some(info) = info(what, input) {
                    self.stack.receive(bytes(input), &info);
                }
            }
            // An IP packet from the guest to anywhere, with right checksums; or to where it may go.
            kind @ 1..=5 => {
                if let Some(info) = info(what, input) {
                    let frame = self.frame(bytes(input), kind > 2);
                    self.stack.receive(&frame, &info);
                }
            }
            // What a name server says.
            6 => {
                let mut query = [0; 8192];
                if let Ok((len, from)) = self.names.recv_from(&mut query) {
                    let mut answer = query[..len].to_vec();
                    let tail = bytes(input);
                    let keep = usize::from(input.byte()).min(answer.len());
                    answer.truncate(if what & 16 == 0 { len } else { keep });
                    answer.extend(tail);
                    if let [_, _, flags, _, _, _, _, count, ..] = &mut answer[..] {
                        *flags |= 0x80;
                        *count |= 1;
                    }
                    let _ = self.names.send_to(&answer, from);
                }
            }
            // What the peer does.
            7 => {
                if let Ok((stream, _)) = self.listener.accept() {
                    let _ = stream.set_nonblocking(true);
                    self.streams.push(stream);
                }
                let data = bytes(input);
                for stream in &mut self.streams {
                    let _ = stream.write(data);
                    let _ = stream.read(&mut [0; 4096]);
                }
                if what & 16 != 0 {
                    self.streams.pop();
                }
            }
            8 => {
                self.offloads = Offloads {
                    checksum: what & 16 != 0,
                    segmentation: what & 48 == 48,
                };
                self.stack.reset(self.offloads);
            }
            // A client of the port that leads inward.
            _ => {
                if let Some(port) = self.network.host_port(80)
                    && let Ok(stream) = TcpStream::connect(port)
                {
                    let _ = stream.set_nonblocking(true);
                    self.streams.push(stream);
                    self.streams.truncate(2 * FLOWS);
                }
            }
        }
    }

    /// Turns until there is nothing left to do at once.
    fn settle(&mut self) {
        for turn in 0.. {
            let again = self.stack.run() == Some(Duration::ZERO);
            let (offloads, mtu) = (self.offloads, usize::from(self.config.mtu));
            let sequences = &mut self.sequences;
            while self.stack.take_frame(|frame, info| {
                check(frame, info, offloads, mtu);
                note_sequence(frame, sequences);
                true
            }) {}
            if !again {
                break;
            }
            assert!(turn < 10_000, "the stack never rests");
        }
        let stats = self.network.stats();
        assert!(stats.tcp_flows <= FLOWS as u64 + 1);
        assert!(stats.datagram_flows <= FLOWS as u64);
    }

    /// An Ethernet frame with `packet`, whose checksums are made right; with `at_home` its addresses
    /// and, for TCP not to the name service, its port are made right, too.
    fn frame(&self, packet: &[u8], at_home: bool) -> Vec<u8> {
        let addresses = &self.config.addresses;
        let mut frame = [&addresses.gateway_mac[..], &addresses.guest_mac].concat();
        let v6 = packet.first().is_some_and(|byte| byte >> 4 == 6);
        frame.extend(if v6 { [0x86, 0xdd] } else { [8, 0] });
        let mut packet = packet.to_vec();
        let len = u16::try_from(packet.len()).unwrap_or(u16::MAX);
        let (head, from, to, protocol) = if v6 && packet.len() >= 40 {
            packet[4..6].copy_from_slice(&(len - 40).to_be_bytes());
            packet[8..24].copy_from_slice(&addresses.guest_v6.octets());
            if at_home {
                packet[24..40].copy_from_slice(&addresses.gateway_v6.octets());
            }
            (40, 8..24, 24..40, packet[6])
        } else if !v6 && packet.len() >= 20 {
            packet[0] = 0x45;
            packet[2..4].copy_from_slice(&len.to_be_bytes());
            packet[12..16].copy_from_slice(&addresses.guest_v4.octets());
            if at_home {
                packet[6..8].fill(0);
                packet[16..20].copy_from_slice(&addresses.gateway_v4.octets());
            }
            packet[10..12].fill(0);
            let sum = checksum(&[&packet[..20]]);
            packet[10..12].copy_from_slice(&sum);
            (20, 12..16, 16..20, packet[9])
        } else {
            frame.extend(packet);
            return frame;
        };
        let (ip, rest) = packet.split_at_mut(head);
        let field = match protocol {
            6 => Some(16),
            17 => Some(6),
            1 | 58 => Some(2),
            _ => None,
        };
        if at_home && protocol == 6 && rest.len() >= 20 {
            if rest[2..4] != [0, 53] {
                let port = self.listener.local_addr().expect("an address").port();
                rest[2..4].copy_from_slice(&port.to_be_bytes());
            }
            // Numbers count from what would be right, so that small ones get far.
            let guest = u16::from_be_bytes([rest[0], rest[1]]);
            if let Some(&(next, expected)) = self.sequences.get(&guest) {
                for (at, base) in [(4, expected), (8, next)] {
                    let field = [rest[at], rest[at + 1], rest[at + 2], rest[at + 3]];
                    let value = base.wrapping_add(u32::from_be_bytes(field));
                    rest[at..at + 4].copy_from_slice(&value.to_be_bytes());
                }
            }
        }
        if let Some(field) = field
            && rest.len() >= if field == 16 { 20 } else { 8 }
        {
            if protocol == 17 {
                let len = u16::try_from(rest.len()).unwrap_or(u16::MAX);
                rest[4..6].copy_from_slice(&len.to_be_bytes());
            }
            rest[field..field + 2].fill(0);
            let len = u32::try_from(rest.len()).unwrap_or(0).to_be_bytes();
            let last = [0, protocol];
            let sum = match protocol {
                1 => checksum(&[rest]),
                _ => checksum(&[&ip[from], &ip[to], &len, &last, rest]),
            };
            rest[field..field + 2].copy_from_slice(&sum);
        }
        frame.extend(packet);
        frame
    }
}

/// Remembers how far the stack is in the connection of a segment.
fn note_sequence(frame: &[u8], sequences: &mut HashMap<u16, (u32, u32)>) {
    let (protocol, at) = match frame.get(12..14) {
        Some([8, 0]) => (frame.get(23), 34),
        Some([0x86, 0xdd]) => (frame.get(20), 54),
        _ => return,
    };
    let Some([_, _, a, b, c, d, e, f, g, h, i, j, offset, flags, ..]) = frame.get(at..) else {
        return;
    };
    if protocol != Some(&6) {
        return;
    }
    let header = usize::from(offset >> 4) * 4;
    let data = frame.len().saturating_sub(at + header);
    let ends = u32::from(flags & 1) + u32::from(flags >> 1 & 1);
    let sent = u32::from_be_bytes([*c, *d, *e, *f])
        .wrapping_add(u32::try_from(data).unwrap_or(0))
        .wrapping_add(ends);
    let expected = u32::from_be_bytes([*g, *h, *i, *j]);
    sequences.insert(u16::from_be_bytes([*a, *b]), (sent, expected));
}

/// What a driver may rely on.
fn check(frame: &[u8], info: &FrameInfo, offloads: Offloads, mtu: usize) {
    assert!((14..=MAX_FRAME).contains(&frame.len()));
    if let Checksum::Partial { start, offset } = info.checksum {
        assert!(offloads.checksum);
        assert!(usize::from(start) + usize::from(offset) + 2 <= frame.len());
    }
    match info.segmentation {
        Some(cut) => {
            assert!(offloads.segmentation && info.checksum != Checksum::Complete);
            assert!(cut.size > 0 && usize::from(cut.size) + usize::from(cut.headers) <= mtu + 14);
        }
        None => assert!(frame.len() <= mtu + 14),
    }
}

/// What the card's header says of a frame: none mostly, else as the card reads it from the driver.
/// `None` if it drops the frame.
fn info(what: u8, input: &mut Input<'_>) -> Option<FrameInfo> {
    if what & 128 == 0 {
        return Some(FrameInfo::default());
    }
    let header = FrameHeader::decode(input.bytes(12))?;
    assert_eq!(FrameHeader::decode(&header.encode(1)), Some(header));
    assert!(header.segmentation.is_none() || header.checksum.is_some());
    Some(FrameInfo {
        checksum: header.checksum.map_or(Checksum::Complete, |partial| {
            let (start, offset) = (partial.start, partial.offset);
            Checksum::Partial { start, offset }
        }),
        segmentation: header.segmentation.map(|cut| Segmentation {
            size: cut.size,
            headers: cut.headers,
            ipv6: cut.ipv6,
        }),
    })
}

fn bytes<'a>(input: &mut Input<'a>) -> &'a [u8] {
    let len = usize::from(input.byte()) * 8 + usize::from(input.byte() % 8);
    input.bytes(len)
}

fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let mut sum = 0_u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!u16::try_from(sum).unwrap_or(0)).to_be_bytes()
}

pub fn seeds() -> Vec<Vec<u8>> {
    // One step: what it is, its length, its bytes.
    let step = |what: u8, data: &[u8]| {
        let len = u8::try_from(data.len() / 8).unwrap_or(u8::MAX);
        let rest = u8::try_from(data.len() % 8).unwrap_or(0);
        [&[what, len, rest][..], data].concat()
    };
    // The same with a header.
    let headed = |what: u8, header: [u8; 12], data: &[u8]| {
        let mut bytes = step(what, data);
        bytes.splice(1..1, header);
        bytes
    };
    let v4 = |protocol: u8, payload: &[u8]| {
        let mut packet = vec![0; 20];
        (packet[0], packet[8], packet[9]) = (0x45, 64, protocol);
        packet.extend(payload);
        packet
    };
    let v6 = |protocol: u8, payload: &[u8]| {
        let mut packet = vec![0; 40];
        (packet[0], packet[6], packet[7]) = (0x60, protocol, 64);
        packet.extend(payload);
        packet
    };
    let tcp = |port: u16, flags: u8, seq: u8, data: &[u8]| {
        let mut segment = vec![0; 20];
        segment[0..2].copy_from_slice(&[0x40, 0]);
        segment[2..4].copy_from_slice(&port.to_be_bytes());
        segment[7] = seq;
        (segment[12], segment[13], segment[14]) = (0x50, flags, 0xff);
        segment.extend(data);
        segment
    };
    let udp = |port: u16, data: &[u8]| {
        let mut datagram = vec![0; 8];
        datagram[0..2].copy_from_slice(&[0x50, 0]);
        datagram[2..4].copy_from_slice(&port.to_be_bytes());
        datagram.extend(data);
        datagram
    };
    let query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\x04test\0\0\x01\0\x01";
    let answer = b"\xc0\x0c\0\x01\0\x01\0\0\0\x09\0\x04\xc0\0\x02\x01\xff";
    let arp = [
        &[0xff; 6][..],
        &[2, 0x62, 0x61, 0x6e, 0x74, 2, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1],
        &[2, 0x62, 0x61, 0x6e, 0x74, 2, 10, 231, 118, 2],
        &[0, 0, 0, 0, 0, 0, 10, 231, 118, 1],
    ]
    .concat();
    let solicit = [
        &[135, 0, 0, 0, 0, 0, 0, 0][..],
        &[0xfd, 0x62, 0x61, 0x6e, 0x74, 0x61, 0x6d],
        &[0; 8],
        &[1],
    ]
    .concat();
    let length = u8::try_from(query.len()).unwrap_or(0);
    let by_tcp = [&[0, length][..], query].concat();
    let mut fragment = v4(17, &udp(99, &[7; 16]));
    fragment[6] = 0x20;
    // A SYN with a segment size and a window scale, as every guest sends it.
    let mut syn = tcp(80, 2, 0, &[2, 4, 5, 0xb4, 1, 3, 3, 7, 4, 2, 1, 1]);
    syn[12] = 0x80;
    vec![
        [
            step(58, b""),
            step(3, &v4(6, &syn)),
            step(7, b"hello"),
            step(3, &v4(6, &tcp(80, 0x10, 0, &[]))),
            step(7, &[7; 2000]),
            step(3, &v4(6, &tcp(80, 0x18, 0, &[1; 1400]))),
            step(3, &v4(6, &tcp(80, 0x11, 0, &[]))),
        ]
        .concat(),
        // A long segment that the card is to cut, with a partial checksum.
        [
            step(58, b""),
            step(3, &v4(6, &syn)),
            step(7, b"hello"),
            headed(
                133,
                [1, 1, 54, 0, 0xb4, 5, 34, 0, 16, 0, 0, 0],
                &v4(6, &tcp(80, 0x18, 0, &[1; 1900])),
            ),
            headed(
                133,
                [1, 0, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0],
                &v4(6, &tcp(80, 0x11, 0, &[])),
            ),
        ]
        .concat(),
        step(0, &arp),
        step(3, &v6(58, &solicit)),
        [
            step(3, &v4(1, &[8, 0, 0, 0, 1, 2, 3, 4, 5])),
            step(1, &v4(1, &[8, 0, 0, 0, 1, 2, 3, 4])),
        ]
        .concat(),
        [step(3, &v4(17, &udp(53, query))), step(6, answer)].concat(),
        [
            step(3, &v4(6, &tcp(80, 2, 0, &[]))),
            step(7, b"hello"),
            step(3, &v4(6, &tcp(80, 0x10, 0, &[]))),
            step(7, b"hello"),
            step(3, &v4(6, &tcp(80, 0x18, 0, b"data"))),
            step(3, &v4(6, &tcp(80, 0x18, 2, b"out of order"))),
            step(3, &v4(6, &tcp(80, 0x18, 0xfe, b"again"))),
            step(3, &v4(6, &tcp(80, 0x11, 0, &[]))),
            step(23, b""),
            step(3, &v4(6, &tcp(80, 4, 0, &[]))),
        ]
        .concat(),
        [
            step(58, b""),
            step(3, &v6(6, &tcp(53, 2, 0, &[]))),
            step(3, &v6(6, &tcp(53, 0x18, 0, &by_tcp))),
            step(6, answer),
            step(3, &v6(6, &tcp(53, 0x11, 0, &[]))),
        ]
        .concat(),
        [step(1, &fragment), step(1, &v4(6, &tcp(443, 2, 0, &[])))].concat(),
        step(9, b""),
    ]
}
