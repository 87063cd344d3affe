//! What a kernel finds in memory.

use std::fs::File;
use std::io::Write;

use bantam_arch::x86_64::boot::{Boot, Entry, RNG_SEED_LEN, load_initrd, prepare};
use bantam_arch::x86_64::layout::{self, memory_regions};
use bantam_arch::x86_64::{Initrd, LoadedKernel};
use bantam_arch::{ArchError, GuestRam};
use vm_memory::{Bytes, GuestAddress};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn kernel() -> LoadedKernel {
    LoadedKernel {
        entry: GuestAddress(16 * MIB),
        start: GuestAddress(16 * MIB),
        end: GuestAddress(32 * MIB),
    }
}

/// RAM of any size; pages that are not touched cost nothing.
fn ram(bytes: u64) -> GuestRam {
    let regions = memory_regions(bytes).unwrap();
    let ranges: Vec<_> = regions
        .iter()
        .map(|&(addr, len)| (addr, usize::try_from(len).unwrap()))
        .collect();
    GuestRam::from_ranges(&ranges).unwrap()
}

fn read<const N: usize>(ram: &GuestRam, at: u64) -> [u8; N] {
    let mut bytes = [0; N];
    ram.read_slice(&mut bytes, GuestAddress(at)).unwrap();
    bytes
}

fn u32_at(ram: &GuestRam, at: u64) -> u32 {
    u32::from_le_bytes(read(ram, at))
}

fn u64_at(ram: &GuestRam, at: u64) -> u64 {
    u64::from_le_bytes(read(ram, at))
}

fn boot(kernel: &LoadedKernel) -> Boot<'_> {
    Boot {
        kernel,
        cmdline: "quiet init=/init",
        initrd: None,
        vcpus: 1,
        devices: 4,
        rng_seed: None,
    }
}

#[test]
fn the_memory_map_leaves_the_hole_out() {
    for (size, above) in [(3 * GIB, None), (5 * GIB, Some((4 * GIB, 2 * GIB, 1)))] {
        let ram = ram(size);
        let mut expected = vec![
            (0, 0x9_fc00, 1),
            (0x9_fc00, 0x6_0400, 2),
            (MIB, 3 * GIB - MIB, 1),
        ];
        expected.extend(above);
        prepare(&ram, &boot(&kernel())).unwrap();
        let page = layout::ZERO_PAGE.0;
        let count = read::<1>(&ram, page + 0x1e8)[0];
        let e820: Vec<_> = (0..u64::from(count))
            .map(|i| page + 0x2d0 + 20 * i)
            .map(|at| {
                (
                    u64_at(&ram, at),
                    u64_at(&ram, at + 8),
                    u32_at(&ram, at + 16),
                )
            })
            .collect();
        assert_eq!(e820, expected);
    }
}

#[test]
fn a_kernel_finds_its_zero_page_and_page_tables() {
    let ram = ram(256 * MIB);
    let kernel = kernel();
    let initrd = Initrd {
        addr: GuestAddress(128 * MIB),
        len: 12345,
    };
    let entry = prepare(
        &ram,
        &Boot {
            initrd: Some(initrd),
            ..boot(&kernel)
        },
    )
    .unwrap();
    let page = layout::ZERO_PAGE.0;
    assert_eq!(entry.rip, 16 * MIB);
    assert_eq!(read(&ram, page + 0x1fe), [0x55, 0xaa]);
    assert_eq!(&read(&ram, page + 0x202), b"HdrS");
    assert_eq!(
        read(&ram, page + 0x210),
        [0xff, 1],
        "undefined loader, loaded high"
    );
    assert_eq!(u32_at(&ram, page + 0x218), 128 << 20);
    assert_eq!(u32_at(&ram, page + 0x21c), 12345);
    let cmdline = u32_at(&ram, page + 0x228);
    assert_eq!(&read::<17>(&ram, cmdline.into()), b"quiet init=/init\0");
    assert_eq!(u32_at(&ram, page + 0x238), 16, "its length");
    assert_eq!(u64_at(&ram, page + 0x250), 0, "no setup_data");

    // A walk, as the CPU does it.
    for addr in [0, 16 * MIB + 0x123, GIB - 1] {
        let mut table = layout::PAGE_TABLES.0;
        for shift in [39, 30, 21] {
            let entry = u64_at(&ram, table + (addr >> shift & 511) * 8);
            assert_eq!(entry & 3, 3, "present and writable");
            table = entry & !0xfff;
            assert_eq!(
                entry & 0x80 != 0,
                shift == 21,
                "a large page at the last level only"
            );
        }
        assert_eq!(table + (addr & 0x1f_ffff), addr);
    }
    assert_eq!(u64_at(&ram, layout::PAGE_TABLES.0 + 8), 0, "nothing beyond");
    assert_eq!(
        u64_at(&ram, layout::PAGE_TABLES.0 + 0x1008),
        0,
        "nothing beyond"
    );
}

