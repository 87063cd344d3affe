//! Reads tar archives: v7, POSIX (PAX), GNU and star, with sparse files.
//!
//! Of the `tar` crate only the header layouts are used. Its entry iterator applies neither the PAX sparse formats
//! nor negative times, refuses signed checksums, and reads extension headers without a bound that is ours.

use std::collections::BTreeMap;
use std::io::{self, Read};

use tar::Header;

use super::decode::{read_block, read_failed};
use super::header::{self, BLOCK};
use super::pax::{Pax, decimal};
use crate::erofs::ContentWriter;
use crate::error::{Error, Result};
use crate::limits::{MAX_EXTENSION, MAX_PATH, MAX_SPARSE_EXTENTS};

/// What an archive entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    File,
    HardLink,
    Symlink,
    CharDevice,
    BlockDevice,
    Dir,
    Fifo,
}

/// One entry with all its extensions applied.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) kind: EntryKind,
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    /// Bytes of the file once unpacked.
    pub(crate) size: u64,
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: i64,
    pub(crate) mtime_ns: u32,
    pub(crate) device: (u32, u32),
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Where the stored bytes belong, when not simply one after another.
    sparse: Option<Vec<(u64, u64)>>,
}

impl Entry {
    /// Whether the stored bytes are the contents as they are.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.sparse.is_none()
    }
}

/// Where the stored bytes of a sparse file belong.
struct Sparse {
    /// Offset and length, in order.
    extents: Vec<(u64, u64)>,
    /// Size of the whole file.
    size: u64,
}

/// A streaming reader of archive entries.
pub(crate) struct TarReader<R> {
    input: R,
    what: String,
    position: u64,
    /// Stored bytes of the current entry that are unread, and the padding after them.
    unread: u64,
    padding: u64,
    done: bool,
    skip: Skip<R>,
}

/// Goes past so many bytes of an input, or fails with `UnexpectedEof`.
type Skip<R> = fn(&mut R, u64) -> io::Result<()>;

impl<R: Read> TarReader<R> {
    /// `what` names the archive in errors.
    pub(crate) fn new(input: R, what: impl Into<String>) -> Self {
        Self {
            input,
            what: what.into(),
            position: 0,
            unread: 0,
            padding: 0,
            done: false,
            skip: read_past,
        }
    }

    /// Goes past what nobody reads with `skip`, and not by reading it.
    pub(crate) fn skipping_with(self, skip: Skip<R>) -> Self {
        Self { skip, ..self }
    }

    /// The offset of the current entry's stored bytes in the archive.
    pub(crate) fn data_offset(&self) -> u64 {
        self.position
    }

    /// The reader behind, at the end of the archive or wherever reading stopped.
    pub(crate) fn into_inner(self) -> R {
        self.input
    }

    /// The next entry. An archive may end without its end mark, but not inside an entry.
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>> {
        let mut pax = None;
        let mut long_name = None;
        let mut long_link = None;
        loop {
            self.skip_rest()?;
            let Some(header) = self.read_header()? else {
                if pax.is_some() || long_name.is_some() || long_link.is_some() {
                    return Err(self.bad("an extended header without an entry"));
                }
                return Ok(None);
            };
            let size = header::number(&header.as_old().size)
                .and_then(|n| u64::try_from(n).ok())
                .ok_or_else(|| self.bad("an entry's size is not a number"))?;
            match header.as_old().linkflag[0] {
                // An extended header is for the next real entry, whatever other headers come between.
                b'x' | b'X' => {
                    let bytes = self.read_extension(size)?;
                    pax =
                        Some(Pax::parse(&bytes).ok_or_else(|| self.bad("a malformed PAX header"))?);
                }
                // Global headers hold comments and checksums of whole archives; tools ignore them, and so do we.
                b'g' => self.begin_data(size)?,
                b'L' => long_name = Some(self.read_long(size)?),
                b'K' => long_link = Some(self.read_long(size)?),
                // GNU volume label.
                b'V' => self.begin_data(size)?,
                _ => {
                    return self
                        .entry(&header, size, pax.unwrap_or_default(), long_name, long_link)
                        .map(Some);
                }
            }
        }
    }

