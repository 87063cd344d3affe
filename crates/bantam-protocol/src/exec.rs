//! Exec streams: one for each command or file transfer, opened by the host.
//!
//! A command: `Exec`, then `Stdin`… `StdinEof`, `Resize`, `Signal`, `Kill` in any
//! order; the guest answers `StartFailed`, or `Started`, `Stdout`/`Stderr`…, `Exit`.
//! A host that hangs up, even in one direction, before `Exit` kills everything the
//! command started. What a finished command left running in the background stays.
//! A command with [`detach`](ExecRequest::detach) is let go: `Started` ends its stream.
//!
//! Standard input has a window of its own, so that a command that does not read
//! never keeps a `Signal` or a `Kill` from being seen: the host may have sent at most
//! [`STDIN_WINDOW`](crate::STDIN_WINDOW) bytes of `Stdin` more than the guest has
//! returned with `StdinCredit`. After `StdinClosed` no one reads; sending on is harmless.
//!
//! Writing a file: `WriteFile`, `Stdin`…, `StdinEof`, without a window; the guest
//! answers `FileDone` or `FileFailed`. Reading: `ReadFile`; the guest answers `FileOpened`, `Stdout`…,
//! `FileDone`, or `FileFailed` at any point. Trees go the same way as tar archives:
//! `WriteTree` and `ReadTree`, with `TreeDone` at the end.
//! `File` is answered with `FileEntry`… where its request says so, and `FileDone` or
//! `FileFailed`; `GetStats` with `Stats`. The last message ends the stream.

use serde::{Deserialize, Serialize};

use crate::frame::{encode_bytes, encode_value};
use crate::{
    Error, FileEntry, FileRequest, Frame, GuestStats, Kind, ReadTree, TreeSummary, WriteTree,
};

/// What the host says on an exec stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostExec<'a> {
    /// Run a command.
    Exec(ExecRequest),
    /// Replace a file by the bytes that follow.
    WriteFile(WriteFile),
    /// Send a file.
    ReadFile(ReadFile),
    /// Send a file or directory as a tar archive.
    ReadTree(ReadTree),
    /// Extract the tar archive that follows.
    WriteTree(WriteTree),
    /// Say how the guest fares.
    GetStats,
    /// Describe or change files.
    File(FileRequest),
    /// Bytes for standard input, or of the file. To send without a copy use
    /// [`write_frame`](crate::write_frame) with [`Kind::Stdin`].
    Stdin(&'a [u8]),
    /// The end of standard input, or of the file.
    StdinEof,
    /// The terminal has a new size.
    Resize(Size),
    /// Send this signal to the command's process group.
    Signal(u8),
    /// Kill every process the command started.
    Kill,
}

/// A command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecRequest {
    /// The command and its arguments; not empty. A command without `/` is looked
    /// up in the `PATH` of `env`; one with `/` is relative to the working directory.
    pub argv: Vec<Vec<u8>>,
    /// The whole environment, `NAME=value` entries in the order `execve` gets
    /// them. The guest adds only `PATH` and `HOME`, and only if they are missing.
    pub env: Vec<Vec<u8>>,
    /// The working directory, absolute; `/` if absent.
    pub cwd: Option<Vec<u8>>,
    /// Make a missing working directory (mode 0755, owned by root) instead of failing.
    pub create_cwd: bool,
    /// `user`, `uid`, `user:group`, `uid:gid`, `uid:group` or `user:gid`, looked up
    /// in the guest's own `/etc/passwd` and `/etc/group`; root if absent.
    pub user: Option<String>,
    /// Run on a terminal of this size. Standard error is then part of `Stdout`.
    pub tty: Option<Size>,
    /// Standard input comes from the stream; if not, it is `/dev/null` (without a
    /// terminal) or silent (with one).
    pub stdin: bool,
    /// Kill everything the command started after so many milliseconds.
    pub timeout_ms: Option<u64>,
    /// Let it go once it runs: its standard streams are `/dev/null`, `Started` ends the
    /// stream, and the command lives on, for at most its timeout if it has one.
    pub detach: bool,
    /// Nobody waits for `Started`: it may come together with what is said next, for which it waits
    /// some tenths of a second at most.
    pub lazy_started: bool,
}

