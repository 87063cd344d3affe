//! Real distributions through independent programs: mmdebstrap makes them, umoci packs and unpacks them, the tests' own
//! reader, the kernel and fsck.erofs read what is made of them.
//!
//! They take a minute each, and network the first time; `cargo xtask test` runs them in a suite of their own.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use bantam_image::{Digest, ImageSource, NoProgress, ResolveOptions, Store};
use tempfile::TempDir;

use crate::common::erofs::{read_erofs, show};
use crate::common::{Layout, Tar, have, run, skipped};

/// What mmdebstrap makes, once; kept outside the repository.
struct Debian {
    name: &'static str,
    options: &'static [&'static str],
}

const MINBASE: Debian = Debian {
    name: "minbase",
    options: &["--variant=minbase"],
};
const PYTHON: Debian = Debian {
    name: "minbase-python3",
    options: &["--variant=minbase", "--include=python3"],
};
const BUSYBOX: Debian = Debian {
    name: "busybox",
    options: &["--variant=extract", "--include=busybox-static,base-files"],
};
const PING: Debian = Debian {
    name: "ping",
    options: &["--variant=minbase", "--include=iputils-ping,libcap2-bin"],
};
const GIT: Debian = Debian {
    name: "git",
    options: &["--variant=extract", "--include=git,perl"],
};
const CERTIFICATES: Debian = Debian {
    name: "certificates",
    options: &["--variant=extract", "--include=ca-certificates,locales"],
};

