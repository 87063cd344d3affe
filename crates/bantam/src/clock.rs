//! Keeping the guest's wall clock right while the host's is set, sleeps, or drifts from it.

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

/// A thread that calls back when the guest should be told the time; it ends with the value.
#[derive(Debug)]
pub(crate) struct ClockWatch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ClockWatch {
    /// Calls `tell` after every jump of the host's wall clock, a sleep of the host among them,
    /// and every ten minutes.
    pub(crate) fn start(tell: impl Fn() + Send + 'static) -> io::Result<Self> {
        Self::every(INTERVAL, tell)
    }

    fn every(interval: Duration, tell: impl Fn() + Send + 'static) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let timer = timerfd_create(TimerfdClockId::Realtime, TimerfdFlags::CLOEXEC)?;
        arm(&timer, interval)?;
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("clock".to_owned())
            .spawn(move || {
                while next(&timer, interval, &stopped).unwrap_or(false) {
                    tell();
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for ClockWatch {
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

/// Waits until it is time; false to stop.
fn next(timer: &OwnedFd, interval: Duration, stop: &OwnedFd) -> io::Result<bool> {
    loop {
        let mut fds = [
            PollFd::new(timer, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        if !fds[1].revents().is_empty() {
            return Ok(false);
        }
        match rustix::io::read(timer, &mut [0; 8]) {
            Ok(_) => return Ok(true),
            // The clock jumped: the timer counts from where it is now.
            Err(rustix::io::Errno::CANCELED) => {
                arm(timer, interval)?;
                return Ok(true);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn the_guest_is_told_again_and_again() {
        let (told, times) = mpsc::channel();
        let watch = ClockWatch::every(Duration::from_millis(5), move || {
            // The test may have seen enough.
            let _ = told.send(());
        })
        .unwrap();
        for _ in 0..3 {
            times.recv_timeout(Duration::from_secs(30)).unwrap();
        }
        drop(watch);
    }

    #[test]
    fn a_watch_ends_at_once_although_nothing_happens() {
        let (told, times) = mpsc::channel();
        let watch = ClockWatch::start(move || told.send(()).unwrap()).unwrap();
        drop(watch);
        assert!(
            times.recv().is_err(),
            "told although the clock did not jump"
        );
    }
}
