//! Kernels, boot structures and vCPU set-up, through the public API.
#![cfg(target_arch = "x86_64")]
// Clippy's leave for tests does not reach helpers outside `#[test]` functions.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod boot;
mod fixture;
mod hostile;
mod kernel;
mod on_kvm;
