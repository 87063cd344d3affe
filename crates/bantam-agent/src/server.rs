//! The event loop: one thread, edge-triggered epoll, no waiting anywhere else.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Cursor, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bantam_protocol::{ExitStatus, Frame, GuestExec, HostExec};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc::VMADDR_CID_HOST;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{SockFlag, VsockAddr, accept4, getpeername};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};

use crate::cgroup::{Cgroup, CgroupRoot};
use crate::command::{Command, Detached, Part, SCRATCH_LEN, Terms, Turn};
use crate::connection::{Connection, Received};
use crate::control::{Control, Order};
use crate::files::{receive_file, send_file};
use crate::paths;
use crate::start::start;
use crate::stats::send_stats;
use crate::sys::process::run_in_child;
use crate::trees::{receive_tree, send_tree};

/// Streams served at once; more wait to be accepted.
const MAX_SESSIONS: usize = 4096;

/// Streams accepted before those that are there have their turn.
const ACCEPTS_PER_TURN: usize = 128;

/// Events taken from the kernel at once.
const EVENTS: usize = 64;

/// Events that belong to no exec stream are of session 0.
const OWN: u64 = 0;
const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const CONTROL: u64 = 2;

/// Bits of an event's token that say which descriptor of a session it is about.
const PART_BITS: u32 = 3;

/// Where exec streams come from.
pub(crate) enum Listener {
    /// The guest's vsock port: only the host may connect.
    Vsock(OwnedFd),
    /// A Unix socket: whoever may open it.
    Unix(OwnedFd),
}

impl Listener {
    fn fd(&self) -> &OwnedFd {
        match self {
            Self::Vsock(fd) | Self::Unix(fd) => fd,
        }
    }

    /// The next stream; `None` if it is of someone who may not connect.
    fn accept(&self) -> nix::Result<Option<OwnedFd>> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let stream = accept4(self.fd(), flags)?;
        let allowed = match self {
            Self::Unix(_) => true,
            // Any process of the guest can reach the port over vsock's loopback.
            Self::Vsock(_) => getpeername::<VsockAddr>(stream.as_raw_fd())
                .is_ok_and(|peer| peer.cid() == VMADDR_CID_HOST),
        };
        Ok(allowed.then_some(stream))
    }
}

/// An exec stream.
enum Session {
    /// The request has not fully arrived.
    Asked(Connection),
    /// A command.
    Command(Box<Command>),
}

/// Why [`Server::run`] returned.
pub(crate) enum End {
    /// The host asked for a shutdown, or hung up the control stream.
    Shutdown {
        /// How long processes have between SIGTERM and SIGKILL.
        grace: Duration,
    },
}

/// Everything the agent does after boot.
pub(crate) struct Server {
    epoll: Epoll,
    signals: SignalFd,
    listener: Listener,
    /// The listener may have streams to accept.
    acceptable: bool,
    /// Whether streams are accepted yet.
    open: bool,
    control: Option<Control>,
    cgroups: Option<CgroupRoot>,
    /// Cgroups of finished commands whose background processes are still there.
    lingering: Vec<Cgroup>,
    sessions: BTreeMap<u64, Session>,
    /// Sessions with something to do.
    due: BTreeSet<u64>,
    /// The session of each command that was not reaped.
    commands: BTreeMap<i32, u64>,
    /// Commands without a session, by process id.
    detached: BTreeMap<i32, Detached>,
    next_id: u64,
    scratch: Vec<u8>,
}

