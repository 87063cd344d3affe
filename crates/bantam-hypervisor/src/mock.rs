//! A hypervisor that plays a script instead of guest code, and writes down what it is told.
//!
//! For tests of the layers above: exits come in the order of the script, one list per vCPU, and
//! every call is recorded. What a device answered to a read is recorded when the next `run`
//! completes it, as a real hypervisor would.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::x86::{CpuidEntry, Fpu, LapicState, MpState, Msr, Registers, SystemRegisters, X86Vcpu};
use crate::{
    Capabilities, DataMatch, EventFd, Exit, ExitCounts, Gsi, Hypervisor, HypervisorError,
    IoAddress, MemorySlot, Result, SystemEvent, Vcpu, VcpuBinder, VcpuKicker, Vm, VmConfig,
};

/// One step of a vCPU's script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// [`Exit::PortIn`] of one access of this many bytes.
    PortIn {
        /// Port number.
        port: u16,
        /// Bytes.
        size: usize,
    },
    /// [`Exit::PortOut`] of one access.
    PortOut {
        /// Port number.
        port: u16,
        /// The data.
        data: Vec<u8>,
    },
    /// [`Exit::MmioRead`] of this many bytes.
    MmioRead {
        /// Guest-physical address.
        addr: u64,
        /// Bytes.
        size: usize,
    },
    /// [`Exit::MmioWrite`], unless an ioeventfd takes the write: then the event is signalled and
    /// the next step follows.
    MmioWrite {
        /// Guest-physical address.
        addr: u64,
        /// The data.
        data: Vec<u8>,
    },
    /// [`Exit::Halt`].
    Halt,
    /// [`Exit::Shutdown`].
    Shutdown,
    /// [`Exit::SystemEvent`].
    SystemEvent(SystemEvent),
    /// [`Exit::InternalError`] with this code.
    InternalError(u32),
    /// [`Exit::FailEntry`] with this reason.
    FailEntry(u64),
    /// `run` blocks until the vCPU is kicked.
    UntilKicked,
    /// `run` panics.
    Panic,
}

/// One recorded call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// [`Hypervisor::create_vm`].
    CreateVm(VmConfig),
    /// [`Vm::map_memory`].
    MapMemory {
        /// Slot number.
        slot: u32,
        /// Guest-physical address.
        guest_addr: u64,
        /// Bytes.
        len: usize,
        /// Read-only.
        read_only: bool,
    },
    /// [`Vm::unmap_memory`].
    UnmapMemory(u32),
    /// [`Vm::irqfd`].
    Irqfd(Gsi),
    /// [`Vm::remove_irqfd`].
    RemoveIrqfd(Gsi),
    /// [`Vm::set_irq_line`].
    SetIrqLine(Gsi, bool),
    /// [`Vm::ioeventfd`].
    Ioeventfd(IoAddress, DataMatch),
    /// [`Vm::remove_ioeventfd`].
    RemoveIoeventfd(IoAddress, DataMatch),
    /// [`Vm::create_vcpu`].
    CreateVcpu(u32),
    /// [`VcpuBinder::bind`].
    Bind(u32),
    /// [`VcpuKicker::kick`].
    Kick(u32),
    /// The answer that a device gave to a scripted `PortIn` or `MmioRead`.
    ReadCompleted {
        /// The vCPU.
        vcpu: u32,
        /// What the device filled in.
        data: Vec<u8>,
    },
}

/// The mock hypervisor.
#[derive(Clone)]
pub struct MockHypervisor {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    kicked: Condvar,
}

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    scripts: BTreeMap<u32, VecDeque<Step>>,
    kicks: BTreeMap<u32, bool>,
    events: Vec<(IoAddress, DataMatch, EventFd)>,
    cpuid: Vec<CpuidEntry>,
    tsc_khz: Option<u32>,
    vcpus: BTreeMap<u32, VcpuState>,
}

/// What was set on a mock vCPU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct VcpuState {
    pub cpuid: Vec<CpuidEntry>,
    pub registers: Registers,
    pub system_registers: SystemRegisters,
    pub fpu: Fpu,
    pub msrs: BTreeMap<u32, u64>,
    pub lapic: LapicState,
    pub mp_state: MpState,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, call: Call) {
        self.lock().calls.push(call);
    }
}

