//! The directory of a machine.
//!
//! | name | what |
//! |---|---|
//! | `machine.json` | the machine's [`Record`] |
//! | `run.json` | its [`LastRun`] |
//! | `run.room` | room for the end of that on a full disk |
//! | `lock` | held by whoever may change the machine; by its process while it runs |
//! | `control.sock` | the control socket of its process |
//! | `disk.ext4` | what it wrote |
//! | `output.log`, `output.log.1` | what its workload wrote |
//! | `vmm.log` | what its process had to say |

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::name::MachineName;
use super::record::{self, LastRun, Record};
use crate::Error;

/// Begin the names of directories that are being made or removed; no machine's name does.
const MAKING: &str = ".new-";
const REMOVING: &str = ".gone-";

/// Random bytes in such a name.
const RANDOM: usize = 8;

/// Between looks at a lock or a process that others hold. Only rare waits do it: two starts of
/// one machine at once, or the last moment of one that was killed.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

/// One machine's directory, which may not exist.
#[derive(Debug, Clone)]
pub(crate) struct MachineDir {
    path: PathBuf,
    name: MachineName,
}

/// The right to change a machine: to start, update or remove it. Held until it is dropped, or by
/// the process that it is handed to.
#[derive(Debug)]
pub(crate) struct MachineLock(File);

impl MachineLock {
    pub(super) fn new(file: File) -> Self {
        Self(file)
    }

    pub(super) fn file(&self) -> &File {
        &self.0
    }
}

impl MachineDir {
    pub(super) fn new(machines: &Path, name: &MachineName) -> Self {
        Self {
            path: machines.join(name.as_str()),
            name: name.clone(),
        }
    }