/// A terminal's size in character cells.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// A file to replace. The bytes go to a temporary file beside it that is renamed
/// over it at the end, so that no reader ever sees a part of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteFile {
    /// The absolute path; symbolic links are followed, as `cp` would.
    pub path: Vec<u8>,
    /// Permission bits (0 to 0o7777). If absent: those of the file it replaces,
    /// 0644 for a new one.
    pub mode: Option<u32>,
    /// Make missing parent directories (mode 0755).
    pub create_parents: bool,
}

/// A file to send.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFile {
    /// The absolute path; symbolic links are followed.
    pub path: Vec<u8>,
}

impl<'a> HostExec<'a> {
    /// The message as one frame.
    ///
    /// # Errors
    /// [`Error::TooLong`] when it is longer than its kind allows.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        match self {
            Self::Exec(request) => encode_value(Kind::Exec, request),
            Self::WriteFile(request) => encode_value(Kind::WriteFile, request),
            Self::ReadFile(request) => encode_value(Kind::ReadFile, request),
            Self::ReadTree(request) => encode_value(Kind::ReadTree, request),
            Self::WriteTree(request) => encode_value(Kind::WriteTree, request),
            Self::GetStats => encode_bytes(Kind::GetStats, &[]),
            Self::File(request) => encode_value(Kind::FileRequest, request),
            Self::Stdin(bytes) => encode_bytes(Kind::Stdin, bytes),
            Self::StdinEof => encode_bytes(Kind::StdinEof, &[]),
            Self::Resize(size) => encode_value(Kind::Resize, size),
            Self::Signal(number) => encode_value(Kind::Signal, number),
            Self::Kill => encode_bytes(Kind::Kill, &[]),
        }
    }

    /// The message in `frame`.
    ///
    /// # Errors
    /// [`Error::Malformed`], or [`Error::Unexpected`] when it is not one a host sends here.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, Error> {
        match frame.kind {
            Kind::Exec => frame.parse().map(Self::Exec),
            Kind::WriteFile => frame.parse().map(Self::WriteFile),
            Kind::ReadFile => frame.parse().map(Self::ReadFile),
            Kind::ReadTree => frame.parse().map(Self::ReadTree),
            Kind::WriteTree => frame.parse().map(Self::WriteTree),
            Kind::GetStats => frame.empty(Self::GetStats),
            Kind::FileRequest => frame.parse().map(Self::File),
            Kind::Stdin => Ok(Self::Stdin(frame.payload)),
            Kind::StdinEof => frame.empty(Self::StdinEof),
            Kind::Resize => frame.parse().map(Self::Resize),
            Kind::Signal => frame.parse().map(Self::Signal),
            Kind::Kill => frame.empty(Self::Kill),
            kind => Err(Error::Unexpected(kind)),
        }
    }
}

/// What the guest says on an exec stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestExec<'a> {
    /// The command runs.
    Started {
        /// Its process id in the guest.
        pid: u32,
    },
    /// The command could not be started; nothing follows.
    StartFailed(StartFailed),
    /// Bytes of standard output, of the terminal, or of the file.
    Stdout(&'a [u8]),
    /// Bytes of standard error.
    Stderr(&'a [u8]),
    /// The command took so many bytes of its standard input; as many more may be sent.
    StdinCredit(u32),
    /// The command closed its standard input: nothing sent there will be read.
    StdinClosed,
    /// The command ended, and all it had written was sent; nothing follows.
    Exit(Exit),
    /// The file to read is open; its bytes follow.
    FileOpened(FileInfo),
    /// The whole file was read or written; nothing follows.
    FileDone,
    /// The file or tree could not be read or written; nothing follows.
    FileFailed(FileFailure),
    /// The whole tree was read or written; nothing follows.
    TreeDone(TreeSummary),
    /// How the guest fares; nothing follows.
    Stats(GuestStats),
    /// A file's description.
    FileEntry(FileEntry),
}

/// Why a command could not be started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartFailed {
    /// What sort of failure.
    pub kind: StartFailedKind,
    /// What happened, naming the thing.
    pub message: String,
}

