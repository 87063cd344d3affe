//! Builds what is measured and runs `bantam-bench`, here or in the nested rig.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use super::plan::{Known, Request, Step, Subject};
use super::results::{LeftOut, Part, Place, Report, Results, Run, SCHEMA};
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

/// Builds and measures. A run of `bantam-bench`, a rig or virtual time that fails is among the results as
/// failed, and takes none of the others along.
pub(super) fn all(request: &Request, known: &Known, progress: &Progress) -> Result<Results> {
    if request.peers {
        peers::fetch(progress)?;
    }
    let what = Measured::build(progress)?;
    let sizes = match request.has_sizes() {
        true => what.sizes()?,
        false => BTreeMap::new(),
    };
    let mut native_works = None;
    let run = |step: &Step| {
        let place = match step.subject {
            Subject::Machines(Engine::Native) => {
                match native_works.get_or_insert_with(|| what.works_here(Engine::Native)) {
                    Ok(true) => Place::Host,
                    Ok(false) => Place::Rig,
                    Err(error) => return (Place::Host, Err(Error::other(error.to_string()))),
                }
            }
            _ => Place::Host,
        };
        let report = match place {
            Place::Host => what.here(step, request.runs),
            Place::Rig => what.in_rig(step, request.runs, progress),
        };
        (place, report)
    };
    let parts = parts(request, known, run, || virtual_time::measure(progress));
    Ok(Results {
        schema: SCHEMA,
        run: this_run(),
        sizes,
        parts,
    })
}

/// Each part of a request, made by these.
fn parts(
    request: &Request,
    known: &Known,
    mut run: impl FnMut(&Step) -> (Place, Result<Report>),
    virtual_time: impl FnOnce() -> Result<Part>,
) -> Vec<Part> {
    let mut parts = Vec::new();
    for step in request.steps(known) {
        let (place, report) = run(&step);
        parts.push(match report {
            Ok(report) => Part { place, report },
            Err(error) => failed(place, step.subject.name(), &step.entries, &error),
        });
    }
    if request.has_virtual_time() {
        let entries = [virtual_time::ENTRY.to_owned()];
        let part = virtual_time();
        parts.push(
            part.unwrap_or_else(|error| {
                failed(Place::Rig, Engine::Native.name(), &entries, &error)
            }),
        );
    }
    parts
}

/// A part of which nothing is known but why.
fn failed(place: Place, engine: &str, entries: &[String], error: &Error) -> Part {
    let reason = error.to_string();
    let left_out = entries.iter().map(|name| LeftOut {
        name: name.clone(),
        engine: engine.to_owned(),
        reason: reason.clone(),
    });
    Part {
        place,
        report: Report {
            failed: left_out.collect(),
            ..Report::default()
        },
    }
}

/// smolvm unpacks the image in a machine of its own of 8 GiB, which comes to no end in 2 GiB.
const SMOLVM_RIG_MIB: u32 = 4096;

