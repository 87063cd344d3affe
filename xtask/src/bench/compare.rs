//! What moved between two runs.

use std::fmt::Write as _;

use super::budgets;
use super::results::{Measurement, Place, Profile, Results, number};

/// A time that was taken once has a spread nobody saw; it is taken to be a tenth.
const UNSEEN: f64 = 0.1;
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

    /// Whether the change is more than what values of one run differ by.
    fn is_real(&self) -> bool {
        let spread = |m: &Measurement| match (m.is_count(), m.n) {
            (false, 1) => m.median * UNSEEN,
            _ => m.spread(),
        };
        self.change().abs() > spread(self.old).max(spread(self.new))
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
    if let Some(note) = other_machine(old, new) {
        line(note);
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
    for Move { place, old, new } in &moves {
        let percent = match old.median {
            0.0 => "new".to_owned(),
            was => format!("{:+.1} %", (new.median - was) / was * 100.0),
        };
        line(format!(
            "{percent:>10}  {}: {} -> {} {}",
            title(*place, new),
            number(old.median),
            number(new.median),
            new.unit
        ));
    }
    for Move {
        old: was, new: is, ..
    } in moves.iter().filter(|moved| moved.new.is_count())
    {
        if let (Some(before), Some(after)) = (profile(old, was), profile(new, is)) {
            for grown in budgets::growth(&budgets::parts(before, 0), after, 0, PARTS) {
                line(format!("            {}: {grown}", is.name));
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

/// Times of two machines say nothing of what changed.
fn other_machine(old: &Results, new: &Results) -> Option<String> {
    let machine = |results: &Results| {
        let part = results
            .parts
            .iter()
            .find(|part| part.place == Place::Host)?;
        let facts = part.report.host.as_ref()?;
        Some(format!(
            "{}, {} cores, {}",
            facts.cpu, facts.cores, facts.kernel
        ))
    };
    let (old, new) = (machine(old)?, machine(new)?);
    (old != new).then(|| format!("note: then on {old}, now on {new}: compare counts, not times"))
}

#[cfg(test)]
mod tests {
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
    fn a_count_that_moved_names_what_grew() {
        let run = |count: u64| {
            let total = (count + 10) as f64;
            results(
                vec![measured("boot", "instructions", &[total])],
                vec![profile("boot", &[("sort_r", count), ("strlen", 10)])],
            )
        };
        let text = compare(&run(100), &run(500));
        assert!(text.contains("sort_r"), "{text}");
        assert!(!text.contains("strlen"), "{text}");
    }
}