    pub(super) fn name(&self) -> &MachineName {
        &self.name
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn disk(&self) -> PathBuf {
        self.path.join("disk.ext4")
    }

    pub(super) fn output(&self) -> PathBuf {
        self.path.join("output.log")
    }

    pub(super) fn vmm_log(&self) -> PathBuf {
        self.path.join("vmm.log")
    }

    /// The record; an error if there is no such machine.
    pub(super) fn record(&self) -> Result<Record, Error> {
        let path = self.path.join("machine.json");
        let record = record::read::<Record>(&path)?.ok_or_else(|| self.not_found())?;
        if record.version != Record::VERSION {
            return Err(Error::Record {
                path,
                reason: format!(
                    "it is of version {}, and this program knows {}",
                    record.version,
                    Record::VERSION
                ),
            });
        }
        Ok(record)
    }

    pub(super) fn write_record(&self, record: &Record) -> Result<(), Error> {
        record::write(&self.path.join("machine.json"), record)
    }

    pub(super) fn last_run(&self) -> Result<Option<LastRun>, Error> {
        record::read(&self.path.join("run.json"))
    }

    pub(super) fn write_last_run(&self, run: &LastRun) -> Result<(), Error> {
        record::write(&self.path.join("run.json"), run)
    }

    /// As [`MachineDir::write_last_run`], for the first and the last time in a run: the first keeps room
    /// on the host's disk for the last, so that a stop on a full disk is not taken for a crash.
    pub(super) fn write_start(&self, run: &LastRun) -> Result<(), Error> {
        self.write_last_run(run)?;
        let path = self.path.join("run.json");
        if let Err(error) = record::keep_room(&path) {
            // A machine that runs may be what makes room.
            tracing::warn!(%error, path = %path.display(), "cannot keep room");
        }
        Ok(())
    }

    /// See [`MachineDir::write_start`].
    pub(super) fn write_end(&self, run: &LastRun) -> Result<(), Error> {
        record::write_last(&self.path.join("run.json"), run)
    }

    pub(super) fn not_found(&self) -> Error {
        Error::NoSuchMachine {
            name: self.name.to_string(),
        }
    }

    /// Takes the lock. While someone else has it, `meanwhile` decides every few milliseconds
    /// whether to go on waiting; what it gives ends the wait.
    pub(super) fn lock<T>(
        &self,
        mut meanwhile: impl FnMut() -> Result<Option<T>, Error>,
    ) -> Result<Locked<T>, Error> {
        let path = self.path.join("lock");
        loop {
            let file = match open_lock(&path, false) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(self.not_found());
                }
                Err(error) => return Err(state("open", &path)(error)),
            };
            match file.try_lock() {
                // The machine of that name may have been removed, and another made, meanwhile.
                Ok(()) if is_at(&file, &path) => return Ok(Locked::Mine(MachineLock(file))),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    if let Some(value) = meanwhile()? {
                        return Ok(Locked::Instead(value));
                    }
                    thread::sleep(PAUSE);
                }
                Err(TryLockError::Error(error)) => return Err(state("lock", &path)(error)),
            }
        }
    }

    /// Makes the directory with everything that `fill` puts into it; it appears whole or not at
    /// all.
    pub(super) fn make(&self, fill: impl FnOnce(&Self) -> Result<(), Error>) -> Result<(), Error> {
        let machines = self.path.parent().unwrap_or(Path::new("/"));
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(machines)
            .map_err(state("make", machines))?;
        if self.path.exists() {
            return Err(self.exists());
        }
        let (staged, _lock) = self.stage(machines)?;
        let made = staged.fill_and_publish(&self.path, fill);
        if made.is_err() {
            // What failed is told; a leftover is swept by the next who makes a machine.
            let _ = fs::remove_dir_all(&staged.path);
        }
        made
    }

    /// A directory under another name, and its lock, which says that its maker lives.
    fn stage(&self, machines: &Path) -> Result<(Self, File), Error> {
        loop {
            let staged = Self {
                path: machines.join(format!("{MAKING}{}", super::random_hex(RANDOM)?)),
                name: self.name.clone(),
            };
            DirBuilder::new()
                .mode(0o700)
                .create(&staged.path)
                .map_err(state("make", &staged.path))?;
            let lock_path = staged.path.join("lock");
            let lock = open_lock(&lock_path, true).map_err(state("make", &lock_path))?;
            lock.lock().map_err(state("lock", &lock_path))?;
            // Until it was locked, somebody who sweeps may have taken it for a leftover.
            if is_at(&lock, &lock_path) {
                return Ok((staged, lock));
            }
        }
    }

    fn fill_and_publish(
        &self,
        to: &Path,
        fill: impl FnOnce(&Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        fill(self)?;
        // A rename does not replace a directory that has something in it.
        fs::rename(&self.path, to).map_err(|error| match error.kind() {
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists => self.exists(),
            _ => state("make", to)(error),
        })?;
        // It is there; should the host crash now, it may be gone.
        if let Err(error) = record::sync_parent(to) {
            tracing::warn!(%error, path = %to.display(), "cannot sync");
        }
        Ok(())
    }

    fn exists(&self) -> Error {
        Error::MachineExists {
            name: self.name.to_string(),
        }
    }

    /// Removes the directory. Its name is free at once, whatever happens to the rest; between the
    /// two, `meanwhile` lets go of what the machine held elsewhere.
    pub(super) fn remove(
        &self,
        lock: MachineLock,
        meanwhile: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let removed = self.remove_locked(meanwhile);
        drop(lock);
        removed
    }

    /// As [`MachineDir::remove`], for a process that has the lock anyway.
    pub(super) fn remove_locked(
        &self,
        meanwhile: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let machines = self.path.parent().unwrap_or(Path::new("/"));
        let gone = machines.join(format!("{REMOVING}{}", super::random_hex(RANDOM)?));
        fs::rename(&self.path, &gone).map_err(state("remove", &self.path))?;
        meanwhile()?;
        fs::remove_dir_all(&gone).map_err(state("remove", &gone))
    }

    /// Binds the control socket. Only the holder of the lock may.
    pub(super) fn listen(&self) -> Result<UnixListener, Error> {
        let path = self.path.join("control.sock");
        let failed = state("listen on", &path);
        let bind = || {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let (_dir, short) = self.short_socket_path()?;
            let listener = UnixListener::bind(short)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
            Ok(listener)
        };
        bind().map_err(failed)
    }

    /// Removes the control socket. One that is left is harmless: nobody answers on it.
    pub(super) fn unlisten(&self) {
        let _ = fs::remove_file(self.path.join("control.sock"));
    }

    /// Connects to the process that has the machine; `None` if there is none. One that takes no
    /// connection within `limit` is unreachable.
    pub(super) fn connect(&self, limit: Duration) -> Result<Option<UnixStream>, Error> {
        let failed = state("connect to", &self.path);
        let (_dir, short) = match self.short_socket_path() {
            Ok(paths) => paths,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        match connect_within(&short, limit) {
            Ok(stream) => Ok(Some(stream)),
            Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
            // Its queue is full and stays so.
            Err(Errno::AGAIN) => Err(Error::Unreachable {
                name: self.name.to_string(),
            }),
            Err(error) => Err(failed(error.into())),
        }
    }

    /// A path to the socket through an open directory: addresses of sockets end at 107 bytes,
    /// and state directories can be anywhere.
    fn short_socket_path(&self) -> io::Result<(File, PathBuf)> {
        let dir = File::open(&self.path)?;
        let path = format!("/proc/self/fd/{}/control.sock", dir.as_raw_fd());
        Ok((dir, path.into()))
    }
}

/// As [`UnixStream::connect`], which may wait for ever for a process that accepts nothing.
fn connect_within(path: &Path, limit: Duration) -> rustix::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// What came of waiting for a lock.
pub(super) enum Locked<T> {
    /// The lock.
    Mine(MachineLock),
    /// What made it needless.
    Instead(T),
}

/// The error for a file of ours.
pub(super) fn state(what: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::State {
        what,
        path: path.clone(),
        source,
    }
}

fn open_lock(path: &Path, create: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .open(path)
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

/// The names of all machines.
pub(super) fn names(machines: &Path) -> Result<Vec<MachineName>, Error> {
    let entries = match fs::read_dir(machines) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(state("read", machines)(error)),
    };
    let mut names: Vec<_> = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| MachineName::parse(entry.file_name().to_str()?).ok())
        .collect();
    names.sort();
    Ok(names)
}

