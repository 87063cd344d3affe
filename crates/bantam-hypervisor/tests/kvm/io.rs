//! Port and MMIO accesses of every width, and ioeventfds that take them.

use bantam_hypervisor::{DataMatch, EventFd, Exit, IoAddress, Vcpu};

use crate::guest::{Guest, long_mode};

/// `mov ax, 0xf000; mov ds, ax`: data accesses go to 0xf_0000, where there is no memory.
const DS_TO_MMIO: &[u8] = &[0xb8, 0x00, 0xf0, 0x8e, 0xd8];
const MMIO: u64 = 0xf_0000;
const HLT: u8 = 0xf4;

/// Everything the guest does until it halts, as text; reads are answered with 0xa0, 0xa1, ...
fn trace(vcpu: &mut dyn Vcpu) -> Vec<String> {
    let mut log = Vec::new();
    let answer = |data: &mut [u8]| {
        for (byte, value) in data.iter_mut().zip(0xa0..) {
            *byte = value;
        }
    };
    loop {
        match vcpu.run().unwrap() {
            Exit::PortIn { port, size, data } => {
                answer(data);
                log.push(format!("in{} {port:#x} {}", size * 8, data.len() / size));
            }
            Exit::PortOut { port, size, data } => {
                log.push(format!("out{} {port:#x} {data:x?}", size * 8));
            }
            Exit::MmioRead { addr, data } => {
                answer(data);
                log.push(format!("read{} {addr:#x}", data.len() * 8));
            }
            Exit::MmioWrite { addr, data } => log.push(format!("write {addr:#x} {data:x?}")),
            Exit::Halt => return log,
            other => panic!("{other:?} after {log:?}"),
        }
    }
}

#[test]
fn port_writes_have_the_guests_width_and_value() {
    let code = [
        0x66, 0xb8, 0x44, 0x33, 0x22, 0x11, // mov eax, 0x11223344
        0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xee, // out dx, al
        0xef, // out dx, ax
        0x66, 0xef, // out dx, eax
        HLT,
    ];
    let Some(guest) = Guest::plain(&code) else {
        return;
    };
    let mut vcpu = guest.vcpu();
    assert_eq!(
        trace(&mut *vcpu),
        [
            "out8 0x3f8 [44]",
            "out16 0x3f8 [44, 33]",
            "out32 0x3f8 [44, 33, 22, 11]"
        ]
    );
    let counts = vcpu.exit_counts();
    assert_eq!((counts.port_out, counts.halt, counts.total()), (3, 1, 4));
}

#[test]
fn port_reads_reach_the_guests_register() {
    let code = [
        0x66, 0x31, 0xc0, // xor eax, eax
        0xba, 0x60, 0x00, // mov dx, 0x60
        0xec, // in al, dx
        0xa2, 0x00, 0x20, // mov [0x2000], al
        0xed, // in ax, dx
        0xa3, 0x02, 0x20, // mov [0x2002], ax
        0x66, 0xed, // in eax, dx
        0x66, 0xa3, 0x04, 0x20, // mov [0x2004], eax
        HLT,
    ];
    let Some(guest) = Guest::plain(&code) else {
        return;
    };
    let mut vcpu = guest.vcpu();
    assert_eq!(
        trace(&mut *vcpu),
        ["in8 0x60 1", "in16 0x60 1", "in32 0x60 1"]
    );
    assert_eq!(
        guest.ram.read(0x2000, 8),
        [0xa0, 0, 0xa0, 0xa1, 0xa0, 0xa1, 0xa2, 0xa3]
    );
    assert_eq!(vcpu.exit_counts().port_in, 3);
}

