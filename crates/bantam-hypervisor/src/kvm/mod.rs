//! The KVM backend (Linux, x86_64; `Documentation/virt/kvm/api.rst`).

mod convert;
mod kick;
mod probe;
mod vcpu;
mod vm;

use std::sync::{Arc, OnceLock};

use kvm_ioctls::Cap;

pub use kick::kick_signal;
pub(crate) use probe::probe;

use crate::x86::CpuidEntry;
use crate::{Capabilities, Hypervisor, HypervisorError, Result, UnusableReason, Vm, VmConfig};

/// The device that is opened.
pub const DEVICE: &str = "/dev/kvm";

/// Guest-physical pages that KVM takes for itself on Intel CPUs without "unrestricted guest": an
/// identity page table and a task state segment. No memory slot and no device may lie here.
pub const RESERVED: std::ops::Range<u64> = IDENTITY_MAP_ADDRESS..TSS_ADDRESS + 3 * 4096;

const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;
const TSS_ADDRESS: u64 = IDENTITY_MAP_ADDRESS + 4096;

/// An opened `/dev/kvm`.
pub struct Kvm {
    shared: Arc<Shared>,
}

/// What the virtual machines of one opened device have in common.
pub(crate) struct Shared {
    pub(crate) fd: kvm_ioctls::Kvm,
    pub(crate) capabilities: Capabilities,
    cpuid: OnceLock<Vec<CpuidEntry>>,
}

impl Kvm {
    /// Opens `/dev/kvm`.
    ///
    /// # Errors
    ///
    /// [`HypervisorError::Unavailable`] if there is none that this process may use, and
    /// [`HypervisorError::Missing`] if it lacks what bantam cannot do without.
    pub fn open() -> Result<Self> {
        let fd = probe::open_device().map_err(HypervisorError::Unavailable)?;
        let version = fd.get_api_version();
        if version != probe::API_VERSION {
            return Err(HypervisorError::Unavailable(
                UnusableReason::UnsupportedApi { version },
            ));
        }
        let capabilities = capabilities(&fd);
        if !fd.check_extension(Cap::UserMemory) {
            return Err(HypervisorError::Missing(
                "user memory slots (KVM_CAP_USER_MEMORY)",
            ));
        }
        if !fd.check_extension(Cap::ExtCpuid) {
            return Err(HypervisorError::Missing(
                "CPUID control (KVM_CAP_EXT_CPUID)",
            ));
        }
        Ok(Self {
            shared: Arc::new(Shared {
                fd,
                capabilities,
                cpuid: OnceLock::new(),
            }),
        })
    }
}

impl Hypervisor for Kvm {
    fn capabilities(&self) -> Capabilities {
        self.shared.capabilities
    }

    fn create_vm(&self, config: &VmConfig) -> Result<Box<dyn Vm>> {
        Ok(Box::new(vm::KvmVm::create(&self.shared, config)?))
    }
}

impl Shared {
    /// `KVM_GET_SUPPORTED_CPUID`, asked once.
    pub(crate) fn supported_cpuid(&self) -> Result<Vec<CpuidEntry>> {
        if let Some(entries) = self.cpuid.get() {
            return Ok(entries.clone());
        }
        let list = self
            .fd
            .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(|e| HypervisorError::call("reading the supported CPUID", e))?;
        let entries: Vec<_> = list
            .as_slice()
            .iter()
            .map(convert::cpuid_from_kvm)
            .collect();
        Ok(self.cpuid.get_or_init(|| entries).clone())
    }
}

pub(crate) fn capabilities(fd: &kvm_ioctls::Kvm) -> Capabilities {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Capabilities {
        max_vcpus: count(fd.get_max_vcpus()),
        memory_slots: count(fd.get_nr_memslots()),
        in_kernel_irqchip: fd.check_extension(Cap::Irqchip),
        irqfd: fd.check_extension(Cap::Irqfd),
        ioeventfd: fd.check_extension(Cap::Ioeventfd),
        read_only_memory: fd.check_extension(Cap::ReadonlyMem),
        tsc_control: fd.check_extension(Cap::TscControl),
    }
}
