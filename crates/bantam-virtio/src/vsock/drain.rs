//! The last bytes of a device that stopped.
//!
//! A host that reads slowly has up to [`BUF_ALLOC`](super::BUF_ALLOC) bytes of each connection still
//! to come when the guest is gone. A thread of their own delivers them, without the device, its rings
//! or guest memory, and ends when each stream was read or dropped.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use super::connection::Connection;
use crate::sys::Poller;
use crate::warned::Warned;

/// Delivers what `connections` hold and closes each when it is done.
pub(super) fn start(connections: Vec<Connection>, failed: &Arc<Warned>) {
    let warned = failed.clone();
    let thread = std::thread::Builder::new().name("vsock-drain".to_owned());
    let spawned = thread.spawn(move || {
        if let Err(error) = drain(connections)
            && warned.first()
        {
            tracing::warn!(%error, "delivering the last bytes of vsock streams");
        }
    });
    if let Err(error) = spawned
        && failed.first()
    {
        tracing::warn!(%error, "the last bytes of vsock streams are lost");
    }
}

fn drain(connections: Vec<Connection>) -> io::Result<()> {
    let mut poller = Poller::new()?;
    let mut connections: HashMap<u64, Connection> = (0..).zip(connections).collect();
    for (id, connection) in &mut connections {
        connection.drain();
        poller.add(connection.stream(), *id, connection.interest())?;
    }
    let mut ready = Vec::new();
    loop {
        // Also finds the host's end closed: flushing then lets go of the bytes.
        connections.retain(|_, connection| {
            connection.flush();
            connection.has_backlog()
        });
        if connections.is_empty() {
            return Ok(());
        }
        ready.clear();
        poller.wait(&mut ready, None)?;
    }
}
