//! Where images and machines are kept on the host.

use std::env;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Error;

/// The directories of one user's bantam.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    images: PathBuf,
    machines: PathBuf,
}

impl Home {
    /// Everything below one directory.
    #[must_use]
    pub fn at(dir: &Path) -> Self {
        let dir = absolute(dir.to_path_buf());
        Self {
            images: dir.join("images"),
            machines: dir.join("machines"),
        }
    }

    /// `$BANTAM_HOME` if it is set; otherwise images are a cache, in
    /// `$XDG_CACHE_HOME/bantam/images` or `~/.cache/bantam/images`, and machines are data, in
    /// `$XDG_DATA_HOME/bantam/machines` or `~/.local/share/bantam/machines`.
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
        let data = variable("XDG_DATA_HOME")
            .or_else(|| variable("HOME").map(|home| home.join(".local/share")))
            .ok_or(Error::NoHome)?;
        Ok(Self {
            images: cache.join("bantam/images"),
            machines: data.join("bantam/machines"),
        })
    }

    /// The content store of images.
    #[must_use]
    pub fn images(&self) -> &Path {
        &self.images
    }

    /// The directories of named machines.
    #[must_use]
    pub fn machines(&self) -> &Path {
        &self.machines
    }
}

/// An environment variable that holds a path; empty means unset, as everywhere.
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(|value| absolute(value.into()))
}

/// A path that means the same elsewhere, where the process of a machine works.
pub(crate) fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}
