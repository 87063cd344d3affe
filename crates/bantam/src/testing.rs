//! What unit tests of several modules need.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

use std::path::Path;

/// The names in a directory, sorted.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}
