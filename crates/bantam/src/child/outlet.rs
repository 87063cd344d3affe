//! A stream for output whose reader may stop reading.
//!
//! While its valve is closed a full stream makes the writer wait, which is the backpressure that
//! keeps memory bounded. Once the valve is open, what does not fit is dropped instead, so that a
//! command that is over is over, whether its output is read or not.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};

/// The writer's end.
#[derive(Debug)]
pub(crate) struct Outlet {
    stream: UnixStream,
    open: Arc<AtomicBool>,
    /// Readable (at its end) once the valve is open.
    woken: UnixStream,
}

/// Opens the outlet, once and for good.
#[derive(Debug)]
pub(crate) struct Valve {
    open: Arc<AtomicBool>,
    wake: UnixStream,
}

/// A reader's end, the writer's end and the valve, closed.
pub(crate) fn pair() -> io::Result<(UnixStream, Outlet, Valve)> {
    let (reader, stream) = UnixStream::pair()?;
    let (woken, wake) = UnixStream::pair()?;
    stream.set_nonblocking(true)?;
    let open = Arc::new(AtomicBool::new(false));
    let outlet = Outlet {
        stream,
        open: Arc::clone(&open),
        woken,
    };
    Ok((reader, outlet, Valve { open, wake }))
}

impl Valve {
    /// From now on, output that does not fit is dropped.
    pub(crate) fn open(&self) {
        self.open.store(true, Ordering::Release);
        // Fails only if it was shut down before, which is what is wanted.
        let _ = self.wake.shutdown(std::net::Shutdown::Both);
    }
}

impl Outlet {
    fn wait(&self) -> io::Result<()> {
        let mut fds = [
            PollFd::new(&self.stream, PollFlags::OUT),
            PollFd::new(&self.woken, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Write for Outlet {
    /// Takes everything: a reader that went away is like `/dev/null`.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.stream.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.open.load(Ordering::Acquire) {
                        return Ok(bytes.len());
                    }
                    self.wait()?;
                }
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(bytes.len()),
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::thread;

    use super::*;

    const MORE_THAN_FITS: usize = 16 << 20;

    #[test]
    fn a_slow_reader_gets_everything() {
        let (mut reader, mut outlet, _valve) = pair().unwrap();
        let writer = thread::spawn(move || outlet.write_all(&vec![7; MORE_THAN_FITS]));
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), MORE_THAN_FITS);
        writer.join().unwrap().unwrap();
    }

    #[test]
    fn opening_the_valve_frees_a_writer_that_waits() {
        let (mut reader, mut outlet, valve) = pair().unwrap();
        let writer = thread::spawn(move || outlet.write_all(&vec![7; MORE_THAN_FITS]));
        let mut some = [0; 1000];
        reader.read_exact(&mut some).unwrap();
        valve.open();
        writer.join().unwrap().unwrap();
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        assert!(!rest.is_empty(), "what fitted is still there");
        assert!(rest.len() < MORE_THAN_FITS);
    }

    #[test]
    fn a_reader_that_went_away_costs_nothing() {
        let (reader, mut outlet, _valve) = pair().unwrap();
        drop(reader);
        outlet.write_all(&vec![7; MORE_THAN_FITS]).unwrap();
    }
}
