//! Interrupts from an irqfd and from a line, through the in-kernel interrupt controller.

use bantam_hypervisor::{EventFd, Exit, Gsi, Vcpu, VmConfig};

use crate::guest::{Guest, kvm};

const HANDLER: u16 = 0x1100;
const VECTOR_BASE: u8 = 0x20;
const GSI: Gsi = Gsi(5);

/// Sets the first PIC up (vectors from 0x20, automatic end of interrupt, nothing masked), says so on
/// port 0x10, and waits for interrupts for ever.
const WAIT: &[u8] = &[
    0xb0,
    0x11,
    0xe6,
    0x20, // ICW1: cascade, edge-triggered, ICW4 follows
    0xb0,
    VECTOR_BASE,
    0xe6,
    0x21, // ICW2
    0xb0,
    0x04,
    0xe6,
    0x21, // ICW3
    0xb0,
    0x03,
    0xe6,
    0x21, // ICW4: 8086, automatic EOI
    0xb0,
    0x00,
    0xe6,
    0x21, // OCW1: unmask all
    0xe6,
    0x10, // out 0x10, al
    0xfb,
    0xf4, // sti; hlt
    0xeb,
    0xfc, // jmp back to sti
];
/// `out 0x30, al; iret`
const REPORT: &[u8] = &[0xe6, 0x30, 0xcf];

fn guest() -> Option<(Guest, Box<dyn Vcpu>)> {
    let guest = Guest::new(&VmConfig::new(1), WAIT)?;
    guest.ram.write(HANDLER.into(), REPORT);
    let vector = VECTOR_BASE + 5;
    let [low, high] = HANDLER.to_le_bytes();
    guest.ram.write(usize::from(vector) * 4, &[low, high, 0, 0]);
    let mut vcpu = guest.vcpu();
    assert_eq!(port(&mut *vcpu), 0x10, "ready");
    Some((guest, vcpu))
}

/// Runs up to the next port write.
fn port(vcpu: &mut dyn Vcpu) -> u16 {
    match vcpu.run().unwrap() {
        Exit::PortOut { port, .. } => port,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_signalled_irqfd_runs_the_guests_handler() {
    let Some((guest, mut vcpu)) = guest() else {
        return;
    };
    let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    guest.vm.irqfd(GSI, &event).unwrap();
    for _ in 0..3 {
        event.write(1).unwrap();
        // Blocks in `hlt` inside the kernel until the interrupt arrives.
        assert_eq!(port(&mut *vcpu), 0x30, "the handler ran");
    }
    let counts = vcpu.exit_counts();
    assert_eq!((counts.port_out, counts.halt, counts.total()), (4, 0, 4));
    guest.vm.remove_irqfd(GSI, &event).unwrap();
}

#[test]
fn a_raised_line_runs_the_guests_handler() {
    let Some((guest, mut vcpu)) = guest() else {
        return;
    };
    for _ in 0..2 {
        guest.vm.set_irq_line(GSI, true).unwrap();
        guest.vm.set_irq_line(GSI, false).unwrap();
        assert_eq!(port(&mut *vcpu), 0x30, "the handler ran");
    }
    assert_eq!(vcpu.exit_counts().total(), 3);
}

#[test]
fn interrupts_need_an_interrupt_controller() {
    let Some(kvm) = kvm() else {
        return;
    };
    let config = VmConfig {
        interrupt_controller: false,
        ..VmConfig::new(1)
    };
    let vm = kvm.create_vm(&config).unwrap();
    let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    assert!(vm.irqfd(GSI, &event).is_err());
    assert!(vm.set_irq_line(GSI, true).is_err());
}
