//! File transfers as users expect them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use bantam_protocol::{FileFailureKind, HostExec, WriteFile};
use support::Agent;

fn to(path: &Path) -> WriteFile {
    WriteFile {
        path: path.to_str().unwrap().into(),
        ..WriteFile::default()
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_large_file_arrives_byte_exact_in_both_directions() {
    let agent = Agent::start();
    let path = agent.dir().join("large");
    let content: Vec<u8> = (0..300_000_000u32)
        .map(|n| n.to_le_bytes()[usize::from(n % 3 == 0)])
        .collect();
    agent.write_file(to(&path), &content).unwrap();
    assert!(std::fs::read(&path).unwrap() == content, "written changed");
    let (info, back) = agent.read_file(&path).unwrap();
    assert!(back == content, "read back changed");
    assert_eq!(info.size, 300_000_000);
    assert_eq!(info.mode, 0o644);
}

#[test]
fn modes_are_those_asked_for_or_those_of_the_file_replaced() {
    let agent = Agent::start();
    let path = agent.dir().join("file");
    let mode = || std::fs::metadata(&path).unwrap().mode() & 0o7777;
    let ask = WriteFile {
        mode: Some(0o4750),
        ..to(&path)
    };
    agent.write_file(ask, b"one").unwrap();
    assert_eq!(mode(), 0o4750);
    agent.write_file(to(&path), b"two").unwrap();
    assert_eq!(mode(), 0o4750);
    assert_eq!(agent.read_file(&path).unwrap().0.mode, 0o4750);
}

#[test]
fn an_upload_that_breaks_off_leaves_the_old_file_and_nothing_else() {
    let agent = Agent::start();
    let dir = agent.dir().join("d");
    std::fs::create_dir(&dir).unwrap();
    let path = dir.join("file");
    std::fs::write(&path, "old").unwrap();
    let mut stream = agent.connect();
    stream.send(&HostExec::WriteFile(to(&path)));
    stream.send(&HostExec::Stdin(b"half of it"));
    stream.socket.shutdown(std::net::Shutdown::Write).unwrap();
    // The end of the stream is the end of the transfer.
    assert_eq!(stream.receive(), None);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
    assert_eq!(names(&dir), ["file"]);
}

#[test]
fn symbolic_links_are_written_through_not_replaced() {
    let agent = Agent::start();
    let dir = agent.dir().join("d");
    std::fs::create_dir_all(dir.join("real")).unwrap();
    symlink("real/target", dir.join("middle")).unwrap();
    symlink(dir.join("middle"), dir.join("link")).unwrap();
    for content in ["through a dangling link", "through a good one"] {
        agent
            .write_file(to(&dir.join("link")), content.as_bytes())
            .unwrap();
        assert_eq!(
            std::fs::read_to_string(dir.join("real/target")).unwrap(),
            content
        );
    }
    assert_eq!(names(&dir), ["link", "middle", "real"]);
    assert_eq!(
        agent.read_file(&dir.join("link")).unwrap().1,
        b"through a good one"
    );
}

#[test]
fn missing_parents_are_made_only_on_request() {
    let agent = Agent::start();
    let path = agent.dir().join("a/b/file");
    let failure = agent.write_file(to(&path), b"x").unwrap_err();
    assert_eq!(failure.kind, FileFailureKind::NotFound);
    let request = WriteFile {
        create_parents: true,
        ..to(&path)
    };
    agent.write_file(request, b"x").unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "x");
    let parent = std::fs::metadata(path.parent().unwrap()).unwrap();
    assert_eq!(parent.permissions().mode() & 0o777, 0o755);
}

#[test]
fn every_failure_has_its_kind_and_names_the_path() {
    let agent = Agent::start();
    let dir = agent.dir();
    std::fs::write(dir.join("file"), "").unwrap();
    symlink("loop", dir.join("loop")).unwrap();
    nix::unistd::mkfifo(&dir.join("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let reads = [
        (dir.join("none"), FileFailureKind::NotFound),
        (dir.to_path_buf(), FileFailureKind::IsADirectory),
        (dir.join("file/below"), FileFailureKind::NotADirectory),
        (dir.join("loop"), FileFailureKind::InvalidPath),
        (dir.join("fifo"), FileFailureKind::Other),
        ("/dev/zero".into(), FileFailureKind::Other),
        ("relative".into(), FileFailureKind::InvalidPath),
    ];
    for (path, kind) in reads {
        let failure = agent.read_file(&path).unwrap_err();
        assert_eq!(failure.kind, kind, "{}", failure.message);
        assert!(failure.message.contains(path.to_str().unwrap()));
    }
    let writes = [
        (dir.to_path_buf(), FileFailureKind::IsADirectory),
        ("/".into(), FileFailureKind::IsADirectory),
        (dir.join("file/below"), FileFailureKind::NotADirectory),
        (dir.join("loop"), FileFailureKind::InvalidPath),
        (dir.join("fifo"), FileFailureKind::Other),
        ("/dev/null".into(), FileFailureKind::Other),
        ("relative".into(), FileFailureKind::InvalidPath),
    ];
    for (path, kind) in writes {
        let failure = agent.write_file(to(&path), b"x").unwrap_err();
        assert_eq!(failure.kind, kind, "{}", failure.message);
    }
}

#[test]
fn a_proc_file_of_no_size_is_sent_whole() {
    let agent = Agent::start();
    let (info, content) = agent.read_file(Path::new("/proc/version")).unwrap();
    assert_eq!(info.size, 0);
    assert!(content.starts_with(b"Linux version"));
}

#[test]
fn an_uploaded_program_can_be_run() {
    let agent = Agent::start();
    let path = agent.dir().join("program");
    let request = WriteFile {
        mode: Some(0o755),
        ..to(&path)
    };
    agent.write_file(request, b"#!/bin/sh\necho ran\n").unwrap();
    assert_eq!(agent.sh(path.to_str().unwrap()).text(), "ran\n");
}
