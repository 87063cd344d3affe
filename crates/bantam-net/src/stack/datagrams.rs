//! UDP flows and pings: one connected socket of the host for each, or one shared by all clients of a
//! port that leads inward.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use mio::net::UdpSocket;
use mio::{Interest, Registry};
use smoltcp::wire::IpProtocol;

use super::Kind;
use super::output::Output;
use super::reply::{self, Unreachable};
use super::tcp::Target;
use crate::slab::Slab;
use crate::{Addresses, Protocol};

/// For how long a flow lives without a datagram, before and after there was an answer. (RFC 4787
/// §4.3 asks for at least two minutes; what nobody answers, a scan for example, gets less.)
const IDLE_UNANSWERED: Duration = Duration::from_secs(60);
const IDLE: Duration = Duration::from_secs(180);
/// Datagrams taken from one socket before others get their turn.
const TURN: usize = 64;
/// Largest datagram.
const MAX_DATAGRAM: usize = 65_535;

/// What a flow is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Carrier {
    Udp,
    /// Echo; the port of the guest is the identifier, that of the peer 0.
    Echo,
}

/// A flow's two ends as the guest sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) carrier: Carrier,
    pub(super) guest: SocketAddr,
    pub(super) peer: SocketAddr,
}

pub(super) struct Flow {
    key: Key,
    pub(super) target: Option<Target>,
    way: Way,
    answered: bool,
    last_active: Instant,
    /// There may be datagrams, but there was no room for them.
    waiting: bool,
}

impl Flow {
    pub(super) fn protocol(&self) -> Protocol {
        match self.key.carrier {
            Carrier::Udp => Protocol::Udp,
            Carrier::Echo => Protocol::Icmp,
        }
    }
}

enum Way {
    /// The guest began: a socket of its own.
    Out(UdpSocket),
    /// A client of a port of the host began.
    In { port: usize, client: SocketAddr },
}

/// A port of the host that leads inward.
struct Port {
    socket: UdpSocket,
    /// Where datagrams go.
    guest: SocketAddr,
    waiting: bool,
}

/// All flows.
pub(super) struct Datagrams {
    pub(super) flows: Slab<Flow>,
    index: HashMap<Key, usize>,
    ports: Vec<Port>,
    limit: usize,
    scratch: Vec<u8>,
    waiting: bool,
}

impl Datagrams {
    pub(super) fn new(limit: usize) -> Datagrams {
        Datagrams {
            flows: Slab::new(),
            index: HashMap::new(),
            ports: Vec::new(),
            limit: limit.max(1),
            scratch: vec![0; MAX_DATAGRAM],
            waiting: false,
        }
    }

    pub(super) fn add_port(
        &mut self,
        registry: &Registry,
        mut socket: UdpSocket,
        guest: SocketAddr,
    ) -> io::Result<()> {
        let token = Kind::UdpPort.token(self.ports.len());
        registry.register(&mut socket, token, Interest::READABLE)?;
        self.ports.push(Port {
            socket,
            guest,
            waiting: false,
        });
        Ok(())
    }

    pub(super) fn reset(&mut self, registry: &Registry) {
        let all: Vec<usize> = self.flows.iter().map(|(id, _)| id).collect();
        for id in all {
            self.remove(registry, id);
        }
    }

    pub(super) fn find(&self, key: &Key) -> Option<usize> {
        self.index.get(key).copied()
    }

    /// A flow that the guest begins.
    pub(super) fn open(
        &mut self,
        registry: &Registry,
        key: Key,
        target: Target,
        now: Instant,
    ) -> io::Result<usize> {
        let mut socket = match key.carrier {
            Carrier::Udp => udp_socket(target.address)?,
            Carrier::Echo => ping_socket(target.address)?,
        };
        self.make_room(registry);
        let token = Kind::Datagram.token(self.flows.next());
        registry.register(&mut socket, token, Interest::READABLE)?;
        Ok(self.insert(key, Some(target), Way::Out(socket), now))
    }

    fn insert(&mut self, key: Key, target: Option<Target>, way: Way, now: Instant) -> usize {
        let id = self.flows.insert(Flow {
            key,
            target,
            way,
            answered: false,
            last_active: now,
            waiting: false,
        });
        self.index.insert(key, id);
        id
    }

    /// Ends the flow that was idle longest, if there are too many, of those that began on the side
    /// that has more: neither the guest nor strangers at its ports take the other's.
    fn make_room(&mut self, registry: &Registry) {
        if self.flows.len() < self.limit {
            return;
        }
        let inward = |flow: &Flow| matches!(flow.way, Way::In { .. });
        let inwards = self.flows.iter().filter(|(_, flow)| inward(flow)).count();
        let side = inwards > self.limit / 2;
        let oldest = self
            .flows
            .iter()
            .filter(|(_, flow)| inward(flow) == side)
            .min_by_key(|(_, flow)| flow.last_active)
            .map(|(id, _)| id);
        if let Some(id) = oldest {
            self.remove(registry, id);
        }
    }