impl Default for MockHypervisor {
    fn default() -> Self {
        Self::new()
    }
}

impl MockHypervisor {
    /// A hypervisor whose vCPUs have empty scripts.
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                kicked: Condvar::new(),
            }),
        }
    }

    /// Appends steps to a vCPU's script.
    #[must_use]
    pub fn script(self, vcpu: u32, steps: impl IntoIterator<Item = Step>) -> Self {
        self.shared
            .lock()
            .scripts
            .entry(vcpu)
            .or_default()
            .extend(steps);
        self
    }

    /// Sets what [`X86Vcpu::supported_cpuid`] and [`X86Vcpu::tsc_khz`] answer.
    #[must_use]
    pub fn with_cpu(self, cpuid: Vec<CpuidEntry>, tsc_khz: Option<u32>) -> Self {
        {
            let mut state = self.shared.lock();
            state.cpuid = cpuid;
            state.tsc_khz = tsc_khz;
        }
        self
    }

    /// Everything that was called so far, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.shared.lock().calls.clone()
    }

    /// What was set on a vCPU, once it exists.
    pub fn vcpu_state(&self, vcpu: u32) -> Option<VcpuState> {
        self.shared.lock().vcpus.get(&vcpu).cloned()
    }
}

impl Hypervisor for MockHypervisor {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_vcpus: 64,
            memory_slots: 64,
            in_kernel_irqchip: true,
            irqfd: true,
            ioeventfd: true,
            read_only_memory: true,
            tsc_control: false,
        }
    }

    fn create_vm(&self, config: &VmConfig) -> Result<Box<dyn Vm>> {
        self.shared.record(Call::CreateVm(config.clone()));
        Ok(Box::new(MockVm {
            shared: Arc::clone(&self.shared),
        }))
    }
}

struct MockVm {
    shared: Arc<Shared>,
}

impl Vm for MockVm {
    #[allow(unsafe_code)] // never looks at the memory
    unsafe fn map_memory(&self, slot: MemorySlot) -> Result<()> {
        let MemorySlot {
            slot,
            guest_addr,
            len,
            read_only,
            ..
        } = slot;
        self.shared.record(Call::MapMemory {
            slot,
            guest_addr,
            len,
            read_only,
        });
        Ok(())
    }

    fn unmap_memory(&self, slot: u32) -> Result<()> {
        self.shared.record(Call::UnmapMemory(slot));
        Ok(())
    }

    fn irqfd(&self, gsi: Gsi, _fd: &EventFd) -> Result<()> {
        self.shared.record(Call::Irqfd(gsi));
        Ok(())
    }

    fn remove_irqfd(&self, gsi: Gsi, _fd: &EventFd) -> Result<()> {
        self.shared.record(Call::RemoveIrqfd(gsi));
        Ok(())
    }

    fn set_irq_line(&self, gsi: Gsi, level: bool) -> Result<()> {
        self.shared.record(Call::SetIrqLine(gsi, level));
        Ok(())
    }

    fn ioeventfd(&self, addr: IoAddress, data: DataMatch, fd: &EventFd) -> Result<()> {
        let fd = fd.try_clone().map_err(|e| {
            HypervisorError::call(format!("cloning event descriptor {}", fd.as_raw_fd()), e)
        })?;
        let mut state = self.shared.lock();
        state.calls.push(Call::Ioeventfd(addr, data));
        state.events.push((addr, data, fd));
        Ok(())
    }

    fn remove_ioeventfd(&self, addr: IoAddress, data: DataMatch, _fd: &EventFd) -> Result<()> {
        let mut state = self.shared.lock();
        state.calls.push(Call::RemoveIoeventfd(addr, data));
        state.events.retain(|(a, d, _)| (*a, *d) != (addr, data));
        Ok(())
    }

