//! Linux: the kernel's own routing decision, asked for by RTM_GETROUTE (rtnetlink(7)). A second
//! address of a network, an anycast address, a block that is routed to this host as a whole: all
//! are "local" there, and no other question finds all of them.

use std::io;
use std::net::IpAddr;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

/// Of linux/netlink.h and linux/rtnetlink.h.
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTA_DST: u16 = 1;
const RTN_LOCAL: u8 = 2;
const RTN_BROADCAST: u8 = 3;
const RTN_ANYCAST: u8 = 4;
/// Of linux/socket.h.
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// Bytes of `struct nlmsghdr`, and where `rtm_type` and the number of an error are after it.
const HEADER: usize = 16;
const TYPE: usize = HEADER + 7;

pub(super) fn is_local(address: IpAddr) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        flags,
        // NETLINK_ROUTE is protocol 0.
        None,
    )?;
    send(&socket, &question(address), SendFlags::NOSIGNAL)?;
    // The kernel has answered before the call above returned; routes have few attributes.
    let mut answer = [0; 1024];
    let (len, _) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
    read(answer.get(..len).unwrap_or_default())
}

/// `struct nlmsghdr`, `struct rtmsg`, and the destination as an attribute.
fn question(address: IpAddr) -> Vec<u8> {
    let (family, len, octets) = match address {
        IpAddr::V4(v4) => (AF_INET, 4_u8, v4.octets().to_vec()),
        IpAddr::V6(v6) => (AF_INET6, 16, v6.octets().to_vec()),
    };
    let mut bytes = Vec::with_capacity(48);
    // Three headers of 16, 12 and 4 bytes.
    bytes.extend((32 + u32::from(len)).to_ne_bytes());
    bytes.extend(RTM_GETROUTE.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and port: there is one question on this socket.
    bytes.extend([0; 8]);
    // rtm_family, rtm_dst_len in bits; the kernel is asked for everything else.
    bytes.extend([family, len * 8]);
    bytes.extend([0; 10]);
    bytes.extend((4 + u16::from(len)).to_ne_bytes());
    bytes.extend(RTA_DST.to_ne_bytes());
    bytes.extend(octets);
    bytes
}

fn read(answer: &[u8]) -> io::Result<bool> {
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "an odd answer about a route");
    let Some(&[low, high]) = answer.get(4..6) else {
        return Err(odd());
    };
    match u16::from_ne_bytes([low, high]) {
        RTM_NEWROUTE => {
            let kind = *answer.get(TYPE).ok_or_else(odd)?;
            Ok(matches!(kind, RTN_LOCAL | RTN_BROADCAST | RTN_ANYCAST))
        }
        NLMSG_ERROR => {
            let Some(&[a, b, c, d]) = answer.get(HEADER..HEADER + 4) else {
                return Err(odd());
            };
            let number = i32::from_ne_bytes([a, b, c, d]).saturating_neg();
            Err(Errno::from_raw_os_error(number).into())
        }
        _ => Err(odd()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_of_loopback_is_here_and_the_internet_is_not() {
        for (address, local) in [
            ("127.0.0.1", true),
            // No interface has it; the block is routed here.
            ("127.9.8.7", true),
            ("9.9.9.9", false),
        ] {
            match is_local(address.parse().unwrap()) {
                Ok(found) => assert_eq!(found, local, "{address}"),
                // A host without a network.
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::NetworkUnreachable),
            }
        }
        if std::path::Path::new("/proc/net/if_inet6").exists() {
            assert!(is_local("::1".parse().unwrap()).unwrap());
        }
    }

    #[test]
    fn answers_that_are_cut_short_are_errors() {
        let mut answer = vec![0; TYPE + 1];
        answer[4..6].copy_from_slice(&RTM_NEWROUTE.to_ne_bytes());
        answer[TYPE] = RTN_ANYCAST;
        assert!(read(&answer).unwrap());
        for len in 0..answer.len() {
            read(&answer[..len]).unwrap_err();
        }
        let mut answer = vec![0; HEADER + 4];
        answer[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
        answer[HEADER..].copy_from_slice(&(-101_i32).to_ne_bytes());
        let error = read(&answer).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NetworkUnreachable);
    }
}
