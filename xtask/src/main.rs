//! Developer commands. `cargo xtask --help` lists them.

mod bench;
mod cpio;
mod demo;
mod disk;
mod error;
mod first_functions;
mod fuzz;
mod guest;
mod host;
mod image;
mod install;
mod kernel;
mod libtest;
mod oci;
mod patches;
mod profile;
mod progress;
mod rig;
mod setup;
mod symbols;
mod test;
mod virtual_time;

use std::io::Write;
use std::path::PathBuf;
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
    /// From a fresh clone to a command's output in a microVM
    ///
    /// Installs Debian packages that are missing, builds the guest kernel and
    /// the program, makes a Debian image with Python from Debian's packages (no
    /// registry: they limit anonymous pulls, and some networks have none), and
    /// runs a command in it. The second time all is cached.
    Demo {
        /// Do not ask before installing packages
        #[arg(long, short)]
        yes: bool,
    },
    /// Every check and test; the last line is `N passed, N failed, N skipped`
    Test(test::TestArgs),
    /// Build kernel, agent and initramfs into target/guest
    Guest,
    /// Build the guest kernel (cached by source, configuration and compiler)
    Kernel {
        /// Build even when the cache has it
        #[arg(long)]
        force: bool,
        /// Leave the source tree (about 1 GB) for a look
        #[arg(long)]
        keep: bool,
    },
    /// Make the list of functions anew that the guest kernel's linker puts first (some minutes)
    ///
    /// Boots machines of both engines, runs common programs in them, and looks which of the kernel's
    /// functions ran: images/kernel/README.md says when.
    FirstFunctions,
    /// Make a test image (OCI archive, from Debian's packages) and print its path
    Image {
        /// Which one
        which: image::Which,
    },
    /// Run a command in the nested rig: an emulated machine with a real /dev/kvm
    ///
    /// The command sees this repository, the target folder and bantam's cache
    /// at their own paths, read-only. Its stdout, stderr and exit code are this
    /// command's.
    Rig(rig::RigArgs),
    /// Run the fuzz targets for a while each; what they find is in target/fuzz/found
    Fuzz(fuzz::FuzzArgs),
    /// Measure machines: boots, commands, memory; one table, and JSON
    Bench(bench::BenchArgs),
    /// Time from a program's start to its guest's /init, counted in instructions
    ///
    /// Runs in the nested rig; the same boot takes the same time whatever else this host does.
    VirtualTime(virtual_time::VirtualTimeArgs),
    /// Build and install the program and its guest for this user
    Install {
        /// Where to: PREFIX/bin and PREFIX/share (default: ~/.local)
        #[arg(long)]
        prefix: Option<PathBuf>,
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
        Task::Demo { yes } => return demo::run(yes),
        Task::Test(args) => return test::run(&args),
        Task::Fuzz(args) => return fuzz::command(&args),
        Task::Install { prefix } => install::run(prefix)?,
        Task::Kernel { force, keep } => {
            let options = kernel::Options { force, keep };
            let built = kernel::GUEST.build(options, &Progress::new())?;
            say(&format!("{}", built.vmlinux.display()));
        }
        Task::FirstFunctions => first_functions::run()?,
        Task::VirtualTime(args) => virtual_time::run(&args)?,
        Task::Bench(args) => return bench::run(&args),
        Task::Guest => {
            let dir = guest::build(kernel::Options::default(), &Progress::new())?;
            say(&format!("guest artefacts in {}", dir.display()));
        }
        Task::Rig(args) => {
            let outcome = rig::run(
                &args,
                std::io::stdout(),
                std::io::stderr(),
                &Progress::new(),
            )?;
            return Ok(ExitCode::from(outcome.code));
        }
        Task::Image { which } => {
            let path = image::make(which, &Progress::new())?;
            let _ = writeln!(std::io::stdout(), "{}", path.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}
