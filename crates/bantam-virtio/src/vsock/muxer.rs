//! Moves packets between the rings and the connections.
//!
//! The muxer is the device worker's, which holds its lock for a pass at a time. The thread of a caller
//! that opens a connection has it for a moment when it is free: while the device is at rest, it puts
//! its own request and first bytes into the ring ([`Muxer::open_now`]), so that they wake nobody. It
//! takes nothing that the guest sends.
//!
//! One pass does a bounded amount of work in each direction and interrupts the driver once for each
//! ring. Whoever has something for the guest stands in `line`, once, and is served in turn, a burst
//! at a time. When the guest posts no receive buffers, answers pile up only to a cap, after which the
//! transmit ring is left alone until there is room: the guest slows down itself and nobody else.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::awaited::{Awaited, Told};
use super::connection::{Connection, Phase, Violation};
use super::host::{Connect, Opening, Shared};
use super::packet::{HEADER_LEN, Header, TYPE_STREAM, op, shutdown};
use super::{HOST_CID, MAX_CONNECTIONS, NAME, drain, host};
use crate::sys::{self, Interest, Poller, Watcher};
use crate::worker::Stop;
use crate::{ActiveQueue, Chain, Error, GuestRam, Result};

/// Chains of one ring handled in a pass.
const BATCH: usize = 64;
/// Receive buffers that a caller's thread may fill: its request, its first bytes and the ends of other
/// connections are fewer, with Linux's buffers.
const CALLER_BATCH: usize = 16;
/// Receive buffers without room that are looked at for one packet.
const MAX_USELESS: usize = 8;
/// How long an answer of the guest that nothing depends on may wait in the ring, should nothing come
/// after it: at first, and when it has turned out to be merely slow.
const PATIENCE: Duration = Duration::from_millis(20);
const MAX_PATIENCE: Duration = Duration::from_millis(80);
/// Receive buffers filled by one read of a stream: 128 KiB with Linux's 4 KiB buffers.
const MAX_BURST: usize = 32;
/// Resets waiting for receive buffers before the transmit ring is left alone.
const MAX_REPLIES: usize = 256;
/// Host ports of connections that the host opens start here, above what a listener would choose.
const FIRST_EPHEMERAL_PORT: u32 = 1 << 30;

const STOP: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;
const RX_KICK: u64 = u64::MAX - 2;
const TX_KICK: u64 = u64::MAX - 3;
const TIMER: u64 = u64::MAX - 4;

/// The device's rings.
pub(super) struct Rings {
    rx: ActiveQueue,
    tx: ActiveQueue,
    /// The event ring, if this transport gives it to us. There is no event to send: a guest learns
    /// of a transport reset (§5.10.6.7) only after migration.
    _event: Option<ActiveQueue>,
}

impl Rings {
    pub(super) fn new(queues: Vec<ActiveQueue>) -> Result<Rings> {
        let (mut rx, mut tx, mut event) = (None, None, None);
        for queue in queues {
            match queue.index() {
                0 => rx = Some(queue),
                1 => tx = Some(queue),
                _ => event = Some(queue),
            }
        }
        let missing = |index| Error::MissingQueue {
            device: NAME,
            index,
        };
        Ok(Rings {
            rx: rx.ok_or_else(|| missing(0))?,
            tx: tx.ok_or_else(|| missing(1))?,
            _event: event,
        })
    }
}

/// The muxer, while the device is active. Its lock is taken before that of [`Shared`], never after.
pub(super) type Slot = Mutex<Option<Muxer>>;

pub(super) fn lock(slot: &Slot) -> MutexGuard<'_, Option<Muxer>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves `rings` until stopped. Meanwhile the muxer is in `slot`.
pub(super) fn run(
    stop: &Stop,
    rings: Rings,
    shared: &Arc<Shared>,
    slot: &Slot,
    guest_cid: u64,
) -> io::Result<()> {
    let mut poller = Poller::new()?;
    poller.add(sys::event_as_fd(stop.event()), STOP, Interest::READ)?;
    let muxer = Muxer::new(rings, shared.clone(), poller.watcher(), guest_cid)?;
    shared.attach(poller.watcher());
    *lock(slot) = Some(muxer);
    let serving = Serving { shared, slot };
    let result = serve(stop, &mut poller, shared, slot);
    if let Some(muxer) = serving.end() {
        muxer.finish();
    }
    result
}

