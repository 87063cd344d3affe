//! Where images and machines are kept on the host.

use std::env;
use std::path::{Path, PathBuf};

use crate::Error;

/// The directories of one user's bantam.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    images: PathBuf,
}

impl Home {
    /// Everything below one directory.
    #[must_use]
    pub fn at(dir: &Path) -> Self {
        Self {
            images: dir.join("images"),
        }
    }

    /// `$BANTAM_HOME` if it is set; otherwise images are a cache, in
    /// `$XDG_CACHE_HOME/bantam/images` or `~/.cache/bantam/images`.
    ///
    /// # Errors
    /// [`Error::NoHome`] if no variable says where that is.
    pub fn from_env() -> Result<Self, Error> {
        if let Some(dir) = variable("BANTAM_HOME") {
            return Ok(Self::at(&dir));
        }
        let cache = variable("XDG_CACHE_HOME")
            .or_else(|| variable("HOME").map(|home| home.join(".cache")))
            .ok_or(Error::NoHome)?;
        Ok(Self {
            images: cache.join("bantam/images"),
        })
    }

    /// The content store of images.
    #[must_use]
    pub fn images(&self) -> &Path {
        &self.images
    }
}

/// An environment variable that holds a path; empty means unset, as everywhere.
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}
