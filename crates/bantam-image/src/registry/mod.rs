//! Pulls from registries and their mirrors (OCI distribution-spec "Pull").
//!
//! What holds for every pull:
//!
//! - A registry's challenge decides how it is asked ([`endpoint`]); a registry without one sees no credentials.
//! - What may pass (no connection, 408, 429, 5xx) is tried again, with pauses that double or that the registry asks
//!   for; other refusals are final ([`retry`]).
//! - A blob that breaks off goes on where it stopped. Each read has a time limit and so has the whole, by its size.
//! - All bytes are checked against the digest that the image names, whoever sent them.
//! - If the caller wants it, only addresses of the public internet are connected to ([`public`]).
//! - Proxies come from the environment ([`proxy`]), authorities and client certificates from the host ([`tls`]).

mod address;
mod auth;
mod budget;
mod client;
mod endpoint;
mod fetch;
mod http;
mod options;
mod proxy;
mod public;
mod retry;
mod tls;

pub(crate) use client::Client;
pub(crate) use fetch::remove_partials;
pub use options::{Registries, Timeouts};
