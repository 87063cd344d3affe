//! Connections and datagrams: how they begin, end and break, how many and how large.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bantam::NetworkConfig;
use bantam_e2e::{World, tests_with_world};
use rustix::net::sockopt::set_socket_linger;

use super::{LIMIT, assert_reached, attempt, echo, greet, start, succeed};

/// Bytes that fill every buffer on the way many times over.
const BULK: usize = 8 << 20;

/// What a guest's Python script begins with: `c`, connected to a server.
fn connected(address: &str, port: u16) -> String {
    format!(
        "import socket, struct, sys\n\
         c = socket.create_connection(({address:?}, {port}), 60)\n\
         def rest():\n    n = 0\n    while d := c.recv(65536): n += len(d)\n    return n\n"
    )
}

fn python(machine: &bantam::Machine, script: &str) -> String {
    succeed(machine, &format!("exec python3 - <<'END'\n{script}\nEND"))
}

/// A listener in the internet whose connections go to `serve`, one after the other; what that
/// returns is received.
fn serve<T: Send + 'static>(
    world: &World,
    port: u16,
    serve: impl Fn(TcpStream) -> T + Send + 'static,
) -> mpsc::Receiver<T> {
    let listener = world.internet(|| TcpListener::bind((World::PUBLIC, port)).unwrap());
    let (results, received) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            if results.send(serve(stream.unwrap())).is_err() {
                return;
            }
        }
    });
    received
}

fn read_all(stream: &mut TcpStream) -> Result<usize, ErrorKind> {
    let mut all = Vec::new();
    stream
        .read_to_end(&mut all)
        .map(|_| all.len())
        .map_err(|error| error.kind())
}

/// Ends a connection with a reset.
fn reset(stream: TcpStream) {
    set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
}

