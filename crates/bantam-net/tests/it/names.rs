//! Names, with a name server of the test's own.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use bantam_net::{Config, Offloads, Policy, Protocol, Reason};

use crate::guest::{Guest, granted};

/// A name server that gives every name one address, over UDP and TCP.
struct Server {
    address: SocketAddr,
    asked: Arc<AtomicUsize>,
}

fn server(v4: Ipv4Addr) -> Server {
    loop {
        let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = udp.local_addr().unwrap();
        let Ok(tcp) = TcpListener::bind(address) else {
            continue;
        };
        let asked = Arc::new(AtomicUsize::new(0));
        let (by_udp, by_tcp) = (asked.clone(), asked.clone());
        thread::spawn(move || {
            let mut query = [0; 4096];
            while let Ok((len, from)) = udp.recv_from(&mut query) {
                by_udp.fetch_add(1, Ordering::SeqCst);
                // A forger's guess comes first.
                let mut forged = answer(&query[..len], Ipv4Addr::new(6, 6, 6, 6));
                forged[0] ^= 1;
                udp.send_to(&forged, from).unwrap();
                udp.send_to(&answer(&query[..len], v4), from).unwrap();
            }
        });
        thread::spawn(move || {
            while let Ok((mut stream, _)) = tcp.accept() {
                by_tcp.fetch_add(1, Ordering::SeqCst);
                let mut len = [0; 2];
                if stream.read_exact(&mut len).is_err() {
                    continue;
                }
                let mut query = vec![0; u16::from_be_bytes(len).into()];
                stream.read_exact(&mut query).unwrap();
                let answer = answer(&query, v4);
                let len = u16::try_from(answer.len()).unwrap();
                stream.write_all(&len.to_be_bytes()).unwrap();
                stream.write_all(&answer).unwrap();
            }
        });
        return Server { address, asked };
    }
}

fn query(id: u16, name: &str) -> Vec<u8> {
    let mut bytes = id.to_be_bytes().to_vec();
    bytes.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}

/// An alias and its address.
fn answer(query: &[u8], v4: Ipv4Addr) -> Vec<u8> {
    let mut bytes = query.to_vec();
    bytes[2..8].copy_from_slice(&[0x81, 0x80, 0, 1, 0, 2]);
    let alias = [&[0xc0, 12, 0, 5, 0, 1, 0, 0, 0, 9, 0, 5][..], b"\x03cdn\0"].concat();
    bytes.extend(alias);
    bytes.extend([3, b'c', b'd', b'n', 0, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4]);
    bytes.extend(v4.octets());
    bytes
}

fn guest(policy: Policy, server: &Server) -> Guest {
    let config = Config {
        policy,
        dns_servers: vec![server.address],
        ..Config::default()
    };
    Guest::with(&config, Offloads::default())
}

fn ask(guest: &mut Guest, name: &str) -> Vec<u8> {
    let socket = guest.udp();
    let to = guest.host(53);
    guest.udp_send(socket, to, &query(0x1234, name));
    let (answer, from) = guest.udp_receive(socket);
    assert_eq!(from, to);
    assert_eq!(answer[..2], [0x12, 0x34], "the identifier is the guest's");
    guest.sockets.remove(socket);
    answer
}

fn code(answer: &[u8]) -> u8 {
    answer[3] & 15
}

const ANYWHERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);

#[test]
fn names_are_answered_over_udp_and_tcp() {
    let server = server(ANYWHERE);
    let mut guest = guest(Policy::public(), &server);
    let answer = ask(&mut guest, "Example.test");
    assert_eq!(
        (code(&answer), &answer[answer.len() - 4..]),
        (0, &ANYWHERE.octets()[..])
    );

    // Two questions at once, the first in pieces.
    let to = guest.host(53);
    let socket = guest.connect(to);
    assert!(guest.connected(socket));
    let message = |name| {
        let query = query(9, name);
        [
            &u16::try_from(query.len()).unwrap().to_be_bytes()[..],
            &query,
        ]
        .concat()
    };
    let bytes = [message("a.test"), message("b.test")].concat();
    guest.send(socket, &bytes[..1]);
    guest.step();
    guest.send(socket, &bytes[1..]);
    guest.tcp(socket).close();
    let answers = guest.receive_all(socket).unwrap();
    let each = usize::from(u16::from_be_bytes([answers[0], answers[1]])) + 2;
    assert_eq!(answers.len(), 2 * each);
    assert_eq!(answers[each - 4..each], ANYWHERE.octets());
    assert_eq!(server.asked.load(Ordering::SeqCst), 3);
}

