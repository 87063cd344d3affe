//! A guest that means harm: nothing panics, spins, grows or stands still.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use bantam_net::{Checksum, Config, FrameInfo, Limits, Offloads, Policy, Segmentation};
use smoltcp::socket::tcp::State;
use smoltcp::wire::{Ipv4Packet, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber, TcpTimestampRepr};

use crate::guest::{Guest, frame, granted};

/// A TCP segment without data, from port `from` of the guest to port `to` of the gateway.
fn segment(
    guest: &Guest,
    from: u16,
    to: u16,
    control: TcpControl,
    seq: i32,
    ack: Option<i32>,
) -> Vec<u8> {
    let tcp = TcpRepr {
        src_port: from,
        dst_port: to,
        control,
        seq_number: TcpSeqNumber(seq),
        ack_number: ack.map(TcpSeqNumber),
        window_len: 65_535,
        window_scale: Some(7),
        max_seg_size: Some(1460),
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    frame(&guest.addresses, &tcp)
}

fn plain() -> FrameInfo {
    FrameInfo::default()
}

#[test]
fn a_syn_flood_takes_no_more_than_its_limits() {
    let limits = Limits {
        tcp_flows: 64,
        tcp_connecting: 16,
        ..Limits::default()
    };
    let config = Config {
        policy: granted(),
        limits,
        ..Config::default()
    };
    let mut guest = Guest::with(&config, Offloads::default());
    // One that accepts, and one whose queue is full at once, so that connecting takes for ever.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let to = listener.local_addr().unwrap().port();
    for round in 0..20 {
        for from in 1..2000 {
            let syn = segment(&guest, from, to, TcpControl::Syn, round, None);
            guest.stack.receive(&syn, &plain());
        }
        guest.stack.run();
        let flows = guest.network.stats().tcp_flows;
        assert!(flows <= 64, "{flows} flows");
        // The guest takes nothing all the while.
    }
    // What never answers is given up, and room is made when the guest resets it.
    for from in 1..2000 {
        let reset = segment(&guest, from, to, TcpControl::Rst, 20, None);
        guest.stack.receive(&reset, &plain());
    }
    guest.until("room", |guest| {
        for from in 1..2000 {
            let reset = segment(guest, from, to, TcpControl::Rst, 1, Some(1));
            guest.stack.receive(&reset, &plain());
        }
        guest.card.received.clear();
        (guest.network.stats().tcp_flows < 64).then_some(())
    });
}

#[test]
fn both_sides_full_is_not_the_end() {
    let mut guest = Guest::new(granted());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let udp_port = udp.local_addr().unwrap().port();
    let total = 24 << 20;
    let server = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut writer = stream.try_clone().unwrap();
        let writer = thread::spawn(move || writer.write_all(&vec![1; total]).unwrap());
        let mut got = 0;
        let mut buffer = vec![0; 1 << 16];
        let mut stream = stream;
        while got < total {
            got += stream.read(&mut buffer).unwrap();
        }
        writer.join().unwrap();
    });
    let socket = guest.connect(guest.host(port));
    assert!(guest.connected(socket));
    // The guest floods and takes no frame: its queue here is full, and so are the flow's buffers.
    guest.takes = 0;
    let chatty = guest.udp();
    let host = guest.host(udp_port);
    let mut left = total;
    for _ in 0..2000 {
        guest.udp_send(chatty, host, &[0; 1000]);
        let n = left.min(1 << 16);
        left -= guest.tcp(socket).send_slice(&vec![2; n]).unwrap();
        guest.step();
    }
    assert!(guest.stack.has_frame());
    // With nothing to be done there is nothing to do: the loop may sleep.
    let busy = (0..100)
        .filter(|_| guest.stack.run() == Some(Duration::ZERO))
        .count();
    assert!(busy < 50, "{busy} of 100 turns ask for another at once");
    // It takes frames again: everything arrives.
    guest.takes = usize::MAX;
    let mut got = 0;
    guest.until("everything", |guest| {
        let socket = guest.tcp(socket);
        if left > 0 {
            left -= socket.send_slice(&vec![2; left.min(1 << 16)]).unwrap();
        }
        while socket.can_recv() {
            let _ = socket.recv(|bytes| {
                got += bytes.len();
                (bytes.len(), ())
            });
        }
        (left == 0 && got == total).then_some(())
    });
    guest.until("the server", |_| server.is_finished().then_some(()));
    server.join().unwrap();
}

#[test]
fn an_idle_connection_with_bytes_that_nobody_takes_lets_the_loop_sleep() {
    let mut guest = Guest::new(granted());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let socket = guest.connect(guest.host(port));
    assert!(guest.connected(socket));
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    let block = vec![0; 1 << 20];
    // The guest's program does not read; its window closes.
    guest.until("a full window", |guest| {
        while stream.write(&block).is_ok() {}
        let socket = guest.tcp(socket);
        (socket.recv_queue() == socket.recv_capacity()).then_some(())
    });
    let start = Instant::now();
    let mut turns = 0;
    while start.elapsed() < Duration::from_millis(500) {
        let pause = guest.step();
        guest.wait(pause.min(Duration::from_millis(500)));
        turns += 1;
    }
    assert!(turns < 300, "{turns} turns in half a second of nothing");
}

