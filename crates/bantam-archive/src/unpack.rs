//! From an archive to a tree.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT, Uid, chownat,
    fchmod, fchown, fstat, futimens, linkat, mkdirat, openat, renameat, statat, symlinkat,
    unlinkat, utimensat,
};
use rustix::io::Errno;

use crate::dirs::Dirs;
use crate::header::{Entry, Kind};
use crate::names::{check_text, components};
use crate::reader::Reader;
use crate::{Error, Summary, sys, through};

/// Things that are known to be of the archive; those after so many are not: no
/// hard link may lead to them, and a directory that the archive comes back to is as any other.
const MAX_REMEMBERED: usize = 1 << 20;

/// Names tried for a file that takes another's place.
const MAX_TEMPORARIES: u32 = 1000;

/// Mode of a directory that the archive only implies.
const IMPLIED: u32 = 0o755;

/// Where the names of an archive lead.
#[derive(Debug, Clone, Copy)]
pub enum Place<'a> {
    /// Below the directory.
    Below,
    /// The first component of every name is replaced by this one; nothing else in the
    /// directory is touched.
    As(&'a OsStr),
}

/// How to unpack.
#[derive(Debug, Clone, Copy)]
pub struct Unpack<'a> {
    /// Where names lead.
    pub place: Place<'a>,
    /// The one thing in the archive must be a directory.
    pub must_be_directory: bool,
    /// Take over owners and the set-user-ID, set-group-ID and sticky bits. If not, files belong
    /// to the caller and have none.
    pub owners: bool,
    /// Without `owners`, take the bits of the process's umask from the modes, as `cp` and `tar`
    /// do: else whoever made the archive could make files that everyone on this system may write.
    pub umask: bool,
    /// The directory's path, for messages.
    pub shown: &'a Path,
}

/// Makes the files of `archive` in `dir`, and reads it to the end of the stream.
///
/// A directory that is there stays as it is, and what is in it that the archive does not name.
/// A file takes the place of one that is there, or of a symbolic link, in one step. A directory
/// does not take the place of anything else, nor anything else that of a directory.
///
/// # Errors
/// [`Error::Archive`] for an archive that is damaged or holds what it must not, [`Error::File`]
/// for what cannot be made, [`Error::Stream`] as `archive` says. What was made until then stays.
pub fn unpack(
    archive: &mut dyn Read,
    dir: OwnedFd,
    options: &Unpack<'_>,
) -> Result<Summary, Error> {
    run::<false>(archive, dir, options)
}

/// As [`unpack`], but with [`Place::As`] a file goes into the one that is there, as with `cp`,
/// which keeps its mode, its owner and its other names, but no set-user-ID bits unless with
/// [`Unpack::owners`]. It gets the new contents when they have come as a whole, unless no file can
/// be made beside it. A symbolic link that is there is an error, since an earlier archive may have
/// brought it. Files below a directory of the archive take the place of others as ever.
///
/// # Errors
/// As [`unpack`].
pub fn unpack_over(
    archive: &mut dyn Read,
    dir: OwnedFd,
    options: &Unpack<'_>,
) -> Result<Summary, Error> {
    run::<true>(archive, dir, options)
}

fn run<const OVER: bool>(
    archive: &mut dyn Read,
    dir: OwnedFd,
    options: &Unpack<'_>,
) -> Result<Summary, Error> {
    let links = dir.try_clone().map_err(|source| Error::File {
        path: options.shown.to_path_buf(),
        source,
    })?;
    let mut unpacker = Unpacker::<'_, OVER> {
        options,
        dirs: Dirs::new(dir),
        links: Dirs::new(links),
        unfinished: Vec::new(),
        made: HashSet::new(),
        bits: match (options.owners, options.umask) {
            (true, _) => 0o7777,
            (false, true) => 0o777 & !sys::umask(),
            (false, false) => 0o777,
        },
        summary: Summary::default(),
        buffer: vec![0; 64 << 10],
    };
    let mut reader = Reader::new(archive);
    while let Some(entry) = reader.next()? {
        unpacker.take(&entry, &mut reader)?;
    }
    unpacker.go_to(&[])?;
    Ok(unpacker.summary)
}

/// With `OVER`, the one thing goes into a file that is there. It is known when this is compiled, so
/// that the guest's agent is none the larger for it.
struct Unpacker<'a, const OVER: bool> {
    options: &'a Unpack<'a>,
    dirs: Dirs,
    /// The way to what hard links lead to.
    links: Dirs,
    /// Directories that were made, with their depth: they get their modes and times when
    /// nothing more comes into them.
    unfinished: Vec<(usize, Attributes)>,
    /// Device and inode number of everything that was made.
    made: HashSet<(u64, u64)>,
    /// Mode bits that are taken over.
    bits: u32,
    summary: Summary,
    buffer: Vec<u8>,
}

