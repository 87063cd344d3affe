//! A running machine.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bantam_image::{Argv, Image, ImageConfig};
use bantam_protocol::GUEST_EXEC_PORT;
use bantam_vmm::{EngineKind, EngineReport, ExitCause, Phase, Timeline, Vm};

use crate::capped::Capped;
use crate::control::Control;
use crate::{Error, Exec, MachineBuilder, files};

/// How long an agent that works may take to accept a request and to answer that a command runs.
/// It is generous: an emulated guest on a busy host is slow.
pub(crate) const REQUEST_LIMIT: Duration = Duration::from_secs(60);

/// How many console lines an error carries.
pub(crate) const CONSOLE_LINES: usize = 15;

/// A running machine. Dropping it ends it at once; [`Machine::stop`] asks first.
#[derive(Debug)]
pub struct Machine(Arc<Inner>);

/// What streams and commands hold on to.
#[derive(Debug)]
pub(crate) struct Inner {
    vm: Vm,
    control: Mutex<Control>,
    image: Image,
    timeline: Timeline,
}

/// What is left of a machine.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Report {
    /// Why it ended.
    pub cause: ExitCause,
    /// The engine that ran it.
    pub engine: EngineKind,
    /// When each phase was reached.
    pub timeline: Timeline,
}

impl Inner {
    pub(crate) fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    pub(crate) fn image_config(&self) -> &ImageConfig {
        &self.image.config
    }

    pub(crate) fn connect_exec(&self) -> Result<UnixStream, Error> {
        self.vm
            .vsock()
            .connect(GUEST_EXEC_PORT)
            .map_err(|error| match error.kind() {
                io::ErrorKind::BrokenPipe => self.died("it was asked for a command".to_owned()),
                _ => Error::Io {
                    what: "cannot open a stream to the guest",
                    source: error,
                },
            })
    }

    /// The error for a stream that ended by itself. The streams of a machine that ends close a
    /// moment before its exit is known.
    pub(crate) fn died(&self, what: String) -> Error {
        let Some(exit) = self.vm.wait(Some(Duration::from_millis(500))) else {
            return Error::Agent {
                what,
                reason: "hung up".to_owned(),
            };
        };
        let last_words = self.lock_control().last_words();
        let cause = last_words.unwrap_or_else(|| match exit {
            ExitCause::GuestShutdown => "the guest shut down or its kernel panicked".into(),
            ExitCause::Killed => "it was stopped".into(),
            ExitCause::Failed(reason) => reason,
        });
        Error::MachineDied {
            what,
            cause,
            console: self.vm.console().last_lines(CONSOLE_LINES),
        }
    }

    fn lock_control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Machine {
    /// The most bytes that [`Machine::read_file`] returns: a guest must not fill the host's
    /// memory. [`Machine::read_file_to`] has no limit.
    pub const READ_LIMIT: u64 = 1 << 30;
    /// How long commands have to end after [`Machine::stop`] asked them to.
    pub const STOP_GRACE: Duration = Duration::from_secs(5);
    /// How long the guest may take in all before [`Machine::stop`] ends it by force.
    pub const STOP_LIMIT: Duration = Duration::from_secs(15);

    /// Begins the description of a machine.
    pub fn builder() -> MachineBuilder {
        MachineBuilder::default()
    }

    pub(crate) fn new(vm: Vm, control: Control, image: Image, timeline: Timeline) -> Self {
        Self(Arc::new(Inner {
            vm,
            control: Mutex::new(control),
            image,
            timeline,
        }))
    }

    /// Runs a command: `argv[0]` is looked up in the guest's `PATH`, the environment, user and
    /// working directory are the image's unless set otherwise.
    pub fn exec<I, S>(&self, argv: I) -> Exec
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let argv = argv
            .into_iter()
            .map(|arg| arg.as_ref().as_bytes().to_vec())
            .collect();
        Exec::new(Arc::clone(&self.0), argv)
    }

