//! Named machines: records on disk, and a process for each that runs.
//!
//! A machine is a directory (see [`dir`]). Making one, and removing it, is a rename: it is there
//! whole or not at all. Starting one takes its lock and hands it to a new process, which boots
//! the machine, holds the lock as long as it lives, and listens on the control socket. So:
//!
//! * whether a machine runs is asked of the kernel, not of a file: somebody accepts on its
//!   socket, or nobody does;
//! * a process that is killed frees the lock and the machine with it, and the next start goes on
//!   from the disk;
//! * a command needs the machine's process only to open its stream: that is handed over as a
//!   descriptor, and nobody copies what goes through it.

mod attached;
mod changes;
mod dir;
mod egress;
mod info;
mod ipc;
mod log;
mod name;
mod reach;
mod record;
mod start;
mod stats;
mod stop_signal;
mod vmm;
mod workload;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bantam_image::{Image, Store};
use bantam_vmm::Timeline;

use self::attached::{Answer, Attached};
pub use self::changes::Changes;
use self::dir::{Locked, MachineDir, MachineLock};
pub use self::egress::EgressRecord;
pub use self::info::{MachineInfo, MachineState};
use self::ipc::{Reply, Request, RunningStatus};
pub use self::log::LogOptions;
pub use self::name::MachineName;
pub(crate) use self::record::Record;
pub use self::stats::MachineStats;
pub use self::vmm::{Stopper, VmmProcess};
use crate::home::absolute;
use crate::machine::Facts;
use crate::spec::Spec;
use crate::{Error, Home, Machine, MachineBuilder, NetworkConfig, disk, guest};

/// How long the process of a machine that has ended may take to be gone.
const EXIT_LIMIT: Duration = Duration::from_secs(10);

/// The named machines of this user.
///
/// Every process of the user may work on them at the same time.
///
/// ```no_run
/// use bantam::{Home, Machine, MachineName, Machines};
///
/// let home = Home::from_env()?;
/// Machine::builder().name("dev").image("debian:12").home(home.clone()).create()?;
///
/// let machines = Machines::open(&home);
/// let name = MachineName::parse("dev")?;
/// let machine = machines.start(&name)?;
/// machine.exec(["bash", "-c", "echo kept > /root/note"]).output()?;
/// machines.stop(&name, Machine::STOP_GRACE)?;
/// assert_eq!(machines.start(&name)?.read_file("/root/note")?, b"kept\n");
/// machines.delete(&name)?;
/// # Ok::<(), bantam::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Machines {
    home: Home,
    vmm_program: Option<PathBuf>,
}

/// How a machine was found by [`Machines::stop`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stopped {
    /// It ran, and has powered off or was ended by force.
    Now,
    /// It did not run.
    Before(MachineState),
}

impl Machines {
    /// The machines of a home.
    #[must_use]
    pub fn open(home: &Home) -> Self {
        Self {
            home: home.clone(),
            vmm_program: None,
        }
    }

    /// The program that a machine's process runs: `bantam`, or another that calls
    /// [`VmmProcess`]. By default `$BANTAM_PROGRAM`, or `bantam` beside the running program or in
    /// `$PATH`.
    #[must_use]
    pub fn vmm_program(mut self, program: impl Into<PathBuf>) -> Self {
        self.vmm_program = Some(absolute(program.into()));
        self
    }

    /// Makes a machine; see [`MachineBuilder::create`].
    pub(crate) fn make(
        &self,
        name: &MachineName,
        spec: Spec,
        image: &Image,
        called: String,
        ephemeral: bool,
    ) -> Result<(), Error> {
        let record = Record {
            version: Record::VERSION,
            id: random_hex(8)?,
            name: name.clone(),
            created_at: now(),
            ephemeral,
            image: called,
            image_digest: image.digest.clone(),
            spec,
        };
        let store = self.store()?;
        dir::sweep(self.home.machines(), |record| {
            // The next sweep tries again.
            let _ = store.unpin(&record.pin_owner());
        });
        let template = guest::find_disk_template()?;
        let made = self.dir(name).make(|dir| {
            disk::create(&dir.disk(), record.spec.disk_gib, &template)?;
            // By the record a sweep knows whose pin it is.
            dir.write_record(&record)?;
            Ok(store.pin(image, &record.pin_owner())?)
        });
        if made.is_err() {
            // There is no machine of that id.
            let _ = store.unpin(&record.pin_owner());
        }
        made
    }

