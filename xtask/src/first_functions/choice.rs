//! Which of the guest kernel's functions come first.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use crate::error::{Error, Result};
use crate::symbols::{Symbols, Table};

/// A large page, which the functions that come first fill.
const LARGE_PAGE: u64 = 2 << 20;
/// What is left free of it: the next kernel's functions may be longer.
const SPARE: u64 = 64 << 10;

/// Places that a boot patches.
const PATCHED: [Table; 2] = [
    Table {
        start: "__alt_instructions",
        end: "__alt_instructions_end",
        entry: 14,
    },
    Table {
        start: "__start_static_call_sites",
        end: "__stop_static_call_sites",
        entry: 8,
    },
];

/// The functions that are marked: a byte for each of the code's.
pub(super) fn marked(symbols: &Symbols, marks: &[u8]) -> Result<BTreeSet<u64>> {
    let (start, _) = symbols.code()?;
    let places = (start..).zip(marks).filter(|(_, mark)| **mark != 0);
    Ok(places
        .filter_map(|(address, _)| symbols.function(address))
        .collect())
}

/// The functions in which a boot patches something.
pub(super) fn patched(symbols: &Symbols, vmlinux: &[u8]) -> Result<BTreeSet<u64>> {
    let mut patched = BTreeSet::new();
    for table in &PATCHED {
        patched.extend(symbols.pointed_at(vmlinux, table)?);
    }
    Ok(patched)
}

/// The functions that the list can name: others have a place of their own in the linker's script, as
/// those that may not be traced or that schedule.
fn listable(symbols: &Symbols) -> Result<impl Iterator<Item = (u64, &[String])>> {
    let first = symbols.address("_text")?..symbols.address("__sched_text_start")?;
    let rest = symbols.address("__lock_text_end")?..symbols.address("__noinstr_text_start")?;
    Ok(symbols.functions(first).chain(symbols.functions(rest)))
}

/// Bytes of what comes first whatever the list: all that is there and not on it.
fn fixed(symbols: &Symbols, list: &BTreeSet<&str>) -> Result<u64> {
    let first = symbols.address("_text")?..symbols.address("__lock_text_end")?;
    let functions = symbols.functions(first);
    let fixed = functions.filter(|(_, names)| !names.iter().any(|n| list.contains(n.as_str())));
    Ok(fixed.map(|(start, _)| symbols.size(start)).sum())
}

/// What is on a new list.
pub(super) struct Choice<'a> {
    pub(super) names: BTreeSet<&'a str>,
    /// Bytes of the large page that are used.
    pub(super) bytes: u64,
    /// How many functions did not fit.
    pub(super) left_out: usize,
}

