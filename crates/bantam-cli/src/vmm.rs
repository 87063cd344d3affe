//! The process of a named machine.

use std::thread;

use bantam::VmmProcess;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::failure::Failure;
use crate::{Outcome, vmm_log};

/// Serves the machine that the starting process hands over, until it ends or a signal ends it.
pub(crate) fn run() -> Outcome {
    vmm_log::install();
    let process = VmmProcess::receive()?;
    let stopper = process.stopper();
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(|source| {
        Failure::Library(bantam::Error::Io {
            what: "cannot watch for signals",
            source,
        })
    })?;
    thread::spawn(move || {
        for _ in signals.forever() {
            stopper.stop();
        }
    });
    process.run()?;
    Ok(0)
}
