//! Running, halting, kicking and shutting down.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use bantam_hypervisor::kvm::kick_signal;
use bantam_hypervisor::{Exit, HypervisorError, VmConfig};

use crate::guest::{CODE, Guest, kvm, long_mode, start};

/// `jmp $`
const SPIN: &[u8] = &[0xeb, 0xfe];
/// `hlt`
const HLT: &[u8] = &[0xf4];

#[test]
fn hlt_exits_without_an_interrupt_controller() {
    let Some(guest) = Guest::plain(HLT) else {
        return;
    };
    let mut vcpu = guest.vcpu();
    assert!(matches!(vcpu.run().unwrap(), Exit::Halt));
    assert_eq!(vcpu.exit_counts().halt, 1);
    assert_eq!(vcpu.exit_counts().total(), 1);
}

#[test]
fn a_kick_before_run_is_not_lost() {
    let Some(guest) = Guest::plain(HLT) else {
        return;
    };
    let binder = guest.vm.create_vcpu(0).unwrap();
    let kicker = binder.kicker();
    // Before bind, twice: one interruption. After bind: another one.
    kicker.kick();
    kicker.kick();
    let mut vcpu = start(binder, CODE);
    assert!(matches!(vcpu.run().unwrap(), Exit::Interrupted));
    kicker.kick();
    assert!(matches!(vcpu.run().unwrap(), Exit::Interrupted));
    assert_eq!(
        vcpu.x86().unwrap().registers().unwrap().rip,
        CODE,
        "no guest instruction ran"
    );
    assert!(matches!(vcpu.run().unwrap(), Exit::Halt));
    assert_eq!(vcpu.exit_counts().interrupted, 2);
}

#[test]
fn another_thread_stops_a_spinning_guest_each_time() {
    const KICKS: u32 = 500;
    let Some(guest) = Guest::plain(SPIN) else {
        return;
    };
    let binder = guest.vm.create_vcpu(0).unwrap();
    let kicker = binder.kicker();
    let asked = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&asked);
    let (stopped, stops) = mpsc::channel();
    let thread = thread::spawn(move || {
        let mut vcpu = start(binder, CODE);
        let mut answered = 0;
        while answered < KICKS {
            let exit = vcpu.run().unwrap();
            assert!(matches!(exit, Exit::Interrupted), "{exit:?}");
            // What was stored before the kick is seen after `run`; a spurious return is allowed.
            let asked = seen.load(Ordering::Acquire);
            if asked != answered {
                answered = asked;
                stopped.send(answered).unwrap();
            }
        }
        vcpu.exit_counts()
    });
    for kick in 1..=KICKS {
        asked.store(kick, Ordering::Release);
        kicker.kick();
        let stop = stops.recv_timeout(Duration::from_secs(60));
        assert_eq!(stop, Ok(kick), "a kick was lost");
    }
    let counts = thread.join().unwrap();
    assert!(counts.interrupted >= u64::from(KICKS));
    assert_eq!(counts.total(), counts.interrupted);
    kicker.kick(); // nobody there any more: nothing happens
}

#[test]
fn dropping_the_vcpu_restores_the_threads_signal_mask() {
    let blocked = || vmm_sys_util::signal::get_blocked_signals().unwrap();
    let Some(guest) = Guest::plain(HLT) else {
        return;
    };
    let before = blocked();
    assert!(!before.contains(&kick_signal()));
    let binder = guest.vm.create_vcpu(0).unwrap();
    let kicker = binder.kicker();
    let vcpu = start(binder, CODE);
    assert!(blocked().contains(&kick_signal()));
    // Pending when the vCPU goes: were it delivered, it would kill the process.
    kicker.kick();
    drop(vcpu);
    kicker.kick();
    assert_eq!(blocked(), before);
}

#[test]
fn a_triple_fault_is_a_shutdown() {
    // ud2
    let Some(guest) = Guest::plain(&[0x0f, 0x0b]) else {
        return;
    };
    let mut vcpu = guest.vcpu();
    let x86 = vcpu.x86().unwrap();
    long_mode(&guest.ram, x86);
    let mut system = x86.system_registers().unwrap();
    system.idt.limit = 0; // no handler, not even for the fault that this is
    x86.set_system_registers(&system).unwrap();
    let exit = vcpu.run().unwrap();
    assert!(matches!(exit, Exit::Shutdown), "{exit:?}");
    assert_eq!(vcpu.exit_counts().shutdown, 1);
}

#[test]
fn two_vcpus_run_on_two_threads() {
    let config = VmConfig {
        interrupt_controller: false,
        ..VmConfig::new(2)
    };
    // out 0x20, al; hlt
    let Some(guest) = Guest::new(&config, &[0xe6, 0x20, 0xf4]) else {
        return;
    };
    let (sender, ports) = mpsc::channel();
    thread::scope(|scope| {
        for id in 0..2u8 {
            let binder = guest.vm.create_vcpu(id.into()).unwrap();
            let sender = sender.clone();
            scope.spawn(move || {
                let mut vcpu = start(binder, CODE);
                let x86 = vcpu.x86().unwrap();
                let mut registers = x86.registers().unwrap();
                registers.rax = (0x40 + id).into();
                x86.set_registers(&registers).unwrap();
                let Exit::PortOut { data, .. } = vcpu.run().unwrap() else {
                    panic!("no port write")
                };
                sender.send(data.to_vec()).unwrap();
                assert!(matches!(vcpu.run().unwrap(), Exit::Halt));
            });
        }
    });
    let mut seen: Vec<_> = ports.try_iter().collect();
    seen.sort();
    assert_eq!(seen, [[0x40], [0x41]]);
}

#[test]
fn impossible_machines_are_refused() {
    let Some(kvm) = kvm() else {
        return;
    };
    for vcpus in [0, u32::MAX] {
        let refused = kvm.create_vm(&VmConfig::new(vcpus));
        assert!(
            matches!(refused, Err(HypervisorError::Invalid { .. })),
            "{vcpus}"
        );
    }
    let vm = kvm.create_vm(&VmConfig::new(1)).unwrap();
    assert!(vm.create_vcpu(1).is_err());
    assert!(vm.create_vcpu(0).is_ok());
    assert!(vm.create_vcpu(0).is_err(), "a vCPU cannot be created twice");
}