    /// Sends what the guest sent; `packet` is the IP packet, for an error about it.
    pub(super) fn send(
        &mut self,
        output: &mut Output,
        addresses: &Addresses,
        id: usize,
        data: &[u8],
        packet: &[u8],
        now: Instant,
    ) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        flow.last_active = now;
        let result = match &flow.way {
            // The error of an earlier datagram is told instead of sending this one.
            Way::Out(socket) => socket.send(data).or_else(|_| socket.send(data)),
            Way::In { port, client } => match self.ports.get(*port) {
                Some(port) => {
                    flow.answered = true;
                    port.socket.send_to(data, *client)
                }
                None => return,
            },
        };
        if let Err(error) = result
            && let Some(why) = why(&error)
        {
            let guest = flow.key.guest.ip();
            let gateway = addresses.gateway(guest);
            reply::unreachable(output, gateway, guest, why, packet);
        }
    }

    /// A flow's socket has news.
    pub(super) fn flow_event(
        &mut self,
        output: &mut Output,
        addresses: &Addresses,
        id: usize,
        now: Instant,
    ) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        let Way::Out(socket) = &flow.way else {
            return;
        };
        flow.waiting = false;
        let mut odd = false;
        for _ in 0..TURN {
            if !output.has_room() {
                break;
            }
            match socket.recv(&mut self.scratch) {
                Ok(len) => {
                    flow.last_active = now;
                    flow.answered = true;
                    let data = self.scratch.get(..len).unwrap_or_default();
                    match flow.key.carrier {
                        Carrier::Udp => reply::udp(output, flow.key.peer, flow.key.guest, data),
                        Carrier::Echo => pass_echo(output, &flow.key, data),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // What came back for an earlier datagram; reading it has cleared it. Of others there
                    // is no telling whether they would come again at once, so only one is passed over.
                    let Some(why) = why(&error) else {
                        if std::mem::replace(&mut odd, true) {
                            return;
                        }
                        continue;
                    };
                    let (guest, peer) = (flow.key.guest, flow.key.peer);
                    let protocol = match (flow.key.carrier, guest.is_ipv4()) {
                        (Carrier::Udp, _) => IpProtocol::Udp,
                        (Carrier::Echo, true) => IpProtocol::Icmp,
                        (Carrier::Echo, false) => IpProtocol::Icmpv6,
                    };
                    let from = addresses.gateway(guest.ip());
                    let packet = reply::head(guest, peer, protocol);
                    reply::unreachable(output, from, guest.ip(), why, &packet);
                }
            }
        }
        flow.waiting = true;
        self.waiting = true;
    }

    /// A port that leads inward has datagrams.
    pub(super) fn port_event(
        &mut self,
        registry: &Registry,
        output: &mut Output,
        addresses: &Addresses,
        index: usize,
        now: Instant,
    ) {
        for _ in 0..TURN {
            let Some(port) = self.ports.get_mut(index) else {
                return;
            };
            port.waiting = false;
            if !output.has_room() {
                break;
            }
            let (len, client) = match port.socket.recv_from(&mut self.scratch) {
                Ok(received) => received,
                // An answer of the guest's that its client did not take.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            let guest = port.guest;
            let Some(id) = self.inward(registry, addresses, index, guest, client, now) else {
                continue;
            };
            if let Some(flow) = self.flows.get_mut(id) {
                flow.last_active = now;
                let data = self.scratch.get(..len).unwrap_or_default();
                reply::udp(output, flow.key.peer, flow.key.guest, data);
            }
        }
        if let Some(port) = self.ports.get_mut(index) {
            port.waiting = true;
            self.waiting = true;
        }
    }

    /// The flow of a client of a port.
    fn inward(
        &mut self,
        registry: &Registry,
        addresses: &Addresses,
        index: usize,
        guest: SocketAddr,
        client: SocketAddr,
        now: Instant,
    ) -> Option<usize> {
        let mut peer = present(addresses, guest.ip(), client);
        // Clients on different addresses of the host may have the same port.
        for _ in 0..64 {
            let key = Key {
                carrier: Carrier::Udp,
                guest,
                peer,
            };
            match self
                .find(&key)
                .and_then(|id| Some((id, self.flows.get(id)?)))
            {
                None => {
                    self.make_room(registry);
                    let way = Way::In {
                        port: index,
                        client,
                    };
                    return Some(self.insert(key, None, way, now));
                }
                Some((id, flow)) => match flow.way {
                    Way::In { port, client: its } if port == index && its == client => {
                        return Some(id);
                    }
                    _ => peer.set_port(next_port(peer.port())),
                },
            }
        }
        None
    }

    /// Goes on with sockets that waited for room for frames. Returns whether some have more.
    pub(super) fn resume(
        &mut self,
        registry: &Registry,
        output: &mut Output,
        addresses: &Addresses,
        now: Instant,
    ) -> bool {
        if !std::mem::take(&mut self.waiting) {
            return false;
        }
        let flows: Vec<usize> = self
            .flows
            .iter()
            .filter(|(_, flow)| flow.waiting)
            .map(|(id, _)| id)
            .collect();
        for id in flows {
            self.flow_event(output, addresses, id, now);
        }
        for index in 0..self.ports.len() {
            if self.ports.get(index).is_some_and(|port| port.waiting) {
                self.port_event(registry, output, addresses, index, now);
            }
        }
        self.waiting && output.has_room()
    }

    /// Ends flows that were idle for too long.
    pub(super) fn expire(&mut self, registry: &Registry, now: Instant) {
        let idle: Vec<usize> = self
            .flows
            .iter()
            .filter(|(_, flow)| {
                let limit = if flow.answered { IDLE } else { IDLE_UNANSWERED };
                now.saturating_duration_since(flow.last_active) > limit
            })
            .map(|(id, _)| id)
            .collect();
        for id in idle {
            self.remove(registry, id);
        }
    }

    pub(super) fn remove(&mut self, registry: &Registry, id: usize) {
        let Some(flow) = self.flows.remove(id) else {
            return;
        };
        self.index.remove(&flow.key);
        if let Way::Out(mut socket) = flow.way
            && let Err(error) = registry.deregister(&mut socket)
        {
            tracing::debug!(%error, "forgetting a flow's socket");
        }
    }
}

