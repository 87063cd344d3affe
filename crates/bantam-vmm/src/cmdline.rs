//! The guest kernel's command line.
//!
//! Only what the kernel itself needs before the agent runs stands here; everything else reaches
//! the guest over vsock, where it is neither logged nor limited to a page.

use bantam_arch::x86_64::cmdline;
use bantam_arch::x86_64::layout::MmioSlot;

use crate::VmConfig;

/// The machine's base words, one per device that the kernel cannot find by itself, the engine's
/// own, and the caller's.
pub(crate) fn build(config: &VmConfig, slots: &[MmioSlot], engine: &[&str]) -> String {
    let mut words = vec![cmdline::base(u32::from(config.cpus), slots)];
    words.extend(engine.iter().map(ToString::to_string));
    words.extend(config.extra_cmdline.clone());
    words.join(" ")
}
