//! Writes a tree's metadata behind its contents and completes the image.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

use super::data::DataArea;
use super::format::{self, BLOCK, BLOCK_USIZE, DIRENT, INODE, Layout, SLOT, Super};
use super::tree::{InodeId, Kind, ROOT, Tree, index};
use crate::digest::{Algorithm, Hasher};
use crate::error::{Error, Result};

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Size of the image in bytes, a multiple of [`BLOCK`].
    pub bytes: u64,
    /// Number of inodes.
    pub inodes: u64,
    /// The file system's UUID.
    pub uuid: [u8; 16],
}

/// An inode's place.
#[derive(Clone, Copy)]
struct Placed {
    nid: u64,
    ino: u32,
    layout: Layout,
    size: u64,
    /// First data block of a directory or long symlink.
    block: u32,
}

/// Writes the metadata of `tree`, whose contents went to `data`, and returns the finished file.
///
/// `seed` is mixed into the UUID, beside all metadata: name the layers here, so that images whose contents differ
/// at equal sizes and times have different UUIDs.
pub fn write(tree: &Tree, mut data: DataArea, seed: &[u8]) -> Result<(File, Summary)> {
    data.punch()?;
    let mut plan = Plan::new(tree, data.next_block)?;
    plan.place_all()?;
    let meta_block = plan.next_block;
    let meta_blocks = plan.cursor.div_ceil(BLOCK);
    let blocks = u32::try_from(u64::from(meta_block) + meta_blocks).map_err(|_| too_big())?;

    let image = &data.image;
    let mut out = Output::new(image, u64::from(data.next_block) * BLOCK, seed)?;
    plan.write_blocks(&mut out)?;
    plan.write_inodes(&mut out, &data.spool)?;
    let uuid = out.finish()?;

    let root = plan.placed(ROOT)?;
    let superblock = Super {
        root_nid: u16::try_from(root.nid).map_err(|_| too_big())?,
        inodes: tree.live(),
        blocks,
        meta_block,
        uuid,
    };
    let bytes = u64::from(blocks) * BLOCK;
    image
        .write_all_at(&superblock.encode(), 0)
        .map_err(failed())?;
    // The last metadata block, and a last data block that was all zeros, may end short of a whole block.
    image.set_len(bytes).map_err(failed())?;
    Ok((
        data.image,
        Summary {
            bytes,
            inodes: tree.live(),
            uuid,
        },
    ))
}

struct Plan<'a> {
    tree: &'a Tree,
    placed: Vec<Option<Placed>>,
    /// Inodes in the order of their places, and the parent of each directory.
    order: Vec<(InodeId, InodeId)>,
    /// Next free block for directories and long symlinks.
    next_block: u32,
    /// Next free byte in the metadata area.
    cursor: u64,
}

impl<'a> Plan<'a> {
    fn new(tree: &'a Tree, next_block: u32) -> Result<Self> {
        Ok(Self {
            tree,
            placed: vec![None; tree.index_bound()],
            order: Vec::new(),
            next_block,
            cursor: 0,
        })
    }

    fn placed(&self, id: InodeId) -> Result<Placed> {
        self.placed
            .get(index(id))
            .copied()
            .flatten()
            .ok_or_else(|| Error::malformed("file tree", "an inode without a place"))
    }

    /// Breadth first, so that the inodes of one directory are neighbours; the root comes first, as its number
    /// must fit 16 bits.
    fn place_all(&mut self) -> Result<()> {
        self.place(ROOT, ROOT)?;
        let mut dirs = VecDeque::from([ROOT]);
        while let Some(dir) = dirs.pop_front() {
            for entry in self.tree.dir(dir)?.entries.values() {
                if self
                    .placed
                    .get(index(entry.inode))
                    .copied()
                    .flatten()
                    .is_some()
                {
                    continue;
                }
                self.place(entry.inode, dir)?;
                if matches!(self.tree.inode(entry.inode)?.kind, Kind::Dir(_)) {
                    dirs.push_back(entry.inode);
                }
            }
        }
        Ok(())
    }

