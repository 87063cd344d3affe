//! All results for people: on a terminal and as Markdown.

use std::fmt::Write as _;

use super::results::{
    Count, Facts, Measurement, Place, Profile, Results, counted, mitigations, number,
};

/// How many parts of a count the table shows.
const TOP: usize = 12;

/// What the short table has.
const HEADLINES: [&str; 19] = [
    "boot instructions, 1 vCPU",
    "boot instructions, 4 vCPU",
    "instructions from hello to first output, 1 vCPU",
    "instructions from start to first output, 1 vCPU, without waits",
    "exits to user space of a boot",
    "virtual time: all VM exits to /init",
    "virtual time: start to the guest's /init",
    "host system calls of a run",
    "start to first output",
    "start to first output, side by side",
    "start call to a command's output, library",
    "exec `true` round trip, side by side",
    "exec `true` round trip",
    "named: exec `true`, library",
    "resident: this process, without guest memory",
    "resident: QEMU, without guest memory",
    "resident: guest memory touched",
    "resident: beside guest memory, all processes",
    "pull to a root file system",
];

/// A number of ours and the same number of others.
struct Row<'a> {
    place: Place,
    ours: &'a Measurement,
    peers: Vec<&'a Measurement>,
}

impl Row<'_> {
    fn engine(&self) -> String {
        match self.place {
            Place::Host => self.ours.engine.clone(),
            Place::Rig => format!("{} (rig)", self.ours.engine),
        }
    }

    /// Our median by each peer's.
    fn ratios(&self) -> String {
        let ratios: Vec<String> = (self.peers.iter())
            .filter(|peer| peer.median > 0.0)
            .map(|peer| format!("{:.2} x {}", self.ours.median / peer.median, name(peer)))
            .collect();
        ratios.join("; ")
    }
}

fn name(peer: &Measurement) -> &str {
    peer.peer.as_deref().unwrap_or("bantam")
}

/// Ours in the order of measuring, each with what peers have of the same name; then what only a
/// peer has.
fn rows(results: &Results) -> Vec<Row<'_>> {
    let all: Vec<_> = results.measurements().collect();
    let same = |a: &(Place, &Measurement), b: &(Place, &Measurement)| {
        (a.0, &a.1.name, &a.1.engine, &a.1.unit) == (b.0, &b.1.name, &b.1.engine, &b.1.unit)
    };
    let mut rows: Vec<Row<'_>> = Vec::new();
    for one in &all {
        let ours = one.1.peer.is_none();
        let known = all
            .iter()
            .any(|other| other.1.peer.is_none() && same(one, other));
        if ours || !known {
            let peers = all.iter().filter(|other| ours && other.1.peer.is_some());
            rows.push(Row {
                place: one.0,
                ours: one.1,
                peers: peers
                    .filter(|other| same(one, other))
                    .map(|(_, peer)| *peer)
                    .collect(),
            });
        }
    }
    rows
}

/// The table for a terminal, with profiles and what could not be measured.
pub(super) fn table(results: &Results) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        let _ = writeln!(text, "{}", words.trim_end());
    };
    for fact in facts(results) {
        line(fact);
    }
    line(format!(
        "\n{:62} {:14} {:>13} {:>13} {:>13} {:>4}  ours by theirs",
        "what", "engine", "median", "p95", "min", "n"
    ));
    for row in rows(results) {
        let mut put = |what: String, m: &Measurement, ratios: String| {
            line(format!(
                "{what:62} {:14} {:>13} {:>13} {:>13} {:>4}  {ratios}",
                row.engine(),
                number(m.median),
                m.p95.map(number).unwrap_or_default(),
                number(m.min),
                m.n
            ));
        };
        let alone = match &row.ours.peer {
            Some(peer) => format!(" ({peer})"),
            None => String::new(),
        };
        let what = format!("{}{alone}, {}", row.ours.name, row.ours.unit);
        put(what, row.ours, row.ratios());
        for peer in &row.peers {
            put(format!("    {}", name(peer)), peer, String::new());
        }
    }
    for (name, bytes) in &results.sizes {
        line(format!(
            "{:62} {:14} {:>13}",
            format!("size: {name}, bytes"),
            "",
            counted(*bytes)
        ));
    }
    for profile in results.profiles() {
        for words in profile_lines(profile) {
            line(words);
        }
    }
    for skipped in results.skipped() {
        line(format!(
            "not measured: {}: {}",
            skipped.title(),
            skipped.reason
        ));
    }
    for (names, reason) in failures(results) {
        line(format!("FAILED: {names}: {reason}"));
    }
    text
}

/// Failures in words, those with the same reason together.
fn failures(results: &Results) -> Vec<(String, &str)> {
    let mut all: Vec<(String, &str)> = Vec::new();
    for failed in results.failed() {
        match all.iter_mut().find(|(_, reason)| *reason == failed.reason) {
            Some((names, _)) => names.push_str(&format!(", {}", failed.title())),
            None => all.push((failed.title(), &failed.reason)),
        }
    }
    all
}

/// When, what and on which machines.
fn facts(results: &Results) -> Vec<String> {
    let run = &results.run;
    let mut lines = vec![
        format!("{:8} {}", "date", run.date),
        format!("{:8} {}", "commit", run.commit),
        format!("{:8} {}", "qemu", run.qemu),
    ];
    let mut seen = Vec::new();
    for part in &results.parts {
        if let Some(facts) = &part.report.host
            && !seen.contains(&part.place)
        {
            seen.push(part.place);
            let place = match part.place {
                Place::Host => "host",
                Place::Rig => "rig",
            };
            lines.push(format!("{place:8} {}", machine(facts)));
            lines.push(format!("{:8} mitigations: {}", "", mitigations(facts)));
        }
    }
    lines
}

