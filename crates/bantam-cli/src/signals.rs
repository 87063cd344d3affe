//! Signals for a command that runs in a machine.

use std::io;
use std::thread::{self, JoinHandle};

use bantam::ChildHandle;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

/// Passes an interrupt on to the command, as if it ran here; a second one ends this program, and
/// with it the command. Ends when dropped.
pub(crate) struct Forwarding {
    signals: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Forwarding {
    pub(crate) fn start(command: ChildHandle) -> io::Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let handle = signals.handle();
        let thread = thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                let mut passed = false;
                for signal in signals.forever() {
                    let number = u8::try_from(signal).unwrap_or(0);
                    // A command that cannot be reached cannot be waited for.
                    if passed || command.signal(number).is_err() {
                        let _ = signal_hook::low_level::emulate_default_handler(signal);
                    }
                    passed = true;
                }
            })?;
        Ok(Self {
            signals: handle,
            thread: Some(thread),
        })
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        self.signals.close();
        if let Some(thread) = self.thread.take() {
            // It ends when its signals are closed, and has nothing that could panic.
            let _ = thread.join();
        }
    }
}
