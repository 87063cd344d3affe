//! The network of a machine, on the command line.

use std::fmt::Write as _;

use bantam::{MachineBuilder, NetworkConfig};
use clap::Args;

use super::args::EventsArgs;
use crate::Outcome;
use crate::args::Global;
use crate::failure::Failure;
use crate::show::{json, out, printable};

const HEADING: &str = "Network (off unless asked for)";

// The network of a new machine.
#[derive(Debug, Default, Args)]
pub(crate) struct NetworkArgs {
    /// Let the machine reach public addresses
    #[arg(long, help_heading = HEADING)]
    pub(crate) net: bool,
    /// Let it reach a name, *.NAME for all below it, and with this nothing else (repeatable)
    #[arg(long, value_name = "NAME[:PORTS]", help_heading = HEADING)]
    pub(crate) allow_host: Vec<String>,
    /// Let it reach addresses, private ones too, and with this nothing else (repeatable)
    #[arg(long, value_name = "CIDR[:PORTS]", help_heading = HEADING)]
    pub(crate) allow_cidr: Vec<String>,
    /// Keep it from addresses, whatever else is said (repeatable)
    #[arg(long, value_name = "CIDR[:PORTS]", help_heading = HEADING)]
    pub(crate) deny_cidr: Vec<String>,
    /// Let it reach private addresses as well
    #[arg(long, help_heading = HEADING)]
    pub(crate) allow_private: bool,
    /// Let it reach this host's services, as host.bantam.internal
    #[arg(long, help_heading = HEADING)]
    pub(crate) allow_host_loopback: bool,
    /// Ask this name server instead of the host's (repeatable)
    #[arg(long, value_name = "ADDRESS", help_heading = HEADING)]
    pub(crate) dns: Vec<String>,
    /// Look up names without a dot in this domain (repeatable)
    #[arg(long, value_name = "DOMAIN", help_heading = HEADING)]
    pub(crate) dns_search: Vec<String>,
    /// Lead a port of this host into the machine: [ADDRESS:]HOST:GUEST[/udp], from 127.0.0.1 unless
    /// said otherwise (repeatable)
    #[arg(short, long, value_name = "PORTS", help_heading = HEADING)]
    pub(crate) port: Vec<String>,
    /// Let published ports reach servers that listen on 127.0.0.1 in the machine
    #[arg(long, requires = "port", help_heading = HEADING)]
    pub(crate) port_to_loopback: bool,
    /// There is one kind of card
    #[arg(long, hide = true, value_parser = ["virtio-net"])]
    pub(crate) net_backend: Option<String>,
}

// What a new machine takes over from this host.
#[derive(Debug, Default, Args)]
pub(crate) struct HostArgs {
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
    /// Use the proxies that http_proxy, https_proxy, all_proxy and no_proxy name here; the network
    /// must grant their addresses
    #[arg(long, help_heading = HEADING)]
    pub(crate) use_host_proxy: bool,
    /// Trust the certificates that this host trusts
    #[arg(long, help_heading = HEADING)]
    pub(crate) trust_host_certs: bool,
}

impl HostArgs {
    /// `builder` with all of this.
    pub(crate) fn apply(&self, mut builder: MachineBuilder) -> Result<MachineBuilder, Failure> {
        match self.network.config()? {
            Some(network) => builder = builder.network(network),
            None if self.use_host_proxy => {
                return Err(Failure::Usage(
                    "--use-host-proxy is for a machine with a network: add --net".to_owned(),
                ));
            }
            None => {}
        }
        if self.use_host_proxy {
            builder = builder.use_host_proxy()?;
        }
        if self.trust_host_certs {
            builder = builder.trust_host_certs()?;
        }
        Ok(builder)
    }
}

impl NetworkArgs {
    /// The network that these ask for, if any does.
    pub(crate) fn config(&self) -> Result<Option<NetworkConfig>, Failure> {
        let reaches = self.net
            || self.allow_private
            || self.allow_host_loopback
            || !(self.allow_host.is_empty() && self.allow_cidr.is_empty() && self.dns.is_empty());
        let network = if reaches {
            NetworkConfig::public()
        } else if self.port.is_empty() {
            if !self.deny_cidr.is_empty() || !self.dns_search.is_empty() {
                return Err(Failure::Usage(
                    "--deny-cidr and --dns-search say how a network is, and there is none: add --net"
                        .to_owned(),
                ));
            }
            return Ok(None);
        } else {
            NetworkConfig::isolated()
        };
        self.add_to(network).map(Some)
    }

