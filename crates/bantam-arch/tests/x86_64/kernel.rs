//! What kernels are recognised, and what ends up in guest memory.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bantam_arch::x86_64::{Format, Kernel, MapFile, Segment};
use bantam_arch::{ArchError, GuestRam};
use vm_memory::{Bytes, GuestAddress};

use crate::fixture::{LOAD, SEGMENT_OFFSET, bz_image, elf, ram};

const CODE: &[u8] = b"the kernel's first segment";

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 19).unwrap()
}

/// As the kernel's build does it: with the x86 filter and a CRC-32.
pub(crate) fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut options = lzma_rust2::XzOptions::with_preset(6);
    options.set_check_sum_type(lzma_rust2::CheckType::Crc32);
    options.prepend_pre_filter(lzma_rust2::FilterType::BcjX86, 0);
    let mut writer = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
    writer.write_all(bytes).unwrap();
    writer.finish().unwrap()
}

fn check_loaded(kernel: &Kernel) {
    let ram = ram(4);
    let loaded = kernel.load(&ram).unwrap();
    assert_eq!(loaded.entry, GuestAddress(LOAD));
    assert_eq!(loaded.start, GuestAddress(LOAD));
    assert_eq!(loaded.end, GuestAddress(LOAD + CODE.len() as u64 + 4096));
    let mut bytes = vec![0; CODE.len() + 1];
    ram.read_slice(&mut bytes, loaded.start).unwrap();
    assert_eq!(&bytes[..CODE.len()], CODE);
    assert_eq!(
        bytes[CODE.len()],
        0,
        "what follows the segment in the file is not loaded"
    );
}

#[test]
fn a_kernel_is_loaded_whatever_follows_it_in_the_file() {
    let mut file = elf(CODE);
    file.extend(b"section headers or anything");
    let kernel = Kernel::from_bytes(file).unwrap();
    assert_eq!(kernel.format(), Format::Elf);
    let segment = Segment {
        file_offset: SEGMENT_OFFSET as u64,
        file_len: CODE.len() as u64,
        guest_addr: LOAD,
        mem_len: CODE.len() as u64 + 4096,
        writable: false,
    };
    assert_eq!(kernel.segments(), [segment]);
    check_loaded(&kernel);
}

#[test]
fn an_elf_file_is_loaded_straight_from_disk() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&elf(CODE)).unwrap();
    let kernel = Kernel::open(file.path()).unwrap();
    check_loaded(&kernel);
    check_loaded(&kernel); // again, for the next machine

    // The file is cut off after it was found sane.
    file.as_file().set_len(SEGMENT_OFFSET as u64 + 3).unwrap();
    assert!(matches!(
        kernel.load(&ram(4)),
        Err(ArchError::Kernel { .. })
    ));
}

#[test]
fn compressed_kernels_are_unpacked_on_the_host() {
    let plain = elf(CODE);
    for (name, packed) in [
        ("gzip", gzip(&plain)),
        ("zstd", zstd(&plain)),
        ("xz", xz(&plain)),
    ] {
        let kernel = Kernel::from_bytes(packed.clone()).unwrap();
        assert_eq!(kernel.format(), Format::CompressedElf, "{name}");
        check_loaded(&kernel);
        let kernel = Kernel::from_bytes(bz_image(&packed)).unwrap();
        assert_eq!(kernel.format(), Format::BzImage, "{name}");
        check_loaded(&kernel);
    }
    let uncompressed = Kernel::from_bytes(bz_image(&plain)).unwrap();
    check_loaded(&uncompressed);
}

#[test]
fn a_compression_that_is_not_supported_is_named() {
    let error = Kernel::from_bytes(bz_image(&[0x02, 0x21, 0x4c, 0x18, 0, 0])).unwrap_err();
    assert!(error.to_string().contains("compressed with lz4"), "{error}");
}

