//! The KVM backend against a real `/dev/kvm`, with hand-assembled real-mode payloads.
//!
//! Everything is judged by counts and contents, never by time: a software KVM is slow, but it
//! counts exits like any other.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
// Clippy's leave for tests does not reach helpers outside `#[test]` functions.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod guest;
mod io;
mod irq;
mod memory;
mod run;
