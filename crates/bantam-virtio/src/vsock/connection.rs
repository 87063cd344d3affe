//! One connection: its place in the protocol, and the bytes that are under way to the host.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use vm_memory::VolatileSlice;

use super::packet::{Header, TYPE_STREAM, op, shutdown};
use super::{BUF_ALLOC, EARLY_DATA};
use crate::sys::{self, Interest};

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The guest is asked once the host has written something.
    Silent,
    /// The host asked; the guest has not answered.
    Connecting,
    /// Both ends agreed.
    Open,
    /// Over for the guest; the host has not read everything yet.
    Draining,
}

/// A connection as plain data. Counters are in bytes and wrap (virtio 1.3 §5.10.6.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConnectionState {
    /// The host's port.
    pub(super) host_port: u32,
    /// The guest's port.
    pub(super) guest_port: u32,
    /// Where it is in its life.
    pub(super) phase: Phase,
    /// Bytes sent to the guest.
    pub(super) sent: u32,
    /// The guest's receive buffer, as it last said.
    pub(super) peer_buf_alloc: u32,
    /// Bytes the guest took out of that buffer, as it last said.
    pub(super) peer_fwd_cnt: u32,
    /// Bytes received from the guest.
    pub(super) received: u32,
    /// Of those, bytes passed on to the host's stream.
    pub(super) forwarded: u32,
    /// What the guest was last told about `forwarded`.
    pub(super) forwarded_told: u32,
    /// Directions that the guest shut down: 1 receive, 2 send.
    pub(super) guest_shutdown: u32,
    /// Directions that the host shut down.
    pub(super) host_shutdown: u32,
}

/// Packets that a connection owes the guest. At most one of each.
#[derive(Clone, Copy, Debug, Default)]
struct Owed {
    request: bool,
    response: bool,
    shutdown: bool,
    credit_update: bool,
}

/// Why a connection is to be reset: mostly what the guest did against the protocol.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation(pub(super) &'static str);

pub(super) struct Connection {
    pub(super) state: ConnectionState,
    stream: UnixStream,
    /// Bytes of the guest that the stream had no room for; at most [`BUF_ALLOC`].
    to_host: VecDeque<u8>,
    owed: Owed,
    /// Bytes may go out behind the request, before the guest has answered.
    early: bool,
    /// The stream may have bytes, or its end, to read.
    pub(super) readable: bool,
    /// Nobody holds the other end of the stream.
    hung_up: bool,
    /// It stands in the muxer's line of those that have something for the guest.
    pub(super) in_line: bool,
    /// Receive buffers to try to fill at once; follows how much there is to read.
    pub(super) burst: usize,
}

impl Connection {
    /// A connection that the host asks for.
    pub(super) fn to_guest(host_port: u32, guest_port: u32, stream: UnixStream) -> Connection {
        let mut connection = Connection::new(host_port, guest_port, stream, Phase::Connecting);
        connection.owed.request = true;
        connection
    }

    /// The same, but not before [`begin`](Self::begin).
    pub(super) fn to_guest_on_write(
        host_port: u32,
        guest_port: u32,
        stream: UnixStream,
    ) -> Connection {
        let mut connection = Connection::new(host_port, guest_port, stream, Phase::Silent);
        connection.early = true;
        connection
    }

    /// The host has written: the guest is asked, if it was not.
    pub(super) fn begin(&mut self) {
        if self.state.phase == Phase::Silent {
            self.state.phase = Phase::Connecting;
            self.owed.request = true;
        }
    }

    /// The same, and the host has written already.
    pub(super) fn to_guest_with_bytes(
        host_port: u32,
        guest_port: u32,
        stream: UnixStream,
    ) -> Connection {
        let mut connection = Connection::to_guest_on_write(host_port, guest_port, stream);
        connection.readable = true;
        connection.begin();
        connection
    }

    /// The poller tells about its stream before the guest has answered.
    pub(super) fn is_watched(&self) -> bool {
        self.early
    }

    /// The host's first bytes went out with the request, and the guest has not sent any.
    pub(super) fn is_early(&self) -> bool {
        self.early && !self.is_closed() && self.state.received == 0
    }

    /// The host has ended both directions.
    pub(super) fn is_closed(&self) -> bool {
        self.state.host_shutdown == shutdown::BOTH
    }

    /// Whether what the guest has to say next changes nothing by itself: its answer to a request
    /// behind which all there is has gone out, and that it has read it; or its answer to the host's
    /// end of both directions.
    pub(super) fn needs_no_answer(&self) -> bool {
        self.early && !self.readable || self.is_closed()
    }

    /// A connection that the guest asked for, with `request`.
    pub(super) fn from_guest(request: &Header, stream: UnixStream) -> Connection {
        let (host_port, guest_port) = (request.dst_port, request.src_port);
        let mut connection = Connection::new(host_port, guest_port, stream, Phase::Open);
        connection.owed.response = true;
        connection.take_credit(request);
        connection
    }

