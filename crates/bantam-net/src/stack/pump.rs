//! One connection's bytes, from smoltcp's buffers to the host's socket and back.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown};
use std::time::Duration;

use mio::Registry;
use mio::net::TcpStream;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::socket::tcp::{Socket, State};
use smoltcp::wire::{
    IpProtocol, IpRepr, Ipv4Packet, Ipv6Packet, TCP_HEADER_LEN, TcpControl, TcpPacket, TcpRepr,
    TcpSeqNumber,
};

use super::losses::Acknowledgement;
use super::output::Output;
use crate::dns::MAX_QUERY;

/// Bytes moved one way before other connections get their turn.
const TURN: usize = 1 << 20;
/// Answers waiting for one connection to the name service, in bytes, above which nothing more is asked.
/// Those under way come on top: 64 KiB each at most.
const MAX_ANSWERS: usize = 64 << 10;
/// Queries of one such connection that are under way.
const MAX_QUERIES: usize = 8;

/// The other end of a connection.
pub(super) struct Host {
    end: End,
    /// The socket may have bytes for us.
    readable: bool,
    /// The socket may take bytes.
    writable: bool,
    /// All of the guest's bytes went out and its end was passed on.
    guest_ended: bool,
    /// The socket's end came and was passed on.
    host_ended: bool,
    /// The guest sent FIN.
    guest_fin: bool,
}

enum End {
    Stream(TcpStream),
    Names(Names),
    Dead,
}

/// A connection to the name service (RFC 7766): messages after their lengths.
#[derive(Default)]
struct Names {
    input: Vec<u8>,
    output: VecDeque<u8>,
    asked: usize,
}

/// What [`move_bytes`] did.
pub(super) struct Moved {
    /// Bytes, both ways.
    pub(super) bytes: usize,
    /// It stopped although it could go on.
    pub(super) more: bool,
}

impl Host {
    fn new(end: End, ready: bool) -> Host {
        Host {
            end,
            readable: ready,
            writable: ready,
            guest_ended: false,
            host_ended: false,
            guest_fin: false,
        }
    }

    /// A socket that is being connected.
    pub(super) fn stream(stream: TcpStream) -> Host {
        Host::new(End::Stream(stream), false)
    }

    /// A socket that is connected.
    pub(super) fn accepted(stream: TcpStream) -> Host {
        set_options(&stream);
        Host::new(End::Stream(stream), true)
    }

    /// Our own name service.
    pub(super) fn names() -> Host {
        Host::new(End::Names(Names::default()), true)
    }

    pub(super) fn event(&mut self, readable: bool, writable: bool) {
        self.readable |= readable;
        self.writable |= writable;
    }