    /// Starts a machine and returns when its agent answers and its workload runs. A machine that
    /// runs already is connected to. A workload that cannot be executed does not keep the machine from
    /// running: it may have to be mended from inside, and [`MachineInfo::workload_error`] says why.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`], or what kept it from booting; it does not run then.
    pub fn start(&self, name: &MachineName) -> Result<Machine, Error> {
        self.start_within(name, MachineBuilder::DEFAULT_BOOT_TIMEOUT)
    }

    /// As [`Machines::start`], with a limit for the guest to come up.
    ///
    /// # Errors
    /// As [`Machines::start`].
    pub fn start_within(&self, name: &MachineName, limit: Duration) -> Result<Machine, Error> {
        Ok(self.start_to_work(name, limit)?.0)
    }

    /// As [`Machines::start_within`], and why the workload could not be executed, if it could not.
    pub(crate) fn start_to_work(
        &self,
        name: &MachineName,
        limit: Duration,
    ) -> Result<(Machine, Option<Error>), Error> {
        let dir = self.dir(name);
        let timeline = Timeline::start();
        match dir.lock(|| running(&dir))? {
            Locked::Instead(running) => {
                let refused = refused(&running);
                Ok((self.attach(&dir, running, timeline)?, refused))
            }
            Locked::Mine(lock) => {
                // Before the start: a short workload may end the machine, and remove it.
                let (record, image) = self.description(&dir)?;
                let running = start::start(self, &dir, lock, limit)?;
                let refused = refused(&running);
                let machine = attached_machine(&dir, record, image, running, timeline);
                Ok((machine, refused))
            }
        }
    }

    /// The running machine of that name, whichever process started it.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`], [`Error::NotRunning`], [`Error::Unreachable`].
    pub fn connect(&self, name: &MachineName) -> Result<Machine, Error> {
        let dir = self.dir(name);
        let timeline = Timeline::start();
        let running = self.running(&dir)?;
        self.attach(&dir, running, timeline)
    }

    /// How the machine in `dir` runs, which it must.
    fn running(&self, dir: &MachineDir) -> Result<RunningStatus, Error> {
        match running(dir)? {
            Some(running) => Ok(running),
            None => Err(self.not_running(dir.name())?),
        }
    }

    fn attach(
        &self,
        dir: &MachineDir,
        running: RunningStatus,
        timeline: Timeline,
    ) -> Result<Machine, Error> {
        let (record, image) = self.description(dir)?;
        Ok(attached_machine(dir, record, image, running, timeline))
    }

    fn description(&self, dir: &MachineDir) -> Result<(Record, Image), Error> {
        let record = dir.record()?;
        let image = self.store()?.stored(&record.image_digest)?;
        let image = image.ok_or_else(|| Error::ImageGone {
            image: record.image.clone(),
        })?;
        Ok((record, image))
    }

    /// Asks a machine to write everything back and power off; processes in it have `grace` to
    /// end. It is ended by force if it does not within [`Machine::STOP_LIMIT`] after that.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`], or what went wrong with its process.
    pub fn stop(&self, name: &MachineName, grace: Duration) -> Result<Stopped, Error> {
        self.end(
            name,
            stop_request(grace, Machine::STOP_LIMIT.saturating_add(grace)),
        )
    }

    /// Ends a machine at once, without asking the guest.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`], or what went wrong with its process.
    pub fn kill(&self, name: &MachineName) -> Result<Stopped, Error> {
        self.end(name, Request::Kill)
    }

