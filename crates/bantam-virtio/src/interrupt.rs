//! How a device reaches its driver.

use std::io;

use crate::EventFd;

/// Device to driver notifications, as a device's worker sees them. Which line, message or
/// descriptor carries them is the transport's affair.
pub trait Interrupt: Send + Sync {
    /// Buffers of `queue` were used.
    fn used_queue(&self, queue: u16);
    /// The configuration space changed.
    fn config_changed(&self);
    /// The device is in a state that only a reset mends: sets DEVICE_NEEDS_RESET and tells the
    /// driver where the transport can.
    fn needs_reset(&self);
}

/// An interrupt input of the machine, edge-triggered: each `trigger` is one edge.
pub trait InterruptLine: Send + Sync {
    /// Raises an edge.
    ///
    /// # Errors
    /// The host's error; the transport logs it, as there is nobody in the guest to tell.
    fn trigger(&self) -> io::Result<()>;
}

/// An event descriptor bound to an interrupt input (irqfd).
impl InterruptLine for EventFd {
    fn trigger(&self) -> io::Result<()> {
        match self.write(1) {
            // Full, so raised already.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }
}
