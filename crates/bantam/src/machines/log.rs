//! What a workload wrote, the newest of it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::dir::state;
use crate::Error;

/// A log file is this long at most; then the next one is begun, and the one before is dropped.
const MAX_LOG: u64 = 8 << 20;

/// How often a reader that follows looks for more.
const FOLLOW_PAUSE: Duration = Duration::from_millis(100);

/// The log that a machine's process writes; clones and writers share it.
#[derive(Debug, Clone)]
pub(super) struct Log(Arc<Mutex<Current>>);

#[derive(Debug)]
struct Current {
    path: PathBuf,
    file: File,
    len: u64,
    /// The process's own log was told that this one cannot be written. Once is enough: a workload
    /// writes as often as it likes.
    warned: bool,
}

impl Log {
    /// Goes on with the log at `path`.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let file = append(path).map_err(state("open", path))?;
        let len = file.metadata().map_err(state("open", path))?.len();
        Ok(Self(Arc::new(Mutex::new(Current {
            path: path.to_path_buf(),
            file,
            len,
            warned: false,
        }))))
    }

    pub(super) fn writer(&self) -> LogWriter {
        LogWriter(self.clone())
    }
}

/// Writes to a log. A log that cannot be written does not keep a workload from going on.
#[derive(Debug)]
pub(super) struct LogWriter(Log);

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut log = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = log.write(bytes)
            && !std::mem::replace(&mut log.warned, true)
        {
            tracing::warn!(%error, path = %log.path.display(), "cannot write the log");
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Current {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.len.saturating_add(bytes.len() as u64) > MAX_LOG {
            fs::rename(&self.path, older(&self.path))?;
            self.file = append(&self.path)?;
            self.len = 0;
        }
        self.file.write_all(bytes)?;
        self.len = self.len.saturating_add(bytes.len() as u64);
        Ok(())
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

fn older(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// Which part of a log to read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogOptions {
    /// Only the last so many lines of what there is.
    pub tail: Option<u64>,
    /// Go on with what is written later, until the machine ends.
    pub follow: bool,
}

impl LogOptions {
    /// All that there is.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Only the last `lines` lines.
    #[must_use]
    pub fn tail(mut self, lines: u64) -> Self {
        self.tail = Some(lines);
        self
    }

    /// And what is written later, until the machine ends.
    #[must_use]
    pub fn follow(mut self, follow: bool) -> Self {
        self.follow = follow;
        self
    }
}

/// Copies a log to `out`; with `follow`, goes on while `runs` says that more may come.
pub(super) fn copy(
    path: &Path,
    options: LogOptions,
    mut runs: impl FnMut() -> bool,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let out_failed = Error::io("cannot pass on the machine's log");
    let mut reader = Reader::open(path, options.tail).map_err(state("read", path))?;
    let mut chunk = vec![0; 64 << 10];
    let copied: io::Result<()> = (|| {
        loop {
            // Asked before the last look, so that nothing written before the end is missed.
            let more = options.follow && runs();
            while let Some(bytes) = reader.next(&mut chunk)? {
                out.write_all(bytes)?;
            }
            out.flush()?;
            if !more {
                return Ok(());
            }
            thread::sleep(FOLLOW_PAUSE);
        }
    })();
    copied.map_err(out_failed)
}

/// Reads the older file, then the newer, then whatever the newer is replaced by.
struct Reader {
    path: PathBuf,
    /// The files still to read, the oldest last.
    files: Vec<File>,
}

impl Reader {
    fn open(path: &Path, tail: Option<u64>) -> io::Result<Self> {
        let mut files = Vec::new();
        let mut seen = None;
        for path in [path.to_path_buf(), older(path)] {
            match File::open(&path) {
                Ok(file) => {
                    // A change of files between the two looks gives the same one twice.
                    let number = file.metadata()?.ino();
                    if seen.replace(number) != Some(number) {
                        files.push(file);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        if let Some(lines) = tail {
            let mut left = lines;
            for (index, file) in files.iter_mut().enumerate() {
                if seek_to_tail(file, &mut left)? {
                    files.truncate(index + 1);
                    break;
                }
            }
        }
        Ok(Self {
            path: path.to_path_buf(),
            files,
        })
    }

    /// The next bytes; `None` when there are none now.
    fn next<'a>(&mut self, chunk: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        loop {
            let last = self.files.len() == 1;
            let Some(file) = self.files.last_mut() else {
                match File::open(&self.path) {
                    Ok(file) => self.files.push(file),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                    Err(error) => return Err(error),
                }
                continue;
            };
            let mut count = file.read(chunk)?;
            let current = fs::metadata(&self.path).map(|meta| meta.ino()).ok();
            let is_current = last && Some(file.metadata()?.ino()) == current;
            if count == 0 && !is_current {
                // Something may have been written between that read and the change of files.
                count = file.read(chunk)?;
            }
            if count > 0 {
                return Ok(chunk.get(..count));
            }
            if is_current {
                return Ok(None);
            }
            self.files.pop();
            if self.files.is_empty() && current.is_none() {
                return Ok(None);
            }
        }
    }
}

/// Puts `file` before its last `lines` lines and takes those that it has off `lines`; whether it
/// has that many.
fn seek_to_tail(file: &mut File, lines: &mut u64) -> io::Result<bool> {
    let mut text = Vec::new();
    file.take(MAX_LOG * 2).read_to_end(&mut text)?;
    let mut start = text.len();
    // The newline at the very end ends the last line and begins none.
    let mut end = text.len().saturating_sub(1);
    while *lines > 0 && start > 0 {
        let newline = text
            .get(..end)
            .and_then(|text| text.iter().rposition(|&byte| byte == b'\n'));
        start = newline.map_or(0, |at| at + 1);
        end = newline.unwrap_or(0);
        *lines -= 1;
    }
    file.seek(SeekFrom::Start(start as u64))?;
    Ok(*lines == 0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn read(path: &Path, options: LogOptions) -> String {
        let mut out = Vec::new();
        copy(path, options, || false, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_tail_is_the_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        fs::write(older(&path), "1\n2\n").unwrap();
        fs::write(&path, "3\n4\nunfinished").unwrap();
        let all = LogOptions::new();
        assert_eq!(read(&path, all), "1\n2\n3\n4\nunfinished");
        assert_eq!(read(&path, all.tail(0)), "");
        assert_eq!(read(&path, all.tail(1)), "unfinished");
        assert_eq!(read(&path, all.tail(2)), "4\nunfinished");
        assert_eq!(read(&path, all.tail(4)), "2\n3\n4\nunfinished");
        assert_eq!(read(&path, all.tail(99)), "1\n2\n3\n4\nunfinished");
        fs::write(&path, "").unwrap();
        assert_eq!(read(&path, all.tail(1)), "2\n");
    }

    #[test]
    fn a_log_keeps_the_newest_and_stays_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        let log = Log::open(&path).unwrap();
        let piece = vec![b'x'; 1 << 20];
        for _ in 0..40 {
            log.writer().write_all(&piece).unwrap();
        }
        log.writer().write_all(b"end").unwrap();
        let size = |path: &Path| fs::metadata(path).unwrap().len();
        assert!(size(&path) + size(&older(&path)) <= 2 * MAX_LOG);
        assert!(read(&path, LogOptions::new()).ends_with("xend"));
    }

    /// Counts warnings.
    #[derive(Clone, Default)]
    struct Warnings(Arc<AtomicU32>);

    impl tracing::Subscriber for Warnings {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            *metadata.level() <= tracing::Level::WARN
        }
        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::Id {
            tracing::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::Id, _: &tracing::Id) {}
        fn enter(&self, _: &tracing::Id) {}
        fn exit(&self, _: &tracing::Id) {}
    }

    #[test]
    fn a_log_without_room_holds_up_nobody_and_is_told_of_once() {
        let warnings = Warnings::default();
        let log = Log::open(Path::new("/dev/full")).unwrap();
        tracing::subscriber::with_default(warnings.clone(), || {
            for _ in 0..5000 {
                log.writer().write_all(b"x").unwrap();
            }
        });
        assert_eq!(warnings.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_missing_log_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(&dir.path().join("output.log"), LogOptions::new()), "");
    }

    #[test]
    fn following_shows_what_comes_later_across_a_new_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        let log = Log::open(&path).unwrap();
        log.writer().write_all(b"first ").unwrap();
        let mut turns = 0;
        let mut out = Vec::new();
        let runs = || {
            turns += 1;
            match turns {
                1 => log.writer().write_all(b"second ").unwrap(),
                2 => {
                    fs::rename(&path, older(&path)).unwrap();
                    fs::write(&path, b"third").unwrap();
                }
                _ => {}
            }
            turns < 4
        };
        copy(&path, LogOptions::new().follow(true), runs, &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "first second third");
    }
}
