//! A running virtual machine, whichever engine runs it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bantam_net::Network;
use bantam_virtio::vsock::Vsock;

use crate::console::ConsoleLog;
use crate::devices::{DeviceSet, Handles};
use crate::engine::{EngineKind, choose};
use crate::timeline::trace_step;
use crate::{Timeline, VmConfig, VmmError};

/// Why a machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitCause {
    /// The guest shut down or reset itself; a kernel panic ends so, too.
    GuestShutdown,
    /// The owner killed it.
    Killed,
    /// The engine could not go on; the text says why.
    Failed(String),
}

/// Set once, when the machine has ended; the engine's threads are gone by then.
#[derive(Debug, Clone, Default)]
pub(crate) struct ExitLatch(Arc<(Mutex<Option<ExitCause>>, Condvar, AtomicBool)>);

impl ExitLatch {
    pub(crate) fn set(&self, cause: ExitCause) {
        let (slot, changed, halted) = &*self.0;
        let cause = match cause {
            ExitCause::Killed if halted.load(Ordering::Acquire) => ExitCause::GuestShutdown,
            cause => cause,
        };
        slot.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(cause);
        changed.notify_all();
    }

    /// The guest has shut down: whoever kills the machine from now on only clears away.
    fn halted(&self) {
        let (.., halted) = &*self.0;
        halted.store(true, Ordering::Release);
    }

    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Option<ExitCause> {
        // A timeout beyond what the clock can tell is none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let (slot, changed, _) = &*self.0;
        let mut cause = slot.lock().unwrap_or_else(PoisonError::into_inner);
        while cause.is_none() {
            cause = match deadline {
                None => changed.wait(cause).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.checked_duration_since(Instant::now())?;
                    changed
                        .wait_timeout(cause, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
        cause.clone()
    }
}

/// Held by who takes a machine down: if that panics, whoever waits for the machine still hears of its
/// end.
pub(crate) struct ExitGuard(pub(crate) ExitLatch);

impl Drop for ExitGuard {
    fn drop(&mut self) {
        self.0.set(ExitCause::Failed(
            "the thread that takes the machine down panicked".to_owned(),
        ));
    }
}

/// How a started machine is ended.
pub(crate) trait Kill: Send + Sync {
    /// Ends the machine now. The latch is set when everything but the supervisor is gone.
    fn kill(&self);
}

/// Ends a machine whose guest has come to its end without the machine's: Linux that powers off or
/// halts stops its CPUs for good, and no engine hears of that.
#[derive(Clone)]
pub struct Halted {
    machine: Arc<dyn Kill>,
    exit: ExitLatch,
}

impl std::fmt::Debug for Halted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Halted").finish_non_exhaustive()
    }
}

impl Halted {
    /// Waits `patience` for the machine to end by itself, then ends it. Either is
    /// [`ExitCause::GuestShutdown`].
    pub fn end(&self, patience: Duration) {
        if self.exit.wait(Some(patience)).is_none() {
            self.exit.halted();
            self.machine.kill();
        }
    }
}

/// What an engine gives back for a started machine.
pub(crate) struct Running {
    pub(crate) machine: Box<dyn Kill>,
    /// Ends right after it has set the latch.
    pub(crate) supervisor: JoinHandle<()>,
}

/// What an engine needs beside the configuration.
pub(crate) struct StartContext {
    pub(crate) devices: DeviceSet,
    pub(crate) console: ConsoleLog,
    pub(crate) exit: ExitLatch,
    pub(crate) timeline: Timeline,
}

/// A running virtual machine. Dropping it kills it and waits until it is gone.
pub struct Vm {
    engine: EngineKind,
    vsock: Vsock,
    network: Option<Network>,
    console: ConsoleLog,
    exit: ExitLatch,
    machine: Arc<dyn Kill>,
    supervisor: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Vm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vm")
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}

impl Vm {
    /// Starts a machine and returns while its kernel boots. `prepare` sees the vsock before
    /// the first guest instruction, so that a listener is there when the agent says hello.
    ///
    /// # Errors
    /// Any [`VmmError`]; nothing is left running then.
    pub fn start(
        config: &VmConfig,
        timeline: &Timeline,
        prepare: impl FnOnce(&Vsock) -> std::io::Result<()>,
    ) -> Result<Self, VmmError> {
        config.check()?;
        let engine = choose(config.engine)?;
        let (devices, Handles { vsock, network }) = DeviceSet::build(config)?;
        prepare(&vsock).map_err(VmmError::device("vsock"))?;
        let console = ConsoleLog::new();
        let exit = ExitLatch::default();
        let context = StartContext {
            devices,
            console: console.clone(),
            exit: exit.clone(),
            timeline: timeline.clone(),
        };
        let running = start_engine(engine, config, context)?;
        Ok(Self {
            engine,
            vsock,
            network,
            console,
            exit,
            machine: Arc::from(running.machine),
            supervisor: Some(running.supervisor),
        })
    }

