//! Measurements of named machines: commands in a warm one, its memory, and what two hundred of
//! them leave behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use bantam::{EngineChoice, Home, Machine, MachineBuilder, MachineName, Machines};

use crate::machine::run_true;
use crate::memory::{self, Usage};
use crate::program::{Bench, MEMORY_MIB, succeed};
use crate::report::{Report, milliseconds};
use crate::{Error, Progress};

/// How often the short command is run in one machine.
const ROUND_TRIPS: usize = 100;
/// How many machines are made and removed, natively in the rig fewer: its CPU is emulated.
const CYCLES: usize = 200;
const CYCLES_RIG: usize = 20;
/// Before what is held is looked at: threads, caches and the allocator's memory come with the
/// first ones.
const WARM_UP: usize = 3;

/// The one machine at a time that a measurement has, in a home of its own.
struct Named<'a> {
    bench: &'a Bench,
    home: tempfile::TempDir,
    name: MachineName,
    machines: Machines,
}

impl<'a> Named<'a> {
    fn new(bench: &'a Bench) -> Result<Self, Error> {
        let home = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
        let program =
            std::path::absolute(&bench.program).map_err(Error::file("finding", &bench.program))?;
        Ok(Self {
            bench,
            name: MachineName::parse("bench")?,
            machines: Machines::open(&Home::at(home.path())).vmm_program(program),
            home,
        })
    }

    fn builder(&self) -> Result<MachineBuilder, Error> {
        Ok(Machine::builder()
            .name(self.name.as_str())
            .image_source(self.bench.image_source()?)
            .memory_mib(MEMORY_MIB)
            .engine(EngineChoice::Only(self.bench.engine))
            .home(Home::at(self.home.path())))
    }

    fn start(&self) -> Result<Machine, Error> {
        self.builder()?.create()?;
        Ok(self.machines.start(&self.name)?)
    }

    /// `bantam exec` of `true` in the machine.
    fn exec(&self) -> Command {
        let mut exec = Command::new(&self.bench.program);
        exec.env("BANTAM_HOME", self.home.path()).args([
            "exec",
            "-n",
            self.name.as_str(),
            "--",
            "true",
        ]);
        exec
    }
}

impl Drop for Named<'_> {
    fn drop(&mut self) {
        // After a failure there may be a machine; without one there is nothing to remove.
        let _ = self.machines.delete(&self.name);
    }
}

/// `true` in a warm named machine, by the library and by the program; and what the machine has in
/// memory beside its guest's.
pub(crate) fn exec(bench: &Bench, report: &mut Report, progress: Progress) -> Result<(), Error> {
    progress.say("exec round trip in a named machine");
    let named = Named::new(bench)?;
    let machine = named.start()?;
    run_true(&machine)?;
    succeed(&mut named.exec())?;
    let (mut library, mut program) = (Vec::new(), Vec::new());
    for _ in 0..ROUND_TRIPS {
        let start = Instant::now();
        run_true(&machine)?;
        library.push(milliseconds(start.elapsed()));
        let start = Instant::now();
        succeed(&mut named.exec())?;
        program.push(milliseconds(start.elapsed()));
    }
    let pid = named.machines.inspect(&named.name)?.pid;
    let pid = pid.ok_or_else(|| Error::Other("the machine has no process".to_owned()))?;
    let vmm = Usage::of(pid, MEMORY_MIB)?;
    let (mut guest, mut qemu) = (vmm.guest_mib(), Vec::new());
    for child in memory::children_of(pid)? {
        let usage = Usage::of(child, MEMORY_MIB)?;
        guest = guest.max(usage.guest_mib());
        qemu.push(usage.beside_guest_mib());
    }
    for (name, unit, values) in [
        ("named: exec `true`, library", "ms", library),
        ("named: exec `true`, program", "ms", program),
        (
            "named: resident, machine's process without guest memory",
            "MiB",
            vec![vmm.beside_guest_mib()],
        ),
        (
            "named: ... of that its own, not of shared files",
            "MiB",
            vec![vmm.private_kib() as f64 / 1024.0],
        ),
        ("named: resident, QEMU without guest memory", "MiB", qemu),
        ("named: guest memory touched", "MiB", vec![guest]),
    ] {
        report.add(name, bench.engine.name(), unit, values);
    }
    Ok(())
}

