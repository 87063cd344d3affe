//! One entry of an archive, on its way into a header and out of one.

use std::io::Write;

use tar::{EntryType, Header};

use crate::{Error, pax};

/// Bytes of a tar block.
pub(crate) const BLOCK: usize = 512;

/// Bytes of the name and of the link's target that a header itself has room for.
const SHORT: usize = 100;

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A regular file; its contents follow.
    File,
    /// A directory.
    Directory,
    /// A symbolic link to this target.
    Symlink(Vec<u8>),
    /// Another name of the entry with this name.
    Link(Vec<u8>),
    /// A FIFO.
    Fifo,
    /// A device, which is never made.
    Device,
}

/// An entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: Vec<u8>,
    pub(crate) kind: Kind,
    /// Permission bits (0 to 0o7777).
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Seconds since 1970 and nanoseconds after them.
    pub(crate) mtime: (i64, u32),
    /// Bytes of contents.
    pub(crate) size: u64,
}

/// Writes the header of an entry, after an extended one if it needs that.
pub(crate) fn write(entry: &Entry, out: &mut dyn Write) -> Result<(), Error> {
    let mut name = entry.name.clone();
    let (flag, target) = match &entry.kind {
        Kind::File => (EntryType::Regular, &b""[..]),
        Kind::Directory => {
            name.push(b'/');
            (EntryType::Directory, &b""[..])
        }
        Kind::Symlink(target) => (EntryType::Symlink, &target[..]),
        Kind::Link(target) => (EntryType::Link, &target[..]),
        Kind::Fifo => (EntryType::Fifo, &b""[..]),
        Kind::Device => return Ok(()),
    };
    let (seconds, nanos) = entry.mtime;
    let mut records = Vec::new();
    if name.len() > SHORT {
        pax::push(&mut records, "path", &name);
    }
    if target.len() > SHORT {
        pax::push(&mut records, "linkpath", target);
    }
    if !records.is_empty()
        && [&name[..], target]
            .iter()
            .any(|text| str::from_utf8(text).is_err())
    {
        let mut charset = Vec::new();
        pax::push(&mut charset, "hdrcharset", b"BINARY");
        records.splice(0..0, charset);
    }
    if nanos != 0 || seconds < 0 {
        let text = pax::time_text(seconds, nanos);
        pax::push(&mut records, "mtime", text.as_bytes());
    }
    if !records.is_empty() {
        let mut header = blank(b"pax header");
        header.set_entry_type(EntryType::XHeader);
        header.set_size(records.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_cksum();
        let padding = padding(records.len() as u64);
        records.resize(records.len() + padding, 0);
        out.write_all(header.as_bytes()).map_err(Error::Stream)?;
        out.write_all(&records).map_err(Error::Stream)?;
    }
    let mut header = blank(&name);
    header.set_entry_type(flag);
    header.set_size(entry.size);
    header.set_mode(entry.mode);
    header.set_uid(entry.uid.into());
    header.set_gid(entry.gid.into());
    header.set_mtime(u64::try_from(seconds).unwrap_or_default());
    copy_into(&mut header.as_old_mut().linkname, target);
    header.set_cksum();
    out.write_all(header.as_bytes()).map_err(Error::Stream)
}

fn blank(name: &[u8]) -> Header {
    let mut header = Header::new_ustar();
    copy_into(&mut header.as_old_mut().name, name);
    header
}

fn copy_into(field: &mut [u8; SHORT], text: &[u8]) {
    for (to, from) in field.iter_mut().zip(text) {
        *to = *from;
    }
}

/// Bytes after contents of `size` bytes, up to a whole block.
pub(crate) fn padding(size: u64) -> usize {
    let rest = usize::try_from(size % BLOCK as u64).unwrap_or_default();
    (BLOCK - rest) % BLOCK
}
