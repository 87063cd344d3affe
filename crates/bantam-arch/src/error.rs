//! The crate's error type.

use std::io;
use std::path::PathBuf;

use bantam_hypervisor::HypervisorError;

/// What can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
pub enum ArchError {
    /// The kernel file cannot be read.
    #[error("reading kernel {} failed", path.display())]
    KernelFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The kernel is in a format that is not supported, or it is damaged.
    #[error("loading the kernel failed: {what}")]
    Kernel {
        /// What is wrong with it.
        what: String,
    },
    /// Something does not fit into the guest's memory.
    #[error("{what} at {addr:#x} ({len:#x} bytes) does not fit into guest memory")]
    Memory {
        /// What was to be placed.
        what: &'static str,
        /// Guest-physical address.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// A limit of the boot protocol or of the layout is exceeded.
    #[error("{what} is {value}, and at most {limit} is possible")]
    Limit {
        /// What is too large.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The largest possible value.
        limit: u64,
    },
    /// The kernel command line contains a byte that would end or split it.
    #[error("the kernel command line contains a control character at byte {0}")]
    CommandLine(usize),
    /// The initial ramdisk cannot be read.
    #[error("reading the initial ramdisk failed")]
    Initrd(#[source] io::Error),
    /// A vCPU could not be set up.
    #[error("setting up vCPU {id} failed")]
    Vcpu {
        /// The vCPU.
        id: u32,
        /// What the hypervisor said.
        #[source]
        source: HypervisorError,
    },
}
