//! A copy out into what is no file: a device, a FIFO, the caller's own standard output.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, openat, readlinkat, statat,
};
use rustix::io::Errno;

/// How long somebody may take to open a FIFO for reading. An earlier copy may have made it, and a
/// machine must not be able to hold its caller for good.
const READER_LIMIT: Duration = Duration::from_secs(60);

/// How often it is tried.
const READER_PAUSE: Duration = Duration::from_millis(20);

/// Opens what is at `name` in `dir` for writing, if it is to be written into as it is. `None` if it
/// is a file, a directory, nothing, or a symbolic link that an earlier copy may have made: the
/// last is not followed. `path` is the directory's.
///
/// # Errors
/// As the kernel says, and if nobody reads from a FIFO for a minute.
pub(super) fn open(dir: BorrowedFd<'_>, path: &Path, name: &OsStr) -> io::Result<Option<File>> {
    let kind = match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => FileType::from_raw_mode(stat.st_mode),
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
    let open = |more| openat(dir, name, flags | more, Mode::empty());
    let opened = match kind {
        FileType::RegularFile | FileType::Directory => return Ok(None),
        FileType::Symlink if !is_systems(path) => return Ok(None),
        FileType::Symlink => match own_stream(dir, path, name)? {
            Some(stream) => stream,
            None => open(OFlags::TRUNC)?,
        },
        FileType::Fifo => fifo(|| open(OFlags::NOFOLLOW | OFlags::NONBLOCK), READER_LIMIT)?,
        // A socket refuses with a reason.
        _ => open(OFlags::NOFOLLOW)?,
    };
    Ok(Some(File::from(opened)))
}

/// Whether the links in a directory are the system's own, which no copy made: `/dev/stdout`,
/// `/dev/fd/3`, `/dev/disk/by-id/...`. Anybody may write to `/dev/shm`.
fn is_systems(dir: &Path) -> bool {
    dir.canonicalize().is_ok_and(|dir| {
        (dir.starts_with("/dev") || dir.starts_with("/proc")) && !dir.starts_with("/dev/shm")
    })
}

/// Our standard output or error, if that is where the link leads: opened anew, a file would be
/// emptied and written from its beginning, and a socket cannot be opened at all.
fn own_stream(dir: BorrowedFd<'_>, path: &Path, name: &OsStr) -> io::Result<Option<OwnedFd>> {
    let ours = Path::new("/proc/self/fd");
    let target = readlinkat(dir, name, Vec::new())?;
    let target = Path::new(OsStr::from_bytes(target.as_bytes()));
    let number = if target.parent() == Some(ours) {
        target.file_name()
    } else if path.canonicalize()? == ours.canonicalize()? {
        Some(name)
    } else {
        None
    };
    match number.map(OsStr::as_bytes) {
        Some(b"1") => io::stdout().as_fd().try_clone_to_owned().map(Some),
        Some(b"2") => io::stderr().as_fd().try_clone_to_owned().map(Some),
        _ => Ok(None),
    }
}

/// Opens a FIFO with `open`, which does not wait, once somebody has opened it for reading.
fn fifo(open: impl Fn() -> Result<OwnedFd, Errno>, limit: Duration) -> io::Result<OwnedFd> {
    let begun = Instant::now();
    loop {
        match open() {
            Ok(fifo) => {
                let flags = fcntl_getfl(&fifo)?;
                fcntl_setfl(&fifo, flags.difference(OFlags::NONBLOCK))?;
                return Ok(fifo);
            }
            Err(Errno::NXIO) if begun.elapsed() < limit => thread::sleep(READER_PAUSE),
            Err(Errno::NXIO) => {
                return Err(io::Error::new(
                    ErrorKind::TimedOut,
                    "it is a FIFO, and nobody reads from it",
                ));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, fstat, mkfifoat};

    use super::*;

    #[test]
    fn a_fifo_that_nobody_reads_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        let open = || openat(CWD, &path, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty());
        let error = fifo(open, Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("nobody reads"), "{error}");
        let _reader = openat(CWD, &path, OFlags::RDWR, Mode::empty()).unwrap();
        let opened = fifo(open, Duration::from_millis(50)).unwrap();
        assert!(!fcntl_getfl(&opened).unwrap().contains(OFlags::NONBLOCK));
    }

    #[test]
    fn our_own_streams_are_not_opened_anew() {
        let opened = |path: &str, name: &str| {
            let dir = File::open(path).unwrap();
            own_stream(dir.as_fd(), Path::new(path), name.as_ref()).unwrap()
        };
        for (path, name) in [("/dev", "stdout"), ("/dev/fd", "1"), ("/proc/self/fd", "1")] {
            let ours = fstat(io::stdout()).unwrap();
            let got = fstat(opened(path, name).unwrap()).unwrap();
            assert_eq!(
                (got.st_dev, got.st_ino),
                (ours.st_dev, ours.st_ino),
                "{path}"
            );
        }
        assert!(opened("/dev", "stderr").is_some());
        assert!(opened("/dev/fd", "0").is_none());
        assert!(opened("/dev", "stdin").is_none());
    }

    #[test]
    fn links_are_the_systems_own_only_where_no_copy_goes() {
        for path in ["/dev", "/dev/fd", "/dev/fd/.", "/proc/self/fd"] {
            assert!(is_systems(Path::new(path)), "{path}");
        }
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev", dir.path().join("dev")).unwrap();
        assert!(!is_systems(dir.path()));
        assert!(!is_systems(&dir.path().join("none")));
        assert!(!is_systems(Path::new("/dev/shm")));
        assert!(!is_systems(Path::new("/tmp")));
    }
}
