//! The host's part of a start: what it costs from the call of the library to the first guest
//! instruction, and to take the machine away again.
//!
//! A guest is not needed for it, so it is measured on a software KVM, too, on the real CPU. Counted
//! are this process's processor time, which other processes do not change, and its system calls. A
//! process of its own starts the machines, so that its first one is a first one.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bantam::{EngineChoice, EngineKind, ImageSource, Machine};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tracing::Event;
use tracing::field::{Field, Visit};

use crate::events::{Listen, Listening};
use crate::program::{self, Bench, MEMORY_MIB};
use crate::report::{Measurement, Profile, Report, median_of, sorted};
use crate::{Error, Progress};

/// The hidden first argument of the process that starts machines; the second is the image.
const ONCE: &str = "--host-side-once";
/// Has the native engine taken although Linux would not boot.
const SOFTWARE_KVM: &str = "BANTAM_SOFTWARE_KVM";
/// Machines that one process starts, one after the other.
const STARTS: usize = 3;
/// Until the guest is given up: it cannot say hello on a software KVM.
const PATIENCE: Duration = Duration::from_millis(50);
/// What the machine's one vCPU uses from the kill to its end, among the steps.
const VCPU: &str = "vcpu";
/// The step at which the guest's first instruction is next.
const FIRST_RUN: &str = "first_run";
/// A file that is not there, looked for where the count of system calls begins.
const BEGIN: &str = "/bantam-bench-begin";

/// It needs no guest that runs, so it is measured once, on the host itself.
const ENGINE: &str = "any";

/// Processor time in microseconds at each step of one start, since the call.
type Steps = BTreeMap<String, u64>;

