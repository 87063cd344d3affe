//! A machine's network, as whoever makes the machine describes it.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use bantam_net::{CidrRule, Config, HOST_NAMES, HostRule, Limits, Policy, PortForward, Protocol};
use bantam_protocol::GuestNetwork;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

use crate::Error;

/// Most search domains of the host that the guest is told, as in resolv.conf(5) of old.
const MAX_SEARCH: usize = 6;

/// Bytes of the host's `resolv.conf` that are read.
const MAX_RESOLV_CONF: u64 = 64 << 10;

/// A machine's network card and where its packets may go. A machine has no network unless
/// [`MachineBuilder::network`](crate::MachineBuilder::network) gives it one.
///
/// ```
/// use bantam::NetworkConfig;
///
/// let network = NetworkConfig::public()
///     .allow_host("pypi.org:443")?
///     .allow_host("*.pythonhosted.org:443")?
///     .publish("8080:80")?;
/// # Ok::<(), bantam::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkConfig {
    /// Where packets may go.
    #[serde(with = "PolicyRecord")]
    pub policy: Policy,
    /// Name servers to ask, at most three; when empty, the host's own.
    #[serde(default)]
    pub dns_servers: Vec<SocketAddr>,
    /// Domains in which the guest looks up names without a dot; when there are neither these nor
    /// name servers, the host's own.
    #[serde(default)]
    pub search: Vec<String>,
    /// Ports of the host that lead into the machine.
    #[serde(default, with = "ports")]
    pub ports: Vec<PortForward>,
}

impl NetworkConfig {
    /// Public addresses may be reached, and nothing else.
    #[must_use]
    pub fn public() -> Self {
        Self::new(Policy::public())
    }

    /// Nothing may be reached; for ports that lead into the machine.
    #[must_use]
    pub fn isolated() -> Self {
        Self::new(Policy::off())
    }

