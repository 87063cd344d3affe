use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bantam_net::{Config, Limits, Offloads};
use smoltcp::socket::tcp::State;

use crate::guest::{Guest, granted};

const ALL: Offloads = Offloads {
    checksum: true,
    segmentation: true,
};

fn listen() -> (TcpListener, u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// Serves one connection.
fn serve<T: Send + 'static>(
    listener: TcpListener,
    serve: impl FnOnce(TcpStream) -> T + Send + 'static,
) -> JoinHandle<T> {
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        serve(stream)
    })
}

/// Bytes that tell their place.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

fn read_all(mut stream: &TcpStream) -> Vec<u8> {
    let mut data = Vec::new();
    stream.read_to_end(&mut data).unwrap();
    data
}

#[test]
fn bytes_and_ends_go_both_ways_over_both_families() {
    let mut guest = Guest::new(granted());
    let v6 = TcpListener::bind((Ipv6Addr::LOCALHOST, 0));
    let v4 = listen().0;
    for listener in [Some(v4), v6.ok()].into_iter().flatten() {
        let local = listener.local_addr().unwrap();
        let server = serve(listener, |stream| {
            let data = read_all(&stream);
            (&stream).write_all(&[b"got ", &data[..]].concat()).unwrap();
            data
        });
        let to = match local {
            SocketAddr::V4(_) => guest.host(local.port()),
            SocketAddr::V6(_) => guest.host6(local.port()),
        };
        let socket = guest.connect(to);
        assert!(guest.connected(socket));
        guest.send(socket, b"hello");
        // The guest's end is passed on while the other direction stays open.
        guest.tcp(socket).close();
        assert_eq!(guest.receive_all(socket).unwrap(), b"got hello");
        assert_eq!(server.join().unwrap(), b"hello");
        guest.until("both ends", |guest| {
            (guest.network.stats().tcp_flows == 0).then_some(())
        });
    }
}

#[test]
fn the_servers_end_is_passed_on_while_the_guest_goes_on_sending() {
    let mut guest = Guest::new(granted());
    let (listener, port) = listen();
    let server = serve(listener, |stream| {
        (&stream).write_all(b"bye").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        read_all(&stream)
    });
    let socket = guest.connect(guest.host(port));
    assert_eq!(guest.receive_all(socket).unwrap(), b"bye");
    let data = pattern(300_000);
    guest.send(socket, &data);
    guest.tcp(socket).close();
    guest.until("the server", |_| server.is_finished().then_some(()));
    assert!(server.join().unwrap() == data);
}

#[test]
fn a_port_without_a_server_refuses_at_once() {
    let mut guest = Guest::new(granted());
    let (listener, port) = listen();
    drop(listener);
    let socket = guest.connect(guest.host(port));
    assert!(!guest.connected(socket));
    assert_eq!(guest.network.stats().tcp_flows, 0);
}

#[test]
fn a_reset_by_the_server_reaches_the_guest() {
    let mut guest = Guest::new(granted());
    let (listener, port) = listen();
    let server = serve(listener, |stream| {
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    });
    let socket = guest.connect(guest.host(port));
    assert!(guest.receive_all(socket).is_err(), "an end in order");
    server.join().unwrap();
    guest.until("no flow", |guest| {
        (guest.network.stats().tcp_flows == 0).then_some(())
    });
}

#[test]
fn a_reset_by_the_guest_reaches_the_server() {
    let mut guest = Guest::new(granted());
    let (listener, port) = listen();
    let server = serve(listener, |mut stream| {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        stream.read(&mut byte).map_err(|error| error.kind())
    });
    let socket = guest.connect(guest.host(port));
    assert!(guest.connected(socket));
    guest.send(socket, b"x");
    guest.until("the byte", |guest| {
        (guest.tcp(socket).send_queue() == 0).then_some(())
    });
    guest.tcp(socket).abort();
    guest.until("the server", |_| server.is_finished().then_some(()));
    assert_eq!(
        server.join().unwrap(),
        Err(std::io::ErrorKind::ConnectionReset)
    );
}

#[test]
fn megabytes_arrive_whole_with_and_without_offloads() {
    for (mtu, offloads) in [
        (1500, Offloads::default()),
        (1500, ALL),
        (
            1280,
            Offloads {
                checksum: true,
                segmentation: false,
            },
        ),
        (65_520, ALL),
    ] {
        let config = Config {
            mtu,
            policy: granted(),
            ..Config::default()
        };
        let mut guest = Guest::with(&config, offloads);
        let data = pattern(8 << 20);
        let (listener, port) = listen();
        let sent = data.clone();
        let server = serve(listener, move |stream| {
            let reader = stream.try_clone().unwrap();
            let reader = thread::spawn(move || read_all(&reader));
            (&stream).write_all(&sent).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            reader.join().unwrap()
        });
        let socket = guest.connect(guest.host(port));
        assert!(guest.connected(socket));
        let (mut left, mut got) = (&data[..], Vec::new());
        guest.until("both directions", |guest| {
            let socket = guest.tcp(socket);
            if !left.is_empty() {
                let sent = socket.send_slice(left).unwrap();
                left = &left[sent..];
                if left.is_empty() {
                    socket.close();
                }
            }
            while socket.can_recv() {
                let _ = socket.recv(|bytes| {
                    got.extend_from_slice(bytes);
                    (bytes.len(), ())
                });
            }
            (left.is_empty() && got.len() == data.len()).then_some(())
        });
        guest.until("the server", |_| server.is_finished().then_some(()));
        assert!(got == data, "to the guest, mtu {mtu}");
        assert!(server.join().unwrap() == data, "to the host, mtu {mtu}");
        if offloads.segmentation && mtu == 1500 {
            assert!(guest.longest > 16 << 10, "{} bytes", guest.longest);
        }
    }
}

