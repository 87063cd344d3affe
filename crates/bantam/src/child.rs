//! A running command with its streams, like [`std::process::Child`].

mod outlet;

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Instant;

use bantam_protocol::{HostExec, Size};

use crate::Error;
use crate::started::Started;
use crate::status::{Finished, Status};
use crate::wire::FrameSender;
use outlet::Valve;

/// A running command. Dropping it before it has ended kills everything it started.
#[derive(Debug)]
pub struct Child {
    /// Its standard input, unless that comes from a reader. Dropping it ends the input.
    pub stdin: Option<ChildStdin>,
    /// Its standard output; with a terminal, everything it writes.
    pub stdout: Option<ChildStdout>,
    /// Its standard error.
    pub stderr: Option<ChildStderr>,
    pid: u32,
    sender: FrameSender,
    valves: [Valve; 2],
    deadline: Option<Instant>,
    finished: Receiver<Result<Finished, Error>>,
    status: Option<Status>,
}

/// Standard input of a [`Child`].
#[derive(Debug)]
pub struct ChildStdin(FrameSender);

impl Write for ChildStdin {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send_data(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for ChildStdin {
    fn drop(&mut self) {
        // A command that has ended needs no end of input.
        let _ = self.0.send(&HostExec::StdinEof);
    }
}

macro_rules! output_stream {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(UnixStream);

        impl Read for $name {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.0.read(buffer)
            }
        }

        impl From<$name> for std::os::fd::OwnedFd {
            fn from(stream: $name) -> Self {
                stream.0.into()
            }
        }
    };
}

output_stream!(
    /// Standard output of a [`Child`].
    ChildStdout
);
output_stream!(
    /// Standard error of a [`Child`].
    ChildStderr
);

impl Child {
    pub(crate) fn new(started: Started, stdin: bool) -> Result<Self, Error> {
        let pipe =
            || outlet::pair().map_err(Error::io("cannot make a pipe for a command's output"));
        let (stdout, mut stdout_outlet, stdout_valve) = pipe()?;
        let (stderr, mut stderr_outlet, stderr_valve) = pipe()?;
        let sender = started.sender();
        let (pid, deadline) = (started.pid(), started.deadline());
        let (finish, finished) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("exec".to_owned())
            .spawn(move || {
                let result = started.pump(&mut stdout_outlet, &mut stderr_outlet);
                // Nobody to tell when the child was dropped.
                let _ = finish.send(result);
            })
            .map_err(Error::io("cannot start the thread for a command's output"))?;
        Ok(Self {
            stdin: stdin.then(|| ChildStdin(sender.clone())),
            stdout: Some(ChildStdout(stdout)),
            stderr: Some(ChildStderr(stderr)),
            pid,
            sender,
            valves: [stdout_valve, stderr_valve],
            deadline,
            finished,
            status: None,
        })
    }

