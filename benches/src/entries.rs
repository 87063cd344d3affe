//! The list of what can be measured, and how one after the other is.

use std::fs;
use std::path::Path;

use crate::exits::ExitLog;
use crate::program::Bench;
use crate::report::Report;
use crate::{Engine, Error, Progress};
use crate::{boot, hostside, images, machine, named, net, onemore, peers, program, wakeups};

/// What a measurement is made with.
pub(crate) struct Context<'a> {
    pub(crate) bench: &'a Bench,
    /// How often times are taken.
    pub(crate) runs: usize,
    /// How often counts are: they hardly differ.
    pub(crate) counted: usize,
    /// The folder of smolvm's Python package, if it was fetched.
    pub(crate) smolvm: &'a Path,
    /// An archive of an image to pull.
    pub(crate) pull_image: &'a Path,
    /// An image with curl and iperf3.
    pub(crate) network_image: &'a Path,
    /// VM exits of this process's machines.
    pub(crate) exits: &'a ExitLog,
    pub(crate) progress: Progress,
}

/// One entry of the list below.
pub(crate) struct Entry {
    /// What `--filter` looks at.
    name: &'static str,
    on: On,
    measure: fn(&Context<'_>, &mut Report) -> Result<(), Error>,
}

/// When an entry is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    /// For each engine.
    Both,
    /// For machines on the native engine.
    Native,
    /// For machines on the emulated engine.
    Emulated,
    /// Once, whatever the engine: no machine boots for it.
    Any,
    /// For each engine with machines, but only when `--filter` names it: it takes minutes.
    Asked,
}

/// Everything that can be measured, in the order in which it is.
pub(crate) const ENTRIES: &[Entry] = &[
    entry("boot-instructions-1", On::Emulated, |c, r| {
        boot::instructions(c.bench, 1, c.counted, r, c.progress)
    }),
    entry("boot-instructions-4", On::Emulated, |c, r| {
        boot::instructions(c.bench, 4, c.counted, r, c.progress)
    }),
    entry("exits", On::Native, |c, r| {
        machine::exits(c.bench, c.counted, c.exits, r, c.progress)
    }),
    // Needs a KVM and no guest, so a software one will do.
    entry("host-side", On::Any, |c, r| {
        any_kvm()?;
        hostside::measure(c.bench, c.runs, r, c.progress)
    }),
    entry("system-calls", On::Both, |c, r| {
        program::system_calls(c.bench, c.counted, r, c.progress)
    }),
    entry("bytes-read", On::Both, |c, r| {
        program::read_bytes(c.bench, c.counted, r, c.progress)
    }),
    entry("memory", On::Both, |c, r| {
        machine::resident(c.bench, c.counted, r, c.progress)
    }),
    entry("one-more", On::Native, |c, r| {
        onemore::measure(c.bench, r, c.progress)
    }),
    entry("first-output", On::Both, |c, r| {
        program::first_output(c.bench, c.runs, r, c.progress)
    }),
    entry("peer-qemu-microvm", On::Both, |c, r| {
        peers::microvm(c.bench, c.runs, r, c.progress)
    }),
    entry("peer-smolvm", On::Asked, |c, r| {
        peers::smolvm(c.bench, c.smolvm, c.counted, r, c.progress)
    }),
    entry("exec", On::Both, |c, r| {
        machine::exec(c.bench, r, c.progress)
    }),
    entry("wake-ups", On::Both, |c, r| {
        wakeups::measure(c.bench, r, c.progress)
    }),
    entry("named-exec", On::Both, |c, r| {
        named::exec(c.bench, r, c.progress)
    }),
    entry("stream", On::Both, |c, r| {
        machine::stream(c.bench, r, c.progress)
    }),
    // The others stand behind QEMU's card only.
    entry("net", On::Emulated, |c, r| {
        net::peers(c.bench, c.network_image, c.counted, r, c.progress)
    }),
    entry("pull", On::Any, |c, r| {
        images::pull(&c.bench.program, c.pull_image, c.counted, r, c.progress)
    }),
    entry("cycles", On::Asked, |c, r| {
        named::cycles(c.bench, r, c.progress)
    }),
];

const fn entry(
    name: &'static str,
    on: On,
    measure: fn(&Context<'_>, &mut Report) -> Result<(), Error>,
) -> Entry {
    Entry { name, on, measure }
}

impl Entry {
    pub(crate) fn is_for(&self, engine: Engine) -> bool {
        match self.on {
            On::Both | On::Asked => !matches!(engine, Engine::Any),
            On::Native => matches!(engine, Engine::Native),
            On::Emulated => matches!(engine, Engine::Emulated),
            On::Any => matches!(engine, Engine::Any),
        }
    }

    /// Its line in a list: the name, and whether it has to be asked for.
    pub(crate) fn listed(&self) -> String {
        match self.on {
            On::Asked => format!("{} asked", self.name),
            _ => self.name.to_owned(),
        }
    }
}

/// A KVM that this process may use, also one on which no guest boots.
fn any_kvm() -> Result<(), Error> {
    let kvm = "/dev/kvm";
    match fs::File::options().read(true).write(true).open(kvm) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::Missing(format!("no KVM, {kvm}: {error}"))),
    }
}

