use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use bantam_net::{Config, Error, Limits, Offloads, Policy, PortForward, Protocol, open};
use smoltcp::iface::SocketHandle;
use smoltcp::socket::tcp;

use crate::guest::{Guest, granted, own_address};

fn forward(protocol: Protocol, listen: SocketAddr) -> Config {
    Config {
        policy: Policy::off(),
        ports: vec![PortForward {
            protocol,
            listen,
            guest_port: 8080,
            guest_loopback: false,
        }],
        ..Config::default()
    }
}

fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

/// A server in the guest.
fn listen(guest: &mut Guest) -> SocketHandle {
    let buffer = || tcp::SocketBuffer::new(vec![0; 64 << 10]);
    let mut socket = tcp::Socket::new(buffer(), buffer());
    socket.listen(8080).unwrap();
    guest.sockets.add(socket)
}

#[test]
fn a_client_on_the_host_reaches_a_server_in_the_guest() {
    // Inward, the policy for the guest's own packets does not matter.
    let mut guest = Guest::with(&forward(Protocol::Tcp, loopback()), Offloads::default());
    let server = listen(&mut guest);
    let to = guest.network.host_port(8080).unwrap();
    let client = thread::spawn(move || {
        let mut stream = TcpStream::connect(to).unwrap();
        stream.write_all(b"GET").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer
    });
    guest.until("a client", |guest| {
        guest.tcp(server).is_active().then_some(())
    });
    let peer = guest.tcp(server).remote_endpoint().unwrap();
    assert_eq!(
        std::net::IpAddr::from(peer.addr),
        guest.addresses.gateway_v4,
        "a client on the host comes from the gateway"
    );
    guest.until("the request", |guest| {
        matches!(guest.tcp(server).state(), tcp::State::CloseWait).then_some(())
    });
    assert_eq!(guest.receive_all(server).unwrap(), b"GET");
    guest.send(server, b"200");
    guest.tcp(server).close();
    guest.until("the client", |_| client.is_finished().then_some(()));
    assert_eq!(client.join().unwrap(), b"200");
}

#[test]
fn a_client_elsewhere_is_seen_by_its_own_address() {
    let Some(own) = own_address() else {
        println!(
            "skipped: a_client_elsewhere_is_seen_by_its_own_address: the host has none but loopback"
        );
        return;
    };
    let config = forward(Protocol::Tcp, (own, 0).into());
    let mut guest = Guest::with(&config, Offloads::default());
    let server = listen(&mut guest);
    let client = TcpStream::connect(guest.network.host_port(8080).unwrap()).unwrap();
    guest.until("a client", |guest| {
        guest.tcp(server).may_send().then_some(())
    });
    let peer = guest.tcp(server).remote_endpoint().unwrap();
    assert_eq!(std::net::IpAddr::from(peer.addr), own);
    assert_eq!(peer.port, client.local_addr().unwrap().port());
}

#[test]
fn a_port_without_a_server_in_the_guest_resets_the_client() {
    let mut guest = Guest::with(&forward(Protocol::Tcp, loopback()), Offloads::default());
    let to = guest.network.host_port(8080).unwrap();
    let client = thread::spawn(move || {
        let mut stream = TcpStream::connect(to).unwrap();
        stream.read(&mut [0]).map_err(|error| error.kind())
    });
    guest.until("the client", |_| client.is_finished().then_some(()));
    assert_eq!(
        client.join().unwrap(),
        Err(std::io::ErrorKind::ConnectionReset)
    );
}

#[test]
fn servers_on_the_guests_loopback_are_reached_when_asked() {
    let mut config = forward(Protocol::Udp, loopback());
    config.ports[0].guest_loopback = true;
    let mut guest = Guest::with(&config, Offloads::default());
    guest.takes = 0;
    let client = UdpSocket::bind(loopback()).unwrap();
    client
        .send_to(b"x", guest.network.host_port(8080).unwrap())
        .unwrap();
    // Whether the guest takes it is its kernel's to say.
    let frame = guest.until("a datagram", |guest| {
        let mut frame = None;
        guest.stack.take_frame(|bytes, _| {
            frame = Some(bytes.to_vec());
            true
        });
        frame
    });
    assert_eq!(frame[30..34], [127, 0, 0, 1]);
}

#[test]
fn datagrams_of_several_clients_find_their_way_back() {
    let mut guest = Guest::with(&forward(Protocol::Udp, loopback()), Offloads::default());
    let to = guest.network.host_port(8080).unwrap();
    let server = guest.udp();
    let socket = guest
        .sockets
        .get_mut::<smoltcp::socket::udp::Socket<'_>>(server);
    socket.close();
    socket.bind(8080).unwrap();
    let clients: Vec<_> = (0..5)
        .map(|i| {
            let client = UdpSocket::bind(loopback()).unwrap();
            client
                .set_read_timeout(Some(Duration::from_secs(30)))
                .unwrap();
            client.send_to(&[i], to).unwrap();
            (client, i)
        })
        .collect();
    for _ in &clients {
        let (data, from) = guest.udp_receive(server);
        assert_eq!(from.ip(), guest.addresses.gateway_v4);
        guest.udp_send(server, from, &[data[0] + 100]);
    }
    // The answers go out in this turn.
    guest.step();
    for (client, i) in clients {
        let mut data = [0; 8];
        let (len, from) = client.recv_from(&mut data).unwrap();
        assert_eq!((&data[..len], from), (&[i + 100][..], to));
    }
}

