//! Where QEMU connects by itself. Its network cards, alone among its vhost-user devices, refuse an
//! inherited socket and want an address; an abstract one leaves no file behind.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Pid;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::peer_process;

/// A listening socket for one connection of one process.
pub(super) struct Rendezvous {
    listener: UnixListener,
    name: String,
}

impl Rendezvous {
    pub(super) fn open() -> io::Result<Self> {
        let mut random = [0; 16];
        // So few bytes come whole.
        getrandom(&mut random[..], GetRandomFlags::empty())?;
        let name = format!("bantam-{:032x}", u128::from_ne_bytes(random));
        let address = SocketAddr::from_abstract_name(&name)?;
        let listener = UnixListener::bind_addr(&address)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, name })
    }

    /// The name in the abstract namespace.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Waits for the connection of `process`, whose end `ended` becomes readable at; `None` if it
    /// ended before. Anybody on the host can connect, and everybody else is hung up on.
    pub(super) fn accept(
        self,
        process: Pid,
        ended: BorrowedFd<'_>,
    ) -> io::Result<Option<UnixStream>> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if peer_process(&stream).is_ok_and(|peer| peer == Some(process)) {
                        return Ok(Some(stream));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut fds = [
                        PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
                        PollFd::from_borrowed_fd(ended, PollFlags::IN),
                    ];
                    match poll(&mut fds, None) {
                        Err(error) if error != rustix::io::Errno::INTR => return Err(error.into()),
                        _ => {}
                    }
                    let [listener, ended] = fds;
                    if listener.revents().is_empty() && !ended.revents().is_empty() {
                        return Ok(None);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connect(meeting: &Rendezvous) -> UnixStream {
        let address = SocketAddr::from_abstract_name(meeting.name()).unwrap();
        UnixStream::connect_addr(&address).unwrap()
    }

    #[test]
    fn only_the_process_that_is_waited_for_gets_in() {
        let (ended, end) = UnixStream::pair().unwrap();
        let meeting = Rendezvous::open().unwrap();
        let client = connect(&meeting);
        let accepted = meeting.accept(rustix::process::getpid(), ended.as_fd());
        assert!(accepted.unwrap().is_some());
        drop(client);

        let meeting = Rendezvous::open().unwrap();
        let stranger = connect(&meeting);
        drop(end);
        // Process 1 has ended, as far as this can see.
        assert!(meeting.accept(Pid::INIT, ended.as_fd()).unwrap().is_none());
        let mut byte = [0];
        assert_eq!(io::Read::read(&mut &stranger, &mut byte).unwrap_or(0), 0);
    }
}
