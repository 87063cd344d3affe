//! Named machines, from outside: every test has a home of its own, and fails if it leaves
//! anything in it.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

mod growth;
mod killed;
mod lifecycle;
mod rules;
mod together;
mod workload;

use std::time::Duration;

/// Ends a wait for something that is sure to come.
const LIMIT: Duration = Duration::from_secs(60);