    /// A network under `policy`.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            dns_servers: Vec::new(),
            search: Vec::new(),
            ports: Vec::new(),
        }
    }

    /// Private, carrier and IPv4 link-local addresses may be reached as well.
    #[must_use]
    pub fn allow_private(mut self) -> Self {
        self.policy.enabled = true;
        self.policy.allow_private = true;
        self
    }

    /// Services on the host may be reached: by the name `host.bantam.internal` those on its
    /// 127.0.0.1, and those on its other addresses.
    #[must_use]
    pub fn allow_host_loopback(mut self) -> Self {
        self.policy.enabled = true;
        self.policy.allow_host_loopback = true;
        self
    }

    /// The addresses of a name may be reached: `NAME[:PORTS]`, or `*.NAME[:PORTS]` for all names
    /// below it. Once there is such a rule or one for addresses, nothing else may be reached.
    ///
    /// # Errors
    /// [`Error::Network`] for a rule that cannot be understood.
    pub fn allow_host(mut self, rule: &str) -> Result<Self, Error> {
        self.policy.enabled = true;
        self.policy.allow_hosts.push(rule.parse()?);
        Ok(self)
    }

    /// Addresses may be reached: `CIDR[:PORTS]`, `[CIDR]:PORTS` for IPv6. A rule that lies within
    /// a private range grants that part of it.
    ///
    /// # Errors
    /// [`Error::Network`] for a rule that cannot be understood.
    pub fn allow_cidr(mut self, rule: &str) -> Result<Self, Error> {
        self.policy.enabled = true;
        self.policy.allow_cidrs.push(rule.parse()?);
        Ok(self)
    }

    /// Addresses may not be reached, whatever else is said.
    ///
    /// # Errors
    /// [`Error::Network`] for a rule that cannot be understood.
    pub fn deny_cidr(mut self, rule: &str) -> Result<Self, Error> {
        self.policy.deny_cidrs.push(rule.parse()?);
        Ok(self)
    }

    /// Asks this name server, at `ADDRESS` or `ADDRESS:PORT`, instead of the host's.
    ///
    /// # Errors
    /// [`Error::Network`] if it is no address.
    pub fn dns_server(mut self, server: &str) -> Result<Self, Error> {
        let address = server
            .parse::<IpAddr>()
            .map(|address| SocketAddr::new(address, 53))
            .or_else(|_| server.parse::<SocketAddr>());
        let address = address.map_err(|_| wrong(server, "it is not an address"))?;
        self.dns_servers.push(address);
        Ok(self)
    }

    /// Looks up names without a dot in this domain.
    ///
    /// # Errors
    /// [`Error::Network`] if it is no domain.
    pub fn search(mut self, domain: &str) -> Result<Self, Error> {
        if !is_domain(domain) {
            return Err(wrong(domain, "it is not a domain"));
        }
        self.search.push(domain.to_owned());
        Ok(self)
    }

    /// Leads ports of the host into the machine: `[ADDRESS:]HOST:GUEST[/udp]`, where `HOST` and
    /// `GUEST` are ports or ranges of the same length. The address is 127.0.0.1 unless given.
    ///
    /// # Errors
    /// [`Error::Network`] if it cannot be understood.
    pub fn publish(mut self, ports: &str) -> Result<Self, Error> {
        self.ports.extend(parse_ports(ports)?);
        Ok(self)
    }

    /// Leads all ports published so far to 127.0.0.1 in the guest, for servers that listen there
    /// only.
    #[must_use]
    pub fn publish_to_guest_loopback(mut self) -> Self {
        for port in &mut self.ports {
            port.guest_loopback = true;
        }
        self
    }

    /// The published ports as they are written: `127.0.0.1:8080:80/tcp`.
    #[must_use]
    pub fn port_list(&self) -> Vec<String> {
        self.ports.iter().map(published).collect()
    }

    /// What the machine is made with: a card with an address of its own, so that what guests derive
    /// from it differs.
    pub(crate) fn config(&self) -> Config {
        let mut config = Config {
            policy: self.policy.clone(),
            dns_servers: self.dns_servers.clone(),
            ports: self.ports.clone(),
            limits: limits_for(descriptor_limit()),
            ..Config::default()
        };
        let mut mac = config.addresses.guest_mac;
        // Locally administered, for one machine. So few bytes come whole; the fallback works, too.
        if getrandom(&mut mac[1..], GetRandomFlags::empty()).is_ok() {
            config.addresses.guest_mac = mac;
        }
        config
    }

    /// What the guest is told.
    pub(crate) fn guest(&self, config: &Config) -> GuestNetwork {
        let addresses = &config.addresses;
        let gateway = IpAddr::from(addresses.gateway_v4);
        // The host's domains are no business of a machine that asks another server, or none.
        let of_the_host = self.dns_servers.is_empty() && self.policy.enabled;
        let search = match self.search.is_empty() && of_the_host {
            true => host_search(),
            false => self.search.clone(),
        };
        // Programs that try one address only must get the one that most servers listen on.
        let hosts = HOST_NAMES.iter().map(|&name| (gateway, name.to_owned()));
        GuestNetwork {
            addresses: vec![
                (addresses.guest_v4.into(), addresses.prefix_v4),
                (addresses.guest_v6.into(), addresses.prefix_v6),
            ],
            gateways: vec![gateway, addresses.gateway_v6.into()],
            name_servers: vec![gateway],
            search,
            hosts: match self.policy.allow_host_loopback {
                true => hosts.collect(),
                false => Vec::new(),
            },
            route_loopback: self.ports.iter().any(|port| port.guest_loopback),
        }
    }
}

/// Allows this process as many descriptors as it may allow itself.
///
/// Each connection of a machine takes one, in the process that has the machine. The usual limit of
/// 1024 is for programs that cannot handle more (select(2)); with it one machine gets 256
/// connections rather than 4096, so that what else the process does goes on. For a program with
/// machines of its own, before it makes the first.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // With the lower limit fewer connections are possible.
    let _ = setrlimit(Resource::Nofile, raised);
}

fn descriptor_limit() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    })
}

/// What one machine may have when its process may have so many descriptors.
fn limits_for(descriptors: usize) -> Limits {
    let most = Limits::default();
    let share = |most: usize, part: usize| most.min(descriptors / part).max(1);
    Limits {
        tcp_flows: share(most.tcp_flows, 4),
        tcp_connecting: share(most.tcp_connecting, 8),
        datagram_flows: share(most.datagram_flows, 16),
        dns_queries: share(most.dns_queries, 32),
    }
}

fn wrong(rule: &str, reason: &'static str) -> Error {
    Error::Network(bantam_net::Error::Rule {
        rule: rule.to_owned(),
        reason,
    })
}

/// Whether `text` may stand in a guest's resolv.conf as a domain.
fn is_domain(text: &str) -> bool {
    let name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !text.is_empty() && text.len() <= bantam_net::MAX_NAME && text.bytes().all(name)
}

/// The search domains of the host.
fn host_search() -> Vec<String> {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open("/etc/resolv.conf") {
        // What cannot be read is taken for empty, as resolv.conf(5) says.
        let _ = file.take(MAX_RESOLV_CONF).read_to_end(&mut bytes);
    }
    parse_search(&String::from_utf8_lossy(&bytes))
}

