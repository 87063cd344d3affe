//! What is written down of a machine.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ipc::RemoteError;
use super::name::MachineName;
use crate::Error;
use crate::spec::Spec;
use crate::status::Status;

/// No file of ours is larger; one that is was not written by us.
const MAX_FILE: u64 = 4 << 20;

/// `machine.json`: what the machine is. Written when it is made and by updates, never by a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The format; a reader refuses one that it does not know.
    pub(crate) version: u32,
    /// Tells this machine from an earlier one of the same name.
    pub(crate) id: String,
    pub(crate) name: MachineName,
    /// Unix seconds.
    pub(crate) created_at: u64,
    pub(crate) ephemeral: bool,
    /// What the image was called when the machine was made.
    pub(crate) image: String,
    /// The image in the store, which the machine holds a pin on.
    pub(crate) image_digest: String,
    #[serde(flatten)]
    pub(crate) spec: Spec,
}

impl Record {
    pub(crate) const VERSION: u32 = 1;

    /// In whose name the store keeps the image.
    pub(crate) fn pin_owner(&self) -> String {
        format!("machine '{}' ({})", self.name, self.id)
    }
}

/// `run.json`: the last start. Written by the machine's process alone.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LastRun {
    /// The process that has, or had, the virtual machine.
    pub(crate) pid: u32,
    /// Unix seconds.
    pub(crate) started_at: u64,
    /// Unless it still runs, or was killed before it could say.
    #[serde(default)]
    pub(crate) end: Option<End>,
    /// How the workload ended, if it has.
    #[serde(default)]
    pub(crate) workload: Option<WorkloadEnd>,
}

/// The end of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct End {
    /// Unix seconds.
    pub(crate) at: u64,
    pub(crate) kind: EndKind,
    /// For people.
    pub(crate) reason: String,
    /// The last lines of the guest's console, if it failed.
    #[serde(default)]
    pub(crate) console: Vec<String>,
}

impl End {
    /// An end at this moment.
    pub(crate) fn now(kind: EndKind, reason: String, console: Vec<String>) -> Self {
        Self {
            at: super::now(),
            kind,
            reason,
            console,
        }
    }
}

/// What sort of end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EndKind {
    /// Somebody stopped it.
    Stopped,
    /// The guest shut itself down, or its kernel panicked.
    Shutdown,
    /// It did not boot, or could not go on.
    Failed,
}

/// The end of a workload.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WorkloadEnd {
    /// As a shell would give it; 125 to 127 if it could not be started.
    pub(crate) exit_code: u8,
    /// For people, unless it exited by itself.
    #[serde(default)]
    pub(crate) reason: Option<String>,
    /// Why it never ran: the guest could not execute it.
    #[serde(default)]
    pub(crate) refused: Option<RemoteError>,
}

impl WorkloadEnd {
    pub(crate) fn new(result: &Result<Status, Error>) -> Self {
        let (exit_code, reason) = match result {
            Ok(status) if status.oom => (status.exit_code(), Some("out of memory".to_owned())),
            Ok(status) => (status.exit_code(), None),
            Err(error) => (error.exit_code(), Some(error.to_string())),
        };
        let refused = match result {
            Err(error @ Error::Start { .. }) => Some(RemoteError::new(error)),
            _ => None,
        };
        Self {
            exit_code,
            reason,
            refused,
        }
    }
}

/// Reads one of our files; `None` if there is none.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    let damaged = |reason: String| Error::Record {
        path: path.to_path_buf(),
        reason,
    };
    let mut bytes = Vec::new();
    match File::open(path) {
        Ok(file) => {
            file.take(MAX_FILE)
                .read_to_end(&mut bytes)
                .map_err(|error| damaged(error.to_string()))?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(damaged(error.to_string())),
    }
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| damaged(error.to_string()))
}

/// Replaces one of our files: after a crash it is the old one or the new one, whole.
pub(crate) fn write(path: &Path, value: &impl Serialize) -> Result<(), Error> {
    let failed = |source| Error::State {
        what: "write",
        path: path.to_path_buf(),
        source,
    };
    let bytes = serde_json::to_vec_pretty(value).map_err(|error| failed(error.into()))?;
    // One writer's own: two at once must not mix.
    let temporary = path.with_extension(format!("{}.new", super::random_hex(4)?));
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)
        .map_err(failed)?;
    let written = file
        .write_all(&bytes)
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = written {
        // Where there is no room, it would take some at each try. The write's own error says more than this one's.
        let _ = fs::remove_file(&temporary);
        return Err(failed(error));
    }
    sync_parent(path).map_err(failed)
}

/// A file of this name and length keeps room for [`write_last`].
const ROOM: &str = "room";
const ROOM_LEN: usize = 64 << 10;