    fn place(&mut self, id: InodeId, parent: InodeId) -> Result<()> {
        let inode = self.tree.inode(id)?;
        let head = INODE + inode.attributes.xattrs.len();
        let fits = |tail: usize| tail != 0 && head + tail <= BLOCK_USIZE;
        let (size, tail, own_blocks) = match &inode.kind {
            Kind::File(extent) => {
                let tail = extent.tail_len();
                if tail != 0 && !fits(tail) {
                    let why = "a file has not the attributes that its contents were written for";
                    return Err(Error::malformed("file tree", why));
                }
                (extent.size, tail, 0)
            }
            Kind::Dir(_) => {
                let size = self.directory_size(id)?;
                let tail = usize::try_from(size % BLOCK).unwrap_or(0);
                if fits(tail) {
                    (size, tail, size / BLOCK)
                } else {
                    (size, 0, size.div_ceil(BLOCK))
                }
            }
            Kind::Symlink(target) if fits(target.len()) => (target.len() as u64, target.len(), 0),
            Kind::Symlink(target) => (
                target.len() as u64,
                0,
                (target.len() as u64).div_ceil(BLOCK),
            ),
            Kind::CharDevice(_) | Kind::BlockDevice(_) | Kind::Fifo | Kind::Socket => (0, 0, 0),
        };
        // An inline tail may not cross a block boundary, and neither may the inode: keep all of it in one block.
        // Only attributes may continue in the next block, of an inode without a tail.
        let whole = if head + tail <= BLOCK_USIZE {
            head + tail
        } else {
            INODE
        } as u64;
        if self.cursor % BLOCK + whole > BLOCK {
            self.cursor = self.cursor.next_multiple_of(BLOCK);
        }
        let nid = self.cursor / SLOT;
        self.cursor = (self.cursor + (head + tail) as u64).next_multiple_of(SLOT);
        let block = match &inode.kind {
            Kind::File(extent) => extent.block,
            _ => self.next_block,
        };
        let own_blocks = u32::try_from(own_blocks).map_err(|_| too_big())?;
        self.next_block = self
            .next_block
            .checked_add(own_blocks)
            .ok_or_else(too_big)?;
        let layout = if tail == 0 {
            Layout::Plain
        } else {
            Layout::Inline
        };
        let ino = u32::try_from(self.order.len() + 1).map_err(|_| too_big())?;
        self.placed[index(id)] = Some(Placed {
            nid,
            ino,
            layout,
            size,
            block,
        });
        self.order.push((id, parent));
        Ok(())
    }

