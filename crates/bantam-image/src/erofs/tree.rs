//! The file system in memory: names and attributes, no contents.

use std::collections::{BTreeMap, VecDeque};

use super::data::Extent;
use super::xattr::Xattrs;
use crate::error::{Error, Result};
use crate::limits::{Limits, MAX_DETOUR, MAX_NAME, MAX_SYMLINKS};

/// An inode of a [`Tree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeId(u32);

/// Owner, permissions, time and extended attributes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits with setuid, setgid and sticky (07777).
    pub mode: u16,
    /// Owning user.
    pub uid: u32,
    /// Owning group.
    pub gid: u32,
    /// Modification time, seconds since the epoch; may be negative.
    pub mtime: i64,
    /// Nanoseconds after `mtime`.
    pub mtime_ns: u32,
    /// Extended attributes.
    pub xattrs: Xattrs,
}

impl Attributes {
    /// What a directory gets that no layer describes: 0755, root.
    pub fn implied_dir() -> Self {
        Self {
            mode: 0o755,
            ..Self::default()
        }
    }
}

/// What an inode is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A directory; see [`Tree`] for its entries.
    Dir(Dir),
    /// A regular file.
    File(Extent),
    /// A symbolic link and its target.
    Symlink(Box<[u8]>),
    /// A character device (Linux's 32-bit device number).
    CharDevice(u32),
    /// A block device.
    BlockDevice(u32),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

/// A directory's entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dir {
    pub(super) entries: BTreeMap<Box<[u8]>, Dirent>,
    /// The last layer that put anything in here, directly or further down.
    touched: u32,
    /// The last layer that hid all lower layers' entries here and further down. It need not look again: a layer may
    /// say so once for each of its entries.
    cleared: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dirent {
    pub(super) inode: InodeId,
    /// The layer whose entry this is.
    layer: u32,
}

pub(super) struct Inode {
    pub(super) attributes: Attributes,
    pub(super) kind: Kind,
    pub(super) nlink: u32,
}

/// A tree of inodes that layers are applied to.
///
/// No host path is ever formed from a name in it: names are keys of maps, and a symlink is followed by looking its
/// target up in the same maps, with the root as the parent of itself. That is why no image can reach outside.
pub struct Tree {
    inodes: Vec<Option<Inode>>,
    free: Vec<InodeId>,
    live: u64,
    metadata_bytes: u64,
    limits: Limits,
    released: Vec<Extent>,
}

/// The root of every [`Tree`].
pub(super) const ROOT: InodeId = InodeId(0);

impl Tree {
    /// A root directory with nothing in it.
    pub fn new(limits: Limits) -> Self {
        let root = Inode {
            attributes: Attributes::implied_dir(),
            kind: Kind::Dir(Dir::default()),
            nlink: 2,
        };
        Self {
            inodes: vec![Some(root)],
            free: Vec::new(),
            live: 1,
            metadata_bytes: 0,
            limits,
            released: Vec::new(),
        }
    }

    /// The root directory.
    pub fn root(&self) -> InodeId {
        ROOT
    }

    /// Whether anything is in the tree.
    pub fn is_empty(&self) -> bool {
        self.live == 1
    }

    /// Inodes in the tree, with the root.
    pub(super) fn live(&self) -> u64 {
        self.live
    }

    /// One more than the largest inode index.
    pub(super) fn index_bound(&self) -> usize {
        self.inodes.len()
    }

    pub(super) fn inode(&self, id: InodeId) -> Result<&Inode> {
        self.inodes
            .get(index(id))
            .and_then(Option::as_ref)
            .ok_or_else(|| Error::malformed("file tree", "an entry leads to no inode"))
    }

    fn inode_mut(&mut self, id: InodeId) -> Result<&mut Inode> {
        self.inodes
            .get_mut(index(id))
            .and_then(Option::as_mut)
            .ok_or_else(|| Error::malformed("file tree", "an entry leads to no inode"))
    }

    pub(super) fn dir(&self, id: InodeId) -> Result<&Dir> {
        match &self.inode(id)?.kind {
            Kind::Dir(dir) => Ok(dir),
            _ => Err(Error::malformed(
                "file tree",
                "an entry under something that is no directory",
            )),
        }
    }