/// Keeps room beside our file at `path` for one [`write_last`], on the host's disk.
pub(crate) fn keep_room(path: &Path) -> io::Result<()> {
    let room = path.with_extension(ROOM);
    if fs::metadata(&room).is_ok_and(|kept| kept.len() == ROOM_LEN as u64) {
        return Ok(());
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&room)?;
    (file.write_all(&vec![0; ROOM_LEN]))
        .and_then(|()| file.sync_all())
        .inspect_err(|_| {
            // What there is of it may be what others miss.
            let _ = fs::remove_file(&room);
        })
}

/// As [`write`]; if there is no room, in that which was kept.
pub(crate) fn write_last(path: &Path, value: &impl Serialize) -> Result<(), Error> {
    let written = write(path, value);
    if written.is_ok() {
        return written;
    }
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    if bytes.is_empty() || bytes.len() > ROOM_LEN {
        return written;
    }
    match write_into_room(path, &bytes) {
        Ok(()) => Ok(()),
        // What kept the file from being written says more.
        Err(_) => written,
    }
}

/// Over what is there: that needs no room, unless the host's file system copies on write.
fn write_into_room(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let room = path.with_extension(ROOM);
    let mut file = OpenOptions::new().write(true).open(&room)?;
    file.write_all(bytes)?;
    file.set_len(bytes.len() as u64)?;
    file.sync_all()?;
    fs::rename(&room, path)?;
    sync_parent(path)
}

/// Makes a name in a directory, or its absence, last.
pub(crate) fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::testing::names;

    #[test]
    fn a_write_that_fails_leaves_the_old_file_and_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.json");
        // No file takes the place of a directory.
        fs::create_dir(&path).unwrap();
        for _ in 0..3 {
            assert!(matches!(
                write(&path, &"new"),
                Err(Error::State { what: "write", .. })
            ));
            assert_eq!(names(dir.path()), ["run.json"]);
        }
        fs::remove_dir(&path).unwrap();
        write(&path, &"new").unwrap();
        assert_eq!(names(dir.path()), ["run.json"]);
        assert_eq!(read(&path).unwrap(), Some("new".to_owned()));
    }

    #[test]
    fn a_full_file_system_keeps_the_old_file_and_gets_no_fuller() {
        let dir = tempfile::tempdir().unwrap();
        // Mounts need root, as on CI's machines and not on everyone's.
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"])
            .arg(dir.path())
            .output()
            .is_ok_and(|output| output.status.success());
        if !mounted {
            println!("skipped: cannot mount a small file system here");
            return;
        }
        let path = dir.path().join("run.json");
        write(&path, &"old").unwrap();
        let results: Vec<_> = (0..3)
            .map(|_| write(&path, &"x".repeat(256 << 10)))
            .collect();
        let left = names(dir.path());
        let kept = read::<String>(&path);
        // There is room again, as before.
        let small = write(&path, &"new");
        let unmounted = Command::new("umount").arg(dir.path()).status().unwrap();
        assert!(unmounted.success());
        for result in results {
            let Err(Error::State { source, .. }) = result else {
                panic!("a full file system took it");
            };
            assert_eq!(source.kind(), io::ErrorKind::StorageFull);
        }
        assert_eq!(left, ["run.json"]);
        assert_eq!(kept.unwrap(), Some("old".to_owned()));
        small.unwrap();
    }

    fn run(reason: &str) -> LastRun {
        LastRun {
            pid: 7,
            started_at: 1,
            end: Some(End::now(EndKind::Stopped, reason.to_owned(), Vec::new())),
            workload: None,
        }
    }

    fn reason(path: &Path) -> String {
        read::<LastRun>(path).unwrap().unwrap().end.unwrap().reason
    }

    #[test]
    fn the_last_word_is_written_in_the_room_that_was_kept_and_takes_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.json");
        write(&path, &run("first")).unwrap();
        keep_room(&path).unwrap();
        // There is room: what was kept stays.
        write_last(&path, &run("second")).unwrap();
        assert_eq!(reason(&path), "second");
        assert_eq!(names(dir.path()), ["run.json", "run.room"]);
        write_into_room(&path, &serde_json::to_vec(&run("third")).unwrap()).unwrap();
        assert_eq!(reason(&path), "third");
        assert_eq!(names(dir.path()), ["run.json"]);
        // The next run keeps room again.
        keep_room(&path).unwrap();
        let kept = fs::metadata(dir.path().join("run.room")).unwrap();
        assert_eq!(kept.len(), ROOM_LEN as u64);
    }

    #[test]
    fn without_room_it_is_said_why_nothing_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone/run.json");
        let error = write_last(&gone, &run("x")).unwrap_err();
        assert!(
            matches!(error, Error::State { what: "write", .. }),
            "{error}"
        );
    }
}
