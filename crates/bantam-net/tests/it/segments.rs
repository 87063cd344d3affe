//! Segments one by one, with a guest that is played by hand: what a Linux guest says when it loses data
//! (windows that change, selective acknowledgements) smoltcp's own would not.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use bantam_net::{Config, FrameInfo, Offloads};
use smoltcp::wire::{Ipv4Packet, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber};

use crate::guest::{Guest, LIMIT, frame, granted};

const PORT: u16 = 40_000;
/// Window shift of the guest's.
const SHIFT: u8 = 7;
/// What the guest's windows are, in bytes, unless a test says otherwise.
const WINDOW: usize = 1 << 20;

/// The guest's end of one connection.
struct Receiver {
    guest: Guest,
    server: TcpStream,
    to: u16,
    /// The next sequence number of ours.
    own: TcpSeqNumber,
    /// Where the data begins.
    first: TcpSeqNumber,
    /// How much of it came, without a gap.
    came: usize,
    /// What came after a gap: from and to.
    later: Vec<(usize, usize)>,
    /// How much of ours the stack has acknowledged.
    acknowledged: TcpSeqNumber,
    /// Segments that came, with data or without.
    segments: usize,
    /// Window shift of the stack's.
    shift: u8,
    /// Up to where the stack has ever said that it takes data.
    edge: TcpSeqNumber,
    /// What the guest says with each acknowledgement.
    window: usize,
    selective: bool,
}

/// Data that came: from and to, counted from the connection's beginning.
type Piece = (usize, usize);

impl Receiver {
    fn new(selective: bool) -> Receiver {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let to = listener.local_addr().unwrap().port();
        let offloads = Offloads {
            checksum: true,
            segmentation: true,
        };
        let config = Config {
            policy: granted(),
            ..Config::default()
        };
        let mut guest = Guest::with(&config, offloads);
        let own = TcpSeqNumber(1000);
        let syn = TcpRepr {
            src_port: PORT,
            dst_port: to,
            control: TcpControl::Syn,
            seq_number: own,
            ack_number: None,
            window_len: 65_535,
            window_scale: Some(SHIFT),
            max_seg_size: Some(1460),
            sack_permitted: selective,
            sack_ranges: [None; 3],
            timestamp: None,
            payload: &[],
        };
        let syn = frame(&guest.addresses, &syn);
        guest.stack.receive(&syn, &FrameInfo::default());
        let (server, _) = listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        let (mut first, mut shift) = (None, 0);
        while first.is_none() {
            guest.stack.run();
            guest.wait(Duration::from_millis(5));
            guest.stack.take_frame(|bytes, _| {
                let ip = Ipv4Packet::new_unchecked(&bytes[14..]);
                let tcp = TcpPacket::new_unchecked(ip.payload());
                if tcp.syn() {
                    assert_eq!(tcp.selective_ack_permitted().unwrap(), selective);
                    first = Some(tcp.seq_number() + 1);
                    shift = tcp.options_summary().unwrap().window_scale.unwrap();
                }
                true
            });
        }
        let mut receiver = Receiver {
            guest,
            server,
            to,
            own: own + 1,
            first: first.unwrap(),
            came: 0,
            later: Vec::new(),
            acknowledged: own + 1,
            segments: 0,
            shift,
            edge: own + 1,
            window: WINDOW,
            selective,
        };
        receiver.acknowledge();
        receiver
    }

    /// The guest says what it has and what it takes.
    fn acknowledge(&mut self) {
        self.send(&[]);
    }

    /// The same, with data of its own.
    fn send(&mut self, data: &[u8]) {
        let mut sack_ranges = [None; 3];
        if self.selective {
            let at = |offset| (self.first + offset).0.cast_unsigned();
            for (range, &(start, end)) in sack_ranges.iter_mut().zip(self.later.iter().rev()) {
                *range = Some((at(start), at(end)));
            }
        }
        let ack = TcpRepr {
            src_port: PORT,
            dst_port: self.to,
            control: TcpControl::None,
            seq_number: self.own,
            ack_number: Some(self.first + self.came),
            window_len: u16::try_from(self.window >> SHIFT).unwrap(),
            window_scale: None,
            max_seg_size: None,
            sack_permitted: false,
            sack_ranges,
            timestamp: None,
            payload: data,
        };
        self.own += data.len();
        let ack = frame(&self.guest.addresses, &ack);
        self.guest.stack.receive(&ack, &FrameInfo::default());
    }