/// While the worker serves the muxer. However that ends, streams do not stay behind that nobody serves.
struct Serving<'a> {
    shared: &'a Shared,
    slot: &'a Slot,
}

impl Serving<'_> {
    fn end(&self) -> Option<Muxer> {
        self.shared.detach();
        lock(self.slot).take()
    }
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        // Only a panic leaves a muxer here.
        drop(self.end());
    }
}

/// Tells the log that the stream of a connection cannot be watched.
fn cannot_watch(shared: &Shared, error: &io::Error) {
    if shared.warnings.watching.first() {
        tracing::error!(%error, "watching a vsock stream");
    }
}

fn serve(stop: &Stop, poller: &mut Poller, shared: &Shared, slot: &Slot) -> io::Result<()> {
    let mut ready = Vec::new();
    loop {
        let more = match lock(slot).as_mut() {
            Some(muxer) => muxer.work(&ready)?,
            None => return Ok(()),
        };
        ready.clear();
        // Without the muxer's lock: from here on, whoever wants something has it or wakes the worker.
        let sleep = !more && shared.falls_asleep();
        poller.wait(&mut ready, (!sleep).then_some(Duration::ZERO))?;
        if sleep {
            shared.is_awake();
        }
        if stop.requested() {
            return Ok(());
        }
    }
}

pub(super) struct Muxer {
    rx: ActiveQueue,
    tx: ActiveQueue,
    _event: Option<ActiveQueue>,
    memory: Arc<GuestRam>,
    shared: Arc<Shared>,
    guest_cid: u64,
    /// What the worker waits for.
    watcher: Watcher,
    connections: HashMap<u64, Connection>,
    /// Connections that the guest knows, by host port and guest port.
    by_ports: HashMap<(u32, u32), u64>,
    /// Connections that have something for the guest, each once.
    line: VecDeque<u64>,
    /// Resets for the guest that belong to no connection (any more).
    replies: VecDeque<Header>,
    /// What the guest should say, and nobody need be woken for.
    awaited: Awaited,
    /// Packets of the guest for which it does not kick, should it send no more.
    unkicked: u16,
    /// How long they may wait.
    patience: Duration,
    /// The guest has said something that is no such answer.
    has_news: bool,
    next_port: u32,
    /// There was something for the guest and no receive buffer for it.
    starved: bool,
}

impl Muxer {
    fn new(
        rings: Rings,
        shared: Arc<Shared>,
        watcher: Watcher,
        guest_cid: u64,
    ) -> io::Result<Muxer> {
        let Rings { rx, tx, _event } = rings;
        watcher.add(sys::event_as_fd(shared.wake()), WAKE, Interest::READ)?;
        watcher.add(shared.timer(), TIMER, Interest::READ)?;
        watcher.add(sys::event_as_fd(rx.kick()), RX_KICK, Interest::READ)?;
        watcher.add(sys::event_as_fd(tx.kick()), TX_KICK, Interest::READ)?;
        Ok(Muxer {
            memory: rx.memory().clone(),
            rx,
            tx,
            _event,
            shared,
            guest_cid,
            watcher,
            connections: HashMap::new(),
            by_ports: HashMap::new(),
            line: VecDeque::new(),
            replies: VecDeque::new(),
            awaited: Awaited::default(),
            unkicked: 0,
            patience: PATIENCE,
            has_news: false,
            next_port: FIRST_EPHEMERAL_PORT,
            starved: false,
        })
    }

