//! The process that has a named machine.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bantam_image::Store;
use bantam_vmm::{ExitCause, Timeline};

use super::changes::changed_meanwhile;
use super::dir::{MachineDir, MachineLock};
use super::ipc::{self, RemoteError, Reply, Request, RunningStatus, StartRequest};
use super::reach;
use super::record::{End, EndKind, LastRun, Record, WorkloadEnd};
use super::workload::{self, RunningWorkload};
use crate::confine::{confine, start_no_more_programs};
use crate::home::variable;
use crate::host::Host;
use crate::local::{Boot, Local};
use crate::machine::Facts;
use crate::network::raise_descriptor_limit;
use crate::{Error, Machine, NetworkConfig, disk, host_trust};

/// How many requests are worked on at once; more wait in the socket's queue.
const MAX_REQUESTS: usize = 256;

/// How long a client may take to say what it wants.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// If it is set and not empty, processes of machines give up nothing: a debugger's wish.
const UNCONFINED: &str = "BANTAM_UNCONFINED";

const CONFINING: &str = "cannot confine the machine's process";

/// The process of one named machine, which [`Machines::start`](crate::Machines::start) runs.
///
/// A program that is to be a machine's process (see
/// [`Machines::vmm_program`](crate::Machines::vmm_program)) calls this, and nothing else, when
/// its first argument is [`VmmProcess::ARGUMENT`].
#[derive(Debug)]
pub struct VmmProcess {
    request: StartRequest,
    /// To the process that starts the machine, until the machine runs.
    starter: UnixStream,
    lock: MachineLock,
    serving: Arc<Serving>,
}

/// Stops the machine of this process, for a handler of signals.
#[derive(Debug, Clone)]
pub struct Stopper(Arc<Serving>);

impl Stopper {
    /// Asks the machine to power off; [`VmmProcess::run`] returns when it has ended. If it has
    /// not booted yet, this process exits.
    pub fn stop(&self) {
        // It is killed if it cannot be asked.
        let _ = self.0.stop(Machine::STOP_GRACE, Machine::STOP_LIMIT);
    }
}

/// What the threads of the process share.
#[derive(Debug)]
pub(super) struct Serving {
    pub(super) dir: MachineDir,
    run: Mutex<LastRun>,
    /// Once it has booted.
    local: OnceLock<Arc<Local>>,
    pub(super) workload: RunningWorkload,
    /// Where the image's pin is, for a machine that is removed at its end.
    images: PathBuf,
    /// Held while the machine's record is changed.
    record: Mutex<()>,
    /// Somebody asked for the end.
    stopping: AtomicBool,
    /// The workload's end is the machine's.
    workload_ends_it: AtomicBool,
    /// The machine was removed.
    gone: AtomicBool,
    requests: AtomicUsize,
}

impl VmmProcess {
    /// The first argument of the process.
    pub const ARGUMENT: &'static str = "vmm-process";

    /// Takes over the machine that the starting process hands over on standard input.
    ///
    /// From here on this thread, and the threads and programs that it starts, reach nothing of the
    /// host but what the machine needs, as far as the host's kernel can see to that
    /// ([`Confinement`](crate::Confinement)). Other threads must be started after this.
    ///
    /// # Errors
    /// [`Error::Io`] if this process was not started for that.
    pub fn receive() -> Result<Self, Error> {
        // Fails only for the leader of a process group, which has no terminal to leave.
        let _ = rustix::process::setsid();
        raise_descriptor_limit();
        let failed = Error::io("this is run by bantam itself, to start a machine");
        let received = io::stdin()
            .as_fd()
            .try_clone_to_owned()
            .map(UnixStream::from)
            .and_then(|starter| {
                let (request, lock) = ipc::receive::<StartRequest>(&starter)?;
                let lock = lock.ok_or(io::ErrorKind::InvalidData)?;
                Ok((request, lock, starter))
            });
        let (request, lock, starter) = received.map_err(failed)?;
        let run = LastRun {
            pid: std::process::id(),
            started_at: super::now(),
            end: None,
            workload: None,
        };
        let dir = MachineDir::new(request.home.machines(), &request.name);
        give_up_rights(&dir, &request)?;
        let serving = Serving {
            dir,
            run: Mutex::new(run),
            local: OnceLock::new(),
            workload: RunningWorkload::default(),
            images: request.home.images().to_path_buf(),
            record: Mutex::new(()),
            stopping: AtomicBool::new(false),
            workload_ends_it: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            requests: AtomicUsize::new(0),
        };
        Ok(Self {
            request,
            starter,
            lock: MachineLock::new(File::from(lock)),
            serving: Arc::new(serving),
        })
    }