#[test]
fn unlisted_names_do_not_exist_and_are_not_asked_for() {
    let server = server(ANYWHERE);
    let policy = Policy {
        allow_hosts: vec!["good.test".parse().unwrap(), "*.cdn.test".parse().unwrap()],
        ..Policy::public()
    };
    let mut guest = guest(policy, &server);
    for (name, expected) in [
        ("good.test", 0),
        ("GOOD.test", 0),
        ("a.b.cdn.test", 0),
        ("_http._tcp.good.test", 0),
        ("cdn.test", 3),
        ("secret.bad.test", 3),
        ("good.test.bad.test", 3),
        ("xgood.test", 3),
    ] {
        let before = server.asked.load(Ordering::SeqCst);
        let answer = ask(&mut guest, name);
        assert_eq!(code(&answer), expected, "{name}");
        let asked = server.asked.load(Ordering::SeqCst) - before;
        assert_eq!(asked, usize::from(expected == 0), "{name}");
    }
    let events = guest.network.events(0);
    assert_eq!(events.len(), 4);
    assert_eq!(events[1].name.as_deref(), Some("secret.bad.test"));
    assert_eq!(events[1].protocol, Protocol::Dns);
}

#[test]
fn with_the_network_off_no_name_is_looked_up() {
    let server = server(ANYWHERE);
    let mut guest = guest(Policy::off(), &server);
    assert_eq!(code(&ask(&mut guest, "example.test")), 5);
    assert_eq!(server.asked.load(Ordering::SeqCst), 0);
}

#[test]
fn a_name_that_leads_to_a_private_address_grants_nothing() {
    for address in [
        Ipv4Addr::new(10, 0, 0, 1),
        Ipv4Addr::LOCALHOST,
        Ipv4Addr::new(169, 254, 169, 254),
    ] {
        let server = server(address);
        let policy = Policy {
            allow_hosts: vec!["rebind.test".parse().unwrap()],
            ..Policy::public()
        };
        let mut guest = guest(policy, &server);
        assert_eq!(code(&ask(&mut guest, "rebind.test")), 0);
        let socket = guest.connect((address, 80).into());
        assert!(!guest.connected(socket));
        let events = guest.network.events(0);
        let event = events.last().unwrap();
        assert!(matches!(event.reason, Reason::Range(_)), "{event:?}");
        assert_eq!(event.name.as_deref(), Some("rebind.test"));
    }
}

#[test]
fn the_host_has_a_name_when_it_is_granted() {
    let server = server(ANYWHERE);
    let mut with = guest(granted(), &server);
    let answer = ask(&mut with, "host.bantam.internal");
    assert_eq!(
        answer[answer.len() - 4..],
        with.addresses.gateway_v4.octets()
    );
    let mut without = guest(Policy::public(), &server);
    assert_eq!(code(&ask(&mut without, "host.bantam.internal")), 3);
    assert_eq!(server.asked.load(Ordering::SeqCst), 0);
}

#[test]
fn a_dead_name_server_is_passed_over_and_only_dead_ones_are_a_failure() {
    let server = server(ANYWHERE);
    // Refuses at once.
    let dead = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = dead.local_addr().unwrap();
    drop(dead);
    let mut config = Config {
        policy: Policy::public(),
        dns_servers: vec![address, server.address],
        ..Config::default()
    };
    let mut guest = Guest::with(&config, Offloads::default());
    assert_eq!(code(&ask(&mut guest, "a.test")), 0);
    config.dns_servers.truncate(1);
    let mut guest = Guest::with(&config, Offloads::default());
    assert_eq!(code(&ask(&mut guest, "a.test")), 2);
}
