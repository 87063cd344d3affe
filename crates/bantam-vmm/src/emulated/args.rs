//! QEMU's command line.

use std::ffi::OsString;
use std::os::fd::RawFd;

use super::tsc;
use crate::VmConfig;
use crate::cmdline;
use crate::devices::DeviceKind;

/// QEMU's own seccomp filter: no new processes, no new privileges.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// `microvm` needs no firmware for an ELF kernel with a PVH note, and has neither PCI nor ACPI.
/// The RTC is there because a kernel that finds none waits for it for a second.
const MACHINE: &str = "microvm,x-option-roms=off,rtc=on,isa-serial=on,acpi=off,memory-backend=ram";

/// QEMU's APIC timer counts nanoseconds. Without this word the kernel waits a tenth of a second to
/// find that out. The word is a patch of ours (`images/kernel/patches`); because of its dot other
/// kernels take it for a parameter of a module that they do not have.
const APIC_TIMER: &str = "apic.timer_khz=1000000";

/// How QEMU gets the socket of a device.
pub(super) enum Socket {
    Inherited(RawFd),
    /// It connects to this name in the abstract namespace.
    Named(String),
}

/// The descriptors that QEMU inherits, under their own numbers: all that it may touch.
pub(super) struct Inherited {
    pub(super) kernel: RawFd,
    pub(super) initramfs: RawFd,
    /// One vhost-user socket per device, in guest order.
    pub(super) devices: Vec<(DeviceKind, Socket)>,
}

impl Inherited {
    pub(super) fn all(&self) -> Vec<RawFd> {
        let devices = self.devices.iter().filter_map(|(_, socket)| match socket {
            Socket::Inherited(fd) => Some(*fd),
            Socket::Named(_) => None,
        });
        [self.kernel, self.initramfs]
            .into_iter()
            .chain(devices)
            .collect()
    }
}

/// Arguments for `config`.
pub(super) fn build(config: &VmConfig, inherited: &Inherited) -> Vec<OsString> {
    let mib = config.memory.mib();
    let mut args: Vec<OsString> = Vec::new();
    let mut push = |words: &[&str]| args.extend(words.iter().map(OsString::from));
    push(&["-machine", MACHINE]);
    push(&[
        "-object",
        &format!("memory-backend-memfd,id=ram,size={mib}M,share=on"),
    ]);
    push(&["-m", &format!("{mib}M")]);
    // Without "fast strings" the guest copies word by word, which TCG does faster.
    push(&["-accel", "tcg", "-cpu", "max,-erms,-fsrm"]);
    push(&["-smp", &config.cpus.to_string()]);
    push(&["-nodefaults", "-no-user-config", "-display", "none"]);
    push(&["-no-reboot", "-sandbox", SANDBOX]);
    // The console is QEMU's serial port on this engine: its vhost-user has no console.
    push(&["-chardev", "stdio,id=console,signal=off"]);
    push(&["-serial", "chardev:console"]);
    for (index, (kind, socket)) in inherited.devices.iter().enumerate() {
        let socket = match socket {
            Socket::Inherited(fd) => format!("fd={fd}"),
            Socket::Named(name) => format!("path={name},abstract=on,tight=on"),
        };
        push(&["-chardev", &format!("socket,id=c{index},{socket}")]);
        match (kind, &config.network) {
            (DeviceKind::Net, Some(network)) => {
                let netdev = format!("vhost-user,id=n{index},chardev=c{index}");
                push(&["-netdev", &netdev]);
                push(&["-device", &card(network, index)]);
            }
            _ => push(&["-device", &format!("{},chardev=c{index}", front_end(*kind))]),
        }
    }
    let khz = tsc::khz();
    // Loops per jiffy at 100 Hz; without it every further CPU measures its own.
    let tsc = format!("tsc_early_khz={khz} lpj={}", khz.saturating_mul(10));
    let line = cmdline::build(config, &[], &["console=ttyS0", &tsc, APIC_TIMER]);
    push(&["-append", &line]);
    push(&["-kernel", &format!("/proc/self/fd/{}", inherited.kernel)]);
    push(&["-initrd", &format!("/proc/self/fd/{}", inherited.initramfs)]);
    args
}

/// The card's configuration is QEMU's to keep: it does not ask us.
fn card(network: &bantam_net::Config, netdev: usize) -> String {
    let mac = network
        .addresses
        .guest_mac
        .map(|byte| format!("{byte:02x}"));
    format!(
        "virtio-net-device,netdev=n{netdev},mac={},host_mtu={}",
        mac.join(":"),
        network.mtu
    )
}

fn front_end(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Block => "vhost-user-blk,num-queues=1",
        DeviceKind::Vsock => "vhost-user-vsock-device",
        DeviceKind::Net => "virtio-net-device",
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
            network: Some(bantam_net::Config::default()),
            engine: EngineChoice::Auto,
            extra_cmdline: Some("loglevel=7".to_owned()),
        };
        let inherited = Inherited {
            kernel: 3,
            initramfs: 4,
            devices: vec![
                (DeviceKind::Block, Socket::Inherited(7)),
                (DeviceKind::Vsock, Socket::Inherited(9)),
                (DeviceKind::Net, Socket::Named("name".to_owned())),
            ],
        };
        assert_eq!(inherited.all(), [3, 4, 7, 9]);
        let args = build(&config, &inherited);
        let text: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).collect();
        let line = text.join(" ");
        assert!(line.contains("socket,id=c0,fd=7 -device vhost-user-blk,num-queues=1,chardev=c0"));
        assert!(line.contains("socket,id=c1,fd=9 -device vhost-user-vsock-device,chardev=c1"));
        assert!(line.contains("-smp 2"));
        assert!(line.contains(
            "socket,id=c2,path=name,abstract=on,tight=on -netdev vhost-user,id=n2,chardev=c2 \
             -device virtio-net-device,netdev=n2,mac=02:62:61:6e:74:02,host_mtu=1500"
        ));
        let paths = line.replace("path=name,abstract=on", "");
        assert!(!paths.contains("path="), "{line}");
        assert!(line.contains("console=ttyS0 tsc_early_khz="), "{line}");
        assert!(
            line.contains(" loglevel=7 -kernel /proc/self/fd/3 -initrd /proc/self/fd/4"),
            "extra words come last: {line}"
        );
    }
}
