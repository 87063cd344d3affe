//! Where the guest wants to go: the policy asked, sockets made, refusals told.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Instant;

use mio::net::TcpStream;
use smoltcp::wire::DnsRcode;

use super::Stack;
use super::datagrams::{self, Carrier, why};
use super::ingress::Packet;
use super::reply::{self, Unreachable};
use super::tcp::{self, Refused, Target};
use crate::config::HOST_NAMES;
use crate::control::{Counters, lock};
use crate::dns::{self, Answer, Origin};
use crate::own::is_own;
use crate::{Destination, Protocol, Reason};

const DNS_PORT: u16 = 53;
/// Connections to the name service, each of which may hold answers; see `pump`.
const MAX_NAME_CONNECTIONS: usize = 64;

impl Stack {
    /// Where `peer`, as the guest sees it, leads, and whether it may.
    pub(super) fn route(
        &self,
        protocol: Protocol,
        peer: SocketAddr,
        now: Instant,
    ) -> Result<Target, (Target, Reason)> {
        let gateway = self.addresses.is_gateway(peer.ip());
        let address = if gateway {
            SocketAddr::new(loopback(peer.ip()), peer.port())
        } else {
            peer
        };
        let names = self.names.of(peer.ip(), now);
        let target = Target {
            address,
            host: gateway || (self.policy.enabled && is_own(address.ip())),
            names: names.iter().map(|&name| name.to_owned()).collect(),
        };
        match self.decide(protocol, &target) {
            Ok(()) => Ok(target),
            Err(reason) => Err((target, reason)),
        }
    }

    fn decide(&self, protocol: Protocol, target: &Target) -> Result<(), Reason> {
        let names: Vec<&str> = target.names.iter().map(String::as_str).collect();
        self.policy.decide(&Destination {
            address: target.address.ip(),
            port: (protocol != Protocol::Icmp).then_some(target.address.port()),
            host: target.host,
            names: &names,
        })
    }

    /// Notes a refusal.
    fn refuse(&self, protocol: Protocol, target: &Target, reason: Reason) {
        Counters::add(&self.shared.counters.refused, 1);
        lock(&self.shared.events).push(
            protocol,
            Some(target.address.ip()),
            (protocol != Protocol::Icmp).then_some(target.address.port()),
            target.names.first().cloned(),
            reason,
        );
    }

    /// A connection that the guest asks for.
    pub(super) fn open_tcp(&mut self, key: tcp::Key, syn: &[u8], now: Instant) {
        if self.tcp.flows.len() >= self.limits.tcp_flows {
            self.tcp.reject(&mut self.output, syn, now);
            return;
        }
        if self.addresses.is_gateway(key.peer.ip()) && key.peer.port() == DNS_PORT {
            if self.tcp.names() < MAX_NAME_CONNECTIONS {
                self.tcp.open_names(&mut self.output, key, syn, now);
            } else {
                self.tcp.reject(&mut self.output, syn, now);
            }
            return;
        }
        let target = match self.route(Protocol::Tcp, key.peer, now) {
            Ok(target) => target,
            Err((target, reason)) => {
                self.refuse(Protocol::Tcp, &target, reason);
                self.tcp.reject(&mut self.output, syn, now);
                return;
            }
        };
        if self.tcp.connecting() >= self.limits.tcp_connecting {
            // The guest asks again.
            return;
        }
        let registry = self.poll.registry();
        let opened = TcpStream::connect(target.address)
            .and_then(|stream| self.tcp.open(registry, key, target, stream, syn, now));
        if let Err(error) = opened {
            let syn = syn.to_vec();
            self.tell_refused(&Refused { key, syn, error }, now);
        }
    }

    /// Tells the guest that a connection it asked for did not come about.
    pub(super) fn tell_refused(&mut self, refused: &Refused, now: Instant) {
        let why = match refused.error.kind() {
            io::ErrorKind::ConnectionRefused => None,
            _ => why(&refused.error),
        };
        match why {
            None => self.tcp.reject(&mut self.output, &refused.syn, now),
            Some(why) => {
                let guest = refused.key.guest.ip();
                let gateway = self.addresses.gateway(guest);
                reply::unreachable(&mut self.output, gateway, guest, why, &refused.syn);
            }
        }
    }