/// Is this the process that starts machines? Then this is all that it does.
pub(crate) fn child() -> Option<ExitCode> {
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() != Some(ONCE) {
        return None;
    }
    Some(match once(&args.next().unwrap_or_default()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody else has to read it.
            let _ = writeln!(std::io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    })
}

/// Starts machines and prints what each step had cost.
fn once(image: &str) -> Result<(), Error> {
    let log = StepLog::default();
    // Nothing else in this process sets one.
    let _ = tracing::subscriber::set_global_default(Listening(log.clone()));
    let mut all = Vec::new();
    for _ in 0..STARTS {
        log.take();
        let _ = fs::metadata(BEGIN);
        let started = Machine::builder()
            .image_source(
                ImageSource::parse(image).map_err(|error| Error::Other(error.to_string()))?,
            )
            .memory_mib(MEMORY_MIB)
            .engine(EngineChoice::Only(EngineKind::Native))
            .boot_timeout(PATIENCE)
            .start();
        // Where the guest does come up, it is killed like one that does not.
        let error = started.err();
        let steps = log.take();
        // That a software KVM's guest says nothing is no error here; that there is no KVM is one.
        match error {
            Some(error) if !steps.contains_key(FIRST_RUN) => return Err(error.into()),
            _ => all.push(steps),
        }
    }
    serde_json::to_writer(std::io::stdout().lock(), &Starts(all))
        .map_err(|error| Error::Other(format!("printing the steps: {error}")))
}

#[derive(Serialize, Deserialize)]
struct Starts(Vec<Steps>);

/// How often the calls are counted, each time of a process of its own: they hardly differ.
const COUNTED: usize = 3;
const SYSTEM_CALLS: &str = "host side: system calls, call to first vCPU run";

/// Measures the processor time and the system calls of a start.
pub(crate) fn measure(
    bench: &Bench,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    let mut values: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let mut add = |name, value| values.entry(name).or_default().push(value);
    for run in 1..=runs {
        progress.say(&format!("host side of a start: {run}/{runs}"));
        let starts = one_process(bench)?;
        for (n, steps) in starts.0.iter().enumerate() {
            let at = |step: &str| steps.get(step).map(|&us| us as f64 / 1000.0);
            let (Some(run), Some(kill), Some(gone)) = (at(FIRST_RUN), at("kill"), at("gone"))
            else {
                return Err(Error::Other(format!("steps are missing in {steps:?}")));
            };
            if n == 0 {
                add(
                    "host side: call to first vCPU run, first machine of a process",
                    run,
                );
            } else {
                add("host side: call to first vCPU run", run);
                for (step, name) in [
                    ("rootfs_ready", "host side: ... image found"),
                    ("vm_created", "host side: ... VM made"),
                    ("memory_ready", "host side: ... memory ready"),
                    ("devices_ready", "host side: ... devices ready"),
                ] {
                    at(step).into_iter().for_each(|ms| add(name, ms));
                }
                let vcpu = at(VCPU).unwrap_or(0.0);
                add("host side: teardown, without the vCPU", gone - kill - vcpu);
                add("host side: teardown, the vCPU until it stops", vcpu);
            }
        }
    }
    for (name, times) in values {
        let result = Measurement::new(name, ENGINE, "ms of CPU", times);
        report.results.extend(result);
    }
    program::find("strace")?;
    let mut profiles = Vec::new();
    for run in 1..=runs.min(COUNTED) {
        progress.say(&format!("host side of a start: system calls: {run}"));
        profiles.extend(system_calls(bench)?);
    }
    let totals = profiles.iter().map(|calls| calls.total as f64).collect();
    report.add(SYSTEM_CALLS, ENGINE, "calls", totals);
    report.profiles.extend(median_of(profiles));
    Ok(())
}

fn command(bench: &Bench, mut command: Command) -> Command {
    command.arg(ONCE).arg(&bench.image).env(SOFTWARE_KVM, "1");
    command
}

fn this_program() -> Result<std::path::PathBuf, Error> {
    std::env::current_exe().map_err(|error| Error::Other(format!("finding myself: {error}")))
}

fn one_process(bench: &Bench) -> Result<Starts, Error> {
    let mut command = command(bench, Command::new(this_program()?));
    let output = command.output().map_err(Error::start(&command))?;
    if !output.status.success() {
        return Err(Error::Other(format!(
            "starting machines: {}",
            String::from_utf8_lossy(&output.stderr)
        )));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::Other(format!("reading the steps: {error}")))
}

/// System calls from the call of the library to the first `KVM_RUN`, of all threads and by name, for
/// every start but the first.
fn system_calls(bench: &Bench) -> Result<Vec<Profile>, Error> {
    let log = tempfile::NamedTempFile::new()
        .map_err(Error::file("creating a file in", &std::env::temp_dir()))?;
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o"]).arg(log.path());
    strace.arg(this_program()?);
    program::succeed(&mut command(bench, strace))?;
    let text = fs::read_to_string(log.path()).map_err(Error::file("reading", log.path()))?;
    let starts = calls_between(&text);
    if starts.len() != STARTS {
        return Err(Error::Other(format!(
            "strace saw {} of {STARTS} starts",
            starts.len()
        )));
    }
    let profile = |calls: BTreeMap<String, u64>| Profile {
        name: SYSTEM_CALLS.to_owned(),
        engine: ENGINE,
        unit: "calls",
        total: calls.values().sum(),
        parts: sorted(calls),
        ..Profile::default()
    };
    Ok(starts.into_iter().skip(1).map(profile).collect())
}

/// Calls by name for each start in the log.
fn calls_between(log: &str) -> Vec<BTreeMap<String, u64>> {
    let (mut all, mut counts) = (Vec::new(), None);
    for line in log.lines() {
        if line.contains(BEGIN) {
            counts = Some(BTreeMap::new());
        } else if line.contains("KVM_RUN") {
            all.extend(counts.take());
        } else if let (Some(counts), Some(name)) = (&mut counts, call(line)) {
            *counts.entry(name).or_default() += 1;
        }
    }
    all
}

/// The name of the call that begins on this line of strace, which has the thread first. `ioctl` says
/// little without what is asked for: that is named, too.
fn call(line: &str) -> Option<String> {
    let (_, call) = line.split_once(' ')?;
    let (name, arguments) = call.trim_start().split_once('(')?;
    // `<... futex resumed>)` is the end of one, `--- SIGCHLD {...} ---` and `+++ exited +++` are none.
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return None;
    }
    let mut words = arguments
        .split([',', ')', ' '])
        .filter(|word| !word.is_empty());
    match (name, words.nth(1)) {
        ("ioctl", Some(request)) if !request.starts_with('<') => Some(format!("ioctl {request}")),
        _ => Some(name.to_owned()),
    }
}

