//! The guest kernel's functions, and which of them come first.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use crate::error::{Error, Result};

/// A large page, which the functions that come first fill.
const LARGE_PAGE: u64 = 2 << 20;
/// What is left free of it: the next kernel's functions may be longer.
const SPARE: u64 = 64 << 10;

/// A table of places that a boot patches. Each entry begins with a signed 32-bit distance from itself.
struct Table {
    start: &'static str,
    end: &'static str,
    entry: usize,
}

const TABLES: [Table; 2] = [
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

/// The names of a `System.map`.
pub(super) struct Map {
    symbols: BTreeMap<String, u64>,
    /// By address, all names of each.
    functions: BTreeMap<u64, Vec<String>>,
}

impl Map {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut map = Self {
            symbols: BTreeMap::new(),
            functions: BTreeMap::new(),
        };
        for line in text.lines() {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let [address, kind, name] = words[..] else {
                return Err(Error::other(format!("System.map: `{line}`")));
            };
            let address = u64::from_str_radix(address, 16)
                .map_err(|_| Error::other(format!("System.map: `{line}`")))?;
            if matches!(kind, "t" | "T" | "w" | "W") {
                let names: &mut Vec<String> = map.functions.entry(address).or_default();
                names.push(name.to_owned());
            }
            map.symbols.insert(name.to_owned(), address);
        }
        Ok(map)
    }

    /// The address of a symbol that every kernel of ours has.
    pub(super) fn address(&self, name: &str) -> Result<u64> {
        let found = self.symbols.get(name).copied();
        found.ok_or_else(|| Error::other(format!("System.map has no {name}")))
    }

    /// Where the code begins, and how many bytes it has.
    pub(super) fn code(&self) -> Result<(u64, u64)> {
        let start = self.address("_text")?;
        Ok((start, self.address("_etext")?.saturating_sub(start)))
    }

    /// The start of the function that an address is in.
    fn function(&self, address: u64) -> Option<u64> {
        let (start, _) = self.functions.range(..=address).next_back()?;
        Some(*start)
    }

    fn size(&self, function: u64) -> u64 {
        let next = self.functions.range(function + 1..).next();
        next.map_or(0, |(next, _)| next - function)
    }

    /// The functions that are marked: a byte for each of the code's.
    pub(super) fn marked(&self, marks: &[u8]) -> Result<BTreeSet<u64>> {
        let (start, _) = self.code()?;
        let places = (start..).zip(marks).filter(|(_, mark)| **mark != 0);
        Ok(places
            .filter_map(|(address, _)| self.function(address))
            .collect())
    }

    /// The functions in which a boot patches something.
    pub(super) fn patched(&self, vmlinux: &[u8]) -> Result<BTreeSet<u64>> {
        let mut patched = BTreeSet::new();
        for table in &TABLES {
            let (start, end) = (self.address(table.start)?, self.address(table.end)?);
            let bytes = contents(vmlinux, start, end)
                .ok_or_else(|| Error::other(format!("vmlinux has no {}", table.start)))?;
            let entries = (start..).step_by(table.entry);
            for (entry, bytes) in entries.zip(bytes.chunks_exact(table.entry)) {
                let Some(distance) = bytes.first_chunk() else {
                    continue;
                };
                let distance = i64::from(i32::from_le_bytes(*distance));
                patched.extend(self.function(entry.wrapping_add_signed(distance)));
            }
        }
        Ok(patched)
    }

    /// The functions that the list can name: others have a place of their own in the linker's script, as
    /// those that may not be traced or that schedule.
    fn listable(&self) -> Result<impl Iterator<Item = (u64, &[String])>> {
        let first = self.address("_text")?..self.address("__sched_text_start")?;
        let rest = self.address("__lock_text_end")?..self.address("__noinstr_text_start")?;
        let all = self.functions.range(first);
        let all = all.chain(self.functions.range(rest));
        Ok(all.map(|(start, names)| (*start, names.as_slice())))
    }

    /// Bytes of what comes first whatever the list: all that is there and not on it.
    fn fixed(&self, list: &BTreeSet<&str>) -> Result<u64> {
        let first = self.address("_text")?..self.address("__lock_text_end")?;
        let functions = self.functions.range(first);
        let fixed = functions.filter(|(_, names)| !names.iter().any(|n| list.contains(n.as_str())));
        Ok(fixed.map(|(start, _)| self.size(*start)).sum())
    }
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
    map: &'a Map,
    list: &BTreeSet<&str>,
    needed: &BTreeSet<u64>,
    wanted: &[BTreeSet<u64>],
) -> Result<Choice<'a>> {
    // The linker takes all functions of a name, so they come or stay together.
    let mut places: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for (function, names) in map.listable()? {
        for name in names {
            places.entry(name).or_default().push(function);
        }
    }
    let sets: Vec<_> = iter::once(needed).chain(wanted).collect();
    let mut order: Vec<_> = (map.listable()?)
        .filter_map(|(function, names)| {
            let rank = sets.iter().position(|set| set.contains(&function))?;
            Some((rank, map.size(function), function, names))
        })
        .collect();
    order.sort_unstable();
    let mut choice = Choice {
        names: BTreeSet::new(),
        bytes: map.fixed(list)?,
        left_out: 0,
    };
    let mut chosen = BTreeSet::new();
    for (rank, _, _, names) in order {
        let together = names.iter().filter_map(|name| places.get(name.as_str()));
        let new: BTreeSet<u64> = (together.flatten().copied())
            .filter(|function| !chosen.contains(function))
            .collect();
        let bytes: u64 = new.iter().map(|function| map.size(*function)).sum();
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

/// The bytes of an ELF file between two addresses.
fn contents(elf: &[u8], start: u64, end: u64) -> Option<&[u8]> {
    const LOAD: u64 = 1;
    let field = |at: usize, size| number(elf, at, size);
    let headers = usize::try_from(field(32, 8)?).ok()?;
    let size = usize::try_from(field(54, 2)?).ok()?;
    let count = usize::try_from(field(56, 2)?).ok()?;
    (0..count).map(|n| headers + n * size).find_map(|header| {
        let (offset, address) = (field(header + 8, 8)?, field(header + 16, 8)?);
        let loaded = address..=address.checked_add(field(header + 32, 8)?)?;
        if field(header, 4)? != LOAD || !loaded.contains(&start) || !loaded.contains(&end) {
            return None;
        }
        let at = |place: u64| usize::try_from(offset + (place - address)).ok();
        elf.get(at(start)?..at(end)?)
    })
}

/// A little-endian number of at most eight bytes.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let mut number = [0; 8];
    number[..size].copy_from_slice(bytes.get(at..at + size)?);
    Some(u64::from_le_bytes(number))
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
        ffffffff81404000 T _etext\n\
        ffffffff81500000 D __start_static_call_sites\n\
        ffffffff81500010 D __stop_static_call_sites\n\
        ffffffff81600000 R __alt_instructions\n\
        ffffffff8160000e R __alt_instructions_end\n";

    fn map() -> Map {
        Map::parse(MAP).unwrap()
    }

    fn of(map: &Map, names: &[&str]) -> BTreeSet<u64> {
        let with = |n: &&Vec<String>| n.iter().any(|name| names.contains(&name.as_str()));
        let functions = map.functions.iter().filter(|(_, names)| with(names));
        functions.map(|(start, _)| *start).collect()
    }

    /// Segments of an ELF file, behind each other.
    fn elf(segments: &[(u64, Vec<u8>)]) -> Vec<u8> {
        let mut elf = vec![0; 64];
        elf[32] = 64;
        elf[54] = 56;
        elf[56] = u8::try_from(segments.len()).unwrap();
        let mut offset = 64 + 56 * segments.len() as u64;
        for (address, bytes) in segments {
            let size = bytes.len() as u64;
            for word in [1, offset, *address, 0, size, size, 0] {
                elf.extend(word.to_le_bytes());
            }
            offset += size;
        }
        elf.extend(segments.iter().flat_map(|(_, bytes)| bytes));
        elf
    }

    #[test]
    fn a_mark_anywhere_in_a_function_is_the_functions() {
        let map = map();
        let (start, size) = map.code().unwrap();
        assert_eq!((start, size), (0xffff_ffff_8100_0000, 0x40_4000));
        let mut marks = vec![0; usize::try_from(size).unwrap()];
        marks[0x2ff] = 1;
        marks[0x20_0010] = 1;
        let marked = map.marked(&marks).unwrap();
        assert_eq!(marked, of(&map, &["boots", "call"]));
    }

    #[test]
    fn both_tables_say_what_is_patched() {
        let entry = |from: u64, to: u64, size: usize| {
            let mut entry = to.wrapping_sub(from).to_le_bytes()[..4].to_vec();
            entry.resize(size, 0xff);
            entry
        };
        let calls = 0xffff_ffff_8150_0000;
        let mut sites = entry(calls, 0xffff_ffff_8120_1234, 8);
        sites.extend(entry(calls + 8, 0xffff_ffff_8100_0200, 8));
        let alternatives = 0xffff_ffff_8160_0000;
        let alternative = entry(alternatives, 0xffff_ffff_8140_1fff, 14);
        let vmlinux = elf(&[(calls, sites), (alternatives, alternative)]);
        let patched = map().patched(&vmlinux).unwrap();
        let names = of(&map(), &["boots", "patched"]);
        let expected = names.into_iter().chain([0xffff_ffff_8120_1000]);
        assert_eq!(patched, expected.collect());
    }

    #[test]
    fn a_file_without_the_tables_is_refused() {
        assert!(map().patched(&elf(&[])).is_err());
        assert!(map().patched(b"short").is_err());
        assert!(Map::parse("ffffffff81000000 T").is_err());
        assert!(Map::parse("text T _text").is_err());
    }

    #[test]
    fn what_a_boot_needs_is_listed_and_then_what_fits() {
        let map = map();
        let list = BTreeSet::from(["boots", "twice"]);
        let boot = of(&map, &["boots", "schedule", "noinstr", "patched"]);
        let command = of(&map, &["idle", "boots"]);
        let ran = of(&map, &["call", "large", "idle"]);
        let choice = choose(&map, &list, &boot, &[command, ran]).unwrap();
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
        let map = Map::parse(&text).unwrap();
        let sets = [["large"], ["twice"]].map(|names| of(&map, &names));
        let [large, small] = &sets;
        let names = |sets: &[BTreeSet<u64>]| {
            let choice = choose(&map, &BTreeSet::new(), &BTreeSet::new(), sets).unwrap();
            choice.names.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(names(&sets), ["large"]);
        assert_eq!(names(&[small.clone(), large.clone()]), ["twice"]);
    }

    #[test]
    fn functions_of_one_name_come_together() {
        let map = map();
        let ran = BTreeSet::from([0xffff_ffff_8100_0300]);
        let choice = choose(&map, &BTreeSet::new(), &ran, &[]).unwrap();
        assert_eq!(choice.names, BTreeSet::from(["twice"]));
        let fixed = map.fixed(&BTreeSet::new()).unwrap();
        assert_eq!(choice.bytes, fixed + 0x100 + 0x1000);
    }

    #[test]
    fn a_boot_that_needs_more_than_a_large_page_is_an_error() {
        let map = map();
        let choose = |names| choose(&map, &BTreeSet::new(), &of(&map, names), &[]);
        assert!(choose(&["boots", "large"]).is_ok());
        assert!(choose(&["boots", "large", "call", "patched"]).is_err());
    }
}
