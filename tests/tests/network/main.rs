//! A machine's network, from both of its ends: real clients in the guest, real servers outside.
//!
//! `loopback` has servers on this host's loopback. The others have a [`World`] each: namespaces of
//! their own in which a public server has a public address, and from which there is no way out.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

mod card;
mod clients;
mod flows;
mod loopback;
mod names;
mod policy;
mod ports;

use std::net::{TcpListener, UdpSocket};
use std::thread;
use std::time::Duration;

use bantam::{Machine, NetworkConfig};
use bantam_e2e::{Asked, DnsServer, Reply, World};
use serde_json::Value;

/// Ends a wait in a guest for what is sure to come.
const LIMIT: Duration = Duration::from_secs(150);

/// Longest time in which a refusal must have reached a program in the guest. A connection without
/// any answer takes minutes.
const AT_ONCE: f64 = 10.0;

/// A machine of the image with clients.
fn start(world: &World, network: NetworkConfig) -> Machine {
    world
        .home
        .builder()
        .boot_timeout(Duration::from_secs(200))
        .network(network)
        .start()
        .unwrap()
}

/// Runs a script in a machine: its exit code, and what it wrote.
fn run(machine: &Machine, script: &str) -> (i32, String) {
    let out = machine
        .exec(["bash", "-c", script])
        .timeout(LIMIT)
        .output()
        .unwrap();
    let text = [out.stdout, out.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    (out.status.exit_code().into(), text)
}

#[track_caller]
fn succeed(machine: &Machine, script: &str) -> String {
    let (code, text) = run(machine, script);
    assert_eq!(code, 0, "{script}: {text}");
    text
}

/// Something that a program in the guest tried, and what became of it.
#[derive(Debug)]
struct Tried {
    /// `tcp ADDRESS PORT`, `udp ADDRESS PORT` or `ping ADDRESS`.
    what: String,
    /// `ok`, the name of an error, or `timeout`.
    result: String,
    /// How long it took in the guest.
    seconds: f64,
}

/// Tries all at the same time, by programs in the guest.
fn attempt(machine: &Machine, what: &[&str]) -> Vec<Tried> {
    let command = ["python3", "-c", include_str!("attempt.py")];
    let out = machine
        .exec(command.iter().chain(what))
        .timeout(LIMIT)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    tried(&out.stdout)
}

/// What `attempt.py` printed.
fn tried(stdout: &[u8]) -> Vec<Tried> {
    let text = String::from_utf8_lossy(stdout);
    let one = |line: &str| {
        let value: Value = serde_json::from_str(line).unwrap();
        let field = |name: &str| value[name].as_str().unwrap().to_owned();
        Tried {
            what: field("what"),
            result: field("result"),
            seconds: value["seconds"].as_f64().unwrap(),
        }
    };
    text.lines().map(one).collect()
}

/// Every one was refused, and soon.
#[track_caller]
fn assert_refused(tried: &[Tried]) {
    for one in tried {
        let refused = match one.what.split(' ').next() {
            Some("tcp") => one.result == "ECONNREFUSED",
            Some("udp") => ["EHOSTUNREACH", "EACCES"].contains(&one.result.as_str()),
            _ => one.result == "prohibited",
        };
        assert!(refused, "{one:?}");
        assert!(one.seconds < AT_ONCE, "{one:?}");
    }
}

#[track_caller]
fn assert_reached(tried: &[Tried]) {
    for one in tried {
        assert_eq!(one.result, "ok", "{one:?}");
    }
}

/// A server in the internet that greets every connection with its client's address.
fn greet(world: &World, address: &str, port: u16) {
    let listener = world.internet(|| TcpListener::bind((address, port)).unwrap());
    greet_on(listener);
}

fn greet_on(listener: TcpListener) {
    use std::io::Write;
    thread::spawn(move || {
        while let Ok((mut stream, client)) = listener.accept() {
            // A client that has gone is the test's concern, not the server's.
            let _ = stream.write_all(format!("hello {}\n", client.ip()).as_bytes());
        }
    });
}

/// A UDP echo server in the internet.
fn echo(world: &World, address: &str, port: u16) {
    let socket = world.internet(|| UdpSocket::bind((address, port)).unwrap());
    echo_on(socket);
}

fn echo_on(socket: UdpSocket) {
    thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while let Ok((len, client)) = socket.recv_from(&mut bytes) {
            // As above.
            let _ = socket.send_to(&bytes[..len], client);
        }
    });
}

/// A name server in the internet.
fn name_server(
    world: &World,
    address: &str,
    answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
) -> DnsServer {
    let (udp, tcp) = world.internet(|| sockets(address));
    DnsServer::start(udp, tcp, answer)
}

fn sockets(address: &str) -> (UdpSocket, TcpListener) {
    let udp = UdpSocket::bind((address, 53)).unwrap();
    (udp, TcpListener::bind((address, 53)).unwrap())
}