/// The domains in the last `search` or `domain` line.
fn parse_search(resolv_conf: &str) -> Vec<String> {
    let words =
        |line: &'_ str| -> Vec<String> { line.split_whitespace().map(Into::into).collect() };
    let mut last = resolv_conf
        .lines()
        .map(words)
        .rfind(|words| {
            words
                .first()
                .is_some_and(|word| word == "search" || word == "domain")
        })
        .unwrap_or_default();
    last.retain(|word| is_domain(word) && word != ".");
    last.into_iter().skip(1).take(MAX_SEARCH).collect()
}

fn parse_ports(text: &str) -> Result<Vec<PortForward>, Error> {
    const FORM: &str =
        "it is not like 8080:80, 127.0.0.1:8080:80, 8000-8009:8000-8009 or 53:53/udp";
    let malformed = || wrong(text, FORM);
    let (rest, protocol) = match text.rsplit_once('/') {
        None => (text, Protocol::Tcp),
        Some((rest, "tcp")) => (rest, Protocol::Tcp),
        Some((rest, "udp")) => (rest, Protocol::Udp),
        Some(_) => return Err(malformed()),
    };
    let (rest, guest) = rest.rsplit_once(':').ok_or_else(malformed)?;
    let (address, host) = match rest.rsplit_once(':') {
        None => (Ipv4Addr::LOCALHOST.into(), rest),
        Some((address, host)) => {
            let bare = address.strip_prefix('[').and_then(|a| a.strip_suffix(']'));
            let address = bare.unwrap_or(address).parse().map_err(|_| malformed())?;
            (address, host)
        }
    };
    let host = range(host).ok_or_else(malformed)?;
    let guest = range(guest)
        .filter(|guest| guest.0 > 0)
        .ok_or_else(malformed)?;
    if host.1 - host.0 != guest.1 - guest.0 {
        return Err(wrong(text, "its ranges are of different lengths"));
    }
    if host.0 == 0 && host.1 > 0 {
        return Err(malformed());
    }
    let pairs = (host.0..=host.1).zip(guest.0..=guest.1);
    Ok(pairs
        .map(|(host, guest_port)| PortForward {
            protocol,
            listen: SocketAddr::new(address, host),
            guest_port,
            guest_loopback: false,
        })
        .collect())
}

/// A port as [`parse_ports`] reads it.
fn published(port: &PortForward) -> String {
    let protocol = match port.protocol {
        Protocol::Udp => "udp",
        _ => "tcp",
    };
    format!("{}:{}/{protocol}", port.listen, port.guest_port)
}

/// `PORT` or `FIRST-LAST`.
fn range(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| -> Option<u16> {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse().ok())?
    };
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then_some((first, last))
}

/// A policy in a record: its rules as they are written.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Policy")]
struct PolicyRecord {
    #[serde(default)]
    enabled: bool,
    #[serde(default)]
    allow_private: bool,
    #[serde(default)]
    allow_host_loopback: bool,
    #[serde(default, with = "text")]
    allow_hosts: Vec<HostRule>,
    #[serde(default, with = "text")]
    allow_cidrs: Vec<CidrRule>,
    #[serde(default, with = "text")]
    deny_cidrs: Vec<CidrRule>,
}

/// Values by how they are written.
mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<T: Display, S: Serializer>(
        values: &[T],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(ToString::to_string))
    }

    pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        Vec::<String>::deserialize(deserializer)?
            .iter()
            .map(|text| text.parse().map_err(de::Error::custom))
            .collect()
    }
}

/// Ports by how they are published.
mod ports {
    use bantam_net::PortForward;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    use super::{parse_ports, published};

    #[derive(Serialize, Deserialize)]
    struct Record {
        publish: String,
        #[serde(default)]
        guest_loopback: bool,
    }

