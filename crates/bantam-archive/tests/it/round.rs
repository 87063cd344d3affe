//! What goes in comes out, also through other programs.

use std::ffi::OsStr;
use std::fs::{self, File, FileTimes, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use bantam_archive::{Error, Place, Source, Summary, Unpack, pack, unpack};

use crate::support::{assert_same, below, has, in_memory, packed, tree, unpacked};

/// A tree with one of everything that a copy keeps.
fn plant(root: &Path) {
    let write = |name: &[u8], content: &[u8]| {
        let path = root.join(OsStr::from_bytes(name));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    write(b"empty", b"");
    write(b"small", b"small");
    write(b"block", &[1; 512]);
    for size in [65_535, 65_536, 65_537, 1_000_000] {
        write(format!("of-{size}").as_bytes(), &vec![7; size]);
    }
    write(b"not-\xff\xfe-utf8/with\nnewline", b"x");
    write(
        &[b"long/".as_slice(), &[b'n'; 200], b"/", &[b'm'; 255]].concat(),
        b"x",
    );
    write(&[b"exactly/".as_slice(), &[b'h'; 92]].concat(), b"x");
    write(
        "d/".repeat(150).as_bytes().strip_suffix(b"/").unwrap(),
        b"deep",
    );
    symlink("small", root.join("link")).unwrap();
    symlink("/no/such/thing", root.join("dangling")).unwrap();
    symlink("t".repeat(300), root.join("long-link")).unwrap();
    fs::hard_link(root.join("small"), root.join("second-name")).unwrap();
    fs::hard_link(
        root.join("small"),
        root.join(OsStr::from_bytes(
            &[b"long/".as_slice(), &[b'k'; 200]].concat(),
        )),
    )
    .unwrap();
    assert!(
        Command::new("mkfifo")
            .arg(root.join("fifo"))
            .status()
            .unwrap()
            .success()
    );
    let set = |name: &str, mode, seconds: i64, nanos| {
        let path = root.join(name);
        let file = File::open(&path).unwrap();
        let offset = Duration::new(seconds.unsigned_abs(), 0);
        let time = if seconds < 0 {
            UNIX_EPOCH - offset
        } else {
            UNIX_EPOCH + offset
        };
        let time = time + Duration::new(0, nanos);
        file.set_times(FileTimes::new().set_modified(time)).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    };
    set("empty", 0o600, 0, 0);
    set("block", 0o444, -1, 0);
    set("of-65536", 0o755, 4_000_000_000, 1);
    set("long", 0o711, 1_000_000_000, 999_999_999);
    set("exactly", 0o700, -86_400, 0);
}

#[test]
fn a_tree_with_one_of_everything_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    fs::create_dir(&from).unwrap();
    fs::create_dir(&to).unwrap();
    plant(&from);
    let (archive, sent) = packed(&from.join("."));
    let got = unpacked(&archive, &to).unwrap();
    assert_same(&from, &to);
    // The directory itself is in the archive, and there already.
    assert_eq!(sent.entries, got.entries + 1);
    assert_eq!((sent.bytes, sent.skipped), (got.bytes, 0));
    // Again, over what is there; directories that are there keep their own times.
    let whole = |path: &Path| fs::read(path.join("of-1000000")).unwrap();
    fs::write(to.join("of-1000000"), "other").unwrap();
    unpacked(&archive, &to).unwrap();
    assert_eq!(whole(&from), whole(&to));
    let paths = |root: &Path| tree(root).into_keys().collect::<Vec<_>>();
    assert_eq!(paths(&from), paths(&to));
}

#[test]
fn other_programs_read_what_is_packed() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    fs::create_dir(&from).unwrap();
    plant(&from);
    let archive = dir.path().join("archive.tar");
    fs::write(&archive, packed(&from).0).unwrap();
    for program in ["tar", "bsdtar"] {
        if !has(program) {
            continue;
        }
        let to = dir.path().join(program);
        fs::create_dir(&to).unwrap();
        let extract = Command::new(program)
            .arg("-xpf")
            .arg(&archive)
            .arg("-C")
            .arg(&to)
            .env("LC_ALL", "C.UTF-8")
            .output()
            .unwrap();
        assert!(extract.status.success(), "{extract:?}");
        assert_same(&from, &to.join("from"));
    }
}

