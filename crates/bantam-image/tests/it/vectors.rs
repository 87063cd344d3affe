//! The archives that Go and Python test with, as Python and bsdtar read them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::erofs::{Files, show};
use crate::common::{Layout, digest, have, skipped};

/// Archives that must be refused; Go's or Python's own tests say so too, or they are cut off.
const MALFORMED: [&str; 11] = [
    "issue10968.tar",
    "issue11169.tar",
    "issue12435.tar",
    "neg-size.tar",
    "pax-bad-hdr-file.tar",
    "pax-bad-mtime-file.tar",
    "pax-nul-path.tar",
    "pax-path-hdr.tar",
    "recursion.tar",
    "writer-big-long.tar",
    "writer-big.tar",
];

/// Contents are compared of files up to this size. Some sparse ones are of 60 GB.
const MOST: u64 = 1 << 20;

/// What there is to compare: by path, a file's size and digest or a link's target.
type Contents = BTreeMap<String, String>;

/// Debian's golang-1.19-src and libpython3.11-testsuite, and any others in `$BANTAM_TAR_VECTORS`.
fn vectors() -> Vec<PathBuf> {
    let dirs = [
        "/usr/share/go-1.19/src/archive/tar/testdata",
        "/usr/lib/python3.11/test",
    ];
    let mut paths: Vec<PathBuf> = std::env::var("BANTAM_TAR_VECTORS")
        .iter()
        .map(String::as_str)
        .chain(dirs)
        .flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten())
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "tar"))
        .collect();
    paths.sort();
    if paths.is_empty() {
        skipped("neither golang-1.19-src nor libpython3.11-testsuite is installed");
    }
    paths
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

/// The archive as this crate reads it.
fn read(path: &Path) -> Result<Files, bantam_image::Error> {
    let mut layout = Layout::new();
    layout.image(&[fs::read(path).unwrap()]);
    layout.files()
}

fn described(size: u64, bytes: &[u8]) -> String {
    match size {
        ..MOST => format!("{size} bytes, {}", digest(bytes)),
        _ => format!("{size} bytes"),
    }
}

fn contents(files: &Files) -> Contents {
    let mut contents = Contents::new();
    for (path, node) in files {
        match node.kind() {
            0o100_000 => contents.insert(path.clone(), described(node.size, &node.data)),
            0o120_000 => contents.insert(path.clone(), show(&node.data)),
            _ => None,
        };
    }
    contents
}

/// Files only; of links Python tells other targets.
fn as_python_reads(path: &Path) -> Contents {
    const LIST: &str = r"
import hashlib, sys, tarfile
for m in tarfile.open(sys.argv[1], errors='surrogateescape'):
    # Python takes the stored size for a sparse file's own where both are given.
    size = int(m.pax_headers.get('GNU.sparse.realsize', m.size))
    if m.isreg() and not m.name.endswith('/') and size < 1 << 20:
        data = tarfile.open(sys.argv[1]).extractfile(m).read()
        digest = hashlib.sha256(data[:size].ljust(size, b'\0')).hexdigest()
        name = m.name.encode('utf-8', 'surrogateescape')
        text = '%d bytes, sha256:%s' % (size, digest)
        sys.stdout.buffer.write(text.encode() + b'\0' + name + b'\0')
";
    let out = Command::new("python3")
        .args(["-c", LIST])
        .arg(path)
        .output();
    let out = out.unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{}: {text}", path.display());
    let mut contents = Contents::new();
    let fields: Vec<&[u8]> = out.stdout.split(|b| *b == 0).collect();
    for pair in fields.chunks_exact(2) {
        let name = show(pair[1]);
        let name = name.trim_start_matches("./").trim_start_matches('/');
        // Of two entries of one name the last is the file.
        contents.insert(name.to_owned(), String::from_utf8_lossy(pair[0]).into());
    }
    contents
}

#[test]
fn the_archives_that_go_and_python_test_with_are_read_as_python_reads_them() {
    if !have("python3") {
        return skipped("python3 is not installed");
    }
    for path in vectors() {
        let name = name_of(&path);
        let result = read(&path);
        if MALFORMED.contains(&&*name) {
            assert!(result.is_err(), "{name}");
            continue;
        }
        let files = result.unwrap_or_else(|e| panic!("{name}: {e}"));
        // Python takes the access time of GNU headers for a prefix of the name, and obeys global headers.
        if matches!(&*name, "gnu-incremental.tar" | "pax-global-records.tar") {
            let known = files.contains_key("test2/foo") || files.contains_key("file1");
            assert!(known, "{files:?}");
            continue;
        }
        let got = contents(&files);
        for (file, want) in as_python_reads(&path) {
            assert_eq!(got.get(&file), Some(&want), "{name}: {file}");
        }
    }
}

/// What bsdtar extracts, and what it complains of.
fn as_bsdtar_extracts(path: &Path) -> (Contents, String) {
    let dir = tempfile::tempdir().unwrap();
    let out = Command::new("bsdtar")
        .env("LC_ALL", "C.UTF-8")
        .args(["--no-same-owner", "--no-xattrs", "--no-acls", "-xf"])
        .arg(path)
        .arg("-C")
        .arg(dir.path())
        .output()
        .unwrap();
    let mut contents = Contents::new();
    let mut pending = vec![dir.path().to_owned()];
    while let Some(path) = pending.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let name = show(
            path.strip_prefix(dir.path())
                .unwrap()
                .as_os_str()
                .as_bytes(),
        );
        if meta.is_dir() {
            pending.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        } else if meta.is_symlink() {
            let target = fs::read_link(&path).unwrap();
            contents.insert(name, show(target.as_os_str().as_bytes()));
        } else if meta.is_file() {
            let mut bytes = Vec::new();
            let mut start = File::open(&path).unwrap().take(MOST);
            start.read_to_end(&mut bytes).unwrap();
            contents.insert(name, described(meta.len(), &bytes));
        }
    }
    (contents, String::from_utf8_lossy(&out.stderr).into())
}

#[test]
fn the_archives_that_go_and_python_test_with_are_read_as_bsdtar_reads_them() {
    if !have("bsdtar") {
        return skipped("bsdtar is not installed (libarchive-tools)");
    }
    // Here bsdtar is alone: Go and Python see a prefix in the one and a size of 14 in the other, too.
    const ALONE: [&str; 2] = ["invalid-go17.tar", "nil-uid.tar"];
    for path in vectors() {
        let name = name_of(&path);
        if MALFORMED.contains(&&*name) || ALONE.contains(&&*name) {
            continue;
        }
        let files = read(&path).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (want, said) = as_bsdtar_extracts(&path);
        assert_eq!(contents(&files), want, "{name}: {said}");
    }
}
