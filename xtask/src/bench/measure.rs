//! Builds what is measured and runs `bantam-bench`, here or in the nested rig.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use super::results::{Part, Place, Report, Results, Run, SCHEMA, Skipped};
use super::{Engine, peers, virtual_time};
use crate::demo;
use crate::error::{Error, Result};
use crate::guest;
use crate::host;
use crate::image::{self, Which};
use crate::kernel::{self, GUEST};
use crate::progress::Progress;
use crate::rig::{self, RigArgs};

/// How often counts are taken: they hardly differ.
pub(super) const COUNTED: usize = 3;
/// In the rig everything takes some twenty times as long.
const RIG_RUNS: usize = 3;
const RIG_SECONDS: u64 = 2400;
/// Memory of the outer machine in MiB.
const RIG_MIB: u32 = 2048;
/// Where the rig finds programs of this host that are measured or measure.
const PROGRAMS: &str = "/usr";

/// What to measure.
pub(super) struct Request {
    /// None: all.
    pub(super) engines: Vec<Engine>,
    /// None: everything that does not take minutes.
    pub(super) filters: Vec<String>,
    pub(super) runs: usize,
    pub(super) peers: bool,
}

impl Request {
    fn has(&self, engine: Engine) -> bool {
        self.engines.is_empty() || self.engines.contains(&engine)
    }

    /// One part after the other, each in a rig of its own: a foreign program that hangs must not take
    /// our numbers with it.
    fn parts(&self, engine: Engine) -> Vec<Self> {
        let (foreign, ours): (Vec<String>, Vec<String>) = (self.filters.iter())
            .filter(|filter| !virtual_time::is_named(filter))
            .cloned()
            .partition(|filter| engine == Engine::Native && filter == SMOLVM);
        let part = |filters| Self {
            engines: vec![engine],
            filters,
            ..*self
        };
        let asked = engine == Engine::Native && self.peers && self.filters.is_empty();
        let mut parts = Vec::new();
        if !ours.is_empty() || self.filters.is_empty() {
            parts.push(part(ours));
        }
        if asked || !foreign.is_empty() {
            parts.push(part(vec![SMOLVM.to_owned()]));
        }
        parts
    }

    /// Virtual time has an outer machine of its own, whatever this host can do.
    fn has_virtual_time(&self) -> bool {
        let mut filters = self.filters.iter();
        let asked = self.filters.is_empty() || filters.any(|filter| virtual_time::is_named(filter));
        asked && self.has(Engine::Native)
    }

    fn is_foreign(&self) -> bool {
        self.filters == [SMOLVM]
    }
}

/// Builds and measures.
pub(super) fn all(request: &Request, progress: &Progress) -> Result<Results> {
    if request.peers {
        peers::fetch(progress)?;
    }
    let what = Measured::build(progress)?;
    let mut parts = Vec::new();
    // Emulated first: the rig's QEMU is not to be among what is measured here.
    for engine in [Engine::Emulated, Engine::Native] {
        if !request.has(engine) {
            continue;
        }
        let in_rig = engine == Engine::Native && !what.works_here(engine)?;
        for part in request.parts(engine) {
            let measured = match in_rig {
                true => what.in_rig(&part, progress),
                false => what.here(engine, &part),
            };
            parts.push(match measured {
                Err(error) if part.is_foreign() => skipped(in_rig, &error),
                measured => measured?,
            });
        }
    }
    if request.has_virtual_time() {
        parts.push(virtual_time::measure(progress)?);
    }
    let wants_sizes = |filter: &String| "sizes".contains(filter.as_str());
    let sizes = match request.filters.is_empty() || request.filters.iter().any(wants_sizes) {
        true => what.sizes()?,
        false => BTreeMap::new(),
    };
    Ok(Results {
        schema: SCHEMA,
        run: this_run(),
        sizes,
        parts,
    })
}