    /// Its process id in the guest.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// Waits until it has ended. Ends standard input first, as [`std::process::Child::wait`]
    /// does.
    ///
    /// Output that was not taken out of the handle can be read afterwards as far as it fits the
    /// stream's buffer (some 200 KiB); what does not fit is dropped rather than waited for. A
    /// stream that was taken must be read to its end, or dropped.
    ///
    /// # Errors
    /// [`Error::MachineDied`] if the machine ended first.
    pub fn wait(&mut self) -> Result<Status, Error> {
        drop(self.stdin.take());
        if let Some(status) = self.status {
            return Ok(status);
        }
        let [stdout, stderr] = &self.valves;
        if self.stdout.is_some() {
            stdout.open();
        }
        if self.stderr.is_some() {
            stderr.open();
        }
        let finished = match self.deadline {
            None => self.finished.recv().map_err(|_| ()),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                match self.finished.recv_timeout(left) {
                    // It ought to be dead, so its output is not worth waiting for any more.
                    Err(RecvTimeoutError::Timeout) => {
                        stdout.open();
                        stderr.open();
                        self.finished.recv().map_err(|_| ())
                    }
                    result => result.map_err(|_| ()),
                }
            }
        };
        let finished =
            finished.map_err(|()| Error::Protocol("the thread for its output panicked".into()))?;
        let status = finished?.status;
        self.status = Some(status);
        Ok(status)
    }

    /// Reads all output to its end, then waits.
    ///
    /// # Errors
    /// As [`Child::wait`], and [`Error::Io`] if a stream cannot be read.
    pub fn wait_with_output(mut self) -> Result<(Status, Vec<u8>, Vec<u8>), Error> {
        drop(self.stdin.take());
        let read = |stream: Option<Box<dyn Read + Send>>| {
            let mut bytes = Vec::new();
            stream
                .map_or(Ok(0), |mut stream| stream.read_to_end(&mut bytes))
                .map(|_| bytes)
                .map_err(Error::io("cannot read a command's output"))
        };
        let stdout = self.stdout.take().map(|stream| Box::new(stream) as _);
        let stderr = self.stderr.take().map(|stream| Box::new(stream) as _);
        let (stdout, stderr) = thread::scope(|scope| {
            let stderr = scope.spawn(|| read(stderr));
            let stdout = read(stdout);
            let panicked = || Error::Protocol("the thread for its output panicked".into());
            (stdout, stderr.join().map_err(|_| panicked()).flatten())
        });
        Ok((self.wait()?, stdout?, stderr?))
    }

    /// Kills everything it started. Output that nobody reads is dropped from now on. Does nothing
    /// to a command that has ended. If the guest takes nothing for some seconds its stream is hung
    /// up, which kills, too; [`Child::wait`] then fails.
    pub fn kill(&self) {
        // Fails only if it has ended.
        let _ = self.sender.kill();
        self.valves.iter().for_each(Valve::open);
    }

    /// Sends a signal to its process group.
    ///
    /// # Errors
    /// [`Error::Io`] if it has ended, or if the guest takes nothing for some seconds.
    pub fn signal(&self, number: u8) -> Result<(), Error> {
        self.handle().signal(number)
    }

    /// Tells its terminal a new size.
    ///
    /// # Errors
    /// [`Error::Io`] if it has ended, or if the guest takes nothing for some seconds.
    pub fn resize(&self, size: Size) -> Result<(), Error> {
        self.handle().resize(size)
    }

    /// A handle for another thread, while this one waits.
    #[must_use]
    pub fn handle(&self) -> ChildHandle {
        ChildHandle::new(self.sender.clone())
    }
}

const UNREACHABLE: &str = "cannot reach the command";

/// Reaches a running command from any thread. Does not keep it alive.
#[derive(Debug, Clone)]
pub struct ChildHandle(FrameSender);

impl ChildHandle {
    pub(crate) fn new(sender: FrameSender) -> Self {
        Self(sender)
    }

    /// Kills everything the command started, as [`Child::kill`].
    ///
    /// # Errors
    /// [`Error::Io`] if it has ended.
    pub fn kill(&self) -> Result<(), Error> {
        self.0.kill().map_err(Error::io(UNREACHABLE))
    }

    /// Sends a signal to the command's process group.
    ///
    /// # Errors
    /// [`Error::Io`] if it has ended, or if the guest takes nothing for some seconds.
    pub fn signal(&self, number: u8) -> Result<(), Error> {
        self.send(&HostExec::Signal(number))
    }

    /// Tells the command's terminal a new size.
    ///
    /// # Errors
    /// [`Error::Io`] if it has ended, or if the guest takes nothing for some seconds.
    pub fn resize(&self, size: Size) -> Result<(), Error> {
        self.send(&HostExec::Resize(size))
    }

    fn send(&self, message: &HostExec<'_>) -> Result<(), Error> {
        self.0.send_control(message).map_err(Error::io(UNREACHABLE))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.status.is_none() {
            self.sender.hang_up();
        }
        self.valves.iter().for_each(Valve::open);
    }
}
