//! From a request to a child: everything is checked and laid out before the fork.

use std::ffi::{CString, OsStr};
use std::fs::DirBuilder;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use bantam_protocol::{ExecRequest, StartFailed, StartFailedKind, clip_text};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, Uid, fchown, geteuid, pipe2};

use crate::cgroup::Cgroup;
use crate::lookup::{DEFAULT_PATH, candidates, explain, variable};
use crate::sys::process::{Credentials, Plan, Step, spawn};
use crate::sys::tty::open_pty;
use crate::users::Database;

/// A child that was forked and is on its way to `execve`.
pub(crate) struct Child {
    /// Its process id, and the id of its session and process group.
    pub(crate) pid: Pid,
    /// Closes when the command runs; holds a report if it could not be started.
    pub(crate) report: OwnedFd,
    /// Where its standard input is written to, if it is wanted. All non-blocking.
    pub(crate) stdin: Option<OwnedFd>,
    /// Its standard output, or the terminal, unless it is detached.
    pub(crate) stdout: Option<OwnedFd>,
    /// Its standard error, unless it has a terminal.
    pub(crate) stderr: Option<OwnedFd>,
    /// The command's own ends of its output pipes. While they are open, its end does not show in the
    /// pipes, which would wake the agent once more: it learns of that when it reaps the process.
    pub(crate) writers: [Option<OwnedFd>; 2],
    /// What is needed to explain a failed start.
    pub(crate) attempt: Attempt,
}

/// What was tried, for the message if it fails.
pub(crate) struct Attempt {
    command: Vec<u8>,
    programs: Vec<Vec<u8>>,
    cwd: PathBuf,
    user: String,
}

impl Attempt {
    /// What a child's report means.
    pub(crate) fn explain(&self, step: Step, error: Errno) -> StartFailed {
        match step {
            Step::SetUp => internal("the command's session could not be set up", error),
            Step::WorkingDir => bad_working_dir(&self.cwd, error),
            Step::User => StartFailed {
                kind: StartFailedKind::BadUser,
                message: clip_text(format!(
                    "user {:?} could not be taken on: {}",
                    self.user,
                    error.desc()
                )),
            },
            Step::Exec => explain(&self.command, &self.programs, &self.cwd, error),
        }
    }
}

/// Starts what `request` asks for in `cgroup`.
///
/// # Errors
/// What the host is to be told.
pub(crate) fn start(request: ExecRequest, cgroup: Option<&Cgroup>) -> Result<Child, StartFailed> {
    let ExecRequest {
        argv,
        mut env,
        cwd,
        create_cwd,
        user,
        tty,
        stdin,
        timeout_ms: _,
        detach,
        lazy_started: _,
    } = request;
    let command = argv.first().cloned().ok_or_else(|| StartFailed {
        kind: StartFailedKind::Internal,
        message: "the request names no command".into(),
    })?;
    if detach && (tty.is_some() || stdin) {
        return Err(StartFailed {
            kind: StartFailedKind::Internal,
            message: "a detached command has neither a terminal nor standard input".into(),
        });
    }
    let account = Database::load()
        .resolve(user.as_deref())
        .map_err(|message| StartFailed {
            kind: StartFailedKind::BadUser,
            message: clip_text(message),
        })?;
    let cwd = PathBuf::from(OsStr::from_bytes(cwd.as_deref().unwrap_or(b"/")));
    if create_cwd {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&cwd)
            .map_err(|error| {
                let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
                bad_working_dir(&cwd, errno)
            })?;
    }
    if variable(&env, "PATH").is_none() {
        env.push([b"PATH=", DEFAULT_PATH].concat());
    }
    if variable(&env, "HOME").is_none() {
        env.push([b"HOME=", &account.home[..]].concat());
    }
    let programs = candidates(&command, variable(&env, "PATH").unwrap_or(DEFAULT_PATH));
    // An agent without privileges (a test's) stays who it is unless told otherwise.
    let switch = geteuid().is_root() || user.is_some();
    let owner = Uid::from_raw(account.uid);
    let plan = Plan {
        programs: c_strings(&programs, "command")?,
        argv: c_strings(&argv, "argument")?,
        env: c_strings(&env, "environment entry")?,
        cwd: c_string(cwd.as_os_str().as_bytes(), "working directory")?,
        credentials: switch.then_some(Credentials {
            uid: account.uid,
            gid: account.gid,
            groups: account.groups,
        }),
        tty: tty.is_some(),
    };

    let ends = match tty {
        _ if detach => Ends::null(),
        Some(size) => Ends::terminal(size, stdin, owner),
        None => Ends::pipes(stdin, owner),
    }
    .map_err(|error| internal("the command's standard streams could not be made", error))?;
    let (report, report_end) = pipe2(OFlag::O_CLOEXEC)
        .and_then(|(ours, theirs)| Ok((non_blocking(ours)?, theirs)))
        .map_err(|error| internal("the command's report pipe could not be made", error))?;
    let stdio = [
        ends.theirs.0.as_fd(),
        ends.theirs.1.as_ref().unwrap_or(&ends.theirs.0).as_fd(),
        ends.theirs.2.as_ref().unwrap_or(&ends.theirs.0).as_fd(),
    ];
    let group = cgroup.map(AsFd::as_fd);
    let pid = spawn(&plan, stdio, report_end.as_fd(), group)
        .map_err(|error| internal("a process could not be made", error))?;
    let (_, stdout_writer, stderr_writer) = ends.theirs;
    Ok(Child {
        pid,
        report,
        stdin: ends.stdin,
        stdout: ends.stdout,
        stderr: ends.stderr,
        writers: [stdout_writer, stderr_writer],
        attempt: Attempt {
            command,
            programs,
            cwd,
            user: user.unwrap_or_default(),
        },
    })
}

