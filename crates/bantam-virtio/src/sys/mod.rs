//! What differs between host systems: event descriptors, readiness, vectored file access.
//!
//! A port provides the same names over its own primitives (on macOS: kqueue with a user event in
//! the place of epoll and eventfd).

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub use linux::EventFd;
#[cfg(target_os = "linux")]
pub(crate) use linux::*;
