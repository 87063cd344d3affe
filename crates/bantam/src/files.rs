//! Files in a machine, and how it fares.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use bantam_protocol::{
    FileEntry, FileFailureKind, FileKind, FileRequest, GuestStats, HostExec, ReadFile, WriteFile,
};

use crate::machine::REQUEST_LIMIT;
use crate::transfer::{Answer, Guest, Transfer};
use crate::{Error, Machine, wire};

pub(crate) fn write(
    guest: &dyn Guest,
    path: &Path,
    mode: Option<u32>,
    content: &mut dyn Read,
) -> Result<(), Error> {
    let request = HostExec::WriteFile(WriteFile {
        path: path.as_os_str().as_bytes().to_vec(),
        mode,
        create_parents: false,
    });
    let what = format!("'{}' was written", path.display());
    let mut transfer = Transfer::open(guest, &request, what)?;
    // Without the end of the input the guest leaves the file as it was.
    wire::send_all(content, &transfer.sender)
        .map_err(Error::io("cannot read the bytes for a file in the guest"))?;
    transfer.end();
    let done = transfer.answer(None, |answer| matches!(answer, Answer::Done))?;
    if done {
        Ok(())
    } else {
        Err(transfer.unexpected())
    }
}

pub(crate) fn read(guest: &dyn Guest, path: &Path, sink: &mut dyn Write) -> Result<(), Error> {
    let request = HostExec::ReadFile(ReadFile {
        path: path.as_os_str().as_bytes().to_vec(),
    });
    let what = format!("'{}' was read", path.display());
    let mut transfer = Transfer::open(guest, &request, what)?;
    let opened = transfer.answer(None, |answer| matches!(answer, Answer::Opened))?;
    if !opened {
        return Err(transfer.unexpected());
    }
    while let Some(written) = transfer
        .answer(None, |answer| match answer {
            Answer::Data(bytes) => Ok(Some(sink.write_all(bytes))),
            Answer::Done => Ok(None),
            _ => Err(()),
        })?
        .map_err(|()| transfer.unexpected())?
    {
        written.map_err(Error::io("cannot pass on a file from the guest"))?;
    }
    Ok(())
}

pub(crate) fn stats(guest: &dyn Guest) -> Result<GuestStats, Error> {
    let what = "it was asked how it fares".to_owned();
    let mut transfer = Transfer::open(guest, &HostExec::GetStats, what)?;
    let deadline = Instant::now().checked_add(REQUEST_LIMIT);
    transfer
        .answer(deadline, |answer| match answer {
            Answer::Stats(stats) => Some(stats),
            _ => None,
        })?
        .ok_or_else(|| transfer.unexpected())
}

/// A file in the guest, as the guest describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileInfo {
    /// Its name in the directory that was listed; empty if it was asked for by its path. One
    /// component, never `.` or `..`.
    pub name: OsString,
    /// What it is.
    pub kind: FileKind,
    /// Permission bits (0 to 0o7777).
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its size in bytes.
    pub size: u64,
    /// When its contents changed, in seconds since 1970.
    pub modified: i64,
    /// Where a symbolic link leads: any text.
    pub target: Option<PathBuf>,
}

impl Machine {
    /// The most bytes of names that [`Machine::list_dir`] takes: a guest must not fill the host's
    /// memory.
    pub const LIST_LIMIT: u64 = 64 << 20;

    /// Describes a file; of a symbolic link what it leads to if `follow_link`, or the link.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason.
    pub fn stat(&self, path: impl AsRef<Path>, follow_link: bool) -> Result<FileInfo, Error> {
        let path = path.as_ref();
        let request = FileRequest::Stat {
            path: bytes(path),
            follow_link,
        };
        let mut entries = ask(&*self.0, request, path)?;
        match (entries.pop(), entries.pop()) {
            (Some(entry), None) => Ok(entry),
            _ => Err(Error::Protocol("not one description of a file".into())),
        }
    }

