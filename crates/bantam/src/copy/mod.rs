//! Copying files and directories between the host and a machine.
//!
//! Both ways they travel as a tar archive, made and taken apart by `bantam-archive`; the agent
//! does on its side what this does here. What comes out of a machine is hostile, and is taken
//! apart as such.

mod special;
#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::fs::{DirBuilder, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use bantam_archive::{
    Error as ArchiveError, Place, Source, Summary, Unpack, pack, unpack_into, unpack_over,
};
use bantam_protocol::{HostExec, MAX_DATA_LEN, ReadTree, TreePlace, TreeSummary, WriteTree};
use rustix::fs::{Mode, OFlags};

use crate::Error;
use crate::transfer::{Answer, Guest, Task, Transfer, Wait};
use crate::wire::{self, FrameSender};

/// How to copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyOptions {
    /// Keep numeric owners and the set-user-ID, set-group-ID and sticky bits. Without it files
    /// belong to root in the machine and to the caller on the host, without those bits, and on the
    /// host without those that the process's umask takes, so that a machine makes no file there
    /// that others may write. On the host it takes root to give files away; think twice before letting a machine make
    /// set-user-ID files there.
    pub owners: bool,
    /// If the source is a symbolic link, copy what it leads to, under the link's name. Links
    /// below the source are always copied as links.
    pub follow_link: bool,
}

/// What was copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Copied {
    /// Files, directories, links and FIFOs.
    pub entries: u64,
    /// Bytes of file contents.
    pub bytes: u64,
    /// Sockets and devices, which are not copied.
    pub skipped: u64,
}

impl From<TreeSummary> for Copied {
    fn from(summary: TreeSummary) -> Self {
        Self {
            entries: summary.entries,
            bytes: summary.bytes,
            skipped: summary.skipped,
        }
    }
}

/// Copies `from` on the host to `to` in the guest.
pub(crate) fn copy_in(
    guest: &dyn Guest,
    from: &Path,
    to: &Path,
    options: &CopyOptions,
) -> Result<Copied, Error> {
    let source = Source::open(from, options.follow_link)?;
    let place = match source.name() {
        None => TreePlace::Directory,
        Some(name) => TreePlace::One {
            name: name.as_bytes().to_vec(),
            directory: source.is_directory(),
        },
    };
    let mut transfer = open_write(guest, to, place, options.owners)?;
    let sent = {
        let stream = Sender(&transfer.sender);
        let mut out = BufWriter::with_capacity(MAX_DATA_LEN, stream);
        pack(source, &mut out).and_then(|summary| {
            out.flush().map_err(ArchiveError::Stream)?;
            Ok(summary)
        })
    };
    let skipped = match sent {
        Ok(summary) => {
            transfer.end();
            summary.skipped
        }
        // The guest reads no more: its answer says why.
        Err(ArchiveError::Stream(_)) => 0,
        // Without the end of the archive the guest knows that it is not whole.
        Err(error) => return Err(error.into()),
    };
    let mut copied = written(&mut transfer)?;
    copied.skipped = copied.skipped.saturating_add(skipped);
    Ok(copied)
}

/// Extracts a tar archive in the directory `to` in the guest, with the archive's owners.
pub(crate) fn copy_in_tar(
    guest: &dyn Guest,
    archive: &mut dyn Read,
    to: &Path,
) -> Result<Copied, Error> {
    let mut transfer = open_write(guest, to, TreePlace::Inside, true)?;
    wire::send_all(archive, &transfer.sender)
        .map_err(Error::io("cannot read the archive for the guest"))?;
    transfer.end();
    written(&mut transfer)
}

/// Copies `from` in the guest to `to` on the host.
pub(crate) fn copy_out(
    guest: &dyn Guest,
    from: &Path,
    to: &Path,
    options: &CopyOptions,
) -> Result<Copied, Error> {
    let transfer = open_read(guest, from, options.follow_link)?;
    let mut archive = Archive::new(transfer);
    // Nothing is touched here before the guest has something to give.
    archive.fill()?;
    let target = Target::find(to, own_name(from))?;
    let dir = target.open()?;
    let made = match target.special(dir.as_fd())? {
        Some((mut sink, path)) => unpack_into(&mut archive, &mut sink, &path),
        None => target.unpack(&mut archive, dir, options),
    };
    let made = match made {
        Ok(made) => made,
        Err(error) => return Err(archive.error.take().unwrap_or_else(|| error.into())),
    };
    let sent = archive.summary.unwrap_or_default();
    Ok(Copied {
        entries: made.entries,
        bytes: made.bytes,
        skipped: made.skipped.saturating_add(sent.skipped),
    })
}

