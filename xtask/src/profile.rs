//! Where the instructions of a boot in virtual time go: what the plugin `benches/plugin/nested.c` counts.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::host;
use crate::symbols::{Symbols, Table};

/// Counts; its comment gives the layout of the file.
const PLUGIN: &str = "benches/plugin/nested.c";
const MAGIC: u64 = 0x3264_6574_736e_6c62;
const HEADER: usize = 11;
/// The word that says how many boots came to `/init`.
const BOOTS: usize = 10;
/// Words for each step: instructions of the host, of the guest, exits.
const PER_STEP: usize = 3;
/// Words for each handler: exits, instructions of the host.
const PER_HANDLER: usize = 2;
/// Where the kernel's addresses begin; its code's are so much higher than where it lies in the guest's memory.
const KERNEL_START: u64 = 0xffff_ffff_8000_0000;
/// How many functions, steps and handlers are named.
const TOP: usize = 30;

/// The calls by which the kernel's parts set themselves up.
const INITCALLS: Table = Table {
    start: "__initcall_start",
    end: "__initcall_end",
    entry: 4,
};
/// KVM's functions for the exits of an AMD processor, by exit code.
const HANDLERS: &str = "svm_exit_handlers";
/// Called by `npf_interception` where the page is no memory but a device's. A compiler may make them part
/// of their callers; then such an exit is among those of the handler.
const DEVICES: [&str; 2] = ["vcpu_mmio_read", "vcpu_mmio_write"];

/// A file of counters and what they count.
pub(crate) struct Profile {
    path: PathBuf,
    plugin: PathBuf,
    names: Names,
}

/// What the counters of a boot count, each list with its words for what has no name.
struct Names {
    host: Vec<String>,
    guest: Vec<String>,
    steps: Vec<String>,
    handlers: Vec<String>,
}

/// What one boot took, from the start of its program to the guest's `/init`. Names are those of
/// functions; what did not run is not in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Boot {
    /// Instructions of the host.
    pub(crate) host: Vec<(String, u64)>,
    /// Instructions of the guest.
    pub(crate) guest: Vec<(String, u64)>,
    /// VM exits by the function of KVM that answered them, the last one of several, and the instructions of the host from
    /// such an exit until the guest went on.
    pub(crate) handlers: Vec<(String, [u64; PER_HANDLER])>,
    /// By initcall, up to the start of the next: instructions of the host, of the guest, exits.
    pub(crate) steps: Vec<(String, [u64; PER_STEP])>,
}

impl Profile {
    /// Makes plugin and file in `dir` for so many boots with the kernels of the outer machine and of
    /// its guest.
    pub(crate) fn create(dir: &Path, host: &Path, guest: &Path, boots: usize) -> Result<Self> {
        let plugin = host::build_plugin(PLUGIN, dir)?;
        let symbols = Symbols::beside(guest)?;
        let functions = Functions::of(&symbols);
        let steps = functions.only(&symbols.pointed_at(&host::read(guest)?, &INITCALLS)?);
        let outer = Symbols::beside(host)?;
        let of_host = Functions::of(&outer);
        let mut handlers = outer.listed_in(&host::read(host)?, HANDLERS)?;
        handlers.extend(DEVICES.iter().filter_map(|name| outer.address(name).ok()));
        let handlers = of_host.only(&handlers);
        let points = [
            outer.address("__x64_sys_execve")?,
            symbols.address("startup_64")? - KERNEL_START,
            symbols.address("run_init_process")?,
            // Some are called earlier, too, by others.
            symbols.address("do_one_initcall")?,
        ];
        let path = dir.join("counts");
        let parts = [&of_host, &functions, &steps, &handlers];
        let words = empty(points, parts.map(|part| part.starts.as_slice()), boots);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        fs::write(&path, bytes).map_err(Error::file("writing", &path))?;
        Ok(Self {
            path,
            plugin,
            names: Names::of(parts.map(|part| part.names.as_slice())),
        })
    }

    /// The plugin, for QEMU, with its words.
    pub(crate) fn words(&self) -> String {
        let (plugin, path) = (self.plugin.display(), self.path.display());
        format!("{plugin},counts={path}")
    }

    /// What each of so many boots took.
    pub(crate) fn boots(&self, boots: usize) -> Result<Vec<Boot>> {
        let bytes = host::read(&self.path)?;
        let (words, _) = bytes.as_chunks();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let counted = words.get(BOOTS).copied().unwrap_or(0);
        if counted != boots as u64 {
            return Err(Error::other(format!(
                "of {boots} boots the plugin saw {counted} come to /init"
            )));
        }
        self.names
            .boots(&words, boots)
            .ok_or_else(|| Error::other("the file of counters is too short"))
    }
}

