//! Who may what: one row a case.

use std::net::IpAddr;

use super::*;
use crate::policy::range::block;

/// `""`: off. Else words: `public`, `private`, `loopback`, `+RULE` (allow), `-RULE` (deny).
fn policy(words: &str) -> Policy {
    let mut policy = Policy::off();
    for word in words.split_ascii_whitespace() {
        policy.enabled = true;
        match (word, word.split_at(1)) {
            ("public", _) => {}
            ("private", _) => policy.allow_private = true,
            ("loopback", _) => policy.allow_host_loopback = true,
            (_, ("-", rule)) => policy.deny_cidrs.push(rule.parse().unwrap()),
            (_, ("+", rule)) => match rule.parse() {
                Ok(rule) => policy.allow_cidrs.push(rule),
                Err(_) => policy.allow_hosts.push(rule.parse().unwrap()),
            },
            _ => panic!("{word}"),
        }
    }
    policy
}

/// `protocol ADDRESS PORT NAME..`; the address `host` is the loopback behind the gateway, and `own:X`
/// is X as an address of the host.
fn decide(words: &str, to: &str) -> String {
    let mut parts = to.split_ascii_whitespace();
    let protocol = parts.next().unwrap();
    let address = parts.next().unwrap();
    let port = (protocol != "icmp").then(|| parts.next().unwrap().parse().unwrap());
    let names: Vec<&str> = parts.collect();
    let (address, host): (IpAddr, bool) = match address.strip_prefix("own:") {
        Some(own) => (own.parse().unwrap(), true),
        None if address == "host" => ([127, 0, 0, 1].into(), true),
        None => (address.parse().unwrap(), false),
    };
    let decided = policy(words).decide(&Destination {
        address,
        port,
        host,
        names: &names,
    });
    match decided {
        Ok(()) => "ok".to_owned(),
        Err(Reason::Off) => "off".to_owned(),
        Err(Reason::Range(range)) => range.to_string(),
        Err(Reason::Denied(rule)) => format!("-{rule}"),
        Err(Reason::NotAllowed) => "unlisted".to_owned(),
    }
}