#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    mode: Mode,
    pub(crate) owner: Option<(Uid, Gid)>,
    mtime: (i64, u32),
}

impl Attributes {
    pub(crate) fn times(&self) -> Timestamps {
        Timestamps {
            last_access: Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_OMIT,
            },
            last_modification: Timespec {
                tv_sec: self.mtime.0,
                tv_nsec: self.mtime.1.into(),
            },
        }
    }

    /// Owner first: a change of owner takes set-user-ID away.
    pub(crate) fn set(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        if let Some((uid, gid)) = self.owner {
            fchown(fd, Some(uid), Some(gid))?;
        }
        fchmod(fd, self.mode)?;
        futimens(fd, &self.times())
    }
}

impl<const OVER: bool> Unpacker<'_, OVER> {
    fn take(&mut self, entry: &Entry, reader: &mut Reader<'_>) -> Result<(), Error> {
        let name = self.place(&entry.name)?;
        let Some((last, parents)) = name.split_last() else {
            // The directory itself.
            return match entry.kind {
                Kind::Directory => Ok(()),
                _ => Err(Error::archive("holds a file without a name", &entry.name)),
            };
        };
        if self.options.must_be_directory && parents.is_empty() && entry.kind != Kind::Directory {
            return Err(self.failed(&name)(Errno::NOTDIR));
        }
        if entry.kind == Kind::Device {
            self.summary.skipped += 1;
            return Ok(());
        }
        self.go_to(parents)?;
        match &entry.kind {
            Kind::Directory => self.directory(last, &name, entry)?,
            Kind::File => self.file(last, &name, entry, reader)?,
            Kind::Symlink(target) => self.symlink(last, &name, target, entry)?,
            Kind::Link(target) => self.link(last, &name, target, entry)?,
            Kind::Fifo => self.fifo(last, &name, entry)?,
            Kind::Device => {}
        }
        self.summary.entries += 1;
        Ok(())
    }

    /// The components of where `name` leads.
    fn place<'n>(&self, name: &'n [u8]) -> Result<Vec<&'n [u8]>, Error>
    where
        Self: 'n,
    {
        let mut parts = components(name)?;
        if let Place::As(new) = self.options.place {
            match parts.first_mut() {
                Some(first) => *first = new.as_bytes(),
                None => {
                    return Err(Error::archive(
                        "holds more than the one thing asked for",
                        name,
                    ));
                }
            }
        }
        Ok(parts)
    }

    /// Makes `path` the current directory, and every directory on the way that is missing.
    fn go_to(&mut self, path: &[&[u8]]) -> Result<(), Error> {
        let common = self.dirs.common(path);
        while self.dirs.depth() > common {
            self.finish_current(path)?;
        }
        for (at, name) in path.iter().enumerate().skip(common) {
            // The message only if there is one: at each of many levels it would cost more than the level.
            self.enter_or_make(name)
                .map_err(|error| self.failed(path.get(..=at).unwrap_or(path))(error))?;
        }
        Ok(())
    }

    fn enter_or_make(&mut self, name: &[u8]) -> Result<(), Errno> {
        match self.dirs.enter(name) {
            Ok(()) => {
                // One that was finished is so again when we leave it.
                let dir = self.dirs.current()?;
                let stat = fstat(dir)?;
                if self.made.contains(&(stat.st_dev, stat.st_ino)) {
                    let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
                    if !mode.contains(Mode::RWXU) {
                        fchmod(dir, mode | Mode::RWXU)?;
                    }
                    let attributes = Attributes {
                        mode,
                        owner: None,
                        mtime: (
                            stat.st_mtime,
                            u32::try_from(stat.st_mtime_nsec).unwrap_or_default(),
                        ),
                    };
                    self.unfinished.push((self.dirs.depth(), attributes));
                }
                Ok(())
            }
            Err(Errno::NOENT) => {
                let parent = self.dirs.current()?;
                mkdirat(parent, OsStr::from_bytes(name), Mode::from(IMPLIED))?;
                self.dirs.enter(name)?;
                self.remember_current()
            }
            Err(error) => Err(error),
        }
    }

    /// Notes that the current directory was made here.
    fn remember_current(&mut self) -> Result<(), Errno> {
        let stat = fstat(self.dirs.current()?)?;
        self.remember(&stat);
        Ok(())
    }

    fn remember(&mut self, stat: &Stat) {
        if self.made.len() < MAX_REMEMBERED {
            self.made.insert((stat.st_dev, stat.st_ino));
        }
    }

    /// Leaves the current directory, for good if the archive goes by depth.
    fn finish_current(&mut self, shown: &[&[u8]]) -> Result<(), Error> {
        if let Some((depth, attributes)) = self.unfinished.last().copied()
            && depth == self.dirs.depth()
        {
            self.unfinished.pop();
            let result = self.dirs.current().and_then(|dir| attributes.set(dir));
            result.map_err(|error| self.failed(shown)(error))?;
        }
        self.dirs.leave();
        Ok(())
    }

    fn directory(&mut self, last: &[u8], name: &[&[u8]], entry: &Entry) -> Result<(), Error> {
        // Until it is finished it must let us in.
        let made = self
            .dirs
            .current()
            .and_then(|parent| mkdirat(parent, OsStr::from_bytes(last), Mode::RWXU));
        match made {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(self.failed(name)(error)),
        }
        if made.is_ok() {
            let entered = self.dirs.enter(last);
            entered
                .and_then(|()| self.remember_current())
                .map_err(self.failed(name))?;
            let attributes = self.attributes(entry);
            self.unfinished.push((self.dirs.depth(), attributes));
            return Ok(());
        }
        self.enter_or_make(last).map_err(self.failed(name))?;
        // One that the archive implied before, or named twice.
        let attributes = self.attributes(entry);
        if let Some((depth, last)) = self.unfinished.last_mut()
            && *depth == self.dirs.depth()
        {
            *last = attributes;
        }
        Ok(())
    }

    fn file(
        &mut self,
        last: &[u8],
        name: &[&[u8]],
        entry: &Entry,
        reader: &mut Reader<'_>,
    ) -> Result<(), Error> {
        let (failed, path) = (self.failed(name), self.path(name));
        let attributes = self.attributes(entry);
        let last = OsStr::from_bytes(last);
        let parent = self.dirs.current().map_err(&failed)?;
        if OVER
            && name.len() == 1
            && let Some(there) = through::existing(parent, last, &path)?
        {
            let content = through::Content {
                reader,
                buffer: &mut self.buffer,
                attributes: &attributes,
            };
            let stat = content
                .write(there, parent, &failed)
                .and_then(|there| fstat(&there).map_err(&failed))?;
            self.summary.bytes += entry.size;
            self.remember(&stat);
            return Ok(());
        }
        let (fd, temporary) = create(parent, last).map_err(&failed)?;
        let written = temporary.as_deref().unwrap_or(last);
        let mut file = File::from(fd);
        let result = fill(&mut file, reader, &mut self.buffer, &failed)
            .and_then(|()| attributes.set(file.as_fd()).map_err(&failed))
            .and_then(|()| match &temporary {
                Some(temporary) => renameat(parent, temporary, parent, last).map_err(&failed),
                None => Ok(()),
            })
            .and_then(|()| fstat(&file).map_err(&failed));
        match result {
            Ok(stat) => {
                self.summary.bytes += entry.size;
                self.remember(&stat);
                Ok(())
            }
            Err(error) => {
                // A part of a file is worse than none.
                let _ = unlinkat(parent, written, AtFlags::empty());
                Err(error)
            }
        }
    }

    fn symlink(
        &mut self,
        last: &[u8],
        name: &[&[u8]],
        target: &[u8],
        entry: &Entry,
    ) -> Result<(), Error> {
        check_text(target)?;
        let attributes = self.attributes(entry);
        let last = OsStr::from_bytes(last);
        self.replace(last, name, |parent| {
            symlinkat(OsStr::from_bytes(target), parent, last)?;
            set_unopened(parent, last, &attributes)
        })?;
        self.remember_unopened(last, name)
    }

    fn fifo(&mut self, last: &[u8], name: &[&[u8]], entry: &Entry) -> Result<(), Error> {
        let attributes = self.attributes(entry);
        let last = OsStr::from_bytes(last);
        self.replace(last, name, |parent| {
            // The mode it gets is less the umask.
            sys::make_fifo(parent, last, attributes.mode)?;
            set_unopened(parent, last, &attributes)
        })?;
        self.remember_unopened(last, name)
    }

    /// Notes what was just made: GNU tar makes hard links to symbolic links and FIFOs, too.
    fn remember_unopened(&mut self, last: &OsStr, name: &[&[u8]]) -> Result<(), Error> {
        let made = self
            .dirs
            .current()
            .and_then(|parent| statat(parent, last, AtFlags::SYMLINK_NOFOLLOW));
        self.remember(&made.map_err(self.failed(name))?);
        Ok(())
    }

    fn link(
        &mut self,
        last: &[u8],
        name: &[&[u8]],
        target: &[u8],
        entry: &Entry,
    ) -> Result<(), Error> {
        let foreign = || Error::archive("holds a hard link to what it did not bring", &entry.name);
        let target = self.place(target)?;
        let (target, parents) = target.split_last().ok_or_else(foreign)?;
        let common = self.links.common(parents);
        while self.links.depth() > common {
            self.links.leave();
        }
        for parent in parents.get(common..).unwrap_or_default() {
            self.links.enter(parent).map_err(|_| foreign())?;
        }
        let from = self.links.current().map_err(|_| foreign())?;
        let target = OsStr::from_bytes(target);
        let stat = statat(from, target, AtFlags::SYMLINK_NOFOLLOW).map_err(|_| foreign())?;
        let inode = (stat.st_dev, stat.st_ino);
        let directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if directory || !self.made.contains(&inode) {
            return Err(foreign());
        }
        let from = from.try_clone_to_owned().map_err(|source| Error::File {
            path: self.path(name),
            source,
        })?;
        let last = OsStr::from_bytes(last);
        self.replace(last, name, |parent| {
            // Nothing to do for a link to itself, which must not be removed either.
            if statat(parent, last, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|there| (there.st_dev, there.st_ino) == inode)
            {
                return Ok(());
            }
            linkat(&from, target, parent, last, AtFlags::empty())
        })
    }

    /// Makes something at `last`, in the place of what is there unless that is a directory.
    fn replace(
        &mut self,
        last: &OsStr,
        name: &[&[u8]],
        make: impl Fn(BorrowedFd<'_>) -> Result<(), Errno>,
    ) -> Result<(), Error> {
        let failed = self.failed(name);
        let parent = self.dirs.current().map_err(&failed)?;
        match make(parent) {
            // EISDIR for a directory.
            Err(Errno::EXIST) => unlinkat(parent, last, AtFlags::empty())
                .and_then(|()| make(parent))
                .map_err(&failed),
            result => result.map_err(&failed),
        }
    }

    fn attributes(&self, entry: &Entry) -> Attributes {
        Attributes {
            mode: Mode::from(entry.mode & self.bits),
            owner: self
                .options
                .owners
                .then(|| (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid))),
            mtime: entry.mtime,
        }
    }

    /// Where `name` leads, for messages.
    fn path(&self, name: &[&[u8]]) -> PathBuf {
        let mut path = self.options.shown.to_path_buf();
        path.extend(name.iter().map(|part| OsStr::from_bytes(part)));
        path
    }

    fn failed(&self, name: &[&[u8]]) -> impl Fn(Errno) -> Error + use<OVER> {
        let path = self.path(name);
        move |error| Error::file(path.clone())(error)
    }
}