    /// The engine that runs the machine.
    #[must_use]
    pub fn engine(&self) -> EngineKind {
        self.engine
    }

    /// Connections to and from the guest.
    #[must_use]
    pub fn vsock(&self) -> &Vsock {
        &self.vsock
    }

    /// The network behind the machine's card, if it has one.
    #[must_use]
    pub fn network(&self) -> Option<&Network> {
        self.network.as_ref()
    }

    /// The tail of the guest's console.
    #[must_use]
    pub fn console(&self) -> &ConsoleLog {
        &self.console
    }

    /// Waits until the machine has ended and all its threads and processes are gone. `None` if
    /// it still runs after `timeout`.
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> Option<ExitCause> {
        self.exit.wait(timeout)
    }

    /// What ends the machine once its guest is known to have halted. It does not keep the machine.
    #[must_use]
    pub fn halted(&self) -> Halted {
        Halted {
            machine: Arc::clone(&self.machine),
            exit: self.exit.clone(),
        }
    }

    /// Ends the machine now, without asking the guest, and waits until it is gone.
    pub fn kill(&self) -> ExitCause {
        trace_step("kill");
        self.machine.kill();
        let cause = self.exit.wait(None).unwrap_or(ExitCause::Killed);
        trace_step("gone");
        cause
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.kill();
        if let Some(supervisor) = self.supervisor.take() {
            // It has set the latch and has nothing left that could panic.
            let _ = supervisor.join();
        }
    }
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn start_engine(
    engine: EngineKind,
    config: &VmConfig,
    context: StartContext,
) -> Result<Running, VmmError> {
    match engine {
        EngineKind::Native => crate::native::start(config, context),
        EngineKind::Emulated => crate::emulated::start(config, context),
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn start_engine(
    engine: EngineKind,
    _config: &VmConfig,
    _context: StartContext,
) -> Result<Running, VmmError> {
    Err(VmmError::EngineUnavailable {
        engine: engine.name(),
        reason: "this platform is not supported yet".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_wakes_when_the_machine_ends() {
        let latch = ExitLatch::default();
        let waiter = {
            let latch = latch.clone();
            std::thread::spawn(move || latch.wait(None))
        };
        latch.set(ExitCause::GuestShutdown);
        assert_eq!(waiter.join().unwrap(), Some(ExitCause::GuestShutdown));
    }

    #[test]
    fn the_first_cause_stays() {
        let latch = ExitLatch::default();
        latch.set(ExitCause::GuestShutdown);
        latch.set(ExitCause::Killed);
        assert_eq!(latch.wait(None), Some(ExitCause::GuestShutdown));
    }

    /// A machine that ends only when it is killed.
    struct Stays(ExitLatch);

    impl Kill for Stays {
        fn kill(&self) {
            self.0.set(ExitCause::Killed);
        }
    }

    fn halted(exit: &ExitLatch) -> Halted {
        Halted {
            machine: Arc::new(Stays(exit.clone())),
            exit: exit.clone(),
        }
    }

    #[test]
    fn a_guest_that_halted_has_shut_down_however_its_machine_is_ended() {
        let exit = ExitLatch::default();
        halted(&exit).end(Duration::ZERO);
        assert_eq!(exit.wait(None), Some(ExitCause::GuestShutdown));
    }

    #[test]
    fn a_machine_that_ends_by_itself_meanwhile_keeps_its_cause() {
        let exit = ExitLatch::default();
        let failed = ExitCause::Failed("on purpose".to_owned());
        let ender = {
            let halted = halted(&exit);
            std::thread::spawn(move || halted.end(Duration::MAX))
        };
        exit.set(failed.clone());
        ender.join().unwrap();
        assert_eq!(exit.wait(None), Some(failed));
        // Nor is one that was killed before a guest that shut down.
        let exit = ExitLatch::default();
        exit.set(ExitCause::Killed);
        halted(&exit).end(Duration::ZERO);
        assert_eq!(exit.wait(None), Some(ExitCause::Killed));
    }

    #[test]
    fn a_supervisor_that_panics_leaves_nobody_waiting() {
        let latch = ExitLatch::default();
        let guard = ExitGuard(latch.clone());
        let supervisor = std::thread::spawn(move || {
            let _guard = guard;
            panic!("on purpose");
        });
        assert!(supervisor.join().is_err());
        assert!(matches!(latch.wait(None), Some(ExitCause::Failed(_))));
    }

    #[test]
    fn a_timeout_longer_than_the_clock_is_none() {
        let latch = ExitLatch::default();
        latch.set(ExitCause::Killed);
        assert_eq!(latch.wait(Some(Duration::MAX)), Some(ExitCause::Killed));
    }

    #[test]
    fn waiting_for_a_running_machine_ends_at_the_timeout() {
        assert_eq!(ExitLatch::default().wait(Some(Duration::ZERO)), None);
    }
}
