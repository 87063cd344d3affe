//! Streams between host and guest.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bantam_virtio::testing::{PATIENCE, Transport};
use bantam_virtio::vsock::{BACKLOG, BUF_ALLOC, EARLY_DATA, MAX_CONNECTIONS};

use crate::vsock_driver::{
    CREDIT_REQUEST, CREDIT_UPDATE, Driver, Packet, REQUEST, RESPONSE, RST, RW, SHUTDOWN,
};

/// A connection that the guest opened to the host's port 1024, from its port 5000.
fn accepted(transport: Transport) -> (Driver, UnixStream) {
    let mut driver = Driver::ready(transport);
    let listener = driver.vsock.listen(1024).unwrap();
    driver.send(&Packet::new(REQUEST, 5000, 1024));
    let response = driver.expect(RESPONSE);
    assert_eq!((response.src_cid, response.dst_cid), (2, 3));
    assert_eq!((response.host_port, response.guest_port), (1024, 5000));
    assert_eq!(response.buf_alloc, BUF_ALLOC);
    (driver, listener.accept().unwrap())
}

fn packet(op: u16) -> Packet {
    Packet::new(op, 5000, 1024)
}

/// The host closed its stream. That its bytes end may be noticed and told first.
fn expect_closed(driver: &mut Driver) {
    while driver.expect(SHUTDOWN).flags != 3 {}
}

fn read_to_end(stream: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn bytes_pass_both_ways_on_a_connection_of_the_guest() {
    for &transport in Transport::ALL {
        let (mut driver, mut stream) = accepted(transport);
        driver.send(&packet(RW).data(b"from the guest"));
        let mut bytes = [0; 14];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"from the guest");
        stream.write_all(b"from the host").unwrap();
        let answer = driver.expect(RW);
        assert_eq!(answer.data, b"from the host");
        assert_eq!(answer.fwd_cnt, 14, "data carries news of credit");
    }
}

#[test]
fn what_the_host_writes_before_the_guest_accepts_is_sent_then() {
    for &transport in Transport::ALL {
        let mut driver = Driver::ready(transport);
        let mut stream = driver.vsock.connect(1025).unwrap();
        stream.write_all(b"early").unwrap();
        let request = driver.expect(REQUEST);
        assert_eq!(request.guest_port, 1025);
        assert!(driver.receive_for(Duration::from_millis(50)).is_none());
        driver.send(&Packet::new(RESPONSE, 1025, request.host_port));
        assert_eq!(driver.expect(RW).data, b"early");
    }
}

#[test]
fn a_connection_asked_for_before_the_guest_runs_is_opened_then() {
    let (device, vsock) = bantam_virtio::VsockDevice::new(3).unwrap();
    let _stream = vsock.connect(7).unwrap();
    let mut driver = Driver::with_device(Transport::Mmio, device, vsock);
    driver.post(1);
    assert_eq!(driver.expect(REQUEST).guest_port, 7);
}

#[test]
fn a_refused_connection_is_at_its_end() {
    for &transport in Transport::ALL {
        let mut driver = Driver::ready(transport);
        let mut stream = driver.vsock.connect(9).unwrap();
        stream.write_all(b"nobody reads this").unwrap();
        let request = driver.expect(REQUEST);
        driver.send(&Packet::new(RST, 9, request.host_port));
        assert!(read_to_end(&mut stream).is_empty());
    }
}

#[test]
fn a_request_to_a_port_without_a_listener_is_reset() {
    for &transport in Transport::ALL {
        let mut driver = Driver::ready(transport);
        driver.send(&Packet::new(REQUEST, 5000, 99));
        let reset = driver.expect(RST);
        assert_eq!((reset.host_port, reset.guest_port), (99, 5000));
    }
}

