//! The frame layer: `{u32 LE payload length, u8 kind}` and the payload.

use std::io::{ErrorKind, IoSlice, Read, Write};

use serde::{Serialize, de::DeserializeOwned};

use crate::{Error, MAX_DATA_LEN, MAX_MESSAGE_LEN, MAX_REQUEST_LEN};

/// What a frame carries; the number is its byte on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Guest to host, control: [`Hello`](crate::Hello).
    Hello = 0x01,
    /// Guest to host, control: text saying which step of the boot failed.
    BootFailed = 0x02,
    /// Guest to host, control: the guest is about to power off; empty.
    ShuttingDown = 0x03,
    /// Host to guest, control: [`Configure`](crate::Configure).
    Configure = 0x10,
    /// Host to guest, control: stop everything and power off; the grace in milliseconds.
    Shutdown = 0x11,
    /// Host to guest, control: set the wall clock; nanoseconds since 1970.
    SetClock = 0x12,
    /// Host to guest, first on its stream: [`ExecRequest`](crate::ExecRequest).
    Exec = 0x20,
    /// Host to guest, first on its stream: [`WriteFile`](crate::WriteFile).
    WriteFile = 0x21,
    /// Host to guest, first on its stream: [`ReadFile`](crate::ReadFile).
    ReadFile = 0x22,
    /// Host to guest, first on its stream: [`ReadTree`](crate::ReadTree).
    ReadTree = 0x23,
    /// Host to guest, first on its stream: [`WriteTree`](crate::WriteTree).
    WriteTree = 0x24,
    /// Host to guest, first on its stream: how the guest fares; empty.
    GetStats = 0x25,
    /// Host to guest, first on its stream: [`FileRequest`](crate::FileRequest).
    FileRequest = 0x26,
    /// Host to guest: bytes for standard input, or of the file; raw.
    Stdin = 0x28,
    /// Host to guest: no more bytes will come; empty.
    StdinEof = 0x29,
    /// Host to guest: the terminal's new [`Size`](crate::Size).
    Resize = 0x2a,
    /// Host to guest: a signal number for the process group.
    Signal = 0x2b,
    /// Host to guest: kill everything the request started; empty.
    Kill = 0x2c,
    /// Guest to host: the command runs; its process id.
    Started = 0x30,
    /// Guest to host, last: [`StartFailed`](crate::StartFailed).
    StartFailed = 0x31,
    /// Guest to host: bytes of standard output, of the terminal or of the file; raw.
    Stdout = 0x32,
    /// Guest to host: bytes of standard error; raw.
    Stderr = 0x33,
    /// Guest to host, last: [`Exit`](crate::Exit).
    Exit = 0x34,
    /// Guest to host: the file to read is open: [`FileInfo`](crate::FileInfo).
    FileOpened = 0x35,
    /// Guest to host, last: the whole file was moved; empty.
    FileDone = 0x36,
    /// Guest to host, last: [`FileFailure`](crate::FileFailure).
    FileFailed = 0x37,
    /// Guest to host: how many more bytes of standard input may be sent.
    StdinCredit = 0x38,
    /// Guest to host: the command closed its standard input; empty.
    StdinClosed = 0x39,
    /// Guest to host, last: the whole tree was moved: [`TreeSummary`](crate::TreeSummary).
    TreeDone = 0x3a,
    /// Guest to host, last: [`GuestStats`](crate::GuestStats).
    Stats = 0x3b,
    /// Guest to host: [`FileEntry`](crate::FileEntry).
    FileEntry = 0x3c,
}

impl Kind {
    const ALL: [Self; 31] = [
        Self::Hello,
        Self::BootFailed,
        Self::ShuttingDown,
        Self::Configure,
        Self::Shutdown,
        Self::SetClock,
        Self::Exec,
        Self::WriteFile,
        Self::ReadFile,
        Self::ReadTree,
        Self::WriteTree,
        Self::GetStats,
        Self::FileRequest,
        Self::Stdin,
        Self::StdinEof,
        Self::Resize,
        Self::Signal,
        Self::Kill,
        Self::Started,
        Self::StartFailed,
        Self::Stdout,
        Self::Stderr,
        Self::Exit,
        Self::FileOpened,
        Self::FileDone,
        Self::FileFailed,
        Self::StdinCredit,
        Self::StdinClosed,
        Self::TreeDone,
        Self::Stats,
        Self::FileEntry,
    ];

