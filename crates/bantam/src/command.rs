//! Commands in a machine.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use bantam_protocol::{ExecRequest, Size};

use crate::Error;
use crate::capped::Capped;
use crate::child::{Child, ChildHandle};
use crate::machine::Inner;
use crate::started::Started;
use crate::status::{Finished, Output};

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
    max_output: u64,
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
    /// How many bytes of each stream [`Exec::output`] keeps unless told otherwise: 256 MiB. A
    /// guest must not fill the host's memory.
    pub const MAX_OUTPUT: u64 = 256 << 20;

    pub(crate) fn new(machine: Arc<Inner>, argv: Vec<Vec<u8>>) -> Self {
        Self {
            machine,
            argv,
            env: Vec::new(),
            workdir: None,
            user: None,
            tty: None,
            timeout: None,
            max_output: Self::MAX_OUTPUT,
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

    /// The most bytes of each stream that [`Exec::output`] keeps, [`Exec::MAX_OUTPUT`] by
    /// default; the rest is counted and dropped. [`Exec::pipe`] and [`Exec::spawn`] stream
    /// without a limit.
    pub fn max_output(mut self, bytes: u64) -> Self {
        self.max_output = bytes;
        self
    }

    /// Runs the command and collects what it writes.
    ///
    /// # Errors
    /// [`Error::Start`] if it cannot be started, [`Error::MachineDied`] if the machine ends
    /// before the command does. A command that fails or times out is no error.
    pub fn output(self) -> Result<Output, Error> {
        self.launch(true)?.output()
    }

    /// Runs the command and passes on what it writes as it comes, in bounded memory. A writer
    /// that blocks delays the return, also past a timeout.
    ///
    /// # Errors
    /// As [`Exec::output`]; and [`Error::Io`] if a writer fails, in which case the command is
    /// killed.
    pub fn pipe(self, stdout: &mut dyn Write, stderr: &mut dyn Write) -> Result<Finished, Error> {
        self.launch(true)?.pipe(stdout, stderr)
    }

    /// Starts the command. Its output waits in the guest until [`Running::pipe`] or [`Running::output`]
    /// takes it; a handle to signal it can be had before that.
    ///
    /// # Errors
    /// As [`Exec::output`].
    pub fn start(self) -> Result<Running, Error> {
        self.launch(false)
    }

    /// With `lazy`, a command that nobody writes to may not have started when this returns.
    fn launch(mut self, lazy: bool) -> Result<Running, Error> {
        let input = std::mem::replace(&mut self.input, Input::Null);
        let has_input = matches!(input, Input::Reader(_));
        let max_output = self.max_output;
        let mut request = self.request(has_input)?;
        request.lazy_started = lazy && !has_input && self.tty.is_none();
        let command = self.name();
        let started = Started::start(self.machine, request, self.timeout, command)?;
        if let Input::Reader(reader) = input {
            started.feed(reader)?;
        }
        Ok(Running {
            started,
            max_output,
        })
    }

    /// Starts the command; its streams are in the result, as with [`std::process::Child`].
    ///
    /// # Errors
    /// [`Error::Start`] or [`Error::MachineDied`].
    pub fn spawn(mut self) -> Result<Child, Error> {
        match std::mem::replace(&mut self.input, Input::Null) {
            Input::Null => Child::new(self.begin(true)?, true),
            Input::Reader(reader) => {
                let started = self.begin(true)?;
                started.feed(reader)?;
                Child::new(started, false)
            }
        }
    }

    /// Starts the command and lets it go: its standard streams are `/dev/null`, and it lives on
    /// by itself until it ends, its timeout is over or the machine ends. Returns its process id
    /// in the guest.
    ///
    /// # Errors
    /// [`Error::Start`] or [`Error::MachineDied`]; [`Error::InvalidCommand`] if it was given a
    /// terminal or standard input.
    pub fn detach(self) -> Result<u32, Error> {
        if self.tty.is_some() || matches!(self.input, Input::Reader(_)) {
            return Err(Error::InvalidCommand(
                "a detached command has neither a terminal nor standard input".into(),
            ));
        }
        let mut request = self.request(false)?;
        request.detach = true;
        let command = self.name();
        Started::start(self.machine, request, self.timeout, command).map(|started| started.pid())
    }

    fn name(&self) -> String {
        let name = self.argv.first().map_or(&b""[..], Vec::as_slice);
        String::from_utf8_lossy(name).into_owned()
    }

    fn begin(self, stdin: bool) -> Result<Started, Error> {
        let request = self.request(stdin)?;
        let command = self.name();
        Started::start(self.machine, request, self.timeout, command)
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
            detach: false,
            lazy_started: false,
        })
    }
}

/// A command that runs, without a thread of its own. Dropping it kills everything it started.
#[must_use = "dropping it kills the command"]
pub struct Running {
    started: Started,
    max_output: u64,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running")
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}

impl Running {
    /// Its process id in the guest.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.started.pid()
    }

    /// A handle to signal or kill it with, from any thread, while this one waits.
    #[must_use]
    pub fn handle(&self) -> ChildHandle {
        ChildHandle::new(self.started.sender())
    }

    /// Passes on what it writes as it comes, until it has ended, as [`Exec::pipe`].
    ///
    /// # Errors
    /// [`Error::MachineDied`] if the machine ends first; [`Error::Io`] if a writer fails, in
    /// which case the command is killed.
    pub fn pipe(self, stdout: &mut dyn Write, stderr: &mut dyn Write) -> Result<Finished, Error> {
        self.started.pump(stdout, stderr)
    }

    /// Collects what it writes until it has ended, as [`Exec::output`].
    ///
    /// # Errors
    /// [`Error::MachineDied`] if the machine ends first.
    pub fn output(self) -> Result<Output, Error> {
        let mut stdout = Capped::new(self.max_output);
        let mut stderr = Capped::new(self.max_output);
        let finished = self.pipe(&mut stdout, &mut stderr)?;
        Ok(Output {
            status: finished.status,
            truncated: stdout.truncated() || stderr.truncated(),
            stdout: stdout.bytes,
            stderr: stderr.bytes,
            stdout_bytes: finished.stdout_bytes,
            stderr_bytes: finished.stderr_bytes,
        })
    }
}