#[test]
fn a_taken_port_is_reported_before_anything_runs() {
    let taken = TcpListener::bind(loopback()).unwrap();
    let address = taken.local_addr().unwrap();
    match open(&forward(Protocol::Tcp, address)).map(|_| ()) {
        Err(error @ Error::Listen { .. }) => {
            assert!(error.to_string().contains(&address.to_string()), "{error}");
        }
        other => panic!("{other:?}"),
    }
    let taken = UdpSocket::bind(loopback()).unwrap();
    let address = taken.local_addr().unwrap();
    assert!(open(&forward(Protocol::Udp, address)).is_err());
}

#[test]
fn a_driver_reset_ends_connections_and_keeps_ports() {
    let mut guest = Guest::with(&forward(Protocol::Tcp, loopback()), Offloads::default());
    let server = listen(&mut guest);
    let to = guest.network.host_port(8080).unwrap();
    let mut client = TcpStream::connect(to).unwrap();
    guest.until("a client", |guest| {
        guest.tcp(server).may_send().then_some(())
    });
    guest.stack.reset(Offloads::default());
    assert_eq!(
        client.read(&mut [0]).map_err(|error| error.kind()),
        Err(std::io::ErrorKind::ConnectionReset)
    );
    guest.tcp(server).abort();
    guest.step();
    let server = listen(&mut guest);
    let _client = TcpStream::connect(to).unwrap();
    guest.until("a client", |guest| {
        guest.tcp(server).may_send().then_some(())
    });
}

#[test]
fn strangers_at_ports_leave_the_guest_its_share() {
    let mut config = forward(Protocol::Udp, loopback());
    config.policy = granted();
    config.limits = Limits {
        datagram_flows: 8,
        ..Limits::default()
    };
    let mut guest = Guest::with(&config, Offloads::default());
    let to = guest.network.host_port(8080).unwrap();
    let server = UdpSocket::bind(loopback()).unwrap();
    let own = guest.udp();
    let host = guest.host(server.local_addr().unwrap().port());
    guest.udp_send(own, host, b"before");
    let mut taken = [0; 16];
    server.set_nonblocking(true).unwrap();
    let (_, back) = guest.until("the guest's datagram", |_| {
        server.recv_from(&mut taken).ok()
    });
    let strangers: Vec<_> = (0..40)
        .map(|_| {
            let client = UdpSocket::bind(loopback()).unwrap();
            client.send_to(b"x", to).unwrap();
            client
        })
        .collect();
    let mut passed = 0;
    guest.until("the strangers' datagrams", |guest| {
        passed += guest.card.received.len();
        guest.card.received.clear();
        (passed >= strangers.len()).then_some(())
    });
    server.send_to(b"still there", back).unwrap();
    let (data, _) = guest.udp_receive(own);
    assert_eq!(data, b"still there");
    assert!(guest.network.stats().datagram_flows <= 8);
}

#[test]
fn connections_that_wait_at_a_full_port_let_the_stack_rest_and_the_guest_connect() {
    let mut config = forward(Protocol::Tcp, loopback());
    config.policy = granted();
    config.limits = Limits {
        tcp_flows: 8,
        ..Limits::default()
    };
    let mut guest = Guest::with(&config, Offloads::default());
    let to = guest.network.host_port(8080).unwrap();
    let servers: Vec<_> = (0..20).map(|_| listen(&mut guest)).collect();
    let strangers: Vec<_> = (0..20).map(|_| TcpStream::connect(to).unwrap()).collect();
    guest.until("connections and rest", |guest| {
        let taken = guest.network.stats().tcp_flows;
        assert!(taken <= 6, "{taken} of 8");
        (taken == 6 && guest.step() > Duration::ZERO).then_some(())
    });
    let server = TcpListener::bind(loopback()).unwrap();
    let own = guest.host(server.local_addr().unwrap().port());
    let own = guest.connect(own);
    guest.until("the guest's own", |guest| {
        guest.connected(own).then_some(())
    });
    // Room for the next.
    drop(strangers);
    guest.until("the others", |guest| {
        for &server in &servers {
            let socket = guest.tcp(server);
            if socket.state() == tcp::State::CloseWait {
                socket.close();
            }
        }
        let open = servers.iter();
        let open = open.filter(|server| guest.tcp(**server).state() == tcp::State::Listen);
        (open.count() == 0).then_some(())
    });
}
