//! What can go wrong between a configuration and a running guest.

use std::io;
use std::path::PathBuf;

/// Failures of one virtual machine. Each message starts with what failed and names the thing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmmError {
    /// A value of the configuration is out of range.
    #[error("invalid machine configuration: {0}")]
    Config(String),
    /// A file that the machine needs cannot be opened or mapped.
    #[error("cannot open {what} {}", path.display())]
    File {
        /// What the file is for, such as `kernel`.
        what: &'static str,
        /// Where it was looked for.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// No engine can run a guest on this host.
    #[error("no engine can run a machine here: {0}")]
    NoEngine(String),
    /// The engine that was asked for cannot run a guest on this host.
    #[error("the {engine} engine cannot run a machine here: {reason}")]
    EngineUnavailable {
        /// The engine's name.
        engine: &'static str,
        /// Why, and what would help.
        reason: String,
    },
    /// The host gave no memory for the guest.
    #[error("cannot reserve {mib} MiB of guest memory: {reason}")]
    Memory {
        /// The size asked for, in MiB.
        mib: u32,
        /// The reason, in the words of the layer below.
        reason: String,
    },
    /// The hypervisor refused an operation.
    #[error("hypervisor: {0}")]
    Hypervisor(#[from] bantam_hypervisor::HypervisorError),
    /// The kernel file is not one that can be booted.
    #[error("cannot boot kernel {}", path.display())]
    Kernel {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: bantam_arch::ArchError,
    },
    /// The kernel could not be loaded or the boot state not be built.
    #[error("boot: {0}")]
    Boot(#[from] bantam_arch::ArchError),
    /// A device could not be created or wired.
    #[error("device {device}: {reason}")]
    Device {
        /// The device's name.
        device: &'static str,
        /// Why.
        reason: String,
    },
    /// The machine's network cannot be had: a rule, a setting, or a port of the host that is taken.
    #[error(transparent)]
    Network(#[from] bantam_net::Error),
    /// An operating system call failed.
    #[error("{what}")]
    Io {
        /// What was attempted.
        what: &'static str,
        /// The operating system's reason.
        source: io::Error,
    },
}

impl VmmError {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }

    pub(crate) fn device(device: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Device {
            device,
            reason: error.to_string(),
        }
    }
}
