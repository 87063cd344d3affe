//! Reading the entries of an archive that anyone may have made.

use std::io::{self, ErrorKind, Read};

use tar::Header;

use crate::header::{BLOCK, Entry, Kind, padding};
use crate::{Error, MAX_NAME, pax};

/// Most bytes after the end of an archive: tar programs fill up a record of 10 KiB, at most
/// one of 1 MiB.
const MAX_TRAILER: u64 = 1 << 20;

/// Most extended headers before one entry.
const MAX_EXTENSIONS: usize = 16;

/// Reads an archive entry by entry.
pub(crate) struct Reader<'a> {
    stream: &'a mut dyn Read,
    /// Bytes of the current entry's contents that were not read.
    left: u64,
    /// Bytes after them.
    padding: usize,
}

/// What extended headers say about the entry after them.
#[derive(Default)]
struct Extended {
    name: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<(i64, u32)>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(stream: &'a mut dyn Read) -> Self {
        Self {
            stream,
            left: 0,
            padding: 0,
        }
    }

    /// The next entry; `None` at the end of the archive, which is then the end of the stream.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>, Error> {
        self.skip()?;
        let mut extended = Extended::default();
        for _ in 0..=MAX_EXTENSIONS {
            let Some(header) = self.header()? else {
                self.finish()?;
                return Ok(None);
            };
            match header.as_bytes()[156] {
                b'x' => {
                    let records = self.extension(&header, pax::MAX_HEADER)?;
                    extended.take(&records)?;
                }
                // Comments, as of git archive; what else it may say holds for no one here.
                b'g' => drop(self.extension(&header, pax::MAX_HEADER)?),
                b'L' => extended.name = Some(self.long_name(&header)?),
                b'K' => extended.target = Some(self.long_name(&header)?),
                // A volume's label.
                b'V' => drop(self.extension(&header, pax::MAX_HEADER)?),
                flag => {
                    let entry = extended.entry(&header, flag)?;
                    self.left = entry.size;
                    self.padding = padding(entry.size);
                    return Ok(Some(entry));
                }
            }
        }
        Err(Error::archive("has too many extended headers", b""))
    }

    /// Reads contents of the current entry; 0 at their end.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let wanted = usize::try_from(self.left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        if wanted == 0 {
            return Ok(0);
        }
        let count = read_some(self.stream, buffer.get_mut(..wanted).unwrap_or_default())?;
        if count == 0 {
            return Err(truncated());
        }
        self.left = self.left.saturating_sub(count as u64);
        Ok(count)
    }

    /// Passes over what is left of the current entry.
    fn skip(&mut self) -> Result<(), Error> {
        let mut buffer = vec![0; if self.left == 0 { BLOCK } else { 64 << 10 }];
        while self.read(&mut buffer)? > 0 {}
        let padding = std::mem::take(&mut self.padding);
        let rest = buffer.get_mut(..padding).unwrap_or_default();
        match self.fill(rest)? {
            // Some programs leave the padding of the last entry out.
            0 => Ok(()),
            count if count == padding => Ok(()),
            _ => Err(truncated()),
        }
    }

    /// The next header block; `None` at the end-of-archive mark or the end of the stream.
    fn header(&mut self) -> Result<Option<Header>, Error> {
        let mut header = Header::new_old();
        match self.fill(header.as_mut_bytes())? {
            0 => return Ok(None),
            BLOCK => {}
            _ => return Err(truncated()),
        }
        let bytes = header.as_bytes();
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let sum: u32 = bytes
            .iter()
            .enumerate()
            .map(|(at, byte)| {
                u32::from(if (148..156).contains(&at) {
                    b' '
                } else {
                    *byte
                })
            })
            .sum();
        if header.cksum().ok() != Some(sum) {
            return Err(Error::archive("is damaged, or no tar archive at all", b""));
        }
        Ok(Some(header))
    }

    /// The contents of a header that extends another.
    fn extension(&mut self, header: &Header, max: u64) -> Result<Vec<u8>, Error> {
        let size = number(header.entry_size(), b"")?;
        if size > max {
            return Err(Error::archive("has too long an extended header", b""));
        }
        let mut bytes = vec![0; usize::try_from(size).unwrap_or_default()];
        let length = bytes.len();
        if self.fill(&mut bytes)? != length {
            return Err(truncated());
        }
        self.padding = padding(size);
        self.skip()?;
        Ok(bytes)
    }

    /// The text of GNU's `L` or `K` header, which ends with a NUL byte.
    fn long_name(&mut self, header: &Header) -> Result<Vec<u8>, Error> {
        let mut name = self.extension(header, MAX_NAME as u64 + 1)?;
        while name.last() == Some(&0) {
            name.pop();
        }
        Ok(name)
    }

    /// Reads on to the end of the stream.
    fn finish(&mut self) -> Result<(), Error> {
        let mut buffer = [0; 4096];
        let mut total = 0_u64;
        loop {
            match read_some(self.stream, &mut buffer)? {
                0 => return Ok(()),
                count => total += count as u64,
            }
            if total > MAX_TRAILER {
                return Err(Error::archive("goes on after its end", b""));
            }
        }
    }

    /// Fills `buffer`, or less of it at the end of the stream.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match read_some(self.stream, rest)? {
                0 => break,
                count => filled += count,
            }
        }
        Ok(filled)
    }
}

