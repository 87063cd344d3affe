//! Guest instructions of a boot, counted by a plugin in QEMU.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::counts::Symbols;
use crate::peers;
use crate::program::{self, Bench};
use crate::report::{Profile, Report, median_of};
use crate::{Error, Progress};

/// The plugin, and what it includes.
const PLUGIN: [(&str, &str); 2] = [
    ("bootcount.c", include_str!("../plugin/bootcount.c")),
    ("qemu.h", include_str!("../plugin/qemu.h")),
];
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
        .ok_or_else(|| Error::Missing("no kernel symbols were given (--system-map)".to_owned()))?;
    program::find("cc")?;
    let symbols = Symbols::read(map)?;
    let temp = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
    let plugin = build_plugin(temp.path())?;
    let counts = temp.path().join("counts");
    let wrapper = wrapper(temp.path(), &plugin, &counts)?;
    let (mut to_hello, mut to_output, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for run in 1..=runs {
        progress.say(&format!("boot instructions, {vcpus} vCPU: {run}/{runs}"));
        symbols.create(&counts, vcpus)?;
        let mut command = bench.run(vcpus, &COMMAND);
        command.env("BANTAM_QEMU", &wrapper);
        program::succeed(&mut command)?;
        let boot = symbols.boot(&counts, vcpus)?;
        all.push(worked(&boot.to_hello) + worked(&boot.to_output));
        to_hello.push(boot.to_hello);
        to_output.push(boot.to_output);
    }
    let engine = bench.engine.name();
    for (name, profiles) in [
        ("boot instructions", to_hello),
        ("instructions from hello to first output", to_output),
    ] {
        let name = format!("{name}, {vcpus} vCPU");
        let totals = profiles.iter().map(|p| p.total as f64).collect();
        let without_waits = profiles.iter().map(worked).collect::<Vec<_>>();
        report.add(&name, engine, "instructions", totals);
        report.add(
            format!("{name}, without waits"),
            engine,
            "instructions",
            without_waits,
        );
        report
            .profiles
            .extend(median_of(profiles).map(|profile| Profile {
                name,
                engine,
                ..profile
            }));
    }
    if vcpus > 1 {
        return Ok(());
    }
    report.add(TO_OUTPUT, engine, "instructions", all);
    match microvm(bench, &symbols, &plugin, &counts, runs, progress) {
        Ok(values) => report.add_peer(peers::QEMU, TO_OUTPUT, engine, "instructions", values),
        Err(error) => report.left_out(format!("{TO_OUTPUT}, {}", peers::QEMU), &error),
    }
    Ok(())
}

const TO_OUTPUT: &str = "instructions from start to first output, 1 vCPU, without waits";

/// What is counted less what only waits.
fn worked(profile: &Profile) -> f64 {
    let waits: u64 = profile.waits.iter().map(|wait| wait.count).sum();
    profile.total.saturating_sub(waits) as f64
}

/// The same kernel and command in QEMU's own microvm.
fn microvm(
    bench: &Bench,
    symbols: &Symbols,
    plugin: &Path,
    counts: &Path,
    runs: usize,
    progress: Progress,
) -> Result<Vec<f64>, Error> {
    let peer = peers::Microvm::new(bench)?;
    (1..=runs)
        .map(|run| {
            progress.say(&format!("boot instructions, {}: {run}/{runs}", peers::QEMU));
            symbols.create(counts, 1)?;
            let mut command = peer.command();
            command
                .arg("-plugin")
                .arg(format!("{},counts={}", plugin.display(), counts.display()));
            peers::first_byte(&mut command)?;
            Ok(worked(&symbols.printed(counts)?))
        })
        .collect()
}

fn build_plugin(dir: &Path) -> Result<PathBuf, Error> {
    for (name, text) in PLUGIN {
        let file = dir.join(name);
        fs::write(&file, text).map_err(Error::file("writing", &file))?;
    }
    let plugin = dir.join("bootcount.so");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-shared", "-fPIC", "-o"])
        .args([&plugin, &dir.join(PLUGIN[0].0)]);
    program::succeed(&mut cc)?;
    Ok(plugin)
}

/// A program that is QEMU with the plugin. The engine starts it with an empty environment, so
/// everything stands in it.
///
/// All vCPUs share one of QEMU's threads: one that spins until another gets somewhere then gives its
/// turn away, where on threads of their own it would count how busy the host is.
fn wrapper(dir: &Path, plugin: &Path, counts: &Path) -> Result<PathBuf, Error> {
    let qemu = match std::env::var_os("BANTAM_QEMU") {
        Some(path) => PathBuf::from(path),
        None => program::find("qemu-system-x86_64")?,
    };
    let path = dir.join("qemu");
    let script = format!(
        "#!/bin/sh\nfor word; do\n  shift\n  [ \"$word\" = tcg ] && word=tcg,thread=single\n  \
         set -- \"$@\" \"$word\"\ndone\nexec '{}' \"$@\" -plugin '{},counts={}'\n",
        qemu.display(),
        plugin.display(),
        counts.display()
    );
    fs::write(&path, script).map_err(Error::file("writing", &path))?;
    fs::set_permissions(&path, Permissions::from_mode(0o755))
        .map_err(Error::file("making executable", &path))?;
    Ok(path)
}