    /// The names of a directory in the order on disk.
    fn names(&self, dir: InodeId) -> Result<Vec<&'a [u8]>> {
        let mut names: Vec<&[u8]> = self
            .tree
            .dir(dir)?
            .entries
            .keys()
            .map(|name| &**name)
            .collect();
        names.extend([&b"."[..], b".."]);
        // Names such as "!" or "+x" sort before the dots.
        names.sort_unstable();
        Ok(names)
    }

    fn directory_size(&self, dir: InodeId) -> Result<u64> {
        let names = self.names(dir)?;
        let mut chunks = chunks(&names).peekable();
        let mut size = 0;
        while let Some(chunk) = chunks.next() {
            size += match chunks.peek() {
                Some(_) => BLOCK,
                None => chunk.iter().map(|name| (DIRENT + name.len()) as u64).sum(),
            };
        }
        Ok(size)
    }

    fn directory_bytes(&self, dir: InodeId, parent: InodeId) -> Result<Vec<u8>> {
        let entries = &self.tree.dir(dir)?.entries;
        let names = self.names(dir)?;
        let mut out = Vec::new();
        for chunk in chunks(&names) {
            // All but the last block are full size; here the previous one is padded.
            out.resize(out.len().next_multiple_of(BLOCK_USIZE), 0);
            let mut offset = chunk.len() * DIRENT;
            for name in chunk {
                let id = match *name {
                    b"." => dir,
                    b".." => parent,
                    name => entries.get(name).map_or(ROOT, |entry| entry.inode),
                };
                let at = u16::try_from(offset).map_err(|_| too_big())?;
                let nid = self.placed(id)?.nid;
                out.extend_from_slice(&format::dirent(
                    nid,
                    at,
                    file_type(&self.tree.inode(id)?.kind),
                ));
                offset += name.len();
            }
            for name in chunk {
                out.extend_from_slice(name);
            }
        }
        Ok(out)
    }

    /// Directory blocks and symlinks too long to be inline, in the order of the inodes.
    fn write_blocks(&self, out: &mut Output<'_>) -> Result<()> {
        for (id, parent) in &self.order {
            let placed = self.placed(*id)?;
            let bytes = match &self.tree.inode(*id)?.kind {
                Kind::Dir(_) => self.directory_bytes(*id, *parent)?,
                Kind::Symlink(target) => target.to_vec(),
                _ => continue,
            };
            let in_blocks = match placed.layout {
                Layout::Plain => bytes.len(),
                Layout::Inline => bytes.len() / BLOCK_USIZE * BLOCK_USIZE,
            };
            out.write(&bytes[..in_blocks])?;
            out.pad_to(BLOCK)?;
        }
        Ok(())
    }

    fn write_inodes(&self, out: &mut Output<'_>, spool: &File) -> Result<()> {
        let start = out.position;
        let mut tail = vec![0; BLOCK_USIZE];
        for (id, parent) in &self.order {
            let inode = self.tree.inode(*id)?;
            let placed = self.placed(*id)?;
            out.pad_until(start + placed.nid * SLOT)?;
            let a = &inode.attributes;
            let nlink = match &inode.kind {
                Kind::Dir(dir) => self.subdirectories(&dir.entries)?,
                _ => inode.nlink,
            };
            let union = match &inode.kind {
                Kind::CharDevice(device) | Kind::BlockDevice(device) => *device,
                Kind::Fifo | Kind::Socket => 0,
                _ => placed.block,
            };
            let raw = format::Inode {
                layout: placed.layout,
                xattr_bytes: a.xattrs.len(),
                mode: (a.mode & 0o7777) | type_bits(&inode.kind),
                size: placed.size,
                union,
                ino: placed.ino,
                uid: a.uid,
                gid: a.gid,
                mtime: a.mtime,
                mtime_ns: a.mtime_ns,
                nlink,
            };
            out.write(&raw.encode())?;
            out.write(a.xattrs.bytes())?;
            if placed.layout == Layout::Plain {
                continue;
            }
            match &inode.kind {
                Kind::File(extent) => {
                    let tail = &mut tail[..extent.tail_len()];
                    read_tail(spool, extent.tail.unwrap_or(0), tail)
                        .map_err(Error::io("cannot read back file contents"))?;
                    out.write(tail)?;
                }
                Kind::Dir(_) => {
                    let bytes = self.directory_bytes(*id, *parent)?;
                    out.write(&bytes[bytes.len() / BLOCK_USIZE * BLOCK_USIZE..])?;
                }
                Kind::Symlink(target) => out.write(target)?,
                Kind::CharDevice(_) | Kind::BlockDevice(_) | Kind::Fifo | Kind::Socket => {}
            }
        }
        Ok(())
    }

    /// A directory's link count: itself, its name, and the `..` of each directory in it.
    fn subdirectories(
        &self,
        entries: &std::collections::BTreeMap<Box<[u8]>, super::tree::Dirent>,
    ) -> Result<u32> {
        let mut count = 2;
        for entry in entries.values() {
            if matches!(self.tree.inode(entry.inode)?.kind, Kind::Dir(_)) {
                count += 1;
            }
        }
        Ok(count)
    }
}

