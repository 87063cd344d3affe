//! What the process of a machine reaches on its host.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use super::dir::MachineDir;
use super::ipc::StartRequest;
use crate::confine::{Grant, Right};

/// Where systems keep their programs and libraries: QEMU, and what it loads.
const SYSTEM: [&str; 9] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt",
    "/nix/store",
    "/gnu/store",
];

/// What describes the host: settings of the resolver, certificates, processors, this process.
const SETTINGS: [&str; 3] = ["/etc", "/proc", "/sys"];

const DEVICES: [&str; 5] = [
    "/dev/kvm",
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
];

/// All that the process of the machine in `dir` needs. It takes no other machine's files, nobody's
/// home, no secrets of its user.
pub(super) fn grants(dir: &MachineDir, request: &StartRequest, ephemeral: bool) -> Vec<Grant> {
    let mut grants = vec![
        Grant::new(Right::Own, dir.path()),
        Grant::new(Right::Read, request.home.images()),
        Grant::new(Right::Read, &request.kernel),
        Grant::new(Right::Read, &request.initramfs),
    ];
    if ephemeral {
        // It removes itself at its end.
        grants.push(Grant::new(Right::Remove, request.home.machines()));
        grants.push(Grant::new(
            Right::Remove,
            request.home.images().join("pins"),
        ));
    }
    let of = |right, paths: &[&str]| -> Vec<_> {
        paths.iter().map(|path| Grant::new(right, path)).collect()
    };
    grants.extend(of(Right::Run, &SYSTEM));
    grants.extend(of(Right::Read, &SETTINGS));
    grants.extend(of(Right::Device, &DEVICES));
    grants.extend(resolver_settings().map(|path| Grant::new(Right::Read, path)));
    if let Some(bundle) = env::var_os("SSL_CERT_FILE") {
        grants.push(Grant::new(Right::Read, bundle));
    }
    if let Ok(program) = bantam_vmm::emulator() {
        grants.extend(program_of_its_own(&program));
    }
    grants
}

/// The directory that `/etc/resolv.conf` is really in: it is replaced there when the host's network
/// changes.
fn resolver_settings() -> Option<PathBuf> {
    let file = fs::canonicalize("/etc/resolv.conf").ok()?;
    Some(file.parent()?.to_path_buf())
}

/// QEMU where its user has put it, and the libraries and data beside it.
fn program_of_its_own(program: &Path) -> Vec<Grant> {
    let real = fs::canonicalize(program).unwrap_or_else(|_| program.to_path_buf());
    let mut paths = Vec::new();
    for program in [program, &real] {
        let Some(dir) = program.parent() else {
            continue;
        };
        paths.push(program.to_path_buf());
        if dir.file_name() == Some(OsStr::new("bin"))
            && let Some(prefix) = dir.parent()
        {
            paths.extend(["lib", "lib64", "libexec", "share"].map(|name| prefix.join(name)));
        }
    }
    paths
        .into_iter()
        .map(|path| Grant::new(Right::Run, path))
        .collect()
}
