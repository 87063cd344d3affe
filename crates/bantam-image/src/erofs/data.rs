//! The data area: file contents, streamed straight into the image.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::format::{BLOCK, BLOCK_USIZE, INODE};
use super::xattr::Xattrs;
use crate::error::{Error, Result};
use crate::sys;

/// Files of fewer bytes than this keep their last partial block beside the inode.
pub const TAIL_PACKED_BELOW: u64 = 4 * BLOCK;

/// Where a file's contents are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes in the file.
    pub(crate) size: u64,
    /// First block in the image.
    pub(super) block: u32,
    /// Number of blocks in the image.
    pub(super) blocks: u32,
    /// Where in the spool the bytes beyond those blocks are.
    pub(super) tail: Option<u64>,
}

impl Extent {
    pub(super) fn tail_len(&self) -> usize {
        match self.tail {
            Some(_) => usize::try_from(self.size - u64::from(self.blocks) * BLOCK).unwrap_or(0),
            None => 0,
        }
    }
}

/// Receives file contents one after another.
pub struct DataArea {
    pub(super) image: File,
    pub(super) spool: File,
    spool_len: u64,
    pub(super) next_block: u32,
    max_bytes: u64,
    dead: Vec<(u32, u32)>,
}

impl DataArea {
    /// `image` is an empty file for the result; `spool` an empty scratch file; `max_bytes` bounds the image.
    pub fn new(image: File, spool: File, max_bytes: u64) -> Self {
        // Block numbers have 32 bits; the last is left free for rounding.
        let max_bytes = max_bytes.min((u64::from(u32::MAX) - 1) * BLOCK);
        Self {
            image,
            spool,
            spool_len: 0,
            next_block: 1,
            max_bytes,
            dead: Vec::new(),
        }
    }

    /// Begins a file of exactly `size` bytes with these extended attributes: how long they are decides where the
    /// file's last bytes go. [`write`](super::write) refuses a file that has others in the tree and no room for them.
    pub fn begin(&mut self, size: u64, xattrs: &Xattrs) -> Result<ContentWriter<'_>> {
        let tail = size % BLOCK;
        let head = (INODE + xattrs.len()) as u64;
        let inline = tail != 0 && size < TAIL_PACKED_BELOW && head + tail <= BLOCK;
        let blocks = if inline {
            size / BLOCK
        } else {
            size.div_ceil(BLOCK)
        };
        let end = u64::from(self.next_block)
            .checked_add(blocks)
            .filter(|end| *end <= self.max_bytes / BLOCK);
        let (Some(end), Ok(blocks)) = (end, u32::try_from(blocks)) else {
            return Err(Error::Limit {
                what: "image".to_owned(),
                limit: self.max_bytes,
                unit: "bytes",
            });
        };
        let extent = Extent {
            size,
            block: self.next_block,
            blocks,
            tail: inline.then_some(self.spool_len),
        };
        self.next_block = u32::try_from(end).unwrap_or(u32::MAX);
        if inline {
            self.spool_len += tail;
        }
        Ok(ContentWriter {
            area: self,
            extent,
            position: 0,
        })
    }

    /// Gives up the contents of a file that is no longer in the image.
    pub fn release(&mut self, extent: &Extent) {
        if extent.blocks != 0 {
            self.dead.push((extent.block, extent.blocks));
        }
    }

    /// Takes given-up contents out of the file.
    pub(super) fn punch(&mut self) -> Result<()> {
        for (block, blocks) in self.dead.drain(..) {
            sys::punch_hole(
                &self.image,
                u64::from(block) * BLOCK,
                u64::from(blocks) * BLOCK,
            )
            .map_err(Error::io("cannot remove replaced contents from the image"))?;
        }
        Ok(())
    }
}

/// Writes one file's contents.
#[must_use = "contents count only once finished"]
pub struct ContentWriter<'a> {
    area: &'a mut DataArea,
    extent: Extent,
    position: u64,
}

