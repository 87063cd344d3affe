//! Names: whom the guest's questions reach, and what a rule about a name grants.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};

use bantam::{NetworkConfig, Policy};
use bantam_e2e::{Asked, DnsServer, Reply, World, tests_with_world};

use super::{
    assert_reached, assert_refused, attempt, greet, greet_on, name_server, run, start, succeed,
};

/// What the name server of the internet knows.
fn zone(asked: &Asked) -> Reply {
    let addresses = |addresses: &[&str]| Reply::addresses(asked, addresses);
    match asked.name.as_str() {
        "both.example" => addresses(&["9.9.9.9", "2620:fe::9"]),
        "www.example" => Reply::empty()
            .alias("www.example", "edge.cdn.example")
            .alias("edge.cdn.example", "edge1.cdn.example")
            .with(asked, "edge1.cdn.example", 1, &["9.9.9.10", "9.9.9.11"]),
        "other.example" | "a.wild.example" | "wild.example" => addresses(&["9.9.9.12"]),
        "b.wild.example" => addresses(&["2620:fe::10"]),
        // Names that lead where nobody may go.
        "rebind-loopback.example" => addresses(&["127.0.0.1", "::1"]),
        "rebind-private.example" => addresses(&["10.55.0.1", "fd99::1"]),
        "rebind-metadata.example" => addresses(&["169.254.169.254", "fd00:ec2::254"]),
        "rebind-host.example" => addresses(&[World::HOST_PUBLIC, World::HOST_V6]),
        "rebind-mapped.example" => addresses(&["::ffff:10.55.0.1", "::ffff:127.0.0.1"]),
        "rebind-gateway.example" => addresses(&["10.231.118.1"]),
        "9.9.9.9.in-addr.arpa" => Reply::pointer(asked, "both.example"),
        "many.example" => {
            let all: Vec<_> = (1..=200).map(|i| format!("9.9.10.{i}")).collect();
            let all: Vec<_> = all.iter().map(String::as_str).collect();
            addresses(&all).truncated()
        }
        "box.corp.example" => addresses(&["9.9.9.11"]),
        "failing.example" => Reply::failure(),
        _ => Reply::nxdomain(),
    }
}

/// Only what was asked for by this name.
fn asked_for(server: &DnsServer, name: &str) -> Vec<Asked> {
    let mut asked = server.asked();
    asked.retain(|asked| asked.name == name);
    asked
}

