//! Which addresses are the host's own.

#[cfg_attr(target_os = "linux", path = "linux.rs")]
#[cfg_attr(not(target_os = "linux"), path = "other.rs")]
mod sys;

use std::io;
use std::net::IpAddr;

use crate::{Range, range};

/// Whether what is sent to `address` stays on this host. If that cannot be found out, it does.
///
/// Loopback by its own address and what a socket would take for an IPv4 address are not looked at:
/// those are refused for what they are.
pub(crate) fn is_own(address: IpAddr) -> bool {
    if matches!(
        range(address),
        Range::Loopback
            | Range::Embedded
            | Range::Unspecified
            | Range::Multicast
            | Range::Broadcast
    ) {
        return false;
    }
    is_own_or_unknown(sys::is_local(address))
}

/// What there is no way to is not here. After any other error, such as one for want of
/// descriptors, which a guest can bring about, there is no telling.
fn is_own_or_unknown(found: io::Result<bool>) -> bool {
    use io::ErrorKind as K;
    match found {
        Ok(own) => own,
        Err(error) => !matches!(
            error.kind(),
            K::NetworkUnreachable | K::HostUnreachable | K::PermissionDenied | K::InvalidInput
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_cannot_be_looked_up_is_taken_for_the_hosts() {
        let of = |kind: io::ErrorKind| is_own_or_unknown(Err(kind.into()));
        assert!(!of(io::ErrorKind::NetworkUnreachable));
        assert!(of(io::ErrorKind::OutOfMemory));
        let no_descriptors = io::Error::from(rustix::io::Errno::MFILE);
        assert!(is_own_or_unknown(Err(no_descriptors)));
    }
}
