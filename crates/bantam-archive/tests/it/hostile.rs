//! Archives made to reach outside, to hang, or to fill memory.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use bantam_archive::{Error, Place, Unpack, unpack};
use tar::EntryType;

use crate::support::{Archive, below, in_memory, tree, unpacked};

/// A destination, and beside it what no archive may touch.
struct Site(tempfile::TempDir);

impl Site {
    fn new() -> Self {
        let dir = in_memory();
        fs::create_dir_all(dir.path().join("outside/dir")).unwrap();
        fs::write(dir.path().join("outside/secret"), "secret").unwrap();
        fs::create_dir(dir.path().join("dest")).unwrap();
        // What a user may have there.
        symlink("../outside", dir.path().join("dest/way-out")).unwrap();
        symlink("../outside/secret", dir.path().join("dest/file-out")).unwrap();
        fs::write(dir.path().join("dest/mine"), "mine").unwrap();
        Self(dir)
    }

    fn dest(&self) -> std::path::PathBuf {
        self.0.path().join("dest")
    }

    /// Unpacks, and fails if anything outside is other than before.
    fn take(&self, archive: &[u8]) -> Result<(), Error> {
        let outside = self.0.path().join("outside");
        let before = tree(&outside);
        let links = fs::metadata(outside.join("secret")).unwrap().nlink();
        let result = unpacked(archive, &self.dest()).map(drop);
        assert_eq!(tree(&outside), before);
        assert_eq!(fs::metadata(outside.join("secret")).unwrap().nlink(), links);
        let beside: Vec<_> = fs::read_dir(self.0.path()).unwrap().collect();
        assert_eq!(beside.len(), 2, "{beside:?}");
        result
    }

    fn refuses(&self, archive: &[u8]) {
        assert!(self.take(archive).is_err());
    }
}

#[test]
fn names_that_lead_out_are_refused() {
    let outside = std::env::temp_dir().join("bantam-must-not-exist");
    for name in [
        "../outside/new",
        "..",
        "a/../../outside/new",
        "./../outside/new",
        "a/..",
        "/",
        "/tmp/bantam-must-not-exist",
        "//tmp/bantam-must-not-exist",
    ] {
        let site = Site::new();
        site.refuses(&Archive::default().file(name, b"x").end());
        site.refuses(&Archive::default().dir(name).end());
        site.refuses(&Archive::default().symlink(name, "x").end());
        let long = Archive::default().pax("path", name.as_bytes());
        site.refuses(&long.file("innocent", b"x").end());
        let long = [name.as_bytes(), b"\0"].concat();
        let long = Archive::default().entry(EntryType::GNULongName, b"long", b"", &long);
        site.refuses(&long.file("innocent", b"x").end());
        assert!(!site.dest().join("innocent").exists());
    }
    assert!(!outside.exists());
}

#[test]
fn links_of_the_archive_are_not_followed() {
    for target in ["../outside", "/", "..", "."] {
        let link = || Archive::default().symlink("link", target);
        let site = Site::new();
        site.refuses(&link().file("link/new", b"x").end());
        site.refuses(&link().dir("link/dir2").end());
        site.refuses(&link().dir("link").end());
        site.refuses(&link().file("link/outside/secret", b"x").end());
        site.refuses(&link().symlink("link/new", "x").end());
        site.refuses(&link().link("link/new", "mine").end());
        site.refuses(&link().link("stolen", "link/secret").end());
    }
    // A directory that becomes a link in the middle of it.
    let swapped = Archive::default()
        .dir("d")
        .file("d/one", b"1")
        .symlink("d", "../outside")
        .file("d/two", b"2");
    Site::new().refuses(&swapped.end());
}

#[test]
fn a_link_of_the_archive_is_replaced_by_a_file_and_not_written_through() {
    let site = Site::new();
    let archive = Archive::default()
        .symlink("link", "../outside/secret")
        .file("link", b"pwned");
    site.take(&archive.end()).unwrap();
    let link = site.dest().join("link");
    assert!(link.symlink_metadata().unwrap().is_file());
    assert_eq!(fs::read_to_string(link).unwrap(), "pwned");
}