#[test]
fn a_kernel_that_is_larger_than_ram_is_refused() {
    let kernel = Kernel::from_bytes(elf(CODE)).unwrap();
    assert!(matches!(
        kernel.load(&ram(2)),
        Err(ArchError::Memory { .. })
    ));
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let missing = Kernel::open(Path::new("/nonexistent/vmlinux")).unwrap_err();
    assert!(
        missing.to_string().contains("/nonexistent/vmlinux"),
        "{missing}"
    );
    assert!(matches!(
        Kernel::open(Path::new("/")),
        Err(ArchError::KernelFile { .. })
    ));
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4096).unwrap();
    let error = Kernel::open(file.path()).unwrap_err().to_string();
    assert!(error.contains(file.path().to_str().unwrap()), "{error}");
    assert!(error.contains("neither an ELF file"), "{error}");
}

/// Kernels of a distribution or of our own: what `BANTAM_TEST_KERNELS` lists (separated by colons),
/// and what is installed in `/boot`.
#[test]
fn real_kernels_are_understood() {
    let mut paths: Vec<PathBuf> = std::env::var_os("BANTAM_TEST_KERNELS")
        .map(|list| std::env::split_paths(&list).collect())
        .unwrap_or_default();
    if let Ok(boot) = std::fs::read_dir("/boot") {
        let kernels = boot.flatten().map(|entry| entry.path());
        paths.extend(kernels.filter(|path| path.to_string_lossy().contains("/vmlinu")));
    }
    if paths.is_empty() {
        println!("skipped: no kernel in /boot and none in BANTAM_TEST_KERNELS");
    }
    for path in paths {
        let kernel = Kernel::open(&path).unwrap();
        let loaded = kernel.load(&ram(256)).unwrap();
        println!("{}: {:?}, {loaded:x?}", path.display(), kernel.format());
        assert_eq!(
            loaded.start,
            GuestAddress(16 << 20),
            "where Linux links itself to"
        );
        assert!(loaded.end > loaded.entry);
    }
}

/// Maps nothing, but shows in memory what it was asked to map, unless it refuses.
struct Marker {
    ram: GuestRam,
    refuse: bool,
}

impl MapFile for Marker {
    fn map(&self, _: &File, offset: u64, at: GuestAddress, len: usize) -> io::Result<bool> {
        if !self.refuse {
            assert_eq!((offset % 4096, at.0 % 4096, len % 4096), (0, 0, 0));
            self.ram.write_slice(&vec![0x77; len], at).unwrap();
        }
        Ok(!self.refuse)
    }
}

/// The fixture's kernel with its segment at a page's beginning and with these flags.
fn page_aligned(code: &[u8], flags: u32) -> Vec<u8> {
    let mut file = elf(code);
    file.splice(
        SEGMENT_OFFSET..SEGMENT_OFFSET,
        vec![0; 4096 - SEGMENT_OFFSET],
    );
    file[68..72].copy_from_slice(&flags.to_le_bytes());
    file[72..80].copy_from_slice(&4096u64.to_le_bytes());
    file
}

#[test]
fn whole_pages_that_a_kernel_only_reads_are_mapped_and_all_else_is_copied() {
    const READ_EXECUTE: u32 = 5;
    const READ_WRITE_EXECUTE: u32 = 7;
    let code = [0x5a; 2 * 4096 + 100];
    for (flags, refuse, whole) in [
        (READ_EXECUTE, false, 0x77),
        (READ_EXECUTE, true, 0x5a),
        (READ_WRITE_EXECUTE, false, 0x5a),
    ] {
        let ram = ram(4);
        let marker = Marker {
            ram: ram.clone(),
            refuse,
        };
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&page_aligned(&code, flags)).unwrap();
        let kernel = Kernel::open(file.path()).unwrap();
        kernel.load_with(&ram, &marker).unwrap();
        let mut loaded = [0; 2 * 4096 + 100];
        ram.read_slice(&mut loaded, GuestAddress(LOAD)).unwrap();
        assert_eq!(loaded[..2 * 4096], [whole; 2 * 4096], "{flags} {refuse}");
        assert_eq!(loaded[2 * 4096..], [0x5a; 100], "{flags} {refuse}");
    }
}
