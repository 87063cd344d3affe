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
/// A command whose first output ends what is counted.
const COMMAND: [&str; 2] = ["echo", "hello"];

/// Boots `runs` times with `vcpus`; counts until the agent's hello, and from there until a
/// command's first output.
pub(crate) fn instructions(
    bench: &Bench,
    vcpus: u8,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    let map = bench
        .system_map
        .as_ref()
        .ok_or_else(|| Error::Other("no kernel symbols were given (--system-map)".to_owned()))?;
    let symbols = Symbols::read(map)?;
    let temp = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
    let plugin = build_plugin(temp.path())?;
    let counts = temp.path().join("counts");
    let wrapper = wrapper(temp.path(), &plugin, &counts)?;
    let (mut to_hello, mut to_output) = (Vec::new(), Vec::new());
    for run in 1..=runs {
        progress.say(&format!("boot instructions, {vcpus} vCPU: {run}/{runs}"));
        symbols.create(&counts, vcpus)?;
        let mut command = bench.run(vcpus, &COMMAND);
        command.env("BANTAM_QEMU", &wrapper);
        program::succeed(&mut command)?;
        let boot = symbols.boot(&counts, vcpus)?;
        to_hello.push(boot.to_hello);
        to_output.push(boot.to_output);
    }
    let engine = bench.engine.name();
    for (name, mut profiles) in [
        ("boot instructions", to_hello),
        ("instructions from hello to first output", to_output),
    ] {
        let name = format!("{name}, {vcpus} vCPU");
        let totals = profiles.iter().map(|p| p.total as f64).collect();
        let worked = |p: &Profile| (p.total - p.waits) as f64;
        let without_waits = profiles.iter().map(worked).collect();
        report.add(&name, engine, "instructions", totals);
        report.add(
            format!("{name}, without waits"),
            engine,
            "instructions",
            without_waits,
        );
        // The profile of the median run, as one example that really happened.
        profiles.sort_by_key(|profile| profile.total);
        let median = profiles.into_iter().nth(runs.saturating_sub(1) / 2);
        report
            .profiles
            .extend(median.map(|profile| Profile { name, ..profile }));
    }
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