#[test]
fn links_that_were_there_are_not_followed_either() {
    let site = Site::new();
    site.refuses(&Archive::default().file("way-out/new", b"x").end());
    site.refuses(&Archive::default().dir("way-out").end());
    site.refuses(&Archive::default().dir("way-out/dir").end());
    site.take(&Archive::default().file("file-out", b"new").end())
        .unwrap();
    assert!(
        site.dest()
            .join("file-out")
            .symlink_metadata()
            .unwrap()
            .is_file()
    );
}

#[test]
fn names_cannot_talk_to_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let name = "a\x1b[31m\nb";
    fs::create_dir(dir.path().join(name)).unwrap();
    let archives = [
        Archive::default().file(name, b"x").end(),
        Archive::default().file(&format!("{name}/../x"), b"x").end(),
    ];
    for archive in archives {
        let text = unpacked(&archive, dir.path()).unwrap_err().to_string();
        assert!(text.contains(r"a\u{1b}[31m\nb"), "{text}");
        assert!(!text.contains(char::is_control), "{text}");
    }
    let missing = bantam_archive::Source::open(Path::new("/none\x07"), false);
    assert_eq!(
        missing.unwrap_err().to_string(),
        r#"cannot copy "/none\u{7}": No such file or directory (os error 2)"#
    );
}

#[test]
fn hard_links_to_links_and_fifos_of_the_archive_are_made() {
    let dir = tempfile::tempdir().unwrap();
    let archive = Archive::default()
        .symlink("link", "/etc/passwd")
        .link("link2", "link")
        .entry(EntryType::Fifo, b"fifo", b"", b"")
        .link("fifo2", "fifo")
        .end();
    unpacked(&archive, dir.path()).unwrap();
    for (name, other) in [("link", "link2"), ("fifo", "fifo2")] {
        let inode = |name| dir.path().join(name).symlink_metadata().unwrap().ino();
        assert_eq!(inode(name), inode(other), "{name}");
    }
    assert!(dir.path().join("link2").is_symlink());
    // One that was there is not the archive's.
    let archive = Archive::default().link("link3", "link").end();
    assert!(unpacked(&archive, dir.path()).is_err());
}

