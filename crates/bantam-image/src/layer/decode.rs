//! Compression, recognised by its first bytes and never by a media type.

use std::io::{self, BufRead, BufReader, Read};

use crate::error::{Error, Result};

const BUFFER: usize = 128 * 1024;

/// How a blob is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// Judges by the first bytes, of which there may be fewer than four.
    pub(crate) fn sniff(start: &[u8]) -> Self {
        match start {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            // A skippable frame may come first.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::None,
        }
    }
}

/// Decompresses `input`: all members of a gzip stream, all frames of a zstd stream, or nothing.
pub(crate) fn decoder<'a>(input: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut input = BufReader::with_capacity(BUFFER, input);
    // A blob of fewer than four bytes is legal: an empty layer is one.
    let compression = Compression::sniff(peek(&mut input)?);
    Ok(match compression {
        Compression::None => Box::new(input),
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
        Compression::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(input)?),
    })
}

/// The buffered start of the input. A first read of one to three bytes is possible only where the input is a pipe;
/// blobs come from files.
fn peek<R: Read>(input: &mut BufReader<R>) -> io::Result<&[u8]> {
    input.fill_buf()
}

/// Counts bytes against a bound shared by all layers of an image.
pub(crate) struct Bounded<'a, R> {
    inner: R,
    left: &'a mut u64,
    limit: u64,
}

impl<'a, R: Read> Bounded<'a, R> {
    /// `left` is what remains of `limit`.
    pub(crate) fn new(inner: R, left: &'a mut u64, limit: u64) -> Self {
        Self { inner, left, limit }
    }
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        match self.left.checked_sub(n as u64) {
            Some(left) => *self.left = left,
            None => {
                return Err(io::Error::other(Error::Limit {
                    what: "decompressed image".to_owned(),
                    limit: self.limit,
                    unit: "bytes",
                }));
            }
        }
        Ok(n)
    }
}

/// Turns an error from a chain of readers into this crate's, unwrapping one that already is.
pub(crate) fn read_failed(what: &str) -> impl FnOnce(io::Error) -> Error + '_ {
    move |error| match error.downcast::<Error>() {
        Ok(ours) => ours,
        Err(error) => match error.kind() {
            io::ErrorKind::UnexpectedEof => Error::malformed(what, "ends too early"),
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::Other => {
                Error::malformed(what, format!("damaged: {error}"))
            }
            _ => Error::Io {
                what: format!("cannot read {what}"),
                source: error,
            },
        },
    }
}

/// Fills `buf`, or reads nothing at all at the end of the input. `Ok(false)` is the end.
pub(crate) fn read_block(input: &mut impl Read, buf: &mut [u8]) -> Result<bool, io::Error> {
    let mut filled = 0;
    while filled < buf.len() {
        match input.read(&mut buf[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}
