//! ELF kernels: header and program headers.

use linux_loader::elf::{EM_X86_64, ET_DYN, ET_EXEC, Elf64_Ehdr, Elf64_Phdr, PF_W, PT_LOAD};
use vm_memory::ByteValued;

use super::Segment;
use super::source::Source;
use crate::x86_64::layout::{HIGH_MEMORY, HOLE_START};
use crate::{ArchError, Result};

/// Most program headers. A kernel has about five.
const MAX_PROGRAM_HEADERS: u16 = 64;
/// End of what the boot page tables map.
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
    for index in 0..header.e_phnum {
        let mut program = Elf64_Phdr::default();
        let offset = u64::from(index) * size_of::<Elf64_Phdr>() as u64;
        let offset = header.e_phoff.checked_add(offset).ok_or_else(|| {
            ArchError::kernel("the program headers lie beyond the end of the file")
        })?;
        source.read_at(offset, program.as_mut_slice())?;
        if program.p_type == PT_LOAD && program.p_memsz != 0 {
            segments.push(segment(&program, source.len())?);
        }
    }

    image(segments, header.e_entry)
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

fn image(segments: Vec<Segment>, entry: u64) -> Result<Image> {
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
    if end > MAPPED_END {
        return Err(ArchError::Memory {
            what: "the kernel",
            addr: start,
            len: end - start,
        });
    }
    Ok(Image {
        segments,
        entry,
        start,
        end,
    })
}