/// What sort of failure kept a command from starting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StartFailedKind {
    /// There is no such command, or its interpreter is missing (a shell's 127).
    NotFound,
    /// It is there but cannot be executed (a shell's 126).
    NotExecutable,
    /// The working directory is missing or cannot be entered.
    BadWorkingDir,
    /// The user or group is not in the guest, or the spec is malformed.
    BadUser,
    /// The request itself is unusable, or the guest lacks a resource.
    Internal,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// The status that `wait` gave.
    pub status: ExitStatus,
    /// It was killed because [`ExecRequest::timeout_ms`] ran out.
    pub timed_out: bool,
    /// The kernel killed a process of the command because memory ran out.
    pub oom: bool,
}

/// The status of a process that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It exited with this code.
    Exited(u8),
    /// This signal ended it.
    Signaled(u8),
}

/// A file about to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// Its size in bytes when it was opened; files of `/proc` say 0 and send more.
    pub size: u64,
    /// Its permission bits (0 to 0o7777).
    pub mode: u32,
}

/// Why a file could not be read or written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFailure {
    /// What sort of failure.
    pub kind: FileFailureKind,
    /// What happened, naming the path.
    pub message: String,
}

/// What sort of failure a file operation met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileFailureKind {
    /// The file, or a directory on the way to it, does not exist.
    NotFound,
    /// The path leads to a directory.
    IsADirectory,
    /// Something on the way to it is not a directory.
    NotADirectory,
    /// Permission was denied.
    PermissionDenied,
    /// The filesystem is read-only.
    ReadOnly,
    /// The filesystem is full.
    NoSpace,
    /// The path is not absolute, too long, or a loop of symbolic links.
    InvalidPath,
    /// Anything else; the message says what.
    Other,
}

impl<'a> GuestExec<'a> {
    /// The message as one frame.
    ///
    /// # Errors
    /// [`Error::TooLong`] when it is longer than its kind allows.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        match self {
            Self::Started { pid } => encode_value(Kind::Started, pid),
            Self::StartFailed(failure) => encode_value(Kind::StartFailed, failure),
            Self::Stdout(bytes) => encode_bytes(Kind::Stdout, bytes),
            Self::Stderr(bytes) => encode_bytes(Kind::Stderr, bytes),
            Self::StdinCredit(bytes) => encode_value(Kind::StdinCredit, bytes),
            Self::StdinClosed => encode_bytes(Kind::StdinClosed, &[]),
            Self::Exit(exit) => encode_value(Kind::Exit, exit),
            Self::FileOpened(info) => encode_value(Kind::FileOpened, info),
            Self::FileDone => encode_bytes(Kind::FileDone, &[]),
            Self::FileFailed(failure) => encode_value(Kind::FileFailed, failure),
            Self::TreeDone(summary) => encode_value(Kind::TreeDone, summary),
            Self::Stats(stats) => encode_value(Kind::Stats, stats),
            Self::FileEntry(entry) => encode_value(Kind::FileEntry, entry),
        }
    }

    /// The message in `frame`.
    ///
    /// # Errors
    /// [`Error::Malformed`], or [`Error::Unexpected`] when it is not one a guest sends here.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, Error> {
        match frame.kind {
            Kind::Started => frame.parse().map(|pid| Self::Started { pid }),
            Kind::StartFailed => frame.parse().map(Self::StartFailed),
            Kind::Stdout => Ok(Self::Stdout(frame.payload)),
            Kind::Stderr => Ok(Self::Stderr(frame.payload)),
            Kind::StdinCredit => frame.parse().map(Self::StdinCredit),
            Kind::StdinClosed => frame.empty(Self::StdinClosed),
            Kind::Exit => frame.parse().map(Self::Exit),
            Kind::FileOpened => frame.parse().map(Self::FileOpened),
            Kind::FileDone => frame.empty(Self::FileDone),
            Kind::FileFailed => frame.parse().map(Self::FileFailed),
            Kind::TreeDone => frame.parse().map(Self::TreeDone),
            Kind::Stats => frame.parse().map(Self::Stats),
            Kind::FileEntry => frame.parse().map(Self::FileEntry),
            kind => Err(Error::Unexpected(kind)),
        }
    }
}
