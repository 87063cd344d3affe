//! The registers of a vCPU at its first instruction.

use bantam_hypervisor::HypervisorError;
use bantam_hypervisor::x86::{DescriptorTable, Msr, Registers, Segment, SystemRegisters, X86Vcpu};

use super::boot::Entry;
use super::cpuid::CpuPolicy;
use super::layout::{BOOT_STACK, GDT, PAGE_TABLES, ZERO_PAGE};
use crate::{ArchError, Result};

/// MSRs whose value after reset is not what a firmware would leave behind. All others stay as the
/// hypervisor resets them.
const MSRS: [Msr; 2] = [
    // IA32_MISC_ENABLE: fast strings, else the kernel clears `rep_good` and copies word by word.
    Msr {
        index: 0x1a0,
        value: 1,
    },
    // IA32_MTRR_DEF_TYPE: enabled, write-back; else the kernel takes all memory for uncached.
    Msr {
        index: 0x2ff,
        value: 1 << 11 | 6,
    },
];

/// Offsets of the local APIC's LINT registers (SDM volume 3, table 11-1).
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
/// Delivery modes in an LVT entry.
const LVT_EXT_INT: u32 = 7 << 8;
const LVT_NMI: u32 = 4 << 8;

/// Sets up vCPU `id` of `vcpus`, on its own thread, after [`boot::prepare`](super::boot::prepare)
/// and before it first runs. vCPU 0 is the boot processor and starts at `entry`; the others wait
/// for the kernel to send them INIT and SIPI.
///
/// # Errors
///
/// If the hypervisor refuses a register; the message names it.
pub fn configure_vcpu(
    vcpu: &mut dyn X86Vcpu,
    id: u32,
    vcpus: u32,
    entry: &Entry,
    policy: &CpuPolicy,
) -> Result<()> {
    configure(vcpu, id, vcpus, entry, policy).map_err(|source| ArchError::Vcpu { id, source })
}

fn configure(
    vcpu: &mut dyn X86Vcpu,
    id: u32,
    vcpus: u32,
    entry: &Entry,
    policy: &CpuPolicy,
) -> std::result::Result<(), HypervisorError> {
    let supported = vcpu.supported_cpuid()?;
    // CPUID comes first: it decides which MSRs exist.
    vcpu.set_cpuid(&policy.apply(&supported, id, vcpus, vcpu.tsc_khz()))?;
    vcpu.set_msrs(&MSRS)?;
    if id != 0 {
        return Ok(());
    }
    let mut system = vcpu.system_registers()?;
    set_system_registers(&mut system);
    vcpu.set_system_registers(&system)?;
    vcpu.set_registers(&registers(entry))?;
    // Virtual wire mode (MPS 1.4, 3.6.2.2): the PIC on LINT0, NMI on LINT1. INIT resets the other
    // CPUs' local APICs anyway.
    let mut lapic = vcpu.lapic()?;
    lapic.set(LVT_LINT0, LVT_EXT_INT);
    lapic.set(LVT_LINT1, LVT_NMI);
    vcpu.set_lapic(&lapic)
}

fn registers(entry: &Entry) -> Registers {
    const FLAGS_RESERVED: u64 = 2;
    Registers {
        rip: entry.rip,
        rsi: ZERO_PAGE.0,
        rsp: BOOT_STACK.0,
        rbp: BOOT_STACK.0,
        rflags: FLAGS_RESERVED,
        ..Default::default()
    }
}

/// Selectors as the Linux boot protocol wants them: code 0x10, data 0x18.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;
/// The last one is the upper half of the task state descriptor.
const GDT_ENTRIES: usize = 6;
const GDT_LIMIT: u16 = 6 * 8 - 1;

fn code() -> Segment {
    // Executable, readable, accessed, of 64 bits.
    Segment {
        selector: CODE,
        kind: 0xb,
        l: true,
        ..flat()
    }
}

fn data() -> Segment {
    // Writable, accessed.
    Segment {
        selector: DATA,
        kind: 0x3,
        db: true,
        ..flat()
    }
}

fn flat() -> Segment {
    Segment {
        limit: u32::MAX,
        present: true,
        s: true,
        g: true,
        ..Default::default()
    }
}

/// A busy task state segment: entering the guest needs one, nobody uses it.
fn task() -> Segment {
    Segment {
        selector: TASK,
        kind: 0xb,
        limit: 0x67,
        present: true,
        ..Default::default()
    }
}

/// The table that the selectors point into.
pub(super) fn gdt() -> [u64; GDT_ENTRIES] {
    [
        0,
        0,
        descriptor(&code()),
        descriptor(&data()),
        descriptor(&task()),
        0,
    ]
}

/// A segment as the eight bytes of a descriptor (SDM volume 3, figure 3-8).
fn descriptor(s: &Segment) -> u64 {
    let limit = u64::from(if s.g { s.limit >> 12 } else { s.limit });
    let flag = |set: bool, bit: u32| u64::from(set) << bit;
    (limit & 0xffff)
        | (s.base & 0xff_ffff) << 16
        | u64::from(s.kind & 0xf) << 40
        | flag(s.s, 44)
        | u64::from(s.dpl & 3) << 45
        | flag(s.present, 47)
        | (limit >> 16 & 0xf) << 48
        | flag(s.avl, 52)
        | flag(s.l, 53)
        | flag(s.db, 54)
        | flag(s.g, 55)
        | (s.base >> 24 & 0xff) << 56
}

fn set_system_registers(system: &mut SystemRegisters) {
    const CR0_PE: u64 = 1;
    const CR0_ET: u64 = 1 << 4;
    const CR0_PG: u64 = 1 << 31;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LME: u64 = 1 << 8;
    const EFER_LMA: u64 = 1 << 10;

    system.cs = code();
    system.ds = data();
    system.es = data();
    system.fs = data();
    system.gs = data();
    system.ss = data();
    system.tr = task();
    system.gdt = DescriptorTable {
        base: GDT.0,
        limit: GDT_LIMIT,
    };
    system.idt = DescriptorTable { base: 0, limit: 0 };
    system.cr0 = CR0_PE | CR0_ET | CR0_PG;
    system.cr3 = PAGE_TABLES.0;
    system.cr4 = CR4_PAE;
    system.efer = EFER_LME | EFER_LMA;
}
