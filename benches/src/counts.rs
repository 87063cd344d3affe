//! The file of counters that `plugin/bootcount.c` fills. Its comment gives the layout.

use std::fs;
use std::path::Path;

use crate::Error;
use crate::report::{Count, Profile};

const MAGIC: u64 = 0x3174_6e75_6f63_626c;
const HEADER: usize = 8;
const FIRST_USER: usize = 6;
/// Kernel text is above this address.
const KERNEL_START: u64 = 0xffff_ffff_8000_0000;
/// Counters before a vCPU's symbols: all, low addresses, user space.
const ALL: usize = 0;
const LOW: usize = 1;
const USER: usize = 2;
const FIRST_SYMBOL: usize = 3;

/// Functions whose first instruction is a phase of the boot, in order. At the last one the
/// agent, on its control stream, says hello: nothing else sends on a vsock before.
const MARKS: [&str; 9] = [
    "pvh_start_xen",
    "x86_64_start_kernel",
    "start_kernel",
    "rest_init",
    "kernel_init_freeable",
    "do_basic_setup",
    "do_idle",
    "run_init_process",
    HELLO,
];
/// After this, code at low addresses is user space's.
const USER_FROM: &str = "run_init_process";
const HELLO: &str = "vsock_connectible_sendmsg";

/// Functions that wait for a clock or for another CPU by spinning. What they count says how fast
/// the host was, not what the boot costs.
const WAITS: [&str; 7] = [
    "calibrate_delay",
    "cpuhp_ap_sync_alive",
    "cpuhp_bp_sync_alive",
    "delay_tsc",
    "quick_pit_calibrate",
    "read_current_timer",
    "setup_boot_APIC_clock",
];

/// The kernel's functions by address.
pub(crate) struct Symbols(Vec<(u64, String)>);

impl Symbols {
    /// Reads a `System.map`.
    pub(crate) fn read(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path).map_err(Error::file("reading", path))?;
        Self::parse(&text)
            .ok_or_else(|| Error::Other(format!("{} lacks {USER_FROM} or {HELLO}", path.display())))
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
        (symbols.addr(USER_FROM).is_some() && symbols.addr(HELLO).is_some()).then_some(symbols)
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
        let mark = |name: &str| MARKS.iter().position(|m| *m == name).unwrap_or(0) as u64;
        let mut words = vec![
            MAGIC,
            self.0.len() as u64,
            MARKS.len() as u64,
            u64::from(vcpus),
            mark(HELLO),
            mark(USER_FROM),
            0,
            0,
        ];
        words.extend(self.0.iter().map(|(addr, _)| addr));
        // A function that the compiler inlined has no address and is never reached.
        words.extend(MARKS.iter().map(|name| self.addr(name).unwrap_or(0)));
        let outputs = MARKS.len() + 2 * usize::from(vcpus) * self.per_vcpu();
        words.resize(words.len() + outputs, 0);
        words
    }

    fn per_vcpu(&self) -> usize {
        self.0.len() + FIRST_SYMBOL
    }

    /// Reads what was counted up to the agent's hello.
    pub(crate) fn profile(
        &self,
        path: &Path,
        name: &str,
        vcpus: u8,
        top: usize,
    ) -> Result<Profile, Error> {
        let bytes = fs::read(path).map_err(Error::file("reading", path))?;
        let (words, _) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        self.profile_of(&words, name, vcpus, top)
            .ok_or_else(|| Error::Other(format!("{name}: the guest never said hello")))
    }

    fn profile_of(&self, words: &[u64], name: &str, vcpus: u8, top: usize) -> Option<Profile> {
        let marks_at = HEADER + self.0.len() + MARKS.len();
        let reached = words.get(marks_at..marks_at + MARKS.len())?;
        let counters = marks_at + MARKS.len();
        let size = usize::from(vcpus) * self.per_vcpu();
        let copy = words.get(counters + size..counters + 2 * size)?;
        let sum = |index: usize| -> u64 {
            copy.chunks_exact(self.per_vcpu())
                .map(|vcpu| vcpu[index])
                .sum()
        };
        let mut marks: Vec<_> = MARKS
            .iter()
            .zip(reached)
            .map(|(name, at)| count(name, *at))
            .chain([count("[first user instruction]", words[FIRST_USER])])
            .filter(|mark| mark.instructions > 0)
            .collect();
        marks.sort_by_key(|mark| mark.instructions);
        let mut symbols: Vec<_> = (self.0.iter().enumerate())
            .map(|(i, (_, name))| count(name, sum(FIRST_SYMBOL + i)))
            .chain([count("[user]", sum(USER)), count("[low]", sum(LOW))])
            .filter(|symbol| symbol.instructions > 0)
            .collect();
        let waits = symbols
            .iter()
            .filter(|symbol| WAITS.contains(&symbol.name.as_str()))
            .map(|symbol| symbol.instructions)
            .sum();
        symbols.sort_by_key(|symbol| std::cmp::Reverse(symbol.instructions));
        symbols.truncate(top);
        let total = sum(ALL);
        (total > 0).then(|| Profile {
            name: name.to_owned(),
            total,
            waits,
            marks,
            symbols,
        })
    }
}

fn count(name: &str, instructions: u64) -> Count {
    Count {
        name: name.to_owned(),
        instructions,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "0000000000001000 A low\n\
        ffffffff81000300 T delay_tsc\n\
        ffffffff81000200 t vsock_connectible_sendmsg\n\
        ffffffff81000100 T run_init_process\n\
        ffffffff82000000 D data\n";

    #[test]
    fn only_kernel_functions_are_counted_in_order_of_address() {
        let symbols = Symbols::parse(MAP).unwrap();
        let names: Vec<_> = symbols.0.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(names, [USER_FROM, HELLO, "delay_tsc"]);
    }

    #[test]
    fn a_kernel_without_the_function_that_says_hello_is_refused() {
        assert!(Symbols::parse("ffffffff81000100 T run_init_process\n").is_none());
    }

    #[test]
    fn counters_of_all_vcpus_are_added_up() {
        let symbols = Symbols::parse(MAP).unwrap();
        let mut words = symbols.empty(2);
        assert!(symbols.profile_of(&words, "p", 2, 9).is_none());
        let copy = words.len() - 2 * symbols.per_vcpu();
        for vcpu in 0..2 {
            let first = copy + vcpu * symbols.per_vcpu();
            words[first + ALL] = 12;
            words[first + USER] = 3;
            words[first + FIRST_SYMBOL + 1] = 7;
            words[first + FIRST_SYMBOL + 2] = 2;
        }
        let profile = symbols.profile_of(&words, "p", 2, 9).unwrap();
        assert_eq!((profile.total, profile.waits), (24, 4));
        let symbols: Vec<_> = profile
            .symbols
            .iter()
            .map(|s| (s.name.as_str(), s.instructions))
            .collect();
        assert_eq!(symbols, [(HELLO, 14), ("[user]", 6), ("delay_tsc", 4)]);
    }
}
