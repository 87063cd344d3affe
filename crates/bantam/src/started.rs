//! A command that runs: its stream, its deadline, its output.

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bantam_protocol::{ExecRequest, Exit, GuestExec, HostExec, STDIN_WINDOW, StartFailed};
use bantam_virtio::vsock::ConnectionId;
use bantam_vmm::Phase;

use crate::Error;
use crate::host::ExecStream;
use crate::machine::{Inner, REQUEST_LIMIT};
use crate::status::{Finished, Status};
use crate::wire::{self, FrameReceiver, FrameSender, ReceiveError};

/// How long after the guest's own deadline its answer may take. The guest enforces a command's
/// timeout; the host steps in only if the guest does not.
const GRACE: Duration = Duration::from_millis(1500);

/// A command that runs. Dropping it hangs up, and the agent kills what is left.
pub(crate) struct Started {
    machine: Arc<Inner>,
    sender: FrameSender,
    receiver: FrameReceiver,
    /// When the guest must have reported a timeout.
    deadline: Option<Instant>,
    timeout: Option<Duration>,
    /// Present once the command is known to run.
    pid: Option<u32>,
    command: String,
    /// The connection, if nobody but this has the stream.
    id: Option<ConnectionId>,
    /// The command has ended, and all it wrote was passed on.
    over: bool,
    /// Why standard input could not be read to its end.
    input_error: Arc<Mutex<Option<io::Error>>>,
}

enum Answer {
    Started(u32),
    Failed(StartFailed),
}

enum Step {
    Answer(Answer),
    Wrote(io::Result<()>),
    Input,
    Exit(Exit),
}

enum Event<T> {
    Frame(T),
    TimedOut,
}