    fn create_vcpu(&self, id: u32) -> Result<Box<dyn VcpuBinder>> {
        let fresh = VcpuState {
            cpuid: Vec::new(),
            registers: Registers::default(),
            system_registers: SystemRegisters::default(),
            fpu: Fpu::default(),
            msrs: BTreeMap::new(),
            lapic: LapicState::new(vec![0; LapicState::REGISTERS])?,
            mp_state: if id == 0 {
                MpState::Runnable
            } else {
                MpState::Uninitialized
            },
        };
        let mut state = self.shared.lock();
        state.calls.push(Call::CreateVcpu(id));
        state.vcpus.insert(id, fresh);
        drop(state);
        Ok(Box::new(MockBinder {
            id,
            shared: Arc::clone(&self.shared),
        }))
    }
}

struct MockBinder {
    id: u32,
    shared: Arc<Shared>,
}

impl VcpuBinder for MockBinder {
    fn id(&self) -> u32 {
        self.id
    }

    fn kicker(&self) -> Arc<dyn VcpuKicker> {
        Arc::new(MockKicker {
            id: self.id,
            shared: Arc::clone(&self.shared),
        })
    }

    fn bind(self: Box<Self>) -> Result<Box<dyn Vcpu>> {
        self.shared.record(Call::Bind(self.id));
        Ok(Box::new(MockVcpu {
            id: self.id,
            shared: self.shared,
            data: Vec::new(),
            read: false,
            counts: ExitCounts::default(),
        }))
    }
}

struct MockKicker {
    id: u32,
    shared: Arc<Shared>,
}

impl VcpuKicker for MockKicker {
    fn kick(&self) {
        let mut state = self.shared.lock();
        state.calls.push(Call::Kick(self.id));
        state.kicks.insert(self.id, true);
        drop(state);
        self.shared.kicked.notify_all();
    }
}

struct MockVcpu {
    id: u32,
    shared: Arc<Shared>,
    data: Vec<u8>,
    /// `data` is a device's answer, still to be recorded.
    read: bool,
    counts: ExitCounts,
}

impl MockVcpu {
    /// The next step that is an exit; `None` if the vCPU was kicked.
    fn next_step(&self) -> Result<Option<Step>> {
        let mut state = self.shared.lock();
        loop {
            let kicked = state.kicks.insert(self.id, false) == Some(true);
            let script = state.scripts.entry(self.id).or_default();
            match script.front() {
                Some(Step::UntilKicked) if kicked => {
                    script.pop_front();
                    return Ok(None);
                }
                _ if kicked => return Ok(None),
                None => return Err(HypervisorError::ScriptEnded(self.id)),
                Some(Step::UntilKicked) => {
                    state =
                        (self.shared.kicked.wait(state)).unwrap_or_else(PoisonError::into_inner);
                }
                Some(_) => {
                    let step = script.pop_front();
                    match &step {
                        Some(Step::MmioWrite { addr, data })
                            if state.signalled(IoAddress::Mmio(*addr), data) => {}
                        Some(Step::PortOut { port, data })
                            if state.signalled(IoAddress::Port(*port), data) => {}
                        _ => return Ok(step),
                    }
                }
            }
        }
    }
}

impl State {
    /// Signals the ioeventfd that takes this write, if there is one.
    fn signalled(&self, addr: IoAddress, data: &[u8]) -> bool {
        let taker = self.events.iter().find(|(at, matching, _)| {
            *at == addr
                && match matching {
                    DataMatch::Any => true,
                    DataMatch::U8(value) => value.to_le_bytes() == data,
                    DataMatch::U16(value) => value.to_le_bytes() == data,
                    DataMatch::U32(value) => value.to_le_bytes() == data,
                    DataMatch::U64(value) => value.to_le_bytes() == data,
                }
        });
        taker.is_some_and(|(_, _, fd)| fd.write(1).is_ok())
    }
}

impl Vcpu for MockVcpu {
    fn id(&self) -> u32 {
        self.id
    }