/// Writes `from` in the guest to `sink` as a tar archive, as the guest made it.
pub(crate) fn copy_out_tar(
    guest: &dyn Guest,
    from: &Path,
    sink: &mut dyn Write,
    follow_link: bool,
) -> Result<Copied, Error> {
    let mut transfer = open_read(guest, from, follow_link)?;
    loop {
        let step = transfer.answer(Wait::Stream, |answer| match answer {
            Answer::Data(bytes) => Ok(sink.write_all(bytes).map(|()| None)),
            Answer::TreeDone(summary) => Ok(Ok(Some(summary))),
            _ => Err(()),
        })?;
        let passed_on = step.map_err(|()| transfer.unexpected())?;
        if let Some(summary) = passed_on.map_err(Error::io("cannot pass on the archive"))? {
            return Ok(summary.into());
        }
    }
}

fn open_write<'a>(
    guest: &'a dyn Guest,
    to: &Path,
    place: TreePlace,
    owners: bool,
) -> Result<Transfer<'a>, Error> {
    let path = absolute(to);
    let task = Task::of("copy to", "copied to", &path);
    let request = HostExec::WriteTree(WriteTree {
        path: path.into_os_string().into_vec(),
        place,
        owners,
    });
    Transfer::open(guest, &request, task)
}

fn open_read<'a>(
    guest: &'a dyn Guest,
    from: &Path,
    follow_link: bool,
) -> Result<Transfer<'a>, Error> {
    let path = absolute(from);
    let task = Task::of("copy", "copied", &path);
    let request = HostExec::ReadTree(ReadTree {
        path: path.into_os_string().into_vec(),
        follow_link,
    });
    Transfer::open(guest, &request, task)
}

/// Paths in a machine are relative to its root. The slash or `.` at the end is kept.
fn absolute(path: &Path) -> PathBuf {
    Path::new("/").join(path)
}

fn written(transfer: &mut Transfer<'_>) -> Result<Copied, Error> {
    let summary = transfer.answer(Wait::Stream, |answer| match answer {
        Answer::TreeDone(summary) => Some(summary),
        _ => None,
    })?;
    summary
        .map(Copied::from)
        .ok_or_else(|| transfer.unexpected())
}

/// The name of what a path in the guest names; `None` if that is what is in a directory.
fn own_name(path: &Path) -> Option<Vec<u8>> {
    let bytes = path.as_os_str().as_bytes();
    let end = bytes.iter().rposition(|byte| *byte != b'/')? + 1;
    let last = bytes.get(..end)?.rsplit(|byte| *byte == b'/').next()?;
    (!matches!(last, b"" | b"." | b"..")).then(|| last.to_vec())
}

/// Where on the host something goes.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    /// The directory that is worked in.
    dir: PathBuf,
    /// It is to be made.
    make: bool,
    /// A symbolic link at the end of `dir` is followed.
    follow: bool,
    /// The name of the one thing in it; without it, everything goes into the directory.
    name: Option<Vec<u8>>,
    must_be_directory: bool,
}

