//! A virtual machine on KVM.

#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_MEM_READONLY, KVM_PMU_CAP_DISABLE, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::errno;

use super::{IDENTITY_MAP_ADDRESS, RESERVED, Shared, TSS_ADDRESS, vcpu};
use crate::{
    DataMatch, EventFd, Gsi, HypervisorError, IoAddress, MemorySlot, Result, VcpuBinder, Vm,
    VmConfig,
};

const PAGE: u64 = 4096;

pub(super) struct KvmVm {
    inner: Arc<VmInner>,
    config: VmConfig,
    slots: Mutex<Vec<(u32, u64, u64)>>,
}

/// Lives as long as the virtual machine and each of its vCPUs.
pub(super) struct VmInner {
    pub(super) fd: VmFd,
    pub(super) shared: Arc<Shared>,
}

impl KvmVm {
    pub(super) fn create(shared: &Arc<Shared>, config: &VmConfig) -> Result<Self> {
        let capabilities = &shared.capabilities;
        if config.vcpus == 0 || config.vcpus > capabilities.max_vcpus {
            return Err(HypervisorError::Invalid {
                what: format!("a machine of {} vCPUs", config.vcpus),
                why: "the hypervisor takes at least 1 and at most its capabilities' max_vcpus",
            });
        }
        let fd = create_fd(shared)?;
        if !config.performance_counters {
            disable_performance_counters(&fd)?;
        }
        fd.set_identity_map_address(IDENTITY_MAP_ADDRESS)
            .map_err(|e| HypervisorError::call("placing the identity map", e))?;
        // Fits: the address is below 4 GiB and this is a 64-bit host.
        #[allow(clippy::cast_possible_truncation)]
        fd.set_tss_address(TSS_ADDRESS as usize)
            .map_err(|e| HypervisorError::call("placing the task state segment", e))?;
        if config.interrupt_controller {
            fd.create_irq_chip()
                .map_err(|e| HypervisorError::call("creating the interrupt controller", e))?;
        }
        let inner = Arc::new(VmInner {
            fd,
            shared: Arc::clone(shared),
        });
        Ok(Self {
            inner,
            config: config.clone(),
            slots: Mutex::new(Vec::new()),
        })
    }

    fn need_interrupt_controller(&self, what: &str) -> Result<()> {
        if self.config.interrupt_controller {
            Ok(())
        } else {
            Err(HypervisorError::Invalid {
                what: what.to_owned(),
                why: "the virtual machine was created without an interrupt controller",
            })
        }
    }

    fn set_region(
        &self,
        region: kvm_userspace_memory_region,
    ) -> std::result::Result<(), errno::Error> {
        // SAFETY: the caller of `map_memory` vouches for the host range; a region of size 0 removes
        // the slot and points nowhere.
        unsafe { self.inner.fd.set_user_memory_region(region) }
    }
}

/// `KVM_CREATE_VM` registers an MMU notifier, which a signal can interrupt.
fn create_fd(shared: &Shared) -> Result<VmFd> {
    const ATTEMPTS: u32 = 16;
    let mut attempt = 1;
    loop {
        match shared.fd.create_vm() {
            Ok(fd) => return Ok(fd),
            Err(e) if e.errno() == libc::EINTR && attempt < ATTEMPTS => attempt += 1,
            Err(e) => return Err(HypervisorError::call("creating a virtual machine", e)),
        }
    }
}

/// Before the first vCPU exists. A kernel before 5.18 cannot, and then the guest has them.
fn disable_performance_counters(fd: &VmFd) -> Result<()> {
    let supported = fd.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into());
    if u32::try_from(supported).unwrap_or(0) & KVM_PMU_CAP_DISABLE == 0 {
        return Ok(());
    }
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_PMU_CAPABILITY,
        ..Default::default()
    };
    cap.args[0] = KVM_PMU_CAP_DISABLE.into();
    fd.enable_cap(&cap)
        .map_err(|e| HypervisorError::call("disabling the performance counters", e))
}

