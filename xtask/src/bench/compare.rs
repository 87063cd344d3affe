//! What moved between two runs.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::parts::{movement, parts};
use super::results::{Facts, Measurement, Place, Profile, Results, number};

/// What was taken once has a spread nobody saw; of a time it is taken to be a tenth.
const UNSEEN_OF_TIME: f64 = 0.1;
/// Of a count: a little more than counts of one build differ by that are taken several times, wake-ups
/// and memory in use.
const UNSEEN_OF_COUNT: f64 = 0.03;
/// How many parts of a count that moved are named.
const PARTS: usize = 6;

/// A number that is not what it was.
struct Move<'a> {
    place: Place,
    old: &'a Measurement,
    new: &'a Measurement,
}

impl Move<'_> {
    fn change(&self) -> f64 {
        self.new.median - self.old.median
    }

    /// By which part it changed; from nothing is more than anything.
    fn size(&self) -> f64 {
        if self.old.median == 0.0 {
            f64::INFINITY
        } else {
            (self.change() / self.old.median).abs()
        }
    }

    /// By which part it changed, as it is printed.
    fn percent(&self) -> String {
        if self.old.median == 0.0 {
            "new".to_owned()
        } else {
            format!("{:+.1} %", self.change() / self.old.median * 100.0)
        }
    }

    /// Whether the change is more than what values of one run differ by, and one that can be seen.
    fn is_real(&self) -> bool {
        let spread = |m: &Measurement| match (m.n, m.is_count()) {
            (1, true) => m.median.abs() * UNSEEN_OF_COUNT,
            (1, false) => m.median.abs() * UNSEEN_OF_TIME,
            _ => m.spread(),
        };
        self.change().abs() > spread(self.old).max(spread(self.new))
            && !["+0.0 %", "-0.0 %"].contains(&self.percent().as_str())
    }
}

/// What moved, largest first, and what is in one of the runs only.
pub(super) fn compare(old: &Results, new: &Results) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        let _ = writeln!(text, "{words}");
    };
    line(format!(
        "\nmoved since {} of {}:",
        or_unknown(&old.run.commit),
        or_unknown(&old.run.date)
    ));
    for note in notes(old, new) {
        line(format!("note: {note}"));
    }
    let mut moves = Vec::new();
    let mut gone = Vec::new();
    for (place, was) in old.measurements() {
        match new
            .measurements()
            .find(|(at, is)| *at == place && is_same(was, is))
        {
            Some((place, is)) => moves.push(Move {
                place,
                old: was,
                new: is,
            }),
            None => gone.push(title(place, was)),
        }
    }
    let compared = moves.len();
    moves.retain(Move::is_real);
    moves.sort_by(|a, b| b.size().total_cmp(&a.size()));
    for moved in &moves {
        line(format!(
            "{:>10}  {}: {} -> {} {}",
            moved.percent(),
            title(moved.place, moved.new),
            number(moved.old.median),
            number(moved.new.median),
            moved.new.unit
        ));
    }
    for Move {
        old: was, new: is, ..
    } in moves.iter().filter(|moved| moved.new.is_count())
    {
        if let (Some(before), Some(after)) = (profile(old, was), profile(new, is)) {
            for part in movement(&parts(before, 0), after, PARTS) {
                line(format!("            {}: {part}", is.name));
            }
        }
    }
    line(format!(
        "{} of {compared} moved beyond their spread",
        moves.len()
    ));
    for title in gone {
        line(format!("not measured any more, or renamed: {title}"));
    }
    for (place, is) in new.measurements() {
        if !old
            .measurements()
            .any(|(at, was)| at == place && is_same(was, is))
        {
            line(format!(
                "not measured before, or renamed: {}",
                title(place, is)
            ));
        }
    }
    text
}

fn is_same(a: &Measurement, b: &Measurement) -> bool {
    (&a.name, &a.engine, &a.peer, &a.unit) == (&b.name, &b.engine, &b.peer, &b.unit)
}

/// The profile of a number of ours, if it has one.
fn profile<'a>(results: &'a Results, of: &Measurement) -> Option<&'a Profile> {
    results
        .profiles()
        .find(|p| p.name == of.name && p.engine == of.engine && of.peer.is_none())
}

fn title(place: Place, m: &Measurement) -> String {
    let place = match place {
        Place::Host => "",
        Place::Rig => ", rig",
    };
    let peer = m
        .peer
        .as_ref()
        .map_or_else(String::new, |peer| format!(", {peer}"));
    format!("{} ({}{place}{peer})", m.name, m.engine)
}

fn or_unknown(text: &str) -> &str {
    if text.is_empty() { "unknown" } else { text }
}