#[test]
fn a_listener_that_is_dropped_refuses() {
    let mut driver = Driver::ready(Transport::Direct);
    let listener = driver.vsock.listen(1024).unwrap();
    assert_eq!(
        driver.vsock.listen(1024).map(|_| ()).unwrap_err().kind(),
        ErrorKind::AddrInUse
    );
    let timeout = listener.accept_timeout(Duration::from_millis(1));
    assert_eq!(timeout.unwrap_err().kind(), ErrorKind::TimedOut);
    drop(listener);
    driver.send(&packet(REQUEST));
    driver.expect(RST);
    driver.vsock.listen(1024).unwrap();
}

#[test]
fn a_full_backlog_refuses_and_recovers() {
    let mut driver = Driver::ready(Transport::Direct);
    let listener = driver.vsock.listen(1024).unwrap();
    for i in 0..=BACKLOG as u32 {
        driver.send(&Packet::new(REQUEST, 5000 + i, 1024));
        let expected = if i < BACKLOG as u32 { RESPONSE } else { RST };
        driver.expect(expected);
    }
    listener.accept().unwrap();
    // The end of that stream, and the answer, in either order.
    driver.send(&Packet::new(REQUEST, 4000, 1024));
    let ops = [driver.receive().op, driver.receive().op];
    assert!(
        ops.contains(&RESPONSE) && ops.contains(&SHUTDOWN),
        "{ops:?}"
    );
}

#[test]
fn connections_beyond_the_cap_are_reset() {
    // Two descriptors a connection, as both ends are in this process.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    if limit.maximum.is_some_and(|maximum| maximum < 4096) {
        println!("skipped: not enough descriptors");
        return;
    }
    let mut driver = Driver::ready(Transport::Direct);
    let listener = driver.vsock.listen(1024).unwrap();
    let mut streams = Vec::new();
    for port in 0..MAX_CONNECTIONS as u32 {
        driver.send(&Packet::new(REQUEST, port, 1024));
        driver.expect(RESPONSE);
        streams.push(listener.accept().unwrap());
    }
    driver.send(&Packet::new(REQUEST, 9999, 1024));
    driver.expect(RST);
    let mut refused = driver.vsock.connect(7).unwrap();
    assert!(read_to_end(&mut refused).is_empty());
    // One ends, one begins.
    driver.send(&Packet::new(SHUTDOWN, 0, 1024).flags(3));
    driver.expect(RST);
    driver.send(&Packet::new(REQUEST, 9999, 1024));
    driver.expect(RESPONSE);
}

#[test]
fn the_guest_half_closes_and_still_receives() {
    for &transport in Transport::ALL {
        let (mut driver, mut stream) = accepted(transport);
        driver.send(&packet(RW).data(b"last words"));
        driver.send(&packet(SHUTDOWN).flags(2));
        assert_eq!(read_to_end(&mut stream), b"last words");
        stream.write_all(b"answer").unwrap();
        assert_eq!(driver.expect(RW).data, b"answer");
        drop(stream);
        expect_closed(&mut driver);
    }
}

#[test]
fn the_host_half_closes_and_still_receives() {
    for &transport in Transport::ALL {
        let (mut driver, mut stream) = accepted(transport);
        stream.write_all(b"question").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(driver.expect(RW).data, b"question");
        assert_eq!(driver.expect(SHUTDOWN).flags, 2);
        driver.send(&packet(RW).data(b"answer"));
        driver.send(&packet(SHUTDOWN).flags(3));
        driver.expect(RST);
        assert_eq!(read_to_end(&mut stream), b"answer");
    }
}

#[test]
fn what_the_host_wrote_before_it_closed_reaches_the_guest() {
    for &transport in Transport::ALL {
        let (mut driver, mut stream) = accepted(transport);
        let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        stream.write_all(&bytes).unwrap();
        drop(stream);
        assert_eq!(driver.expect_data(bytes.len()), bytes);
        expect_closed(&mut driver);
    }
}

#[test]
fn what_the_guest_sent_before_it_ended_reaches_a_slow_host() {
    for &transport in Transport::ALL {
        for ending in [packet(RST), packet(SHUTDOWN).flags(3)] {
            let (mut driver, mut stream) = accepted(transport);
            let bytes: Vec<u8> = (0..BUF_ALLOC).map(|i| (i % 251) as u8).collect();
            for piece in bytes.chunks(65536) {
                driver.send(&packet(RW).data(piece));
            }
            // Unread bytes of the host must not turn the end into an error.
            stream.write_all(b"too late").unwrap();
            driver.send(&ending);
            assert_eq!(read_to_end(&mut stream), bytes);
        }
    }
}

