//! The network itself: frames in, frames out, sockets behind.

mod datagrams;
mod frame;
mod ingress;
mod losses;
mod output;
mod outward;
mod ports;
mod pump;
mod reassembly;
mod reply;
mod tcp;
#[cfg(test)]
mod tests;
mod wire;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};

use self::datagrams::{Datagrams, next_port, present};
use self::output::Output;
use self::ports::Bound;
use self::reassembly::Reassembly;
use self::tcp::Tcp;
use crate::control::{Counters, Shared, lock};
use crate::dns::{Names, Origin, Resolver, Servers};
use crate::{Addresses, Config, Error, Limits, Network, Policy, Result};

pub use self::frame::{Checksum, FrameInfo, MAX_FRAME, Offloads, Segmentation};

/// Events taken from the host's poller at once.
const EVENTS: usize = 256;
/// Connections accepted from one port before others get their turn.
const ACCEPTS: usize = 64;
/// How often flows are looked through for idle ones.
const SWEEP: Duration = Duration::from_secs(10);

/// What a descriptor in the poller belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Waker,
    Tcp,
    Datagram,
    Query,
    TcpPort,
    UdpPort,
}

impl Kind {
    const ALL: [Kind; 6] = [
        Kind::Waker,
        Kind::Tcp,
        Kind::Datagram,
        Kind::Query,
        Kind::TcpPort,
        Kind::UdpPort,
    ];

    /// The token of the `index`th of this kind.
    fn token(self, index: usize) -> Token {
        Token(index << 3 | self as usize)
    }

    fn of(token: Token) -> Option<(Kind, usize)> {
        Some((*Kind::ALL.get(token.0 & 7)?, token.0 >> 3))
    }
}

/// A machine's network. It has no thread of its own; see the [crate's documentation](crate) for the
/// loop that drives it.
pub struct Stack {
    addresses: Addresses,
    limits: Limits,
    shared: Arc<Shared>,
    policy: Policy,
    names: Names,
    poll: Poll,
    events: Events,
    output: Output,
    tcp: Tcp,
    datagrams: Datagrams,
    resolver: Resolver,
    reassembly: Reassembly,
    listeners: Vec<Listener>,
    swept: Instant,
    /// A port could not accept; the next sweep tries again.
    accept_later: bool,
    /// Frames reported as dropped so far.
    dropped: usize,
}

/// A TCP port of the host that leads inward.
struct Listener {
    socket: TcpListener,
    guest: SocketAddr,
    /// There may be connections: its turn was over, or there were too many flows.
    waiting: bool,
}

/// Makes a network, with its ports of the host open: connections to them wait until the guest runs.
///
/// # Errors
/// [`Error::Setting`] for a setting out of bounds, [`Error::Listen`] for a port that cannot be
/// listened on, [`Error::Setup`] when the host is out of descriptors.
pub fn open(config: &Config) -> Result<(Network, Stack)> {
    config.check()?;
    let (bound, ports) = ports::bind(config)?;
    let poll = Poll::new().map_err(Error::Setup)?;
    let waker = Waker::new(poll.registry(), Kind::Waker.token(0)).map_err(Error::Setup)?;
    let shared = Arc::new(Shared {
        waker,
        update: Default::default(),
        events: Default::default(),
        counters: Counters::default(),
        ports,
    });
    let now = Instant::now();
    let mut output = Output::new(&config.addresses, config.mtu);
    let mut stack = Stack {
        addresses: config.addresses.clone(),
        limits: config.limits.clone(),
        shared: shared.clone(),
        policy: config.policy.clone(),
        names: Names::default(),
        events: Events::with_capacity(EVENTS),
        tcp: Tcp::new(&mut output, now),
        output,
        datagrams: Datagrams::new(config.limits.datagram_flows),
        resolver: Resolver::new(
            Servers::new(&config.dns_servers),
            config.limits.dns_queries,
            |index| Kind::Query.token(index),
        ),
        reassembly: Reassembly::default(),
        listeners: Vec::new(),
        poll,
        swept: now,
        accept_later: false,
        dropped: 0,
    };
    for one in bound {
        stack.add_port(one).map_err(Error::Setup)?;
    }
    Ok((Network { shared }, stack))
}