    /// Most bytes a payload of this kind may have.
    #[must_use]
    pub const fn max_payload(self) -> usize {
        match self {
            Self::Stdin | Self::Stdout | Self::Stderr => MAX_DATA_LEN,
            Self::Exec
            | Self::WriteFile
            | Self::ReadFile
            | Self::ReadTree
            | Self::WriteTree
            | Self::FileRequest => MAX_REQUEST_LEN,
            _ => MAX_MESSAGE_LEN,
        }
    }
}

impl TryFrom<u8> for Kind {
    type Error = Error;

    fn try_from(byte: u8) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|kind| *kind as u8 == byte)
            .ok_or(Error::UnknownKind(byte))
    }
}

/// The five bytes in front of every payload, with a length that its kind allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    kind: Kind,
    len: u32,
}

impl FrameHeader {
    /// Bytes of an encoded header.
    pub const LEN: usize = 5;

    /// A header for `len` payload bytes of `kind`.
    ///
    /// # Errors
    /// [`Error::TooLong`] when `kind` does not allow so many.
    pub fn new(kind: Kind, len: usize) -> Result<Self, Error> {
        let max = kind.max_payload();
        match u32::try_from(len) {
            Ok(short) if len <= max => Ok(Self { kind, len: short }),
            _ => Err(Error::TooLong { kind, len, max }),
        }
    }

    /// Decodes and checks a header.
    ///
    /// # Errors
    /// [`Error::UnknownKind`], or [`Error::TooLong`] when the kind does not allow the length.
    pub fn decode(bytes: [u8; Self::LEN]) -> Result<Self, Error> {
        let [a, b, c, d, kind] = bytes;
        let len = usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        Self::new(Kind::try_from(kind)?, len)
    }

    /// The header as it goes on the wire.
    #[must_use]
    pub fn encode(self) -> [u8; Self::LEN] {
        let [a, b, c, d] = self.len.to_le_bytes();
        [a, b, c, d, self.kind as u8]
    }

    /// What the payload is.
    #[must_use]
    pub fn kind(self) -> Kind {
        self.kind
    }

    /// Bytes of payload that follow.
    #[must_use]
    pub fn payload_len(self) -> usize {
        self.len as usize
    }
}

/// One received frame; the payload still lies where it was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// What the payload is.
    pub kind: Kind,
    /// The payload, no longer than the kind allows.
    pub payload: &'a [u8],
}

impl Frame<'_> {
    /// The structured payload; bytes left over are an error.
    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T, Error> {
        match postcard::take_from_bytes(self.payload) {
            Ok((value, [])) => Ok(value),
            _ => Err(Error::Malformed { kind: self.kind }),
        }
    }

    /// `value`, provided that the payload is empty.
    pub(crate) fn empty<T>(&self, value: T) -> Result<T, Error> {
        if self.payload.is_empty() {
            Ok(value)
        } else {
            Err(Error::Malformed { kind: self.kind })
        }
    }
}

/// A whole frame with a structured payload.
pub(crate) fn encode_value<T: Serialize>(kind: Kind, value: &T) -> Result<Vec<u8>, Error> {
    let payload = postcard::to_allocvec(value).map_err(|_| Error::Malformed { kind })?;
    encode_bytes(kind, &payload)
}

/// A whole frame with a raw payload.
pub(crate) fn encode_bytes(kind: Kind, payload: &[u8]) -> Result<Vec<u8>, Error> {
    let header = FrameHeader::new(kind, payload.len())?;
    let mut frame = Vec::with_capacity(FrameHeader::LEN + payload.len());
    frame.extend_from_slice(&header.encode());
    frame.extend_from_slice(payload);
    Ok(frame)
}

