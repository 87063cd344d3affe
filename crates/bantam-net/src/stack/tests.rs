//! Where the stack would connect to, without connecting.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::*;
use crate::dns::{Answer, Learned};
use crate::{Protocol, Range, Reason};

const NAMED: &str = "93.184.215.14:443";

fn stack(rules: &[&str]) -> (Network, Stack) {
    let config = Config {
        policy: Policy {
            allow_hosts: rules.iter().map(|rule| rule.parse().unwrap()).collect(),
            ..Policy::public()
        },
        ..Config::default()
    };
    open(&config).unwrap()
}

/// An answer of a name server.
fn learn(stack: &mut Stack, name: &str, address: &str, ttl: u64, now: Instant) {
    let addresses = vec![(address.parse().unwrap(), Duration::from_secs(ttl))];
    let answer = Answer {
        origin: Origin::Tcp { flow: 0, serial: 0 },
        bytes: Vec::new(),
        learned: Some(Learned {
            name: name.into(),
            addresses,
        }),
    };
    stack.give_answer(answer, now);
}

fn route(stack: &Stack, to: &str, now: Instant) -> Result<(), Reason> {
    let to: SocketAddr = to.parse().unwrap();
    stack
        .route(Protocol::Tcp, to, now)
        .map(|target| assert_eq!(target.address, to))
        .map_err(|(_, reason)| reason)
}

#[test]
fn an_allowed_name_opens_its_address_from_the_answer_until_its_end() {
    let (_network, mut stack) = stack(&["good.test:443"]);
    let now = Instant::now();
    assert_eq!(route(&stack, NAMED, now), Err(Reason::NotAllowed));
    learn(&mut stack, "good.test", "93.184.215.14", 3600, now);
    assert_eq!(route(&stack, NAMED, now), Ok(()));
    assert_eq!(
        route(&stack, "93.184.215.14:80", now),
        Err(Reason::NotAllowed)
    );
    assert_eq!(
        route(&stack, "93.184.215.15:443", now),
        Err(Reason::NotAllowed)
    );
    let end = now + Duration::from_secs(3600);
    assert_eq!(route(&stack, NAMED, end - Duration::from_secs(1)), Ok(()));
    assert_eq!(route(&stack, NAMED, end), Err(Reason::NotAllowed));
}

#[test]
fn an_address_shared_with_another_name_stays_open() {
    let (_network, mut stack) = stack(&["good.test"]);
    let now = Instant::now();
    learn(&mut stack, "good.test", "93.184.215.14", 3600, now);
    learn(&mut stack, "other.test", "93.184.215.14", 3600, now);
    // A content network's next answer has other addresses; the earlier ones still hold.
    learn(&mut stack, "good.test", "93.184.215.99", 20, now);
    assert_eq!(route(&stack, NAMED, now), Ok(()));
    assert_eq!(route(&stack, "93.184.215.99:443", now), Ok(()));
}

#[test]
fn a_new_policy_judges_names_learned_before_it() {
    let (_network, mut stack) = stack(&[]);
    let now = Instant::now();
    learn(&mut stack, "good.test", "93.184.215.14", 3600, now);
    stack.policy.allow_hosts = vec!["other.test".parse().unwrap()];
    assert_eq!(route(&stack, NAMED, now), Err(Reason::NotAllowed));
    stack.policy.allow_hosts = vec!["good.test".parse().unwrap()];
    assert_eq!(route(&stack, NAMED, now), Ok(()));
}

#[test]
fn a_name_grants_no_special_range() {
    let (_network, mut stack) = stack(&["good.test"]);
    let now = Instant::now();
    for (address, range) in [
        ("10.0.0.1", Range::Private),
        ("127.0.0.1", Range::Loopback),
        ("169.254.169.254", Range::Metadata),
        ("fd00::1", Range::Private),
        ("::1", Range::Loopback),
        ("::ffff:10.0.0.1", Range::Embedded),
    ] {
        learn(&mut stack, "good.test", address, 3600, now);
        let ip: IpAddr = address.parse().unwrap();
        let to = SocketAddr::new(ip, 443).to_string();
        assert_eq!(route(&stack, &to, now), Err(Reason::Range(range)));
    }
}

#[test]
fn the_gateway_leads_to_loopback_of_its_family() {
    let (_network, mut stack) = stack(&[]);
    stack.policy.allow_host_loopback = true;
    let now = Instant::now();
    for (gateway, loopback) in [
        (IpAddr::V4(stack.addresses.gateway_v4), "127.0.0.1:80"),
        (IpAddr::V6(stack.addresses.gateway_v6), "[::1]:80"),
    ] {
        let to = SocketAddr::new(gateway, 80);
        let target = stack.route(Protocol::Tcp, to, now).unwrap();
        assert_eq!(target.address.to_string(), loopback);
        assert!(target.host);
    }
    // By its own address it is refused even so.
    for (to, range) in [
        ("127.0.0.1:80", Range::Loopback),
        ("[::1]:80", Range::Loopback),
        ("[::ffff:127.0.0.1]:80", Range::Embedded),
    ] {
        assert_eq!(route(&stack, to, now), Err(Reason::Range(range)));
    }
}

/// A network with a port of each protocol, and the ports.
fn with_ports() -> (Network, Stack, [SocketAddr; 2]) {
    let port = |protocol| crate::PortForward {
        protocol,
        listen: (std::net::Ipv4Addr::LOCALHOST, 0).into(),
        guest_port: 80,
        guest_loopback: false,
    };
    let config = Config {
        ports: vec![port(Protocol::Tcp), port(Protocol::Udp)],
        ..Config::default()
    };
    let (network, stack) = open(&config).unwrap();
    let ports = [network.ports()[0].listen, network.ports()[1].listen];
    (network, stack, ports)
}

#[test]
fn flows_without_a_byte_for_too_long_are_ended() {
    let (network, mut stack, [tcp, udp]) = with_ports();
    let _client = std::net::TcpStream::connect(tcp).unwrap();
    let datagrams = std::net::UdpSocket::bind((std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
    datagrams.send_to(b"x", udp).unwrap();
    stack.run();
    assert_eq!(network.stats().tcp_flows, 1);
    assert_eq!(network.stats().datagram_flows, 1);
    let now = Instant::now();
    stack.sweep(now + Duration::from_secs(50));
    assert_eq!(stack.datagrams.flows.len(), 1);
    stack.sweep(now + Duration::from_secs(70));
    assert_eq!(stack.datagrams.flows.len(), 0, "nobody answered");
    stack.sweep(now + Duration::from_secs(2 * 3600));
    assert_eq!(stack.tcp.flows.len(), 1);
    stack.sweep(now + Duration::from_secs(2 * 3600 + 300));
    stack.run();
    assert_eq!(network.stats().tcp_flows, 0);
}

#[test]
fn an_idle_network_has_no_timer() {
    let (_network, mut stack, _) = with_ports();
    assert_eq!(stack.run(), None);
    assert_eq!(stack.run(), None);
}
