//! Memory slots, and the registers as plain data.

use bantam_hypervisor::x86::{CpuidEntry, Fpu, LapicState, MpState, Msr};
use bantam_hypervisor::{Exit, HypervisorError, MemorySlot, VmConfig, kvm};

use crate::guest::{CODE, Guest, HostMemory, map, start};

#[test]
fn a_write_to_a_read_only_slot_exits_and_changes_nothing() {
    let code = [
        0xb8, 0x00, 0x20, 0x8e, 0xd8, // mov ax, 0x2000; mov ds, ax: 0x2_0000
        0xa0, 0x04, 0x00, // mov al, [4]
        0xfe, 0xc0, // inc al
        0xa2, 0x04, 0x00, // mov [4], al
        0xa0, 0x04, 0x00, // mov al, [4]
        0xe6, 0x10, // out 0x10, al
        0xf4, // hlt
    ];
    let Some(guest) = Guest::plain(&code) else {
        return;
    };
    let image = HostMemory::new(0x1000);
    image.write(0, b"read only");
    map(&*guest.vm, 1, 0x2_0000, &image, true);
    let mut vcpu = guest.vcpu();
    match vcpu.run().unwrap() {
        Exit::MmioWrite { addr, data } => {
            assert_eq!((addr, data), (0x2_0004, &[b' ' + 1][..]));
        }
        other => panic!("{other:?}"),
    }
    match vcpu.run().unwrap() {
        Exit::PortOut { data, .. } => assert_eq!(data, b" ", "the guest reads what was there"),
        other => panic!("{other:?}"),
    }
    assert_eq!(image.read(0, 9), b"read only");
    let counts = vcpu.exit_counts();
    assert_eq!(
        (counts.mmio_write, counts.mmio_read),
        (1, 0),
        "reads need no exit"
    );
    drop((vcpu, guest));
}

#[test]
fn an_unmapped_slot_is_memory_no_more() {
    let code = [
        0xb8, 0x00, 0x20, 0x8e, 0xd8, // mov ax, 0x2000; mov ds, ax
        0xa0, 0x00, 0x00, // mov al, [0]
        0xe6, 0x10, // out 0x10, al
        0xa0, 0x00, 0x00, // mov al, [0]
        0xf4,
    ];
    let Some(guest) = Guest::plain(&code) else {
        return;
    };
    let extra = HostMemory::new(0x1000);
    map(&*guest.vm, 7, 0x2_0000, &extra, false);
    let mut vcpu = guest.vcpu();
    assert!(matches!(vcpu.run().unwrap(), Exit::PortOut { .. }));
    guest.vm.unmap_memory(7).unwrap();
    assert!(matches!(
        vcpu.run().unwrap(),
        Exit::MmioRead { addr: 0x2_0000, .. }
    ));
    assert!(guest.vm.unmap_memory(7).is_err(), "it is gone");
    map(&*guest.vm, 7, 0x3_0000, &extra, false);
    drop((vcpu, guest));
}

#[test]
#[allow(unsafe_code)]
fn impossible_slots_are_refused() {
    let Some(guest) = Guest::plain(&[0xf4]) else {
        return;
    };
    let memory = HostMemory::new(0x4000);
    let good = MemorySlot {
        slot: 1,
        guest_addr: 0x10_0000,
        host_addr: memory.addr,
        len: 0x2000,
        read_only: false,
    };
    let bad = [
        ("empty", MemorySlot { len: 0, ..good }),
        (
            "part of a page",
            MemorySlot {
                len: 0x1001,
                ..good
            },
        ),
        (
            "unaligned guest address",
            MemorySlot {
                guest_addr: 0x10_0800,
                ..good
            },
        ),
        (
            "unaligned host address",
            MemorySlot {
                host_addr: memory.addr.wrapping_add(8),
                ..good
            },
        ),
        (
            "wrapping",
            MemorySlot {
                guest_addr: u64::MAX - 0xfff,
                ..good
            },
        ),
        ("used slot", MemorySlot { slot: 0, ..good }),
        (
            "overlap",
            MemorySlot {
                guest_addr: 0xf000,
                ..good
            },
        ),
        (
            "KVM's pages",
            MemorySlot {
                guest_addr: kvm::RESERVED.start - 0x1000,
                ..good
            },
        ),
    ];
    for (why, slot) in bad {
        // SAFETY: `memory` outlives the machine.
        let refused = unsafe { guest.vm.map_memory(slot) };
        assert!(
            matches!(refused, Err(HypervisorError::Invalid { .. })),
            "{why}: {refused:?}"
        );
    }
    // SAFETY: `memory` outlives the machine.
    unsafe { guest.vm.map_memory(good) }.unwrap();
    drop(guest);
}

