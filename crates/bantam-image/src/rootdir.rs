//! A directory as root file system.
//!
//! The walk opens every directory relative to its parent and never through a symlink, so that what is read lies
//! in the directory whatever happens to it meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, OsStr};
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, openat, readlinkat, statat};

use crate::config::ImageConfig;
use crate::digest::{Algorithm, Digest, Hasher};
use crate::erofs::{self, Attributes, DataArea, InodeId, Kind, Summary, Tree, Xattrs};
use crate::error::{Error, Result};
use crate::limits::Limits;
use crate::platform::Platform;
use crate::sys;

const DIR_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// The configuration of an image that is only files.
pub(crate) fn config(platform: &Platform) -> ImageConfig {
    ImageConfig {
        architecture: platform.architecture.clone(),
        os: platform.os.clone(),
        ..ImageConfig::default()
    }
}

/// An open root directory.
pub(crate) struct RootDir {
    root: OwnedFd,
    path: PathBuf,
}

/// One entry of the walk.
struct Found<'a> {
    dir: BorrowedFd<'a>,
    name: &'a CStr,
    /// Relative to the root directory.
    path: &'a Path,
    /// 0 for what is directly in the root directory.
    depth: usize,
    stat: Stat,
}

struct Level {
    dir: OwnedFd,
    path: PathBuf,
    /// In reverse, to be taken from the end.
    names: Vec<CString>,
}

impl RootDir {
    /// Opens `path`. The host's own root, and a directory that holds the store, are refused.
    pub(crate) fn open(path: &Path, store: &Path) -> Result<Self> {
        let path = fs::canonicalize(path).map_err(Error::path("open", path))?;
        let store = fs::canonicalize(store).unwrap_or_else(|_| store.to_owned());
        let refuse = |why: &str| {
            Err(Error::malformed(
                format!("root directory {}", path.display()),
                why,
            ))
        };
        if path.parent().is_none() {
            return refuse(
                "that is this host's own root; name a directory that holds a root file system",
            );
        }
        if store.starts_with(&path) {
            return refuse("it contains the image store");
        }
        // The path may be a symlink, which the user chose; below it none is followed.
        let root = rustix::fs::open(&path, DIR_FLAGS, Mode::empty())
            .map_err(|e| Error::path("open", &path)(e.into()))?;
        let dir = Self { root, path };
        let entries = read_names(dir.root.as_fd(), &dir.path)?;
        if entries.is_empty() {
            return Err(Error::malformed(
                format!("root directory {}", dir.path.display()),
                "empty",
            ));
        }
        Ok(dir)
    }

    /// Identifies the directory's state by everything about its entries but the contents of files, whose times
    /// change with them.
    pub(crate) fn digest(&self, limits: &Limits) -> Result<Digest> {
        let mut hasher = Hasher::new(Algorithm::Sha256);
        hasher.update(b"bantam root directory 1\0");
        hasher.update(self.path.as_os_str().as_bytes());
        let mut add = |path: &[u8], stat: &Stat| {
            hasher.update(&(path.len() as u64).to_le_bytes());
            hasher.update(path);
            #[allow(clippy::unnecessary_cast)] // The field types differ between hosts.
            for number in [
                stat.st_mode as i128,
                stat.st_uid as i128,
                stat.st_gid as i128,
                stat.st_size as i128,
                stat.st_ino as i128,
                stat.st_nlink as i128,
                stat.st_rdev as i128,
                stat.st_mtime as i128,
                stat.st_mtime_nsec as i128,
                stat.st_ctime as i128,
                stat.st_ctime_nsec as i128,
            ] {
                hasher.update(&number.to_le_bytes());
            }
        };
        add(b"", &self.stat()?);
        self.walk(limits, &mut |found| {
            add(found.path.as_os_str().as_bytes(), &found.stat);
            Ok(())
        })?;
        Ok(hasher.finish())
    }

    /// Writes the directory as an image.
    pub(crate) fn to_erofs(
        &self,
        image: File,
        spool: File,
        limits: &Limits,
    ) -> Result<(File, Summary)> {
        let mut tree = Tree::new(*limits);
        let mut data = DataArea::new(image, spool, limits.content_bytes);
        let mut parents = vec![tree.root()];
        let mut seen: HashMap<(u64, u64), InodeId> = HashMap::new();
        let mut buf = vec![0; 256 * 1024];
        let root = attributes(
            &self.stat()?,
            self.xattrs(self.root.as_fd(), c".", Path::new("."))?,
        );
        tree.set_dir_attributes(tree.root(), root, 1)?;
        self.walk(limits, &mut |found| {
            parents.truncate(found.depth + 1);
            let parent = parents.last().copied().unwrap_or(tree.root());
            let name = found.name.to_bytes();
            let kind = FileType::from_raw_mode(found.stat.st_mode);
            #[allow(clippy::unnecessary_cast)] // The field types differ between hosts.
            let (inode, links) = (
                (found.stat.st_dev as u64, found.stat.st_ino as u64),
                found.stat.st_nlink as u64,
            );
            if kind != FileType::Directory
                && let Some(first) = seen.get(&inode)
            {
                return tree.link(parent, name, *first, 1);
            }
            let attributes =
                attributes(&found.stat, self.xattrs(found.dir, found.name, found.path)?);
            let kind = match kind {
                FileType::Directory => {
                    parents.push(tree.insert_dir(parent, name, attributes, 1)?);
                    return Ok(());
                }
                FileType::RegularFile => {
                    self.copy_file(found, &attributes.xattrs, &mut data, &mut buf)?
                }
                FileType::Symlink => {
                    let target = readlinkat(found.dir, found.name, Vec::new())
                        .map_err(self.failed("read link", found.path))?;
                    Kind::Symlink(target.into_bytes().into())
                }
                FileType::CharacterDevice => Kind::CharDevice(self.device(found)?),
                FileType::BlockDevice => Kind::BlockDevice(self.device(found)?),
                FileType::Fifo => Kind::Fifo,
                FileType::Socket => Kind::Socket,
                FileType::Unknown => {
                    return Err(Error::malformed(
                        self.path.join(found.path).display().to_string(),
                        "of unknown type",
                    ));
                }
            };
            let id = tree.insert(parent, name, attributes, kind, 1)?;
            if links > 1 {
                seen.insert(inode, id);
            }
            Ok(())
        })?;
        erofs::write(&tree, data, b"root directory")
    }

