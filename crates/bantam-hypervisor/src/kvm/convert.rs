//! Between the public plain data and KVM's structures.

use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_HALTED,
    KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_RUNNABLE, KVM_MP_STATE_SIPI_RECEIVED,
    KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_cpuid_entry2, kvm_dtable, kvm_fpu, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs,
};
use vmm_sys_util::errno;

use super::vcpu::KvmVcpu;
use crate::x86::{
    CpuidEntry, DescriptorTable, Fpu, LapicState, MpState, Msr, Registers, Segment,
    SystemRegisters, X86Vcpu,
};
use crate::{HypervisorError, Result};

impl KvmVcpu {
    fn named<T>(&self, what: &str, result: std::result::Result<T, errno::Error>) -> Result<T> {
        result.map_err(|e| HypervisorError::call(format!("{what} of vCPU {}", self.id), e))
    }
}

impl X86Vcpu for KvmVcpu {
    fn supported_cpuid(&self) -> Result<Vec<CpuidEntry>> {
        self.vm.shared.supported_cpuid()
    }

    fn set_cpuid(&mut self, entries: &[CpuidEntry]) -> Result<()> {
        let entries: Vec<_> = entries.iter().map(cpuid_to_kvm).collect();
        let list = CpuId::from_entries(&entries).map_err(|_| HypervisorError::Invalid {
            what: format!("a CPUID list of {} entries", entries.len()),
            why: "KVM takes at most 256",
        })?;
        self.named("setting the CPUID", self.fd.set_cpuid2(&list))
    }

