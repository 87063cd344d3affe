//! A running command: its streams, its end, and what the host says meanwhile.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bantam_protocol::{
    Exit, ExitStatus, Frame, FrameHeader, GuestExec, HostExec, Kind, MAX_DATA_LEN, STDIN_WINDOW,
};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::EpollFlags;
use nix::unistd::{Pid, read, write};

use crate::cgroup::Cgroup;
use crate::connection::{Connection, Received};
use crate::start::{Attempt, Child};
use crate::sys::process::{REPORT_LEN, decode_report, signal_group};
use crate::sys::tty::{readable_bytes, set_size};

/// Bytes of the buffer that every turn reads into: one whole data frame.
pub(crate) const SCRATCH_LEN: usize = FrameHeader::LEN + MAX_DATA_LEN;

/// Rounds a command gets before the others have theirs.
const ROUNDS_PER_TURN: usize = 8;

/// Standard input that was taken and not yet returned as credit, before it is.
const CREDIT_STEP: usize = STDIN_WINDOW / 4;

/// Most bytes taken from a terminal after its command ended: more than its buffers hold.
const MAX_TERMINAL_REST: usize = 256 << 10;

/// What a terminal reads as the end of input at the beginning of a line: ^D.
const END_OF_TRANSMISSION: u8 = 4;

const SIGKILL: u8 = 9;

/// How long the news that a command has started waits for more, where nobody waits for it.
const STARTED_WAIT: Duration = Duration::from_millis(100);

/// How long a host may take to close the stream of a command that has ended. The side that closes first
/// pays for one more packet; the host's goes out with its next request.
const CLOSE_WAIT: Duration = Duration::from_secs(1);

/// Most bytes of output in one frame: with its header it fills the largest packet that Linux makes of a
/// vsock stream. A byte more would be a packet of its own.
const OUTPUT_LEN: usize = (64 << 10) - FrameHeader::LEN;

/// The capacity of a pipe through which much comes, so that its writer goes on while its reader sends.
const STREAM_PIPE: i32 = 1 << 20;

/// Output of a command that has ended, up to so many bytes, leaves together with its exit status.
const SMALL_OUTPUT: usize = 4096;

/// What a turn came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It waits for an event.
    Idle,
    /// It could go on at once.
    Again,
    /// It is over; the connection may be closed.
    Done,
    /// The command runs by itself from now on; the connection may be closed.
    LetGo,
}

/// Which descriptor of a command an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Connection,
    Report,
    Stdin,
    Stdout,
    Stderr,
}

/// One exec stream and the command behind it.
pub(crate) struct Command {
    connection: Connection,
    pid: Pid,
    cgroup: Option<Cgroup>,
    /// Present until it is known whether the command runs.
    starting: Option<(OwnedFd, Attempt)>,
    /// When the host is to hear of the start if nothing else was said until then. Nothing watches the
    /// report in this case: it is looked at when there is something to say.
    announce_at: Option<Instant>,
    stdin: Option<Input>,
    stdout: Option<Output>,
    stderr: Option<Output>,
    tty: bool,
    deadline: Option<Instant>,
    timed_out: bool,
    ended: Option<ExitStatus>,
    /// The last message is on its way.
    finished: bool,
    /// When the stream is closed if the host has not done so.
    close_at: Option<Instant>,
    /// To be let go once it is known to run.
    detach: bool,
    _writers: [Option<OwnedFd>; 2],
}

/// What of a request concerns the stream and not the child.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// How long the command may take.
    pub(crate) timeout: Option<Duration>,
    /// To be let go once it is known to run.
    pub(crate) detach: bool,
    /// Nobody waits to hear that it has started.
    pub(crate) lazy_started: bool,
}

struct Input {
    fd: OwnedFd,
    writable: bool,
    pending: VecDeque<u8>,
    /// The host will send no more.
    ended: bool,
    /// No one reads it any more.
    unread: bool,
    taken: usize,
}

struct Output {
    fd: OwnedFd,
    kind: Kind,
    readable: bool,
    /// Bytes left to forward, once the command has ended.
    rest: Option<usize>,
    /// Its pipe has the default capacity.
    small: bool,
}