/// Collects the steps that the engine tells.
#[derive(Clone, Default)]
struct StepLog(Arc<Mutex<Told>>);

#[derive(Default)]
struct Told {
    steps: Steps,
    /// The vCPU's thread.
    vcpu: Option<i32>,
    /// Its processor time when the machine was killed.
    vcpu_at_kill: Option<u64>,
    /// The same when it had left the guest for good.
    vcpu_at_end: Option<u64>,
}

impl Told {
    /// Takes in what a thread of the engine tells; `clock` reads the processor time of a thread or of
    /// all.
    fn hear(&mut self, mut step: Step, thread: i32, clock: impl Fn(Of) -> Option<u64>) {
        if let Some(name) = step.name {
            // A machine that is dropped is killed once more, when its threads are gone.
            let first = !self.steps.contains_key(&name);
            match name.as_str() {
                // The vCPU itself tells it. To look for its thread at the kill would be measured.
                FIRST_RUN => self.vcpu = Some(thread),
                "kill" if first => {
                    self.vcpu_at_kill = self.vcpu.and_then(|vcpu| clock(Of::Thread(vcpu)));
                    // The engine's number lacks what a vCPU that runs has used since the last tick:
                    // the kernel only brings that up to date when it is asked for the thread.
                    step.cpu_us = clock(Of::Process).unwrap_or(step.cpu_us);
                }
                _ => {}
            }
            self.steps.entry(name).or_insert(step.cpu_us);
        } else if step.vcpu_ended {
            self.vcpu_at_end = clock(Of::Thread(thread));
        }
    }

    /// All that was told, counted from the call.
    fn steps(mut self) -> Steps {
        let start = self.steps.get("call").copied().unwrap_or(0);
        for us in self.steps.values_mut() {
            *us = us.saturating_sub(start);
        }
        // One that had ended before the kill has no part in the teardown.
        let vcpu = match (self.vcpu_at_kill, self.vcpu_at_end) {
            (Some(kill), Some(end)) => end.saturating_sub(kill),
            _ => 0,
        };
        self.steps.insert(VCPU.to_owned(), vcpu);
        self.steps
    }
}

impl StepLog {
    /// What was told, counted from the call; then forgotten.
    fn take(&self) -> Steps {
        std::mem::take(&mut *self.lock()).steps()
    }