    fn dir_mut(&mut self, id: InodeId) -> Result<&mut Dir> {
        match &mut self.inode_mut(id)?.kind {
            Kind::Dir(dir) => Ok(dir),
            _ => Err(Error::malformed(
                "file tree",
                "an entry under something that is no directory",
            )),
        }
    }

    /// Contents that left the tree since the last call.
    pub fn take_released(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.released)
    }

    /// Whether an inode is a directory.
    pub fn is_dir(&self, id: InodeId) -> Result<bool> {
        Ok(matches!(self.inode(id)?.kind, Kind::Dir(_)))
    }

    /// The inode at `name` in `dir`, symlinks not followed.
    pub fn lookup(&self, dir: InodeId, name: &[u8]) -> Result<Option<InodeId>> {
        Ok(self.dir(dir)?.entries.get(name).map(|entry| entry.inode))
    }

    /// Finds the directory at `path` (slash-separated, relative to the root), following symlinks inside the tree.
    ///
    /// `..` at the root stays there. `None` means that it does not exist.
    pub fn find_dir(&self, path: &[u8]) -> Result<Option<InodeId>> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.next_name() {
            let Some(found) = self.lookup(walk.here(), &name)? else {
                return Ok(None);
            };
            match &self.inode(found)?.kind {
                Kind::Dir(_) => walk.enter(found),
                Kind::Symlink(target) => walk.follow(path, target)?,
                _ => return Ok(None),
            }
        }
        Ok(Some(walk.here()))
    }

    /// Like [`Tree::find_dir`], and makes what is missing on the way (0755, root). A file in the way is replaced.
    pub fn make_dirs(&mut self, path: &[u8], layer: u32) -> Result<InodeId> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.next_name() {
            let here = walk.here();
            let found = match self.lookup(here, &name)? {
                Some(found) => match &self.inode(found)?.kind {
                    Kind::Dir(_) => Some(found),
                    Kind::Symlink(target) => {
                        walk.follow(path, target)?;
                        continue;
                    }
                    _ => None,
                },
                None => None,
            };
            let dir = match found {
                Some(dir) => dir,
                None => self.insert(
                    here,
                    &name,
                    Attributes::implied_dir(),
                    Kind::Dir(Dir::default()),
                    layer,
                )?,
            };
            walk.enter(dir);
        }
        let here = walk.here();
        for dir in walk.stack {
            self.dir_mut(dir)?.touched = layer;
        }
        Ok(here)
    }

    /// Puts a new inode at `name`, in place of what is there.
    pub fn insert(
        &mut self,
        dir: InodeId,
        name: &[u8],
        attributes: Attributes,
        mut kind: Kind,
        layer: u32,
    ) -> Result<InodeId> {
        if let Kind::Dir(new) = &mut kind {
            new.touched = layer;
        }
        let nlink = if matches!(kind, Kind::Dir(_)) { 2 } else { 0 };
        let id = self.allocate(Inode {
            attributes,
            kind,
            nlink,
        })?;
        self.link(dir, name, id, layer)?;
        Ok(id)
    }

    /// Makes a directory at `name`, or replaces the attributes of the one that is there.
    pub fn insert_dir(
        &mut self,
        dir: InodeId,
        name: &[u8],
        attributes: Attributes,
        layer: u32,
    ) -> Result<InodeId> {
        if let Some(found) = self.lookup(dir, name)?
            && matches!(self.inode(found)?.kind, Kind::Dir(_))
        {
            self.set_dir_attributes(found, attributes, layer)?;
            if let Some(entry) = self.dir_mut(dir)?.entries.get_mut(name) {
                entry.layer = layer;
            }
            return Ok(found);
        }
        self.insert(dir, name, attributes, Kind::Dir(Dir::default()), layer)
    }

    /// Replaces a directory's attributes.
    pub fn set_dir_attributes(
        &mut self,
        dir: InodeId,
        attributes: Attributes,
        layer: u32,
    ) -> Result<()> {
        self.dir_mut(dir)?.touched = layer;
        let added = attributes.xattrs.len() as u64;
        let inode = self.inode_mut(dir)?;
        let removed = inode.attributes.xattrs.len() as u64;
        inode.attributes = attributes;
        self.metadata_bytes = self.metadata_bytes.saturating_sub(removed);
        self.charge(added)
    }

    /// Gives an inode that is not a directory one more name, in place of what is there.
    pub fn link(&mut self, dir: InodeId, name: &[u8], inode: InodeId, layer: u32) -> Result<()> {
        check_name(name)?;
        let target = self.inode_mut(inode)?;
        if !matches!(target.kind, Kind::Dir(_)) {
            target.nlink = target.nlink.saturating_add(1);
        }
        self.charge(name.len() as u64)?;
        // Counted before the old entry goes, as both may be the same inode.
        let old = self
            .dir_mut(dir)?
            .entries
            .insert(name.into(), Dirent { inode, layer });
        if let Some(old) = old {
            self.metadata_bytes = self.metadata_bytes.saturating_sub(name.len() as u64);
            self.unlink(old.inode)?;
        }
        Ok(())
    }

    /// Whiteout: removes what layers below `layer` put at `name`, and only that.
    pub fn remove_lower(&mut self, dir: InodeId, name: &[u8], layer: u32) -> Result<()> {
        let Some(entry) = self.dir(dir)?.entries.get(name).copied() else {
            return Ok(());
        };
        match &self.inode(entry.inode)?.kind {
            Kind::Dir(inner) if inner.touched >= layer => {
                if entry.layer < layer {
                    // The layer hides the lower directory and puts entries into a new one of which it says nothing.
                    self.set_dir_attributes(entry.inode, Attributes::implied_dir(), layer)?;
                }
                self.clear_lower(entry.inode, layer)
            }
            Kind::Dir(_) => self.remove(dir, name),
            _ if entry.layer < layer => self.remove(dir, name),
            _ => Ok(()),
        }
    }

    /// Opaque whiteout: removes all that layers below `layer` put under `dir`.
    pub fn clear_lower(&mut self, dir: InodeId, layer: u32) -> Result<()> {
        let mut pending = vec![dir];
        while let Some(dir) = pending.pop() {
            if self.dir(dir)?.cleared >= layer {
                continue;
            }
            let mut lower: Vec<Box<[u8]>> = Vec::new();
            let mut renewed = Vec::new();
            for (name, entry) in &self.dir(dir)?.entries {
                match &self.inode(entry.inode)?.kind {
                    Kind::Dir(inner) if inner.touched >= layer => {
                        pending.push(entry.inode);
                        if entry.layer < layer {
                            renewed.push(entry.inode);
                        }
                    }
                    Kind::Dir(_) => lower.push(name.clone()),
                    _ if entry.layer < layer => lower.push(name.clone()),
                    _ => {}
                }
            }
            for name in lower {
                self.remove(dir, &name)?;
            }
            for inode in renewed {
                self.set_dir_attributes(inode, Attributes::implied_dir(), layer)?;
            }
            self.dir_mut(dir)?.cleared = layer;
        }
        Ok(())
    }

    fn remove(&mut self, dir: InodeId, name: &[u8]) -> Result<()> {
        if let Some(entry) = self.dir_mut(dir)?.entries.remove(name) {
            self.metadata_bytes = self.metadata_bytes.saturating_sub(name.len() as u64);
            self.unlink(entry.inode)?;
        }
        Ok(())
    }

    /// Takes one name from an inode; the last one frees it, and a directory takes its contents along.
    fn unlink(&mut self, inode: InodeId) -> Result<()> {
        let mut pending = vec![inode];
        while let Some(id) = pending.pop() {
            let inode = self.inode_mut(id)?;
            if !matches!(inode.kind, Kind::Dir(_)) {
                inode.nlink = inode.nlink.saturating_sub(1);
                if inode.nlink > 0 {
                    continue;
                }
            }
            let Some(inode) = self.inodes.get_mut(index(id)).and_then(Option::take) else {
                continue;
            };
            let mut bytes = inode.attributes.xattrs.len() as u64;
            match inode.kind {
                Kind::Dir(dir) => {
                    for (name, entry) in dir.entries {
                        bytes = bytes.saturating_add(name.len() as u64);
                        pending.push(entry.inode);
                    }
                }
                Kind::File(extent) => self.released.push(extent),
                Kind::Symlink(target) => bytes = bytes.saturating_add(target.len() as u64),
                Kind::CharDevice(_) | Kind::BlockDevice(_) | Kind::Fifo | Kind::Socket => {}
            }
            self.metadata_bytes = self.metadata_bytes.saturating_sub(bytes);
            self.live -= 1;
            self.free.push(id);
        }
        Ok(())
    }

    fn allocate(&mut self, inode: Inode) -> Result<InodeId> {
        let too_many = Error::Limit {
            what: "image".to_owned(),
            limit: self.limits.entries,
            unit: "files",
        };
        if self.live >= self.limits.entries {
            return Err(too_many);
        }
        let target = match &inode.kind {
            Kind::Symlink(target) => target.len(),
            _ => 0,
        };
        self.charge((inode.attributes.xattrs.len() + target) as u64)?;
        self.live += 1;
        if let Some(id) = self.free.pop() {
            self.inodes[index(id)] = Some(inode);
            return Ok(id);
        }
        let id = InodeId(u32::try_from(self.inodes.len()).map_err(|_| too_many)?);
        self.inodes.push(Some(inode));
        Ok(id)
    }

    fn charge(&mut self, bytes: u64) -> Result<()> {
        self.metadata_bytes = self.metadata_bytes.saturating_add(bytes);
        if self.metadata_bytes > self.limits.metadata_bytes {
            return Err(Error::Limit {
                what: "image".to_owned(),
                limit: self.limits.metadata_bytes,
                unit: "bytes of names, link targets and extended attributes",
            });
        }
        Ok(())
    }
}

