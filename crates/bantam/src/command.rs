//! Commands in a machine.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bantam_protocol::{ExecRequest, Exit, ExitStatus, GuestExec, HostExec, STDIN_WINDOW, Size};
use bantam_vmm::Phase;

use crate::Error;
use crate::child::Child;
use crate::machine::Inner;
use crate::wire::{self, FrameReceiver, FrameSender, ReceiveError};

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Its exit code, if it exited.
    pub code: Option<u8>,
    /// The signal that ended it, if one did.
    pub signal: Option<u8>,
    /// It was killed because its time ran out.
    pub timed_out: bool,
    /// The kernel killed a process of it because memory ran out.
    pub oom: bool,
}

impl Status {
    const TIMED_OUT: Self = Self {
        code: None,
        signal: Some(9),
        timed_out: true,
        oom: false,
    };

    /// Whether it exited with 0.
    #[must_use]
    pub fn success(self) -> bool {
        self.code == Some(0) && !self.timed_out
    }

    /// The code a shell would give: the command's own, 124 after a timeout, 128+n after
    /// signal n.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match (self.timed_out, self.code, self.signal) {
            (true, ..) => 124,
            (false, Some(code), _) => code,
            (false, None, Some(signal)) => 128_u8.saturating_add(signal),
            (false, None, None) => 125,
        }
    }
}

impl From<Exit> for Status {
    fn from(exit: Exit) -> Self {
        let (code, signal) = match exit.status {
            ExitStatus::Exited(code) => (Some(code), None),
            ExitStatus::Signaled(signal) => (None, Some(signal)),
        };
        Self {
            code,
            signal,
            timed_out: exit.timed_out,
            oom: exit.oom,
        }
    }
}

/// A finished command and what it wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub status: Status,
    /// Standard output (with a terminal: everything).
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

/// A finished command whose output went elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// How it ended.
    pub status: Status,
    /// Bytes of standard output.
    pub stdout_bytes: u64,
    /// Bytes of standard error.
    pub stderr_bytes: u64,
}

/// Where standard input comes from.
enum Input {
    Null,
    Reader(Box<dyn Read + Send>),
}

/// A command to run in a machine, built like [`std::process::Command`].
#[must_use = "nothing runs before output, pipe or spawn"]
pub struct Exec {
    machine: Arc<Inner>,
    argv: Vec<Vec<u8>>,
    env: Vec<(Vec<u8>, Vec<u8>)>,
    workdir: Option<Vec<u8>>,
    user: Option<String>,
    tty: Option<Size>,
    timeout: Option<Duration>,
    input: Input,
}

impl std::fmt::Debug for Exec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exec")
            .field("command", &self.name())
            .finish_non_exhaustive()
    }
}

impl Exec {
    pub(crate) fn new(machine: Arc<Inner>, argv: Vec<Vec<u8>>) -> Self {
        Self {
            machine,
            argv,
            env: Vec::new(),
            workdir: None,
            user: None,
            tty: None,
            timeout: None,
            input: Input::Null,
        }
    }