    /// `network` with what these add to it.
    pub(crate) fn add_to(&self, network: NetworkConfig) -> Result<NetworkConfig, Failure> {
        let mut network = network;
        if self.net {
            network.policy.enabled = true;
        }
        if self.allow_private {
            network = network.allow_private();
        }
        if self.allow_host_loopback {
            network = network.allow_host_loopback();
        }
        for rule in &self.allow_host {
            network = network.allow_host(rule).map_err(usage)?;
        }
        for rule in &self.allow_cidr {
            network = network.allow_cidr(rule).map_err(usage)?;
        }
        for rule in &self.deny_cidr {
            network = network.deny_cidr(rule).map_err(usage)?;
        }
        for server in &self.dns {
            network = network.dns_server(server).map_err(usage)?;
        }
        for domain in &self.dns_search {
            network = network.search(domain).map_err(usage)?;
        }
        for ports in &self.port {
            network = network.publish(ports).map_err(usage)?;
        }
        if self.port_to_loopback {
            network = network.publish_to_guest_loopback();
        }
        Ok(network)
    }

    fn is_empty(&self) -> bool {
        !(self.net || self.allow_private || self.allow_host_loopback)
            && [
                &self.allow_host,
                &self.allow_cidr,
                &self.deny_cidr,
                &self.dns,
                &self.dns_search,
                &self.port,
            ]
            .iter()
            .all(|rules| rules.is_empty())
    }
}

// Changes to the network of a machine.
#[derive(Debug, Default, Args)]
pub(crate) struct NetworkChangeArgs {
    #[command(flatten)]
    pub(crate) add: NetworkArgs,
    /// Take the network away
    #[arg(long, conflicts_with = "net", help_heading = HEADING)]
    pub(crate) no_net: bool,
    /// Take a rule of --allow-host back (repeatable)
    #[arg(long, value_name = "NAME[:PORTS]", help_heading = HEADING)]
    pub(crate) remove_allow_host: Vec<String>,
    /// Take a rule of --allow-cidr back (repeatable)
    #[arg(long, value_name = "CIDR[:PORTS]", help_heading = HEADING)]
    pub(crate) remove_allow_cidr: Vec<String>,
    /// Take a rule of --deny-cidr back (repeatable)
    #[arg(long, value_name = "CIDR[:PORTS]", help_heading = HEADING)]
    pub(crate) remove_deny_cidr: Vec<String>,
    /// Take a --port back (repeatable)
    #[arg(long, value_name = "PORTS", help_heading = HEADING)]
    pub(crate) remove_port: Vec<String>,
}

impl NetworkChangeArgs {
    /// What the network is to be, if it is to change.
    pub(crate) fn apply(
        &self,
        present: Option<NetworkConfig>,
    ) -> Result<Option<Option<NetworkConfig>>, Failure> {
        if self.no_net {
            return Ok(Some(None));
        }
        let removes = [
            &self.remove_allow_host,
            &self.remove_allow_cidr,
            &self.remove_deny_cidr,
            &self.remove_port,
        ];
        let takes_back = removes.iter().any(|rules| !rules.is_empty());
        if self.add.is_empty() && !takes_back {
            return Ok(None);
        }
        let Some(mut network) = present else {
            if takes_back {
                return Err(Failure::Usage(
                    "the machine has no network to take anything back from".to_owned(),
                ));
            }
            return self.add.config().map(Some);
        };
        let restricted = network.policy.is_restricted();
        remove(&mut network.policy.allow_hosts, &self.remove_allow_host)?;
        remove(&mut network.policy.allow_cidrs, &self.remove_allow_cidr)?;
        remove(&mut network.policy.deny_cidrs, &self.remove_deny_cidr)?;
        for ports in &self.remove_port {
            unpublish(&mut network, ports)?;
        }
        let network = self.add.add_to(network)?;
        if restricted && !network.policy.is_restricted() && !self.add.net {
            return Err(Failure::Usage(
                "without its last allow rule the machine could reach all public addresses: \
                 add --net if it may, or take its network with --no-net"
                    .to_owned(),
            ));
        }
        Ok(Some(Some(network)))
    }
}

fn remove<T>(rules: &mut Vec<T>, gone: &[String]) -> Result<(), Failure>
where
    T: std::str::FromStr<Err: std::fmt::Display> + PartialEq,
{
    for text in gone {
        let rule: T = text
            .parse()
            .map_err(|error: T::Err| Failure::Usage(error.to_string()))?;
        let before = rules.len();
        rules.retain(|other| *other != rule);
        if rules.len() == before {
            return Err(Failure::Usage(format!(
                "there is no rule '{text}' to take back"
            )));
        }
    }
    Ok(())
}

/// Takes the ports back that `text` published.
fn unpublish(network: &mut NetworkConfig, text: &str) -> Result<(), Failure> {
    let gone = NetworkConfig::isolated().publish(text).map_err(usage)?;
    for port in gone.port_list() {
        let published = network.port_list();
        let Some(at) = published.iter().position(|other| *other == port) else {
            return Err(Failure::Usage(format!("port {port} is not published")));
        };
        network.ports.remove(at);
    }
    Ok(())
}