impl Names {
    /// Of the host's functions, the guest's, steps, and handlers.
    fn of([host, guest, steps, handlers]: [&[String]; 4]) -> Self {
        let with = |first: &[&str], names: &[String]| {
            let first = first.iter().map(|&name| name.to_owned());
            first.chain(names.iter().cloned()).collect()
        };
        Self {
            host: with(&["[user space]"], host),
            guest: with(&["[low addresses]"], guest),
            steps: with(&["[before the guest]", "[before the first]"], steps),
            handlers: with(&["[none]"], handlers),
        }
    }

    fn boots(&self, words: &[u64], boots: usize) -> Option<Vec<Boot>> {
        let [host, guest] = [self.host.len(), self.guest.len()];
        let [steps, handlers] = [self.steps.len(), self.handlers.len()];
        // Each list's words for what has no name have no address.
        let addresses = (host - 1) + (guest - 1) + (steps - 2) + (handlers - 1);
        let per_boot = host + guest + steps * PER_STEP + handlers * PER_HANDLER;
        let counters = words.get(HEADER + addresses..)?;
        let boots: Vec<Boot> = (counters.chunks_exact(per_boot).take(boots))
            .map(|counters| self.boot(counters))
            .collect::<Option<_>>()?;
        (!boots.is_empty()).then_some(boots)
    }

    fn boot(&self, counters: &[u64]) -> Option<Boot> {
        let (host, rest) = counters.split_at_checked(self.host.len())?;
        let (guest, rest) = rest.split_at_checked(self.guest.len())?;
        let (steps, handlers) = rest.split_at_checked(self.steps.len() * PER_STEP)?;
        Some(Boot {
            host: counted(&self.host, host, |count| *count),
            guest: counted(&self.guest, guest, |count| *count),
            steps: counted(&self.steps, steps.as_chunks().0, |[host, guest, _]| {
                host + guest
            }),
            handlers: counted(&self.handlers, handlers.as_chunks().0, |[exits, _]| *exits),
        })
    }
}

/// What was counted, by name.
fn counted<T: Copy>(names: &[String], counts: &[T], cost: impl Fn(&T) -> u64) -> Vec<(String, T)> {
    (names.iter().zip(counts))
        .filter(|(_, counts)| cost(counts) > 0)
        .map(|(name, counts)| (name.clone(), *counts))
        .collect()
}

impl Boot {
    /// All instructions of the host.
    pub(crate) fn host_instructions(&self) -> u64 {
        self.host.iter().map(|(_, count)| count).sum()
    }

    /// All instructions of the guest.
    pub(crate) fn guest_instructions(&self) -> u64 {
        self.guest.iter().map(|(_, count)| count).sum()
    }

    /// All VM exits, those that the host's kernel answers by itself among them.
    pub(crate) fn exits(&self) -> u64 {
        self.handlers.iter().map(|(_, [exits, _])| exits).sum()
    }

