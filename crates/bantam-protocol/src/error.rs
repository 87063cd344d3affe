use crate::Kind;

/// Why a frame could not be decoded, encoded or moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kind byte names no frame of this protocol version.
    #[error("frame kind {0:#04x} is unknown")]
    UnknownKind(u8),
    /// The length is over the cap of the kind.
    #[error("{kind:?} frame of {len} bytes is over its limit of {max} bytes")]
    TooLong {
        /// The kind the frame claims.
        kind: Kind,
        /// The payload length it claims, in bytes.
        len: usize,
        /// The most the kind allows, in bytes.
        max: usize,
    },
    /// The payload is not what its kind promises.
    #[error("{kind:?} frame has a malformed payload")]
    Malformed {
        /// The kind of the frame.
        kind: Kind,
    },
    /// A valid frame that has no place on this stream.
    #[error("{0:?} frame is unexpected here")]
    Unexpected(Kind),
    /// The stream ended inside a frame.
    #[error("stream ended inside a frame")]
    Truncated,
    /// The reader or writer handed to [`read_frame`](crate::read_frame) or
    /// [`write_frame`](crate::write_frame) failed.
    #[error("frame transfer failed")]
    Io(#[from] std::io::Error),
}
