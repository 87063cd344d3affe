//! The header before each frame: `struct virtio_net_hdr` (virtio 1.3 §5.1.6).

use virtio_bindings::virtio_net::{
    VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_NONE, VIRTIO_NET_HDR_GSO_TCPV4,
    VIRTIO_NET_HDR_GSO_TCPV6,
};

/// Bytes of the header without its last field, the number of buffers.
const SHORT: usize = 10;
/// Bytes of the whole header.
const LONG: usize = 12;

/// A checksum that is not in the frame: the sum of the bytes from `start` to the end belongs at
/// `start + offset`, where the sum of the pseudo header is now. From a guest neither is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialChecksum {
    /// Bytes from the frame's beginning.
    pub start: u16,
    /// Bytes from `start`.
    pub offset: u16,
}

/// A frame that stands for several TCP segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segmentation {
    /// Most bytes of data in one segment; not 0.
    pub size: u16,
    /// Bytes of all headers, which each segment repeats. From a guest it is a hint.
    pub headers: u16,
    /// TCP over IPv6.
    pub ipv6: bool,
}

/// What there is to know of a frame besides its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameHeader {
    /// The checksum that is left out, if one is.
    pub checksum: Option<PartialChecksum>,
    /// How the frame is to be cut, if it is.
    pub segmentation: Option<Segmentation>,
}

/// Bytes of the header in the queues: a driver of before virtio 1.0 has a shorter one, unless
/// buffers are merged.
pub(super) fn header_len(version_1: bool, mergeable: bool) -> usize {
    if version_1 || mergeable { LONG } else { SHORT }
}

impl FrameHeader {
    /// What a driver wrote, if it is what a driver may write: `bytes` is a whole header.
    pub fn decode(bytes: &[u8]) -> Option<FrameHeader> {
        let &[flags, kind, l0, l1, s0, s1, c0, c1, o0, o1, ..] = bytes else {
            return None;
        };
        let checksum = u32::from(flags) & VIRTIO_NET_HDR_F_NEEDS_CSUM != 0;
        let ipv6 = match kind.into() {
            VIRTIO_NET_HDR_GSO_NONE => None,
            VIRTIO_NET_HDR_GSO_TCPV4 => Some(false),
            VIRTIO_NET_HDR_GSO_TCPV6 => Some(true),
            _ => return None,
        };
        let size = u16::from_le_bytes([s0, s1]);
        // §5.1.6.2.1: a frame that is to be cut has a size for it and a checksum to be filled in.
        if ipv6.is_some() && (size == 0 || !checksum) {
            return None;
        }
        Some(FrameHeader {
            checksum: checksum.then(|| PartialChecksum {
                start: u16::from_le_bytes([c0, c1]),
                offset: u16::from_le_bytes([o0, o1]),
            }),
            segmentation: ipv6.map(|ipv6| Segmentation {
                size,
                headers: u16::from_le_bytes([l0, l1]),
                ipv6,
            }),
        })
    }

    /// The header for a driver, before a frame in `buffers` chains.
    pub fn encode(&self, buffers: u16) -> [u8; LONG] {
        let mut bytes = [0; LONG];
        if let Some(segmentation) = self.segmentation {
            let kind = match segmentation.ipv6 {
                false => VIRTIO_NET_HDR_GSO_TCPV4,
                true => VIRTIO_NET_HDR_GSO_TCPV6,
            };
            bytes[1..2].copy_from_slice(&kind.to_le_bytes()[..1]);
            bytes[2..4].copy_from_slice(&segmentation.headers.to_le_bytes());
            bytes[4..6].copy_from_slice(&segmentation.size.to_le_bytes());
        }
        if let Some(checksum) = self.checksum {
            bytes[..1].copy_from_slice(&VIRTIO_NET_HDR_F_NEEDS_CSUM.to_le_bytes()[..1]);
            bytes[6..8].copy_from_slice(&checksum.start.to_le_bytes());
            bytes[8..10].copy_from_slice(&checksum.offset.to_le_bytes());
        }
        bytes[SHORT..].copy_from_slice(&buffers.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_back_as_it_was_written() {
        let checksum = Some(PartialChecksum {
            start: 34,
            offset: 16,
        });
        for segmentation in [None, Some(false), Some(true)] {
            let header = FrameHeader {
                checksum,
                segmentation: segmentation.map(|ipv6| Segmentation {
                    size: 1460,
                    headers: 54,
                    ipv6,
                }),
            };
            assert_eq!(FrameHeader::decode(&header.encode(3)), Some(header));
            assert_eq!(header.encode(3)[10..], [3, 0]);
        }
        let plain = FrameHeader::default();
        assert_eq!(FrameHeader::decode(&plain.encode(1)), Some(plain));
    }

    #[test]
    fn what_was_not_offered_is_refused() {
        // UDP fragmentation, ECN, and kinds nobody knows.
        for kind in [2, 3, 5, 0x80, 0x81, 0x84, 0xff] {
            assert_eq!(
                FrameHeader::decode(&[1, kind, 0, 0, 1, 0, 0, 0, 0, 0]),
                None
            );
        }
        // No size, no checksum, no whole header.
        assert_eq!(FrameHeader::decode(&[1, 1, 0, 0, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(FrameHeader::decode(&[0, 1, 0, 0, 1, 0, 0, 0, 0, 0]), None);
        assert_eq!(FrameHeader::decode(&[0; 9]), None);
    }
}