    /// Sets a variable, over the image's.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((
            name.as_ref().as_bytes().to_vec(),
            value.as_ref().as_bytes().to_vec(),
        ));
        self
    }

    /// Sets the working directory, which must exist. Without it the image's is used, and made
    /// if it is missing.
    pub fn workdir(mut self, dir: impl AsRef<OsStr>) -> Self {
        self.workdir = Some(dir.as_ref().as_bytes().to_vec());
        self
    }

    /// Runs as `user`, `uid`, `user:group` or `uid:gid` instead of the image's user.
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.user = Some(user.into());
        self
    }

    /// Runs on a terminal of this size. Standard error is then part of standard output.
    pub fn tty(mut self, size: Size) -> Self {
        self.tty = Some(size);
        self
    }

    /// Kills everything the command started after `timeout`, counted from its start.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Gives these bytes as standard input; without it, standard input is empty.
    pub fn stdin_bytes(self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin_reader(io::Cursor::new(bytes.into()))
    }

    /// Streams standard input from `reader`, on a thread of its own. A reader that blocks for
    /// ever keeps that thread, but not the command: it ends when it ends.
    pub fn stdin_reader(mut self, reader: impl Read + Send + 'static) -> Self {
        self.input = Input::Reader(Box::new(reader));
        self
    }

    /// Runs the command and collects everything it writes.
    ///
    /// # Errors
    /// [`Error::Start`] if it cannot be started, [`Error::MachineDied`] if the machine ends
    /// before the command does. A command that fails or times out is no error.
    pub fn output(self) -> Result<Output, Error> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let finished = self.pipe(&mut stdout, &mut stderr)?;
        Ok(Output {
            status: finished.status,
            stdout,
            stderr,
        })
    }

    /// Runs the command and passes on what it writes as it comes, in bounded memory.
    ///
    /// # Errors
    /// As [`Exec::output`]; and [`Error::Io`] if a writer fails, in which case the command is
    /// killed.
    pub fn pipe(
        mut self,
        stdout: &mut dyn Write,
        stderr: &mut dyn Write,
    ) -> Result<Finished, Error> {
        let input = std::mem::replace(&mut self.input, Input::Null);
        let has_input = matches!(input, Input::Reader(_));
        let started = self.start(has_input)?;
        if let Input::Reader(reader) = input {
            started.feed(reader)?;
        }
        started.pump(stdout, stderr)
    }

    /// Starts the command; its streams are in the result, as with [`std::process::Child`].
    ///
    /// # Errors
    /// [`Error::Start`] or [`Error::MachineDied`].
    pub fn spawn(mut self) -> Result<Child, Error> {
        match std::mem::replace(&mut self.input, Input::Null) {
            Input::Null => Child::new(self.start(true)?, true),
            Input::Reader(reader) => {
                let started = self.start(true)?;
                started.feed(reader)?;
                Child::new(started, false)
            }
        }
    }

    fn name(&self) -> String {
        let name = self.argv.first().map_or(&b""[..], Vec::as_slice);
        String::from_utf8_lossy(name).into_owned()
    }

    /// Sends the request and waits until the command runs.
    fn start(self, stdin: bool) -> Result<Started, Error> {
        let command = self.name();
        let request = self.request(stdin)?;
        let machine = self.machine;
        let stream = machine.connect_exec()?;
        let (sender, receiver) = wire::split(stream, STDIN_WINDOW)?;
        let mut started = Started {
            deadline: self.timeout.map(Deadline::after),
            machine,
            sender,
            receiver,
            pid: 0,
            command: command.clone(),
        };
        started
            .sender
            .send(&HostExec::Exec(request))
            .map_err(|_| started.gone())?;
        let answer = started.next(|message| match message {
            GuestExec::Started { pid } => Ok(Start::Started(pid)),
            GuestExec::StartFailed(failure) => Ok(Start::Failed(failure)),
            _ => Err("a message before the command was started".to_owned()),
        })?;
        match answer {
            Event::Frame(Start::Started(pid)) => started.pid = pid,
            Event::Frame(Start::Failed(failure)) => {
                return Err(Error::Start {
                    command,
                    kind: failure.kind,
                    message: failure.message,
                });
            }
            Event::TimedOut => {
                return Err(started.gone_because("the guest did not answer in time"));
            }
        }
        Ok(started)
    }

    fn request(&self, stdin: bool) -> Result<ExecRequest, Error> {
        if self.argv.first().is_none_or(Vec::is_empty) {
            return Err(Error::InvalidCommand("no command was given".into()));
        }
        let nul = |bytes: &[u8]| bytes.contains(&0);
        if self.argv.iter().any(|arg| nul(arg))
            || self.env.iter().any(|(name, value)| nul(name) || nul(value))
        {
            return Err(Error::InvalidCommand(
                "an argument or variable holds a NUL byte".into(),
            ));
        }
        if let Some((name, _)) = self
            .env
            .iter()
            .find(|(name, _)| name.is_empty() || name.contains(&b'='))
        {
            return Err(Error::InvalidCommand(format!(
                "'{}' is no name for a variable",
                String::from_utf8_lossy(name)
            )));
        }
        let config = self.machine.image_config();
        Ok(ExecRequest {
            argv: self.argv.clone(),
            env: config.environment(&self.env),
            cwd: self
                .workdir
                .clone()
                .or_else(|| config.working_dir.clone().map(String::into_bytes)),
            create_cwd: self.workdir.is_none(),
            user: self.user.clone().or_else(|| config.user.clone()),
            tty: self.tty,
            stdin,
            timeout_ms: self.timeout.map(|timeout| {
                u64::try_from(timeout.as_millis())
                    .unwrap_or(u64::MAX)
                    .max(1)
            }),
        })
    }
}

