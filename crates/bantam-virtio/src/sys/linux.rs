//! Linux: eventfd, epoll, readv and friends.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use vm_memory::VolatileSlice;
pub use vmm_sys_util::eventfd::EventFd;

/// Most slices handed to the kernel in one call; more are left to the next call.
const MAX_IOV: usize = 256;

/// A new event descriptor, nonblocking and closed on exec.
pub(crate) fn event_fd() -> io::Result<EventFd> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
}

/// Takes the counter back to zero. That somebody else did so first is no error.
pub(crate) fn drain(event: &EventFd) -> io::Result<()> {
    match event.read() {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}

/// The event descriptor as one that can be polled.
pub(crate) fn event_as_fd(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: `event` owns the descriptor and outlives the borrow, which carries its lifetime.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// Makes an event descriptor out of any descriptor the front-end sent. That it is an eventfd
/// cannot be known; reads and writes of it fail or do nothing of use otherwise. It is made
/// nonblocking, so that a front-end cannot stop a worker by having it wait.
#[cfg(feature = "vhost-user")]
pub(crate) fn event_from_file(file: File) -> io::Result<EventFd> {
    use std::os::fd::IntoRawFd;
    rustix::io::ioctl_fionbio(&file, true)?;
    // SAFETY: `into_raw_fd` gives up the ownership that `from_raw_fd` takes.
    Ok(unsafe { EventFd::from_raw_fd(file.into_raw_fd()) })
}

/// Rings once, a while after it was last set; a poller can wait for it.
pub(crate) struct Timer(OwnedFd);

impl Timer {
    pub(crate) fn new() -> io::Result<Timer> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Timer(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Has it ring `after` from now, and not before.
    pub(crate) fn set(&self, after: Duration) -> io::Result<()> {
        let zero = Timespec::default();
        let value = Timespec::try_from(after).map_err(|_| io::ErrorKind::InvalidInput)?;
        let once = Itimerspec {
            it_interval: zero,
            it_value: value,
        };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }

    /// Whether it has rung since it was last set or asked.
    pub(crate) fn drain(&self) -> io::Result<bool> {
        match rustix::io::read(&self.0, &mut [0; 8]) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::AGAIN) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What to be told about a descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Told about each change once, rather than for as long as the descriptor is ready.
    pub(crate) edge: bool,
}

impl Interest {
    pub(crate) const READ: Interest = Interest {
        readable: true,
        writable: false,
        edge: false,
    };

    /// Something to read, told once.
    pub(crate) const EDGE: Interest = Interest {
        edge: true,
        ..Interest::READ
    };

    fn flags(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        if self.readable {
            flags |= epoll::EventFlags::IN;
        }
        if self.writable {
            flags |= epoll::EventFlags::OUT;
        }
        if self.edge {
            flags |= epoll::EventFlags::ET;
        }
        flags
    }
}

/// What happened on a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Readiness {
    pub(crate) token: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// The other end is gone altogether. Reported whether asked for or not.
    pub(crate) hung_up: bool,
}

/// Readiness of a set of descriptors. A descriptor leaves the set when removed or
/// when its last copy is closed.
pub(crate) struct Poller {
    epoll: Arc<OwnedFd>,
    events: Vec<epoll::Event>,
}

/// Changes a [`Poller`]'s set, from any thread, also while it waits.
#[derive(Clone)]
pub(crate) struct Watcher(Arc<OwnedFd>);

impl Watcher {
    pub(crate) fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(&self.0, fd, data, interest.flags())?)
    }

    pub(crate) fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::modify(&self.0, fd, data, interest.flags())?)
    }

    pub(crate) fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }
}

