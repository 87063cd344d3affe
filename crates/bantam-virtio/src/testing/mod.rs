//! A guest driver over plain memory, for tests: no hypervisor, no guest.
//!
//! [`Guest`] owns fake guest RAM and drives one device the way a driver does, over any
//! [`Transport`]. [`TestRing`] is the driver's side of one virtqueue. It can also do everything that a
//! driver must not: descriptors, heads and indices are written as they are given.
//!
//! Failures of the harness itself panic: it is for tests only.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod guest;
mod ring;

pub use guest::{Guest, Transport};
pub use ring::{Buffer, INDIRECT, NEXT, TestRing, WRITE};

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap, MmapRegion};

use crate::{EventFd, GuestRam, sys};

/// How long the harness waits for something that is going to happen.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The first region of [`ram`]: 8 MiB at 0.
pub const LOW_END: u64 = 8 << 20;
/// The second region of [`ram`] starts here, behind a hole; 4 MiB.
pub const HIGH_START: u64 = 16 << 20;
/// The end of the second region.
pub const HIGH_END: u64 = 20 << 20;
/// Where a machine would have a device's register window: not RAM.
pub const MMIO_WINDOW: u64 = 0xd000_0000;

/// Guest RAM with a hole in it, on a sealed memfd so that it can be shared with a back-end.
pub fn ram() -> Arc<GuestRam> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = std::fs::File::from(rustix::fs::memfd_create("guest-ram", flags).unwrap());
    let high_len = HIGH_END - HIGH_START;
    file.set_len(LOW_END + high_len).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let region = |start: u64, len: u64, offset: u64| {
        let file = FileOffset::new(file.try_clone().unwrap(), offset);
        let mapping = MmapRegion::from_file(file, usize::try_from(len).unwrap()).unwrap();
        GuestRegionMmap::new(mapping, GuestAddress(start)).unwrap()
    };
    let regions = vec![region(0, LOW_END, 0), region(HIGH_START, high_len, LOW_END)];
    Arc::new(GuestRam::from_regions(regions).unwrap())
}

/// Waits until `fd` is readable; false when `deadline` passed first.
pub fn wait_readable(fd: impl AsFd, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).unwrap();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&timeout)), Ok(1..))
}

/// Takes an event descriptor back to zero; whether it had been signalled.
pub(crate) fn take(event: &EventFd) -> bool {
    event.read().is_ok()
}

pub(crate) fn wait_event(event: &EventFd, deadline: Instant) -> bool {
    wait_readable(sys::event_as_fd(event), deadline)
}
