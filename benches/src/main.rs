//! Measures machines of one engine on this host and prints the results as JSON.
//!
//! `cargo xtask bench` builds what this needs, runs it for each engine (the native one in the
//! nested rig where the host has no KVM for it) and prints a table. `docs/performance.md` says
//! how each number is made.

mod boot;
mod counts;
mod events;
mod exits;
mod facts;
mod hostside;
mod images;
mod machine;
mod memory;
mod named;
mod net;
mod onemore;
mod peers;
mod program;
mod report;
mod virtual_time;
mod wakeups;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use bantam::{Availability, EngineKind, ImageSource, probe_engines};
use clap::{Parser, ValueEnum};

use crate::events::Listening;
use crate::exits::ExitLog;
use crate::facts::Facts;
use crate::program::Bench;
use crate::report::Report;

#[derive(Parser)]
struct Args {
    /// Measure machines of this engine
    #[arg(long)]
    engine: Engine,
    /// Only say, by the exit status, whether the engine works here
    #[arg(long)]
    check: bool,
    /// Only print the names for --filter
    #[arg(long)]
    list: bool,
    /// Only measurements whose name contains this (repeatable)
    #[arg(long)]
    filter: Vec<String>,
    /// How often each is repeated
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// The `bantam` program
    #[arg(long, default_value = "bantam")]
    program: PathBuf,
    /// An image with busybox
    #[arg(long, default_value = "busybox")]
    image: PathBuf,
    /// An archive of an image to pull
    #[arg(long, default_value = "debian-12-python.tar")]
    pull_image: PathBuf,
    /// An image with curl and iperf3
    #[arg(long, default_value = "network.tar")]
    network_image: PathBuf,
    /// The folder of smolvm's Python package, if it was fetched
    #[arg(long, default_value = "smolvm")]
    smolvm: PathBuf,
    /// The guest kernel's System.map
    #[arg(long)]
    system_map: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Engine {
    Native,
    Emulated,
}

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{doing} {path}: {source}", path = path.display())]
    File {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("starting {program}: {source}")]
    Start { program: String, source: io::Error },
    #[error("{program} failed ({status}): {said}")]
    Program {
        program: String,
        status: String,
        said: String,
    },
    #[error(transparent)]
    Machine(#[from] bantam::Error),
    #[error("{0}")]
    Other(String),
}

impl Error {
    fn file(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::File {
            doing,
            path,
            source,
        }
    }