/// Policy, destination, outcome.
const ROWS: &[(&str, &str, &str)] = &[
    // Off means off.
    ("", "tcp 93.184.215.14 443", "off"),
    ("", "udp 8.8.8.8 53", "off"),
    ("", "icmp 8.8.8.8", "off"),
    ("", "tcp 2606:4700::1 443", "off"),
    ("", "tcp host 80", "off"),
    ("", "tcp 10.0.0.1 80", "off"),
    // Public addresses, every protocol, both families.
    ("public", "tcp 93.184.215.14 443", "ok"),
    ("public", "udp 8.8.8.8 53", "ok"),
    ("public", "icmp 8.8.8.8", "ok"),
    ("public", "tcp 1.0.0.1 1", "ok"),
    ("public", "tcp 9.255.255.255 80", "ok"),
    ("public", "tcp 11.0.0.0 80", "ok"),
    ("public", "tcp 100.63.255.255 80", "ok"),
    ("public", "tcp 100.128.0.0 80", "ok"),
    ("public", "tcp 126.255.255.255 80", "ok"),
    ("public", "tcp 128.0.0.1 80", "ok"),
    ("public", "tcp 169.253.255.255 80", "ok"),
    ("public", "tcp 169.255.0.0 80", "ok"),
    ("public", "tcp 172.15.255.255 80", "ok"),
    ("public", "tcp 172.32.0.0 80", "ok"),
    ("public", "tcp 192.0.1.0 80", "ok"),
    ("public", "tcp 192.167.255.255 80", "ok"),
    ("public", "tcp 192.169.0.0 80", "ok"),
    ("public", "tcp 198.17.255.255 80", "ok"),
    ("public", "tcp 198.20.0.0 80", "ok"),
    ("public", "tcp 223.255.255.255 80", "ok"),
    ("public", "tcp 2606:4700::1 443", "ok"),
    ("public", "udp 2606:4700::1 443", "ok"),
    ("public", "icmp 2606:4700::1", "ok"),
    ("public", "tcp 2001:200::1 443", "ok"),
    ("public", "tcp 2003::1 443", "ok"),
    ("public", "tcp 3ffe::1 443", "ok"),
    // Special ranges: their edges, every protocol.
    ("public", "tcp 10.0.0.0 80", "private"),
    ("public", "tcp 10.255.255.255 80", "private"),
    ("public", "udp 10.1.2.3 53", "private"),
    ("public", "icmp 10.1.2.3", "private"),
    ("public", "tcp 172.16.0.0 80", "private"),
    ("public", "tcp 172.31.255.255 80", "private"),
    ("public", "tcp 192.168.0.0 80", "private"),
    ("public", "tcp 192.168.255.255 80", "private"),
    ("public", "tcp 100.64.0.0 80", "carrier"),
    ("public", "udp 100.127.255.255 80", "carrier"),
    ("public", "tcp 127.0.0.1 80", "loopback"),
    ("public", "tcp 127.255.255.255 80", "loopback"),
    ("public", "tcp 169.254.0.1 80", "link-local"),
    ("public", "tcp 169.254.169.253 80", "link-local"),
    ("public", "tcp 169.254.169.254 80", "metadata"),
    ("public", "udp 169.254.169.254 53", "metadata"),
    ("public", "icmp 169.254.169.254", "metadata"),
    ("public", "tcp 169.254.170.2 80", "metadata"),
    ("private", "tcp 169.254.0.23 80", "metadata"),
    ("private", "tcp 169.254.42.42 80", "metadata"),
    ("private", "tcp fd00:42::42 80", "metadata"),
    ("public", "tcp 169.254.170.23 80", "metadata"),
    ("public", "tcp 100.100.100.200 80", "metadata"),
    ("public", "tcp 168.63.129.16 80", "metadata"),
    ("public", "tcp 192.0.0.192 80", "metadata"),
    ("public", "tcp 168.63.129.17 80", "ok"),
    ("public", "tcp 0.0.0.0 80", "unspecified"),
    ("public", "tcp 0.1.2.3 80", "unspecified"),
    ("public", "tcp 192.0.0.1 80", "reserved"),
    ("public", "tcp 192.88.99.1 80", "reserved"),
    ("public", "tcp 240.0.0.1 80", "reserved"),
    ("public", "tcp 192.0.2.1 80", "documentation"),
    ("public", "tcp 198.51.100.1 80", "documentation"),
    ("public", "tcp 203.0.113.1 80", "documentation"),
    ("public", "tcp 198.18.0.1 80", "benchmark"),
    ("public", "tcp 198.19.255.255 80", "benchmark"),
    ("public", "udp 224.0.0.251 5353", "multicast"),
    ("public", "udp 239.255.255.255 1", "multicast"),
    ("public", "udp 255.255.255.255 67", "broadcast"),
    ("public", "tcp :: 80", "unspecified"),
    ("public", "tcp ::1 80", "loopback"),
    ("public", "tcp fe80::1 80", "link-local"),
    ("public", "tcp febf:ffff::1 80", "link-local"),
    ("public", "tcp fc00::1 80", "private"),
    ("public", "tcp fdff::1 80", "private"),
    ("public", "icmp fd12::1", "private"),
    ("public", "tcp fd00:ec2::254 80", "metadata"),
    ("public", "tcp fd00:ec2::23 80", "metadata"),
    ("public", "tcp fd20:ce::254 80", "metadata"),
    ("public", "udp ff02::fb 5353", "multicast"),
    ("public", "tcp 2001:db8::1 80", "documentation"),
    ("public", "tcp 3fff::1 80", "documentation"),
    ("public", "tcp 2001:2::1 80", "benchmark"),
    ("public", "tcp 2001:1::1 80", "reserved"),
    ("public", "tcp 100::1 80", "reserved"),
    ("public", "tcp fec0::1 80", "reserved"),
    ("public", "tcp 4000::1 80", "reserved"),
    ("public", "tcp e000::1 80", "reserved"),
    ("public", "tcp 5f00::1 80", "reserved"),
    // IPv4 addresses in IPv6 ones, public or not.
    ("public", "tcp ::ffff:8.8.8.8 80", "embedded"),
    ("public", "tcp ::ffff:127.0.0.1 80", "embedded"),
    ("public", "tcp ::ffff:169.254.169.254 80", "embedded"),
    ("public", "tcp ::ffff:0:10.0.0.1 80", "embedded"),
    ("public", "tcp ::10.0.0.1 80", "embedded"),
    ("public", "tcp 64:ff9b::8.8.8.8 80", "embedded"),
    ("public", "tcp 64:ff9b::169.254.169.254 80", "embedded"),
    ("public", "tcp 64:ff9b:1::10.0.0.1 80", "embedded"),
    ("public", "tcp 2002:7f00:1::1 80", "embedded"),
    ("public", "tcp 2002:808:808::1 80", "embedded"),
    ("public", "tcp 2001::1 80", "embedded"),
    // Private addresses granted; nothing else with them.
    ("private", "tcp 10.0.0.1 22", "ok"),
    ("private", "udp 192.168.1.1 53", "ok"),
    ("private", "icmp 172.16.0.1", "ok"),
    ("private", "tcp 100.64.0.1 22", "ok"),
    ("private", "tcp 169.254.1.1 80", "ok"),
    ("private", "tcp fd12::1 22", "ok"),
    ("private", "tcp 8.8.8.8 53", "ok"),
    ("private", "tcp 169.254.169.254 80", "metadata"),
    ("private", "tcp 100.100.100.200 80", "metadata"),
    ("private", "tcp fd00:ec2::254 80", "metadata"),
    ("private", "tcp fe80::1 80", "link-local"),
    ("private", "tcp 127.0.0.1 80", "loopback"),
    ("private", "tcp host 80", "host"),
    ("private", "tcp ::ffff:10.0.0.1 80", "embedded"),
    ("private", "tcp 64:ff9b::10.0.0.1 80", "embedded"),
    ("private", "tcp 198.18.0.1 80", "benchmark"),
    ("private", "udp 224.0.0.1 1", "multicast"),
    // The host.
    ("public", "tcp host 80", "host"),
    ("public", "udp host 53", "host"),
    ("loopback", "tcp host 80", "ok"),
    ("loopback", "udp host 53", "ok"),
    ("loopback", "tcp 127.0.0.1 80", "loopback"),
    ("loopback", "tcp ::1 80", "loopback"),
    ("loopback", "tcp 10.0.0.1 80", "private"),
    ("loopback", "tcp 8.8.8.8 80", "ok"),
    ("loopback +a.test", "tcp host 80", "ok"),
    ("loopback +a.test", "tcp 8.8.8.8 80", "unlisted"),
    ("loopback -127.0.0.1:22", "tcp host 22", "-127.0.0.1/32:22"),
    ("loopback -127.0.0.1:22", "tcp host 80", "ok"),
    // A deny rule about the host holds for all of its addresses.
    (
        "loopback -127.0.0.1:22",
        "tcp own:2606:4700::1 22",
        "-127.0.0.1/32:22",
    ),
    (
        "loopback -127.0.0.1:22",
        "tcp own:192.168.1.2 22",
        "-127.0.0.1/32:22",
    ),
    ("loopback -::1", "tcp host 22", "-::1/128"),
    (
        "private -127.0.0.0/8",
        "tcp own:192.168.1.2 22",
        "-127.0.0.0/8",
    ),
    ("private -127.0.0.0/8", "tcp 192.168.1.2 22", "ok"),
    // Credentials that the host serves to itself are granted only by themselves.
    ("loopback", "tcp own:169.254.169.254 80", "host"),
    ("loopback private", "tcp own:169.254.170.2 80", "host"),
    (
        "loopback +169.254.169.254",
        "tcp own:169.254.169.254 80",
        "ok",
    ),
    ("+127.0.0.1", "tcp host 80", "host"),
    ("+127.0.0.0/8", "tcp 127.0.0.1 80", "loopback"),
    ("public", "tcp own:8.8.8.8 80", "host"),
    ("public", "tcp own:10.0.0.5 80", "host"),
    ("private", "tcp own:10.0.0.5 80", "ok"),
    ("private", "tcp own:8.8.8.8 80", "host"),
    ("private", "tcp own:2606:4700::1 80", "host"),
    ("private +8.8.8.8", "tcp own:10.0.0.5 80", "host"),
    ("loopback", "tcp own:2606:4700::1 80", "ok"),
    ("+8.8.8.8", "tcp own:8.8.8.8 80", "ok"),
    ("+8.8.8.8:443", "tcp own:8.8.8.8 80", "host"),
    ("+0.0.0.0/0", "tcp own:8.8.8.8 80", "host"),
    ("+10.0.0.0/8", "tcp own:10.0.0.5 80", "ok"),
    ("loopback -8.8.8.8", "tcp own:8.8.8.8 80", "-8.8.8.8/32"),
    // Allowed blocks: those, and nothing else.
    ("+8.8.8.0/24", "tcp 8.8.8.8 53", "ok"),
    ("+8.8.8.0/24", "icmp 8.8.8.8", "ok"),
    ("+8.8.8.0/24", "tcp 8.8.9.8 53", "unlisted"),
    ("+8.8.8.0/24", "udp 8.8.9.8 53", "unlisted"),
    ("+8.8.8.0/24", "icmp 8.8.9.8", "unlisted"),
    ("+8.8.8.0/24", "tcp 2606:4700::1 53", "unlisted"),
    ("+8.8.8.8", "tcp 8.8.8.8 53", "ok"),
    ("+8.8.8.8:53", "udp 8.8.8.8 53", "ok"),
    ("+8.8.8.8:53", "udp 8.8.8.8 443", "unlisted"),
    ("+8.8.8.8:53", "icmp 8.8.8.8", "unlisted"),
    ("+8.8.8.8:53,8000-8010", "tcp 8.8.8.8 8000", "ok"),
    ("+8.8.8.8:53,8000-8010", "tcp 8.8.8.8 8010", "ok"),
    ("+8.8.8.8:53,8000-8010", "tcp 8.8.8.8 8011", "unlisted"),
    ("+2606:4700::/32", "tcp 2606:4700::1 443", "ok"),
    ("+[2606:4700::/32]:443", "tcp 2606:4700::1 443", "ok"),
    ("+[2606:4700::/32]:443", "tcp 2606:4700::1 80", "unlisted"),
    ("+2606:4700::/32", "tcp 8.8.8.8 443", "unlisted"),
    ("+0.0.0.0/0", "tcp 8.8.8.8 443", "ok"),
    ("+0.0.0.0/0", "tcp 2606:4700::1 443", "unlisted"),
    ("+::/0", "tcp 2606:4700::1 443", "ok"),
    // A special range is granted by a rule inside it, not by a wider one.
    ("+10.0.0.0/8", "tcp 10.1.2.3 80", "ok"),
    ("+10.1.0.0/16", "tcp 10.1.2.3 80", "ok"),
    ("+10.1.0.0/16", "tcp 10.2.2.3 80", "private"),
    ("+10.1.0.0/16", "tcp 8.8.8.8 80", "unlisted"),
    ("+10.1.2.3:80", "tcp 10.1.2.3 22", "private"),
    ("+10.1.2.3:80", "icmp 10.1.2.3", "private"),
    ("+0.0.0.0/0", "tcp 10.1.2.3 80", "private"),
    ("+0.0.0.0/0", "tcp 169.254.169.254 80", "metadata"),
    ("+169.254.0.0/16", "tcp 169.254.1.1 80", "ok"),
    ("+169.254.0.0/16", "tcp 169.254.169.254 80", "metadata"),
    ("+169.254.169.254", "tcp 169.254.169.254 80", "ok"),
    ("+169.254.169.254:80", "tcp 169.254.169.254 443", "metadata"),
    ("+fd00::/8", "tcp fd12::1 80", "ok"),
    ("+fd00::/8", "tcp fd00:ec2::254 80", "metadata"),
    ("+fd00:ec2::254", "tcp fd00:ec2::254 80", "ok"),
    ("+198.18.0.0/15", "tcp 198.18.0.1 80", "ok"),
    ("+192.0.2.0/24", "tcp 192.0.2.1 80", "ok"),
    ("+100.64.0.0/10", "tcp 100.64.0.1 80", "ok"),
    ("+100.64.0.0/10", "tcp 100.100.100.200 80", "metadata"),
    ("private +8.8.8.8", "tcp 10.0.0.1 80", "unlisted"),
    ("private +a.test", "tcp 10.0.0.1 80 a.test", "ok"),
    // What no rule grants.
    ("+224.0.0.0/4", "udp 224.0.0.1 1", "multicast"),
    ("+255.255.255.255", "udp 255.255.255.255 1", "broadcast"),
    ("+0.0.0.0", "tcp 0.0.0.0 1", "unspecified"),
    ("+fe80::/10", "tcp fe80::1 80", "link-local"),
    ("+::1", "tcp ::1 80", "loopback"),
    ("+::ffff:0:0/96", "tcp ::ffff:8.8.8.8 80", "embedded"),
    ("+::ffff:127.0.0.1", "tcp ::ffff:127.0.0.1 80", "embedded"),
    ("+::/0", "tcp ::ffff:8.8.8.8 80", "embedded"),
    ("+::/0", "tcp 4000::1 80", "reserved"),
    ("+4000::/16", "tcp 4000::1 80", "reserved"),
    // An address that leads to another needs both.
    ("+64:ff9b::/96", "tcp 64:ff9b::8.8.8.8 80", "ok"),
    ("+64:ff9b::/96", "tcp 64:ff9b::10.0.0.1 80", "private"),
    (
        "+64:ff9b::/96",
        "tcp 64:ff9b::169.254.169.254 80",
        "metadata",
    ),
    ("+64:ff9b::/96", "tcp 64:ff9b::127.0.0.1 80", "loopback"),
    ("private +64:ff9b::/96", "tcp 64:ff9b::10.0.0.1 80", "ok"),
    (
        "+64:ff9b::/96 +10.0.0.0/8",
        "tcp 64:ff9b::10.0.0.1 80",
        "ok",
    ),
    ("+2002::/16", "tcp 2002:808:808::1 80", "ok"),
    ("+2002::/16", "tcp 2002:a00:1::1 80", "private"),
    (
        "+64:ff9b::/96 -8.8.8.8",
        "tcp 64:ff9b::8.8.8.8 80",
        "-8.8.8.8/32",
    ),
    (
        "+2002::/16 -8.8.8.8",
        "tcp 2002:808:808::1 80",
        "-8.8.8.8/32",
    ),
    (
        "+2001::/32 -8.8.8.8",
        "tcp 2001::f7f7:f7f7 80",
        "-8.8.8.8/32",
    ),
    // Deny beats allow.
    ("public -8.8.8.0/24", "tcp 8.8.8.8 53", "-8.8.8.0/24"),
    ("public -8.8.8.0/24", "udp 8.8.8.8 53", "-8.8.8.0/24"),
    ("public -8.8.8.0/24", "icmp 8.8.8.8", "-8.8.8.0/24"),
    ("public -8.8.8.0/24", "tcp 8.8.9.8 53", "ok"),
    ("public -8.8.8.8:25", "tcp 8.8.8.8 25", "-8.8.8.8/32:25"),
    ("public -8.8.8.8:25", "tcp 8.8.8.8 26", "ok"),
    ("public -8.8.8.8:25", "icmp 8.8.8.8", "ok"),
    ("public -0.0.0.0/0:25", "tcp 9.9.9.9 25", "-0.0.0.0/0:25"),
    ("public -::/0", "tcp 2606:4700::1 443", "-::/0"),
    ("public -::/0", "tcp 8.8.8.8 443", "ok"),
    ("+8.8.8.8 -8.8.0.0/16", "tcp 8.8.8.8 53", "-8.8.0.0/16"),
    ("private -10.0.0.0/8", "tcp 10.0.0.1 80", "-10.0.0.0/8"),
    ("private -10.0.0.0/8", "tcp 192.168.0.1 80", "ok"),
    ("+a.test -8.8.8.8", "tcp 8.8.8.8 53 a.test", "-8.8.8.8/32"),
    // Names: the address counts for the names it was given for.
    ("+a.test", "tcp 8.8.8.8 443 a.test", "ok"),
    ("+a.test", "udp 8.8.8.8 443 a.test", "ok"),
    ("+a.test", "icmp 8.8.8.8 a.test", "ok"),
    ("+a.test", "tcp 2606:4700::1 443 a.test", "ok"),
    ("+a.test", "tcp 8.8.8.8 443", "unlisted"),
    ("+a.test", "icmp 8.8.8.8", "unlisted"),
    ("+a.test", "udp 8.8.8.8 53", "unlisted"),
    ("+a.test", "tcp 8.8.8.8 443 b.test", "unlisted"),
    ("+a.test", "tcp 8.8.8.8 443 b.test a.test", "ok"),
    ("+a.test:443", "tcp 8.8.8.8 443 a.test", "ok"),
    ("+a.test:443", "tcp 8.8.8.8 80 a.test", "unlisted"),
    ("+a.test:443", "icmp 8.8.8.8 a.test", "unlisted"),
    ("+A.Test", "tcp 8.8.8.8 443 a.test", "ok"),
    ("+*.a.test", "tcp 8.8.8.8 443 x.a.test", "ok"),
    ("+*.a.test", "tcp 8.8.8.8 443 y.x.a.test", "ok"),
    ("+*.a.test", "tcp 8.8.8.8 443 a.test", "unlisted"),
    ("+*.a.test", "tcp 8.8.8.8 443 xa.test", "unlisted"),
    ("+*.a.test:443", "tcp 8.8.8.8 80 x.a.test", "unlisted"),
    ("+a.test", "tcp 10.0.0.1 443 a.test", "private"),
    ("+a.test", "tcp 169.254.169.254 80 a.test", "metadata"),
    ("+a.test", "tcp 127.0.0.1 80 a.test", "loopback"),
    ("+a.test", "tcp own:8.8.8.8 80 a.test", "host"),
    ("+a.test", "tcp host 80 a.test", "host"),
    ("+a.test +9.9.9.9", "tcp 9.9.9.9 443", "ok"),
    ("+a.test +9.9.9.9", "tcp 8.8.8.8 443 a.test", "ok"),
    ("+a.test +10.0.0.1", "tcp 10.0.0.1 443 a.test", "ok"),
];

