//! `cargo xtask virtual-time --profile`: where the time from the guest's first instruction to `/init` goes.

use std::collections::BTreeSet;
use std::fs;
use std::iter;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::host;
use crate::symbols::{Symbols, Table};

/// Counts; its comment gives the layout of the file.
const PLUGIN: &str = "benches/plugin/nested.c";
const MAGIC: u64 = 0x3164_6574_736e_6c62;
const HEADER: usize = 8;
const BOOTS: usize = 7;
/// Words for each step: instructions of the host, of the guest, exits.
const PER_STEP: usize = 3;
/// Where the kernel's addresses begin; its code's are so much higher than where it lies in the guest's memory.
const KERNEL_START: u64 = 0xffff_ffff_8000_0000;
/// How many functions and steps are named.
const TOP: usize = 30;

/// The calls by which the kernel's parts set themselves up.
const INITCALLS: Table = Table {
    start: "__initcall_start",
    end: "__initcall_end",
    entry: 4,
};

/// A file of counters and what they count.
pub(crate) struct Profile {
    path: PathBuf,
    plugin: PathBuf,
    /// Names of the host's functions, of the guest's, and of the steps.
    names: [Vec<String>; 3],
}

impl Profile {
    /// Makes plugin and file in `dir` for the kernels of the outer machine and of its guest.
    pub(crate) fn create(dir: &Path, host: &Path, guest: &Path) -> Result<Self> {
        let plugin = host::build_plugin(PLUGIN, dir)?;
        let symbols = Symbols::beside(guest)?;
        let functions = Functions::of(&symbols);
        let initcalls = symbols.pointed_at(&host::read(guest)?, &INITCALLS)?;
        let steps = functions.only(&initcalls);
        let points = [
            symbols.address("startup_64")? - KERNEL_START,
            symbols.address("run_init_process")?,
            // Some are called earlier, too, by others.
            symbols.address("do_one_initcall")?,
        ];
        let host = Functions::of(&Symbols::beside(host)?);
        let path = dir.join("counts");
        let parts = [host, functions, steps];
        let words = empty(points, parts.each_ref().map(|part| part.starts.as_slice()));
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        fs::write(&path, bytes).map_err(Error::file("writing", &path))?;
        Ok(Self {
            path,
            plugin,
            names: parts.map(|part| part.names),
        })
    }

    /// The plugin, for QEMU, with its words.
    pub(crate) fn words(&self) -> String {
        let (plugin, path) = (self.plugin.display(), self.path.display());
        format!("{plugin},counts={path}")
    }

    /// What the last of `boots` cost, in words.
    pub(crate) fn text(&self, boots: u64) -> Result<String> {
        let bytes = host::read(&self.path)?;
        let (words, _) = bytes.as_chunks();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let counted = words.get(BOOTS).copied().unwrap_or(0);
        if counted != boots {
            return Err(Error::other(format!(
                "of {boots} boots the plugin saw {counted} come to /init"
            )));
        }
        self.table(&words)
            .ok_or_else(|| Error::other("the file of counters is too short"))
    }

    fn table(&self, words: &[u64]) -> Option<String> {
        let [host, guest, steps] = &self.names;
        let at = HEADER + host.len() + guest.len() + steps.len();
        let (of_host, rest) = words.get(at..)?.split_at_checked(host.len() + 1)?;
        let (of_guest, of_steps) = rest.split_at_checked(guest.len() + 1)?;
        let (of_steps, _) = of_steps.as_chunks::<PER_STEP>();
        let exits: u64 = of_steps.iter().map(|[.., exits]| exits).sum();
        let (all_host, all_guest): (u64, u64) = (of_host.iter().sum(), of_guest.iter().sum());
        let mut text = format!(
            "instructions from the guest's first to /init: {all_host} of the host, {all_guest} of the \
             guest; {exits} exits\n"
        );
        for (title, low, names, counts) in [
            ("the guest's functions", "[low addresses]", guest, of_guest),
            (
                "the host's kernel's functions",
                "[user space]",
                host,
                of_host,
            ),
        ] {
            text.push_str(&format!("\n{:>12} {title}\n", "instructions"));
            let names = iter::once(low).chain(names.iter().map(String::as_str));
            for (name, count) in most(names.zip(counts.iter().copied()), |count| *count) {
                text.push_str(&format!("{count:>12} {name}\n"));
            }
        }
        text.push_str(&format!(
            "\n{:>12} {:>12} {:>6} initcall, until the next\n",
            "host", "guest", "exits"
        ));
        let names = iter::once("[before the first]").chain(steps.iter().map(String::as_str));
        let cost = |[host, guest, _]: &[u64; PER_STEP]| host + guest;
        for (name, [host, guest, exits]) in most(names.zip(of_steps.iter().copied()), cost) {
            text.push_str(&format!("{host:>12} {guest:>12} {exits:>6} {name}\n"));
        }
        Some(text)
    }
}