#[test]
fn a_server_that_does_not_read_stops_the_guest_and_loses_nothing() {
    let mut guest = Guest::new(granted());
    let (listener, port) = listen();
    let socket = guest.connect(guest.host(port));
    assert!(guest.connected(socket));
    let (stream, _) = listener.accept().unwrap();
    let data = pattern(64 << 20);
    let mut left = &data[..];
    // As long as something moves.
    let mut still = 0;
    while still < 200 {
        guest.step();
        let sent = guest.tcp(socket).send_slice(left).unwrap();
        left = &left[sent..];
        still = if sent > 0 { 0 } else { still + 1 };
        guest.wait(Duration::from_millis(1));
    }
    assert!(!left.is_empty(), "the guest was never stopped");
    let reader = thread::spawn(move || read_all(&stream));
    guest.send(socket, left);
    guest.tcp(socket).close();
    guest.until("the server", |_| reader.is_finished().then_some(()));
    assert!(reader.join().unwrap() == data);
}

#[test]
fn a_guest_that_does_not_read_stops_the_server_and_loses_nothing() {
    let mut guest = Guest::new(granted());
    let (listener, port) = listen();
    let data = pattern(32 << 20);
    let sent = data.clone();
    let server = serve(listener, move |stream| {
        (&stream).write_all(&sent).unwrap();
    });
    let socket = guest.connect(guest.host(port));
    assert!(guest.connected(socket));
    guest.until("a full window", |guest| {
        let socket = guest.tcp(socket);
        (socket.recv_queue() == socket.recv_capacity()).then_some(())
    });
    for _ in 0..200 {
        guest.step();
        guest.wait(Duration::from_millis(1));
    }
    assert!(!server.is_finished(), "32 MiB are in buffers");
    assert!(guest.receive_all(socket).unwrap() == data);
    server.join().unwrap();
}

#[test]
fn a_thousand_connections_at_once_each_get_their_own_bytes() {
    const FLOWS: usize = 1000;
    raise_descriptors();
    let mut guest = Guest::new(granted());
    let (listener, port) = listen();
    let server = thread::spawn(move || {
        let mut streams: Vec<_> = (0..FLOWS).map(|_| listener.accept().unwrap().0).collect();
        for stream in &mut streams {
            let mut id = [0; 4];
            stream.read_exact(&mut id).unwrap();
            stream.write_all(&id).unwrap();
        }
    });
    let host = guest.host(port);
    let mut sockets = Vec::new();
    for chunk in 0..FLOWS / 100 {
        for i in 0..100 {
            let socket = guest.connect_with(host, 2048);
            sockets.push((socket, u32::try_from(chunk * 100 + i).unwrap()));
        }
        guest.until("connections", |guest| {
            let open = |guest: &mut Guest| {
                sockets
                    .iter()
                    .all(|&(socket, _)| guest.tcp(socket).state() == State::Established)
            };
            open(guest).then_some(())
        });
    }
    assert_eq!(guest.network.stats().tcp_flows, FLOWS as u64);
    for &(socket, id) in &sockets {
        guest.tcp(socket).send_slice(&id.to_be_bytes()).unwrap();
    }
    for &(socket, id) in &sockets {
        assert_eq!(guest.receive_all(socket).unwrap(), id.to_be_bytes());
        guest.tcp(socket).close();
    }
    server.join().unwrap();
    guest.until("no flow", |guest| {
        (guest.network.stats().tcp_flows == 0).then_some(())
    });
}

#[test]
fn connections_above_the_limit_are_reset_and_one_that_ends_makes_room() {
    let config = Config {
        policy: granted(),
        limits: Limits {
            tcp_flows: 2,
            ..Limits::default()
        },
        ..Config::default()
    };
    let mut guest = Guest::with(&config, Offloads::default());
    let (_listener, port) = listen();
    let host = guest.host(port);
    let sockets: Vec<_> = (0..2).map(|_| guest.connect(host)).collect();
    for socket in &sockets {
        assert!(guest.connected(*socket));
    }
    let third = guest.connect(host);
    assert!(!guest.connected(third));
    guest.tcp(sockets[0]).abort();
    guest.until("room", |guest| {
        (guest.network.stats().tcp_flows == 1).then_some(())
    });
    let third = guest.connect(host);
    assert!(guest.connected(third));
}

/// Both ends of each connection are this process's.
fn raise_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
}