    fn cpuid(&self) -> Result<Vec<CpuidEntry>> {
        let list = self.named(
            "reading the CPUID",
            self.fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES),
        )?;
        Ok(list.as_slice().iter().map(cpuid_from_kvm).collect())
    }

    fn tsc_khz(&self) -> Option<u32> {
        self.fd.get_tsc_khz().ok().filter(|&khz| khz != 0)
    }

    fn registers(&self) -> Result<Registers> {
        let r = self.named("reading the registers", self.fd.get_regs())?;
        Ok(Registers {
            rax: r.rax,
            rbx: r.rbx,
            rcx: r.rcx,
            rdx: r.rdx,
            rsi: r.rsi,
            rdi: r.rdi,
            rsp: r.rsp,
            rbp: r.rbp,
            r8: r.r8,
            r9: r.r9,
            r10: r.r10,
            r11: r.r11,
            r12: r.r12,
            r13: r.r13,
            r14: r.r14,
            r15: r.r15,
            rip: r.rip,
            rflags: r.rflags,
        })
    }

    fn set_registers(&mut self, r: &Registers) -> Result<()> {
        let regs = kvm_regs {
            rax: r.rax,
            rbx: r.rbx,
            rcx: r.rcx,
            rdx: r.rdx,
            rsi: r.rsi,
            rdi: r.rdi,
            rsp: r.rsp,
            rbp: r.rbp,
            r8: r.r8,
            r9: r.r9,
            r10: r.r10,
            r11: r.r11,
            r12: r.r12,
            r13: r.r13,
            r14: r.r14,
            r15: r.r15,
            rip: r.rip,
            rflags: r.rflags,
        };
        self.named("setting the registers", self.fd.set_regs(&regs))
    }

    fn system_registers(&self) -> Result<SystemRegisters> {
        let s = self.named("reading the system registers", self.fd.get_sregs())?;
        Ok(SystemRegisters {
            cs: segment_from_kvm(&s.cs),
            ds: segment_from_kvm(&s.ds),
            es: segment_from_kvm(&s.es),
            fs: segment_from_kvm(&s.fs),
            gs: segment_from_kvm(&s.gs),
            ss: segment_from_kvm(&s.ss),
            tr: segment_from_kvm(&s.tr),
            ldt: segment_from_kvm(&s.ldt),
            gdt: DescriptorTable {
                base: s.gdt.base,
                limit: s.gdt.limit,
            },
            idt: DescriptorTable {
                base: s.idt.base,
                limit: s.idt.limit,
            },
            cr0: s.cr0,
            cr2: s.cr2,
            cr3: s.cr3,
            cr4: s.cr4,
            cr8: s.cr8,
            efer: s.efer,
            apic_base: s.apic_base,
            interrupt_bitmap: s.interrupt_bitmap,
        })
    }

    fn set_system_registers(&mut self, s: &SystemRegisters) -> Result<()> {
        let sregs = kvm_sregs {
            cs: segment_to_kvm(&s.cs),
            ds: segment_to_kvm(&s.ds),
            es: segment_to_kvm(&s.es),
            fs: segment_to_kvm(&s.fs),
            gs: segment_to_kvm(&s.gs),
            ss: segment_to_kvm(&s.ss),
            tr: segment_to_kvm(&s.tr),
            ldt: segment_to_kvm(&s.ldt),
            gdt: kvm_dtable {
                base: s.gdt.base,
                limit: s.gdt.limit,
                padding: [0; 3],
            },
            idt: kvm_dtable {
                base: s.idt.base,
                limit: s.idt.limit,
                padding: [0; 3],
            },
            cr0: s.cr0,
            cr2: s.cr2,
            cr3: s.cr3,
            cr4: s.cr4,
            cr8: s.cr8,
            efer: s.efer,
            apic_base: s.apic_base,
            interrupt_bitmap: s.interrupt_bitmap,
        };
        self.named("setting the system registers", self.fd.set_sregs(&sregs))
    }

    fn fpu(&self) -> Result<Fpu> {
        let f = self.named("reading the FPU", self.fd.get_fpu())?;
        Ok(Fpu {
            fpr: f.fpr,
            fcw: f.fcw,
            fsw: f.fsw,
            ftwx: f.ftwx,
            last_opcode: f.last_opcode,
            last_ip: f.last_ip,
            last_dp: f.last_dp,
            xmm: f.xmm,
            mxcsr: f.mxcsr,
        })
    }

    fn set_fpu(&mut self, f: &Fpu) -> Result<()> {
        let fpu = kvm_fpu {
            fpr: f.fpr,
            fcw: f.fcw,
            fsw: f.fsw,
            ftwx: f.ftwx,
            last_opcode: f.last_opcode,
            last_ip: f.last_ip,
            last_dp: f.last_dp,
            xmm: f.xmm,
            mxcsr: f.mxcsr,
            ..kvm_fpu::default()
        };
        self.named("setting the FPU", self.fd.set_fpu(&fpu))
    }

    fn msrs(&self, indices: &[u32]) -> Result<Vec<Msr>> {
        let entries: Vec<_> = indices
            .iter()
            .map(|&index| kvm_msr_entry {
                index,
                ..Default::default()
            })
            .collect();
        let mut list = msr_list(&entries)?;
        let read = self.named("reading MSRs", self.fd.get_msrs(&mut list))?;
        self.all_msrs("reading", &entries, read)?;
        Ok(list
            .as_slice()
            .iter()
            .map(|m| Msr {
                index: m.index,
                value: m.data,
            })
            .collect())
    }

    fn set_msrs(&mut self, msrs: &[Msr]) -> Result<()> {
        let entries: Vec<_> = msrs
            .iter()
            .map(|m| kvm_msr_entry {
                index: m.index,
                data: m.value,
                ..Default::default()
            })
            .collect();
        let list = msr_list(&entries)?;
        let written = self.named("setting MSRs", self.fd.set_msrs(&list))?;
        self.all_msrs("setting", &entries, written)
    }

    fn lapic(&self) -> Result<LapicState> {
        let state = self.named("reading the local APIC", self.fd.get_lapic())?;
        let mut registers = vec![0; LapicState::REGISTERS];
        for (value, bytes) in registers.iter_mut().zip(state.regs.chunks(16)) {
            for (at, byte) in bytes.iter().take(4).enumerate() {
                *value |= u32::from(byte.cast_unsigned()) << (8 * at);
            }
        }
        LapicState::new(registers)
    }

    fn set_lapic(&mut self, lapic: &LapicState) -> Result<()> {
        let mut state = kvm_lapic_state::default();
        for (bytes, value) in state.regs.chunks_mut(16).zip(lapic.registers()) {
            for (byte, part) in bytes.iter_mut().zip(value.to_le_bytes()) {
                *byte = part.cast_signed();
            }
        }
        self.named("setting the local APIC", self.fd.set_lapic(&state))
    }

    fn mp_state(&self) -> Result<MpState> {
        let state = self.named("reading the multiprocessing state", self.fd.get_mp_state())?;
        match state.mp_state {
            KVM_MP_STATE_RUNNABLE => Ok(MpState::Runnable),
            KVM_MP_STATE_UNINITIALIZED => Ok(MpState::Uninitialized),
            KVM_MP_STATE_INIT_RECEIVED => Ok(MpState::InitReceived),
            KVM_MP_STATE_HALTED => Ok(MpState::Halted),
            KVM_MP_STATE_SIPI_RECEIVED => Ok(MpState::SipiReceived),
            other => Err(HypervisorError::Invalid {
                what: format!("multiprocessing state {other}"),
                why: "an x86 vCPU has none of this number",
            }),
        }
    }

    fn set_mp_state(&mut self, state: MpState) -> Result<()> {
        let mp_state = match state {
            MpState::Runnable => KVM_MP_STATE_RUNNABLE,
            MpState::Uninitialized => KVM_MP_STATE_UNINITIALIZED,
            MpState::InitReceived => KVM_MP_STATE_INIT_RECEIVED,
            MpState::Halted => KVM_MP_STATE_HALTED,
            MpState::SipiReceived => KVM_MP_STATE_SIPI_RECEIVED,
        };
        let state = kvm_mp_state { mp_state };
        self.named(
            "setting the multiprocessing state",
            self.fd.set_mp_state(state),
        )
    }
}

