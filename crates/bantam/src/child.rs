//! A running command with its streams, like [`std::process::Child`].

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::thread::{self, JoinHandle};

use bantam_protocol::{HostExec, Size};

use crate::Error;
use crate::command::{Finished, Started, Status};
use crate::wire::FrameSender;

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
    pump: Option<JoinHandle<Result<Finished, Error>>>,
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
        pub struct $name(PipeReader);

        impl Read for $name {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.0.read(buffer)
            }
        }

        impl From<$name> for std::process::Stdio {
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
        let pipe = || io::pipe().map_err(Error::io("cannot make a pipe for a command's output"));
        let (stdout, stdout_writer) = pipe()?;
        let (stderr, stderr_writer) = pipe()?;
        let sender = started.sender();
        let pid = started.pid();
        let pump = thread::Builder::new()
            .name("exec".to_owned())
            .spawn(move || started.pump(&mut Unread(stdout_writer), &mut Unread(stderr_writer)))
            .map_err(Error::io("cannot start the thread for a command's output"))?;
        Ok(Self {
            stdin: stdin.then(|| ChildStdin(sender.clone())),
            stdout: Some(ChildStdout(stdout)),
            stderr: Some(ChildStderr(stderr)),
            pid,
            sender,
            pump: Some(pump),
        })
    }

    /// Its process id in the guest.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// Waits until it has ended. Ends standard input first, as [`std::process::Child::wait`]
    /// does; output must be read or its handle dropped, or a command that writes much waits.
    ///
    /// # Errors
    /// [`Error::MachineDied`] if the machine ended first.
    pub fn wait(&mut self) -> Result<Status, Error> {
        drop(self.stdin.take());
        let ended_twice = || Error::InvalidCommand("the command was already waited for".into());
        let pump = self.pump.take().ok_or_else(ended_twice)?;
        match pump.join() {
            Ok(finished) => finished.map(|finished| finished.status),
            Err(_) => Err(Error::Protocol("the output thread panicked".into())),
        }
    }

    /// Kills everything it started.
    ///
    /// # Errors
    /// [`Error::Io`] if it has ended.
    pub fn kill(&self) -> Result<(), Error> {
        self.send(&HostExec::Kill)
    }

    /// Sends a signal to its process group.
    ///
    /// # Errors
    /// [`Error::Io`] if it has ended.
    pub fn signal(&self, number: u8) -> Result<(), Error> {
        self.send(&HostExec::Signal(number))
    }

    /// Tells its terminal a new size.
    ///
    /// # Errors
    /// [`Error::Io`] if it has ended.
    pub fn resize(&self, size: Size) -> Result<(), Error> {
        self.send(&HostExec::Resize(size))
    }

    fn send(&self, message: &HostExec<'_>) -> Result<(), Error> {
        self.sender
            .send(message)
            .map_err(Error::io("cannot reach a command that has ended"))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.pump.is_some() {
            self.sender.hang_up();
        }
    }
}

/// A pipe whose reader may go away: the rest of the output is dropped, as with `/dev/null`.
struct Unread(PipeWriter);

impl Write for Unread {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(bytes.len()),
            result => result,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
