//! Host-guest messages: pure encoding and decoding, no I/O.
//!
//! Two kinds of vsock stream run between a host and the agent in its guest:
//!
//! * the **control stream**: the guest connects to [`HOST_CONTROL_PORT`], says
//!   [`GuestControl::Hello`] or [`GuestControl::BootFailed`], and is told
//!   [`HostControl::Configure`] and, at the end, [`HostControl::Shutdown`].
//!   A guest whose control stream is hung up powers off.
//! * **exec streams**: the host connects to [`GUEST_EXEC_PORT`], one stream for
//!   each command, file transfer or question. The first frame is the request; see
//!   [`HostExec`] and [`GuestExec`] for what follows.
//!
//! Both carry length-delimited frames ([`FrameHeader`]). Structured payloads are
//! postcard; data payloads (standard input and output, file contents) are raw
//! bytes that no one copies or re-encodes. Flow control is the stream's own.
//!
//! Neither side trusts the other: every length is checked against the cap of its
//! kind before a byte is stored, and decoding never panics.
#![forbid(unsafe_code)]

mod control;
mod error;
mod exec;
mod file;
mod frame;
mod stats;
mod tree;

pub use control::{BootTimings, Configure, GuestControl, GuestNetwork, Hello, HostControl};
pub use error::Error;
pub use exec::{
    ExecRequest, Exit, ExitStatus, FileFailure, FileFailureKind, FileInfo, GuestExec, HostExec,
    ReadFile, Size, StartFailed, StartFailedKind, WriteFile,
};
pub use file::{FileEntry, FileKind, FileRequest};
pub use frame::{Decoder, Frame, FrameHeader, Kind, read_frame, write_frame};
pub use stats::{DiskUse, GuestStats};
pub use tree::{ReadTree, TreePlace, TreeSummary, WriteTree};

/// The version both sides must agree on; a change to any message changes it.
pub const PROTOCOL_VERSION: u32 = 4;

/// The vsock port on which the host waits for the guest's control stream.
pub const HOST_CONTROL_PORT: u32 = 1024;

/// The vsock port on which the guest waits for exec and file streams.
pub const GUEST_EXEC_PORT: u32 = 1025;

/// Most bytes in a data frame ([`Kind::Stdin`], [`Kind::Stdout`], [`Kind::Stderr`]).
pub const MAX_DATA_LEN: usize = 64 << 10;

/// Bytes of standard input a host may send before the guest returns credit with
/// [`GuestExec::StdinCredit`].
pub const STDIN_WINDOW: usize = 256 << 10;

/// Most bytes in a request: as much as `execve` takes for arguments and
/// environment together under Linux's default 8 MiB stack limit.
pub const MAX_REQUEST_LEN: usize = 2 << 20;

/// Most bytes in any other frame.
pub const MAX_MESSAGE_LEN: usize = 16 << 10;

/// Most bytes of human-readable text that [`clip_text`] leaves in a message.
pub const MAX_TEXT_LEN: usize = 4 << 10;

/// Shortens `text` to at most [`MAX_TEXT_LEN`] bytes, so that a message which
/// quotes a foreign path or argument still fits its frame.
#[must_use]
pub fn clip_text(mut text: String) -> String {
    if text.len() > MAX_TEXT_LEN {
        text.truncate(text.floor_char_boundary(MAX_TEXT_LEN - '…'.len_utf8()));
        text.push('…');
    }
    text
}
