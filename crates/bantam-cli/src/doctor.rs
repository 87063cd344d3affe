//! `bantam doctor`: what this host can do, what is missing and how to get it.

use std::io::{self, Write};
use std::path::Path;

use bantam::{Availability, Confinement, EngineChoice, EngineReport, find_guest, probe_engines};
use rustix::fs::Access;
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
        let images = Check::new(store(global.home()?.images()));
        Ok(Self {
            ok: engine.is_some() && guest.is_ok() && images.ok,
            engine: engine.map(bantam::EngineKind::name),
            native: check(&engines.native),
            emulated: check(&engines.emulated),
            guest: Check::new(guest),
            images,
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
            Some(_) if !self.guest.ok => {
                "Machines cannot run here before the guest is built.\n".to_owned()
            }
            Some(_) => "Machines cannot run here: images have no place.\n".to_owned(),
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

/// Whether images can be kept in `dir`, which need not be there yet, and how much space is left.
fn store(dir: &Path) -> Result<String, String> {
    let failed = |at: &Path, error: &dyn std::fmt::Display| {
        format!(
            "{} cannot be used: {}: {error}",
            dir.display(),
            at.display()
        )
    };
    // Not `exists`, to which what is below a file is not there.
    let existing = dir
        .ancestors()
        .find(|dir| std::fs::symlink_metadata(dir).is_ok())
        .unwrap_or(Path::new("/"));
    let metadata = std::fs::metadata(existing).map_err(|error| failed(existing, &error))?;
    if !metadata.is_dir() {
        return Err(failed(existing, &"not a directory"));
    }
    rustix::fs::access(existing, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|error| failed(existing, &io::Error::from(error)))?;
    let stat = rustix::fs::statvfs(existing).map_err(|error| failed(existing, &error))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free == 0 {
        return Err(failed(existing, &"no space is left"));
    }
    let text = format!("{}, {} MiB free", dir.display(), free >> 20);
    Ok(if free < LITTLE_SPACE {
        format!("{text}: large images may not fit")
    } else {
        text
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_store_is_fine_where_it_is_or_can_be_made() {
        let dir = tempfile::tempdir().unwrap();
        for below in ["", "images", "not/there/yet"] {
            let text = store(&dir.path().join(below)).unwrap();
            assert!(text.contains("MiB free"), "{text}");
        }
    }

    #[test]
    fn a_store_that_cannot_be_written_is_said_to_be_unusable() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"").unwrap();
        let astray = dir.path().join("astray");
        symlink("nowhere", &astray).unwrap();
        let mut bad = vec![
            // Has no space at all.
            Path::new("/proc/images").to_path_buf(),
            file.join("images"),
            astray.join("images"),
        ];
        let locked = dir.path().join("locked");
        fs::create_dir(&locked).unwrap();
        fs::set_permissions(&locked, Permissions::from_mode(0o500)).unwrap();
        if !rustix::process::geteuid().is_root() {
            bad.push(locked);
        }
        for path in bad {
            let why = store(&path).unwrap_err();
            assert!(why.contains("cannot be used"), "{why}");
        }
    }
}