#[test]
fn registers_survive_a_round_trip() {
    let Some(guest) = Guest::new(&VmConfig::new(2), &[0xf4]) else {
        return;
    };
    let mut second = start(guest.vm.create_vcpu(1).unwrap(), CODE);
    assert_eq!(
        second.x86().unwrap().mp_state().unwrap(),
        MpState::Uninitialized
    );
    drop(second);

    let mut vcpu = guest.vcpu();
    let x86 = vcpu.x86().unwrap();

    let supported = x86.supported_cpuid().unwrap();
    assert!(
        supported.iter().any(|entry| entry.leaf == 0x4000_0000),
        "KVM's own leaf"
    );
    let mut cpuid = supported.clone();
    cpuid.retain(|entry| entry.leaf != 0x4000_0010);
    let timing = CpuidEntry {
        leaf: 0x4000_0010,
        eax: 2_445_400,
        ..Default::default()
    };
    cpuid.push(timing);
    x86.set_cpuid(&cpuid).unwrap();
    assert!(x86.cpuid().unwrap().contains(&timing));
    assert!(
        x86.set_cpuid(&vec![timing; 300]).is_err(),
        "more than KVM takes"
    );

    let mut registers = x86.registers().unwrap();
    registers.r15 = 0x1234_5678_9abc_def0;
    registers.rax = 7;
    x86.set_registers(&registers).unwrap();
    assert_eq!(x86.registers().unwrap(), registers);

    let mut system = x86.system_registers().unwrap();
    system.idt.base = 0x4_0000;
    system.ds.selector = 0x123;
    system.ds.base = 0x1230;
    x86.set_system_registers(&system).unwrap();
    assert_eq!(x86.system_registers().unwrap(), system);

    let mut fpu = Fpu::initial();
    fpu.xmm[3] = [0x5a; 16];
    x86.set_fpu(&fpu).unwrap();
    assert_eq!(x86.fpu().unwrap().xmm[3], [0x5a; 16]);
    assert_eq!(x86.fpu().unwrap().fcw, 0x37f);

    let mut lapic = x86.lapic().unwrap();
    lapic.set(0x350, 0x700);
    lapic.set(0x351, 1); // no register: nothing happens
    lapic.set(0x4000, 1);
    x86.set_lapic(&lapic).unwrap();
    assert_eq!(x86.lapic().unwrap().get(0x350), Some(0x700));
    assert_eq!(lapic.get(0x351), None);
    assert!(LapicState::new(vec![0; 63]).is_err());

    const STAR: u32 = 0xc000_0081;
    x86.set_msrs(&[Msr {
        index: STAR,
        value: 0x23_0010 << 32,
    }])
    .unwrap();
    assert_eq!(
        x86.msrs(&[STAR]).unwrap(),
        [Msr {
            index: STAR,
            value: 0x23_0010 << 32
        }]
    );

    x86.set_mp_state(MpState::Halted).unwrap();
    assert_eq!(x86.mp_state().unwrap(), MpState::Halted);
}

#[test]
fn a_refused_msr_is_named() {
    let Some(guest) = Guest::plain(&[0xf4]) else {
        return;
    };
    let mut vcpu = guest.vcpu();
    // EFER, then a number that no CPU has.
    let Err(error) = vcpu.x86().unwrap().msrs(&[0xc000_0080, 0x1234_5678]) else {
        println!("skipped: this KVM ignores unknown MSRs");
        return;
    };
    assert!(
        error.to_string().contains("MSR 0x12345678 of vCPU 0"),
        "{error}"
    );
}
