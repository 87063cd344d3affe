//! Ports of the host that lead into a machine.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;

use bantam_e2e::{World, eventually, tests_with_world};

use super::LIMIT;

/// Greets clients with their addresses, by TCP on all of these ports and by UDP on port 53; on
/// 127.0.0.1 only on port 7000.
const SERVER: &str = "
import socket, threading
def greet(l):
    while True:
        c, a = l.accept(); c.sendall(a[0].encode()); c.close()
for port in (8000, 9000, 9001, 9002):
    l = socket.create_server(('::', port), family=socket.AF_INET6, dualstack_ipv6=True)
    threading.Thread(target=greet, args=(l,)).start()
threading.Thread(target=greet, args=(socket.create_server(('127.0.0.1', 7000)),)).start()
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('', 53))
print('ready', flush=True)
while True:
    d, a = u.recvfrom(4096); u.sendto(a[0].encode() + b' ' + d, a)
";

fn greeting(address: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address.parse::<SocketAddr>().unwrap())?;
    stream.set_read_timeout(Some(LIMIT))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

tests_with_world! {
    fn ports_lead_where_they_say_and_from_this_host_alone_unless_said(world) {
        let home = &world.home;
        let ports = [
            "8080:8000", "9000-9002:9000-9002", "5353:53/udp", "192.168.77.2:8081:8000",
            "[::1]:8082:8000", "0.0.0.0:8083:8000", "127.0.0.1:7070:7000",
        ];
        let ports: Vec<_> = ports.iter().flat_map(|port| ["-p", port]).collect();
        home.started("m", &ports);
        let mut server = home.start(["exec", "-n", "m", "--", "python3", "-c", SERVER]);
        assert_eq!(server.read(6), "ready\n");

        // From the host. A client on the loopback is the gateway to the guest.
        for port in [8080, 9000, 9001, 9002, 8083] {
            assert_eq!(greeting(&format!("127.0.0.1:{port}")).unwrap(), "::ffff:10.231.118.1");
        }
        assert_eq!(greeting("[::1]:8082").unwrap(), "fd62:616e:7461:6d00::1");
        let udp = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        udp.set_read_timeout(Some(LIMIT)).unwrap();
        udp.connect(("127.0.0.1", 5353)).unwrap();
        udp.send(b"hello").unwrap();
        let mut answer = [0; 100];
        let len = udp.recv(&mut answer).unwrap();
        assert_eq!(String::from_utf8_lossy(&answer[..len]), "10.231.118.1 hello");

        // From elsewhere: what was bound there, with the client's own address.
        for port in [8081, 8083] {
            let seen = world.internet(|| greeting(&format!("192.168.77.2:{port}")).unwrap());
            assert_eq!(seen, "::ffff:192.168.77.1");
        }
        for port in [8080, 9000, 7070] {
            for address in [format!("192.168.77.2:{port}"), format!("[fd77::2]:{port}"), format!("[::1]:{port}")] {
                let error = greeting(&address).unwrap_err();
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{address}");
                let error = world.internet(|| greeting(&address).unwrap_err());
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{address}");
            }
        }

        // A port in is no way out.
        super::greet(world, World::PUBLIC, 80);
        let out = home.exec("m", "curl -sS -m 60 http://9.9.9.9/");
        assert_eq!(out.code, 7, "{}", out.stderr);

        // Who listens on the guest's loopback alone is not reached, unless that is said.
        assert!(!matches!(greeting("127.0.0.1:7070"), Ok(text) if !text.is_empty()));
        let text = home.ok(["ls", "--json"]);
        assert!(text.contains("127.0.0.1:9002:9002/tcp") && text.contains("127.0.0.1:5353:53/udp"), "{text}");

        // Others are told that the port is taken before anything boots, and nothing is left.
        let run_args = |more: &[&str]| {
            let mut args = vec!["run".into()];
            args.extend(home.machine_args());
            args.extend(more.iter().map(Into::into));
            args
        };
        let said = home.fails(run_args(&["-p", "8080:80", "--", "true"]));
        assert!(said.contains("127.0.0.1:8080") && said.contains("in use"), "{said}");
        let said = home.fails(run_args(&["-p", "5353:80/udp", "--", "true"]));
        assert!(said.contains("127.0.0.1:5353"), "{said}");
        let said = home.fails(run_args(&["-d", "-n", "other", "-p", "9001:80"]));
        assert!(said.contains("127.0.0.1:9001"), "{said}");
        let said = home.fails(run_args(&["-p", "9.9.9.9:1:80", "--", "true"]));
        assert!(said.contains("9.9.9.9:1"), "{said}");
        let names: Vec<_> = home.list().iter().map(|m| m["name"].clone()).collect();
        assert_eq!(names, ["m"]);

        // The ports are the machine's while it runs, and its again at the next start, right after.
        home.ok(["stop", "-n", "m"]);
        let _ = server.finish();
        drop(TcpListener::bind(("127.0.0.1", 8080)).unwrap());
        home.ok(["update", "-n", "m", "--remove-port", "7070:7000", "-p", "7071:7000", "--port-to-loopback"]);
        home.ok(["start", "-n", "m"]);
        let mut server = home.start(["exec", "-n", "m", "--", "python3", "-c", SERVER]);
        assert_eq!(server.read(6), "ready\n");
        assert_eq!(greeting("127.0.0.1:7071").unwrap(), "10.231.118.1");
        assert_eq!(greeting("127.0.0.1:8080").unwrap(), "::ffff:10.231.118.1");
        home.ok(["stop", "-n", "m"]);
        let _ = server.finish();
        home.delete("m");
    }

    fn a_server_in_the_guest_serves_many_clients_of_the_host(world) {
        let home = &world.home;
        home.started("m", &["-p", "8000:8000"]);
        home.sh("m", "mkdir /tmp/www && head -c 3000000 /dev/zero | tr '\\0' x >/tmp/www/f");
        let server = home.start(["exec", "-n", "m", "--", "python3", "-m", "http.server", "8000", "--directory", "/tmp/www"]);
        let get = || -> std::io::Result<usize> {
            let mut stream = TcpStream::connect(("127.0.0.1", 8000))?;
            stream.write_all(b"GET /f HTTP/1.0\r\n\r\n")?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer)?;
            Ok(answer.iter().filter(|byte| **byte == b'x').count())
        };
        eventually(LIMIT, "the server", || match get() {
            Ok(3_000_000) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        thread::scope(|scope| {
            let clients: Vec<_> = (0..20).map(|_| scope.spawn(get)).collect();
            for client in clients {
                assert_eq!(client.join().unwrap().unwrap(), 3_000_000);
            }
        });
        home.ok(["stop", "-n", "m"]);
        let _ = server.finish();
        home.delete("m");
    }
}
