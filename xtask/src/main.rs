//! Developer commands. `cargo xtask --help` lists them.

mod cpio;
mod error;
mod guest;
mod host;
mod image;
mod kernel;
mod oci;
mod progress;
mod setup;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::Result;
use crate::progress::{Progress, say};

/// Developer commands of bantam.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install the Debian packages that the other commands need
    Setup(setup::SetupArgs),
    /// Build the guest kernel (cached by source, configuration and compiler)
    Kernel {
        /// Build even when the cache has it
        #[arg(long)]
        force: bool,
        /// Leave the source tree (about 1 GB) for a look
        #[arg(long)]
        keep: bool,
    },
    /// Build kernel, agent and initramfs into target/guest
    Guest,
    /// Make a test image (OCI archive, from Debian's packages) and print its path
    Image {
        /// Which one
        which: image::Which,
    },
}

fn main() -> ExitCode {
    match run(Args::parse().command) {
        Ok(code) => code,
        Err(error) => {
            say(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    match task {
        Task::Setup(args) => setup::command(args)?,
        Task::Kernel { force, keep } => {
            let options = kernel::Options { force, keep };
            let built = kernel::GUEST.build(options, &Progress::new())?;
            say(&format!("{}", built.vmlinux.display()));
        }
        Task::Guest => {
            let dir = guest::build(kernel::Options::default(), &Progress::new())?;
            say(&format!("guest artefacts in {}", dir.display()));
        }
        Task::Image { which } => {
            let path = image::make(which, &Progress::new())?;
            let _ = writeln!(std::io::stdout(), "{}", path.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}