/// The entry that measures smolvm.
const SMOLVM: &str = "peer-smolvm";
/// It unpacks the image in a machine of its own of 8 GiB, which comes to no end in 2 GiB.
const SMOLVM_RIG_MIB: u32 = 4096;

/// What is known of a peer whose measuring failed.
fn skipped(in_rig: bool, error: &Error) -> Part {
    Part {
        place: if in_rig { Place::Rig } else { Place::Host },
        report: Report {
            skipped: vec![Skipped {
                name: SMOLVM.to_owned(),
                reason: error.to_string(),
            }],
            ..Report::default()
        },
    }
}

/// Prints the names of what can be measured.
pub(super) fn list(progress: &Progress) -> Result<()> {
    let mut bench = Command::new(build_bench(progress)?);
    let names = host::capture(bench.args(["--list", "--engine", "emulated"]))?;
    let _ = io::stdout().write_all(&names);
    let _ = writeln!(io::stdout(), "{}", virtual_time::ENTRY);
    Ok(())
}

/// What is measured, built.
struct Measured {
    program: PathBuf,
    bench: PathBuf,
    image: PathBuf,
    /// What is pulled, if it has been made.
    pulled: PathBuf,
    /// With clients of the network, if it has been made.
    network: PathBuf,
    guest: PathBuf,
    system_map: PathBuf,
}

/// The release build of the measurements.
pub(crate) fn build_bench(progress: &Progress) -> Result<PathBuf> {
    progress.update("measurements", "building".to_owned());
    let mut cargo = host::cargo();
    cargo.args(["build", "--release", "--package", "bantam-benches"]);
    host::run_quiet(&mut cargo)?;
    progress.forget("measurements");
    Ok(host::target_dir().join("release/bantam-bench"))
}

impl Measured {
    fn build(progress: &Progress) -> Result<Self> {
        let guest = guest::build(kernel::Options::default(), progress)?;
        let kernel = GUEST.build(kernel::Options::default(), progress)?;
        let image = image::make(Which::Tiny, progress)?;
        let program = demo::build_program(progress)?;
        Ok(Self {
            program,
            bench: build_bench(progress)?,
            image,
            pulled: host::cache_dir()?.join("demo/debian-12-python.tar"),
            network: host::cache_dir()?.join("test-images/network-1.tar"),
            guest,
            system_map: kernel.vmlinux.with_file_name("System.map"),
        })
    }

    fn words(&self, engine: Engine, request: &Request, runs: usize) -> Vec<String> {
        let path = |path: &Path| path.display().to_string();
        let mut words = vec![
            path(&self.bench),
            format!("--engine={}", engine.name()),
            format!("--runs={runs}"),
            format!("--program={}", path(&self.program)),
            format!("--image={}", path(&self.image)),
            format!("--pull-image={}", path(&self.pulled)),
            format!("--network-image={}", path(&self.network)),
            format!("--system-map={}", path(&self.system_map)),
            format!("--smolvm={}", path(&peers::smolvm())),
        ];
        words.extend(
            request
                .filters
                .iter()
                .map(|filter| format!("--filter={filter}")),
        );
        words
    }

    fn works_here(&self, engine: Engine) -> Result<bool> {
        let mut check = Command::new(&self.bench);
        check.args(["--check", "--engine", engine.name()]);
        let status = check.status().map_err(host::start_error(&check))?;
        Ok(status.success())
    }

