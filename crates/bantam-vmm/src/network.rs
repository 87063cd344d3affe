//! The user-space network behind the machine's card.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use bantam_net::{Checksum, FrameInfo, Offloads, Stack};
use bantam_virtio::NetBackend;
use bantam_virtio::net::{FrameHeader, NetOffloads, PartialChecksum, Segmentation};

/// A [`Stack`] as the card wants it. Both sides speak of the same header in words of their own.
pub(crate) struct StackBackend(pub(crate) Stack);

impl NetBackend for StackBackend {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn reset(&mut self, offloads: NetOffloads) {
        self.0.reset(Offloads {
            checksum: offloads.checksum,
            segmentation: offloads.segmentation,
        });
    }

    fn receive(&mut self, frame: &[u8], header: &FrameHeader) {
        self.0.receive(frame, &info(header));
    }

    fn run(&mut self) -> Option<Duration> {
        self.0.run()
    }

    fn take_frame(&mut self, take: &mut dyn FnMut(&[u8], &FrameHeader) -> bool) -> bool {
        self.0.take_frame(|frame, info| take(frame, &header(info)))
    }
}

fn info(header: &FrameHeader) -> FrameInfo {
    FrameInfo {
        checksum: match header.checksum {
            None => Checksum::Complete,
            Some(PartialChecksum { start, offset }) => Checksum::Partial { start, offset },
        },
        segmentation: header.segmentation.map(
            |Segmentation {
                 size,
                 headers,
                 ipv6,
             }| bantam_net::Segmentation {
                size,
                headers,
                ipv6,
            },
        ),
    }
}

fn header(info: &FrameInfo) -> FrameHeader {
    FrameHeader {
        checksum: match info.checksum {
            Checksum::Complete => None,
            Checksum::Partial { start, offset } => Some(PartialChecksum { start, offset }),
        },
        segmentation: info.segmentation.map(
            |bantam_net::Segmentation {
                 size,
                 headers,
                 ipv6,
             }| Segmentation {
                size,
                headers,
                ipv6,
            },
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_means_the_same_on_both_sides() {
        let segmentation = Segmentation {
            size: 1,
            headers: 2,
            ipv6: true,
        };
        let checksum = PartialChecksum {
            start: 3,
            offset: 4,
        };
        for there in [
            FrameHeader::default(),
            FrameHeader {
                checksum: Some(checksum),
                segmentation: Some(segmentation),
            },
        ] {
            assert_eq!(header(&info(&there)), there);
        }
    }
}