#[test]
fn every_row_of_the_table_is_decided_as_it_says() {
    let wrong: Vec<String> = ROWS
        .iter()
        .filter_map(|&(policy, to, expected)| {
            let decided = decide(policy, to);
            (decided != expected).then(|| format!("{policy:?}, {to:?}: {decided}, not {expected}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(ROWS.len() >= 150, "{}", ROWS.len());
}

#[test]
fn names_are_decided_by_host_rules_alone() {
    for (words, name, may) in [
        ("", "a.test", false),
        ("public", "a.test", true),
        ("private", "a.test", true),
        ("public -0.0.0.0/0", "a.test", true),
        ("+a.test", "a.test", true),
        ("+a.test:443", "a.test", true),
        ("+a.test", "b.test", false),
        ("+a.test", "x.a.test", false),
        ("+*.a.test", "x.a.test", true),
        ("+*.a.test", "a.test", false),
        ("+a.test", "_http._tcp.a.test", true),
        ("+a.test", "_http._tcp.b.test", false),
        ("+a.test", "_a.test", false),
        ("+a.test", "x._tcp.a.test", false),
        ("+8.8.8.8", "a.test", false),
        ("+a.test", "", false),
        ("public", "", true),
        ("+a.test", "_", false),
    ] {
        let decided = policy(words).decide_name(name).is_ok();
        assert_eq!(decided, may, "{words:?}, {name:?}");
    }
}

#[test]
fn rules_are_printed_as_they_are_written() {
    for rule in [
        "10.0.0.0/8",
        "10.1.2.3/32:22",
        "10.0.0.0/8:80,443,8000-8099",
        "2001:db8::/32",
        "[2001:db8::/32]:443",
        "::/0",
    ] {
        assert_eq!(rule.parse::<CidrRule>().unwrap().to_string(), rule);
    }
    for rule in ["pypi.org", "*.debian.org", "github.com:22,443"] {
        assert_eq!(rule.parse::<HostRule>().unwrap().to_string(), rule);
    }
    assert_eq!("Host.".parse::<HostRule>().unwrap().to_string(), "host");
    assert_eq!("::1".parse::<CidrRule>().unwrap().to_string(), "::1/128");
}

#[test]
fn rules_that_say_nothing_or_too_much_are_errors() {
    for rule in [
        "",
        "10.0.0.0/33",
        "10.0.0.1/8",
        "10.0.0.0/",
        "10.0.0.0/+8",
        "10.0.0/8",
        "10.0.0.0/8:",
        "10.0.0.0/8:0",
        "10.0.0.0/8:70000",
        "10.0.0.0/8:9-8",
        "10.0.0.0/8:http",
        "::/129",
        "[::/0",
        "[::/0]x",
        "[::/0]:",
        "1.2.3.4:80:90",
        "a.test",
    ] {
        assert!(rule.parse::<CidrRule>().is_err(), "{rule:?}");
    }
    for rule in [
        "", "*", "*.", ".", "a..b", ".a", "a b", "a/b", "a:0", "a:", "8.8.8.8", "*.*.a", "a*.b",
        "-:x", "http://a",
    ] {
        assert!(rule.parse::<HostRule>().is_err(), "{rule:?}");
    }
    let many = vec!["1"; MAX_PORT_RANGES + 1].join(",");
    assert!(format!("a.test:{many}").parse::<HostRule>().is_err());
}

#[test]
fn every_block_holds_its_own_edges() {
    for text in ["0.0.0.0", "255.255.255.255", "::", "ffff::ffff"] {
        // The last entry of each family is everything: no address is without a block.
        block(text.parse().unwrap());
    }
}
