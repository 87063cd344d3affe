//! Open directories on the way to where work goes on.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

/// Levels whose directories are kept open. A tree may be deeper than a process may have files.
const KEPT: usize = 48;

/// A directory and the way down from it to the current one, each step opened by itself and
/// without following symbolic links.
pub(crate) struct Dirs {
    root: OwnedFd,
    levels: Vec<Level>,
}

struct Level {
    name: Vec<u8>,
    /// Kept for the first levels and for the current one.
    fd: Option<OwnedFd>,
}

impl Dirs {
    pub(crate) fn new(root: OwnedFd) -> Self {
        Self {
            root,
            levels: Vec::new(),
        }
    }

    /// How deep the current directory is.
    pub(crate) fn depth(&self) -> usize {
        self.levels.len()
    }

    /// How many levels of the way to `path` are the current ones.
    pub(crate) fn common(&self, path: &[impl AsRef<[u8]>]) -> usize {
        self.levels
            .iter()
            .zip(path)
            .take_while(|(level, name)| level.name == name.as_ref())
            .count()
    }

    /// The current directory.
    pub(crate) fn current(&mut self) -> Result<BorrowedFd<'_>, Errno> {
        self.reopen()?;
        Ok(match self.levels.last() {
            Some(Level { fd: Some(fd), .. }) => fd.as_fd(),
            _ => self.root.as_fd(),
        })
    }

    /// Goes up one level.
    pub(crate) fn leave(&mut self) {
        self.levels.pop();
    }

    /// Goes down to `name` in the current directory.
    ///
    /// # Errors
    /// As the kernel says; `ENOTDIR` for a symbolic link.
    pub(crate) fn enter(&mut self, name: &[u8]) -> Result<(), Errno> {
        let fd = open_dir(self.current()?, name)?;
        if self.levels.len() > KEPT
            && let Some(parent) = self.levels.last_mut()
        {
            parent.fd = None;
        }
        self.levels.push(Level {
            name: name.to_vec(),
            fd: Some(fd),
        });
        Ok(())
    }

    /// Opens the current directory again, if it was not kept.
    fn reopen(&mut self) -> Result<(), Errno> {
        let kept = self
            .levels
            .iter()
            .take_while(|level| level.fd.is_some())
            .count();
        if kept == self.levels.len() || self.levels.last().is_none_or(|last| last.fd.is_some()) {
            return Ok(());
        }
        let from = match kept.checked_sub(1).and_then(|last| self.levels.get(last)) {
            Some(Level { fd: Some(fd), .. }) => fd.as_fd(),
            _ => self.root.as_fd(),
        };
        let mut fd = None;
        for level in self.levels.iter().skip(kept) {
            let parent = fd.as_ref().map_or(from, AsFd::as_fd);
            fd = Some(open_dir(parent, &level.name)?);
        }
        if let Some(last) = self.levels.last_mut() {
            last.fd = fd;
        }
        Ok(())
    }
}

/// Opens a directory that is not a symbolic link.
pub(crate) fn open_dir(parent: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, OsStr::from_bytes(name), flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn a_tree_deeper_than_what_is_kept_open_is_walked_down_and_up() {
        let dir = tempfile::tempdir().unwrap();
        let depth = KEPT * 3;
        let path: PathBuf = (0..depth).map(|n| n.to_string()).collect();
        std::fs::create_dir_all(dir.path().join(&path)).unwrap();
        let mut dirs = Dirs::new(std::fs::File::open(dir.path()).unwrap().into());
        for n in 0..depth {
            dirs.enter(n.to_string().as_bytes()).unwrap();
        }
        let open = dirs.levels.iter().filter(|level| level.fd.is_some());
        assert!(open.count() <= KEPT + 2);
        for n in (0..depth).rev() {
            dirs.leave();
            let name = n.to_string();
            let current = dirs.current().unwrap();
            open_dir(current, name.as_bytes()).unwrap();
        }
        assert_eq!(dirs.depth(), 0);
    }

    #[test]
    fn a_symbolic_link_is_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        let mut dirs = Dirs::new(std::fs::File::open(dir.path()).unwrap().into());
        assert!(dirs.enter(b"link").is_err());
    }
}
