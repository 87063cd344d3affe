//! A guest: smoltcp's own stack at the other end of the link.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use bantam_net::{Addresses, Checksum, Config, FrameInfo, Network, Offloads, Policy, Stack, open};
use smoltcp::iface::{Interface, SocketHandle, SocketSet};
use smoltcp::phy::{ChecksumCapabilities, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::{icmp, tcp, udp};
use smoltcp::time::Instant as WireInstant;
use smoltcp::wire::{
    EthernetAddress, EthernetFrame, EthernetProtocol, EthernetRepr, HardwareAddress, IpCidr,
    IpProtocol, Ipv4Packet, Ipv4Repr, TcpPacket, TcpRepr,
};

/// Ends a hang; nothing is measured by it.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// The guest's network card.
pub(crate) struct Card {
    pub(crate) received: VecDeque<Vec<u8>>,
    pub(crate) sent: VecDeque<Vec<u8>>,
    mtu: usize,
    offloads: Offloads,
}

impl Device for Card {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sender<'a>;

    fn receive(&mut self, _: WireInstant) -> Option<(Received, Sender<'_>)> {
        let frame = self.received.pop_front()?;
        Some((Received(frame), Sender(&mut self.sent)))
    }

    fn transmit(&mut self, _: WireInstant) -> Option<Sender<'_>> {
        (self.sent.len() < 64).then_some(Sender(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = self.mtu + 14;
        if self.offloads.checksum {
            let mut checksums = ChecksumCapabilities::default();
            checksums.tcp = smoltcp::phy::Checksum::None;
            capabilities.checksum = checksums;
        }
        capabilities
    }
}

pub(crate) struct Received(Vec<u8>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

pub(crate) struct Sender<'a>(&'a mut VecDeque<Vec<u8>>);

impl TxToken for Sender<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = vec![0; len];
        let result = f(&mut frame);
        self.0.push_back(frame);
        result
    }
}

/// A guest and its network.
pub(crate) struct Guest {
    pub(crate) network: Network,
    pub(crate) stack: Stack,
    pub(crate) card: Card,
    pub(crate) sockets: SocketSet<'static>,
    pub(crate) interface: Interface,
    pub(crate) addresses: Addresses,
    /// Frames the guest takes; `usize::MAX` normally.
    pub(crate) takes: usize,
    /// CPU time spent in the stack.
    pub(crate) inside: Duration,
    /// Longest frame it got.
    pub(crate) longest: usize,
    start: Instant,
    next_port: u16,
}

/// A policy under which the tests' servers are reached.
pub(crate) fn granted() -> Policy {
    Policy {
        allow_host_loopback: true,
        ..Policy::public()
    }
}

impl Guest {
    pub(crate) fn new(policy: Policy) -> Guest {
        Guest::with(
            &Config {
                policy,
                ..Config::default()
            },
            Offloads::default(),
        )
    }

    pub(crate) fn with(config: &Config, offloads: Offloads) -> Guest {
        let (network, mut stack) = open(config).unwrap();
        stack.reset(offloads);
        let addresses = config.addresses.clone();
        let mut card = Card {
            received: VecDeque::new(),
            sent: VecDeque::new(),
            mtu: config.mtu.into(),
            offloads,
        };
        let mac = HardwareAddress::Ethernet(EthernetAddress(addresses.guest_mac));
        let mut settings = smoltcp::iface::Config::new(mac);
        settings.random_seed = 7;
        let mut interface = Interface::new(settings, &mut card, WireInstant::ZERO);
        interface.update_ip_addrs(|list| {
            let (v4, v6) = (addresses.guest_v4, addresses.guest_v6);
            list.push(IpCidr::new(v4.into(), addresses.prefix_v4))
                .unwrap();
            list.push(IpCidr::new(v6.into(), addresses.prefix_v6))
                .unwrap();
        });
        let routes = interface.routes_mut();
        routes.add_default_ipv4_route(addresses.gateway_v4).unwrap();
        routes.add_default_ipv6_route(addresses.gateway_v6).unwrap();
        Guest {
            network,
            stack,
            card,
            sockets: SocketSet::new(Vec::new()),
            interface,
            addresses,
            takes: usize::MAX,
            inside: Duration::ZERO,
            longest: 0,
            start: Instant::now(),
            next_port: 40_000,
        }
    }

    pub(crate) fn now(&self) -> WireInstant {
        WireInstant::from_micros(i64::try_from(self.start.elapsed().as_micros()).unwrap())
    }

