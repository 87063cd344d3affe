//! A machine's network in user space: Ethernet frames of the guest on one side, ordinary sockets of
//! the host on the other. No root, no tap, nothing on the host but sockets, and every protocol under
//! one [`Policy`].
//!
//! # The seam to the device
//!
//! [`open`] gives two ends. [`Stack`] is the network itself. It has no thread: the thread that serves
//! the network card's queues drives it, so that a packet costs no hand-over. [`Network`] is the
//! handle for everybody else: change the policy, read what was refused, count.
//!
//! The thread's loop, with `stack` in its poller beside the queues' kicks:
//!
//! 1. wait until the stack's descriptor ([`AsFd`](std::os::fd::AsFd)) or a kick is readable, or the
//!    time that [`Stack::run`] gave is over;
//! 2. [`Stack::receive`] for each frame the guest made available, up to a batch;
//! 3. [`Stack::run`], which does what is due and gives the time until it must be called again;
//! 4. [`Stack::take_frame`] while there is a buffer of the guest for a frame; if any was taken, go
//!    to 3, for there is room for more.
//!
//! Neither end ever waits for the other. `receive` always takes the frame (TCP has its windows, and
//! what is not TCP may be lost), and when the guest gives no buffers, frames wait in a bounded queue;
//! when that is full, flows wait, and their host sockets with them. Guest to host goes on in the
//! meantime.
//!
//! # Inside
//!
//! * TCP: the guest's end is smoltcp's TCP, one socket set a connection behind our own table, so the
//!   cost of a packet does not depend on how many there are. A guest's SYN is answered when the
//!   host's connection stands: what the host learns (refused, unreachable), the guest learns. Ends
//!   and resets are carried over one by one in both directions.
//! * UDP and echo: one connected socket of the host for each flow. Fragments are put together and
//!   made.
//! * Names: the gateway answers on port 53 and asks the host's servers. What they answer is
//!   remembered for as long as it is valid, for [`Policy::allow_hosts`].
//! * The gateway's address also stands for the host's loopback, when that is granted.
//! * Ports of the host lead to the guest; the guest sees the client's own address, or the gateway's
//!   for clients on the host.
//!
//! A guest's frame is hostile: parsing is bounded, tables have the sizes in [`Limits`], and a frame
//! from an address that is not the guest's is dropped.
//!
//! # Dependencies
//!
//! * `smoltcp` (0BSD; brings bitflags, byteorder, cfg-if, heapless, managed): TCP and every packet
//!   format, DNS among them.
//! * `mio`: edge-triggered readiness on Linux and macOS without unsafe code of ours, and itself a
//!   descriptor that the device's poller can wait for.
//! * `rustix`: ping sockets, routing questions and options of sockets, which the standard library lacks.
//! * `getrandom`: query identifiers and sequence numbers that a guest's peers cannot guess.

#![forbid(unsafe_code)]

mod config;
mod control;
mod dns;
mod error;
mod events;
mod own;
mod policy;
mod slab;
mod stack;

pub use config::{
    Addresses, Config, HOST_NAMES, Limits, MAX_DNS_SERVERS, MAX_MTU, MAX_PORTS, MIN_MTU,
    PortForward,
};
pub use control::{Network, Stats};
pub use error::{Error, Result};
pub use events::{EgressEvent, MAX_EVENTS};
pub use policy::{
    Cidr, CidrRule, Destination, HostRule, MAX_NAME, MAX_PORT_RANGES, Policy, Ports, Protocol,
    Range, Reason, range,
};
pub use stack::{Checksum, FrameInfo, MAX_FRAME, Offloads, Segmentation, Stack, open};