impl AsFd for Stack {
    /// Readable when [`Stack::run`] has something to do. To be waited for, level-triggered; not to be
    /// read.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll.registry().as_fd()
    }
}

impl Stack {
    /// The driver was set up anew (or for the first time) and takes `offloads`: what there was of
    /// connections and frames is gone, at the host's end, too. Ports of the host stay open.
    pub fn reset(&mut self, offloads: Offloads) {
        self.output.clear();
        self.output.offloads = Offloads {
            checksum: offloads.checksum,
            segmentation: offloads.segmentation && offloads.checksum,
        };
        let registry = self.poll.registry();
        self.tcp.reset(registry, &mut self.output);
        self.datagrams.reset(registry);
        self.resolver.clear(registry);
        self.reassembly = Reassembly::default();
    }

    /// Does everything that is due, for the guest's frames since the last call, for sockets of the
    /// host and for timers; a bounded part of it. Call it again after the returned time (`None`:
    /// there is no timer), or when the descriptor is readable, or after [`Stack::receive`] or
    /// [`Stack::take_frame`].
    pub fn run(&mut self) -> Option<Duration> {
        if let Err(error) = self.poll.poll(&mut self.events, Some(Duration::ZERO))
            && error.kind() != io::ErrorKind::Interrupted
        {
            tracing::error!(%error, "waiting for the host's sockets");
        }
        let now = Instant::now();
        let events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        for event in &events {
            let readable = event.is_readable() || event.is_read_closed() || event.is_error();
            let writable = event.is_writable() || event.is_write_closed() || event.is_error();
            match Kind::of(event.token()) {
                Some((Kind::Waker, _)) => self.take_update(),
                Some((Kind::Tcp, id)) => self.tcp.host_event(id, readable, writable),
                Some((Kind::Datagram, id)) => {
                    self.datagrams
                        .flow_event(&mut self.output, &self.addresses, id, now);
                }
                Some((Kind::Query, index)) => {
                    let answer = self.resolver.ready(self.poll.registry(), index, now);
                    if let Some(answer) = answer {
                        self.give_answer(answer, now);
                    }
                }
                Some((Kind::TcpPort, index)) => self.accept(index, now),
                Some((Kind::UdpPort, index)) => self.datagrams.port_event(
                    self.poll.registry(),
                    &mut self.output,
                    &self.addresses,
                    index,
                    now,
                ),
                None => {}
            }
        }
        self.events = events;
        for answer in self.resolver.expire(self.poll.registry(), now) {
            self.give_answer(answer, now);
        }
        let mut more = self.serve_tcp(now);
        more |= self
            .datagrams
            .resume(self.poll.registry(), &mut self.output, &self.addresses, now);
        for index in 0..self.listeners.len() {
            if self.listeners[index].waiting && self.room_inward() > 0 {
                self.accept(index, now);
                more |= self.listeners[index].waiting && self.room_inward() > 0;
            }
        }
        self.sweep(now);
        self.count();
        if more {
            return Some(Duration::ZERO);
        }
        self.next_deadline()
            .map(|at| at.saturating_duration_since(now))
    }

    /// Offers the oldest frame for the guest to `take`, which copies it to the guest's buffer and
    /// says whether it did; if not, the frame stays. False when there was no frame or it stays.
    pub fn take_frame(&mut self, take: impl FnOnce(&[u8], &FrameInfo) -> bool) -> bool {
        let counters = &self.shared.counters;
        self.output
            .take(|bytes, info| {
                let taken = take(bytes, info);
                if taken {
                    Counters::add(&counters.frames_to_guest, 1);
                    Counters::add(&counters.bytes_to_guest, bytes.len());
                }
                taken
            })
            .unwrap_or(false)
    }

    /// Whether a frame waits for the guest.
    pub fn has_frame(&self) -> bool {
        !self.output.is_empty()
    }

    fn serve_tcp(&mut self, now: Instant) -> bool {
        // The name service needs the rest of the network while connections are served.
        let mut queries = Vec::new();
        let more = self.tcp.run(
            self.poll.registry(),
            &mut self.output,
            now,
            |flow, serial, query| {
                queries.push((flow, serial, query));
                None
            },
        );
        for (flow, serial, query) in queries {
            self.ask(&query, Origin::Tcp { flow, serial }, now);
        }
        for refused in std::mem::take(&mut self.tcp.refused) {
            self.tell_refused(&refused, now);
        }
        more
    }