impl Debian {
    /// The root file system as an archive; says so where there is none.
    fn archive(&self) -> Option<PathBuf> {
        let cache = PathBuf::from(std::env::var_os("HOME")?).join(".cache/bantam/test-images");
        let path = cache.join(format!("{}.tar", self.name));
        if path.exists() {
            return Some(path);
        }
        if !have("mmdebstrap") {
            skipped("mmdebstrap is not installed");
            return None;
        }
        fs::create_dir_all(&cache).ok()?;
        let part = cache.join(format!("part-{}-{}.tar", self.name, std::process::id()));
        let made = Command::new("mmdebstrap")
            .env("SOURCE_DATE_EPOCH", "1700000000")
            .args(["--quiet", "--format=tar"])
            .args(self.options)
            .arg("bookworm")
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

    /// The image `oci:x` in a temporary folder, of one layer.
    fn image(&self) -> Option<Made> {
        if !rustix::process::geteuid().is_root() {
            skipped("umoci keeps owners only for root");
            return None;
        }
        for program in ["umoci", "fsck.erofs", "setfattr"] {
            if !have(program) {
                skipped(&format!("{program} is not installed"));
                return None;
            }
        }
        let tar = self.archive()?;
        let made = Made {
            dir: tempfile::tempdir().unwrap(),
        };
        run("umoci", &["init", "--layout", &made.at("oci")]);
        made.umoci(&["new"], &[]);
        made.umoci(&["raw", "add-layer"], &[tar.to_str().unwrap()]);
        Some(made)
    }
}

/// An image in the making.
pub(crate) struct Made {
    pub(crate) dir: TempDir,
}

impl Made {
    pub(crate) fn at(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn umoci(&self, command: &[&str], args: &[&str]) {
        let image = format!("{}:x", self.at("oci"));
        run("umoci", &[command, &["--image", &image], args].concat());
    }

    /// Adds a layer with whiteouts, an opaque directory, and entries of each kind in place of others; `file` is one
    /// of the image's to link to.
    fn edit(&self, file: &str) {
        let layer = Tar::new()
            .hard_link("srv/linked", file)
            .whiteout("usr/share/doc")
            .file("etc/hostname", "changed\n")
            .dir("opt")
            .symlink("opt/link", "../etc/hostname")
            .file("var/cache/of-this-layer", "stays")
            .opaque("var/cache")
            .file("usr/share/now-a-file", "1")
            .pax(&[("SCHILY.xattr.user.note", b"a\0b")])
            .file("srv/noted", "xattr")
            .finish();
        fs::write(self.at("edit.tar"), layer).unwrap();
        self.umoci(&["raw", "add-layer"], &[&self.at("edit.tar")]);
        // Layers as umoci makes them.
        fs::create_dir_all(self.at("new/sub")).unwrap();
        fs::write(self.at("new/sub/file"), "inserted").unwrap();
        self.umoci(
            &["insert"],
            &["--opaque", &self.at("new"), "/usr/share/perl5"],
        );
        self.umoci(&["insert"], &["--whiteout", "/usr/share/now-a-file"]);
    }

    /// Compares what this crate makes of the image with what umoci unpacks, which is returned.
    fn check(&self, at_least: usize) -> Tree {
        let arch = bantam_image::Platform::host().architecture;
        self.umoci(&["config"], &["--architecture", &arch, "--os", "linux"]);
        let store = Store::open(&self.dir.path().join("store")).unwrap();
        let source = ImageSource::OciLayoutDir(self.at("oci").into());
        let image = store
            .resolve(&source, &ResolveOptions::default(), &NoProgress)
            .unwrap();
        self.compare(&image.rootfs, at_least)
    }

    /// Compares an image's file system with what umoci unpacks of `oci:x`, which is returned.
    pub(crate) fn compare(&self, rootfs: &Path, at_least: usize) -> Tree {
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        self.umoci(&["raw", "unpack"], &[&self.at("oracle")]);
        let mut want = walk(&self.at("oracle"));
        // Directories whose times umoci leaves as its own work made them: that of the root, and of those that lost
        // or got entries without being an entry of that layer.
        let touched: Vec<String> = want
            .iter()
            .filter(|(_, seen)| seen.is_dir() && seen.mtime.0 >= began.as_secs() as i64)
            .map(|(path, _)| path.clone())
            .collect();
        assert!(touched.len() < 10, "umoci lost the times of {touched:?}");
        let without_touched = |mut files: Tree| {
            for path in &touched {
                files.get_mut(path).unwrap().mtime = (0, 0);
            }
            files
        };
        want = without_touched(want);
        assert!(want.len() > at_least, "only {} files", want.len());

        let image = rootfs.to_str().unwrap();
        run("fsck.erofs", &[image]);

        let mut heads = want.clone();
        heads.values_mut().for_each(|seen| seen.content.clear());
        compare("the tests' reader", &without_touched(read(rootfs)), &heads);

        fs::create_dir(self.at("mnt")).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "erofs", "-o", "loop,ro", image, &self.at("mnt")])
            .output();
        if mounted.is_ok_and(|out| out.status.success()) {
            let mounted = Mounted(self.at("mnt"));
            compare("the kernel", &without_touched(walk(&mounted.0)), &want);
        } else {
            // Not a skipped test: two other readers compare everything between them.
            println!("the kernel does not mount EROFS here");
        }
        // fsck.erofs 1.5 restores no extended attributes, copies hard links, and loses set-id bits as it changes
        // owners after modes.
        let extract = format!("--extract={}", self.at("extracted"));
        run("fsck.erofs", &["--preserve", &extract, image]);
        let mut extracted = without_touched(walk(&self.at("extracted")));
        let mut plain = want.clone();
        for files in [&mut extracted, &mut plain] {
            for (path, seen) in files.iter_mut() {
                seen.xattrs.clear();
                seen.links = 0;
                seen.mode &= !0o6000;
                seen.same_as.clone_from(path);
            }
        }
        compare("what fsck.erofs extracts", &extracted, &plain);
        want
    }
}

/// All there is to compare about a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    mtime: (i64, i64),
    pub(crate) rdev: u64,
    links: u64,
    size: u64,
    /// A link's target; the digest of a file's first MiB.
    pub(crate) head: String,
    /// The digest of all of a file.
    content: String,
    pub(crate) xattrs: Vec<String>,
    /// The first of the names that the file has.
    pub(crate) same_as: String,
}

impl Seen {
    fn is_dir(&self) -> bool {
        self.mode >> 12 == 0o4
    }
}

/// Files by path.
pub(crate) type Tree = BTreeMap<String, Seen>;

/// The most of a file that the tests' reader returns.
const HEAD: u64 = 1 << 20;

