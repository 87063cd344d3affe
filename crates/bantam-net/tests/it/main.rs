//! The stack with a guest of smoltcp's on one side and real sockets of this host's loopback on the
//! other. Nothing leaves the host.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod guest;
mod hostile;
mod names;
mod ports;
mod rules;
mod segments;
mod tcp;
mod udp;