    /// Whether the socket's connect has succeeded.
    pub(super) fn connected(&mut self) -> io::Result<bool> {
        let End::Stream(stream) = &self.end else {
            return Err(io::ErrorKind::ConnectionAborted.into());
        };
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        match stream.peer_addr() {
            Ok(_) => {
                set_options(stream);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The socket is of no use any more.
    pub(super) fn kill(&mut self) {
        if let End::Stream(stream) = std::mem::replace(&mut self.end, End::Dead) {
            reset_on_close(&stream);
        }
    }

    /// Both ends came to their end in order.
    pub(super) fn is_orderly(&self) -> bool {
        self.guest_ended && self.host_ended
    }

    /// Closes the socket, with a reset if the other end is to see one.
    pub(super) fn close(&mut self, registry: &Registry, reset: bool) {
        if let End::Stream(mut stream) = std::mem::replace(&mut self.end, End::Dead) {
            if reset {
                reset_on_close(&stream);
            }
            if let Err(error) = registry.deregister(&mut stream) {
                tracing::debug!(%error, "forgetting a connection's socket");
            }
        }
    }

    /// Whether it is our own name service.
    pub(super) fn is_names(&self) -> bool {
        matches!(self.end, End::Names(_))
    }

    /// The next whole query of a connection to the name service.
    pub(super) fn next_query(&mut self) -> Option<Vec<u8>> {
        let End::Names(names) = &mut self.end else {
            return None;
        };
        if !names.may_ask() {
            return None;
        }
        let &[high, low, ..] = &names.input[..] else {
            return None;
        };
        let len = usize::from(u16::from_be_bytes([high, low]));
        if len > MAX_QUERY {
            self.end = End::Dead;
            return None;
        }
        let query = names.input.get(2..2 + len)?.to_vec();
        names.input.drain(..2 + len);
        names.asked += 1;
        Some(query)
    }

    /// An answer to one of the queries; empty when there will be none.
    pub(super) fn answer(&mut self, bytes: &[u8]) {
        let End::Names(names) = &mut self.end else {
            return;
        };
        names.asked = names.asked.saturating_sub(1);
        let Ok(len) = u16::try_from(bytes.len()) else {
            return;
        };
        if len > 0 {
            names.output.extend(len.to_be_bytes());
            names.output.extend(bytes);
        }
    }
}

impl Names {
    /// Whether another query may be asked now.
    fn may_ask(&self) -> bool {
        self.asked < MAX_QUERIES && self.output.len() <= MAX_ANSWERS
    }

    /// Whether a whole query is there.
    fn is_whole(&self) -> bool {
        match self.input[..] {
            [high, low, ref rest @ ..] => {
                let len = usize::from(u16::from_be_bytes([high, low]));
                rest.len() >= len || len > MAX_QUERY
            }
            _ => false,
        }
    }
}

/// After so long without a byte the host asks whether its peer is there: the guest's own questions
/// end here, and what is between the host and the peer forgets connections that are silent.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

fn set_options(stream: &TcpStream) {
    use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepidle};
    let set = stream.set_nodelay(true).and_then(|()| {
        set_socket_keepalive(stream, true)?;
        Ok(set_tcp_keepidle(stream, KEEP_ALIVE)?)
    });
    if let Err(error) = set {
        tracing::debug!(%error, "setting a connection's options");
    }
}

/// Makes closing the socket send a reset.
fn reset_on_close(stream: &TcpStream) {
    let linger = Some(Duration::ZERO);
    if let Err(error) = rustix::net::sockopt::set_socket_linger(stream, linger) {
        tracing::debug!(%error, "setting SO_LINGER");
    }
}

/// Moves bytes and ends between the guest's connection and the host's socket.
pub(super) fn move_bytes(socket: &mut Socket<'_>, host: &mut Host) -> Moved {
    let (out, out_more) = from_guest(socket, host);
    let (back, back_more) = to_guest(socket, host);
    // A connection to the name service has its queries read after this.
    let query = matches!(&host.end, End::Names(names) if names.may_ask() && names.is_whole());
    let moved = Moved {
        bytes: out + back,
        more: out_more || back_more || query,
    };
    host.guest_fin |= matches!(
        socket.state(),
        State::CloseWait | State::LastAck | State::Closing | State::TimeWait
    );
    if host.guest_fin && !host.guest_ended && socket.recv_queue() == 0 {
        host.guest_ended = true;
        match &mut host.end {
            End::Stream(stream) => {
                if let Err(error) = stream.shutdown(Shutdown::Write) {
                    tracing::debug!(%error, "passing on the guest's end");
                }
            }
            // Nothing follows but what is already being answered.
            End::Names(names)
                if names.asked == 0 && names.output.is_empty() && !names.is_whole() =>
            {
                socket.close();
                host.host_ended = true;
            }
            End::Names(_) => host.guest_ended = false,
            End::Dead => {}
        }
    }
    if matches!(host.end, End::Dead) && !host.is_orderly() && socket.is_open() {
        socket.abort();
    }
    moved
}

/// Gives how many bytes moved and whether there are more that could.
fn from_guest(socket: &mut Socket<'_>, host: &mut Host) -> (usize, bool) {
    let mut total = 0;
    while socket.can_recv() {
        if total >= TURN {
            return (total, true);
        }
        let (moved, dead) = match &mut host.end {
            End::Stream(stream) if host.writable => {
                let result = socket.recv(|bytes| match stream.write(bytes) {
                    Ok(n) => (n, Ok(n)),
                    Err(error) => (0, Err(error)),
                });
                match result {
                    Ok(Ok(n)) => (n, false),
                    Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                        host.writable = false;
                        (0, false)
                    }
                    Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Ok(Err(_)) => (0, true),
                    Err(_) => (0, false),
                }
            }
            End::Names(names) => {
                let room = (2 * (2 + MAX_QUERY)).saturating_sub(names.input.len());
                let taken = socket.recv(|bytes| {
                    let n = bytes.len().min(room);
                    names.input.extend(&bytes[..n]);
                    (n, n)
                });
                (taken.unwrap_or(0), false)
            }
            _ => (0, false),
        };
        if dead {
            host.kill();
        }
        if moved == 0 {
            break;
        }
        total += moved;
    }
    (total, false)
}

/// Gives how many bytes moved and whether there are more that could.
fn to_guest(socket: &mut Socket<'_>, host: &mut Host) -> (usize, bool) {
    let mut total = 0;
    while socket.can_send() {
        if total >= TURN {
            return (total, true);
        }
        let (moved, dead) = match &mut host.end {
            End::Stream(stream) if host.readable && !host.host_ended => {
                let result = socket.send(|room| match stream.read(room) {
                    Ok(n) => (n, Ok(n)),
                    Err(error) => (0, Err(error)),
                });
                match result {
                    Ok(Ok(0)) => {
                        host.host_ended = true;
                        socket.close();
                        (0, false)
                    }
                    Ok(Ok(n)) => (n, false),
                    Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                        host.readable = false;
                        (0, false)
                    }
                    Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Ok(Err(_)) => (0, true),
                    Err(_) => (0, false),
                }
            }
            End::Names(names) => {
                let (front, _) = names.output.as_slices();
                let sent = socket.send_slice(front).unwrap_or(0);
                names.output.drain(..sent);
                if names.output.is_empty() {
                    names.output.shrink_to(0);
                }
                (sent, false)
            }
            _ => (0, false),
        };
        if dead {
            host.kill();
        }
        if moved == 0 {
            break;
        }
        total += moved;
    }
    (total, false)
}