/// The address under which the guest sees a client of a port: its own, or the gateway's where the
/// client's would mean the guest itself or is of the other family.
pub(super) fn present(addresses: &Addresses, guest: IpAddr, client: SocketAddr) -> SocketAddr {
    let ip = client.ip().to_canonical();
    let usable = ip.is_ipv4() == guest.is_ipv4()
        && !ip.is_loopback()
        && !ip.is_unspecified()
        && !addresses.is_guest(ip)
        && !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let ip = if usable {
        ip
    } else {
        match guest {
            IpAddr::V4(_) => addresses.gateway_v4.into(),
            IpAddr::V6(_) => addresses.gateway_v6.into(),
        }
    };
    SocketAddr::new(ip, client.port())
}

/// Another unprivileged port.
pub(super) fn next_port(port: u16) -> u16 {
    port.checked_add(1).unwrap_or(1024).max(1024)
}

/// What an error means to the guest; `None` when it means nothing.
pub(super) fn why(error: &io::Error) -> Option<Unreachable> {
    use io::ErrorKind as K;
    match error.kind() {
        K::ConnectionRefused => Some(Unreachable::Port),
        K::HostUnreachable | K::TimedOut => Some(Unreachable::Host),
        K::NetworkUnreachable | K::NetworkDown | K::AddrNotAvailable => Some(Unreachable::Network),
        K::PermissionDenied => Some(Unreachable::Prohibited),
        _ => None,
    }
}

fn any_of(like: SocketAddr) -> IpAddr {
    match like {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

fn udp_socket(to: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((any_of(to), 0).into())?;
    socket.connect(to)?;
    Ok(socket)
}

/// A socket for echo requests, which the kernel gives without privileges where
/// `net.ipv4.ping_group_range` has the user's group.
fn ping_socket(to: SocketAddr) -> io::Result<UdpSocket> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto};
    let (family, protocol) = match to {
        SocketAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP),
        SocketAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6),
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, flags, Some(protocol))?;
    rustix::net::connect(&socket, &to)?;
    // Sends and receives like any connected datagram socket.
    Ok(UdpSocket::from_std(std::net::UdpSocket::from(socket)))
}

/// Passes an echo reply on, which the kernel gave its own identifier.
fn pass_echo(output: &mut Output, key: &Key, message: &[u8]) {
    let &[kind, 0, _, _, _, _, high, low, ref data @ ..] = message else {
        return;
    };
    let reply = if key.guest.is_ipv4() { 0 } else { 129 };
    if kind == reply {
        let seq = u16::from_be_bytes([high, low]);
        let (peer, guest) = (key.peer.ip(), key.guest.ip());
        reply::echo(output, peer, guest, key.guest.port(), seq, data);
    }
}