    fn run(&mut self) -> Result<Exit<'_>> {
        if std::mem::take(&mut self.read) {
            let data = std::mem::take(&mut self.data);
            self.shared.record(Call::ReadCompleted {
                vcpu: self.id,
                data,
            });
        }
        let step = self.next_step()?;
        let exit = match step {
            None | Some(Step::UntilKicked) => Exit::Interrupted,
            Some(Step::PortIn { port, size }) => {
                (self.data, self.read) = (vec![0; size], true);
                Exit::PortIn {
                    port,
                    size,
                    data: &mut self.data,
                }
            }
            Some(Step::PortOut { port, data }) => {
                self.data = data;
                Exit::PortOut {
                    port,
                    size: self.data.len(),
                    data: &self.data,
                }
            }
            Some(Step::MmioRead { addr, size }) => {
                (self.data, self.read) = (vec![0; size], true);
                Exit::MmioRead {
                    addr,
                    data: &mut self.data,
                }
            }
            Some(Step::MmioWrite { addr, data }) => {
                self.data = data;
                Exit::MmioWrite {
                    addr,
                    data: &self.data,
                }
            }
            Some(Step::Halt) => Exit::Halt,
            Some(Step::Shutdown) => Exit::Shutdown,
            Some(Step::SystemEvent(event)) => Exit::SystemEvent(event),
            Some(Step::InternalError(code)) => Exit::InternalError {
                code,
                data: Vec::new(),
            },
            Some(Step::FailEntry(reason)) => Exit::FailEntry { reason, cpu: 0 },
            #[allow(clippy::panic)] // what was asked for
            Some(Step::Panic) => panic!("vCPU {} panics, as its script says", self.id),
        };
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

impl MockVcpu {
    fn with<T>(&self, f: impl FnOnce(&mut VcpuState) -> T) -> Result<T> {
        match self.shared.lock().vcpus.get_mut(&self.id) {
            Some(state) => Ok(f(state)),
            None => Err(HypervisorError::Invalid {
                what: format!("mock vCPU {}", self.id),
                why: "it was never created",
            }),
        }
    }
}

impl X86Vcpu for MockVcpu {
    fn supported_cpuid(&self) -> Result<Vec<CpuidEntry>> {
        Ok(self.shared.lock().cpuid.clone())
    }

    fn set_cpuid(&mut self, entries: &[CpuidEntry]) -> Result<()> {
        self.with(|s| s.cpuid = entries.to_vec())
    }

    fn cpuid(&self) -> Result<Vec<CpuidEntry>> {
        self.with(|s| s.cpuid.clone())
    }

    fn tsc_khz(&self) -> Option<u32> {
        self.shared.lock().tsc_khz
    }

    fn registers(&self) -> Result<Registers> {
        self.with(|s| s.registers)
    }

    fn set_registers(&mut self, registers: &Registers) -> Result<()> {
        self.with(|s| s.registers = *registers)
    }

    fn system_registers(&self) -> Result<SystemRegisters> {
        self.with(|s| s.system_registers)
    }

    fn set_system_registers(&mut self, registers: &SystemRegisters) -> Result<()> {
        self.with(|s| s.system_registers = *registers)
    }

    fn fpu(&self) -> Result<Fpu> {
        self.with(|s| s.fpu)
    }

    fn set_fpu(&mut self, fpu: &Fpu) -> Result<()> {
        self.with(|s| s.fpu = *fpu)
    }

    fn msrs(&self, indices: &[u32]) -> Result<Vec<Msr>> {
        self.with(|s| {
            let value = |index| s.msrs.get(&index).copied().unwrap_or(0);
            indices
                .iter()
                .map(|&index| Msr {
                    index,
                    value: value(index),
                })
                .collect()
        })
    }

    fn set_msrs(&mut self, msrs: &[Msr]) -> Result<()> {
        self.with(|s| s.msrs.extend(msrs.iter().map(|m| (m.index, m.value))))
    }

    fn lapic(&self) -> Result<LapicState> {
        self.with(|s| s.lapic.clone())
    }

    fn set_lapic(&mut self, lapic: &LapicState) -> Result<()> {
        self.with(|s| s.lapic = lapic.clone())
    }

    fn mp_state(&self) -> Result<MpState> {
        self.with(|s| s.mp_state)
    }

    fn set_mp_state(&mut self, state: MpState) -> Result<()> {
        self.with(|s| s.mp_state = state)
    }
}

#[cfg(test)]
mod tests;
