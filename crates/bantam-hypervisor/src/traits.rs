//! The staged traits: hypervisor, virtual machine, vCPU binder, vCPU.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::x86::X86Vcpu;
use crate::{EventFd, Exit, ExitCounts, Result};

/// A global system interrupt: an input pin of the guest's interrupt controller
/// (x86: 0 to 23, the pins of the IOAPIC).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Gsi(pub u32);

/// What a hypervisor can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Most vCPUs that one virtual machine may have.
    pub max_vcpus: u32,
    /// Most memory slots that one virtual machine may have.
    pub memory_slots: u32,
    /// The interrupt controller is emulated in the kernel.
    pub in_kernel_irqchip: bool,
    /// [`Vm::irqfd`] works.
    pub irqfd: bool,
    /// [`Vm::ioeventfd`] works.
    pub ioeventfd: bool,
    /// [`MemorySlot::read_only`] works.
    pub read_only_memory: bool,
    /// The guest's TSC frequency can be set (x86).
    pub tsc_control: bool,
}

/// What must be known before a virtual machine exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmConfig {
    /// Number of vCPUs that will be created, ids `0..vcpus`; at least 1.
    pub vcpus: u32,
    /// Create the in-kernel interrupt controller (x86: PICs, IOAPIC and a local APIC per vCPU).
    /// Without it, `hlt` is an [`Exit::Halt`] and interrupts cannot be raised.
    pub interrupt_controller: bool,
    /// Give the guest the CPU's performance counters, as far as the hypervisor can. Otherwise it has
    /// none, and the hypervisor need not switch them at each entry and exit.
    pub performance_counters: bool,
}

impl VmConfig {
    /// The usual machine: `vcpus` vCPUs, the in-kernel interrupt controller, no performance counters.
    pub fn new(vcpus: u32) -> Self {
        Self {
            vcpus,
            interrupt_controller: true,
            performance_counters: false,
        }
    }
}

/// A range of guest-physical addresses backed by host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySlot {
    /// The slot's number, the caller's choice, `0..Capabilities::memory_slots`.
    pub slot: u32,
    /// Guest-physical address, a multiple of the page size.
    pub guest_addr: u64,
    /// Start of the host mapping, a multiple of the page size.
    pub host_addr: *mut u8,
    /// Length in bytes, a multiple of the page size, not 0.
    pub len: usize,
    /// The guest's writes do not reach the memory but come out as [`Exit::MmioWrite`].
    pub read_only: bool,
}

/// An address that the guest writes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IoAddress {
    /// Guest-physical address.
    Mmio(u64),
    /// I/O port (x86).
    Port(u16),
}

/// Which writes to an [`IoAddress`] signal an event. A write of any other width or value exits to
/// user space as usual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DataMatch {
    /// Every write, of any width and value.
    Any,
    /// One byte of this value.
    U8(u8),
    /// Two bytes of this value.
    U16(u16),
    /// Four bytes of this value (a virtio-mmio QueueNotify).
    U32(u32),
    /// Eight bytes of this value.
    U64(u64),
}

/// A host's hypervisor.
pub trait Hypervisor: Send + Sync {
    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Creates an empty virtual machine, with its interrupt controller if the configuration says so.
    ///
    /// # Errors
    ///
    /// If the configuration exceeds the capabilities or the host refuses.
    fn create_vm(&self, config: &VmConfig) -> Result<Box<dyn Vm>>;
}

/// A virtual machine.
pub trait Vm: Send + Sync {
    /// Puts host memory into the guest-physical address space.
    ///
    /// # Errors
    ///
    /// If the range is empty, unaligned, overlaps another slot, or the host refuses.
    ///
    /// # Safety
    ///
    /// `slot.host_addr..+slot.len` must stay mapped (writable unless `read_only`) until the slot is
    /// unmapped, or this `Vm` and all its vCPUs are dropped. The guest may change it at any time,
    /// so Rust code must not hold references into it.
    #[allow(unsafe_code)] // the contract cannot be checked here
    unsafe fn map_memory(&self, slot: MemorySlot) -> Result<()>;

    /// Takes a slot out of the guest-physical address space.
    ///
    /// # Errors
    ///
    /// If the slot is not mapped or the host refuses.
    fn unmap_memory(&self, slot: u32) -> Result<()>;

    /// From now on, each signal of `fd` raises an edge on `gsi`, without user space. The kernel
    /// keeps its own reference to the descriptor.
    ///
    /// # Errors
    ///
    /// If there is no interrupt controller or the host refuses.
    fn irqfd(&self, gsi: Gsi, fd: &EventFd) -> Result<()>;

    /// Undoes [`Vm::irqfd`].
    ///
    /// # Errors
    ///
    /// If it was not set up.
    fn remove_irqfd(&self, gsi: Gsi, fd: &EventFd) -> Result<()>;

    /// Sets the level of an interrupt line. An edge is `true`, then `false`.
    ///
    /// # Errors
    ///
    /// If there is no interrupt controller or no such line.
    fn set_irq_line(&self, gsi: Gsi, level: bool) -> Result<()>;

    /// From now on, a guest's write to `addr` that matches signals `fd` instead of an exit.
    ///
    /// # Errors
    ///
    /// If the same address and match is taken, or the host refuses.
    fn ioeventfd(&self, addr: IoAddress, data: DataMatch, fd: &EventFd) -> Result<()>;

    /// Undoes [`Vm::ioeventfd`].
    ///
    /// # Errors
    ///
    /// If it was not set up.
    fn remove_ioeventfd(&self, addr: IoAddress, data: DataMatch, fd: &EventFd) -> Result<()>;

    /// Creates vCPU `id`. Map memory first where that is possible: slots are cheapest to add before
    /// the first vCPU runs.
    ///
    /// # Errors
    ///
    /// If `id` is not below [`VmConfig::vcpus`], exists already, or the host refuses.
    fn create_vcpu(&self, id: u32) -> Result<Box<dyn VcpuBinder>>;
}

/// A vCPU that no thread owns yet.
pub trait VcpuBinder: Send {
    /// The vCPU's number.
    fn id(&self) -> u32;

    /// A handle that gets the vCPU out of the guest. Works from now on, also before `bind`.
    fn kicker(&self) -> Arc<dyn VcpuKicker>;

    /// Binds the vCPU to the calling thread, for good.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn bind(self: Box<Self>) -> Result<Box<dyn Vcpu>>;
}

/// A vCPU, bound to the current thread.
pub trait Vcpu {
    /// The vCPU's number.
    fn id(&self) -> u32;

    /// Runs guest code until something happens that user space must see to.
    ///
    /// # Errors
    ///
    /// If the host fails; what the guest does wrong is an [`Exit`], never an error.
    fn run(&mut self) -> Result<Exit<'_>>;

    /// How often `run` returned, by kind.
    fn exit_counts(&self) -> ExitCounts;

    /// The registers of an x86_64 vCPU, if it is one.
    fn x86(&mut self) -> Option<&mut dyn X86Vcpu> {
        None
    }
}

/// Gets a vCPU out of the guest from any thread.
pub trait VcpuKicker: Send + Sync {
    /// Makes the current, or else the next, [`Vcpu::run`] return [`Exit::Interrupted`]. Several
    /// kicks before it returns count as one. Does nothing once the vCPU is dropped.
    fn kick(&self);
}