impl Target {
    /// What `to` means for a thing of that name, or for what is in a directory.
    ///
    /// A symbolic link at the end of `to` may be one that an earlier copy out of the same machine
    /// made: it is replaced by a link, refused to a file, and followed only if a slash comes after it, which says
    /// that the user knows that it is more than a name. (`lstat` and `open` see it that way by
    /// themselves.) The directories before it are the user's own, links or not.
    fn find(to: &Path, name: Option<Vec<u8>>) -> Result<Self, Error> {
        let failed = |source: io::Error| {
            Error::Archive(ArchiveError::File {
                path: to.to_path_buf(),
                source,
            })
        };
        let there = match to.symlink_metadata() {
            Ok(metadata) => Some(metadata.file_type()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        match (there, name) {
            (Some(there), name) if there.is_dir() => Ok(Self {
                dir: to.to_path_buf(),
                make: false,
                follow: false,
                name,
                must_be_directory: false,
            }),
            (Some(there), name) if there.is_symlink() && (name.is_none() || to.is_dir()) => {
                Err(failed(io::Error::new(
                    io::ErrorKind::NotADirectory,
                    "it is a symbolic link, and an earlier copy may have made it: to copy into \
                     the directory that it leads to, put a '/' after it",
                )))
            }
            (Some(_), None) => Err(failed(io::ErrorKind::NotADirectory.into())),
            (None, None) => Ok(Self {
                dir: to.to_path_buf(),
                make: true,
                follow: false,
                name: None,
                must_be_directory: false,
            }),
            (_, Some(_)) => {
                let bytes = to.as_os_str().as_bytes();
                let slash = bytes.ends_with(b"/") || bytes.ends_with(b"/.");
                let (Some(parent), Some(name)) = (to.parent(), to.file_name()) else {
                    return Err(failed(io::ErrorKind::NotFound.into()));
                };
                let dir = if parent.as_os_str().is_empty() {
                    Path::new(".")
                } else {
                    parent
                };
                Ok(Self {
                    dir: dir.to_path_buf(),
                    make: false,
                    follow: true,
                    name: Some(name.as_bytes().to_vec()),
                    must_be_directory: slash,
                })
            }
        }
    }

    /// What the one thing is to be written into if that is neither made nor a file, and its path.
    fn special(&self, dir: BorrowedFd<'_>) -> Result<Option<(File, PathBuf)>, Error> {
        let Some(name) = self.name.as_deref().map(OsStr::from_bytes) else {
            return Ok(None);
        };
        let path = self.dir.join(name);
        match special::open(dir, &self.dir, name) {
            Ok(sink) => Ok(sink.map(|sink| (sink, path))),
            Err(source) => Err(Error::Archive(ArchiveError::File { path, source })),
        }
    }

    fn unpack(
        &self,
        archive: &mut dyn Read,
        dir: OwnedFd,
        options: &CopyOptions,
    ) -> Result<Summary, ArchiveError> {
        let unpacking = Unpack {
            place: self
                .name
                .as_deref()
                .map_or(Place::Below, |name| Place::As(OsStr::from_bytes(name))),
            must_be_directory: self.must_be_directory,
            owners: options.owners,
            umask: true,
            shown: &self.dir,
        };
        unpack_over(archive, dir, &unpacking)
    }

    fn open(&self) -> Result<OwnedFd, Error> {
        let open = || {
            if self.make {
                DirBuilder::new().create(&self.dir)?;
            }
            let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            if !self.follow {
                flags |= OFlags::NOFOLLOW;
            }
            rustix::fs::open(&self.dir, flags, Mode::empty()).map_err(io::Error::from)
        };
        open().map_err(|source| {
            Error::Archive(ArchiveError::File {
                path: self.dir.clone(),
                source,
            })
        })
    }
}

/// Writes an archive to the guest.
struct Sender<'a>(&'a FrameSender);

impl Write for Sender<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send_data(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads an archive from the guest.
struct Archive<'a> {
    transfer: Transfer<'a>,
    buffer: Vec<u8>,
    /// Bytes of `buffer` that were read.
    taken: usize,
    /// What the guest said at the end.
    summary: Option<TreeSummary>,
    /// Why the stream failed.
    error: Option<Error>,
}

impl<'a> Archive<'a> {
    fn new(transfer: Transfer<'a>) -> Self {
        Self {
            transfer,
            buffer: Vec::new(),
            taken: 0,
            summary: None,
            error: None,
        }
    }

    /// Waits for bytes, or for the end.
    fn fill(&mut self) -> Result<(), Error> {
        while self.taken == self.buffer.len() && self.summary.is_none() {
            self.buffer.clear();
            self.taken = 0;
            let (buffer, summary) = (&mut self.buffer, &mut self.summary);
            let taken = self.transfer.answer(Wait::Stream, |answer| match answer {
                Answer::Data(bytes) => {
                    buffer.extend_from_slice(bytes);
                    true
                }
                Answer::TreeDone(done) => {
                    *summary = Some(done);
                    true
                }
                _ => false,
            })?;
            if !taken {
                return Err(self.transfer.unexpected());
            }
        }
        Ok(())
    }
}

impl Read for Archive<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if let Err(error) = self.fill() {
            self.error = Some(error);
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let count = self.buffer[self.taken..].as_ref().read(into)?;
        self.taken += count;
        Ok(count)
    }
}
