//! An agent as an ordinary process on a Unix socket, and a host's side of it.
#![allow(dead_code)] // each test file uses its own part

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use bantam_protocol::{
    ExecRequest, Exit, ExitStatus, FileEntry, FileFailure, FileInfo, GuestExec, GuestStats,
    HostExec, Kind, MAX_DATA_LEN, ReadFile, STDIN_WINDOW, StartFailed, TreeSummary, WriteFile,
    read_frame, write_frame,
};

/// A running agent; killed when dropped.
pub(crate) struct Agent {
    process: Child,
    dir: tempfile::TempDir,
}

impl Agent {
    pub(crate) fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_bantam-agent"))
            .arg("--serve")
            .stdin(Stdio::from(OwnedFd::from(listener)))
            .spawn()
            .unwrap();
        Self { process, dir }
    }

    /// A directory for the test's own files.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn connect(&self) -> Stream {
        let socket = UnixStream::connect(self.dir.path().join("socket")).unwrap();
        Stream {
            socket,
            buffer: Vec::new(),
        }
    }

    pub(crate) fn exec(&self, request: ExecRequest) -> Stream {
        let mut stream = self.connect();
        stream.send(&HostExec::Exec(request));
        stream
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, request: ExecRequest) -> Output {
        self.exec(request).finish()
    }

    /// Runs a shell script to its end.
    pub(crate) fn sh(&self, script: &str) -> Output {
        self.run(sh(script))
    }

    pub(crate) fn read_file(&self, path: &Path) -> Result<(FileInfo, Vec<u8>), FileFailure> {
        let mut stream = self.connect();
        let path = path.to_str().unwrap().into();
        stream.send(&HostExec::ReadFile(ReadFile { path }));
        let mut opened = None;
        let mut content = Vec::new();
        loop {
            match stream
                .receive()
                .expect("the transfer ended without a result")
            {
                Message::FileOpened(info) => opened = Some(info),
                Message::Stdout(bytes) => content.extend(bytes),
                Message::FileDone => return Ok((opened.unwrap(), content)),
                Message::FileFailed(failure) => return Err(failure),
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    pub(crate) fn write_file(&self, request: WriteFile, content: &[u8]) -> Result<(), FileFailure> {
        let mut stream = self.connect();
        stream.send(&HostExec::WriteFile(request));
        for piece in content.chunks(MAX_DATA_LEN) {
            // A guest that has already answered hangs up.
            if write_frame(&mut stream.socket, Kind::Stdin, piece).is_err() {
                break;
            }
        }
        let _ = write_frame(&mut stream.socket, Kind::StdinEof, &[]);
        match stream.receive() {
            Some(Message::FileDone) => Ok(()),
            Some(Message::FileFailed(failure)) => Err(failure),
            other => panic!("unexpected {other:?}"),
        }
    }

    /// The most memory the agent ever used, in KiB.
    pub(crate) fn peak_memory_kib(&self) -> u64 {
        self.status("VmHWM:")
    }

    /// How often the agent had nothing to do.
    pub(crate) fn times_slept(&self) -> u64 {
        self.status("voluntary_ctxt_switches:")
    }

    fn status(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()));
        let status = status.unwrap();
        let value = status.lines().find_map(|line| line.strip_prefix(field));
        let mut words = value.unwrap().split_whitespace();
        words.next().unwrap().parse().unwrap()
    }

    /// Descriptors the agent has open.
    pub(crate) fn open_descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.process.id()))
            .unwrap()
            .count()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A request to run a shell script.
pub(crate) fn sh(script: &str) -> ExecRequest {
    command(&["/bin/sh", "-c", script])
}

/// A request to run a command.
pub(crate) fn command(argv: &[&str]) -> ExecRequest {
    ExecRequest {
        argv: argv
            .iter()
            .map(|argument| argument.as_bytes().to_vec())
            .collect(),
        ..ExecRequest::default()
    }
}

/// A message that owns its bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Started(u32),
    StartFailed(StartFailed),
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    StdinCredit(u32),
    StdinClosed,
    Exit(Exit),
    FileOpened(FileInfo),
    FileDone,
    FileFailed(FileFailure),
    TreeDone(TreeSummary),
    Stats(GuestStats),
    FileEntry(FileEntry),
}

/// How a command went.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) end: Result<Exit, StartFailed>,
}

impl Output {
    pub(crate) fn text(&self) -> &str {
        str::from_utf8(&self.stdout).unwrap()
    }

