//! Questions about files, and changes to them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use bantam_protocol::{FileEntry, FileFailure, FileFailureKind, FileKind, FileRequest, HostExec};
use support::{Agent, Message};

impl Agent {
    fn ask(&self, request: FileRequest) -> Result<Vec<FileEntry>, FileFailure> {
        let mut stream = self.connect();
        stream.send(&HostExec::File(request));
        let mut entries = Vec::new();
        loop {
            match stream.receive().expect("it ended without a result") {
                Message::FileEntry(entry) => entries.push(entry),
                Message::FileDone => break,
                Message::FileFailed(failure) => return Err(failure),
                other => panic!("unexpected {other:?}"),
            }
        }
        assert_eq!(stream.receive(), None);
        Ok(entries)
    }
}

fn bytes(path: &Path) -> Vec<u8> {
    path.to_str().unwrap().into()
}

#[test]
fn a_file_is_described_as_it_is() {
    let agent = Agent::start();
    let dir = agent.dir();
    fs::write(dir.join("file"), "12345").unwrap();
    symlink("file", dir.join("link")).unwrap();
    let stat = |name: &str, follow_link| {
        let path = bytes(&dir.join(name));
        let mut entries = agent.ask(FileRequest::Stat { path, follow_link })?;
        assert_eq!(entries.len(), 1);
        Ok::<_, FileFailure>(entries.remove(0))
    };
    let file = stat("file", false).unwrap();
    assert_eq!((file.kind, file.size), (FileKind::File, 5));
    assert_eq!(file.target, None);
    let link = stat("link", false).unwrap();
    assert_eq!(link.kind, FileKind::Symlink);
    assert_eq!(link.target.as_deref(), Some(&b"file"[..]));
    assert_eq!(stat("link", true).unwrap(), file);
    assert_eq!(stat("", true).unwrap().kind, FileKind::Directory);
    assert_eq!(stat("socket", false).unwrap().kind, FileKind::Other);
    let failure = stat("none", true).unwrap_err();
    assert_eq!(failure.kind, FileFailureKind::NotFound);
    assert!(failure.message.contains("/none"), "{}", failure.message);
}

#[test]
fn a_directory_of_any_size_is_listed_whole() {
    let agent = Agent::start();
    let dir = agent.dir().join("d");
    fs::create_dir(&dir).unwrap();
    for n in 0..3000 {
        fs::write(dir.join(format!("{n:0>200}")), "").unwrap();
    }
    let listed = agent.ask(FileRequest::List { path: bytes(&dir) }).unwrap();
    let mut names: Vec<_> = listed.into_iter().map(|entry| entry.name).collect();
    names.sort();
    let expected: Vec<_> = (0..3000)
        .map(|n| format!("{n:0>200}").into_bytes())
        .collect();
    assert!(names == expected, "{} names came", names.len());
    let path = bytes(&dir.join("0".repeat(200)));
    let failure = agent.ask(FileRequest::List { path }).unwrap_err();
    assert_eq!(failure.kind, FileFailureKind::NotADirectory);
}

#[test]
fn directories_are_made_and_things_renamed_and_removed() {
    let agent = Agent::start();
    let dir = agent.dir();
    let make = |name: &str, parents| {
        agent.ask(FileRequest::MakeDir {
            path: bytes(&dir.join(name)),
            mode: 0o755,
            parents,
        })
    };
    let remove = |name: &str, recursive| {
        let path = bytes(&dir.join(name));
        agent.ask(FileRequest::Remove { path, recursive })
    };
    let rename = |from: &str, to: &str| {
        agent.ask(FileRequest::Rename {
            from: bytes(&dir.join(from)),
            to: bytes(&dir.join(to)),
        })
    };
    make("one", false).unwrap();
    assert!(make("one", false).is_err());
    make("one", true).unwrap();
    let failure = make("a/b", false).unwrap_err();
    assert_eq!(failure.kind, FileFailureKind::NotFound);
    make("a/b/c", true).unwrap();
    assert!(dir.join("a/b/c").is_dir());

    fs::write(dir.join("a/file"), "x").unwrap();
    rename("a/file", "moved").unwrap();
    assert_eq!(fs::read_to_string(dir.join("moved")).unwrap(), "x");
    for (from, to, culprit) in [("none", "x", "/none"), ("moved", "none/x", "/none/x")] {
        let failure = rename(from, to).unwrap_err();
        assert_eq!(failure.kind, FileFailureKind::NotFound);
        assert!(failure.message.contains(culprit), "{}", failure.message);
    }

    assert!(remove("a", false).is_err(), "it is not empty");
    remove("one", false).unwrap();
    symlink(dir.join("a"), dir.join("link")).unwrap();
    remove("link", true).unwrap();
    assert!(dir.join("a/b/c").is_dir(), "the link was followed");
    remove("a", true).unwrap();
    remove("moved", false).unwrap();
    assert!(!dir.join("a").exists() && !dir.join("moved").exists());
    let failure = remove("a", true).unwrap_err();
    assert_eq!(failure.kind, FileFailureKind::NotFound);
}