    /// The worker's turn: what it was woken for, and a pass. True if there is more to do right away.
    fn work(&mut self, ready: &[sys::Readiness]) -> io::Result<bool> {
        for event in ready {
            match event.token {
                STOP => {}
                WAKE => sys::drain(self.shared.wake())?,
                TIMER => {
                    if self.shared.has_rung()? {
                        self.look();
                    }
                }
                RX_KICK => self.kicked(RX_KICK, event.hung_up)?,
                TX_KICK => self.kicked(TX_KICK, event.hung_up)?,
                id => self.stream_ready(id, event)?,
            }
        }
        self.close_parted();
        self.open_connections();
        Ok(self.pass())
    }

    /// Takes what the guest has not kicked for, as it has not said all that was expected for a while.
    fn look(&mut self) {
        self.has_news = false;
        self.serve_tx(self.unkicked.into());
        let slow = !self.has_news && self.expected() > 0;
        if slow && self.patience < MAX_PATIENCE {
            self.patience *= 2;
        } else if slow || self.has_news {
            self.awaited.disappointed();
            self.patience = PATIENCE;
        }
    }

    /// On a caller's thread: opens a connection whose stream holds its first bytes already and asks
    /// the guest. Gives it back if the worker is to do that, because others wait for their turn.
    pub(super) fn open_now(&mut self, connect: Connect) -> Option<Connect> {
        if !self.is_at_rest() || self.connections.len() >= MAX_CONNECTIONS {
            return Some(connect);
        }
        let id = connect.id;
        // First, as the guest answers to it at once, and what it answers to a request later.
        self.close_parted();
        self.open(connect);
        let more = self.serve_caller();
        // Not before its bytes were taken out of it: they would be news for the worker.
        if let Some(connection) = self.connections.get(&id)
            && let Err(error) = (self.watcher).add(connection.stream(), id, connection.interest())
        {
            cannot_watch(&self.shared, &error);
            self.reset(id);
        }
        self.leave_rest(more);
        None
    }

    /// On a caller's thread: closes what callers have parted with. False if the worker is to do that.
    pub(super) fn close_now(&mut self) -> bool {
        if !self.is_at_rest() {
            return false;
        }
        self.close_parted();
        let more = self.serve_caller();
        self.leave_rest(more);
        true
    }

    fn is_at_rest(&self) -> bool {
        self.line.is_empty() && self.replies.is_empty() && !self.starved
    }

    /// Tells the guest what a caller has for it. True if there is something to do right away.
    fn serve_caller(&mut self) -> bool {
        self.serve_rx(CALLER_BATCH);
        // Before the guest hears of it, which answers at once and would still kick for that.
        let more = self.rest();
        self.rx.notify();
        more
    }

    /// Leaves to the worker what a caller has not done.
    fn leave_rest(&self, more: bool) {
        let waiting = !self.line.is_empty() || !self.replies.is_empty();
        if more || waiting && !self.starved {
            self.shared.wake_muxer();
        }
    }

    /// One bounded pass over both rings. True if there is more to do right away.
    fn pass(&mut self) -> bool {
        self.tx.disable_kicks();
        self.rx.disable_kicks();
        self.unkicked = 0;
        let tx_full = self.serve_tx(BATCH);
        let rx_full = self.serve_rx(BATCH);
        // Before the guest hears of anything, which answers at once and would still kick for that.
        let more = tx_full || rx_full || self.rest();
        self.tx.notify();
        self.rx.notify();
        more
    }

    /// Has the worker woken for what is next. True if there is something to do right away.
    fn rest(&mut self) -> bool {
        let expected = self.expected();
        self.unkicked = expected;
        if expected > 0 {
            self.shared.expects(self.patience);
        } else {
            self.shared.expects_nothing();
        }
        // Without room for answers the transmit ring waits for receive buffers; with news for the
        // guest and no buffer, a kick of the receive ring is wanted, and not otherwise.
        let tx_more = self.may_reply() && self.tx.enable_kicks_after(expected);
        let rx_more = self.starved && self.rx.enable_kicks();
        tx_more || rx_more
    }

