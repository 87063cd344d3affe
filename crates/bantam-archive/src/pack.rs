//! From a tree to an archive.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, openat, readlinkat, statat,
};
use rustix::io::Errno;

use crate::dirs::{Dirs, open_dir};
use crate::header::{self, BLOCK, Entry, Kind, padding};
use crate::{Error, MAX_NAME, Summary, sys};

/// Files up to this size are read before their header is written, so that its size is true
/// for those of sysfs, too, and for one that shrinks.
const SMALL: usize = 64 << 10;

/// Most bytes of a file of which the kernel does not tell the size, as in `/proc`.
const MAX_UNSIZED: u64 = 16 << 20;

/// Most bytes remembered of files with several names, of which the further names become links.
/// Beyond them each name becomes a file of its own.
const MAX_LINKS: usize = 64 << 20;

/// Bytes that each of them takes besides its name, about.
const PER_LINK: usize = 64;

/// What to pack: found and open, nothing read yet.
#[derive(Debug)]
pub struct Source {
    root: Root,
    /// The first component of every name; empty for the contents of a directory.
    prefix: Vec<u8>,
    shown: PathBuf,
}

#[derive(Debug)]
enum Root {
    Directory(OwnedFd),
    Other { parent: OwnedFd, name: Vec<u8> },
}

impl Source {
    /// Finds what `path` names, as `cp -r` understands it: `dir/.` (and `/`, and what ends in
    /// `..`) is what is in the directory, anything else the thing itself, under the last
    /// component of the path. A symbolic link at the end is taken as a link, unless a slash
    /// comes after it or `follow_link` is set; those on the way are followed.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn open(path: &Path, follow_link: bool) -> Result<Self, Error> {
        Self::find(path, follow_link).map_err(Error::file(path))
    }

    fn find(path: &Path, follow_link: bool) -> Result<Self, Errno> {
        let bytes = path.as_os_str().as_bytes();
        let slashes = bytes.iter().rev().take_while(|byte| **byte == b'/').count();
        let trimmed = bytes.get(..bytes.len() - slashes).unwrap_or_default();
        let (parent, last) = match trimmed.iter().rposition(|byte| *byte == b'/') {
            Some(at) => trimmed.split_at(at + 1),
            None => (&b""[..], trimmed),
        };
        let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |path: &[u8], flags| openat(CWD, OsStr::from_bytes(path), flags, Mode::empty());
        let found = |root, prefix: &[u8]| Self {
            root,
            prefix: prefix.to_vec(),
            shown: path.to_path_buf(),
        };
        if bytes.is_empty() {
            return Err(Errno::NOENT);
        }
        if matches!(last, b"" | b"." | b"..") {
            return Ok(found(Root::Directory(open(bytes, directory)?), b""));
        }
        let follow = follow_link || slashes > 0;
        let flags = if follow {
            AtFlags::empty()
        } else {
            AtFlags::SYMLINK_NOFOLLOW
        };
        let stat = statat(CWD, OsStr::from_bytes(trimmed), flags)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let last_link = if follow {
                OFlags::empty()
            } else {
                OFlags::NOFOLLOW
            };
            let root = Root::Directory(open(trimmed, directory | last_link)?);
            return Ok(found(root, last));
        }
        if slashes > 0 {
            return Err(Errno::NOTDIR);
        }
        let (parent, name) = if follow {
            let real = std::fs::canonicalize(path).map_err(|error| errno(&error))?;
            let name = real.file_name().unwrap_or_default().as_bytes().to_vec();
            let parent = real.parent().unwrap_or(Path::new("/")).to_path_buf();
            (parent.into_os_string().into_vec(), name)
        } else {
            let parent = if parent.is_empty() { &b"."[..] } else { parent };
            (parent.to_vec(), last.to_vec())
        };
        let parent = open(&parent, directory)?;
        Ok(found(Root::Other { parent, name }, last))
    }

    /// Whether it is a directory, or what is in one.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        matches!(self.root, Root::Directory(_))
    }

    /// The thing's own name; `None` for what is in a directory.
    #[must_use]
    pub fn name(&self) -> Option<&OsStr> {
        (!self.prefix.is_empty()).then(|| OsStr::from_bytes(&self.prefix))
    }
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// Writes `source` to `out` as one archive, its end included. Symbolic links in it are not
/// followed; sockets and devices are left out and counted; of filesystems that the kernel makes
/// up (`/proc`, `/sys`) only the directory they are mounted on is taken, unless they are the
/// source. What vanishes meanwhile is left out.
///
/// # Errors
/// [`Error::File`] and [`Error::Shrank`] for what cannot be read, [`Error::Stream`] as `out`
/// says.
pub fn pack(source: Source, out: &mut dyn Write) -> Result<Summary, Error> {
    let mut packer = Packer {
        out,
        prefix: source.prefix,
        shown: source.shown,
        path: Vec::new(),
        links: Links::new(MAX_LINKS),
        summary: Summary::default(),
        buffer: vec![0; SMALL],
    };
    match source.root {
        Root::Directory(dir) => packer.tree(dir)?,
        Root::Other { parent, name } => {
            if let Some(stat) = packer.stat(parent.as_fd(), &name)? {
                packer.leaf(parent.as_fd(), &name, &stat)?;
            }
        }
    }
    let end = [0; 2 * BLOCK];
    packer.out.write_all(&end).map_err(Error::Stream)?;
    Ok(packer.summary)
}