impl Command {
    /// Takes over a child that was just started.
    pub(crate) fn new(
        connection: Connection,
        child: Child,
        cgroup: Option<Cgroup>,
        terms: Terms,
    ) -> Self {
        let Terms {
            timeout,
            detach,
            lazy_started,
        } = terms;
        // Who writes to a command waits for its start, too.
        let lazy = lazy_started && !detach && child.stdin.is_none();
        let output = |fd, kind| Output {
            fd,
            kind,
            readable: true,
            rest: None,
            small: true,
        };
        Self {
            connection,
            pid: child.pid,
            cgroup,
            starting: Some((child.report, child.attempt)),
            announce_at: lazy.then(|| Instant::now() + STARTED_WAIT),
            stdin: child.stdin.map(|fd| Input {
                fd,
                writable: true,
                pending: VecDeque::new(),
                ended: false,
                unread: false,
                taken: 0,
            }),
            tty: child.stderr.is_none(),
            stdout: child.stdout.map(|fd| output(fd, Kind::Stdout)),
            stderr: child.stderr.map(|fd| output(fd, Kind::Stderr)),
            // A timeout too long for the clock is none.
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            timed_out: false,
            ended: None,
            finished: false,
            close_at: None,
            detach,
            _writers: child.writers,
        }
    }