impl ContentWriter<'_> {
    /// Appends bytes. Errors if the file would become longer than announced.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        if self
            .position
            .checked_add(bytes.len() as u64)
            .is_none_or(|end| end > self.extent.size)
        {
            return Err(Error::malformed("file contents", "longer than announced"));
        }
        let in_blocks = u64::from(self.extent.blocks) * BLOCK;
        let base = u64::from(self.extent.block) * BLOCK;
        while !bytes.is_empty() && self.position < in_blocks {
            // Up to the next block boundary, so that whole zero blocks can be left as holes.
            let room = BLOCK_USIZE - usize::try_from(self.position % BLOCK).unwrap_or(0);
            let mut run = room.min(bytes.len());
            if is_zero(&bytes[..run]) {
                self.position += run as u64;
                bytes = &bytes[run..];
                continue;
            }
            while run < bytes.len() && self.position + (run as u64) < in_blocks {
                let next = (run + BLOCK_USIZE).min(bytes.len());
                if is_zero(&bytes[run..next]) {
                    break;
                }
                run = next;
            }
            let run = usize::try_from(in_blocks - self.position).map_or(run, |left| run.min(left));
            self.area
                .image
                .write_all_at(&bytes[..run], base + self.position)
                .map_err(write_failed())?;
            self.position += run as u64;
            bytes = &bytes[run..];
        }
        if let (Some(tail), false) = (self.extent.tail, bytes.is_empty()) {
            let at = tail + (self.position - in_blocks);
            self.area
                .spool
                .write_all_at(bytes, at)
                .map_err(write_failed())?;
            self.position += bytes.len() as u64;
        }
        Ok(())
    }

    /// Appends a hole: `bytes` zero bytes that take no space on the host.
    pub fn skip(&mut self, bytes: u64) -> Result<()> {
        let end = self
            .position
            .checked_add(bytes)
            .filter(|end| *end <= self.extent.size);
        self.position =
            end.ok_or_else(|| Error::malformed("file contents", "longer than announced"))?;
        Ok(())
    }

    /// Ends the file. Errors unless exactly the announced number of bytes came.
    pub fn finish(self) -> Result<Extent> {
        if self.position != self.extent.size {
            return Err(Error::malformed("file contents", "shorter than announced"));
        }
        Ok(self.extent)
    }
}

fn write_failed() -> impl FnOnce(std::io::Error) -> Error {
    Error::io("cannot write file contents to the image store")
}

fn is_zero(bytes: &[u8]) -> bool {
    let (head, words, tail) = (bytes.first(), bytes.chunks_exact(16), bytes.last());
    // Most data differs from zero at once; look at the ends before all of it.
    head == Some(&0)
        && tail == Some(&0)
        && words.remainder().iter().all(|b| *b == 0)
        && bytes.chunks_exact(16).all(|w| w == [0; 16])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::erofs::{Attributes, Kind, Tree, write};
    use crate::limits::Limits;

    fn xattrs(len: usize) -> Xattrs {
        let map = BTreeMap::from([(b"user.a".to_vec(), vec![1; len])]);
        Xattrs::encode("f", &map).unwrap()
    }

    /// An image of one file of `size` bytes, begun with some attributes and put into the tree with others.
    fn image(size: u64, begun: Xattrs, inserted: Xattrs) -> Result<u64> {
        let file = || tempfile::tempfile().unwrap();
        let mut area = DataArea::new(file(), file(), 1 << 30);
        let mut writer = area.begin(size, &begun)?;
        writer.skip(size)?;
        let kind = Kind::File(writer.finish()?);
        let attributes = Attributes {
            xattrs: inserted,
            ..Attributes::default()
        };
        let mut tree = Tree::new(Limits::default());
        tree.insert(tree.root(), b"f", attributes, kind, 1)?;
        Ok(write(&tree, area, b"")?.1.bytes)
    }

    #[test]
    fn contents_begun_with_other_attributes_are_refused_when_they_do_not_fit() {
        // 4000 bytes and the inode fill a block but for 32 bytes.
        assert!(image(4000, Xattrs::default(), Xattrs::default()).is_ok());
        let error = image(4000, Xattrs::default(), xattrs(100)).unwrap_err();
        assert!(error.to_string().contains("attributes"), "{error}");
        // No bytes are beside the inode then, so any attributes fit.
        assert!(image(4000, xattrs(100), Xattrs::default()).is_ok());
        assert!(image(4096, Xattrs::default(), xattrs(5000)).is_ok());
    }

    #[test]
    fn contents_are_exactly_as_long_as_announced() {
        let file = || tempfile::tempfile().unwrap();
        let mut area = DataArea::new(file(), file(), 1 << 30);
        let mut writer = area.begin(3, &Xattrs::default()).unwrap();
        writer.write(b"ab").unwrap();
        assert!(writer.write(b"cd").is_err());
        assert!(writer.skip(2).is_err());
        assert!(writer.finish().is_err());
        assert!(
            area.begin(1 << 30, &Xattrs::default()).is_err(),
            "the limit"
        );
        assert!(area.begin(u64::MAX, &Xattrs::default()).is_err());
    }
}