    /// One turn of guest and stack. Gives how long nothing will happen by itself.
    pub(crate) fn step(&mut self) -> Duration {
        let now = self.now();
        self.interface.poll(now, &mut self.card, &mut self.sockets);
        let start = cpu_time();
        let mut info = FrameInfo::default();
        if self.card.offloads.checksum {
            info.checksum = Checksum::Partial {
                start: 34,
                offset: 16,
            };
        }
        while let Some(frame) = self.card.sent.pop_front() {
            // Only TCP is left to the device.
            let tcp = frame.get(12..14) == Some(&[8, 0]) && frame.get(23) == Some(&6)
                || frame.get(12..14) == Some(&[0x86, 0xdd]) && frame.get(20) == Some(&6);
            let plain = FrameInfo::default();
            self.stack.receive(&frame, if tcp { &info } else { &plain });
        }
        let mut pause = self.stack.run();
        let mut taken = 0;
        while taken < self.takes {
            let card = &mut self.card;
            let longest = &mut self.longest;
            let offloads = card.offloads;
            if !self.stack.take_frame(|bytes, info| {
                *longest = bytes.len().max(*longest);
                check(bytes, info, offloads, card.mtu);
                card.received.push_back(bytes.to_vec());
                true
            }) {
                break;
            }
            taken += 1;
            if taken % 32 == 0 {
                break;
            }
        }
        self.inside += cpu_time().saturating_sub(start);
        if taken > 0 {
            pause = Some(Duration::ZERO);
        }
        let now = self.now();
        let guest = self
            .interface
            .poll_delay(now, &self.sockets)
            .map(|delay| Duration::from_micros(delay.total_micros()));
        [pause, guest]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(Duration::MAX)
    }

    /// Turns until `done`; panics after [`LIMIT`], saying what it waited for.
    pub(crate) fn until<T>(
        &mut self,
        what: &str,
        mut done: impl FnMut(&mut Guest) -> Option<T>,
    ) -> T {
        let start = Instant::now();
        loop {
            let pause = self.step();
            if let Some(value) = done(self) {
                return value;
            }
            assert!(start.elapsed() < LIMIT, "waiting for {what}");
            // What the test's own threads do shows only at sockets, or not at all.
            self.wait(pause.min(Duration::from_millis(5)));
        }
    }

    /// Waits for the stack's descriptor; false if it has nothing after `pause`.
    pub(crate) fn wait(&self, pause: Duration) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let timeout = Timespec::try_from(pause).unwrap();
        let fd = self.stack.as_fd();
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() > 0
    }

    /// A TCP socket that is being connected to `to`.
    pub(crate) fn connect(&mut self, to: SocketAddr) -> SocketHandle {
        self.connect_with(to, 256 << 10)
    }

    pub(crate) fn connect_with(&mut self, to: SocketAddr, buffer: usize) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; buffer]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        let from = self.fresh_port();
        socket.connect(self.interface.context(), to, from).unwrap();
        self.sockets.add(socket)
    }

    pub(crate) fn fresh_port(&mut self) -> u16 {
        self.next_port += 1;
        self.next_port
    }

    pub(crate) fn tcp(&mut self, handle: SocketHandle) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    /// Waits until the connection stands or is refused.
    pub(crate) fn connected(&mut self, handle: SocketHandle) -> bool {
        self.until("a connection", |guest| match guest.tcp(handle).state() {
            tcp::State::SynSent => None,
            state => Some(state != tcp::State::Closed),
        })
    }

    /// Sends all of `data`.
    pub(crate) fn send(&mut self, handle: SocketHandle, mut data: &[u8]) {
        self.until("bytes sent", |guest| {
            let sent = guest.tcp(handle).send_slice(data).unwrap();
            data = &data[sent..];
            data.is_empty().then_some(())
        });
    }

    /// Receives up to the peer's end, or a reset.
    pub(crate) fn receive_all(&mut self, handle: SocketHandle) -> Result<Vec<u8>, Vec<u8>> {
        let mut data = Vec::new();
        self.until("the peer's end", |guest| {
            let socket = guest.tcp(handle);
            if socket.state() == tcp::State::SynSent {
                return None;
            }
            while socket.can_recv() {
                socket
                    .recv(|bytes| {
                        data.extend_from_slice(bytes);
                        (bytes.len(), ())
                    })
                    .unwrap();
            }
            match socket.recv(|_| (0, ())) {
                Ok(()) => None,
                Err(tcp::RecvError::Finished) => Some(true),
                Err(tcp::RecvError::InvalidState) => Some(false),
            }
        })
        .then(|| std::mem::take(&mut data))
        .ok_or(data)
    }

    /// A UDP socket.
    pub(crate) fn udp(&mut self) -> SocketHandle {
        let buffer =
            || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 64], vec![0; 256 << 10]);
        let mut socket = udp::Socket::new(buffer(), buffer());
        socket.bind(self.fresh_port()).unwrap();
        self.sockets.add(socket)
    }

    pub(crate) fn udp_send(&mut self, handle: SocketHandle, to: SocketAddr, data: &[u8]) {
        let socket = self.sockets.get_mut::<udp::Socket<'_>>(handle);
        socket
            .send_slice(data, smoltcp::wire::IpEndpoint::from(to))
            .unwrap();
    }

    pub(crate) fn udp_receive(&mut self, handle: SocketHandle) -> (Vec<u8>, SocketAddr) {
        self.until("a datagram", |guest| {
            let socket = guest.sockets.get_mut::<udp::Socket<'_>>(handle);
            let (data, meta) = socket.recv().ok()?;
            let from = SocketAddr::new(meta.endpoint.addr.into(), meta.endpoint.port);
            Some((data.to_vec(), from))
        })
    }

    /// A socket that gets the ICMP errors about a UDP socket's port.
    pub(crate) fn errors_of(&mut self, port: u16) -> SocketHandle {
        let buffer =
            || icmp::PacketBuffer::new(vec![icmp::PacketMetadata::EMPTY; 8], vec![0; 4096]);
        let mut socket = icmp::Socket::new(buffer(), buffer());
        socket.bind(icmp::Endpoint::Udp(port.into())).unwrap();
        self.sockets.add(socket)
    }

    /// The gateway, which is the host's loopback.
    pub(crate) fn host(&self, port: u16) -> SocketAddr {
        (self.addresses.gateway_v4, port).into()
    }

    pub(crate) fn host6(&self, port: u16) -> SocketAddr {
        (self.addresses.gateway_v6, port).into()
    }
}

