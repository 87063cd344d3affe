//! Who is at the other end of a socket.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::process::Pid;

/// The process that connected to a listening Unix socket, or that listens at the one connected to,
/// as it was then; `None` if it is in a PID namespace that cannot be seen from here.
///
/// Rustix has this, too, and takes the 0 that the kernel says of such a process for a process id.
///
/// # Errors
///
/// What the kernel says of a socket that is not a Unix one.
pub fn peer_process(socket: impl AsFd) -> io::Result<Option<Pid>> {
    Ok(Pid::from_raw(getsockopt(&socket, PeerCredentials)?.pid()))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::process::{Command, Stdio};

    use super::*;

    const NAME: &str = "BANTAM_TEST_PEER_NAME";

    fn address(name: &str) -> SocketAddr {
        SocketAddr::from_abstract_name(name).unwrap()
    }

    #[test]
    fn a_process_of_this_namespace_is_known() {
        let (one, _other) = UnixStream::pair().unwrap();
        let own = rustix::process::getpid();
        assert_eq!(peer_process(&one).unwrap(), Some(own));
    }

    /// The listener is in a PID namespace of its own, so whoever connects from outside has no number there.
    #[test]
    fn a_process_of_an_outer_namespace_has_no_number() {
        let name = format!("bantam-peer-test-{}", std::process::id());
        let helper = "peer::tests::listens_in_a_namespace_of_its_own";
        let mut unshare = Command::new("unshare");
        unshare
            .args([
                "--user",
                "--map-root-user",
                "--pid",
                "--fork",
                "--kill-child",
            ])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", helper, "--ignored", "--nocapture"])
            .env(NAME, &name)
            .stdout(Stdio::piped());
        let mut child = unshare.spawn().unwrap();
        let connected = loop {
            if let Ok(stream) = UnixStream::connect_addr(&address(&name)) {
                break Some(stream);
            }
            if child.try_wait().unwrap().is_some() {
                break None;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        let mut said = String::new();
        child
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut said)
            .unwrap();
        child.wait().unwrap();
        if connected.is_none() {
            println!("skipped: this host lets nobody have a PID namespace");
            return;
        }
        assert!(said.contains("peer: None"), "{said}");
    }

    #[test]
    #[ignore = "another test runs this"]
    fn listens_in_a_namespace_of_its_own() {
        let listener = UnixListener::bind_addr(&address(&std::env::var(NAME).unwrap())).unwrap();
        let (stream, _) = listener.accept().unwrap();
        println!("peer: {:?}", peer_process(&stream).unwrap());
    }
}
