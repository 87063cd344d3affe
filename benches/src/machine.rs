//! Measurements of a machine through the library.

use std::io::{self, Write};
use std::time::Instant;

use bantam::{EngineChoice, Machine, Phase};

use crate::exits::ExitLog;
use crate::memory::{self, Usage};
use crate::peers;
use crate::program::{Bench, MEMORY_MIB};
use crate::report::{Profile, Report, median_of, milliseconds, sorted};
use crate::{Error, Progress};

/// How often the short command is run in one machine.
const ROUND_TRIPS: usize = 200;
/// What is streamed.
const STREAM_MIB: u64 = 1024;
/// How often its speed is taken.
const STREAMS: usize = 3;
/// Memory is looked at once for so many bytes of output.
const SAMPLE_BYTES: u64 = 32 << 20;

pub(crate) fn start(bench: &Bench) -> Result<Machine, Error> {
    Ok(Machine::builder()
        .image_source(bench.image_source()?)
        .memory_mib(MEMORY_MIB)
        .engine(EngineChoice::Only(bench.engine))
        .start()?)
}

pub(crate) fn run_true(machine: &Machine) -> Result<(), Error> {
    let status = machine.exec(["true"]).output()?.status;
    if status.success() {
        Ok(())
    } else {
        Err(Error::Other(format!("`true` in the machine: {status:?}")))
    }
}

/// `true` in a warm machine, from the call to its exit status; and the time of `start` itself.
pub(crate) fn exec(bench: &Bench, report: &mut Report, progress: Progress) -> Result<(), Error> {
    progress.say("exec round trip");
    let machine = start(bench)?;
    let hello = machine.timeline().get(Phase::AgentHello);
    run_true(&machine)?;
    let mut times = Vec::new();
    for _ in 0..ROUND_TRIPS {
        let start = Instant::now();
        run_true(&machine)?;
        times.push(milliseconds(start.elapsed()));
    }
    let engine = bench.engine.name();
    report.add("exec `true` round trip", engine, "ms", times);
    let hello = hello.map(milliseconds).into_iter().collect();
    report.add("start call to agent hello", engine, "ms", hello);
    Ok(())
}

/// What the host spends on an idle machine beside the guest's memory, by mapping.
pub(crate) fn resident(
    bench: &Bench,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    const OURS: &str = "resident: this process, without guest memory";
    const QEMU: &str = "resident: QEMU, without guest memory";
    const GUEST: &str = peers::TOUCHED;
    let (mut ours, mut qemu, mut guest) = (Vec::new(), Vec::new(), Vec::new());
    let mut all = Vec::new();
    // The first machine brings the image into the store and lets the heap grow.
    for run in 0..=runs {
        progress.say(&format!("memory: {run}/{runs}"));
        let machine = start(bench)?;
        run_true(&machine)?;
        if run == 0 {
            machine.kill();
            continue;
        }
        let own = Usage::of(std::process::id(), MEMORY_MIB)?;
        let mut guest_mib = own.guest_mib();
        let mut beside_mib = own.beside_guest_mib();
        ours.push(own);
        for child in memory::children()? {
            let usage = Usage::of(child, MEMORY_MIB)?;
            guest_mib = guest_mib.max(usage.guest_mib());
            beside_mib += usage.beside_guest_mib();
            qemu.push(usage);
        }
        guest.push(guest_mib);
        all.push(beside_mib);
        machine.kill();
    }
    let engine = bench.engine.name();
    for (name, usages) in [(OURS, ours), (QEMU, qemu)] {
        let values = usages.iter().map(Usage::beside_guest_mib).collect();
        report.add(name, engine, "MiB", values);
        let profiles = usages.into_iter().map(|usage| Profile {
            name: name.to_owned(),
            engine,
            unit: "KiB",
            total: usage.beside_guest_kib(),
            parts: sorted(usage.mappings()),
            ..Profile::default()
        });
        report.profiles.extend(median_of(profiles.collect()));
    }
    report.add(GUEST, engine, "MiB", guest);
    report.add(peers::BESIDE, engine, "MiB", all);
    Ok(())
}

