//! From the start of a program with a virtual machine in it to the guest's `/init`, where time is
//! counted in instructions.
//!
//! `cargo xtask bench --filter virtual-time` runs this in the nested rig under `-icount`: one
//! instruction of the emulated machine, host and guest alike, is one nanosecond. Two processes take
//! part, because the time in which the kernel and the linker start a program belongs to it: one reads
//! the clock and starts the other, which boots a machine and prints when it got where.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::{Command, ExitCode, Stdio};

use bantam::{EngineChoice, EngineKind, Machine, Phase};
use rustix::time::{ClockId, clock_gettime};

use crate::Error;
use crate::program::MEMORY_MIB;

/// The hidden first argument of the process that starts others; the image and a number follow.
const STARTER: &str = "--virtual-time";
/// The hidden first argument of the process that boots; the image and the starter's clock follow.
const BOOTER: &str = "--virtual-time-boot";
/// Begins each line of the result.
const MARK: &str = "virtual-time:";

/// Is this one of the two processes? Then this is all that it does.
pub(crate) fn child() -> Option<ExitCode> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [mode, image, number] = args.as_slice() else {
        return None;
    };
    let image = image.to_str()?;
    let number = number.to_str()?.parse().ok()?;
    let result = match mode.to_str()? {
        STARTER => start(image, number),
        BOOTER => boot(image, number),
        _ => return None,
    };
    Some(match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody else has to read it.
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    })
}

fn start(image: &str, runs: u64) -> Result<(), Error> {
    let program = std::env::current_exe()
        .map_err(|error| Error::Other(format!("finding myself: {error}")))?;
    // The first brings everything into memory.
    for _ in 0..=runs {
        let mut boot = Command::new(&program);
        boot.args([BOOTER, image]).stdin(Stdio::null());
        boot.arg(clock_ns().to_string());
        let status = boot.status().map_err(Error::start(&boot))?;
        if !status.success() {
            return Err(Error::Other(format!("the machine did not boot: {status}")));
        }
    }
    Ok(())
}

fn boot(image: &str, started: u64) -> Result<(), Error> {
    let called = clock_ns();
    let machine = Machine::builder()
        .image(image)
        .memory_mib(MEMORY_MIB)
        .engine(EngineChoice::Only(EngineKind::Native))
        .start()?;
    let timeline = machine.timeline();
    let before = called.saturating_sub(started);
    let mut line = format!("{MARK} main={before}");
    for phase in [
        Phase::RootfsReady,
        Phase::VmCreated,
        Phase::MemoryReady,
        Phase::DevicesReady,
        Phase::FirstRun,
        Phase::GuestInit,
        Phase::AgentHello,
    ] {
        let at = timeline.get(phase).unwrap_or_default().as_nanos();
        line.push_str(&format!(" {}={}", phase.name(), u128::from(before) + at));
    }
    let (killed, cpu) = (clock_ns(), cpu_ns());
    machine.kill();
    let (took, used) = (clock_ns() - killed, cpu_ns() - cpu);
    line.push_str(&format!(" teardown_took={took} teardown_cpu={used}"));
    let _ = writeln!(io::stdout(), "{line}");
    Ok(())
}

/// The monotonic clock, which all processes read alike.
fn clock_ns() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// What this process's threads have used of the processor, also in the kernel.
fn cpu_ns() -> u64 {
    nanoseconds(ClockId::ProcessCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}
