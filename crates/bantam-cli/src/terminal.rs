//! A command on a terminal: raw mode, window size, and both given back whatever happens.

use std::io::{self, IsTerminal, Read, Write};
use std::sync::{Arc, Weak};
use std::thread;

use bantam::{ChildHandle, Exec, Size, Status};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use signal_hook::iterator::Signals;

use crate::failure::Failure;
use crate::show::raw_stdout;

/// The most bytes that are written to the terminal at once.
const CHUNK: usize = 64 << 10;

/// Standard input in raw mode: every key goes to the guest, whose terminal makes of it what it
/// will (Ctrl-C interrupts the command there). Dropping it restores the mode.
struct RawMode(Termios);

impl RawMode {
    fn enter() -> io::Result<Self> {
        let stdin = io::stdin();
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Self(before))
    }

    fn restore(&self) {
        // The terminal may be gone; then there is no mode left to restore.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        self.restore();
    }
}

/// The window's size.
fn window() -> Option<Size> {
    let size = tcgetwinsize(io::stdin()).ok()?;
    Some(Size {
        cols: size.ws_col,
        rows: size.ws_row,
    })
}

/// Refuses `-t` where there is no terminal, before a machine is started for it.
pub(crate) fn check() -> Result<(), Failure> {
    if io::stdin().is_terminal() {
        Ok(())
    } else {
        Err(Failure::Usage(
            "-t needs a terminal, and standard input is none: leave -t out in pipes and scripts"
                .to_owned(),
        ))
    }
}

/// Runs a command on this terminal; with `input`, keys go to it.
pub(crate) fn run(exec: Exec, input: bool) -> Result<Status, Failure> {
    let failed =
        |what: &'static str| move |source| Failure::Library(bantam::Error::Io { what, source });
    let exec = match std::env::var_os("TERM") {
        Some(term) => exec.env("TERM", term),
        None => exec,
    };
    let mut stdout = raw_stdout()?;
    let mut child = exec.tty(window().unwrap_or_default()).spawn()?;
    let keys = child.stdin.take();
    let output = child.stdout.take();

    let raw = Arc::new(RawMode::enter().map_err(failed("cannot set the terminal's mode"))?);
    // Apart, so that a guest that takes nothing cannot keep us from ending.
    let watched =
        |numbers: &[i32]| Signals::new(numbers).map_err(failed("cannot watch for signals"));
    let (mut sizes, mut ends) = (watched(&[SIGWINCH])?, watched(&[SIGINT, SIGTERM, SIGHUP])?);
    let handle = sizes.handle();
    let command = child.handle();
    // Neither is joined: the first may be stuck, and the second is of use as long as we live.
    thread::spawn(move || pass_sizes(&mut sizes, &command));
    {
        let raw = Arc::downgrade(&raw);
        thread::spawn(move || end(&mut ends, &raw));
    }
    match keys {
        // Ends with the process: a read of a terminal cannot be called off.
        Some(mut keys) if input => {
            thread::spawn(move || io::copy(&mut io::stdin(), &mut keys));
        }
        keys => drop(keys),
    }
    if let Some(mut output) = output {
        // A terminal that went away ends the command by SIGHUP; what it still writes is lost.
        let _ = pass_on(&mut output, &mut stdout);
    }
    handle.close();
    Ok(child.wait()?)
}

/// Writes what can be read as it comes, each piece at once: a prompt ends without a newline.
fn pass_on(output: &mut dyn Read, terminal: &mut dyn Write) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    loop {
        match output.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(count) => terminal.write_all(chunk.get(..count).unwrap_or_default())?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Passes on changes of the window's size.
fn pass_sizes(signals: &mut Signals, command: &ChildHandle) {
    for _ in signals.forever() {
        if let Some(size) = window() {
            // Fails only if the command has ended.
            let _ = command.resize(size);
        }
    }
}

/// Restores the terminal before a signal ends us.
fn end(signals: &mut Signals, raw: &Weak<RawMode>) {
    for signal in signals.forever() {
        if let Some(raw) = raw.upgrade() {
            raw.restore();
        }
        // As if we had never looked: the exit status says which signal it was.
        let _ = signal_hook::low_level::emulate_default_handler(signal);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Gives one piece with each read, and takes one with each write.
    #[derive(Default)]
    struct Pieces(VecDeque<Vec<u8>>);

    impl Read for Pieces {
        fn read(&mut self, mut buffer: &mut [u8]) -> io::Result<usize> {
            match self.0.pop_front() {
                Some(piece) if piece.is_empty() => Err(io::ErrorKind::Interrupted.into()),
                Some(piece) => buffer.write(&piece),
                None => Ok(0),
            }
        }
    }

    impl Write for Pieces {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.push_back(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_piece_goes_out_by_itself_and_whole() {
        let pieces = [&b"Password: "[..], b"", b"a\nb\nc", &[b'x'; CHUNK], b"$ "];
        let mut output = Pieces(pieces.map(<[u8]>::to_vec).into());
        let mut terminal = Pieces::default();
        pass_on(&mut output, &mut terminal).unwrap();
        let written: Vec<_> = terminal.0.iter().map(Vec::as_slice).collect();
        let expected: Vec<_> = pieces.into_iter().filter(|p| !p.is_empty()).collect();
        assert!(written == expected);
    }
}