#[test]
fn what_other_programs_pack_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    fs::create_dir(&from).unwrap();
    plant(&from);
    // These formats keep neither nanoseconds nor times before 1970.
    let whole = |path: &Path| {
        let time = UNIX_EPOCH + Duration::from_secs(1_000_000);
        if path.is_file() || path.is_dir() {
            File::open(path)
                .unwrap()
                .set_times(FileTimes::new().set_modified(time))
                .unwrap();
        }
    };
    for (program, format, fine) in [
        ("tar", "posix", true),
        ("bsdtar", "pax", true),
        ("tar", "gnu", false),
    ] {
        if !has(program) {
            continue;
        }
        if !fine {
            for name in ["empty", "small", "block", "of-65536", "long", "exactly"] {
                whole(&from.join(name));
            }
        }
        let to = dir.path().join(format!("{program}-{format}"));
        fs::create_dir(&to).unwrap();
        let made = Command::new(program)
            .arg(format!("--format={format}"))
            .args(["-cf", "-", "-C"])
            .arg(&from)
            .arg(".")
            .env("LC_ALL", "C.UTF-8")
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        unpacked(&made.stdout, &to).unwrap();
        if fine {
            assert_same(&from, &to);
        } else {
            let count = |dir: &Path| tree(dir).len();
            assert_eq!(count(&from), count(&to));
        }
    }
}

#[test]
fn a_real_tree_comes_back() {
    let real = Path::new("/usr/share/doc");
    if !real.is_dir() {
        println!("skipped: there is no {}", real.display());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (archive, _) = packed(&real.join("."));
    unpacked(&archive, dir.path()).unwrap();
    assert_same(real, dir.path());
}

#[test]
fn a_hundred_thousand_files_are_no_problem() {
    let dir = in_memory();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    for outer in 0..100 {
        let inner = from.join(outer.to_string());
        fs::create_dir_all(&inner).unwrap();
        for name in 0..1000 {
            File::create(inner.join(name.to_string())).unwrap();
        }
    }
    let (archive, sent) = packed(&from);
    assert_eq!(sent.entries, 100_101);
    let got = unpacked(&archive, &to).unwrap();
    assert_eq!(got.entries, 100_101);
    assert!(to.join("from/99/999").is_file());
}

/// Counts what is written to it.
#[derive(Default)]
struct Count {
    total: u64,
    first: Vec<u8>,
}

impl Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.first.len() < 512 {
            self.first.extend_from_slice(&bytes[..bytes.len().min(512)]);
        }
        self.total += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_file_larger_than_a_header_can_say_in_octal_goes_whole() {
    let dir = in_memory();
    let path = dir.path().join("large");
    let size = (8 << 30) + 5;
    File::create(&path).unwrap().set_len(size).unwrap();
    let mut count = Count::default();
    let time = UNIX_EPOCH + Duration::from_secs(1);
    File::open(&path)
        .unwrap()
        .set_times(FileTimes::new().set_modified(time))
        .unwrap();
    let summary = pack(Source::open(&path, false).unwrap(), &mut count).unwrap();
    assert_eq!(summary.bytes, size);
    assert_eq!(count.total, size.next_multiple_of(512) + 3 * 512);
    let header = tar::Header::from_byte_slice(&count.first[..512]);
    assert_eq!(header.entry_size().unwrap(), size);
    // And in the other direction, as far as the header goes.
    let error = unpacked(&count.first, &dir.path().join(".")).unwrap_err();
    assert!(matches!(error, Error::Archive { .. }), "{error}");
}

#[test]
fn a_path_means_what_it_means_to_cp() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    fs::create_dir(root.join("dir")).unwrap();
    fs::write(root.join("dir/file"), "x").unwrap();
    symlink("dir", root.join("link")).unwrap();
    symlink("dir/file", root.join("file-link")).unwrap();
    let names = |path: &str, follow| {
        let mut archive = Vec::new();
        let source = Source::open(&root.join(path), follow)?;
        pack(source, &mut archive)?;
        let mut entries = tar::Archive::new(&archive[..]);
        let names = entries.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            let kind = entry.header().entry_type().as_byte() as char;
            format!("{kind} {}", entry.path().unwrap().display())
        });
        Ok::<_, Error>(names.collect::<Vec<_>>().join(", "))
    };
    assert_eq!(names("dir", false).unwrap(), "5 dir/, 0 dir/file");
    assert_eq!(names("dir/", false).unwrap(), "5 dir/, 0 dir/file");
    assert_eq!(names("dir/.", false).unwrap(), "5 ./, 0 file");
    assert_eq!(names("dir/./.", false).unwrap(), "5 ./, 0 file");
    assert_eq!(names("dir/file", false).unwrap(), "0 file");
    assert_eq!(names("link", false).unwrap(), "2 link");
    assert_eq!(names("link", true).unwrap(), "5 link/, 0 link/file");
    assert_eq!(names("link/", false).unwrap(), "5 link/, 0 link/file");
    assert_eq!(names("link/.", false).unwrap(), "5 ./, 0 file");
    assert_eq!(names("file-link", false).unwrap(), "2 file-link");
    assert_eq!(names("file-link", true).unwrap(), "0 file-link");
    for missing in ["none", "dir/file/", "file-link/", "none/.", "dir/file/."] {
        let error = names(missing, false).unwrap_err();
        assert!(
            error.to_string().contains(missing.trim_end_matches("/.")),
            "{error}"
        );
    }
}