/// The guest enforces a command's timeout; the host steps in if the guest does not.
#[derive(Debug, Clone, Copy)]
struct Deadline(Option<Instant>);

impl Deadline {
    /// How long after the guest's own deadline its answer may take.
    const GRACE: Duration = Duration::from_millis(1500);

    fn after(timeout: Duration) -> Self {
        Self(
            timeout
                .checked_add(Self::GRACE)
                .and_then(|all| Instant::now().checked_add(all)),
        )
    }
}

/// What a start request is answered with.
enum Start {
    Started(u32),
    Failed(bantam_protocol::StartFailed),
}

pub(crate) enum Event<T> {
    Frame(T),
    TimedOut,
}

/// A command that runs.
pub(crate) struct Started {
    machine: Arc<Inner>,
    sender: FrameSender,
    receiver: FrameReceiver,
    deadline: Option<Deadline>,
    pid: u32,
    command: String,
}

impl Started {
    pub(crate) fn sender(&self) -> FrameSender {
        self.sender.clone()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Streams `reader` to the command from a thread of its own.
    fn feed(&self, reader: Box<dyn Read + Send>) -> Result<(), Error> {
        let sender = self.sender();
        thread::Builder::new()
            .name("stdin".to_owned())
            .spawn(move || {
                if let Err(error) = wire::send_all(reader, &sender) {
                    tracing::warn!(%error, "standard input could not be read to its end");
                }
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
            let event = self.next(|message| {
                Ok(match message {
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
                })
            })?;
            match event {
                Event::Frame(Step::Wrote(result)) => {
                    result.map_err(Error::io("cannot pass on the command's output"))?;
                }
                Event::Frame(Step::Input) => {}
                Event::Frame(Step::Exit(exit)) => {
                    timeline.mark(Phase::CommandExit);
                    finished.status = exit.into();
                    return Ok(finished);
                }
                Event::TimedOut => {
                    // The guest should have killed it long ago; its streams end with ours.
                    timeline.mark(Phase::CommandExit);
                    return Ok(finished);
                }
            }
        }
    }

    fn next<T>(
        &mut self,
        take: impl FnOnce(GuestExec<'_>) -> Result<T, String>,
    ) -> Result<Event<T>, Error> {
        let deadline = self.deadline.and_then(|deadline| deadline.0);
        let mut refused = None;
        let received = self.receiver.receive(deadline, |frame| {
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

    fn gone_because(&self, reason: &str) -> Error {
        Error::MachineDied {
            what: format!("'{}' was started", self.command),
            cause: reason.to_owned(),
            console: Vec::new(),
        }
    }
}

impl Drop for Started {
    /// Hangs up, also for a thread that still sends input: the agent kills what is left.
    fn drop(&mut self) {
        self.sender.hang_up();
    }
}

enum Step {
    Wrote(io::Result<()>),
    Input,
    Exit(Exit),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        let exit = |status, timed_out| {
            Status::from(Exit {
                status,
                timed_out,
                oom: false,
            })
            .exit_code()
        };
        assert_eq!(exit(ExitStatus::Exited(0), false), 0);
        assert_eq!(exit(ExitStatus::Exited(7), false), 7);
        assert_eq!(exit(ExitStatus::Signaled(9), false), 137);
        assert_eq!(exit(ExitStatus::Signaled(15), false), 143);
        assert_eq!(exit(ExitStatus::Signaled(9), true), 124);
        assert_eq!(exit(ExitStatus::Exited(0), true), 124);
    }
}
