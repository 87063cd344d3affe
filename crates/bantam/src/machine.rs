//! A running machine.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bantam_image::{Argv, Image, ImageConfig};
use bantam_net::Network;
use bantam_virtio::vsock::ConnectionId;
use bantam_vmm::{EngineKind, ExitCause, Phase, Timeline};

use crate::copy::{self, Copied, CopyOptions};
use crate::host::{ExecStream, Host};
use crate::machines::{MachineName, Record};
use crate::spec::CommandDefaults;
use crate::{Error, Exec, GuestStats, Home, MachineBuilder, MachineInfo, Machines, files};

/// How long an agent that works may take to accept a request and to answer that a command runs.
/// It is generous: an emulated guest on a busy host is slow.
pub(crate) const REQUEST_LIMIT: Duration = Duration::from_secs(60);

/// How long after the guest has hung up its machine's end is waited for: longer than a guest that
/// halts has ([`Local`](crate::local::Local)), and than an emulated kernel on a busy host takes to say why it
/// panics. A machine that is still there then has lost its agent only.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A running machine.
///
/// One that was started without a name runs in this process: dropping it ends it at once, and it
/// ends with the process however that dies. A named one runs in a process of its own and goes on
/// when this is dropped. [`Machine::stop`] ends either, and asks first.
///
/// A child that this process forks cannot use it: there, commands and files of a machine without a name
/// are errors, and dropping it waits for an end that nobody tells the child of. Such a child goes on with
/// `exec` or `_exit`.
#[derive(Debug)]
pub struct Machine(pub(crate) Arc<Inner>);

/// What streams and commands hold on to.
#[derive(Debug)]
pub(crate) struct Inner {
    host: Arc<dyn Host>,
    facts: Facts,
    timeline: Timeline,
    /// It ends with its `Machine`.
    owned: bool,
}

/// What does not change while a machine runs.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) name: Option<MachineName>,
    pub(crate) image: Image,
    /// What the image was called.
    pub(crate) called: String,
    pub(crate) engine: EngineKind,
    pub(crate) kernel_release: String,
    pub(crate) defaults: CommandDefaults,
    pub(crate) has_network: bool,
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

impl Facts {
    /// Of a named machine.
    pub(crate) fn of(
        record: Record,
        image: Image,
        engine: EngineKind,
        kernel_release: String,
    ) -> Self {
        Self {
            name: Some(record.name),
            image,
            called: record.image,
            engine,
            kernel_release,
            has_network: record.spec.network.is_some(),
            defaults: record.spec.defaults,
        }
    }
}

impl Inner {
    pub(crate) fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    pub(crate) fn image_config(&self) -> &ImageConfig {
        &self.facts.image.config
    }

    pub(crate) fn connect_exec(&self) -> Result<UnixStream, Error> {
        (self.host.connect_exec()).map_err(|error| self.not_connected(error))
    }

    pub(crate) fn request_exec(&self, request: &[u8]) -> Result<ExecStream, Error> {
        (self.host.request_exec(request)).map_err(|error| self.not_connected(error))
    }

    pub(crate) fn part(&self, id: ConnectionId, stream: Arc<UnixStream>) {
        self.host.part(id, stream);
    }

