//! How commands end and what is left of them.

use bantam_protocol::{Exit, ExitStatus};

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Its exit code, if it exited.
    pub code: Option<u8>,
    /// The signal that ended it, if one did.
    pub signal: Option<u8>,
    /// It was killed because its time ran out.
    pub timed_out: bool,
    /// The kernel killed a process of it because memory ran out.
    pub oom: bool,
}

impl Status {
    pub(crate) const TIMED_OUT: Self = Self {
        code: None,
        signal: Some(9),
        timed_out: true,
        oom: false,
    };

    /// Whether it exited with 0.
    #[must_use]
    pub fn success(self) -> bool {
        self.code == Some(0) && !self.timed_out
    }

    /// The code a shell would give: the command's own, 124 after a timeout, 128+n after
    /// signal n.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match (self.timed_out, self.code, self.signal) {
            (true, ..) => 124,
            (false, Some(code), _) => code,
            (false, None, Some(signal)) => 128_u8.saturating_add(signal),
            (false, None, None) => 125,
        }
    }
}

impl From<Exit> for Status {
    fn from(exit: Exit) -> Self {
        let (code, signal) = match exit.status {
            ExitStatus::Exited(code) => (Some(code), None),
            ExitStatus::Signaled(signal) => (None, Some(signal)),
        };
        Self {
            code,
            signal,
            timed_out: exit.timed_out,
            oom: exit.oom,
        }
    }
}

/// A finished command and what it wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// How it ended.
    pub status: Status,
    /// Standard output (with a terminal: everything).
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// Bytes of standard output that the command wrote; more than there are in `stdout` if
    /// that was truncated.
    pub stdout_bytes: u64,
    /// Bytes of standard error that the command wrote.
    pub stderr_bytes: u64,
    /// Output over the limit was dropped; see [`Exec::max_output`](crate::Exec::max_output).
    pub truncated: bool,
}

/// A finished command whose output went elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finished {
    /// How it ended.
    pub status: Status,
    /// Bytes of standard output.
    pub stdout_bytes: u64,
    /// Bytes of standard error.
    pub stderr_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        let exit = |status, timed_out| {
            Status::from(Exit {
                status,
                timed_out,
                oom: false,
            })
            .exit_code()
        };
        assert_eq!(exit(ExitStatus::Exited(0), false), 0);
        assert_eq!(exit(ExitStatus::Exited(7), false), 7);
        assert_eq!(exit(ExitStatus::Signaled(9), false), 137);
        assert_eq!(exit(ExitStatus::Signaled(15), false), 143);
        assert_eq!(exit(ExitStatus::Signaled(9), true), 124);
        assert_eq!(exit(ExitStatus::Exited(0), true), 124);
    }
}
