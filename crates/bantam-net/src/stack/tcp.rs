//! TCP connections: smoltcp towards the guest, a socket towards the host.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Interest, Registry};
use smoltcp::iface::{Config as InterfaceConfig, Interface, PollResult, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::{Duration as WireDuration, Instant as WireInstant};
use smoltcp::wire::{HardwareAddress, IpEndpoint};

use super::Kind;
use super::losses::Losses;
use super::output::Output;
use super::pump::{self, Host};
use super::wire::Wire;
use crate::slab::Slab;

/// Bytes that the buffers of all connections share, in each direction. A connection gets an equal part
/// when it opens, between the two bounds; 4096 connections whose ends all stand still hold 336 MiB.
const SHARED: usize = 16 << 20;
/// Bytes of each of a connection's two buffers, at most. They are its largest windows: the more of them
/// are on their way at once, the fewer interrupts they take.
const LARGEST_BUFFER: usize = 1 << 20;
const SMALLEST_BUFFER: usize = 32 << 10;
/// Sockets kept for later connections: the allocator would fill new buffers with zeros.
const SPARES: usize = 4;
/// A connection that carried more has touched its buffers, which are given back to the host.
const SPARE_BYTES: usize = 64 << 10;
/// How much faster smoltcp's clock runs than ours. Its least retransmission time, one second, is made
/// for the internet; to the guest it is 200 ms, as Linux has it.
const PACE: u32 = 5;
/// For how long the guest may take to answer our SYN or our SYN-ACK: 20 s.
const HANDSHAKE: WireDuration = WireDuration::from_secs(20 * PACE as u64);
/// For how long the host's connect may take.
const CONNECT: Duration = Duration::from_secs(75);
/// After so long without a byte a connection is reset (RFC 5382 §5 asks for 2 h 4 min).
pub(super) const IDLE: Duration = Duration::from_secs(2 * 3600 + 4 * 60);
/// The same for one to the name service, which is for a few questions (RFC 7766 §6.2.3).
const NAMES_IDLE: Duration = Duration::from_secs(60);
/// Least pause before a connection that had nothing to send says again that it has.
const RECHECK: Duration = Duration::from_millis(5);
/// For how long an acknowledgement waits for the host's answer to go with: that of a request that one
/// or two segments hold.
const ACK_DELAY: Duration = Duration::from_millis(1);
/// Packets that one connection sends before the next gets its turn.
const TURN: usize = 32;

/// A connection's two ends as the guest sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) guest: SocketAddr,
    pub(super) peer: SocketAddr,
}

/// How a connection's opening went, when it did not succeed.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) key: Key,
    /// The guest's SYN, an IP packet.
    pub(super) syn: Vec<u8>,
    pub(super) error: std::io::Error,
}

pub(super) struct Flow {
    pub(super) key: Key,
    /// Where the host's socket is connected to, and the name the guest knew it by, for a new policy;
    /// `None` for connections that came from outside and for names.
    pub(super) target: Option<Target>,
    pub(super) serial: u64,
    pub(super) host: Host,
    /// The guest's SYN while the host connects.
    syn: Option<Vec<u8>>,
    slot: Slot,
    /// Bytes of data, both ways.
    carried: usize,
    mss: u16,
    /// The guest got a segment of a whole MSS, by itself and not with others in a long frame. Linux
    /// (6.6 on) takes from the first such segment how much memory data needs, and makes its windows
    /// accordingly for the connection's whole life. A long frame needs the least there is, so when it
    /// comes first and its window fills up with frames that are not as long, the receive buffer is
    /// full before the window is, and frames are dropped ("RcvPruned" in its statistics).
    measured: bool,
    losses: Losses,
    /// Bytes of the guest's that came since it was last sent anything.
    unacknowledged: usize,
    /// When they must be acknowledged.
    ack_due: Option<Instant>,
    /// Something happened: it is in `Tcp::ready`.
    queued: bool,
    timer: Option<Instant>,
    last_active: Instant,
}

/// smoltcp's end of a connection: a set of one socket.
struct Slot {
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    /// Bytes of each of its buffers.
    size: usize,
}

impl Slot {
    fn new(size: usize) -> Slot {
        // Pages that the host gives only when they are used, unless the allocator has some already.
        let buffer = || SocketBuffer::new(vec![0; size]);
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(Socket::new(buffer(), buffer()));
        Slot {
            sockets,
            handle,
            size,
        }
    }