    /// The process id, until the process is reaped.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Every descriptor to be watched, but the connection's.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = (Part, BorrowedFd<'_>)> {
        let report = self
            .starting
            .as_ref()
            .filter(|_| self.announce_at.is_none())
            .map(|(fd, _)| (Part::Report, fd.as_fd()));
        let stdin = self
            .stdin
            .as_ref()
            .map(|input| (Part::Stdin, input.fd.as_fd()));
        let stdout = self
            .stdout
            .as_ref()
            .map(|output| (Part::Stdout, output.fd.as_fd()));
        let stderr = self
            .stderr
            .as_ref()
            .map(|output| (Part::Stderr, output.fd.as_fd()));
        report.into_iter().chain(stdin).chain(stdout).chain(stderr)
    }

    /// Notes what epoll reported.
    pub(crate) fn note(&mut self, part: Part, flags: EpollFlags) {
        match part {
            Part::Connection => self.connection.note(flags),
            Part::Report => {}
            Part::Stdin => self.note_stdin(flags),
            Part::Stdout => {
                if let Some(output) = &mut self.stdout {
                    output.readable = true;
                }
                if self.tty {
                    self.note_stdin(EpollFlags::empty());
                }
            }
            Part::Stderr => {
                if let Some(output) = &mut self.stderr {
                    output.readable = true;
                }
            }
        }
    }

    fn note_stdin(&mut self, flags: EpollFlags) {
        if let Some(input) = &mut self.stdin {
            input.writable = true;
            // How a pipe reports that no one reads it any more. The host hears of it on the next
            // turn: nothing may be said before the command is known to have started.
            input.unread |= flags.contains(EpollFlags::EPOLLERR);
        }
    }

    fn close_stdin(&mut self) {
        self.stdin = None;
        self.connection
            .send_message(GuestExec::StdinClosed.encode());
    }

    /// When [`check_time`](Self::check_time) has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let times = [self.deadline, self.announce_at, self.close_at];
        times.into_iter().flatten().min()
    }

    /// The host has all there will be.
    pub(crate) fn is_over(&self) -> bool {
        self.finished && (self.connection.is_clear() || self.connection.is_gone())
    }

    /// Does what is due. True if the command wants a turn.
    pub(crate) fn check_time(&mut self, now: Instant) -> bool {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.deadline = None;
            if self.ended.is_none() {
                self.timed_out = true;
                self.kill_all();
            }
        }
        if self.close_at.is_some_and(|at| at <= now) {
            // A host that is slow to take the rest gets it.
            self.close_at = (!self.is_over()).then(|| now + CLOSE_WAIT);
            if self.close_at.is_none() {
                self.connection.give_up();
                return true;
            }
        }
        if self.announce_at.is_none_or(|at| at > now) {
            return false;
        }
        if self.starting.is_some() {
            // A turn finds out, and is the time to say so next time.
            self.announce_at = Some(now + STARTED_WAIT);
            return true;
        }
        self.announce_at = None;
        self.connection.release();
        false
    }

    /// Its process was reaped. What is in the pipes now is all that it wrote; what a
    /// process it left behind may still write is not waited for.
    pub(crate) fn ended(&mut self, status: ExitStatus) {
        self.ended = Some(status);
        self.deadline = None;
        self.stdin = None;
        for output in [&mut self.stdout, &mut self.stderr].into_iter().flatten() {
            output.rest = Some(if self.tty {
                MAX_TERMINAL_REST
            } else {
                readable_bytes(&output.fd).unwrap_or_default()
            });
            output.readable = true;
        }
    }

    /// Kills every process it started, as far as the kernel knows them.
    pub(crate) fn kill_all(&self) {
        kill_all(self.pid, self.cgroup.as_ref(), self.ended.is_some());
    }

    /// Leaves the command behind without its stream, if it has not ended.
    pub(crate) fn let_go(self) -> Result<Detached, Option<Cgroup>> {
        if self.ended.is_some() {
            return Err(self.cgroup);
        }
        Ok(Detached {
            pid: self.pid,
            cgroup: self.cgroup,
            deadline: self.deadline,
        })
    }

    /// Gives up the cgroup, at the end.
    pub(crate) fn take_cgroup(&mut self) -> Option<Cgroup> {
        self.cgroup.take()
    }

    /// Does what can be done without waiting.
    pub(crate) fn turn(&mut self, scratch: &mut [u8]) -> Turn {
        for _ in 0..ROUNDS_PER_TURN {
            self.connection.flush();
            if !self.finished && !self.check_start() {
                return Turn::Idle;
            }
            if self.finished {
                // Whatever comes now is late; what matters is the end.
                match self.connection.receive(scratch) {
                    Received::Bytes(_) => continue,
                    Received::Nothing => return Turn::Idle,
                    Received::End => return Turn::Done,
                }
            }
            if self.detach {
                // Whether the host still listens makes no difference.
                return if self.connection.is_clear() || self.connection.is_gone() {
                    Turn::LetGo
                } else {
                    Turn::Idle
                };
            }
            let mut moved = self.take_frames(scratch);
            if self.connection.is_gone() {
                self.kill_all();
                return Turn::Done;
            }
            moved |= self.feed_stdin();
            moved |= forward(&mut self.stdout, &mut self.connection, self.tty, scratch);
            moved |= forward(&mut self.stderr, &mut self.connection, self.tty, scratch);
            if let Some(status) = self.ended
                && self.stdout.as_ref().is_none_or(Output::is_drained)
                && self.stderr.as_ref().is_none_or(Output::is_drained)
            {
                let exit = Exit {
                    status,
                    timed_out: self.timed_out,
                    oom: self.cgroup.as_ref().is_some_and(Cgroup::oom_killed),
                };
                self.finish(&GuestExec::Exit(exit));
                moved = true;
            }
            if !moved {
                return Turn::Idle;
            }
        }
        Turn::Again
    }

    fn finish(&mut self, last: &GuestExec<'_>) {
        self.connection.send_message(last.encode());
        self.finished = true;
        self.announce_at = None;
        self.close_at = Some(Instant::now() + CLOSE_WAIT);
    }

    /// Whether the command runs (or has run); tells the host when that becomes known.
    fn check_start(&mut self) -> bool {
        let Some((report, attempt)) = &self.starting else {
            return true;
        };
        let mut bytes = [0; REPORT_LEN];
        match read(report, &mut bytes) {
            Err(Errno::EAGAIN | Errno::EINTR) => return false,
            Ok(REPORT_LEN) => {
                let (step, error) = decode_report(bytes);
                let failure = attempt.explain(step, error);
                self.finish(&GuestExec::StartFailed(failure));
            }
            // Closed by execve, or by a child that was killed before it.
            _ => {
                let pid = self.pid.as_raw().unsigned_abs();
                let started = GuestExec::Started { pid }.encode();
                match started {
                    Ok(frame) if self.announce_at.is_some() => self.connection.hold(&frame),
                    started => self.connection.send_message(started),
                }
            }
        }
        self.starting = None;
        true
    }

    /// Takes one buffer of what the host sends.
    fn take_frames(&mut self, scratch: &mut [u8]) -> bool {
        let received = match self.connection.receive(scratch) {
            Received::Bytes(count) => scratch.get(..count).unwrap_or_default(),
            Received::Nothing | Received::End => return false,
        };
        self.take_bytes(received);
        true
    }

    /// Takes bytes that the host has sent.
    pub(crate) fn take_bytes(&mut self, mut bytes: &[u8]) {
        let mut decoder = std::mem::take(&mut self.connection.decoder);
        loop {
            match decoder.next_frame(&mut bytes) {
                Ok(Some(frame)) => self.take_frame(&frame),
                Ok(None) => break,
                Err(_) => {
                    self.connection.give_up();
                    break;
                }
            }
        }
        self.connection.decoder = decoder;
    }

    fn take_frame(&mut self, frame: &Frame<'_>) {
        match HostExec::decode(frame) {
            Ok(HostExec::Stdin(bytes)) => {
                if let Some(input) = &mut self.stdin
                    && !input.ended
                {
                    if bytes.len() > STDIN_WINDOW - input.pending.len().min(STDIN_WINDOW) {
                        return self.connection.give_up();
                    }
                    input.pending.extend(bytes);
                }
            }
            Ok(HostExec::StdinEof) => {
                if let Some(input) = &mut self.stdin
                    && !input.ended
                {
                    input.ended = true;
                    if self.tty {
                        input.pending.push_back(END_OF_TRANSMISSION);
                    }
                }
            }
            Ok(HostExec::Resize(size)) => {
                if self.tty
                    && let Some(output) = &self.stdout
                {
                    // A terminal already hung up needs no size.
                    let _ = set_size(&output.fd, size);
                }
            }
            Ok(HostExec::Signal(number)) => {
                // After the end the number of the group may be another's.
                if self.ended.is_none() {
                    signal_group(self.pid, number);
                }
            }
            Ok(HostExec::Kill) => self.kill_all(),
            // A second request, or what is none.
            Ok(_) | Err(_) => self.connection.give_up(),
        }
    }

    fn feed_stdin(&mut self) -> bool {
        let Some(input) = &mut self.stdin else {
            return false;
        };
        let mut moved = false;
        let mut closed = input.unread;
        while !closed && input.writable && !input.pending.is_empty() {
            let (bytes, _) = input.pending.as_slices();
            match write(&input.fd, bytes) {
                Ok(count) => {
                    input.pending.drain(..count);
                    input.taken += count;
                    moved = true;
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => input.writable = false,
                Err(_) => {
                    closed = true;
                    break;
                }
            }
        }
        if input.taken >= CREDIT_STEP {
            let credit = u32::try_from(input.taken).unwrap_or(u32::MAX);
            input.taken = 0;
            self.connection
                .send_message(GuestExec::StdinCredit(credit).encode());
        }
        if closed {
            self.close_stdin();
        } else if input.ended && input.pending.is_empty() {
            self.stdin = None;
        }
        moved
    }
}