    fn here(&self, engine: Engine, request: &Request) -> Result<Part> {
        let words = self.words(engine, request, request.runs);
        let mut bench = Command::new(&words[0]);
        bench
            .args(&words[1..])
            .env("BANTAM_GUEST_DIR", &self.guest)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit());
        let out = bench.output().map_err(host::start_error(&bench))?;
        Ok(Part {
            place: Place::Host,
            report: parsed(&out.stdout)?,
        })
    }

    fn in_rig(&self, request: &Request, progress: &Progress) -> Result<Part> {
        let rig = RigArgs {
            cpus: 1,
            mem: if request.is_foreign() {
                SMOLVM_RIG_MIB
            } else {
                RIG_MIB
            },
            timeout: RIG_SECONDS,
            env: vec![format!("BANTAM_GUEST_DIR={}", self.guest.display())],
            share: vec![PathBuf::from(PROGRAMS)],
            command: self.words(Engine::Native, request, request.runs.min(RIG_RUNS)),
        };
        let out = Shared::default();
        let outcome = rig::run(&rig, out.clone(), io::stderr(), progress)?;
        if outcome.code == rig::TIMED_OUT {
            return Err(Error::other(format!(
                "the rig was not done after {RIG_SECONDS} s"
            )));
        }
        let bytes = out.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Part {
            place: Place::Rig,
            report: parsed(&bytes)?,
        })
    }

    fn sizes(&self) -> Result<BTreeMap<String, u64>> {
        let agent = host::target_dir().join("agent/x86_64-unknown-linux-gnu/agent/bantam-agent");
        [
            ("guest kernel", self.guest.join("vmlinux")),
            ("initramfs", self.guest.join("initramfs.cpio")),
            ("agent", agent),
            ("program", self.program.clone()),
        ]
        .into_iter()
        .map(|(name, path)| {
            let file = fs::metadata(&path).map_err(Error::file("reading", &path))?;
            Ok((name.to_owned(), file.len()))
        })
        .collect()
    }
}

fn parsed(bytes: &[u8]) -> Result<Report> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::other(format!(
            "reading the measurements: {error} in `{}`",
            host::last_lines(&String::from_utf8_lossy(bytes), 20)
        ))
    })
}

fn this_run() -> Run {
    let line = |program: &str, args: &[&str]| {
        host::first_line(Command::new(program).args(args)).unwrap_or_default()
    };
    Run {
        date: line("date", &["--utc", "+%Y-%m-%dT%H:%MZ"]),
        commit: line("git", &["describe", "--always", "--dirty=+", "--exclude=*"]),
        qemu: line("qemu-system-x86_64", &["--version"]),
    }
}

/// Bytes that a thread writes and another reads afterwards.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(engines: &[Engine], filters: &[&str], peers: bool) -> Request {
        Request {
            engines: engines.to_vec(),
            filters: filters.iter().map(|&filter| filter.to_owned()).collect(),
            runs: 1,
            peers,
        }
    }

    /// The filters of each part.
    fn parts(engine: Engine, filters: &[&str], peers: bool) -> Vec<String> {
        let parts = request(&[], filters, peers).parts(engine).into_iter();
        parts.map(|part| part.filters.join(" ")).collect()
    }

    #[test]
    fn a_foreign_program_is_measured_once_and_by_itself() {
        let native = |filters: &[&str], peers| parts(Engine::Native, filters, peers);
        assert_eq!(native(&[], true), ["", SMOLVM]);
        assert_eq!(native(&[], false), [""]);
        assert_eq!(native(&["exec"], true), ["exec"]);
        assert_eq!(native(&["exec", SMOLVM], true), ["exec", SMOLVM]);
        assert_eq!(native(&[SMOLVM], true), [SMOLVM]);
        assert_eq!(parts(Engine::Emulated, &[], true), [""]);
        assert_eq!(parts(Engine::Emulated, &[SMOLVM], true), [SMOLVM]);
    }

    #[test]
    fn virtual_time_is_measured_apart_from_the_others() {
        for engine in [Engine::Native, Engine::Emulated] {
            let none: [&str; 0] = [];
            assert_eq!(parts(engine, &[virtual_time::ENTRY], false), none);
            assert_eq!(
                parts(engine, &["exec", virtual_time::ENTRY], false),
                ["exec"]
            );
        }
        let asked = |engines: &[Engine], filters: &[&str]| {
            request(engines, filters, false).has_virtual_time()
        };
        assert!(asked(&[], &[]) && asked(&[Engine::Native], &["virtual"]));
        assert!(!asked(&[], &["exec"]) && !asked(&[Engine::Emulated], &["virtual"]));
    }
}
