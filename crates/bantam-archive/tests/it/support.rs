//! Trees to compare and archives made byte by byte.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bantam_archive::{Error, Place, Source, Summary, Unpack, pack, unpack};
use tar::{EntryType, Header};

/// For what would keep a disk busy.
pub(crate) fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| tempfile::tempdir().unwrap())
}

/// Packs a path into memory.
pub(crate) fn packed(path: &Path) -> (Vec<u8>, Summary) {
    let mut archive = Vec::new();
    let source = Source::open(path, false).unwrap();
    let summary = pack(source, &mut archive).unwrap();
    (archive, summary)
}

/// Unpacks into a directory with the names as they are.
pub(crate) fn unpacked(mut archive: &[u8], dir: &Path) -> Result<Summary, Error> {
    unpack(&mut archive, File::open(dir).unwrap().into(), &below(dir))
}

pub(crate) fn below(dir: &Path) -> Unpack<'_> {
    Unpack {
        place: Place::Below,
        must_be_directory: false,
        owners: false,
        umask: false,
        shown: dir,
    }
}

/// Everything about one thing in a tree that a copy must keep.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Thing {
    mode: u32,
    mtime: Option<(i64, i64)>,
    content: Vec<u8>,
    target: Option<PathBuf>,
    /// The first path of the same file.
    same_as: PathBuf,
}

/// Everything below `root`, by path.
pub(crate) fn tree(root: &Path) -> BTreeMap<PathBuf, Thing> {
    let mut things = BTreeMap::new();
    let mut inodes = BTreeMap::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(dir) = todo.pop() {
        let mut names: Vec<OsString> = std::fs::read_dir(root.join(&dir))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        for name in names {
            let path = dir.join(name);
            let full = root.join(&path);
            let metadata = full.symlink_metadata().unwrap();
            let kind = metadata.file_type();
            let same_as = if kind.is_file() {
                inodes.entry(metadata.ino()).or_insert(path.clone()).clone()
            } else {
                PathBuf::new()
            };
            let thing = Thing {
                mode: metadata.mode(),
                mtime: Some((metadata.mtime(), metadata.mtime_nsec())),
                content: if kind.is_file() {
                    std::fs::read(&full).unwrap()
                } else {
                    Vec::new()
                },
                target: std::fs::read_link(&full).ok(),
                same_as,
            };
            if kind.is_dir() {
                todo.push(path.clone());
            }
            things.insert(path, thing);
        }
    }
    things
}

/// Fails with the first difference.
pub(crate) fn assert_same(one: &Path, other: &Path) {
    let (one, other) = (tree(one), tree(other));
    for (path, thing) in &one {
        assert_eq!(Some(thing), other.get(path), "{}", path.display());
    }
    for path in other.keys() {
        assert!(one.contains_key(path), "{} is too much", path.display());
    }
}

/// Whether a program is there; says so if not.
pub(crate) fn has(program: &str) -> bool {
    let found = std::process::Command::new(program)
        .arg("--version")
        .output()
        .is_ok();
    if !found {
        println!("skipped: {program} is not installed");
    }
    found
}

/// An archive made entry by entry, however wrong.
#[derive(Default)]
pub(crate) struct Archive(pub(crate) Vec<u8>);

impl Archive {
    pub(crate) fn entry(self, kind: EntryType, name: &[u8], target: &[u8], content: &[u8]) -> Self {
        self.header(kind, name, target, content.len() as u64)
            .raw(content)
    }

    pub(crate) fn file(self, name: &str, content: &[u8]) -> Self {
        self.entry(EntryType::Regular, name.as_bytes(), b"", content)
    }

    pub(crate) fn dir(self, name: &str) -> Self {
        self.entry(EntryType::Directory, name.as_bytes(), b"", b"")
    }

    pub(crate) fn symlink(self, name: &str, target: &str) -> Self {
        self.entry(EntryType::Symlink, name.as_bytes(), target.as_bytes(), b"")
    }

    pub(crate) fn link(self, name: &str, target: &str) -> Self {
        self.entry(EntryType::Link, name.as_bytes(), target.as_bytes(), b"")
    }

    pub(crate) fn header(mut self, kind: EntryType, name: &[u8], target: &[u8], size: u64) -> Self {
        let mut header = Header::new_ustar();
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target);
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_mode(0o7777);
        header.set_uid(12_345);
        header.set_gid(12_345);
        header.set_mtime(1);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self
    }

    /// Bytes, padded to a block.
    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    /// A pax header with one record.
    pub(crate) fn pax(self, keyword: &str, value: &[u8]) -> Self {
        let mut record = Vec::new();
        let mut length = 0;
        loop {
            let text = [format!("{length} {keyword}=").as_bytes(), value, b"\n"].concat();
            if text.len() == length {
                record.extend(text);
                break;
            }
            length = text.len();
        }
        self.entry(EntryType::XHeader, b"pax", b"", &record)
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        self.0.extend([0; 1024]);
        self.0
    }
}