impl Started {
    /// Sends the request and waits until the command runs; not so if the request says that
    /// nobody waits for that.
    pub(crate) fn start(
        machine: Arc<Inner>,
        request: ExecRequest,
        timeout: Option<Duration>,
        command: String,
    ) -> Result<Self, Error> {
        let begun = Instant::now();
        let limit = match timeout {
            Some(timeout) => timeout.saturating_add(GRACE).min(REQUEST_LIMIT),
            None => REQUEST_LIMIT,
        };
        let lazy = request.lazy_started;
        let request = HostExec::Exec(request)
            .encode()
            .map_err(|error| Error::InvalidCommand(error.to_string()))?;
        let ExecStream { stream, sent, id } = machine.request_exec(&request)?;
        let (sender, receiver) = wire::split(stream, STDIN_WINDOW);
        let mut started = Self {
            machine,
            sender,
            receiver,
            deadline: begun.checked_add(limit),
            timeout,
            pid: None,
            command,
            // Nobody sends input or signals to a command whose start is not waited for.
            id: id.filter(|_| lazy),
            over: false,
            input_error: Arc::default(),
        };
        let rest = request.get(sent..).unwrap_or_default();
        if !rest.is_empty() {
            (started.sender.send_encoded(rest, limit)).map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => started.silent(),
                _ => started.gone(),
            })?;
        }
        if lazy {
            return Ok(started);
        }
        let answer = started.next(|message| match message {
            GuestExec::Started { pid } => Ok(Answer::Started(pid)),
            GuestExec::StartFailed(failure) => Ok(Answer::Failed(failure)),
            _ => Err("a message before the command was started".to_owned()),
        })?;
        match answer {
            Event::Frame(answer) => started.take_answer(answer)?,
            Event::TimedOut => return Err(started.silent()),
        }
        Ok(started)
    }

    /// Notes that the command runs, or says why it does not.
    fn take_answer(&mut self, answer: Answer) -> Result<(), Error> {
        match answer {
            Answer::Started(pid) => {
                self.pid = Some(pid);
                self.deadline = self
                    .timeout
                    .and_then(|timeout| timeout.checked_add(GRACE))
                    .and_then(|all| Instant::now().checked_add(all));
                Ok(())
            }
            Answer::Failed(failure) => Err(Error::Start {
                command: self.command.clone(),
                kind: failure.kind,
                message: failure.message,
            }),
        }
    }

    pub(crate) fn sender(&self) -> FrameSender {
        self.sender.clone()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid.unwrap_or(0)
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Streams `reader` to the command from a thread of its own.
    pub(crate) fn feed(&self, mut reader: Box<dyn Read + Send>) -> Result<(), Error> {
        let sender = self.sender();
        let failure = Arc::clone(&self.input_error);
        thread::Builder::new()
            .name("stdin".to_owned())
            .spawn(move || {
                if let Err(error) = wire::send_all(&mut reader, &sender) {
                    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                }
                // Also after an error: the command must not wait for bytes that will not come.
                // Fails only if the command has ended.
                let _ = sender.send(&HostExec::StdinEof);
            })
            .map(drop)
            .map_err(Error::io("cannot start the thread for standard input"))
    }

    /// Passes on output until the command has ended.
    pub(crate) fn pump(
        mut self,
        stdout: &mut dyn Write,
        stderr: &mut dyn Write,
    ) -> Result<Finished, Error> {
        let mut finished = Finished {
            status: Status::TIMED_OUT,
            stdout_bytes: 0,
            stderr_bytes: 0,
        };
        let timeline = self.machine.timeline().clone();
        let sender = self.sender();
        loop {
            let mut writing = Duration::ZERO;
            let running = self.pid.is_some();
            let event = self.next(|message| {
                let begun = Instant::now();
                let step = match message {
                    GuestExec::Started { pid } if !running => Step::Answer(Answer::Started(pid)),
                    GuestExec::StartFailed(failure) if !running => {
                        Step::Answer(Answer::Failed(failure))
                    }
                    _ if !running => {
                        return Err("a message before the command was started".to_owned());
                    }
                    GuestExec::Stdout(bytes) => {
                        timeline.mark(Phase::FirstOutput);
                        finished.stdout_bytes += bytes.len() as u64;
                        Step::Wrote(stdout.write_all(bytes).and_then(|()| stdout.flush()))
                    }
                    GuestExec::Stderr(bytes) => {
                        timeline.mark(Phase::FirstOutput);
                        finished.stderr_bytes += bytes.len() as u64;
                        Step::Wrote(stderr.write_all(bytes).and_then(|()| stderr.flush()))
                    }
                    GuestExec::StdinCredit(bytes) => {
                        sender.credit(bytes);
                        Step::Input
                    }
                    GuestExec::StdinClosed => {
                        sender.nobody_reads();
                        Step::Input
                    }
                    GuestExec::Exit(exit) => Step::Exit(exit),
                    _ => return Err("a message that is not output or exit".to_owned()),
                };
                writing = begun.elapsed();
                Ok(step)
            })?;
            // A slow reader of the output takes none of the guest's time to answer.
            self.deadline = self
                .deadline
                .and_then(|deadline| deadline.checked_add(writing));
            match event {
                Event::Frame(Step::Wrote(result)) => {
                    result.map_err(Error::io("cannot pass on the command's output"))?;
                }
                Event::Frame(Step::Answer(answer)) => self.take_answer(answer)?,
                Event::Frame(Step::Input) => {}
                Event::Frame(Step::Exit(exit)) => {
                    timeline.mark(Phase::CommandExit);
                    finished.status = exit.into();
                    self.over = true;
                    return self.finish(finished);
                }
                Event::TimedOut if self.pid.is_none() => return Err(self.silent()),
                Event::TimedOut => {
                    // The guest should have killed it long ago; it will when we hang up.
                    timeline.mark(Phase::CommandExit);
                    return Ok(finished);
                }
            }
        }
    }

    /// A command that got less input than it was promised has not done what was asked.
    fn finish(&self, finished: Finished) -> Result<Finished, Error> {
        let failure = self
            .input_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match failure {
            Some(source) => Err(Error::Io {
                what: "cannot read the command's standard input",
                source,
            }),
            None => Ok(finished),
        }
    }

    fn next<T>(
        &mut self,
        take: impl FnOnce(GuestExec<'_>) -> Result<T, String>,
    ) -> Result<Event<T>, Error> {
        let mut refused = None;
        let received = self.receiver.receive(self.deadline, |frame| {
            let message = GuestExec::decode(&frame)?;
            match take(message) {
                Ok(value) => Ok(Some(value)),
                Err(reason) => {
                    refused = Some(reason);
                    Ok(None)
                }
            }
        });
        match received {
            Ok(Some(value)) => Ok(Event::Frame(value)),
            Ok(None) => Err(Error::Protocol(refused.unwrap_or_default())),
            Err(ReceiveError::TimedOut) => Ok(Event::TimedOut),
            Err(ReceiveError::Gone) => Err(self.gone()),
            Err(ReceiveError::Protocol(error)) => Err(Error::Protocol(error.to_string())),
        }
    }

    fn gone(&self) -> Error {
        self.machine.died(format!("'{}' ran", self.command))
    }

    fn silent(&self) -> Error {
        Error::Agent {
            what: format!("'{}' was to be started", self.command),
            reason: "did not answer".to_owned(),
        }
    }
}

impl Drop for Started {
    /// Hangs up, also for a thread that still sends input: the agent kills what is left. A command that
    /// is over has nothing left, and the agent need not hear of it at once.
    fn drop(&mut self) {
        match self.id {
            Some(id) if self.over => self.machine.part(id, self.sender.stream()),
            _ => self.sender.hang_up(),
        }
    }
}