/// The two ends of a command's standard streams.
struct Ends {
    /// Input, output and error; a terminal is all three.
    theirs: (OwnedFd, Option<OwnedFd>, Option<OwnedFd>),
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
}

impl Ends {
    fn null() -> nix::Result<Self> {
        let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC;
        Ok(Self {
            theirs: (open("/dev/null", flags, Mode::empty())?, None, None),
            stdin: None,
            stdout: None,
            stderr: None,
        })
    }

    fn terminal(size: bantam_protocol::Size, stdin: bool, owner: Uid) -> nix::Result<Self> {
        let (master, slave) = open_pty(size)?;
        give_to(&slave, owner)?;
        let stdin = if stdin {
            Some(duplicate(&master)?)
        } else {
            None
        };
        Ok(Self {
            theirs: (slave, None, None),
            stdin,
            stdout: Some(master),
            stderr: None,
        })
    }

    fn pipes(stdin: bool, owner: Uid) -> nix::Result<Self> {
        let (their_in, our_in) = if stdin {
            let (theirs, ours) = pipe2(OFlag::O_CLOEXEC)?;
            give_to(&theirs, owner)?;
            (theirs, Some(non_blocking(ours)?))
        } else {
            let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
            (open("/dev/null", flags, Mode::empty())?, None)
        };
        let (our_out, their_out) = pipe2(OFlag::O_CLOEXEC)?;
        let (our_err, their_err) = pipe2(OFlag::O_CLOEXEC)?;
        give_to(&their_out, owner)?;
        give_to(&their_err, owner)?;
        Ok(Self {
            theirs: (their_in, Some(their_out), Some(their_err)),
            stdin: our_in,
            stdout: Some(non_blocking(our_out)?),
            stderr: Some(non_blocking(our_err)?),
        })
    }
}

/// Lets `owner` open the stream again by name (`/dev/stdout`, the terminal's path).
fn give_to(stream: &OwnedFd, owner: Uid) -> nix::Result<()> {
    if owner.is_root() {
        return Ok(());
    }
    fchown(stream, Some(owner), None)
}

fn non_blocking(fd: OwnedFd) -> nix::Result<OwnedFd> {
    fcntl(&fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(fd)
}

fn duplicate(fd: &OwnedFd) -> nix::Result<OwnedFd> {
    fd.try_clone()
        .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or_default()))
}

fn c_strings(strings: &[Vec<u8>], what: &str) -> Result<Vec<CString>, StartFailed> {
    strings
        .iter()
        .map(|string| c_string(string, what))
        .collect()
}

fn c_string(string: &[u8], what: &str) -> Result<CString, StartFailed> {
    CString::new(string).map_err(|_| StartFailed {
        kind: StartFailedKind::Internal,
        message: clip_text(format!(
            "{what} {:?} contains a NUL byte",
            String::from_utf8_lossy(string)
        )),
    })
}

fn bad_working_dir(cwd: &Path, error: Errno) -> StartFailed {
    StartFailed {
        kind: StartFailedKind::BadWorkingDir,
        message: clip_text(format!(
            "working directory {}: {}",
            cwd.display(),
            error.desc()
        )),
    }
}

fn internal(what: &str, error: Errno) -> StartFailed {
    StartFailed {
        kind: StartFailedKind::Internal,
        message: format!("{what}: {}", error.desc()),
    }
}