/// Finishes what killed processes left half made or half removed, and removes ephemeral machines
/// whose process was killed. `release` lets go of what a machine of that id holds elsewhere.
pub(super) fn sweep(machines: &Path, release: impl Fn(&Record)) {
    let Ok(entries) = fs::read_dir(machines) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else {
            continue;
        };
        let record = record::read::<Record>(&path.join("machine.json"))
            .ok()
            .flatten();
        if !is_unfinished(&name) {
            let Ok(name) = MachineName::parse(&name) else {
                continue;
            };
            if let Some(record) = record.filter(|record| record.ephemeral) {
                sweep_ephemeral(&MachineDir::new(machines, &name), || release(&record));
            }
            continue;
        }
        // Held meanwhile: its maker may be about to take it.
        let lock = open_lock(&path.join("lock"), false);
        let dead = match &lock {
            Ok(lock) => lock.try_lock().is_ok(),
            // Without a lock it is older than a moment, or its maker was killed at once.
            Err(_) => entry
                .metadata()
                .and_then(|meta| meta.modified())
                .is_ok_and(|at| at.elapsed().is_ok_and(|age| age > Duration::from_secs(60))),
        };
        if dead {
            record.iter().for_each(&release);
            // The next sweep tries again.
            let _ = fs::remove_dir_all(&path);
        }
    }
}

/// An ephemeral machine that was started and does not run has ended without being removed.
fn sweep_ephemeral(dir: &MachineDir, release: impl FnOnce()) {
    let path = dir.path.join("lock");
    let Ok(file) = open_lock(&path, false) else {
        return;
    };
    if file.try_lock().is_err() || !is_at(&file, &path) {
        return;
    }
    if matches!(dir.last_run(), Ok(Some(_))) {
        // The next sweep tries again.
        let _ = dir.remove(MachineLock(file), || {
            release();
            Ok(())
        });
    }
}

