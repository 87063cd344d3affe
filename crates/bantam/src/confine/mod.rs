//! What a process gives up for good before it serves an untrusted guest.
//!
//! [`confine`] takes away the file system but for what is granted, signals to other processes, and
//! the system calls that nothing of ours makes. [`start_no_more_programs`] takes away starting
//! programs, when all that are needed run. Both hold for every program started after them, and
//! neither can be undone.

#[cfg_attr(target_os = "linux", path = "linux.rs")]
#[cfg_attr(not(target_os = "linux"), path = "other.rs")]
mod sys;

use std::path::PathBuf;

pub(crate) use sys::{confine, start_no_more_programs};

/// What may be done with a path, and with everything beneath it if it is a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Right {
    /// Read it.
    Read,
    /// Read it and run it as a program.
    Run,
    /// Read, write and control a device.
    Device,
    /// Anything: make, change, remove.
    Own,
    /// Look into directories, rename and remove what is in them, without reading or changing a file.
    Remove,
}

/// Part of the file system that stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grant {
    /// Where; what is not there is no error.
    pub(crate) path: PathBuf,
    pub(crate) right: Right,
}

impl Grant {
    pub(crate) fn new(right: Right, path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            right,
        }
    }
}

/// How far a process on this host can be confined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Confinement {
    /// Files, and signals to other processes (Landlock).
    pub files: bool,
    /// System calls (seccomp).
    pub system_calls: bool,
}

impl Confinement {
    /// What the host's kernel offers, without using it.
    #[must_use]
    pub fn probe() -> Self {
        sys::probe()
    }
}
