//! Kernel files, as bytes, and the loading of those that are accepted.

use std::sync::OnceLock;

use bantam_arch::x86_64::Kernel;
use vm_memory::{GuestAddress, GuestMemoryMmap};

/// Guest memory that accepted kernels are loaded into; it is never read.
const RAM: usize = 64 << 20;

pub fn run(data: &[u8]) {
    let Ok(kernel) = Kernel::from_bytes(data.to_vec()) else {
        return;
    };
    let source = kernel.unpacked().expect("it came as bytes").len() as u64;
    for segment in kernel.segments() {
        let end = segment.file_offset.checked_add(segment.file_len);
        assert!(end.is_some_and(|end| end <= source), "{segment:?}");
        assert!(segment.file_len <= segment.mem_len, "{segment:?}");
        assert!(
            segment.guest_addr.checked_add(segment.mem_len).is_some(),
            "{segment:?}"
        );
    }
    static MEMORY: OnceLock<GuestMemoryMmap<()>> = OnceLock::new();
    let ram = MEMORY.get_or_init(|| {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM)]).expect("64 MiB of memory")
    });
    if let Ok(loaded) = kernel.load(ram) {
        assert!(
            loaded.start <= loaded.entry && loaded.entry < loaded.end,
            "{loaded:?}"
        );
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let elf = elf();
    let zstd = zstd::encode_all(&elf[..], 1).unwrap_or_default();
    let mut image = vec![0; 1024];
    image[0x1f1] = 1;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    image[0x211] = 1;
    image[0x236] = 3;
    image[0x24c..0x250].copy_from_slice(&(zstd.len() as u32 + 4).to_le_bytes());
    image.extend_from_slice(&zstd);
    image.extend_from_slice(&(elf.len() as u32).to_le_bytes());
    vec![elf, zstd, image]
}

/// A 64-bit ELF file with one segment.
fn elf() -> Vec<u8> {
    const LOAD: u64 = 0x100_0000;
    let mut file = Vec::new();
    file.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    file.extend_from_slice(&2_u16.to_le_bytes());
    file.extend_from_slice(&62_u16.to_le_bytes());
    file.extend_from_slice(&1_u32.to_le_bytes());
    for n in [LOAD, 64, 0] {
        file.extend_from_slice(&n.to_le_bytes());
    }
    file.extend_from_slice(&0_u32.to_le_bytes());
    for n in [64_u16, 56, 1, 64, 0, 0] {
        file.extend_from_slice(&n.to_le_bytes());
    }
    let mut program = |kind: u32, flags: u32, fields: [u64; 6]| {
        file.extend_from_slice(&kind.to_le_bytes());
        file.extend_from_slice(&flags.to_le_bytes());
        for n in fields {
            file.extend_from_slice(&n.to_le_bytes());
        }
    };
    program(1, 5, [256, LOAD, LOAD, 64, 128, 4096]);
    file.resize(256, 0);
    file.resize(320, 0xf4);
    file
}