/// A TCP segment from the guest to the gateway.
pub(crate) fn frame(addresses: &Addresses, tcp: &TcpRepr<'_>) -> Vec<u8> {
    let (src, dst) = (addresses.guest_v4, addresses.gateway_v4);
    let ip = Ipv4Repr {
        src_addr: src,
        dst_addr: dst,
        next_header: IpProtocol::Tcp,
        payload_len: tcp.buffer_len(),
        hop_limit: 64,
    };
    let ethernet = EthernetRepr {
        src_addr: EthernetAddress(addresses.guest_mac),
        dst_addr: EthernetAddress(addresses.gateway_mac),
        ethertype: EthernetProtocol::Ipv4,
    };
    let checksums = ChecksumCapabilities::default();
    let mut bytes = vec![0; 14 + 20 + tcp.buffer_len()];
    ethernet.emit(&mut EthernetFrame::new_unchecked(&mut bytes[..]));
    ip.emit(&mut Ipv4Packet::new_unchecked(&mut bytes[14..]), &checksums);
    tcp.emit(
        &mut TcpPacket::new_unchecked(&mut bytes[34..]),
        &src.into(),
        &dst.into(),
        &checksums,
    );
    bytes
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// What a driver may rely on.
fn check(bytes: &[u8], info: &FrameInfo, offloads: Offloads, mtu: usize) {
    if let Checksum::Partial { start, offset } = info.checksum {
        assert!(offloads.checksum, "a partial checksum was not negotiated");
        assert!(bytes.len() > usize::from(start) + usize::from(offset) + 2);
    }
    match info.segmentation {
        Some(cut) => {
            assert!(offloads.segmentation, "segmentation was not negotiated");
            assert!(usize::from(cut.size) + usize::from(cut.headers) <= mtu + 14);
            assert!(bytes.len() > usize::from(cut.size) + usize::from(cut.headers));
            assert!(info.checksum != Checksum::Complete);
        }
        None => assert!(
            bytes.len() <= mtu + 14,
            "{} bytes are too many",
            bytes.len()
        ),
    }
}

/// An address of this host that is not loopback, if it has one.
pub(crate) fn own_address() -> Option<IpAddr> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // Connecting a datagram socket sends nothing.
    socket.connect((Ipv4Addr::new(10, 255, 255, 254), 9)).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback()).then_some(ip)
}
