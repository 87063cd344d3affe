//! The policy as the guest meets it; who may what is in the table beside the policy.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

use bantam_net::{Policy, Protocol, Range, Reason};
use smoltcp::socket::tcp::State;

use crate::guest::{Guest, granted, own_address};

#[test]
fn refused_addresses_are_reset_at_once_and_noted() {
    for (policy, to, reason) in [
        (Policy::off(), "192.0.2.1:80", Reason::Off),
        (
            Policy::public(),
            "169.254.169.254:80",
            Reason::Range(Range::Metadata),
        ),
        (
            Policy::public(),
            "10.0.0.1:22",
            Reason::Range(Range::Private),
        ),
        (
            Policy::public(),
            "[fd00:ec2::254]:80",
            Reason::Range(Range::Metadata),
        ),
        (
            Policy::public(),
            "[64:ff9b::7f00:1]:80",
            Reason::Range(Range::Embedded),
        ),
        (
            Policy::public(),
            "127.0.0.1:80",
            Reason::Range(Range::Loopback),
        ),
        (granted(), "127.0.0.1:80", Reason::Range(Range::Loopback)),
        (
            granted(),
            "[::ffff:127.0.0.1]:80",
            Reason::Range(Range::Embedded),
        ),
    ] {
        let mut guest = Guest::new(policy);
        let to: SocketAddr = to.parse().unwrap();
        let socket = guest.connect(to);
        assert!(!guest.connected(socket), "{to}");
        let events = guest.network.events(0);
        assert_eq!(events.len(), 1, "{to}");
        assert_eq!(events[0].protocol, Protocol::Tcp);
        assert_eq!(events[0].address, Some(to.ip()));
        assert_eq!(events[0].port, Some(to.port()));
        assert_eq!(events[0].reason, reason, "{to}");
    }
}

#[test]
fn the_gateway_is_not_the_host_unless_granted() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut guest = Guest::new(Policy::public());
    let host = guest.host(port);
    let socket = guest.connect(host);
    assert!(!guest.connected(socket));
    assert_eq!(
        guest.network.events(0)[0].reason,
        Reason::Range(Range::Host)
    );
    // A grant on the running network.
    guest.network.update(granted());
    guest.step();
    let socket = guest.connect(host);
    assert!(guest.connected(socket));
    // Taken back, it ends what stands.
    guest.network.update(Policy::public());
    guest.until("a reset", |guest| {
        (guest.tcp(socket).state() == State::Closed).then_some(())
    });
    assert!(listener.accept().is_ok());
    assert_eq!(guest.network.stats().tcp_flows, 0);
}

#[test]
fn the_hosts_own_addresses_are_the_host() {
    let Some(own) = own_address() else {
        println!("skipped: the_hosts_own_addresses_are_the_host: it has none but loopback");
        return;
    };
    let listener = TcpListener::bind((own, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let to = SocketAddr::from((own, port));
    let private = Policy {
        allow_private: true,
        ..Policy::public()
    };
    let rule = |rule: String| Policy {
        allow_cidrs: vec![rule.parse().unwrap()],
        ..Policy::public()
    };
    for (policy, may) in [
        (Policy::public(), false),
        (private, bantam_net::range(own) == Range::Private),
        (granted(), true),
        (rule(format!("{own}")), true),
        (rule(format!("{own}:{port}")), true),
        (rule(format!("{own}:1")), false),
        (rule("0.0.0.0/0".to_owned()), false),
    ] {
        let mut guest = Guest::new(policy.clone());
        let socket = guest.connect(to);
        assert_eq!(guest.connected(socket), may, "{policy:?}");
    }
}

#[test]
fn a_deny_rule_speaks_of_the_host_behind_the_gateway() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut policy = granted();
    policy.deny_cidrs = vec![format!("127.0.0.0/8:{port}").parse().unwrap()];
    let mut guest = Guest::new(policy);
    let host = guest.host(port);
    let socket = guest.connect(host);
    assert!(!guest.connected(socket));
    let event = &guest.network.events(0)[0];
    assert_eq!(event.address, Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    assert_eq!(event.reason, Reason::Denied(format!("127.0.0.0/8:{port}")));
}
