//! Why a vCPU stopped running guest code.

use serde::{Deserialize, Serialize};

/// Why [`Vcpu::run`](crate::Vcpu::run) returned.
///
/// Data of a read (`PortIn`, `MmioRead`) must be filled in before the next `run`, which completes
/// the guest's instruction. Lengths are the guest's choice, so a device must take any.
#[derive(Debug)]
pub enum Exit<'a> {
    /// The guest reads an I/O port. `data` holds one access of 1, 2 or 4 bytes, or, for a string
    /// instruction, several such accesses to the same port one after the other.
    PortIn {
        /// Port number.
        port: u16,
        /// Bytes of one access. The slice is `size * count` bytes in all.
        size: usize,
        /// To be filled in.
        data: &'a mut [u8],
    },
    /// The guest writes an I/O port. Same shape as [`Exit::PortIn`].
    PortOut {
        /// Port number.
        port: u16,
        /// Bytes of one access.
        size: usize,
        /// What the guest wrote, little-endian.
        data: &'a [u8],
    },
    /// The guest reads an address without memory behind it (1 to 8 bytes).
    MmioRead {
        /// Guest-physical address.
        addr: u64,
        /// To be filled in.
        data: &'a mut [u8],
    },
    /// The guest writes an address without memory, or with read-only memory, behind it.
    MmioWrite {
        /// Guest-physical address.
        addr: u64,
        /// What the guest wrote, little-endian, 1 to 8 bytes.
        data: &'a [u8],
    },
    /// The guest waits for an interrupt. Only without an in-kernel interrupt controller.
    Halt,
    /// The CPU shut down (x86: triple fault, which is also how Linux reboots with `reboot=t`).
    Shutdown,
    /// The guest asked the firmware interface for something (arm64: PSCI).
    SystemEvent(SystemEvent),
    /// [`VcpuKicker::kick`](crate::VcpuKicker::kick) was called, or a signal came. May be spurious.
    Interrupted,
    /// The hypervisor could not go on, for example because it cannot emulate an instruction.
    InternalError {
        /// The hypervisor's own code (KVM: `suberror`; 1 is "emulation failed").
        code: u32,
        /// The hypervisor's own details, for a log.
        data: Vec<u64>,
    },
    /// The hardware refused to enter the guest: the register state is invalid.
    FailEntry {
        /// The hardware's reason.
        reason: u64,
        /// The host CPU on which it happened.
        cpu: u32,
    },
    /// An exit that bantam never asked for; the hypervisor's own number, for a log.
    Unknown(u32),
}

/// What the guest asked for in an [`Exit::SystemEvent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SystemEvent {
    /// Power off.
    Shutdown,
    /// Restart.
    Reset,
    /// The guest reports that it crashed.
    Crash,
    /// Anything else; the hypervisor's own number.
    Other(u32),
}

/// How often a vCPU left the guest for user space, per kind of [`Exit`].
///
/// Exits that the kernel handles itself (ioeventfd, in-kernel interrupt controller) never show up
/// here, which is what makes the numbers a useful budget.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitCounts {
    /// [`Exit::PortIn`].
    pub port_in: u64,
    /// [`Exit::PortOut`].
    pub port_out: u64,
    /// [`Exit::MmioRead`].
    pub mmio_read: u64,
    /// [`Exit::MmioWrite`].
    pub mmio_write: u64,
    /// [`Exit::Halt`].
    pub halt: u64,
    /// [`Exit::Shutdown`].
    pub shutdown: u64,
    /// [`Exit::SystemEvent`].
    pub system_event: u64,
    /// [`Exit::Interrupted`].
    pub interrupted: u64,
    /// [`Exit::InternalError`], [`Exit::FailEntry`] and [`Exit::Unknown`].
    pub failed: u64,
}

impl ExitCounts {
    /// All exits together.
    pub fn total(&self) -> u64 {
        self.port_in
            + self.port_out
            + self.mmio_read
            + self.mmio_write
            + self.halt
            + self.shutdown
            + self.system_event
            + self.interrupted
            + self.failed
    }

    /// Counts one exit.
    pub(crate) fn record(&mut self, exit: &Exit<'_>) {
        let counter = match exit {
            Exit::PortIn { .. } => &mut self.port_in,
            Exit::PortOut { .. } => &mut self.port_out,
            Exit::MmioRead { .. } => &mut self.mmio_read,
            Exit::MmioWrite { .. } => &mut self.mmio_write,
            Exit::Halt => &mut self.halt,
            Exit::Shutdown => &mut self.shutdown,
            Exit::SystemEvent(_) => &mut self.system_event,
            Exit::Interrupted => &mut self.interrupted,
            Exit::InternalError { .. } | Exit::FailEntry { .. } | Exit::Unknown(_) => {
                &mut self.failed
            }
        };
        *counter = counter.saturating_add(1);
    }
}
