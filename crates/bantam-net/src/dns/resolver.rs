//! Queries under way at the host's name servers.
//!
//! A query over UDP is asked over UDP from a socket of its own, so that its port is as hard to guess
//! as its identifier; a query over TCP is asked over TCP. Answers are passed on as they are, with
//! what the server said of DNSSEC and truncation.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::net::{TcpStream, UdpSocket};
use mio::{Interest, Registry, Token};
use smoltcp::wire::DnsRcode;

use super::message::{self, Query};
use super::servers::Servers;
use crate::slab::Slab;

/// For how long a server may think before the next is asked.
const PATIENCE_UDP: Duration = Duration::from_secs(2);
const PATIENCE_TCP: Duration = Duration::from_secs(5);
/// How often each server is asked.
const ROUNDS: usize = 2;
/// Longest message.
const MAX_MESSAGE: usize = 65_535;

/// Whom an answer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A datagram from `guest` to `gateway`.
    Udp {
        guest: SocketAddr,
        gateway: SocketAddr,
    },
    /// A connection: its number, and its serial number since numbers are used again.
    Tcp { flow: usize, serial: u64 },
}

/// An answer for the guest.
pub(crate) struct Answer {
    pub(crate) origin: Origin,
    pub(crate) bytes: Vec<u8>,
    pub(crate) learned: Option<Learned>,
}

/// What an answer said of a name.
pub(crate) struct Learned {
    pub(crate) name: Arc<str>,
    /// Its addresses, and for how long it has them.
    pub(crate) addresses: Vec<(IpAddr, Duration)>,
}

struct Pending {
    origin: Origin,
    query: Query,
    /// The query as it goes out; its identifier is set anew for each server.
    raw: Vec<u8>,
    id: u16,
    upstream: Upstream,
    attempt: usize,
    deadline: Instant,
}

enum Upstream {
    None,
    Udp(UdpSocket),
    Tcp {
        stream: TcpStream,
        /// What is still to be sent.
        output: Vec<u8>,
        input: Vec<u8>,
    },
}

/// All queries under way.
pub(crate) struct Resolver {
    servers: Servers,
    pending: Slab<Pending>,
    limit: usize,
    token: fn(usize) -> Token,
    scratch: Vec<u8>,
}

impl Resolver {
    /// `token` gives the event token of a query's socket.
    pub(crate) fn new(servers: Servers, limit: usize, token: fn(usize) -> Token) -> Resolver {
        Resolver {
            servers,
            pending: Slab::new(),
            limit,
            token,
            scratch: vec![0; MAX_MESSAGE],
        }
    }

    /// Asks; gives the answer when it is a failure already.
    pub(crate) fn ask(
        &mut self,
        registry: &Registry,
        query: Query,
        raw: &[u8],
        origin: Origin,
        now: Instant,
    ) -> Option<Answer> {
        if self.pending.len() >= self.limit {
            return Some(failure(origin, &query));
        }
        // A guest that asks again has had no answer yet; the first question still stands.
        if matches!(origin, Origin::Udp { .. })
            && self
                .pending
                .iter()
                .any(|(_, pending)| pending.origin == origin && pending.query == query)
        {
            return None;
        }
        let index = self.pending.insert(Pending {
            origin,
            query,
            raw: raw.to_vec(),
            id: 0,
            upstream: Upstream::None,
            attempt: 0,
            deadline: now,
        });
        self.ask_next(registry, index, now)
    }

    /// Asks the next server, or gives up.
    fn ask_next(&mut self, registry: &Registry, index: usize, now: Instant) -> Option<Answer> {
        loop {
            let pending = self.pending.get_mut(index)?;
            drop_upstream(registry, &mut pending.upstream);
            let servers = self.servers.current();
            if pending.attempt >= servers.len() * ROUNDS {
                let pending = self.pending.remove(index)?;
                return Some(failure(pending.origin, &pending.query));
            }
            let server = servers[pending.attempt % servers.len()];
            pending.attempt += 1;
            match pending.send(registry, server, (self.token)(index)) {
                Ok(patience) => {
                    pending.deadline = now + patience;
                    return None;
                }
                Err(error) => tracing::debug!(%server, %error, "asking a name server"),
            }
        }
    }

    /// Does what a query's socket is ready for.
    pub(crate) fn ready(
        &mut self,
        registry: &Registry,
        index: usize,
        now: Instant,
    ) -> Option<Answer> {
        let pending = self.pending.get_mut(index)?;
        match pending.receive(&mut self.scratch) {
            Ok(None) => None,
            Ok(Some(len)) => {
                let mut pending = self.pending.remove(index)?;
                drop_upstream(registry, &mut pending.upstream);
                let mut bytes = self.scratch.get(..len)?.to_vec();
                let addresses = message::addresses(&bytes, &pending.query);
                let learned = pending
                    .query
                    .name
                    .as_deref()
                    .filter(|_| !addresses.is_empty())
                    .map(|name| Learned {
                        name: Arc::from(name),
                        addresses,
                    });
                message::set_id(&mut bytes, pending.query.id);
                Some(Answer {
                    origin: pending.origin,
                    bytes,
                    learned,
                })
            }
            Err(error) => {
                tracing::debug!(%error, "a name server failed");
                self.ask_next(registry, index, now)
            }
        }
    }

