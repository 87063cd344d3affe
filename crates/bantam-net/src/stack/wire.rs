//! smoltcp's view of the link: one packet in, packets out while there is room.

use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;
use smoltcp::wire::TcpSeqNumber;

use super::output::{Output, checksums};
use super::{losses, pump};

/// A device for one turn of one connection.
pub(super) struct Wire<'a> {
    packet: Option<&'a [u8]>,
    output: &'a mut Output,
    mss: u16,
    /// Longest packet that smoltcp may make, in bytes; it asks once.
    pub(super) mtu: usize,
    /// Packets sent.
    pub(super) sent: usize,
    /// Bytes of the longest of them.
    pub(super) longest: usize,
    /// The sequence number after the last of all.
    pub(super) end: Option<TcpSeqNumber>,
}

impl<'a> Wire<'a> {
    /// `packet` is what came from the guest; `mss` is what the guest takes in one segment.
    pub(super) fn new(packet: Option<&'a [u8]>, output: &'a mut Output, mss: u16) -> Wire<'a> {
        Wire {
            packet,
            mtu: output.mtu,
            output,
            mss,
            sent: 0,
            longest: 0,
            end: None,
        }
    }

    /// Whether there is room for another packet.
    pub(super) fn has_room(&self) -> bool {
        self.output.has_room()
    }
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
            longest: &mut self.longest,
            end: &mut self.end,
        };
        Some((Received(packet), sender))
    }

    fn transmit(&mut self, _now: Instant) -> Option<Sender<'_>> {
        self.output.has_room().then_some(Sender {
            output: self.output,
            mss: self.mss,
            sent: &mut self.sent,
            longest: &mut self.longest,
            end: &mut self.end,
        })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.mtu;
        capabilities.checksum = checksums(self.output.offloads.checksum);
        capabilities
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
    longest: &'a mut usize,
    end: &'a mut Option<TcpSeqNumber>,
}

impl TxToken for Sender<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        *self.sent += 1;
        *self.longest = len.max(*self.longest);
        let end = self.end;
        let fill_checksum = !self.output.offloads.checksum;
        self.output.push_tcp(len, self.mss, |packet| {
            let result = f(packet);
            pump::narrow_window(packet, fill_checksum);
            *end = losses::later(*end, pump::end_of(packet));
            result
        })
    }
}
