//! Against agents that the tests play: honest ones, with the same crate as the real one, and
//! others.

mod existing;

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::thread;

use bantam_archive::unpack;
use bantam_protocol::{FileFailure, FileFailureKind, GuestExec, Kind, read_frame, write_frame};

use super::*;

/// A guest whose next stream leads to the test.
struct Fake(Mutex<Option<UnixStream>>);

impl Guest for Fake {
    fn connect(&self) -> Result<UnixStream, Error> {
        Ok(self.0.lock().unwrap().take().unwrap())
    }

    fn died(&self, what: String) -> Error {
        Error::Agent {
            what,
            reason: "hung up".into(),
        }
    }
}

/// A guest, and a thread that plays its agent after the request was read.
fn guest<T: Send + 'static>(
    play: impl FnOnce(HostExec<'static>, UnixStream) -> T + Send + 'static,
) -> (Fake, thread::JoinHandle<T>) {
    let (host, mut agent) = UnixStream::pair().unwrap();
    let player = thread::spawn(move || {
        let mut buffer = Vec::new();
        let frame = read_frame(&mut agent, &mut buffer).unwrap().unwrap();
        let request = match HostExec::decode(&frame).unwrap() {
            HostExec::ReadTree(request) => HostExec::ReadTree(request),
            HostExec::WriteTree(request) => HostExec::WriteTree(request),
            other => panic!("unexpected {other:?}"),
        };
        play(request, agent)
    });
    (Fake(Mutex::new(Some(host))), player)
}

fn say(agent: &mut UnixStream, message: &GuestExec<'_>) {
    // A host that refused the archive has hung up.
    let _ = agent.write_all(&message.encode().unwrap());
}

fn say_archive(agent: &mut UnixStream, archive: &[u8]) {
    for piece in archive.chunks(1000) {
        if write_frame(agent, Kind::Stdout, piece).is_err() {
            return;
        }
    }
    say(agent, &GuestExec::TreeDone(TreeSummary::default()));
}

/// A guest that answers with this archive.
fn sends(archive: Vec<u8>) -> (Fake, thread::JoinHandle<()>) {
    guest(move |_, mut agent| say_archive(&mut agent, &archive))
}

/// A guest that packs what is asked for from `root`.
fn honest(root: &Path) -> (Fake, thread::JoinHandle<()>) {
    let root = root.to_path_buf();
    guest(move |request, mut agent| {
        let HostExec::ReadTree(request) = request else {
            panic!("unexpected {request:?}");
        };
        // Joined by hand: the slash or dot at the end matters.
        let mut path = root.into_os_string();
        path.push(OsStr::from_bytes(&request.path));
        if request.path == b"/" {
            path.push(".");
        }
        let mut archive = Vec::new();
        let source = Source::open(Path::new(&path), request.follow_link).unwrap();
        pack(source, &mut archive).unwrap();
        say_archive(&mut agent, &archive);
    })
}

fn plant(root: &Path) {
    fs::create_dir_all(root.join("dir/sub")).unwrap();
    fs::write(root.join("dir/sub/file"), "content").unwrap();
    fs::write(root.join("file"), vec![7; 200_000]).unwrap();
    symlink("dir", root.join("link")).unwrap();
}

const OPTIONS: CopyOptions = CopyOptions {
    owners: false,
    follow_link: false,
};

