//! The state of an x86_64 vCPU as plain data (Intel SDM volume 3, AMD APM volume 2).
//!
//! All structs serialise, so that a snapshot is the structs themselves.

use serde::{Deserialize, Serialize};

use crate::{HypervisorError, Result};

/// General-purpose registers, instruction pointer and flags.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Registers {
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub rsp: u64,
    pub rbp: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
    pub rip: u64,
    pub rflags: u64,
}

/// A segment register with its hidden part (SDM volume 3, 3.4.5).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes, granularity already applied.
    pub limit: u32,
    /// Visible selector.
    pub selector: u16,
    /// The descriptor's type field, 4 bits.
    pub kind: u8,
    /// Present.
    pub present: bool,
    /// Descriptor privilege level, 0 to 3.
    pub dpl: u8,
    /// Default operand size is 32 bits.
    pub db: bool,
    /// Code or data, as opposed to system.
    pub s: bool,
    /// 64-bit code.
    pub l: bool,
    /// The descriptor's limit counts 4 KiB units.
    pub g: bool,
    /// Available to software.
    pub avl: bool,
    /// Loaded with a null selector.
    pub unusable: bool,
}

/// GDTR or IDTR.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescriptorTable {
    /// Linear base address.
    pub base: u64,
    /// Length in bytes minus 1.
    pub limit: u16,
}

/// Segments, control registers, descriptor tables, EFER and the APIC base.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct SystemRegisters {
    pub cs: Segment,
    pub ds: Segment,
    pub es: Segment,
    pub fs: Segment,
    pub gs: Segment,
    pub ss: Segment,
    pub tr: Segment,
    pub ldt: Segment,
    pub gdt: DescriptorTable,
    pub idt: DescriptorTable,
    pub cr0: u64,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub cr8: u64,
    pub efer: u64,
    pub apic_base: u64,
    /// Pending external interrupt, one bit per vector.
    pub interrupt_bitmap: [u64; 4],
}

/// x87 and SSE state, as FXSAVE lays it out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Fpu {
    pub fpr: [[u8; 16]; 8],
    pub fcw: u16,
    pub fsw: u16,
    pub ftwx: u8,
    pub last_opcode: u16,
    pub last_ip: u64,
    pub last_dp: u64,
    pub xmm: [[u8; 16]; 16],
    pub mxcsr: u32,
}

impl Fpu {
    /// The state after FNINIT, with all SSE exceptions masked (SDM volume 1, 8.1.5 and 10.2.3).
    pub fn initial() -> Self {
        Self {
            fcw: 0x37f,
            mxcsr: 0x1f80,
            ..Self::default()
        }
    }
}

/// A model-specific register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Msr {
    /// Register number.
    pub index: u32,
    /// Value.
    pub value: u64,
}

/// One answer of the CPUID instruction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuidEntry {
    /// EAX on entry.
    pub leaf: u32,
    /// ECX on entry; `None` if the leaf does not look at it.
    pub subleaf: Option<u32>,
    /// Answer.
    pub eax: u32,
    /// Answer.
    pub ebx: u32,
    /// Answer.
    pub ecx: u32,
    /// Answer.
    pub edx: u32,
}

/// The registers of a local APIC: a page's first KiB, one 32-bit register every 16 bytes
/// (SDM volume 3, table 11-1).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LapicState {
    registers: Vec<u32>,
}

impl LapicState {
    /// Number of register slots.
    pub const REGISTERS: usize = 64;

    /// Takes the registers in the order of their offsets.
    ///
    /// # Errors
    ///
    /// If there are not exactly [`Self::REGISTERS`].
    pub fn new(registers: Vec<u32>) -> Result<Self> {
        if registers.len() == Self::REGISTERS {
            Ok(Self { registers })
        } else {
            Err(HypervisorError::Invalid {
                what: format!("a local APIC state of {} registers", registers.len()),
                why: "there are 64",
            })
        }
    }

    /// All registers in the order of their offsets.
    pub fn registers(&self) -> &[u32] {
        &self.registers
    }

    /// The register at a byte offset (a multiple of 16 below 1024), if there is one.
    pub fn get(&self, offset: usize) -> Option<u32> {
        self.slot(offset)
            .and_then(|slot| self.registers.get(slot).copied())
    }

    /// Sets the register at a byte offset. An offset that is none changes nothing.
    pub fn set(&mut self, offset: usize, value: u32) {
        if let Some(register) = self
            .slot(offset)
            .and_then(|slot| self.registers.get_mut(slot))
        {
            *register = value;
        }
    }

    fn slot(&self, offset: usize) -> Option<usize> {
        offset.is_multiple_of(16).then_some(offset / 16)
    }
}

/// Whether a vCPU runs, and if not, what it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MpState {
    /// Runs.
    Runnable,
    /// An application processor that waits for INIT.
    Uninitialized,
    /// Got INIT, waits for SIPI.
    InitReceived,
    /// Executed HLT.
    Halted,
    /// Got SIPI.
    SipiReceived,
}

/// What is particular to an x86_64 vCPU.
pub trait X86Vcpu {
    /// What CPUID could say to a guest here, as the hypervisor supports it.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn supported_cpuid(&self) -> Result<Vec<CpuidEntry>>;

    /// Sets what CPUID says. Once, before the vCPU first runs and before its MSRs are set.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn set_cpuid(&mut self, entries: &[CpuidEntry]) -> Result<()>;

    /// What CPUID says now.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn cpuid(&self) -> Result<Vec<CpuidEntry>>;

    /// The guest's TSC frequency in kHz, if the host knows it.
    fn tsc_khz(&self) -> Option<u32>;

    /// Reads the general-purpose registers.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn registers(&self) -> Result<Registers>;

    /// Writes the general-purpose registers.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn set_registers(&mut self, registers: &Registers) -> Result<()>;

    /// Reads the system registers.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn system_registers(&self) -> Result<SystemRegisters>;

    /// Writes the system registers.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn set_system_registers(&mut self, registers: &SystemRegisters) -> Result<()>;

    /// Reads the x87 and SSE state.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn fpu(&self) -> Result<Fpu>;

    /// Writes the x87 and SSE state.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn set_fpu(&mut self, fpu: &Fpu) -> Result<()>;

    /// Reads MSRs, in the order asked.
    ///
    /// # Errors
    ///
    /// If one cannot be read; the message names it.
    fn msrs(&self, indices: &[u32]) -> Result<Vec<Msr>>;

    /// Writes MSRs in order.
    ///
    /// # Errors
    ///
    /// If one cannot be written; the message names it. Those before it are written.
    fn set_msrs(&mut self, msrs: &[Msr]) -> Result<()>;

    /// Reads the local APIC. Needs the in-kernel interrupt controller.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn lapic(&self) -> Result<LapicState>;

    /// Writes the local APIC. Needs the in-kernel interrupt controller.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn set_lapic(&mut self, lapic: &LapicState) -> Result<()>;

    /// Reads the multiprocessing state. Needs the in-kernel interrupt controller.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn mp_state(&self) -> Result<MpState>;

    /// Writes the multiprocessing state. Needs the in-kernel interrupt controller.
    ///
    /// # Errors
    ///
    /// If the host refuses.
    fn set_mp_state(&mut self, state: MpState) -> Result<()>;
}
