//! What a kernel finds in memory: command line, memory map, initial ramdisk, randomness, descriptor and
//! page tables (the 64-bit boot protocol: `Documentation/arch/x86/boot.rst` and `zero-page.rst`).
//!
//! PVH, which leads into the same kernel, has no place for the randomness, and Linux begins it by
//! looking for Xen with 256 CPUID, each an exit.

use std::fs::File;

use linux_loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::kernel::{LoadedKernel, copy_file};
use super::layout::{
    CMDLINE, CMDLINE_MAX, GDT, HIGH_MEMORY, LOW_MEMORY_END, PAGE, PAGE_TABLES, SETUP_DATA,
    ZERO_PAGE,
};
use super::{cpu, mptable};
use crate::{ArchError, GuestRam, Result};

/// The initial ramdisk must end below: kernels say so in `initrd_addr_max`.
const INITRD_END: u64 = 1 << 31;

/// An initial ramdisk in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Initrd {
    /// Where it starts, page-aligned.
    pub addr: GuestAddress,
    /// Its length in bytes.
    pub len: u64,
}

/// How many bytes of randomness a kernel gets: twice what its generator needs to be ready.
pub const RNG_SEED_LEN: usize = 64;

/// What [`prepare`] needs to know.
#[derive(Debug, Clone, Copy)]
pub struct Boot<'a> {
    /// The kernel, already loaded.
    pub kernel: &'a LoadedKernel,
    /// The whole kernel command line, at most [`CMDLINE_MAX`] bytes.
    pub cmdline: &'a str,
    /// The initial ramdisk, already loaded.
    pub initrd: Option<Initrd>,
    /// Number of vCPUs, at most [`MAX_VCPUS`](super::layout::MAX_VCPUS).
    pub vcpus: u32,
    /// Number of virtio-mmio devices, in the first slots of the layout.
    pub devices: u32,
    /// Random bytes of the host's, for this boot alone. The kernel takes them before anything asks it
    /// for randomness, and wipes them.
    pub rng_seed: Option<[u8; RNG_SEED_LEN]>,
}

/// Where the boot processor starts; what [`configure_vcpu`](super::configure_vcpu) needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// First instruction.
    pub rip: u64,
}

/// Copies an initial ramdisk, the whole of `file`, to the end of RAM. To map it would save nothing: the
/// guest reads all of it once, and each page would be an exit. It starts on a page, so that our kernel
/// can make pages of it a file's.
///
/// # Errors
///
/// If it does not fit between the kernel and the end of the RAM below 2 GiB, or cannot be read.
pub fn load_initrd(ram: &GuestRam, kernel: &LoadedKernel, file: &mut File) -> Result<Initrd> {
    let len = file.metadata().map_err(ArchError::Initrd)?.len();
    let room = ram.find_region(HIGH_MEMORY).map_or(0, |region| {
        region
            .start_addr()
            .0
            .saturating_add(region.len())
            .min(INITRD_END)
    });
    let addr = room.checked_sub(len).map(|addr| addr / PAGE * PAGE);
    let no_room = |addr| ArchError::Memory {
        what: "the initial ramdisk",
        addr,
        len,
    };
    let addr = addr
        .filter(|&addr| addr >= kernel.end.0)
        .ok_or_else(|| no_room(kernel.end.0))?;
    let bytes = usize::try_from(len).map_err(|_| no_room(addr))?;
    copy_file(ram, file, 0, GuestAddress(addr), bytes).map_err(ArchError::Initrd)?;
    Ok(Initrd {
        addr: GuestAddress(addr),
        len,
    })
}

/// Writes everything that the kernel expects to find in memory, and says how to start it.
///
/// # Errors
///
/// If the command line is too long or has control characters, there are too many vCPUs, or RAM is
/// too small.
pub fn prepare(ram: &GuestRam, boot: &Boot<'_>) -> Result<Entry> {
    write_cmdline(ram, boot.cmdline)?;
    mptable::write(ram, boot.vcpus, boot.devices)?;
    put(
        ram,
        "the GDT",
        GDT,
        &cpu::gdt().map(u64::to_le_bytes).concat(),
    )?;
    write_page_tables(ram)?;
    write_zero_page(ram, boot)?;
    Ok(Entry {
        rip: boot.kernel.entry.0,
    })
}

fn put(ram: &GuestRam, what: &'static str, at: GuestAddress, bytes: &[u8]) -> Result<()> {
    ram.write_slice(bytes, at).map_err(|_| ArchError::Memory {
        what,
        addr: at.0,
        len: bytes.len() as u64,
    })
}