/// Fills in `same_as`, from what identifies each file.
fn with_links(files: BTreeMap<String, (u64, Seen)>) -> Tree {
    let mut first: BTreeMap<u64, String> = BTreeMap::new();
    files
        .into_iter()
        .map(|(path, (inode, mut seen))| {
            seen.same_as = first.entry(inode).or_insert_with(|| path.clone()).clone();
            (path, seen)
        })
        .collect()
}

fn walk(root: &str) -> Tree {
    let root = Path::new(root);
    let mut files = BTreeMap::new();
    let mut pending = vec![root.to_owned()];
    while let Some(path) = pending.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            pending.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
        let name = show(path.strip_prefix(root).unwrap().as_os_str().as_bytes());
        files.insert(name, (meta.ino(), seen(&path, &meta)));
    }
    with_links(files)
}

fn seen(path: &Path, meta: &fs::Metadata) -> Seen {
    let (mut head, mut content) = (String::new(), String::new());
    if meta.is_symlink() {
        head = show(fs::read_link(path).unwrap().as_os_str().as_bytes());
    } else if meta.is_file() {
        let mut bytes = Vec::new();
        File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
        content = Digest::of(&bytes).to_string();
        bytes.truncate(HEAD as usize);
        head = Digest::of(&bytes).to_string();
    }
    let mut names = vec![0; 4096];
    let n = rustix::fs::llistxattr(path, &mut names[..]).unwrap_or(0);
    let mut xattrs: Vec<String> = names[..n]
        .split(|b| *b == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let mut value = vec![0; 65_536];
            let n = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
            format!("{}={:?}", show(name), &value[..n])
        })
        .collect();
    xattrs.sort();
    Seen {
        mode: meta.mode(),
        owner: (meta.uid(), meta.gid()),
        mtime: (meta.mtime(), meta.mtime_nsec()),
        rdev: meta.rdev(),
        // File systems count a directory's links, and its size, differently.
        links: if meta.is_dir() { 0 } else { meta.nlink() },
        size: if meta.is_dir() { 0 } else { meta.len() },
        head,
        content,
        xattrs,
        same_as: String::new(),
    }
}

/// The same of an image, with the tests' reader; without the contents beyond the first MiB.
fn read(image: &Path) -> Tree {
    let files = read_erofs(image).into_iter().map(|(path, node)| {
        let dir = node.is_dir();
        let xattrs = node.xattrs.iter().map(|(name, v)| format!("{name}={v:?}"));
        let seen = Seen {
            mode: node.mode,
            owner: (node.uid, node.gid),
            mtime: (node.mtime.0, node.mtime.1.into()),
            rdev: node.rdev.into(),
            links: if dir { 0 } else { node.nlink.into() },
            size: if dir { 0 } else { node.size },
            head: match node.kind() {
                0o120_000 => show(&node.data),
                0o100_000 => Digest::of(&node.data).to_string(),
                _ => String::new(),
            },
            content: String::new(),
            xattrs: xattrs.collect(),
            same_as: String::new(),
        };
        (path, (node.nid, seen))
    });
    with_links(files.collect())
}

fn compare(what: &str, got: &Tree, want: &Tree) {
    for (path, seen) in want {
        assert_eq!(got.get(path), Some(seen), "{what}: {path}");
    }
    let extra: Vec<_> = got
        .keys()
        .filter(|path| !want.contains_key(*path))
        .collect();
    assert!(extra.is_empty(), "{what}: {extra:?}");
}

