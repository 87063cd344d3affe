//! A request to the agent that is not a command, and its answers.

use std::os::unix::net::UnixStream;
use std::time::Instant;

use bantam_protocol::{FileEntry, GuestExec, GuestStats, HostExec, TreeSummary};

use crate::Error;
use crate::machine::{Inner, REQUEST_LIMIT};
use crate::wire::{self, FrameReceiver, FrameSender, ReceiveError};

/// Whoever has an agent.
pub(crate) trait Guest {
    /// A new stream to the agent's exec port.
    fn connect(&self) -> Result<UnixStream, Error>;

    /// The error for a stream that ended by itself while `what` was done.
    fn died(&self, what: String) -> Error;
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
    Data(&'a [u8]),
    Done,
    TreeDone(TreeSummary),
    Stats(GuestStats),
    Entry(FileEntry),
}

/// A request and its stream, which is hung up in the end.
pub(crate) struct Transfer<'a> {
    guest: &'a dyn Guest,
    pub(crate) sender: FrameSender,
    receiver: FrameReceiver,
    what: String,
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        self.sender.hang_up();
    }
}

impl<'a> Transfer<'a> {
    /// Sends the request. `what` says, in the past tense, what is done, for an error about a
    /// guest that ends meanwhile.
    pub(crate) fn open(
        guest: &'a dyn Guest,
        request: &HostExec<'_>,
        what: String,
    ) -> Result<Self, Error> {
        let (sender, receiver) = wire::split(guest.connect()?, wire::UNLIMITED)?;
        let transfer = Self {
            guest,
            sender,
            receiver,
            what,
        };
        transfer
            .sender
            .send_request(request, REQUEST_LIMIT)
            .map_err(|_| transfer.gone())?;
        Ok(transfer)
    }

    /// Tells the agent that all bytes were sent.
    pub(crate) fn end(&self) {
        // If this fails the answer, or its absence, says why.
        let _ = self.sender.send(&HostExec::StdinEof);
    }

    /// Waits for the next answer and hands it to `take`; a failure is an error.
    pub(crate) fn answer<T>(
        &mut self,
        deadline: Option<Instant>,
        take: impl FnOnce(Answer<'_>) -> T,
    ) -> Result<T, Error> {
        let received = self.receiver.receive(deadline, |frame| {
            Ok(Some(Ok(take(match GuestExec::decode(&frame)? {
                GuestExec::FileOpened(_) => Answer::Opened,
                GuestExec::Stdout(bytes) => Answer::Data(bytes),
                GuestExec::FileDone => Answer::Done,
                GuestExec::TreeDone(summary) => Answer::TreeDone(summary),
                GuestExec::Stats(stats) => Answer::Stats(stats),
                GuestExec::FileEntry(entry) => Answer::Entry(entry),
                GuestExec::FileFailed(failure) => {
                    return Ok(Some(Err(Error::File {
                        kind: failure.kind,
                        message: failure.message,
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
                what: self.what.clone(),
                reason: "did not answer".to_owned(),
            }),
            Err(ReceiveError::Gone) => Err(self.gone()),
        }
    }

    /// The error for an answer that has no place here.
    pub(crate) fn unexpected(&self) -> Error {
        Error::Protocol(format!("an answer out of place while {}", self.what))
    }

    fn gone(&self) -> Error {
        self.guest.died(self.what.clone())
    }
}
