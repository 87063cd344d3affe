//! The one error type of the developer commands.

use std::io;
use std::path::{Path, PathBuf};

/// A developer command's failure: what failed, named, and what to do next.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A file operation failed.
    #[error("{doing} {path}: {source}", path = path.display())]
    File {
        /// What was tried: "reading", "writing", ...
        doing: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A program could not be started at all.
    #[error("starting {program}: {source}; `cargo xtask setup` installs what is missing")]
    Start {
        /// The program's name.
        program: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A program ran and failed.
    #[error("{program} failed ({status}){}", tail_block(tail))]
    Program {
        /// The program and its first arguments.
        program: String,
        /// Its exit status in words.
        status: String,
        /// The end of what it said, where that was captured.
        tail: String,
    },
    /// Anything else, already in words.
    #[error("{0}")]
    Other(String),
}

/// Result of a developer command.
pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Wraps a file error: `map_err(Error::file("reading", path))`.
    pub(crate) fn file(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::File {
            doing,
            path,
            source,
        }
    }

    /// An error that is only a sentence.
    pub(crate) fn other(text: impl Into<String>) -> Self {
        Self::Other(text.into())
    }
}

fn tail_block(tail: &str) -> String {
    if tail.trim().is_empty() {
        String::new()
    } else {
        format!("; its last lines:\n{}", tail.trim_end())
    }
}
