//! What may be reached and what may not, as programs in the guest see it.

use std::net::{TcpListener, UdpSocket};

use bantam::NetworkConfig;
use bantam_e2e::{World, tests_with_world};
use serde_json::Value;

use super::{assert_reached, assert_refused, attempt, echo, greet, greet_on, start, tried};

/// Addresses that nobody gets without asking, all of which answer in a test's world.
const FORBIDDEN: &[&str] = &[
    "192.168.77.1",
    "10.55.0.1",
    "172.20.0.1",
    "100.64.0.7",
    "169.254.7.7",
    "169.254.169.254",
    "fd77::1",
    "fd99::1",
    "fd00:ec2::254",
    // The host itself.
    World::HOST,
    World::HOST_V6,
    World::HOST_PUBLIC,
];

/// The gateway stands for the host's loopback.
const GATEWAYS: &[&str] = &["10.231.118.1", "fd62:616e:7461:6d00::1"];

fn each(kind: &str, addresses: &[&str], port: &str) -> Vec<String> {
    let line = |address| format!("{kind} {address}{port}");
    addresses.iter().map(line).collect()
}

fn words(lines: &[String]) -> Vec<&str> {
    lines.iter().map(String::as_str).collect()
}

/// Servers at every address, so that what is refused is refused by the policy.
fn serve_everywhere(world: &World) {
    let own = [World::HOST, World::HOST_V6, World::HOST_PUBLIC];
    for address in FORBIDDEN.iter().filter(|address| !own.contains(address)) {
        greet(world, address, 80);
        echo(world, address, 7);
    }
    for address in own.iter().chain(&["127.0.0.1", "::1"]) {
        greet_on(TcpListener::bind((*address, 80)).unwrap());
        super::echo_on(UdpSocket::bind((*address, 7)).unwrap());
    }
    for address in [World::PUBLIC, World::PUBLIC_V6] {
        greet(world, address, 80);
        echo(world, address, 7);
    }
}

tests_with_world! {
    fn nothing_but_public_addresses_is_reached_unasked_and_all_else_is_refused_at_once(world) {
        serve_everywhere(world);
        // The host reaches them all.
        for address in FORBIDDEN {
            std::net::TcpStream::connect((*address, 80)).unwrap();
        }
        let home = &world.home;
        home.started("m", &["--net"]);
        let run = |what: &[&str]| {
            let mut args = vec!["exec", "-n", "m", "--", "python3", "-c", include_str!("attempt.py")];
            args.extend(what);
            tried(home.ok(args).as_bytes())
        };
        let public = ["tcp 9.9.9.9 80", "tcp 2620:fe::9 80", "udp 9.9.9.9 7", "udp 2620:fe::9 7",
            "ping 9.9.9.9", "ping 2620:fe::9"];
        assert_reached(&run(&public));

        let mut refused = each("tcp", FORBIDDEN, " 80");
        refused.extend(each("tcp", GATEWAYS, " 80"));
        refused.extend(each("udp", FORBIDDEN, " 7"));
        refused.extend(each("udp", GATEWAYS, " 7"));
        refused.extend(each("ping", FORBIDDEN, ""));
        assert_refused(&run(&words(&refused)));

        // Nothing is sent to groups, and a program is not told otherwise: datagrams vanish.
        let events = home.ok(["egress-events", "-n", "m", "--json"]);
        let events: Vec<Value> = serde_json::from_str(&events).unwrap();
        for line in &refused {
            let parts: Vec<_> = line.split(' ').collect();
            let address = match parts[1] {
                "10.231.118.1" => "127.0.0.1",
                "fd62:616e:7461:6d00::1" => "::1",
                other => other,
            };
            let protocol = if parts[0] == "ping" { "icmp" } else { parts[0] };
            let port: Option<u64> = parts.get(2).map(|port| port.parse().unwrap());
            let listed = events.iter().any(|event| {
                event["protocol"] == protocol
                    && event["address"] == address
                    && event["port"].as_u64() == port
                    && event["reason"].as_str().is_some_and(|reason| reason.contains("not granted"))
            });
            assert!(listed, "{line}: {events:#?}");
        }
        let reached = ["9.9.9.9", "2620:fe::9"];
        assert!(events.iter().all(|event| !reached.iter().any(|a| event["address"] == *a)));
        home.delete("m");
    }
}