/// A mounted file system, until dropped.
struct Mounted(String);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_layer_is_what_bsdtar_unpacks() {
    if !rustix::process::geteuid().is_root() {
        return skipped("bsdtar keeps owners and makes devices only for root");
    }
    if !have("bsdtar") {
        return skipped("bsdtar is not installed (libarchive-tools)");
    }
    for debian in [MINBASE, PYTHON, BUSYBOX, PING, GIT, CERTIFICATES] {
        let Some(tar) = debian.archive() else { return };
        let mut layout = Layout::new();
        layout.image(&[fs::read(&tar).unwrap()]);
        let (image, _store) = layout.resolve(&ResolveOptions::default()).unwrap();

        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().to_str().unwrap();
        // Its own environment, as names that are not ASCII are lost without.
        let out = Command::new("bsdtar")
            .env("LC_ALL", "C.UTF-8")
            .args(["--numeric-owner", "-xpf", tar.to_str().unwrap(), "-C", to])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{}: {said}", debian.name);
        let mut want = walk(to);
        assert!(want.len() > 50, "{}: only {}", debian.name, want.len());
        want.values_mut().for_each(|seen| seen.content.clear());
        let mut got = read(&image.rootfs);
        // The directory that it unpacks into is not bsdtar's to change the time of.
        got.get_mut("").unwrap().mtime = want[""].mtime;
        compare(debian.name, &got, &want);
    }
}

#[test]
fn a_minimal_debian_is_what_umoci_unpacks() {
    let Some(image) = MINBASE.image() else { return };
    image.edit("usr/bin/perl");
    let files = image.check(1000);
    assert!(!files.contains_key("usr/share/doc"));
    assert_eq!(files["srv/linked"].same_as, "srv/linked");
    assert_eq!(files["usr/bin/perl"].same_as, "srv/linked");
    assert!(files.contains_key("var/cache/of-this-layer"));
    assert!(!files.contains_key("var/cache/apt"));
    assert!(files["usr/bin/su"].mode & 0o4000 != 0, "su is not setuid");
}

#[test]
fn a_debian_with_python_repacked_by_umoci_is_what_umoci_unpacks() {
    let Some(image) = PYTHON.image() else { return };
    // A second layer, as umoci makes it: removes, replaces, adds, links.
    image.umoci(&["unpack"], &[&image.at("edit")]);
    let edit = PathBuf::from(image.at("edit/rootfs"));
    fs::remove_dir_all(edit.join("usr/share/doc")).unwrap();
    fs::remove_file(edit.join("etc/motd")).unwrap_or(());
    fs::write(edit.join("etc/hostname"), "changed").unwrap();
    fs::hard_link(edit.join("usr/bin/python3.11"), edit.join("opt/python")).unwrap();
    fs::create_dir(edit.join("srv/new")).unwrap();
    let new = edit.join("srv/new");
    let args = ["-n", "user.note", "-v", "hello", new.to_str().unwrap()];
    run("setfattr", &args);
    image.umoci(&["repack"], &[&image.at("edit")]);
    let files = image.check(1000);
    assert!(!files.contains_key("usr/share/doc"));
    assert_eq!(files["srv/new"].xattrs.len(), 1);
}

#[test]
fn a_busybox_image_is_what_umoci_unpacks() {
    let Some(image) = BUSYBOX.image() else { return };
    image.edit("bin/busybox");
    image.check(50);
}

#[test]
fn capabilities_of_files_are_what_umoci_unpacks() {
    let Some(image) = PING.image() else { return };
    image.edit("usr/bin/perl");
    let files = image.check(1000);
    let ping = ["bin/ping", "usr/bin/ping"].iter().find_map(|path| {
        let seen = files.get(*path)?;
        Some(
            seen.xattrs
                .iter()
                .any(|x| x.starts_with("security.capability=")),
        )
    });
    assert_eq!(ping, Some(true), "ping has no capability to compare");
}

#[test]
fn hard_links_and_symlinks_are_what_umoci_unpacks() {
    let Some(image) = GIT.image() else { return };
    image.edit("usr/bin/git");
    let files = image.check(1000);
    let linked = files.iter().filter(|(path, seen)| **path != seen.same_as);
    assert!(linked.count() >= 3, "too few hard links to compare");
    let links = files.values().filter(|seen| seen.mode >> 12 == 0o12);
    assert!(links.count() > 100, "too few symlinks to compare");
}

#[test]
fn names_that_are_not_ascii_are_what_umoci_unpacks() {
    let Some(image) = CERTIFICATES.image() else {
        return;
    };
    image.edit("usr/sbin/locale-gen");
    let files = image.check(500);
    let foreign = files.keys().filter(|path| !path.is_ascii());
    assert!(foreign.count() > 0, "no such name to compare");
}