    fn not_connected(&self, error: io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::BrokenPipe => self.died("it was asked for a command".to_owned()),
            _ => Error::Io {
                what: "cannot open a stream to the guest",
                source: error,
            },
        }
    }

    /// The error for a stream that ended by itself. The streams of a machine that ends close a
    /// moment before its exit is known.
    pub(crate) fn died(&self, what: String) -> Error {
        match self.host.ended(END_LIMIT) {
            Some(ended) => Error::MachineDied {
                what,
                cause: ended.cause,
                console: ended.console,
            },
            None => Error::Agent {
                what,
                reason: "hung up".to_owned(),
            },
        }
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

    /// A machine that ends with the value.
    pub(crate) fn owned(host: Arc<dyn Host>, facts: Facts, timeline: Timeline) -> Self {
        Self(Arc::new(Inner {
            host,
            facts,
            timeline,
            owned: true,
        }))
    }

    /// A machine that goes on without it.
    pub(crate) fn attached(host: Arc<dyn Host>, facts: Facts, timeline: Timeline) -> Self {
        Self(Arc::new(Inner {
            host,
            facts,
            timeline,
            owned: false,
        }))
    }

    /// The running machine of that name, whichever process started it. Dropping the result
    /// leaves the machine running.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`], [`Error::NotRunning`], or what [`Home::from_env`] gives. For
    /// another home see [`Machines::connect`].
    pub fn connect(name: &str) -> Result<Self, Error> {
        Machines::open(&Home::from_env()?).connect(&MachineName::parse(name)?)
    }

    /// All named machines, by name.
    ///
    /// # Errors
    /// As [`Machines::list`]; for another home see there.
    pub fn list() -> Result<Vec<MachineInfo>, Error> {
        Machines::open(&Home::from_env()?).list()
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
        self.command(argv)
    }

    /// A command with the defaults that this machine was made with.
    fn command(&self, argv: Vec<Vec<u8>>) -> Exec {
        let defaults = &self.0.facts.defaults;
        let mut exec = Exec::new(Arc::clone(&self.0), argv);
        for (name, value) in &defaults.env {
            exec = exec.env(name, value);
        }
        if let Some(dir) = &defaults.workdir {
            exec = exec.workdir(dir);
        }
        if let Some(user) = &defaults.user {
            exec = exec.user(user);
        }
        exec
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
        match self.0.image_config().process(&args, entrypoint.as_deref()) {
            Argv::Run(argv) => Ok(self.command(argv)),
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
        files::write(&*self.0, path.as_ref(), mode, content)
    }

    /// Reads a file in the guest, of at most [`Machine::READ_LIMIT`] bytes. Of a larger one no more
    /// than that is taken.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason, [`Error::TooLarge`] for a larger one.
    pub fn read_file(&self, path: impl AsRef<Path>) -> Result<Vec<u8>, Error> {
        files::read_whole(&*self.0, path.as_ref(), Self::READ_LIMIT)
    }

    /// Streams a file in the guest to `sink`, in bounded memory.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason, [`Error::Io`] if `sink` fails.
    pub fn read_file_to(&self, path: impl AsRef<Path>, sink: &mut dyn Write) -> Result<(), Error> {
        files::read(&*self.0, path.as_ref(), sink)
    }

    /// Copies a file or directory of the host into the machine, as `docker cp` does:
    ///
    /// * a file goes to `to`, or into it if that is a directory;
    /// * a directory becomes `to`, or goes into it if that is there already;
    /// * what is in a directory (`from` ends in `/.`) goes into the directory `to`, which is made
    ///   if it is missing;
    /// * a slash at the end of `to` demands a directory; the parent of `to` must exist.
    ///
    /// Modes and modification times are kept, symbolic links stay links, owners are
    /// [`CopyOptions`]'s affair. Sockets and devices are counted and left out.
    ///
    /// # Errors
    /// [`Error::Archive`] for what cannot be read here, [`Error::File`] with the guest's reason.
    pub fn copy_in(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        options: &CopyOptions,
    ) -> Result<Copied, Error> {
        copy::copy_in(&*self.0, from.as_ref(), to.as_ref(), options)
    }

    /// Copies a file or directory of the machine to the host, with the rules of
    /// [`Machine::copy_in`]. Nothing that the machine sends is made anywhere but at (or, for a
    /// directory, below) the place where the copy belongs; symbolic links that are there already
    /// are not followed below it, and no devices are made.
    ///
    /// Nor is a symbolic link that `to` itself names, since an earlier copy may have brought it:
    /// a link takes its place, a file is refused, and one to a directory is refused unless a
    /// slash comes after it. Links in `/dev` and `/proc` are the system's own, and are followed. The
    /// directories before the last component of `to` are the caller's own, and are followed.
    ///
    /// A single file goes *into* what is there already, as with `cp`:
    ///
    /// * a file keeps its mode, its owner and its other names, but no set-user-ID bits, unless
    ///   owners are kept. It gets the new contents when they have come as a whole: a guest that
    ///   fails leaves the old ones. Until then they are in an unnamed file beside it; where none
    ///   can be made they go straight in;
    /// * a device gets the bytes, and so does a FIFO, whose reader is waited for, for a minute;
    /// * `/dev/stdout` and `/dev/fd/1` are this process's standard output, where it stands.
    ///
    /// Files below a directory that is copied take the place of those that are there.
    ///
    /// Modes lose the bits of the process's umask, unless owners are kept.
    ///
    /// # Errors
    /// [`Error::Archive`] for what cannot be made here or must not be, [`Error::File`] with the
    /// guest's reason. What was copied until then stays.
    pub fn copy_out(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        options: &CopyOptions,
    ) -> Result<Copied, Error> {
        copy::copy_out(&*self.0, from.as_ref(), to.as_ref(), options)
    }

    /// Extracts a tar archive in a directory of the machine, with the owners it names.
    ///
    /// # Errors
    /// [`Error::Io`] if `archive` cannot be read, [`Error::File`] with the guest's reason.
    pub fn copy_in_tar(
        &self,
        archive: &mut dyn Read,
        dir: impl AsRef<Path>,
    ) -> Result<Copied, Error> {
        copy::copy_in_tar(&*self.0, archive, dir.as_ref())
    }

    /// Writes a file or directory of the machine to `sink` as a tar archive. It is the
    /// machine's own work: take it apart as you would one from a stranger.
    ///
    /// # Errors
    /// [`Error::Io`] if `sink` fails, [`Error::File`] with the guest's reason.
    pub fn copy_out_tar(
        &self,
        from: impl AsRef<Path>,
        sink: &mut dyn Write,
        options: &CopyOptions,
    ) -> Result<Copied, Error> {
        copy::copy_out_tar(&*self.0, from.as_ref(), sink, options.follow_link)
    }

    /// What the guest's kernel says of its memory, processors, processes and disk. It is the
    /// guest's word.
    ///
    /// # Errors
    /// [`Error::MachineDied`] or [`Error::Agent`].
    pub fn stats(&self) -> Result<GuestStats, Error> {
        files::stats(&*self.0)
    }

    /// Its name, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<&MachineName> {
        self.0.facts.name.as_ref()
    }

    /// The image it was made from.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.0.facts.image
    }

    /// What the image was called when the machine was made.
    #[must_use]
    pub fn image_name(&self) -> &str {
        &self.0.facts.called
    }

    /// Whether it has a network card.
    #[must_use]
    pub fn has_network(&self) -> bool {
        self.0.facts.has_network
    }

    /// The engine that runs it.
    #[must_use]
    pub fn engine(&self) -> EngineKind {
        self.0.facts.engine
    }

    /// Its network, to change the policy and to see what was refused; `None` for a machine without
    /// one, and for a named machine, whose network is of another process.
    #[must_use]
    pub fn network(&self) -> Option<Network> {
        self.0.host.network()
    }

    /// When each phase was reached.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.0.timeline
    }

    /// The release of the guest's kernel, as `uname -r` shows it.
    #[must_use]
    pub fn kernel_release(&self) -> &str {
        &self.0.facts.kernel_release
    }

    /// Asks the guest to write everything back and power off; ends it by force if it does not
    /// within [`Machine::STOP_LIMIT`]. Stopping a machine that has ended reports how it ended.
    ///
    /// # Errors
    /// For a machine in a process of its own, [`Error::Io`] if that cannot be reached.
    pub fn stop(&self) -> Result<Report, Error> {
        let cause = self.0.host.stop(Self::STOP_GRACE, Self::STOP_LIMIT)?;
        Ok(self.report(cause))
    }

    /// Ends it at once, without asking the guest. Calls that wait for the guest, on any thread,
    /// end with an error.
    pub fn kill(&self) -> Report {
        let cause = self.0.host.kill();
        self.report(cause)
    }

    fn report(&self, cause: ExitCause) -> Report {
        self.0.timeline.mark(Phase::Teardown);
        Report {
            cause,
            engine: self.engine(),
            timeline: self.0.timeline.clone(),
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.0.owned {
            // Commands may still hold a reference; the machine ends with its owner all the same.
            self.0.host.kill();
        }
    }
}
