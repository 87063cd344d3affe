//! Which engine runs a machine, and what this host offers.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use bantam_hypervisor::{HostKind, HwExtension};

use crate::VmmError;

/// Set to `1`, it has the native engine taken on a software KVM, too. Linux does not boot there, but
/// everything up to the first guest instruction can be measured on the real CPU.
const SOFTWARE_KVM_VARIABLE: &str = "BANTAM_SOFTWARE_KVM";

/// An engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// Our own monitor on the host's hypervisor.
    Native,
    /// QEMU's TCG as the CPU, our devices.
    Emulated,
}

impl EngineKind {
    /// The engine's name on the command line and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Emulated => "emulated",
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which engine a caller wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// The best one that works on this host.
    #[default]
    Auto,
    /// This one or an error.
    Only(EngineKind),
}

impl FromStr for EngineChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "native" => Ok(Self::Only(EngineKind::Native)),
            "emulated" => Ok(Self::Only(EngineKind::Emulated)),
            other => Err(format!(
                "unknown engine '{other}': use native, emulated or auto"
            )),
        }
    }
}

/// Whether an engine can run a guest here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// It can; the text says with what, such as `KVM (svm)` or QEMU's path.
    Ready(String),
    /// It cannot; the text says why and what would help.
    Unusable(String),
}

/// What this host offers, engine by engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineReport {
    /// The native engine.
    pub native: Availability,
    /// The emulated engine.
    pub emulated: Availability,
}

/// Asks the host what it offers. Never runs guest code, never blocks.
#[must_use]
pub fn probe_engines() -> EngineReport {
    EngineReport {
        native: probe_native(),
        emulated: probe_emulated(),
    }
}

/// The engine that a choice means here. What is not needed to know it is not looked for.
pub(crate) fn choose(choice: EngineChoice) -> Result<EngineKind, VmmError> {
    let wants_native = choice != EngineChoice::Only(EngineKind::Emulated);
    if wants_native && matches!(probe_native(), Availability::Ready(_)) {
        return Ok(EngineKind::Native);
    }
    probe_engines().select(choice)
}

fn probe_native() -> Availability {
    let probe = bantam_hypervisor::probe();
    match probe.kind {
        HostKind::Hardware(HwExtension::Vmx) => Availability::Ready("KVM on Intel VT-x".to_owned()),
        HostKind::Hardware(HwExtension::Svm) => Availability::Ready("KVM on AMD-V".to_owned()),
        HostKind::SoftwareKvm if std::env::var_os(SOFTWARE_KVM_VARIABLE).is_some_and(|v| v == "1") => {
            Availability::Ready("software KVM, on which Linux does not boot".to_owned())
        }
        HostKind::SoftwareKvm => Availability::Unusable(
            "this host's KVM is software (the CPU shows neither VT-x nor AMD-V), on which Linux does not boot"
                .to_owned(),
        ),
        HostKind::Unusable(reason) => Availability::Unusable(reason.to_string()),
    }
}

fn probe_emulated() -> Availability {
    match emulator() {
        Ok(path) => Availability::Ready(path.display().to_string()),
        Err(reason) => Availability::Unusable(reason),
    }
}

/// The program that the emulated engine starts: QEMU, from `$BANTAM_QEMU` or the `PATH`.
///
/// # Errors
/// Why there is none, and how to get it.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub fn emulator() -> Result<PathBuf, String> {
    crate::emulated::find_qemu()
}

/// The program that the emulated engine starts: none on this platform yet.
///
/// # Errors
/// Always.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
pub fn emulator() -> Result<PathBuf, String> {
    Err("not supported on this platform yet".to_owned())
}

impl EngineReport {
    /// The engine that a choice means on this host.
    ///
    /// # Errors
    /// [`VmmError::EngineUnavailable`] or [`VmmError::NoEngine`], saying what is missing.
    pub fn select(&self, choice: EngineChoice) -> Result<EngineKind, VmmError> {
        match choice {
            EngineChoice::Only(kind) => match self.availability(kind) {
                Availability::Ready(_) => Ok(kind),
                Availability::Unusable(reason) => Err(VmmError::EngineUnavailable {
                    engine: kind.name(),
                    reason: reason.clone(),
                }),
            },
            EngineChoice::Auto => match (&self.native, &self.emulated) {
                (Availability::Ready(_), _) => Ok(EngineKind::Native),
                (_, Availability::Ready(_)) => Ok(EngineKind::Emulated),
                (Availability::Unusable(native), Availability::Unusable(emulated)) => Err(
                    VmmError::NoEngine(format!("native: {native}; emulated: {emulated}")),
                ),
            },
        }
    }

    /// Whether `kind` works here.
    #[must_use]
    pub fn availability(&self, kind: EngineKind) -> &Availability {
        match kind {
            EngineKind::Native => &self.native,
            EngineKind::Emulated => &self.emulated,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(native: bool, emulated: bool) -> EngineReport {
        let availability = |ready| match ready {
            true => Availability::Ready("here".to_owned()),
            false => Availability::Unusable("install it".to_owned()),
        };
        EngineReport {
            native: availability(native),
            emulated: availability(emulated),
        }
    }

    #[test]
    fn auto_takes_the_native_engine_where_it_works() {
        let select = |n, e| report(n, e).select(EngineChoice::Auto).ok();
        assert_eq!(select(true, true), Some(EngineKind::Native));
        assert_eq!(select(true, false), Some(EngineKind::Native));
        assert_eq!(select(false, true), Some(EngineKind::Emulated));
        assert_eq!(select(false, false), None);
    }

    #[test]
    fn an_engine_asked_for_by_name_is_never_replaced_by_another() {
        let error = report(false, true)
            .select(EngineChoice::Only(EngineKind::Native))
            .unwrap_err();
        assert!(error.to_string().contains("install it"), "{error}");
    }

    #[test]
    fn with_no_engine_at_all_the_error_gives_both_reasons() {
        let error = report(false, false)
            .select(EngineChoice::Auto)
            .unwrap_err()
            .to_string();
        assert_eq!(error.matches("install it").count(), 2, "{error}");
    }
}
