//! Warnings that a guest can cause.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the log was told of something that is wrong with a device. Once is enough: what a guest
/// can cause, it can cause in a loop, and whoever keeps a log keeps a bounded one.
#[derive(Debug, Default)]
pub(crate) struct Warned(AtomicBool);

impl Warned {
    /// True for the first who asks, who tells the log.
    pub(crate) fn first(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }
}
