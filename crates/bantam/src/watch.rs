//! What happens to a guest while nobody uses it: the host's wall clock is set, sleeps, or drifts from
//! the guest's; the guest hangs up, which is its end.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// How often the guest is told the time although nothing happened. A guest's clock may be off by
/// some 10 ppm, 6 ms in this time.
const INTERVAL: Duration = Duration::from_secs(600);

/// What a watch calls back for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum News {
    /// The guest should be told the time.
    Clock,
    /// Either side hung up the stream. Nothing more comes after it.
    HungUp,
}

/// A thread that calls back when there is [`News`]; it ends with the value.
#[derive(Debug)]
pub(crate) struct GuestWatch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl GuestWatch {
    /// Calls `tell` with [`News::Clock`] after every jump of the host's wall clock, a sleep of the
    /// host among them, and every ten minutes; and with [`News::HungUp`] when `stream` ends, of which
    /// nothing is read.
    pub(crate) fn start(stream: OwnedFd, tell: impl Fn(News) + Send + 'static) -> io::Result<Self> {
        Self::every(INTERVAL, stream, tell)
    }

    fn every(
        interval: Duration,
        stream: OwnedFd,
        tell: impl Fn(News) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let timer = timerfd_create(TimerfdClockId::Realtime, TimerfdFlags::CLOEXEC)?;
        arm(&timer, interval)?;
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || {
                while let Ok(Some(news)) = next(&timer, interval, &stopped, &stream) {
                    tell(news);
                    if news == News::HungUp {
                        return;
                    }
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for GuestWatch {
    fn drop(&mut self) {
        // A write to an eventfd that nobody else writes to cannot fail.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // It has nothing that could panic.
            let _ = thread.join();
        }
    }
}

/// A timer at the next interval that the kernel cancels when the clock jumps.
fn arm(timer: &OwnedFd, interval: Duration) -> io::Result<()> {
    let spec = |time: Duration| {
        Timespec::try_from(time).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
    };
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let next = Itimerspec {
        it_interval: spec(interval)?,
        it_value: spec(now.saturating_add(interval))?,
    };
    let flags = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
    timerfd_settime(timer, flags, &next)?;
    Ok(())
}

/// Waits for news; `None` to stop.
fn next(
    timer: &OwnedFd,
    interval: Duration,
    stop: &OwnedFd,
    stream: &OwnedFd,
) -> io::Result<Option<News>> {
    loop {
        let mut fds = [
            PollFd::new(timer, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
            PollFd::new(stream, PollFlags::RDHUP),
        ];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        if !fds[1].revents().is_empty() {
            return Ok(None);
        }
        if !fds[2].revents().is_empty() {
            return Ok(Some(News::HungUp));
        }
        match rustix::io::read(timer, &mut [0; 8]) {
            Ok(_) => return Ok(Some(News::Clock)),
            // The clock jumped: the timer counts from where it is now.
            Err(rustix::io::Errno::CANCELED) => {
                arm(timer, interval)?;
                return Ok(Some(News::Clock));
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn the_guest_is_told_again_and_again() {
        let (told, times) = mpsc::channel();
        let (_guest, stream) = UnixStream::pair().unwrap();
        let watch = GuestWatch::every(Duration::from_millis(5), stream.into(), move |news| {
            // The test may have seen enough.
            let _ = told.send(news);
        })
        .unwrap();
        for _ in 0..3 {
            assert_eq!(times.recv_timeout(LIMIT), Ok(News::Clock));
        }
        drop(watch);
    }

    #[test]
    fn a_watch_ends_at_once_although_nothing_happens() {
        let (told, times) = mpsc::channel();
        let (mut guest, stream) = UnixStream::pair().unwrap();
        let watch = GuestWatch::start(stream.into(), move |news| told.send(news).unwrap()).unwrap();
        // What the guest says is for others to read.
        guest.write_all(b"hello").unwrap();
        drop(watch);
        assert!(times.recv().is_err(), "told although nothing happened");
    }

    #[test]
    fn it_is_told_once_that_a_side_hung_up_however_it_did() {
        let close: [fn(UnixStream, &UnixStream); 3] = [
            |guest, _| drop(guest),
            |guest, _| guest.shutdown(Shutdown::Write).unwrap(),
            |_, ours| ours.shutdown(Shutdown::Both).unwrap(),
        ];
        for close in close {
            let (told, times) = mpsc::channel();
            let (guest, ours) = UnixStream::pair().unwrap();
            let stream = ours.try_clone().unwrap();
            let watch = GuestWatch::start(stream.into(), move |news| told.send(news).unwrap());
            close(guest.try_clone().unwrap(), &ours);
            drop(guest);
            assert_eq!(times.recv_timeout(LIMIT), Ok(News::HungUp));
            assert!(times.recv().is_err(), "told again");
            drop(watch);
        }
    }
}
