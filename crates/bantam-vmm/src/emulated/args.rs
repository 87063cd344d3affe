//! QEMU's command line.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::Path;

use super::tsc;
use crate::VmConfig;
use crate::cmdline;
use crate::devices::DeviceKind;

/// QEMU's own seccomp filter: no new processes, no new privileges.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// `microvm` needs no firmware for an ELF kernel with a PVH note, and has neither PCI nor ACPI.
/// The RTC is there because a kernel that finds none waits for it for a second.
const MACHINE: &str = "microvm,x-option-roms=off,rtc=on,isa-serial=on,acpi=off,memory-backend=ram";

/// Arguments for `config` with `kernel` in the place of its kernel, and with one vhost-user socket
/// per device, in guest order.
pub(super) fn build(
    config: &VmConfig,
    kernel: &Path,
    devices: &[(DeviceKind, RawFd)],
) -> Vec<OsString> {
    let mib = config.memory.mib();
    let mut args: Vec<OsString> = Vec::new();
    let mut push = |words: &[&str]| args.extend(words.iter().map(OsString::from));
    push(&["-machine", MACHINE]);
    push(&[
        "-object",
        &format!("memory-backend-memfd,id=ram,size={mib}M,share=on"),
    ]);
    push(&["-m", &format!("{mib}M")]);
    push(&["-accel", "tcg", "-cpu", "max"]);
    push(&["-smp", &config.cpus.to_string()]);
    push(&["-nodefaults", "-no-user-config", "-display", "none"]);
    push(&["-no-reboot", "-sandbox", SANDBOX]);
    // The console is QEMU's serial port on this engine: its vhost-user has no console.
    push(&["-chardev", "stdio,id=console,signal=off"]);
    push(&["-serial", "chardev:console"]);
    for (index, (kind, fd)) in devices.iter().enumerate() {
        push(&["-chardev", &format!("socket,id=c{index},fd={fd}")]);
        push(&["-device", &format!("{},chardev=c{index}", front_end(*kind))]);
    }
    let tsc = format!("tsc_early_khz={}", tsc::khz());
    let line = cmdline::build(config, &[], &["console=ttyS0", &tsc]);
    push(&["-append", &line]);
    args.push("-kernel".into());
    args.push(kernel.into());
    args.push("-initrd".into());
    args.push(config.guest.initramfs.clone().into());
    args
}

fn front_end(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Block => "vhost-user-blk,num-queues=1",
        DeviceKind::Vsock => "vhost-user-vsock-device",
        DeviceKind::Rng => "vhost-user-rng",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EngineChoice, GuestKernel, MemorySize};

    #[test]
    fn every_device_gets_its_inherited_socket_and_no_path() {
        let config = VmConfig {
            cpus: 2,
            memory: MemorySize::from_mib(256).unwrap(),
            guest: GuestKernel {
                kernel: "/k".into(),
                initramfs: "/i".into(),
            },
            disks: Vec::new(),
            engine: EngineChoice::Auto,
            extra_cmdline: Some("loglevel=7".to_owned()),
        };
        let args = build(
            &config,
            Path::new("/k"),
            &[(DeviceKind::Block, 7), (DeviceKind::Vsock, 9)],
        );
        let text: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).collect();
        let line = text.join(" ");
        assert!(line.contains("socket,id=c0,fd=7 -device vhost-user-blk,num-queues=1,chardev=c0"));
        assert!(line.contains("socket,id=c1,fd=9 -device vhost-user-vsock-device,chardev=c1"));
        assert!(line.contains("-smp 2"));
        assert!(!line.contains("path="), "{line}");
        assert!(line.contains("console=ttyS0 tsc_early_khz="), "{line}");
        assert!(
            line.contains(" loglevel=7 -kernel"),
            "extra words come last: {line}"
        );
    }
}
