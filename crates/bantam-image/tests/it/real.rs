//! A real distribution through independent programs: umoci packs and unpacks it, the kernel or fsck.erofs reads it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use bantam_image::{Digest, ImageSource, NoProgress, ResolveOptions, Store};

use crate::common::{have, run, skipped};

/// A Debian root file system with Python, made once and kept outside the repository.
fn debian() -> Option<PathBuf> {
    let cache = PathBuf::from(std::env::var_os("HOME")?).join(".cache/bantam/test-images");
    let path = cache.join("minbase-python3.tar");
    if path.exists() {
        return Some(path);
    }
    if !have("mmdebstrap") {
        skipped("mmdebstrap is not installed");
        return None;
    }
    fs::create_dir_all(&cache).ok()?;
    let part = cache.join(format!("part-{}.tar", std::process::id()));
    let made = Command::new("mmdebstrap")
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .args([
            "--quiet",
            "--variant=minbase",
            "--include=python3",
            "bookworm",
        ])
        .arg(&part)
        .status();
    if !made.is_ok_and(|status| status.success()) {
        skipped("mmdebstrap cannot make a root file system here (no network, or no privilege)");
        let _ = fs::remove_file(&part);
        return None;
    }
    fs::rename(&part, &path).ok()?;
    Some(path)
}

/// All there is to compare about a file, but which files it is linked with.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    mode: u32,
    owner: (u32, u32),
    mtime: (i64, i64),
    rdev: u64,
    links: u64,
    content: String,
    xattrs: String,
    same_as: PathBuf,
}

fn walk(root: &Path) -> BTreeMap<PathBuf, Seen> {
    let mut out = BTreeMap::new();
    let mut first: BTreeMap<u64, PathBuf> = BTreeMap::new();
    let mut pending = vec![root.to_owned()];
    let mut paths = Vec::new();
    while let Some(path) = pending.pop() {
        if fs::symlink_metadata(&path).unwrap().is_dir() {
            pending.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
        paths.push(path);
    }
    paths.sort();
    for path in paths {
        let meta = fs::symlink_metadata(&path).unwrap();
        let relative = path.strip_prefix(root).unwrap().to_owned();
        let content = if meta.is_symlink() {
            fs::read_link(&path).unwrap().display().to_string()
        } else if meta.is_file() {
            Digest::of(&fs::read(&path).unwrap()).to_string()
        } else {
            String::new()
        };
        let mut names = vec![0; 4096];
        let n = rustix::fs::llistxattr(&path, &mut names[..]).unwrap_or(0);
        let mut xattrs: Vec<String> = names[..n]
            .split(|b| *b == 0)
            .filter(|name| !name.is_empty() && *name != b"user.rootlesscontainers")
            .map(|name| {
                let mut value = vec![0; 65_536];
                let n = rustix::fs::lgetxattr(&path, name, &mut value[..]).unwrap();
                format!("{}={:?}", String::from_utf8_lossy(name), &value[..n])
            })
            .collect();
        xattrs.sort();
        let same_as = if meta.is_dir() {
            relative.clone()
        } else {
            first
                .entry(meta.ino())
                .or_insert_with(|| relative.clone())
                .clone()
        };
        let seen = Seen {
            mode: meta.mode(),
            owner: (meta.uid(), meta.gid()),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            rdev: meta.rdev(),
            // File systems count a directory's links differently.
            links: if meta.is_dir() { 0 } else { meta.nlink() },
            content,
            xattrs: xattrs.join(","),
            same_as,
        };
        out.insert(relative, seen);
    }
    out
}

fn compare(what: &str, got: &BTreeMap<PathBuf, Seen>, want: &BTreeMap<PathBuf, Seen>) {
    for (path, seen) in want {
        assert_eq!(got.get(path), Some(seen), "{what}: {}", path.display());
    }
    let extra: Vec<_> = got
        .keys()
        .filter(|path| !want.contains_key(*path))
        .collect();
    assert!(extra.is_empty(), "{what}: {extra:?}");
    assert!(want.len() > 1000, "{what}: only {} files", want.len());
}

/// A mounted file system, until dropped.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_debian_image_is_file_for_file_what_umoci_unpacks() {
    if !rustix::process::geteuid().is_root() {
        return skipped("umoci keeps owners only for root");
    }
    if !have("umoci") || !have("fsck.erofs") {
        return skipped("umoci or fsck.erofs is not installed");
    }
    let Some(tar) = debian() else { return };
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let image = format!("{}:base", at("oci"));
    run("umoci", &["init", "--layout", &at("oci")]);
    run("umoci", &["new", "--image", &image]);
    run(
        "umoci",
        &["raw", "add-layer", "--image", &image, tar.to_str().unwrap()],
    );
    // A second layer, as umoci makes it: removes, replaces, adds, links.
    run("umoci", &["unpack", "--image", &image, &at("edit")]);
    let edit = dir.path().join("edit/rootfs");
    fs::remove_dir_all(edit.join("usr/share/doc")).unwrap();
    fs::remove_file(edit.join("etc/motd")).unwrap_or(());
    fs::write(edit.join("etc/hostname"), "changed").unwrap();
    fs::hard_link(edit.join("usr/bin/python3.11"), edit.join("opt/python")).unwrap();
    fs::create_dir(edit.join("srv/new")).unwrap();
    run(
        "setfattr",
        &[
            "-n",
            "user.note",
            "-v",
            "hello",
            edit.join("srv/new").to_str().unwrap(),
        ],
    );
    run("umoci", &["repack", "--image", &image, &at("edit")]);
    let arch = bantam_image::Platform::host().architecture;
    run(
        "umoci",
        &[
            "config",
            "--image",
            &image,
            "--architecture",
            &arch,
            "--os",
            "linux",
        ],
    );
    run(
        "umoci",
        &["raw", "unpack", "--image", &image, &at("oracle")],
    );

    let store = Store::open(&dir.path().join("store")).unwrap();
    let source = ImageSource::OciLayoutDir(dir.path().join("oci"));
    let image = store
        .resolve(&source, &ResolveOptions::default(), &NoProgress)
        .unwrap();
    let rootfs = image.rootfs.to_str().unwrap();
    run("fsck.erofs", &[rootfs]);
    let want = walk(Path::new(&at("oracle")));
    assert!(!want.contains_key(Path::new("usr/share/doc")));

    fs::create_dir(at("mnt")).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "erofs", "-o", "loop,ro", rootfs, &at("mnt")])
        .output();
    if mounted.is_ok_and(|out| out.status.success()) {
        let mounted = Mounted(at("mnt").into());
        compare("the kernel's view", &walk(&mounted.0), &want);
    } else {
        skipped("the kernel does not mount EROFS here; only fsck.erofs compares");
    }
    // fsck.erofs 1.5 restores no extended attributes, copies hard links, and loses set-id bits as it changes owners
    // after modes.
    run(
        "fsck.erofs",
        &[
            "--preserve",
            &format!("--extract={}", at("extracted")),
            rootfs,
        ],
    );
    let mut extracted = walk(Path::new(&at("extracted")));
    let mut want = want;
    for files in [&mut extracted, &mut want] {
        for (path, seen) in files.iter_mut() {
            seen.xattrs.clear();
            seen.links = 0;
            seen.mode &= !0o6000;
            seen.same_as.clone_from(path);
        }
    }
    compare("what fsck.erofs extracts", &extracted, &want);
}
