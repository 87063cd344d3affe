//! File transfers. Each runs in a child of the agent with plain blocking calls: a
//! slow disk, or a host that is slow to take the bytes, holds up no one else.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use bantam_protocol::{
    FileFailure, FileFailureKind, FileInfo, GuestExec, HostExec, Kind, MAX_DATA_LEN, ReadFile,
    WriteFile, clip_text, read_frame, write_frame,
};
use nix::libc;

/// Symbolic links followed on the way to a file to write, as many as the kernel follows.
const MAX_LINKS: usize = 40;

/// Names tried for the temporary file: only another write in progress can hold one.
const MAX_TEMPORARIES: u32 = 1000;

/// The bits of a mode that `chmod` sets.
pub(crate) const MODE_BITS: u32 = 0o7777;

/// Why a transfer ended early.
pub(crate) enum Stop {
    /// The host is told.
    Failed(FileFailure),
    /// The host is gone, or broke the protocol: there is no one to tell.
    Gone,
}

impl From<bantam_protocol::Error> for Stop {
    fn from(_: bantam_protocol::Error) -> Self {
        Self::Gone
    }
}

/// Sends a file to the host.
pub(crate) fn send_file(request: &ReadFile, stream: &mut (impl Read + Write)) {
    let result = try_send(request, stream);
    conclude(result, stream);
}

/// Replaces a file by what the host sends.
pub(crate) fn receive_file(request: &WriteFile, stream: &mut (impl Read + Write)) {
    let result = try_receive(request, stream);
    conclude(result, stream);
}

/// Tells the host how a transfer ended.
pub(crate) fn conclude(result: Result<GuestExec<'_>, Stop>, stream: &mut impl Write) {
    let last = match result {
        Ok(done) => done.encode(),
        Err(Stop::Failed(failure)) => GuestExec::FileFailed(failure).encode(),
        Err(Stop::Gone) => return,
    };
    if let Ok(frame) = last {
        // A host that hung up does not want to know.
        let _ = stream.write_all(&frame);
    }
}

fn try_send(request: &ReadFile, stream: &mut impl Write) -> Result<GuestExec<'static>, Stop> {
    let path = absolute(&request.path)?;
    let failed = |error: io::Error| failure(path, &error);
    // Non-blocking, so that a FIFO without a writer is refused and not waited for.
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    must_be_regular(path, &metadata)?;
    let info = FileInfo {
        size: metadata.len(),
        mode: metadata.mode() & MODE_BITS,
    };
    let frame = GuestExec::FileOpened(info).encode()?;
    stream.write_all(&frame).map_err(|_| Stop::Gone)?;
    let mut buffer = vec![0; MAX_DATA_LEN];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(GuestExec::FileDone),
            Ok(count) => {
                let bytes = buffer.get(..count).unwrap_or_default();
                write_frame(stream, Kind::Stdout, bytes)?;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

fn try_receive(request: &WriteFile, stream: &mut impl Read) -> Result<GuestExec<'static>, Stop> {
    let asked = absolute(&request.path)?;
    let failed = |error: io::Error| failure(asked, &error);
    let path = follow_links(asked)?;
    let (Some(parent), Some(_)) = (path.parent(), path.file_name()) else {
        return Err(failed(ErrorKind::IsADirectory.into()));
    };
    let replaced = match path.metadata() {
        Ok(metadata) => {
            must_be_regular(asked, &metadata)?;
            Some(metadata)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(failed(error)),
    };
    if request.create_parents && replaced.is_none() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(parent)
            .map_err(failed)?;
    }
    let (mut file, temporary) = Temporary::create(parent).map_err(failed)?;
    let mut buffer = Vec::new();
    loop {
        let frame = read_frame(stream, &mut buffer)?.ok_or(Stop::Gone)?;
        match HostExec::decode(&frame)? {
            HostExec::Stdin(bytes) => file.write_all(bytes).map_err(failed)?,
            HostExec::StdinEof => break,
            _ => return Err(Stop::Gone),
        }
    }
    if let Some(replaced) = &replaced {
        fchown(&file, Some(replaced.uid()), Some(replaced.gid())).map_err(failed)?;
    }
    // After the owner: a change of owner takes set-user-ID away.
    let kept = replaced.as_ref().map_or(0o644, MetadataExt::mode);
    let mode = request.mode.unwrap_or(kept) & MODE_BITS;
    file.set_permissions(Permissions::from_mode(mode))
        .map_err(failed)?;
    temporary.rename_to(&path).map_err(failed)?;
    Ok(GuestExec::FileDone)
}

/// A file beside the one to replace, removed unless it takes that one's place.
struct Temporary {
    path: Option<PathBuf>,
}

impl Temporary {
    fn create(parent: &Path) -> io::Result<(File, Self)> {
        let mut number = std::process::id();
        for _ in 0..MAX_TEMPORARIES {
            let path = parent.join(format!(".bantam-{number}"));
            let made = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path);
            match made {
                Ok(file) => return Ok((file, Self { path: Some(path) })),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    number = number.wrapping_add(1);
                }
                Err(error) => return Err(error),
            }
        }
        Err(ErrorKind::AlreadyExists.into())
    }

    fn rename_to(mut self, target: &Path) -> io::Result<()> {
        if let Some(path) = &self.path {
            std::fs::rename(path, target)?;
            self.path = None;
        }
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Follows the symbolic links at the end of `path`, to the file that an `open` for
/// writing would create or replace, which need not exist.
pub(crate) fn follow_links(path: &Path) -> Result<PathBuf, Stop> {
    let mut path = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        match std::fs::read_link(&path) {
            Ok(target) => {
                path.pop();
                path.push(target);
            }
            Err(_) => return Ok(path),
        }
    }
    Err(failure(&path, &io::Error::from_raw_os_error(libc::ELOOP)))
}

/// The path, if it is absolute.
pub(crate) fn absolute(path: &[u8]) -> Result<&Path, Stop> {
    let path = Path::new(OsStr::from_bytes(path));
    if path.is_absolute() {
        return Ok(path);
    }
    Err(Stop::Failed(FileFailure {
        kind: FileFailureKind::InvalidPath,
        message: clip_text(format!("{}: is not an absolute path", path.display())),
    }))
}

fn must_be_regular(path: &Path, metadata: &Metadata) -> Result<(), Stop> {
    if metadata.is_dir() {
        return Err(failure(path, &ErrorKind::IsADirectory.into()));
    }
    if metadata.is_file() {
        return Ok(());
    }
    Err(Stop::Failed(FileFailure {
        kind: FileFailureKind::Other,
        message: clip_text(format!("{}: is not a regular file", path.display())),
    }))
}

/// What the host is told of `error` at `path`.
pub(crate) fn failure(path: &Path, error: &io::Error) -> Stop {
    let kind = match error.kind() {
        ErrorKind::NotFound => FileFailureKind::NotFound,
        ErrorKind::IsADirectory => FileFailureKind::IsADirectory,
        ErrorKind::NotADirectory => FileFailureKind::NotADirectory,
        ErrorKind::PermissionDenied => FileFailureKind::PermissionDenied,
        ErrorKind::ReadOnlyFilesystem => FileFailureKind::ReadOnly,
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => FileFailureKind::NoSpace,
        ErrorKind::InvalidFilename | ErrorKind::InvalidInput => FileFailureKind::InvalidPath,
        _ if error.raw_os_error() == Some(libc::ELOOP) => FileFailureKind::InvalidPath,
        _ => FileFailureKind::Other,
    };
    Stop::Failed(FileFailure {
        kind,
        message: clip_text(format!("{}: {error}", path.display())),
    })
}