    fn end(&self, name: &MachineName, request: Request) -> Result<Stopped, Error> {
        let dir = self.dir(name);
        match ended(&dir, &request) {
            Ok((_, false)) => Ok(Stopped::Before(self.inspect(name)?.state)),
            // An ephemeral one is gone.
            Ok((_, true)) => Ok(Stopped::Now),
            Err(error) => Err(error),
        }
    }

    /// Ends a machine if it runs, and removes it with everything it wrote.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`], or what went wrong.
    pub fn delete(&self, name: &MachineName) -> Result<(), Error> {
        let dir = self.dir(name);
        let (Some(lock), _) = ended(&dir, &Request::Kill)? else {
            return Ok(());
        };
        // A damaged record is no reason to keep the machine; its pin is the price.
        let owner = dir.record().ok().map(|record| record.pin_owner());
        let store = self.store()?;
        dir.remove(lock, || match owner {
            Some(owner) => Ok(store.unpin(&owner)?),
            None => Ok(()),
        })
    }

    /// Changes a machine that does not run. The policy of a network can be changed while the
    /// machine runs; it then holds for connections that exist, too.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`], [`Error::MachineRuns`], or what is wrong with the change.
    pub fn update(&self, name: &MachineName, changes: &Changes) -> Result<MachineInfo, Error> {
        let dir = self.dir(name);
        let runs = || {
            Ok(running(&dir)?.map(|_| Error::MachineRuns {
                name: name.to_string(),
            }))
        };
        match dir.lock(runs)? {
            Locked::Instead(error) => {
                let network = changes.policy_only(&dir.record()?.spec).ok_or(error)?;
                self.set_policy(&dir, network, changes.network_was.clone().flatten())?;
                self.inspect(name)
            }
            Locked::Mine(_lock) => {
                let mut record = dir.record()?;
                changes.apply(&mut record.spec)?;
                record.spec.check()?;
                dir.write_record(&record)?;
                self.inspect(name)
            }
        }
    }

    fn set_policy(
        &self,
        dir: &MachineDir,
        network: &NetworkConfig,
        was: Option<NetworkConfig>,
    ) -> Result<(), Error> {
        let request = Request::SetPolicy {
            network: Box::new(network.clone()),
            was: was.map(Box::new),
        };
        match attached::ask(dir, &request, attached::ANSWER_LIMIT)? {
            // It ended meanwhile.
            None => Err(Error::MachineBusy {
                name: dir.name().to_string(),
            }),
            Some(answer) => match answer.reply {
                Reply::PolicySet => Ok(()),
                _ => Err(attached::strange()),
            },
        }
    }

    /// What the network of a running machine refused, the oldest first; at most the last 1024.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`], [`Error::NotRunning`], [`Error::Unreachable`].
    pub fn egress_events(&self, name: &MachineName) -> Result<Vec<EgressRecord>, Error> {
        let dir = self.dir(name);
        match attached::ask(&dir, &Request::EgressEvents, attached::ANSWER_LIMIT)? {
            None => Err(self.not_running(name)?),
            Some(answer) => match answer.reply {
                Reply::EgressEvents { events } => Ok(events),
                _ => Err(attached::strange()),
            },
        }
    }

    fn not_running(&self, name: &MachineName) -> Result<Error, Error> {
        Ok(Error::NotRunning {
            name: name.to_string(),
            state: self.inspect(name)?.state.name().to_owned(),
        })
    }

    /// All machines, by name. One that is made, started, stopped or removed at the same time is
    /// shown before or after, and is not disturbed.
    ///
    /// # Errors
    /// [`Error::State`] if the directory of machines cannot be read.
    pub fn list(&self) -> Result<Vec<MachineInfo>, Error> {
        let names = dir::names(self.home.machines())?;
        Ok(names
            .iter()
            .filter_map(|name| info::listed(&self.dir(name)))
            .collect())
    }

    /// One machine.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`], [`Error::Record`].
    pub fn inspect(&self, name: &MachineName) -> Result<MachineInfo, Error> {
        info::info(&self.dir(name))
    }

