//! The crate from outside: hand-made and real images in, EROFS files out.

// Helpers outside of test functions are test code too, which clippy.toml cannot tell.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::print_stdout,
    clippy::unwrap_used
)]

mod buildah;
mod common;
mod endless;
mod formats;
mod hostile;
mod layers;
mod model;
mod real_images;
mod registry;
mod registry_auth;
mod registry_faults;
mod registry_host;
mod registry_public;
mod registry_real;
mod same_process;
mod sources;
mod store;
mod store_manage;
mod vectors;
