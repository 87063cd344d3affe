//! A machine whose virtual machine runs in a process of its own.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use bantam_vmm::ExitCause;

use super::dir::MachineDir;
use super::ipc::{self, Reply, Request};
use super::record::{EndKind, LastRun};
use crate::Error;
use crate::host::{Ended, Host};

/// How long the process of a machine may take to answer. It answers at once unless the host is
/// very busy or the process is stopped.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How much longer than the machine's own limit for a stop its process may take.
const STOP_MARGIN: Duration = Duration::from_secs(5);

/// A connection to a machine's process is made for each request.
#[derive(Debug)]
pub(crate) struct Attached {
    dir: MachineDir,
    /// The process of the run that this is attached to. The machine may be stopped and started
    /// again, or be another of that name, while someone is attached.
    pid: u32,
}

impl Attached {
    pub(super) fn new(dir: MachineDir, pid: u32) -> Self {
        Self { dir, pid }
    }

    fn last_run(&self) -> Option<LastRun> {
        self.dir
            .last_run()
            .ok()
            .flatten()
            .filter(|run| run.pid == self.pid)
    }

    /// Whether the run that this is attached to is still the one.
    fn is_current(&self) -> bool {
        self.last_run().is_some_and(|run| run.end.is_none())
    }
}

/// What came of a request.
pub(super) enum Asked {
    /// Nobody listens: the machine does not run, or is only just being started.
    Nobody,
    /// The process was there, and ended while it was asked.
    HungUp,
    /// It answered.
    Answered(Answer),
}

/// What the process of a machine said.
pub(super) struct Answer {
    pub(super) reply: Reply,
    /// The stream that came with it.
    pub(super) stream: Option<UnixStream>,
    /// Ends when the process does.
    connection: UnixStream,
}

/// Asks the process that has the machine in `dir`.
fn try_ask(dir: &MachineDir, request: &Request, limit: Duration) -> Result<Asked, Error> {
    let unreachable = || Error::Unreachable {
        name: dir.name().to_string(),
    };
    let Some(stream) = dir.connect(limit)? else {
        return Ok(Asked::Nobody);
    };
    let asked = stream
        .set_read_timeout(Some(limit))
        .and_then(|()| stream.set_write_timeout(Some(limit)))
        .and_then(|()| ipc::send(&stream, request, None))
        .and_then(|()| ipc::receive::<Reply>(&stream));
    match asked {
        Ok((reply, descriptor)) => Ok(Asked::Answered(Answer {
            reply,
            stream: descriptor.map(UnixStream::from),
            connection: stream,
        })),
        Err(error) => match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset => Ok(Asked::HungUp),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(unreachable()),
            _ => Err(Error::Io {
                what: "cannot talk to the machine's process",
                source: error,
            }),
        },
    }
}

/// Asks the process that has the machine in `dir`; `None` if there is none, or none any more. That
/// it cannot do what it is asked is [`Error::Remote`].
pub(super) fn ask(
    dir: &MachineDir,
    request: &Request,
    limit: Duration,
) -> Result<Option<Answer>, Error> {
    match try_ask(dir, request, limit)? {
        Asked::Nobody | Asked::HungUp => Ok(None),
        Asked::Answered(answer) => match answer.reply {
            Reply::Failed(error) => Err(error.into()),
            _ => Ok(Some(answer)),
        },
    }
}

/// Ends the machine in `dir` as `request` says, and waits until its process is gone. `None` if
/// nobody listens. A process that does not answer is killed.
pub(super) fn end(dir: &MachineDir, request: &Request) -> Result<Option<EndKind>, Error> {
    let limit = match request {
        Request::Stop { limit_ms, .. } => Duration::from_millis(*limit_ms) + STOP_MARGIN,
        _ => ANSWER_LIMIT,
    };
    match try_ask(dir, request, limit) {
        Ok(Asked::Nobody) => Ok(None),
        // It was asked, and is gone: what else could it have done.
        Ok(Asked::HungUp) => Ok(Some(EndKind::Stopped)),
        Ok(Asked::Answered(answer)) => match answer.reply {
            Reply::Ended { kind } => {
                wait_for_exit(dir, &answer.connection);
                Ok(Some(kind))
            }
            Reply::Failed(error) => Err(error.into()),
            _ => Err(strange()),
        },
        Err(Error::Unreachable { .. }) => {
            kill_process(dir)?;
            Ok(Some(EndKind::Stopped))
        }
        Err(error) => Err(error),
    }
}

