//! The one fork of the agent.
//!
//! The agent has a single thread, so a plain copy of it is a sane process. The child
//! still allocates nothing: everything it needs is laid out before.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use nix::errno::Errno;
use nix::libc;
use nix::unistd::Pid;

/// Everything a command needs to start.
pub(crate) struct Plan {
    /// The files to try, in order.
    pub(crate) programs: Vec<CString>,
    /// The arguments, the command's name first.
    pub(crate) argv: Vec<CString>,
    /// The environment.
    pub(crate) env: Vec<CString>,
    /// The working directory.
    pub(crate) cwd: CString,
    /// Who to become; `None` stays what the agent is.
    pub(crate) credentials: Option<Credentials>,
    /// Standard input is a terminal to take as the controlling one.
    pub(crate) tty: bool,
}

/// Who a command runs as.
pub(crate) struct Credentials {
    /// User id.
    pub(crate) uid: u32,
    /// Group id.
    pub(crate) gid: u32,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
}

/// The step at which a child gave up, as it reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Step {
    /// Session, descriptors or terminal.
    SetUp = 0,
    /// `chdir`.
    WorkingDir = 1,
    /// `setgroups`, `setgid` or `setuid`.
    User = 2,
    /// `execve`.
    Exec = 3,
}

/// `CLONE_INTO_CGROUP` of `clone3(2)`; libc's constant has the wrong width.
const CLONE_INTO_CGROUP: u64 = 1 << 33;

/// `CLOSE_RANGE_CLOEXEC` of `close_range(2)`.
const CLOSE_RANGE_CLOEXEC: libc::c_uint = 1 << 2;

/// Bytes of a child's report: the step, then the error number, little-endian.
pub(crate) const REPORT_LEN: usize = 5;

/// Decodes a child's report.
pub(crate) fn decode_report(report: [u8; REPORT_LEN]) -> (Step, Errno) {
    let [step, a, b, c, d] = report;
    let step = match step {
        1 => Step::WorkingDir,
        2 => Step::User,
        3 => Step::Exec,
        _ => Step::SetUp,
    };
    (step, Errno::from_raw(i32::from_le_bytes([a, b, c, d])))
}

