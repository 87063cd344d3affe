//! Files in a machine, and how it fares.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use bantam_protocol::{
    FileEntry, FileFailureKind, FileKind, FileRequest, GuestStats, HostExec, ReadFile, WriteFile,
};

use crate::transfer::{Answer, Guest, Task, Transfer, Wait};
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
    let mut transfer = Transfer::open(guest, &request, Task::of("write", "written", path))?;
    // Without the end of the input the guest leaves the file as it was.
    wire::send_all(content, &transfer.sender)
        .map_err(Error::io("cannot read the bytes for a file in the guest"))?;
    transfer.end();
    let done = transfer.answer(Wait::Stream, |answer| matches!(answer, Answer::Done))?;
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
    let mut transfer = Transfer::open(guest, &request, Task::of("read", "read", path))?;
    let opened = transfer.answer(Wait::Answer, |answer| matches!(answer, Answer::Opened))?;
    if !opened {
        return Err(transfer.unexpected());
    }
    while let Some(written) = transfer
        .answer(Wait::Stream, |answer| match answer {
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

/// Reads a file of at most `limit` bytes, and no more of a larger one.
pub(crate) fn read_whole(guest: &dyn Guest, path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    let mut whole = Whole {
        bytes: Vec::new(),
        limit,
        full: false,
    };
    match read(guest, path, &mut whole) {
        Err(_) if whole.full => Err(Error::TooLarge {
            path: path.display().to_string(),
            limit,
        }),
        result => result.map(|()| whole.bytes),
    }
}

/// Keeps what is written to it, and fails at the first byte too many.
struct Whole {
    bytes: Vec<u8>,
    limit: u64,
    full: bool,
}

impl Write for Whole {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let all = self.bytes.len().saturating_add(bytes.len());
        self.full = u64::try_from(all).map_or(true, |all| all > self.limit);
        if self.full {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) fn stats(guest: &dyn Guest) -> Result<GuestStats, Error> {
    let mut transfer = Transfer::open(guest, &HostExec::GetStats, Task::stats())?;
    transfer
        .answer(Wait::Answer, |answer| match answer {
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
    let (verb, participle, wait) = match &request {
        FileRequest::Stat { .. } => ("examine", "examined", Wait::Answer),
        FileRequest::List { .. } => ("list", "listed", Wait::Answer),
        FileRequest::MakeDir { .. } => ("make", "made", Wait::Answer),
        FileRequest::Rename { .. } => ("rename", "renamed", Wait::Answer),
        // A large tree takes its time, and its removal is silent.
        FileRequest::Remove {
            recursive: true, ..
        } => ("remove", "removed", Wait::Work),
        FileRequest::Remove { .. } => ("remove", "removed", Wait::Answer),
    };
    let task = Task::of(verb, participle, path);
    let mut transfer = Transfer::open(guest, &HostExec::File(request), task)?;
    let mut entries = Vec::new();
    let mut total = 0_u64;
    loop {
        let answer = transfer.answer(wait, |answer| match answer {
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
    use std::time::Duration;

    use bantam_protocol::{
        FileFailure, FileInfo as Opened, GuestExec, Kind, read_frame, write_frame,
    };

    use super::*;
    use crate::copy;
    use crate::transfer::Limits;

    /// The host's end of a stream, and how long is waited for the other.
    struct Fake(Mutex<Option<UnixStream>>, Limits);

    /// Longer than a busy host holds up a thread.
    const PATIENT: Limits = Limits {
        answer: Duration::from_secs(60),
        stall: Duration::from_secs(60),
    };

    impl Guest for Fake {
        fn connect(&self) -> Result<UnixStream, Error> {
            Ok(self.0.lock().unwrap().take().unwrap())
        }

        fn died(&self, what: String) -> Error {
            Error::Protocol(what)
        }

        fn limits(&self) -> Limits {
            self.1
        }
    }

    /// A guest, and its end of the stream. It says nothing.
    fn silent() -> (Fake, UnixStream) {
        let soon = Limits {
            answer: Duration::from_millis(20),
            stall: Duration::from_millis(40),
        };
        guest(soon)
    }

    fn guest(limits: Limits) -> (Fake, UnixStream) {
        let (host, agent) = UnixStream::pair().unwrap();
        (Fake(Mutex::new(Some(host)), limits), agent)
    }

    /// What is made of a guest's answer, which is `entries` and the end.
    fn asked(entries: impl IntoIterator<Item = Vec<u8>> + Send + 'static) -> Result<usize, Error> {
        let (guest, mut agent) = guest(PATIENT);
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

    #[test]
    fn a_guest_that_hangs_hangs_no_call() {
        let path = Path::new("/a");
        let bytes = || b"/a".to_vec();
        let requests = [
            FileRequest::Stat {
                path: bytes(),
                follow_link: true,
            },
            FileRequest::List { path: bytes() },
            FileRequest::MakeDir {
                path: bytes(),
                mode: 0,
                parents: true,
            },
            FileRequest::Rename {
                from: bytes(),
                to: bytes(),
            },
            FileRequest::Remove {
                path: bytes(),
                recursive: false,
            },
        ];
        let silence = |result: Result<(), Error>| {
            let error = result.unwrap_err();
            assert!(error.to_string().contains("did not answer"), "{error}");
        };
        for request in requests {
            let (guest, _agent) = silent();
            silence(ask(&guest, request, path).map(drop));
        }
        let (guest, _agent) = silent();
        silence(read(&guest, path, &mut Vec::new()));
        let (guest, _agent) = silent();
        silence(write(&guest, path, None, &mut &b"x"[..]));
        // It takes not even the bytes.
        let (guest, _agent) = silent();
        silence(write(&guest, path, None, &mut io::repeat(0).take(64 << 20)));
        let (guest, _agent) = silent();
        silence(stats(&guest).map(drop));
        let dir = tempfile::tempdir().unwrap();
        let (options, to) = (copy::CopyOptions::default(), dir.path().join("to"));
        let (guest, _agent) = silent();
        silence(copy::copy_out(&guest, path, &to, &options).map(drop));
        let (guest, _agent) = silent();
        silence(copy::copy_in(&guest, dir.path(), path, &options).map(drop));
        let (guest, _agent) = silent();
        let mut archive = io::repeat(0).take(64 << 20);
        silence(copy::copy_in_tar(&guest, &mut archive, path).map(drop));
    }

    #[test]
    fn a_guest_that_stops_in_the_middle_of_a_file_hangs_no_call() {
        let (guest, mut agent) = silent();
        let opened = GuestExec::FileOpened(Opened { size: 9, mode: 0 });
        agent.write_all(&opened.encode().unwrap()).unwrap();
        write_frame(&mut agent, Kind::Stdout, b"half").unwrap();
        let mut got = Vec::new();
        let error = read(&guest, Path::new("/a"), &mut got).unwrap_err();
        assert!(error.to_string().contains("did not answer"), "{error}");
        assert_eq!(got, b"half");
    }

    #[test]
    fn the_removal_of_a_tree_may_take_its_time() {
        let (guest, mut agent) = silent();
        let player = thread::spawn(move || {
            read_frame(&mut agent, &mut Vec::new()).unwrap().unwrap();
            // Beyond every limit.
            thread::sleep(Duration::from_millis(100));
            agent
                .write_all(&GuestExec::FileDone.encode().unwrap())
                .unwrap();
        });
        let request = FileRequest::Remove {
            path: b"/a".to_vec(),
            recursive: true,
        };
        ask(&guest, request, Path::new("/a")).unwrap();
        player.join().unwrap();
    }

    #[test]
    fn a_file_without_end_is_hung_up_on_at_the_limit() {
        let (guest, mut agent) = guest(PATIENT);
        let player = thread::spawn(move || {
            let opened = GuestExec::FileOpened(Opened {
                size: u64::MAX,
                mode: 0,
            });
            agent.write_all(&opened.encode().unwrap()).unwrap();
            let mut sent = 0_usize;
            while write_frame(&mut agent, Kind::Stdout, &[0; 60_000]).is_ok() {
                sent += 60_000;
            }
            sent
        });
        let error = read_whole(&guest, Path::new("/a"), 1_000_000).unwrap_err();
        assert!(matches!(
            error,
            Error::TooLarge {
                limit: 1_000_000,
                ..
            }
        ));
        // What is beyond the limit was on its way.
        assert!(player.join().unwrap() < 4_000_000);
    }

    /// What is asked of a guest, with a directory of the host's for what comes or goes.
    type Call = fn(&Fake, &Path) -> Result<(), Error>;

    const CALLS: [(&str, Call); 12] = [
        ("stat", |guest, _| {
            one(guest, |path| FileRequest::Stat {
                path,
                follow_link: true,
            })
        }),
        ("list", |guest, _| {
            one(guest, |path| FileRequest::List { path })
        }),
        ("make", |guest, _| {
            one(guest, |path| FileRequest::MakeDir {
                path,
                mode: 0,
                parents: true,
            })
        }),
        ("rename", |guest, _| {
            one(guest, |path| FileRequest::Rename {
                from: path.clone(),
                to: path,
            })
        }),
        ("remove", |guest, _| {
            one(guest, |path| FileRequest::Remove {
                path,
                recursive: true,
            })
        }),
        ("stats", |guest, _| stats(guest).map(drop)),
        ("read", |guest, _| {
            // Whoever takes the bytes of a file without end bounds them.
            read(guest, Path::new("/a"), &mut &mut [0; 100_000][..])
        }),
        ("write", |guest, _| {
            write(guest, Path::new("/a"), None, &mut &b"x"[..])
        }),
        ("copy_out", |guest, dir| {
            copy::copy_out(guest, Path::new("/a"), &dir.join("to"), &Default::default()).map(drop)
        }),
        ("copy_out_tar", |guest, _| {
            let sink = &mut &mut [0; 100_000][..];
            copy::copy_out_tar(guest, Path::new("/a"), sink, true).map(drop)
        }),
        ("copy_in", |guest, dir| {
            copy::copy_in(guest, dir, Path::new("/a"), &Default::default()).map(drop)
        }),
        ("copy_in_tar", |guest, _| {
            copy::copy_in_tar(guest, &mut &b"x"[..], Path::new("/a")).map(drop)
        }),
    ];

    fn one(guest: &Fake, request: fn(Vec<u8>) -> FileRequest) -> Result<(), Error> {
        ask(guest, request(b"/a".to_vec()), Path::new("/a")).map(drop)
    }

    /// Every frame that is not a guest's last word, at its smallest.
    fn frames() -> [GuestExec<'static>; 10] {
        [
            GuestExec::Started { pid: 1 },
            GuestExec::Stdout(b""),
            GuestExec::Stdout(b"\0"),
            GuestExec::Stdout(b"x"),
            GuestExec::Stderr(b""),
            GuestExec::Stderr(b"x"),
            GuestExec::StdinCredit(0),
            GuestExec::StdinClosed,
            GuestExec::FileOpened(Opened { size: 0, mode: 0 }),
            GuestExec::FileEntry(FileEntry {
                name: Vec::new(),
                kind: FileKind::File,
                mode: 0,
                uid: 0,
                gid: 0,
                size: 0,
                modified: 0,
                target: None,
            }),
        ]
    }

    #[test]
    fn a_guest_that_says_the_same_for_ever_keeps_no_call() {
        let dir = tempfile::tempdir().unwrap();
        for (name, call) in CALLS {
            for frame in frames() {
                let (guest, mut agent) = guest(PATIENT);
                let mut begin = Vec::new();
                if name == "read" {
                    let opened = GuestExec::FileOpened(Opened { size: 9, mode: 0 });
                    begin = opened.encode().unwrap();
                }
                let again = frame.encode().unwrap().repeat(1000);
                let player = thread::spawn(move || {
                    let mut said = agent.write_all(&begin);
                    while said.is_ok() {
                        said = agent.write_all(&again);
                    }
                });
                let (ends, ended) = std::sync::mpsc::channel();
                let at = dir.path().to_path_buf();
                thread::spawn(move || ends.send(call(&guest, &at)));
                let result = ended
                    .recv_timeout(Duration::from_secs(60))
                    .unwrap_or_else(|_| panic!("{name} does not end: {frame:?} again and again"));
                assert!(result.is_err(), "{name}: {frame:?} again and again");
                player.join().unwrap();
            }
        }
    }

    #[test]
    fn a_file_of_just_the_limit_is_read() {
        let (guest, mut agent) = guest(PATIENT);
        let opened = GuestExec::FileOpened(Opened { size: 3, mode: 0 });
        agent.write_all(&opened.encode().unwrap()).unwrap();
        write_frame(&mut agent, Kind::Stdout, b"abc").unwrap();
        agent
            .write_all(&GuestExec::FileDone.encode().unwrap())
            .unwrap();
        assert_eq!(read_whole(&guest, Path::new("/a"), 3).unwrap(), b"abc");
    }

    #[test]
    fn a_failure_says_what_failed_and_cannot_talk_to_a_terminal() {
        for (told, expected) in [
            ("/a: No such file", "cannot read '/a': No such file"),
            (
                "/b: \x1b[31m\nred",
                "cannot read '/a': /b: \\u{1b}[31m\\nred",
            ),
        ] {
            let (guest, mut agent) = silent();
            let failure = GuestExec::FileFailed(FileFailure {
                kind: FileFailureKind::NotFound,
                message: told.to_owned(),
            });
            agent.write_all(&failure.encode().unwrap()).unwrap();
            let error = read(&guest, Path::new("/a"), &mut Vec::new()).unwrap_err();
            assert_eq!(error.to_string(), expected);
        }
    }
}