#[test]
fn no_mode_goes_beyond_the_umask() {
    // In a process of its own, since a umask is all threads'.
    if std::env::var_os("BANTAM_ARCHIVE_UMASK").is_none() {
        let script = r#"umask 027; exec "$0" --exact hostile::no_mode_goes_beyond_the_umask"#;
        let status = std::process::Command::new("/bin/sh")
            .args(["-c", script])
            .arg(std::env::current_exe().unwrap())
            .env("BANTAM_ARCHIVE_UMASK", "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let archive = Archive::default()
        .file("implied/file", b"x")
        .dir("implied")
        .dir("dir")
        .file("dir/file", b"x")
        .entry(EntryType::Fifo, b"dir/fifo", b"", b"")
        .end();
    let options = Unpack {
        umask: true,
        ..below(dir.path())
    };
    // Twice: the second time the files are there.
    for _ in 0..2 {
        let fd = File::open(dir.path()).unwrap().into();
        unpack(&mut &archive[..], fd, &options).unwrap();
        for name in ["implied", "implied/file", "dir", "dir/file", "dir/fifo"] {
            let metadata = dir.path().join(name).symlink_metadata().unwrap();
            assert_eq!(metadata.mode() & 0o7777, 0o750, "{name}");
        }
    }
}

#[test]
fn hard_links_lead_only_to_what_the_archive_brought() {
    let site = Site::new();
    for target in [
        "mine",
        "file-out",
        "way-out/secret",
        "../outside/secret",
        "none",
        ".",
        "/etc/passwd",
    ] {
        site.refuses(&Archive::default().link("stolen", target).end());
        assert!(
            site.dest().join("stolen").symlink_metadata().is_err(),
            "{target}"
        );
    }
    let archive = Archive::default()
        .symlink("s", "../outside/secret")
        .link("s2", "s");
    // Another name of the link, and not of what it leads to.
    site.take(&archive.end()).unwrap();
    assert!(site.dest().join("s2").is_symlink());
    let archive = Archive::default().dir("d").link("stolen", "d");
    site.refuses(&archive.end());
    let archive = Archive::default()
        .file("f", b"x")
        .link("g", "f")
        .link("f", "g")
        .link("f", "f");
    site.take(&archive.end()).unwrap();
    assert_eq!(fs::read_to_string(site.dest().join("f")).unwrap(), "x");
    assert_eq!(fs::metadata(site.dest().join("g")).unwrap().nlink(), 2);
    assert_eq!(
        fs::read_to_string(site.dest().join("mine")).unwrap(),
        "mine"
    );
}

#[test]
fn devices_are_never_made_and_special_bits_never_set() {
    let site = Site::new();
    let archive = Archive::default()
        .entry(EntryType::Char, b"null", b"", b"")
        .entry(EntryType::Block, b"disk", b"", b"")
        .file("setuid", b"x")
        .dir("sticky")
        .entry(EntryType::Fifo, b"fifo", b"", b"")
        .symlink("link", "x");
    site.take(&archive.end()).unwrap();
    let dest = site.dest();
    assert!(!dest.join("null").exists() && !dest.join("disk").exists());
    let me = fs::metadata(&dest).unwrap().uid();
    for name in ["setuid", "sticky", "fifo", "link"] {
        let metadata = dest.join(name).symlink_metadata().unwrap();
        assert_eq!(metadata.mode() & 0o7000, 0, "{name}");
        assert_eq!(metadata.uid(), me, "{name}");
    }
}

#[test]
fn only_the_one_thing_asked_for_is_made() {
    let site = Site::new();
    let dest = site.dest();
    let place = Unpack {
        place: Place::As(OsStr::new("wanted")),
        ..below(&dest)
    };
    let take = |archive: Vec<u8>| {
        unpack(&mut &archive[..], File::open(&dest).unwrap().into(), &place).map(drop)
    };
    // Whatever it calls things, they are parts of the one.
    take(
        Archive::default()
            .dir("wanted")
            .file("mine/new", b"x")
            .end(),
    )
    .unwrap();
    assert!(dest.join("wanted/new").is_file());
    assert_eq!(fs::read_to_string(dest.join("mine")).unwrap(), "mine");
    assert!(take(Archive::default().file(".", b"x").end()).is_err());
    assert!(
        take(
            Archive::default()
                .dir("d")
                .link("d/stolen", "d/../mine")
                .end()
        )
        .is_err()
    );
    assert!(take(Archive::default().link("stolen", "mine").end()).is_err());
}

#[test]
fn lengths_are_bounded_before_anything_is_allocated() {
    let site = Site::new();
    let big = u64::from(u32::MAX) * 1000;
    for kind in [
        EntryType::XHeader,
        EntryType::XGlobalHeader,
        EntryType::GNULongName,
        EntryType::GNULongLink,
    ] {
        site.refuses(&Archive::default().header(kind, b"x", b"", big).end());
    }
    // A file may say what it likes; only what comes is written.
    let archive = Archive::default().header(EntryType::Regular, b"file", b"", u64::MAX / 2);
    site.refuses(&archive.end());
    assert!(
        !site.dest().join("file").exists(),
        "a part of a file is left"
    );
    // A link or a directory has no contents.
    for kind in [
        EntryType::Symlink,
        EntryType::Link,
        EntryType::Directory,
        EntryType::Fifo,
    ] {
        site.refuses(
            &Archive::default()
                .entry(kind, b"x", b"mine", b"contents")
                .end(),
        );
    }
    let long = vec![b'a'; 5000];
    site.refuses(&Archive::default().pax("path", &long).file("x", b"").end());
    site.refuses(
        &Archive::default()
            .pax("linkpath", &long)
            .symlink("x", "y")
            .end(),
    );
    let deep = "d/".repeat(2100);
    site.refuses(
        &Archive::default()
            .pax("path", deep.as_bytes())
            .file("x", b"")
            .end(),
    );
}

#[test]
fn malformed_archives_are_errors() {
    let site = Site::new();
    let good = Archive::default().file("f", b"contents").end();
    for cut in [1, 511, 513, 515] {
        site.refuses(&good[..cut]);
    }
    // An archive may lack its end, and its last padding.
    site.take(&good[..1024]).unwrap();
    site.take(&good[..520]).unwrap();
    site.take(&[]).unwrap();
    let mut damaged = good.clone();
    damaged[0] ^= 1;
    site.refuses(&damaged);
    site.refuses(&[0x1f; 2048]);
    site.refuses(
        &Archive::default()
            .entry(EntryType::new(b'S'), b"sparse", b"", b"")
            .end(),
    );
    site.refuses(
        &Archive::default()
            .entry(EntryType::new(b'Q'), b"what", b"", b"")
            .end(),
    );
    site.refuses(&Archive::default().symlink("s", "").end());
    site.refuses(&Archive::default().pax("path", b"a\0b").file("x", b"").end());
    site.refuses(
        &Archive::default()
            .pax("linkpath", b"a\0b")
            .symlink("x", "y")
            .end(),
    );
    site.refuses(
        &Archive::default()
            .pax("GNU.sparse.major", b"1")
            .file("x", b"")
            .end(),
    );
    for (keyword, value) in [
        ("size", "-1"),
        ("uid", "4294967295"),
        ("gid", "x"),
        ("mtime", "1e9"),
    ] {
        site.refuses(
            &Archive::default()
                .pax(keyword, value.as_bytes())
                .file("x", b"")
                .end(),
        );
    }
    // Extreme times are clamped by the filesystem.
    for mtime in [
        "9223372036854775807",
        "-9223372036854775808",
        "-0.000000001",
    ] {
        let archive = Archive::default()
            .pax("mtime", mtime.as_bytes())
            .file("x", b"");
        site.take(&archive.end()).unwrap();
    }
    site.refuses(&Archive::default().file("", b"x").end());
    site.refuses(&Archive::default().file("mine/below", b"x").end());
    site.refuses(&Archive::default().dir("d").file("d", b"x").end());
    assert_eq!(
        fs::read_to_string(site.dest().join("mine")).unwrap(),
        "mine"
    );
}

/// A stream that never ends.
struct Endless(io::Repeat);

impl Read for Endless {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

#[test]
fn an_archive_that_never_ends_is_cut_off_where_it_brings_nothing() {
    let site = Site::new();
    let dest = site.dest();
    let take = |stream: &mut dyn Read| {
        unpack(stream, File::open(&dest).unwrap().into(), &below(&dest)).map(drop)
    };
    assert!(take(&mut Endless(io::repeat(0))).is_err());
    let mut headers = Archive::default();
    for _ in 0..20 {
        headers = headers.pax("comment", b"x");
    }
    assert!(take(&mut headers.0.chain(io::repeat(0))).is_err());
}

#[test]
fn a_directory_closed_to_all_can_be_filled_and_is_closed_at_the_end() {
    let site = Site::new();
    let (archive, _) = {
        let from = tempfile::tempdir().unwrap();
        let dir = from.path().join("closed");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("file"), "x").unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o555)).unwrap();
        let packed = crate::support::packed(&dir);
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        packed
    };
    site.take(&archive).unwrap();
    let closed = site.dest().join("closed");
    assert_eq!(fs::metadata(&closed).unwrap().mode() & 0o777, 0o555);
    assert!(Path::new(&closed).join("file").is_file());
    // So that an ordinary user can remove it.
    fs::set_permissions(&closed, Permissions::from_mode(0o755)).unwrap();
}

