//! Measures machines of one engine on this host and prints the results as JSON.
//!
//! `cargo xtask bench` builds what this needs, runs it for each engine (the native one in the
//! nested rig where the host has no KVM for it) and prints a table. `docs/performance.md` says
//! how each number is made.

mod boot;
mod counts;
mod exits;
mod images;
mod machine;
mod memory;
mod named;
mod program;
mod report;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use bantam::{Availability, EngineKind, ImageSource, probe_engines};
use clap::{Parser, ValueEnum};

use crate::exits::ExitLog;
use crate::program::Bench;
use crate::report::{Report, Skipped};

#[derive(Parser)]
struct Args {
    /// Measure machines of this engine
    #[arg(long)]
    engine: Engine,
    /// Only say, by the exit status, whether the engine works here
    #[arg(long)]
    check: bool,
    /// Only measurements whose name contains this
    #[arg(long, default_value = "")]
    filter: String,
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
    let report = measure(args, engine);
    let printed = serde_json::to_writer(io::stdout().lock(), &report);
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Makes every measurement that the filter names. One that fails does not stop the others.
fn measure(args: Args, engine: EngineKind) -> Report {
    let bench = Bench {
        engine,
        program: args.program,
        image: args.image,
        system_map: args.system_map,
    };
    let (runs, progress) = (args.runs.max(1), Progress(engine));
    let exits = ExitLog::default();
    // Nothing else in this program sets one.
    let _ = tracing::subscriber::set_global_default(exits.clone());
    type Measure<'a> = Box<dyn Fn(&mut Report) -> Result<(), Error> + 'a>;
    let bench = &bench;
    let counted = runs.min(3);
    let mut all: Vec<(&'static str, Measure<'_>)> = Vec::new();
    match engine {
        EngineKind::Emulated => {
            all.push((
                "boot-instructions-1",
                Box::new(move |r| boot::instructions(bench, 1, counted, r, progress)),
            ));
            all.push((
                "boot-instructions-4",
                Box::new(move |r| boot::instructions(bench, 4, counted, r, progress)),
            ));
            // Has no engine: once is enough.
            let archive = &args.pull_image;
            all.push((
                "pull",
                Box::new(move |r| images::pull(&bench.program, archive, counted, r, progress)),
            ));
        }
        EngineKind::Native => all.push((
            "exits",
            Box::new(|r| machine::exits(bench, counted, &exits, r, progress)),
        )),
    }
    if program::find("strace").is_ok() {
        all.push((
            "system-calls",
            Box::new(move |r| program::system_calls(bench, counted, r, progress)),
        ));
    }
    all.push((
        "first-output",
        Box::new(move |r| program::first_output(bench, runs, r, progress)),
    ));
    all.push(("exec", Box::new(move |r| machine::exec(bench, r, progress))));
    all.push((
        "memory",
        Box::new(move |r| machine::resident(bench, counted, r, progress)),
    ));
    all.push((
        "named-exec",
        Box::new(move |r| named::exec(bench, r, progress)),
    ));
    all.push((
        "cycles",
        Box::new(move |r| named::cycles(bench, r, progress)),
    ));
    all.push((
        "stream",
        Box::new(move |r| machine::stream(bench, r, progress)),
    ));

    let mut report = Report::default();
    for (name, measure) in all {
        if name == "cycles" && args.filter.is_empty() {
            let reason = "takes minutes: only with --filter cycles".to_owned();
            report.skipped.push(Skipped { name, reason });
        } else if name.contains(&args.filter)
            && let Err(error) = measure(&mut report)
        {
            let reason = error.to_string();
            progress.say(&format!("{name}: {reason}"));
            report.skipped.push(Skipped { name, reason });
        }
    }
    report
}