/// A command that nobody listens to.
pub(crate) struct Detached {
    pid: Pid,
    cgroup: Option<Cgroup>,
    deadline: Option<Instant>,
}

impl Detached {
    /// The process id.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// When it is to be killed.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Its time is over.
    pub(crate) fn time_out(&mut self) {
        self.deadline = None;
        kill_all(self.pid, self.cgroup.as_ref(), false);
    }

    /// Gives up the cgroup, at the end.
    pub(crate) fn into_cgroup(self) -> Option<Cgroup> {
        self.cgroup
    }
}

fn kill_all(leader: Pid, cgroup: Option<&Cgroup>, ended: bool) {
    if let Some(cgroup) = cgroup {
        cgroup.kill();
    } else if !ended {
        signal_group(leader, SIGKILL);
    }
}

impl AsFd for Command {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

impl Output {
    fn is_drained(&self) -> bool {
        self.rest == Some(0)
    }
}

/// Sends one buffer of what a command wrote, if the host has taken everything before.
fn forward(
    output: &mut Option<Output>,
    connection: &mut Connection,
    tty: bool,
    scratch: &mut [u8],
) -> bool {
    let Some(from) = output.as_mut().filter(|from| from.readable) else {
        return false;
    };
    if !connection.is_clear() || from.is_drained() {
        return false;
    }
    let wanted = from.rest.unwrap_or(OUTPUT_LEN).min(OUTPUT_LEN);
    let Some(payload) = scratch.get_mut(FrameHeader::LEN..FrameHeader::LEN + wanted) else {
        return false;
    };
    if tty && from.rest.is_some() {
        settle_terminal(&from.fd);
    }
    match read(&from.fd, payload) {
        Ok(0) | Err(Errno::EIO) => *output = None,
        Ok(count) => {
            from.rest = from.rest.map(|rest| rest.saturating_sub(count));
            if count == OUTPUT_LEN && std::mem::take(&mut from.small) {
                // A terminal has no capacity, and a user may be out of theirs: it goes on as it is.
                let _ = fcntl(&from.fd, FcntlArg::F_SETPIPE_SZ(STREAM_PIPE));
            }
            let Ok(header) = FrameHeader::new(from.kind, count) else {
                return false;
            };
            if let Some((head, _)) = scratch.split_first_chunk_mut() {
                *head = header.encode();
            }
            let frame = scratch.get(..FrameHeader::LEN + count).unwrap_or_default();
            if from.rest.is_some() && count <= SMALL_OUTPUT {
                // The end is about to be told.
                connection.hold(frame);
            } else {
                connection.send(frame);
            }
        }
        Err(Errno::EINTR) => {}
        Err(Errno::EAGAIN) => {
            from.readable = false;
            // Nothing is left of a command that has ended.
            from.rest = from.rest.map(|_| 0);
        }
        Err(_) => *output = None,
    }
    true
}

/// Makes the kernel bring what was written to a terminal to where a read sees it: it
/// does so on its own later, and by then this command's stream would be closed.
fn settle_terminal(master: &OwnedFd) {
    let mut fds = [PollFd::new(master.as_fd(), PollFlags::POLLIN)];
    let _ = poll(&mut fds, PollTimeout::ZERO);
}
