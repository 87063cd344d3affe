//! The file of counters that `plugin/bootcount.c` fills. Its comment gives the layout.

use std::fs;
use std::path::Path;

use crate::Error;
use crate::report::{Count, Profile, sorted};

const MAGIC: u64 = 0x3274_6e75_6f63_626c;
const HEADER: usize = 8;
const FIRST_USER: usize = 6;
/// Kernel text is above this address.
const KERNEL_START: u64 = 0xffff_ffff_8000_0000;
/// Counters before a vCPU's symbols: all, low addresses, user space.
const ALL: usize = 0;
const LOW: usize = 1;
const USER: usize = 2;
const FIRST_SYMBOL: usize = 3;
/// How many functions a profile names: all that matter for finding what grew.
const TOP: usize = 600;

/// A phase begins when the guest first enters a function, or first after another mark.
struct Mark {
    name: &'static str,
    function: &'static str,
    /// The mark that must have been reached before.
    after: Option<&'static str>,
}

/// The phases, in order. Nothing sends on a vsock before the agent says hello; the first message
/// after the command wrote to its standard output carries what it wrote.
const MARKS: [Mark; 13] = [
    mark("pvh_start_xen"),
    mark("x86_64_start_kernel"),
    mark("start_kernel"),
    mark("rest_init"),
    mark("kernel_init_freeable"),
    mark("do_basic_setup"),
    mark("do_idle"),
    mark(USER_FROM),
    Mark {
        name: HELLO,
        function: "vsock_connectible_sendmsg",
        after: None,
    },
    Mark {
        name: "[command executed]",
        function: "begin_new_exec",
        after: Some(HELLO),
    },
    Mark {
        name: "[command writes]",
        function: "pipe_write",
        after: Some("[command executed]"),
    },
    Mark {
        name: OUTPUT,
        function: "vsock_connectible_sendmsg",
        after: Some("[command writes]"),
    },
    Mark {
        name: PRINTS,
        function: "n_tty_write",
        after: Some(USER_FROM),
    },
];
/// After this, code at low addresses is user space's.
const USER_FROM: &str = "run_init_process";
const HELLO: &str = "[agent says hello]";
const OUTPUT: &str = "[agent sends output]";
/// In a peer's machine, whose console is where the command writes. The kernel's own messages do not
/// come this way.
const PRINTS: &str = "[command prints]";
/// The marks at which all counters are copied.
const COPIES: [&str; 3] = [HELLO, OUTPUT, PRINTS];

const fn mark(function: &'static str) -> Mark {
    Mark {
        name: function,
        function,
        after: None,
    }
}

/// The place of a mark in the list.
fn place(name: &str) -> usize {
    MARKS.iter().position(|m| m.name == name).unwrap_or(0)
}

/// Functions that wait for a clock or for another CPU by spinning. What they count says how fast
/// the host was, not what the boot costs.
const WAITS: [&str; 8] = [
    "calibrate_delay",
    "cpuhp_ap_sync_alive",
    "cpuhp_bp_sync_alive",
    "cpuhp_wait_for_sync_state",
    "delay_tsc",
    "quick_pit_calibrate",
    "read_current_timer",
    "setup_boot_APIC_clock",
];

/// Functions without which the agent's messages cannot be told. One of the others may be missing:
/// what the compiler inlined is never reached.
const NEEDED: [&str; 4] = [
    USER_FROM,
    "vsock_connectible_sendmsg",
    "begin_new_exec",
    "pipe_write",
];

/// The kernel's functions by address.
pub(crate) struct Symbols(Vec<(u64, String)>);

