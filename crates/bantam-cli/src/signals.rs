//! Signals for a command that runs in a machine.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bantam::ChildHandle;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::emulate_default_handler;

/// Passes an interrupt on to the command, as if it ran here. The second one ends this program,
/// and with it the command, whatever the thread that passes them on is doing: a guest that takes
/// nothing blocks it. Once dropped, the first one does.
pub(crate) struct Forwarding {
    signals: Handle,
    armed: Arc<AtomicBool>,
}

impl Forwarding {
    pub(crate) fn start(command: ChildHandle) -> io::Result<Self> {
        let (signals, armed) = watch([SIGINT, SIGTERM])?;
        let handle = signals.handle();
        // Not joined: it may be stuck, and ends with the program.
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || forward(signals, &command))?;
        Ok(Self {
            signals: handle,
            armed,
        })
    }
}

/// Signals that do what they always did once the flag is set, which the first one does.
fn watch<const N: usize>(numbers: [i32; N]) -> io::Result<(Signals, Arc<AtomicBool>)> {
    let armed = Arc::new(AtomicBool::new(false));
    for number in numbers {
        // In this order: what the flag is when a signal comes is what counts.
        flag::register_conditional_default(number, Arc::clone(&armed))?;
        flag::register(number, Arc::clone(&armed))?;
    }
    Ok((Signals::new(numbers)?, armed))
}

fn forward(mut signals: Signals, command: &ChildHandle) {
    for signal in signals.forever() {
        let number = u8::try_from(signal).unwrap_or(0);
        // A command that cannot be reached cannot be waited for.
        if command.signal(number).is_err() {
            let _ = emulate_default_handler(signal);
        }
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        self.armed.store(true, Ordering::SeqCst);
        self.signals.close();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    use signal_hook::consts::SIGUSR1;
    use signal_hook::low_level::raise;

    use super::*;

    /// Set in the process that is to die of a signal.
    const CHILD: &str = "BANTAM_TEST_DIES_OF_A_SIGNAL";

    #[test]
    fn a_second_signal_ends_the_program_though_nobody_takes_the_first() {
        if std::env::var_os(CHILD).is_some() {
            // The iterator is never asked, as by a thread that is stuck.
            let _watched = watch([SIGUSR1, SIGTERM]).unwrap();
            raise(SIGUSR1).unwrap();
            eprintln!("survived the first");
            raise(SIGTERM).unwrap();
            unreachable!("survived the second");
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("signals::tests::a_second_signal_ends_the_program_though_nobody_takes_the_first")
            .env(CHILD, "1")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        let stderr = child.stderr.as_mut().unwrap();
        stderr.read_to_string(&mut said).unwrap();
        assert!(said.contains("survived the first"), "{said}");
        assert_eq!(child.wait().unwrap().signal(), Some(SIGTERM), "{said}");
    }
}