/// Creates a file to write: at `name` if nothing is there, else beside it, under the name that is
/// given back.
fn create(parent: BorrowedFd<'_>, name: &OsStr) -> Result<(OwnedFd, Option<OsString>), Errno> {
    match open_new(parent, name) {
        Ok(fd) => return Ok((fd, None)),
        Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    let there = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(there.st_mode) == FileType::Directory {
        return Err(Errno::ISDIR);
    }
    create_beside(parent).map(|(fd, temporary)| (fd, Some(temporary)))
}

fn open_new(parent: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::RUSR | Mode::WUSR)
}

/// Creates a file to write and read under a name that nothing has.
pub(crate) fn create_beside(parent: BorrowedFd<'_>) -> Result<(OwnedFd, OsString), Errno> {
    let mut number = std::process::id();
    for _ in 0..MAX_TEMPORARIES {
        let temporary = OsString::from(format!(".bantam-copy-{number}"));
        match open_new(parent, &temporary) {
            Ok(fd) => return Ok((fd, temporary)),
            Err(Errno::EXIST) => number = number.wrapping_add(1),
            Err(error) => return Err(error),
        }
    }
    Err(Errno::EXIST)
}

/// Writes what is left of the current entry.
pub(crate) fn fill(
    file: &mut dyn Write,
    reader: &mut Reader<'_>,
    buffer: &mut [u8],
    failed: &impl Fn(Errno) -> Error,
) -> Result<(), Error> {
    loop {
        let count = reader.read(buffer)?;
        if count == 0 {
            return Ok(());
        }
        file.write_all(buffer.get(..count).unwrap_or_default())
            .map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    }
}

/// Sets what can be set of something that was just made and cannot be opened.
fn set_unopened(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    attributes: &Attributes,
) -> Result<(), Errno> {
    if let Some((uid, gid)) = attributes.owner {
        chownat(
            parent,
            name,
            Some(uid),
            Some(gid),
            AtFlags::SYMLINK_NOFOLLOW,
        )?;
    }
    utimensat(parent, name, &attributes.times(), AtFlags::SYMLINK_NOFOLLOW)
}
