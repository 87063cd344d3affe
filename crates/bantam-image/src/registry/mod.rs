//! Anonymous pulls from registries (OCI distribution-spec "Pull").

mod auth;
mod client;
mod fetch;

pub(crate) use client::Client;
pub use client::Registries;
