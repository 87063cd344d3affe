//! A non-blocking stream to the host: frames in, frames out, bounded both ways.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use bantam_protocol::Decoder;
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;
use nix::sys::socket::{MsgFlags, send};
use nix::unistd::read;

/// What [`Connection::receive`] found.
pub(crate) enum Received {
    /// So many bytes are in the buffer.
    Bytes(usize),
    /// Nothing for now.
    Nothing,
    /// The host hung up.
    End,
}

/// One stream and what is on its way out of it.
///
/// Readiness is edge-triggered: a flag stays up until a call would block.
pub(crate) struct Connection {
    fd: OwnedFd,
    /// Cuts what is received into frames.
    pub(crate) decoder: Decoder,
    unsent: Vec<u8>,
    /// What is unsent waits for more, to leave together with it.
    held: bool,
    readable: bool,
    writable: bool,
    gone: bool,
}

impl Connection {
    /// Takes over a non-blocking stream socket.
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            decoder: Decoder::new(),
            unsent: Vec::new(),
            held: false,
            readable: true,
            writable: true,
            gone: false,
        }
    }

    /// Notes what epoll reported.
    pub(crate) fn note(&mut self, flags: EpollFlags) {
        let hung_up = EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR | EpollFlags::EPOLLRDHUP;
        self.readable |= flags.intersects(EpollFlags::EPOLLIN | hung_up);
        self.writable |= flags.intersects(EpollFlags::EPOLLOUT | hung_up);
    }

    /// The host hung up, or broke the protocol.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone
    }

    /// Treats the host as gone.
    pub(crate) fn give_up(&mut self) {
        self.gone = true;
        self.unsent.clear();
    }

    /// Everything sent so far has left, so that one more frame may be made.
    pub(crate) fn is_clear(&self) -> bool {
        (self.unsent.is_empty() || self.held) && !self.gone
    }

    /// Keeps a small frame until the next one is sent, or until [`release`](Self::release).
    pub(crate) fn hold(&mut self, frame: &[u8]) {
        if self.is_clear() {
            self.unsent.extend_from_slice(frame);
            self.held = true;
        } else {
            self.send(frame);
        }
    }

    /// Sends what was held.
    pub(crate) fn release(&mut self) {
        self.held = false;
        self.flush();
    }

    /// Sends an encoded frame, keeping what does not leave at once. Callers that
    /// send data wait for [`is_clear`](Self::is_clear) first; that bounds what is kept.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        if self.gone {
            return;
        }
        if !self.unsent.is_empty() {
            self.unsent.extend_from_slice(frame);
            if self.held {
                self.release();
            }
            return;
        }
        let sent = self.try_send(frame);
        self.unsent
            .extend_from_slice(frame.get(sent..).unwrap_or_default());
    }

    /// Sends a message; one that cannot be encoded ends the connection.
    pub(crate) fn send_message(&mut self, encoded: Result<Vec<u8>, bantam_protocol::Error>) {
        match encoded {
            Ok(frame) => self.send(&frame),
            Err(_) => self.give_up(),
        }
    }

    /// Sends what was kept, as far as it leaves.
    pub(crate) fn flush(&mut self) {
        if self.held || self.unsent.is_empty() || !self.writable {
            return;
        }
        let unsent = std::mem::take(&mut self.unsent);
        let sent = self.try_send(&unsent);
        if !self.gone {
            self.unsent = unsent;
            self.unsent.drain(..sent);
        }
    }

    fn try_send(&mut self, bytes: &[u8]) -> usize {
        let mut sent = 0;
        while self.writable {
            let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) else {
                break;
            };
            match send(self.fd.as_raw_fd(), rest, MsgFlags::MSG_NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => self.writable = false,
                Err(_) => {
                    self.give_up();
                    break;
                }
            }
        }
        sent
    }

    /// Reads what has come, at most a buffer full.
    pub(crate) fn receive(&mut self, buffer: &mut [u8]) -> Received {
        if self.gone {
            return Received::End;
        }
        while self.readable {
            match read(&self.fd, buffer) {
                Ok(0) => {
                    self.give_up();
                    return Received::End;
                }
                Ok(count) => return Received::Bytes(count),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => self.readable = false,
                Err(_) => {
                    self.give_up();
                    return Received::End;
                }
            }
        }
        Received::Nothing
    }

    /// The socket itself, for work that is done elsewhere.
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
