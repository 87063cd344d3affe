//! `bantam doctor`: what this host can do, what is missing and how to get it.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bantam::{Availability, Confinement, EngineChoice, EngineReport, find_guest, probe_engines};
use serde::Serialize;

use crate::Outcome;
use crate::args::{DoctorArgs, Global};
use crate::failure::Failure;

/// Below this much free space a pull of an ordinary image is likely to fail.
const LITTLE_SPACE: u64 = 2 << 30;

#[derive(Serialize)]
struct Report {
    ok: bool,
    engine: Option<&'static str>,
    native: Check,
    emulated: Check,
    guest: Check,
    images: Check,
    confinement: Check,
    version: &'static str,
}

#[derive(Serialize)]
struct Check {
    ok: bool,
    text: String,
}

impl Check {
    fn new(result: Result<String, String>) -> Self {
        match result {
            Ok(text) => Self { ok: true, text },
            Err(text) => Self { ok: false, text },
        }
    }
}

pub(crate) fn doctor(global: &Global, args: &DoctorArgs) -> Outcome {
    let engines = probe_engines();
    let report = Report::new(&engines, global)?;
    let mut stdout = io::stdout().lock();
    let written = if args.json {
        serde_json::to_writer_pretty(&mut stdout, &report)
            .map_err(io::Error::from)
            .and_then(|()| writeln!(stdout))
    } else {
        write!(stdout, "{}", report.text())
    };
    written.map_err(Failure::Output)?;
    Ok(if report.ok { 0 } else { 125 })
}

impl Report {
    fn new(engines: &EngineReport, global: &Global) -> Result<Self, Failure> {
        let check = |availability: &Availability| {
            Check::new(match availability {
                Availability::Ready(text) => Ok(text.clone()),
                Availability::Unusable(text) => Err(text.clone()),
            })
        };
        let guest = match find_guest(None) {
            Ok(guest) => Ok(format!(
                "{}, {}",
                guest.kernel.display(),
                guest.initramfs.display()
            )),
            Err(error) => Err(match error.hint() {
                Some(hint) => format!("{error}; {hint}"),
                None => error.to_string(),
            }),
        };
        let engine = engines.select(EngineChoice::Auto).ok();
        let images = global.home()?.images().to_path_buf();
        Ok(Self {
            ok: engine.is_some() && guest.is_ok(),
            engine: engine.map(bantam::EngineKind::name),
            native: check(&engines.native),
            emulated: check(&engines.emulated),
            guest: Check::new(guest),
            images: Check::new(space(&images)),
            confinement: Check::new(confinement()),
            version: env!("CARGO_PKG_VERSION"),
        })
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (name, check) in [
            ("native engine", &self.native),
            ("emulated engine", &self.emulated),
            ("guest", &self.guest),
            ("image store", &self.images),
            ("confinement", &self.confinement),
        ] {
            let mark = if check.ok { "ok" } else { "no" };
            text.push_str(&format!("{name:<16} {mark:<3} {}\n", check.text));
        }
        text.push_str(&match self.engine {
            Some(engine) if self.ok => format!("Machines run here, on the {engine} engine.\n"),
            Some(_) => "Machines cannot run here before the guest is built.\n".to_owned(),
            None => "Machines cannot run here: no engine works.\n".to_owned(),
        });
        text
    }
}

/// How far the process of a named machine can be kept from everything that is not the machine's.
fn confinement() -> Result<String, String> {
    let Confinement {
        files,
        system_calls,
    } = Confinement::probe();
    let named = [
        ("files (Landlock)", files),
        ("system calls (seccomp)", system_calls),
    ];
    let list = |has: bool| -> Vec<_> {
        let of = named.iter().filter(|(_, there)| *there == has);
        of.map(|(name, _)| *name).collect()
    };
    match list(false)[..] {
        [] => Ok(list(true).join(", ")),
        ref missing => Err(format!(
            "this kernel cannot restrict {}: machines run, less confined",
            missing.join(" and ")
        )),
    }
}

/// Free space where images go, or will go.
fn space(dir: &Path) -> Result<String, String> {
    let existing: PathBuf = dir
        .ancestors()
        .find(|dir| dir.exists())
        .unwrap_or(Path::new("/"))
        .to_path_buf();
    let stat = rustix::fs::statvfs(&existing)
        .map_err(|error| format!("{}: {error}", existing.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let text = format!("{}, {} MiB free", dir.display(), free >> 20);
    if free < LITTLE_SPACE {
        Err(format!("{text}: images may not fit"))
    } else {
        Ok(text)
    }
}
