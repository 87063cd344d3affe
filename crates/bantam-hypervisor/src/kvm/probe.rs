//! What this host's KVM is good for, without creating a virtual machine.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use vmm_sys_util::errno;

use super::{DEVICE, capabilities};
use crate::{HostKind, HostProbe, HwExtension, UnusableReason};

/// The only version that ever was (`KVM_API_VERSION`).
pub(super) const API_VERSION: i32 = 12;

/// The flags line is in the first processor's block; more is never needed.
const CPUINFO_CAP: u64 = 64 * 1024;

pub(crate) fn probe() -> HostProbe {
    let mut answer = HostProbe {
        backend: "kvm".to_owned(),
        device: Some(PathBuf::from(DEVICE)),
        api_version: None,
        kind: HostKind::SoftwareKvm,
        capabilities: None,
    };
    match open_device() {
        Err(reason) => answer.kind = HostKind::Unusable(reason),
        Ok(fd) => {
            let version = fd.get_api_version();
            answer.api_version = Some(version);
            if version == API_VERSION {
                answer.capabilities = Some(capabilities(&fd));
                answer.kind = hw_extension().map_or(HostKind::SoftwareKvm, HostKind::Hardware);
            } else {
                answer.kind = HostKind::Unusable(UnusableReason::UnsupportedApi { version });
            }
        }
    }
    answer
}

pub(super) fn open_device() -> Result<kvm_ioctls::Kvm, UnusableReason> {
    kvm_ioctls::Kvm::new().map_err(why_unusable)
}

fn why_unusable(error: errno::Error) -> UnusableReason {
    let device = PathBuf::from(DEVICE);
    match error.errno() {
        // ENXIO and ENODEV: a device node whose driver is not loaded.
        libc::ENOENT | libc::ENXIO | libc::ENODEV => UnusableReason::NoDevice { device },
        libc::EACCES | libc::EPERM => UnusableReason::PermissionDenied {
            device,
            hint: "add yourself to group kvm (`sudo usermod -aG kvm $USER`) and log in again"
                .to_owned(),
        },
        _ => UnusableReason::Other {
            message: format!("opening {DEVICE} failed: {}", std::io::Error::from(error)),
        },
    }
}

/// The CPU's extension as the kernel sees it: it clears the flag when the firmware disabled it.
/// Where `/proc` cannot be read, the CPU is asked.
fn hw_extension() -> Option<HwExtension> {
    // One processor's block, in one call.
    let mut text = String::with_capacity(8192);
    match File::open("/proc/cpuinfo").map(|f| f.take(CPUINFO_CAP).read_to_string(&mut text)) {
        Ok(Ok(_)) => from_cpuinfo(&text),
        _ => from_cpuid(),
    }
}

fn from_cpuinfo(text: &str) -> Option<HwExtension> {
    let flags = text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == "flags").then_some(value)
    })?;
    flags.split_whitespace().find_map(|flag| match flag {
        "vmx" => Some(HwExtension::Vmx),
        "svm" => Some(HwExtension::Svm),
        _ => None,
    })
}

fn from_cpuid() -> Option<HwExtension> {
    use std::arch::x86_64::__cpuid;
    const VMX: u32 = 1 << 5;
    const SVM: u32 = 1 << 2;
    if __cpuid(1).ecx & VMX != 0 {
        Some(HwExtension::Vmx)
    } else if __cpuid(0x8000_0000).eax > 0x8000_0000 && __cpuid(0x8000_0001).ecx & SVM != 0 {
        Some(HwExtension::Svm)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_line_decides_between_hardware_and_software() {
        let intel = "processor\t: 0\nflags\t\t: fpu vme vmx ssse3\nvmx flags\t: vnmi\n";
        let amd = "processor\t: 0\nflags\t\t: fpu svm lm\n";
        // No "vmx" flag, but a line and a word that contain it.
        let none = "model name\t: vmx svm\nflags\t\t: fpu novmx svm_lock lm\n";
        assert_eq!(from_cpuinfo(intel), Some(HwExtension::Vmx));
        assert_eq!(from_cpuinfo(amd), Some(HwExtension::Svm));
        assert_eq!(from_cpuinfo(none), None);
        assert_eq!(from_cpuinfo(""), None);
    }

    #[test]
    fn each_way_of_not_opening_gets_its_own_reason() {
        let reason = |code| why_unusable(errno::Error::new(code));
        assert!(matches!(
            reason(libc::ENOENT),
            UnusableReason::NoDevice { .. }
        ));
        assert!(matches!(
            reason(libc::ENXIO),
            UnusableReason::NoDevice { .. }
        ));
        assert!(matches!(reason(libc::EMFILE), UnusableReason::Other { .. }));
        let UnusableReason::PermissionDenied { device, hint } = reason(libc::EACCES) else {
            panic!("EACCES is a matter of permission");
        };
        assert_eq!(device, PathBuf::from("/dev/kvm"));
        assert!(hint.contains("group kvm"), "{hint}");
    }

    #[test]
    fn the_probe_agrees_with_opening() {
        let probe = probe();
        match (&probe.kind, super::super::Kvm::open()) {
            (HostKind::Unusable(_), Err(_)) => {}
            (HostKind::Hardware(_) | HostKind::SoftwareKvm, Ok(_)) => {
                assert_eq!(probe.api_version, Some(API_VERSION));
                assert!(probe.capabilities.is_some_and(|c| c.max_vcpus >= 1));
            }
            (kind, opened) => panic!("{kind:?}, but opening gave {:?}", opened.err()),
        }
    }
}
