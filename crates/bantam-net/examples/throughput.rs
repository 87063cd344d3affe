//! How fast bytes get through the stack, without a virtual machine: a guest of smoltcp's on one
//! side, a socket of the loopback on the other. The CPU time of the stack alone is told apart from
//! the guest's.
//!
//! `cargo run --release -p bantam-net --example throughput`

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    dead_code,
    unreachable_pub
)]

#[path = "../tests/it/guest.rs"]
mod guest;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use bantam_net::{Config, Offloads};
use guest::{Guest, granted};

const TOTAL: usize = 1 << 30;

fn main() {
    let all = Offloads {
        checksum: true,
        segmentation: true,
    };
    for (name, mtu, offloads) in [
        ("mtu 1500, no offloads", 1500, Offloads::default()),
        ("mtu 1500, offloads", 1500, all),
        ("mtu 65520, offloads", 65_520, all),
    ] {
        let config = Config {
            mtu,
            policy: granted(),
            ..Config::default()
        };
        let (wall, inside) = outward(&config, offloads);
        report(name, "guest to host", wall, inside);
        let (wall, inside) = inward(&config, offloads);
        report(name, "host to guest", wall, inside);
    }
    requests();
    datagrams();
}

fn report(name: &str, way: &str, wall: Duration, inside: Duration) {
    let rate = |time: Duration| TOTAL as f64 / time.as_secs_f64() / 1e6;
    println!(
        "{name:24} {way:14} {:7.0} MB/s wall, {:7.0} MB/s by the stack's CPU time",
        rate(wall),
        rate(inside)
    );
}

fn outward(config: &Config, offloads: Offloads) -> (Duration, Duration) {
    let mut guest = Guest::with(config, offloads);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let sink = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = vec![0; 1 << 20];
        let mut got = 0;
        while got < TOTAL {
            got += stream.read(&mut buffer).unwrap();
        }
    });
    let socket = guest.connect_with(guest.host(port), 1 << 20);
    assert!(guest.connected(socket));
    let block = vec![7; 1 << 20];
    let start = Instant::now();
    guest.inside = Duration::ZERO;
    let mut left = TOTAL;
    while !sink.is_finished() {
        if left > 0 {
            left -= guest
                .tcp(socket)
                .send_slice(&block[..left.min(block.len())])
                .unwrap();
        }
        let pause = guest.step();
        if left == 0 || guest.tcp(socket).send_capacity() == guest.tcp(socket).send_queue() {
            guest.wait(pause.min(Duration::from_millis(1)));
        }
    }
    (start.elapsed(), guest.inside)
}

fn inward(config: &Config, offloads: Offloads) -> (Duration, Duration) {
    let mut guest = Guest::with(config, offloads);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let source = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let block = vec![7; 1 << 20];
        for _ in 0..TOTAL / block.len() {
            stream.write_all(&block).unwrap();
        }
    });
    let socket = guest.connect_with(guest.host(port), 1 << 20);
    assert!(guest.connected(socket));
    let start = Instant::now();
    guest.inside = Duration::ZERO;
    let mut got = 0;
    while got < TOTAL {
        let pause = guest.step();
        let socket = guest.tcp(socket);
        let before = got;
        while socket.can_recv() {
            let _ = socket.recv(|bytes| {
                got += bytes.len();
                (bytes.len(), ())
            });
        }
        if got == before {
            guest.wait(pause.min(Duration::from_millis(1)));
        }
    }
    source.join().unwrap();
    (start.elapsed(), guest.inside)
}

/// Small requests, each over a connection of its own.
fn requests() {
    const REQUESTS: u32 = 2000;
    let mut guest = Guest::new(granted());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let mut buffer = [0; 1000];
        while let Ok((mut stream, _)) = listener.accept() {
            if stream.read(&mut buffer).is_ok() {
                let _ = stream.write_all(&buffer);
            }
        }
    });
    let host = guest.host(port);
    let start = Instant::now();
    guest.inside = Duration::ZERO;
    for _ in 0..REQUESTS {
        let socket = guest.connect_with(host, 4096);
        assert!(guest.connected(socket));
        guest.send(socket, b"GET / HTTP/1.1\r\n\r\n");
        assert_eq!(guest.receive_all(socket).unwrap().len(), 1000);
        guest.tcp(socket).abort();
        guest.sockets.remove(socket);
    }
    println!(
        "request on a new connection: {:.0} us, {:.0} us CPU of the stack",
        start.elapsed().as_secs_f64() * 1e6 / f64::from(REQUESTS),
        guest.inside.as_secs_f64() * 1e6 / f64::from(REQUESTS)
    );
}

/// One datagram and its answer after the other.
fn datagrams() {
    const DATAGRAMS: u32 = 5000;
    let mut guest = Guest::new(granted());
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let host = guest.host(socket.local_addr().unwrap().port());
    thread::spawn(move || {
        let mut buffer = [0; 1000];
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..len], from);
        }
    });
    let udp = guest.udp();
    let start = Instant::now();
    guest.inside = Duration::ZERO;
    for _ in 0..DATAGRAMS {
        guest.udp_send(udp, host, &[1; 100]);
        guest.udp_receive(udp);
    }
    println!(
        "datagram and answer: {:.0} us, {:.0} us CPU of the stack",
        start.elapsed().as_secs_f64() * 1e6 / f64::from(DATAGRAMS),
        guest.inside.as_secs_f64() * 1e6 / f64::from(DATAGRAMS)
    );
}
