//! Copies of a file to where something is already.

use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::time::{Duration, SystemTime};

use rustix::fs::{CWD, mkfifoat};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::*;
use crate::testing::names;

const CONTENT: &str = "content";

/// Copies a file of these contents, and of the name `file`, to `to`.
fn copy_file(to: &Path) -> Result<Copied, Error> {
    copy_named("file", to, &OPTIONS)
}

fn copy_named(name: &str, to: &Path, options: &CopyOptions) -> Result<Copied, Error> {
    let (guest, player) = sends(entry(b'0', name, "", CONTENT.as_bytes()));
    let result = copy_out(&guest, Path::new(name), to, options);
    drop(guest);
    player.join().unwrap();
    result
}

/// Copies an archive that does not hold one file, which must fail.
fn copy_other(archive: Vec<u8>, to: &Path) -> Error {
    let (guest, player) = sends(archive);
    let error = copy_out(&guest, Path::new("file"), to, &OPTIONS).unwrap_err();
    drop(guest);
    player.join().unwrap();
    error
}

/// How this process calls what it has open.
fn by_descriptor(fd: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

fn make_fifo(path: &Path) {
    mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
}

#[test]
fn a_file_that_is_there_keeps_what_it_is_and_gets_new_contents() {
    for to in ["there/file", "there", "to-there/"] {
        let out = tempfile::tempdir().unwrap();
        fs::create_dir(out.path().join("there")).unwrap();
        symlink("there", out.path().join("to-there")).unwrap();
        let (file, other) = (out.path().join("there/file"), out.path().join("other"));
        fs::write(&file, "longer than what comes").unwrap();
        fs::hard_link(&file, &other).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        let before = fs::metadata(&file).unwrap();
        let copied = copy_file(&out.path().join(to)).unwrap();
        assert_eq!((copied.entries, copied.bytes), (1, 7), "{to}");
        let after = fs::metadata(&file).unwrap();
        assert_eq!((after.ino(), after.nlink()), (before.ino(), 2), "{to}");
        assert_eq!((after.mode() & 0o7777, after.uid()), (0o600, before.uid()));
        assert_eq!(fs::read_to_string(&other).unwrap(), CONTENT, "{to}");
        // The time of the guest's file, as with every copy.
        let second = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        assert_eq!(after.modified().unwrap(), second);
        assert_eq!(names(&out.path().join("there")), ["file"], "{to}");
    }
}

#[test]
fn a_guests_contents_do_not_run_as_the_owner_of_a_file_that_was_there() {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("file");
    fs::write(&file, "old").unwrap();
    let mode = || fs::metadata(&file).unwrap().mode() & 0o7777;
    fs::set_permissions(&file, Permissions::from_mode(0o6755)).unwrap();
    copy_file(&file).unwrap();
    assert_eq!(mode(), 0o755);
    // Owners and all bits are kept if the user asks for it: the guest's.
    if rustix::process::geteuid().is_root() {
        let owners = CopyOptions {
            owners: true,
            ..OPTIONS
        };
        copy_named("file", &file, &owners).unwrap();
        assert_eq!(mode(), 0o7777);
    }
}

#[test]
fn a_copy_that_fails_leaves_the_file_that_was_there() {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("file");
    fs::write(&file, "old").unwrap();
    // Contents that end in the middle, by the end of the stream and by the guest's death.
    let half = entry(b'0', "file", "", &[b'x'; 4096])[..2048].to_vec();
    copy_other(half.clone(), &file);
    let (dying, player) = guest(move |_, mut agent| {
        write_frame(&mut agent, Kind::Stdout, &half).unwrap();
    });
    let error = copy_out(&dying, Path::new("file"), &file, &OPTIONS).unwrap_err();
    player.join().unwrap();
    assert!(matches!(error, Error::Agent { .. }), "{error}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "old");
    assert_eq!(names(out.path()), ["file"]);
}

#[test]
fn a_file_is_written_where_none_can_be_made_beside_it() {
    // The name of this process.
    copy_named("comm", Path::new("/proc/self/comm"), &OPTIONS).unwrap();
    assert_eq!(fs::read_to_string("/proc/self/comm").unwrap(), "content\n");
}

#[test]
fn a_fifo_passes_the_contents_on_and_stays() {
    for to in ["there/file", "there"] {
        let out = tempfile::tempdir().unwrap();
        fs::create_dir(out.path().join("there")).unwrap();
        let fifo = out.path().join("there/file");
        make_fifo(&fifo);
        let reader = {
            let fifo = fifo.clone();
            thread::spawn(move || fs::read_to_string(fifo).unwrap())
        };
        copy_file(&out.path().join(to)).unwrap();
        assert_eq!(reader.join().unwrap(), CONTENT);
        assert!(fifo.symlink_metadata().unwrap().file_type().is_fifo());
    }
}

#[test]
fn a_device_is_written_to_and_stays() {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let device = Path::new(OsStr::from_bytes(name.as_bytes()));
    copy_file(device).unwrap();
    let mut got = [0; CONTENT.len()];
    File::from(master).read_exact(&mut got).unwrap();
    assert_eq!(got, CONTENT.as_bytes());
    // One that takes nothing is an error, and one that takes everything none.
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let error = copy_file(&by_descriptor(&full)).unwrap_err();
    assert!(error.to_string().contains("No space left"), "{error}");
    let null = OpenOptions::new().write(true).open("/dev/null").unwrap();
    copy_file(&by_descriptor(&null)).unwrap();
    for device in ["/dev/full", "/dev/null"] {
        let kind = fs::symlink_metadata(device).unwrap().file_type();
        assert!(kind.is_char_device(), "{device}");
    }
}

#[test]
fn what_this_process_has_open_is_written_to_by_its_number() {
    let (reader, writer) = io::pipe().unwrap();
    let writer = OwnedFd::from(writer);
    copy_file(&by_descriptor(&writer)).unwrap();
    let as_shells_say = PathBuf::from(format!("/dev/fd/{}", writer.as_raw_fd()));
    copy_file(&as_shells_say).unwrap();
    drop(writer);
    assert_eq!(io::read_to_string(reader).unwrap(), "contentcontent");
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"longer than what comes").unwrap();
    copy_file(&by_descriptor(&file)).unwrap();
    io::Seek::rewind(&mut file).unwrap();
    assert_eq!(io::read_to_string(file).unwrap(), CONTENT);
}

#[test]
fn a_socket_is_refused_and_stays() {
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let error = copy_file(&path).unwrap_err();
    assert!(error.to_string().contains("socket"), "{error}");
    assert!(path.symlink_metadata().unwrap().file_type().is_socket());
}

#[test]
fn only_one_file_is_written_into_what_is_no_file() {
    let (reader, writer) = io::pipe().unwrap();
    let to = by_descriptor(&writer);
    for archive in [
        entry(b'5', "file", "", b""),
        entry(b'2', "file", "/etc/passwd", b""),
        entry(b'1', "file", "/etc/passwd", b""),
        entry(b'6', "file", "", b""),
        [
            entry(b'5', "file", "", b""),
            entry(b'0', "file/x", "", b"x"),
        ]
        .concat(),
    ] {
        let error = copy_other(archive, &to);
        assert!(error.to_string().contains("only a file"), "{error}");
    }
    let two = [entry(b'0', "file", "", b"1"), entry(b'0', "file", "", b"2")].concat();
    let error = copy_other(two, &to);
    assert!(error.to_string().contains("more than the one"), "{error}");
    drop(writer);
    assert_eq!(io::read_to_string(reader).unwrap(), "1");
}

#[test]
fn a_link_that_a_guest_sent_is_not_written_through_by_a_second_copy() {
    let out = tempfile::tempdir().unwrap();
    let (secret, report) = (out.path().join("secret"), out.path().join("report"));
    fs::write(&secret, "secret").unwrap();
    for target in ["secret", "none", "/dev/null", "/proc/self/fd/1"] {
        // The user asks for the same thing each time.
        for _ in 0..2 {
            let (guest, player) = sends(entry(b'2', "report", target, b""));
            copy_out(&guest, Path::new("report"), &report, &OPTIONS).unwrap();
            player.join().unwrap();
            assert_eq!(fs::read_link(&report).unwrap(), Path::new(target));
        }
        for to in [&report, out.path()] {
            let error = copy_named("report", to, &OPTIONS).unwrap_err();
            let said = error.to_string();
            assert!(
                said.contains("symbolic link") && said.contains("report"),
                "{said}"
            );
        }
        assert_eq!(fs::read_link(&report).unwrap(), Path::new(target));
        assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
        assert_eq!(names(out.path()), ["report", "secret"]);
    }
}
