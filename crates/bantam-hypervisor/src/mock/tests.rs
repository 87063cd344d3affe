use super::*;

fn vcpu(mock: &MockHypervisor) -> (Box<dyn Vm>, Box<dyn Vcpu>) {
    let vm = mock.create_vm(&VmConfig::new(1)).unwrap();
    let vcpu = vm.create_vcpu(0).unwrap().bind().unwrap();
    (vm, vcpu)
}

#[test]
fn a_script_plays_in_order_and_then_ends() {
    let mock = MockHypervisor::new().script(
        0,
        [
            Step::MmioRead {
                addr: 0xd000_0000,
                size: 4,
            },
            Step::PortOut {
                port: 0x3f8,
                data: vec![b'x'],
            },
            Step::Shutdown,
        ],
    );
    let (_vm, mut vcpu) = vcpu(&mock);
    match vcpu.run().unwrap() {
        Exit::MmioRead {
            addr: 0xd000_0000,
            data,
        } => data.copy_from_slice(b"virt"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        vcpu.run().unwrap(),
        Exit::PortOut {
            port: 0x3f8,
            data: b"x",
            ..
        }
    ));
    assert!(matches!(vcpu.run().unwrap(), Exit::Shutdown));
    assert!(matches!(vcpu.run(), Err(HypervisorError::ScriptEnded(0))));
    let answer = Call::ReadCompleted {
        vcpu: 0,
        data: b"virt".to_vec(),
    };
    assert!(mock.calls().contains(&answer));
    let counts = vcpu.exit_counts();
    assert_eq!(
        (counts.mmio_read, counts.port_out, counts.shutdown),
        (1, 1, 1)
    );
}

#[test]
fn an_ioeventfd_takes_a_scripted_write_that_matches() {
    let notify = |value: u8| Step::MmioWrite {
        addr: 0x50,
        data: vec![value, 0, 0, 0],
    };
    let mock = MockHypervisor::new().script(0, [notify(1), notify(2), Step::Halt]);
    let (vm, mut vcpu) = vcpu(&mock);
    let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    vm.ioeventfd(IoAddress::Mmio(0x50), DataMatch::U32(1), &event)
        .unwrap();
    assert!(matches!(
        vcpu.run().unwrap(),
        Exit::MmioWrite {
            data: [2, 0, 0, 0],
            ..
        }
    ));
    assert!(matches!(vcpu.run().unwrap(), Exit::Halt));
    assert_eq!(event.read().unwrap(), 1);
}

#[test]
fn a_kick_interrupts_a_vcpu_that_waits_and_one_that_will_run() {
    let mock = MockHypervisor::new().script(0, [Step::UntilKicked, Step::Halt]);
    let vm = mock.create_vm(&VmConfig::new(1)).unwrap();
    let binder = vm.create_vcpu(0).unwrap();
    let kicker = binder.kicker();
    let thread = std::thread::spawn(move || {
        let mut vcpu = binder.bind().unwrap();
        assert!(matches!(vcpu.run().unwrap(), Exit::Interrupted));
        assert!(matches!(vcpu.run().unwrap(), Exit::Halt));
    });
    kicker.kick();
    thread.join().unwrap();
}
