//! `bantam run` and `bantam create`: new machines.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::time::Instant;

use bantam::{Availability, EngineKind, Machine, MachineBuilder, MachineName, probe_engines};

use super::args::{CreateArgs, MachineArgs, NameArg, RunArgs, given_name};
use super::command::{self, Context, Done};
use super::result::{self, Around};
use super::text;
use crate::args::{Global, THIS_PROGRAM};
use crate::failure::Failure;
use crate::show::{out, say};
use crate::{Outcome, progress};

pub(super) fn run(global: &Global, args: Box<RunArgs>) -> Outcome {
    let started = Instant::now();
    args.later.check()?;
    if args.machine.image == "-" && args.run.interactive {
        return Err(Failure::Usage(
            "standard input cannot be both the image (-I -) and the command's input (-i)".into(),
        ));
    }
    if args.detach {
        return run_detached(global, &args);
    }
    command::check(&args.run)?;
    let context = Context::new(&args.run.context)?;
    let mut builder = args.network.apply(builder(global, &args.machine)?)?;
    if let Some(name) = &args.name {
        builder = builder.hostname(MachineName::parse(name)?.as_str());
    }
    bantam::raise_descriptor_limit();
    let machine = builder.start()?;
    let notes = notes(machine.engine());
    if !args.output.json {
        for note in &notes {
            say(global, &format!("note: {note}"));
        }
    }
    let exec = machine
        .workload(&args.command, args.machine.entrypoint.as_deref())
        .map_err(|error| match error {
            bantam::Error::InvalidCommand(_) => Failure::Usage(format!(
                "no command was given, and the image '{image}' names none: add one, as in \
                 `bantam run -I {image} -- sh`",
                image = args.machine.image
            )),
            error => error.into(),
        })?;
    let done = command::perform(context.apply(exec), &args.run, &args.output);
    let report = machine.kill();
    let done = done?;
    let code = done.status().exit_code();
    if let Done::Kept(output) = done {
        let around = Around {
            machine: None,
            image: &args.machine.image,
            engine: report.engine,
            took: started.elapsed(),
            timeline: &report.timeline,
            network: machine.has_network(),
            notes: &notes,
        };
        result::print(output, &around)?;
    }
    if args.output.timings {
        let digest = &machine.image().digest;
        let table = result::timings_table(&report.timeline, report.engine, digest);
        // A closed standard error does not matter.
        let _ = write!(io::stderr(), "{table}");
    }
    Ok(code)
}

/// `run -d`: a named machine with the command as its workload.
fn run_detached(global: &Global, args: &RunArgs) -> Outcome {
    if args.run.tty || args.run.interactive {
        return Err(Failure::Usage(
            "-i and -t make no sense with --detach: use `bantam exec` or `bantam shell`".into(),
        ));
    }
    let name = NameArg {
        name: args.name.clone(),
    }
    .resolve()?;
    let builder = builder(global, &args.machine)?.ephemeral(args.rm);
    let builder = args.network.apply(builder)?;
    let builder = named(builder, &name, &args.label);
    let builder = defaults(builder, &args.run.context)?;
    let builder = workload(builder, &args.command, args.machine.entrypoint.as_deref())?;
    let machine = builder.start()?;
    for note in notes(machine.engine()) {
        say(global, &format!("note: {note}"));
    }
    out(&format!(
        "Machine '{name}' running in background\n\n\
         To interact:\n  bantam machine exec --name {name} -- <command>\n\n\
         To stop:\n  bantam machine stop --name {name}\n"
    ))?;
    Ok(0)
}

pub(super) fn create(global: &Global, args: Box<CreateArgs>) -> Outcome {
    args.later.check()?;
    let name = match given_name(args.name.as_deref())? {
        Some(name) => name,
        None => MachineName::generate()?,
    };
    let builder = builder(global, &args.machine)?.stop_on_exit(args.stop_on_exit);
    let builder = args.network.apply(builder)?;
    let builder = named(builder, &name, &args.label);
    let builder = defaults(builder, &args.context)?;
    let builder = workload(builder, &args.command, args.machine.entrypoint.as_deref())?;
    let info = builder.create()?;
    if global.quiet {
        out(&format!("{name}\n"))?;
        return Ok(0);
    }
    let ports = match info.network.map_or(0, |network| network.ports.len()) {
        0 => String::new(),
        ports => format!("  Ports: {ports}\n"),
    };
    out(&format!(
        "Created machine: {name}\n  CPUs: {}, Memory: {} MiB\n{ports}\n\
         Use 'bantam machine start --name {name}' to start the machine\n\
         Then use 'bantam machine exec --name {name} -- <command>' to run commands\n",
        info.cpus, info.memory_mib
    ))?;
    Ok(0)
}

fn named(
    builder: MachineBuilder,
    name: &MachineName,
    labels: &[(String, String)],
) -> MachineBuilder {
    let builder = builder.name(name.as_str()).vmm_program(THIS_PROGRAM);
    labels
        .iter()
        .fold(builder, |builder, (key, value)| builder.label(key, value))
}

fn builder(global: &Global, args: &MachineArgs) -> Result<MachineBuilder, Failure> {
    let mut builder = Machine::builder()
        .image(&args.image)
        .home(global.home()?)
        .pull(args.pull.into())
        .registries(global.registries())
        .cpus(args.cpus)
        .memory_mib(args.mem)
        .engine(args.engine)
        .progress(progress::reporter(global.quiet));
    if let Some(gib) = args.disk.gib() {
        builder = builder.disk_gib(gib);
    }
    if let Some(platform) = &args.platform {
        builder = builder.platform(platform.clone());
    }
    if let Some(kernel) = &args.kernel {
        builder = builder.kernel(absolute(kernel)?);
    }
    if let Some(words) = &args.kernel_args {
        builder = builder.kernel_args(words);
    }
    Ok(builder)
}

/// A machine's process works elsewhere.
fn absolute(path: &std::path::Path) -> Result<std::path::PathBuf, Failure> {
    std::path::absolute(path).map_err(|source| {
        Failure::Library(bantam::Error::Io {
            what: "cannot tell where the kernel is",
            source,
        })
    })
}

/// What commands in a named machine find around them.
fn defaults(
    mut builder: MachineBuilder,
    args: &super::args::ContextArgs,
) -> Result<MachineBuilder, Failure> {
    for (name, value) in command::environment(&args.env)? {
        builder = builder.env(text(&name)?, text(&value)?);
    }
    if let Some(dir) = &args.workdir {
        builder = builder.workdir(text(dir)?);
    }
    if let Some(user) = &args.user {
        builder = builder.user(user);
    }
    Ok(builder)
}

fn workload(
    builder: MachineBuilder,
    command: &[OsString],
    entrypoint: Option<&OsStr>,
) -> Result<MachineBuilder, Failure> {
    if command.is_empty() && entrypoint.is_none() {
        return Ok(builder);
    }
    let words: Vec<_> = command
        .iter()
        .map(|word| text(word))
        .collect::<Result<_, _>>()?;
    let entrypoint = entrypoint.map(text).transpose()?;
    Ok(builder.workload(words, entrypoint.as_deref()))
}

/// What the user should know about how a machine runs.
pub(super) fn notes(engine: EngineKind) -> Vec<String> {
    match engine {
        EngineKind::Native => Vec::new(),
        EngineKind::Emulated => {
            let why = match probe_engines().native {
                Availability::Ready(_) => "as asked".to_owned(),
                Availability::Unusable(reason) => reason,
            };
            vec![format!(
                "this machine runs under software emulation, many times slower than hardware: {why}"
            )]
        }
    }
}