/// Cuts a byte stream that arrives in arbitrary pieces into frames.
///
/// A frame that lies whole in one piece is handed out from there; only the parts
/// of one that is split are stored. The store grows with the bytes that arrive,
/// never by the length a header claims, and never past the cap of its kind.
#[derive(Debug, Default)]
pub struct Decoder {
    stored: Vec<u8>,
    /// `stored` holds a frame that the last call handed out.
    handed_out: bool,
}

impl Decoder {
    /// A decoder at the start of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next frame, advancing `chunk` past what was used of it. `None`
    /// means that all of `chunk` was used and the frame is not complete.
    ///
    /// # Errors
    /// As [`FrameHeader::decode`]. The stream cannot be continued after an error.
    pub fn next_frame<'a, 'c: 'a>(
        &'a mut self,
        chunk: &mut &'c [u8],
    ) -> Result<Option<Frame<'a>>, Error> {
        if self.handed_out {
            self.handed_out = false;
            self.stored.clear();
        }
        if self.stored.is_empty()
            && let Some((head, rest)) = chunk.split_first_chunk()
        {
            let header = FrameHeader::decode(*head)?;
            if let Some((payload, rest)) = rest.split_at_checked(header.payload_len()) {
                *chunk = rest;
                return Ok(Some(Frame {
                    kind: header.kind,
                    payload,
                }));
            }
        }
        self.store_up_to(FrameHeader::LEN, chunk);
        let Some(head) = self.stored.first_chunk() else {
            return Ok(None);
        };
        let header = FrameHeader::decode(*head)?;
        let whole = FrameHeader::LEN + header.payload_len();
        self.store_up_to(whole, chunk);
        if self.stored.len() < whole {
            return Ok(None);
        }
        self.handed_out = true;
        Ok(Some(Frame {
            kind: header.kind,
            payload: self.stored.get(FrameHeader::LEN..).unwrap_or_default(),
        }))
    }

    /// Whether the stream may end here: no frame has begun.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        self.handed_out || self.stored.is_empty()
    }

    fn store_up_to(&mut self, len: usize, chunk: &mut &[u8]) {
        let wanted = len.saturating_sub(self.stored.len()).min(chunk.len());
        let (used, rest) = chunk.split_at(wanted);
        self.stored.extend_from_slice(used);
        *chunk = rest;
    }
}

/// Reads one frame from a blocking reader, its payload into `buffer` (which is
/// reused and never grows past the cap of the kind). `None` is the end of the stream.
///
/// # Errors
/// As [`FrameHeader::decode`]; [`Error::Truncated`] at an end inside a frame;
/// [`Error::Io`] as the reader says.
pub fn read_frame<'a>(
    reader: &mut impl Read,
    buffer: &'a mut Vec<u8>,
) -> Result<Option<Frame<'a>>, Error> {
    let mut head = [0; FrameHeader::LEN];
    let mut filled = 0;
    while let Some(rest) = head.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match reader.read(rest) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(Error::Truncated),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    let header = FrameHeader::decode(head)?;
    buffer.resize(header.payload_len(), 0);
    reader
        .read_exact(buffer)
        .map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => Error::Truncated,
            _ => Error::Io(error),
        })?;
    Ok(Some(Frame {
        kind: header.kind,
        payload: buffer,
    }))
}

/// Writes one frame to a blocking writer, with one call where the writer takes
/// header and payload together; the payload is not copied.
///
/// # Errors
/// [`Error::TooLong`] before anything is written; [`Error::Io`] as the writer says.
pub fn write_frame(writer: &mut impl Write, kind: Kind, payload: &[u8]) -> Result<(), Error> {
    let head = FrameHeader::new(kind, payload.len())?.encode();
    let written = loop {
        match writer.write_vectored(&[IoSlice::new(&head), IoSlice::new(payload)]) {
            Ok(0) => return Err(Error::Io(ErrorKind::WriteZero.into())),
            Ok(count) => break count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    };
    writer.write_all(head.get(written..).unwrap_or_default())?;
    let of_payload = written.saturating_sub(FrameHeader::LEN);
    writer.write_all(payload.get(of_payload..).unwrap_or_default())?;
    Ok(())
}