impl Vm for KvmVm {
    unsafe fn map_memory(&self, slot: MemorySlot) -> Result<()> {
        let invalid = |why| {
            Err(HypervisorError::Invalid {
                what: format!(
                    "memory slot {} of {:#x} bytes at {:#x}",
                    slot.slot, slot.len, slot.guest_addr
                ),
                why,
            })
        };
        let len = slot.len as u64;
        let host = slot.host_addr as u64;
        let aligned = [len, slot.guest_addr, host]
            .iter()
            .all(|n| n.is_multiple_of(PAGE));
        if len == 0 || !aligned {
            return invalid("addresses and length are whole pages");
        }
        let Some(end) = slot.guest_addr.checked_add(len) else {
            return invalid("it ends above the address space");
        };
        if slot.guest_addr < RESERVED.end && RESERVED.start < end {
            return invalid("it covers pages that KVM reserves");
        }
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // KVM would take a used number as a request to move or change the slot.
        if slots.iter().any(|&(used, ..)| used == slot.slot) {
            return invalid("the slot number is in use");
        }
        if slots
            .iter()
            .any(|&(_, start, stop)| slot.guest_addr < stop && start < end)
        {
            return invalid("it overlaps another slot");
        }
        self.set_region(kvm_userspace_memory_region {
            slot: slot.slot,
            flags: if slot.read_only { KVM_MEM_READONLY } else { 0 },
            guest_phys_addr: slot.guest_addr,
            memory_size: len,
            userspace_addr: host,
        })
        .map_err(|e| {
            let what = format!(
                "mapping memory slot {} of {len:#x} bytes at {:#x}",
                slot.slot, slot.guest_addr
            );
            HypervisorError::call(what, e)
        })?;
        slots.push((slot.slot, slot.guest_addr, end));
        Ok(())
    }

    fn unmap_memory(&self, slot: u32) -> Result<()> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(position) = slots.iter().position(|&(used, ..)| used == slot) else {
            return Err(HypervisorError::Invalid {
                what: format!("memory slot {slot}"),
                why: "it is not mapped",
            });
        };
        self.set_region(kvm_userspace_memory_region {
            slot,
            ..Default::default()
        })
        .map_err(|e| HypervisorError::call(format!("unmapping memory slot {slot}"), e))?;
        slots.swap_remove(position);
        Ok(())
    }

    fn irqfd(&self, gsi: Gsi, fd: &EventFd) -> Result<()> {
        self.need_interrupt_controller("an irqfd")?;
        self.inner
            .fd
            .register_irqfd(fd, gsi.0)
            .map_err(|e| HypervisorError::call(format!("binding an irqfd to GSI {}", gsi.0), e))
    }

    fn remove_irqfd(&self, gsi: Gsi, fd: &EventFd) -> Result<()> {
        self.inner
            .fd
            .unregister_irqfd(fd, gsi.0)
            .map_err(|e| HypervisorError::call(format!("removing the irqfd from GSI {}", gsi.0), e))
    }

    fn set_irq_line(&self, gsi: Gsi, level: bool) -> Result<()> {
        self.need_interrupt_controller("an interrupt line")?;
        self.inner
            .fd
            .set_irq_line(gsi.0, level)
            .map_err(|e| HypervisorError::call(format!("setting GSI {}", gsi.0), e))
    }

    fn ioeventfd(&self, addr: IoAddress, data: DataMatch, fd: &EventFd) -> Result<()> {
        let (vm, at) = (&self.inner.fd, io_event_address(addr));
        match data {
            DataMatch::Any => vm.register_ioevent(fd, &at, NoDatamatch),
            DataMatch::U8(value) => vm.register_ioevent(fd, &at, value),
            DataMatch::U16(value) => vm.register_ioevent(fd, &at, value),
            DataMatch::U32(value) => vm.register_ioevent(fd, &at, value),
            DataMatch::U64(value) => vm.register_ioevent(fd, &at, value),
        }
        .map_err(|e| HypervisorError::call(format!("binding an ioeventfd to {addr:x?}"), e))
    }

    fn remove_ioeventfd(&self, addr: IoAddress, data: DataMatch, fd: &EventFd) -> Result<()> {
        let (vm, at) = (&self.inner.fd, io_event_address(addr));
        match data {
            DataMatch::Any => vm.unregister_ioevent(fd, &at, NoDatamatch),
            DataMatch::U8(value) => vm.unregister_ioevent(fd, &at, value),
            DataMatch::U16(value) => vm.unregister_ioevent(fd, &at, value),
            DataMatch::U32(value) => vm.unregister_ioevent(fd, &at, value),
            DataMatch::U64(value) => vm.unregister_ioevent(fd, &at, value),
        }
        .map_err(|e| HypervisorError::call(format!("removing the ioeventfd from {addr:x?}"), e))
    }

    fn create_vcpu(&self, id: u32) -> Result<Box<dyn VcpuBinder>> {
        if id >= self.config.vcpus {
            return Err(HypervisorError::Invalid {
                what: format!("vCPU {id}"),
                why: "the virtual machine was configured for fewer vCPUs",
            });
        }
        Ok(Box::new(vcpu::KvmBinder::create(&self.inner, id)?))
    }
}

fn io_event_address(addr: IoAddress) -> IoEventAddress {
    match addr {
        IoAddress::Mmio(addr) => IoEventAddress::Mmio(addr),
        IoAddress::Port(port) => IoEventAddress::Pio(port.into()),
    }
}