pub(super) fn strange() -> Error {
    Error::Protocol("the machine's process gave an answer to another question".into())
}

/// Waits until a process that has said that its machine ended is gone; kills one that lingers.
fn wait_for_exit(dir: &MachineDir, connection: &UnixStream) {
    // The end of the stream is the end of the process; nothing more is sent on it.
    let _ = connection.set_read_timeout(Some(ANSWER_LIMIT));
    let ended = ipc::receive::<Reply>(connection);
    if ended.is_err_and(|error| error.kind() != io::ErrorKind::UnexpectedEof) {
        // If it cannot be killed either, the next start says that the machine is busy.
        let _ = kill_process(dir);
    }
}

/// Kills the process that listens on the control socket. The kernel says which that is, at a
/// moment when it accepts connections.
fn kill_process(dir: &MachineDir) -> Result<(), Error> {
    let Some(stream) = dir.connect(ANSWER_LIMIT)? else {
        return Ok(());
    };
    let failed = |source: io::Error| Error::Io {
        what: "cannot kill the machine's process",
        source,
    };
    let unseen = || io::Error::other("it is in a PID namespace that cannot be seen from here");
    let owner = bantam_vmm::peer_process(&stream).map_err(failed)?;
    let owner = owner.ok_or_else(|| failed(unseen()))?;
    match rustix::process::kill_process(owner, rustix::process::Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => return Err(failed(error.into())),
    }
    let _ = stream.set_read_timeout(Some(ANSWER_LIMIT));
    // Whatever comes: the lock tells whether it is gone.
    let _ = ipc::receive::<Reply>(&stream);
    Ok(())
}

impl Host for Attached {
    fn connect_exec(&self) -> io::Result<UnixStream> {
        if !self.is_current() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let answer = match ask(&self.dir, &Request::Connect, ANSWER_LIMIT) {
            Ok(Some(answer)) => answer,
            // There is no guest, or it is at its end.
            Ok(None) | Err(Error::Remote { .. }) => return Err(io::ErrorKind::BrokenPipe.into()),
            Err(error) => return Err(io::Error::other(error)),
        };
        match (answer.reply, answer.stream) {
            (Reply::Connected, Some(stream)) => Ok(stream),
            _ => Err(io::Error::other(strange())),
        }
    }

    fn ended(&self, patience: Duration) -> Option<Ended> {
        let deadline = Instant::now() + patience;
        loop {
            let gone = matches!(self.dir.connect(ANSWER_LIMIT), Ok(None));
            // Read after that look: whoever ends properly writes before it stops listening.
            let run = self.last_run();
            if let Some(end) = run.as_ref().and_then(|run| run.end.as_ref()) {
                return Some(Ended {
                    cause: end.reason.clone(),
                    console: end.console.clone(),
                });
            }
            if run.is_none() || gone {
                let cause = match run {
                    Some(_) => "its process was killed",
                    None => "it ended, and was started again or removed",
                };
                return Some(Ended {
                    cause: cause.to_owned(),
                    console: Vec::new(),
                });
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(super::dir::PAUSE);
        }
    }

    fn stop(&self, grace: Duration, limit: Duration) -> Result<ExitCause, Error> {
        if !self.is_current() {
            return Ok(self.exit_cause());
        }
        end(&self.dir, &super::stop_request(grace, limit))?;
        Ok(self.exit_cause())
    }

    fn kill(&self) -> ExitCause {
        if self.is_current() {
            // One that cannot be reached cannot be told; `Machines::kill` reports why.
            let _ = end(&self.dir, &Request::Kill);
        }
        self.exit_cause()
    }
}

impl Attached {
    /// How the run ended, by what it left.
    fn exit_cause(&self) -> ExitCause {
        match self.last_run().and_then(|run| run.end) {
            Some(end) => match end.kind {
                EndKind::Failed => ExitCause::Failed(end.reason),
                EndKind::Stopped | EndKind::Shutdown => ExitCause::GuestShutdown,
            },
            None => ExitCause::Killed,
        }
    }
}
