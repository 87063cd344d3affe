//! The choice of platform, in one place.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[path = "linux_x86_64.rs"]
mod imp;

#[cfg(all(target_os = "linux", not(target_arch = "x86_64")))]
#[path = "linux_other.rs"]
mod imp;

pub use imp::EventFd;
pub(crate) use imp::{open, probe};
