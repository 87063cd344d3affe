//! Linux on x86_64: KVM.

pub use vmm_sys_util::eventfd::EventFd;

pub(crate) use crate::kvm::probe;
use crate::{Hypervisor, Result, kvm::Kvm};

pub(crate) fn open() -> Result<Box<dyn Hypervisor>> {
    Ok(Box::new(Kvm::open()?))
}