#[test]
fn what_comes_out_lands_where_cp_would_put_it() {
    let root = tempfile::tempdir().unwrap();
    plant(root.path());
    for (from, to, result) in [
        ("file", "there", "there/file"),
        ("file", "there/", "there/file"),
        ("/file", "new", "new"),
        ("file", "old", "old"),
        ("file", "to-there/", "there/file"),
        ("file", "to-there/.", "there/file"),
        ("dir", "to-there/", "there/dir/sub/file"),
        ("dir/.", "to-there/", "there/sub/file"),
        ("file", "to-there/new", "there/new"),
        ("dir", "there", "there/dir/sub/file"),
        ("dir", "new", "new/sub/file"),
        ("dir/", "new/", "new/sub/file"),
        ("dir/.", "there", "there/sub/file"),
        ("dir/.", "new", "new/sub/file"),
        ("link/", "there", "there/link/sub/file"),
        ("/", "new", "new/dir/sub/file"),
    ] {
        let out = tempfile::tempdir().unwrap();
        fs::create_dir(out.path().join("there")).unwrap();
        fs::write(out.path().join("old"), "old").unwrap();
        symlink("there", out.path().join("to-there")).unwrap();
        symlink("old", out.path().join("to-old")).unwrap();
        symlink("none", out.path().join("to-none")).unwrap();
        let (guest, player) = honest(root.path());
        copy_out(&guest, Path::new(from), &out.path().join(to), &OPTIONS).unwrap();
        player.join().unwrap();
        let copied = fs::symlink_metadata(out.path().join(result));
        let size = copied
            .unwrap_or_else(|error| panic!("{from} to {to}: {error}"))
            .len();
        assert_eq!(size, if from.ends_with("file") { 200_000 } else { 7 });
        if to != "old" {
            let old = fs::read_to_string(out.path().join("old")).unwrap();
            assert_eq!(old, "old", "{from} to {to}");
        }
        assert!(!out.path().join("none").exists());
    }
    let out = tempfile::tempdir().unwrap();
    let (guest, player) = honest(root.path());
    copy_out(
        &guest,
        Path::new("link"),
        &out.path().join("copy"),
        &OPTIONS,
    )
    .unwrap();
    player.join().unwrap();
    assert_eq!(
        fs::read_link(out.path().join("copy")).unwrap(),
        Path::new("dir")
    );
    let (guest, player) = honest(root.path());
    let follow = CopyOptions {
        follow_link: true,
        ..OPTIONS
    };
    copy_out(
        &guest,
        Path::new("link"),
        &out.path().join("followed"),
        &follow,
    )
    .unwrap();
    player.join().unwrap();
    assert!(out.path().join("followed/sub/file").is_file());
}

#[test]
fn what_cp_would_refuse_is_refused() {
    let root = tempfile::tempdir().unwrap();
    plant(root.path());
    let out = tempfile::tempdir().unwrap();
    fs::write(out.path().join("old"), "old").unwrap();
    symlink("old", out.path().join("to-old")).unwrap();
    symlink("none", out.path().join("to-none")).unwrap();
    symlink(".", out.path().join("to-here")).unwrap();
    for (from, to) in [
        ("file", "to-here"),
        ("file", "to-old"),
        ("file", "to-none"),
        ("dir", "to-here"),
        ("dir/.", "to-here"),
        ("file", "to-old/"),
        ("dir", "to-old"),
        ("dir/.", "to-old"),
        ("dir/.", "to-old/"),
        ("file", "to-none/"),
        ("dir", "to-none"),
        ("dir", "to-none/"),
        ("dir/.", "to-none"),
        ("dir/.", "to-none/"),
        ("file", "missing/"),
        ("file", "missing/new"),
        ("file", "old/"),
        ("file", "old/new"),
        ("dir", "old"),
        ("dir", "missing/new"),
        ("dir/.", "old"),
        ("dir/.", "missing/new"),
    ] {
        let (guest, player) = honest(root.path());
        let error = copy_out(&guest, Path::new(from), &out.path().join(to), &OPTIONS).unwrap_err();
        assert!(matches!(error, Error::Archive(_)), "{error}");
        assert!(
            error.to_string().contains(out.path().to_str().unwrap()),
            "{error}"
        );
        drop(guest);
        player.join().unwrap();
    }
    let left: Vec<_> = fs::read_dir(out.path()).unwrap().collect();
    assert_eq!(left.len(), 4);
    assert_eq!(fs::read_to_string(out.path().join("old")).unwrap(), "old");
}

#[test]
fn a_guest_that_refuses_leaves_nothing_here() {
    let out = tempfile::tempdir().unwrap();
    let (guest, player) = guest(|_, mut agent| {
        let failure = FileFailure {
            kind: FileFailureKind::NotFound,
            message: "/none: not found".into(),
        };
        say(&mut agent, &GuestExec::FileFailed(failure));
    });
    let to = out.path().join("new");
    let error = copy_out(&guest, Path::new("none/."), &to, &OPTIONS).unwrap_err();
    player.join().unwrap();
    assert!(matches!(error, Error::File { .. }), "{error}");
    assert!(!to.exists());
}

