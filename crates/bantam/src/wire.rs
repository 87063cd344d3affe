//! Frames over a stream to the guest's agent.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bantam_protocol::{Decoder, Frame, HostExec, Kind, MAX_DATA_LEN, write_frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

/// The sending side, shared by everyone who talks to one command.
#[derive(Debug, Clone)]
pub(crate) struct FrameSender {
    stream: Arc<UnixStream>,
    turns: Arc<Turns>,
    window: Arc<Window>,
    /// How long a guest may take no byte at all.
    stall: Option<Duration>,
}

/// How long a signal or the like may take to get out. Who feeds standard input waits for a guest
/// that takes nothing in the middle of a frame; those who have more to say must not wait with it.
const CONTROL_LIMIT: Duration = Duration::from_secs(5);

/// Whose turn it is to write a frame, so that those of two threads do not mix. A lock that one
/// need not wait for for ever.
#[derive(Debug, Default)]
struct Turns {
    taken: Mutex<bool>,
    free: Condvar,
}

/// A turn, which ends with the value.
struct Turn<'a>(&'a Turns);

impl Turns {
    fn take(&self, deadline: Option<Instant>) -> io::Result<Turn<'_>> {
        let mut taken = self.lock();
        while *taken {
            taken = match deadline {
                None => self.free.wait(taken),
                Some(deadline) => self
                    .free
                    .wait_timeout(taken, left(deadline)?)
                    .map(|(taken, _)| taken)
                    .map_err(|error| PoisonError::new(error.into_inner().0)),
            }
            .unwrap_or_else(PoisonError::into_inner);
        }
        *taken = true;
        Ok(Turn(self))
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.lock() = false;
        self.0.free.notify_one();
    }
}

/// The time until a deadline, never zero.
fn left(deadline: Instant) -> io::Result<Duration> {
    deadline
        .checked_duration_since(Instant::now())
        .filter(|left| !left.is_zero())
        .ok_or_else(|| io::ErrorKind::TimedOut.into())
}

/// How many bytes of standard input may be on their way, so that a command that does not read
/// never keeps a signal for it behind them.
#[derive(Debug)]
struct Window {
    /// Bytes that may be sent now; `None` once nobody reads any more.
    left: Mutex<Option<usize>>,
    changed: Condvar,
}

impl Window {
    fn new(bytes: usize) -> Self {
        Self {
            left: Mutex::new(Some(bytes)),
            changed: Condvar::new(),
        }
    }