    /// Packets of the guest that should come and that nobody need be woken for: the answer to a
    /// request that has gone out with all there was to send, the last word about a connection that
    /// the host has closed. They are seen together with the next packet.
    fn expected(&self) -> u16 {
        self.awaited.count(|ports| {
            let id = self.by_ports.get(&ports);
            let connection = id.and_then(|id| self.connections.get(id));
            !connection.is_some_and(Connection::needs_no_answer)
        })
    }

    /// The device stops: what the guest sent so far still goes to the host.
    fn finish(mut self) {
        let size = usize::from(self.tx.state().size);
        self.serve_tx(size);
        let unread: Vec<_> = self
            .connections
            .into_values()
            .filter(Connection::has_backlog)
            .collect();
        if !unread.is_empty() {
            drain::start(unread, &self.shared.warnings.draining);
        }
    }

    fn kicked(&mut self, token: u64, hung_up: bool) -> io::Result<()> {
        let queue = if token == RX_KICK {
            &mut self.rx
        } else {
            &mut self.tx
        };
        if hung_up || sys::drain(queue.kick()).is_err() {
            queue.mark_broken(&"its kick descriptor failed");
            self.watcher.remove(sys::event_as_fd(queue.kick()))?;
        }
        Ok(())
    }

    /// A host's stream changed.
    fn stream_ready(&mut self, id: u64, event: &sys::Readiness) -> io::Result<()> {
        if !self.connections.contains_key(&id) {
            self.open_connections();
        }
        let Some(connection) = self.connections.get_mut(&id) else {
            return Ok(());
        };
        if event.writable {
            connection.flush();
            // One that a caller has parted with meanwhile is watched no more.
            if !connection.has_backlog() && !connection.is_hung_up() {
                let interest = connection.interest();
                self.watcher.modify(connection.stream(), id, interest)?;
            }
        }
        if event.readable || event.hung_up {
            connection.begin();
        }
        if event.readable {
            connection.readable = true;
        }
        if event.hung_up {
            connection.host_hung_up();
        }
        self.settle(id);
        Ok(())
    }

    /// Opens what the host asked for.
    fn open_connections(&mut self) {
        while let Some(connect) = self.shared.next_connect() {
            if self.connections.len() >= MAX_CONNECTIONS {
                if self.shared.warnings.crowded.first() {
                    tracing::warn!(
                        port = connect.guest_port,
                        "too many vsock connections; not connecting"
                    );
                }
                continue;
            }
            if connect.opening != Opening::AtOnce
                && !connect.watched
                && let Err(error) = (self.watcher).add(&connect.stream, connect.id, Interest::EDGE)
            {
                cannot_watch(&self.shared, &error);
                continue;
            }
            self.open(connect);
        }
    }

    fn open(&mut self, connect: Connect) {
        let Connect {
            id,
            guest_port,
            stream,
            opening,
            ..
        } = connect;
        let host_port = self.free_port(guest_port);
        let connection = match opening {
            // Its stream is watched from when the guest accepts: until then a wake-up is wasted.
            Opening::AtOnce => Connection::to_guest(host_port, guest_port, stream),
            Opening::OnWrite => Connection::to_guest_on_write(host_port, guest_port, stream),
            Opening::Written => Connection::to_guest_with_bytes(host_port, guest_port, stream),
        };
        self.insert(id, connection);
    }

    /// Closes what its callers have parted with. The poller is not to tell of that.
    fn close_parted(&mut self) {
        for (id, stream) in self.shared.take_parted() {
            let Some(connection) = self.connections.get_mut(&id) else {
                host::end(&stream);
                continue;
            };
            if let Err(error) = self.watcher.remove(connection.stream()) {
                tracing::debug!(%error, "a vsock stream was not watched");
            }
            host::end(&stream);
            connection.flush();
            connection.host_hung_up();
            self.settle(id);
        }
    }

