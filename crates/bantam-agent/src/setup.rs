//! What a command expects to find in a running system. It comes after `Hello`, while
//! the host is busy with that, and before the first command is taken.

use std::fs::Permissions;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::Duration;

use bantam_protocol::Configure;
use nix::mount::MsFlags;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};
use nix::unistd::sethostname;

use crate::boot::{StepFailed, mount_at};
use crate::cgroup::{CGROUP_ROOT, CgroupRoot};
use crate::sys::net::loopback_up;
use crate::{etc, log, network};

/// Open files a process may have; databases and servers refuse to start below 65536.
const OPEN_FILES: u64 = 65_536;
const OPEN_FILES_MAX: u64 = 1_048_576;

/// Mounts and makes everything that does not depend on the host's configuration.
///
/// # Errors
/// The step that failed, if commands cannot do without.
pub(crate) fn set_up() -> Result<Option<CgroupRoot>, StepFailed> {
    let guarded = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let closed = guarded | MsFlags::MS_NOEXEC;
    let terminals = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    mount_at("proc", "/proc", "proc", closed, "")?;
    mount_at(
        "devpts",
        "/dev/pts",
        "devpts",
        terminals,
        "mode=620,ptmxmode=666,gid=5",
    )?;
    mount_at("tmpfs", "/dev/shm", "tmpfs", guarded, "mode=1777")?;
    mount_at("tmpfs", "/run", "tmpfs", guarded, "mode=755")?;
    for (target, link) in [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ] {
        tolerate(link, symlink(target, link));
    }
    tolerate("/tmp", make_tmp());
    // A kernel without these is a smaller one, not a broken one.
    if let Err(failed) = mount_at("mqueue", "/dev/mqueue", "mqueue", closed, "") {
        log(&failed.to_string());
    }
    tolerate("loopback", loopback_up().map_err(io::Error::from));
    let limits = setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES_MAX);
    tolerate("open files", limits.map_err(io::Error::from));
    Ok(cgroups())
}

/// Commands without cgroups still run; what they leave behind cannot be killed.
fn cgroups() -> Option<CgroupRoot> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let opened = mount_at("cgroup2", CGROUP_ROOT, "cgroup2", flags, "")
        .and_then(|()| CgroupRoot::open().map_err(StepFailed::at("open the cgroups")));
    opened.inspect_err(|failed| log(&failed.to_string())).ok()
}

/// `/tmp` is the image's, if it has one.
fn make_tmp() -> io::Result<()> {
    match std::fs::create_dir("/tmp") {
        Ok(()) => std::fs::set_permissions("/tmp", Permissions::from_mode(0o1777)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Applies what only the host knows.
pub(crate) fn configure(configure: &Configure) {
    set_clock(configure.wall_clock_ns);
    let hostname = configure.hostname.as_str();
    let set = sethostname(hostname);
    tolerate("host name", set.map_err(io::Error::from));
    for (path, error) in etc::configure(configure) {
        tolerate(path, Err(error));
    }
    if let Some(network) = &configure.network {
        network::set_up(network);
    }
}

/// Sets the wall clock, in nanoseconds since 1970.
pub(crate) fn set_clock(wall_clock_ns: u64) {
    let now = TimeSpec::from(Duration::from_nanos(wall_clock_ns));
    let set = clock_settime(ClockId::CLOCK_REALTIME, now);
    tolerate("wall clock", set.map_err(io::Error::from));
}

fn tolerate(what: &str, result: io::Result<()>) {
    if let Err(error) = result {
        log(&format!("{what}: {error}"));
    }
}