tests_with_world! {
    fn rules_for_addresses_grant_what_they_say_and_denials_win(world) {
        for address in ["9.9.9.9", "9.9.9.10", "2620:fe::9", "10.55.0.1", "192.168.77.1", "169.254.169.254"] {
            greet(world, address, 80);
            greet(world, address, 81);
            echo(world, address, 80);
        }
        let allow = |rule: &str| NetworkConfig::public().allow_cidr(rule).unwrap();
        let machine = start(world, allow("9.9.9.0/24:80"));
        let set = |network: NetworkConfig| machine.network().unwrap().update(network.policy);

        assert_reached(&attempt(&machine, &["tcp 9.9.9.9 80", "tcp 9.9.9.10 80", "udp 9.9.9.9 80"]));
        // Pings have no port, and a rule with ports does not speak of them.
        assert_refused(&attempt(&machine, &["tcp 9.9.9.9 81", "tcp 2620:fe::9 80",
            "tcp 10.55.0.1 80", "ping 9.9.9.9"]));

        set(allow("[2620:fe::/48]:80").allow_cidr("10.55.0.0/24").unwrap());
        assert_reached(&attempt(&machine, &["tcp 2620:fe::9 80", "tcp 10.55.0.1 81", "ping 10.55.0.1"]));
        assert_refused(&attempt(&machine, &["tcp 9.9.9.9 80", "tcp 2620:fe::9 81", "tcp 192.168.77.1 80"]));

        // Everything is not what is private; credentials have to be named.
        set(allow("0.0.0.0/0").allow_private());
        assert_reached(&attempt(&machine, &["tcp 9.9.9.9 80", "tcp 10.55.0.1 80", "tcp 192.168.77.1 80"]));
        assert_refused(&attempt(&machine, &["tcp 169.254.169.254 80", "tcp 2620:fe::9 80"]));
        set(allow("169.254.169.254"));
        assert_reached(&attempt(&machine, &["tcp 169.254.169.254 80"]));

        let denied = allow("9.9.9.0/24").deny_cidr("9.9.9.9").unwrap();
        set(denied.deny_cidr("9.9.9.10:81").unwrap());
        assert_reached(&attempt(&machine, &["tcp 9.9.9.10 80"]));
        assert_refused(&attempt(&machine, &["tcp 9.9.9.9 80", "udp 9.9.9.9 80", "ping 9.9.9.9",
            "tcp 9.9.9.10 81"]));
    }

    fn new_rules_hold_for_a_running_machine_and_end_what_they_forbid(world) {
        // Connections that say nothing.
        for address in ["9.9.9.9", "9.9.9.10"] {
            let listener = world.internet(|| TcpListener::bind((address, 1000)).unwrap());
            std::thread::spawn(move || listener.incoming().collect::<Vec<_>>());
        }
        greet(world, "10.55.0.1", 80);
        let home = &world.home;
        home.started("m", &["--net"]);
        let script = "import socket, sys\n\
            all = [socket.create_connection((a, 1000), 60) for a in ('9.9.9.9', '9.9.9.10')]\n\
            print('open', flush=True)\n\
            for c in all: c.settimeout(100)\n\
            try: all[0].recv(1); print('end')\n\
            except ConnectionResetError: print('reset')\n\
            all[1].settimeout(2)\n\
            try: all[1].recv(1); print('end')\n\
            except TimeoutError: print('open')\n";
        let mut held = home.start(["exec", "-n", "m", "--", "python3", "-c", script]);
        assert_eq!(held.read(5), "open\n");
        home.ok(["update", "-n", "m", "--deny-cidr", "9.9.9.9"]);
        let held = held.finish();
        assert_eq!(held.text(), "reset\nopen\n", "{}", held.stderr);
        let events = home.ok(["egress-events", "-n", "m"]);
        assert!(events.contains("9.9.9.9 port 1000: denied by 9.9.9.9/32"), "{events}");

        let try_again = |what: &[&str]| {
            let mut args = vec!["exec", "-n", "m", "--", "python3", "-c", include_str!("attempt.py")];
            args.extend(what);
            tried(home.ok(args).as_bytes())
        };
        assert_refused(&try_again(&["tcp 9.9.9.9 1000", "tcp 10.55.0.1 80"]));
        home.ok(["update", "-n", "m", "--allow-cidr", "10.55.0.0/16:80"]);
        assert_reached(&try_again(&["tcp 10.55.0.1 80"]));
        assert_refused(&try_again(&["tcp 9.9.9.10 1000"]));
        // And for the next start.
        home.ok(["stop", "-n", "m"]);
        home.ok(["start", "-n", "m"]);
        assert_reached(&try_again(&["tcp 10.55.0.1 80"]));
        assert_refused(&try_again(&["tcp 9.9.9.10 1000"]));
        home.delete("m");
    }
}
