//! Files and directories as tar archives, as users expect them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use bantam_archive::{Source, pack};
use bantam_protocol::{
    ExecRequest, FileFailure, FileFailureKind, HostExec, Kind, MAX_DATA_LEN, ReadTree, TreePlace,
    TreeSummary, WriteTree, write_frame,
};
use support::{Agent, Message, Stream, command};

impl Agent {
    fn read_tree(&self, path: &str, follow_link: bool) -> Result<Vec<u8>, FileFailure> {
        let mut stream = self.connect();
        let path = path.into();
        stream.send(&HostExec::ReadTree(ReadTree { path, follow_link }));
        let mut archive = Vec::new();
        loop {
            match stream
                .receive()
                .expect("the transfer ended without a result")
            {
                Message::Stdout(bytes) => archive.extend(bytes),
                Message::TreeDone(_) => return Ok(archive),
                Message::FileFailed(failure) => return Err(failure),
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    fn write_tree(&self, request: WriteTree, archive: &[u8]) -> Result<TreeSummary, FileFailure> {
        let mut stream = self.connect();
        stream.send(&HostExec::WriteTree(request));
        for piece in archive.chunks(MAX_DATA_LEN) {
            // A guest that has already answered hangs up.
            if write_frame(&mut stream.socket, Kind::Stdin, piece).is_err() {
                break;
            }
        }
        let _ = write_frame(&mut stream.socket, Kind::StdinEof, &[]);
        match stream.receive() {
            Some(Message::TreeDone(summary)) => Ok(summary),
            Some(Message::FileFailed(failure)) => Err(failure),
            other => panic!("unexpected {other:?}"),
        }
    }
}

fn to(path: &Path, place: TreePlace) -> WriteTree {
    WriteTree {
        path: path.to_str().unwrap().into(),
        place,
        owners: false,
    }
}

fn one(name: &str, directory: bool) -> TreePlace {
    TreePlace::One {
        name: name.into(),
        directory,
    }
}

fn packed(path: &Path) -> Vec<u8> {
    let mut archive = Vec::new();
    pack(Source::open(path, false).unwrap(), &mut archive).unwrap();
    archive
}

fn plant(root: &Path) {
    fs::create_dir_all(root.join("sub/empty")).unwrap();
    fs::write(root.join("sub/file"), "content").unwrap();
    fs::write(root.join("large"), vec![7; 3_000_001]).unwrap();
    symlink("sub/file", root.join("link")).unwrap();
}

#[test]
fn an_archive_from_the_guest_is_the_one_that_would_be_made_here() {
    let agent = Agent::start();
    let root = agent.dir().join("tree");
    plant(&root);
    let at = |below: &str| format!("{}{below}", root.display());
    assert_eq!(agent.read_tree(&at(""), false).unwrap(), packed(&root));
    assert_eq!(
        agent.read_tree(&at("/."), false).unwrap(),
        packed(&root.join("."))
    );
    let link = packed(&root.join("link"));
    assert_eq!(agent.read_tree(&at("/link"), false).unwrap(), link);
    assert_ne!(agent.read_tree(&at("/link"), true).unwrap(), link);
}

#[test]
fn a_tree_lands_where_cp_would_put_it() {
    let agent = Agent::start();
    let dir = agent.dir();
    let from = dir.join("from");
    plant(&from);
    let (whole, file) = (packed(&from), packed(&from.join("large")));
    let contents = packed(&from.join("."));
    fs::create_dir(dir.join("there")).unwrap();
    symlink("there", dir.join("to-there")).unwrap();
    for (path, place, archive, result) in [
        ("there", one("from", true), &whole, "there/from/sub/file"),
        (
            "to-there",
            one("other", true),
            &whole,
            "there/other/sub/file",
        ),
        ("new", one("from", true), &whole, "new/sub/file"),
        (
            "new-slash/",
            one("from", true),
            &whole,
            "new-slash/sub/file",
        ),
        ("there", one("large", false), &file, "there/large"),
        ("new-file", one("large", false), &file, "new-file"),
        ("new-file", one("large", false), &file, "new-file"),
        ("made", TreePlace::Directory, &contents, "made/sub/file"),
        ("there", TreePlace::Directory, &contents, "there/sub/file"),
        ("there", TreePlace::Inside, &whole, "there/from/sub/file"),
    ] {
        agent
            .write_tree(to(&dir.join(path), place), archive)
            .unwrap();
        assert!(dir.join(result).is_file(), "{result}");
    }
    let summary = agent.write_tree(to(&dir.join("counted"), one("from", true)), &whole);
    let summary = summary.unwrap();
    assert_eq!(
        (summary.entries, summary.bytes, summary.skipped),
        (6, 3_000_008, 0)
    );
    assert_eq!(
        fs::read_link(dir.join("counted/link")).unwrap(),
        Path::new("sub/file")
    );
}

#[test]
fn what_cp_would_refuse_is_refused_and_names_the_path() {
    let agent = Agent::start();
    let dir = agent.dir();
    let from = dir.join("from");
    plant(&from);
    fs::write(dir.join("file"), "kept").unwrap();
    let (whole, file) = (packed(&from), packed(&from.join("large")));
    for (path, place, archive, kind) in [
        (
            "file",
            one("from", true),
            &whole,
            FileFailureKind::NotADirectory,
        ),
        (
            "file/",
            one("large", false),
            &file,
            FileFailureKind::NotADirectory,
        ),
        (
            "missing/",
            one("large", false),
            &file,
            FileFailureKind::NotFound,
        ),
        (
            "missing/x",
            one("large", false),
            &file,
            FileFailureKind::NotFound,
        ),
        (
            "missing/x",
            one("from", true),
            &whole,
            FileFailureKind::NotFound,
        ),
        (
            "missing",
            TreePlace::Inside,
            &whole,
            FileFailureKind::NotFound,
        ),
        (
            "missing/x",
            TreePlace::Directory,
            &whole,
            FileFailureKind::NotFound,
        ),
        (
            "file",
            TreePlace::Inside,
            &whole,
            FileFailureKind::NotADirectory,
        ),
    ] {
        let failure = agent
            .write_tree(to(&dir.join(path), place), archive)
            .unwrap_err();
        assert_eq!(failure.kind, kind, "{}", failure.message);
        let named = path.trim_end_matches("/x");
        assert!(
            failure.message.contains(named),
            "{path}: {}",
            failure.message
        );
    }
    assert_eq!(fs::read_to_string(dir.join("file")).unwrap(), "kept");
    assert!(!dir.join("missing").exists());
    for (path, kind) in [
        ("/no/such/thing", FileFailureKind::NotFound),
        ("relative", FileFailureKind::InvalidPath),
        ("/etc/passwd/", FileFailureKind::NotADirectory),
    ] {
        let failure = agent.read_tree(path, false).unwrap_err();
        assert_eq!(failure.kind, kind, "{}", failure.message);
        assert!(failure.message.contains(path), "{}", failure.message);
    }
    let failure = agent
        .write_tree(
            to(dir, TreePlace::Inside),
            b"this is no archive".repeat(99).as_slice(),
        )
        .unwrap_err();
    assert!(
        failure.message.contains("no tar archive"),
        "{}",
        failure.message
    );
}

#[test]
fn files_belong_to_the_agents_user_unless_owners_are_asked_for() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can give files away");
        return;
    }
    let agent = Agent::start();
    let dir = agent.dir();
    fs::write(dir.join("file"), "x").unwrap();
    std::os::unix::fs::chown(dir.join("file"), Some(4321), Some(4321)).unwrap();
    let archive = packed(&dir.join("file"));
    for (owners, owner) in [(false, 0), (true, 4321)] {
        let request = WriteTree {
            owners,
            ..to(&dir.join("copy"), one("file", false))
        };
        agent.write_tree(request, &archive).unwrap();
        assert_eq!(fs::metadata(dir.join("copy")).unwrap().uid(), owner);
    }
}

#[test]
fn half_an_archive_is_not_taken_for_a_whole_one() {
    let agent = Agent::start();
    let dir = agent.dir();
    let mut stream = agent.connect();
    stream.send(&HostExec::WriteTree(to(&dir.join("new"), one("x", true))));
    // It ends between two entries, where an archive on a disk might.
    stream.send(&HostExec::Stdin(&packed(Path::new("/dev/null"))[..0]));
    stream.socket.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(stream.receive(), None, "no summary of what did not end");
}

#[test]
fn a_transfer_keeps_no_ones_input_open() {
    let agent = Agent::start();
    let mut cat = agent.exec(ExecRequest {
        stdin: true,
        ..command(&["cat"])
    });
    cat.send(&HostExec::Stdin(b"x"));
    assert_eq!(cat.read_to("x"), "x");
    let mut transfer = agent.connect();
    transfer.send(&HostExec::WriteTree(to(agent.dir(), TreePlace::Inside)));
    // It works on it, for it waits for more: its child was made.
    let large = agent.dir().join("large");
    fs::write(&large, vec![0; 1 << 20]).unwrap();
    let mut reader = agent.connect();
    reader.send(&HostExec::ReadTree(ReadTree {
        path: large.to_str().unwrap().into(),
        follow_link: false,
    }));
    assert!(matches!(reader.receive(), Some(Message::Stdout(_))));
    cat.send(&HostExec::StdinEof);
    finish(cat);
    drop(reader);
    transfer.send(&HostExec::StdinEof);
    assert!(matches!(transfer.receive(), Some(Message::TreeDone(_))));
}

fn finish(stream: Stream) {
    assert_eq!(stream.finish().stdout, b"");
}

#[test]
fn a_reader_that_hangs_up_ends_the_transfer() {
    let agent = Agent::start();
    let mut stream = agent.connect();
    stream.send(&HostExec::ReadTree(ReadTree {
        path: b"/usr".to_vec(),
        follow_link: false,
    }));
    assert!(matches!(stream.receive(), Some(Message::Stdout(_))));
    drop(stream);
    assert_eq!(agent.sh("echo here").text(), "here\n");
}

#[test]
fn the_guest_says_how_it_fares() {
    let agent = Agent::start();
    let mut stream = agent.connect();
    stream.send(&HostExec::GetStats);
    let Some(Message::Stats(stats)) = stream.receive() else {
        panic!("no statistics came");
    };
    assert!(stats.memory_available > 0 && stats.memory_available < stats.memory_total);
    assert!(stats.cpus > 0 && stats.cpu_ns > 0 && stats.uptime_ns > 0);
    assert!(stats.processes >= 2, "the agent and this test");
    assert!(stats.disk.used > 0 && stats.disk.used <= stats.disk.total);
    let mut rest = Vec::new();
    stream.socket.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    // Whatever comes after the question is no one's.
    let _ = stream.socket.write_all(b"x");
}