#[test]
fn string_port_accesses_keep_their_unit() {
    let code = [
        0xfc, // cld
        0xba, 0x80, 0x00, // mov dx, 0x80
        0xbe, 0x00, 0x20, // mov si, 0x2000
        0xb9, 0x03, 0x00, // mov cx, 3
        0xf3, 0x6f, // rep outsw
        0xbf, 0x00, 0x21, // mov di, 0x2100
        0xb9, 0x04, 0x00, // mov cx, 4
        0xf3, 0x6c, // rep insb
        HLT,
    ];
    let Some(guest) = Guest::plain(&code) else {
        return;
    };
    guest.ram.write(0x2000, &[1, 2, 3, 4, 5, 6]);
    let mut vcpu = guest.vcpu();
    let (mut out, mut read) = (Vec::new(), 0u8);
    loop {
        // KVM may hand over one access or several at a time.
        match vcpu.run().unwrap() {
            Exit::PortOut {
                port: 0x80,
                size: 2,
                data,
            } => {
                assert!(data.len().is_multiple_of(2));
                out.extend_from_slice(data);
            }
            Exit::PortIn {
                port: 0x80,
                size: 1,
                data,
            } => {
                for byte in data {
                    read += 1;
                    *byte = read;
                }
            }
            Exit::Halt => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(out, [1, 2, 3, 4, 5, 6]);
    // KVM may have read ahead; what counts is what the guest sees.
    assert_eq!(guest.ram.read(0x2100, 5), [1, 2, 3, 4, 0]);
}

#[test]
fn mmio_accesses_have_the_guests_width_and_value() {
    let code = [
        DS_TO_MMIO,
        &[0x66, 0xb8, 0x44, 0x33, 0x22, 0x11], // mov eax, 0x11223344
        &[0xa2, 0x10, 0x00],                   // mov [0x10], al
        &[0xa3, 0x20, 0x00],                   // mov [0x20], ax
        &[0x66, 0xa3, 0x30, 0x00],             // mov [0x30], eax
        &[0xa0, 0x11, 0x00],                   // mov al, [0x11]
        &[0xa1, 0x22, 0x00],                   // mov ax, [0x22]
        &[0x66, 0xa1, 0x34, 0x00],             // mov eax, [0x34]
        &[0xba, 0x10, 0x00, 0x66, 0xef],       // mov dx, 0x10; out dx, eax
        &[HLT],
    ]
    .concat();
    let Some(guest) = Guest::plain(&code) else {
        return;
    };
    let mut vcpu = guest.vcpu();
    assert_eq!(
        trace(&mut *vcpu),
        [
            "write 0xf0010 [44]",
            "write 0xf0020 [44, 33]",
            "write 0xf0030 [44, 33, 22, 11]",
            "read8 0xf0011",
            "read16 0xf0022",
            "read32 0xf0034",
            "out32 0x10 [a0, a1, a2, a3]",
        ]
    );
    let counts = vcpu.exit_counts();
    assert_eq!((counts.mmio_write, counts.mmio_read), (3, 3));
}

#[test]
fn a_64_bit_guest_accesses_eight_bytes_at_once() {
    let code = [
        0x48, 0xb8, 8, 7, 6, 5, 4, 3, 2, 1, // mov rax, 0x0102030405060708
        0xbf, 0x00, 0x00, 0x0f, 0x00, // mov edi, 0xf0000
        0x48, 0x89, 0x07, // mov [rdi], rax
        0x48, 0x8b, 0x5f, 0x08, // mov rbx, [rdi + 8]
        HLT,
    ];
    let Some(guest) = Guest::plain(&code) else {
        return;
    };
    let mut vcpu = guest.vcpu();
    long_mode(&guest.ram, vcpu.x86().unwrap());
    assert_eq!(
        trace(&mut *vcpu),
        ["write 0xf0000 [8, 7, 6, 5, 4, 3, 2, 1]", "read64 0xf0008"]
    );
    let rbx = vcpu.x86().unwrap().registers().unwrap().rbx;
    assert_eq!(rbx, 0xa7a6_a5a4_a3a2_a1a0);
}

#[test]
fn a_matching_write_signals_the_ioeventfd_instead_of_exiting() {
    let code = [
        DS_TO_MMIO,
        &[0x66, 0xb8, 1, 0, 0, 0], // mov eax, 1
        &[0x66, 0xa3, 0x50, 0x00], // mov [0x50], eax: queue 1
        &[0x66, 0xa3, 0x50, 0x00], // mov [0x50], eax: again
        &[0x66, 0xb8, 2, 0, 0, 0], // mov eax, 2
        &[0x66, 0xa3, 0x50, 0x00], // mov [0x50], eax: a queue without an eventfd
        &[0xb0, 1],                // mov al, 1
        &[0xa2, 0x50, 0x00],       // mov [0x50], al: too narrow
        &[0xe6, 0x77],             // out 0x77, al
        &[0xe6, 0x78],             // out 0x78, al
        &[HLT],
    ]
    .concat();
    let Some(guest) = Guest::plain(&code) else {
        return;
    };
    let notify = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let port = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let queue_1 = (IoAddress::Mmio(MMIO + 0x50), DataMatch::U32(1));
    guest.vm.ioeventfd(queue_1.0, queue_1.1, &notify).unwrap();
    guest
        .vm
        .ioeventfd(IoAddress::Port(0x77), DataMatch::Any, &port)
        .unwrap();
    assert!(
        guest.vm.ioeventfd(queue_1.0, queue_1.1, &notify).is_err(),
        "it is taken"
    );

    let mut vcpu = guest.vcpu();
    assert_eq!(
        trace(&mut *vcpu),
        [
            "write 0xf0050 [2, 0, 0, 0]",
            "write 0xf0050 [1]",
            "out8 0x78 [1]"
        ]
    );
    assert_eq!(notify.read().unwrap(), 2);
    assert_eq!(port.read().unwrap(), 1);
    assert_eq!(
        vcpu.exit_counts().mmio_write,
        2,
        "two of four writes left the kernel"
    );

    guest
        .vm
        .remove_ioeventfd(queue_1.0, queue_1.1, &notify)
        .unwrap();
    assert!(
        guest
            .vm
            .remove_ioeventfd(queue_1.0, queue_1.1, &notify)
            .is_err()
    );
    crate::guest::real_mode(vcpu.x86().unwrap(), crate::guest::CODE);
    assert_eq!(
        trace(&mut *vcpu)[..2],
        ["write 0xf0050 [1, 0, 0, 0]", "write 0xf0050 [1, 0, 0, 0]"]
    );
    assert!(notify.read().is_err(), "nothing signals it any more");
}