    /// Copies what the machine's workload wrote to `out`, the newest 16 MiB of it at most.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`], or what kept it from being read or passed on.
    pub fn logs(
        &self,
        name: &MachineName,
        options: LogOptions,
        out: &mut dyn Write,
    ) -> Result<(), Error> {
        let dir = self.dir(name);
        dir.record()?;
        let runs = || running(&dir).is_ok_and(|running| running.is_some());
        log::copy(&dir.output(), options, runs, out)
    }

    /// What a running machine uses.
    ///
    /// # Errors
    /// As [`Machines::connect`] and [`Machine::stats`].
    pub fn stats(&self, name: &MachineName) -> Result<MachineStats, Error> {
        let dir = self.dir(name);
        let running = self.running(&dir)?;
        let pid = running.pid;
        let guest = self.attach(&dir, running, Timeline::start())?.stats()?;
        Ok(stats::of_process(pid, &dir.disk(), guest))
    }

    /// The directory of a machine.
    ///
    /// # Errors
    /// [`Error::NoSuchMachine`].
    pub fn data_dir(&self, name: &MachineName) -> Result<PathBuf, Error> {
        let dir = self.dir(name);
        dir.record()?;
        Ok(dir.path().to_path_buf())
    }

    fn dir(&self, name: &MachineName) -> MachineDir {
        MachineDir::new(self.home.machines(), name)
    }

    fn store(&self) -> Result<Store, Error> {
        Ok(Store::open(Path::new(self.home.images()))?)
    }
}

/// Ends the machine in `dir` if it runs, and takes its lock, which is free when its process is
/// gone. One that is only just being started is waited for, and ended. Gives the lock, unless the
/// machine was removed at its end, and whether it ran.
fn ended(dir: &MachineDir, request: &Request) -> Result<(Option<MachineLock>, bool), Error> {
    let mut ran = false;
    let mut deadline = Instant::now() + EXIT_LIMIT;
    let locked = dir.lock(|| {
        if attached::end(dir, request)?.is_some() {
            ran = true;
            deadline = Instant::now() + EXIT_LIMIT;
        }
        Ok((Instant::now() > deadline).then_some(()))
    });
    match locked {
        Ok(Locked::Mine(lock)) => Ok((Some(lock), ran)),
        Ok(Locked::Instead(())) => Err(Error::MachineBusy {
            name: dir.name().to_string(),
        }),
        Err(Error::NoSuchMachine { .. }) if ran => Ok((None, true)),
        Err(error) => Err(error),
    }
}

/// Why the workload of a machine that was started could not be executed.
fn refused(running: &RunningStatus) -> Option<Error> {
    let end = running.workload.as_ref()?;
    end.refused.clone().map(Error::from)
}

fn attached_machine(
    dir: &MachineDir,
    record: Record,
    image: Image,
    running: RunningStatus,
    timeline: Timeline,
) -> Machine {
    let host = Attached::new(dir.clone(), running.pid);
    let facts = Facts::of(record, image, running.engine, running.kernel_release);
    Machine::attached(Arc::new(host), facts, timeline)
}

/// How the machine in `dir` runs, if it does. One that is being started does not yet.
fn running(dir: &MachineDir) -> Result<Option<RunningStatus>, Error> {
    match attached::ask(dir, &Request::Status, attached::ANSWER_LIMIT)? {
        None => Ok(None),
        Some(Answer { reply, .. }) => match reply {
            Reply::Running(status) => Ok(Some(status)),
            Reply::Starting => Ok(None),
            _ => Err(attached::strange()),
        },
    }
}

fn stop_request(grace: Duration, limit: Duration) -> Request {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Request::Stop {
        grace_ms: ms(grace),
        limit_ms: ms(limit),
    }
}

/// Unix seconds; 0 on a host whose clock is before 1970.
fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// So many random bytes, in hexadecimal.
fn random_hex(bytes: usize) -> Result<String, Error> {
    let mut random = vec![0; bytes];
    rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty()).map_err(
        |error| Error::Io {
            what: "cannot get random bytes",
            source: error.into(),
        },
    )?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}