struct Packer<'a> {
    out: &'a mut dyn Write,
    prefix: Vec<u8>,
    shown: PathBuf,
    /// Where the walk is, below the prefix.
    path: Vec<Vec<u8>>,
    links: Links,
    summary: Summary,
    buffer: Vec<u8>,
}

/// Files of which not all names were seen yet.
struct Links {
    /// The first name and how many are left, by device and inode number.
    files: HashMap<(u64, u64), (Vec<u8>, u64)>,
    /// Bytes that may still be remembered.
    room: usize,
}

impl Links {
    fn new(room: usize) -> Self {
        Self {
            files: HashMap::new(),
            room,
        }
    }

    /// The first name of a file, unless `name` is that.
    /// `names` is how many it has, in whatever type the system counts them.
    fn first(&mut self, inode: (u64, u64), names: impl Into<u64>, name: &[u8]) -> Option<Vec<u8>> {
        let names = names.into();
        if let Some((first, left)) = self.files.get_mut(&inode) {
            *left = left.saturating_sub(1);
            if *left > 0 {
                return Some(first.clone());
            }
            let (first, _) = self.files.remove(&inode)?;
            self.room = self.room.saturating_add(PER_LINK + first.len());
            return Some(first);
        }
        if names > 1
            && let Some(room) = self.room.checked_sub(PER_LINK + name.len())
        {
            self.room = room;
            self.files.insert(inode, (name.to_vec(), names - 1));
        }
        None
    }
}