tests_with_world! {
    fn dig_gets_every_kind_of_answer_as_the_server_gave_it(world) {
        let server = name_server(world, World::PUBLIC, zone);
        // The first is a server that nobody answers for; the second is asked in its place.
        let network = NetworkConfig::public()
            .dns_server("9.9.9.10")
            .and_then(|network| network.dns_server(World::PUBLIC))
            .and_then(|network| network.search("corp.example"))
            .unwrap();
        let machine = start(world, network);
        let dig = |args: &str| succeed(&machine, &format!("dig +tries=1 +time=60 {args}"));

        assert_eq!(dig("+short both.example A"), "9.9.9.9\n");
        assert_eq!(dig("+short both.example AAAA"), "2620:fe::9\n");
        assert_eq!(dig("+short -x 9.9.9.9"), "both.example.\n");
        assert_eq!(
            dig("+short www.example"),
            "edge.cdn.example.\nedge1.cdn.example.\n9.9.9.10\n9.9.9.11\n"
        );
        assert!(dig("nothing.example").contains("status: NXDOMAIN"));
        assert!(dig("failing.example").contains("status: SERVFAIL"));
        let empty = dig("both.example MX");
        assert!(empty.contains("status: NOERROR") && empty.contains("ANSWER: 0"), "{empty}");

        // Over TCP it is asked over TCP, and what did not fit is asked again so.
        let _ = server.asked();
        assert_eq!(dig("+short +tcp both.example A"), "9.9.9.9\n");
        assert!(asked_for(&server, "both.example").iter().all(|asked| asked.tcp));
        let many = dig("+short many.example");
        assert_eq!(many.lines().count(), 200, "{many}");
        let how: Vec<_> = asked_for(&server, "many.example").iter().map(|asked| asked.tcp).collect();
        assert_eq!(how, [false, true]);

        // As programs look names up: both families, and below the search domain.
        assert_eq!(succeed(&machine, "getent ahosts box | cut -d' ' -f1 | uniq"), "9.9.9.11\n");
        assert_eq!(succeed(&machine, "getent hosts 9.9.9.9 | tr -s ' '"), "9.9.9.9 both.example\n");
    }

    fn a_rule_for_a_name_grants_its_addresses_and_nothing_else(world) {
        let server = name_server(world, "9.9.9.10", zone);
        for address in ["9.9.9.9", "9.9.9.10", "9.9.9.11", "9.9.9.12", "2620:fe::9", "2620:fe::10"] {
            greet(world, address, 80);
            greet(world, address, 443);
            greet(world, address, 853);
        }
        let foreign = name_server(world, "9.9.9.9", zone);
        let _ = name_server(world, "9.9.9.12", zone);
        let network = NetworkConfig::public()
            .dns_server("9.9.9.10")
            .and_then(|network| network.allow_host("www.example:80"))
            .and_then(|network| network.allow_host("*.wild.example"))
            .unwrap();
        let machine = start(world, network);
        // Before the names are asked for, nothing is known of their addresses; after it, all of
        // a name's are, the one that stands behind aliases, too.
        assert_refused(&attempt(&machine, &["tcp 9.9.9.11 80", "tcp 9.9.9.12 80"]));
        let names = "getent ahosts www.example; getent ahosts a.wild.example; getent ahosts b.wild.example";
        succeed(&machine, names);
        assert_reached(&attempt(&machine, &[
            "tcp www.example 80", "tcp 9.9.9.10 80", "tcp 9.9.9.11 80",
            "tcp a.wild.example 443", "tcp 9.9.9.12 80", "tcp 2620:fe::10 443",
        ]));
        assert_refused(&attempt(&machine, &[
            "tcp 9.9.9.10 443", "tcp 9.9.9.9 80", "tcp 2620:fe::9 80",
        ]));

        // Names without a rule are not asked for; neither is the name above a star.
        let _ = server.asked();
        for name in ["both.example", "wild.example", "cdn.example", "edge.cdn.example"] {
            let answer = succeed(&machine, &format!("dig +tries=1 +time=60 {name}"));
            assert!(answer.contains("status: NXDOMAIN"), "{answer}");
            let answer = succeed(&machine, &format!("dig +tcp +tries=1 +time=60 {name}"));
            assert!(answer.contains("status: NXDOMAIN"), "{answer}");
        }
        assert_eq!(server.asked(), []);

        // No other server is asked, in no way: plain, over TCP, TLS or HTTPS by address.
        assert_refused(&attempt(&machine, &[
            "udp 9.9.9.9 53", "tcp 9.9.9.9 53", "tcp 9.9.9.9 853", "tcp 9.9.9.9 443",
            "udp 9.9.9.10 53", "tcp 9.9.9.10 53", "tcp 9.9.9.10 853", "tcp 9.9.9.10 443",
            "tcp 2620:fe::9 443", "udp 2620:fe::9 53",
        ]));
        assert_eq!(foreign.asked(), []);
    }

    fn a_name_that_leads_inward_leads_nowhere(world) {
        let rebinding = ["loopback", "private", "metadata", "host", "mapped", "gateway"];
        let _server = name_server(world, World::PUBLIC, zone);
        for address in ["10.55.0.1", "fd99::1", "169.254.169.254", "fd00:ec2::254"] {
            greet(world, address, 80);
        }
        for address in ["127.0.0.1", "::1", World::HOST_PUBLIC, World::HOST_V6] {
            greet_on(TcpListener::bind((address, 80)).unwrap());
        }
        let network = NetworkConfig::public().dns_server(World::PUBLIC).unwrap();
        let machine = start(world, network.clone());
        let policies = [network.policy.clone(), network.allow_host("*.example").unwrap().policy];
        for policy in policies {
            machine.network().unwrap().update(policy);
            let before = machine.network().unwrap().stats().refused;
            for what in rebinding {
                let name = format!("rebind-{what}.example");
                let script = format!(
                    "for a in $(getent ahosts {name} | awk '/STREAM/ {{print $1}}'); do \
                     echo tcp $a; nc -w 30 $a 80 </dev/null && exit 1; done; exit 0"
                );
                let said = succeed(&machine, &script);
                // What is the guest's own loopback is its own affair.
                assert!(said.contains("tcp ") || what == "mapped", "{name}: {said}");
            }
            assert!(machine.network().unwrap().stats().refused > before);
        }
    }

    fn the_hosts_own_resolver_is_asked_when_no_server_is_given(world) {
        world.set_resolv_conf("# stub\nnameserver 127.0.0.53\noptions edns0 trust-ad\nsearch corp.example\n");
        // As a split resolver has it: what a name server of the internet does not know.
        let udp = UdpSocket::bind((Ipv4Addr::new(127, 0, 0, 53), 53)).unwrap();
        let tcp = TcpListener::bind((Ipv4Addr::new(127, 0, 0, 53), 53)).unwrap();
        let stub = DnsServer::start(udp, tcp, zone);
        let machine = start(world, NetworkConfig::public());
        let files = succeed(&machine, "cat /etc/resolv.conf");
        assert_eq!(files, "nameserver 10.231.118.1\nsearch corp.example\n");
        assert_eq!(succeed(&machine, "getent ahosts box | cut -d' ' -f1 | uniq"), "9.9.9.11\n");
        assert!(!stub.asked().is_empty());
        // By the gateway only: the stub itself stays the host's.
        assert_ne!(run(&machine, "dig +tries=1 +time=2 @127.0.0.53 box.corp.example").0, 0);

        // The host moves to another network, and the machine asks there.
        let server = name_server(world, World::PUBLIC, zone);
        world.set_resolv_conf(&format!("nameserver {}\n", World::PUBLIC));
        let _ = stub.asked();
        assert_eq!(succeed(&machine, "dig +short other.example"), "9.9.9.12\n");
        assert_eq!(stub.asked(), []);
        assert_eq!(server.asked().len(), 1);

        // Nothing is answered when there is no network.
        machine.network().unwrap().update(Policy::off());
        let off = succeed(&machine, "dig +tries=1 +time=60 other.example");
        assert!(off.contains("status: REFUSED"), "{off}");
        assert_eq!(server.asked(), []);
    }
}
