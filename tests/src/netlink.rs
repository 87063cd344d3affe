//! Links, addresses and routes of a network namespace, by rtnetlink(7): the rig has no `ip`.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

/// Message types and attributes, as `linux/rtnetlink.h` and its kin number them.
const NLMSG_ERROR: u16 = 2;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
/// NLM_F_REQUEST and NLM_F_ACK; with NLM_F_CREATE and NLM_F_EXCL.
const CHANGE: u16 = 0x5;
const CREATE: u16 = 0x605;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_F_NODAD: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const IFF_UP: u32 = 1;

/// The calling thread's namespace.
pub(crate) struct Netlink {
    socket: OwnedFd,
}

impl Netlink {
    pub(crate) fn open() -> io::Result<Self> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            // NETLINK_ROUTE
            None,
        )?;
        Ok(Self { socket })
    }

    /// A link with one end here and the other in another namespace.
    pub(crate) fn add_veth(
        &self,
        name: &str,
        peer: &str,
        peer_namespace: BorrowedFd<'_>,
        mtu: u32,
    ) -> io::Result<()> {
        let mut other = vec![0; 16];
        attribute(&mut other, IFLA_IFNAME, &text(peer));
        attribute(&mut other, IFLA_MTU, &mtu.to_ne_bytes());
        let fd = peer_namespace.as_raw_fd();
        attribute(&mut other, IFLA_NET_NS_FD, &fd.to_ne_bytes());
        let mut data = Vec::new();
        attribute(&mut data, VETH_INFO_PEER, &other);
        let mut info = Vec::new();
        attribute(&mut info, IFLA_INFO_KIND, b"veth");
        attribute(&mut info, IFLA_INFO_DATA, &data);
        let mut body = vec![0; 16];
        attribute(&mut body, IFLA_IFNAME, &text(name));
        attribute(&mut body, IFLA_MTU, &mtu.to_ne_bytes());
        attribute(&mut body, IFLA_LINKINFO, &info);
        self.request(RTM_NEWLINK, CREATE, &body)
    }

    pub(crate) fn up(&self, name: &str) -> io::Result<()> {
        let mut body = vec![0; 4];
        for field in [index(name)?, IFF_UP, IFF_UP] {
            body.extend(field.to_ne_bytes());
        }
        self.request(RTM_NEWLINK, CHANGE, &body)
    }

    pub(crate) fn add_address(&self, name: &str, address: IpAddr, prefix: u8) -> io::Result<()> {
        let mut body = vec![family(address), prefix, IFA_F_NODAD, 0];
        body.extend(index(name)?.to_ne_bytes());
        attribute(&mut body, IFA_LOCAL, &bytes(address));
        attribute(&mut body, IFA_ADDRESS, &bytes(address));
        self.request(RTM_NEWADDR, CREATE, &body)
    }

    pub(crate) fn add_default_route(&self, gateway: IpAddr) -> io::Result<()> {
        // The main table, made by an administrator, to everywhere, unicast.
        let mut body = vec![family(gateway), 0, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0];
        attribute(&mut body, RTA_GATEWAY, &bytes(gateway));
        self.request(RTM_NEWROUTE, CREATE, &body)
    }

    /// A route to one address.
    pub(crate) fn add_route(&self, name: &str, to: IpAddr) -> io::Result<()> {
        let prefix = if to.is_ipv4() { 32 } else { 128 };
        // The main table, made by an administrator, on the link, unicast.
        let mut body = vec![family(to), prefix, 0, 0, 254, 4, 253, 1, 0, 0, 0, 0];
        attribute(&mut body, RTA_DST, &bytes(to));
        attribute(&mut body, RTA_OIF, &index(name)?.to_ne_bytes());
        self.request(RTM_NEWROUTE, CREATE, &body)
    }

    fn request(&self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        let len = u32::try_from(16 + body.len()).map_err(io::Error::other)?;
        let mut message = len.to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend([0; 8]);
        message.extend(body);
        send(&self.socket, &message, SendFlags::empty())?;
        let mut answer = [0; 1024];
        let (len, _) = recv(&self.socket, &mut answer[..], RecvFlags::empty())?;
        let answer = &answer[..len];
        if answer.get(4..6) != Some(&NLMSG_ERROR.to_ne_bytes()[..]) {
            return Err(io::Error::other("rtnetlink answered something else"));
        }
        match answer.get(16..20).and_then(|code| code.try_into().ok()) {
            Some(code) => match i32::from_ne_bytes(code) {
                0 => Ok(()),
                code => Err(io::Error::from_raw_os_error(-code)),
            },
            None => Err(io::Error::other("rtnetlink's answer is short")),
        }
    }
}

fn index(name: &str) -> io::Result<u32> {
    let socket = socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    Ok(rustix::net::netdevice::name_to_index(socket, name)?)
}

fn attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let len = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    body.extend(len.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn text(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() { 2 } else { 10 }
}

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}