impl Packer<'_> {
    fn tree(&mut self, root: OwnedFd) -> Result<(), Error> {
        let stat = fstat(&root).map_err(Error::file(&self.shown))?;
        self.entry(Kind::Directory, &stat, 0)?;
        let mut devices = vec![device(&stat)];
        let names = list(root.as_fd()).map_err(Error::file(&self.shown))?;
        let mut todo = vec![names.into_iter()];
        let mut dirs = Dirs::new(root);
        while let Some(names) = todo.last_mut() {
            let Some(name) = names.next() else {
                todo.pop();
                devices.pop();
                if self.path.pop().is_some() {
                    dirs.leave();
                }
                continue;
            };
            let here = self.shown();
            let parent = dirs.current().map_err(Error::file(here))?;
            let Some(stat) = self.stat(parent, &name)? else {
                continue;
            };
            self.path.push(name);
            let name = self.path.last().cloned().unwrap_or_default();
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                self.leaf(parent, &name, &stat)?;
                self.path.pop();
                continue;
            }
            match dirs.enter(&name) {
                Ok(()) => {}
                // It vanished, or is something else now.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                    self.path.pop();
                    continue;
                }
                Err(error) => return Err(Error::file(self.shown())(error)),
            }
            self.entry(Kind::Directory, &stat, 0)?;
            let here = self.shown();
            let dir = dirs.current().map_err(Error::file(&here))?;
            let mounted = devices.last() != Some(&device(&stat));
            let names = if mounted && sys::is_made_up(dir) {
                Vec::new()
            } else {
                list(dir).map_err(Error::file(&here))?
            };
            devices.push(device(&stat));
            todo.push(names.into_iter());
        }
        Ok(())
    }

    fn stat(&self, parent: BorrowedFd<'_>, name: &[u8]) -> Result<Option<Stat>, Error> {
        match statat(parent, OsStr::from_bytes(name), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => {
                let path = self.shown().join(OsStr::from_bytes(name));
                Err(Error::file(path)(error))
            }
        }
    }

    /// Packs what is no directory.
    fn leaf(&mut self, parent: BorrowedFd<'_>, name: &[u8], stat: &Stat) -> Result<(), Error> {
        let name = OsStr::from_bytes(name);
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => self.file(parent, name),
            FileType::Symlink => match readlinkat(parent, name, Vec::new()) {
                Ok(target) => self.entry(Kind::Symlink(target.into_bytes()), stat, 0),
                Err(Errno::NOENT | Errno::INVAL) => Ok(()),
                Err(error) => Err(Error::file(self.shown())(error)),
            },
            FileType::Fifo => self.entry(Kind::Fifo, stat, 0),
            _ => {
                self.summary.skipped += 1;
                Ok(())
            }
        }
    }

    fn file(&mut self, parent: BorrowedFd<'_>, name: &OsStr) -> Result<(), Error> {
        // Non-blocking, in case it has become a FIFO meanwhile.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fd = match openat(parent, name, flags | OFlags::CLOEXEC, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::LOOP) => return Ok(()),
            Err(error) => return Err(Error::file(self.shown())(error)),
        };
        let stat = fstat(&fd).map_err(Error::file(self.shown()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            self.summary.skipped += 1;
            return Ok(());
        }
        let inode = (device(&stat), stat.st_ino);
        if stat.st_nlink > 1 {
            let name = self.name();
            if let Some(first) = self.links.first(inode, stat.st_nlink, &name) {
                return self.entry(Kind::Link(first), &stat, 0);
            }
        }
        let mut file = File::from(fd);
        let mut buffer = std::mem::take(&mut self.buffer);
        let result = self.contents(&mut file, &stat, &mut buffer);
        self.buffer = buffer;
        result
    }

    fn contents(&mut self, file: &mut File, stat: &Stat, buffer: &mut [u8]) -> Result<(), Error> {
        let told = u64::try_from(stat.st_size).unwrap_or_default();
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.read(file, rest)? {
                0 => break,
                count => filled += count,
            }
        }
        let first = buffer.get(..filled).unwrap_or_default();
        if filled < buffer.len() {
            return self.whole(stat, first);
        }
        if told == 0 {
            let mut all = first.to_vec();
            file.take(MAX_UNSIZED + 1)
                .read_to_end(&mut all)
                .map_err(|error| self.failed(error))?;
            if all.len() as u64 > MAX_UNSIZED {
                return Err(self.failed(ErrorKind::FileTooLarge.into()));
            }
            return self.whole(stat, &all);
        }
        if told <= filled as u64 {
            // It grew; it had `told` bytes when it was opened.
            let told = usize::try_from(told).unwrap_or_default();
            return self.whole(stat, first.get(..told).unwrap_or_default());
        }
        self.entry(Kind::File, stat, told)?;
        self.out.write_all(first).map_err(Error::Stream)?;
        let mut left = told - filled as u64;
        while left > 0 {
            let wanted = usize::try_from(left)
                .unwrap_or(usize::MAX)
                .min(buffer.len());
            let piece = buffer.get_mut(..wanted).unwrap_or_default();
            let count = self.read(file, piece)?;
            if count == 0 {
                return Err(Error::Shrank(self.shown()));
            }
            let piece = piece.get(..count).unwrap_or_default();
            self.out.write_all(piece).map_err(Error::Stream)?;
            left = left.saturating_sub(count as u64);
        }
        self.pad(told)
    }

    fn whole(&mut self, stat: &Stat, bytes: &[u8]) -> Result<(), Error> {
        self.entry(Kind::File, stat, bytes.len() as u64)?;
        self.out.write_all(bytes).map_err(Error::Stream)?;
        self.pad(bytes.len() as u64)
    }

    fn pad(&mut self, size: u64) -> Result<(), Error> {
        let zeros = [0; BLOCK];
        let padding = zeros.get(..padding(size)).unwrap_or_default();
        self.summary.bytes += size;
        self.out.write_all(padding).map_err(Error::Stream)
    }

    fn read(&self, file: &mut File, buffer: &mut [u8]) -> Result<usize, Error> {
        loop {
            match file.read(buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => return result.map_err(|error| self.failed(error)),
            }
        }
    }

    fn entry(&mut self, kind: Kind, stat: &Stat, size: u64) -> Result<(), Error> {
        let name = self.name();
        // With the slash of a directory.
        if name.len() >= MAX_NAME {
            return Err(Error::file(self.shown())(Errno::NAMETOOLONG));
        }
        let entry = Entry {
            name,
            kind,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            mtime: (
                stat.st_mtime,
                u32::try_from(stat.st_mtime_nsec).unwrap_or_default(),
            ),
            size,
        };
        header::write(&entry, self.out)?;
        self.summary.entries += 1;
        Ok(())
    }

    /// The current name in the archive.
    fn name(&self) -> Vec<u8> {
        let prefix = (!self.prefix.is_empty()).then_some(&self.prefix);
        let parts: Vec<_> = prefix
            .into_iter()
            .chain(&self.path)
            .map(Vec::as_slice)
            .collect();
        if parts.is_empty() {
            b".".to_vec()
        } else {
            parts.join(&b'/')
        }
    }

    /// The current path, for messages.
    fn shown(&self) -> PathBuf {
        let mut path = self.shown.clone();
        path.extend(self.path.iter().map(|name| OsStr::from_bytes(name)));
        path
    }

    fn failed(&self, source: std::io::Error) -> Error {
        Error::File {
            path: self.shown(),
            source,
        }
    }
}

fn device(stat: &Stat) -> u64 {
    stat.st_dev
}

/// The names in a directory, sorted, so that the same tree is the same archive.
fn list(dir: BorrowedFd<'_>) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    // Of its own, since reading moves it.
    let own = open_dir(dir, b".")?;
    for entry in Dir::new(own)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_forgotten_with_its_last_name() {
        let mut links = Links::new(1000);
        assert_eq!(links.first((1, 1), 3_u32, b"a"), None);
        assert_eq!(links.first((1, 1), 3_u32, b"b"), Some(b"a".to_vec()));
        assert_eq!(links.first((1, 1), 3_u32, b"c"), Some(b"a".to_vec()));
        assert!(links.files.is_empty());
        assert_eq!(links.room, 1000);
    }

    #[test]
    fn files_with_many_names_take_bounded_memory() {
        let mut links = Links::new(1000);
        for inode in 0..100_000 {
            assert_eq!(links.first((1, inode), 2_u32, b"name"), None);
        }
        assert!(links.files.len() <= 1000 / PER_LINK);
        // Those that are remembered still are.
        assert_eq!(links.first((1, 0), 2_u32, b"other"), Some(b"name".to_vec()));
    }
}
