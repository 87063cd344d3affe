//! System calls that have no safe wrapper, and what differs between processors.

pub(crate) mod disk;
mod entry;
pub(crate) mod net;
pub(crate) mod power;
pub(crate) mod process;
pub(crate) mod tty;