    /// What the stack sends, when its host's sockets give it something to do; and for how long it
    /// would wait when it sends nothing.
    fn turn(&mut self) -> (Vec<Piece>, Option<Duration>) {
        loop {
            let (pieces, pause) = self.turn_at_once();
            // A socket's bytes are not there in the moment in which they are written.
            if !pieces.is_empty() || !self.guest.wait(pause.unwrap_or(LIMIT)) {
                return (pieces, pause);
            }
        }
    }

    fn turn_at_once(&mut self) -> (Vec<Piece>, Option<Duration>) {
        let mut pieces = Vec::new();
        loop {
            let pause = self.guest.stack.run();
            let before = pieces.len();
            let first = self.first;
            let (acknowledged, segments) = (&mut self.acknowledged, &mut self.segments);
            let (edge, shift) = (&mut self.edge, self.shift);
            while self.guest.stack.take_frame(|bytes, _| {
                let ip = Ipv4Packet::new_unchecked(&bytes[14..]);
                let tcp = TcpPacket::new_unchecked(ip.payload());
                *acknowledged = tcp.ack_number();
                *segments += 1;
                let window = usize::from(tcp.window_len()) << shift;
                *edge = (tcp.ack_number() + window).max(*edge);
                if !tcp.payload().is_empty() {
                    let start = tcp.seq_number() - first;
                    pieces.push((start, start + tcp.payload().len()));
                }
                true
            }) {}
            if pause != Some(Duration::ZERO) && pieces.len() == before {
                return (pieces, pause);
            }
        }
    }

    /// The guest keeps a piece.
    fn keep(&mut self, piece: Piece) {
        self.later.push(piece);
        self.later.sort_unstable();
        while let Some(i) = self.later.iter().position(|&(start, _)| start <= self.came) {
            self.came = self.came.max(self.later.remove(i).1);
        }
    }