/// Where functions start, ascending, and what they are called.
struct Functions {
    starts: Vec<u64>,
    names: Vec<String>,
}

impl Functions {
    fn of(symbols: &Symbols) -> Self {
        let functions = symbols.functions(KERNEL_START..u64::MAX);
        // Of several names the last: __x64_sys_close rather than __se_sys_close.
        let last = functions.map(|(start, names)| (start, names.last().cloned()));
        let (starts, names) = last
            .map(|(start, name)| (start, name.unwrap_or_default()))
            .unzip();
        Self { starts, names }
    }

    fn only(&self, starts: &BTreeSet<u64>) -> Self {
        let all = self.starts.iter().zip(&self.names);
        let only = all.filter(|(start, _)| starts.contains(start));
        let (starts, names) = only.map(|(start, name)| (*start, name.clone())).unzip();
        Self { starts, names }
    }
}

/// A file in which nothing has been counted: the guest's entry point, the function that starts `/init`,
/// and the one that calls a step's; the starts of host's functions, of the guest's, of steps.
fn empty(points: [u64; 3], starts: [&[u64]; 3]) -> Vec<u64> {
    let sizes = starts.map(<[u64]>::len);
    let mut words = vec![MAGIC];
    words.extend(sizes.map(|size| size as u64));
    words.extend(points);
    words.push(0);
    words.extend(starts.into_iter().flatten());
    let [host, guest, steps] = sizes;
    let counters = (host + 1) + (guest + 1) + (steps + 1) * PER_STEP;
    words.resize(words.len() + counters, 0);
    words
}

/// The largest, without those that cost nothing.
fn most<'a, T>(
    all: impl Iterator<Item = (&'a str, T)>,
    cost: impl Fn(&T) -> u64,
) -> Vec<(&'a str, T)> {
    let mut all: Vec<_> = all.filter(|(_, counts)| cost(counts) > 0).collect();
    all.sort_by_key(|(_, counts)| std::cmp::Reverse(cost(counts)));
    all.truncate(TOP);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Profile {
            path: PathBuf::new(),
            plugin: PathBuf::new(),
            names: [
                names(&["fault", "unused"]),
                names(&["memset"]),
                names(&["futex_init", "ipc_init"]),
            ],
        }
    }

    #[test]
    fn the_tables_name_what_was_counted_the_most_first() {
        let profile = profile();
        let mut words = empty([1, 2, 3], [&[10, 11], &[20], &[30, 31]]);
        let at = HEADER + 5;
        assert_eq!(words.len(), at + 3 + 2 + 3 * PER_STEP);
        words[at..].copy_from_slice(&[5, 7, 0, 90, 400, 4, 0, 0, 1, 30, 2, 7, 460, 1]);
        let text = profile.table(&words).unwrap();
        let rows: Vec<Vec<&str>> = (text.lines())
            .map(|line| line.split_ascii_whitespace().collect())
            .collect();
        let place = |row: &[&str]| rows.iter().position(|r| r == row);
        assert!(text.contains("12 of the host, 490 of the guest; 3 exits"));
        assert!(place(&["400", "memset"]) < place(&["90", "[low", "addresses]"]));
        assert!(place(&["7", "fault"]) < place(&["5", "[user", "space]"]));
        let last = place(&["7", "460", "1", "ipc_init"]);
        assert!(last.is_some() && last < place(&["1", "30", "2", "futex_init"]));
        assert!(!text.contains("unused"));
        assert!(profile.table(&words[..at + 4]).is_none());
    }

    #[test]
    fn the_header_says_how_many_there_are_and_where_the_guest_begins() {
        let words = empty([1, 2, 3], [&[10, 11], &[20], &[]]);
        assert_eq!(words[..HEADER], [MAGIC, 2, 1, 0, 1, 2, 3, 0]);
        assert_eq!(words[HEADER..HEADER + 3], [10, 11, 20]);
    }
}