/// What is held by this process, by its home and by the host.
#[derive(Clone, Copy)]
struct Held([(&'static str, &'static str, f64); 7]);

impl Held {
    fn now(home: &Path) -> Result<Self, Error> {
        let children = memory::children_of(std::process::id())?.len();
        Ok(Self([
            ("descriptors", "", entries(Path::new("/proc/self/fd"))?),
            ("threads", "", entries(Path::new("/proc/self/task"))?),
            ("processes", "", children as f64),
            ("memory", "KiB", memory::anonymous_kib()? as f64),
            ("files", "", files(home) as f64),
            ("host's processes", "", memory::processes()?.len() as f64),
            ("host's open files", "", open_files()?),
        ]))
    }
}

/// Machines made, started, used, stopped and removed, one after the other.
pub(crate) fn cycles(bench: &Bench, report: &mut Report, progress: Progress) -> Result<(), Error> {
    let cycles = match std::env::var_os("RIG") {
        Some(_) => CYCLES_RIG,
        None => CYCLES,
    };
    let named = Named::new(bench)?;
    for _ in 0..WARM_UP {
        cycle(&named)?;
    }
    let before = Held::now(named.home.path())?;
    let mut steps: Vec<(&str, Vec<f64>)> = Vec::new();
    for number in 1..=cycles {
        if number % 10 == 0 {
            progress.say(&format!("machines made and removed: {number}/{cycles}"));
        }
        for (index, (step, took)) in cycle(&named)?.into_iter().enumerate() {
            match steps.get_mut(index) {
                Some((_, values)) => values.push(milliseconds(took)),
                None => steps.push((step, vec![milliseconds(took)])),
            }
        }
    }
    let after = settled(&named, &before)?;
    let engine = bench.engine.name();
    for (step, values) in steps {
        let name = format!("named: {step}");
        report.add(name, engine, "ms", values);
    }
    for ((what, unit, before), (_, _, after)) in before.0.into_iter().zip(after.0) {
        let name = format!("growth in {cycles} machines: {what}");
        report.add(name, engine, unit, vec![after - before]);
    }
    Ok(())
}

/// What is held when the last machine's reaper has ended, too; it does so a moment later.
fn settled(named: &Named<'_>, before: &Held) -> Result<Held, Error> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let held = Held::now(named.home.path())?;
        let own = held.0.iter().zip(before.0).take(3);
        if own.into_iter().all(|(now, then)| now.2 <= then.2) || Instant::now() > deadline {
            return Ok(held);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// One machine's life, and how long each step of it took.
fn cycle(named: &Named<'_>) -> Result<[(&'static str, Duration); 5], Error> {
    let (machines, name) = (&named.machines, &named.name);
    let mut last = Instant::now();
    let mut lap = || {
        let took = last.elapsed();
        last = Instant::now();
        took
    };
    named.builder()?.create()?;
    let create = lap();
    let machine = machines.start(name)?;
    let start = lap();
    run_true(&machine)?;
    let exec = lap();
    machines.stop(name, Machine::STOP_GRACE)?;
    let stop = lap();
    machines.delete(name)?;
    Ok([
        ("create", create),
        ("start", start),
        ("first exec", exec),
        ("stop", stop),
        ("delete", lap()),
    ])
}

fn entries(dir: &Path) -> Result<f64, Error> {
    let entries = fs::read_dir(dir).map_err(Error::file("reading", dir))?;
    Ok(entries.count() as f64)
}

/// Files and directories below `dir`.
fn files(dir: &Path) -> usize {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => 1 + files(&entry.path()),
            _ => 1,
        })
        .sum()
}

/// Files that are open on the host, by the kernel's count.
fn open_files() -> Result<f64, Error> {
    let path = PathBuf::from("/proc/sys/fs/file-nr");
    let text = fs::read_to_string(&path).map_err(Error::file("reading", &path))?;
    text.split_whitespace()
        .next()
        .and_then(|count| count.parse().ok())
        .ok_or_else(|| Error::Other(format!("{} makes no sense: {text}", path.display())))
}