impl KvmVcpu {
    /// KVM stops at the first MSR that it refuses and says how many went well.
    fn all_msrs(&self, what: &str, entries: &[kvm_msr_entry], done: usize) -> Result<()> {
        match entries.get(done) {
            None => Ok(()),
            Some(refused) => Err(HypervisorError::call(
                format!("{what} MSR {:#x} of vCPU {}", refused.index, self.id),
                std::io::Error::from_raw_os_error(libc::EINVAL),
            )),
        }
    }
}

fn msr_list(entries: &[kvm_msr_entry]) -> Result<Msrs> {
    Msrs::from_entries(entries).map_err(|_| HypervisorError::Invalid {
        what: format!("a list of {} MSRs", entries.len()),
        why: "KVM takes at most 256",
    })
}

pub(super) fn cpuid_from_kvm(entry: &kvm_cpuid_entry2) -> CpuidEntry {
    let indexed = entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0;
    CpuidEntry {
        leaf: entry.function,
        subleaf: indexed.then_some(entry.index),
        eax: entry.eax,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx,
    }
}

fn cpuid_to_kvm(entry: &CpuidEntry) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function: entry.leaf,
        index: entry.subleaf.unwrap_or(0),
        flags: if entry.subleaf.is_some() {
            KVM_CPUID_FLAG_SIGNIFCANT_INDEX
        } else {
            0
        },
        eax: entry.eax,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx,
        padding: [0; 3],
    }
}

fn segment_from_kvm(s: &kvm_segment) -> Segment {
    Segment {
        base: s.base,
        limit: s.limit,
        selector: s.selector,
        kind: s.type_,
        present: s.present != 0,
        dpl: s.dpl,
        db: s.db != 0,
        s: s.s != 0,
        l: s.l != 0,
        g: s.g != 0,
        avl: s.avl != 0,
        unusable: s.unusable != 0,
    }
}

fn segment_to_kvm(s: &Segment) -> kvm_segment {
    kvm_segment {
        base: s.base,
        limit: s.limit,
        selector: s.selector,
        type_: s.kind,
        present: s.present.into(),
        dpl: s.dpl,
        db: s.db.into(),
        s: s.s.into(),
        l: s.l.into(),
        g: s.g.into(),
        avl: s.avl.into(),
        unusable: s.unusable.into(),
        padding: 0,
    }
}