/// VM exits that the host's kernel did not answer by itself: a boot, one `true`, then killed.
pub(crate) fn exits(
    bench: &Bench,
    runs: usize,
    log: &ExitLog,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    const EXITS: &str = "exits to user space of a boot";
    let engine = bench.engine.name();
    let (mut totals, mut profiles) = (Vec::new(), Vec::new());
    // The first boot brings the image into the store and the files into the page cache.
    for run in 0..=runs {
        progress.say(&format!("VM exits: {run}/{runs}"));
        log.take();
        let machine = start(bench)?;
        run_true(&machine)?;
        machine.kill();
        let counts = log.take();
        if counts.is_empty() {
            return Err(Error::Other("the vCPU's end was not logged".to_owned()));
        }
        if run == 0 {
            continue;
        }
        let profile = Profile {
            name: EXITS.to_owned(),
            engine,
            unit: "exits",
            total: counts.values().sum(),
            parts: sorted(counts),
            ..Profile::default()
        };
        totals.push(profile.total as f64);
        profiles.push(profile);
    }
    report.add(EXITS, engine, "exits", totals);
    report.profiles.extend(median_of(profiles));
    Ok(())
}

/// A command's output as a stream: once for what this process's memory beside the guest's grows by
/// meanwhile, on a heap that has not streamed yet, then for the speed alone, as looking takes time, in
/// turns with a pipe in the guest.
pub(crate) fn stream(bench: &Bench, report: &mut Report, progress: Progress) -> Result<(), Error> {
    let mib = STREAM_MIB;
    progress.say(&format!("stream of {mib} MiB: memory"));
    let machine = start(bench)?;
    run_true(&machine)?;
    let mut sink = Sink {
        sampled: 0,
        bytes: 0,
        samples_kib: vec![own_kib()?],
    };
    // In large pieces: busybox's `head` reads and writes byte by byte, which is what it would measure.
    let source = format!("dd if=/dev/zero bs=65536 count={}", mib << 4);
    pour(&machine, &source, &mut sink)?;
    let into_pipe = format!("{source} 2>/dev/null | cat >/dev/null");
    let megabytes = (mib << 20) as f64 / 1e6;
    let (mut speeds, mut pipe_speeds) = (Vec::new(), Vec::new());
    for run in 1..=STREAMS {
        progress.say(&format!("stream of {mib} MiB: {run}/{STREAMS}"));
        let start = Instant::now();
        pour(&machine, &source, &mut io::sink())?;
        speeds.push(megabytes / start.elapsed().as_secs_f64());
        let start = Instant::now();
        let piped = machine.exec(["sh", "-c", &into_pipe]).output()?;
        pipe_speeds.push(megabytes / start.elapsed().as_secs_f64());
        if !piped.status.success() {
            return Err(Error::Other(format!("{into_pipe}: {:?}", piped.status)));
        }
    }
    let engine = bench.engine.name();
    report.add("stream from a command", engine, "MB/s", speeds);
    report.add("stream: a pipe in the guest", engine, "MB/s", pipe_speeds);
    let (first_half, _) = sink.samples_kib.split_at(sink.samples_kib.len() / 2);
    let most = |samples: &[u64]| samples.iter().copied().max().unwrap_or(0);
    let before = sink.samples_kib.first().copied().unwrap_or(0);
    for (name, from) in [
        ("memory growth while streaming", before),
        (
            "memory growth while streaming: in the second half",
            most(first_half),
        ),
    ] {
        let growth = most(&sink.samples_kib).saturating_sub(from);
        report.add(name, engine, "KiB", vec![growth as f64]);
    }
    Ok(())
}

/// The command's whole output into the sink.
fn pour(machine: &Machine, source: &str, sink: &mut dyn Write) -> Result<(), Error> {
    let mut complaint = Vec::new();
    let finished = machine.exec(source.split(' ')).pipe(sink, &mut complaint)?;
    if finished.stdout_bytes == STREAM_MIB << 20 {
        return Ok(());
    }
    Err(Error::Other(format!(
        "{} bytes came of {STREAM_MIB} MiB: {}",
        finished.stdout_bytes,
        String::from_utf8_lossy(&complaint)
    )))
}

/// This process's memory that is neither a file's nor the guest's.
fn own_kib() -> Result<u64, Error> {
    Ok(Usage::of(std::process::id(), MEMORY_MIB)?.private_kib())
}

struct Sink {
    bytes: u64,
    sampled: u64,
    /// This process's memory before the stream and during it.
    samples_kib: Vec<u64>,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes += bytes.len() as u64;
        if self.bytes - self.sampled >= SAMPLE_BYTES {
            self.sampled = self.bytes;
            self.samples_kib.push(own_kib().map_err(io::Error::other)?);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
