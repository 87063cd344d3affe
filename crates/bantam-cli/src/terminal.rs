//! A command on a terminal: raw mode, window size, and both given back whatever happens.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::thread;

use bantam::{ChildHandle, Exec, Size, Status};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use signal_hook::iterator::Signals;

use crate::failure::Failure;

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
    let mut child = exec.tty(window().unwrap_or_default()).spawn()?;
    let keys = child.stdin.take();
    let output = child.stdout.take();

    let raw = Arc::new(RawMode::enter().map_err(failed("cannot set the terminal's mode"))?);
    let mut signals = Signals::new([SIGWINCH, SIGINT, SIGTERM, SIGHUP])
        .map_err(failed("cannot watch for signals"))?;
    let handle = signals.handle();
    let watcher = {
        let (command, raw) = (child.handle(), Arc::clone(&raw));
        thread::spawn(move || watch(&mut signals, &command, &raw))
    };
    match keys {
        // Ends with the process: a read of a terminal cannot be called off.
        Some(mut keys) if input => {
            thread::spawn(move || io::copy(&mut io::stdin(), &mut keys));
        }
        keys => drop(keys),
    }
    if let Some(mut output) = output {
        let mut stdout = io::stdout().lock();
        // A terminal that went away ends the command by SIGHUP; what it still writes is lost.
        let _ = io::copy(&mut output, &mut stdout).and_then(|_| stdout.flush());
    }
    handle.close();
    // It ends when its signals are closed, and has nothing that could panic.
    let _ = watcher.join();
    Ok(child.wait()?)
}

/// Passes on changes of the window's size; restores the terminal before a signal ends us.
fn watch(signals: &mut Signals, command: &ChildHandle, raw: &RawMode) {
    for signal in signals.forever() {
        if signal == SIGWINCH {
            if let Some(size) = window() {
                // Fails only if the command has ended.
                let _ = command.resize(size);
            }
        } else {
            raw.restore();
            // As if we had never looked: the exit status says which signal it was.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    }
}
