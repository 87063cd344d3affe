//! Questions about files, and changes to them that move no contents. As in
//! [`files`](crate::files), each is answered in a child of the agent: a directory may be large.

use std::ffi::OsStr;
use std::fs::{DirBuilder, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use bantam_protocol::{FileEntry, FileKind, FileRequest, GuestExec};

use crate::files::{MODE_BITS, Stop, absolute, conclude, failure};

/// Does what is asked.
pub(crate) fn answer(request: &FileRequest, stream: &mut (impl Read + Write)) {
    let result = try_answer(request, stream).map(|()| GuestExec::FileDone);
    conclude(result, stream);
}

fn try_answer(request: &FileRequest, stream: &mut impl Write) -> Result<(), Stop> {
    match request {
        FileRequest::Stat { path, follow_link } => {
            let path = absolute(path)?;
            let metadata = if *follow_link {
                path.metadata()
            } else {
                path.symlink_metadata()
            };
            let metadata = metadata.map_err(|error| failure(path, &error))?;
            say(entry(OsStr::new(""), path, &metadata), stream)
        }
        FileRequest::List { path } => {
            let path = absolute(path)?;
            let failed = |error: io::Error| failure(path, &error);
            for found in path.read_dir().map_err(failed)? {
                let found = found.map_err(failed)?;
                // What vanishes meanwhile is left out.
                if let Ok(metadata) = found.path().symlink_metadata() {
                    let entry = entry(&found.file_name(), &found.path(), &metadata);
                    say(entry, stream)?;
                }
            }
            Ok(())
        }
        FileRequest::MakeDir {
            path,
            mode,
            parents,
        } => {
            let path = absolute(path)?;
            DirBuilder::new()
                .recursive(*parents)
                .mode(mode & MODE_BITS)
                .create(path)
                .map_err(|error| failure(path, &error))
        }
        FileRequest::Remove { path, recursive } => {
            let path = absolute(path)?;
            remove(path, *recursive).map_err(|error| failure(path, &error))
        }
        FileRequest::Rename { from, to } => {
            let (from, to) = (absolute(from)?, absolute(to)?);
            std::fs::rename(from, to).map_err(|error| {
                // The one that is wrong: the new path's directory, or the old path.
                let culprit = if from.symlink_metadata().is_ok() {
                    to
                } else {
                    from
                };
                failure(culprit, &error)
            })
        }
    }
}

fn remove(path: &Path, recursive: bool) -> io::Result<()> {
    if !path.symlink_metadata()?.is_dir() {
        std::fs::remove_file(path)
    } else if recursive {
        std::fs::remove_dir_all(path)
    } else {
        std::fs::remove_dir(path)
    }
}

fn say(entry: FileEntry, stream: &mut impl Write) -> Result<(), Stop> {
    let frame = GuestExec::FileEntry(entry).encode()?;
    stream.write_all(&frame).map_err(|_| Stop::Gone)
}

fn entry(name: &OsStr, path: &Path, metadata: &Metadata) -> FileEntry {
    let kind = metadata.file_type();
    FileEntry {
        name: name.as_bytes().to_vec(),
        kind: if kind.is_file() {
            FileKind::File
        } else if kind.is_dir() {
            FileKind::Directory
        } else if kind.is_symlink() {
            FileKind::Symlink
        } else {
            FileKind::Other
        },
        mode: metadata.mode() & MODE_BITS,
        uid: metadata.uid(),
        gid: metadata.gid(),
        size: metadata.len(),
        modified: metadata.mtime(),
        target: kind
            .is_symlink()
            .then(|| path.read_link().ok())
            .flatten()
            .map(|target| target.as_os_str().as_bytes().to_vec()),
    }
}