    fn lock(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listen for StepLog {
    const TARGET: &'static str = "bantam_vmm";

    fn hear(&self, event: &Event<'_>) {
        let mut step = Step::default();
        event.record(&mut step);
        let thread = nix::unistd::gettid().as_raw();
        self.lock().hear(step, thread, processor_time_us);
    }
}

/// Whose processor time.
#[derive(Clone, Copy)]
enum Of {
    /// All threads of this process; of one that runs on another CPU only up to its last tick or to
    /// when it was last asked for by itself.
    Process,
    /// One thread, to the moment: `/proc` is behind by up to a tick.
    Thread(i32),
}

/// What that has used of the processor. `None` if the thread has ended.
fn processor_time_us(of: Of) -> Option<u64> {
    let clock = match of {
        Of::Process => ClockId::CLOCK_PROCESS_CPUTIME_ID,
        // The kernel's numbers of such clocks: the complement of the thread's, "of a thread", "by the
        // scheduler".
        Of::Thread(thread) => ClockId::from_raw(!thread << 3 | 4 | 2),
    };
    let time = clock_gettime(clock).ok()?;
    u64::try_from(time.tv_sec() * 1_000_000 + time.tv_nsec() / 1000).ok()
}

#[derive(Default)]
struct Step {
    name: Option<String>,
    cpu_us: u64,
    vcpu_ended: bool,
}

impl Visit for Step {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "step" {
            self.name = Some(value.to_owned());
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "cpu_us" {
            self.cpu_us = value;
        }
        // Only its end is told with it.
        self.vcpu_ended |= field.name() == "vcpu";
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_up_to_the_first_run_of_each_start() {
        let log = "1 read(3)\n1 stat(\"/bantam-bench-begin\") = -1\n1 mmap(a) = 1\n\
            1 futex(x <unfinished ...>\n2 ioctl(4, KVM_CREATE_VM, 0) = 5\n\
            1 <... futex resumed>) = 0\n1 --- SIGUSR1 {si_pid=7 (me)} ---\n\
            2 ioctl(5, KVM_RUN\n2 ioctl(5, KVM_RUN\n1 close(3) = 0\n\
            1 stat(\"/bantam-bench-begin\") = -1\n2 +++ exited with 0 +++\n1 ioctl(5, KVM_RUN\n";
        let [first, second] = &calls_between(log)[..] else {
            panic!("two starts");
        };
        let first: Vec<_> = first.iter().map(|(name, n)| (name.as_str(), *n)).collect();
        assert_eq!(
            first,
            [("futex", 1), ("ioctl KVM_CREATE_VM", 1), ("mmap", 1)]
        );
        assert!(second.is_empty());
    }

    #[test]
    fn a_call_is_named_with_what_an_ioctl_asks_for() {
        let named = |line| call(line).unwrap_or_default();
        assert_eq!(named("12  getpid() = 12"), "getpid");
        assert_eq!(named("12 openat(AT_FDCWD, \"/a (b)\") = 3"), "openat");
        assert_eq!(
            named("12 ioctl(5, KVM_SET_MSRS, {}) = 1"),
            "ioctl KVM_SET_MSRS"
        );
        assert_eq!(
            named("12 ioctl(5, KVM_GET_TSC_KHZ) = 1"),
            "ioctl KVM_GET_TSC_KHZ"
        );
        assert_eq!(named("12 ioctl(5 <unfinished ...>"), "ioctl");
        assert_eq!(named("12 <... ioctl resumed>) = 0"), "");
    }

    fn step(name: &str, cpu_us: u64) -> Step {
        Step {
            name: Some(name.to_owned()),
            cpu_us,
            vcpu_ended: false,
        }
    }

    fn end() -> Step {
        Step {
            vcpu_ended: true,
            ..Step::default()
        }
    }

    const CALLER: i32 = 1;
    const THREAD: i32 = 2;

    #[test]
    fn a_machine_that_is_killed_twice_is_measured_at_the_first() {
        let mut told = Told::default();
        let gone = |_| None;
        told.hear(step("call", 100), CALLER, gone);
        told.hear(step("first_run", 200), THREAD, gone);
        let clock = |of| match of {
            Of::Thread(THREAD) => Some(700),
            Of::Thread(_) => None,
            Of::Process => Some(1000),
        };
        // Short of what the vCPU has used since the last tick.
        told.hear(step("kill", 840), CALLER, clock);
        told.hear(end(), THREAD, |_| Some(730));
        told.hear(step("gone", 1500), CALLER, gone);
        told.hear(step("kill", 1600), CALLER, gone);
        told.hear(step("gone", 1610), CALLER, gone);
        let steps = told.steps();
        assert_eq!((steps["kill"], steps["gone"]), (900, 1400));
        assert_eq!(steps[VCPU], 30);
    }

    #[test]
    fn a_vcpu_that_had_ended_has_no_part_in_the_teardown() {
        let mut told = Told::default();
        told.hear(step("first_run", 200), THREAD, |_| None);
        told.hear(end(), THREAD, |_| Some(730));
        told.hear(step("kill", 1000), CALLER, |_| None);
        assert_eq!(told.steps()[VCPU], 0);
    }
}