impl Poller {
    pub(crate) fn new() -> io::Result<Poller> {
        Ok(Poller {
            epoll: Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?),
            events: Vec::with_capacity(64),
        })
    }

    pub(crate) fn watcher(&self) -> Watcher {
        Watcher(Arc::clone(&self.epoll))
    }

    pub(crate) fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        self.watcher().add(fd, token, interest)
    }

    pub(crate) fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        self.watcher().remove(fd)
    }

    /// Waits until something is ready (or `timeout` is over) and appends what is to `ready`.
    pub(crate) fn wait(
        &mut self,
        ready: &mut Vec<Readiness>,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        self.events.clear();
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut self.events),
            timeout.as_ref(),
        ) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
        ready.extend(self.events.iter().map(|event| {
            let flags = event.flags;
            Readiness {
                token: event.data.u64(),
                readable: flags.intersects(epoll::EventFlags::IN),
                writable: flags.intersects(epoll::EventFlags::OUT),
                hung_up: flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR),
            }
        }));
        Ok(())
    }
}

type Slice<'a> = VolatileSlice<'a, ()>;

/// Runs `call` on at most [`MAX_IOV`] slices as an iovec.
fn with_iov(
    slices: &[Slice<'_>],
    call: impl FnOnce(*const libc::iovec, libc::c_int) -> isize,
) -> io::Result<usize> {
    let mut iov = [const {
        libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }
    }; MAX_IOV];
    let count = slices.len().min(MAX_IOV);
    for (entry, slice) in iov.iter_mut().zip(slices) {
        entry.iov_base = slice.ptr_guard_mut().as_ptr().cast();
        entry.iov_len = slice.len();
    }
    let done = call(iov.as_ptr(), libc::c_int::try_from(count).unwrap_or(0));
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}

/// One `preadv(2)`: from `file` at `offset` bytes into guest memory.
pub(crate) fn read_vectored_at(
    file: &File,
    slices: &[Slice<'_>],
    offset: i64,
) -> io::Result<usize> {
    with_iov(slices, |iov, count| {
        // SAFETY: each entry is a live mapping of guest memory for the length given (a
        // `VolatileSlice` keeps its mapping borrowed); no Rust reference to it exists.
        unsafe { libc::preadv64(file.as_raw_fd(), iov, count, offset) }
    })
}

/// One `pwritev(2)`: from guest memory to `file` at `offset` bytes.
pub(crate) fn write_vectored_at(
    file: &File,
    slices: &[Slice<'_>],
    offset: i64,
) -> io::Result<usize> {
    with_iov(slices, |iov, count| {
        // SAFETY: as in `read_vectored_at`; the kernel only reads.
        unsafe { libc::pwritev64(file.as_raw_fd(), iov, count, offset) }
    })
}

/// One `readv(2)`: from `fd` into guest memory.
pub(crate) fn read_vectored(fd: impl AsFd, slices: &[Slice<'_>]) -> io::Result<usize> {
    with_iov(slices, |iov, count| {
        // SAFETY: as in `read_vectored_at`.
        unsafe { libc::readv(fd.as_fd().as_raw_fd(), iov, count) }
    })
}

/// One `sendmsg(2)` of guest memory to a socket; a peer that is gone is an error, never a signal.
pub(crate) fn send_vectored(fd: impl AsFd, slices: &[Slice<'_>]) -> io::Result<usize> {
    with_iov(slices, |iov, count| {
        // SAFETY: `msghdr` is plain data for which zero is valid; the iovec is as in
        // `read_vectored_at` and the kernel only reads it and what it points to.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = iov.cast_mut();
            message.msg_iovlen = usize::try_from(count).unwrap_or(0);
            libc::sendmsg(fd.as_fd().as_raw_fd(), &message, libc::MSG_NOSIGNAL)
        }
    })
}

/// One `send(2)`, likewise; it never waits for room.
pub(crate) fn send(fd: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    Ok(rustix::net::send(fd, bytes, flags)?)
}

/// Gives the storage of a range back; it reads as zeroes afterwards.
pub(crate) fn punch_hole(file: &File, offset: u64, len: u64) -> io::Result<()> {
    use rustix::fs::FallocateFlags;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, offset, len)?)
}

/// Zeroes a range and keeps its storage.
pub(crate) fn zero_range(file: &File, offset: u64, len: u64) -> io::Result<()> {
    use rustix::fs::FallocateFlags;
    let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, offset, len)?)
}
