//! Which addresses are the public internet's, for callers that pull what strangers name.
//!
//! A name may lead anywhere, and elsewhere the next time it is looked up. So the check is made where the addresses are
//! found that are then connected to ([`PublicOnly`] is the client's resolver), for each request: registry, mirror, token
//! server and every redirect.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

use super::address::in_network;

/// IPv4 networks that are not globally reachable (IANA's special-purpose registry), and what clouds put elsewhere.
const NOT_PUBLIC_V4: [([u8; 4], u32); 16] = [
    ([0, 0, 0, 0], 8),
    ([10, 0, 0, 0], 8),
    ([100, 64, 0, 0], 10),
    ([127, 0, 0, 0], 8),
    // Azure's platform services, at an address like any other.
    ([168, 63, 129, 16], 32),
    // Link-local; most clouds' metadata.
    ([169, 254, 0, 0], 16),
    ([172, 16, 0, 0], 12),
    ([192, 0, 0, 0], 24),
    ([192, 0, 2, 0], 24),
    ([192, 88, 99, 0], 24),
    ([192, 168, 0, 0], 16),
    ([198, 18, 0, 0], 15),
    ([198, 51, 100, 0], 24),
    ([203, 0, 113, 0], 24),
    ([224, 0, 0, 0], 4),
    ([240, 0, 0, 0], 4),
];
/// What of 2000::/3, the only IPv6 network given out so far, is for other uses: protocols (Teredo among them),
/// documentation, 6to4.
const NOT_PUBLIC_V6: [(Ipv6Addr, u32); 4] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];
const GLOBAL_V6: Ipv6Addr = Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0);
/// IPv4 as hosts without it see it (RFC 6052).
const NAT64: Ipv6Addr = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0);

/// Whether an address is one of the public internet.
pub(super) fn is_public(ip: IpAddr) -> bool {
    // An IPv4 address in IPv6's clothes (::ffff:a.b.c.d) is the former.
    match ip.to_canonical() {
        IpAddr::V4(ip) => !NOT_PUBLIC_V4.iter().any(|(network, length)| {
            in_network(ip.into(), Ipv4Addr::from(*network).into(), *length)
        }),
        IpAddr::V6(v6) if in_network(v6.into(), NAT64.into(), 96) => {
            let [.., a, b, c, d] = v6.octets();
            is_public(Ipv4Addr::new(a, b, c, d).into())
        }
        IpAddr::V6(v6) => {
            in_network(v6.into(), GLOBAL_V6.into(), 3)
                && !NOT_PUBLIC_V6
                    .iter()
                    .any(|(network, length)| in_network(v6.into(), (*network).into(), *length))
        }
    }
}

/// Looks names up, and refuses those that lead anywhere but to the public internet, be it among other addresses.
#[derive(Debug, Default)]
pub(super) struct PublicOnly(DefaultResolver);

impl Resolver for PublicOnly {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.0.resolve(uri, config, timeout)?;
        match found.iter().find(|address| !is_public(address.ip())) {
            None => Ok(found),
            Some(address) => {
                let why = format!(
                    "refused, as {} is not an address of the public internet",
                    address.ip()
                );
                Err(ureq::Error::Other(why.into()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_and_special_addresses_are_not_public_in_any_notation() {
        for ip in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            // Alibaba's metadata.
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.254",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            // Oracle's metadata.
            "192.0.0.192",
            "192.0.2.1",
            "192.168.255.255",
            "198.19.0.1",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "255.255.255.255",
        ] {
            let v4: Ipv4Addr = ip.parse().unwrap();
            let [a, b, c, d] = v4.octets().map(u16::from);
            let embedded = |prefix: [u16; 6]| {
                let [p, q, r, s, t, u] = prefix;
                IpAddr::from([p, q, r, s, t, u, a << 8 | b, c << 8 | d])
            };
            for ip in [
                v4.into(),
                v4.to_ipv6_mapped().into(),
                embedded([0; 6]),
                embedded([0x64, 0xff9b, 0, 0, 0, 0]),
                IpAddr::from([0x2002, a << 8 | b, c << 8 | d, 0, 0, 0, 0, 1]),
            ] {
                assert!(!is_public(ip), "{ip}");
            }
        }
        for ip in [
            "::",
            "::1",
            "::8.8.8.8",
            "64:ff9b:1::808:808",
            "100::1",
            "2001::1",
            "2001:1ff::1",
            "2001:db8::1",
            "2002:808:808::1",
            "3fff::1",
            "fd00:ec2::254",
            "fc00::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!is_public(ip.parse().unwrap()), "{ip}");
        }
    }

    #[test]
    fn what_lies_beside_those_is_public() {
        for ip in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "168.63.129.17",
            "169.253.255.255",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.167.255.255",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "::ffff:8.8.8.8",
            "64:ff9b::808:808",
            "2001:200::1",
            "2600:1f18::1",
            "2a00:1450::1",
        ] {
            assert!(is_public(ip.parse().unwrap()), "{ip}");
        }
    }
}
