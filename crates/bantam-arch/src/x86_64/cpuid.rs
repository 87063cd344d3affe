//! What CPUID says to a guest (Intel SDM volume 2 "CPUID", AMD APM volume 3 appendix E, KVM
//! `Documentation/virt/kvm/x86/cpuid.rst`).
//!
//! The hypervisor's list of what it supports is the start. From it go the features that a microVM
//! has no use for, each with its reason in `HIDDEN`; the topology is made to fit the vCPU count;
//! and the TSC's frequency is told, so that nothing is measured. Model, caches, brand string and
//! instruction-set extensions stay the host's.

use bantam_hypervisor::x86::CpuidEntry;

/// What a guest may see beyond the ordinary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuPolicy {
    /// Show VMX or SVM, so that the guest can run virtual machines of its own.
    pub nested: bool,
    /// Show the performance counters. AMD's exist without a CPUID bit, so the virtual machine must be
    /// created without them as well (`VmConfig::performance_counters`).
    pub pmu: bool,
}

/// A register of a CPUID answer.
#[derive(Debug, Clone, Copy)]
enum Register {
    Eax,
    Ecx,
    Edx,
}

/// When a hidden feature stays hidden.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unless {
    Never,
    Nested,
    Pmu,
}

/// Bits that are cleared: leaf, register, bits, exception, reason.
const HIDDEN: &[(u32, Register, u32, Unless, &str)] = &[
    (
        0x1,
        Register::Ecx,
        bits(&[2, 4]),
        Unless::Never,
        "DTES64, DS-CPL: debug store is host-only",
    ),
    (
        0x1,
        Register::Ecx,
        bits(&[3]),
        Unless::Never,
        "MONITOR: exits; idle is HLT",
    ),
    (0x1, Register::Ecx, bits(&[5]), Unless::Nested, "VMX"),
    (
        0x1,
        Register::Ecx,
        bits(&[6]),
        Unless::Never,
        "SMX: trusted boot is the host's",
    ),
    (
        0x1,
        Register::Ecx,
        bits(&[7, 8]),
        Unless::Never,
        "EST, TM2: power is the host's",
    ),
    (
        0x1,
        Register::Ecx,
        bits(&[15]),
        Unless::Pmu,
        "PDCM: perf capabilities MSR",
    ),
    (
        0x1,
        Register::Edx,
        bits(&[21]),
        Unless::Never,
        "DS: debug store",
    ),
    (
        0x1,
        Register::Edx,
        bits(&[22, 29, 31]),
        Unless::Never,
        "ACPI, TM, PBE: thermal control",
    ),
    (
        0x6,
        Register::Eax,
        !ARAT,
        Unless::Never,
        "all of leaf 6 but ARAT: power and thermal",
    ),
    (
        0x6,
        Register::Ecx,
        !0,
        Unless::Never,
        "APERF/MPERF, energy bias",
    ),
    (
        0x8000_0001,
        Register::Ecx,
        bits(&[2, 12]),
        Unless::Nested,
        "SVM, SKINIT",
    ),
    (
        0x8000_0001,
        Register::Ecx,
        bits(&[10]),
        Unless::Never,
        "IBS",
    ),
    (
        0x8000_0001,
        Register::Ecx,
        bits(&[13, 15]),
        Unless::Never,
        "WDT, LWP",
    ),
    (
        0x8000_0001,
        Register::Ecx,
        bits(&[23, 24, 28]),
        Unless::Pmu,
        "performance counters",
    ),
    (
        0x8000_0001,
        Register::Ecx,
        bits(&[29]),
        Unless::Never,
        "MWAITX",
    ),
    (
        0x8000_0007,
        Register::Edx,
        !INVARIANT_TSC,
        Unless::Never,
        "all but the invariant TSC",
    ),
];

/// Leaves that answer all zeros, which means "not there": leaf, exception, reason.
const EMPTY: &[(u32, Unless, &str)] = &[
    (0x5, Unless::Never, "MONITOR/MWAIT"),
    (0x9, Unless::Never, "direct cache access"),
    (0xa, Unless::Pmu, "architectural performance monitoring"),
    (0x12, Unless::Never, "SGX"),
    (0x14, Unless::Never, "processor trace"),
    // An absent 0x1f sends software to 0xb, which says the same with fewer levels.
    (0x1f, Unless::Never, "second topology leaf"),
    (0x8000_000a, Unless::Nested, "SVM"),
    (0x8000_001b, Unless::Never, "IBS"),
    (0x8000_0022, Unless::Pmu, "extended performance monitoring"),
    (
        0x8000_0026,
        Unless::Never,
        "AMD's second topology leaf, as 0x1f",
    ),
];

const fn bits(list: &[u32]) -> u32 {
    let mut mask = 0;
    let mut at = 0;
    while at < list.len() {
        mask |= 1 << list[at];
        at += 1;
    }
    mask
}

/// Leaf 6: the local APIC's timer runs in every idle state, so no other timer is needed.
const ARAT: u32 = 1 << 2;
const INVARIANT_TSC: u32 = 1 << 8;
const HYPERVISOR: u32 = 1 << 31;
const TSC_DEADLINE: u32 = 1 << 24;
const HTT: u32 = 1 << 28;
const CMP_LEGACY: u32 = 1 << 1;

