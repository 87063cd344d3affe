//! The MultiProcessor table (Intel MultiProcessor Specification 1.4): the CPUs, the IOAPIC, and
//! which interrupt arrives at which of its pins. It takes the place of ACPI's MADT.

use vm_memory::{Bytes, GuestAddress};

use super::layout::{IOAPIC, LAPIC, MAX_VCPUS, MMIO_FIRST_GSI, MMIO_SLOTS, MP_TABLE};
use crate::{ArchError, GuestRam, Result};

const SPEC_1_4: u8 = 4;
const LAPIC_VERSION: u8 = 0x14;
const IOAPIC_VERSION: u8 = 0x11;
const ISA_BUS: u8 = 0;

const FLOATING_POINTER_LEN: u32 = 16;
const HEADER_LEN: usize = 44;

/// Entry types, MPS 1.4 table 4-3.
mod entry {
    pub(super) const PROCESSOR: u8 = 0;
    pub(super) const BUS: u8 = 1;
    pub(super) const IOAPIC: u8 = 2;
    pub(super) const IO_INTERRUPT: u8 = 3;
    pub(super) const LOCAL_INTERRUPT: u8 = 4;
}

/// Interrupt types, MPS 1.4 table 4-10.
mod interrupt {
    pub(super) const INT: u8 = 0;
    pub(super) const NMI: u8 = 1;
    pub(super) const EXT_INT: u8 = 3;
}

/// Writes the floating pointer and the table for `vcpus` CPUs and `devices` virtio-mmio devices to
/// [`MP_TABLE`].
pub(super) fn write(ram: &GuestRam, vcpus: u32, devices: u32) -> Result<()> {
    let bytes = build(vcpus, devices, MP_TABLE)?;
    ram.write_slice(&bytes, MP_TABLE)
        .map_err(|_| ArchError::Memory {
            what: "the MP table",
            addr: MP_TABLE.0,
            len: bytes.len() as u64,
        })
}

/// The floating pointer followed by the table, to be placed at `at`.
fn build(vcpus: u32, devices: u32, at: GuestAddress) -> Result<Vec<u8>> {
    let too_many = || ArchError::Limit {
        what: "the number of vCPUs",
        value: vcpus.into(),
        limit: MAX_VCPUS.into(),
    };
    let cpus = u8::try_from(vcpus).map_err(|_| too_many())?;
    if vcpus > MAX_VCPUS {
        return Err(too_many());
    }

    let mut entries = Vec::new();
    let mut count = 0u16;
    let mut add = |bytes: &[u8]| {
        entries.extend_from_slice(bytes);
        count += 1;
    };
    for id in 0..cpus {
        add(&processor(id));
    }
    add(&[entry::BUS, ISA_BUS, b'I', b'S', b'A', b' ', b' ', b' ']);
    // The IOAPIC's id follows those of the local APICs.
    let ioapic_id = cpus;
    let mut ioapic = [entry::IOAPIC, ioapic_id, IOAPIC_VERSION, 1, 0, 0, 0, 0];
    put_address(&mut ioapic, IOAPIC);
    add(&ioapic);
    // Every pin is an ISA interrupt of the same number: edge-triggered, active high, which is what
    // an irqfd delivers. Flags 0 mean "as the bus has it". Pins without a device are left out: the
    // kernel sets up each that it is told of, with eight exits.
    for pin in 0..MMIO_FIRST_GSI + devices.min(MMIO_SLOTS) {
        // At most 23.
        let pin = pin.to_le_bytes()[0];
        add(&[
            entry::IO_INTERRUPT,
            interrupt::INT,
            0,
            0,
            ISA_BUS,
            pin,
            ioapic_id,
            pin,
        ]);
    }
    const BOOT_PROCESSOR: u8 = 0;
    const ALL: u8 = 0xff;
    add(&[
        entry::LOCAL_INTERRUPT,
        interrupt::EXT_INT,
        0,
        0,
        ISA_BUS,
        0,
        BOOT_PROCESSOR,
        0,
    ]);
    add(&[
        entry::LOCAL_INTERRUPT,
        interrupt::NMI,
        0,
        0,
        ISA_BUS,
        0,
        ALL,
        1,
    ]);

    let mut table = header(entries.len(), count);
    table.extend_from_slice(&entries);
    set_checksum(&mut table, 7);

    let mut bytes = floating_pointer(at);
    set_checksum(&mut bytes, 10);
    bytes.extend_from_slice(&table);
    Ok(bytes)
}

/// MPS 1.4 table 4-1.
fn floating_pointer(at: GuestAddress) -> Vec<u8> {
    let mut bytes = b"_MP_".to_vec();
    // The layout's constant, far below 4 GiB.
    let table = at.0.to_le_bytes();
    let table = u32::from_le_bytes([table[0], table[1], table[2], table[3]]);
    bytes.extend_from_slice(&(table + FLOATING_POINTER_LEN).to_le_bytes());
    // Length in 16-byte units, revision, checksum, no default configuration, virtual wire mode.
    bytes.extend_from_slice(&[1, SPEC_1_4, 0, 0, 0, 0, 0, 0]);
    bytes
}

/// MPS 1.4 table 4-2.
fn header(entries_len: usize, count: u16) -> Vec<u8> {
    let mut bytes = b"PCMP".to_vec();
    // At most 254 CPUs of 20 bytes and 28 other entries of 8.
    let len = u16::try_from(HEADER_LEN + entries_len).unwrap_or(u16::MAX);
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(&[SPEC_1_4, 0]);
    bytes.extend_from_slice(b"BANTAM  ");
    bytes.extend_from_slice(b"MICROVM     ");
    bytes.extend_from_slice(&[0; 6]); // no OEM table
    bytes.extend_from_slice(&count.to_le_bytes());
    let mut lapic = [0; 8];
    put_address(&mut lapic, LAPIC);
    bytes.extend_from_slice(&lapic[4..]);
    bytes.extend_from_slice(&[0; 4]); // no extended table
    bytes
}