    /// Runs what the image is for, as a container engine would: `args` replace the image's
    /// default arguments and follow its entrypoint; `entrypoint` replaces that, or clears it if it
    /// is empty.
    ///
    /// # Errors
    /// [`Error::InvalidCommand`] if neither the image nor the caller names a command.
    pub fn workload<I>(&self, args: I, entrypoint: Option<&OsStr>) -> Result<Exec, Error>
    where
        I: IntoIterator<Item: AsRef<OsStr>>,
    {
        let bytes = |word: &OsStr| word.as_bytes().to_vec();
        let args: Vec<_> = args.into_iter().map(|arg| bytes(arg.as_ref())).collect();
        let entrypoint = entrypoint.map(|word| vec![bytes(word)]);
        match self.0.image.config.process(&args, entrypoint.as_deref()) {
            Argv::Run(argv) => Ok(Exec::new(Arc::clone(&self.0), argv)),
            Argv::Idle => Err(Error::InvalidCommand(
                "none was given, and the image names none".to_owned(),
            )),
        }
    }

    /// Writes a file in the guest, whole or not at all. The mode is 0644, or that of the file
    /// it replaces.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason.
    pub fn write_file(
        &self,
        path: impl AsRef<Path>,
        content: impl AsRef<[u8]>,
    ) -> Result<(), Error> {
        self.write_file_from(path, None, &mut content.as_ref())
    }

    /// Streams `content` into a file in the guest, in bounded memory.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason, [`Error::Io`] if `content` cannot be read.
    pub fn write_file_from(
        &self,
        path: impl AsRef<Path>,
        mode: Option<u32>,
        content: &mut dyn Read,
    ) -> Result<(), Error> {
        files::write(&self.0, path.as_ref(), mode, content)
    }

    /// Reads a file in the guest, of at most [`Machine::READ_LIMIT`] bytes.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason, [`Error::TooLarge`] for a larger one.
    pub fn read_file(&self, path: impl AsRef<Path>) -> Result<Vec<u8>, Error> {
        let path = path.as_ref();
        let mut content = Capped::new(Self::READ_LIMIT);
        self.read_file_to(path, &mut content)?;
        if content.truncated() {
            return Err(Error::TooLarge {
                path: path.display().to_string(),
                limit: Self::READ_LIMIT,
            });
        }
        Ok(content.bytes)
    }

    /// Streams a file in the guest to `sink`, in bounded memory.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason, [`Error::Io`] if `sink` fails.
    pub fn read_file_to(&self, path: impl AsRef<Path>, sink: &mut dyn Write) -> Result<(), Error> {
        files::read(&self.0, path.as_ref(), sink)
    }

    /// The image it was made from.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.0.image
    }

    /// The engine that runs it.
    #[must_use]
    pub fn engine(&self) -> EngineKind {
        self.0.vm.engine()
    }

    /// What the host offered when the engine was chosen.
    #[must_use]
    pub fn engines(&self) -> &EngineReport {
        self.0.vm.engines()
    }

    /// When each phase was reached.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.0.timeline
    }

    /// The release of the guest's kernel, as `uname -r` shows it.
    #[must_use]
    pub fn kernel_release(&self) -> String {
        self.0.lock_control().hello.kernel_release.clone()
    }

    /// Asks the guest to write everything back and power off; ends it by force if it does not
    /// within [`Machine::STOP_LIMIT`]. Stopping a machine that has ended reports how it ended.
    ///
    /// # Errors
    /// None today; a machine with a disk of its own will report one that was not written back.
    pub fn stop(&self) -> Result<Report, Error> {
        let asked = self
            .0
            .lock_control()
            .shutdown(Self::STOP_GRACE, Self::STOP_LIMIT);
        // If the agent is gone, so is its machine, or there is nobody to ask.
        let cause = asked
            .ok()
            .and_then(|()| self.0.vm.wait(Some(Self::STOP_LIMIT)))
            .unwrap_or_else(|| self.0.vm.kill());
        Ok(self.report(cause))
    }

    /// Ends it at once, without asking the guest. Calls that wait for the guest, on any thread,
    /// end with an error.
    pub fn kill(&self) -> Report {
        let cause = self.0.vm.kill();
        self.report(cause)
    }

    fn report(&self, cause: ExitCause) -> Report {
        self.0.timeline.mark(Phase::Teardown);
        Report {
            cause,
            engine: self.0.vm.engine(),
            timeline: self.0.timeline.clone(),
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Commands may still hold a reference; the machine ends with its owner all the same.
        self.0.vm.kill();
    }
}