/// The entries for an engine that the filters name, all without filters. A filter that names none is
/// an error, in words.
pub(crate) fn chosen<'a>(
    entries: &'a [Entry],
    engine: Engine,
    filters: &[String],
) -> Result<Vec<&'a Entry>, String> {
    let known: Vec<&Entry> = (entries.iter())
        .filter(|entry| entry.is_for(engine))
        .collect();
    let names = |filter: &String, entry: &Entry| entry.name.contains(filter.as_str());
    for filter in filters {
        if !known.iter().any(|entry| names(filter, entry)) {
            let all: Vec<&str> = known.iter().map(|entry| entry.name).collect();
            return Err(format!(
                "`--filter {filter}` names nothing that is measured for `--engine {}`; there are: {}",
                engine.name(),
                all.join(", ")
            ));
        }
    }
    Ok(known
        .into_iter()
        .filter(|entry| filters.is_empty() || filters.iter().any(|filter| names(filter, entry)))
        .collect())
}

/// Makes each measurement if the engine is usable. One that cannot be made or fails does not stop the
/// others.
pub(crate) fn run(
    entries: &[&Entry],
    filters: &[String],
    usable: &Result<(), Error>,
    context: &Context<'_>,
    report: &mut Report,
) {
    for Entry { name, on, measure } in entries {
        if filters.is_empty() && *on == On::Asked {
            report.skip(*name, format!("takes minutes: only with --filter {name}"));
        } else if let Err(error) = usable {
            report.left_out(*name, error);
        } else if let Err(error) = measure(context, report) {
            context.progress.say(&format!("{name}: {error}"));
            report.left_out(*name, &error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use bantam::EngineKind;

    use super::*;

    const SOME: &[Entry] = &[
        entry("works", On::Both, |_, r| {
            r.add("number", "native", "ms", vec![1.0]);
            Ok(())
        }),
        entry("lacks-a-program", On::Both, |_, _| {
            program::find("no-such-program-anywhere").map(|_| ())
        }),
        // What a program does that is there and wrong.
        entry("goes-wrong", On::Both, |c, r| {
            program::read_bytes(c.bench, c.counted, r, c.progress)
        }),
        entry("only-emulated", On::Emulated, |_, _| Ok(())),
        entry("hours", On::Asked, |_, _| {
            Err(Error::Other("asked".to_owned()))
        }),
    ];

    /// What is left of the native entries.
    fn report(usable: &Result<(), Error>, filters: &[&str]) -> Report {
        let bench = Bench {
            engine: EngineKind::Native,
            program: PathBuf::from("/bin/false"),
            image: PathBuf::from("image"),
            system_map: None,
        };
        let exits = ExitLog::default();
        let context = Context {
            bench: &bench,
            runs: 1,
            counted: 1,
            smolvm: Path::new("smolvm"),
            pull_image: Path::new("pull"),
            network_image: Path::new("network"),
            exits: &exits,
            progress: Progress("native"),
        };
        let filters: Vec<String> = filters.iter().map(|&filter| filter.to_owned()).collect();
        let mut report = Report::of("native");
        let entries = chosen(SOME, Engine::Native, &filters).unwrap();
        run(&entries, &filters, usable, &context, &mut report);
        report
    }

    fn names(left_out: &[crate::report::LeftOut]) -> Vec<&str> {
        left_out.iter().map(|one| one.name.as_str()).collect()
    }

    #[test]
    fn what_was_tried_and_went_wrong_is_no_skip() {
        let report = report(&Ok(()), &[]);
        assert_eq!(names(&report.failed), ["goes-wrong"]);
        assert!(report.failed[0].reason.contains("/bin/false"));
        assert_eq!(report.failed[0].engine, "native");
        assert_eq!(names(&report.skipped), ["lacks-a-program", "hours"]);
        assert_eq!(report.results.len(), 1);
    }

    #[test]
    fn without_a_usable_engine_nothing_is_tried() {
        let missing = report(&Err(Error::Missing("no KVM".to_owned())), &["w"]);
        assert_eq!(names(&missing.skipped), ["works", "goes-wrong"]);
        assert!(missing.failed.is_empty() && missing.results.is_empty());
        let broken = report(&Err(Error::Other("the rig's KVM".to_owned())), &["works"]);
        assert_eq!(names(&broken.failed), ["works"]);
    }

    #[test]
    fn a_filter_that_names_nothing_is_an_error_that_names_what_there_is() {
        let chosen = |engine, filters: &[&str]| {
            let filters: Vec<String> = filters.iter().map(|&filter| filter.to_owned()).collect();
            chosen(SOME, engine, &filters)
        };
        for (engine, filters) in [
            (Engine::Native, &["nothing"][..]),
            (Engine::Native, &["works", "nothing"]),
            (Engine::Native, &["only-emulated"]),
            (Engine::Any, &["works"]),
        ] {
            let error = chosen(engine, filters).err().unwrap();
            assert!(error.contains(filters[filters.len() - 1]), "{error}");
        }
        let error = chosen(Engine::Native, &["nothing"]).err().unwrap();
        assert!(error.contains("works, lacks-a-program"), "{error}");
        assert!(!error.contains("only-emulated"), "{error}");
        assert!(chosen(Engine::Emulated, &["only", "hours"]).is_ok());
    }

    #[test]
    fn every_entry_is_for_some_engine_and_the_hosts_own_for_one() {
        let engines = [Engine::Native, Engine::Emulated, Engine::Any];
        for entry in ENTRIES {
            let count = engines
                .iter()
                .filter(|engine| entry.is_for(**engine))
                .count();
            assert!(count > 0, "{}", entry.name);
        }
        let host = chosen(ENTRIES, Engine::Any, &[]).unwrap();
        let host: Vec<&str> = host.iter().map(|entry| entry.name).collect();
        assert_eq!(host, ["host-side", "pull"]);
    }
}
