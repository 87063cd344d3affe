//! smoltcp's view of the link: one packet in, packets out while there is room.

use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;

use super::output::{Output, checksums};

/// A device for one turn of one connection.
pub(super) struct Wire<'a> {
    packet: Option<&'a [u8]>,
    output: &'a mut Output,
    mss: u16,
    /// Packets sent.
    pub(super) sent: usize,
}

impl<'a> Wire<'a> {
    /// `packet` is what came from the guest; `mss` is what the guest takes in one segment.
    pub(super) fn new(packet: Option<&'a [u8]>, output: &'a mut Output, mss: u16) -> Wire<'a> {
        Wire {
            packet,
            output,
            mss,
            sent: 0,
        }
    }

    /// Whether there is room for another packet.
    pub(super) fn has_room(&self) -> bool {
        self.output.has_room()
    }
}

/// What smoltcp has to know: with segmentation left to the guest, its segments may fill a frame.
pub(super) fn capabilities(output: &Output) -> DeviceCapabilities {
    let mut capabilities = DeviceCapabilities::default();
    capabilities.medium = Medium::Ip;
    capabilities.max_transmission_unit = if output.offloads.segmentation {
        usize::from(u16::MAX)
    } else {
        output.mtu
    };
    capabilities.checksum = checksums(output.offloads.checksum);
    capabilities
}

impl Device for Wire<'_> {
    type RxToken<'b>
        = Received<'b>
    where
        Self: 'b;
    type TxToken<'b>
        = Sender<'b>
    where
        Self: 'b;

    fn receive(&mut self, _now: Instant) -> Option<(Received<'_>, Sender<'_>)> {
        let packet = self.packet.take()?;
        let sender = Sender {
            output: self.output,
            mss: self.mss,
            sent: &mut self.sent,
        };
        Some((Received(packet), sender))
    }

    fn transmit(&mut self, _now: Instant) -> Option<Sender<'_>> {
        self.output.has_room().then_some(Sender {
            output: self.output,
            mss: self.mss,
            sent: &mut self.sent,
        })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities(self.output)
    }
}

pub(super) struct Received<'a>(&'a [u8]);

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

pub(super) struct Sender<'a> {
    output: &'a mut Output,
    mss: u16,
    sent: &'a mut usize,
}

impl TxToken for Sender<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        *self.sent += 1;
        self.output.push_tcp(len, self.mss, f)
    }
}