/// A connection of a client on the host to a server in the guest.
fn to_guest(machine: &bantam::Machine, port: u16) -> TcpStream {
    let stream = TcpStream::connect(machine.network().unwrap().host_port(port).unwrap()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

tests_with_world! {
    fn each_half_of_a_connection_ends_by_itself_and_a_reset_ends_both(world) {
        // Ends after what the guest sent; answers with its length, many times.
        let counted = serve(world, 1001, |mut stream| {
            let len = read_all(&mut stream).unwrap();
            stream.write_all(&vec![7; BULK]).unwrap();
            len
        });
        // Ends its own half first.
        let ended = serve(world, 1002, |mut stream| {
            stream.write_all(&vec![7; BULK]).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            read_all(&mut stream)
        });
        let broken = serve(world, 1003, |mut stream| read_all(&mut stream));
        let breaking = serve(world, 1004, |mut stream| {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            reset(stream);
        });
        let network = NetworkConfig::public()
            .publish("0:1001")
            .and_then(|network| network.publish("0:1002"))
            .unwrap();
        let machine = start(world, network);

        let to = |port| connected(World::PUBLIC, port);
        let script = format!("{}c.sendall(b'x' * {BULK}); c.shutdown(1); print(rest())", to(1001));
        assert_eq!(python(&machine, &script), format!("{BULK}\n"));
        assert_eq!(counted.recv().unwrap(), BULK);

        let script = format!("{}print(rest()); c.sendall(b'x' * {BULK}); c.close()", to(1002));
        assert_eq!(python(&machine, &script), format!("{BULK}\n"));
        assert_eq!(ended.recv().unwrap(), Ok(BULK));

        // The guest resets, with data that was not read and none.
        let linger = "c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); c.close()";
        python(&machine, &format!("{}{linger}", to(1003)));
        assert_eq!(broken.recv().unwrap(), Err(ErrorKind::ConnectionReset));
        python(&machine, &format!("{}c.send(b'x'); {linger}", to(1003)));
        assert_eq!(broken.recv().unwrap(), Err(ErrorKind::ConnectionReset));

        // The server resets.
        let script = format!(
            "{}c.send(b'x')\ntry: print('read', len(c.recv(10)))\nexcept ConnectionResetError: print('reset')",
            to(1004)
        );
        assert_eq!(python(&machine, &script), "reset\n");
        breaking.recv().unwrap();

        // The same with the client outside: a server that answers after the end, then one that
        // resets.
        let server = "import socket, struct\n\
            a, b = socket.create_server(('', 1001)), socket.create_server(('', 1002))\n\
            open('/tmp/ready', 'w')\n\
            c, _ = a.accept(); n = 0\n\
            while d := c.recv(65536): n += len(d)\n\
            c.sendall(b'y' * n); c.close()\n\
            c, _ = b.accept(); c.recv(1)\n\
            c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); c.close()\n\
            c, _ = b.accept(); c.sendall(b'!')\n\
            try: c.recv(1); print('end')\n\
            except ConnectionResetError: print('reset')\n";
        let running = machine.exec(["python3", "-c", server]).spawn().unwrap();
        succeed(&machine, "until [ -e /tmp/ready ]; do sleep 0.1; done");
        let mut stream = to_guest(&machine, 1001);
        stream.write_all(&vec![1; BULK]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(&mut stream), Ok(BULK));
        let mut stream = to_guest(&machine, 1002);
        stream.write_all(&[1]).unwrap();
        assert_eq!(read_all(&mut stream), Err(ErrorKind::ConnectionReset));
        // Once it is the guest's connection, too.
        let mut stream = to_guest(&machine, 1002);
        stream.read_exact(&mut [0]).unwrap();
        reset(stream);
        let (_, stdout, _) = running.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&stdout), "reset\n");
        // Nothing of all that is left.
        let begun = Instant::now();
        while machine.network().unwrap().stats().tcp_flows > 0 {
            assert!(begun.elapsed() < LIMIT, "{:?}", machine.network().unwrap().stats());
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn who_does_not_answer_is_told_apart_from_who_refuses(world) {
        // Nobody takes these connections.
        let idle = world.internet(|| TcpListener::bind((World::PUBLIC, 2001)).unwrap());
        greet(world, World::PUBLIC, 80);
        let machine = start(world, NetworkConfig::public().allow_private());
        let idle_script = format!(
            "{}c.settimeout(5); n = 0\ntry:\n    while True: n += c.send(b'x' * 65536)\n\
             except TimeoutError: print('full' if n < 64 << 20 else n)",
            connected(World::PUBLIC, 2001)
        );
        assert_eq!(python(&machine, &idle_script), "full\n");
        // All at once, and beside each other.
        let tried = attempt(&machine, &[
            "tcp 9.9.9.9 2002", "udp 9.9.9.9 2002", "tcp 2620:fe::9 2002", "udp 2620:fe::9 2002",
            "tcp 192.168.77.99 80", "tcp fd77::99 80", "tcp 9.9.9.9 80",
        ]);
        let results: Vec<_> = tried.iter().map(|one| one.result.as_str()).collect();
        assert_eq!(results, [
            "ECONNREFUSED", "ECONNREFUSED", "ECONNREFUSED", "ECONNREFUSED",
            "EHOSTUNREACH", "EHOSTUNREACH", "ok",
        ], "{tried:#?}");
        drop(idle);
    }

    fn a_thousand_connections_are_open_at_once(world) {
        const FLOWS: usize = 1000;
        let listener = world.internet(|| TcpListener::bind((World::PUBLIC, 3001)).unwrap());
        thread::spawn(move || {
            let serve = |mut stream: TcpStream| {
                let mut byte = [0];
                while matches!(stream.read(&mut byte), Ok(1)) && stream.write_all(&byte).is_ok() {}
            };
            for stream in listener.incoming() {
                let builder = thread::Builder::new().stack_size(1 << 16);
                builder.spawn(move || serve(stream.unwrap())).unwrap();
            }
        });
        let home = &world.home;
        home.started("m", &["--net"]);
        let script = format!(
            "import socket\n\
             all = [socket.create_connection(('{}', 3001), 100) for _ in range({FLOWS})]\n\
             for round in b'ab':\n\
             \x20   for c in all: c.send(bytes([round]))\n\
             \x20   for c in all: assert c.recv(1)[0] == round\n\
             print(len(all))",
            World::PUBLIC
        );
        // The usual limit of descriptors, below what this takes, is no limit of the machine.
        let text = home.ok(["exec", "-n", "m", "--", "python3", "-c", &script]);
        assert_eq!(text, format!("{FLOWS}\n"));
        home.delete("m");
    }

    fn datagrams_of_every_size_pass_whole_both_ways(world) {
        for address in [World::PUBLIC, World::PUBLIC_V6] {
            echo(world, address, 7);
        }
        let network = NetworkConfig::public().publish("0:7/udp").unwrap();
        let machine = start(world, network);
        // One packet, one byte more, many fragments, the most there is.
        let script = "import os, socket, sys\n\
            for address, kind, most in (('9.9.9.9', 2, 65507), ('2620:fe::9', 10, 65507)):\n\
            \x20   s = socket.socket(kind, socket.SOCK_DGRAM); s.settimeout(20); s.connect((address, 7))\n\
            \x20   for size in (0, 1, 1232, 1452, 1453, 1472, 1473, 9000, 60000, most):\n\
            \x20       sent = os.urandom(size); s.send(sent)\n\
            \x20       try: got = s.recv(65536)\n\
            \x20       except OSError as error: print(address, size, error); continue\n\
            \x20       if got != sent: print(address, size, len(got))\n\
            print('all')";
        assert_eq!(python(&machine, script), "all\n");

        // The other way, through a port.
        let server = "import socket\n\
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 7)); open('/tmp/ready', 'w')\n\
            while True: d, c = s.recvfrom(65536); s.sendto(d, c)\n";
        let server = machine.exec(["python3", "-c", server]).spawn().unwrap();
        succeed(&machine, "until [ -e /tmp/ready ]; do sleep 0.1; done");
        let client = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        client.connect(machine.network().unwrap().host_port(7).unwrap()).unwrap();
        let mut got = vec![0; 1 << 16];
        for size in [1, 1472, 1473, 9000, 65507] {
            let sent: Vec<u8> = (0..size).map(|i: usize| i.to_le_bytes()[0]).collect();
            client.send(&sent).unwrap();
            let len = client.recv(&mut got).unwrap();
            assert!(got[..len] == sent, "{size}: {len}");
        }
        server.kill();
        assert_reached(&attempt(&machine, &["udp 9.9.9.9 7"]));
    }
}