pub(super) fn index(id: InodeId) -> usize {
    id.0 as usize
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > MAX_NAME {
        return Err(Error::Limit {
            what: format!("file name {}", String::from_utf8_lossy(name)),
            limit: MAX_NAME as u64,
            unit: "bytes",
        });
    }
    if name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0)
    {
        return Err(Error::malformed(
            format!("file name {:?}", String::from_utf8_lossy(name)),
            "not a name",
        ));
    }
    Ok(())
}

/// A path being resolved: the directories entered, and the components still to come.
struct Walk {
    stack: Vec<InodeId>,
    rest: VecDeque<Box<[u8]>>,
    symlinks: usize,
    /// Components of their targets.
    detour: usize,
}

impl Walk {
    fn new(path: &[u8]) -> Self {
        Self {
            stack: vec![ROOT],
            rest: components(path).collect(),
            symlinks: 0,
            detour: 0,
        }
    }

    fn here(&self) -> InodeId {
        self.stack.last().copied().unwrap_or(ROOT)
    }

    /// The next component that is a name.
    fn next_name(&mut self) -> Option<Box<[u8]>> {
        loop {
            let name = self.rest.pop_front()?;
            if &*name != b".." {
                return Some(name);
            }
            if self.stack.len() > 1 {
                self.stack.pop();
            }
        }
    }

    fn enter(&mut self, dir: InodeId) {
        self.stack.push(dir);
    }

    fn follow(&mut self, path: &[u8], target: &[u8]) -> Result<()> {
        let targets: Vec<_> = components(target).collect();
        self.symlinks += 1;
        self.detour += targets.len();
        if self.symlinks > MAX_SYMLINKS || self.detour > MAX_DETOUR {
            return Err(Error::malformed(
                format!("path {}", String::from_utf8_lossy(path)),
                "too many levels of symbolic links",
            ));
        }
        if target.first() == Some(&b'/') {
            self.stack.truncate(1);
        }
        for component in targets.into_iter().rev() {
            self.rest.push_front(component);
        }
        Ok(())
    }
}

fn components(path: &[u8]) -> impl Iterator<Item = Box<[u8]>> + '_ {
    path.split(|b| *b == b'/')
        .filter(|c| !c.is_empty() && *c != b".")
        .map(Box::from)
}