#[test]
fn the_same_ports_can_be_used_again_while_the_last_bytes_are_delivered() {
    let mut driver = Driver::ready(Transport::Direct);
    let listener = driver.vsock.listen(1024).unwrap();
    driver.send(&packet(REQUEST));
    driver.expect(RESPONSE);
    let mut first = listener.accept().unwrap();
    for _ in 0..4 {
        driver.send(&packet(RW).data(&[1; 65536]));
    }
    driver.send(&packet(RST));
    driver.send(&packet(REQUEST));
    while driver.receive().op != RESPONSE {}
    let mut second = listener.accept().unwrap();
    driver.send(&packet(RW).data(&[2; 3]));
    driver.send(&packet(SHUTDOWN).flags(2));
    assert_eq!(read_to_end(&mut second), [2; 3]);
    assert_eq!(read_to_end(&mut first), vec![1; 4 * 65536]);
}

#[test]
fn the_guest_may_send_its_credit_and_not_a_byte_more() {
    for &transport in Transport::ALL {
        let (mut driver, mut stream) = accepted(transport);
        // Fill the stream's own buffer first: what it takes is no longer held.
        let mut sent: usize = 0;
        let mut told: u32 = 0;
        loop {
            while driver.guest.has_used(0) {
                told = driver.receive().fwd_cnt;
            }
            let room = BUF_ALLOC - (sent as u32).wrapping_sub(told);
            if room == 0 {
                break;
            }
            let piece = vec![0x11; room.min(65536) as usize];
            driver.send(&packet(RW).data(&piece));
            sent += piece.len();
        }
        // The worker may have told us less than it forwarded; half the credit covers that.
        for _ in 0..3 {
            driver.send(&packet(RW).data(&[0x22; 65536]));
        }
        let mut reset = false;
        while !reset {
            let next = driver.receive();
            reset = next.op == RST;
        }
        let bytes = read_to_end(&mut stream);
        assert!(bytes.len() >= sent);
        assert!(bytes[..sent].iter().all(|&byte| byte == 0x11));
    }
}

#[test]
fn credit_comes_back_when_the_host_reads() {
    for &transport in Transport::ALL {
        let (mut driver, mut stream) = accepted(transport);
        let mut sent: u32 = 0;
        let mut told: u32 = 0;
        let mut read: u32 = 0;
        let total: u32 = 4 << 20;
        let mut buffer = vec![0; 65536];
        while sent < total {
            let room = BUF_ALLOC - (sent - told);
            if room > 0 {
                let len = room.min(65536).min(total - sent);
                driver.send(&packet(RW).data(&vec![7; len as usize]));
                sent += len;
            } else {
                // Out of credit: reading must bring an update.
                while sent - read > 0 {
                    read += stream.read(&mut buffer).unwrap() as u32;
                }
                told = driver.expect(CREDIT_UPDATE).fwd_cnt;
            }
            while driver.guest.has_used(0) {
                told = driver.expect(CREDIT_UPDATE).fwd_cnt;
            }
        }
    }
}

#[test]
fn a_credit_request_is_answered() {
    for &transport in Transport::ALL {
        let (mut driver, mut stream) = accepted(transport);
        driver.send(&packet(RW).data(b"12345"));
        stream.read_exact(&mut [0; 5]).unwrap();
        driver.send(&packet(CREDIT_REQUEST));
        let update = driver.expect(CREDIT_UPDATE);
        assert_eq!((update.fwd_cnt, update.buf_alloc), (5, BUF_ALLOC));
    }
}