fn machine(facts: &Facts) -> String {
    format!(
        "{}, {} cores, {}, load {}",
        facts.cpu, facts.cores, facts.kernel, facts.load
    )
}

fn profile_lines(profile: &Profile) -> Vec<String> {
    let total = profile.total.max(1);
    let entry = |part: &Count| {
        let percent = part.count * 100 / total;
        format!("{:>14} {percent:3} %  {}", counted(part.count), part.name)
    };
    let title = format!(
        "{} ({}), {}, median run",
        profile.name, profile.engine, profile.unit
    );
    let mut lines = Vec::new();
    if !profile.marks.is_empty() {
        lines.push(format!("\n{title}: until each phase began"));
        lines.extend(profile.marks.iter().map(entry));
    }
    lines.push(format!("\n{title}: most"));
    lines.extend(profile.parts.iter().take(TOP).map(entry));
    if !profile.waits.is_empty() {
        lines.push("these only wait:".to_owned());
        lines.extend(profile.waits.iter().map(entry));
    }
    lines
}

/// A short table for the README and the whole one, in Markdown.
pub(super) fn markdown(results: &Results) -> String {
    let mut text = String::new();
    let mut line = |words: String| {
        let _ = writeln!(text, "{words}");
    };
    for fact in facts(results) {
        let words: Vec<&str> = fact.split_whitespace().collect();
        line(format!("* {}", words.join(" ")));
    }
    let rows = rows(results);
    line("\n| what | engine | bantam | others | ours by theirs |".to_owned());
    line("|---|---|---:|---:|---:|".to_owned());
    for row in rows
        .iter()
        .filter(|row| HEADLINES.contains(&row.ours.name.as_str()) && row.ours.peer.is_none())
    {
        let others: Vec<String> = (row.peers.iter())
            .map(|peer| format!("{} {}", name(peer), number(peer.median)))
            .collect();
        line(format!(
            "| {}, {} | {} | {} | {} | {} |",
            row.ours.name,
            row.ours.unit,
            row.engine(),
            number(row.ours.median),
            others.join("<br>"),
            row.ratios().replace("; ", "<br>")
        ));
    }
    line("\n| what | engine | who | median | p95 | min | n |".to_owned());
    line("|---|---|---|---:|---:|---:|---:|".to_owned());
    for row in &rows {
        for m in std::iter::once(&row.ours).chain(&row.peers) {
            line(format!(
                "| {}, {} | {} | {} | {} | {} | {} | {} |",
                m.name,
                m.unit,
                row.engine(),
                name(m),
                number(m.median),
                m.p95.map(number).unwrap_or_default(),
                number(m.min),
                m.n
            ));
        }
    }
    if !results.sizes.is_empty() {
        let sizes: Vec<String> = (results.sizes.iter())
            .map(|(name, bytes)| format!("{name} {}", counted(*bytes)))
            .collect();
        line(format!("\nSizes in bytes: {}.", sizes.join(", ")));
    }
    for skipped in results.skipped() {
        line(format!(
            "\nNot measured: {}: {}.",
            skipped.title(),
            skipped.reason
        ));
    }
    for (names, reason) in failures(results) {
        line(format!("\nFailed: {names}: {reason}."));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::results::testing::{left_out, measured, profile, results};
    use super::*;

    fn side_by_side() -> Results {
        let theirs = Measurement {
            peer: Some("QEMU microvm".to_owned()),
            ..measured("start to first output", "ms", &[400.0])
        };
        let lone = Measurement {
            peer: Some("other".to_owned()),
            ..measured("theirs alone", "ms", &[7.0])
        };
        let ours = measured("start to first output", "ms", &[100.0]);
        let mut all = results(vec![theirs, ours, lone], vec![profile("p", &[("f", 5)])]);
        all.parts[0].place = Place::Rig;
        all
    }

    #[test]
    fn the_table_sets_peers_under_ours_with_the_ratio() {
        let text = table(&side_by_side());
        let ours = text.find("start to first output, ms").unwrap();
        let theirs = text.find("    QEMU microvm").unwrap();
        assert!(ours < theirs, "{text}");
        assert!(text.contains("0.25 x QEMU microvm"), "{text}");
        assert!(text.contains("theirs alone (other), ms"), "{text}");
        assert!(text.contains("emulated (rig)"), "{text}");
    }

    #[test]
    fn failures_are_told_apart_from_what_cannot_be_measured() {
        let mut all = side_by_side();
        let report = &mut all.parts[0].report;
        report.skipped.push(left_out("pull", "no skopeo"));
        for name in ["exits", "exec"] {
            report.failed.push(left_out(name, "the rig was not done"));
        }
        let text = table(&all);
        let skipped = "not measured: pull (emulated): no skopeo\n";
        let failed = "FAILED: exits (emulated), exec (emulated): the rig was not done\n";
        assert!(text.ends_with(&format!("{skipped}{failed}")), "{text}");
        let text = markdown(&all);
        assert!(text.contains("Failed: exits (emulated), exec"), "{text}");
    }

    #[test]
    fn the_short_table_in_markdown_has_the_headlines_only() {
        let text = markdown(&side_by_side());
        let short = "| start to first output, ms | emulated (rig) | 100 | QEMU microvm 400 | 0.25 x QEMU microvm |";
        assert!(text.contains(short), "{text}");
        assert_eq!(text.matches("theirs alone").count(), 1, "{text}");
    }
}