    fn start(command: &Command) -> impl FnOnce(io::Error) -> Self + use<> {
        let program = command.get_program().to_string_lossy().into_owned();
        move |source| Self::Start { program, source }
    }
}

impl Bench {
    fn image_source(&self) -> Result<ImageSource, Error> {
        ImageSource::parse(&self.image.to_string_lossy())
            .map_err(|error| Error::Other(format!("image {}: {error}", self.image.display())))
    }
}

/// Says on standard error what is being measured.
#[derive(Clone, Copy)]
struct Progress(EngineKind);

impl Progress {
    fn say(self, what: &str) {
        // Nobody has to read it.
        let _ = writeln!(io::stderr(), "measuring ({}) {what}", self.0);
    }
}

fn main() -> ExitCode {
    if let Some(code) = hostside::child().or_else(virtual_time::child) {
        return code;
    }
    let args = Args::parse();
    let engine = match args.engine {
        Engine::Native => EngineKind::Native,
        Engine::Emulated => EngineKind::Emulated,
    };
    let availability = probe_engines().availability(engine).clone();
    if args.check {
        return match availability {
            Availability::Ready(_) => ExitCode::SUCCESS,
            Availability::Unusable(_) => ExitCode::FAILURE,
        };
    }
    if args.list {
        for entry in ENTRIES {
            let _ = writeln!(io::stdout(), "{}", entry.name);
        }
        return ExitCode::SUCCESS;
    }
    let report = measure(args, engine);
    let printed = serde_json::to_writer(io::stdout().lock(), &report);
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// What a measurement is made with.
struct Context<'a> {
    bench: &'a Bench,
    /// How often times are taken.
    runs: usize,
    /// How often counts are: they hardly differ.
    counted: usize,
    /// The folder of smolvm's Python package, if it was fetched.
    smolvm: &'a Path,
    /// An archive of an image to pull.
    pull_image: &'a Path,
    /// An image with curl and iperf3.
    network_image: &'a Path,
    /// VM exits of this process's machines.
    exits: &'a ExitLog,
    progress: Progress,
}

/// One entry of the list below.
struct Entry {
    /// What `--filter` looks at.
    name: &'static str,
    on: On,
    measure: fn(&Context<'_>, &mut Report) -> Result<(), Error>,
}

/// When an entry is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    /// For each engine.
    Both,
    /// For machines on the native engine.
    Native,
    /// For machines on the emulated engine; also what has no engine and is wanted once.
    Emulated,
    /// For each engine, but only when `--filter` names it: it takes minutes.
    Asked,
}

/// Everything that can be measured, in the order in which it is.
const ENTRIES: &[Entry] = &[
    entry("boot-instructions-1", On::Emulated, |c, r| {
        boot::instructions(c.bench, 1, c.counted, r, c.progress)
    }),
    entry("boot-instructions-4", On::Emulated, |c, r| {
        boot::instructions(c.bench, 4, c.counted, r, c.progress)
    }),
    entry("exits", On::Native, |c, r| {
        machine::exits(c.bench, c.counted, c.exits, r, c.progress)
    }),
    // Needs a KVM and no guest, so a software one will do.
    entry("host-side", On::Emulated, |c, r| {
        hostside::measure(c.bench, c.runs, r, c.progress)
    }),
    entry("system-calls", On::Both, |c, r| {
        program::system_calls(c.bench, c.counted, r, c.progress)
    }),
    entry("bytes-read", On::Both, |c, r| {
        program::read_bytes(c.bench, c.counted, r, c.progress)
    }),
    entry("memory", On::Both, |c, r| {
        machine::resident(c.bench, c.counted, r, c.progress)
    }),
    entry("one-more", On::Native, |c, r| {
        onemore::measure(c.bench, r, c.progress)
    }),
    entry("first-output", On::Both, |c, r| {
        program::first_output(c.bench, c.runs, r, c.progress)
    }),
    entry("peer-qemu-microvm", On::Both, |c, r| {
        peers::microvm(c.bench, c.runs, r, c.progress)
    }),
    entry("peer-smolvm", On::Asked, |c, r| {
        peers::smolvm(c.bench, c.smolvm, c.counted, r, c.progress)
    }),
    entry("exec", On::Both, |c, r| {
        machine::exec(c.bench, r, c.progress)
    }),
    entry("wake-ups", On::Both, |c, r| {
        wakeups::measure(c.bench, r, c.progress)
    }),
    entry("named-exec", On::Both, |c, r| {
        named::exec(c.bench, r, c.progress)
    }),
    entry("stream", On::Both, |c, r| {
        machine::stream(c.bench, r, c.progress)
    }),
    // The others stand behind QEMU's card only.
    entry("net", On::Emulated, |c, r| {
        net::peers(c.bench, c.network_image, c.counted, r, c.progress)
    }),
    entry("pull", On::Emulated, |c, r| {
        images::pull(&c.bench.program, c.pull_image, c.counted, r, c.progress)
    }),
    entry("cycles", On::Asked, |c, r| {
        named::cycles(c.bench, r, c.progress)
    }),
];

const fn entry(
    name: &'static str,
    on: On,
    measure: fn(&Context<'_>, &mut Report) -> Result<(), Error>,
) -> Entry {
    Entry { name, on, measure }
}

impl Entry {
    fn is_for(&self, engine: EngineKind) -> bool {
        match self.on {
            On::Both | On::Asked => true,
            On::Native => engine == EngineKind::Native,
            On::Emulated => engine == EngineKind::Emulated,
        }
    }

    fn is_named(&self, filters: &[String]) -> bool {
        filters.iter().any(|filter| self.name.contains(filter))
    }
}

/// Makes every measurement that the filters name. One that fails does not stop the others.
fn measure(args: Args, engine: EngineKind) -> Report {
    let bench = Bench {
        engine,
        program: args.program,
        image: args.image,
        system_map: args.system_map,
    };
    let runs = args.runs.max(1);
    let exits = ExitLog::default();
    // Nothing else in this program sets one.
    let _ = tracing::subscriber::set_global_default(Listening(exits.clone()));
    let context = Context {
        bench: &bench,
        runs,
        counted: runs.min(3),
        smolvm: &args.smolvm,
        pull_image: &args.pull_image,
        network_image: &args.network_image,
        exits: &exits,
        progress: Progress(engine),
    };
    let mut report = Report::default();
    for entry in ENTRIES.iter().filter(|entry| entry.is_for(engine)) {
        let Entry { name, on, measure } = entry;
        if args.filter.is_empty() && *on == On::Asked {
            report.skip(*name, format!("takes minutes: only with --filter {name}"));
        } else if (args.filter.is_empty() || entry.is_named(&args.filter))
            && let Err(error) = measure(&context, &mut report)
        {
            context.progress.say(&format!("{name}: {error}"));
            report.skip(*name, error.to_string());
        }
    }
    report.host = Some(Facts::read());
    report
}
