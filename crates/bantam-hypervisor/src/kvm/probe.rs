//! What this host's KVM is good for, without creating a virtual machine.

use std::path::PathBuf;

use vmm_sys_util::errno;

use super::{DEVICE, capabilities};
use crate::{HostKind, HostProbe, HwExtension, UnusableReason};

/// The only version that ever was (`KVM_API_VERSION`).
pub(super) const API_VERSION: i32 = 12;

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

/// The CPU's extension, by its own word. `/proc/cpuinfo` would say whether the firmware left it on, but
/// then there is no hardware KVM, and a text of all of the host's CPUs takes longer than making a machine.
fn hw_extension() -> Option<HwExtension> {
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