#[test]
fn the_one_thing_gets_the_name_it_is_to_have() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    fs::create_dir(&from).unwrap();
    fs::create_dir(&to).unwrap();
    plant(&from);
    let (archive, _) = packed(&from);
    let place = Unpack {
        place: Place::As(OsStr::new("new")),
        ..below(&to)
    };
    unpack(&mut &archive[..], File::open(&to).unwrap().into(), &place).unwrap();
    assert_same(&from, &to.join("new"));
    let (file, _) = packed(&from.join("small"));
    let directory = Unpack {
        must_be_directory: true,
        ..place
    };
    let error = unpack(&mut &file[..], File::open(&to).unwrap().into(), &directory).unwrap_err();
    assert!(error.to_string().contains("to/new"), "{error}");
    // A directory does not become a file, nor a file a directory.
    for (archive, name) in [(&archive, "file"), (&file, "new")] {
        fs::write(to.join("file"), "kept").unwrap();
        let place = Unpack {
            place: Place::As(OsStr::new(name)),
            ..below(&to)
        };
        let result = unpack(&mut &archive[..], File::open(&to).unwrap().into(), &place);
        assert!(result.is_err(), "{name}");
    }
    assert_eq!(fs::read_to_string(to.join("file")).unwrap(), "kept");
}

#[test]
fn sockets_and_devices_are_left_out_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    fs::create_dir(&from).unwrap();
    let _listener = UnixListener::bind(from.join("socket")).unwrap();
    fs::write(from.join("file"), "x").unwrap();
    let (archive, summary) = packed(&from);
    let expected = Summary {
        entries: 2,
        bytes: 1,
        skipped: 1,
    };
    assert_eq!(summary, expected);
    assert!(!archive.windows(6).any(|bytes| bytes == b"socket"));
}

#[test]
fn files_of_the_kernel_are_taken_at_their_true_size_and_its_filesystems_are_not() {
    let (archive, summary) = packed(Path::new("/proc/version"));
    let version = fs::read("/proc/version").unwrap();
    assert_eq!(summary.bytes, version.len() as u64);
    assert!(archive.windows(version.len()).any(|bytes| bytes == version));
    // Says 4096 and is shorter.
    let (_, summary) = packed(Path::new("/sys/kernel/mm/transparent_hugepage/enabled"));
    assert!(summary.bytes < 4096);
}

#[test]
fn owners_and_special_bits_are_kept_only_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    fs::create_dir(&from).unwrap();
    fs::create_dir(&to).unwrap();
    fs::write(from.join("file"), "x").unwrap();
    let root = fs::metadata(&from).unwrap().uid() == 0;
    if root {
        std::os::unix::fs::chown(from.join("file"), Some(4321), Some(4321)).unwrap();
    }
    fs::set_permissions(from.join("file"), Permissions::from_mode(0o6755)).unwrap();
    fs::set_permissions(&from, Permissions::from_mode(0o1777)).unwrap();
    let (archive, _) = packed(&from);
    unpacked(&archive, &to).unwrap();
    let file = fs::metadata(to.join("from/file")).unwrap();
    assert_eq!(file.mode() & 0o7777, 0o755);
    assert_ne!(file.uid(), 4321);
    assert_eq!(
        fs::metadata(to.join("from")).unwrap().mode() & 0o7777,
        0o777
    );
    if !root {
        println!("skipped: only root can give files away");
        return;
    }
    let kept = Unpack {
        owners: true,
        ..below(&to)
    };
    fs::remove_dir_all(to.join("from")).unwrap();
    unpack(&mut &archive[..], File::open(&to).unwrap().into(), &kept).unwrap();
    assert_same(&from, &to.join("from"));
    let file = fs::metadata(to.join("from/file")).unwrap();
    assert_eq!((file.uid(), file.gid()), (4321, 4321));
}
