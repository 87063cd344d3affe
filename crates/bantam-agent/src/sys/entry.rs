//! The entry point, without the standard library's own.
//!
//! That one opens `/dev/null` in place of missing standard descriptors and aborts if it
//! cannot; PID 1 starts without descriptors (no console) and without `/dev`. It also
//! saves ten system calls of every boot.
#![allow(unsafe_code)]

use nix::libc;

/// What the C start-up code calls.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))] // the test harness has its own
extern "C" fn main() -> libc::c_int {
    // SAFETY: sets a disposition, at a time when there is no other thread. A write to
    // a pipe that no one reads is to fail, as everywhere in Rust.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    }
    crate::run()
}