#[test]
fn without_an_initial_ramdisk_the_zero_page_has_none() {
    let ram = ram(256 * MIB);
    prepare(&ram, &boot(&kernel())).unwrap();
    let page = layout::ZERO_PAGE.0;
    assert_eq!(u64_at(&ram, page + 0x218), 0);
}

#[test]
fn a_kernel_finds_its_random_seed() {
    let ram = ram(256 * MIB);
    let kernel = kernel();
    let seed = std::array::from_fn(|i| u8::try_from(i + 1).unwrap());
    let with_seed = Boot {
        rng_seed: Some(seed),
        ..boot(&kernel)
    };
    prepare(&ram, &with_seed).unwrap();
    let page = layout::ZERO_PAGE.0;
    let data = u64_at(&ram, page + 0x250);
    assert_eq!(data, layout::SETUP_DATA.0);
    assert_eq!(u64_at(&ram, data), 0, "the only one");
    assert_eq!(u32_at(&ram, data + 8), 9, "SETUP_RNG_SEED");
    assert_eq!(u32_at(&ram, data + 12), 64, "its length");
    assert_eq!(read::<RNG_SEED_LEN>(&ram, data + 16), seed);
}

#[test]
fn the_descriptor_table_has_flat_segments() {
    let ram = ram(4 * MIB);
    prepare(&ram, &boot(&kernel())).unwrap();
    let gdt = [0x10, 0x18, 0x20].map(|selector| u64_at(&ram, layout::GDT.0 + selector));
    assert_eq!(
        gdt,
        [
            0x00af_9b00_0000_ffff,
            0x00cf_9300_0000_ffff,
            0x8b00_0000_0067
        ]
    );
}

#[test]
fn the_initial_ramdisk_goes_to_the_end_of_ram() {
    let bytes = vec![0x5a; 5000];
    let mut file = file(&bytes);
    for (size, end) in [(256 * MIB, 256 * MIB), (5 * GIB, 2 * GIB)] {
        let ram = ram(size);
        let kernel = kernel();
        let initrd = load_initrd(&ram, &kernel, &mut file).unwrap();
        assert_eq!(
            initrd,
            Initrd {
                addr: GuestAddress(end - 8192),
                len: 5000
            }
        );
        assert_eq!(read::<5000>(&ram, initrd.addr.0), *bytes);
    }
}

#[test]
fn an_initial_ramdisk_that_does_not_fit_is_refused() {
    let ram = ram(33 * MIB);
    let kernel = kernel();
    let load = |len: u64| {
        let mut sparse = tempfile::tempfile().unwrap();
        sparse.set_len(len).unwrap();
        load_initrd(&ram, &kernel, &mut sparse)
    };
    assert!(load(MIB).is_ok());
    assert!(
        matches!(load(MIB + 1), Err(ArchError::Memory { .. })),
        "it would cover the kernel"
    );
    assert!(matches!(load(1 << 40), Err(ArchError::Memory { .. })));
    let mut unreadable = File::open(std::env::temp_dir()).unwrap();
    let failed = load_initrd(&ram, &kernel, &mut unreadable);
    assert!(matches!(failed, Err(ArchError::Initrd(_))));
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

#[test]
fn bad_command_lines_are_refused() {
    let ram = ram(4 * MIB);
    let kernel = kernel();
    let try_line = |cmdline: &str| -> Result<Entry, ArchError> {
        prepare(
            &ram,
            &Boot {
                cmdline,
                ..boot(&kernel)
            },
        )
    };
    let longest = "x".repeat(layout::CMDLINE_MAX);
    assert!(try_line(&longest).is_ok());
    assert!(matches!(
        try_line(&format!("{longest}x")),
        Err(ArchError::Limit { .. })
    ));
    assert!(matches!(try_line("a\nb"), Err(ArchError::CommandLine(1))));
    assert!(matches!(try_line("ab\0"), Err(ArchError::CommandLine(2))));
}

#[test]
fn too_many_vcpus_are_refused() {
    let ram = ram(4 * MIB);
    let kernel = kernel();
    let with = |vcpus| {
        prepare(
            &ram,
            &Boot {
                vcpus,
                ..boot(&kernel)
            },
        )
    };
    assert!(with(layout::MAX_VCPUS).is_ok());
    assert!(matches!(
        with(layout::MAX_VCPUS + 1),
        Err(ArchError::Limit { .. })
    ));
}
