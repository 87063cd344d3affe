//! The host's side: opening connections and accepting them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::muxer::{Muxer, Slot};
use super::{BACKLOG, MAX_CONNECTIONS};
use crate::sys::{self, EventFd, Interest, Timer, Watcher};
use crate::warned::Warned;

/// Connections that callers have parted with and the guest has not been told of.
const MAX_PARTED: usize = 8;
/// How long the guest is not told, should there be nothing else to tell it.
const PARTING_PATIENCE: Duration = Duration::from_millis(20);

/// What the muxer and the host's callers share.
pub(super) struct Shared {
    /// Where the worker runs. A child that was forked has a copy of this, and the guest's memory.
    process: u32,
    state: Mutex<State>,
    /// Wakes the muxer when there is a connection to open.
    wake: EventFd,
    /// Wakes the muxer when there was something that could wait.
    timer: Timer,
    /// Tells connections apart, and events about their streams.
    next_id: AtomicU64,
    pub(super) warnings: Warnings,
}

/// What the log was told in the life of the device.
#[derive(Default)]
pub(super) struct Warnings {
    /// Its worker cannot be woken.
    pub(super) waking: Warned,
    /// Streams cannot be watched.
    pub(super) watching: Warned,
    /// Connections that the guest may open cannot be.
    pub(super) accepting: Warned,
    /// There are too many connections.
    pub(super) crowded: Warned,
    /// The last bytes of streams cannot be delivered.
    pub(super) draining: Arc<Warned>,
}

#[derive(Default)]
struct State {
    connects: VecDeque<Connect>,
    /// Connections to close, by number, with the host's ends of their streams.
    parted: Vec<(u64, Arc<UnixStream>)>,
    listeners: HashMap<u32, Arc<Backlog>>,
    /// Watches streams for the muxer, while there is one.
    watcher: Option<Watcher>,
    /// The worker has nothing to do and has to be woken.
    asleep: bool,
    /// When the worker is to look for what the guest was expected to say.
    answers_due: Option<Instant>,
    /// When it is to close what callers have parted with.
    parting_due: Option<Instant>,
    /// When the timer rings, which may be for nothing.
    rings: Option<Instant>,
    /// When a caller last parted with a connection.
    parted_at: Option<Instant>,
    /// No call came soon after that, and none is expected to.
    lone: bool,
    /// The device is gone for good.
    closed: bool,
}

/// A connection to open.
pub(super) struct Connect {
    pub(super) id: u64,
    pub(super) guest_port: u32,
    pub(super) stream: UnixStream,
    pub(super) opening: Opening,
    /// The muxer's poller tells about its stream.
    pub(super) watched: bool,
}

/// When the guest is asked for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opening {
    AtOnce,
    /// Once the host has written something.
    OnWrite,
    /// At once, and the host has written something.
    Written,
}

/// When what a caller has parted with is closed.
enum Parting {
    /// With the next request, or when its time has come.
    Waits,
    /// At once.
    Lone,
    /// At once, as there are several.
    Many,
}

/// Accepted connections that nobody took yet.
#[derive(Default)]
struct Backlog {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    streams: VecDeque<UnixStream>,
    closed: bool,
}

impl Shared {
    pub(super) fn new() -> io::Result<Shared> {
        Ok(Shared {
            process: std::process::id(),
            state: Mutex::default(),
            wake: sys::event_fd()?,
            timer: Timer::new()?,
            next_id: AtomicU64::new(0),
            warnings: Warnings::default(),
        })
    }

