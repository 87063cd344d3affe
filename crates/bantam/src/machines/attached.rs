//! A machine whose virtual machine runs in a process of its own.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

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
    /// The process of the run that this is attached to: a machine may be stopped and started
    /// while someone is attached.
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
}

/// Asks the process that has the machine in `dir`; `None` if there is none.
pub(super) fn ask(
    dir: &MachineDir,
    request: Request,
    limit: Duration,
) -> Result<Option<Answer>, Error> {
    let Some(stream) = dir.connect()? else {
        return Ok(None);
    };
    let asked = stream
        .set_read_timeout(Some(limit))
        .and_then(|()| stream.set_write_timeout(Some(limit)))
        .and_then(|()| ipc::send(&stream, &request, None))
        .and_then(|()| ipc::receive::<Reply>(&stream));
    match asked {
        Ok((reply, descriptor)) => Ok(Some(Answer {
            reply,
            stream: descriptor.map(UnixStream::from),
            connection: stream,
        })),
        Err(error) => match error.kind() {
            // It ended while we were asking.
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset => Ok(None),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(Error::Unreachable {
                name: dir.name().to_string(),
            }),
            _ => Err(Error::Io {
                what: "cannot talk to the machine's process",
                source: error,
            }),
        },
    }
}

/// What the process of a machine said.
pub(super) struct Answer {
    pub(super) reply: Reply,
    /// The stream that came with it.
    pub(super) stream: Option<UnixStream>,
    /// Ends when the process does.
    pub(super) connection: UnixStream,
}

/// Ends the machine in `dir` as `request` says, and waits until its process is gone. `None` if
/// it did not run. A process that does not answer is killed.
pub(super) fn end(dir: &MachineDir, request: Request) -> Result<Option<EndKind>, Error> {
    let limit = match request {
        Request::Stop { limit_ms, .. } => Duration::from_millis(limit_ms) + STOP_MARGIN,
        _ => ANSWER_LIMIT,
    };
    match ask(dir, request, limit) {
        Ok(None) => Ok(None),
        Ok(Some(answer)) => match answer.reply {
            Reply::Ended { kind, .. } => {
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

/// Kills the process that listens on the control socket: the kernel says which that is, so that
/// it cannot be another that got its number.
fn kill_process(dir: &MachineDir) -> Result<(), Error> {
    let Some(stream) = dir.connect()? else {
        return Ok(());
    };
    let failed = |source: rustix::io::Errno| Error::Io {
        what: "cannot kill the machine's process",
        source: source.into(),
    };
    let owner = rustix::net::sockopt::socket_peercred(&stream).map_err(failed)?;
    match rustix::process::kill_process(owner.pid, rustix::process::Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => return Err(failed(error)),
    }
    let _ = stream.set_read_timeout(Some(ANSWER_LIMIT));
    // Whatever comes: the lock tells whether it is gone.
    let _ = ipc::receive::<Reply>(&stream);
    Ok(())
}

impl Host for Attached {
    fn connect_exec(&self) -> io::Result<UnixStream> {
        match ask(&self.dir, Request::Connect, ANSWER_LIMIT) {
            Ok(Some(Answer {
                reply: Reply::Connected,
                stream: Some(stream),
                ..
            })) => Ok(stream),
            Ok(None) => Err(io::ErrorKind::BrokenPipe.into()),
            Ok(Some(Answer {
                reply: Reply::Failed(error),
                ..
            })) => Err(io::Error::other(Error::from(error))),
            Ok(Some(_)) => Err(io::Error::other(strange())),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn ended(&self, patience: Duration) -> Option<Ended> {
        let deadline = std::time::Instant::now() + patience;
        loop {
            let run = self.last_run();
            if let Some(end) = run.as_ref().and_then(|run| run.end.as_ref()) {
                return Some(Ended {
                    cause: end.reason.clone(),
                    console: end.console.clone(),
                });
            }
            if run.is_none() || matches!(self.dir.connect(), Ok(None)) {
                return Some(Ended {
                    cause: "its process was killed".to_owned(),
                    console: Vec::new(),
                });
            }
            if std::time::Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(super::dir::PAUSE);
        }
    }

    fn stop(&self, grace: Duration, limit: Duration) -> Result<ExitCause, Error> {
        let ended = end(&self.dir, super::stop_request(grace, limit))?;
        Ok(exit_cause(ended))
    }

    fn kill(&self) -> ExitCause {
        // One that cannot be reached cannot be told; `Machines::stop` reports why.
        let _ = end(&self.dir, Request::Kill);
        ExitCause::Killed
    }
}

fn exit_cause(ended: Option<EndKind>) -> ExitCause {
    match ended {
        Some(EndKind::Failed) => ExitCause::Failed("the machine failed".to_owned()),
        Some(EndKind::Stopped | EndKind::Shutdown) | None => ExitCause::GuestShutdown,
    }
}
