//! The symbols of a built kernel, and tables of places in its code.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use crate::error::{Error, Result};
use crate::host;

/// A table of places in the code. Each entry begins with a signed 32-bit distance from itself.
pub(crate) struct Table {
    pub(crate) start: &'static str,
    pub(crate) end: &'static str,
    /// Bytes of an entry.
    pub(crate) entry: usize,
}

/// The names of a `System.map`.
pub(crate) struct Symbols {
    all: BTreeMap<String, u64>,
    /// By address, all names of each.
    functions: BTreeMap<u64, Vec<String>>,
}

impl Symbols {
    /// Reads the `System.map` beside a kernel.
    pub(crate) fn beside(vmlinux: &Path) -> Result<Self> {
        let bytes = host::read(&vmlinux.with_file_name("System.map"))?;
        Self::parse(&String::from_utf8_lossy(&bytes))
    }

    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut map = Self {
            all: BTreeMap::new(),
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
            map.all.insert(name.to_owned(), address);
        }
        Ok(map)
    }

    /// The address of a symbol that every kernel of ours has.
    pub(crate) fn address(&self, name: &str) -> Result<u64> {
        let found = self.all.get(name).copied();
        found.ok_or_else(|| Error::other(format!("System.map has no {name}")))
    }

    /// Where the code begins, and how many bytes it has.
    pub(crate) fn code(&self) -> Result<(u64, u64)> {
        let start = self.address("_text")?;
        Ok((start, self.address("_etext")?.saturating_sub(start)))
    }

    /// The start of the function that an address is in.
    pub(crate) fn function(&self, address: u64) -> Option<u64> {
        let (start, _) = self.functions.range(..=address).next_back()?;
        Some(*start)
    }

    /// Bytes from the start of a function to that of the next.
    pub(crate) fn size(&self, function: u64) -> u64 {
        let next = self.functions.range(function + 1..).next();
        next.map_or(0, |(next, _)| next - function)
    }

    /// Functions that start in a range, with their names.
    pub(crate) fn functions(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &[String])> {
        let functions = self.functions.range(range);
        functions.map(|(start, names)| (*start, names.as_slice()))
    }

    /// The functions into which a table of `vmlinux` points.
    pub(crate) fn pointed_at(&self, vmlinux: &[u8], table: &Table) -> Result<BTreeSet<u64>> {
        let (start, end) = (self.address(table.start)?, self.address(table.end)?);
        let bytes = contents(vmlinux, start, end)
            .ok_or_else(|| Error::other(format!("vmlinux has no {}", table.start)))?;
        let entries = (start..).step_by(table.entry);
        let functions = (entries.zip(bytes.chunks_exact(table.entry))).filter_map(|(at, entry)| {
            let distance = i64::from(i32::from_le_bytes(*entry.first_chunk()?));
            self.function(at.wrapping_add_signed(distance))
        });
        Ok(functions.collect())
    }

    /// The functions whose addresses are in a table of `vmlinux`, which ends at the next symbol.
    pub(crate) fn listed_in(&self, vmlinux: &[u8], table: &str) -> Result<BTreeSet<u64>> {
        let start = self.address(table)?;
        let later = self.all.values().copied().filter(|at| *at > start);
        let bytes = later.min().and_then(|end| contents(vmlinux, start, end));
        let bytes = bytes.ok_or_else(|| Error::other(format!("vmlinux has no {table}")))?;
        let (entries, _) = bytes.as_chunks();
        let addresses = entries.iter().map(|entry| u64::from_le_bytes(*entry));
        Ok(addresses
            .filter(|address| self.functions.contains_key(address))
            .collect())
    }
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
        ffffffff81000200 T boots\n\
        ffffffff81200000 t __do_call\n\
        ffffffff81200000 t call\n\
        ffffffff81404000 T _etext\n\
        ffffffff81500000 D table\n\
        ffffffff81500010 D table_end\n\
        ffffffff81600000 D other\n";

    const TABLE: Table = Table {
        start: "table",
        end: "table_end",
        entry: 8,
    };

    fn symbols() -> Symbols {
        Symbols::parse(MAP).unwrap()
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
    fn an_address_is_in_the_function_before_it() {
        let symbols = symbols();
        assert_eq!(symbols.code().unwrap(), (0xffff_ffff_8100_0000, 0x40_4000));
        let function = symbols.function(0xffff_ffff_8100_0fff).unwrap();
        assert_eq!(function, symbols.address("boots").unwrap());
        assert_eq!(symbols.size(function), 0x1f_fe00);
        assert_eq!(symbols.function(0x1000), None);
        let range = 0xffff_ffff_8100_0001..0xffff_ffff_8140_0000;
        let names: Vec<_> = symbols.functions(range).map(|(_, names)| names).collect();
        assert_eq!(names, [&["boots"][..], &["__do_call", "call"]]);
    }

    #[test]
    fn a_table_points_into_functions() {
        let entry = |from: u64, to: u64| {
            let mut entry = to.wrapping_sub(from).to_le_bytes()[..4].to_vec();
            entry.extend([0xff; 4]);
            entry
        };
        let table = 0xffff_ffff_8150_0000;
        let mut bytes = entry(table, 0xffff_ffff_8120_1234);
        bytes.extend(entry(table + 8, 0xffff_ffff_8100_0200));
        bytes.extend(entry(table + 16, 0xffff_ffff_8100_0000));
        let vmlinux = elf(&[(0xffff_ffff_8100_0000, vec![0x90; 8]), (table, bytes)]);
        let functions = symbols().pointed_at(&vmlinux, &TABLE).unwrap();
        let names = ["boots", "call"].map(|name| symbols().address(name).unwrap());
        assert_eq!(functions, names.into());
    }

    #[test]
    fn a_table_lists_functions_up_to_the_next_symbol() {
        let table = 0xffff_ffff_8150_0000;
        let addresses = [
            0,
            0xffff_ffff_8120_0000_u64,
            // Behind the table.
            0xffff_ffff_8100_0200,
        ];
        let bytes = addresses.iter().flat_map(|address| address.to_le_bytes());
        let vmlinux = elf(&[(table, bytes.collect())]);
        let listed = symbols().listed_in(&vmlinux, "table").unwrap();
        assert_eq!(listed, [symbols().address("call").unwrap()].into());
        assert!(symbols().listed_in(&elf(&[]), "table").is_err());
        assert!(symbols().listed_in(&vmlinux, "other").is_err());
    }

    #[test]
    fn files_that_lack_something_are_refused() {
        assert!(symbols().pointed_at(&elf(&[]), &TABLE).is_err());
        assert!(symbols().pointed_at(b"short", &TABLE).is_err());
        assert!(symbols().address("nothing").is_err());
        assert!(Symbols::parse("ffffffff81000000 T").is_err());
        assert!(Symbols::parse("text T _text").is_err());
    }
}
