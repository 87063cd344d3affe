//! The network card: addresses and routes, by rtnetlink (rtnetlink(7)).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use bantam_protocol::GuestNetwork;
use nix::errno::Errno;
use nix::libc;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

use crate::log;

/// A machine has one card, which the kernel calls so.
const INTERFACE: &str = "eth0";

/// Brings the card up with what `network` says. What fails is logged, and the rest is done.
pub(crate) fn set_up(network: &GuestNetwork) {
    let steps = || -> nix::Result<()> {
        let mut link = Link::open(INTERFACE)?;
        // Nobody else is on the link: there are no routers to ask for and no addresses to try out,
        // which would take a second.
        for (setting, value) in [("accept_ra", "0"), ("accept_dad", "0")] {
            set("ipv6", setting, value);
        }
        if network.route_loopback {
            set("ipv4", "route_localnet", "1");
        }
        link.up()?;
        for &(address, prefix) in &network.addresses {
            note(
                format_args!("address {address}"),
                link.add_address(address, prefix),
            );
        }
        for &gateway in &network.gateways {
            note(
                format_args!("gateway {gateway}"),
                link.add_default_route(gateway),
            );
        }
        Ok(())
    };
    note(format_args!("interface {INTERFACE}"), steps());
}

/// Changes a setting of the card; a kernel without it needs no change.
fn set(family: &str, setting: &str, value: &str) {
    let path = format!("/proc/sys/net/{family}/conf/{INTERFACE}/{setting}");
    match std::fs::write(&path, value) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => log(&format!("{path}: {error}")),
        _ => {}
    }
}

fn note(what: std::fmt::Arguments<'_>, result: nix::Result<()>) {
    if let Err(error) = result {
        log(&format!("{what}: {}", error.desc()));
    }
}

/// A network interface, and the kernel's ear for requests about it.
struct Link {
    socket: OwnedFd,
    index: u32,
    sequence: u32,
}

impl Link {
    fn open(name: &str) -> nix::Result<Self> {
        Ok(Self {
            index: if_nametoindex(name)?,
            socket: socket(
                AddressFamily::Netlink,
                SockType::Raw,
                SockFlag::SOCK_CLOEXEC,
                SockProtocol::NetlinkRoute,
            )?,
            sequence: 0,
        })
    }

    fn up(&mut self) -> nix::Result<()> {
        self.request(&link_up(self.index))
    }

    fn add_address(&mut self, address: IpAddr, prefix: u8) -> nix::Result<()> {
        self.request(&new_address(self.index, address, prefix))
    }

    fn add_default_route(&mut self, gateway: IpAddr) -> nix::Result<()> {
        self.request(&default_route(self.index, gateway))
    }

    /// Sends a request and waits for the kernel's answer, which it gives at once.
    fn request(&mut self, request: &Request) -> nix::Result<()> {
        self.sequence += 1;
        let message = request.message(self.sequence);
        send(self.socket.as_raw_fd(), &message, MsgFlags::empty())?;
        let mut answer = [0; 1024];
        let len = recv(self.socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        answer
            .get(..len)
            .and_then(acknowledged)
            .unwrap_or(Err(Errno::EBADMSG))
    }
}

/// The verdict in an NLMSG_ERROR message: 0, or an error number below 0.
fn acknowledged(answer: &[u8]) -> Option<nix::Result<()>> {
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    if libc::c_int::from(kind) != libc::NLMSG_ERROR {
        return None;
    }
    let verdict = i32::from_ne_bytes(answer.get(16..20)?.try_into().ok()?);
    Some(match verdict {
        0 => Ok(()),
        error => Err(Errno::from_raw(-error)),
    })
}

/// A request without its header.
struct Request {
    kind: u16,
    flags: libc::c_int,
    body: Vec<u8>,
}

impl Request {
    /// An attribute, padded to four bytes.
    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let len = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        self.body.extend(len.to_ne_bytes());
        self.body.extend(kind.to_ne_bytes());
        self.body.extend(value);
        self.body.resize(self.body.len().next_multiple_of(4), 0);
    }

    /// The whole message: `struct nlmsghdr` and the request.
    fn message(&self, sequence: u32) -> Vec<u8> {
        let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | self.flags;
        let len = u32::try_from(16 + self.body.len()).unwrap_or(u32::MAX);
        let mut message = Vec::with_capacity(16 + self.body.len());
        message.extend(len.to_ne_bytes());
        message.extend(self.kind.to_ne_bytes());
        message.extend(u16::try_from(flags).unwrap_or_default().to_ne_bytes());
        message.extend(sequence.to_ne_bytes());
        // The sender's port: the kernel fills it in.
        message.extend(0_u32.to_ne_bytes());
        message.extend(&self.body);
        message
    }
}

