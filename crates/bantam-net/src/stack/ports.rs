//! Ports of the host that lead into the machine.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use mio::net::{TcpListener, UdpSocket};

use crate::{Addresses, Config, Error, PortForward, Protocol, Result};

/// A port that is listened on.
pub(super) enum Bound {
    Tcp(TcpListener, SocketAddr),
    Udp(UdpSocket, SocketAddr),
}

/// Listens on all ports; gives them with the numbers they got.
pub(super) fn bind(config: &Config) -> Result<(Vec<Bound>, Vec<PortForward>)> {
    let mut bound = Vec::new();
    let mut ports = Vec::new();
    for port in &config.ports {
        let failed = |source| Error::Listen {
            protocol: port.protocol,
            address: port.listen,
            source,
        };
        let guest = destination(&config.addresses, port);
        let (one, listen) = bind_one(port, guest).map_err(failed)?;
        bound.push(one);
        ports.push(PortForward {
            listen,
            ..port.clone()
        });
    }
    Ok((bound, ports))
}

fn bind_one(port: &PortForward, guest: SocketAddr) -> io::Result<(Bound, SocketAddr)> {
    match port.protocol {
        Protocol::Tcp => {
            let listener = TcpListener::bind(port.listen)?;
            let address = listener.local_addr()?;
            Ok((Bound::Tcp(listener, guest), address))
        }
        _ => {
            let socket = UdpSocket::bind(port.listen)?;
            let address = socket.local_addr()?;
            Ok((Bound::Udp(socket, guest), address))
        }
    }
}

/// Where a port leads: to the guest's address of the same family as the listener's.
fn destination(addresses: &Addresses, port: &PortForward) -> SocketAddr {
    let ip: IpAddr = if port.guest_loopback {
        Ipv4Addr::LOCALHOST.into()
    } else {
        match port.listen {
            SocketAddr::V4(_) => addresses.guest_v4.into(),
            SocketAddr::V6(_) => addresses.guest_v6.into(),
        }
    };
    SocketAddr::new(ip, port.guest_port)
}
