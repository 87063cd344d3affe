//! What the fuzz targets do with their bytes, and what they begin with.
//!
//! A module for each target: `run` takes one input and panics where an invariant does not hold, `seeds` makes the
//! inputs that libFuzzer begins with. They are made by code, so that the repository holds no blobs.

pub mod documents;
pub mod frames;
mod image;
pub mod kernel;
pub mod layers;
pub mod names;
pub mod protocol;
pub mod tree;

// The independent reader and the archive writer of the image tests.
#[allow(dead_code, clippy::all)]
#[path = "../../crates/bantam-image/tests/it/common/erofs.rs"]
mod erofs;
#[allow(dead_code, clippy::all)]
#[path = "../../crates/bantam-image/tests/it/common/tarball.rs"]
mod tarball;

// What `names` needs of modules that are the image crate's own.
#[allow(dead_code, unused_imports, clippy::all)]
#[path = "../../crates/bantam-image/src/registry/auth.rs"]
mod auth;
mod config {
    //! The one function that `auth` takes from its own crate.
    use serde::{Deserialize, Deserializer};

    pub(crate) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: Default + Deserialize<'de>,
    {
        Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
    }
}

/// Names the folder for seeds; without it none are written.
pub const SEEDS: &str = "BANTAM_FUZZ_SEEDS";

/// Writes the inputs to begin with, before libFuzzer reads its corpus.
pub fn write_seeds(seeds: Vec<Vec<u8>>) {
    let Some(dir) = std::env::var_os(SEEDS) else {
        return;
    };
    let dir = std::path::PathBuf::from(dir);
    std::fs::create_dir_all(&dir).expect("creating the folder for seeds");
    for (i, seed) in seeds.iter().enumerate() {
        std::fs::write(dir.join(format!("seed-{i:02}")), seed).expect("writing a seed");
    }
}

/// Takes values from the front of an input; zeros when it is used up.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub(crate) fn number(&mut self) -> u64 {
        let mut all = [0; 8];
        // A small number mostly, a large one sometimes.
        let len = match self.byte() % 8 {
            0..5 => 1,
            5 => 2,
            6 => 4,
            _ => 8,
        };
        let taken = self.bytes(len);
        all[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(all)
    }
}