    /// Whether there is something at `path`; a symbolic link that leads nowhere is nothing.
    ///
    /// # Errors
    /// [`Error::File`] if that cannot be told.
    pub fn exists(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        match self.stat(path, true) {
            Ok(_) => Ok(true),
            Err(Error::File {
                kind: FileFailureKind::NotFound | FileFailureKind::NotADirectory,
                ..
            }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Describes what is in a directory, by name.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason, [`Error::TooLarge`] over
    /// [`Machine::LIST_LIMIT`].
    pub fn list_dir(&self, path: impl AsRef<Path>) -> Result<Vec<FileInfo>, Error> {
        let path = path.as_ref();
        let request = FileRequest::List { path: bytes(path) };
        let mut entries = ask(&*self.0, request, path)?;
        entries.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(entries)
    }

    /// Makes a directory, mode 0755. With `parents` also those on the way, and one that is there
    /// already is no error.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason.
    pub fn make_dir(&self, path: impl AsRef<Path>, parents: bool) -> Result<(), Error> {
        let path = path.as_ref();
        let request = FileRequest::MakeDir {
            path: bytes(path),
            mode: 0o755,
            parents,
        };
        ask(&*self.0, request, path).map(drop)
    }

    /// Removes a file, a symbolic link or an empty directory; with `recursive` also a directory
    /// that is not empty.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason.
    pub fn remove(&self, path: impl AsRef<Path>, recursive: bool) -> Result<(), Error> {
        let path = path.as_ref();
        let request = FileRequest::Remove {
            path: bytes(path),
            recursive,
        };
        ask(&*self.0, request, path).map(drop)
    }

    /// Renames within one filesystem of the guest, in the place of what has the new name.
    ///
    /// # Errors
    /// [`Error::File`] with the guest's reason.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<(), Error> {
        let (from, to) = (from.as_ref(), to.as_ref());
        let request = FileRequest::Rename {
            from: bytes(from),
            to: bytes(to),
        };
        ask(&*self.0, request, from).map(drop)
    }
}

fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

/// Sends a request and collects what it describes.
fn ask(guest: &dyn Guest, request: FileRequest, path: &Path) -> Result<Vec<FileInfo>, Error> {
    let what = format!("it was asked about '{}'", path.display());
    let mut transfer = Transfer::open(guest, &HostExec::File(request), what)?;
    let mut entries = Vec::new();
    let mut total = 0_u64;
    loop {
        let answer = transfer.answer(None, |answer| match answer {
            Answer::Entry(entry) => Ok(Some(entry)),
            Answer::Done => Ok(None),
            _ => Err(()),
        })?;
        let Some(entry) = answer.map_err(|()| transfer.unexpected())? else {
            return Ok(entries);
        };
        let target = entry.target.as_ref().map_or(0, Vec::len);
        let size = size_of::<FileInfo>() + entry.name.len() + target;
        total = total.saturating_add(size as u64);
        if total > Machine::LIST_LIMIT {
            return Err(Error::TooLarge {
                path: path.display().to_string(),
                limit: Machine::LIST_LIMIT,
            });
        }
        entries.push(checked(entry)?);
    }
}

/// Whoever joins the name to a path must stay in the directory.
fn checked(entry: FileEntry) -> Result<FileInfo, Error> {
    let bad = |byte: &u8| matches!(byte, b'/' | 0);
    if matches!(&entry.name[..], b"." | b"..") || entry.name.iter().any(bad) {
        return Err(Error::Protocol("a file's name is none".into()));
    }
    Ok(FileInfo {
        name: OsString::from_vec(entry.name),
        kind: entry.kind,
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        size: entry.size,
        modified: entry.modified,
        target: entry.target.map(|target| OsString::from_vec(target).into()),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;
    use std::thread;

    use bantam_protocol::{GuestExec, read_frame};

    use super::*;

    struct Fake(Mutex<Option<UnixStream>>);

    impl Guest for Fake {
        fn connect(&self) -> Result<UnixStream, Error> {
            Ok(self.0.lock().unwrap().take().unwrap())
        }

        fn died(&self, what: String) -> Error {
            Error::Protocol(what)
        }
    }

    /// What is made of a guest's answer, which is `entries` and the end.
    fn asked(entries: impl IntoIterator<Item = Vec<u8>> + Send + 'static) -> Result<usize, Error> {
        let (host, mut agent) = UnixStream::pair().unwrap();
        let player = thread::spawn(move || {
            let mut buffer = Vec::new();
            read_frame(&mut agent, &mut buffer).unwrap().unwrap();
            for name in entries {
                let entry = FileEntry {
                    name,
                    kind: FileKind::Symlink,
                    mode: 0,
                    uid: 0,
                    gid: 0,
                    size: 0,
                    modified: 0,
                    target: Some(vec![b't'; 10_000]),
                };
                let frame = GuestExec::FileEntry(entry).encode().unwrap();
                if agent.write_all(&frame).is_err() {
                    return;
                }
            }
            let _ = agent.write_all(&GuestExec::FileDone.encode().unwrap());
        });
        let request = FileRequest::List {
            path: b"/".to_vec(),
        };
        let guest = Fake(Mutex::new(Some(host)));
        let result = ask(&guest, request, Path::new("/"));
        player.join().unwrap();
        result.map(|entries| entries.len())
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_refused() {
        assert_eq!(asked([b"a".to_vec(), b"..b".to_vec()]).unwrap(), 2);
        for name in [&b".."[..], b".", b"/", b"a/b", b"../a", b"a\0"] {
            let result = asked([name.to_vec()]);
            assert!(matches!(result, Err(Error::Protocol(_))), "{name:?}");
        }
    }

    #[test]
    fn a_directory_without_end_is_too_large() {
        let result = asked(std::iter::repeat_n(b"a".to_vec(), 1_000_000));
        assert!(matches!(result, Err(Error::TooLarge { .. })));
    }
}
