//! Guest instructions of a boot, counted by a plugin in QEMU.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::counts::Symbols;
use crate::program::{self, Bench};
use crate::report::{Profile, Report};
use crate::{Error, Progress};

const PLUGIN: &str = include_str!("../plugin/bootcount.c");
/// How many functions a profile names.
const TOP: usize = 40;

/// Boots `runs` times with `vcpus` and counts until the agent's hello.
pub(crate) fn instructions(
    bench: &Bench,
    vcpus: u8,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    let name = format!("boot instructions, {vcpus} vCPU");
    let map = bench
        .system_map
        .as_ref()
        .ok_or_else(|| Error::Other("no kernel symbols were given (--system-map)".to_owned()))?;
    let symbols = Symbols::read(map)?;
    let temp = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
    let plugin = build_plugin(temp.path())?;
    let counts = temp.path().join("counts");
    let wrapper = wrapper(temp.path(), &plugin, &counts)?;
    let mut profiles: Vec<Profile> = Vec::new();
    for run in 1..=runs {
        progress.say(&format!("{name}: {run}/{runs}"));
        symbols.create(&counts, vcpus)?;
        let mut command = bench.run(vcpus, &["true"]);
        command.env("BANTAM_QEMU", &wrapper);
        program::succeed(&mut command)?;
        profiles.push(symbols.profile(&counts, &name, vcpus, TOP)?);
    }
    let engine = bench.engine.name();
    let totals = profiles.iter().map(|p| p.total as f64).collect();
    let worked = profiles
        .iter()
        .map(|p| (p.total - p.waits) as f64)
        .collect();
    let without_waits = format!("{name}, without waits");
    for (name, values) in [(name, totals), (without_waits, worked)] {
        report.add(name, engine, "instructions", values);
    }
    // The profile of the median run, as one example that really happened.
    profiles.sort_by_key(|profile| profile.total);
    report
        .profiles
        .extend(profiles.into_iter().nth(runs.saturating_sub(1) / 2));
    Ok(())
}

fn build_plugin(dir: &Path) -> Result<PathBuf, Error> {
    let source = dir.join("bootcount.c");
    let plugin = dir.join("bootcount.so");
    fs::write(&source, PLUGIN).map_err(Error::file("writing", &source))?;
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-shared", "-fPIC", "-o"])
        .args([&plugin, &source]);
    program::succeed(&mut cc)?;
    Ok(plugin)
}

/// A program that is QEMU with the plugin. The engine starts it with an empty environment, so
/// everything stands in it.
fn wrapper(dir: &Path, plugin: &Path, counts: &Path) -> Result<PathBuf, Error> {
    let qemu = match std::env::var_os("BANTAM_QEMU") {
        Some(path) => PathBuf::from(path),
        None => program::find("qemu-system-x86_64")?,
    };
    let path = dir.join("qemu");
    let script = format!(
        "#!/bin/sh\nexec '{}' \"$@\" -plugin '{},counts={}'\n",
        qemu.display(),
        plugin.display(),
        counts.display()
    );
    fs::write(&path, script).map_err(Error::file("writing", &path))?;
    fs::set_permissions(&path, Permissions::from_mode(0o755))
        .map_err(Error::file("making executable", &path))?;
    Ok(path)
}
