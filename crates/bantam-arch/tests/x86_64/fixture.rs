//! Small kernels made by hand.

use bantam_arch::GuestRam;
use vm_memory::GuestAddress;

/// Where the fixture's only segment is loaded.
pub(crate) const LOAD: u64 = 0x20_0000;
/// Offset of the segment in the file.
pub(crate) const SEGMENT_OFFSET: usize = 0x100;
/// Offset of the note segment in the file.
pub(crate) const NOTES_OFFSET: usize = 0xb0;

/// An ELF kernel of one segment of `code` at [`LOAD`] with 4 KiB of bss, whose entry is its first
/// byte, and of notes, which are not loaded.
pub(crate) fn elf(code: &[u8]) -> Vec<u8> {
    let notes = note(b"GNU\0", 3, b"build");
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    for half in [2u16, 62] {
        file.extend(half.to_le_bytes()); // ET_EXEC, EM_X86_64
    }
    file.extend(1u32.to_le_bytes());
    for offset in [LOAD, 64, 0] {
        file.extend(offset.to_le_bytes()); // entry, program headers, section headers
    }
    file.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 2, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    let size = code.len() as u64;
    file.extend(program_header(
        1,
        SEGMENT_OFFSET as u64,
        LOAD,
        size,
        size + 4096,
    ));
    file.extend(program_header(
        4,
        NOTES_OFFSET as u64,
        0,
        notes.len() as u64,
        0,
    ));
    assert_eq!(file.len(), NOTES_OFFSET);
    file.extend(notes);
    assert!(file.len() <= SEGMENT_OFFSET);
    file.resize(SEGMENT_OFFSET, 0);
    file.extend(code);
    file
}

fn program_header(kind: u32, offset: u64, addr: u64, file_len: u64, mem_len: u64) -> Vec<u8> {
    let mut bytes = [kind.to_le_bytes(), 5u32.to_le_bytes()].concat();
    for value in [offset, addr, addr, file_len, mem_len, 4] {
        bytes.extend(value.to_le_bytes());
    }
    bytes
}

fn note(owner: &[u8], kind: u32, value: &[u8]) -> Vec<u8> {
    let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap().to_le_bytes();
    let mut bytes = [len(owner), len(value), kind.to_le_bytes()].concat();
    for part in [owner, value] {
        bytes.extend(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

/// A bzImage with one setup sector around a compressed kernel. As the kernel's build does, the
/// unpacked length follows the payload.
pub(crate) fn bz_image(payload: &[u8]) -> Vec<u8> {
    let mut payload = payload.to_vec();
    payload.extend(0x1234u32.to_le_bytes());
    let mut file = vec![0; 1024];
    file[0x1f1] = 1; // setup_sects
    file[0x202..0x206].copy_from_slice(b"HdrS");
    file[0x206..0x208].copy_from_slice(&0x020fu16.to_le_bytes());
    file[0x211] = 1; // loaded high
    let offset = 0x40u32; // of the payload, after the decompressor's start
    file[0x248..0x24c].copy_from_slice(&offset.to_le_bytes());
    let len = u32::try_from(payload.len()).unwrap();
    file[0x24c..0x250].copy_from_slice(&len.to_le_bytes());
    file.resize(1024 + 0x40, 0x90);
    file.extend(payload);
    file
}

/// `mib` MiB of guest RAM.
pub(crate) fn ram(mib: usize) -> GuestRam {
    GuestRam::from_ranges(&[(GuestAddress(0), mib << 20)]).unwrap()
}