    /// Streams the current entry's contents.
    pub(crate) fn copy_contents(
        &mut self,
        entry: &Entry,
        out: &mut ContentWriter<'_>,
        buf: &mut [u8],
    ) -> Result<()> {
        let whole = [(0, entry.size)];
        let mut at = 0;
        for (offset, len) in entry.sparse.as_deref().unwrap_or(&whole) {
            out.skip(offset - at)?;
            let mut left = *len;
            while left > 0 {
                let want = usize::try_from(left).map_or(buf.len(), |n| n.min(buf.len()));
                let n = self.read_data(&mut buf[..want])?;
                out.write(&buf[..n])?;
                left -= n as u64;
            }
            at = offset + len;
        }
        out.skip(entry.size - at)
    }

    fn entry(
        &mut self,
        header: &Header,
        size: u64,
        mut pax: Pax,
        long_name: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<Entry> {
        let field = |field: &[u8]| header::number(field);
        let old = header.as_old();
        let flag = old.linkflag[0];
        let mut path = long_name
            .or(pax.path.take())
            .unwrap_or_else(|| header::path(header));
        let link = long_link
            .or(pax.link.take())
            .unwrap_or_else(|| header::text(&old.linkname).to_vec());
        let mut kind = match flag {
            // '7' is a contiguous file, which is a file.
            b'0' | 0 | b'7' | b'S' => EntryKind::File,
            b'1' => EntryKind::HardLink,
            b'2' => EntryKind::Symlink,
            b'3' => EntryKind::CharDevice,
            b'4' => EntryKind::BlockDevice,
            // 'D' is a directory with a list of its names as data.
            b'5' | b'D' => EntryKind::Dir,
            b'6' => EntryKind::Fifo,
            other => {
                return Err(self.bad(&format!(
                    "entry {} has the unknown type {:?}",
                    String::from_utf8_lossy(&path),
                    char::from(other)
                )));
            }
        };
        // Before there was a type for directories, a trailing slash marked them. Tools disagree on whether such an
        // entry has data, and so on where the next one starts.
        if kind == EntryKind::File && path.ends_with(b"/") {
            if pax.size.unwrap_or(size) != 0 {
                return Err(self.bad(&format!(
                    "entry {} is a directory with contents",
                    String::from_utf8_lossy(&path)
                )));
            }
            kind = EntryKind::Dir;
        }
        // Only files have data, whatever the size field of others says; GNU's dump directories are the exception.
        let stored = match (kind, flag) {
            (EntryKind::File, _) | (_, b'D') => pax.size.unwrap_or(size),
            _ => 0,
        };
        self.begin_data(stored)?;
        let mut sparse = None;
        let mut real_size = stored;
        if kind == EntryKind::File
            && let Some(found) = self.sparse(header, flag, &mut pax, &mut path)?
        {
            self.check_sparse(&found)?;
            real_size = found.size;
            sparse = Some(found.extents);
        }
        for name in [&path, &link] {
            if name.len() > MAX_PATH {
                return Err(Error::Limit {
                    what: format!("{}: path of an entry", self.what),
                    limit: MAX_PATH as u64,
                    unit: "bytes",
                });
            }
        }
        let name = || String::from_utf8_lossy(&path).into_owned();
        let bad = |why: &str| Error::malformed(&self.what, format!("entry {}: {why}", name()));
        let owner = |pax: Option<u64>, raw: &[u8]| {
            let value = match pax {
                Some(value) => Some(value),
                None => field(raw).and_then(|n| u64::try_from(n).ok()),
            };
            value
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| bad("its owner is out of range"))
        };
        let (mtime, mtime_ns) = match pax.mtime {
            Some(time) => time,
            None => (
                field(&old.mtime).ok_or_else(|| bad("its time is not a number"))?,
                0,
            ),
        };
        let mode = field(&old.mode).ok_or_else(|| bad("its mode is not a number"))?;
        let device = match kind {
            EntryKind::CharDevice | EntryKind::BlockDevice => header::device(header)
                .and_then(|(major, minor)| {
                    Some((u32::try_from(major).ok()?, u32::try_from(minor).ok()?))
                })
                .ok_or_else(|| bad("its device number is out of range"))?,
            _ => (0, 0),
        };
        let uid = owner(pax.uid, &old.uid)?;
        let gid = owner(pax.gid, &old.gid)?;
        Ok(Entry {
            kind,
            link,
            size: if kind == EntryKind::File {
                real_size
            } else {
                0
            },
            mode: u16::try_from(mode & 0o7777).unwrap_or(0),
            uid,
            gid,
            mtime,
            mtime_ns,
            device,
            xattrs: pax.xattrs,
            sparse,
            path,
        })
    }

