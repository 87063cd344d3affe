//! The crate from outside: hand-made and real images in, EROFS files out.

mod common;
mod formats;
mod hostile;
mod layers;
mod model;
mod real;
mod registry;
mod sources;
mod store;
