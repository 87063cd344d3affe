//! Payloads that start exactly as a kernel does, on a real `/dev/kvm`.

use bantam_arch::x86_64::boot::{Boot, prepare};
use bantam_arch::x86_64::{CpuPolicy, Kernel, configure_vcpu, layout};
use bantam_hypervisor::x86::MpState;
use bantam_hypervisor::{Exit, MemorySlot, Vcpu, Vm, VmConfig};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use crate::fixture::{elf, ram};

/// A machine with `code` as its kernel, and its vCPU 0; the memory goes last.
struct Started {
    vcpu: Box<dyn Vcpu>,
    _vm: Box<dyn Vm>,
    _ram: bantam_arch::GuestRam,
}

fn start(code: &[u8]) -> Option<Started> {
    let kvm = match bantam_hypervisor::open() {
        Ok(kvm) => kvm,
        Err(e) => {
            println!("skipped: {e}");
            return None;
        }
    };
    let ram = ram(4);
    let kernel = Kernel::from_bytes(elf(code)).unwrap().load(&ram).unwrap();
    let boot = Boot {
        kernel: &kernel,
        cmdline: "quiet",
        initrd: None,
        vcpus: 2,
        devices: 0,
        rng_seed: None,
    };
    let entry = prepare(&ram, &boot).unwrap();

    let vm = kvm.create_vm(&VmConfig::new(2)).unwrap();
    map(&*vm, &ram);
    let mut vcpu = vm.create_vcpu(0).unwrap().bind().unwrap();
    let policy = CpuPolicy::default();
    configure_vcpu(vcpu.x86().unwrap(), 0, 2, &entry, &policy).unwrap();
    let mut other = vm.create_vcpu(1).unwrap().bind().unwrap();
    configure_vcpu(other.x86().unwrap(), 1, 2, &entry, &policy).unwrap();
    assert_eq!(
        other.x86().unwrap().mp_state().unwrap(),
        MpState::Uninitialized
    );
    Some(Started {
        vcpu,
        _vm: vm,
        _ram: ram,
    })
}

#[allow(unsafe_code)]
fn map(vm: &dyn Vm, ram: &bantam_arch::GuestRam) {
    let slot = MemorySlot {
        slot: 0,
        guest_addr: 0,
        host_addr: ram.get_host_address(GuestAddress(0)).unwrap(),
        len: 4 << 20,
        read_only: false,
    };
    // SAFETY: `Started` drops the machine before the memory.
    unsafe { vm.map_memory(slot) }.unwrap();
}

/// Runs up to a write to port 0x10 and returns what was written.
fn port(vcpu: &mut dyn Vcpu) -> Vec<u8> {
    match vcpu.run().unwrap() {
        Exit::PortOut {
            port: 0x10, data, ..
        } => data.to_vec(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_kernel_starts_in_64_bit_mode_with_its_zero_page() {
    let code = [
        0x8b, 0x86, 0x02, 0x02, 0x00, 0x00, // mov eax, [rsi + 0x202]: "HdrS"
        0xe7, 0x10, // out 0x10, eax
        0x48, 0x89, 0xe0, // mov rax, rsp
        0x48, 0xc1, 0xe8, 0x04, // shr rax, 4
        0x50, 0x58, // push rax; pop rax: the stack works
        0xe7, 0x10, // out 0x10, eax
        0x0f, 0x0b, // ud2
    ];
    let Some(mut machine) = start(&code) else {
        return;
    };
    assert_eq!(port(&mut *machine.vcpu), *b"HdrS");
    assert_eq!(port(&mut *machine.vcpu), 0x8ffu32.to_le_bytes());
    assert!(matches!(machine.vcpu.run().unwrap(), Exit::Shutdown));
}

#[test]
fn a_guest_sees_the_policys_cpuid() {
    let code = [
        0x31, 0xc9, // xor ecx, ecx
        0xb8, 0x01, 0x00, 0x00, 0x00, // mov eax, 1
        0x0f, 0xa2, // cpuid
        0x89, 0xd8, 0xe7, 0x10, // mov eax, ebx; out 0x10, eax
        0x89, 0xc8, 0xe7, 0x10, // mov eax, ecx; out 0x10, eax
        0x0f, 0x0b, // ud2
    ];
    let Some(mut machine) = start(&code) else {
        return;
    };
    let ebx = u32::from_le_bytes(port(&mut *machine.vcpu).try_into().unwrap());
    assert_eq!(ebx >> 24, 0, "APIC id");
    assert_eq!(ebx >> 16 & 0xff, 2, "logical CPUs");
    let ecx = u32::from_le_bytes(port(&mut *machine.vcpu).try_into().unwrap());
    assert_eq!(ecx >> 31, 1, "a hypervisor is present");
    assert_eq!(ecx >> 24 & 1, 1, "TSC deadline timer");
    assert_eq!(ecx & (1 << 3 | 1 << 5), 0, "neither MONITOR nor VMX");
    assert!(matches!(machine.vcpu.run().unwrap(), Exit::Shutdown));
}

#[test]
#[cfg(target_os = "linux")]
fn no_window_in_the_hole_covers_another() {
    let devices = layout::MMIO_START
        ..layout::MMIO_START + u64::from(layout::MMIO_SLOTS) * layout::MMIO_SLOT_SIZE;
    let windows = [
        layout::HOLE_START..layout::HOLE_START,
        devices,
        layout::IOAPIC..layout::IOAPIC + 0x1000,
        layout::LAPIC..layout::LAPIC + 0x1000,
        bantam_hypervisor::kvm::RESERVED,
        layout::HOLE_END..layout::HOLE_END,
    ];
    for pair in windows.windows(2) {
        assert!(pair[0].end <= pair[1].start, "{pair:x?}");
    }
}