/// Whether a connection is done with.
pub(super) fn is_over(socket: &Socket<'_>, host: &Host) -> bool {
    match socket.state() {
        // The guest reset the connection before it stood (RFC 9293 §3.10.7.4 goes back to LISTEN).
        State::Listen => true,
        // Nothing is lost on this link, so nobody will ask again for the last acknowledgement.
        State::TimeWait => matches!(host.end, End::Dead) || host.guest_ended,
        State::Closed => {
            // A reset of ours that is still to be sent.
            if socket.remote_endpoint().is_some() {
                return false;
            }
            // The guest ended in order and its last bytes wait for the host to take them.
            let waiting = host.guest_fin && host.host_ended && socket.recv_queue() > 0;
            !(waiting && matches!(host.end, End::Stream(_)))
        }
        _ => false,
    }
}

/// The TCP part of an IP packet without extension headers.
fn tcp_of(packet: &[u8]) -> Option<(IpAddr, IpAddr, TcpPacket<&[u8]>)> {
    let (from, to, payload) = match packet.first()? >> 4 {
        4 => {
            let ip = Ipv4Packet::new_checked(packet).ok()?;
            (ip.src_addr().into(), ip.dst_addr().into(), ip.payload())
        }
        6 => {
            let ip = Ipv6Packet::new_checked(packet).ok()?;
            (ip.src_addr().into(), ip.dst_addr().into(), ip.payload())
        }
        _ => return None,
    };
    Some((from, to, TcpPacket::new_checked(payload).ok()?))
}

/// Whether a packet resets its connection.
pub(super) fn is_reset(packet: &[u8]) -> bool {
    tcp_of(packet).is_some_and(|(_, _, tcp)| tcp.rst())
}

/// Says in a packet of smoltcp's that it takes a unit of the window less than it does. It rounds its
/// window down each time anew, so that the end of a full one may go back by less than a unit, behind
/// what was promised; and what a guest sends beyond it is cut off.
pub(super) fn narrow_window(packet: &mut [u8], fill_checksum: bool) {
    let Some((from, to, tcp)) = tcp_of(packet) else {
        return;
    };
    // The window of a SYN has no unit.
    if tcp.syn() || tcp.window_len() == 0 {
        return;
    }
    let header = packet.len() - tcp.into_inner().len();
    let Some(segment) = packet.get_mut(header..) else {
        return;
    };
    let mut tcp = TcpPacket::new_unchecked(segment);
    tcp.set_window_len(tcp.window_len() - 1);
    if fill_checksum {
        tcp.fill_checksum(&from.into(), &to.into());
    }
}