/// What can be measured, by the program that does.
pub(super) fn known(progress: &Progress) -> Result<Known> {
    let bench = build_bench(progress)?;
    Known::ask(|subject| {
        let mut list = Command::new(&bench);
        let names = host::capture(list.args(["--list", "--engine", subject.name()]))?;
        Ok(String::from_utf8_lossy(&names).into_owned())
    })
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

    fn words(&self, step: &Step, runs: usize) -> Vec<String> {
        let path = |path: &Path| path.display().to_string();
        let mut words = vec![
            path(&self.bench),
            format!("--engine={}", step.subject.name()),
            format!("--runs={runs}"),
            format!("--program={}", path(&self.program)),
            format!("--image={}", path(&self.image)),
            format!("--pull-image={}", path(&self.pulled)),
            format!("--network-image={}", path(&self.network)),
            format!("--system-map={}", path(&self.system_map)),
            format!("--smolvm={}", path(&peers::smolvm())),
        ];
        let filters = step.filters.iter();
        words.extend(filters.map(|filter| format!("--filter={filter}")));
        words
    }

    fn works_here(&self, engine: Engine) -> Result<bool> {
        let mut check = Command::new(&self.bench);
        check.args(["--check", "--engine", engine.name()]);
        let status = check.status().map_err(host::start_error(&check))?;
        Ok(status.success())
    }

    fn here(&self, step: &Step, runs: usize) -> Result<Report> {
        let words = self.words(step, runs);
        let mut bench = Command::new(&words[0]);
        bench
            .args(&words[1..])
            .env("BANTAM_GUEST_DIR", &self.guest)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit());
        let out = bench.output().map_err(host::start_error(&bench))?;
        parsed(&out.stdout, &out.status.to_string())
    }

    fn in_rig(&self, step: &Step, runs: usize, progress: &Progress) -> Result<Report> {
        let rig = RigArgs {
            cpus: 1,
            mem: if step.is_foreign() {
                SMOLVM_RIG_MIB
            } else {
                RIG_MIB
            },
            timeout: RIG_SECONDS,
            env: vec![format!("BANTAM_GUEST_DIR={}", self.guest.display())],
            share: vec![PathBuf::from(PROGRAMS)],
            command: self.words(step, runs.min(RIG_RUNS)),
        };
        let out = Shared::default();
        let outcome = rig::run(&rig, out.clone(), io::stderr(), progress)?;
        if outcome.code == rig::TIMED_OUT {
            return Err(Error::other(format!(
                "the rig was not done after {RIG_SECONDS} s"
            )));
        }
        let bytes = out.0.lock().unwrap_or_else(PoisonError::into_inner);
        parsed(&bytes, &format!("exit status: {}", outcome.code))
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

/// The report of a run that ended with `status`. That may be a failure: the report says of what.
fn parsed(bytes: &[u8], status: &str) -> Result<Report> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::other(format!(
            "the measuring program ended ({status}) without a report: {error} in `{}`",
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
    use super::super::plan::testing::{known, request};
    use super::super::results::testing::measured;
    use super::*;

    fn report(name: &str) -> Report {
        Report {
            results: vec![measured(name, "ms", &[1.0])],
            ..Report::default()
        }
    }

    fn part(name: &str) -> Part {
        Part {
            place: Place::Rig,
            report: report(name),
        }
    }

    /// The names of what was measured, and of what failed with its engine.
    fn outcome(parts: &[Part]) -> (Vec<&str>, Vec<(&str, &str)>) {
        let results = parts.iter().flat_map(|part| &part.report.results);
        let failed = parts.iter().flat_map(|part| &part.report.failed);
        (
            results.map(|result| result.name.as_str()).collect(),
            failed
                .map(|failed| (failed.name.as_str(), failed.engine.as_str()))
                .collect(),
        )
    }

    #[test]
    fn a_rig_that_fails_takes_no_other_results_along() {
        let run = |step: &Step| match step.subject {
            Subject::Machines(Engine::Native) => {
                (Place::Rig, Err(Error::other("the rig was not done")))
            }
            subject => (Place::Host, Ok(report(subject.name()))),
        };
        let parts = parts(&request(&[], &[], false), &known(), run, || {
            Ok(part("virtual"))
        });
        let (results, failures) = outcome(&parts);
        assert_eq!(results, ["any", "emulated", "virtual"]);
        // What it was to measure, and not what has to be asked for.
        assert_eq!(failures, [("exits", "native"), ("exec", "native")]);
        let rig = &parts[2];
        assert_eq!(rig.place, Place::Rig);
        assert_eq!(rig.report.failed[0].reason, "the rig was not done");
    }

    #[test]
    fn virtual_time_that_fails_takes_no_other_results_along() {
        let run = |step: &Step| (Place::Host, Ok(report(step.subject.name())));
        let filters = ["exits", virtual_time::ENTRY];
        let parts = parts(&request(&[], &filters, false), &known(), run, || {
            Err(Error::other("nothing was measured"))
        });
        let (results, failures) = outcome(&parts);
        assert_eq!(results, ["native"]);
        assert_eq!(failures, [(virtual_time::ENTRY, "native")]);
    }

    #[test]
    fn a_program_that_ends_without_a_report_is_told_with_its_status() {
        let whole = r#"{"host":null,"results":[],"profiles":[],"skipped":[],"failed":[]}"#;
        assert!(parsed(whole.as_bytes(), "exit status: 1").is_ok());
        let error = parsed(b"{", "signal: 9").err().unwrap().to_string();
        assert!(error.contains("signal: 9"), "{error}");
    }
}