    pub(crate) fn status(&self) -> ExitStatus {
        self.end.as_ref().unwrap().status
    }

    pub(crate) fn failure(&self) -> &StartFailed {
        self.end.as_ref().unwrap_err()
    }
}

/// One exec stream.
pub(crate) struct Stream {
    pub(crate) socket: UnixStream,
    buffer: Vec<u8>,
}

impl Stream {
    pub(crate) fn send(&mut self, message: &HostExec<'_>) {
        self.socket.write_all(&message.encode().unwrap()).unwrap();
    }

    pub(crate) fn receive(&mut self) -> Option<Message> {
        let frame = read_frame(&mut self.socket, &mut self.buffer).unwrap()?;
        Some(match GuestExec::decode(&frame).unwrap() {
            GuestExec::Started { pid } => Message::Started(pid),
            GuestExec::StartFailed(failure) => Message::StartFailed(failure),
            GuestExec::Stdout(bytes) => Message::Stdout(bytes.to_vec()),
            GuestExec::Stderr(bytes) => Message::Stderr(bytes.to_vec()),
            GuestExec::StdinCredit(bytes) => Message::StdinCredit(bytes),
            GuestExec::StdinClosed => Message::StdinClosed,
            GuestExec::Exit(exit) => Message::Exit(exit),
            GuestExec::FileOpened(info) => Message::FileOpened(info),
            GuestExec::FileDone => Message::FileDone,
            GuestExec::FileFailed(failure) => Message::FileFailed(failure),
            GuestExec::TreeDone(summary) => Message::TreeDone(summary),
            GuestExec::Stats(stats) => Message::Stats(stats),
            GuestExec::FileEntry(entry) => Message::FileEntry(entry),
        })
    }

    /// Reads standard output up to and including `mark`; its text.
    pub(crate) fn read_to(&mut self, mark: &str) -> String {
        let mut text = String::new();
        while !text.contains(mark) {
            match self.receive().expect("the stream ended") {
                Message::Stdout(bytes) => text.push_str(str::from_utf8(&bytes).unwrap()),
                Message::Started(_) | Message::StdinCredit(_) => {}
                other => panic!("unexpected {other:?} after {text:?}"),
            }
        }
        text
    }

    /// Reads to the last message, after which the stream must end.
    pub(crate) fn finish(mut self) -> Output {
        let mut stdout = Vec::new();
        let mut stderr = Vec::new();
        let end = loop {
            match self.receive().expect("the stream ended without a result") {
                Message::Stdout(bytes) => stdout.extend(bytes),
                Message::Stderr(bytes) => stderr.extend(bytes),
                Message::Exit(exit) => break Ok(exit),
                Message::StartFailed(failure) => break Err(failure),
                Message::Started(_) | Message::StdinCredit(_) | Message::StdinClosed => {}
                other => panic!("unexpected {other:?}"),
            }
        };
        // The agent leaves it to the host to close first, for a while.
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        assert_eq!(self.receive(), None, "something follows the last message");
        Output {
            stdout,
            stderr,
            end,
        }
    }

    /// Sends standard input within its window, and reads what comes meanwhile.
    pub(crate) fn feed_and_finish(mut self, input: &[u8]) -> Output {
        let mut writer = self.socket.try_clone().unwrap();
        let (credit, window) = std::sync::mpsc::channel::<usize>();
        credit.send(STDIN_WINDOW).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut left = 0;
                for piece in input.chunks(MAX_DATA_LEN) {
                    while left < piece.len() {
                        let Ok(more) = window.recv() else { return };
                        left += more;
                    }
                    left -= piece.len();
                    if write_frame(&mut writer, Kind::Stdin, piece).is_err() {
                        return;
                    }
                }
                let _ = write_frame(&mut writer, Kind::StdinEof, &[]);
            });
            let mut stdout = Vec::new();
            let end = loop {
                match self.receive().expect("the stream ended without a result") {
                    Message::Stdout(bytes) => stdout.extend(bytes),
                    Message::StdinCredit(bytes) => {
                        let _ = credit.send(bytes as usize);
                    }
                    Message::Exit(exit) => break Ok(exit),
                    Message::Started(_) | Message::StdinClosed | Message::Stderr(_) => {}
                    other => panic!("unexpected {other:?}"),
                }
            };
            drop(credit);
            Output {
                stdout,
                stderr: Vec::new(),
                end,
            }
        })
    }
}