    fn new(host_port: u32, guest_port: u32, stream: UnixStream, phase: Phase) -> Connection {
        Connection {
            state: ConnectionState {
                host_port,
                guest_port,
                phase,
                sent: 0,
                peer_buf_alloc: 0,
                peer_fwd_cnt: 0,
                received: 0,
                forwarded: 0,
                forwarded_told: 0,
                guest_shutdown: 0,
                host_shutdown: 0,
            },
            stream,
            to_host: VecDeque::new(),
            owed: Owed::default(),
            early: false,
            readable: false,
            hung_up: false,
            in_line: false,
            burst: 1,
        }
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// What the poller is to say about the stream. Edge-triggered: a stream that is full or that
    /// has bytes for a guest without credit causes no wake-ups.
    pub(super) fn interest(&self) -> Interest {
        Interest {
            readable: true,
            writable: !self.to_host.is_empty(),
            edge: true,
        }
    }

    /// Whether bytes wait for the host to make room.
    pub(super) fn has_backlog(&self) -> bool {
        !self.to_host.is_empty()
    }

    /// The guest accepted.
    pub(super) fn accepted(&mut self) -> Result<(), Violation> {
        if self.state.phase != Phase::Connecting || self.owed.request {
            return Err(Violation("a response that nobody waits for"));
        }
        self.state.phase = Phase::Open;
        // Where the stream was not watched, there is something by now, as a rule: the host writes
        // without waiting.
        self.readable |= !self.early;
        Ok(())
    }

    /// Notes what the guest says about its buffer in every packet.
    pub(super) fn take_credit(&mut self, header: &Header) {
        self.state.peer_buf_alloc = header.buf_alloc;
        self.state.peer_fwd_cnt = header.fwd_cnt;
    }

    /// Bytes that the guest has room for.
    pub(super) fn credit(&self) -> u32 {
        if self.state.phase == Phase::Connecting {
            return EARLY_DATA.saturating_sub(self.state.sent);
        }
        let in_flight = self.state.sent.wrapping_sub(self.state.peer_fwd_cnt);
        self.state.peer_buf_alloc.saturating_sub(in_flight)
    }

    /// Takes `len` bytes from the guest: straight into the stream where it has room.
    pub(super) fn receive(
        &mut self,
        len: u32,
        slices: &[VolatileSlice<'_, ()>],
    ) -> Result<(), Violation> {
        let state = &mut self.state;
        if state.phase != Phase::Open || state.guest_shutdown & shutdown::SEND != 0 {
            return Err(Violation("data outside of an open connection"));
        }
        let held = state.received.wrapping_sub(state.forwarded);
        if held.checked_add(len).is_none_or(|held| held > BUF_ALLOC) {
            return Err(Violation("data beyond its credit"));
        }
        state.received = state.received.wrapping_add(len);
        if state.host_shutdown & shutdown::RECEIVE != 0 {
            // Nobody reads; the guest was told or will be.
            self.forward(len);
            return Ok(());
        }
        let mut sent = 0;
        if self.to_host.is_empty() {
            match retry(|| sys::send_vectored(&self.stream, slices)) {
                Ok(done) => sent = u32::try_from(done).unwrap_or(len).min(len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    self.host_receives_no_more();
                    return Ok(());
                }
            }
        }
        let mut skip = sent as usize;
        for slice in slices {
            let skipped = skip.min(slice.len());
            skip -= skipped;
            if let Ok(rest) = slice.offset(skipped) {
                self.hold(&rest);
            }
        }
        self.forward(sent);
        Ok(())
    }

    fn hold(&mut self, slice: &VolatileSlice<'_, ()>) {
        let mut piece = [0; 4096];
        let mut at = 0;
        while let Ok(rest) = slice.offset(at) {
            let len = rest.copy_to(&mut piece[..]);
            if len == 0 {
                return;
            }
            self.to_host.extend(&piece[..len]);
            at += len;
        }
    }

    /// Writes held bytes, as far as the stream has room.
    pub(super) fn flush(&mut self) {
        while !self.to_host.is_empty() {
            let (front, _) = self.to_host.as_slices();
            match retry(|| sys::send(&self.stream, front)) {
                Ok(done) => {
                    self.to_host.drain(..done);
                    self.forward(u32::try_from(done).unwrap_or(u32::MAX));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.host_receives_no_more();
                    return;
                }
            }
        }
        // A burst is over; do not keep its memory.
        self.to_host.shrink_to(0);
        if self.state.guest_shutdown & shutdown::SEND != 0 {
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// Counts bytes as passed on, and owes the guest a credit update when half its credit is news.
    fn forward(&mut self, len: u32) {
        let state = &mut self.state;
        state.forwarded = state.forwarded.wrapping_add(len);
        let news = state.forwarded.wrapping_sub(state.forwarded_told);
        if news >= BUF_ALLOC / 2 {
            self.owe_credit_update();
        }
    }

    pub(super) fn owe_credit_update(&mut self) {
        if self.state.phase == Phase::Open {
            self.owed.credit_update = true;
        }
    }

    /// Nobody reads the host's stream any more: what the guest sent or sends goes nowhere.
    fn host_receives_no_more(&mut self) {
        let held = self.state.received.wrapping_sub(self.state.forwarded);
        self.to_host = VecDeque::new();
        self.forward(held);
        self.shut_host(shutdown::RECEIVE);
    }

    /// The host's stream is at its end.
    pub(super) fn host_sends_no_more(&mut self) {
        self.readable = false;
        let mut directions = shutdown::SEND;
        if self.hung_up {
            directions |= shutdown::RECEIVE;
        }
        self.shut_host(directions);
    }

    /// The poller found the other end of the stream closed, or both directions shut.
    pub(super) fn host_hung_up(&mut self) {
        self.hung_up = true;
        if self.state.host_shutdown & shutdown::SEND != 0 {
            self.shut_host(shutdown::RECEIVE);
        } else {
            // The end comes after the bytes.
            self.readable = true;
        }
    }

    /// Whether [`host_hung_up`](Self::host_hung_up).
    pub(super) fn is_hung_up(&self) -> bool {
        self.hung_up
    }

    fn shut_host(&mut self, directions: u32) {
        let state = &mut self.state;
        let news = directions & !state.host_shutdown;
        state.host_shutdown |= news;
        if news != 0 && state.phase != Phase::Draining {
            self.owed.shutdown = true;
        }
    }

    /// The guest shut down `directions`. True if it thereby is done with the connection.
    pub(super) fn guest_shut(&mut self, directions: u32) -> bool {
        let news = directions & shutdown::BOTH & !self.state.guest_shutdown;
        self.state.guest_shutdown |= news;
        if news & shutdown::RECEIVE != 0 {
            let _ = self.stream.shutdown(Shutdown::Read);
            self.readable = false;
        }
        if news & shutdown::SEND != 0 {
            self.flush();
        }
        self.state.guest_shutdown == shutdown::BOTH
    }

    /// The guest is done with the connection; what it sent is still delivered.
    pub(super) fn drain(&mut self) {
        self.state.phase = Phase::Draining;
        self.owed = Owed::default();
        self.guest_shut(shutdown::BOTH);
    }

    /// Whether there is something for the guest that it can take.
    pub(super) fn has_news(&self) -> bool {
        self.owes() || self.has_sendable_data()
    }

    /// Whether the host wrote something that the guest has room for.
    pub(super) fn has_sendable_data(&self) -> bool {
        let may_send = match self.state.phase {
            Phase::Open => true,
            Phase::Connecting => self.early && !self.owed.request,
            Phase::Silent | Phase::Draining => false,
        };
        self.readable
            && may_send
            && self.state.host_shutdown & shutdown::SEND == 0
            && !self.owed.response
            && self.credit() > 0
    }

    /// The next packet owed besides data.
    pub(super) fn next_owed(&mut self) -> Option<(u16, u32)> {
        let owed = &mut self.owed;
        if std::mem::take(&mut owed.request) {
            Some((op::REQUEST, 0))
        } else if std::mem::take(&mut owed.response) {
            Some((op::RESPONSE, 0))
        } else if self.state.phase == Phase::Connecting {
            // A shutdown waits for the guest's answer.
            None
        } else if std::mem::take(&mut owed.shutdown) {
            Some((op::SHUTDOWN, self.state.host_shutdown))
        } else if std::mem::take(&mut owed.credit_update) {
            Some((op::CREDIT_UPDATE, 0))
        } else {
            None
        }
    }

    /// Whether [`next_owed`](Self::next_owed) has a packet.
    pub(super) fn owes(&self) -> bool {
        let owed = &self.owed;
        owed.request
            || self.state.phase != Phase::Connecting
                && (owed.response || owed.shutdown || owed.credit_update)
    }

    /// The header of a packet to the guest.
    pub(super) fn header(&mut self, guest_cid: u64, op: u16, flags: u32, len: u32) -> Header {
        let state = &mut self.state;
        state.sent = state.sent.wrapping_add(len);
        state.forwarded_told = state.forwarded;
        self.owed.credit_update = false;
        Header {
            src_cid: super::HOST_CID,
            dst_cid: guest_cid,
            src_port: self.state.host_port,
            dst_port: self.state.guest_port,
            len,
            kind: TYPE_STREAM,
            op,
            flags,
            buf_alloc: BUF_ALLOC,
            fwd_cnt: self.state.forwarded,
        }
    }
}

impl Drop for Connection {
    /// Closing a Unix socket that has unread bytes makes the other end fail with ECONNRESET where
    /// it should find its end: so those bytes are read first. They are at most a socket buffer, as
    /// nobody can write after the shutdown.
    fn drop(&mut self) {
        self.flush();
        let _ = self.stream.shutdown(Shutdown::Both);
        let mut scratch = [0; 8192];
        while matches!((&self.stream).read(&mut scratch), Ok(1..)) {}
    }
}

/// Repeats a call that a signal interrupted.
fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
