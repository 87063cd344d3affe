//! The packet header (virtio 1.3 §5.10.6).
//!
//! Written here rather than taken from `virtio-vsock`, whose packets must lie in one or two
//! buffers: Linux spreads a large one over many.

/// Length of the header in bytes.
pub(super) const HEADER_LEN: u32 = 44;
/// The only socket type there is: a stream of bytes.
pub(super) const TYPE_STREAM: u16 = 1;

/// Flags of [`op::SHUTDOWN`].
pub(super) mod shutdown {
    /// The sender receives no more.
    pub(in crate::vsock) const RECEIVE: u32 = 1;
    /// The sender sends no more.
    pub(in crate::vsock) const SEND: u32 = 2;
    pub(in crate::vsock) const BOTH: u32 = RECEIVE | SEND;
}

/// Operations.
pub(super) mod op {
    pub(in crate::vsock) const REQUEST: u16 = 1;
    pub(in crate::vsock) const RESPONSE: u16 = 2;
    pub(in crate::vsock) const RST: u16 = 3;
    pub(in crate::vsock) const SHUTDOWN: u16 = 4;
    pub(in crate::vsock) const RW: u16 = 5;
    pub(in crate::vsock) const CREDIT_UPDATE: u16 = 6;
    pub(in crate::vsock) const CREDIT_REQUEST: u16 = 7;
}

/// `struct virtio_vsock_hdr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    pub(super) buf_alloc: u32,
    pub(super) fwd_cnt: u32,
}

impl Header {
    pub(super) fn decode(bytes: &[u8; HEADER_LEN as usize]) -> Header {
        fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
            std::array::from_fn(|i| bytes[at + i])
        }
        let u16_at = |at| u16::from_le_bytes(field(bytes, at));
        let u32_at = |at| u32::from_le_bytes(field(bytes, at));
        let u64_at = |at| u64::from_le_bytes(field(bytes, at));
        Header {
            src_cid: u64_at(0),
            dst_cid: u64_at(8),
            src_port: u32_at(16),
            dst_port: u32_at(20),
            len: u32_at(24),
            kind: u16_at(28),
            op: u16_at(30),
            flags: u32_at(32),
            buf_alloc: u32_at(36),
            fwd_cnt: u32_at(40),
        }
    }

    pub(super) fn encode(&self) -> [u8; HEADER_LEN as usize] {
        let mut bytes = [0; HEADER_LEN as usize];
        let mut put = |at: usize, field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
        };
        put(0, &self.src_cid.to_le_bytes());
        put(8, &self.dst_cid.to_le_bytes());
        put(16, &self.src_port.to_le_bytes());
        put(20, &self.dst_port.to_le_bytes());
        put(24, &self.len.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.op.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// The reset that answers this packet.
    pub(super) fn reset_reply(&self) -> Header {
        Header {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: op::RST,
            ..Header::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_encoding() {
        let bytes: [u8; HEADER_LEN as usize] = std::array::from_fn(|i| u8::try_from(i).unwrap());
        let header = Header::decode(&bytes);
        assert_eq!(header.dst_port, u32::from_le_bytes([20, 21, 22, 23]));
        assert_eq!(header.op, u16::from_le_bytes([30, 31]));
        assert_eq!(header.encode(), bytes);
    }
}
