//! The card and the files that name it, as the guest finds them.

use std::thread;
use std::time::Duration;

use bantam::NetworkConfig;
use bantam_e2e::{tests_with_home, tests_with_world};

use super::{start, succeed};

tests_with_world! {
    fn the_card_is_set_up_before_the_first_command_and_then_silent(world) {
        let network = NetworkConfig::public().dns_server("9.9.9.9").unwrap();
        let machine = start(world, network);
        let text = succeed(&machine, "ip -o addr show dev eth0; ip route; ip -6 route; ip -o link show eth0");
        for expected in [
            "10.231.118.2/30", "fd62:616e:7461:6d00::2/64", "default via 10.231.118.1 dev eth0",
            "default via fd62:616e:7461:6d00::1 dev eth0", "mtu 1500",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        for unexpected in ["tentative", "dadfailed", "proto ra"] {
            assert!(!text.contains(unexpected), "{unexpected}: {text}");
        }
        let settings = "cd /proc/sys/net/ipv6/conf/eth0 && cat accept_ra accept_dad";
        assert_eq!(succeed(&machine, settings), "0\n0\n");
        assert_eq!(succeed(&machine, "cat /etc/resolv.conf"), "nameserver 10.231.118.1\n");
        assert_eq!(succeed(&machine, "getent hosts localhost $(hostname) | wc -l"), "2\n");

        // A guest that does nothing sends nothing, when what it says on coming up is over: which
        // groups it is in, more than once, at random times of up to ten seconds (RFC 2710 §7.10).
        let sent = || machine.network().unwrap().stats().frames_from_guest;
        let mut counts = vec![sent()];
        while counts.len() < 4 && !matches!(counts[..], [.., before, now] if before == now) {
            thread::sleep(Duration::from_secs(11));
            counts.push(sent());
        }
        assert!(counts.len() < 4 || counts[2] == counts[3], "frames of an idle guest: {counts:?}");
    }
}

/// The files in `/etc` that the agent writes, as a script leaves them before the next start.
const HABITS: &[(&str, &str)] = &[
    ("missing", "rm /etc/resolv.conf /etc/hosts"),
    (
        "links to what is not there",
        "ln -sf ../run/systemd/resolve/stub-resolv.conf /etc/resolv.conf; ln -sf /nowhere/hosts /etc/hosts",
    ),
    (
        "links to what somebody else keeps",
        "echo kept >/root/kept; ln -sf /root/kept /etc/resolv.conf; ln -sf ../root/kept /etc/hosts",
    ),
    (
        "read-only, and for nobody",
        "rm -f /etc/resolv.conf /etc/hosts; echo old >/etc/resolv.conf; echo old >/etc/hosts; chmod 0444 /etc/resolv.conf; chmod 0 /etc/hosts",
    ),
    (
        "links in a circle",
        "ln -sf /etc/hosts /etc/resolv.conf; ln -sf /etc/resolv.conf /etc/hosts",
    ),
    (
        "a directory, as what mounts into containers leaves it",
        "rm -f /etc/resolv.conf /etc/hosts; mkdir /etc/resolv.conf /etc/hosts",
    ),
];

tests_with_home! {
    fn the_files_of_etc_are_right_whatever_the_machine_had_there(home) {
        home.started("m", &["--net", "--dns", "9.9.9.9", "--dns-search", "corp.example", "--allow-host-loopback"]);
        for (what, script) in HABITS {
            home.sh("m", script);
            home.ok(["restart", "-n", "m"]);
            let resolv = home.sh("m", "cat /etc/resolv.conf");
            assert_eq!(resolv, "nameserver 10.231.118.1\nsearch corp.example\n", "{what}");
            let hosts = home.sh("m", "cat /etc/hosts");
            assert!(hosts.contains("10.231.118.1\thost.bantam.internal"), "{what}: {hosts}");
            let lookups = "getent hosts localhost || nslookup localhost; ping -c 1 -W 9 $(hostname); ping -c 1 -W 9 localhost";
            home.sh("m", lookups);
            assert_eq!(home.sh("m", "ls -l /etc/resolv.conf /etc/hosts | cut -c1-10 | uniq"), "-rw-r--r--\n", "{what}");
            // Programs that are not root's read them, too.
            home.ok(["exec", "-n", "m", "-u", "user", "--", "cat", "/etc/resolv.conf", "/etc/hosts"]);
        }
        assert_eq!(home.sh("m", "cat /root/kept"), "kept\n");
        home.delete("m");
    }
}
