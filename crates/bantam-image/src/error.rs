//! The crate's one error type.

use std::io;
use std::path::Path;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an image could not be made ready.
///
/// Every message starts with what failed and names the thing: a path, an image, a digest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is neither a reference nor a source this crate knows.
    #[error("not an image name: {text:?}: {why}")]
    Name {
        /// What was given.
        text: String,
        /// The rule it breaks.
        why: String,
    },
    /// A file operation failed.
    #[error("{what}")]
    Io {
        /// The operation and the path it was on.
        what: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The source is not what it claims to be, or is damaged.
    #[error("{what}: {why}")]
    Malformed {
        /// The archive, layer, manifest or file.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// Bytes do not have the digest that names them.
    #[error("{what}: content has digest {actual}, not {expected}")]
    DigestMismatch {
        /// The blob or layer.
        what: String,
        /// The digest it was asked for by.
        expected: String,
        /// The digest it has.
        actual: String,
    },
    /// The image is well formed and needs something this crate does not do.
    #[error("{what}: not supported: {why}")]
    Unsupported {
        /// The image or object.
        what: String,
        /// The feature.
        why: String,
    },
    /// The image exists, for other platforms only.
    #[error("{image}: no image for {wanted}; it offers {}", if offered.is_empty() { "nothing that can be run".to_owned() } else { offered.join(", ") })]
    NoPlatform {
        /// The image.
        image: String,
        /// The platform that was asked for.
        wanted: String,
        /// The platforms on offer.
        offered: Vec<String>,
    },
    /// The source holds several images and none was chosen.
    #[error("{source_name}: holds several images; choose one of: {}", names.join(", "))]
    Ambiguous {
        /// The layout or archive.
        source_name: String,
        /// The names it holds.
        names: Vec<String>,
    },
    /// A named bound was reached; see [`Limits`](crate::Limits).
    #[error("{what}: more than {limit} {unit}")]
    Limit {
        /// What was being read.
        what: String,
        /// The bound.
        limit: u64,
        /// What the bound counts.
        unit: &'static str,
    },
    /// The image is not in the store and [`PullPolicy::Never`](crate::PullPolicy::Never) forbids fetching it.
    #[error("{image}: not in the image store, and pulling is off")]
    NotStored {
        /// The image.
        image: String,
    },
    /// No image of the store has this name or digest.
    #[error("{image}: no such image in the store")]
    NoSuchImage {
        /// What was asked for.
        image: String,
    },
    /// The image cannot be removed while it is used.
    #[error("{image}: in use by {user}")]
    InUse {
        /// The image.
        image: String,
        /// Who uses it.
        user: String,
    },
    /// The registry refused, or could not be talked to.
    #[error("{what}: {why}")]
    Registry {
        /// The reference and host.
        what: String,
        /// The HTTP status and the registry's own message, or the transport's error.
        why: String,
        /// The HTTP status, when there was an answer.
        status: Option<u16>,
    },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let what = what.into();
        move |source| Error::Io { what, source }
    }

    pub(crate) fn path<'a>(verb: &'a str, path: &'a Path) -> impl FnOnce(io::Error) -> Error + 'a {
        move |source| Error::Io {
            what: format!("cannot {verb} {}", path.display()),
            source,
        }
    }

    /// Says where there is no room to write, for an operation that only knows what it wrote.
    pub(crate) fn at(self, path: &Path) -> Error {
        let path = path.display().to_string();
        match self {
            Error::Io { what, source }
                if matches!(
                    source.kind(),
                    io::ErrorKind::StorageFull
                        | io::ErrorKind::QuotaExceeded
                        | io::ErrorKind::FileTooLarge
                        | io::ErrorKind::ReadOnlyFilesystem
                ) && !what.contains(&path) =>
            {
                Error::Io {
                    what: format!("{what} in {path}"),
                    source,
                }
            }
            other => other,
        }
    }

    pub(crate) fn malformed(what: impl Into<String>, why: impl Into<String>) -> Error {
        Error::Malformed {
            what: what.into(),
            why: why.into(),
        }
    }
}