    fn free_port(&mut self, guest_port: u32) -> u32 {
        // Ends: there are far more ports than connections.
        loop {
            let port = self.next_port;
            self.next_port = port.checked_add(1).unwrap_or(FIRST_EPHEMERAL_PORT);
            if !self.by_ports.contains_key(&(port, guest_port)) {
                return port;
            }
        }
    }

    fn insert(&mut self, id: u64, connection: Connection) {
        let ports = (connection.state.host_port, connection.state.guest_port);
        self.connections.insert(id, connection);
        self.by_ports.insert(ports, id);
        self.settle(id);
    }

    /// After a change: has the connection stand in line if it has news, and forgets it if it is
    /// over.
    fn settle(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        if connection.state.phase == Phase::Draining {
            if !connection.has_backlog() {
                self.connections.remove(&id);
            }
        } else if !connection.in_line && connection.has_news() {
            connection.in_line = true;
            self.line.push_back(id);
        }
    }

    /// Ends a connection for the guest.
    fn end(&mut self, id: u64) {
        if let Some(connection) = self.connections.get_mut(&id) {
            let ports = (connection.state.host_port, connection.state.guest_port);
            self.by_ports.remove(&ports);
            self.awaited.over(ports);
            if std::mem::take(&mut connection.in_line) {
                // A guest without receive buffers would make the line grow without end.
                self.line.retain(|&waiting| waiting != id);
            }
            connection.drain();
            self.settle(id);
        }
    }

    fn may_reply(&self) -> bool {
        self.replies.len() < MAX_REPLIES
    }

    /// Takes up to `budget` packets from the guest. True if there may be more.
    fn serve_tx(&mut self, budget: usize) -> bool {
        for _ in 0..budget {
            if !self.may_reply() {
                return false;
            }
            let Some(chain) = self.tx.pop() else {
                return false;
            };
            self.receive(&chain);
            self.tx.push_used(chain, 0);
        }
        true
    }

    fn receive(&mut self, chain: &Chain) {
        let mut bytes = [0; HEADER_LEN as usize];
        if chain.readable().read_at(&self.memory, 0, &mut bytes) < bytes.len() {
            return;
        }
        let header = Header::decode(&bytes);
        if header.src_cid != self.guest_cid {
            tracing::debug!(
                cid = header.src_cid,
                "dropping a packet with a false sender"
            );
            return;
        }
        let payload = chain.readable().len() - HEADER_LEN;
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM || header.len > payload {
            self.reply_reset(&header);
            return;
        }
        self.has_news |= !matches!(header.op, op::RESPONSE | op::CREDIT_UPDATE | op::RST);
        let ports = (header.dst_port, header.src_port);
        let Some(&id) = self.by_ports.get(&ports) else {
            match header.op {
                op::REQUEST => self.requested(&header),
                op::RST => self.awaited.reset_unknown(ports),
                _ => self.reply_reset(&header),
            }
            return;
        };
        self.dispatch(id, &header, chain);
    }