    /// The extents and real size of a sparse file, in any of GNU's four ways.
    fn sparse(
        &mut self,
        header: &Header,
        flag: u8,
        pax: &mut Pax,
        path: &mut Vec<u8>,
    ) -> Result<Option<Sparse>> {
        if flag == b'S' {
            return self.old_gnu_sparse(header).map(Some);
        }
        let sparse = &mut pax.sparse;
        if let Some(name) = sparse.name.take() {
            *path = name;
        }
        let is_1_0 = sparse.major == Some(1) && sparse.minor == Some(0);
        if !is_1_0 && !sparse.has_map {
            return Ok(None);
        }
        let real_size = sparse
            .real_size
            .ok_or_else(|| Error::malformed(&self.what, "a sparse file without a size"))?;
        let numbers = if is_1_0 {
            self.read_sparse_map()?
        } else {
            std::mem::take(&mut sparse.map)
        };
        if numbers.len() % 2 != 0 || numbers.len() / 2 > MAX_SPARSE_EXTENTS {
            return Err(self.bad("a sparse file's map is malformed"));
        }
        let extents = numbers
            .chunks_exact(2)
            .map(|pair| (pair[0], pair[1]))
            .collect();
        Ok(Some(Sparse {
            extents,
            size: real_size,
        }))
    }

    fn old_gnu_sparse(&mut self, header: &Header) -> Result<Sparse> {
        // The extension blocks come before the data.
        let (stored, padding) = (self.unread, self.padding);
        let gnu = header
            .as_gnu()
            .ok_or_else(|| self.bad("a sparse file in an archive that is not GNU's"))?;
        let malformed = || Error::malformed(&self.what, "a sparse file's map is malformed");
        let (mut extents, mut more) = header::gnu_sparse(gnu).ok_or_else(malformed)?;
        let real_size = header::number(&gnu.realsize)
            .and_then(|n| u64::try_from(n).ok())
            .ok_or_else(malformed)?;
        let mut block = [0; BLOCK];
        while more {
            self.read_exact(&mut block)?;
            more = header::gnu_sparse_more(&block, &mut extents)
                .filter(|_| extents.len() <= MAX_SPARSE_EXTENTS)
                .ok_or_else(|| self.bad("a sparse file's map is malformed"))?;
        }
        (self.unread, self.padding) = (stored, padding);
        Ok(Sparse {
            extents,
            size: real_size,
        })
    }

    /// The map of PAX sparse format 1.0: numbers on lines at the start of the data, padded to a block.
    fn read_sparse_map(&mut self) -> Result<Vec<u64>> {
        let mut numbers = Vec::new();
        let mut line = Vec::new();
        let mut want = 1;
        let mut block = [0; BLOCK];
        loop {
            if self.unread < BLOCK as u64 {
                return Err(self.bad("a sparse file's map is cut off"));
            }
            self.unread -= BLOCK as u64;
            self.read_exact(&mut block)?;
            for byte in block {
                if byte != b'\n' {
                    line.push(byte);
                    if line.len() > 20 {
                        return Err(self.bad("a sparse file's map is malformed"));
                    }
                    continue;
                }
                let number =
                    decimal(&line).ok_or_else(|| self.bad("a sparse file's map is malformed"))?;
                line.clear();
                if numbers.is_empty() {
                    let count = usize::try_from(number)
                        .ok()
                        .filter(|n| *n <= MAX_SPARSE_EXTENTS);
                    let count = count.ok_or_else(|| self.bad("a sparse file's map is too long"))?;
                    want = 1 + 2 * count;
                }
                numbers.push(number);
                if numbers.len() == want {
                    numbers.remove(0);
                    return Ok(numbers);
                }
            }
        }
    }

