//! What needs no privilege on the host: every server is on its loopback.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use bantam::{EngineChoice, Machine, MachineBuilder, NetworkConfig, Policy, Protocol};
use bantam_e2e::{Setup, setup};

use crate::{run, succeed};

/// Bytes of the file that the HTTP server has: several windows of any connection.
const FILE: usize = 3 << 20;

fn builder(setup: &Setup) -> MachineBuilder {
    Machine::builder()
        .image(setup.image.to_str().unwrap())
        .memory_mib(256)
        .engine(setup.engine.parse::<EngineChoice>().unwrap())
        .boot_timeout(Duration::from_secs(120))
}

fn start(setup: &Setup, network: NetworkConfig) -> Machine {
    builder(setup).network(network).start().unwrap()
}

fn file() -> Vec<u8> {
    (0..FILE).map(|i| (i ^ (i >> 7)).to_le_bytes()[0]).collect()
}

/// Answers each request with [`file`], or, to a POST, with how long its body was.
fn http_server() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || serve(stream.unwrap()));
        }
    });
    port
}

fn serve(mut stream: TcpStream) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        if line.trim().is_empty() {
            break;
        }
        lines.push(line);
    }
    let body = if lines[0].starts_with("POST") {
        let mut body = Vec::new();
        reader.read_to_end(&mut body).unwrap();
        format!("{}", body.len()).into_bytes()
    } else {
        file()
    };
    let header = format!("HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
    // A client that went away is part of a test.
    let _ = stream.write_all(header.as_bytes());
    let _ = stream.write_all(&body);
}

/// Knows one address, 192.0.2.7, by every name.
fn dns_server() -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut query = [0; 512];
        while let Ok((len, client)) = socket.recv_from(&mut query) {
            let query = &query[..len];
            let name_end = 12 + query[12..].iter().position(|&byte| byte == 0).unwrap();
            let question = &query[12..name_end + 5];
            let address = question[question.len() - 3] == 1;
            let mut answer = query[..2].to_vec();
            answer.extend([0x81, 0x80, 0, 1, 0, u8::from(address), 0, 0, 0, 0]);
            answer.extend(question);
            if address {
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 7]);
            }
            socket.send_to(&answer, client).unwrap();
        }
    });
    address
}

#[test]
fn a_machine_has_no_card_unless_it_is_given_one() {
    let Some(setup) = setup("a_machine_has_no_card_unless_it_is_given_one") else {
        return;
    };
    let machine = builder(&setup).start().unwrap();
    assert_eq!(succeed(&machine, "ls /sys/class/net"), "lo\n");
    assert!(machine.network().is_none());
    assert_ne!(run(&machine, "ping -c 1 -W 1 192.0.2.1").0, 0);
}

#[test]
fn the_card_is_ready_for_the_first_command() {
    let Some(setup) = setup("the_card_is_ready_for_the_first_command") else {
        return;
    };
    let network = NetworkConfig::public().search("example.org").unwrap();
    let machine = start(&setup, network);
    // The gateway is answered for at once, by both protocols, without a second for DAD.
    succeed(
        &machine,
        "ping -c 1 -W 1 10.231.118.1 && ping6 -c 1 -W 1 fd62:616e:7461:6d00::1",
    );
    let text = succeed(&machine, "ip addr show eth0; ip route; ip -6 route");
    assert!(text.contains("10.231.118.2/30"), "{text}");
    assert!(text.contains("fd62:616e:7461:6d00::2/64"), "{text}");
    assert!(!text.contains("tentative"), "{text}");
    assert!(text.contains("default via 10.231.118.1 dev eth0"), "{text}");
    assert!(
        text.contains("default via fd62:616e:7461:6d00::1 dev eth0"),
        "{text}"
    );
    assert!(text.contains("mtu 1500"), "{text}");
    let files = succeed(
        &machine,
        "cat /etc/resolv.conf; grep -c bantam.int /etc/hosts || true",
    );
    assert_eq!(files, "nameserver 10.231.118.1\nsearch example.org\n0\n");

    // What the agent set up can be taken down and set up again.
    let script = "ip link set eth0 down && ip link set eth0 up && \
                  ip route replace default via 10.231.118.1 && ping -c 1 -W 5 10.231.118.1";
    succeed(&machine, script);
}

