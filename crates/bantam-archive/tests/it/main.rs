//! Trees and archives, with other tar programs and with hostile archives.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod hostile;
mod round;
mod support;