    /// Fails in a child of the device's process, which would write into its parent's rings.
    fn is_of_this_process(&self) -> io::Result<()> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => Err(io::Error::other(
                "the vsock device is of the parent process",
            )),
        }
    }

    /// A number that no other connection has.
    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// A muxer begins to serve; `watcher` is its poller's.
    pub(super) fn attach(&self, watcher: Watcher) {
        self.lock().watcher = Some(watcher);
    }

    /// It ends. What it has not taken waits for the next one.
    pub(super) fn detach(&self) {
        let mut state = self.lock();
        state.watcher = None;
        state.answers_due = None;
        state.parting_due = None;
        for (_, stream) in state.parted.drain(..) {
            end(&stream);
        }
        for connect in &mut state.connects {
            connect.watched = false;
        }
    }

    pub(super) fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// For the muxer's poller; see [`has_rung`](Self::has_rung).
    pub(super) fn timer(&self) -> &Timer {
        &self.timer
    }

    pub(super) fn wake_muxer(&self) {
        if let Err(error) = self.wake.write(1)
            // A counter that is full is readable all the same.
            && error.kind() != io::ErrorKind::WouldBlock
            && self.warnings.waking.first()
        {
            tracing::error!(%error, "waking the vsock worker");
        }
    }

    /// The guest is to answer: the muxer looks after that in a while, if nothing wakes it before.
    /// What is waited for already is not put off.
    pub(super) fn expects(&self, patience: Duration) {
        let mut state = self.lock();
        if state.answers_due.is_none() {
            state.answers_due = Instant::now().checked_add(patience);
        }
        self.set_timer(&mut state);
    }

    /// The guest has said all that was expected of it. The timer may still ring, for nothing.
    pub(super) fn expects_nothing(&self) {
        let mut state = self.lock();
        state.answers_due = None;
        self.set_timer(&mut state);
    }

    /// Has the timer ring for what is due first, if anything waits.
    fn set_timer(&self, state: &mut State) {
        let due = state.answers_due.into_iter().chain(state.parting_due).min();
        let Some(due) = due.filter(|_| due != state.rings) else {
            return;
        };
        state.rings = Some(due);
        // Zero would stop it.
        let left = due.saturating_duration_since(Instant::now());
        if let Err(error) = self.timer.set(left.max(Duration::from_micros(1))) {
            if self.warnings.waking.first() {
                tracing::error!(%error, "setting the vsock worker's timer");
            }
            self.wake_muxer();
        }
    }

    /// The timer may have rung. Whether answers of the guest are due. What was parted with is closed by
    /// whoever is awake.
    pub(super) fn has_rung(&self) -> io::Result<bool> {
        let mut state = self.lock();
        if !self.timer.drain()? {
            return Ok(false);
        }
        state.rings = None;
        let now = Instant::now();
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(state.parting_due) {
            state.parting_due = None;
            state.lone = true;
        }
        let look = is_due(state.answers_due);
        if look {
            state.answers_due = None;
        }
        self.set_timer(&mut state);
        Ok(look)
    }

    /// A caller calls. If that is soon after a connection was parted with, the next may be, too.
    fn is_called(&self) {
        let mut state = self.lock();
        if (state.parted_at).is_some_and(|at| at.elapsed() < PARTING_PATIENCE) {
            state.lone = false;
        }
    }

    /// Notes what a caller has parted with. Gives the stream back if there is no device to tell.
    fn parts(&self, id: ConnectionId, stream: Arc<UnixStream>) -> Result<Parting, Arc<UnixStream>> {
        if self.is_of_this_process().is_err() {
            return Err(stream);
        }
        let mut state = self.lock();
        if state.watcher.is_none() {
            return Err(stream);
        }
        let now = Instant::now();
        state.parted.push((id.0, stream));
        state.parted_at = Some(now);
        if state.parted.len() >= MAX_PARTED {
            return Ok(Parting::Many);
        }
        if state.parting_due.is_none() {
            state.parting_due = now.checked_add(PARTING_PATIENCE);
        }
        if state.lone {
            return Ok(Parting::Lone);
        }
        self.set_timer(&mut state);
        Ok(Parting::Waits)
    }

    /// What was parted with waits for its time, unless the worker is awake to close it.
    fn parting_waits(&self) {
        let mut state = self.lock();
        if state.asleep {
            self.set_timer(&mut state);
        }
    }

    /// The worker is about to wait. False if there is a connection to open or to close before that.
    pub(super) fn falls_asleep(&self) -> bool {
        let mut state = self.lock();
        let closes = state.lone && !state.parted.is_empty();
        state.asleep = state.connects.is_empty() && !closes;
        if state.asleep {
            self.set_timer(&mut state);
        }
        state.asleep
    }

    /// The worker is awake, and looks for connections to open before it waits again.
    pub(super) fn is_awake(&self) {
        self.lock().asleep = false;
    }

    /// Has the worker open a connection.
    fn ask(&self, connect: Connect) -> io::Result<()> {
        let asleep = {
            let mut state = self.lock();
            state.ask(connect)?;
            state.asleep
        };
        if asleep {
            self.wake_muxer();
        }
        Ok(())
    }

    /// What callers have parted with, to be closed.
    pub(super) fn take_parted(&self) -> Vec<(u64, Arc<UnixStream>)> {
        let mut state = self.lock();
        state.parting_due = None;
        std::mem::take(&mut state.parted)
    }

    /// The next connection to open.
    pub(super) fn next_connect(&self) -> Option<Connect> {
        self.lock().connects.pop_front()
    }

    /// Offers a stream to whoever listens on `port`; false if nobody does or the backlog is full.
    pub(super) fn offer(&self, port: u32, stream: UnixStream) -> bool {
        let Some(backlog) = self.lock().listeners.get(&port).cloned() else {
            return false;
        };
        let mut waiting = backlog.lock();
        if waiting.closed || waiting.streams.len() >= BACKLOG {
            return false;
        }
        waiting.streams.push_back(stream);
        backlog.changed.notify_one();
        true
    }

    /// Whether an [`offer`](Self::offer) to `port` has a chance.
    pub(super) fn is_listening(&self, port: u32) -> bool {
        self.lock().listeners.contains_key(&port)
    }

    /// The device is gone: fails what waits and whatever is asked later.
    pub(super) fn close(&self) {
        let listeners = {
            let mut state = self.lock();
            state.closed = true;
            state.connects.clear();
            std::mem::take(&mut state.listeners)
        };
        for backlog in listeners.values() {
            backlog.close();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Has the muxer open a connection.
    fn ask(&mut self, connect: Connect) -> io::Result<()> {
        if self.closed {
            return Err(gone());
        }
        if self.connects.len() >= MAX_CONNECTIONS {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        self.connects.push_back(connect);
        Ok(())
    }
}

impl Backlog {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }
}

/// The host's handle to a socket device. Works whether the guest runs yet or not; clones are the
/// same handle.
#[derive(Clone)]
pub struct Vsock {
    shared: Arc<Shared>,
    muxer: Arc<Slot>,
}

/// Which connection of a device; for [`Vsock::part`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionId(u64);

/// What [`Vsock::connect_with`] opened.
#[derive(Debug)]
pub struct Opened {
    /// The stream.
    pub stream: UnixStream,
    /// How many of the bytes are on their way. The others are the caller's to write.
    pub sent: usize,
    /// The connection.
    pub id: ConnectionId,
}

impl Vsock {
    pub(super) fn new(shared: Arc<Shared>, muxer: Arc<Slot>) -> Vsock {
        Vsock { shared, muxer }
    }

    /// Opens a connection to a port of the guest and returns at once; what is written meanwhile is
    /// sent when the guest accepts. If the guest refuses, the stream is at its end.
    ///
    /// # Errors
    /// `BrokenPipe` when the device is gone, `QuotaExceeded` when [`MAX_CONNECTIONS`] wait for a
    /// guest that does not run, `Other` in a forked child of the device's process, and the host's
    /// errors of making a socket pair.
    pub fn connect(&self, port: u32) -> io::Result<UnixStream> {
        self.open(port, Opening::AtOnce)
    }

    /// The same, for a port where the host speaks first: the guest hears of the connection together
    /// with the first bytes that are written. That saves both sides a wake-up. The listener in the
    /// guest must have room for [`EARLY_DATA`](super::EARLY_DATA) bytes of a connection that it has
    /// not accepted yet; Linux has.
    ///
    /// # Errors
    /// As [`Vsock::connect`].
    pub fn connect_on_write(&self, port: u32) -> io::Result<UnixStream> {
        self.open(port, Opening::OnWrite)
    }

    /// The same, with the first bytes, or as many of them as a socket takes. If the device has nothing
    /// else to do, the calling thread itself puts the first [`EARLY_DATA`](super::EARLY_DATA) of
    /// them into the guest's ring, and no thread of the host is woken. What it calls for that: `getpid`,
    /// `sendto`, `readv`, `shutdown`, `epoll_ctl`, `timerfd_settime`, and `write` to eventfds.
    ///
    /// # Errors
    /// As [`Vsock::connect`].
    pub fn connect_with(&self, port: u32, bytes: &[u8]) -> io::Result<Opened> {
        self.shared.is_of_this_process()?;
        let (stream, theirs) = pair()?;
        let sent = sys::send(&stream, bytes)?;
        self.shared.is_called();
        let id = self.shared.next_id();
        let connect = Connect {
            id,
            guest_port: port,
            stream: theirs,
            opening: Opening::Written,
            watched: false,
        };
        let left = match self.muxer.try_lock() {
            Ok(mut muxer) => match muxer.as_mut() {
                Some(muxer) => muxer.open_now(connect),
                None => Some(connect),
            },
            // As a rule it is the worker that has it, at the end of the pass in which it woke the caller.
            Err(_) => Some(connect),
        };
        if let Some(connect) = left {
            self.shared.ask(connect)?;
        }
        let id = ConnectionId(id);
        Ok(Opened { stream, sent, id })
    }

    /// Ends a connection of [`connect_with`](Self::connect_with), whose stream is `stream`, in both
    /// directions, for every holder, when there is an occasion: when another connection is opened, or
    /// the device has something to do, and in 20 ms at the latest. That saves both sides a wake-up.
    /// Where no other connection followed the last time, it is ended at once, by the calling thread, with
    /// the same calls as there.
    pub fn part(&self, id: ConnectionId, stream: Arc<UnixStream>) {
        match self.shared.parts(id, stream) {
            Err(stream) => end(&stream),
            Ok(Parting::Waits) => {}
            Ok(Parting::Many) => self.shared.wake_muxer(),
            Ok(Parting::Lone) => {
                let closed = match self.muxer.try_lock() {
                    Ok(mut muxer) => muxer.as_mut().is_some_and(Muxer::close_now),
                    // As a rule it is the worker, which closes it before it sleeps.
                    Err(_) => false,
                };
                if !closed {
                    self.shared.parting_waits();
                }
            }
        }
    }

    fn open(&self, port: u32, opening: Opening) -> io::Result<UnixStream> {
        self.shared.is_of_this_process()?;
        let (ours, theirs) = pair()?;
        let wake = {
            let mut state = self.shared.lock();
            let id = self.shared.next_id();
            // Watched from here, with nothing to read yet, it does not wake the muxer; what is
            // written does. The muxer looks into the queue when it is told of a stream that it does
            // not know, and for that waits for this lock.
            let watcher = (state.watcher.as_ref()).filter(|_| opening == Opening::OnWrite);
            let watched = match watcher {
                Some(watcher) => {
                    watcher.add(&theirs, id, Interest::EDGE)?;
                    true
                }
                None => false,
            };
            state.ask(Connect {
                id,
                guest_port: port,
                stream: theirs,
                opening,
                watched,
            })?;
            !watched && state.asleep
        };
        if wake {
            self.shared.wake_muxer();
        }
        Ok(ours)
    }

    /// Accepts the guest's connections to a port of the host, until the listener is dropped.
    ///
    /// # Errors
    /// `AddrInUse` when the port has a listener, `BrokenPipe` when the device is gone.
    pub fn listen(&self, port: u32) -> io::Result<VsockListener> {
        let backlog = Arc::<Backlog>::default();
        let mut state = self.shared.lock();
        if state.closed {
            return Err(gone());
        }
        if state.listeners.contains_key(&port) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        state.listeners.insert(port, backlog.clone());
        Ok(VsockListener {
            port,
            backlog,
            shared: self.shared.clone(),
        })
    }
}

/// A port of the host that the guest can connect to.
pub struct VsockListener {
    port: u32,
    backlog: Arc<Backlog>,
    shared: Arc<Shared>,
}

impl VsockListener {
    /// The port.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// `BrokenPipe` when the device is gone.
    pub fn accept(&self) -> io::Result<UnixStream> {
        self.wait(None)
    }

    /// Waits for a connection for at most `timeout`.
    ///
    /// # Errors
    /// `TimedOut` when none came, `BrokenPipe` when the device is gone.
    pub fn accept_timeout(&self, timeout: Duration) -> io::Result<UnixStream> {
        self.wait(Instant::now().checked_add(timeout))
    }

    fn wait(&self, deadline: Option<Instant>) -> io::Result<UnixStream> {
        let mut waiting = self.backlog.lock();
        loop {
            if let Some(stream) = waiting.streams.pop_front() {
                return Ok(stream);
            }
            if waiting.closed {
                return Err(gone());
            }
            let changed = &self.backlog.changed;
            waiting = match deadline {
                None => changed
                    .wait(waiting)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    changed
                        .wait_timeout(waiting, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }
}

impl Drop for VsockListener {
    fn drop(&mut self) {
        self.shared.lock().listeners.remove(&self.port);
        self.backlog.close();
    }
}

/// A stream, and the device's end of it.
fn pair() -> io::Result<(UnixStream, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    theirs.set_nonblocking(true)?;
    Ok((ours, theirs))
}

/// Ends a stream for every holder.
pub(super) fn end(stream: &UnixStream) {
    // Fails only if the other end is gone, which is what is wanted.
    let _ = stream.shutdown(Shutdown::Both);
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the vsock device is gone")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sys::Poller;

    /// What a device shares with its callers, with a poller for its timer.
    fn shared() -> (Shared, Poller) {
        let (shared, poller) = (Shared::new().unwrap(), Poller::new().unwrap());
        shared.attach(poller.watcher());
        poller.add(shared.timer(), 0, Interest::READ).unwrap();
        (shared, poller)
    }

    fn part(shared: &Shared) -> Parting {
        let (stream, _) = pair().unwrap();
        let parting = shared.parts(ConnectionId(0), Arc::new(stream));
        parting.ok().unwrap()
    }

    /// Waits for the timer. The limit ends a hang.
    fn rings(poller: &mut Poller) -> bool {
        let mut ready = Vec::new();
        poller
            .wait(&mut ready, Some(Duration::from_secs(20)))
            .unwrap();
        !ready.is_empty()
    }

    /// Nobody has called after the last connection was parted with.
    fn lone() -> (Shared, Poller) {
        let (shared, mut poller) = shared();
        assert!(matches!(part(&shared), Parting::Waits));
        assert!(rings(&mut poller));
        assert!(!shared.has_rung().unwrap(), "no answer is due");
        assert_eq!(shared.take_parted().len(), 1);
        (shared, poller)
    }

    #[test]
    fn an_answer_that_is_long_in_coming_does_not_put_off_a_parting() {
        let (shared, mut poller) = shared();
        shared.expects(Duration::from_secs(3600));
        assert!(matches!(part(&shared), Parting::Waits));
        assert!(rings(&mut poller));
        assert!(!shared.has_rung().unwrap(), "its time has not come");
    }

    #[test]
    fn a_parting_does_not_bring_forward_the_look_for_an_answer() {
        let (shared, mut poller) = shared();
        assert!(matches!(part(&shared), Parting::Waits));
        shared.expects(2 * PARTING_PATIENCE);
        // Closed with the request.
        assert_eq!(shared.take_parted().len(), 1);
        let mut looks = false;
        while !looks {
            assert!(rings(&mut poller));
            looks = shared.has_rung().unwrap();
            assert_eq!(looks, shared.lock().answers_due.is_none());
        }
    }

    #[test]
    fn the_worker_does_not_sleep_over_what_a_lone_caller_parts_with_meanwhile() {
        let (shared, _poller) = lone();
        shared.is_awake();
        assert!(matches!(part(&shared), Parting::Lone));
        // The worker has the muxer.
        shared.parting_waits();
        assert!(!shared.falls_asleep());
        assert_eq!(shared.take_parted().len(), 1);
        assert!(shared.falls_asleep());
    }

    #[test]
    fn what_the_worker_was_to_close_has_its_time_when_somebody_calls_meanwhile() {
        let (shared, mut poller) = lone();
        shared.is_awake();
        assert!(matches!(part(&shared), Parting::Lone));
        shared.parting_waits();
        // Its request goes another way, which does not wake the worker.
        shared.is_called();
        assert!(shared.falls_asleep());
        assert!(rings(&mut poller));
    }

    #[test]
    fn what_another_caller_keeps_from_being_closed_at_once_has_its_time() {
        let (shared, mut poller) = lone();
        assert!(shared.falls_asleep());
        assert!(matches!(part(&shared), Parting::Lone));
        // Another caller has the muxer, and is past closing.
        shared.parting_waits();
        assert!(rings(&mut poller));
    }
}