impl Server {
    /// A server for `listener`. With a control stream it takes exec streams only after
    /// the host has configured the guest.
    ///
    /// # Errors
    /// As the kernel says.
    pub(crate) fn new(
        listener: Listener,
        control: Option<Control>,
        cgroups: Option<CgroupRoot>,
    ) -> nix::Result<Self> {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGCHLD);
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&mask), None)?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let signals = SignalFd::with_flags(&mask, flags)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        watch(&epoll, &signals, OWN, SIGNALS)?;
        watch(&epoll, listener.fd(), OWN, LISTENER)?;
        if let Some(control) = &control {
            watch(&epoll, control, OWN, CONTROL)?;
        }
        Ok(Self {
            epoll,
            signals,
            listener,
            acceptable: true,
            open: control.is_none(),
            control,
            cgroups,
            lingering: Vec::new(),
            sessions: BTreeMap::new(),
            due: BTreeSet::new(),
            commands: BTreeMap::new(),
            detached: BTreeMap::new(),
            next_id: OWN + 1,
            scratch: vec![0; SCRATCH_LEN],
        })
    }

    /// Serves until the host ends it.
    ///
    /// # Errors
    /// Only if epoll itself fails.
    pub(crate) fn run(&mut self) -> nix::Result<End> {
        // Children of the boot may have ended before SIGCHLD was watched.
        self.reap();
        loop {
            if let Some(end) = self.obey() {
                return Ok(end);
            }
            self.accept();
            for id in std::mem::take(&mut self.due) {
                self.turn(id);
            }
            let timeout = self.timeout();
            self.wait(timeout)?;
            self.time_out();
        }
    }

    /// Serves until no process is left and the host has all output of its commands, or
    /// until `deadline` is over.
    ///
    /// # Errors
    /// Only if epoll itself fails.
    pub(crate) fn run_down(&mut self, deadline: Instant) -> nix::Result<()> {
        self.open = false;
        loop {
            let processes = self.reap();
            for id in std::mem::take(&mut self.due) {
                self.turn(id);
            }
            let now = Instant::now();
            if now >= deadline || !(processes || self.has_commands()) {
                return Ok(());
            }
            let timeout = if self.due.is_empty() {
                until(deadline, now)
            } else {
                EpollTimeout::ZERO
            };
            self.wait(timeout)?;
        }
    }

    fn has_commands(&self) -> bool {
        self.sessions
            .values()
            .any(|session| matches!(session, Session::Command(command) if !command.is_over()))
    }

    /// The control stream, for the last message.
    pub(crate) fn control(&mut self) -> Option<&mut Control> {
        self.control.as_mut()
    }

    fn wait(&mut self, timeout: EpollTimeout) -> nix::Result<()> {
        let mut events = [EpollEvent::empty(); EVENTS];
        let count = match self.epoll.wait(&mut events, timeout) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(error) => return Err(error),
        };
        for event in events.iter().take(count) {
            let id = event.data() >> PART_BITS;
            let part = event.data() & ((1 << PART_BITS) - 1);
            match (id, part) {
                (OWN, LISTENER) => self.acceptable = true,
                (OWN, SIGNALS) => {
                    while let Ok(Some(_)) = self.signals.read_signal() {}
                    self.reap();
                }
                (OWN, _) => {
                    if let Some(control) = &mut self.control {
                        control.note(event.events());
                    }
                }
                (id, part) => self.note(id, part, event.events()),
            }
        }
        Ok(())
    }

    fn note(&mut self, id: u64, part: u64, flags: EpollFlags) {
        match self.sessions.get_mut(&id) {
            Some(Session::Asked(connection)) => connection.note(flags),
            Some(Session::Command(command)) => {
                let part = match part {
                    0 => Part::Connection,
                    1 => Part::Report,
                    2 => Part::Stdin,
                    3 => Part::Stdout,
                    _ => Part::Stderr,
                };
                command.note(part, flags);
            }
            None => return,
        }
        self.due.insert(id);
    }

    fn obey(&mut self) -> Option<End> {
        match self.control.as_mut()?.take_order(&mut self.scratch) {
            Some(Order::Open) => {
                self.open = true;
                None
            }
            Some(Order::Shutdown { grace }) => Some(End::Shutdown { grace }),
            None => None,
        }
    }

    /// Whether streams can be accepted at once.
    fn can_accept(&self) -> bool {
        self.open && self.acceptable && self.sessions.len() < MAX_SESSIONS
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            if !self.can_accept() {
                return;
            }
            match self.listener.accept() {
                Ok(Some(stream)) => {
                    let id = self.next_id;
                    self.next_id += 1;
                    if watch(&self.epoll, &stream, id, 0).is_ok() {
                        let connection = Connection::new(stream);
                        self.sessions.insert(id, Session::Asked(connection));
                        self.due.insert(id);
                    }
                }
                Ok(None) | Err(Errno::EINTR | Errno::ECONNABORTED) => {}
                // None is waiting; or no descriptor is left, until a session ends.
                Err(_) => self.acceptable = false,
            }
        }
    }

    fn turn(&mut self, id: u64) {
        let session = match self.sessions.remove(&id) {
            Some(Session::Asked(connection)) => self.take_request(id, connection),
            session => session,
        };
        let kept = match session {
            Some(Session::Command(mut command)) => match command.turn(&mut self.scratch) {
                Turn::Done => {
                    self.give_up_cgroup(&mut command);
                    None
                }
                Turn::LetGo => {
                    self.let_go(*command);
                    None
                }
                turn => {
                    if turn == Turn::Again {
                        self.due.insert(id);
                    }
                    if command.is_over() {
                        self.give_up_cgroup(&mut command);
                    }
                    Some(Session::Command(command))
                }
            },
            session => session,
        };
        match kept {
            Some(session) => {
                self.sessions.insert(id, session);
            }
            // What it held may be what accepting had run out of.
            None => self.acceptable = true,
        }
    }

    fn give_up_cgroup(&mut self, command: &mut Command) {
        if let Some(group) = command.take_cgroup() {
            self.lingering.push(group);
            self.remove_cgroups();
        }
    }

    fn let_go(&mut self, command: Command) {
        match command.let_go() {
            Ok(detached) => {
                let pid = detached.pid().as_raw();
                self.commands.remove(&pid);
                self.detached.insert(pid, detached);
            }
            Err(group) => {
                self.lingering.extend(group);
                self.remove_cgroups();
            }
        }
    }

    /// Reads the request. `None` when the stream is over or is another's now.
    fn take_request(&mut self, id: u64, mut connection: Connection) -> Option<Session> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let session = loop {
            let mut bytes = match connection.receive(&mut scratch) {
                Received::Bytes(count) => scratch.get(..count).unwrap_or_default(),
                Received::Nothing => break Some(Session::Asked(connection)),
                Received::End => break None,
            };
            let mut decoder = std::mem::take(&mut connection.decoder);
            match decoder.next_frame(&mut bytes) {
                Ok(Some(frame)) => break self.begin(id, connection, &frame, bytes),
                Ok(None) => connection.decoder = decoder,
                Err(_) => break None,
            }
        };
        self.scratch = scratch;
        session
    }

    /// Begins what a request asks for; `rest` came after it.
    fn begin(
        &mut self,
        id: u64,
        mut connection: Connection,
        frame: &Frame<'_>,
        rest: &[u8],
    ) -> Option<Session> {
        let request = match HostExec::decode(frame) {
            Ok(HostExec::Exec(request)) => request,
            Ok(HostExec::ReadFile(request)) => {
                self.transfer(connection, rest, |stream| send_file(&request, stream));
                return None;
            }
            Ok(HostExec::WriteFile(request)) => {
                self.transfer(connection, rest, |stream| receive_file(&request, stream));
                return None;
            }
            Ok(HostExec::ReadTree(request)) => {
                self.transfer(connection, rest, |stream| send_tree(&request, stream));
                return None;
            }
            Ok(HostExec::WriteTree(request)) => {
                self.transfer(connection, rest, |stream| receive_tree(&request, stream));
                return None;
            }
            Ok(HostExec::File(request)) => {
                self.transfer(connection, rest, |stream| paths::answer(&request, stream));
                return None;
            }
            Ok(HostExec::GetStats) => {
                self.transfer(connection, rest, |stream| send_stats(stream));
                return None;
            }
            _ => return None,
        };
        let terms = Terms {
            timeout: request.timeout_ms.map(Duration::from_millis),
            detach: request.detach,
            lazy_started: request.lazy_started,
        };
        // Without a cgroup a command still runs; less of it can be killed.
        let group = self.cgroups.as_ref().and_then(|root| root.create(id).ok());
        let child = match start(request, group.as_ref()) {
            Ok(child) => child,
            Err(failure) => {
                connection.send_message(GuestExec::StartFailed(failure).encode());
                self.lingering.extend(group);
                self.remove_cgroups();
                return None;
            }
        };
        let mut command = Box::new(Command::new(connection, child, group, terms));
        for (part, fd) in command.descriptors() {
            let part = match part {
                Part::Connection => 0,
                Part::Report => 1,
                Part::Stdin => 2,
                Part::Stdout => 3,
                Part::Stderr => 4,
            };
            // It fails for want of memory only; the command then ends unwatched by
            // its exit or its host.
            let _ = watch(&self.epoll, fd, id, part);
        }
        self.commands.insert(command.pid().as_raw(), id);
        command.take_bytes(rest);
        Some(Session::Command(command))
    }

    /// Hands a stream to a child that works on it with blocking calls.
    fn transfer(&self, connection: Connection, rest: &[u8], work: impl FnOnce(&mut Blocking<'_>)) {
        // The stream stays open in the child, so that closing it here would not end
        // its events.
        let _ = self.epoll.delete(&connection);
        let fd = connection.into_fd();
        // The host sees the stream end if there is no process to be had.
        let stream = fd.as_fd();
        let _ = run_in_child(stream, || {
            if fcntl(stream, FcntlArg::F_SETFL(OFlag::empty())).is_ok() {
                work(&mut Blocking {
                    rest: Cursor::new(rest),
                    stream,
                });
            }
        });
    }

    /// Reaps every child that has ended, orphans included. Whether any is left.
    fn reap(&mut self) -> bool {
        let mut reaped = false;
        let left = loop {
            let (pid, status) = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => (
                    pid,
                    ExitStatus::Exited(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
                ),
                Ok(WaitStatus::Signaled(pid, signal, _)) => {
                    let number = u8::try_from(signal as i32).unwrap_or_default();
                    (pid, ExitStatus::Signaled(number))
                }
                Ok(WaitStatus::StillAlive) => break true,
                Err(Errno::ECHILD) => break false,
                Ok(_) | Err(_) => continue,
            };
            reaped = true;
            if let Some(id) = self.commands.remove(&pid.as_raw())
                && let Some(Session::Command(command)) = self.sessions.get_mut(&id)
            {
                command.ended(status);
                self.due.insert(id);
            } else if let Some(detached) = self.detached.remove(&pid.as_raw()) {
                self.lingering.extend(detached.into_cgroup());
            }
        };
        if reaped {
            self.remove_cgroups();
        }
        left
    }

    fn remove_cgroups(&mut self) {
        if let Some(root) = &self.cgroups {
            let lingering = std::mem::take(&mut self.lingering);
            self.lingering = lingering
                .into_iter()
                .filter_map(|group| root.remove(group))
                .collect();
        }
    }

    fn timeout(&self) -> EpollTimeout {
        if !self.due.is_empty() || self.can_accept() {
            return EpollTimeout::ZERO;
        }
        let deadlines = self.sessions.values().filter_map(|session| match session {
            Session::Command(command) => command.deadline(),
            Session::Asked(_) => None,
        });
        let detached = self.detached.values().filter_map(Detached::deadline);
        deadlines
            .chain(detached)
            .min()
            .map_or(EpollTimeout::NONE, |deadline| {
                until(deadline, Instant::now())
            })
    }

    fn time_out(&mut self) {
        let now = Instant::now();
        for (id, session) in &mut self.sessions {
            if let Session::Command(command) = session
                && command.check_time(now)
            {
                self.due.insert(*id);
            }
        }
        for detached in self.detached.values_mut() {
            if detached.deadline().is_some_and(|deadline| deadline <= now) {
                detached.time_out();
            }
        }
    }
}

/// Rounded up, so that a wait does not end just before its deadline.
fn until(deadline: Instant, now: Instant) -> EpollTimeout {
    let left = deadline.saturating_duration_since(now);
    let millis = left.as_nanos().div_ceil(1_000_000);
    EpollTimeout::try_from(millis).unwrap_or(EpollTimeout::MAX)
}

fn watch(epoll: &Epoll, fd: impl AsFd, id: u64, part: u64) -> nix::Result<()> {
    let flags =
        EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
    epoll.add(fd, EpollEvent::new(flags, id << PART_BITS | part))
}

/// A stream of which the beginning was already read.
struct Blocking<'a> {
    rest: Cursor<&'a [u8]>,
    stream: BorrowedFd<'a>,
}

impl Read for Blocking<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self.rest.read(buffer)? {
            0 => Ok(nix::unistd::read(self.stream, buffer)?),
            count => Ok(count),
        }
    }
}

impl Write for Blocking<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Ok(nix::unistd::write(self.stream, bytes)?)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