    /// A packet of a connection we know.
    fn dispatch(&mut self, id: u64, header: &Header, chain: &Chain) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.take_credit(header);
        let ports = (header.dst_port, header.src_port);
        self.awaited.said(ports, header.op, connection.is_early());
        let outcome = match header.op {
            op::RESPONSE if connection.is_watched() => connection.accepted(),
            op::RESPONSE => connection.accepted().and_then(|()| {
                let interest = connection.interest();
                let added = self.watcher.add(connection.stream(), id, interest);
                added.map_err(|error| {
                    cannot_watch(&self.shared, &error);
                    Violation("its stream cannot be watched")
                })
            }),
            op::RW => {
                let mut slices = Vec::with_capacity(4);
                chain
                    .readable()
                    .slices(&self.memory, HEADER_LEN, header.len, &mut slices);
                let had_backlog = connection.has_backlog();
                let received = connection.receive(header.len, &slices);
                if !had_backlog && connection.has_backlog() {
                    let interest = connection.interest();
                    if let Err(error) = self.watcher.modify(connection.stream(), id, interest) {
                        cannot_watch(&self.shared, &error);
                    }
                }
                received
            }
            op::CREDIT_UPDATE => Ok(()),
            op::CREDIT_REQUEST => {
                connection.owe_credit_update();
                Ok(())
            }
            op::SHUTDOWN => {
                if connection.guest_shut(header.flags) {
                    // The guest waits for this before it forgets the connection.
                    self.reply_reset(header);
                    self.end(id);
                    return;
                }
                Ok(())
            }
            op::RST => {
                self.end(id);
                return;
            }
            _ => Err(Violation("an operation out of place")),
        };
        match outcome {
            Ok(()) => self.settle(id),
            Err(violation) => {
                tracing::debug!(
                    host_port = header.dst_port,
                    guest_port = header.src_port,
                    reason = violation.0,
                    "resetting a vsock connection"
                );
                self.reply_reset(header);
                self.end(id);
            }
        }
    }

    /// The guest asks for a connection.
    fn requested(&mut self, header: &Header) {
        if let Err(error) = self.accept(header) {
            let port = header.dst_port;
            // The guest's own doing, or the host's lack of something.
            let is_guests = matches!(
                error.kind(),
                io::ErrorKind::ConnectionRefused | io::ErrorKind::QuotaExceeded
            );
            if !is_guests && self.shared.warnings.accepting.first() {
                tracing::warn!(port, %error, "refusing a vsock connection");
            } else {
                tracing::debug!(port, %error, "refusing a vsock connection");
            }
            self.reply_reset(header);
        }
    }

    fn accept(&mut self, header: &Header) -> io::Result<()> {
        if !self.shared.is_listening(header.dst_port) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        if !self.shared.offer(header.dst_port, theirs) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let connection = Connection::from_guest(header, ours);
        let (id, interest) = (self.shared.next_id(), connection.interest());
        self.watcher.add(connection.stream(), id, interest)?;
        self.insert(id, connection);
        Ok(())
    }

    /// Ends a connection for both sides.
    fn reset(&mut self, id: u64) {
        if let Some(connection) = self.connections.get_mut(&id) {
            let header = connection.header(self.guest_cid, op::RST, 0, 0);
            self.replies.push_back(header);
            self.end(id);
        }
    }

    fn reply_reset(&mut self, header: &Header) {
        if header.op != op::RST {
            self.replies.push_back(header.reset_reply());
        }
    }

    /// Fills up to about `budget` receive buffers. True if there may be more to send.
    fn serve_rx(&mut self, budget: usize) -> bool {
        self.starved = false;
        let mut used = 0;
        while used < budget {
            if let Some(reply) = self.replies.front().copied() {
                let Some(chain) = self.pop_rx(&mut used) else {
                    return false;
                };
                self.replies.pop_front();
                self.send(chain, &reply);
                continue;
            }
            let Some(id) = self.line.pop_front() else {
                return false;
            };
            let Some(connection) = self.connections.get_mut(&id) else {
                continue;
            };
            connection.in_line = false;
            if connection.owes() {
                let Some(chain) = self.pop_rx(&mut used) else {
                    self.first_in_line(id);
                    return false;
                };
                self.send_owed(id, chain);
            } else if connection.has_sendable_data() && !self.send_data(id, &mut used) {
                self.first_in_line(id);
                return false;
            }
            self.settle(id);
        }
        true
    }

    fn first_in_line(&mut self, id: u64) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.in_line = true;
            self.line.push_front(id);
        }
    }

    /// A receive buffer with room for a header at least; others go back unused.
    fn pop_rx(&mut self, used: &mut usize) -> Option<Chain> {
        // If there are more of them, kicks cannot be enabled, and the next pass goes on.
        for _ in 0..MAX_USELESS {
            let Some(chain) = self.rx.pop() else { break };
            *used += 1;
            if chain.writable().len() > HEADER_LEN {
                return Some(chain);
            }
            self.rx.push_used(chain, 0);
        }
        self.starved = true;
        None
    }

    fn send(&mut self, chain: Chain, header: &Header) {
        let bytes = header.encode();
        let written = chain.writable().write_at(&self.memory, 0, &bytes);
        let written = u32::try_from(written).unwrap_or(HEADER_LEN) + header.len;
        self.rx.push_used(chain, written);
    }

    fn send_owed(&mut self, id: u64, chain: Chain) {
        let guest_cid = self.guest_cid;
        let packet = self.connections.get_mut(&id).and_then(|connection| {
            let (op, flags) = connection.next_owed()?;
            Some(connection.header(guest_cid, op, flags, 0))
        });
        match packet {
            Some(header) => {
                let ports = (header.src_port, header.dst_port);
                match (header.op, header.flags) {
                    (op::REQUEST, _) => self.awaited.told(ports, Told::Request),
                    (op::SHUTDOWN, shutdown::BOTH) => self.awaited.told(ports, Told::End),
                    _ => {}
                }
                self.send(chain, &header);
            }
            None => self.rx.undo_pop(chain),
        }
    }

    /// Sends one burst of a stream's bytes. False if there was no receive buffer.
    fn send_data(&mut self, id: u64, used: &mut usize) -> bool {
        let Some(connection) = self.connections.get(&id) else {
            return true;
        };
        let (credit, burst) = (connection.credit(), connection.burst);
        let Some(first) = self.pop_rx(used) else {
            return false;
        };
        let mut chains: Vec<(Chain, u32)> = Vec::with_capacity(burst);
        let mut room = 0;
        let mut next = Some(first);
        while let Some(chain) = next {
            let take = (chain.writable().len() - HEADER_LEN).min(credit - room);
            room += take;
            chains.push((chain, take));
            next = None;
            if chains.len() < burst && room < credit {
                *used += 1;
                next = self.rx.pop();
            }
            if next
                .as_ref()
                .is_some_and(|chain| chain.writable().len() <= HEADER_LEN)
            {
                // Only the newest chains can be put back: a useless one ends the burst, to be
                // returned when it is the first.
                next.take()
                    .into_iter()
                    .for_each(|chain| self.rx.undo_pop(chain));
            }
        }
        let memory = self.memory.clone();
        let mut slices = Vec::with_capacity(2 * burst);
        for (chain, take) in &chains {
            chain
                .writable()
                .slices(&memory, HEADER_LEN, *take, &mut slices);
        }
        let Some(connection) = self.connections.get(&id) else {
            return true;
        };
        let read = sys::read_vectored(connection.stream(), &slices);
        self.send_read(id, chains, room, read);
        true
    }

    /// Hands buffers that a read filled to the guest and takes the others back.
    fn send_read(
        &mut self,
        id: u64,
        chains: Vec<(Chain, u32)>,
        room: u32,
        read: io::Result<usize>,
    ) {
        let guest_cid = self.guest_cid;
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let mut left = match read {
            Ok(0) => {
                connection.host_sends_no_more();
                0
            }
            Ok(bytes) => u32::try_from(bytes).unwrap_or(room).min(room),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                connection.readable = false;
                0
            }
            Err(error) => {
                tracing::debug!(%error, "reading a vsock stream");
                connection.host_sends_no_more();
                0
            }
        };
        connection.burst = if left == room {
            (connection.burst * 2).min(MAX_BURST)
        } else {
            1.max(connection.burst / 2)
        };
        let mut packets = Vec::with_capacity(chains.len());
        let mut unused = Vec::new();
        for (chain, take) in chains {
            let len = take.min(left);
            left -= len;
            if len == 0 {
                unused.push(chain);
            } else {
                packets.push((chain, connection.header(guest_cid, op::RW, 0, len)));
            }
        }
        for chain in unused.into_iter().rev() {
            self.rx.undo_pop(chain);
        }
        for (chain, header) in packets {
            self.send(chain, &header);
        }
    }
}