    /// Instructions of both by function.
    pub(crate) fn functions(&self) -> impl Iterator<Item = (String, u64)> {
        let named = |who: &'static str, functions: &[(String, u64)]| {
            let functions = functions.iter();
            let named = functions.map(|(name, count)| (format!("{who}: {name}"), *count));
            named.collect::<Vec<_>>()
        };
        let mut all = named("guest", &self.guest);
        all.extend(named("host", &self.host));
        all.into_iter()
    }

    /// The tables of what took the most.
    pub(crate) fn text(&self) -> String {
        let mut text = format!(
            "instructions from the program's start to /init: {} of the host, {} of the guest; {} exits\n",
            self.host_instructions(),
            self.guest_instructions(),
            self.exits()
        );
        for (title, functions) in [
            ("the guest's functions", &self.guest),
            ("the host's kernel's functions", &self.host),
        ] {
            text.push_str(&format!("\n{:>12} {title}\n", "instructions"));
            for (name, count) in most(functions, |count| *count) {
                text.push_str(&format!("{count:>12} {name}\n"));
            }
        }
        text.push_str(&format!(
            "\n{:>12} {:>6} KVM's function that answers an exit\n",
            "host", "exits"
        ));
        for (name, [exits, host]) in most(&self.handlers, |[exits, _]| *exits) {
            text.push_str(&format!("{host:>12} {exits:>6} {name}\n"));
        }
        text.push_str(&format!(
            "\n{:>12} {:>12} {:>6} initcall, until the next\n",
            "host", "guest", "exits"
        ));
        for (name, [host, guest, exits]) in most(&self.steps, |[host, guest, _]| host + guest) {
            text.push_str(&format!("{host:>12} {guest:>12} {exits:>6} {name}\n"));
        }
        text
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

/// A file in which nothing has been counted: the host's function that starts a program, the guest's
/// entry point, the function that starts `/init`, and the one that calls a step's; the starts of the
/// host's functions, the guest's, steps, and handlers; room for so many boots.
fn empty(points: [u64; 4], starts: [&[u64]; 4], boots: usize) -> Vec<u64> {
    let sizes = starts.map(<[u64]>::len);
    let mut words = vec![MAGIC];
    words.extend(sizes.map(|size| size as u64));
    words.push(boots as u64);
    words.extend(points);
    words.push(0);
    words.extend(starts.into_iter().flatten());
    let [host, guest, steps, handlers] = sizes;
    let per_boot = (host + 1) + (guest + 1) + (steps + 2) * PER_STEP + (handlers + 1) * PER_HANDLER;
    words.resize(words.len() + boots * per_boot, 0);
    words
}

/// The largest.
fn most<T: Copy>(all: &[(String, T)], cost: impl Fn(&T) -> u64) -> Vec<(&str, T)> {
    let mut all: Vec<_> = (all.iter())
        .map(|(name, counts)| (name.as_str(), *counts))
        .collect();
    all.sort_by_key(|(_, counts)| std::cmp::Reverse(cost(counts)));
    all.truncate(TOP);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words of a file of three boots, two of which were counted.
    fn file() -> (Names, Vec<u64>) {
        let [host, guest, steps, handlers] = [
            &["fault", "unused"][..],
            &["memset"],
            &["futex_init", "ipc_init"],
            &["io_interception"],
        ]
        .map(|names| {
            names
                .iter()
                .map(|&name| name.to_owned())
                .collect::<Vec<_>>()
        });
        let mut words = empty([1, 2, 3, 4], [&[10, 11], &[20], &[30, 31], &[40]], 3);
        let at = HEADER + 6;
        let first = [
            [5, 7, 0].as_slice(),
            &[90, 400],
            &[8, 0, 0],
            &[0, 0, 1],
            &[30, 2, 7],
            &[460, 1, 0],
            &[1, 3, 7, 70],
        ]
        .concat();
        assert_eq!(words.len(), at + 3 * first.len());
        words[at..][..first.len()].copy_from_slice(&first);
        words[at + first.len()] = 6;
        words[BOOTS] = 2;
        let names = Names::of([&host, &guest, &steps, &handlers]);
        (names, words)
    }

    #[test]
    fn each_boot_has_its_own_counters() {
        let (names, words) = file();
        let boots = names.boots(&words, 2).unwrap();
        assert_eq!(boots.len(), 2);
        let of = |boot: &Boot| (boot.host_instructions(), boot.guest_instructions());
        assert_eq!((of(&boots[0]), boots[0].exits()), ((12, 490), 8));
        assert_eq!((of(&boots[1]), boots[1].exits()), ((6, 0), 0));
        let functions: Vec<_> = boots[0].functions().collect();
        let part = |name: &str, count| (name.to_owned(), count);
        assert_eq!(
            functions,
            [
                part("guest: [low addresses]", 90),
                part("guest: memset", 400),
                part("host: [user space]", 5),
                part("host: fault", 7),
            ]
        );
        let answers = [
            ("[none]".to_owned(), [1, 3]),
            ("io_interception".to_owned(), [7, 70]),
        ];
        assert_eq!(boots[0].handlers, answers);
    }

    #[test]
    fn a_file_without_the_counters_of_a_boot_is_refused() {
        let (names, words) = file();
        assert!(names.boots(&words[..HEADER + 6 + 4], 1).is_none());
        assert!(names.boots(&words[..4], 1).is_none());
    }

    #[test]
    fn the_tables_name_what_was_counted_the_most_first() {
        let (names, words) = file();
        let text = names.boots(&words, 1).unwrap()[0].text();
        let rows: Vec<Vec<&str>> = (text.lines())
            .map(|line| line.split_ascii_whitespace().collect())
            .collect();
        let place = |row: &[&str]| rows.iter().position(|r| r == row);
        assert!(text.contains("12 of the host, 490 of the guest; 8 exits"));
        assert!(place(&["400", "memset"]) < place(&["90", "[low", "addresses]"]));
        assert!(place(&["7", "fault"]) < place(&["5", "[user", "space]"]));
        assert!(place(&["70", "7", "io_interception"]) < place(&["3", "1", "[none]"]));
        let last = place(&["460", "1", "0", "ipc_init"]);
        assert!(last.is_some() && last < place(&["30", "2", "7", "futex_init"]));
        assert!(!text.contains("unused"));
    }

    #[test]
    fn the_header_says_how_many_there_are_and_where_a_boot_begins() {
        let words = empty([1, 2, 3, 4], [&[10, 11], &[20], &[], &[40]], 5);
        assert_eq!(words[..HEADER], [MAGIC, 2, 1, 0, 1, 5, 1, 2, 3, 4, 0]);
        assert_eq!(words[HEADER..HEADER + 4], [10, 11, 20, 40]);
    }
}
