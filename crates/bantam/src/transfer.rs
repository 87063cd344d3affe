//! A request to the agent that is not a command, and its answers.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use bantam_protocol::{FileEntry, GuestExec, GuestStats, HostExec, TreeSummary};

use crate::Error;
use crate::machine::{Inner, REQUEST_LIMIT};
use crate::wire::{self, FrameReceiver, FrameSender, ReceiveError};

/// How long a guest may be silent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Before it answers what takes it no time: whether there is a file, that it is open.
    pub(crate) answer: Duration,
    /// While bytes move or a tree is walked: without one byte taken or given. It is what Linux
    /// grants a task that waits for a disk before it calls it hung. A guest may be slow, and what it
    /// gives may be without end: that is for whoever takes the bytes to bound.
    pub(crate) stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            answer: REQUEST_LIMIT,
            stall: Duration::from_secs(120),
        }
    }
}

/// What an answer is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// [`Limits::answer`].
    Answer,
    /// [`Limits::stall`].
    Stream,
    /// As long as it takes: the guest has much to do before it says anything.
    Work,
}

/// Whoever has an agent.
pub(crate) trait Guest {
    /// A new stream to the agent's exec port.
    fn connect(&self) -> Result<UnixStream, Error>;

    /// The error for a stream that ended by itself while `what` was done.
    fn died(&self, what: String) -> Error;

    /// How long it may be silent.
    fn limits(&self) -> Limits {
        Limits::default()
    }
}

impl Guest for Inner {
    fn connect(&self) -> Result<UnixStream, Error> {
        self.connect_exec()
    }

    fn died(&self, what: String) -> Error {
        Self::died(self, what)
    }
}

/// What the agent says, but for failures.
pub(crate) enum Answer<'a> {
    Opened,
    /// Bytes, one at least: a frame without any is no sign that something moves.
    Data(&'a [u8]),
    Done,
    TreeDone(TreeSummary),
    Stats(GuestStats),
    Entry(FileEntry),
}

/// What is done, for messages.
pub(crate) struct Task {
    /// What failed: `cannot read '/a'`.
    failed: String,
    /// What went on meanwhile: `'/a' was read`.
    meanwhile: String,
    /// How the guest's own message begins if it is about the same path.
    path: String,
}

impl Task {
    /// Something done to a path: `read`, `read`; `copy`, `copied`.
    pub(crate) fn of(verb: &str, participle: &str, path: &Path) -> Self {
        let path = path.display();
        Self {
            failed: format!("cannot {verb} '{path}'"),
            meanwhile: format!("'{path}' was {participle}"),
            path: format!("{path}: "),
        }
    }

    pub(crate) fn stats() -> Self {
        Self {
            failed: "cannot ask the machine how it fares".to_owned(),
            meanwhile: "it was asked how it fares".to_owned(),
            path: String::new(),
        }
    }

    /// The message for a failure that the guest tells of, in its words.
    fn failure(&self, told: &str) -> String {
        let told = told.strip_prefix(&self.path).unwrap_or(told);
        let mut message = format!("{}: ", self.failed);
        for c in told.chars() {
            // It may hold names that talk to a terminal.
            if c.is_control() {
                message.extend(c.escape_default());
            } else {
                message.push(c);
            }
        }
        message
    }
}

/// A request and its stream, which is hung up in the end.
pub(crate) struct Transfer<'a> {
    guest: &'a dyn Guest,
    pub(crate) sender: FrameSender,
    receiver: FrameReceiver,
    task: Task,
    limits: Limits,
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        self.sender.hang_up();
    }
}

impl<'a> Transfer<'a> {
    /// Sends the request.
    pub(crate) fn open(
        guest: &'a dyn Guest,
        request: &HostExec<'_>,
        task: Task,
    ) -> Result<Self, Error> {
        let limits = guest.limits();
        let (mut sender, receiver) = wire::split(guest.connect()?, wire::UNLIMITED);
        sender.fail_if_stalled(limits.stall).map_err(Error::io(
            "cannot set the time limit of a stream to the guest",
        ))?;
        let transfer = Self {
            guest,
            sender,
            receiver,
            task,
            limits,
        };
        transfer
            .sender
            .send_request(request, limits.answer)
            .map_err(|_| transfer.gone())?;
        Ok(transfer)
    }

    /// Tells the agent that all bytes were sent.
    pub(crate) fn end(&self) {
        // If this fails the answer, or its absence, says why.
        let _ = self.sender.send(&HostExec::StdinEof);
    }

    /// Waits for the next answer and hands it to `take`; a failure is an error, and so is a
    /// guest that says nothing for too long.
    pub(crate) fn answer<T>(
        &mut self,
        wait: Wait,
        take: impl FnOnce(Answer<'_>) -> T,
    ) -> Result<T, Error> {
        let limit = match wait {
            Wait::Answer => Some(self.limits.answer),
            Wait::Stream => Some(self.limits.stall),
            Wait::Work => None,
        };
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let task = &self.task;
        let received = self.receiver.receive(deadline, |frame| {
            Ok(Some(Ok(take(match GuestExec::decode(&frame)? {
                GuestExec::FileOpened(_) => Answer::Opened,
                GuestExec::Stdout(bytes) if !bytes.is_empty() => Answer::Data(bytes),
                GuestExec::FileDone => Answer::Done,
                GuestExec::TreeDone(summary) => Answer::TreeDone(summary),
                GuestExec::Stats(stats) => Answer::Stats(stats),
                GuestExec::FileEntry(entry) => Answer::Entry(entry),
                GuestExec::FileFailed(failure) => {
                    return Ok(Some(Err(Error::File {
                        kind: failure.kind,
                        message: task.failure(&failure.message),
                    })));
                }
                _ => return Ok(None),
            }))))
        });
        match received {
            Ok(Some(answer)) => answer,
            Ok(None) => Err(self.unexpected()),
            Err(ReceiveError::Protocol(error)) => Err(Error::Protocol(error.to_string())),
            Err(ReceiveError::TimedOut) => Err(Error::Agent {
                what: self.task.meanwhile.clone(),
                reason: "did not answer".to_owned(),
            }),
            Err(ReceiveError::Gone) => Err(self.gone()),
        }
    }

    /// The error for an answer that has no place here.
    pub(crate) fn unexpected(&self) -> Error {
        Error::Protocol(format!(
            "an answer out of place while {}",
            self.task.meanwhile
        ))
    }

    fn gone(&self) -> Error {
        self.guest.died(self.task.meanwhile.clone())
    }
}
