//! What a host offers: plain data, for `doctor`, for choosing an engine and for error texts.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Capabilities;

/// The answer of [`probe`](crate::probe).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostProbe {
    /// The backend that was asked, `"kvm"`; `"none"` where this build has no backend.
    pub backend: String,
    /// The device file that was opened, where the backend has one.
    pub device: Option<PathBuf>,
    /// The interface's version (KVM: 12), if the device opened.
    pub api_version: Option<i32>,
    /// What can be expected of it.
    pub kind: HostKind,
    /// What it can do, if the device opened.
    pub capabilities: Option<Capabilities>,
}

impl HostProbe {
    /// Whether ordinary guests run at the CPU's own speed here.
    pub fn is_hardware(&self) -> bool {
        matches!(self.kind, HostKind::Hardware(_))
    }
}

/// What can be expected of the host's hypervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostKind {
    /// Guests run on the CPU's virtualization extension.
    Hardware(HwExtension),
    /// `/dev/kvm` opens although the CPU shows no virtualization extension: guest kernel code is
    /// interpreted, some instructions are missing, and an ordinary Linux does not boot.
    SoftwareKvm,
    /// Nothing usable, and why.
    Unusable(UnusableReason),
}

/// A CPU's virtualization extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HwExtension {
    /// Intel VT-x.
    Vmx,
    /// AMD-V.
    Svm,
}

/// Why a host has no usable hypervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnusableReason {
    /// The device file does not exist: no virtualization extension, disabled in the firmware, not
    /// passed into this container, or the module is not loaded.
    NoDevice {
        /// The path that was tried.
        device: PathBuf,
    },
    /// The device file exists but this user may not open it.
    PermissionDenied {
        /// The path that was tried.
        device: PathBuf,
        /// What usually helps.
        hint: String,
    },
    /// The device answers with an interface that bantam does not know.
    UnsupportedApi {
        /// The version it reports.
        version: i32,
    },
    /// This build of bantam has no backend for this platform.
    NoBackend,
    /// Anything else, in the system's words.
    Other {
        /// The system's message.
        message: String,
    },
}

impl fmt::Display for UnusableReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice { device } => write!(f, "{} does not exist", device.display()),
            Self::PermissionDenied { device, hint } => {
                write!(f, "no permission to open {}: {hint}", device.display())
            }
            Self::UnsupportedApi { version } => {
                write!(f, "the KVM interface has version {version}, not 12")
            }
            Self::NoBackend => write!(f, "this platform has no hypervisor backend"),
            Self::Other { message } => f.write_str(message),
        }
    }
}
