//! `bantam`: run commands in microVMs made from OCI images.
//!
//! A thin skin over the `bantam` library: arguments, progress, tables, JSON. Standard output
//! carries the command's bytes (or one JSON object) and nothing else.

mod args;
mod doctor;
mod failure;
mod image;
mod progress;
mod run;
mod terminal;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command, MachineCommand};
use failure::Failure;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let format = cli.error_format();
    let result = match cli.command {
        Command::Run(args)
        | Command::Machine {
            command: MachineCommand::Run(args),
        } => run::run(&cli.global, args),
        Command::Image { command } => image::image(&cli.global, *command),
        Command::Doctor(args) => doctor::doctor(&cli.global, &args),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            failure.report(format);
            ExitCode::from(failure.exit_code())
        }
    }
}

/// What a subcommand gives: the exit code, or what to report.
type Outcome = Result<u8, Failure>;
