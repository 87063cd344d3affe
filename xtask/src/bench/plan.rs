//! What is to be measured: which runs of `bantam-bench` that takes, and what each measures.

use super::{Engine, virtual_time};

/// The entry that measures smolvm.
const SMOLVM: &str = "peer-smolvm";
/// Names the sizes of files, which need no run of `bantam-bench`.
const SIZES: &str = "sizes";

/// What to measure.
#[derive(Clone)]
pub(super) struct Request {
    /// None: all.
    pub(super) engines: Vec<Engine>,
    /// None: everything that does not take minutes.
    pub(super) filters: Vec<String>,
    pub(super) runs: usize,
    pub(super) peers: bool,
}

/// What one run of `bantam-bench` is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Subject {
    /// What needs no machine that boots: measured on this host, whichever engine is asked for.
    Any,
    /// Machines of an engine.
    Machines(Engine),
}

impl Subject {
    /// In the order of measuring. The rig's QEMU is not to be among what is measured here, so native
    /// machines are the last.
    const ALL: [Self; 3] = [
        Self::Any,
        Self::Machines(Engine::Emulated),
        Self::Machines(Engine::Native),
    ];

    /// What `bantam-bench` and the results call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Machines(engine) => engine.name(),
        }
    }
}

/// One line of `bantam-bench --list`.
struct Entry {
    name: String,
    /// It takes minutes, and is measured only when it is named.
    asked: bool,
}

/// What can be measured.
pub(super) struct Known(Vec<(Subject, Vec<Entry>)>);

impl Known {
    /// Asks for the list of each subject.
    pub(super) fn ask<E>(list: impl Fn(Subject) -> Result<String, E>) -> Result<Self, E> {
        let of = |subject| {
            let entries = list(subject)?.lines().filter_map(entry).collect();
            Ok((subject, entries))
        };
        Subject::ALL
            .into_iter()
            .map(of)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    fn of(&self, subject: Subject) -> &[Entry] {
        let found = self.0.iter().find(|(of, _)| *of == subject);
        found.map_or(&[], |(_, entries)| entries)
    }
}

/// `NAME`, or `NAME asked`.
fn entry(line: &str) -> Option<Entry> {
    let mut words = line.split_whitespace();
    Some(Entry {
        name: words.next()?.to_owned(),
        asked: words.next() == Some("asked"),
    })
}

/// One run of `bantam-bench`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) subject: Subject,
    /// Those of the request that name something of this subject.
    pub(super) filters: Vec<String>,
    /// What is measured.
    pub(super) entries: Vec<String>,
}

impl Step {
    /// Whether another program is measured that must not take our numbers with it.
    pub(super) fn is_foreign(&self) -> bool {
        self.filters == [SMOLVM]
    }
}

impl Request {
    fn has(&self, engine: Engine) -> bool {
        self.engines.is_empty() || self.engines.contains(&engine)
    }

    fn subjects(&self) -> impl Iterator<Item = Subject> {
        Subject::ALL.into_iter().filter(|subject| match subject {
            Subject::Any => true,
            Subject::Machines(engine) => self.has(*engine),
        })
    }

    /// Everything that a filter may name for the engines that are asked for, each once.
    pub(super) fn names<'a>(&self, known: &'a Known) -> Vec<&'a str> {
        let mut names: Vec<&str> = Vec::new();
        for entry in self.subjects().flat_map(|subject| known.of(subject)) {
            if !names.contains(&entry.name.as_str()) {
                names.push(&entry.name);
            }
        }
        if self.has(Engine::Native) {
            names.push(virtual_time::ENTRY);
        }
        names.push(SIZES);
        names
    }

    /// The filters that name nothing.
    pub(super) fn unknown(&self, known: &Known) -> Vec<&str> {
        let is_known = |filter: &str| {
            let steps = self.with_filter(filter);
            !steps.steps(known).is_empty() || steps.has_virtual_time() || steps.has_sizes()
        };
        let filters = self.filters.iter().map(String::as_str);
        filters.filter(|filter| !is_known(filter)).collect()
    }

    fn with_filter(&self, filter: &str) -> Self {
        Self {
            filters: vec![filter.to_owned()],
            ..self.clone()
        }
    }

    /// One run after the other. A foreign program has a rig of its own.
    pub(super) fn steps(&self, known: &Known) -> Vec<Step> {
        let mut steps = Vec::new();
        for subject in self.subjects() {
            let native = subject == Subject::Machines(Engine::Native);
            let (foreign, ours): (Vec<String>, Vec<String>) = (self.filters.iter())
                .cloned()
                .partition(|filter| native && filter == SMOLVM);
            let all = self.filters.is_empty();
            if !ours.is_empty() || all {
                steps.extend(step(subject, &ours, known.of(subject)));
            }
            if !foreign.is_empty() || native && self.peers && all {
                steps.extend(step(subject, &[SMOLVM.to_owned()], known.of(subject)));
            }
        }
        steps
    }

    /// Virtual time has an outer machine of its own, whatever this host can do.
    pub(super) fn has_virtual_time(&self) -> bool {
        let mut filters = self.filters.iter();
        let asked = self.filters.is_empty() || filters.any(|filter| virtual_time::is_named(filter));
        asked && self.has(Engine::Native)
    }

    pub(super) fn has_sizes(&self) -> bool {
        let named = |filter: &String| SIZES.contains(filter.as_str());
        self.filters.is_empty() || self.filters.iter().any(named)
    }
}