/// What else than the commit differs between the runs.
fn notes(old: &Results, new: &Results) -> Vec<String> {
    let mut machines = Vec::new();
    for (place, name) in [(Place::Host, "host"), (Place::Rig, "rig")] {
        if let (Some(then), Some(now)) = (facts(old, place), facts(new, place)) {
            machines.extend(other_machine(name, then, now));
        }
    }
    if !machines.is_empty() {
        machines.push("compare counts, not times: they are of different machines".to_owned());
    }
    (difference("qemu", &old.run.qemu, &new.run.qemu).into_iter())
        .chain(difference("engines", &engines(old), &engines(new)))
        .chain(machines)
        .chain(other_place(old, new))
        .collect()
}

fn difference(what: &str, then: &str, now: &str) -> Option<String> {
    let (known_then, known_now) = (or_unknown(then), or_unknown(now));
    (then != now).then(|| format!("{what}: then {known_then}, now {known_now}"))
}

/// In what the machine that is called `name` is not what it was; its load is of the hour.
fn other_machine(name: &str, then: &Facts, now: &Facts) -> Vec<String> {
    let cores = |facts: &Facts| facts.cores.to_string();
    let weaknesses: BTreeSet<&String> =
        (then.mitigations.keys().chain(now.mitigations.keys())).collect();
    let mitigation = |weakness: &String| {
        let state = |facts: &Facts| match facts.mitigations.get(weakness) {
            Some(state) => state.clone(),
            None => "Not affected".to_owned(),
        };
        let what = format!("{name}'s mitigation of {weakness}");
        difference(&what, &state(then), &state(now))
    };
    (difference(&format!("{name}'s cpu"), &then.cpu, &now.cpu).into_iter())
        .chain(difference(
            &format!("{name}'s cores"),
            &cores(then),
            &cores(now),
        ))
        .chain(difference(
            &format!("{name}'s kernel"),
            &then.kernel,
            &now.kernel,
        ))
        .chain(weaknesses.into_iter().filter_map(mitigation))
        .collect()
}

/// The machine that measured at a place, if its program told.
fn facts(results: &Results, place: Place) -> Option<&Facts> {
    let mut parts = results.parts.iter().filter(|part| part.place == place);
    parts.find_map(|part| part.report.host.as_ref())
}

/// The engines of a run.
fn engines(results: &Results) -> String {
    let engines: BTreeSet<&str> = (results.measurements())
        .map(|(_, m)| m.engine.as_str())
        .filter(|engine| *engine != "any")
        .collect();
    engines.into_iter().collect::<Vec<_>>().join(", ")
}