    fn socket(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handle)
    }
}

/// Bytes of each buffer of a connection that opens beside `others`.
fn buffer_size(others: usize) -> usize {
    let part = SHARED / (others + 1);
    // A power of two, so that spares fit, less one: the window of our SYN-ACK, which has no unit, smoltcp
    // takes for one in units when it looks at what comes. With this size the unit is such that even so
    // it does not reach beyond the buffer.
    let part = 1 << part.max(1).ilog2();
    part.clamp(SMALLEST_BUFFER, LARGEST_BUFFER) - 1
}

impl Flow {
    /// Notes a segment of the guest's with `len` bytes of data, which was answered already or not.
    fn received(&mut self, answered: bool, len: usize, now: Instant) {
        if answered {
            self.ack_due = None;
            self.unacknowledged = 0;
        } else if len > 0 {
            self.unacknowledged += len;
            self.ack_due.get_or_insert(now + ACK_DELAY);
        }
    }

    /// Whether all that could be sent is an acknowledgement that is not due yet.
    fn may_wait(&self, now: Instant) -> bool {
        let socket = self.slot.sockets.get::<Socket<'_>>(self.slot.handle);
        self.ack_due.is_some_and(|due| now < due)
            && self.unacknowledged <= 2 * usize::from(self.mss)
            && socket.state() == State::Established
            && socket.send_queue() == 0
    }
}

/// A destination as the policy saw it.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) address: SocketAddr,
    pub(super) host: bool,
    pub(super) names: Vec<String>,
}

/// All connections.
pub(super) struct Tcp {
    interface: Interface,
    /// For connections of which the guest has seen no whole segment yet; see [`Flow::measured`].
    short_interface: Interface,
    pub(super) flows: Slab<Flow>,
    spares: Vec<Slot>,
    index: HashMap<Key, usize>,
    ready: VecDeque<usize>,
    timers: BTreeSet<(Instant, usize)>,
    connecting: usize,
    serial: u64,
    epoch: Instant,
    /// Connections whose opening failed since it was last looked at.
    pub(super) refused: Vec<Refused>,
}

impl Tcp {
    pub(super) fn new(output: &mut Output, epoch: Instant) -> Tcp {
        Tcp {
            interface: interface(output, output.longest_packet()),
            short_interface: interface(output, output.mtu),
            flows: Slab::new(),
            spares: Vec::new(),
            index: HashMap::new(),
            ready: VecDeque::new(),
            timers: BTreeSet::new(),
            connecting: 0,
            serial: 0,
            epoch,
            refused: Vec::new(),
        }
    }

    /// The driver negotiated anew: nothing of the guest's is left.
    pub(super) fn reset(&mut self, registry: &Registry, output: &mut Output) {
        let all: Vec<usize> = self.flows.iter().map(|(id, _)| id).collect();
        for id in all {
            self.remove(registry, id, true);
        }
        self.interface = interface(output, output.longest_packet());
        self.short_interface = interface(output, output.mtu);
    }

    pub(super) fn connecting(&self) -> usize {
        self.connecting
    }

    pub(super) fn find(&self, key: &Key) -> Option<usize> {
        self.index.get(key).copied()
    }

    fn at(&self, now: Instant) -> WireInstant {
        let elapsed = now.saturating_duration_since(self.epoch);
        let micros = elapsed.saturating_mul(PACE).as_micros();
        WireInstant::from_micros(i64::try_from(micros).unwrap_or(i64::MAX))
    }

    /// A connection that the guest asked for, with the host's socket on its way. `syn` is the guest's
    /// packet.
    pub(super) fn open(
        &mut self,
        registry: &Registry,
        key: Key,
        target: Target,
        mut stream: TcpStream,
        syn: &[u8],
        now: Instant,
    ) -> std::io::Result<()> {
        let token = Kind::Tcp.token(self.flows.next());
        registry.register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        self.connecting += 1;
        let id = self.insert(
            key,
            Some(target),
            Host::stream(stream),
            Some(syn.to_vec()),
            now,
        );
        self.set_timer(id, now + CONNECT);
        Ok(())
    }

    /// A connection that the guest asked for and that ends in our own name service.
    pub(super) fn open_names(&mut self, output: &mut Output, key: Key, syn: &[u8], now: Instant) {
        let id = self.insert(key, None, Host::names(), None, now);
        self.accept(output, id, syn, now);
    }