/// A rule that cannot be understood.
fn usage(error: bantam::Error) -> Failure {
    Failure::Usage(error.message_with_causes())
}

pub(super) fn events(global: &Global, args: &EventsArgs) -> Outcome {
    let name = args.name.resolve()?;
    let mut events = global.machines()?.egress_events(&name)?;
    let surplus = events.len().saturating_sub(args.limit);
    events.drain(..surplus);
    if args.json {
        return json(&events);
    }
    if events.is_empty() {
        out(&format!("No egress denials recorded for '{name}'.\n"))?;
        return Ok(0);
    }
    let mut text = String::new();
    for event in events {
        let at = std::time::UNIX_EPOCH + std::time::Duration::from_millis(event.time_ms);
        let to = match (&event.name, event.address) {
            (Some(name), Some(address)) => format!("{} ({address})", printable(name)),
            (Some(name), None) => printable(name),
            (None, Some(address)) => address.to_string(),
            (None, None) => "?".to_owned(),
        };
        let port = event
            .port
            .map_or_else(String::new, |port| format!(" port {port}"));
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{}  {:>4}x  {:<5} {to}{port}: {}",
            humantime::format_rfc3339_millis(at),
            event.count,
            printable(&event.protocol),
            printable(&event.reason)
        );
    }
    out(&text)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> NetworkArgs {
        NetworkArgs::default()
    }

    #[test]
    fn nothing_is_on_unless_asked_for() {
        assert!(args().config().unwrap().is_none());
        let ports = NetworkArgs {
            port: vec!["8080:80".into()],
            ..args()
        };
        let network = ports.config().unwrap().unwrap();
        assert!(!network.policy.enabled, "a port in is no way out");
        assert_eq!(network.port_list(), ["127.0.0.1:8080:80/tcp"]);
        let host = NetworkArgs {
            allow_host: vec!["example.org".into()],
            ..args()
        };
        assert!(host.config().unwrap().unwrap().policy.enabled);
    }

    #[test]
    fn a_rule_that_makes_no_sense_is_a_mistake_on_the_command_line() {
        for bad in [
            NetworkArgs {
                allow_cidr: vec!["10.0.0.0/33".into()],
                ..args()
            },
            NetworkArgs {
                port: vec!["80".into()],
                ..args()
            },
            NetworkArgs {
                deny_cidr: vec!["10.0.0.0/8".into()],
                ..args()
            },
        ] {
            assert_eq!(bad.config().unwrap_err().exit_code(), 2, "{bad:?}");
        }
    }

    #[test]
    fn changes_add_to_what_is_there_and_take_back() {
        let present = NetworkConfig::public()
            .allow_host("a.example")
            .and_then(|network| network.publish("8080:80"))
            .unwrap();
        let change = NetworkChangeArgs {
            add: NetworkArgs {
                allow_host: vec!["b.example".into()],
                ..args()
            },
            remove_allow_host: vec!["a.example".into()],
            remove_port: vec!["8080:80".into()],
            ..NetworkChangeArgs::default()
        };
        let network = change
            .apply(Some(present.clone()))
            .unwrap()
            .flatten()
            .unwrap();
        let rules: Vec<_> = network
            .policy
            .allow_hosts
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(rules, ["b.example"]);
        assert!(network.ports.is_empty());
        assert!(
            NetworkChangeArgs::default()
                .apply(Some(present.clone()))
                .unwrap()
                .is_none()
        );
        let last = NetworkChangeArgs {
            remove_allow_host: vec!["a.example".into()],
            ..NetworkChangeArgs::default()
        };
        let error = last.apply(Some(present.clone())).unwrap_err();
        assert_eq!(error.exit_code(), 2, "the last rule opens everything");
        let meant = NetworkChangeArgs {
            add: NetworkArgs {
                net: true,
                ..args()
            },
            ..last
        };
        let network = meant.apply(Some(present.clone())).unwrap();
        assert!(!network.flatten().unwrap().policy.is_restricted());
        let unknown = NetworkChangeArgs {
            remove_allow_host: vec!["c.example".into()],
            ..NetworkChangeArgs::default()
        };
        assert!(unknown.apply(Some(present.clone())).is_err());
        let unpublished = NetworkChangeArgs {
            remove_port: vec!["8080:80/udp".into()],
            ..NetworkChangeArgs::default()
        };
        for present in [Some(present), None] {
            let error = unpublished.apply(present).unwrap_err();
            assert_eq!(error.exit_code(), 2);
        }
    }
}
