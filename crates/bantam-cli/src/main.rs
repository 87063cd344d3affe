//! `bantam`: run commands in microVMs made from OCI images.
//!
//! A thin skin over the `bantam` library: arguments, progress, tables, JSON. Standard output
//! carries the command's bytes (or one JSON object) and nothing else.

mod args;
mod doctor;
mod failure;
mod image;
mod machine;
mod progress;
mod show;
mod signals;
mod terminal;
mod vmm;
mod vmm_log;

use std::process::ExitCode;

use bantam::VmmProcess;
use clap::{CommandFactory, Parser};

use args::{Cli, Command, ErrorFormat};
use failure::Failure;

fn main() -> ExitCode {
    // Before clap: what that makes of all commands would be in memory as long as the machine is.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == VmmProcess::ARGUMENT)
    {
        return exit_code(vmm::run(), ErrorFormat::Text);
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version are none, and clap's own text says more than JSON could.
        Err(error) if !error.use_stderr() || !args::wants_json(std::env::args_os()) => error.exit(),
        Err(error) => return exit_code(Err(Failure::from(error)), ErrorFormat::Json),
    };
    let format = cli.error_format();
    let result = match cli.command {
        Command::Machine(command) | Command::MachineGroup { command } => {
            machine::machine(&cli.global, command)
        }
        Command::Image { command } => image::image(&cli.global, *command),
        Command::Doctor(args) => doctor::doctor(&cli.global, &args),
        Command::Completion(args) => completion(args.shell),
    };
    exit_code(result, format)
}

/// Reports a failure, and says what to exit with.
fn exit_code(result: Outcome, format: ErrorFormat) -> ExitCode {
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

fn completion(shell: clap_complete::Shell) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "bantam", &mut script);
    show::out(&String::from_utf8_lossy(&script))?;
    Ok(0)
}