    /// Ends the machine from outside [`VmmProcess::run`].
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.serving))
    }

    /// Boots the machine, tells the starting process how that went, and serves the machine until
    /// it ends. If the starting process goes away before the machine runs, this process exits.
    ///
    /// # Errors
    /// What kept the machine from booting, which the starting process was told, too.
    pub fn run(self) -> Result<(), Error> {
        let serving = Arc::clone(&self.serving);
        let answered = Arc::new(AtomicBool::new(false));
        let started = self.start(&answered);
        if let Err(error) = &started {
            serving.failed(error);
            answered.store(true, Ordering::Release);
            let reply = Reply::Failed(RemoteError::new(error));
            // One that went away needs no answer.
            let _ = ipc::send(&self.starter, &reply, None);
        }
        drop(self.starter);
        if let Some(local) = serving.local.get() {
            let cause = local.wait(None).unwrap_or(ExitCause::Killed);
            if started.is_ok() {
                serving.ended(cause, local.console());
            }
        }
        let written = serving.dir.write_end(&serving.lock_run());
        serving.dir.unlisten();
        let removed = serving.remove_ephemeral(self.lock);
        started.map(drop).and(written).and(removed)
    }

    /// Boots, starts the workload, and tells the starting process. Nothing runs after an error.
    fn start(&self, answered: &Arc<AtomicBool>) -> Result<(), Error> {
        let serving = &self.serving;
        let record = serving.dir.record()?;
        let listener = serving.dir.listen()?;
        serving.dir.write_start(&serving.lock_run())?;
        accept(listener, serving)?;
        self.exit_with_the_starter(answered)?;
        let (local, machine) = self.boot(&record)?;
        let _ = serving.local.set(Arc::clone(&local));
        if !is_unconfined() {
            start_no_more_programs().map_err(Error::io(CONFINING))?;
        }
        // The agent answers only when the rest of its set-up is done, which may fail, too.
        let told = machine
            .stats()
            .and_then(|_| workload::run(&machine, &record, serving))
            .and_then(|()| {
                answered.store(true, Ordering::Release);
                ipc::send(&self.starter, &serving.status(), None)
                    .map_err(Error::io("the starting process is gone"))
            });
        if told.is_err() {
            local.kill();
        }
        told
    }

    fn boot(&self, record: &Record) -> Result<(Arc<Local>, Machine), Error> {
        let store = Store::open(self.request.home.images())?;
        let image = store
            .stored(&record.image_digest)?
            .ok_or_else(|| Error::ImageGone {
                image: record.image.clone(),
            })?;
        let timeline = Timeline::start();
        let disk = self.serving.dir.disk();
        // It may have been made larger since the last start.
        disk::grow(&disk, record.spec.disk_gib)?;
        let hostname = record.spec.hostname.as_deref();
        let boot = Boot {
            spec: &record.spec,
            guest: self.request.guest(),
            image: &image,
            disk: Some(disk),
            hostname: hostname.unwrap_or(record.name.as_str()),
            timeout: Duration::from_millis(self.request.boot_timeout_ms),
        };
        let local = Local::boot(boot, &timeline)?;
        let release = local.kernel_release().to_owned();
        let facts = Facts::of(record.clone(), image, local.engine(), release);
        let machine = Machine::attached(Arc::clone(&local) as Arc<dyn Host>, facts, timeline);
        if record.spec.trust_host_certs {
            host_trust::install_certificates(&machine)?;
        }
        Ok((local, machine))
    }

    /// A start that was interrupted must leave nothing: until the flag is set, this process ends
    /// with the one that started it. The kernel takes care of everything else.
    fn exit_with_the_starter(&self, answered: &Arc<AtomicBool>) -> Result<(), Error> {
        let answered = Arc::clone(answered);
        let serving = Arc::clone(&self.serving);
        let mut starter = self
            .starter
            .try_clone()
            .map_err(Error::io("cannot watch the starting process"))?;
        thread::Builder::new()
            .name("starter".to_owned())
            .spawn(move || {
                // It sends nothing more: the read ends when it hangs up.
                let _ = starter.read(&mut [0]);
                if !answered.load(Ordering::Acquire) {
                    serving.give_up("the start was interrupted");
                }
            })
            .map(drop)
            .map_err(Error::io("cannot start a thread"))
    }
}