/// Whether this is a name that [`MachineDir::make`] or [`MachineDir::remove`] gave. Anything else
/// that somebody keeps here is theirs.
fn is_unfinished(name: &str) -> bool {
    let random = name
        .strip_prefix(MAKING)
        .or_else(|| name.strip_prefix(REMOVING));
    random.is_some_and(|random| {
        random.len() == RANDOM * 2 && random.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(machines: &Path, name: &str) -> MachineDir {
        MachineDir::new(machines, &MachineName::parse(name).unwrap())
    }

    fn mine(dir: &MachineDir) -> Option<MachineLock> {
        match dir.lock(|| Ok(Some(()))).unwrap() {
            Locked::Mine(lock) => Some(lock),
            Locked::Instead(()) => None,
        }
    }

    #[test]
    fn a_machine_is_made_whole_or_not_at_all() {
        let home = tempfile::tempdir().unwrap();
        let dir = named(home.path(), "a");
        let failed = dir.make(|_| Err(dir.not_found()));
        assert!(failed.is_err());
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
        dir.make(|_| Ok(())).unwrap();
        assert!(matches!(
            dir.make(|_| Ok(())),
            Err(Error::MachineExists { .. })
        ));
        assert_eq!(names(home.path()).unwrap(), std::slice::from_ref(&dir.name));
        let mode = fs::metadata(dir.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn two_makers_of_one_name_get_one_machine() {
        let home = tempfile::tempdir().unwrap();
        let made: Vec<_> = thread::scope(|scope| {
            let makers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| named(home.path(), "a").make(|_| Ok(())).is_ok()))
                .collect();
            makers
                .into_iter()
                .map(|maker| maker.join().unwrap())
                .collect()
        });
        assert_eq!(made.iter().filter(|made| **made).count(), 1);
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_a_killed_process_left_is_swept_and_what_a_living_one_makes_is_not() {
        let home = tempfile::tempdir().unwrap();
        let left = home.path().join(".new-00000000000000aa");
        fs::create_dir(&left).unwrap();
        drop(open_lock(&left.join("lock"), true).unwrap());
        let living = home.path().join(".gone-00000000000000bb");
        fs::create_dir(&living).unwrap();
        let lock = open_lock(&living.join("lock"), true).unwrap();
        lock.lock().unwrap();
        // Somebody's own, although it begins with a dot and has been there for long.
        let foreign = home.path().join(".git");
        fs::create_dir(&foreign).unwrap();
        let old = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
        File::open(&foreign).unwrap().set_times(old).unwrap();
        sweep(home.path(), |_| {});
        assert!(!left.exists());
        assert!(living.exists());
        assert!(foreign.exists());
    }

    #[test]
    fn a_lock_is_of_one_holder_and_not_of_a_machine_that_was_removed() {
        let home = tempfile::tempdir().unwrap();
        let dir = named(home.path(), "a");
        dir.make(|_| Ok(())).unwrap();
        let lock = mine(&dir).unwrap();
        assert!(mine(&dir).is_none());
        dir.remove(lock, || Ok(())).unwrap();
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
        assert!(matches!(
            dir.lock(|| Ok(Some(()))),
            Err(Error::NoSuchMachine { .. })
        ));
    }

    #[test]
    fn the_socket_works_however_deep_the_directory_is() {
        let home = tempfile::tempdir().unwrap();
        let deep = home.path().join("d".repeat(200));
        fs::create_dir(&deep).unwrap();
        let dir = named(&deep, &"n".repeat(75));
        dir.make(|_| Ok(())).unwrap();
        assert!(dir.connect(Duration::from_secs(5)).unwrap().is_none());
        let listener = dir.listen().unwrap();
        assert!(dir.connect(Duration::from_secs(5)).unwrap().is_some());
        let socket = fs::metadata(dir.path().join("control.sock")).unwrap();
        assert_eq!(socket.permissions().mode() & 0o777, 0o600);
        drop(listener);
        assert!(dir.connect(Duration::from_secs(5)).unwrap().is_none());
        assert!(dir.listen().is_ok(), "a stale socket is in the way");
    }

    #[test]
    fn a_process_that_accepts_nothing_is_unreachable_and_not_waited_for() {
        let home = tempfile::tempdir().unwrap();
        let dir = named(home.path(), "a");
        dir.make(|_| Ok(())).unwrap();
        let (_dir, short) = dir.short_socket_path().unwrap();
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(short).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let limit = Duration::from_millis(50);
        let waiting: Vec<_> = (0..4).map(|_| dir.connect(limit)).collect();
        assert!(matches!(
            waiting.last().unwrap(),
            Err(Error::Unreachable { .. })
        ));
    }

    #[test]
    fn a_damaged_record_is_named_and_not_taken_for_a_missing_one() {
        let home = tempfile::tempdir().unwrap();
        let dir = named(home.path(), "a");
        dir.make(|dir| {
            fs::write(dir.path().join("machine.json"), "{").unwrap();
            Ok(())
        })
        .unwrap();
        let error = dir.record().unwrap_err();
        assert!(matches!(&error, Error::Record { .. }), "{error}");
        assert!(error.to_string().contains("machine.json"), "{error}");
    }
}
