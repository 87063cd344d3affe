//! Reads uncompressed EROFS images, as the kernel documents the format. Checks what it can on the way.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// One inode as seen at one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) nid: u64,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: (i64, u32),
    pub(crate) nlink: u32,
    pub(crate) size: u64,
    pub(crate) rdev: u32,
    pub(crate) xattrs: BTreeMap<String, Vec<u8>>,
    /// A file's contents (the first MiB) or a symlink's target.
    pub(crate) data: Vec<u8>,
}

impl Node {
    pub(crate) fn kind(&self) -> u32 {
        self.mode & 0o170_000
    }
    pub(crate) fn is_dir(&self) -> bool {
        self.kind() == 0o040_000
    }
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.data).into_owned()
    }
}

/// The image's files by path; the root is the empty path. Bytes that are not UTF-8 show as `\xNN`.
pub(crate) type Files = BTreeMap<String, Node>;

pub(crate) fn read_erofs(path: &Path) -> Files {
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len();
    assert_eq!(len % 4096, 0, "the image is not whole blocks");
    let mut sb = vec![0; 128];
    file.read_exact_at(&mut sb, 1024).unwrap();
    assert_eq!(u32_at(&sb, 0), 0xe0f5_e1e2, "magic");
    assert_eq!(u64::from(u32_at(&sb, 36)) * 4096, len, "block count");
    let image = Image {
        file,
        meta: u64::from(u32_at(&sb, 40)) * 4096,
    };
    let mut files = Files::new();
    let root = u64::from(u16_at(&sb, 14));
    image.walk(root, root, String::new(), &mut files);
    let mut nids: Vec<u64> = files.values().map(|n| n.nid).collect();
    nids.sort_unstable();
    nids.dedup();
    assert_eq!(nids.len() as u64, u64_at(&sb, 16), "inode count");
    for (path, node) in &files {
        if !node.is_dir() {
            let names = files.values().filter(|n| n.nid == node.nid).count();
            assert_eq!(names, node.nlink as usize, "link count of {path}");
        }
    }
    files
}

struct Image {
    file: File,
    meta: u64,
}

impl Image {
    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut buf = vec![0; len];
        self.file.read_exact_at(&mut buf, at).unwrap();
        buf
    }

    fn walk(&self, nid: u64, parent: u64, path: String, files: &mut Files) {
        let (node, content) = self.inode(nid);
        if node.is_dir() {
            let mut names = Vec::new();
            let mut subdirs = 0;
            for block in content.chunks(4096) {
                let count = usize::from(u16_at(block, 8)) / 12;
                for i in 0..count {
                    let entry = &block[i * 12..];
                    let start = usize::from(u16_at(entry, 8));
                    let end = if i + 1 < count {
                        usize::from(u16_at(&block[(i + 1) * 12..], 8))
                    } else {
                        block.len()
                    };
                    let name = &block[start..end];
                    let name = &name[..name.iter().position(|b| *b == 0).unwrap_or(name.len())];
                    names.push(name.to_vec());
                    let child = u64_at(entry, 0);
                    match name {
                        b"." => assert_eq!(child, nid, ". of {path}"),
                        b".." => assert_eq!(child, parent, ".. of {path}"),
                        name => {
                            let name = show(name);
                            let full = if path.is_empty() {
                                name
                            } else {
                                format!("{path}/{name}")
                            };
                            let (kind, _) = self.inode(child);
                            let want = [0, 5, 3, 0, 2, 0, 4, 0, 1, 0, 7, 0, 6]
                                [(kind.kind() >> 12) as usize];
                            assert_eq!(entry[10], want, "file type of {full}");
                            subdirs += u32::from(kind.is_dir());
                            self.walk(child, nid, full, files);
                        }
                    }
                }
            }
            assert_eq!(node.nlink, subdirs + 2, "link count of directory {path:?}");
            let mut sorted = names.clone();
            sorted.sort();
            assert_eq!(names, sorted, "order of names in {path:?}");
        }
        assert!(files.insert(path.clone(), node).is_none(), "{path} twice");
    }

    fn inode(&self, nid: u64) -> (Node, Vec<u8>) {
        let at = self.meta + nid * 32;
        let raw = self.read(at, 64);
        let format = u16_at(&raw, 0);
        assert_eq!(format & 1, 1, "only 64-byte inodes are written");
        let units = usize::from(u16_at(&raw, 2));
        let xattr_len = if units == 0 { 0 } else { 12 + 4 * (units - 1) };
        let mode = u32::from(u16_at(&raw, 4));
        let size = u64_at(&raw, 8);
        let union = u32_at(&raw, 16);
        let has_data = matches!(mode & 0o170_000, 0o040_000 | 0o100_000 | 0o120_000);
        let want = if mode & 0o170_000 == 0o040_000 {
            size
        } else {
            size.min(1 << 20)
        };
        let mut content = Vec::new();
        if has_data {
            match format >> 1 {
                0 => content = self.read(u64::from(union) * 4096, want as usize),
                2 => {
                    let blocks = size / 4096 * 4096;
                    content = self.read(u64::from(union) * 4096, blocks as usize);
                    let tail_at = at + 64 + xattr_len as u64;
                    let tail = (size - blocks) as usize;
                    assert!(
                        tail_at % 4096 + tail as u64 <= 4096,
                        "an inline tail crosses a block"
                    );
                    content.extend(self.read(tail_at, tail));
                }
                other => panic!("layout {other}"),
            }
        }
        let is_device = matches!(mode & 0o170_000, 0o020_000 | 0o060_000);
        let node = Node {
            nid,
            mode,
            uid: u32_at(&raw, 24),
            gid: u32_at(&raw, 28),
            mtime: (u64_at(&raw, 32) as i64, u32_at(&raw, 40)),
            nlink: u32_at(&raw, 44),
            size,
            rdev: if is_device { union } else { 0 },
            xattrs: self.xattrs(at + 64, xattr_len),
            data: if mode & 0o170_000 == 0o040_000 {
                Vec::new()
            } else {
                content.clone()
            },
        };
        (node, content)
    }

    fn xattrs(&self, at: u64, len: usize) -> BTreeMap<String, Vec<u8>> {
        let mut out = BTreeMap::new();
        if len == 0 {
            return out;
        }
        let raw = self.read(at, len);
        let mut rest = &raw[12..];
        while !rest.is_empty() {
            let (name_len, value_len) = (usize::from(rest[0]), usize::from(u16_at(rest, 2)));
            let prefix = match rest[1] {
                1 => "user.",
                2 => "system.posix_acl_access",
                3 => "system.posix_acl_default",
                4 => "trusted.",
                6 => "security.",
                other => panic!("xattr index {other}"),
            };
            let name = format!("{prefix}{}", show(&rest[4..4 + name_len]));
            out.insert(name, rest[4 + name_len..4 + name_len + value_len].to_vec());
            rest = &rest[(4 + name_len + value_len).next_multiple_of(4)..];
        }
        out
    }
}

pub(crate) fn show(name: &[u8]) -> String {
    match std::str::from_utf8(name) {
        Ok(text) => text.to_owned(),
        Err(_) => name
            .iter()
            .map(|b| {
                if b.is_ascii() {
                    char::from(*b).to_string()
                } else {
                    format!("\\x{b:02x}")
                }
            })
            .collect(),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}