#[test]
fn frames_of_strangers_are_dropped() {
    let mut guest = Guest::new(granted());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let good = segment(&guest, 1000, port, TcpControl::Syn, 1, None);
    let mut spoofed = good.clone();
    spoofed[29] = 77;
    Ipv4Packet::new_unchecked(&mut spoofed[14..]).fill_checksum();
    let mut broken = good.clone();
    broken[50] ^= 1;
    let mut other_station = good.clone();
    other_station[5] ^= 1;
    let partial = FrameInfo {
        checksum: Checksum::Partial {
            start: 34,
            offset: 16,
        },
        segmentation: None,
    };
    for (frame, info) in [
        (spoofed, partial),
        (broken, plain()),
        (other_station, plain()),
    ] {
        guest.stack.receive(&frame, &info);
    }
    guest.stack.run();
    assert_eq!(guest.network.stats().tcp_flows, 0);
    assert_eq!(guest.network.stats().dropped, 3);
    guest.stack.receive(&good, &plain());
    guest.stack.run();
    assert_eq!(guest.network.stats().tcp_flows, 1);
}

/// A small generator: the same frames each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

#[test]
fn altered_frames_of_a_real_conversation_do_no_harm() {
    let mut random = Random(0x1234_5678_9abc_def1);
    for seed in 0..6 {
        let offloads = Offloads {
            checksum: seed % 2 == 0,
            segmentation: seed % 2 == 0,
        };
        let config = Config {
            policy: granted(),
            ..Config::default()
        };
        let mut guest = Guest::with(&config, offloads);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                thread::spawn(move || {
                    let mut buffer = [0; 1000];
                    while stream.read(&mut buffer).is_ok_and(|n| n > 0) {
                        if stream.write_all(&buffer).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        let host = guest.host(port);
        let resolver = guest.host(53);
        let mut sockets = Vec::new();
        for turn in 0..400_u32 {
            if turn % 20 == 0 {
                sockets.push(guest.connect_with(host, 4096));
                sockets.push(guest.connect_with(resolver, 4096));
                let udp = guest.udp();
                guest.udp_send(udp, resolver, &[turn as u8; 40]);
                guest.udp_send(udp, host, &[turn as u8; 3000]);
            }
            for &socket in &sockets {
                let socket = guest.tcp(socket);
                if socket.state() == State::Established {
                    let _ = socket.send_slice(&[0, 20, 1, 2, 3, 4, 5, 6, 7, 8]);
                    let _ = socket.recv(|bytes| (bytes.len(), ()));
                }
            }
            // Frames as the guest makes them, and the same with some bytes changed.
            let now = guest.now();
            guest
                .interface
                .poll(now, &mut guest.card, &mut guest.sockets);
            let frames: Vec<_> = guest.card.sent.iter().cloned().collect();
            for mut frame in frames {
                for _ in 0..=random.below(3) {
                    let at = random.below(frame.len());
                    frame[at] = random.next() as u8;
                }
                if random.below(4) == 0 {
                    frame.truncate(random.below(frame.len()));
                }
                let info = FrameInfo {
                    checksum: Checksum::Partial {
                        start: random.next() as u16,
                        offset: random.next() as u16,
                    },
                    segmentation: (random.below(2) == 0).then(|| Segmentation {
                        size: random.next() as u16,
                        headers: random.next() as u16,
                        ipv6: false,
                    }),
                };
                guest.stack.receive(&frame, &info);
            }
            guest.step();
        }
    }
}

#[test]
fn a_connection_to_the_name_service_takes_no_more_than_its_limits() {
    let mut guest = Guest::new(granted());
    let to = guest.host(53);
    let socket = guest.connect(to);
    assert!(guest.connected(socket));
    // A length that no query has.
    guest.send(socket, &[0xff, 0xff, 0, 0]);
    guest.until("a reset", |guest| {
        (guest.tcp(socket).state() == State::Closed).then_some(())
    });
    // Bytes that are not questions get no answers, and do not keep others from theirs.
    let socket = guest.connect(to);
    assert!(guest.connected(socket));
    for _ in 0..100 {
        guest.send(socket, &[0, 4, 1, 2, 3, 4]);
    }
    guest.tcp(socket).close();
    assert_eq!(guest.receive_all(socket).unwrap(), b"");
}

#[test]
fn data_beyond_the_largest_window_is_not_taken_before_the_first_acknowledgement() {
    // The window of our SYN-ACK is not in units, those of later segments are.
    let mut guest = Guest::new(Policy::off());
    let syn = segment(&guest, 1, 53, TcpControl::Syn, 0, None);
    guest.stack.receive(&syn, &plain());
    guest.stack.run();
    let mut ours = None;
    guest.stack.take_frame(|bytes, _| {
        let tcp = TcpPacket::new_checked(&bytes[34..]).unwrap();
        assert!(tcp.syn() && tcp.ack());
        ours = Some(tcp.seq_number() + 1);
        true
    });
    let data = [0; 1400];
    let send = |guest: &mut Guest, offset: usize| {
        let tcp = TcpRepr {
            src_port: 1,
            dst_port: 53,
            control: TcpControl::None,
            seq_number: TcpSeqNumber(1) + offset,
            ack_number: ours,
            window_len: 65_535,
            window_scale: None,
            max_seg_size: None,
            sack_permitted: false,
            sack_ranges: [None; 3],
            timestamp: None,
            payload: &data,
        };
        guest
            .stack
            .receive(&frame(&guest.addresses, &tcp), &plain());
    };
    for offset in [1 << 20, 3 << 19, (2 << 20) - 2000] {
        send(&mut guest, offset);
    }
    // Nor does all of it in order, without a turn in between.
    for part in 0..(3 << 20) / data.len() {
        send(&mut guest, part * data.len());
    }
    guest.stack.run();
}

#[test]
fn a_syn_whose_options_fill_the_header_breaks_nothing() {
    let offloads = Offloads {
        checksum: true,
        segmentation: true,
    };
    let mut guest = Guest::with(&Config::default(), offloads);
    let partial = FrameInfo {
        checksum: Checksum::Partial {
            start: 34,
            offset: 16,
        },
        ..FrameInfo::default()
    };
    for (from, port) in [(1, 53), (2, 80)] {
        // A header of the same length, whose options are then replaced: selective acknowledgement is
        // permitted and given for three ranges, and there is a time stamp. With the largest segment
        // size, which the stack adds, they would be two bytes too many.
        let tcp = TcpRepr {
            src_port: from,
            dst_port: port,
            control: TcpControl::Syn,
            seq_number: TcpSeqNumber(1),
            ack_number: Some(TcpSeqNumber(0)),
            window_len: 65_535,
            window_scale: None,
            max_seg_size: None,
            sack_permitted: true,
            sack_ranges: [Some((1, 2)), Some((3, 4)), Some((5, 6))],
            timestamp: Some(TcpTimestampRepr::new(1, 2)),
            payload: &[],
        };
        let mut syn = frame(&guest.addresses, &tcp);
        let options = &mut syn[54..];
        assert_eq!(options.len(), 40);
        options.fill(0);
        options[..4].copy_from_slice(&[4, 2, 5, 26]);
        options[28..30].copy_from_slice(&[8, 10]);
        // No acknowledgement.
        syn[42..46].fill(0);
        syn[47] = 2;
        guest.stack.receive(&syn, &partial);
        guest.stack.run();
        let mut answers = 0;
        while guest.stack.take_frame(|_, _| {
            answers += 1;
            true
        }) {}
        assert!(answers > 0, "port {port} is answered or reset");
    }
}

#[test]
fn questions_whose_answers_nobody_reads_neither_spin_nor_pile_up() {
    // Names are refused without being asked for, so that answers come at once.
    let mut guest = Guest::new(Policy::off());
    let to = guest.host(53);
    let connection = guest.connect_with(to, 16 << 10);
    guest.until("the connection", |guest| {
        guest.connected(connection).then_some(())
    });
    // A query of the root for its addresses, after its length.
    let query = b"\0\x11ab\x01\0\0\x01\0\0\0\0\0\0\0\0\x01\0\x01";
    let queries = query.repeat(1000);
    let mut sent = 0;
    let mut still = Instant::now();
    guest.until("the stack takes no more", |guest| {
        let socket = guest.tcp(connection);
        assert!(socket.may_send(), "it was ended after {sent} bytes");
        let taken = socket.send_slice(&queries[sent % queries.len()..]).unwrap();
        if taken > 0 {
            sent += taken;
            still = Instant::now();
        }
        (still.elapsed() > Duration::from_millis(300)).then_some(())
    });
    // The windows, the stack's buffers, and 64 KiB of answers.
    assert!(
        (300_000..4 << 20).contains(&sent),
        "{sent} bytes of questions were taken"
    );
    let start = Instant::now();
    let mut turns = 0;
    while start.elapsed() < Duration::from_millis(300) {
        let pause = guest.step();
        turns += 1;
        guest.wait(pause.min(Duration::from_millis(20)));
    }
    assert!(turns < 100, "{turns} turns in 300 ms");
    // Nor do many such connections cost much: there are not many.
    let others: Vec<_> = (0..100).map(|_| guest.connect(to)).collect();
    let refused = guest.until("all are answered", |guest| {
        let open = others
            .iter()
            .filter(|handle| guest.tcp(**handle).state() == State::SynSent)
            .count();
        let refused = others
            .iter()
            .filter(|handle| guest.tcp(**handle).state() == State::Closed)
            .count();
        (open == 0).then_some(refused)
    });
    assert_eq!(refused, 100 - 63);
}
