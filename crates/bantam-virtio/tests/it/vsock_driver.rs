//! The guest's side of the vsock protocol, packet by packet.

use std::collections::VecDeque;
use std::time::Duration;

use bantam_virtio::testing::{Buffer, Guest, PATIENCE, Transport};
use bantam_virtio::{Vsock, VsockDevice};

pub(crate) const CID: u32 = 3;
pub(crate) const REQUEST: u16 = 1;
pub(crate) const RESPONSE: u16 = 2;
pub(crate) const RST: u16 = 3;
pub(crate) const SHUTDOWN: u16 = 4;
pub(crate) const RW: u16 = 5;
pub(crate) const CREDIT_UPDATE: u16 = 6;
pub(crate) const CREDIT_REQUEST: u16 = 7;

const HEADER: u32 = 44;
const RX: usize = 0;
const TX: usize = 1;

/// A packet without its addresses' context identifiers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) src_cid: u64,
    pub(crate) dst_cid: u64,
    pub(crate) guest_port: u32,
    pub(crate) host_port: u32,
    pub(crate) len: u32,
    pub(crate) kind: u16,
    pub(crate) op: u16,
    pub(crate) flags: u32,
    pub(crate) buf_alloc: u32,
    pub(crate) fwd_cnt: u32,
    pub(crate) data: Vec<u8>,
}

impl Packet {
    /// A packet from the guest.
    pub(crate) fn new(op: u16, guest_port: u32, host_port: u32) -> Packet {
        Packet {
            src_cid: CID.into(),
            dst_cid: 2,
            guest_port,
            host_port,
            kind: 1,
            op,
            buf_alloc: 1 << 20,
            ..Packet::default()
        }
    }

    pub(crate) fn data(mut self, data: &[u8]) -> Packet {
        self.data = data.to_vec();
        self.len = data.len() as u32;
        self
    }

    pub(crate) fn flags(mut self, flags: u32) -> Packet {
        self.flags = flags;
        self
    }

    pub(crate) fn credit(mut self, buf_alloc: u32, fwd_cnt: u32) -> Packet {
        self.buf_alloc = buf_alloc;
        self.fwd_cnt = fwd_cnt;
        self
    }

    /// As the guest sends it.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.src_cid.to_le_bytes());
        bytes.extend(self.dst_cid.to_le_bytes());
        bytes.extend(self.guest_port.to_le_bytes());
        bytes.extend(self.host_port.to_le_bytes());
        bytes.extend(self.len.to_le_bytes());
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend(self.op.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.buf_alloc.to_le_bytes());
        bytes.extend(self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// As the guest receives it.
    fn parse(bytes: &[u8]) -> Packet {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        Packet {
            src_cid: u64_at(0),
            dst_cid: u64_at(8),
            host_port: u32_at(16),
            guest_port: u32_at(20),
            len: u32_at(24),
            kind: u32_at(28) as u16,
            op: (u32_at(28) >> 16) as u16,
            flags: u32_at(32),
            buf_alloc: u32_at(36),
            fwd_cnt: u32_at(40),
            data: bytes[HEADER as usize..].to_vec(),
        }
    }
}

/// A guest with a vsock driver.
pub(crate) struct Driver {
    pub(crate) guest: Guest,
    pub(crate) vsock: Vsock,
    /// Receive buffers in flight: head and address.
    posted: VecDeque<(u16, u64, u32)>,
    tx_room: u64,
}

const TX_ROOM: u32 = 128 << 10;

impl Driver {
    pub(crate) fn start(transport: Transport) -> Driver {
        let (device, vsock) = VsockDevice::new(CID).unwrap();
        Driver::with_device(transport, device, vsock)
    }

    pub(crate) fn with_device(transport: Transport, device: VsockDevice, vsock: Vsock) -> Driver {
        let mut guest = Guest::start(transport, device);
        let tx_room = guest.alloc(TX_ROOM.into());
        Driver {
            guest,
            vsock,
            posted: VecDeque::new(),
            tx_room,
        }
    }

    /// Starts with receive buffers posted.
    pub(crate) fn ready(transport: Transport) -> Driver {
        let mut driver = Driver::start(transport);
        driver.post(64);
        driver
    }

    /// Sets the device up again after a reset, with empty rings.
    pub(crate) fn restart(&mut self) {
        self.posted.clear();
        self.guest.restart();
    }

    /// Posts receive buffers of 4 KiB.
    pub(crate) fn post(&mut self, count: usize) {
        for _ in 0..count {
            let addr = self.guest.alloc(4096);
            self.post_at(addr, 4096);
        }
        self.guest.rings[RX].kick();
    }

    fn post_at(&mut self, addr: u64, len: u32) {
        let head = self.guest.rings[RX].add(&[Buffer::writable(addr, len)]);
        self.posted.push_back((head, addr, len));
    }

    /// Sends a packet and waits until the device took it.
    pub(crate) fn send(&mut self, packet: &Packet) {
        self.send_with_header(&packet.header(), &packet.data);
    }

    pub(crate) fn send_with_header(&mut self, header: &[u8], data: &[u8]) {
        let bytes = [header, data].concat();
        assert!(bytes.len() <= TX_ROOM as usize);
        let addr = self.tx_room;
        self.guest.write(addr, &bytes);
        let header_len = header.len() as u32;
        let mut buffers = vec![Buffer::readable(addr, header_len)];
        if !data.is_empty() {
            let data_addr = addr + u64::from(header_len);
            buffers.push(Buffer::readable(data_addr, data.len() as u32));
        }
        assert_eq!(self.guest.request(TX, &buffers), 0);
    }

    /// The next packet of the device; its buffer is posted again.
    pub(crate) fn receive(&mut self) -> Packet {
        self.receive_for(PATIENCE).expect("a packet for the guest")
    }

    pub(crate) fn receive_for(&mut self, patience: Duration) -> Option<Packet> {
        let (id, written) = self.guest.wait_used_for(RX, patience)?;
        let (head, addr, len) = self.posted.pop_front().unwrap();
        assert_eq!(id, u32::from(head));
        assert!(written >= HEADER && written <= len, "{written}");
        let packet = Packet::parse(&self.guest.read(addr, written as usize));
        assert_eq!(packet.len as usize, packet.data.len());
        self.post_at(addr, len);
        if self.guest.rings[RX].wants_kick() {
            self.guest.rings[RX].kick();
        }
        Some(packet)
    }

    /// Receives a packet of a kind.
    pub(crate) fn expect(&mut self, op: u16) -> Packet {
        let packet = self.receive();
        assert_eq!(packet.op, op, "{packet:?}");
        packet
    }

    /// Receives data until there are `len` bytes.
    pub(crate) fn expect_data(&mut self, len: usize) -> Vec<u8> {
        let mut data = Vec::new();
        while data.len() < len {
            data.extend(self.expect(RW).data);
        }
        data
    }
}
