//! The host's side: opening connections and accepting them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{BACKLOG, MAX_CONNECTIONS};
use crate::sys::{self, EventFd, Interest, Watcher};

/// What the muxer and the host's callers share.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Wakes the muxer when there is a connection to open.
    wake: EventFd,
    /// Tells connections apart, and events about their streams.
    next_id: AtomicU64,
}

#[derive(Default)]
struct State {
    connects: VecDeque<Connect>,
    listeners: HashMap<u32, Arc<Backlog>>,
    /// Watches streams for the muxer, while there is one.
    watcher: Option<Watcher>,
    /// The device is gone for good.
    closed: bool,
}

/// A connection to open.
pub(super) struct Connect {
    pub(super) id: u64,
    pub(super) guest_port: u32,
    pub(super) stream: UnixStream,
    /// Not before the host has written something.
    pub(super) on_write: bool,
    /// The muxer's poller tells about its stream.
    pub(super) watched: bool,
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
            state: Mutex::default(),
            wake: sys::event_fd()?,
            next_id: AtomicU64::new(0),
        })
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
        for connect in &mut state.connects {
            connect.watched = false;
        }
    }

    pub(super) fn wake(&self) -> &EventFd {
        &self.wake
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
}

impl Vsock {
    pub(super) fn new(shared: Arc<Shared>) -> Vsock {
        Vsock { shared }
    }

    /// Opens a connection to a port of the guest and returns at once; what is written meanwhile is
    /// sent when the guest accepts. If the guest refuses, the stream is at its end.
    ///
    /// # Errors
    /// `BrokenPipe` when the device is gone, `QuotaExceeded` when [`MAX_CONNECTIONS`] wait for a
    /// guest that does not run, and the host's errors of making a socket pair.
    pub fn connect(&self, port: u32) -> io::Result<UnixStream> {
        self.open(port, false)
    }

    /// The same, for a port where the host speaks first: the guest hears of the connection together
    /// with the first bytes that are written. That saves both sides a wake-up. The listener in the
    /// guest must have room for [`EARLY_DATA`](super::EARLY_DATA) bytes of a connection that it has
    /// not accepted yet; Linux has.
    ///
    /// # Errors
    /// As [`Vsock::connect`].
    pub fn connect_on_write(&self, port: u32) -> io::Result<UnixStream> {
        self.open(port, true)
    }

    fn open(&self, port: u32, on_write: bool) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        theirs.set_nonblocking(true)?;
        let wake = {
            let mut state = self.shared.lock();
            if state.closed {
                return Err(gone());
            }
            if state.connects.len() >= MAX_CONNECTIONS {
                return Err(io::ErrorKind::QuotaExceeded.into());
            }
            let id = self.shared.next_id();
            // Watched from here, with nothing to read yet, it does not wake the muxer; what is
            // written does. The muxer looks into the queue when it is told of a stream that it does
            // not know, and for that waits for this lock.
            let watcher = state.watcher.as_ref().filter(|_| on_write);
            let watched = match watcher {
                Some(watcher) => {
                    watcher.add(&theirs, id, Interest::EDGE)?;
                    true
                }
                None => false,
            };
            state.connects.push_back(Connect {
                id,
                guest_port: port,
                stream: theirs,
                on_write,
                watched,
            });
            !watched
        };
        if wake {
            self.shared.wake.write(1)?;
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

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the vsock device is gone")
}
