//! ELF kernels: header, program headers, and the note with the PVH entry point.

use linux_loader::elf::{
    EM_X86_64, ET_DYN, ET_EXEC, Elf64_Ehdr, Elf64_Nhdr, Elf64_Phdr, PF_W, PT_LOAD, PT_NOTE,
};
use vm_memory::ByteValued;

use super::source::Source;
use super::{Protocol, Segment};
use crate::x86_64::layout::{HIGH_MEMORY, HOLE_START};
use crate::{ArchError, Result};

/// Most program headers. A kernel has about five.
const MAX_PROGRAM_HEADERS: u16 = 64;
/// Largest note segment in bytes. A kernel's is below 1 KiB.
const MAX_NOTES: u64 = 64 << 10;
/// End of what the boot page tables of the 64-bit protocol map.
const MAPPED_END: u64 = 1 << 30;

const MAGIC: [u8; 4] = *b"\x7fELF";
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;

/// What matters of a kernel's ELF file, all of it checked.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Image {
    /// Within the file, within `HIGH_MEMORY..HOLE_START`, disjoint.
    pub(super) segments: Vec<Segment>,
    /// Within a segment.
    pub(super) entry: u64,
    pub(super) protocol: Protocol,
    pub(super) start: u64,
    pub(super) end: u64,
}

pub(super) fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

pub(super) fn parse(source: &Source) -> Result<Image> {
    let mut header = Elf64_Ehdr::default();
    source.read_at(0, header.as_mut_slice())?;
    check_header(&header)?;

    let mut segments = Vec::new();
    let mut pvh_entry = None;
    for index in 0..header.e_phnum {
        let mut program = Elf64_Phdr::default();
        let offset = u64::from(index) * size_of::<Elf64_Phdr>() as u64;
        let offset = header.e_phoff.checked_add(offset).ok_or_else(|| {
            ArchError::kernel("the program headers lie beyond the end of the file")
        })?;
        source.read_at(offset, program.as_mut_slice())?;
        match program.p_type {
            PT_LOAD if program.p_memsz != 0 => segments.push(segment(&program, source.len())?),
            PT_NOTE if pvh_entry.is_none() => pvh_entry = find_pvh_entry(source, &program)?,
            _ => {}
        }
    }

    let (entry, protocol) = match pvh_entry {
        Some(entry) => (entry, Protocol::Pvh),
        None => (header.e_entry, Protocol::Linux64),
    };
    image(segments, entry, protocol)
}

fn check_header(header: &Elf64_Ehdr) -> Result<()> {
    let wrong = |what| Err(ArchError::kernel(what));
    if !is_elf(&header.e_ident) {
        return wrong("it is not an ELF file".to_owned());
    }
    if header.e_ident[4] != CLASS_64 || header.e_ident[5] != LITTLE_ENDIAN {
        return wrong("it is not a 64-bit little-endian ELF file".to_owned());
    }
    if header.e_machine != EM_X86_64 {
        return wrong(format!(
            "it is for ELF machine {}, not for x86_64",
            header.e_machine
        ));
    }
    if !matches!(header.e_type, ET_EXEC | ET_DYN) {
        return wrong(format!("ELF type {} is not executable", header.e_type));
    }
    if usize::from(header.e_phentsize) != size_of::<Elf64_Phdr>() {
        return wrong(format!(
            "its program headers have {} bytes, not 56",
            header.e_phentsize
        ));
    }
    if header.e_phnum == 0 || header.e_phnum > MAX_PROGRAM_HEADERS {
        return Err(ArchError::Limit {
            what: "the kernel's number of program headers",
            value: header.e_phnum.into(),
            limit: MAX_PROGRAM_HEADERS.into(),
        });
    }
    Ok(())
}

