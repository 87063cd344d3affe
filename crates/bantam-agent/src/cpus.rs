//! The machine's further CPUs. The kernel boots on one (`maxcpus=1`): with more it would stop
//! all of them for every patch of its own code and wait for each other's locks, which takes
//! several times what bringing them up costs at the end of the boot.

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::write;

use crate::log;

/// More than a kernel of any machine of ours has (`CONFIG_NR_CPUS`).
const MAX_CPUS: u32 = 1024;

/// Brings up every CPU that the kernel left. A machine with fewer than it was given still
/// works, so what fails is only told.
pub(crate) fn bring_up() {
    for cpu in 1..MAX_CPUS {
        // The first CPU has no such file, and cannot be switched.
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        let flags = OFlag::O_WRONLY | OFlag::O_CLOEXEC;
        match open(path.as_str(), flags, Mode::empty()).and_then(|file| write(&file, b"1")) {
            Ok(_) => {}
            Err(Errno::ENOENT) => return,
            Err(error) => log(&format!("bring up CPU {cpu}: {}", error.desc())),
        }
    }
}
