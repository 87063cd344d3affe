//! Measures machines of one engine on this host and prints the results as JSON.
//!
//! `cargo xtask bench` builds what this needs, runs it for each engine (the native one in the
//! nested rig where the host has no KVM for it) and prints a table. `docs/performance.md` says
//! how each number is made.

mod boot;
mod counts;
mod entries;
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

use crate::entries::{Context, ENTRIES, Entry};
use crate::events::Listening;
use crate::exits::ExitLog;
use crate::facts::Facts;
use crate::program::Bench;
use crate::report::Report;

/// Some measurement failed; the others are printed.
const FAILED: u8 = 1;
/// A filter names nothing.
const USAGE: u8 = 2;

#[derive(Parser)]
struct Args {
    /// Measure machines of this engine, or what needs none
    #[arg(long)]
    engine: Engine,
    /// Only say, by the exit status, whether the engine works here
    #[arg(long)]
    check: bool,
    /// Only print the names for --filter; "asked" after one that is not measured without it
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
    /// What needs no machine that boots.
    Any,
}

impl Engine {
    /// As results are labelled.
    fn name(self) -> &'static str {
        match self {
            Self::Native => EngineKind::Native.name(),
            Self::Emulated => EngineKind::Emulated.name(),
            Self::Any => "any",
        }
    }

    /// The engine of the machines that are started. Without one that boots, machines are still started
    /// natively, on any KVM.
    fn kind(self) -> EngineKind {
        match self {
            Self::Native | Self::Any => EngineKind::Native,
            Self::Emulated => EngineKind::Emulated,
        }
    }

    /// Whether this host has what it needs.
    fn usable(self) -> Result<(), Error> {
        if matches!(self, Self::Any) {
            return Ok(());
        }
        match probe_engines().availability(self.kind()) {
            Availability::Ready(_) => Ok(()),
            // The rig is there for its KVM.
            Availability::Unusable(why) if std::env::var_os("RIG").is_some() => {
                Err(Error::Other(format!("in the rig: {why}")))
            }
            Availability::Unusable(why) => Err(Error::Missing(why.clone())),
        }
    }
}

/// Why there is no measurement. All but [`Error::Missing`] are failures.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// This host lacks what the measurement needs, which was found out before it began.
    #[error("{0}")]
    Missing(String),
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
struct Progress(&'static str);

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
    let engine = args.engine;
    if args.check {
        return match engine.usable() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    if args.list {
        for entry in ENTRIES.iter().filter(|entry| entry.is_for(engine)) {
            let _ = writeln!(io::stdout(), "{}", entry.listed());
        }
        return ExitCode::SUCCESS;
    }
    let entries = match entries::chosen(ENTRIES, engine, &args.filter) {
        Ok(entries) => entries,
        Err(unknown) => {
            let _ = writeln!(io::stderr(), "error: {unknown}");
            return ExitCode::from(USAGE);
        }
    };
    let report = measure(args, &entries);
    let printed = serde_json::to_writer(io::stdout().lock(), &report);
    if printed.is_ok() && report.failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FAILED)
    }
}

/// Makes these measurements.
fn measure(args: Args, entries: &[&Entry]) -> Report {
    let engine = args.engine;
    let bench = Bench {
        engine: engine.kind(),
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
        progress: Progress(engine.name()),
    };
    let mut report = Report::of(engine.name());
    entries::run(
        entries,
        &args.filter,
        &engine.usable(),
        &context,
        &mut report,
    );
    report.host = Some(Facts::read());
    report
}