fn segment(program: &Elf64_Phdr, source_len: u64) -> Result<Segment> {
    let segment = Segment {
        file_offset: program.p_offset,
        file_len: program.p_filesz,
        guest_addr: program.p_paddr,
        mem_len: program.p_memsz,
        writable: program.p_flags & PF_W != 0,
    };
    if segment.file_len > segment.mem_len {
        return Err(ArchError::kernel(
            "a segment is larger in the file than in memory",
        ));
    }
    if segment
        .file_offset
        .checked_add(segment.file_len)
        .is_none_or(|end| end > source_len)
    {
        return Err(ArchError::kernel(
            "a segment extends beyond the end of the file",
        ));
    }
    let end = segment.guest_addr.checked_add(segment.mem_len);
    if segment.guest_addr < HIGH_MEMORY.0 || end.is_none_or(|end| end > HOLE_START) {
        return Err(ArchError::Memory {
            what: "a kernel segment",
            addr: segment.guest_addr,
            len: segment.mem_len,
        });
    }
    Ok(segment)
}

fn image(segments: Vec<Segment>, entry: u64, protocol: Protocol) -> Result<Image> {
    // Cannot overflow: `segment` checked it.
    let range = |s: &Segment| s.guest_addr..s.guest_addr + s.mem_len;
    for (index, segment) in segments.iter().enumerate() {
        let (this, before) = (range(segment), segments.iter().take(index).map(range));
        for other in before {
            if this.start < other.end && other.start < this.end {
                return Err(ArchError::kernel(format!(
                    "two segments overlap at {:#x}",
                    this.start.max(other.start)
                )));
            }
        }
    }
    let start = segments.iter().map(|s| s.guest_addr).min();
    let end = segments.iter().map(|s| range(s).end).max();
    let (Some(start), Some(end)) = (start, end) else {
        return Err(ArchError::kernel("it has no segment to load"));
    };
    if !segments
        .iter()
        .any(|s| (s.guest_addr..s.guest_addr + s.file_len).contains(&entry))
    {
        return Err(ArchError::kernel(format!(
            "its entry point {entry:#x} is in no segment"
        )));
    }
    if protocol == Protocol::Linux64 && end > MAPPED_END {
        return Err(ArchError::Memory {
            what: "the kernel",
            addr: start,
            len: end - start,
        });
    }
    Ok(Image {
        segments,
        entry,
        protocol,
        start,
        end,
    })
}

/// Looks for Xen's `PHYS32_ENTRY` note (`xen/include/public/elfnote.h`) in a note segment.
fn find_pvh_entry(source: &Source, program: &Elf64_Phdr) -> Result<Option<u64>> {
    const PHYS32_ENTRY: u32 = 18;
    const OWNER: &[u8] = b"Xen\0";

    if program.p_filesz > MAX_NOTES {
        return Err(ArchError::Limit {
            what: "the length of the kernel's notes in bytes",
            value: program.p_filesz,
            limit: MAX_NOTES,
        });
    }
    let bytes = source.read_vec(program.p_offset, program.p_filesz)?;
    // Each round takes at least a header, so this ends.
    let mut rest = bytes.as_slice();
    while let Some((header, tail)) = rest.split_at_checked(size_of::<Elf64_Nhdr>()) {
        let mut note = Elf64_Nhdr::default();
        note.as_mut_slice().copy_from_slice(header);
        let Some((owner, tail)) = take_padded(tail, note.n_namesz, program.p_align) else {
            return Err(ArchError::kernel(
                "a note's name extends beyond its segment",
            ));
        };
        let Some((value, tail)) = take_padded(tail, note.n_descsz, program.p_align) else {
            return Err(ArchError::kernel(
                "a note's value extends beyond its segment",
            ));
        };
        if note.n_type == PHYS32_ENTRY && owner == OWNER {
            let Some(entry) = value.first_chunk() else {
                return Err(ArchError::kernel("its PVH entry note is too short"));
            };
            return Ok(Some(u32::from_le_bytes(*entry).into()));
        }
        rest = tail;
    }
    Ok(None)
}

/// Splits `len` bytes off, and the padding behind them. The last one's padding may be missing.
fn take_padded(bytes: &[u8], len: u32, align: u64) -> Option<(&[u8], &[u8])> {
    let align = if align == 8 { 8 } else { 4 };
    let len = usize::try_from(len).ok()?;
    let (taken, _) = bytes.split_at_checked(len)?;
    let padded = len.checked_next_multiple_of(align)?.min(bytes.len());
    bytes.get(padded..).map(|rest| (taken, rest))
}