    /// The server sends as much of `left` as its socket takes.
    fn serve(&mut self, left: &mut usize) {
        let zeros = vec![0; 1 << 16];
        while *left > 0 {
            match self.server.write(&zeros[..zeros.len().min(*left)]) {
                Ok(sent) => *left -= sent,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn losses_that_the_guest_tells_of_are_mended_without_waiting() {
    let mut receiver = Receiver::new(true);
    let total = 16 << 20;
    let (mut left, mut frames, mut lost) = (total, 0, 0);
    let mut reached = 0;
    while receiver.came < total {
        receiver.serve(&mut left);
        let (pieces, pause) = receiver.turn();
        assert!(
            !pieces.is_empty(),
            "after {} bytes the stack waits for {pause:?}",
            receiver.came
        );
        for piece in pieces {
            frames += 1;
            // Each seventh frame that is not the last of what there is, the first time.
            if frames % 7 == 3 && piece.1 > reached && piece.1 < total - (1 << 20) {
                reached = piece.1;
                lost += 1;
                continue;
            }
            reached = reached.max(piece.1);
            receiver.keep(piece);
            // A guest short of memory opens and closes its window all the time, which makes no
            // acknowledgement like the one before.
            receiver.window = WINDOW - (frames % 50) * 1024;
            receiver.acknowledge();
        }
    }
    assert!(lost > 20, "{lost} of {frames} frames lost");
}

#[test]
fn a_loss_that_nothing_tells_of_is_mended_within_a_quarter_of_a_second() {
    let mut receiver = Receiver::new(false);
    receiver.serve(&mut 100_000);
    let mut end = 0;
    while end < 100_000 {
        // All that is on its way is lost.
        end = receiver
            .turn_at_once()
            .0
            .last()
            .map_or(end, |piece| piece.1);
    }
    // Not how long it takes, but for how long the stack asks to be left alone.
    let mut waited = Duration::ZERO;
    let pieces = loop {
        let (pieces, pause) = receiver.turn_at_once();
        if !pieces.is_empty() {
            break pieces;
        }
        let pause = pause.expect("a timer");
        waited += pause;
        receiver.guest.wait(pause);
    };
    assert!(waited <= Duration::from_millis(250), "{waited:?}");
    assert_eq!(pieces.first().unwrap().0, 0);
    assert_eq!(pieces.last().unwrap().1, end);
}

#[test]
fn a_window_that_opens_is_filled_at_once() {
    // More than the stack has buffered, and less.
    for (lost, total) in [(false, 600_000), (true, 600_000), (true, 200_000)] {
        let mut receiver = Receiver::new(true);
        let mut left = total;
        receiver.serve(&mut left);
        let (mut first, _) = receiver.turn();
        while first.len() < 3 {
            first.extend(receiver.turn().0);
        }
        // The guest takes the first frame, loses the others or not, and its window closes.
        let kept = if lost { 1 } else { first.len() };
        for &piece in &first[..kept] {
            receiver.keep(piece);
        }
        receiver.window = 0;
        receiver.acknowledge();
        assert_eq!(receiver.turn_at_once().0, [], "lost: {lost}");
        receiver.window = WINDOW;
        while receiver.came < total {
            receiver.serve(&mut left);
            receiver.acknowledge();
            let (pieces, pause) = receiver.turn();
            assert!(
                !pieces.is_empty(),
                "lost: {lost}, after {} bytes the stack waits for {pause:?}",
                receiver.came
            );
            for piece in pieces {
                receiver.keep(piece);
            }
        }
    }
}

#[test]
fn the_first_whole_segment_comes_by_itself() {
    let mut receiver = Receiver::new(true);
    receiver.serve(&mut 200_000);
    let (mut pieces, mut end) = (Vec::new(), 0);
    while end < 200_000 {
        pieces.extend(receiver.turn().0);
        end = pieces.last().unwrap().1;
    }
    assert_eq!(pieces[0], (0, 1460));
    // The others are as long as may be.
    assert!(pieces.len() < 10, "{pieces:?}");
}

#[test]
fn a_short_request_is_acknowledged_with_its_answer() {
    let mut receiver = Receiver::new(true);
    receiver.turn_at_once();
    receiver.server.set_nonblocking(false).unwrap();
    for _ in 0..100 {
        let (before, start) = (receiver.segments, Instant::now());
        receiver.send(&[1; 100]);
        receiver.turn_at_once();
        // On a busy host it is soon the time for it to go by itself.
        let alone = start.elapsed() >= Duration::from_millis(1);
        assert!(alone || receiver.segments == before);
        receiver.server.read_exact(&mut [0; 100]).unwrap();
        receiver.server.write_all(&[2; 50]).unwrap();
        let up_to = receiver.came + 50;
        while receiver.came < up_to {
            for piece in receiver.turn().0 {
                receiver.keep(piece);
            }
        }
        assert_eq!(receiver.acknowledged, receiver.own);
    }
}

#[test]
fn a_short_request_without_an_answer_is_acknowledged_soon() {
    let mut receiver = Receiver::new(true);
    receiver.turn_at_once();
    receiver.send(&[1; 100]);
    let mut waited = Duration::ZERO;
    while receiver.acknowledged != receiver.own {
        let (_, pause) = receiver.turn_at_once();
        if receiver.acknowledged == receiver.own {
            break;
        }
        let pause = pause.expect("a timer");
        waited += pause;
        receiver.guest.wait(pause);
    }
    assert!(waited <= Duration::from_millis(2), "{waited:?}");
}

#[test]
fn more_than_two_segments_are_acknowledged_at_once() {
    let mut receiver = Receiver::new(true);
    receiver.turn_at_once();
    for _ in 0..3 {
        receiver.send(&[1; 1460]);
    }
    receiver.turn_at_once();
    assert_eq!(receiver.acknowledged, receiver.own);
}

#[test]
fn all_data_that_a_window_promised_to_take_is_taken() {
    let mut receiver = Receiver::new(true);
    receiver.server.set_nonblocking(true).unwrap();
    // A byte is always taken, and its acknowledgement says the window.
    receiver.send(&[1]);
    let mut sent = 1;
    // Until both sockets, the stack's and the server's, are full to the last byte of the window.
    let mut still = 0;
    while still < 20 {
        receiver.turn_at_once();
        let room = receiver.edge.max(receiver.own) - receiver.own;
        // No multiple of the window's unit.
        let data = vec![1; room.min(1001)];
        if data.is_empty() {
            still += 1;
            receiver.guest.wait(Duration::from_millis(5));
        } else {
            still = 0;
            sent += data.len();
            receiver.send(&data);
        }
    }
    let (mut received, mut buffer) = (0, vec![0; 1 << 16]);
    let start = Instant::now();
    while received < sent {
        match receiver.server.read(&mut buffer) {
            Ok(len) => received += len,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        receiver.turn_at_once();
        assert!(start.elapsed() < LIMIT, "{received} of {sent} bytes came");
    }
}
