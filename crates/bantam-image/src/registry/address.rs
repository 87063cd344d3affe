//! Addresses of servers, and what may be sent where.

use std::fmt;
use std::net::IpAddr;

use ureq::http::Uri;

/// Scheme, host and port of a URL.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Address {
    /// `http` or `https`.
    pub(super) scheme: String,
    /// An IPv6 address stands in brackets.
    pub(super) host: String,
    pub(super) port: u16,
}

impl Address {
    pub(super) fn parse(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let scheme = uri.scheme_str()?;
        let default_port = match scheme {
            "http" => 80,
            "https" => 443,
            _ => return None,
        };
        // A port that is no number is no port to http::Uri.
        let authority = uri.authority()?.as_str();
        if authority.contains('@') || uri.host()?.is_empty() {
            return None;
        }
        let port = match authority.strip_prefix(uri.host()?)? {
            "" => default_port,
            port => port.strip_prefix(':')?.parse().ok()?,
        };
        Some(Self {
            scheme: scheme.to_owned(),
            host: uri.host()?.to_ascii_lowercase(),
            port,
        })
    }

    /// The host without the brackets of an IPv6 address.
    pub(super) fn bare_host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    /// `HOST[:PORT]`, without a port that goes without saying.
    pub(super) fn authority(&self) -> String {
        match (self.scheme.as_str(), self.port) {
            ("http", 80) | ("https", 443) => self.host.clone(),
            _ => format!("{}:{}", self.host, self.port),
        }
    }

    /// Whether secrets may be sent there.
    pub(super) fn is_private(&self) -> bool {
        self.scheme == "https" || is_loopback(&self.host)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.authority())
    }
}

/// Whether `HOST[:PORT]` is this machine.
pub(super) fn is_loopback(registry: &str) -> bool {
    let host = match registry.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => registry.split(':').next().unwrap_or(""),
    };
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Whether an address lies in a network, given by its first address and the length of its prefix in bits.
pub(super) fn in_network(ip: IpAddr, network: IpAddr, length: u32) -> bool {
    let (ip, network, width) = match (ip.to_canonical(), network) {
        (IpAddr::V4(ip), IpAddr::V4(network)) => {
            (u128::from(ip.to_bits()), u128::from(network.to_bits()), 32)
        }
        (IpAddr::V6(ip), IpAddr::V6(network)) => (ip.to_bits(), network.to_bits(), 128),
        _ => return false,
    };
    match width - length.min(width) {
        _ if length > width => false,
        128 => true,
        host_bits => ip >> host_bits == network >> host_bits,
    }
}

/// A redirect's target (RFC 3986 §5).
pub(super) fn resolve(base: &str, location: &str) -> Option<String> {
    let url = if location.starts_with("http://") || location.starts_with("https://") {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{}://{rest}", base.split_once("://")?.0)
    } else if location.starts_with('/') {
        let (scheme, rest) = base.split_once("://")?;
        format!(
            "{scheme}://{}{location}",
            rest.split(['/', '?', '#']).next()?
        )
    } else {
        let (scheme, rest) = base.split_once("://")?;
        let (host, path) = rest.split(['?', '#']).next()?.split_once('/')?;
        let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
        let end = location.find(['?', '#']).unwrap_or(location.len());
        let (relative, query) = location.split_at(end);
        let path = without_dots(&format!("{dir}/{relative}"));
        format!("{scheme}://{host}/{path}{query}")
    };
    Address::parse(&url)?;
    Some(url)
}

/// Takes `.` and `..` out of a path (RFC 3986 §5.2.4). The result has no slash in front.
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    for segment in path.trim_start_matches('/').split('/') {
        match segment {
            "." => {}
            ".." => {
                kept.pop();
            }
            segment => kept.push(segment),
        }
    }
    kept.join("/")
}

/// Appends a query to a URL, names and values encoded.
pub(super) fn with_query(url: &str, pairs: &[(&str, &str)]) -> String {
    let url = url.split('#').next().unwrap_or("");
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}{}", form(pairs))
}

/// `application/x-www-form-urlencoded`.
pub(super) fn form(pairs: &[(&str, &str)]) -> String {
    let pairs: Vec<String> = pairs
        .iter()
        .map(|(name, value)| format!("{}={}", encode(name), encode(value)))
        .collect();
    pairs.join("&")
}

fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for host in [
            "localhost",
            "localhost:5000",
            "127.0.0.1:1",
            "127.9.9.9",
            "[::1]:5000",
            "[::1]",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "docker.io",
            "10.0.0.1:5000",
            "localhost.example.com",
            "127.0.0.1.example.com",
            "[::2]:1",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn redirects_resolve_against_where_they_came_from() {
        let base = "https://r.io/v2/a/blobs/x?y=1";
        for (location, want) in [
            ("https://cdn.io/z", Some("https://cdn.io/z")),
            ("//cdn.io/z", Some("https://cdn.io/z")),
            ("/z?k=v", Some("https://r.io/z?k=v")),
            ("z", Some("https://r.io/v2/a/blobs/z")),
            ("../z?../k", Some("https://r.io/v2/a/z?../k")),
            ("./../../../../z", Some("https://r.io/z")),
            ("ht tp://x", None),
            ("https://", None),
            ("https://u:p@cdn.io/", None),
        ] {
            assert_eq!(resolve(base, location).as_deref(), want, "{location}");
        }
    }

    #[test]
    fn another_port_is_another_address() {
        let address = |url| Address::parse(url).unwrap();
        assert_ne!(address("https://r.io/x"), address("https://r.io:8443/x"));
        assert_ne!(address("https://r.io/x"), address("http://r.io/x"));
        assert_ne!(address("https://r.io/x"), address("https://cdn.r.io/x"));
        assert_eq!(address("https://r.io/x"), address("https://R.io:443/y?z"));
        assert_eq!(address("http://[::1]:5/x").authority(), "[::1]:5");
        for bad in [
            "ftp://r.io",
            "r.io",
            "https://u@r.io",
            "https://r.io:x/",
            "/x",
        ] {
            assert_eq!(Address::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn queries_are_encoded() {
        let url = with_query(
            "https://a/t?x=1#f",
            &[("scope", "repository:a/b:pull"), ("é", "a b&")],
        );
        assert_eq!(
            url,
            "https://a/t?x=1&scope=repository%3Aa%2Fb%3Apull&%C3%A9=a%20b%26"
        );
    }
}