/// Starts a child that becomes the planned command with the three `stdio`
/// descriptors, in `cgroup` from its first instruction. If it cannot, it writes a
/// report to `report`; if it can, that descriptor closes with nothing written.
///
/// No descriptor given may be 0, 1 or 2.
///
/// # Errors
/// As `clone3` says.
pub(crate) fn spawn(
    plan: &Plan,
    stdio: [BorrowedFd<'_>; 3],
    report: BorrowedFd<'_>,
    cgroup: Option<BorrowedFd<'_>>,
) -> nix::Result<Pid> {
    let argv = pointers(&plan.argv);
    let env = pointers(&plan.env);
    let stdio = stdio.map(|fd| fd.as_raw_fd());
    let report = report.as_raw_fd();
    match fork(cgroup)? {
        0 => {
            // SAFETY: this is the child, and `argv` and `env` are null-terminated
            // arrays of pointers into `plan`, which all live on its copy of the stack.
            let (step, error) = unsafe { become_command(plan, &argv, &env, stdio) };
            let [a, b, c, d] = (error as i32).to_le_bytes();
            let bytes = [step as u8, a, b, c, d];
            // SAFETY: `write` reads REPORT_LEN bytes of a live array; `_exit` ends
            // the child without running anything of the agent's.
            unsafe {
                libc::write(report, bytes.as_ptr().cast(), bytes.len());
                libc::_exit(127)
            }
        }
        pid => Ok(Pid::from_raw(pid)),
    }
}

/// Sends a signal by number, real-time ones too, to the process group of a child that
/// [`spawn`] started. A number that is no signal does nothing.
pub(crate) fn signal_group(leader: Pid, number: u8) {
    let number = libc::c_int::from(number);
    // SAFETY: `kill` takes numbers only and touches no memory.
    unsafe {
        // A child that does not lead its group yet is still alone.
        if libc::kill(-leader.as_raw(), number) < 0 {
            libc::kill(leader.as_raw(), number);
        }
    }
}

/// Runs `work` in a child of the agent: for what may block. The child ends with it. It has
/// no descriptor of the agent's but `kept`: as long as it lived, no command would see the
/// end of its input otherwise.
///
/// # Errors
/// As `clone3` says.
pub(crate) fn run_in_child(kept: BorrowedFd<'_>, work: impl FnOnce()) -> nix::Result<Pid> {
    match fork(None)? {
        0 => {
            let kept = kept.as_raw_fd().unsigned_abs();
            for (first, last) in [(3, kept.saturating_sub(1)), (kept + 1, libc::c_uint::MAX)] {
                if first <= last {
                    // SAFETY: takes numbers only. Owners of these descriptors exist in the
                    // child, but it ends by `_exit` and never drops or uses them.
                    unsafe {
                        libc::syscall(libc::SYS_close_range, first, last, 0);
                    }
                }
            }
            work();
            // SAFETY: `_exit` only ends the child.
            unsafe { libc::_exit(0) }
        }
        pid => Ok(Pid::from_raw(pid)),
    }
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    let mut pointers: Vec<_> = strings.iter().map(|string| string.as_ptr()).collect();
    pointers.push(std::ptr::null());
    pointers
}

/// `fork`, straight into a cgroup: moving a process there later costs the kernel a
/// grace period.
fn fork(cgroup: Option<BorrowedFd<'_>>) -> nix::Result<libc::pid_t> {
    // SAFETY: all-zero is a valid clone_args; it asks for a plain fork.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.exit_signal = u64::from(libc::SIGCHLD.unsigned_abs());
    if let Some(cgroup) = cgroup {
        arguments.flags = CLONE_INTO_CGROUP;
        arguments.cgroup = u64::from(cgroup.as_raw_fd().unsigned_abs());
    }
    // SAFETY: without CLONE_VM the child gets a copy of this memory and goes on from
    // here with its own stack; the agent has no other thread whose locks it could miss.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw const arguments,
            size_of::<libc::clone_args>(),
        )
    };
    let pid = Errno::result(pid)?;
    libc::pid_t::try_from(pid).map_err(|_| Errno::EOVERFLOW)
}

/// The child's way to `execve`; returns only what went wrong.
///
/// # Safety
/// Only in a fresh child. `argv` and `env` must be null-terminated arrays of
/// pointers to null-terminated strings.
unsafe fn become_command(
    plan: &Plan,
    argv: &[*const libc::c_char],
    env: &[*const libc::c_char],
    stdio: [RawFd; 3],
) -> (Step, Errno) {
    // SAFETY: system calls of a child on its own state; every pointer is to live
    // memory of `plan`, `argv`, `env` or this frame.
    unsafe {
        if libc::setsid() < 0 {
            return (Step::SetUp, Errno::last());
        }
        for (target, fd) in (0..).zip(stdio) {
            if libc::dup2(fd, target) < 0 {
                return (Step::SetUp, Errno::last());
            }
        }
        // Ours close themselves; this is for what the agent may have been started with.
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            CLOSE_RANGE_CLOEXEC,
        );
        if plan.tty && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return (Step::SetUp, Errno::last());
        }
        // What the agent blocks and ignores for itself.
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        // As root, so that a directory closed to the user can still be worked in.
        if libc::chdir(plan.cwd.as_ptr()) < 0 {
            return (Step::WorkingDir, Errno::last());
        }
        if let Some(credentials) = &plan.credentials {
            let groups = &credentials.groups;
            if libc::setgroups(groups.len(), groups.as_ptr()) < 0
                || libc::setgid(credentials.gid) < 0
                || libc::setuid(credentials.uid) < 0
            {
                return (Step::User, Errno::last());
            }
        }
        // As execvp(3): a file that may not be executed decides only if no later
        // one can be.
        let mut decided = Errno::ENOENT;
        for program in &plan.programs {
            libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr());
            match Errno::last() {
                Errno::ENOENT | Errno::ENOTDIR => {}
                Errno::EACCES => decided = Errno::EACCES,
                error => return (Step::Exec, error),
            }
        }
        (Step::Exec, decided)
    }
}
