//! Applies one layer's entries to the tree (OCI image-spec layer.md "Applying Changesets").

use std::io::Read;

use super::archive::{Entry, EntryKind, TarReader};
use crate::erofs::{self, Attributes, DataArea, InodeId, Kind, Tree, Xattrs};
use crate::error::{Error, Result};
use crate::limits::Limits;

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Names that AUFS kept for itself.
const AUFS: &[u8] = b".wh..wh.";

/// A file system under construction, layer upon layer.
pub(crate) struct Applier {
    pub(crate) tree: Tree,
    pub(crate) data: DataArea,
    limits: Limits,
    entries: u64,
    layer: u32,
    buf: Vec<u8>,
}

impl Applier {
    pub(crate) fn new(data: DataArea, limits: Limits) -> Self {
        Self {
            tree: Tree::new(limits),
            data,
            limits,
            entries: 0,
            layer: 0,
            buf: vec![0; 256 * 1024],
        }
    }

    /// Applies a layer on top of those applied before. `what` names it in errors.
    pub(crate) fn apply<R: Read>(&mut self, archive: &mut TarReader<R>, what: &str) -> Result<()> {
        self.layer += 1;
        while let Some(entry) = archive.next_entry()? {
            self.entries += 1;
            if self.entries > self.limits.entries {
                return Err(Error::Limit {
                    what: what.to_owned(),
                    limit: self.limits.entries,
                    unit: "entries",
                });
            }
            self.apply_entry(archive, &entry)
                .map_err(|error| name_entry(error, what, &entry.path))?;
            for extent in self.tree.take_released() {
                self.data.release(&extent);
            }
        }
        Ok(())
    }

    fn apply_entry<R: Read>(&mut self, archive: &mut TarReader<R>, entry: &Entry) -> Result<()> {
        let path = clean(&entry.path);
        let Some((name, parent)) = path.split_last() else {
            // The root itself.
            if entry.kind != EntryKind::Dir {
                return Err(bad("the root of the image must be a directory"));
            }
            let attributes = self.attributes(entry)?;
            return self
                .tree
                .set_dir_attributes(self.tree.root(), attributes, self.layer);
        };
        if parent
            .iter()
            .any(|component| component.starts_with(WHITEOUT))
        {
            // Whatever lies under a whiteout marker is not part of the image.
            return Ok(());
        }
        let parent = parent.join(&b'/');
        if name.starts_with(WHITEOUT) {
            return self.whiteout(&parent, name);
        }
        let attributes = self.attributes(entry)?;
        let kind = match entry.kind {
            EntryKind::Dir => {
                let dir = self.tree.make_dirs(&parent, self.layer)?;
                self.tree.insert_dir(dir, name, attributes, self.layer)?;
                return Ok(());
            }
            EntryKind::HardLink => return self.hard_link(&parent, name, &entry.link),
            EntryKind::File => {
                let mut out = self.data.begin(entry.size, &attributes.xattrs)?;
                archive.copy_contents(entry, &mut out, &mut self.buf)?;
                Kind::File(out.finish()?)
            }
            EntryKind::Symlink => {
                if entry.link.is_empty() {
                    return Err(bad("a symbolic link to nothing"));
                }
                Kind::Symlink(entry.link.as_slice().into())
            }
            EntryKind::CharDevice => Kind::CharDevice(device(entry.device)?),
            EntryKind::BlockDevice => Kind::BlockDevice(device(entry.device)?),
            EntryKind::Fifo => Kind::Fifo,
        };
        let dir = self.tree.make_dirs(&parent, self.layer)?;
        self.tree.insert(dir, name, attributes, kind, self.layer)?;
        Ok(())
    }

    /// Hides lower layers' files, wherever in the layer the marker stands; a missing path is fine.
    fn whiteout(&mut self, parent: &[u8], name: &[u8]) -> Result<()> {
        let hidden = &name[WHITEOUT.len()..];
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(bad("a whiteout without a name"));
        }
        let Some(dir) = self.tree.find_dir(parent)? else {
            return Ok(());
        };
        if name == OPAQUE {
            self.tree.clear_lower(dir, self.layer)
        } else if name.starts_with(AUFS) {
            Ok(())
        } else {
            self.tree.remove_lower(dir, hidden, self.layer)
        }
    }

    /// The target is a path in the merged tree; its last component is not followed.
    fn hard_link(&mut self, parent: &[u8], name: &[u8], target: &[u8]) -> Result<()> {
        // First, as this may replace what the target's path leads to.
        let dir = self.tree.make_dirs(parent, self.layer)?;
        let path = clean(target);
        let (target_name, target_parent) = path
            .split_last()
            .ok_or_else(|| bad("hard link to the root"))?;
        let found: Option<InodeId> = match self.tree.find_dir(&target_parent.join(&b'/'))? {
            Some(dir) => self.tree.lookup(dir, target_name)?,
            None => None,
        };
        let inode = found.ok_or_else(|| {
            bad(&format!(
                "hard link to {}, which is missing",
                String::from_utf8_lossy(target)
            ))
        })?;
        if self.tree.is_dir(inode)? {
            return Err(bad("hard link to a directory"));
        }
        self.tree.link(dir, name, inode, self.layer)
    }

    fn attributes(&self, entry: &Entry) -> Result<Attributes> {
        let mode = if entry.kind == EntryKind::Symlink {
            0o777
        } else {
            entry.mode
        };
        Ok(Attributes {
            mode,
            uid: entry.uid,
            gid: entry.gid,
            mtime: entry.mtime,
            mtime_ns: entry.mtime_ns,
            xattrs: Xattrs::encode(&String::from_utf8_lossy(&entry.path), &entry.xattrs)?,
        })
    }
}

/// The components of a name in an archive: relative to the root, `.` and `..` resolved as text, as Docker does.
/// `..` above the root is the root.
fn clean(path: &[u8]) -> Vec<&[u8]> {
    let mut out = Vec::new();
    for component in path.split(|b| *b == b'/') {
        match component {
            b"" | b"." => {}
            b".." => {
                out.pop();
            }
            name => out.push(name),
        }
    }
    out
}

fn device((major, minor): (u32, u32)) -> Result<u32> {
    erofs::device(major, minor).ok_or_else(|| bad("its device number is out of range"))
}

const ENTRY: &str = "entry";

fn bad(why: &str) -> Error {
    Error::malformed(ENTRY, why)
}

/// Says which layer and entry an error is about.
fn name_entry(error: Error, layer: &str, path: &[u8]) -> Error {
    match error {
        Error::Malformed { what, why } if what == ENTRY => Error::Malformed {
            what: layer.to_owned(),
            why: format!("entry {}: {why}", String::from_utf8_lossy(path)),
        },
        Error::Malformed { what, why } if what != layer => Error::Malformed {
            what: layer.to_owned(),
            why: format!("entry {}: {what}: {why}", String::from_utf8_lossy(path)),
        },
        other => other,
    }
}