#[test]
fn a_guest_that_dies_or_lies_is_an_error_and_not_a_copy() {
    let dir = tempfile::tempdir().unwrap();
    plant(dir.path());
    let mut whole = Vec::new();
    pack(
        Source::open(&dir.path().join("dir"), false).unwrap(),
        &mut whole,
    )
    .unwrap();
    // Up to the end of an entry, so that the archive alone could be whole.
    let half = whole[..512].to_vec();
    let (dying, player) = guest(move |_, mut agent| {
        write_frame(&mut agent, Kind::Stdout, &half).unwrap();
    });
    let to = dir.path().join("copy");
    let error = copy_out(&dying, Path::new("dir"), &to, &OPTIONS).unwrap_err();
    player.join().unwrap();
    assert!(matches!(error, Error::Agent { .. }), "{error}");
    let (lying, player) = guest(|_, mut agent| say(&mut agent, &GuestExec::FileDone));
    let error = copy_out(&lying, Path::new("dir"), &to, &OPTIONS).unwrap_err();
    player.join().unwrap();
    assert!(matches!(error, Error::Protocol(_)), "{error}");
}

/// One entry, byte by byte.
fn entry(flag: u8, name: &str, target: &str, content: &[u8]) -> Vec<u8> {
    let mut header = [0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..107].copy_from_slice(b"0007777");
    header[108..115].copy_from_slice(b"0000000");
    header[116..123].copy_from_slice(b"0000000");
    header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
    header[136..147].copy_from_slice(b"00000000001");
    header[148..156].copy_from_slice(b"        ");
    header[156] = flag;
    header[157..157 + target.len()].copy_from_slice(target.as_bytes());
    header[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    let mut bytes = [&header[..], content].concat();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

#[test]
fn nothing_a_hostile_guest_sends_is_made_outside_of_the_copy() {
    let file = |name| entry(b'0', name, "", b"pwned");
    let link = |name, target| entry(b'2', name, target, b"");
    let hard = |name, target| entry(b'1', name, target, b"");
    let archives = [
        file("../pwned"),
        file("copy/../../pwned"),
        file("/tmp/bantam-pwned"),
        [link("copy", ".."), file("copy/pwned")].concat(),
        [link("copy", "/tmp"), file("copy/bantam-pwned")].concat(),
        [
            entry(b'5', "copy", "", b""),
            link("copy/up", "../.."),
            file("copy/up/pwned"),
        ]
        .concat(),
        [
            entry(b'5', "copy", "", b""),
            hard("copy/stolen", "copy/../../secret"),
        ]
        .concat(),
        [
            entry(b'5', "copy", "", b""),
            hard("copy/stolen", "../secret"),
        ]
        .concat(),
        [
            entry(b'5', "copy", "", b""),
            hard("copy/stolen", "/etc/passwd"),
        ]
        .concat(),
        [entry(b'5', "copy", "", b""), hard("copy", "secret")].concat(),
        [entry(b'5', "copy", "", b""), file("..")].concat(),
        entry(b'0', "copy", "", b"x")[..512].to_vec(),
        vec![b'x'; 4096],
    ];
    for (number, archive) in archives.into_iter().enumerate() {
        for name in ["src", "src/."] {
            let out = tempfile::tempdir().unwrap();
            let dest = out.path().join("dest");
            fs::create_dir(&dest).unwrap();
            fs::write(dest.join("secret"), "secret").unwrap();
            let (guest, player) = sends(archive.clone());
            let to = if name == "src" {
                dest.join("copy")
            } else {
                dest.join("contents")
            };
            let result = copy_out(&guest, Path::new(name), &to, &OPTIONS);
            assert!(result.is_err(), "archive {number}");
            player.join().unwrap();
            let names: Vec<_> = fs::read_dir(out.path()).unwrap().collect();
            assert_eq!(names.len(), 1, "archive {number}: {names:?}");
            for entry in fs::read_dir(&dest).unwrap() {
                let name = entry.unwrap().file_name();
                assert!(
                    ["copy", "contents", "secret"]
                        .iter()
                        .any(|known| name == *known),
                    "archive {number}: {name:?}"
                );
            }
            let secret = fs::metadata(dest.join("secret")).unwrap();
            assert_eq!((secret.nlink(), secret.len()), (1, 6), "archive {number}");
        }
    }
    assert!(!Path::new("/tmp/bantam-pwned").exists());
}

/// Two copies to the same place, with the guest's answers.
fn twice(out: &Path, from: &str, first: Vec<u8>, second: Vec<u8>) -> Result<Copied, Error> {
    let mut last = None;
    for archive in [first, second] {
        let (guest, player) = sends(archive);
        last = Some(copy_out(&guest, Path::new(from), out, &OPTIONS));
        drop(guest);
        player.join().unwrap();
    }
    last.unwrap()
}

#[test]
fn a_link_to_a_file_that_the_first_copy_brought_does_not_lead_the_second_out() {
    let host = tempfile::tempdir().unwrap();
    let secret = host.path().join("bashrc");
    fs::write(&secret, "mine").unwrap();
    let work = host.path().join("work");
    fs::create_dir(&work).unwrap();
    let report = work.join("report.txt");
    let link = entry(b'2', "report.txt", secret.to_str().unwrap(), b"");
    let file = entry(b'0', "report.txt", "", b"pwned");
    for to in [&report, &work] {
        let error = twice(to, "/report.txt", link.clone(), file.clone()).unwrap_err();
        assert!(error.to_string().contains("symbolic link"), "{error}");
        assert_eq!(fs::read_to_string(&secret).unwrap(), "mine");
        assert_eq!(fs::read_link(&report).unwrap(), secret);
        fs::remove_file(&report).unwrap();
    }
}

#[test]
fn a_link_to_a_directory_that_the_first_copy_brought_does_not_lead_the_second_out() {
    let host = tempfile::tempdir().unwrap();
    let secret = host.path().join("ssh");
    fs::create_dir(&secret).unwrap();
    let work = host.path().join("work");
    fs::create_dir(&work).unwrap();
    let out = work.join("out");
    let link = entry(b'2', "out", secret.to_str().unwrap(), b"");
    let tree = [
        entry(b'5', "out", "", b""),
        entry(b'0', "out/keys", "", b"pwned"),
    ]
    .concat();
    let contents = [entry(b'5', ".", "", b""), entry(b'0', "keys", "", b"pwned")].concat();
    let file = entry(b'0', "out", "", b"pwned");
    for second in [tree, file] {
        let error = twice(&out, "/out", link.clone(), second).unwrap_err();
        assert!(error.to_string().contains("symbolic link"), "{error}");
        assert_eq!(fs::read_dir(&secret).unwrap().count(), 0);
        fs::remove_file(&out).unwrap();
    }
    let (guest, player) = sends(link);
    copy_out(&guest, Path::new("/out"), &out, &OPTIONS).unwrap();
    player.join().unwrap();
    let (guest, player) = sends(contents);
    let error = copy_out(&guest, Path::new("/out/."), &out, &OPTIONS).unwrap_err();
    assert!(error.to_string().contains("symbolic link"), "{error}");
    assert_eq!(fs::read_dir(&secret).unwrap().count(), 0);
    drop(guest);
    player.join().unwrap();
}

#[test]
fn devices_and_special_bits_of_a_guest_are_not_taken_over() {
    let out = tempfile::tempdir().unwrap();
    let archive = [
        entry(b'5', "x", "", b""),
        entry(b'3', "x/null", "", b""),
        entry(b'4', "x/disk", "", b""),
        entry(b'0', "x/setuid", "", b"x"),
    ]
    .concat();
    let (guest, player) = sends(archive);
    let to = out.path().join("copy");
    let copied = copy_out(&guest, Path::new("x"), &to, &OPTIONS).unwrap();
    player.join().unwrap();
    assert_eq!((copied.entries, copied.skipped), (2, 2));
    assert_eq!(fs::read_dir(&to).unwrap().count(), 1);
    // The guest's 07777, less the umask.
    let usual = out.path().join("usual");
    fs::create_dir(&usual).unwrap();
    let usual = fs::metadata(usual).unwrap().mode() & 0o7777;
    for path in [to.join("setuid"), to] {
        assert_eq!(fs::metadata(path).unwrap().mode() & 0o7777, usual);
    }
}

#[test]
fn a_tree_goes_in_as_a_whole_and_the_request_says_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    plant(dir.path());
    for (from, to, place) in [
        ("dir", "/a", Some(("dir", true))),
        ("file", "a", Some(("file", false))),
        ("link", "a/", Some(("link", false))),
        ("link/", "a", Some(("link", true))),
        ("dir/.", "a/.", None),
    ] {
        let out = tempfile::tempdir().unwrap();
        let into = out.path().to_path_buf();
        let (guest, player) = guest(move |request, mut agent| {
            let mut archive = Vec::new();
            let mut buffer = Vec::new();
            loop {
                let frame = read_frame(&mut agent, &mut buffer).unwrap().unwrap();
                match HostExec::decode(&frame).unwrap() {
                    HostExec::Stdin(bytes) => archive.extend_from_slice(bytes),
                    HostExec::StdinEof => break,
                    other => panic!("unexpected {other:?}"),
                }
            }
            let options = Unpack {
                place: Place::Below,
                must_be_directory: false,
                owners: false,
                umask: false,
                shown: &into,
            };
            let fd = fs::File::open(&into).unwrap().into();
            let summary = unpack(&mut &archive[..], fd, &options).unwrap();
            let summary = TreeSummary {
                entries: summary.entries,
                bytes: summary.bytes,
                skipped: 0,
            };
            say(&mut agent, &GuestExec::TreeDone(summary));
            request
        });
        let mut path = dir.path().as_os_str().to_owned();
        path.push("/");
        path.push(from);
        let copied = copy_in(&guest, Path::new(&path), Path::new(to), &OPTIONS).unwrap();
        assert!(copied.entries > 0);
        let HostExec::WriteTree(request) = player.join().unwrap() else {
            panic!("not a tree");
        };
        let expected = match place {
            Some((name, directory)) => TreePlace::One {
                name: name.into(),
                directory,
            },
            None => TreePlace::Directory,
        };
        assert_eq!(request.place, expected, "{from}");
        assert_eq!(
            request.path,
            format!("/{}", to.trim_start_matches('/')).into_bytes()
        );
        let made = match place {
            Some((name, _)) => out.path().join(name).symlink_metadata().is_ok(),
            None => out.path().join("sub/file").is_file(),
        };
        assert!(made, "{from}");
    }
}

#[test]
fn a_guest_that_stops_reading_says_why() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("large"), vec![0; 8 << 20]).unwrap();
    let (guest, player) = guest(|_, mut agent| {
        let failure = FileFailure {
            kind: FileFailureKind::NoSpace,
            message: "/a: the disk is full".into(),
        };
        say(&mut agent, &GuestExec::FileFailed(failure));
    });
    let error = copy_in(&guest, &dir.path().join("large"), Path::new("/a"), &OPTIONS).unwrap_err();
    player.join().unwrap();
    assert!(error.to_string().contains("the disk is full"), "{error}");
}