    /// A connection from outside.
    pub(super) fn open_inward(
        &mut self,
        registry: &Registry,
        key: Key,
        mut stream: TcpStream,
        now: Instant,
    ) -> std::io::Result<()> {
        let token = Kind::Tcp.token(self.flows.next());
        registry.register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        let id = self.insert(key, None, Host::accepted(stream), None, now);
        let Some(flow) = self.flows.get_mut(id) else {
            return Ok(());
        };
        let socket = flow.slot.socket();
        let (guest, peer) = (IpEndpoint::from(key.guest), IpEndpoint::from(key.peer));
        if let Err(error) = socket.connect(self.interface.context(), guest, peer) {
            tracing::debug!(%error, ?key, "connecting to the guest");
            self.remove(registry, id, true);
            return Ok(());
        }
        self.queue(id);
        Ok(())
    }

    fn insert(
        &mut self,
        key: Key,
        target: Option<Target>,
        host: Host,
        syn: Option<Vec<u8>>,
        now: Instant,
    ) -> usize {
        let size = buffer_size(self.flows.len());
        let fits = |spare: &Slot| spare.size == size;
        let mut slot = match self.spares.iter().position(fits) {
            Some(index) => self.spares.swap_remove(index),
            None => Slot::new(size),
        };
        let socket = slot.socket();
        socket.set_nagle_enabled(false);
        // Acknowledgements go out once a turn, which is a batch of the guest's frames.
        socket.set_ack_delay(None);
        socket.set_timeout(Some(HANDSHAKE));
        self.serial += 1;
        let id = self.flows.insert(Flow {
            key,
            target,
            serial: self.serial,
            host,
            syn,
            slot,
            carried: 0,
            mss: 536,
            measured: false,
            losses: Losses::default(),
            unacknowledged: 0,
            ack_due: None,
            queued: false,
            timer: None,
            last_active: now,
        });
        self.index.insert(key, id);
        id
    }

    /// A segment of a connection that exists.
    pub(super) fn deliver(&mut self, output: &mut Output, id: usize, packet: &[u8], now: Instant) {
        let at = self.at(now);
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        // The host's answer is not here yet; the guest asks again, or has given up.
        if flow.syn.is_some() {
            if pump::is_reset(packet) {
                flow.host.kill();
                self.queue(id);
            }
            return;
        }
        flow.last_active = now;
        let rewritten = pump::rewrite_mss(packet, output, &mut flow.mss);
        let packet = rewritten.as_deref().unwrap_or(packet);
        let mut wire = Wire::new(Some(packet), output, flow.mss);
        self.interface
            .poll_ingress_single(at, &mut wire, &mut flow.slot.sockets);
        let answered = wire.sent > 0;
        flow.losses.sent(wire.end);
        flow.received(answered, pump::data_len(packet), now);
        if let Some(ack) = pump::acknowledgement(packet)
            && flow.losses.acknowledged(&ack)
        {
            self.retransmit(output, id, packet, at);
        }
        self.queue(id);
    }

