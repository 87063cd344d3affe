//! vCPU threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use bantam_arch::x86_64::boot::Entry;
use bantam_arch::x86_64::{CpuPolicy, configure_vcpu};
use bantam_hypervisor::{Exit, Vcpu, VcpuBinder};

use super::bus::Bus;
use super::{Ending, Machine};
use crate::vm::{ExitCause, ExitGuard, ExitLatch};
use crate::{Phase, Timeline, VmmError};

/// What every vCPU thread of a machine has.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) bus: Arc<Bus>,
    pub(super) entry: Entry,
    pub(super) cpus: u32,
    pub(super) ending: Arc<Ending>,
    pub(super) timeline: Timeline,
}

/// Starts the thread of the first vCPU, which takes the machine down at its end, whatever ends it, and
/// then sets the latch.
pub(super) fn spawn_first(
    binder: Box<dyn VcpuBinder>,
    shared: Shared,
    machine: Machine,
    exit: ExitLatch,
) -> Result<JoinHandle<()>, VmmError> {
    // From here on, so that a thread that does not get to its end sets it, too.
    let exit = ExitGuard(exit);
    spawn(binder, shared, move |shared| {
        let ending = Arc::clone(&shared.ending);
        drop(shared);
        machine.take_down();
        exit.0.set(ending.cause());
    })
}

/// Starts the thread of another vCPU.
pub(super) fn spawn_other(
    binder: Box<dyn VcpuBinder>,
    shared: Shared,
) -> Result<JoinHandle<()>, VmmError> {
    spawn(binder, shared, drop)
}

/// Starts a vCPU's thread; `last` is what it does when the vCPU is gone and the machine's end is
/// decided. The vCPU is bound there: some hypervisors demand it.
fn spawn(
    binder: Box<dyn VcpuBinder>,
    shared: Shared,
    last: impl FnOnce(Shared) + Send + 'static,
) -> Result<JoinHandle<()>, VmmError> {
    let id = binder.id();
    thread::Builder::new()
        .name(format!("vcpu{id}"))
        .spawn(move || {
            // What a panic may leave half done is the vCPU, and that is gone.
            let cause = catch_unwind(AssertUnwindSafe(|| run(binder, &shared)))
                .unwrap_or_else(|_| ExitCause::Failed(format!("the thread of vCPU {id} panicked")));
            shared.ending.end(cause);
            last(shared);
        })
        .map_err(VmmError::io("cannot start a vCPU thread"))
}

fn run(binder: Box<dyn VcpuBinder>, shared: &Shared) -> ExitCause {
    let id = binder.id();
    let failed = |what: &str, error: &dyn std::error::Error| {
        ExitCause::Failed(format!("vCPU {id}: {what}: {}", chain(error)))
    };
    let mut vcpu = match binder.bind() {
        Ok(vcpu) => vcpu,
        Err(error) => return failed("cannot be bound to its thread", &error),
    };
    let Some(x86) = vcpu.x86() else {
        return ExitCause::Failed(format!("vCPU {id} is not an x86_64 one"));
    };
    let policy = CpuPolicy::default();
    if let Err(error) = configure_vcpu(x86, id, shared.cpus, &shared.entry, &policy) {
        return failed("cannot be set up", &error);
    }
    if id == 0 {
        shared.timeline.mark(Phase::FirstRun);
    }
    let cause = run_guest(vcpu.as_mut(), shared, id == 0)
        .unwrap_or_else(|error| failed("cannot run", &error));
    tracing::debug!(vcpu = id, exits = ?vcpu.exit_counts(), ?cause, "vCPU ended");
    cause
}

fn run_guest(
    vcpu: &mut dyn Vcpu,
    shared: &Shared,
    first: bool,
) -> Result<ExitCause, bantam_hypervisor::HypervisorError> {
    let bus = &shared.bus;
    let mut unmarked = first;
    while !shared.ending.is_decided() {
        let exit = vcpu.run()?;
        if std::mem::take(&mut unmarked) {
            shared.timeline.mark(Phase::FirstExit);
        }
        match exit {
            Exit::MmioRead { addr, data } => bus.mmio_read(addr, data),
            Exit::MmioWrite { addr, data } => bus.mmio_write(addr, data),
            Exit::PortIn { port, data, .. } => bus.port_in(port, data),
            Exit::PortOut { port, data, .. } => bus.port_out(port, data),
            Exit::Interrupted | Exit::Halt => {}
            Exit::Shutdown | Exit::SystemEvent(_) => return Ok(ExitCause::GuestShutdown),
            Exit::InternalError { code, data } => {
                return Ok(ExitCause::Failed(format!(
                    "the hypervisor gave up on the guest (internal error {code}, {data:x?})"
                )));
            }
            Exit::FailEntry { reason, cpu } => {
                return Ok(ExitCause::Failed(format!(
                    "the CPU refused to enter the guest (reason {reason:#x}, host CPU {cpu})"
                )));
            }
            Exit::Unknown(code) => {
                return Ok(ExitCause::Failed(format!(
                    "the hypervisor reported an exit that nothing asked for ({code})"
                )));
            }
        }
    }
    Ok(ExitCause::Killed)
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