#[test]
fn the_hosts_services_are_reached_when_granted() {
    let Some(setup) = setup("the_hosts_services_are_reached_when_granted") else {
        return;
    };
    let port = http_server();
    let machine = start(&setup, NetworkConfig::public().allow_host_loopback());
    for name in [
        "host.bantam.internal",
        "host.smolvm.internal",
        "10.231.118.1",
    ] {
        let script = format!("wget -q -O /tmp/file http://{name}:{port}/");
        succeed(&machine, &script);
        assert!(machine.read_file("/tmp/file").unwrap() == file(), "{name}");
    }
    // The other way, until the guest ends its half.
    let sent = format!(
        "(printf 'POST / HTTP/1.0\\r\\n\\r\\n'; cat /tmp/file /tmp/file) | nc 10.231.118.1 {port} | tail -n 1"
    );
    assert_eq!(succeed(&machine, &sent), (2 * FILE).to_string());

    // The grant is taken back while the machine runs.
    machine.network().unwrap().update(Policy::public());
    let refused = format!("! nc -w 20 10.231.118.1 {port} </dev/null");
    let begun = Instant::now();
    succeed(&machine, &refused);
    assert!(begun.elapsed() < Duration::from_secs(10), "refused at once");
}

/// The guest's window closes again and again, and packets get lost when it opens.
#[test]
fn a_long_download_arrives_however_it_is_read() {
    const LEN: usize = 48 << 20;
    let Some(setup) = setup("a_long_download_arrives_however_it_is_read") else {
        return;
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            // A client that went away is the test's failure, and told there.
            let _ = stream.unwrap().write_all(&vec![1; LEN]);
        }
    });
    let machine = start(&setup, NetworkConfig::public().allow_host_loopback());
    // The guest ends its half at once.
    let script = format!("nc 10.231.118.1 {port} </dev/null | (sleep 1; wc -c)");
    assert_eq!(succeed(&machine, &script), format!("{LEN}\n"));
}

#[test]
fn what_is_not_granted_is_refused_at_once_and_noted() {
    let Some(setup) = setup("what_is_not_granted_is_refused_at_once_and_noted") else {
        return;
    };
    let port = http_server();
    let machine = start(&setup, NetworkConfig::public());
    let gateway = format!("10.231.118.1 {port}");
    for target in [
        "10.1.2.3 80",
        "192.168.0.1 22",
        "169.254.169.254 80",
        &gateway,
    ] {
        let begun = Instant::now();
        succeed(&machine, &format!("! nc -w 30 {target} </dev/null"));
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(10), "{target}: {took:?}");
    }
    let events = machine.network().unwrap().events(0);
    let seen = |address: &str, port: u16| {
        let address: std::net::IpAddr = address.parse().unwrap();
        events.iter().any(|event| {
            event.address == Some(address)
                && event.port == Some(port)
                && event.protocol == Protocol::Tcp
        })
    };
    assert!(seen("10.1.2.3", 80), "{events:?}");
    assert!(seen("169.254.169.254", 80), "{events:?}");
}

#[test]
fn names_are_answered_by_the_servers_that_were_given() {
    let Some(setup) = setup("names_are_answered_by_the_servers_that_were_given") else {
        return;
    };
    let server = dns_server().to_string();
    let network = NetworkConfig::public().dns_server(&server).unwrap();
    let machine = start(&setup, network);
    let text = succeed(&machine, "nslookup -type=a some.example");
    assert!(text.contains("192.0.2.7"), "{text}");
}

/// Asks the HTTP server of a guest for its file.
fn get(address: SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /page HTTP/1.0\r\n\r\n").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn ports_of_the_host_lead_to_servers_in_the_guest() {
    let Some(setup) = setup("ports_of_the_host_lead_to_servers_in_the_guest") else {
        return;
    };
    let network = NetworkConfig::isolated()
        .publish("0:8081")
        .map(NetworkConfig::publish_to_guest_loopback)
        .and_then(|network| network.publish("0:8080"))
        .and_then(|network| network.publish("0:9999"))
        .unwrap();
    let machine = start(&setup, network);
    let script = "mkdir /www && echo hello from the guest > /www/page && \
                  httpd -p 8080 -h /www && httpd -p 127.0.0.1:8081 -h /www";
    succeed(&machine, script);
    let network = machine.network().unwrap();
    for port in [8080, 8081] {
        let address = network.host_port(port).unwrap();
        assert!(address.ip().is_loopback());
        for _ in 0..3 {
            let answer = get(address);
            assert!(answer.ends_with("hello from the guest\n"), "{answer}");
        }
    }
    // Nobody listens there: the connection ends at once.
    let mut nobody = TcpStream::connect(network.host_port(9999).unwrap()).unwrap();
    let mut byte = [0];
    assert!(!matches!(nobody.read(&mut byte), Ok(1..)));
}

#[test]
fn a_port_that_is_taken_is_told_before_the_machine_boots() {
    let Some(setup) = setup("a_port_that_is_taken_is_told_before_the_machine_boots") else {
        return;
    };
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let network = NetworkConfig::public()
        .publish(&format!("{port}:80"))
        .unwrap();
    let error = builder(&setup).network(network).start().unwrap_err();
    assert_eq!(error.code(), "network");
    assert!(error.to_string().contains(&port.to_string()), "{error}");
}
