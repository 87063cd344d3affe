//! The devices against a driver that plays by the rules, and against one that does not.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation
)]

mod devices;
mod hostile;
mod kinds;
mod limits;
mod net;
mod net_driver;
mod random;
mod registers;
#[cfg(feature = "vhost-user")]
mod vhost_user;
mod vsock;
mod vsock_calls;
mod vsock_driver;
