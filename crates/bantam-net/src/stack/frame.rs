//! What a frame is besides its bytes.

/// Longest frame, in bytes: an IP packet of 65,535 bytes in an Ethernet header. A longer one is
/// dropped.
pub const MAX_FRAME: usize = 65_535 + 14;

/// The state of a TCP or UDP checksum in a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// In the frame, to be verified by who gets it.
    #[default]
    Complete,
    /// Left out: the sum from `start` to the end belongs at `start + offset`, where the pseudo
    /// header's is now (VIRTIO_NET_HDR_F_NEEDS_CSUM, virtio 1.3 §5.1.6.2.1).
    Partial {
        /// Bytes from the frame's beginning.
        start: u16,
        /// Bytes from `start`.
        offset: u16,
    },
}

/// A frame that stands for several TCP segments (VIRTIO_NET_HDR_GSO_TCPV4 and _TCPV6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segmentation {
    /// Most bytes of data in one segment.
    pub size: u16,
    /// Bytes of all headers, which each segment repeats.
    pub headers: u16,
    /// TCP over IPv6.
    pub ipv6: bool,
}

/// What the device's header says of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameInfo {
    /// The checksum's state.
    pub checksum: Checksum,
    /// Whether the frame is to be cut.
    pub segmentation: Option<Segmentation>,
}

/// What the guest's driver takes in frames *to* the guest. Frames *from* the guest may always have
/// partial checksums and be long; whether the guest does that is the device's to negotiate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Partial checksums (VIRTIO_NET_F_GUEST_CSUM).
    pub checksum: bool,
    /// Long TCP segments over IPv4 and IPv6 (VIRTIO_NET_F_GUEST_TSO4 and _TSO6). Needs `checksum`.
    pub segmentation: bool,
}
