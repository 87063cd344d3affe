//! The KVM backend against a real `/dev/kvm`, with hand-assembled real-mode payloads.
//!
//! Everything is judged by counts and contents, never by time: a software KVM is slow, but it
//! counts exits like any other.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![allow(missing_docs)]

mod guest;
mod io;
mod irq;
mod memory;
mod run;
