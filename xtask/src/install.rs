//! `cargo xtask install`: the program and its guest, for one user.

use std::path::PathBuf;

use crate::demo::build_program;
use crate::error::Result;
use crate::guest;
use crate::host;
use crate::kernel::Options;
use crate::progress::{Progress, say};

/// Copies the program to `PREFIX/bin` and the guest to `PREFIX/share/bantam`,
/// where the program looks for it.
pub(crate) fn run(prefix: Option<PathBuf>) -> Result<()> {
    let prefix = match prefix {
        Some(prefix) => prefix,
        None => host::home()?.join(".local"),
    };
    let progress = Progress::new();
    let guest = guest::build(Options::default(), &progress)?;
    let program = build_program(&progress)?;
    let bin = prefix.join("bin");
    let share = prefix.join("share/bantam");
    host::create_dir(&bin)?;
    host::create_dir(&share)?;
    for file in guest::FILES {
        host::copy_atomic(&guest.join(file), &share.join(file))?;
    }
    host::copy_atomic(&program, &bin.join("bantam"))?;
    say(&format!("installed {}", bin.join("bantam").display()));
    Ok(())
}