    fn check_sparse(&self, sparse: &Sparse) -> Result<()> {
        let mut end = 0;
        let mut stored = 0_u64;
        for (offset, len) in &sparse.extents {
            let next = offset
                .checked_add(*len)
                .filter(|next| *offset >= end && *next <= sparse.size);
            end =
                next.ok_or_else(|| self.bad("a sparse file's extents overlap or leave the file"))?;
            stored += len;
        }
        if stored != self.unread {
            return Err(self.bad("a sparse file's extents do not match its data"));
        }
        Ok(())
    }

    /// Data of an extension header.
    fn read_extension(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > MAX_EXTENSION {
            return Err(Error::Limit {
                what: format!("{}: extended header", self.what),
                limit: MAX_EXTENSION,
                unit: "bytes",
            });
        }
        self.begin_data(size)?;
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        self.unread = 0;
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// A GNU long name: text that ends at a NUL.
    fn read_long(&mut self, size: u64) -> Result<Vec<u8>> {
        let bytes = self.read_extension(size)?;
        Ok(header::text(&bytes).to_vec())
    }

    fn begin_data(&mut self, size: u64) -> Result<()> {
        let padded = size
            .checked_next_multiple_of(BLOCK as u64)
            .ok_or_else(|| self.bad("an entry's size is absurd"))?;
        self.unread = size;
        self.padding = padded - size;
        Ok(())
    }

    /// Reads some of the current entry's stored bytes; at least one.
    fn read_data(&mut self, buf: &mut [u8]) -> Result<usize> {
        let want = usize::try_from(self.unread).map_or(buf.len(), |n| n.min(buf.len()));
        loop {
            match self.input.read(&mut buf[..want]) {
                Ok(0) => return Err(self.bad("ends inside an entry")),
                Ok(n) => {
                    self.unread -= n as u64;
                    self.position += n as u64;
                    return Ok(n);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(read_failed(&self.what)(e)),
            }
        }
    }

    fn read_exact(&mut self, buf: &mut [u8]) -> Result<()> {
        self.input
            .read_exact(buf)
            .map_err(read_failed(&self.what))?;
        self.position += buf.len() as u64;
        Ok(())
    }

    fn skip_rest(&mut self) -> Result<()> {
        let left = std::mem::take(&mut self.unread);
        (self.skip)(&mut self.input, left).map_err(read_failed(&self.what))?;
        self.position += left;
        let mut buf = [0; BLOCK];
        let padding = usize::try_from(std::mem::take(&mut self.padding)).unwrap_or(BLOCK);
        let padding = &mut buf[..padding.min(BLOCK)];
        // umoci's `insert` leaves out the padding of the last entry, with the end mark.
        if !padding.is_empty()
            && !read_block(&mut self.input, padding).map_err(read_failed(&self.what))?
        {
            self.done = true;
            return Ok(());
        }
        self.position += padding.len() as u64;
        Ok(())
    }

    /// The next header, or `None` at the end of the archive.
    fn read_header(&mut self) -> Result<Option<Header>> {
        let mut header = Header::new_old();
        if self.done || !self.read_raw_header(&mut header)? {
            self.done = true;
            return Ok(None);
        }
        if header.as_bytes().iter().all(|b| *b == 0) {
            // Two zero blocks end an archive.
            if self.read_raw_header(&mut header)? && header.as_bytes().iter().any(|b| *b != 0) {
                return Err(self.bad("a zero block among its entries"));
            }
            self.done = true;
            return Ok(None);
        }
        if !header::checksum_ok(&header) {
            return Err(self.bad("not a tar archive, or damaged (header checksum)"));
        }
        Ok(Some(header))
    }

    fn read_raw_header(&mut self, header: &mut Header) -> Result<bool> {
        let read =
            read_block(&mut self.input, header.as_mut_bytes()).map_err(read_failed(&self.what))?;
        if read {
            self.position += BLOCK as u64;
        }
        Ok(read)
    }

    fn bad(&self, why: &str) -> Error {
        Error::malformed(&self.what, why)
    }
}

fn read_past(input: &mut impl Read, mut len: u64) -> io::Result<()> {
    let mut buf = [0; 8 * 1024];
    while len > 0 {
        let n = usize::try_from(len).map_or(buf.len(), |n| n.min(buf.len()));
        input.read_exact(&mut buf[..n])?;
        len -= n as u64;
    }
    Ok(())
}
