//! Open directories on the way to where work goes on.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

/// First levels whose directories are kept open. A tree may be deeper than a process may have files.
const KEPT: usize = 32;

/// Below those every such level is kept: the way back up from any depth opens each level once more, not all above
/// each. Of the at most 2048 levels of a name some 130 are open at a time.
const STRIDE: usize = 64;

/// A directory and the way down from it to the current one, each step opened by itself and
/// without following symbolic links.
pub(crate) struct Dirs {
    root: OwnedFd,
    levels: Vec<Level>,
}

struct Level {
    name: Vec<u8>,
    /// Kept for the first levels, each [`STRIDE`]th, the current one, and those of its stretch that were on the way
    /// when the current one was opened again.
    fd: Option<OwnedFd>,
}

/// Whether a level, counted from one, stays open while work goes on below it.
fn is_kept(depth: usize) -> bool {
    depth <= KEPT || depth.is_multiple_of(STRIDE)
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
        let depth = self.levels.len();
        // At the end of a stretch nothing of it is needed but its ends.
        let unneeded = if depth.is_multiple_of(STRIDE) {
            STRIDE
        } else {
            1
        };
        let from = depth.saturating_sub(unneeded);
        for (level, depth) in self.levels.iter_mut().zip(1..).skip(from) {
            if !is_kept(depth) {
                level.fd = None;
            }
        }
        self.levels.push(Level {
            name: name.to_vec(),
            fd: Some(fd),
        });
        Ok(())
    }

    /// Opens the current directory again, if it was not kept, from the nearest above that is open.
    fn reopen(&mut self) -> Result<(), Errno> {
        let open = self.levels.iter().rposition(|level| level.fd.is_some());
        for at in open.map_or(0, |open| open + 1)..self.levels.len() {
            let (above, below) = self.levels.split_at_mut(at);
            let Some(level) = below.first_mut() else {
                break;
            };
            let parent = above.last().and_then(|level| level.fd.as_ref());
            let parent = parent.unwrap_or(&self.root);
            level.fd = Some(open_dir(parent.as_fd(), &level.name)?);
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
    use rustix::fs::{AtFlags, fstat, mkdirat, unlinkat};

    use super::*;

    /// As deep as a name of 4096 bytes can be.
    const DEEPEST: usize = 2048;

    fn open(dirs: &Dirs) -> usize {
        let open = dirs.levels.iter().filter(|level| level.fd.is_some());
        open.count()
    }

    /// Opens the current directory and gives its inode number and how many had to be opened for it.
    fn reopened(dirs: &mut Dirs) -> (u64, usize) {
        let before = open(dirs);
        let inode = fstat(dirs.current().unwrap()).unwrap().st_ino;
        let now = open(dirs);
        assert!(now <= KEPT + DEEPEST / STRIDE + STRIDE, "{now} are open");
        (inode, now - before)
    }

    /// A directory in a directory and so on, the deepest current, and the inode number of each.
    fn deep(dir: &std::path::Path) -> (Dirs, Vec<u64>) {
        let mut dirs = Dirs::new(std::fs::File::open(dir).unwrap().into());
        let mut inodes = vec![reopened(&mut dirs).0];
        for _ in 0..DEEPEST {
            mkdirat(dirs.current().unwrap(), "d", Mode::RWXU).unwrap();
            dirs.enter(b"d").unwrap();
            let (inode, opened) = reopened(&mut dirs);
            assert_eq!(opened, 0);
            inodes.push(inode);
        }
        (dirs, inodes)
    }

    /// Goes up from wherever it is, and removes everything below: a path is too long for that.
    fn remove(dirs: &mut Dirs) {
        while dirs.enter(b"d").is_ok() {}
        while dirs.depth() > 0 {
            dirs.leave();
            let parent = dirs.current().unwrap();
            unlinkat(parent, "d", AtFlags::REMOVEDIR).unwrap();
        }
    }

    #[test]
    fn the_way_up_opens_no_more_than_the_way_down() {
        let dir = tempfile::tempdir().unwrap();
        let (mut dirs, inodes) = deep(dir.path());
        let mut opened = 0;
        for inode in inodes.iter().rev().skip(1) {
            dirs.leave();
            let (found, count) = reopened(&mut dirs);
            assert_eq!(found, *inode);
            opened += count;
        }
        assert!(opened <= DEEPEST, "{opened}");
        remove(&mut dirs);
    }

    #[test]
    fn to_and_fro_opens_few_at_a_time_and_the_right_ones() {
        let dir = tempfile::tempdir().unwrap();
        let (mut dirs, inodes) = deep(dir.path());
        // The same numbers each time (xorshift64).
        let mut state = 1_u64;
        for _ in 0..2000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let steps = usize::try_from(state % 100).unwrap();
            for _ in 0..steps {
                if state & 0x1_0000 == 0 && dirs.depth() > 0 {
                    dirs.leave();
                } else if dirs.depth() < DEEPEST {
                    dirs.enter(b"d").unwrap();
                }
            }
            let (inode, opened) = reopened(&mut dirs);
            assert_eq!(inode, inodes[dirs.depth()]);
            assert!(opened <= STRIDE, "{opened}");
        }
        remove(&mut dirs);
    }

    #[test]
    fn a_symbolic_link_is_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        let mut dirs = Dirs::new(std::fs::File::open(dir.path()).unwrap().into());
        assert!(dirs.enter(b"link").is_err());
    }
}
