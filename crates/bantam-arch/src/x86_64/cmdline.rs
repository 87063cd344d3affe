//! The part of the kernel command line that follows from this machine having no firmware.

use std::fmt::Write;

use super::layout::{MMIO_SLOT_SIZE, MmioSlot};

/// What every guest is told, for the reasons given:
///
/// * `reboot=t panic=-1`: a reboot or a panic is a triple fault at once, which is an exit;
/// * `loglevel=3`: console output is slow (two exits a character on an early console), and the
///   console is looked at only when a boot fails; a panic is shown all the same. `quiet` would
///   still print what the kernel calls errors, such as a line about Spectre at every boot;
/// * `tsc=reliable`: no clocksource watchdog; kvm-clock says the frequency;
/// * `no_timer_check`: there is no PIT whose interrupt could be waited for;
/// * `swiotlb=noforce`: a kernel with 4 GiB or more would clear 64 MiB for devices that reach less,
///   which takes 24 million instructions;
/// * `maxcpus=1` (several vCPUs): the agent brings up the others at the end of the boot, which
///   costs a fraction of booting on all of them;
/// * `noreplace-smp`: does not patch the kernel's code for one CPU, which takes some 4 million
///   instructions and gains less.
///
/// Device entries for `slots` follow. Console arguments are the caller's.
pub fn base(vcpus: u32, slots: &[MmioSlot]) -> String {
    let mut line = String::from(
        "reboot=t panic=-1 loglevel=3 tsc=reliable no_timer_check noreplace-smp swiotlb=noforce",
    );
    if vcpus > 1 {
        line.push_str(" maxcpus=1");
    }
    for slot in slots {
        line.push(' ');
        line.push_str(&mmio_device(slot));
    }
    line
}

/// One `virtio_mmio.device=<size>@<base>:<gsi>` entry
/// (`Documentation/admin-guide/kernel-parameters.txt`).
pub fn mmio_device(slot: &MmioSlot) -> String {
    let mut entry = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        entry,
        "virtio_mmio.device={}K@{:#x}:{}",
        MMIO_SLOT_SIZE / 1024,
        slot.base,
        slot.gsi.0
    );
    entry
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86_64::layout::mmio_slot;

    #[test]
    fn devices_are_announced_with_window_and_interrupt() {
        let slots = [mmio_slot(0).unwrap(), mmio_slot(1).unwrap()];
        let line = base(1, &slots);
        assert!(line.starts_with("reboot=t panic=-1 "), "{line}");
        assert!(line.ends_with(
            " swiotlb=noforce virtio_mmio.device=4K@0xd0000000:5 virtio_mmio.device=4K@0xd0001000:6"
        ));
        assert!(base(2, &slots).contains(" maxcpus=1 "));
    }
}
