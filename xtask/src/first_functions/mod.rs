//! `cargo xtask first-functions`: makes the list of functions that the guest kernel's linker puts first.
//!
//! A plugin of QEMU's marks the code that runs: in a boot on the native engine, where the guest also does
//! what only a guest of KVM's does, in a short command, and in what programs commonly do, both on the
//! emulated engine. What a boot patches is read from the kernel.

mod choice;

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::demo;
use crate::error::{Error, Result};
use crate::guest;
use crate::host;
use crate::image::{self, Which};
use crate::kernel::{self, FIRST_FUNCTIONS, GUEST, Options};
use crate::progress::{Progress, say};
use crate::symbols::Symbols;
use crate::virtual_time::{self, VirtualTimeArgs};

/// Marks what runs.
const PLUGIN: &str = "benches/plugin/touched.c";
/// Runs what programs commonly do.
const WORKLOAD: &str = "images/kernel/workload.sh";
/// A function that every boot runs.
const ALWAYS: &str = "run_init_process";

/// Writes the list and says how it differs from the one before.
pub(crate) fn run() -> Result<()> {
    let progress = Progress::new();
    let kernel = GUEST.build(Options::default(), &progress)?;
    let symbols = Symbols::beside(&kernel.vmlinux)?;

    let temp = tempfile::Builder::new()
        .prefix("bantam-first-functions-")
        .tempdir()
        .map_err(Error::file("creating", &std::env::temp_dir()))?;
    let plugin = host::build_plugin(PLUGIN, temp.path())?;
    let mut boot = native_boot(&symbols, temp.path(), &plugin, &progress)?;
    boot.extend(choice::patched(&symbols, &host::read(&kernel.vmlinux)?)?);
    let emulated = Emulated::build(&symbols, temp.path(), &plugin, &progress)?;
    let wanted = [emulated.command(&progress)?, emulated.work(&progress)?];

    let path = host::repo().join(FIRST_FUNCTIONS);
    let old = String::from_utf8_lossy(&host::read(&path)?).into_owned();
    let old_names = kernel::listed(&old).collect();
    let choice = choice::choose(&symbols, &old_names, &boot, &wanted)?;
    host::write_atomic(&path, list(&old, &choice.names).as_bytes())?;
    say(&format!(
        "{FIRST_FUNCTIONS}: {} names, {} of them new, {} gone; about {} KiB of the large page's 2048, \
         and {} functions that ran do not fit",
        choice.names.len(),
        choice.names.difference(&old_names).count(),
        old_names.difference(&choice.names).count(),
        choice.bytes / 1024,
        choice.left_out,
    ));
    Ok(())
}

/// A list's text: the words before the old one's names, then the new names.
fn list(old: &str, names: &BTreeSet<&str>) -> String {
    let head = old.lines().take_while(|line| line.starts_with('#'));
    let lines = head.chain(names.iter().copied());
    lines.map(|line| format!("{line}\n")).collect()
}

/// A file in which the plugin marks the kernel's code.
struct Marks {
    path: PathBuf,
    start: u64,
}

impl Marks {
    fn create(symbols: &Symbols, path: PathBuf) -> Result<Self> {
        let (start, size) = symbols.code()?;
        let file = File::create(&path).map_err(Error::file("creating", &path))?;
        file.set_len(size)
            .map_err(Error::file("enlarging", &path))?;
        Ok(Self { path, start })
    }

    /// The plugin, for QEMU, with its words.
    fn words(&self, plugin: &Path) -> String {
        let (plugin, path) = (plugin.display(), self.path.display());
        format!("{plugin},marks={path},start={:x}", self.start)
    }

    fn functions(&self, symbols: &Symbols) -> Result<BTreeSet<u64>> {
        let functions = choice::marked(symbols, &host::read(&self.path)?)?;
        if functions.contains(&symbols.address(ALWAYS)?) {
            return Ok(functions);
        }
        Err(Error::other(format!(
            "the plugin did not see {ALWAYS} run: is this kernel's System.map another one's?"
        )))
    }
}

/// The functions that a machine of the native engine runs until its agent's hello.
fn native_boot(
    symbols: &Symbols,
    dir: &Path,
    plugin: &Path,
    progress: &Progress,
) -> Result<BTreeSet<u64>> {
    let marks = Marks::create(symbols, dir.join("native"))?;
    let plugin = format!("{},nested=on", marks.words(plugin));
    virtual_time::boots(&VirtualTimeArgs::boots(0), Some(&plugin), progress)?;
    marks.functions(symbols)
}

/// What runs machines on the emulated engine.
struct Emulated<'a> {
    symbols: &'a Symbols,
    dir: &'a Path,
    plugin: &'a Path,
    guest: PathBuf,
    program: PathBuf,
}

impl<'a> Emulated<'a> {
    fn build(
        symbols: &'a Symbols,
        dir: &'a Path,
        plugin: &'a Path,
        progress: &Progress,
    ) -> Result<Self> {
        Ok(Self {
            symbols,
            dir,
            plugin,
            guest: guest::build(Options::default(), progress)?,
            program: demo::build_program(progress)?,
        })
    }

    /// The functions that a boot, one short command and its end run.
    fn command(&self, progress: &Progress) -> Result<BTreeSet<u64>> {
        let mut run = Command::new(&self.program);
        run.args(["run", "--engine", "emulated", "-I"])
            .arg(image::make(Which::Tiny, progress)?)
            .args(["--", "echo", "hello"]);
        self.functions("command", &mut run)
    }

    /// The functions that the workload runs.
    fn work(&self, progress: &Progress) -> Result<BTreeSet<u64>> {
        let mut workload = Command::new("sh");
        workload
            .arg(host::repo().join(WORKLOAD))
            .env("BANTAM", &self.program)
            .env("IMAGE", image::make(Which::Debian, progress)?);
        progress.update("workload", "running".to_owned());
        let functions = self.functions("workload", &mut workload)?;
        progress.forget("workload");
        Ok(functions)
    }

    fn functions(&self, name: &str, command: &mut Command) -> Result<BTreeSet<u64>> {
        let marks = Marks::create(self.symbols, self.dir.join(name))?;
        let qemu = self.dir.join(format!("qemu-{name}"));
        write_wrapper(&qemu, &marks.words(self.plugin))?;
        command
            .env("BANTAM_HOME", self.dir.join("home"))
            .env("BANTAM_GUEST_DIR", &self.guest)
            .env("BANTAM_QEMU", qemu)
            // A confined QEMU may not write to the marks.
            .env("BANTAM_UNCONFINED", "1");
        host::run_quiet(command)?;
        marks.functions(self.symbols)
    }
}

/// Makes `path` a program that is QEMU with the plugin. The engine starts it with an empty environment, so
/// everything stands in it.
fn write_wrapper(path: &Path, plugin: &str) -> Result<()> {
    let which = host::first_line(Command::new("sh").args(["-c", "command -v qemu-system-x86_64"]))?;
    let script = format!("#!/bin/sh\nexec '{which}' \"$@\" -plugin '{plugin}'\n");
    fs::write(path, script).map_err(Error::file("writing", path))?;
    fs::set_permissions(path, Permissions::from_mode(0o755))
        .map_err(Error::file("making executable", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_list_keeps_the_words_before_it() {
        let old = "# What this is.\n# And why.\nold\nschedule_work\n";
        let new = list(old, &BTreeSet::from(["zap_pte", "do_idle"]));
        assert_eq!(new, "# What this is.\n# And why.\ndo_idle\nzap_pte\n");
    }
}
