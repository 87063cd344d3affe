//! Files and directories as tar archives. As in [`files`](crate::files), each transfer runs
//! in a child of the agent.

use std::ffi::OsStr;
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use bantam_archive::{Error, Place, Source, Summary, Unpack, pack, unpack};
use bantam_protocol::{
    FileFailure, FileFailureKind, GuestExec, HostExec, Kind, MAX_DATA_LEN, ReadTree, TreePlace,
    TreeSummary, WriteTree, clip_text, read_frame, write_frame,
};
use nix::libc;

use crate::files::{Stop, absolute, conclude, failure, follow_links};

/// Sends a file or directory to the host.
pub(crate) fn send_tree(request: &ReadTree, stream: &mut (impl Read + Write)) {
    let result = try_send(request, stream);
    conclude(result, stream);
}

/// Makes files of what the host sends.
pub(crate) fn receive_tree(request: &WriteTree, stream: &mut (impl Read + Write)) {
    let result = try_receive(request, stream);
    conclude(result, stream);
}

fn try_send(request: &ReadTree, stream: &mut impl Write) -> Result<GuestExec<'static>, Stop> {
    let path = absolute(&request.path)?;
    let source = Source::open(path, request.follow_link).map_err(stop)?;
    let mut frames = FrameWriter {
        stream,
        buffer: Vec::with_capacity(MAX_DATA_LEN),
    };
    let summary = pack(source, &mut frames).map_err(stop)?;
    frames.flush().map_err(|_| Stop::Gone)?;
    Ok(done(summary))
}

fn try_receive(request: &WriteTree, stream: &mut impl Read) -> Result<GuestExec<'static>, Stop> {
    let path = absolute(&request.path)?;
    let mut frames = FrameReader {
        stream,
        buffer: Vec::new(),
        taken: 0,
        ended: false,
    };
    let mut extract = |dir: &Path, place, must_be_directory| {
        let options = Unpack {
            place,
            must_be_directory,
            owners: request.owners,
            // The host's own files, as they are there.
            umask: false,
            shown: dir,
        };
        let fd = open_directory(dir).map_err(|error| failure(dir, &error))?;
        unpack(&mut frames, fd, &options).map(done).map_err(stop)
    };
    match &request.place {
        TreePlace::Inside => extract(path, Place::Below, false),
        TreePlace::Directory => {
            match DirBuilder::new().mode(0o755).create(path) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failure(path, &error)),
            }
            extract(path, Place::Below, false)
        }
        TreePlace::One { name, directory } => {
            let name = OsStr::from_bytes(name);
            if matches!(name.as_bytes(), b"" | b"." | b"..") || name.as_bytes().contains(&b'/') {
                return Err(Stop::Gone);
            }
            let slash = path.as_os_str().as_bytes().ends_with(b"/");
            match path.metadata() {
                Ok(metadata) if metadata.is_dir() => extract(path, Place::As(name), *directory),
                Ok(_) if *directory => Err(failure(path, &ErrorKind::NotADirectory.into())),
                Err(error) if error.kind() != ErrorKind::NotFound => Err(failure(path, &error)),
                Err(error) if slash && !directory => Err(failure(path, &error)),
                Ok(_) | Err(_) => {
                    let path = follow_links(path)?;
                    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                        return Err(failure(&path, &ErrorKind::NotFound.into()));
                    };
                    extract(parent, Place::As(name), *directory)
                }
            }
        }
    }
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY)
        .open(path)
        .map(OwnedFd::from)
}

fn done(summary: Summary) -> GuestExec<'static> {
    GuestExec::TreeDone(TreeSummary {
        entries: summary.entries,
        bytes: summary.bytes,
        skipped: summary.skipped,
    })
}

fn stop(error: Error) -> Stop {
    match error {
        Error::File { path, source } => failure(&path, &source),
        Error::Stream(_) => Stop::Gone,
        other => Stop::Failed(FileFailure {
            kind: FileFailureKind::Other,
            message: clip_text(other.to_string()),
        }),
    }
}

/// Sends what is written to it in frames that are as full as may be.
struct FrameWriter<'a, W> {
    stream: &'a mut W,
    buffer: Vec<u8>,
}

impl<W: Write> Write for FrameWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.buffer.len() == MAX_DATA_LEN {
            self.flush()?;
        }
        let room = MAX_DATA_LEN - self.buffer.len();
        let taken = bytes.get(..room).unwrap_or(bytes);
        self.buffer.extend_from_slice(taken);
        Ok(taken.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.buffer.is_empty() {
            write_frame(self.stream, Kind::Stdout, &self.buffer).map_err(io::Error::other)?;
            self.buffer.clear();
        }
        Ok(())
    }
}

/// Reads what the host sends, up to its explicit end. A stream that ends without one is an
/// error, so that half an archive is never taken for a whole one.
struct FrameReader<'a, R> {
    stream: &'a mut R,
    buffer: Vec<u8>,
    /// Bytes of `buffer` that were read.
    taken: usize,
    ended: bool,
}

impl<R: Read> Read for FrameReader<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.taken == self.buffer.len() && !self.ended {
            self.taken = 0;
            let frame = read_frame(self.stream, &mut self.buffer)
                .map_err(io::Error::other)?
                .ok_or(ErrorKind::UnexpectedEof)?;
            match HostExec::decode(&frame).map_err(io::Error::other)? {
                HostExec::Stdin(_) => {}
                HostExec::StdinEof => self.ended = true,
                _ => return Err(ErrorKind::InvalidData.into()),
            }
        }
        let rest = self.buffer.get(self.taken..).unwrap_or_default();
        let count = rest.len().min(into.len());
        let (Some(from), Some(to)) = (rest.get(..count), into.get_mut(..count)) else {
            return Ok(0);
        };
        to.copy_from_slice(from);
        self.taken += count;
        Ok(count)
    }
}
