//! What a named machine is for: started with it, written to its log, stopped before it.

use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::log::Log;
use super::record::{Record, WorkloadEnd};
use super::stop_signal;
use super::vmm::Serving;
use crate::spec::Workload;
use crate::status::Status;
use crate::{ChildHandle, Error, Exec, Machine};

/// What the agent sends to every process anyway.
const SIGTERM: u8 = 15;

/// The workload, as far as stopping it is concerned.
#[derive(Debug, Default)]
pub(super) struct RunningWorkload {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
enum State {
    /// There is none, or none any more.
    #[default]
    None,
    /// It runs, and is to be stopped with this signal.
    Running(ChildHandle, u8),
}

impl RunningWorkload {
    fn set(&self, state: State) {
        *self.lock() = state;
        self.changed.notify_all();
    }

    /// Stops a workload whose image wants another signal than all processes get at the end, and
    /// waits for it, at most for `grace`.
    pub(super) fn stop(&self, grace: Duration) {
        let deadline = Instant::now().checked_add(grace);
        let mut state = self.lock();
        match &*state {
            State::Running(handle, signal) if *signal != SIGTERM => {
                // One that cannot be reached is ended with the machine.
                if handle.signal(*signal).is_err() {
                    return;
                }
            }
            _ => return,
        }
        while let State::Running(..) = *state {
            let left = deadline.and_then(|at| at.checked_duration_since(Instant::now()));
            let Some(left) = left.filter(|left| !left.is_zero()) else {
                return;
            };
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts what the machine is for, and returns when the guest has executed it or its end is written
/// down; a machine that is for nothing in particular waits for commands.
pub(super) fn run(machine: &Machine, record: &Record, serving: &Arc<Serving>) -> Result<(), Error> {
    let Workload { args, entrypoint } = record.spec.workload.clone().unwrap_or_default();
    let exec = match machine.workload(&args, entrypoint.as_deref().map(AsRef::as_ref)) {
        Ok(exec) => exec,
        // Neither the image nor the user named anything.
        Err(_) if record.spec.workload.is_none() => return Ok(()),
        Err(error) => return Err(error),
    };
    let log = Log::open(&serving.dir.output())?;
    let wanted = machine.image().config.stop_signal.as_deref();
    let signal = wanted.and_then(stop_signal::parse).unwrap_or(SIGTERM);
    let serving = Arc::clone(serving);
    let ends_machine = record.ephemeral || record.spec.stop_on_exit;
    let (tell, known) = mpsc::sync_channel(1);
    thread::Builder::new()
        .name("workload".to_owned())
        .spawn(move || {
            let result = follow(exec, signal, &log, &serving.workload, || {
                // There is room for one, and this is the one.
                let _ = tell.send(());
            });
            serving.workload.set(State::None);
            // The machine goes on if that cannot be written down; the log of the process tells.
            if let Err(error) = serving.workload_ended(WorkloadEnd::new(&result)) {
                tracing::warn!(%error, "cannot record the end of the workload");
            }
            drop(tell);
            if ends_machine {
                serving.stop_after_workload();
            }
        })
        .map_err(Error::io("cannot start the thread for the workload"))?;
    // Hung up by one that ended before it ran.
    let _ = known.recv();
    Ok(())
}

fn follow(
    exec: Exec,
    signal: u8,
    log: &Log,
    workload: &RunningWorkload,
    runs: impl FnOnce(),
) -> Result<Status, Error> {
    let running = exec.start()?;
    workload.set(State::Running(running.handle(), signal));
    runs();
    let finished = running.pipe(&mut log.writer(), &mut log.writer())?;
    Ok(finished.status)
}