impl Extended {
    fn take(&mut self, records: &[u8]) -> Result<(), Error> {
        pax::parse(records, |keyword, value| {
            match keyword {
                b"path" => self.name = Some(value.to_vec()),
                b"linkpath" => self.target = Some(value.to_vec()),
                b"size" => self.size = Some(pax::number(value)?),
                b"uid" => self.uid = Some(pax::number(value)?),
                b"gid" => self.gid = Some(pax::number(value)?),
                b"mtime" => self.mtime = Some(pax::time(value)?),
                keyword if keyword.starts_with(b"GNU.sparse.") => {
                    let name = self.name.as_deref().unwrap_or_default();
                    return Err(Error::archive(
                        "holds a sparse file; write it plainly",
                        name,
                    ));
                }
                _ => {}
            }
            Ok(())
        })
    }

    fn entry(self, header: &Header, flag: u8) -> Result<Entry, Error> {
        let name = self
            .name
            .unwrap_or_else(|| header.path_bytes().into_owned());
        let target = self
            .target
            .or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned));
        let target = || {
            target
                .filter(|target| !target.is_empty())
                .ok_or_else(|| Error::archive("holds a link without a target", &name))
        };
        let kind = match flag {
            // Before POSIX a directory was a file whose name ends with a slash.
            b'0' | b'7' | 0 if name.last() == Some(&b'/') => Kind::Directory,
            b'0' | b'7' | 0 => Kind::File,
            b'1' => Kind::Link(target()?),
            b'2' => Kind::Symlink(target()?),
            b'3' | b'4' => Kind::Device,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            b'S' => {
                return Err(Error::archive(
                    "holds a sparse file; write it plainly",
                    &name,
                ));
            }
            _ => return Err(Error::archive("holds an entry of unknown type", &name)),
        };
        let size = match self.size {
            Some(size) => size,
            None => number(header.entry_size(), &name)?,
        };
        if size != 0 && kind != Kind::File {
            return Err(Error::archive("holds contents of what has none", &name));
        }
        let mtime = match self.mtime {
            Some(mtime) => mtime,
            None => (number(header.mtime(), &name).map(clamp)?, 0),
        };
        let owner = |extended: Option<u64>, plain: io::Result<u64>| {
            let id = match extended {
                Some(id) => id,
                None => number(plain, &name)?,
            };
            // The last one stands for "no change" in chown(2).
            u32::try_from(id)
                .ok()
                .filter(|id| *id != u32::MAX)
                .ok_or_else(|| Error::archive("has too large an owner", &name))
        };
        Ok(Entry {
            kind,
            mode: header
                .mode()
                .map_err(|_| Error::archive("has a malformed header", &name))?
                & 0o7777,
            uid: owner(self.uid, header.uid())?,
            gid: owner(self.gid, header.gid())?,
            mtime,
            size,
            name,
        })
    }
}

fn clamp(seconds: u64) -> i64 {
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

fn number(value: io::Result<u64>, name: &[u8]) -> Result<u64, Error> {
    value.map_err(|_| Error::archive("has a malformed header", name))
}

fn truncated() -> Error {
    Error::archive("ends in the middle", b"")
}

fn read_some(stream: &mut dyn Read, buffer: &mut [u8]) -> Result<usize, Error> {
    loop {
        match stream.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result.map_err(Error::Stream),
        }
    }
}