    fn copy_file(
        &self,
        found: &Found<'_>,
        xattrs: &Xattrs,
        data: &mut DataArea,
        buf: &mut [u8],
    ) -> Result<Kind> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut file = File::from(
            openat(found.dir, found.name, flags, Mode::empty())
                .map_err(self.failed("open", found.path))?,
        );
        let path = self.path.join(found.path);
        let changed = || {
            Error::malformed(
                path.display().to_string(),
                "changed while it was being read",
            )
        };
        let meta = file.metadata().map_err(Error::path("look at", &path))?;
        if !meta.is_file() {
            return Err(changed());
        }
        let size = meta.len();
        let mut out = data.begin(size, xattrs)?;
        let mut left = size;
        while left > 0 {
            let want = usize::try_from(left).map_or(buf.len(), |n| n.min(buf.len()));
            let n = file
                .read(&mut buf[..want])
                .map_err(Error::path("read", &path))?;
            if n == 0 {
                return Err(changed());
            }
            out.write(&buf[..n])?;
            left -= n as u64;
        }
        Ok(Kind::File(out.finish()?))
    }

    fn device(&self, found: &Found<'_>) -> Result<u32> {
        let (major, minor) = (
            rustix::fs::major(found.stat.st_rdev),
            rustix::fs::minor(found.stat.st_rdev),
        );
        erofs::device(major, minor).ok_or_else(|| {
            Error::malformed(
                self.path.join(found.path).display().to_string(),
                "its device number is out of range",
            )
        })
    }

    fn xattrs(&self, dir: BorrowedFd<'_>, name: &CStr, relative: &Path) -> Result<Xattrs> {
        let path = self.path.join(relative);
        let mut map = BTreeMap::new();
        let found = sys::xattrs(dir, name, &path)
            .map_err(Error::path("read extended attributes of", &path))?;
        for (name, value) in found {
            map.insert(name, value);
        }
        Xattrs::encode(&path.display().to_string(), &map)
    }

    fn stat(&self) -> Result<Stat> {
        rustix::fs::fstat(&self.root).map_err(self.failed("look at", Path::new("")))
    }

    fn walk(&self, limits: &Limits, visit: &mut dyn FnMut(&Found<'_>) -> Result<()>) -> Result<()> {
        let root = openat(&self.root, c".", DIR_FLAGS, Mode::empty())
            .map_err(self.failed("open", Path::new("")))?;
        let names = read_names(root.as_fd(), &self.path)?;
        let mut stack = vec![Level {
            dir: root,
            path: PathBuf::new(),
            names,
        }];
        let mut count = 0;
        while let Some(level) = stack.last_mut() {
            let Some(name) = level.names.pop() else {
                stack.pop();
                continue;
            };
            count += 1;
            if count > limits.entries {
                return Err(Error::Limit {
                    what: self.path.display().to_string(),
                    limit: limits.entries,
                    unit: "files",
                });
            }
            let path = level.path.join(OsStr::from_bytes(name.to_bytes()));
            let stat = statat(&level.dir, &name, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(self.failed("look at", &path))?;
            let next = if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                let dir = openat(&level.dir, &name, DIR_FLAGS, Mode::empty())
                    .map_err(self.failed("open", &path))?;
                let names = read_names(dir.as_fd(), &self.path.join(&path))?;
                Some(Level {
                    dir,
                    path: path.clone(),
                    names,
                })
            } else {
                None
            };
            let dir = level.dir.as_fd();
            // The level stays borrowed for the visit, so its depth is counted from outside.
            visit(&Found {
                dir,
                name: &name,
                path: &path,
                depth: path.components().count() - 1,
                stat,
            })?;
            stack.extend(next);
        }
        Ok(())
    }

    fn failed<'a>(
        &'a self,
        verb: &'a str,
        relative: &'a Path,
    ) -> impl FnOnce(rustix::io::Errno) -> Error + 'a {
        move |errno| Error::path(verb, &self.path.join(relative))(errno.into())
    }
}

/// Names in a directory, sorted backwards.
fn read_names(dir: BorrowedFd<'_>, path: &Path) -> Result<Vec<CString>> {
    let failed = |e: rustix::io::Errno| Error::path("read directory", path)(e.into());
    let mut names = Vec::new();
    for entry in Dir::read_from(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort_unstable_by(|a, b| b.cmp(a));
    Ok(names)
}

fn attributes(stat: &Stat, xattrs: Xattrs) -> Attributes {
    #[allow(
        clippy::unnecessary_cast,
        clippy::unnecessary_fallible_conversions,
        clippy::useless_conversion
    )]
    // The field types differ between hosts.
    Attributes {
        mode: u16::try_from(stat.st_mode & 0o7777).unwrap_or(0),
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: stat.st_mtime as i64,
        mtime_ns: u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
        xattrs,
    }
}