/// Numbers that were measured on the host then and in the rig now, or the other way round.
fn other_place(old: &Results, new: &Results) -> Option<String> {
    let at = |results: &Results, place, of: &Measurement| {
        let mut all = results.measurements();
        all.any(|(at, m)| at == place && is_same(m, of))
    };
    let moved: Vec<Place> = (new.measurements())
        .filter(|(now, m)| {
            let other = match now {
                Place::Host => Place::Rig,
                Place::Rig => Place::Host,
            };
            !at(old, *now, m) && at(old, other, m)
        })
        .map(|(now, _)| now)
        .collect();
    let (then, now) = match moved.first()? {
        Place::Host => ("in the rig", "on the host"),
        Place::Rig => ("on the host", "in the rig"),
    };
    Some(format!(
        "numbers that were measured {then} then and {now} now are not compared: {}",
        moved.len()
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::results::testing::{measured, profile, results};
    use super::*;

    #[test]
    fn only_real_moves_are_listed_largest_first() {
        let old = results(
            vec![
                measured("steady", "ms", &[10.0, 11.0, 12.0]),
                measured("slower", "ms", &[10.0, 10.0, 11.0]),
                measured("exits", "exits", &[247.0, 247.0, 248.0]),
                measured("once", "ms", &[100.0]),
            ],
            Vec::new(),
        );
        let new = results(
            vec![
                measured("steady", "ms", &[11.0, 12.0, 13.0]),
                measured("slower", "ms", &[20.0, 20.0, 21.0]),
                measured("exits", "exits", &[250.0, 250.0, 250.0]),
                measured("once", "ms", &[108.0]),
            ],
            Vec::new(),
        );
        let text = compare(&old, &new);
        let slower = text.find("slower (emulated): 10 -> 20 ms").unwrap();
        let exits = text.find("exits (emulated): 247 -> 250 exits").unwrap();
        assert!(slower < exits, "{text}");
        assert!(!text.contains("steady"), "{text}");
        assert!(!text.contains("once"), "{text}");
        assert!(text.contains("2 of 4 moved"), "{text}");
    }

    #[test]
    fn what_is_in_one_run_only_is_named() {
        let old = results(vec![measured("old name", "ms", &[1.0])], Vec::new());
        let new = results(vec![measured("new name", "ms", &[1.0])], Vec::new());
        let text = compare(&old, &new);
        assert!(
            text.contains("not measured any more, or renamed: old name"),
            "{text}"
        );
        assert!(
            text.contains("not measured before, or renamed: new name"),
            "{text}"
        );
    }

    #[test]
    fn a_count_that_moved_names_the_parts_that_did_in_either_direction() {
        let run = |count: u64| {
            let total = (count + 10) as f64;
            results(
                vec![measured("boot", "instructions", &[total])],
                vec![profile("boot", &[("sort_r", count), ("strlen", 10)])],
            )
        };
        for (old, new, change) in [(100, 500, "+400  sort_r"), (500, 100, "-400  sort_r")] {
            let text = compare(&run(old), &run(new));
            assert!(text.contains(change), "{text}");
            assert!(!text.contains("strlen"), "{text}");
        }
    }

    /// What a comparison of one number says moved.
    fn moved(unit: &str, old: &[f64], new: &[f64]) -> bool {
        let run = |values: &[f64]| results(vec![measured("m", unit, values)], Vec::new());
        let text = compare(&run(old), &run(new));
        assert!(!text.contains("0.0 %"), "{text}");
        text.contains("1 of 1 moved")
    }

    #[test]
    fn what_was_taken_once_is_uncertain() {
        assert!(!moved("wake-ups", &[0.91], &[0.92]));
        assert!(moved("wake-ups", &[0.91], &[1.91]));
        assert!(!moved("ms", &[100.0], &[108.0]));
        assert!(moved("ms", &[100.0], &[118.0]));
        // Once only, in one of the runs.
        assert!(!moved("calls", &[100.0, 100.0], &[102.0]));
        assert!(moved("calls", &[100.0, 100.0], &[102.0, 102.0]));
    }

    #[test]
    fn what_is_printed_as_no_change_is_none() {
        assert!(!moved("MiB", &[29.746], &[29.75]));
        assert!(!moved("MiB", &[29.746, 29.746], &[29.75, 29.75]));
        assert!(!moved(
            "instructions",
            &[1e7, 1e7],
            &[1e7 - 4000.0, 1e7 - 4000.0]
        ));
        assert!(moved(
            "instructions",
            &[1e7, 1e7],
            &[1e7 - 6000.0, 1e7 - 6000.0]
        ));
        assert!(moved("KiB", &[0.0], &[4.0]));
    }

    /// A run on this machine.
    fn on(facts: Facts) -> Results {
        let mut run = results(vec![measured("m", "ms", &[1.0])], Vec::new());
        run.parts[0].report.host = Some(facts);
        run.run.qemu = "QEMU 7".to_owned();
        run
    }

    fn machine() -> Facts {
        Facts {
            cpu: "EPYC".to_owned(),
            cores: 2,
            kernel: "Linux 6.18".to_owned(),
            mitigations: BTreeMap::from([("meltdown".to_owned(), "Mitigation: PTI".to_owned())]),
            load: "1.0".to_owned(),
        }
    }

    fn notes_of(old: &Results, new: &Results) -> Vec<String> {
        let text = compare(old, new);
        let notes = text.lines().filter_map(|line| line.strip_prefix("note: "));
        notes.map(str::to_owned).collect()
    }

    #[test]
    fn every_difference_of_the_machines_is_noted_and_the_load_is_none() {
        let busy = Facts {
            load: "9.0".to_owned(),
            ..machine()
        };
        assert_eq!(notes_of(&on(machine()), &on(busy)), [""; 0]);
        let other = Facts {
            cpu: "Xeon".to_owned(),
            cores: 4,
            kernel: "Linux 6.19".to_owned(),
            mitigations: BTreeMap::from([("mds".to_owned(), "Vulnerable".to_owned())]),
            ..machine()
        };
        let mut new = on(other);
        new.run.qemu = "QEMU 8".to_owned();
        let expected = [
            "qemu: then QEMU 7, now QEMU 8",
            "host's cpu: then EPYC, now Xeon",
            "host's cores: then 2, now 4",
            "host's kernel: then Linux 6.18, now Linux 6.19",
            "host's mitigation of mds: then Not affected, now Vulnerable",
            "host's mitigation of meltdown: then Mitigation: PTI, now Not affected",
            "compare counts, not times: they are of different machines",
        ];
        assert_eq!(notes_of(&on(machine()), &new), expected);
        let mut in_rig = new;
        in_rig.parts[0].place = Place::Rig;
        let mut old = on(machine());
        old.parts[0].place = Place::Rig;
        let notes = notes_of(&old, &in_rig);
        assert_eq!(notes[1], "rig's cpu: then EPYC, now Xeon");
    }

    #[test]
    fn other_engines_and_another_place_are_noted() {
        let old = on(machine());
        let mut new = on(machine());
        new.parts[0].place = Place::Rig;
        let notes = notes_of(&old, &new);
        let expected =
            "numbers that were measured on the host then and in the rig now are not compared: 1";
        assert_eq!(notes, [expected]);
        let mut new = on(machine());
        new.parts[0].report.results[0].engine = "native".to_owned();
        let notes = notes_of(&old, &new);
        assert_eq!(notes, ["engines: then emulated, now native"]);
    }
}