    /// The first datagram or ping of a flow.
    pub(super) fn send_datagram(
        &mut self,
        key: datagrams::Key,
        data: &[u8],
        packet: &Packet<'_>,
        now: Instant,
    ) {
        let id = match self.datagrams.find(&key) {
            Some(id) => id,
            None => match self.open_datagrams(key, now) {
                Ok(id) => id,
                Err(why) => {
                    let gateway = self.addresses.gateway(packet.from);
                    reply::unreachable(&mut self.output, gateway, packet.from, why, packet.whole);
                    return;
                }
            },
        };
        self.datagrams.send(
            &mut self.output,
            &self.addresses,
            id,
            data,
            packet.whole,
            now,
        );
    }

    fn open_datagrams(&mut self, key: datagrams::Key, now: Instant) -> Result<usize, Unreachable> {
        let protocol = match key.carrier {
            Carrier::Udp => Protocol::Udp,
            Carrier::Echo => Protocol::Icmp,
        };
        let target = self
            .route(protocol, key.peer, now)
            .map_err(|(target, reason)| {
                self.refuse(protocol, &target, reason);
                Unreachable::Prohibited
            })?;
        self.datagrams
            .open(self.poll.registry(), key, target, now)
            .map_err(|error| {
                tracing::debug!(%error, ?key, "opening a flow");
                why(&error).unwrap_or(Unreachable::Network)
            })
    }

    /// A question to the gateway's name service.
    pub(super) fn ask(&mut self, bytes: &[u8], origin: Origin, now: Instant) {
        let answer = |bytes| Answer {
            origin,
            bytes,
            learned: None,
        };
        let Some(query) = dns::parse_query(bytes) else {
            // Not even a question: nothing to answer with, but a connection must not wait for it.
            self.give_answer(answer(Vec::new()), now);
            return;
        };
        let name = query.name.clone().unwrap_or_default();
        if HOST_NAMES.contains(&name.as_str()) {
            let bytes = if self.policy.enabled && self.policy.allow_host_loopback {
                let (v4, v6) = (self.addresses.gateway_v4, self.addresses.gateway_v6);
                dns::answer_address(&query, v4.octets(), v6.octets())
            } else {
                dns::answer_code(&query, DnsRcode::NXDomain)
            };
            self.give_answer(answer(bytes), now);
            return;
        }
        if let Err(reason) = self.policy.decide_name(&name) {
            Counters::add(&self.shared.counters.refused, 1);
            // Programs take "no such name" for an answer at once; other codes they ask again for.
            let code = match reason {
                Reason::Off => DnsRcode::Refused,
                _ => DnsRcode::NXDomain,
            };
            let shown = if name.is_empty() {
                "?".to_owned()
            } else {
                name
            };
            lock(&self.shared.events).push(Protocol::Dns, None, None, Some(shown), reason);
            self.give_answer(answer(dns::answer_code(&query, code)), now);
            return;
        }
        let registry = self.poll.registry();
        if let Some(failed) = self.resolver.ask(registry, query, bytes, origin, now) {
            self.give_answer(failed, now);
        }
    }

    /// Gives the guest an answer, and remembers what it says.
    pub(super) fn give_answer(&mut self, answer: Answer, now: Instant) {
        if let Some(learned) = &answer.learned {
            for (address, ttl) in &learned.addresses {
                self.names.learn(&learned.name, *address, *ttl, now);
            }
        }
        match answer.origin {
            Origin::Udp { guest, gateway } if !answer.bytes.is_empty() => {
                reply::udp(&mut self.output, gateway, guest, &answer.bytes);
            }
            Origin::Udp { .. } => {}
            Origin::Tcp { flow, serial } => self.tcp.answer(flow, serial, &answer.bytes),
        }
    }

    /// Ends the flows that the policy, a new one, refuses.
    pub(super) fn apply_policy(&mut self, _now: Instant) {
        let refused: Vec<(usize, Target, Reason)> = self
            .tcp
            .flows
            .iter()
            .filter_map(|(id, flow)| {
                let target = flow.target.as_ref()?;
                let reason = self.decide(Protocol::Tcp, target).err()?;
                Some((id, target.clone(), reason))
            })
            .collect();
        for (id, target, reason) in refused {
            self.refuse(Protocol::Tcp, &target, reason);
            self.tcp.abort(self.poll.registry(), &mut self.output, id);
        }
        let refused: Vec<usize> = self
            .datagrams
            .flows
            .iter()
            .filter_map(|(id, flow)| {
                let protocol = flow.protocol();
                self.decide(protocol, flow.target.as_ref()?).err()?;
                Some(id)
            })
            .collect();
        // The next datagram is refused by itself, and told.
        for id in refused {
            self.datagrams.remove(self.poll.registry(), id);
        }
    }
}

/// The host's own address that stands behind the gateway's.
fn loopback(gateway: IpAddr) -> IpAddr {
    match gateway {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
}
