//! Which servers to ask.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::Path;
use std::time::SystemTime;

use crate::MAX_DNS_SERVERS;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Bytes of it that are read.
const MAX_FILE: u64 = 64 << 10;
const PORT: u16 = 53;

/// Name servers, given or the host's.
pub(crate) enum Servers {
    Given(Vec<SocketAddr>),
    /// Read again when the file changes: laptops move.
    Host {
        changed: Option<SystemTime>,
        list: Vec<SocketAddr>,
    },
}

impl Servers {
    pub(crate) fn new(given: &[SocketAddr]) -> Servers {
        if given.is_empty() {
            return Servers::Host {
                changed: None,
                list: Vec::new(),
            };
        }
        Servers::Given(given.iter().copied().take(MAX_DNS_SERVERS).collect())
    }

    pub(crate) fn current(&mut self) -> &[SocketAddr] {
        match self {
            Servers::Given(list) => list,
            Servers::Host { changed, list } => {
                let now = std::fs::metadata(RESOLV_CONF).and_then(|file| file.modified());
                let now = now.ok();
                if list.is_empty() || now != *changed {
                    *list = parse(&read(Path::new(RESOLV_CONF)));
                    *changed = now;
                }
                list
            }
        }
    }
}

/// The file's text; nothing when it cannot be read, which resolv.conf(5) takes for an empty file.
fn read(path: &Path) -> String {
    use std::io::Read;
    let mut text = Vec::new();
    if let Ok(file) = std::fs::File::open(path)
        && let Err(error) = file.take(MAX_FILE).read_to_end(&mut text)
    {
        tracing::warn!(path = %path.display(), %error, "reading name servers");
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// The `nameserver` lines of resolv.conf(5); without any, the host itself.
fn parse(text: &str) -> Vec<SocketAddr> {
    let mut servers: Vec<SocketAddr> = text
        .lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            (words.next() == Some("nameserver"))
                .then(|| words.next())
                .flatten()
        })
        .filter_map(server)
        .take(MAX_DNS_SERVERS)
        .collect();
    if servers.is_empty() {
        servers.push((Ipv4Addr::LOCALHOST, PORT).into());
    }
    servers
}

/// An address, an IPv6 one with the number or the name of an interface after `%`.
fn server(word: &str) -> Option<SocketAddr> {
    if let Some((address, scope)) = word.split_once('%') {
        let address: Ipv6Addr = address.parse().ok()?;
        let scope = scope.parse().ok().or_else(|| interface(scope))?;
        return Some(SocketAddrV6::new(address, PORT, 0, scope).into());
    }
    let address: IpAddr = word.parse().ok()?;
    Some((address, PORT).into())
}

/// An interface's number. Only Linux has it in a file; elsewhere such a server is skipped.
fn interface(name: &str) -> Option<u32> {
    if name.is_empty() || name.contains('/') || name.starts_with('.') {
        return None;
    }
    read(Path::new(&format!("/sys/class/net/{name}/ifindex")))
        .trim()
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Vec<String> {
        parse(text).iter().map(SocketAddr::to_string).collect()
    }

    #[test]
    fn name_servers_are_read_as_the_host_reads_them() {
        assert_eq!(
            parsed(
                "# c\nnameserver 127.0.0.53\noptions edns0\n  nameserver\t10.0.0.1  # x\n\
                 nameserver fe80::1%7\nnameserver 9.9.9.9\nnameservers 1.1.1.1\n"
            ),
            ["127.0.0.53:53", "10.0.0.1:53", "[fe80::1%7]:53"]
        );
        assert_eq!(parsed(""), ["127.0.0.1:53"]);
        assert_eq!(parsed("nameserver x\nnameserver\n"), ["127.0.0.1:53"]);
        assert_eq!(parsed("nameserver fe80::1%../x"), ["127.0.0.1:53"]);
    }
}
