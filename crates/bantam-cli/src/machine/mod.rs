//! The commands about machines.

mod args;
mod command;
mod cp;
mod later;
mod lifecycle;
mod list;
mod network;
mod result;
mod run;
mod stats;

use std::ffi::OsStr;
use std::time::Instant;

pub(crate) use args::MachineCommand;
use args::{ExecArgs, ShellArgs};
use command::{Context, Done};
use result::Around;

use crate::Outcome;
use crate::args::Global;
use crate::failure::Failure;
use crate::show::out;
use crate::terminal;

pub(crate) fn machine(global: &Global, command: MachineCommand) -> Outcome {
    match command {
        MachineCommand::Run(args) => run::run(global, args),
        MachineCommand::Create(args) => run::create(global, args),
        MachineCommand::Start(args) => lifecycle::start(global, &args),
        MachineCommand::Stop(args) => lifecycle::stop(global, &args),
        MachineCommand::Restart(args) => lifecycle::restart(global, &args),
        MachineCommand::Delete(args) => lifecycle::delete(global, &args),
        MachineCommand::Update(args) => lifecycle::update(global, &args),
        MachineCommand::Exec(args) => exec(global, &args),
        MachineCommand::Shell(args) => shell(global, &args),
        MachineCommand::Ls(args) => list::ls(global, &args),
        MachineCommand::Status(args) => list::status(global, &args),
        MachineCommand::Stats(args) => stats::stats(global, &args),
        MachineCommand::Cp(args) => cp::cp(global, &args),
        MachineCommand::Logs(args) => list::logs(global, &args),
        MachineCommand::EgressEvents(args) => network::events(global, &args),
        MachineCommand::DataDir(args) => list::data_dir(global, &args),
        MachineCommand::Later(later) => Err(later.refusal()),
    }
}

fn exec(global: &Global, args: &ExecArgs) -> Outcome {
    let started = Instant::now();
    command::check(&args.run)?;
    let context = Context::new(&args.run.context)?;
    let machine = global.machines()?.connect(&args.name.resolve()?)?;
    let exec = context.apply(machine.exec(&args.command));
    if args.detach {
        let exec = match args.run.timeout {
            Some(timeout) => exec.timeout(timeout),
            None => exec,
        };
        out(&format!("{}\n", exec.detach()?))?;
        return Ok(0);
    }
    let done = command::perform(exec, &args.run, &args.output)?;
    let code = done.status().exit_code();
    let timeline = machine.timeline();
    if let Done::Kept(output) = done {
        let around = Around {
            machine: machine.name().map(bantam::MachineName::as_str),
            image: machine.image_name(),
            engine: machine.engine(),
            took: started.elapsed(),
            timeline,
            network: machine.has_network(),
            notes: &[],
        };
        result::print(output, &around)?;
    }
    if args.output.timings {
        let digest = &machine.image().digest;
        let table = result::timings_table(timeline, machine.engine(), digest);
        crate::show::say(global, table.trim_end());
    }
    Ok(code)
}

/// What `shell` runs: the best there is.
const SHELL: &str = "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l";

fn shell(global: &Global, args: &ShellArgs) -> Outcome {
    terminal::check()?;
    let context = Context::new(&args.context)?;
    let machine = global.machines()?.connect(&args.name.resolve()?)?;
    let exec = context.apply(machine.exec(["/bin/sh", "-c", SHELL]));
    Ok(terminal::run(exec, true)?.exit_code())
}

/// What is written down as text.
fn text(word: &OsStr) -> Result<String, Failure> {
    word.to_str().map(str::to_owned).ok_or_else(|| {
        Failure::Usage(format!(
            "'{}' is not UTF-8, which what a named machine keeps must be",
            word.display()
        ))
    })
}
