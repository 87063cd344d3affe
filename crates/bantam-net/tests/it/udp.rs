use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::thread;

use bantam_net::{Config, Limits, Offloads, Policy};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::socket::icmp;
use smoltcp::wire::{Icmpv4DstUnreachable, Icmpv4Packet, Icmpv4Repr, Icmpv6Packet, Icmpv6Repr};

use crate::guest::{Guest, granted, own_address};

/// Answers each datagram with itself.
fn echo(address: IpAddr) -> Option<u16> {
    let socket = UdpSocket::bind((address, 0)).ok()?;
    let port = socket.local_addr().unwrap().port();
    thread::spawn(move || {
        let mut buffer = vec![0; 65_535];
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            if socket.send_to(&buffer[..len], from).is_err() {
                break;
            }
        }
    });
    Some(port)
}

#[test]
fn datagrams_go_both_ways_over_both_families() {
    let mut guest = Guest::new(granted());
    let v4 = echo(Ipv4Addr::LOCALHOST.into()).map(|port| guest.host(port));
    let v6 = echo(Ipv6Addr::LOCALHOST.into()).map(|port| guest.host6(port));
    for to in [v4, v6].into_iter().flatten() {
        let socket = guest.udp();
        guest.udp_send(socket, to, b"ping");
        assert_eq!(guest.udp_receive(socket), (b"ping".to_vec(), to));
    }
}

#[test]
fn datagrams_longer_than_the_mtu_are_put_together_and_cut() {
    let mut guest = Guest::new(granted());
    let port = echo(Ipv4Addr::LOCALHOST.into()).unwrap();
    let host = guest.host(port);
    for len in [1472, 1473, 5000, 40_000] {
        let data: Vec<u8> = (0..len).map(|i: usize| (i ^ (i >> 8)) as u8).collect();
        let socket = guest.udp();
        guest.udp_send(socket, host, &data);
        let (got, from) = guest.udp_receive(socket);
        assert!(got == data, "{len} bytes");
        assert_eq!(from, host);
    }
}

#[test]
fn a_port_without_a_server_is_unreachable() {
    let mut guest = Guest::new(granted());
    let unused = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = unused.local_addr().unwrap().port();
    drop(unused);
    let reason = unreachable_reason(&mut guest, (Ipv4Addr::UNSPECIFIED, port).into());
    assert_eq!(reason, Icmpv4DstUnreachable::PortUnreachable);
}

#[test]
fn what_the_policy_refuses_is_prohibited_at_once() {
    let mut guest = Guest::new(Policy::public());
    let reason = unreachable_reason(&mut guest, "10.1.2.3:99".parse().unwrap());
    assert_eq!(reason, Icmpv4DstUnreachable::CommProhibited);
    assert_eq!(guest.network.stats().datagram_flows, 0);
    let events = guest.network.events(0);
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].address, Some([10, 1, 2, 3].into()));
    assert_eq!(events[0].port, Some(99));
}

/// Sends a datagram, to the gateway for the unspecified address; gives the error that comes back.
fn unreachable_reason(guest: &mut Guest, mut to: SocketAddr) -> Icmpv4DstUnreachable {
    if to.ip().is_unspecified() {
        to = guest.host(to.port());
    }
    let socket = guest.udp();
    let port = guest
        .sockets
        .get::<smoltcp::socket::udp::Socket<'_>>(socket)
        .endpoint()
        .port;
    let errors = guest.errors_of(port);
    guest.udp_send(socket, to, b"hello");
    guest.until("an error", |guest| {
        let (packet, _) = guest
            .sockets
            .get_mut::<icmp::Socket<'_>>(errors)
            .recv()
            .ok()?;
        let packet = Icmpv4Packet::new_checked(packet).unwrap();
        match Icmpv4Repr::parse(&packet, &ChecksumCapabilities::default()).unwrap() {
            Icmpv4Repr::DstUnreachable { reason, header, .. } => {
                assert_eq!(IpAddr::from(header.dst_addr), to.ip());
                Some(reason)
            }
            other => panic!("{other:?}"),
        }
    })
}