    /// Takes up to `wanted` bytes of the window, waiting until there is at least one.
    fn take(&self, wanted: usize) -> io::Result<usize> {
        let mut left = self.lock();
        loop {
            match left.as_mut() {
                None => return Err(io::ErrorKind::BrokenPipe.into()),
                Some(0) => {
                    left = self
                        .changed
                        .wait(left)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                Some(bytes) => {
                    let taken = wanted.min(*bytes);
                    *bytes -= taken;
                    return Ok(taken);
                }
            }
        }
    }

    fn give(&self, bytes: usize) {
        if let Some(left) = self.lock().as_mut() {
            *left = left.saturating_add(bytes);
        }
        self.changed.notify_all();
    }

    fn close(&self) {
        *self.lock() = None;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Option<usize>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FrameSender {
    /// A sender that may have `window` bytes of data on their way.
    pub(crate) fn new(stream: impl Into<Arc<UnixStream>>, window: usize) -> Self {
        Self {
            stream: stream.into(),
            turns: Arc::default(),
            window: Arc::new(Window::new(window)),
            stall: None,
        }
    }

    pub(crate) fn send(&self, message: &HostExec<'_>) -> io::Result<()> {
        let bytes = message.encode().map_err(io::Error::other)?;
        let _turn = self.turns.take(None)?;
        (&*self.stream).write_all(&bytes)
    }

    /// From now on, what is sent fails if the guest takes no byte of it for so long.
    pub(crate) fn fail_if_stalled(&mut self, limit: Duration) -> io::Result<()> {
        self.stall = Some(limit);
        self.stream.set_write_timeout(self.stall)
    }

    /// Sends the request that opens the stream. It must not wait for a guest that takes nothing.
    pub(crate) fn send_request(&self, message: &HostExec<'_>, limit: Duration) -> io::Result<()> {
        self.send_within(message, limit)
    }

    /// Sends a signal or the like, or fails in a few seconds if the guest takes nothing.
    pub(crate) fn send_control(&self, message: &HostExec<'_>) -> io::Result<()> {
        self.send_within(message, CONTROL_LIMIT)
    }

    /// Has everything killed that the command started: by telling the agent, or by hanging up if
    /// that does not listen, which comes to the same.
    ///
    /// # Errors
    /// If the stream has ended, and so the command.
    pub(crate) fn kill(&self) -> io::Result<()> {
        self.kill_within(CONTROL_LIMIT)
    }

    fn kill_within(&self, limit: Duration) -> io::Result<()> {
        match self.send_within(&HostExec::Kill, limit) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                self.hang_up();
                Ok(())
            }
            result => result,
        }
    }

    fn send_within(&self, message: &HostExec<'_>, limit: Duration) -> io::Result<()> {
        let bytes = message.encode().map_err(io::Error::other)?;
        self.send_encoded(&bytes, limit)
    }

    /// Sends what is left of an encoded message, or fails if the guest does not take it within `limit`.
    /// With none it takes it now.
    pub(crate) fn send_encoded(&self, bytes: &[u8], limit: Duration) -> io::Result<()> {
        // A limit beyond what the clock can tell is none.
        let deadline = Instant::now().checked_add(limit);
        let _turn = self.turns.take(deadline)?;
        self.write_until(bytes, deadline)
    }

    /// Writes a frame in one's turn.
    fn write_until(&self, bytes: &[u8], deadline: Option<Instant>) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            // Without waiting, as there is room as a rule.
            let written = send(
                &*self.stream,
                rest,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            )
            .map_err(io::Error::from)
            .or_else(|error| match error.kind() {
                io::ErrorKind::WouldBlock => {
                    let left = deadline.map(left).transpose()?;
                    wait_for(&self.stream, PollFlags::OUT, left).map(|_| 0)
                }
                _ => Err(error),
            });
            match written {
                Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    if rest.len() < bytes.len() {
                        // What comes after a part of a frame makes no sense.
                        self.hang_up();
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Sends bytes of standard input or of a file, whole; waits while the window is used up.
    pub(crate) fn send_data(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let taken = self.window.take(bytes.len().min(MAX_DATA_LEN))?;
            let (piece, rest) = bytes.split_at(taken);
            bytes = rest;
            let _turn = self.turns.take(None)?;
            write_frame(&mut &*self.stream, Kind::Stdin, piece).map_err(|error| match error {
                bantam_protocol::Error::Io(error) => error,
                other => io::Error::other(other),
            })?;
        }
        Ok(())
    }

    /// The command took so many bytes of its standard input.
    pub(crate) fn credit(&self, bytes: u32) {
        self.window
            .give(usize::try_from(bytes).unwrap_or(usize::MAX));
    }

    /// The command closed its standard input.
    pub(crate) fn nobody_reads(&self) {
        self.window.close();
    }

    /// The stream, to be ended in another way than by [`hang_up`](Self::hang_up).
    pub(crate) fn stream(&self) -> Arc<UnixStream> {
        Arc::clone(&self.stream)
    }

    /// Ends the stream both ways, for every holder.
    pub(crate) fn hang_up(&self) {
        self.window.close();
        // Not through the lock: a sender that is stuck in a write must be freed by this.
        // Fails only when the other side is gone, which is what is wanted.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Copies `input` to the guest. Stops early, and without an error, when nobody reads it there.
/// The end of the input is the caller's to tell: after an error there may be none.
pub(crate) fn send_all(input: &mut dyn Read, sender: &FrameSender) -> io::Result<()> {
    let mut buffer = vec![0; MAX_DATA_LEN];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                if sender.send_data(&buffer[..count]).is_err() {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Why no frame came.
#[derive(Debug)]
pub(crate) enum ReceiveError {
    /// The stream ended or failed: the agent or its machine is gone.
    Gone,
    /// The deadline passed.
    TimedOut,
    /// The bytes make no sense.
    Protocol(bantam_protocol::Error),
}

impl From<bantam_protocol::Error> for ReceiveError {
    fn from(error: bantam_protocol::Error) -> Self {
        Self::Protocol(error)
    }
}

/// The receiving side.
#[derive(Debug)]
pub(crate) struct FrameReceiver {
    stream: Arc<UnixStream>,
    decoder: Decoder,
    buffer: Box<[u8]>,
    filled: std::ops::Range<usize>,
}

impl FrameReceiver {
    /// Room for a few frames of data, so that one read empties a burst.
    const BUFFER: usize = 128 * 1024;

    pub(crate) fn new(stream: impl Into<Arc<UnixStream>>) -> Self {
        Self {
            stream: stream.into(),
            decoder: Decoder::new(),
            buffer: vec![0; Self::BUFFER].into_boxed_slice(),
            filled: 0..0,
        }
    }

    /// Waits for the next frame and hands it to `take`.
    pub(crate) fn receive<T>(
        &mut self,
        deadline: Option<Instant>,
        take: impl FnOnce(Frame<'_>) -> Result<T, ReceiveError>,
    ) -> Result<T, ReceiveError> {
        loop {
            let mut chunk = &self.buffer[self.filled.clone()];
            let frame = self.decoder.next_frame(&mut chunk)?;
            self.filled.start = self.filled.end - chunk.len();
            if let Some(frame) = frame {
                return take(frame);
            }
            self.filled = 0..self.read(deadline)?;
        }
    }

    /// Waits for bytes with poll rather than in the read: what the guest's side takes out of the same
    /// socket would wake the read, too.
    fn read(&mut self, deadline: Option<Instant>) -> Result<usize, ReceiveError> {
        loop {
            let limit = deadline
                .map(left)
                .transpose()
                .map_err(|_| ReceiveError::TimedOut)?;
            match wait_for(&self.stream, PollFlags::IN, limit) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(_) => return Err(ReceiveError::Gone),
            }
            match (&*self.stream).read(&mut self.buffer) {
                Ok(0) => return Err(ReceiveError::Gone),
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(ReceiveError::Gone),
            }
        }
    }
}

/// Waits until `stream` is ready; false if it is not yet, for a signal or the limit.
fn wait_for(stream: &UnixStream, what: PollFlags, limit: Option<Duration>) -> io::Result<bool> {
    // A limit that the clock cannot tell is none.
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    let mut fds = [PollFd::new(stream, what)];
    match poll(&mut fds, limit.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A window for streams that need none, such as file transfers.
pub(crate) const UNLIMITED: usize = usize::MAX;

/// Both sides of one stream, with `window` for what is sent as data.
pub(crate) fn split(stream: UnixStream, window: usize) -> (FrameSender, FrameReceiver) {
    let stream = Arc::new(stream);
    let sender = FrameSender::new(Arc::clone(&stream), window);
    (sender, FrameReceiver::new(stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stdout(frame: Frame<'_>) -> Result<Vec<u8>, ReceiveError> {
        assert_eq!(frame.kind, Kind::Stdout);
        Ok(frame.payload.to_vec())
    }

    #[test]
    fn frames_arrive_whole_however_the_stream_is_cut() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            for n in 0..200_usize {
                write_frame(&mut bytes, Kind::Stdout, &vec![7; n * 331 % 65_536]).unwrap();
            }
            for piece in bytes.chunks(1_009) {
                guest.write_all(piece).unwrap();
            }
        });
        let mut receiver = FrameReceiver::new(host);
        for n in 0..200_usize {
            let payload = receiver.receive(None, stdout).unwrap();
            assert_eq!(payload, vec![7; n * 331 % 65_536]);
        }
        assert!(matches!(
            receiver.receive(None, stdout),
            Err(ReceiveError::Gone)
        ));
        writer.join().unwrap();
    }

    #[test]
    fn a_silent_guest_runs_into_the_deadline() {
        let (_guest, host) = UnixStream::pair().unwrap();
        let deadline = Instant::now() + Duration::from_millis(20);
        let result = FrameReceiver::new(host).receive(Some(deadline), stdout);
        assert!(matches!(result, Err(ReceiveError::TimedOut)));
    }

    #[test]
    fn a_deadline_does_not_outlive_its_frame() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        let mut receiver = FrameReceiver::new(host);
        write_frame(&mut guest, Kind::Stdout, b"first").unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        receiver.receive(Some(deadline), stdout).unwrap();
        assert_eq!(receiver.stream.read_timeout().unwrap(), None);
        let slow = std::thread::spawn(move || receiver.receive(None, stdout).unwrap());
        write_frame(&mut guest, Kind::Stdout, b"second").unwrap();
        assert_eq!(slow.join().unwrap(), b"second");
    }

    #[test]
    fn garbage_is_a_protocol_error_and_not_a_hang() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        guest.write_all(&[0xff; 64]).unwrap();
        let result = FrameReceiver::new(host).receive(None, stdout);
        assert!(matches!(result, Err(ReceiveError::Protocol(_))));
    }

    #[test]
    fn input_for_a_command_that_has_ended_is_dropped_without_an_error() {
        let (guest, host) = UnixStream::pair().unwrap();
        drop(guest);
        let mut input = std::io::repeat(1).take(1 << 20);
        send_all(&mut input, &FrameSender::new(host, UNLIMITED)).unwrap();
    }

    #[test]
    fn a_command_that_does_not_read_stops_the_sender_and_not_the_signals() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        let sender = FrameSender::new(host, 1000);
        let feeder = {
            let sender = sender.clone();
            std::thread::spawn(move || sender.send_data(&[7; 1500]))
        };
        let mut buffer = Vec::new();
        let frame = bantam_protocol::read_frame(&mut guest, &mut buffer);
        assert_eq!(frame.unwrap().unwrap().payload.len(), 1000);
        sender.send(&HostExec::Signal(15)).unwrap();
        let frame = bantam_protocol::read_frame(&mut guest, &mut buffer);
        assert_eq!(frame.unwrap().unwrap().kind, Kind::Signal);
        sender.credit(500);
        let frame = bantam_protocol::read_frame(&mut guest, &mut buffer);
        assert_eq!(frame.unwrap().unwrap().payload.len(), 500);
        feeder.join().unwrap().unwrap();
    }

    #[test]
    fn a_sender_that_waits_for_the_window_is_freed_when_the_command_ends() {
        let (_guest, host) = UnixStream::pair().unwrap();
        let sender = FrameSender::new(host, 0);
        let feeder = {
            let sender = sender.clone();
            std::thread::spawn(move || sender.send_data(b"x"))
        };
        sender.hang_up();
        assert!(feeder.join().unwrap().is_err());
    }

    /// A sender that is stuck in the middle of its input for a guest that never reads.
    fn stuck() -> (
        FrameSender,
        UnixStream,
        std::thread::JoinHandle<io::Result<()>>,
    ) {
        let (guest, host) = UnixStream::pair().unwrap();
        let sender = FrameSender::new(host, UNLIMITED);
        let feeder = {
            let sender = sender.clone();
            std::thread::spawn(move || sender.send_data(&vec![7; 64 << 20]))
        };
        // Until the buffer is full and the feeder has its turn.
        while sender
            .send_within(&HostExec::Signal(0), Duration::from_millis(50))
            .is_ok()
        {}
        (sender, guest, feeder)
    }

    #[test]
    fn a_signal_for_a_guest_that_takes_nothing_is_an_error_and_not_a_hang() {
        let (sender, _guest, feeder) = stuck();
        let error = sender
            .send_within(&HostExec::Signal(15), Duration::from_millis(20))
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(!feeder.is_finished());
        sender.hang_up();
        assert!(feeder.join().unwrap().is_err());
    }

    #[test]
    fn a_signal_does_not_wait_for_ever_for_who_writes() {
        let (_guest, host) = UnixStream::pair().unwrap();
        let sender = FrameSender::new(host, 0);
        let turn = sender.turns.take(None).unwrap();
        let signal = || sender.send_within(&HostExec::Signal(15), Duration::from_millis(20));
        assert_eq!(signal().unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(turn);
        signal().unwrap();
    }

    #[test]
    fn killing_hangs_up_on_a_guest_that_takes_nothing() {
        let (sender, mut guest, feeder) = stuck();
        sender.kill_within(Duration::from_millis(20)).unwrap();
        assert!(feeder.join().unwrap().is_err());
        let mut rest = Vec::new();
        guest.read_to_end(&mut rest).unwrap();
        assert!(sender.kill_within(Duration::from_millis(20)).is_err());
    }

    #[test]
    fn a_request_to_a_guest_that_takes_nothing_runs_into_its_limit() {
        let (_guest, host) = UnixStream::pair().unwrap();
        let request = HostExec::Exec(bantam_protocol::ExecRequest {
            argv: vec![vec![b'x'; 1 << 20]],
            ..Default::default()
        });
        let sender = FrameSender::new(host, 0);
        assert!(
            sender
                .send_request(&request, Duration::from_millis(20))
                .is_err()
        );
    }
}