/// All functions that are `needed`, then those of the sets of `wanted`, of each the smallest first. `list`
/// is the one that the kernel was built with.
pub(super) fn choose<'a>(
    symbols: &'a Symbols,
    list: &BTreeSet<&str>,
    needed: &BTreeSet<u64>,
    wanted: &[BTreeSet<u64>],
) -> Result<Choice<'a>> {
    // The linker takes all functions of a name, so they come or stay together.
    let mut places: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for (function, names) in listable(symbols)? {
        for name in names {
            places.entry(name).or_default().push(function);
        }
    }
    let sets: Vec<_> = iter::once(needed).chain(wanted).collect();
    let mut order: Vec<_> = (listable(symbols)?)
        .filter_map(|(function, names)| {
            let rank = sets.iter().position(|set| set.contains(&function))?;
            Some((rank, symbols.size(function), function, names))
        })
        .collect();
    order.sort_unstable();
    let mut choice = Choice {
        names: BTreeSet::new(),
        bytes: fixed(symbols, list)?,
        left_out: 0,
    };
    let mut chosen = BTreeSet::new();
    for (rank, _, _, names) in order {
        let together = names.iter().filter_map(|name| places.get(name.as_str()));
        let new: BTreeSet<u64> = (together.flatten().copied())
            .filter(|function| !chosen.contains(function))
            .collect();
        let bytes: u64 = new.iter().map(|function| symbols.size(*function)).sum();
        if choice.bytes + bytes > LARGE_PAGE - SPARE && rank > 0 {
            choice.left_out += 1;
            continue;
        }
        choice.bytes += bytes;
        choice.names.extend(names.iter().map(String::as_str));
        chosen.extend(new);
    }
    if choice.bytes > LARGE_PAGE {
        return Err(Error::other(format!(
            "what a boot runs or patches takes {} bytes and does not fit into a large page",
            choice.bytes
        )));
    }
    Ok(choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "ffffffff81000000 T _text\n\
        ffffffff81000100 t assembly\n\
        ffffffff81000200 T boots\n\
        ffffffff81000300 t twice\n\
        ffffffff81000400 T __sched_text_start\n\
        ffffffff81000400 T schedule\n\
        ffffffff81000500 T __lock_text_end\n\
        ffffffff81200000 t __do_call\n\
        ffffffff81200000 t call\n\
        ffffffff81201000 t twice\n\
        ffffffff81202000 t large\n\
        ffffffff81401000 t patched\n\
        ffffffff81402000 t idle\n\
        ffffffff81403000 T __noinstr_text_start\n\
        ffffffff81403000 t noinstr\n\
        ffffffff81404000 T _etext\n";

    fn symbols() -> Symbols {
        Symbols::parse(MAP).unwrap()
    }

    fn of(symbols: &Symbols, names: &[&str]) -> BTreeSet<u64> {
        let named = |all: &[String]| all.iter().any(|name| names.contains(&name.as_str()));
        let functions = symbols.functions(0..u64::MAX);
        let functions = functions.filter(|(_, names)| named(names));
        functions.map(|(start, _)| start).collect()
    }

    #[test]
    fn a_mark_anywhere_in_a_function_is_the_functions() {
        let symbols = symbols();
        let mut marks = vec![0; 0x40_4000];
        marks[0x2ff] = 1;
        marks[0x20_0010] = 1;
        let marked = marked(&symbols, &marks).unwrap();
        assert_eq!(marked, of(&symbols, &["boots", "call"]));
    }

    #[test]
    fn what_a_boot_needs_is_listed_and_then_what_fits() {
        let symbols = symbols();
        let list = BTreeSet::from(["boots", "twice"]);
        let boot = of(&symbols, &["boots", "schedule", "noinstr", "patched"]);
        let command = of(&symbols, &["idle", "boots"]);
        let ran = of(&symbols, &["call", "large", "idle"]);
        let choice = choose(&symbols, &list, &boot, &[command, ran]).unwrap();
        let names: Vec<_> = choice.names.iter().copied().collect();
        assert_eq!(names, ["__do_call", "boots", "call", "idle", "patched"]);
        assert_eq!(choice.left_out, 1);
        // _text, assembly and schedule are there anyway.
        assert_eq!(choice.bytes, 0x300 + 0x100 + 3 * 0x1000);
    }

    #[test]
    fn the_first_of_two_sets_goes_before_smaller_functions() {
        // The 2 MiB less 64 KiB have room for one of both.
        let text = MAP.replace("ffffffff81202000 t large", "ffffffff81220000 t large");
        let symbols = Symbols::parse(&text).unwrap();
        let sets = [["large"], ["twice"]].map(|names| of(&symbols, &names));
        let [large, small] = &sets;
        let names = |sets: &[BTreeSet<u64>]| {
            let choice = choose(&symbols, &BTreeSet::new(), &BTreeSet::new(), sets).unwrap();
            choice.names.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(names(&sets), ["large"]);
        assert_eq!(names(&[small.clone(), large.clone()]), ["twice"]);
    }

    #[test]
    fn functions_of_one_name_come_together() {
        let symbols = symbols();
        let ran = BTreeSet::from([0xffff_ffff_8100_0300]);
        let choice = choose(&symbols, &BTreeSet::new(), &ran, &[]).unwrap();
        assert_eq!(choice.names, BTreeSet::from(["twice"]));
        let fixed = fixed(&symbols, &BTreeSet::new()).unwrap();
        assert_eq!(choice.bytes, fixed + 0x100 + 0x1000);
    }

    #[test]
    fn a_boot_that_needs_more_than_a_large_page_is_an_error() {
        let symbols = symbols();
        let choose = |names| choose(&symbols, &BTreeSet::new(), &of(&symbols, names), &[]);
        assert!(choose(&["boots", "large"]).is_ok());
        assert!(choose(&["boots", "large", "call", "patched"]).is_err());
    }
}