/// Confines this process, unless its user has asked for the opposite, as debuggers need.
fn give_up_rights(dir: &MachineDir, request: &StartRequest) -> Result<(), Error> {
    if is_unconfined() {
        tracing::warn!("not confined: {UNCONFINED} is set");
        return Ok(());
    }
    // The start says what is wrong with a record that cannot be read.
    let ephemeral = dir.record().is_ok_and(|record| record.ephemeral);
    let grants = reach::grants(dir, request, ephemeral);
    let confined = confine(&grants).map_err(Error::io(CONFINING))?;
    if !confined.files || !confined.system_calls {
        tracing::warn!(
            files = confined.files,
            system_calls = confined.system_calls,
            "this host's kernel cannot confine a process in full"
        );
    }
    Ok(())
}

fn is_unconfined() -> bool {
    variable(UNCONFINED).is_some()
}

/// Answers requests, each on a thread of its own, until the process ends.
fn accept(listener: UnixListener, serving: &Arc<Serving>) -> Result<(), Error> {
    let serving = Arc::clone(serving);
    thread::Builder::new()
        .name("control".to_owned())
        .spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else {
                    // Out of descriptors or memory: better later than in a tight loop.
                    thread::sleep(super::dir::PAUSE);
                    continue;
                };
                while serving.requests.load(Ordering::Acquire) >= MAX_REQUESTS {
                    thread::sleep(super::dir::PAUSE);
                }
                serving.requests.fetch_add(1, Ordering::AcqRel);
                let answering = Arc::clone(&serving);
                let spawned = thread::Builder::new()
                    .name("request".to_owned())
                    .spawn(move || {
                        // A client that hung up needs no answer.
                        let _ = answering.answer(&stream);
                        answering.requests.fetch_sub(1, Ordering::AcqRel);
                    });
                if spawned.is_err() {
                    serving.requests.fetch_sub(1, Ordering::AcqRel);
                }
            }
        })
        .map(drop)
        .map_err(Error::io("cannot start the thread for requests"))
}

