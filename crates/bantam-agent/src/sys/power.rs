//! How this processor's virtual machine is switched off.

use nix::sys::reboot::{RebootMode, reboot};

/// There is no ACPI to power off with. A reset by triple fault (the kernel is started
/// with `reboot=t`) is what the virtual machine monitor takes as the end.
#[cfg(target_arch = "x86_64")]
const OFF: RebootMode = RebootMode::RB_AUTOBOOT;

/// PSCI SYSTEM_OFF.
#[cfg(not(target_arch = "x86_64"))]
const OFF: RebootMode = RebootMode::RB_POWER_OFF;

/// Ends the virtual machine at once. It returns only if the kernel refuses.
pub(crate) fn off() {
    let _ = reboot(OFF);
}
