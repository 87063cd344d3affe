//! A vCPU on KVM: binding, running, and telling exits apart.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::Arc;

use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::errno;

use super::kick::Kicker;
use super::vm::VmInner;
use crate::x86::X86Vcpu;
use crate::{Exit, ExitCounts, HypervisorError, Result, SystemEvent, Vcpu, VcpuBinder, VcpuKicker};

pub(super) struct KvmBinder {
    id: u32,
    fd: VcpuFd,
    vm: Arc<VmInner>,
    kicker: Arc<Kicker>,
}

impl KvmBinder {
    pub(super) fn create(vm: &Arc<VmInner>, id: u32) -> Result<Self> {
        let fd = vm
            .fd
            .create_vcpu(id.into())
            .map_err(|e| HypervisorError::call(format!("creating vCPU {id}"), e))?;
        Ok(Self {
            id,
            fd,
            vm: Arc::clone(vm),
            kicker: Arc::new(Kicker::new()),
        })
    }
}

impl VcpuBinder for KvmBinder {
    fn id(&self) -> u32 {
        self.id
    }

    fn kicker(&self) -> Arc<dyn VcpuKicker> {
        Arc::clone(&self.kicker) as Arc<dyn VcpuKicker>
    }

    fn bind(self: Box<Self>) -> Result<Box<dyn Vcpu>> {
        let Self { id, fd, vm, kicker } = *self;
        let was_blocked = kicker.bind(&fd, id)?;
        Ok(Box::new(KvmVcpu {
            id,
            fd,
            vm,
            kicker,
            was_blocked,
            counts: ExitCounts::default(),
            _this_thread: PhantomData,
        }))
    }
}

pub(super) struct KvmVcpu {
    pub(super) id: u32,
    pub(super) fd: VcpuFd,
    pub(super) vm: Arc<VmInner>,
    kicker: Arc<Kicker>,
    was_blocked: bool,
    counts: ExitCounts,
    /// Not `Send`: the kick signal is sent to this thread and its mask is restored on drop.
    _this_thread: PhantomData<*const ()>,
}

impl Drop for KvmVcpu {
    fn drop(&mut self) {
        self.kicker.unbind(self.was_blocked);
    }
}

impl Vcpu for KvmVcpu {
    fn id(&self) -> u32 {
        self.id
    }

    fn run(&mut self) -> Result<Exit<'_>> {
        let exit = next_exit(&mut self.fd, &self.kicker)
            .map_err(|e| HypervisorError::call(format!("running vCPU {}", self.id), e))?;
        self.counts.record(&exit);
        Ok(exit)
    }

    fn exit_counts(&self) -> ExitCounts {
        self.counts
    }

    fn x86(&mut self) -> Option<&mut dyn X86Vcpu> {
        Some(self)
    }
}

fn next_exit<'a>(
    fd: &'a mut VcpuFd,
    kicker: &Kicker,
) -> std::result::Result<Exit<'a>, errno::Error> {
    /// What is left to look at once the wrapper's own borrow of `fd` has ended.
    enum Rest {
        PortIn(u16, *mut [u8]),
        PortOut(u16, *const [u8]),
        MmioRead(u64, usize),
        MmioWrite(u64, usize),
        Internal,
        Other,
    }

    let rest = match fd.run() {
        Ok(VcpuExit::IoIn(port, data)) => Rest::PortIn(port, data),
        Ok(VcpuExit::IoOut(port, data)) => Rest::PortOut(port, data),
        Ok(VcpuExit::MmioRead(addr, data)) => Rest::MmioRead(addr, data.len()),
        Ok(VcpuExit::MmioWrite(addr, data)) => Rest::MmioWrite(addr, data.len()),
        Ok(VcpuExit::InternalError) => Rest::Internal,
        Ok(VcpuExit::Hlt) => return Ok(Exit::Halt),
        Ok(VcpuExit::Shutdown) => return Ok(Exit::Shutdown),
        Ok(VcpuExit::SystemEvent(kind, _)) => return Ok(Exit::SystemEvent(system_event(kind))),
        Ok(VcpuExit::FailEntry(reason, cpu)) => return Ok(Exit::FailEntry { reason, cpu }),
        Ok(VcpuExit::Intr) => return Ok(interrupted(kicker)),
        Ok(_) => Rest::Other,
        // EINTR: a kick or another signal. EAGAIN: an application processor woke up from waiting
        // for INIT; it has nothing to say either.
        Err(e) if matches!(e.errno(), libc::EINTR | libc::EAGAIN) => {
            return Ok(interrupted(kicker));
        }
        Err(e) => return Err(e),
    };

    let run = fd.get_kvm_run();
    let detail = &mut run.__bindgen_anon_1;
    Ok(match rest {
        Rest::PortIn(port, data) => {
            // SAFETY: the exit reason was KVM_EXIT_IO, which makes this the union's live field.
            let size = usize::from(unsafe { detail.io.size });
            // SAFETY: the data page lies in the vCPU's mapping, behind `struct kvm_run` itself. The
            // mapping lives as long as `fd`, and the exit keeps `fd` mutably borrowed.
            let data = unsafe { &mut *data };
            Exit::PortIn { port, size, data }
        }
        Rest::PortOut(port, data) => {
            // SAFETY: as for `PortIn`.
            let size = usize::from(unsafe { detail.io.size });
            // SAFETY: as for `PortIn`.
            let data = unsafe { &*data };
            Exit::PortOut { port, size, data }
        }
        Rest::MmioRead(addr, len) => {
            // SAFETY: the exit reason was KVM_EXIT_MMIO; any bytes are a valid value of the field.
            let data = unsafe { &mut detail.mmio.data };
            Exit::MmioRead {
                addr,
                data: data.get_mut(..len).unwrap_or_default(),
            }
        }
        Rest::MmioWrite(addr, len) => {
            // SAFETY: as for `MmioRead`.
            let data = unsafe { &detail.mmio.data };
            Exit::MmioWrite {
                addr,
                data: data.get(..len).unwrap_or_default(),
            }
        }
        Rest::Internal => {
            // SAFETY: the exit reason was KVM_EXIT_INTERNAL_ERROR.
            let internal = unsafe { &detail.internal };
            let count = usize::try_from(internal.ndata).unwrap_or(usize::MAX);
            let data = internal.data.iter().take(count).copied().collect();
            Exit::InternalError {
                code: internal.suberror,
                data,
            }
        }
        Rest::Other => Exit::Unknown(run.exit_reason),
    })
}

fn interrupted(kicker: &Kicker) -> Exit<'static> {
    kicker.acknowledge();
    Exit::Interrupted
}

fn system_event(kind: u32) -> SystemEvent {
    match kind {
        KVM_SYSTEM_EVENT_SHUTDOWN => SystemEvent::Shutdown,
        KVM_SYSTEM_EVENT_RESET => SystemEvent::Reset,
        KVM_SYSTEM_EVENT_CRASH => SystemEvent::Crash,
        other => SystemEvent::Other(other),
    }
}
