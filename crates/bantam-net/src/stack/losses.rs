//! What a guest lost of a connection's data.
//!
//! The link keeps the order of frames and loses none; a guest drops what finds no room in a receive
//! buffer. smoltcp finds few of these losses but by its timer: it does not look at selective
//! acknowledgements, there are so few of the long frames on their way that three acknowledgements of
//! a kind rarely come, and it gives its timer up for that of a closed window.

use smoltcp::wire::TcpSeqNumber;

/// What the guest said of our data.
pub(super) struct Acknowledgement {
    /// What comes next.
    pub(super) up_to: TcpSeqNumber,
    /// It has data that comes later.
    pub(super) hole: bool,
    /// Its window is closed.
    pub(super) shut: bool,
}

/// What was lost of one connection's data.
#[derive(Default)]
pub(super) struct Losses {
    /// After the last of what was sent.
    sent: Option<TcpSeqNumber>,
    /// What was sent when a loss was found: all before it may be lost (RFC 6582 §3.2).
    recover: Option<TcpSeqNumber>,
    /// From where on data was sent again.
    resent: Option<TcpSeqNumber>,
}

impl Losses {
    /// Something was sent, up to `end`.
    pub(super) fn sent(&mut self, end: Option<TcpSeqNumber>) {
        self.sent = later(self.sent, end);
    }

    /// Whether data must be sent again, from where the guest has it.
    pub(super) fn acknowledged(&mut self, ack: &Acknowledgement) -> bool {
        let Some(sent) = self.sent else {
            return false;
        };
        // A window that ends before what was sent has been taken back: the guest had no room for it.
        if self.recover.is_none() && (ack.hole || ack.shut) {
            self.recover = Some(sent);
        }
        if self.recover.is_some_and(|recover| ack.up_to >= recover) {
            self.recover = None;
        }
        // Once from each place: what was on its way is acknowledged meanwhile.
        if self.recover.is_none() || ack.shut || self.resent == Some(ack.up_to) {
            return false;
        }
        self.resent = Some(ack.up_to);
        true
    }
}

/// The later of two, as far as there are two.
pub(super) fn later(a: Option<TcpSeqNumber>, b: Option<TcpSeqNumber>) -> Option<TcpSeqNumber> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.max(b)),
        (a, b) => a.or(b),
    }
}