#[test]
fn what_cannot_be_read_here_is_named_and_never_ends_the_archive() {
    let (guest, player) = guest(|_, _| ());
    let error = copy_in(
        &guest,
        Path::new("/no/such/thing"),
        Path::new("/a"),
        &OPTIONS,
    );
    assert!(error.unwrap_err().to_string().contains("/no/such/thing"));
    // It was found before the guest was asked.
    assert!(guest.0.lock().unwrap().take().is_some());
    assert!(player.join().is_err());
}

#[test]
fn a_stream_passes_both_ways_as_it_is() {
    let archive = entry(b'0', "file", "", b"content");
    let (out, player) = sends(archive.clone());
    let mut got = Vec::new();
    copy_out_tar(&out, Path::new("/file"), &mut got, false).unwrap();
    player.join().unwrap();
    assert_eq!(got, archive);
    let (into, player) = guest(|request, mut agent| {
        let mut all = Vec::new();
        let mut buffer = Vec::new();
        while let Some(frame) = read_frame(&mut agent, &mut buffer).unwrap() {
            match HostExec::decode(&frame).unwrap() {
                HostExec::Stdin(bytes) => all.extend_from_slice(bytes),
                _ => break,
            }
        }
        say(&mut agent, &GuestExec::TreeDone(TreeSummary::default()));
        (request, all)
    });
    copy_in_tar(&into, &mut &archive[..], Path::new("dir")).unwrap();
    let (request, all) = player.join().unwrap();
    assert_eq!(all, archive);
    let expected = HostExec::WriteTree(WriteTree {
        path: b"/dir".to_vec(),
        place: TreePlace::Inside,
        owners: true,
    });
    assert_eq!(request, expected);
}