const KVM_SIGNATURE: u32 = 0x4000_0000;
const TIMING: u32 = 0x4000_0010;
/// KVM's local APIC timer counts nanoseconds.
const APIC_BUS_KHZ: u32 = 1_000_000;

impl CpuPolicy {
    /// The answers for vCPU `id` of `vcpus` (APIC id = vCPU id), on a hypervisor that supports
    /// `supported`, with a TSC of `tsc_khz`.
    pub fn apply(
        &self,
        supported: &[CpuidEntry],
        id: u32,
        vcpus: u32,
        tsc_khz: Option<u32>,
    ) -> Vec<CpuidEntry> {
        let topology = Topology {
            id,
            vcpus: vcpus.max(1),
        };
        let mut entries: Vec<CpuidEntry> = supported
            .iter()
            // Rebuilt below: the list holds one host's levels, perhaps fewer than are needed.
            .filter(|entry| entry.leaf != 0xb && entry.leaf != TIMING)
            .filter(|entry| !self.is_empty(entry.leaf))
            .copied()
            .collect();
        for entry in &mut entries {
            self.hide(entry);
            topology.fit(entry);
            if entry.leaf == KVM_SIGNATURE && tsc_khz.is_some() {
                entry.eax = entry.eax.max(TIMING);
            }
        }
        if supported.iter().any(|entry| entry.leaf == 0xb) {
            entries.extend(topology.levels());
        }
        if let Some(tsc_khz) = tsc_khz
            && entries.iter().any(|entry| entry.leaf == KVM_SIGNATURE)
        {
            entries.push(CpuidEntry {
                leaf: TIMING,
                eax: tsc_khz,
                ebx: APIC_BUS_KHZ,
                ..Default::default()
            });
        }
        entries
    }

    fn excepts(&self, unless: Unless) -> bool {
        match unless {
            Unless::Never => false,
            Unless::Nested => self.nested,
            Unless::Pmu => self.pmu,
        }
    }

    fn is_empty(&self, leaf: u32) -> bool {
        EMPTY
            .iter()
            .any(|&(empty, unless, _)| empty == leaf && !self.excepts(unless))
    }

    fn hide(&self, entry: &mut CpuidEntry) {
        for &(leaf, register, mask, unless, _) in HIDDEN {
            if leaf == entry.leaf && !self.excepts(unless) {
                let value = match register {
                    Register::Eax => &mut entry.eax,
                    Register::Ecx => &mut entry.ecx,
                    Register::Edx => &mut entry.edx,
                };
                *value &= !mask;
            }
        }
    }
}

/// One package of `vcpus` cores with one thread each.
struct Topology {
    id: u32,
    vcpus: u32,
}

impl Topology {
    /// Bits of an APIC id that tell the cores of the package apart.
    fn core_bits(&self) -> u32 {
        self.vcpus.next_power_of_two().trailing_zeros()
    }

    /// Puts this vCPU's place into an answer that tells it.
    fn fit(&self, entry: &mut CpuidEntry) {
        let ids = 1u32 << self.core_bits();
        let several = self.vcpus > 1;
        match entry.leaf {
            0x1 => {
                // Initial APIC id, number of ids, CLFLUSH size and brand index as they are.
                entry.ebx = entry.ebx & 0xffff | ids.min(255) << 16 | (self.id & 0xff) << 24;
                entry.ecx |= HYPERVISOR | TSC_DEADLINE;
                set(&mut entry.edx, HTT, several);
            }
            // Intel and AMD cache leaves. Type 0 ends the list.
            0x4 | 0x8000_001d if entry.eax & 0x1f != 0 => {
                const LEVEL_3: u32 = 3;
                let level = entry.eax >> 5 & 7;
                // The last level is shared by all, the others are a core's own.
                let sharing = if level >= LEVEL_3 { ids - 1 } else { 0 };
                let cores = if entry.leaf == 0x4 {
                    (ids - 1).min(0x3f)
                } else {
                    0
                };
                entry.eax = entry.eax & 0x3fff | sharing.min(0xfff) << 14 | cores << 26;
            }
            0x8000_0001 if !several => entry.ecx &= !CMP_LEGACY,
            // AMD: number of cores less 1, bits of the APIC id that count them.
            0x8000_0008 => {
                entry.ecx =
                    entry.ecx & !0xf0ff | (self.vcpus - 1).min(0xff) | self.core_bits() << 12;
            }
            // AMD: extended APIC id; one thread in the core; one node.
            0x8000_001e => {
                (entry.eax, entry.ebx, entry.ecx) = (self.id, self.id & 0xff, 0);
            }
            _ => {}
        }
    }

    /// Leaf 0xb: the thread level, the core level, and the end.
    fn levels(&self) -> [CpuidEntry; 3] {
        const THREAD: u32 = 1;
        const CORE: u32 = 2;
        let level = |subleaf, shift, count, kind: u32| CpuidEntry {
            leaf: 0xb,
            subleaf: Some(subleaf),
            eax: shift,
            ebx: count,
            ecx: kind << 8 | subleaf,
            edx: self.id,
        };
        [
            level(0, 0, 1, THREAD),
            level(1, self.core_bits(), self.vcpus, CORE),
            level(2, 0, 0, 0),
        ]
    }
}

fn set(register: &mut u32, bit: u32, on: bool) {
    if on {
        *register |= bit;
    } else {
        *register &= !bit;
    }
}

#[cfg(test)]
mod tests;
