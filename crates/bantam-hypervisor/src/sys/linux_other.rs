//! Linux on a CPU without a backend yet.

pub use vmm_sys_util::eventfd::EventFd;

use crate::{HostKind, HostProbe, Hypervisor, HypervisorError, Result, UnusableReason};

pub(crate) fn probe() -> HostProbe {
    HostProbe {
        backend: "none".to_owned(),
        device: None,
        api_version: None,
        kind: HostKind::Unusable(UnusableReason::NoBackend),
        capabilities: None,
    }
}

pub(crate) fn open() -> Result<Box<dyn Hypervisor>> {
    Err(HypervisorError::Unavailable(UnusableReason::NoBackend))
}