/// The run for these filters, none of which stands for all; `None` if they name nothing.
fn step(subject: Subject, filters: &[String], known: &[Entry]) -> Option<Step> {
    let names = |filter: &String, entry: &Entry| entry.name.contains(filter.as_str());
    let entries: Vec<String> = (known.iter())
        .filter(|entry| match filters {
            [] => !entry.asked,
            filters => filters.iter().any(|filter| names(filter, entry)),
        })
        .map(|entry| entry.name.clone())
        .collect();
    let used = |filter: &&String| known.iter().any(|entry| names(filter, entry));
    (!entries.is_empty()).then(|| Step {
        subject,
        filters: filters.iter().filter(used).cloned().collect(),
        entries,
    })
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// A few entries of each subject.
    pub(in crate::bench) fn known() -> Known {
        let list = |subject| {
            Ok::<_, ()>(match subject {
                Subject::Any => "host-side\npull\n".to_owned(),
                Subject::Machines(Engine::Emulated) => {
                    "boot-instructions-1\nexec\npeer-smolvm asked\n".to_owned()
                }
                Subject::Machines(Engine::Native) => {
                    "exits\nexec\npeer-smolvm asked\ncycles asked\n".to_owned()
                }
            })
        };
        Known::ask(list).unwrap()
    }

    pub(in crate::bench) fn request(engines: &[Engine], filters: &[&str], peers: bool) -> Request {
        Request {
            engines: engines.to_vec(),
            filters: filters.iter().map(|&filter| filter.to_owned()).collect(),
            runs: 1,
            peers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{known, request};
    use super::*;

    const NATIVE: &[Engine] = &[Engine::Native];
    const EMULATED: &[Engine] = &[Engine::Emulated];

    /// Each run as `SUBJECT: FILTERS`.
    fn runs(engines: &[Engine], filters: &[&str], peers: bool) -> Vec<String> {
        let steps = request(engines, filters, peers).steps(&known()).into_iter();
        steps
            .map(|step| format!("{}: {}", step.subject.name(), step.filters.join(" ")))
            .collect()
    }

    #[test]
    fn a_foreign_program_is_measured_once_and_by_itself() {
        assert_eq!(
            runs(NATIVE, &[], true),
            ["any: ", "native: ", "native: peer-smolvm"]
        );
        assert_eq!(runs(NATIVE, &[], false), ["any: ", "native: "]);
        assert_eq!(runs(NATIVE, &["exec"], true), ["native: exec"]);
        assert_eq!(
            runs(NATIVE, &["exec", SMOLVM], true),
            ["native: exec", "native: peer-smolvm"]
        );
        assert_eq!(runs(EMULATED, &[], true), ["any: ", "emulated: "]);
        assert_eq!(runs(EMULATED, &[SMOLVM], true), ["emulated: peer-smolvm"]);
        let steps = request(NATIVE, &[], true).steps(&known());
        let foreign: Vec<bool> = steps.iter().map(Step::is_foreign).collect();
        assert_eq!(foreign, [false, false, true]);
    }

    #[test]
    fn virtual_time_is_measured_apart_from_the_others() {
        let none: [&str; 0] = [];
        assert_eq!(runs(&[], &[virtual_time::ENTRY], false), none);
        assert_eq!(
            runs(NATIVE, &["exec", virtual_time::ENTRY], false),
            ["native: exec"]
        );
        let asked = |engines: &[Engine], filters: &[&str]| {
            request(engines, filters, false).has_virtual_time()
        };
        assert!(asked(&[], &[]) && asked(NATIVE, &["virtual"]));
        assert!(!asked(&[], &["exec"]) && !asked(EMULATED, &["virtual"]));
    }

    #[test]
    fn what_needs_no_machine_is_measured_whichever_engine_is_asked_for() {
        for engines in [&[][..], NATIVE, EMULATED] {
            assert_eq!(runs(engines, &["host-side"], false), ["any: host-side"]);
        }
    }

    #[test]
    fn a_run_gets_the_filters_that_name_something_of_it_and_none_is_for_nothing() {
        assert_eq!(
            runs(&[], &["exits", "boot"], false),
            ["emulated: boot", "native: exits"]
        );
        let steps = request(NATIVE, &[], false).steps(&known());
        assert_eq!(steps[1].entries, ["exits", "exec"]);
        let steps = request(NATIVE, &["c"], false).steps(&known());
        assert_eq!(steps[0].entries, ["exec", "cycles"]);
    }

    #[test]
    fn a_filter_that_names_nothing_for_the_engines_is_told() {
        let known = known();
        for (engines, filters, unknown) in [
            (&[][..], &["nothing", "exec"][..], &["nothing"][..]),
            (
                EMULATED,
                &["exits", "virtual-time"],
                &["exits", "virtual-time"],
            ),
            (NATIVE, &["boot-instructions"], &["boot-instructions"]),
            (
                NATIVE,
                &["host-side", "exits", "virtual-time", "sizes"],
                &[],
            ),
        ] {
            let request = request(engines, filters, false);
            assert_eq!(request.unknown(&known), unknown, "{filters:?}");
        }
        let names = request(EMULATED, &[], false).names(&known);
        assert_eq!(
            names,
            [
                "host-side",
                "pull",
                "boot-instructions-1",
                "exec",
                SMOLVM,
                SIZES
            ]
        );
        assert!(
            request(NATIVE, &[], false)
                .names(&known)
                .contains(&virtual_time::ENTRY)
        );
    }
}