/// Bytes of data in a packet.
pub(super) fn data_len(packet: &[u8]) -> usize {
    tcp_of(packet).map_or(0, |(_, _, tcp)| tcp.payload().len())
}

/// The sequence number after a packet's last.
pub(super) fn end_of(packet: &[u8]) -> Option<TcpSeqNumber> {
    let (_, _, tcp) = tcp_of(packet)?;
    Some(tcp.seq_number() + tcp.segment_len())
}

/// What a packet of an open connection acknowledges.
pub(super) fn acknowledgement(packet: &[u8]) -> Option<Acknowledgement> {
    let (_, _, tcp) = tcp_of(packet)?;
    if !tcp.ack() || tcp.syn() || tcp.rst() {
        return None;
    }
    let from = tcp.ack_number();
    let ranges = match usize::from(tcp.header_len()) {
        TCP_HEADER_LEN => [None; 3],
        _ => tcp.selective_ack_ranges().ok()?,
    };
    // A range before it is of data that came twice (RFC 2883).
    let later = |&(start, _): &(u32, u32)| TcpSeqNumber(start.cast_signed()) > from;
    Some(Acknowledgement {
        up_to: from,
        hole: ranges.iter().flatten().any(later),
        shut: tcp.window_len() == 0,
    })
}

/// A packet's acknowledgement without its data, as if it came after it.
pub(super) fn bare_acknowledgement(packet: &[u8]) -> Option<Vec<u8>> {
    let (from, to, tcp) = tcp_of(packet)?;
    let mut bare = parse(from, to, &tcp)?;
    bare.seq_number += tcp.segment_len();
    bare.control = TcpControl::None;
    bare.payload = &[];
    // Nobody looks at its options.
    bare.max_seg_size = None;
    bare.window_scale = None;
    bare.sack_permitted = false;
    bare.sack_ranges = [None; 3];
    bare.timestamp = None;
    Some(emit(from, to, &bare))
}

fn parse<'a>(from: IpAddr, to: IpAddr, tcp: &TcpPacket<&'a [u8]>) -> Option<TcpRepr<'a>> {
    TcpRepr::parse(
        tcp,
        &from.into(),
        &to.into(),
        &ChecksumCapabilities::ignored(),
    )
    .ok()
}

/// An IP packet. Its TCP checksum is not computed: nobody looks at it.
fn emit(from: IpAddr, to: IpAddr, tcp: &TcpRepr<'_>) -> Vec<u8> {
    let unchecked = ChecksumCapabilities::ignored();
    let ip = IpRepr::new(
        from.into(),
        to.into(),
        IpProtocol::Tcp,
        tcp.buffer_len(),
        64,
    );
    let mut bytes = vec![0; ip.buffer_len()];
    ip.emit(&mut bytes[..], &ChecksumCapabilities::default());
    let mut segment = TcpPacket::new_unchecked(&mut bytes[ip.header_len()..]);
    tcp.emit(&mut segment, &from.into(), &to.into(), &unchecked);
    bytes
}

/// Notes how much data the guest takes in one segment, which its SYN says. When the guest cuts long
/// segments itself, gives the SYN with the largest size instead, so that smoltcp makes them long.
pub(super) fn rewrite_mss(packet: &[u8], output: &Output, mss: &mut u16) -> Option<Vec<u8>> {
    let (from, to, tcp) = tcp_of(packet)?;
    if !tcp.syn() {
        return None;
    }
    let mut tcp = parse(from, to, &tcp)?;
    if tcp.control != TcpControl::Syn {
        return None;
    }
    let headers = if from.is_ipv4() { 40 } else { 60 };
    let largest = u16::try_from(output.mtu.saturating_sub(headers)).unwrap_or(u16::MAX);
    // A segment of no data would never get anywhere; RFC 9293 §3.7.1 has 536 as the least.
    *mss = tcp.max_seg_size.unwrap_or(536).clamp(64, largest);
    if !output.offloads.segmentation {
        return None;
    }
    tcp.max_seg_size = Some(u16::MAX);
    // A SYN acknowledges no ranges; with them and what was just added the options could be longer
    // than a header can say.
    tcp.sack_ranges = [None; 3];
    Some(emit(from, to, &tcp))
}