    pub(super) fn serialize<S: Serializer>(
        ports: &[PortForward],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(ports.iter().map(|port| Record {
            publish: published(port),
            guest_loopback: port.guest_loopback,
        }))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<PortForward>, D::Error> {
        let mut ports = Vec::new();
        for record in Vec::<Record>::deserialize(deserializer)? {
            let parsed = parse_ports(&record.publish).map_err(de::Error::custom)?;
            ports.extend(parsed.into_iter().map(|port| PortForward {
                guest_loopback: record.guest_loopback,
                ..port
            }));
        }
        Ok(ports)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_comes_back_from_its_record() {
        let network = NetworkConfig::public()
            .allow_private()
            .allow_host_loopback()
            .allow_host("*.example.org:443,8000-8099")
            .and_then(|network| network.allow_cidr("[2001:db8::/32]:80"))
            .and_then(|network| network.deny_cidr("10.0.0.0/8"))
            .and_then(|network| network.dns_server("192.0.2.1"))
            .and_then(|network| network.dns_server("[2001:db8::53]:5353"))
            .and_then(|network| network.search("example.org"))
            .and_then(|network| network.publish("[::1]:8080-8082:80-82"))
            .and_then(|network| network.publish("0.0.0.0:0:53/udp"))
            .unwrap();
        for network in [
            NetworkConfig::isolated(),
            network.clone(),
            network.publish_to_guest_loopback(),
        ] {
            let text = serde_json::to_string(&network).unwrap();
            let back: NetworkConfig = serde_json::from_str(&text).unwrap();
            assert_eq!(back, network, "{text}");
        }
        let least: NetworkConfig = serde_json::from_str(r#"{"policy":{}}"#).unwrap();
        assert_eq!(least, NetworkConfig::isolated());
    }

    #[test]
    fn ports_are_read_as_they_are_written() {
        let table = [
            ("80:8080", "127.0.0.1:80", 8080, 1),
            ("0.0.0.0:80:8080/tcp", "0.0.0.0:80", 8080, 1),
            ("[::]:80:8080/udp", "[::]:80", 8080, 1),
            ("::1:80:8080", "[::1]:80", 8080, 1),
            ("0:22", "127.0.0.1:0", 22, 1),
            ("1000-1009:2000-2009", "127.0.0.1:1000", 2000, 10),
        ];
        for (text, listen, guest, count) in table {
            let ports = parse_ports(text).unwrap();
            assert_eq!(ports.len(), count, "{text}");
            assert_eq!(ports[0].listen, listen.parse().unwrap(), "{text}");
            assert_eq!(ports[0].guest_port, guest, "{text}");
            assert_eq!(ports[0].protocol == Protocol::Udp, text.ends_with("/udp"));
        }
        for text in [
            "",
            "80",
            ":80",
            "80:",
            "80:0",
            "80:80/sctp",
            "80:65536",
            "+80:80",
            "x:80:80",
            "localhost:80:80",
            "2-1:2-1",
            "1-3:1-2",
            "0-1:1-2",
            "1:2:3:4",
        ] {
            let error = parse_ports(text).unwrap_err();
            assert!(matches!(error, Error::Network(_)), "{text}");
        }
    }

    #[test]
    fn a_machine_leaves_its_process_most_of_the_descriptors() {
        for descriptors in [1, 64, 1024, 4096, usize::MAX] {
            let limits = limits_for(descriptors);
            let all = limits.tcp_flows + limits.datagram_flows + limits.dns_queries;
            assert!(all <= descriptors / 2 || descriptors < 64, "{limits:?}");
        }
        assert_eq!(limits_for(1024).tcp_flows, 256);
        assert_eq!(limits_for(1 << 20), Limits::default());
    }

    #[test]
    fn a_machine_without_a_way_out_is_not_told_of_the_hosts_domains() {
        let isolated = NetworkConfig::isolated().publish("8080:80").unwrap();
        assert!(isolated.guest(&isolated.config()).search.is_empty());
        let own = isolated.search("own.example").unwrap();
        assert_eq!(own.guest(&own.config()).search, ["own.example"]);
    }

    #[test]
    fn the_last_search_line_counts() {
        let text = "domain a.example\nsearch b.example c.example\nnameserver 192.0.2.1\n";
        assert_eq!(parse_search(text), ["b.example", "c.example"]);
        assert_eq!(parse_search("search . a\"b ok.example\n"), ["ok.example"]);
        assert!(parse_search("nameserver 192.0.2.1\n").is_empty());
    }

    #[test]
    fn each_machine_has_a_card_of_its_own() {
        let network = NetworkConfig::public();
        let macs = [(); 2].map(|()| network.config().addresses.guest_mac);
        assert_ne!(macs[0], macs[1]);
        assert_eq!(macs[0][0], 2, "locally administered, not a group");
    }

    #[test]
    fn the_hosts_name_is_known_when_its_services_are_granted() {
        let told = |network: &NetworkConfig| network.guest(&network.config());
        assert!(told(&NetworkConfig::public()).hosts.is_empty());
        let granted = told(&NetworkConfig::public().allow_host_loopback());
        assert_eq!(granted.hosts[0].1, "host.bantam.internal");
        assert_eq!(granted.hosts[0].0, granted.gateways[0]);
    }
}
