//! When each phase of a machine's life was reached.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

macro_rules! phases {
    ($($(#[$doc:meta])* $name:ident => $text:literal,)*) => {
        /// The phases of a machine, in the order in which they are usually reached.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Phase { $($(#[$doc])* $name,)* }

        impl Phase {
            /// All phases, in order.
            pub const ALL: &'static [Phase] = &[$(Phase::$name,)*];

            /// The phase's name in tables and JSON.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Phase::$name => $text,)* }
            }
        }
    };
}

phases! {
    /// The caller asked for the machine (T0, always zero).
    Call => "call",
    /// The image's root file system is in the store (T1).
    RootfsReady => "rootfs_ready",
    /// The virtual machine exists: a hypervisor handle or a QEMU process (T2).
    VmCreated => "vm_created",
    /// Guest memory is mapped and holds kernel, initramfs and boot data (T3).
    MemoryReady => "memory_ready",
    /// Every device is wired (T4).
    DevicesReady => "devices_ready",
    /// The first vCPU is about to run its first guest instruction (T5).
    FirstRun => "first_run",
    /// The first exit of the first vCPU, or the first word of a driver to a device (T6).
    FirstExit => "first_exit",
    /// The guest's `/init` started, by the guest's own clock (T7).
    GuestInit => "guest_init",
    /// The agent said hello over vsock (T8).
    AgentHello => "agent_hello",
    /// The first byte of a command's output arrived (T9).
    FirstOutput => "first_output",
    /// The command's exit status arrived (T10).
    CommandExit => "command_exit",
    /// The machine is gone (T11).
    Teardown => "teardown",
}

/// Time stamps of one machine since the caller's call. Cheap to clone, safe to share.
#[derive(Debug, Clone)]
pub struct Timeline(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    start: Instant,
    marks: [OnceLock<Duration>; Phase::ALL.len()],
}

impl Timeline {
    /// Starts the clock.
    #[must_use]
    pub fn start() -> Self {
        let timeline = Self(Arc::new(Inner {
            start: Instant::now(),
            marks: Default::default(),
        }));
        timeline.mark_at(Phase::Call, Duration::ZERO);
        timeline
    }

    /// Records that `phase` is reached now. Only the first call for a phase counts.
    pub fn mark(&self, phase: Phase) {
        self.mark_at(phase, self.0.start.elapsed());
    }

    /// Records that `phase` was reached `at` after the call. Only the first call counts.
    pub fn mark_at(&self, phase: Phase, at: Duration) {
        // A second mark of a phase is expected (every command has a first byte) and ignored.
        if self.0.marks[phase as usize].set(at).is_ok() {
            trace_step(phase.name());
        }
    }

    /// When `phase` was reached, if it was.
    #[must_use]
    pub fn get(&self, phase: Phase) -> Option<Duration> {
        self.0.marks[phase as usize].get().copied()
    }

    /// The phases that were reached, in order, with their times since the call.
    pub fn reached(&self) -> impl Iterator<Item = (Phase, Duration)> + '_ {
        Phase::ALL
            .iter()
            .filter_map(|&phase| self.get(phase).map(|at| (phase, at)))
    }
}

/// Tells a subscriber that asks for it how much processor time this process has used when it
/// reaches a step: unlike the clock's, that is the same on a busy host.
pub(crate) fn trace_step(step: &str) {
    tracing::trace!(step, cpu_us = processor_time_us(), "reached");
}

fn processor_time_us() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000)
        .saturating_add(nanos / 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mark_of_a_phase_stays() {
        let timeline = Timeline::start();
        timeline.mark_at(Phase::FirstOutput, Duration::from_millis(3));
        timeline.mark(Phase::FirstOutput);
        assert_eq!(
            timeline.get(Phase::FirstOutput),
            Some(Duration::from_millis(3))
        );
    }

    #[test]
    fn phases_that_were_not_reached_are_left_out() {
        let timeline = Timeline::start();
        timeline.mark(Phase::VmCreated);
        let names: Vec<_> = timeline.reached().map(|(phase, _)| phase.name()).collect();
        assert_eq!(names, ["call", "vm_created"]);
    }
}