    /// Asks further servers where one was too slow.
    pub(crate) fn expire(&mut self, registry: &Registry, now: Instant) -> Vec<Answer> {
        let late: Vec<usize> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.deadline <= now)
            .map(|(index, _)| index)
            .collect();
        late.into_iter()
            .filter_map(|index| self.ask_next(registry, index, now))
            .collect()
    }

    /// When [`Resolver::expire`] has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.pending
            .iter()
            .map(|(_, pending)| pending.deadline)
            .min()
    }

    /// Drops every query.
    pub(crate) fn clear(&mut self, registry: &Registry) {
        let all: Vec<usize> = self.pending.iter().map(|(index, _)| index).collect();
        for index in all {
            if let Some(mut pending) = self.pending.remove(index) {
                drop_upstream(registry, &mut pending.upstream);
            }
        }
    }
}

impl Pending {
    fn send(
        &mut self,
        registry: &Registry,
        server: SocketAddr,
        token: Token,
    ) -> io::Result<Duration> {
        let random = getrandom::u32().map_err(io::Error::from)?;
        let [a, b, ..] = random.to_be_bytes();
        self.id = u16::from_be_bytes([a, b]);
        message::set_id(&mut self.raw, self.id);
        if matches!(self.origin, Origin::Udp { .. }) {
            let any: IpAddr = match server {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let mut socket = UdpSocket::bind((any, 0).into())?;
            socket.connect(server)?;
            socket.send(&self.raw)?;
            registry.register(&mut socket, token, Interest::READABLE)?;
            self.upstream = Upstream::Udp(socket);
            return Ok(PATIENCE_UDP);
        }
        let mut stream = TcpStream::connect(server)?;
        registry.register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        let len = u16::try_from(self.raw.len()).unwrap_or(u16::MAX);
        let mut output = len.to_be_bytes().to_vec();
        output.extend(&self.raw);
        self.upstream = Upstream::Tcp {
            stream,
            output,
            input: Vec::new(),
        };
        Ok(PATIENCE_TCP)
    }

    /// Gives the length of the answer in `scratch`, once it has come.
    fn receive(&mut self, scratch: &mut [u8]) -> io::Result<Option<usize>> {
        match &mut self.upstream {
            Upstream::None => Ok(None),
            Upstream::Udp(socket) => loop {
                match socket.recv(scratch) {
                    Ok(len) if message::answers(&scratch[..len], &self.query, self.id) => {
                        return Ok(Some(len));
                    }
                    // A late answer to another question, or somebody guesses.
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            },
            Upstream::Tcp {
                stream,
                output,
                input,
            } => {
                if let Some(error) = stream.take_error()? {
                    return Err(error);
                }
                if !converse(stream, output, input, scratch)? {
                    return Ok(None);
                }
                let answer = input.get(2..).unwrap_or_default();
                if !message::answers(answer, &self.query, self.id) {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "the answer is to another question",
                    ));
                }
                scratch[..answer.len()].copy_from_slice(answer);
                Ok(Some(answer.len()))
            }
        }
    }
}

/// Sends what is left of `output` and reads one message into `input`; true when it is whole.
fn converse(
    stream: &mut TcpStream,
    output: &mut Vec<u8>,
    input: &mut Vec<u8>,
    scratch: &mut [u8],
) -> io::Result<bool> {
    use io::ErrorKind::{Interrupted, NotConnected, WouldBlock};
    while !output.is_empty() {
        match stream.write(output) {
            Ok(n) => {
                output.drain(..n);
            }
            Err(error) if matches!(error.kind(), WouldBlock | NotConnected) => return Ok(false),
            Err(error) if error.kind() == Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    loop {
        let wanted = match input.get(..2) {
            Some(&[high, low]) => 2 + usize::from(u16::from_be_bytes([high, low])),
            _ => 2,
        };
        if input.len() == wanted && wanted > 2 {
            return Ok(true);
        }
        let missing = (wanted - input.len()).min(scratch.len());
        if missing == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        match stream.read(&mut scratch[..missing]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => input.extend(&scratch[..n]),
            Err(error) if error.kind() == WouldBlock => return Ok(false),
            Err(error) if error.kind() == Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn drop_upstream(registry: &Registry, upstream: &mut Upstream) {
    let removed = match upstream {
        Upstream::None => return,
        Upstream::Udp(socket) => registry.deregister(socket),
        Upstream::Tcp { stream, .. } => registry.deregister(stream),
    };
    if let Err(error) = removed {
        tracing::debug!(%error, "forgetting a name server's socket");
    }
    *upstream = Upstream::None;
}

fn failure(origin: Origin, query: &Query) -> Answer {
    Answer {
        origin,
        bytes: message::answer_code(query, DnsRcode::ServFail),
        learned: None,
    }
}
