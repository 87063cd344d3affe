//! What can go wrong in this crate, on the host's side of it.

use std::io;

/// A failure of a device or a transport.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver set up a queue that cannot be used.
    #[error("queue {index}: {reason}")]
    InvalidQueue {
        /// The queue's index.
        index: u16,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The driver left out a queue that the device cannot work without.
    #[error("activating {device}: queue {index} is not set up")]
    MissingQueue {
        /// The device's name.
        device: &'static str,
        /// The queue's index.
        index: u16,
    },
    /// `activate` was called on a device that is running.
    #[error("activating {device}: it is running already")]
    AlreadyActive {
        /// The device's name.
        device: &'static str,
    },
    /// The worker thread or its event descriptors could not be made.
    #[error("starting the {device} worker")]
    Worker {
        /// The device's name.
        device: &'static str,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The backing file of a disk could not be examined.
    #[error("examining the backing file of disk {id:?}")]
    Backing {
        /// The disk's identifier.
        id: String,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