#[test]
fn the_number_of_flows_is_bounded_and_the_oldest_makes_room() {
    let config = Config {
        policy: granted(),
        limits: Limits {
            datagram_flows: 8,
            ..Limits::default()
        },
        ..Config::default()
    };
    let mut guest = Guest::with(&config, Offloads::default());
    let port = echo(Ipv4Addr::LOCALHOST.into()).unwrap();
    let host = guest.host(port);
    for _ in 0..40 {
        let socket = guest.udp();
        guest.udp_send(socket, host, b"x");
        guest.udp_receive(socket);
        assert!(guest.network.stats().datagram_flows <= 8);
        guest.sockets.remove(socket);
    }
}

/// Pings `to`; gives the identifier and data of the answer, or `None` for an error.
fn ping(guest: &mut Guest, to: IpAddr) -> Option<Vec<u8>> {
    let buffer = || icmp::PacketBuffer::new(vec![icmp::PacketMetadata::EMPTY; 8], vec![0; 4096]);
    let mut socket = icmp::Socket::new(buffer(), buffer());
    let ident = guest.fresh_port();
    socket.bind(icmp::Endpoint::Ident(ident)).unwrap();
    let data = b"0123456789";
    let checksums = ChecksumCapabilities::default();
    let (v4, v6) = (
        Icmpv4Repr::EchoRequest {
            ident,
            seq_no: 7,
            data,
        },
        Icmpv6Repr::EchoRequest {
            ident,
            seq_no: 7,
            data,
        },
    );
    let len = v4.buffer_len();
    let place = socket.send(len, to.into()).unwrap();
    match to {
        IpAddr::V4(_) => v4.emit(&mut Icmpv4Packet::new_unchecked(place), &checksums),
        IpAddr::V6(to) => v6.emit(
            &guest.addresses.guest_v6,
            &to,
            &mut Icmpv6Packet::new_unchecked(place),
            &checksums,
        ),
    }
    let handle = guest.sockets.add(socket);
    guest.until("a pong", |guest| {
        let socket = guest.sockets.get_mut::<icmp::Socket<'_>>(handle);
        if let Ok((packet, from)) = socket.recv() {
            let [kind, _, _, _, a, b, _, seq, data @ ..] = packet else {
                panic!("{packet:?}");
            };
            assert!(matches!(kind, 0 | 129), "{packet:?}");
            assert_eq!((u16::from_be_bytes([*a, *b]), *seq), (ident, 7));
            assert_eq!(IpAddr::from(from), to);
            return Some(Some(data.to_vec()));
        }
        (guest.network.stats().refused > 0).then_some(None)
    })
}

#[test]
fn the_gateway_answers_pings() {
    let mut guest = Guest::new(Policy::off());
    let (v4, v6) = (guest.addresses.gateway_v4, guest.addresses.gateway_v6);
    assert_eq!(ping(&mut guest, v4.into()).unwrap(), b"0123456789");
    assert_eq!(ping(&mut guest, v6.into()).unwrap(), b"0123456789");
}

#[test]
fn pings_are_under_the_policy() {
    let mut guest = Guest::new(Policy::public());
    assert_eq!(ping(&mut guest, [10, 1, 2, 3].into()), None);
}

#[test]
fn pings_reach_the_world_where_the_host_lets_users_ping() {
    use rustix::net::{AddressFamily, SocketType, ipproto};
    let may = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, Some(ipproto::ICMP));
    let (Ok(_), Some(own)) = (may, own_address()) else {
        println!(
            "skipped: pings_reach_the_world_where_the_host_lets_users_ping: \
             net.ipv4.ping_group_range does not have this group, or the host has no address but loopback"
        );
        return;
    };
    let mut guest = Guest::new(granted());
    assert_eq!(ping(&mut guest, own).unwrap(), b"0123456789");
}
