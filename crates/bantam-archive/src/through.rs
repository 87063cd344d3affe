//! A file into what is there already.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, fchmod, fstat, futimens, openat, statat, unlinkat,
};
use rustix::io::Errno;

use crate::header::Kind;
use crate::reader::Reader;
use crate::unpack::{Attributes, create_beside, fill};
use crate::{Error, Summary};

/// What a file without set-user-ID, set-group-ID and sticky bits may have.
const PERMISSIONS: Mode = Mode::RWXU.union(Mode::RWXG).union(Mode::RWXO);

/// Writes the contents of the one file in `archive` to `sink`, and reads the archive to the end of
/// the stream. `shown` is what `sink` is called in messages.
///
/// # Errors
/// [`Error::File`] if the archive holds something else than a file, or as `sink` says;
/// [`Error::Archive`] if it is damaged or holds more than one thing, [`Error::Stream`] as `archive`
/// says. What was written until then stays.
pub fn unpack_into(
    archive: &mut dyn Read,
    sink: &mut dyn Write,
    shown: &Path,
) -> Result<Summary, Error> {
    let mut reader = Reader::new(archive);
    let mut summary = Summary::default();
    let mut buffer = vec![0; 64 << 10];
    while let Some(entry) = reader.next()? {
        if summary.entries + summary.skipped > 0 {
            return Err(Error::archive(
                "holds more than the one thing asked for",
                &entry.name,
            ));
        }
        match entry.kind {
            Kind::File => {}
            Kind::Device => {
                summary.skipped += 1;
                continue;
            }
            _ => {
                return Err(refused(
                    shown,
                    ErrorKind::AlreadyExists,
                    "it is there and neither a file nor a directory: only a file can be written \
                     into it",
                ));
            }
        }
        fill(&mut *sink, &mut reader, &mut buffer, &|error| Error::File {
            path: shown.to_path_buf(),
            source: error.into(),
        })?;
        summary.entries += 1;
        summary.bytes += entry.size;
    }
    sink.flush().map_err(|source| Error::File {
        path: shown.to_path_buf(),
        source,
    })?;
    Ok(summary)
}

fn refused(path: &Path, kind: ErrorKind, why: &'static str) -> Error {
    Error::File {
        path: path.to_path_buf(),
        source: io::Error::new(kind, why),
    }
}

/// Opens the file at `name`, as it is; `None` if nothing is there. `path` is for messages.
pub(crate) fn existing(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    path: &Path,
) -> Result<Option<File>, Error> {
    let failed = |error| Error::file(path)(error);
    let kind = match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => FileType::from_raw_mode(stat.st_mode),
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    match kind {
        FileType::RegularFile => {}
        FileType::Directory => return Err(failed(Errno::ISDIR)),
        FileType::Symlink => {
            return Err(refused(
                path,
                ErrorKind::AlreadyExists,
                "it is a symbolic link, and an earlier copy may have made it: name what it leads \
                 to, or remove it",
            ));
        }
        _ => return Err(failed(Errno::EXIST)),
    }
    // Should it have become something else by now, it is not waited for.
    let flags =
        OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = openat(parent, name, flags, Mode::empty()).map_err(failed)?;
    let stat = fstat(&fd).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(failed(Errno::EXIST));
    }
    Ok(Some(File::from(fd)))
}

/// What goes into a file that is there.
pub(crate) struct Content<'a, 'r> {
    pub(crate) reader: &'a mut Reader<'r>,
    pub(crate) buffer: &'a mut [u8],
    pub(crate) attributes: &'a Attributes,
}

impl Content<'_, '_> {
    /// Replaces what is in `there` when all of the new contents have come: until then they are
    /// in a file without a name in `parent`, so that an archive that ends in the middle leaves
    /// the old ones. Where no file can be made in `parent` they go straight in, as with `cp`.
    pub(crate) fn write(
        self,
        mut there: File,
        parent: BorrowedFd<'_>,
        failed: &impl Fn(Errno) -> Error,
    ) -> Result<File, Error> {
        let io_failed =
            |error: io::Error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO));
        let staged = create_beside(parent).and_then(|(fd, name)| {
            // Nothing is left of it, however this ends.
            unlinkat(parent, &name, AtFlags::empty())?;
            Ok(File::from(fd))
        });
        match staged {
            Ok(mut staged) => {
                fill(&mut staged, self.reader, self.buffer, failed)?;
                staged.rewind().map_err(io_failed)?;
                empty(&there, self.attributes).map_err(io_failed)?;
                io::copy(&mut staged, &mut there).map_err(io_failed)?;
            }
            Err(_) => {
                empty(&there, self.attributes).map_err(io_failed)?;
                fill(&mut there, self.reader, self.buffer, failed)?;
            }
        }
        finish(there.as_fd(), self.attributes).map_err(failed)?;
        Ok(there)
    }
}

/// Makes a file ready for contents of a stranger's: they must not run as the file's owner. (The
/// kernel sees to that only where the writer is not root.)
fn empty(there: &File, attributes: &Attributes) -> io::Result<()> {
    let mode = Mode::from_raw_mode(fstat(there)?.st_mode & 0o7777);
    if attributes.owner.is_none() && !PERMISSIONS.contains(mode) {
        fchmod(there, mode & PERMISSIONS)?;
    }
    there.set_len(0)
}

fn finish(there: BorrowedFd<'_>, attributes: &Attributes) -> Result<(), Errno> {
    if attributes.owner.is_some() {
        return attributes.set(there);
    }
    match futimens(there, &attributes.times()) {
        // Somebody else's file, which we may write but not date.
        Err(Errno::PERM | Errno::ACCESS) => Ok(()),
        result => result,
    }
}
