//! `cargo xtask demo`: from a fresh clone to a command's output in a microVM.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::guest;
use crate::host;
use crate::image::{self, Which};
use crate::kernel::Options;
use crate::progress::{Progress, clock, say};
use crate::setup::{self, Set};

/// What runs in the machine.
const SHOW: &str = "uname -a; cat /etc/os-release; python3 -c 'print(2**10)'";

/// Prepares what is missing, then boots a machine.
pub(crate) fn run(yes: bool) -> Result<ExitCode> {
    let start = Instant::now();
    setup::ensure(&[Set::Build, Set::Run, Set::Demo], yes)?;
    let ready = Instant::now();
    // Side by side: the kernel and the program want CPUs, the image mostly
    // waits for the network and the disk.
    let progress = Progress::new();
    let (program, image) = thread::scope(|scope| {
        let image = scope.spawn(|| image::make(Which::Debian, &progress));
        let guest = scope.spawn(|| guest::build(Options::default(), &progress));
        let program = build_program(&progress);
        let guest = joined(guest.join());
        let image = joined(image.join());
        guest.and_then(|_| Ok((program?, image?)))
    })?;
    let built = Instant::now();
    say(&format!(
        "$ {} run -I {} -- bash -c \"{SHOW}\"",
        program.display(),
        image.display()
    ));
    let mut bantam = Command::new(&program);
    bantam
        .args(["run", "-I"])
        .arg(&image)
        .args(["--", "bash", "-c", SHOW]);
    let status = bantam.status().map_err(host::start_error(&bantam))?;
    say(&format!(
        "packages {}, building {}, running {}; all {}",
        clock(ready - start),
        clock(built - ready),
        clock(built.elapsed()),
        clock(start.elapsed()),
    ));
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// The release build of the program.
pub(crate) fn build_program(progress: &Progress) -> Result<PathBuf> {
    let start = Instant::now();
    progress.update("program", "building".to_owned());
    let mut cargo = host::cargo();
    cargo
        .args(["build", "--release", "--package", "bantam-cli"])
        .stdin(Stdio::null());
    host::run_quiet(&mut cargo)?;
    progress.finish("program", &format!("built in {}", clock(start.elapsed())));
    Ok(host::target_dir().join("release/bantam"))
}

fn joined<T>(result: thread::Result<Result<T>>) -> Result<T> {
    result.unwrap_or_else(|_| Err(Error::other("a build thread panicked")))
}
