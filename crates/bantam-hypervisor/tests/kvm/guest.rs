//! A guest of one or two vCPUs that runs bytes in real mode.

use std::ptr;

use bantam_hypervisor::x86::X86Vcpu;
use bantam_hypervisor::{Hypervisor, MemorySlot, Vcpu, VcpuBinder, Vm, VmConfig};

/// Where the code is loaded, and where `rip` starts.
pub(crate) const CODE: u64 = 0x1000;
/// Bytes of guest memory, from address 0. Above it, accesses are MMIO.
pub(crate) const RAM: usize = 0x1_0000;

/// Anonymous host memory for guest RAM.
#[allow(unsafe_code)]
mod host_memory {
    use super::ptr;

    pub(crate) struct HostMemory {
        pub(crate) addr: *mut u8,
        pub(crate) len: usize,
    }

    // SAFETY: plain memory; access goes through raw pointers, byte by byte.
    unsafe impl Send for HostMemory {}
    // SAFETY: as for `Send`.
    unsafe impl Sync for HostMemory {}

    impl HostMemory {
        pub(crate) fn new(len: usize) -> Self {
            // SAFETY: a fresh anonymous mapping touches nothing that exists.
            let addr = unsafe {
                libc::mmap(
                    ptr::null_mut(),
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                )
            };
            assert_ne!(addr, libc::MAP_FAILED);
            Self {
                addr: addr.cast(),
                len,
            }
        }

        pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
            assert!(at + bytes.len() <= self.len);
            for (i, byte) in bytes.iter().enumerate() {
                // SAFETY: within the mapping, checked above.
                unsafe { self.addr.add(at + i).write_volatile(*byte) };
            }
        }

        pub(crate) fn read(&self, at: usize, len: usize) -> Vec<u8> {
            assert!(at + len <= self.len);
            // SAFETY: within the mapping, checked above.
            (at..at + len)
                .map(|i| unsafe { self.addr.add(i).read_volatile() })
                .collect()
        }
    }

    impl Drop for HostMemory {
        fn drop(&mut self) {
            // SAFETY: the mapping is ours, and the guest that used it is dropped before it.
            unsafe { libc::munmap(self.addr.cast(), self.len) };
        }
    }
}
pub(crate) use host_memory::HostMemory;

/// A machine. Field order is drop order: the virtual machine goes before its memory.
pub(crate) struct Guest {
    pub(crate) vm: Box<dyn Vm>,
    pub(crate) ram: HostMemory,
}

impl Guest {
    /// A machine with `code` at [`CODE`], or `None`, said on stdout, where KVM cannot be used.
    pub(crate) fn new(config: &VmConfig, code: &[u8]) -> Option<Self> {
        let kvm = kvm()?;
        let vm = kvm.create_vm(config).unwrap();
        let guest = Self {
            vm,
            ram: HostMemory::new(RAM),
        };
        guest.ram.write(usize::try_from(CODE).unwrap(), code);
        map(&*guest.vm, 0, 0, &guest.ram, false);
        Some(guest)
    }

    /// A machine of one vCPU without an interrupt controller, so that `hlt` exits.
    pub(crate) fn plain(code: &[u8]) -> Option<Self> {
        let config = VmConfig {
            interrupt_controller: false,
            ..VmConfig::new(1)
        };
        Self::new(&config, code)
    }

    /// Binds vCPU 0 to this thread, in real mode, at [`CODE`].
    pub(crate) fn vcpu(&self) -> Box<dyn Vcpu> {
        start(self.vm.create_vcpu(0).unwrap(), CODE)
    }
}

pub(crate) fn kvm() -> Option<Box<dyn Hypervisor>> {
    match bantam_hypervisor::open() {
        Ok(kvm) => Some(kvm),
        Err(e) => {
            println!("skipped: {e}");
            None
        }
    }
}

/// Maps all of `memory`.
#[allow(unsafe_code)]
pub(crate) fn map(vm: &dyn Vm, slot: u32, guest_addr: u64, memory: &HostMemory, read_only: bool) {
    let slot = MemorySlot {
        slot,
        guest_addr,
        host_addr: memory.addr,
        len: memory.len,
        read_only,
    };
    // SAFETY: callers keep `memory` until the machine is dropped.
    unsafe { vm.map_memory(slot) }.unwrap();
}

/// Binds a vCPU to this thread, with flat zero-based segments in real mode.
pub(crate) fn start(binder: Box<dyn VcpuBinder>, rip: u64) -> Box<dyn Vcpu> {
    let mut vcpu = binder.bind().unwrap();
    real_mode(vcpu.x86().unwrap(), rip);
    vcpu
}

pub(crate) fn real_mode(x86: &mut dyn X86Vcpu, rip: u64) {
    let mut system = x86.system_registers().unwrap();
    for segment in [
        &mut system.cs,
        &mut system.ds,
        &mut system.es,
        &mut system.ss,
    ] {
        segment.base = 0;
        segment.selector = 0;
    }
    x86.set_system_registers(&system).unwrap();
    let mut registers = x86.registers().unwrap();
    registers.rip = rip;
    registers.rsp = 0x8000;
    registers.rflags = 2;
    x86.set_registers(&registers).unwrap();
}

/// Puts the vCPU into 64-bit mode, with the first 2 MiB mapped to themselves.
pub(crate) fn long_mode(ram: &HostMemory, x86: &mut dyn X86Vcpu) {
    const LEVEL_4: u64 = 0x4000;
    const LEVEL_3: u64 = 0x5000;
    const LEVEL_2: u64 = 0x6000;
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 0x80;
    for (at, entry) in [(LEVEL_4, LEVEL_3), (LEVEL_3, LEVEL_2), (LEVEL_2, LARGE)] {
        let entry = entry | PRESENT_WRITABLE;
        ram.write(usize::try_from(at).unwrap(), &entry.to_le_bytes());
    }
    // KVM lets only a CPU with long mode into it.
    x86.set_cpuid(&x86.supported_cpuid().unwrap()).unwrap();
    let mut system = x86.system_registers().unwrap();
    system.cr3 = LEVEL_4;
    system.cr4 = 1 << 5; // PAE
    system.cr0 = 1 << 31 | 1; // PG, PE
    system.efer = 1 << 10 | 1 << 8; // LMA, LME
    system.cs.kind = 0xb;
    system.cs.l = true;
    system.cs.db = false;
    system.cs.g = true;
    system.cs.limit = u32::MAX;
    system.cs.selector = 8;
    for segment in [&mut system.ds, &mut system.es, &mut system.ss] {
        segment.kind = 3;
        segment.g = true;
        segment.limit = u32::MAX;
        segment.selector = 16;
    }
    x86.set_system_registers(&system).unwrap();
}