    /// Has smoltcp send again what the guest lacks, one frame of it: it does that after three
    /// acknowledgements of the same (RFC 5681 §3.2), so it gets the guest's as often as that.
    fn retransmit(&mut self, output: &mut Output, id: usize, packet: &[u8], at: WireInstant) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        let Some(ack) = pump::bare_acknowledgement(packet) else {
            return;
        };
        for _ in 0..3 {
            let mut wire = Wire::new(Some(&ack), output, flow.mss);
            self.interface
                .poll_ingress_single(at, &mut wire, &mut flow.slot.sockets);
        }
    }

    /// Answers a segment that belongs to no connection: a reset, unless it is one.
    pub(super) fn reject(&mut self, output: &mut Output, packet: &[u8], now: Instant) {
        let at = self.at(now);
        let mut nothing = SocketSet::new(Vec::new());
        let mut wire = Wire::new(Some(packet), output, 536);
        self.interface
            .poll_ingress_single(at, &mut wire, &mut nothing);
    }

    /// The guest's SYN is answered.
    fn accept(&mut self, output: &mut Output, id: usize, syn: &[u8], now: Instant) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        let socket = flow.slot.socket();
        let local = IpEndpoint::from(flow.key.peer);
        if let Err(error) = socket.listen(local) {
            tracing::debug!(%error, key = ?flow.key, "answering the guest");
            flow.host.kill();
        }
        self.deliver(output, id, syn, now);
    }

    /// The host's socket of a connection has news.
    pub(super) fn host_event(&mut self, id: usize, readable: bool, writable: bool) {
        if let Some(flow) = self.flows.get_mut(id) {
            flow.host.event(readable, writable);
            self.queue(id);
        }
    }

    /// An answer for a connection to the name service.
    pub(super) fn answer(&mut self, id: usize, serial: u64, bytes: &[u8]) {
        if let Some(flow) = self.flows.get_mut(id)
            && flow.serial == serial
        {
            flow.host.answer(bytes);
            self.queue(id);
        }
    }

    /// Resets a connection at both ends.
    pub(super) fn abort(&mut self, registry: &Registry, output: &mut Output, id: usize) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.syn.is_some() {
            let error = std::io::ErrorKind::ConnectionAborted.into();
            self.give_up(registry, id, error);
            return;
        }
        flow.slot.socket().abort();
        flow.host.kill();
        self.serve(registry, output, id, Instant::now());
    }

    /// How many connections came from outside.
    pub(super) fn inward(&self) -> usize {
        let inward = |flow: &Flow| flow.target.is_none() && !flow.host.is_names();
        self.flows.iter().filter(|(_, flow)| inward(flow)).count()
    }

    /// How many connections are to the name service.
    pub(super) fn names(&self) -> usize {
        let flows = self.flows.iter();
        flows.filter(|(_, flow)| flow.host.is_names()).count()
    }

    /// Connections without a byte for too long.
    pub(super) fn idle(&self, now: Instant) -> Vec<usize> {
        let limit = |flow: &Flow| match flow.host.is_names() {
            true => NAMES_IDLE,
            false => IDLE,
        };
        self.flows
            .iter()
            .filter(|(_, flow)| now.saturating_duration_since(flow.last_active) > limit(flow))
            .map(|(id, _)| id)
            .collect()
    }

    fn queue(&mut self, id: usize) {
        if let Some(flow) = self.flows.get_mut(id)
            && !flow.queued
        {
            flow.queued = true;
            self.ready.push_back(id);
        }
    }

    fn set_timer(&mut self, id: usize, at: Instant) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        // An earlier one that is no longer needed costs a look, a later one would cost a stall.
        if flow.timer.is_some_and(|timer| timer <= at) {
            return;
        }
        if let Some(timer) = flow.timer.replace(at) {
            self.timers.remove(&(timer, id));
        }
        self.timers.insert((at, id));
    }

    /// When [`Tcp::run`] has something to do by itself.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|&(at, _)| at)
    }

    /// Serves each connection that has news, once. Returns whether some have more to do at once;
    /// those that wait for room for frames do not count.
    pub(super) fn run(
        &mut self,
        registry: &Registry,
        output: &mut Output,
        now: Instant,
        mut names: impl FnMut(usize, u64, Vec<u8>) -> Option<Vec<u8>>,
    ) -> bool {
        while let Some(&(at, id)) = self.timers.first()
            && at <= now
        {
            self.timers.remove(&(at, id));
            if let Some(flow) = self.flows.get_mut(id) {
                flow.timer = None;
            }
            self.queue(id);
        }
        for _ in 0..self.ready.len() {
            let Some(id) = self.ready.pop_front() else {
                break;
            };
            let Some(flow) = self.flows.get_mut(id) else {
                continue;
            };
            flow.queued = false;
            while let Some(query) = flow.host.next_query() {
                let serial = flow.serial;
                if let Some(answer) = names(id, serial, query) {
                    flow.host.answer(&answer);
                }
            }
            self.serve(registry, output, id, now);
        }
        !self.ready.is_empty() && output.has_room()
    }

    /// Moves what can be moved of one connection, both ways.
    fn serve(&mut self, registry: &Registry, output: &mut Output, id: usize, now: Instant) {
        let at = self.at(now);
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        if flow.syn.is_some() {
            self.serve_connecting(registry, output, id, now);
            return;
        }
        let socket = flow.slot.socket();
        let moved = pump::move_bytes(socket, &mut flow.host);
        if moved.bytes > 0 {
            flow.last_active = now;
            flow.carried = flow.carried.saturating_add(moved.bytes);
        }
        if matches!(
            socket.state(),
            State::Established | State::CloseWait | State::FinWait1 | State::FinWait2
        ) {
            // A guest may stand still (paused, stopped at a breakpoint) for as long as it likes.
            socket.set_timeout(None);
        }
        if !moved.more && flow.may_wait(now) {
            let due = flow.ack_due;
            if let Some(due) = due {
                self.set_timer(id, due);
            }
            return;
        }
        let headers = if flow.key.guest.is_ipv4() { 40 } else { 60 };
        let whole = usize::from(flow.mss) + headers;
        let mut wire = Wire::new(None, output, flow.mss);
        let mut more = moved.more;
        while wire.sent < TURN {
            let interface = match flow.measured {
                true => &mut self.interface,
                false => &mut self.short_interface,
            };
            let emitted = interface.poll_egress(at, &mut wire, &mut flow.slot.sockets);
            if emitted == PollResult::None {
                break;
            }
            flow.measured |= wire.longest >= whole;
        }
        let sent = wire.sent;
        flow.losses.sent(wire.end);
        if sent > 0 {
            flow.ack_due = None;
            flow.unacknowledged = 0;
        }
        more |= sent >= TURN || !wire.has_room();
        let socket = flow.slot.socket();
        // The guest must get the acknowledgement of its end.
        let acknowledged = !more || socket.state() != State::TimeWait;
        if acknowledged && pump::is_over(socket, &flow.host) {
            let orderly = flow.host.is_orderly();
            self.remove(registry, id, !orderly);
            return;
        }
        if more {
            self.queue(id);
            return;
        }
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        let Some(due) = self.interface.poll_at(at, &flow.slot.sockets) else {
            return;
        };
        let due = if due <= at {
            // It had its turn with room to spare and sent nothing, or has just sent something; it
            // must not be asked in a loop.
            if sent > 0 { now } else { now + RECHECK }
        } else {
            // Not a moment too early: that would be another look.
            now + Duration::from(due - at) / PACE + Duration::from_micros(1)
        };
        if due <= now {
            self.queue(id);
        } else {
            self.set_timer(id, due);
        }
    }

    /// Looks whether the host's connection stands.
    fn serve_connecting(
        &mut self,
        registry: &Registry,
        output: &mut Output,
        id: usize,
        now: Instant,
    ) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        match flow.host.connected() {
            Ok(true) => {
                self.connecting -= 1;
                if let Some(syn) = flow.syn.take() {
                    self.accept(output, id, &syn, now);
                }
            }
            Ok(false) => {
                let since = now.saturating_duration_since(flow.last_active);
                if since >= CONNECT {
                    self.give_up(registry, id, std::io::ErrorKind::TimedOut.into());
                } else {
                    self.set_timer(id, now + (CONNECT - since));
                }
            }
            Err(error) => self.give_up(registry, id, error),
        }
    }

    fn give_up(&mut self, registry: &Registry, id: usize, error: std::io::Error) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        let key = flow.key;
        let syn = flow.syn.take().unwrap_or_default();
        self.connecting -= 1;
        self.remove(registry, id, true);
        self.refused.push(Refused { key, syn, error });
    }

    fn remove(&mut self, registry: &Registry, id: usize, reset: bool) {
        let Some(mut flow) = self.flows.remove(id) else {
            return;
        };
        if flow.syn.is_some() {
            self.connecting -= 1;
        }
        self.index.remove(&flow.key);
        if let Some(timer) = flow.timer {
            self.timers.remove(&(timer, id));
        }
        flow.host.close(registry, reset);
        if flow.carried <= SPARE_BYTES && self.spares.len() < SPARES {
            // Opened again, it begins anew.
            flow.slot.socket().abort();
            self.spares.push(flow.slot);
        }
    }
}

/// An interface of packets up to `mtu`.
fn interface(output: &mut Output, mtu: usize) -> Interface {
    let mut config = InterfaceConfig::new(HardwareAddress::Ip);
    // Sequence numbers and our ports; only the guest sees them, and only its own.
    config.random_seed = getrandom::u64().unwrap_or(0x9e37_79b9_7f4a_7c15);
    let mut wire = Wire::new(None, output, 536);
    wire.mtu = mtu;
    let mut interface = Interface::new(config, &mut wire, WireInstant::ZERO);
    // Every address of the world is ours, as far as the guest sees.
    interface.set_any_ip(true);
    interface
}
