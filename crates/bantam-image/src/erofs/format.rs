//! The bytes of EROFS structures (Linux `fs/erofs/erofs_fs.h`).

/// The block size in bytes.
pub const BLOCK: u64 = 4096;
pub(super) const BLOCK_USIZE: usize = 4096;
const BLOCK_BITS: u8 = 12;

const SUPER_OFFSET: usize = 1024;
const MAGIC: u32 = 0xe0f5_e1e2;
const COMPAT_SB_CHECKSUM: u32 = 1;
const COMPAT_MTIME: u32 = 2;

/// Inode numbers count 32-byte slots from the start of the metadata area.
pub(super) const SLOT: u64 = 32;
pub(super) const INODE: usize = 64;
pub(super) const DIRENT: usize = 12;

/// How an inode's data is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Plain = 0,
    Inline = 2,
}

pub(super) struct Super {
    pub(super) root_nid: u16,
    pub(super) inodes: u64,
    pub(super) blocks: u32,
    pub(super) meta_block: u32,
    pub(super) uuid: [u8; 16],
}

impl Super {
    /// The whole first block.
    pub(super) fn encode(&self) -> [u8; BLOCK_USIZE] {
        let mut block = [0; BLOCK_USIZE];
        let sb = &mut block[SUPER_OFFSET..];
        put(sb, 0, &MAGIC.to_le_bytes());
        put(sb, 8, &(COMPAT_SB_CHECKSUM | COMPAT_MTIME).to_le_bytes());
        sb[12] = BLOCK_BITS;
        put(sb, 14, &self.root_nid.to_le_bytes());
        put(sb, 16, &self.inodes.to_le_bytes());
        // 24: build_time and 32: build_time_nsec stay 0, as all inodes carry their own time.
        put(sb, 36, &self.blocks.to_le_bytes());
        put(sb, 40, &self.meta_block.to_le_bytes());
        put(sb, 48, &self.uuid);
        let checksum = crc32c(sb);
        put(sb, 4, &checksum.to_le_bytes());
        block
    }
}

pub(super) struct Inode {
    pub(super) layout: Layout,
    pub(super) xattr_bytes: usize,
    pub(super) mode: u16,
    pub(super) size: u64,
    /// First data block, or the device number of a device node.
    pub(super) union: u32,
    pub(super) ino: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: i64,
    pub(super) mtime_ns: u32,
    pub(super) nlink: u32,
}

impl Inode {
    pub(super) fn encode(&self) -> [u8; INODE] {
        const EXTENDED: u16 = 1;
        let mut out = [0; INODE];
        put(
            &mut out,
            0,
            &(EXTENDED | ((self.layout as u16) << 1)).to_le_bytes(),
        );
        // A 12-byte header counts as one unit, the rest in units of 4 bytes.
        let count = match self.xattr_bytes {
            0 => 0,
            n => u16::try_from((n - 12) / 4 + 1).unwrap_or(u16::MAX),
        };
        put(&mut out, 2, &count.to_le_bytes());
        put(&mut out, 4, &self.mode.to_le_bytes());
        put(&mut out, 8, &self.size.to_le_bytes());
        put(&mut out, 16, &self.union.to_le_bytes());
        put(&mut out, 20, &self.ino.to_le_bytes());
        put(&mut out, 24, &self.uid.to_le_bytes());
        put(&mut out, 28, &self.gid.to_le_bytes());
        put(&mut out, 32, &self.mtime.to_le_bytes());
        put(&mut out, 40, &self.mtime_ns.to_le_bytes());
        put(&mut out, 44, &self.nlink.to_le_bytes());
        out
    }
}

/// One entry of a directory block.
pub(super) fn dirent(nid: u64, name_offset: u16, file_type: u8) -> [u8; DIRENT] {
    let mut out = [0; DIRENT];
    put(&mut out, 0, &nid.to_le_bytes());
    put(&mut out, 8, &name_offset.to_le_bytes());
    out[10] = file_type;
    out
}

/// Linux's 32-bit device number, of 12 bits major and 20 bits minor; `None` if they do not fit.
pub fn device(major: u32, minor: u32) -> Option<u32> {
    let fits = major <= 0xfff && minor <= 0xf_ffff;
    fits.then_some((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12))
}

fn put(out: &mut [u8], at: usize, bytes: &[u8]) {
    out[at..at + bytes.len()].copy_from_slice(bytes);
}

/// CRC-32C without the final inversion, as the kernel checks it. It covers 3 KiB once, so it needs no table.
fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc32c() {
        // The check value of CRC-32C, with its final inversion undone.
        assert_eq!(!crc32c(b"123456789"), 0xe306_9283);
    }
}
