//! What counts are made of, and what of that moved.

use std::collections::BTreeMap;

use super::results::{Profile, counted};

/// The parts of a profile that have at least `smallest`.
pub(super) fn parts(profile: &Profile, smallest: u64) -> BTreeMap<String, u64> {
    (profile.parts.iter())
        .filter(|part| part.count >= smallest)
        .map(|part| (part.name.clone(), part.count))
        .collect()
}

/// What grew most since `before`, in words. A part that is not in `before` had at most `unseen`.
pub(super) fn growth(
    before: &BTreeMap<String, u64>,
    now: &Profile,
    unseen: u64,
    most: usize,
) -> Vec<String> {
    words(moves(before, now, unseen), most, |change| change > 0)
}

/// What moved most since `before`, in either direction, in words; `before` is whole.
pub(super) fn movement(before: &BTreeMap<String, u64>, now: &Profile, most: usize) -> Vec<String> {
    words(moves(before, now, 0), most, |change| change != 0)
}

/// By how much each part changed, with the words for it.
fn moves(before: &BTreeMap<String, u64>, now: &Profile, unseen: u64) -> Vec<(i128, String)> {
    let counts = parts(now, 0);
    let gone = before.keys().filter(|name| !counts.contains_key(*name));
    (counts.keys().chain(gone))
        .map(|name| {
            let (was, is) = (before.get(name).copied(), counts.get(name).copied());
            let change = i128::from(is.unwrap_or(0)) - i128::from(was.unwrap_or(unseen));
            let was = match (was, unseen) {
                (Some(was), _) => counted(was),
                (None, 0) => "none".to_owned(),
                (None, unseen) => format!("less than {}", counted(unseen)),
            };
            let is = is.map_or("none".to_owned(), counted);
            let sign = if change < 0 { '-' } else { '+' };
            let size = u64::try_from(change.unsigned_abs()).unwrap_or(u64::MAX);
            let size = format!("{sign}{}", counted(size));
            (change, format!("{size:>12}  {name} ({was} -> {is})"))
        })
        .collect()
}

/// The words for the largest of these.
fn words(mut moves: Vec<(i128, String)>, most: usize, wanted: fn(i128) -> bool) -> Vec<String> {
    moves.retain(|(change, _)| wanted(*change));
    moves.sort_by_key(|(change, _)| std::cmp::Reverse(change.unsigned_abs()));
    moves.truncate(most);
    moves.into_iter().map(|(_, words)| words).collect()
}

#[cfg(test)]
mod tests {
    use super::super::results::testing::profile;
    use super::*;

    #[test]
    fn parts_that_grew_shrank_came_and_went_are_named_largest_first() {
        let before = parts(
            &profile(
                "p",
                &[("gone", 90), ("less", 80), ("same", 70), ("more", 10)],
            ),
            0,
        );
        let now = profile("p", &[("same", 70), ("more", 60), ("less", 50), ("new", 5)]);
        let moved = movement(&before, &now, 10);
        let told: Vec<&str> = moved.iter().map(|words| words.trim()).collect();
        assert_eq!(
            told,
            [
                "-90  gone (90 -> none)",
                "+50  more (10 -> 60)",
                "-30  less (80 -> 50)",
                "+5  new (none -> 5)",
            ]
        );
        assert_eq!(movement(&before, &now, 2).len(), 2);
        let grown = growth(&before, &now, 0, 10);
        assert_eq!(grown.len(), 2);
        assert!(grown[0].contains("more") && grown[1].contains("new"));
    }
}