/// The same numbers each time (xorshift64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).unwrap()
    }
}

#[test]
fn archives_with_anything_changed_are_errors_or_trees_and_touch_nothing_else() {
    let good = Archive::default()
        .dir("d")
        .file("d/f", b"contents")
        .symlink("d/s", "../../outside/secret")
        .link("d/g", "d/f")
        .pax("path", b"d/a longer name")
        .file("x", &[7; 700])
        .entry(EntryType::GNULongName, b"long", b"", b"way-out/new\0")
        .file("y", b"y")
        .entry(EntryType::Fifo, b"fifo", b"", b"")
        .file("mine", b"replaced")
        .end();
    // What a change is most likely to matter with.
    let bytes = b"\0/.017x\xff 2";
    let mut numbers = Numbers(0x1234_5678_9abc_def1);
    for _ in 0..1500 {
        let mut archive = good.clone();
        for _ in 0..=numbers.below(3) {
            let at = numbers.below(archive.len());
            archive[at] = if numbers.below(2) == 0 {
                bytes[numbers.below(bytes.len())]
            } else {
                u8::try_from(numbers.below(256)).unwrap()
            };
            // A header whose checksum is right again.
            if numbers.below(8) > 0 {
                let block = &mut archive[at / 512 * 512..][..512];
                block[148..156].fill(b' ');
                let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
                block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
            }
        }
        if numbers.below(4) == 0 {
            archive.truncate(numbers.below(archive.len()));
        }
        let _ = Site::new().take(&archive);
    }
}