    fn next_deadline(&self) -> Option<Instant> {
        let flows = self.tcp.flows.len() > 0 || self.datagrams.flows.len() > 0;
        let sweep = (flows || self.accept_later).then(|| self.swept + SWEEP);
        [self.tcp.deadline(), self.resolver.deadline(), sweep]
            .into_iter()
            .flatten()
            .min()
    }

    fn sweep(&mut self, now: Instant) {
        if now.saturating_duration_since(self.swept) < SWEEP {
            return;
        }
        self.swept = now;
        if std::mem::take(&mut self.accept_later) {
            for index in 0..self.listeners.len() {
                self.accept(index, now);
            }
        }
        let registry = self.poll.registry();
        self.datagrams.expire(registry, now);
        for id in self.tcp.idle(now) {
            self.tcp.abort(registry, &mut self.output, id);
        }
        let tcp = self.tcp.flows.iter().map(|(_, flow)| &flow.target);
        let datagrams = self.datagrams.flows.iter().map(|(_, flow)| &flow.target);
        for target in tcp.chain(datagrams).flatten() {
            self.names.used(target.address.ip(), now);
        }
    }

    fn count(&mut self) {
        let counters = &self.shared.counters;
        let store = |counter: &std::sync::atomic::AtomicU64, value: usize| {
            counter.store(value as u64, Ordering::Relaxed);
        };
        store(&counters.tcp_flows, self.tcp.flows.len());
        store(&counters.datagram_flows, self.datagrams.flows.len());
        Counters::add(&counters.dropped, self.output.dropped - self.dropped);
        self.dropped = self.output.dropped;
    }

    fn take_update(&mut self) {
        let Some(policy) = lock(&self.shared.update).take() else {
            return;
        };
        self.policy = policy;
        self.apply_policy(Instant::now());
    }

    fn add_port(&mut self, bound: Bound) -> io::Result<()> {
        match bound {
            Bound::Udp(socket, guest) => {
                self.datagrams.add_port(self.poll.registry(), socket, guest)
            }
            Bound::Tcp(mut socket, guest) => {
                let token = Kind::TcpPort.token(self.listeners.len());
                self.poll
                    .registry()
                    .register(&mut socket, token, Interest::READABLE)?;
                self.listeners.push(Listener {
                    socket,
                    guest,
                    waiting: false,
                });
                Ok(())
            }
        }
    }

    /// Takes connections to a port of the host. While there are too many flows, they wait in the
    /// host's queue.
    fn accept(&mut self, index: usize, now: Instant) {
        let room = self.room_inward();
        for done in 0..ACCEPTS {
            let Some(listener) = self.listeners.get_mut(index) else {
                return;
            };
            listener.waiting = true;
            if done >= room {
                return;
            }
            match listener.socket.accept() {
                Ok((stream, client)) => {
                    let guest = listener.guest;
                    self.open_inward(guest, client, stream, now);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    listener.waiting = false;
                    return;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The client has gone again.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Out of descriptors; to be tried again, but not at once.
                    tracing::debug!(%error, "accepting a connection to a port");
                    listener.waiting = false;
                    self.accept_later = true;
                    return;
                }
            }
        }
    }

    /// How many connections from outside may be taken: strangers do not get all that the guest may
    /// have.
    fn room_inward(&self) -> usize {
        let room = |limit: usize, used: usize| limit.saturating_sub(used);
        let all = room(self.limits.tcp_flows, self.tcp.flows.len());
        all.min(room(self.limits.tcp_flows / 4 * 3, self.tcp.inward()))
    }

    fn open_inward(
        &mut self,
        guest: SocketAddr,
        client: SocketAddr,
        stream: TcpStream,
        now: Instant,
    ) {
        let mut peer = present(&self.addresses, guest.ip(), client);
        for _ in 0..64 {
            let key = tcp::Key { guest, peer };
            if self.tcp.find(&key).is_none() {
                let registry = self.poll.registry();
                if let Err(error) = self.tcp.open_inward(registry, key, stream, now) {
                    tracing::debug!(%error, "taking a connection to a port");
                }
                return;
            }
            peer.set_port(next_port(peer.port()));
        }
    }
}