#[test]
fn the_host_sends_no_more_than_the_guest_has_room_for() {
    for &transport in Transport::ALL {
        let (mut driver, mut stream) = accepted(transport);
        driver.send(&packet(CREDIT_UPDATE).credit(100, 0));
        stream.write_all(&[9; 1000]).unwrap();
        assert_eq!(driver.expect_data(100).len(), 100);
        assert!(driver.receive_for(Duration::from_millis(50)).is_none());
        driver.send(&packet(CREDIT_UPDATE).credit(100, 60));
        assert_eq!(driver.expect_data(60).len(), 60);
        driver.send(&packet(CREDIT_UPDATE).credit(4096, 160));
        assert_eq!(driver.expect_data(840).len(), 840);
    }
}

#[test]
fn a_stream_that_nobody_reads_does_not_stall_another() {
    for &transport in Transport::ALL {
        let (mut driver, _unread) = accepted(transport);
        for _ in 0..4 {
            driver.send(&packet(RW).data(&[1; 65536]));
        }
        let mut other = driver.vsock.connect(1025).unwrap();
        let request = loop {
            let next = driver.receive();
            if next.op == REQUEST {
                break next;
            }
        };
        driver.send(&Packet::new(RESPONSE, 1025, request.host_port));
        driver.send(&Packet::new(RW, 1025, request.host_port).data(b"hello"));
        let mut bytes = [0; 5];
        other.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
    }
}

#[test]
fn a_guest_without_receive_buffers_gets_everything_once_it_has_some() {
    for &transport in Transport::ALL {
        let mut driver = Driver::start(transport);
        let mut stream = driver.vsock.connect(1025).unwrap();
        stream.write_all(&[5; 20_000]).unwrap();
        driver.post(1);
        let request = driver.expect(REQUEST);
        driver.send(&Packet::new(RESPONSE, 1025, request.host_port));
        // One buffer comes back with each packet received: always scarce.
        assert_eq!(driver.expect_data(20_000), vec![5; 20_000]);
    }
}

#[test]
fn when_both_rings_are_stuck_both_go_on_once_there_is_room() {
    for &transport in Transport::ALL {
        let mut driver = Driver::start(transport);
        // Every packet earns a reset, for which there is no buffer. At some point the device stops
        // taking packets.
        let mut sent = 0;
        let header = Packet::new(RW, 1, 1).header();
        let addr = driver.guest.place(&header);
        let buffer = bantam_virtio::testing::Buffer::readable(addr, header.len() as u32);
        loop {
            driver.guest.submit(1, &[buffer]);
            sent += 1;
            let patience = if sent < 256 {
                PATIENCE
            } else {
                Duration::from_millis(50)
            };
            if driver.guest.wait_used_for(1, patience).is_none() {
                break;
            }
            assert!(sent < 10_000, "resets pile up without end");
        }
        driver.post(32);
        for _ in 0..sent {
            driver.expect(RST);
        }
        assert!(driver.guest.wait_used_for(1, PATIENCE).is_some());
    }
}

#[test]
fn a_kick_of_the_receive_ring_is_wanted_only_when_it_is_missed() {
    let (mut driver, mut stream) = accepted(Transport::Direct);
    // There are plenty of buffers: posting more concerns nobody.
    assert!(!driver.guest.rings[0].wants_kick());
    stream.write_all(&vec![1; 64 * 4096]).unwrap();
    drop(stream);
    driver.expect_data(64 * 4096);
    driver.expect(SHUTDOWN);
    assert!(!driver.guest.rings[0].wants_kick());
}

#[test]
fn a_reset_ends_all_streams_and_leaves_the_device_usable() {
    for &transport in Transport::ALL {
        let (mut driver, mut stream) = accepted(transport);
        stream.write_all(b"unread").unwrap();
        driver.expect(RW);
        driver.send(&packet(RW).data(b"delivered"));
        driver.guest.reset();
        assert_eq!(read_to_end(&mut stream), b"delivered");
        driver.restart();
        driver.post(8);
        let _listener = driver.vsock.listen(1024).unwrap();
        driver.send(&packet(REQUEST));
        driver.expect(RESPONSE);
    }
}