fn write_cmdline(ram: &GuestRam, cmdline: &str) -> Result<()> {
    if cmdline.len() > CMDLINE_MAX {
        return Err(ArchError::Limit {
            what: "the length of the kernel command line",
            value: cmdline.len() as u64,
            limit: CMDLINE_MAX as u64,
        });
    }
    if let Some(at) = cmdline.bytes().position(|byte| byte.is_ascii_control()) {
        return Err(ArchError::CommandLine(at));
    }
    let mut bytes = cmdline.as_bytes().to_vec();
    bytes.push(0);
    put(ram, "the kernel command line", CMDLINE, &bytes)
}

/// One range of the memory map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    addr: u64,
    len: u64,
    ram: bool,
}

/// The memory map (e820): all RAM, but the last KiB of conventional memory and what follows up to
/// 1 MiB is reserved, as on any PC; the MP table lies there.
fn memory_map(ram: &GuestRam) -> Vec<Range> {
    let (low_end, high) = (LOW_MEMORY_END.0, HIGH_MEMORY.0);
    let mut map = Vec::new();
    for region in ram.iter() {
        let start = region.start_addr().0;
        let end = start.saturating_add(region.len());
        if start < high && end > high {
            map.push(Range {
                addr: start,
                len: low_end - start,
                ram: true,
            });
            map.push(Range {
                addr: low_end,
                len: high - low_end,
                ram: false,
            });
            map.push(Range {
                addr: high,
                len: end - high,
                ram: true,
            });
        } else {
            map.push(Range {
                addr: start,
                len: end - start,
                ram: true,
            });
        }
    }
    map
}

/// `struct boot_params`.
fn write_zero_page(ram: &GuestRam, boot: &Boot<'_>) -> Result<()> {
    const BOOT_FLAG: u16 = 0xaa55;
    const HEADER_MAGIC: u32 = 0x5372_6448; // "HdrS"
    const LOADER_UNDEFINED: u8 = 0xff;
    const VERSION_2_15: u16 = 0x020f;
    const E820_RAM: u32 = 1;
    const E820_RESERVED: u32 = 2;

    let low32 = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let mut params = boot_params::default();
    // An ELF kernel has no setup header of its own; these are the fields that it reads.
    params.hdr.boot_flag = BOOT_FLAG;
    params.hdr.header = HEADER_MAGIC;
    params.hdr.version = VERSION_2_15;
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.loadflags = 1; // loaded high
    params.hdr.cmd_line_ptr = low32(CMDLINE.0);
    params.hdr.cmdline_size = low32(boot.cmdline.len() as u64);
    if let Some(initrd) = boot.initrd {
        // Below 2 GiB: see `load_initrd`.
        params.hdr.ramdisk_image = low32(initrd.addr.0);
        params.hdr.ramdisk_size = low32(initrd.len);
    }
    let map = memory_map(ram);
    let mut table = params.e820_table; // a copy: the structure is packed
    for (entry, range) in table.iter_mut().zip(&map) {
        *entry = boot_e820_entry {
            addr: range.addr,
            size: range.len,
            r#type: if range.ram { E820_RAM } else { E820_RESERVED },
        };
    }
    params.e820_table = table;
    params.e820_entries = u8::try_from(map.len()).unwrap_or(u8::MAX);
    if let Some(seed) = &boot.rng_seed {
        write_rng_seed(ram, seed)?;
        params.hdr.setup_data = SETUP_DATA.0;
    }
    put(ram, "the zero page", ZERO_PAGE, params.as_slice())
}

/// `struct setup_data`, the only one: its successor, type and length, and the seed.
fn write_rng_seed(ram: &GuestRam, seed: &[u8; RNG_SEED_LEN]) -> Result<()> {
    const NO_NEXT: u64 = 0;
    const RNG_SEED: u32 = 9;
    let len = u32::try_from(seed.len()).unwrap_or(0);
    let header = [
        &NO_NEXT.to_le_bytes()[..],
        &RNG_SEED.to_le_bytes(),
        &len.to_le_bytes(),
    ];
    let bytes = [&header.concat()[..], seed].concat();
    put(ram, "the random seed", SETUP_DATA, &bytes)
}

/// Maps the first GiB to itself in pages of 2 MiB. The kernel, the zero page and the command line
/// lie there; the kernel brings its own tables for the rest.
fn write_page_tables(ram: &GuestRam) -> Result<()> {
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    const ENTRIES: u64 = 512;
    let level4 = PAGE_TABLES.0;
    let level3 = level4 + PAGE;
    let level2 = level3 + PAGE;
    let mut tables = vec![0; usize::try_from(3 * ENTRIES).unwrap_or(0)];
    for (entry, value) in tables.chunks_mut(512).zip([level3, level2]) {
        entry[0] = value | PRESENT_WRITABLE;
    }
    for (entry, page) in tables.iter_mut().skip(1024).zip(0u64..) {
        *entry = page << 21 | PRESENT_WRITABLE | LARGE;
    }
    let bytes: Vec<u8> = tables
        .iter()
        .flat_map(|entry: &u64| entry.to_le_bytes())
        .collect();
    put(ram, "the boot page tables", PAGE_TABLES, &bytes)
}