fn family(address: IpAddr) -> u8 {
    let family = match address {
        IpAddr::V4(_) => libc::AF_INET,
        IpAddr::V6(_) => libc::AF_INET6,
    };
    u8::try_from(family).unwrap_or_default()
}

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// `struct ifinfomsg`: family, type, index, flags, and which of them to change.
fn link_up(index: u32) -> Request {
    let up = libc::IFF_UP.cast_unsigned();
    let mut body = vec![0; 4];
    for field in [index, up, up] {
        body.extend(field.to_ne_bytes());
    }
    Request {
        kind: libc::RTM_NEWLINK,
        flags: 0,
        body,
    }
}

/// `struct ifaddrmsg`: family, prefix, flags, scope and index.
fn new_address(index: u32, address: IpAddr, prefix: u8) -> Request {
    // An IPv6 address is of use at once.
    let flags = u8::try_from(libc::IFA_F_NODAD).unwrap_or_default();
    let flags = if address.is_ipv6() { flags } else { 0 };
    let mut body = vec![family(address), prefix, flags, libc::RT_SCOPE_UNIVERSE];
    body.extend(index.to_ne_bytes());
    let mut request = Request {
        kind: libc::RTM_NEWADDR,
        flags: libc::NLM_F_CREATE | libc::NLM_F_REPLACE,
        body,
    };
    request.attribute(libc::IFA_LOCAL, &bytes(address));
    request.attribute(libc::IFA_ADDRESS, &bytes(address));
    request
}

/// `struct rtmsg`: family, prefixes of destination and source, TOS, table, protocol, scope and
/// type, then flags.
fn default_route(index: u32, gateway: IpAddr) -> Request {
    let mut body = vec![
        family(gateway),
        0,
        0,
        0,
        libc::RT_TABLE_MAIN,
        libc::RTPROT_BOOT,
        libc::RT_SCOPE_UNIVERSE,
        libc::RTN_UNICAST,
    ];
    body.extend(0_u32.to_ne_bytes());
    let mut request = Request {
        kind: libc::RTM_NEWROUTE,
        flags: libc::NLM_F_CREATE | libc::NLM_F_REPLACE,
        body,
    };
    request.attribute(libc::RTA_GATEWAY, &bytes(gateway));
    request.attribute(libc::RTA_OIF, &index.to_ne_bytes());
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_as_long_as_it_says_and_padded() {
        let request = default_route(7, "fd00::1".parse().unwrap());
        let message = request.message(3);
        // Header, rtmsg, two attributes of 16 and 4 bytes.
        assert_eq!(message.len(), 16 + 12 + 20 + 8);
        assert_eq!(message[..4], 56_u32.to_ne_bytes());
        assert_eq!(message[8..12], 3_u32.to_ne_bytes());
        let mut odd = link_up(7);
        odd.attribute(1, &[1, 2, 3, 4, 5]);
        assert_eq!(odd.body.len(), 16 + 12);
        assert_eq!(odd.body[16..18], 9_u16.to_ne_bytes());
    }

    #[test]
    fn a_refusal_is_told_from_an_acknowledgement() {
        let answer = |kind: u16, verdict: i32| {
            let mut answer = vec![0; 36];
            answer[4..6].copy_from_slice(&kind.to_ne_bytes());
            answer[16..20].copy_from_slice(&verdict.to_ne_bytes());
            answer
        };
        assert_eq!(acknowledged(&answer(2, 0)), Some(Ok(())));
        assert_eq!(acknowledged(&answer(2, -19)), Some(Err(Errno::ENODEV)));
        assert_eq!(acknowledged(&answer(3, 0)), None);
        assert_eq!(acknowledged(&answer(2, 0)[..19]), None);
    }

    /// The kernel of the test's host refuses the requests, as there is no such interface (or it has
    /// no IPv6, or the test no permission), but not for their form. Nothing is changed.
    #[test]
    fn the_kernel_understands_the_requests() {
        let mut link = Link {
            index: u32::MAX >> 1,
            ..Link::open("lo").unwrap()
        };
        let (v4, v6) = ("192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap());
        for result in [
            link.up(),
            link.add_address(v4, 24),
            link.add_address(v6, 64),
            link.add_default_route(v4),
            link.add_default_route(v6),
        ] {
            let error = result.unwrap_err();
            let form = [
                Errno::EINVAL,
                Errno::EBADMSG,
                Errno::ERANGE,
                Errno::EMSGSIZE,
            ];
            assert!(!form.contains(&error), "{error}");
        }
    }
}