#[test]
fn what_a_slow_host_has_not_read_when_the_device_goes_still_arrives() {
    let (mut driver, mut stream) = accepted(Transport::Direct);
    let listener = driver.vsock.listen(7).unwrap();
    driver.send(&Packet::new(REQUEST, 1, 7));
    driver.expect(RESPONSE);
    let mut other = listener.accept().unwrap();
    // More than a socket holds.
    let bytes: Vec<u8> = (0..BUF_ALLOC).map(|i| (i % 251) as u8).collect();
    for piece in bytes.chunks(65536) {
        driver.send(&packet(RW).data(piece));
        driver.send(&Packet::new(RW, 1, 7).data(piece));
    }
    drop(driver);
    // Nobody waits for the one that is read last.
    assert_eq!(read_to_end(&mut other), bytes);
    assert_eq!(read_to_end(&mut stream), bytes);
}

#[test]
fn what_the_guest_had_sent_when_it_was_reset_still_arrives() {
    let (mut driver, mut stream) = accepted(Transport::Direct);
    let mut bytes = packet(RW).data(b"last line\n").header();
    bytes.extend(b"last line\n");
    let addr = driver.guest.place(&bytes);
    let buffer = bantam_virtio::testing::Buffer::readable(addr, bytes.len() as u32);
    // Available, and not even kicked.
    driver.guest.rings[1].add(&[buffer]);
    driver.guest.reset();
    assert_eq!(read_to_end(&mut stream), b"last line\n");
}

#[test]
fn a_request_goes_out_with_the_first_bytes_and_not_before() {
    for &transport in Transport::ALL {
        let mut driver = Driver::ready(transport);
        let mut stream = driver.vsock.connect_on_write(1025).unwrap();
        // Nothing of it is seen while another connection comes and goes.
        let other = driver.vsock.connect(7).unwrap();
        let request = driver.expect(REQUEST);
        assert_eq!(request.guest_port, 7);
        driver.send(&Packet::new(RST, 7, request.host_port));
        drop(other);

        stream.write_all(b"the request").unwrap();
        let request = driver.expect(REQUEST);
        assert_eq!(request.guest_port, 1025);
        // Without the guest's answer.
        assert_eq!(driver.expect(RW).data, b"the request");
        driver.send(&Packet::new(RESPONSE, 1025, request.host_port));
        driver.send(&Packet::new(RW, 1025, request.host_port).data(b"an answer"));
        let mut answer = [0; 9];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"an answer");
    }
}

#[test]
fn no_more_than_the_early_bytes_go_out_before_the_guest_has_answered() {
    let mut driver = Driver::ready(Transport::Direct);
    let mut stream = driver.vsock.connect_on_write(1025).unwrap();
    let bytes: Vec<u8> = (0..EARLY_DATA + 5000).map(|n| n as u8).collect();
    stream.write_all(&bytes).unwrap();
    let request = driver.expect(REQUEST);
    let early = driver.expect_data(EARLY_DATA as usize);
    assert!(driver.receive_for(Duration::from_millis(50)).is_none());
    driver.send(&Packet::new(RESPONSE, 1025, request.host_port));
    let late = driver.expect_data(5000);
    assert_eq!([early, late].concat(), bytes);
}

#[test]
fn a_connection_that_was_never_written_to_ends_like_any_other() {
    let mut driver = Driver::ready(Transport::Direct);
    drop(driver.vsock.connect_on_write(1025).unwrap());
    let request = driver.expect(REQUEST);
    driver.send(&Packet::new(RESPONSE, 1025, request.host_port));
    assert_eq!(driver.expect(SHUTDOWN).flags, 3);
}

#[test]
fn a_refused_connection_with_early_bytes_is_at_its_end() {
    let mut driver = Driver::ready(Transport::Direct);
    let mut stream = driver.vsock.connect_on_write(1025).unwrap();
    stream.write_all(b"hello?").unwrap();
    let request = driver.expect(REQUEST);
    driver.expect(RW);
    driver.send(&Packet::new(RST, 1025, request.host_port));
    driver.send(&Packet::new(RST, 1025, request.host_port));
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
}