impl Serving {
    fn answer(&self, stream: &UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(REQUEST_LIMIT))?;
        stream.set_write_timeout(Some(REQUEST_LIMIT))?;
        let request = match ipc::receive::<Request>(stream) {
            Ok((request, _)) => request,
            // From a program of another version, which must not take silence for the end.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let error = Error::Protocol(format!("the machine's process is asked: {error}"));
                return ipc::send(stream, &Reply::Failed(RemoteError::new(&error)), None);
            }
            Err(error) => return Err(error),
        };
        let mut given: Option<OwnedFd> = None;
        let reply = match request {
            Request::Status => self.status(),
            Request::Connect => match self.connect_exec() {
                Ok(exec) => {
                    given = Some(exec.into());
                    Reply::Connected
                }
                Err(error) => Reply::Failed(RemoteError::new(&error)),
            },
            Request::Stop { grace_ms, limit_ms } => {
                let ms = Duration::from_millis;
                self.ended_reply(self.stop(ms(grace_ms), ms(limit_ms)))
            }
            Request::Kill => {
                self.stopping.store(true, Ordering::Release);
                let cause = match self.local.get() {
                    Some(local) => local.kill(),
                    None => self.give_up("it was killed while it was being started"),
                };
                self.ended_reply(Ok(cause))
            }
            Request::SetPolicy { network, was } => {
                match self.set_policy(*network, was.as_deref()) {
                    Ok(()) => Reply::PolicySet,
                    Err(error) => Reply::Failed(RemoteError::new(&error)),
                }
            }
            Request::EgressEvents => {
                let network = self.local.get().and_then(|local| local.network());
                let events = network.map_or_else(Vec::new, |network| network.events(0));
                Reply::EgressEvents {
                    events: events.into_iter().map(Into::into).collect(),
                }
            }
        };
        ipc::send(stream, &reply, given.as_ref().map(AsFd::as_fd))?;
        if matches!(reply, Reply::Ended { .. }) {
            // The asker waits for the end of the stream, which is that of this process.
            stream.set_read_timeout(None)?;
            let _ = (&mut &*stream).read(&mut [0]);
        }
        Ok(())
    }

    fn connect_exec(&self) -> Result<UnixStream, Error> {
        let local = self.local.get().ok_or_else(|| Error::NotRunning {
            name: self.dir.name().to_string(),
            state: "being started".to_owned(),
        })?;
        local
            .connect_exec()
            .map_err(Error::io("cannot open a stream to the guest"))
    }

    /// This process has the machine's lock, so that it alone can write the record; its threads
    /// take turns.
    fn set_policy(&self, network: NetworkConfig, was: Option<&NetworkConfig>) -> Result<(), Error> {
        let _turn = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let running = self.local.get().and_then(|local| local.network());
        let mut record = self.dir.record()?;
        let (Some(running), Some(recorded)) = (running, record.spec.network.as_mut()) else {
            return Err(Error::BadChange(
                "it runs without a network card; stop it first".to_owned(),
            ));
        };
        if was.is_some_and(|was| *was != *recorded) {
            return Err(changed_meanwhile());
        }
        recorded.policy = network.policy.clone();
        self.dir.write_record(&record)?;
        running.update(network.policy);
        Ok(())
    }

    pub(super) fn stop(&self, grace: Duration, limit: Duration) -> Result<ExitCause, Error> {
        self.stopping.store(true, Ordering::Release);
        match self.local.get() {
            Some(local) => {
                let begun = Instant::now();
                self.workload.stop(grace.min(limit));
                let left = |time: Duration| time.saturating_sub(begun.elapsed());
                local.stop(left(grace), left(limit))
            }
            None => self.give_up("it was stopped while it was being started"),
        }
    }

    /// Ends a process that has no machine yet.
    fn give_up(&self, reason: &str) -> ! {
        let mut run = self.lock_run();
        run.end = Some(End::now(EndKind::Stopped, reason.to_owned(), Vec::new()));
        // If it cannot be written down, the machine shows as killed, which is as true.
        let _ = self.dir.write_end(&run);
        self.dir.unlisten();
        drop(run);
        if let Ok(record) = self.dir.record()
            && record.ephemeral
        {
            // This process has the lock as long as it lives.
            let _ = self.dir.remove_locked(|| self.release(&record));
        }
        std::process::exit(1);
    }

    /// Removes an ephemeral machine that has ended.
    fn remove_ephemeral(&self, lock: MachineLock) -> Result<(), Error> {
        match self.dir.record() {
            Ok(record) if record.ephemeral => {
                // Nothing is written into the directory of that name any more: another machine
                // may have it.
                let _run = self.lock_run();
                self.dir.remove(lock, || self.release(&record))?;
                self.gone.store(true, Ordering::Release);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn release(&self, record: &Record) -> Result<(), Error> {
        Ok(Store::open(&self.images)?.unpin(&record.pin_owner())?)
    }

    fn ended_reply(&self, cause: Result<ExitCause, Error>) -> Reply {
        match cause {
            Ok(cause) => Reply::Ended {
                kind: self.describe(cause).0,
            },
            Err(error) => Reply::Failed(RemoteError::new(&error)),
        }
    }

    fn describe(&self, cause: ExitCause) -> (EndKind, String) {
        match cause {
            ExitCause::Failed(reason) => (EndKind::Failed, reason),
            _ if self.stopping.load(Ordering::Acquire) => {
                (EndKind::Stopped, "it was stopped".to_owned())
            }
            _ if self.workload_ends_it.load(Ordering::Acquire) => {
                (EndKind::Stopped, "its workload ended".to_owned())
            }
            ExitCause::GuestShutdown | ExitCause::Killed => (
                EndKind::Shutdown,
                "the guest shut down or its kernel panicked".to_owned(),
            ),
        }
    }

    fn status(&self) -> Reply {
        let run = self.lock_run();
        match self.local.get() {
            None => Reply::Starting,
            Some(local) => Reply::Running(RunningStatus {
                pid: run.pid,
                started_at: run.started_at,
                engine: local.engine(),
                kernel_release: local.kernel_release().to_owned(),
                workload: run.workload.clone(),
            }),
        }
    }

    /// Stops the machine because its workload has ended.
    pub(super) fn stop_after_workload(&self) {
        self.workload_ends_it.store(true, Ordering::Release);
        if let Some(local) = self.local.get() {
            // It is killed if it cannot be asked.
            let _ = local.stop(Machine::STOP_GRACE, Machine::STOP_LIMIT);
        }
    }

    pub(super) fn workload_ended(&self, end: WorkloadEnd) -> Result<(), Error> {
        let mut run = self.lock_run();
        run.workload = Some(end);
        if self.gone.load(Ordering::Acquire) {
            return Ok(());
        }
        self.dir.write_last_run(&run)
    }

    fn ended(&self, cause: ExitCause, console: Vec<String>) {
        let (kind, reason) = self.describe(cause);
        let console = match kind {
            EndKind::Stopped => Vec::new(),
            EndKind::Shutdown | EndKind::Failed => console,
        };
        self.lock_run().end = Some(End::now(kind, reason, console));
    }

    fn failed(&self, error: &Error) {
        let RemoteError {
            message, console, ..
        } = RemoteError::new(error);
        self.lock_run().end = Some(End::now(EndKind::Failed, message, console));
    }

    fn lock_run(&self) -> MutexGuard<'_, LastRun> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