impl Symbols {
    /// Reads a `System.map`.
    pub(crate) fn read(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path).map_err(Error::file("reading", path))?;
        Self::parse(&text).ok_or_else(|| {
            Error::Other(format!(
                "{} lacks a function that this looks for: {}",
                path.display(),
                NEEDED.join(", ")
            ))
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let mut symbols: Vec<_> = text
            .lines()
            .filter_map(|line| {
                let mut words = line.split_ascii_whitespace();
                let addr = u64::from_str_radix(words.next()?, 16).ok()?;
                let code = matches!(words.next()?, "t" | "T" | "w" | "W");
                (code && addr >= KERNEL_START).then_some((addr, words.next()?.to_owned()))
            })
            .collect();
        symbols.sort();
        let symbols = Self(symbols);
        let found = NEEDED.iter().all(|name| symbols.addr(name).is_some());
        found.then_some(symbols)
    }

    fn addr(&self, name: &str) -> Option<u64> {
        self.0
            .iter()
            .find(|(_, n)| n == name)
            .map(|(addr, _)| *addr)
    }

    /// Writes an empty file of counters.
    pub(crate) fn create(&self, path: &Path, vcpus: u8) -> Result<(), Error> {
        let words = self.empty(vcpus);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        fs::write(path, bytes).map_err(Error::file("writing", path))
    }

    fn empty(&self, vcpus: u8) -> Vec<u64> {
        let mut words = vec![
            MAGIC,
            self.0.len() as u64,
            MARKS.len() as u64,
            u64::from(vcpus),
            COPIES.len() as u64,
            place(USER_FROM) as u64,
            0,
            0,
        ];
        words.extend(self.0.iter().map(|(addr, _)| addr));
        words.extend(MARKS.map(|mark| self.addr(mark.function).unwrap_or(0)));
        let number = |place: Option<usize>| place.map_or(0, |place| place as u64 + 1);
        words.extend(MARKS.map(|mark| number(mark.after.map(place))));
        words.extend(MARKS.map(|mark| number(COPIES.iter().position(|at| *at == mark.name))));
        let counters = usize::from(vcpus) * self.per_vcpu();
        let outputs = MARKS.len() + (1 + COPIES.len()) * counters;
        words.resize(words.len() + outputs, 0);
        words
    }

    fn per_vcpu(&self) -> usize {
        self.0.len() + FIRST_SYMBOL
    }

    /// Reads what was counted: until the agent's hello, and from there to the first output.
    pub(crate) fn boot(&self, path: &Path, vcpus: u8) -> Result<Boot, Error> {
        self.boot_of(&words(path)?, vcpus)
            .ok_or_else(|| Error::Other("the guest never said hello or sent output".to_owned()))
    }

    /// Reads what was counted until a command wrote to the console of a machine with one vCPU.
    pub(crate) fn printed(&self, path: &Path) -> Result<Profile, Error> {
        self.copy(&words(path)?, place_of_copy(PRINTS), 1)
            .map(|counters| self.profile(&counters, Vec::new()))
            .ok_or_else(|| Error::Other("nothing wrote to the console".to_owned()))
    }

    fn boot_of(&self, words: &[u64], vcpus: u8) -> Option<Boot> {
        let marks_at = self.marks_at();
        let reached = words.get(marks_at..marks_at + MARKS.len())?;
        let copy = |mark| self.copy(words, place_of_copy(mark), vcpus);
        let (hello, output) = (copy(HELLO)?, copy(OUTPUT)?);
        let mut marks: Vec<_> = MARKS
            .iter()
            .zip(reached)
            .map(|(mark, at)| count(mark.name, *at))
            .chain([count("[first user instruction]", words[FIRST_USER])])
            .filter(|mark| mark.count > 0)
            .collect();
        marks.sort_by_key(|mark| mark.count);
        let hello_at = reached[place(HELLO)];
        let answer_at = marks.partition_point(|mark| mark.count <= hello_at);
        let answer_marks = marks.split_off(answer_at).into_iter();
        let answer_marks = answer_marks.map(|mark| Count {
            count: mark.count - hello_at,
            ..mark
        });
        let answer: Vec<u64> = (output.iter().zip(&hello))
            .map(|(to, from)| to.saturating_sub(*from))
            .collect();
        Some(Boot {
            to_hello: self.profile(&hello, marks),
            to_output: self.profile(&answer, answer_marks.collect()),
        })
    }

    /// Where the program says when each mark was reached.
    fn marks_at(&self) -> usize {
        HEADER + self.0.len() + 3 * MARKS.len()
    }

    /// All vCPUs' counters together, as they were at a mark.
    fn copy(&self, words: &[u64], number: usize, vcpus: u8) -> Option<Vec<u64>> {
        let size = usize::from(vcpus) * self.per_vcpu();
        let at = self.marks_at() + MARKS.len() + (1 + number) * size;
        let mut sums = vec![0; self.per_vcpu()];
        for vcpu in words.get(at..at + size)?.chunks_exact(self.per_vcpu()) {
            sums.iter_mut().zip(vcpu).for_each(|(sum, n)| *sum += n);
        }
        (sums[ALL] > 0).then_some(sums)
    }

    fn profile(&self, counters: &[u64], marks: Vec<Count>) -> Profile {
        let functions = (self.0.iter().enumerate())
            .map(|(i, (_, name))| (name.clone(), counters[FIRST_SYMBOL + i]))
            .chain([
                ("[user]".to_owned(), counters[USER]),
                ("[low]".to_owned(), counters[LOW]),
            ]);
        let (waits, mut parts) = sorted(functions)
            .into_iter()
            .partition::<Vec<_>, _>(|part| WAITS.contains(&part.name.as_str()));
        parts.truncate(TOP);
        Profile {
            unit: "instructions",
            total: counters[ALL],
            marks,
            parts,
            waits,
            ..Profile::default()
        }
    }
}

fn words(path: &Path) -> Result<Vec<u64>, Error> {
    let bytes = fs::read(path).map_err(Error::file("reading", path))?;
    let (words, _) = bytes.as_chunks::<8>();
    Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

fn place_of_copy(name: &str) -> usize {
    COPIES.iter().position(|at| *at == name).unwrap_or(0)
}

/// One boot and one command.
pub(crate) struct Boot {
    pub(crate) to_hello: Profile,
    pub(crate) to_output: Profile,
}

fn count(name: &str, count: u64) -> Count {
    Count {
        name: name.to_owned(),
        count,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "0000000000001000 A low\n\
        ffffffff81000300 T delay_tsc\n\
        ffffffff81000200 t vsock_connectible_sendmsg\n\
        ffffffff81000180 T begin_new_exec\n\
        ffffffff81000190 t pipe_write\n\
        ffffffff81000100 T run_init_process\n\
        ffffffff82000000 D data\n";
    const SEND: usize = 3;
    const DELAY: usize = 4;

    #[test]
    fn only_kernel_functions_are_counted_in_order_of_address() {
        let symbols = Symbols::parse(MAP).unwrap();
        let names: Vec<_> = symbols.0.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(names[0], USER_FROM);
        assert_eq!(
            names[SEND..=DELAY],
            ["vsock_connectible_sendmsg", "delay_tsc"]
        );
    }

    #[test]
    fn a_kernel_without_the_function_that_says_hello_is_refused() {
        assert!(Symbols::parse("ffffffff81000100 T run_init_process\n").is_none());
    }

    #[test]
    fn a_mark_names_the_one_before_it_and_its_copy() {
        let symbols = Symbols::parse(MAP).unwrap();
        let words = symbols.empty(1);
        let after = HEADER + symbols.0.len() + MARKS.len();
        let executed = place("[command executed]");
        assert_eq!(words[after + executed], place(HELLO) as u64 + 1);
        assert_eq!(words[after + place(HELLO)], 0);
        let copies = after + MARKS.len();
        assert_eq!(words[copies + place(HELLO)], 1);
        assert_eq!(words[copies + place(OUTPUT)], 2);
        assert_eq!(words[copies + executed], 0);
    }

    #[test]
    fn counters_of_all_vcpus_are_added_up_and_the_boot_taken_from_the_rest() {
        let symbols = Symbols::parse(MAP).unwrap();
        let mut words = symbols.empty(2);
        assert!(symbols.boot_of(&words, 2).is_none());
        let marks = HEADER + symbols.0.len() + 3 * MARKS.len();
        words[marks + place(HELLO)] = 24;
        words[marks + place(OUTPUT)] = 34;
        let copies = words.len() - 2 * COPIES.len() * symbols.per_vcpu();
        for vcpu in 0..2 {
            let at = |copy: usize| copies + (2 * copy + vcpu) * symbols.per_vcpu();
            for (copy, all, sent) in [(0, 12, 7), (1, 17, 11)] {
                words[at(copy) + ALL] = all;
                words[at(copy) + USER] = 3 + copy as u64;
                words[at(copy) + FIRST_SYMBOL + SEND] = sent;
                words[at(copy) + FIRST_SYMBOL + DELAY] = 2;
            }
        }
        let Boot {
            to_hello,
            to_output,
        } = symbols.boot_of(&words, 2).unwrap();
        assert_eq!((to_hello.total, to_hello.waits[0].count), (24, 4));
        assert_eq!((to_output.total, to_output.waits.len()), (10, 0));
        let named = |counts: &[Count]| -> Vec<(String, u64)> {
            (counts.iter()).map(|c| (c.name.clone(), c.count)).collect()
        };
        let send = "vsock_connectible_sendmsg".to_owned();
        assert_eq!(
            named(&to_hello.parts),
            [(send.clone(), 14), ("[user]".to_owned(), 6),]
        );
        assert_eq!(named(&to_hello.marks), [(HELLO.to_owned(), 24)]);
        assert_eq!(
            named(&to_output.parts),
            [(send, 8), ("[user]".to_owned(), 2)]
        );
        assert_eq!(named(&to_output.marks), [(OUTPUT.to_owned(), 10)]);
    }
}