/// MPS 1.4 table 4-4. The kernel asks CPUID for what the signature and the features say here.
fn processor(id: u8) -> [u8; 20] {
    const ENABLED: u8 = 1;
    const BOOT_PROCESSOR: u8 = 2;
    const FPU_AND_APIC: [u8; 2] = [0x01, 0x02];
    let flags = if id == 0 {
        ENABLED | BOOT_PROCESSOR
    } else {
        ENABLED
    };
    let mut bytes = [0; 20];
    bytes[..4].copy_from_slice(&[entry::PROCESSOR, id, LAPIC_VERSION, flags]);
    bytes[4..6].copy_from_slice(&[0x00, 0x06]); // family 6
    bytes[8..10].copy_from_slice(&FPU_AND_APIC);
    bytes
}

/// Puts a 32-bit address into the last four of eight bytes.
fn put_address(bytes: &mut [u8; 8], addr: u64) {
    bytes[4..].copy_from_slice(&addr.to_le_bytes()[..4]);
}

/// Makes all bytes add up to 0 by setting the one at `at`.
fn set_checksum(bytes: &mut [u8], at: usize) {
    let sum = bytes.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte));
    if let Some(byte) = bytes.get_mut(at) {
        *byte = byte.wrapping_sub(sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that knows only the specification.
    #[derive(Debug, Default, PartialEq)]
    struct Parsed {
        cpus: Vec<(u8, u8)>,
        buses: Vec<(u8, String)>,
        ioapics: Vec<(u8, u8, u32)>,
        interrupts: Vec<[u8; 4]>,
        local: Vec<[u8; 3]>,
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn parse(ram: &GuestRam) -> Parsed {
        let mut pointer = [0; 16];
        ram.read_slice(&mut pointer, MP_TABLE).unwrap();
        assert_eq!(&pointer[..4], b"_MP_");
        assert_eq!(sum(&pointer), 0);
        assert_eq!(pointer[8..10], [1, 4]);
        let table = u32::from_le_bytes(pointer[4..8].try_into().unwrap());
        let mut header = [0; 44];
        let at = GuestAddress(table.into());
        ram.read_slice(&mut header, at).unwrap();
        assert_eq!(&header[..4], b"PCMP");
        let len = u16::from_le_bytes([header[4], header[5]]);
        let mut bytes = vec![0; len.into()];
        ram.read_slice(&mut bytes, at).unwrap();
        assert_eq!(sum(&bytes), 0);
        assert_eq!(header[36..40], 0xfee0_0000u32.to_le_bytes());

        let mut parsed = Parsed::default();
        let mut rest = &bytes[44..];
        let mut count = 0;
        while let Some(&kind) = rest.first() {
            let (entry, tail) = rest.split_at(if kind == 0 { 20 } else { 8 });
            match kind {
                0 => parsed.cpus.push((entry[1], entry[3])),
                1 => parsed
                    .buses
                    .push((entry[1], String::from_utf8(entry[2..].to_vec()).unwrap())),
                2 => {
                    let addr = u32::from_le_bytes(entry[4..].try_into().unwrap());
                    parsed.ioapics.push((entry[1], entry[3], addr));
                }
                3 => {
                    assert_eq!(entry[1..4], [0, 0, 0], "vectored, as the bus has it");
                    parsed.interrupts.push(entry[4..].try_into().unwrap());
                }
                4 => parsed.local.push([entry[1], entry[6], entry[7]]),
                other => panic!("entry of type {other}"),
            }
            rest = tail;
            count += 1;
        }
        assert_eq!(u16::from_le_bytes([header[34], header[35]]), count);
        parsed
    }

    fn written(vcpus: u32, devices: u32) -> Parsed {
        let ram = GuestRam::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        write(&ram, vcpus, devices).unwrap();
        parse(&ram)
    }

    #[test]
    fn a_kernel_finds_its_cpus_and_interrupts() {
        let table = written(3, 2);
        assert_eq!(table.cpus, [(0, 3), (1, 1), (2, 1)]);
        assert_eq!(table.buses, [(0, "ISA   ".to_owned())]);
        assert_eq!(table.ioapics, [(3, 1, 0xfec0_0000)]);
        let identity = |pins| (0..pins).map(|pin| [0, pin, 3, pin]).collect::<Vec<_>>();
        assert_eq!(table.interrupts, identity(7), "the PC's five and two");
        assert_eq!(table.local, [[3, 0, 0], [1, 0xff, 1]]);
        for more in [19, 20, u32::MAX] {
            assert_eq!(written(3, more).interrupts, identity(24), "{more}");
        }
    }

    #[test]
    fn the_largest_machine_has_a_table_and_a_larger_one_is_refused() {
        let table = written(MAX_VCPUS, 4);
        assert_eq!(table.cpus.len(), 254);
        assert_eq!(table.ioapics[0].0, 254, "not the broadcast id");
        for vcpus in [255, 256, u32::MAX] {
            assert!(build(vcpus, 4, MP_TABLE).is_err(), "{vcpus}");
        }
    }

    #[test]
    fn the_table_stays_in_the_range_that_kernels_search() {
        let bytes = build(MAX_VCPUS, MMIO_SLOTS, MP_TABLE).unwrap();
        const { assert!(MP_TABLE.0 >= 0xf_0000) };
        assert!(MP_TABLE.0 + bytes.len() as u64 <= 0x10_0000);
    }
}