/// Reads from the spool. It ends early where the last tails are holes.
fn read_tail(spool: &File, mut at: u64, mut tail: &mut [u8]) -> io::Result<()> {
    while !tail.is_empty() {
        match spool.read_at(tail, at)? {
            0 => {
                tail.fill(0);
                return Ok(());
            }
            n => {
                at += n as u64;
                tail = &mut tail[n..];
            }
        }
    }
    Ok(())
}

/// Splits sorted names into runs that fill at most one directory block each.
fn chunks<'n>(names: &'n [&'n [u8]]) -> impl Iterator<Item = &'n [&'n [u8]]> {
    let mut rest = names;
    std::iter::from_fn(move || {
        let mut used = 0;
        let fit = rest
            .iter()
            .take_while(|name| {
                used += DIRENT + name.len();
                used <= BLOCK_USIZE
            })
            .count();
        let (chunk, after) = rest.split_at(fit);
        rest = after;
        (!chunk.is_empty()).then_some(chunk)
    })
}

fn type_bits(kind: &Kind) -> u16 {
    match kind {
        Kind::Fifo => 0o010_000,
        Kind::CharDevice(_) => 0o020_000,
        Kind::Dir(_) => 0o040_000,
        Kind::BlockDevice(_) => 0o060_000,
        Kind::File(_) => 0o100_000,
        Kind::Symlink(_) => 0o120_000,
        Kind::Socket => 0o140_000,
    }
}

/// Linux `FT_*` values.
fn file_type(kind: &Kind) -> u8 {
    match kind {
        Kind::File(_) => 1,
        Kind::Dir(_) => 2,
        Kind::CharDevice(_) => 3,
        Kind::BlockDevice(_) => 4,
        Kind::Fifo => 5,
        Kind::Socket => 6,
        Kind::Symlink(_) => 7,
    }
}

fn too_big() -> Error {
    Error::Limit {
        what: "image".to_owned(),
        limit: u64::from(u32::MAX),
        unit: "blocks or inodes",
    }
}

fn failed() -> impl FnOnce(io::Error) -> Error {
    Error::io("cannot write image metadata to the image store")
}

/// A buffered, hashed writer that knows its position in the image.
struct Output<'f> {
    file: BufWriter<&'f File>,
    hasher: Hasher,
    position: u64,
}

impl<'f> Output<'f> {
    fn new(mut file: &'f File, position: u64, seed: &[u8]) -> Result<Self> {
        file.seek(SeekFrom::Start(position)).map_err(failed())?;
        let mut hasher = Hasher::new(Algorithm::Sha256);
        hasher.update(seed);
        Ok(Self {
            file: BufWriter::with_capacity(256 * 1024, file),
            hasher,
            position,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.position += bytes.len() as u64;
        self.file.write_all(bytes).map_err(failed())
    }

    fn pad_to(&mut self, multiple: u64) -> Result<()> {
        self.pad_until(self.position.next_multiple_of(multiple))
    }

    fn pad_until(&mut self, end: u64) -> Result<()> {
        let zeros = [0; BLOCK_USIZE];
        while self.position < end {
            let n =
                usize::try_from(end - self.position).map_or(BLOCK_USIZE, |n| n.min(BLOCK_USIZE));
            self.write(&zeros[..n])?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<[u8; 16]> {
        self.file.flush().map_err(failed())?;
        let digest = self.hasher.finish();
        let mut uuid = [0; 16];
        for (byte, pair) in uuid.iter_mut().zip(digest.hex().as_bytes().chunks(2)) {
            *byte = std::str::from_utf8(pair)
                .ok()
                .and_then(|p| u8::from_str_radix(p, 16).ok())
                .unwrap_or(0);
        }
        // A UUID of version 8, "custom" (RFC 9562).
        uuid[6] = (uuid[6] & 0x0f) | 0x80;
        uuid[8] = (uuid[8] & 0x3f) | 0x80;
        Ok(uuid)
    }
}
