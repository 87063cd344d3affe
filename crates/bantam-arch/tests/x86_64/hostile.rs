//! Damaged and malicious kernel files: an error each, never a panic, a loop, or a byte elsewhere.

use bantam_arch::ArchError;
use bantam_arch::x86_64::Kernel;
use bantam_arch::x86_64::layout::{HIGH_MEMORY, HOLE_START};
use proptest::prelude::*;

use crate::fixture::{LOAD, SEGMENT_OFFSET, bz_image, elf, ram};

/// Offset of the entry point.
const E_ENTRY: usize = 24;
/// Offsets in the first program header of the fixture.
const P_OFFSET: usize = 64 + 8;
const P_PADDR: usize = 64 + 24;
const P_FILESZ: usize = 64 + 32;
const P_MEMSZ: usize = 64 + 40;

fn patched(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut file = elf(&[0xf4; 64]);
    file[at..at + bytes.len()].copy_from_slice(bytes);
    file
}

fn parse(file: Vec<u8>) -> Result<Kernel, ArchError> {
    let len = file.len() as u64;
    let kernel = Kernel::from_bytes(file)?;
    // Whatever is accepted keeps its promises.
    for segment in kernel.segments() {
        assert!(segment.file_len <= segment.mem_len);
        assert!(segment.guest_addr >= HIGH_MEMORY.0);
        assert!(segment.guest_addr + segment.mem_len <= HOLE_START);
        assert!(segment.file_offset + segment.file_len <= len.max(1 << 20));
    }
    if let Ok(loaded) = kernel.load(&ram(4)) {
        assert!(loaded.start <= loaded.entry && loaded.entry < loaded.end);
    }
    Ok(kernel)
}

#[test]
fn impossible_headers_are_refused() {
    let max = &u64::MAX.to_le_bytes();
    let cases: [(&str, usize, &[u8]); 20] = [
        ("32-bit", 4, &[1]),
        ("big-endian", 5, &[2]),
        ("a library's object", 16, &[1]),
        ("another CPU", 18, &[183]),
        ("program headers at the end of the address space", 32, max),
        (
            "program headers beyond the file",
            32,
            &0x10_0000u64.to_le_bytes(),
        ),
        ("program headers of another size", 54, &[32]),
        ("no program headers", 56, &[0, 0]),
        ("too many program headers", 56, &[0xff, 0xff]),
        (
            "a segment beyond the file",
            P_OFFSET,
            &0x10_0000u64.to_le_bytes(),
        ),
        ("a segment that wraps in the file", P_OFFSET, max),
        (
            "a segment longer than the file",
            P_FILESZ,
            &0x1000u64.to_le_bytes(),
        ),
        (
            "a segment larger in the file than in memory",
            P_MEMSZ,
            &[1, 0, 0, 0, 0, 0, 0, 0],
        ),
        ("a segment that wraps in memory", P_MEMSZ, max),
        ("a segment in the hole", P_PADDR, &HOLE_START.to_le_bytes()),
        (
            "a segment in low memory, over the boot structures",
            P_PADDR,
            &[0; 8],
        ),
        ("a segment at the end of the address space", P_PADDR, max),
        ("an entry outside", E_ENTRY, &0x30_0000u64.to_le_bytes()),
        (
            "an entry at a virtual address",
            E_ENTRY,
            &(LOAD | 0xffff_ffff_8000_0000).to_le_bytes(),
        ),
        (
            "a segment above what is mapped",
            P_PADDR,
            &0x4000_0000u64.to_le_bytes(),
        ),
    ];
    parse(patched(0, b"\x7fELF")).expect("the fixture itself is fine");
    for (what, at, bytes) in cases {
        assert!(parse(patched(at, bytes)).is_err(), "{what}");
    }
}

#[test]
fn overlapping_segments_are_refused() {
    // The note segment becomes a second copy of the first one.
    let mut file = elf(&[0xf4; 64]);
    file.copy_within(64..120, 120);
    let error = parse(file).unwrap_err();
    assert!(error.to_string().contains("overlap at 0x200000"), "{error}");
}

#[test]
fn every_truncation_is_an_error() {
    let file = elf(&[0xf4; 64]);
    for len in 0..file.len() {
        assert!(parse(file[..len].to_vec()).is_err(), "{len} bytes");
    }
    let packed = zstd::encode_all(file.as_slice(), 1).unwrap();
    let image = bz_image(&packed);
    // The last four bytes are the unpacked length, which nobody needs; but the header counts them.
    for len in 0..image.len() {
        assert!(parse(image[..len].to_vec()).is_err(), "{len} bytes");
    }
}

#[test]
fn impossible_setup_headers_are_refused() {
    let file = elf(&[0xf4; 64]);
    let image = bz_image(&file);
    let cases: [(&str, usize, &[u8]); 6] = [
        ("no magic", 0x202, b"HdrX"),
        ("an old protocol", 0x206, &[0x07, 0x02]),
        ("more setup sectors than file", 0x1f1, &[255]),
        ("a payload at 4 GiB", 0x248, &[0xff; 4]),
        ("a payload of 4 GiB", 0x24c, &[0xff; 4]),
        ("no payload", 0x24c, &[0; 4]),
    ];
    parse(image.clone()).expect("the fixture itself is fine");
    for (what, at, bytes) in cases {
        let mut damaged = image.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        assert!(parse(damaged).is_err(), "{what}");
    }
}

#[test]
fn a_compressed_file_in_a_compressed_file_is_not_followed() {
    let inner = zstd::encode_all(elf(&[0xf4; 64]).as_slice(), 1).unwrap();
    let outer = zstd::encode_all(inner.as_slice(), 1).unwrap();
    assert!(parse(outer).is_err());
}

proptest! {
    #[test]
    fn flipped_bits_never_break_the_parser(
        flips in prop::collection::vec((0usize..SEGMENT_OFFSET + 64, 0u8..8), 1..6),
    ) {
        let mut file = elf(&[0xf4; 64]);
        for (at, bit) in flips {
            file[at] ^= 1 << bit;
        }
        let _ = parse(file);
    }

    #[test]
    fn overwritten_fields_never_break_the_parser(
        at in 0usize..SEGMENT_OFFSET - 8,
        value in prop_oneof![any::<u64>(), Just(0), Just(u64::MAX), (0u32..64).prop_map(|n| 1 << n)],
        width in 1usize..=8,
    ) {
        let _ = parse(patched(at, &value.to_le_bytes()[..width]));
    }

    #[test]
    fn damaged_bz_images_never_break_the_parser(
        at in 0usize..2048,
        bytes in prop::collection::vec(any::<u8>(), 1..8),
        format in 0..3,
    ) {
        let file = elf(&[0xf4; 64]);
        let payload = match format {
            0 => file,
            1 => zstd::encode_all(file.as_slice(), 1).unwrap(),
            _ => crate::kernel::xz(&file),
        };
        let mut image = bz_image(&payload);
        let at = at % (image.len() - bytes.len());
        image[at..at + bytes.len()].copy_from_slice(&bytes);
        let _ = parse(image);
    }

    #[test]
    fn random_bytes_are_no_kernel(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
        prop_assert!(parse(bytes).is_err());
    }
}
