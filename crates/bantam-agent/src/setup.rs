//! What a command expects to find in a running system. It comes after `Hello`, while
//! the host is busy with that, and before the first command is taken.

use std::fs::{File, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use bantam_protocol::Configure;
use nix::mount::MsFlags;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};
use nix::unistd::sethostname;

use crate::boot::{StepFailed, mount_at};
use crate::cgroup::{CGROUP_ROOT, CgroupRoot};
use crate::log;
use crate::sys::net::loopback_up;

/// Open files a process may have; databases and servers refuse to start below 65536.
const OPEN_FILES: u64 = 65_536;
const OPEN_FILES_MAX: u64 = 1_048_576;

/// Most bytes read of the image's `/etc/hosts`.
const MAX_HOSTS_LEN: u64 = 1 << 20;

/// Mounts and makes everything that does not depend on the host's configuration.
///
/// # Errors
/// The step that failed, if commands cannot do without.
pub(crate) fn set_up() -> Result<Option<CgroupRoot>, StepFailed> {
    let guarded = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let closed = guarded | MsFlags::MS_NOEXEC;
    let terminals = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    mount_at("proc", "/proc", "proc", closed, "")?;
    mount_at("sysfs", "/sys", "sysfs", closed, "")?;
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
    tolerate("/etc/machine-id", provide_machine_id());
    let hostname = configure.hostname.as_str();
    let set = sethostname(hostname);
    tolerate("host name", set.map_err(io::Error::from));
    tolerate(
        "/etc/hostname",
        provide("/etc/hostname", &format!("{hostname}\n")),
    );
    let current = read_hosts();
    if let Some(hosts) = hosts_with(&current, hostname) {
        tolerate("/etc/hosts", provide("/etc/hosts", &hosts));
    }
    // It must be there; there is no name server to put in.
    if !Path::new("/etc/resolv.conf").exists() {
        tolerate("/etc/resolv.conf", provide("/etc/resolv.conf", ""));
    }
}

/// Sets the wall clock, in nanoseconds since 1970.
pub(crate) fn set_clock(wall_clock_ns: u64) {
    let now = TimeSpec::from(Duration::from_nanos(wall_clock_ns));
    let set = clock_settime(ClockId::CLOCK_REALTIME, now);
    tolerate("wall clock", set.map_err(io::Error::from));
}

/// Gives the machine an identity of its own, unless it has one already: its disk may keep it.
fn provide_machine_id() -> io::Result<()> {
    const FILE: &str = "/etc/machine-id";
    // What images ship for first boots: nothing, an empty file, or this word.
    match std::fs::read(FILE) {
        Ok(id) if !matches!(id.trim_ascii(), b"" | b"uninitialized") => return Ok(()),
        _ => {}
    }
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    provide(FILE, &machine_id(&uuid))
}

/// A random UUID as machine-id(5) writes it.
fn machine_id(uuid: &str) -> String {
    uuid.chars()
        .filter(char::is_ascii_hexdigit)
        .chain(['\n'])
        .collect()
}

fn read_hosts() -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open("/etc/hosts") {
        let _ = file.take(MAX_HOSTS_LEN).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The hosts file in which `hostname` resolves; `None` if `current` is one.
fn hosts_with(current: &str, hostname: &str) -> Option<String> {
    let mut hosts = current.to_owned();
    if current.trim().is_empty() {
        hosts = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n".to_owned();
    }
    let resolves = hosts
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default())
        .any(|line| line.split_whitespace().skip(1).any(|name| name == hostname));
    let wanted = !resolves && !hostname.is_empty();
    if !wanted && hosts == current {
        return None;
    }
    if wanted {
        if !hosts.ends_with('\n') {
            hosts.push('\n');
        }
        hosts.push_str("127.0.1.1\t");
        hosts.push_str(hostname);
        hosts.push('\n');
    }
    Some(hosts)
}

/// Writes a file of `/etc`, which the image may lack, or have as a link to nowhere.
fn provide(path: &str, content: &str) -> io::Result<()> {
    match std::fs::write(path, content) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            match std::fs::create_dir("/etc") {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    std::fs::remove_file(path)?;
                }
                result => result?,
            }
            std::fs::write(path, content)
        }
        result => result,
    }
}

fn tolerate(what: &str, result: io::Result<()>) {
    if let Err(error) = result {
        log(&format!("{what}: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_id_is_32_lower_case_digits() {
        let id = machine_id("01234567-89ab-cdef-0123-456789abcdef\n");
        assert_eq!(id, "0123456789abcdef0123456789abcdef\n");
    }

    #[test]
    fn the_host_name_resolves_whatever_hosts_file_the_image_has() {
        let made = hosts_with("", "box").unwrap();
        assert!(made.contains("127.0.0.1\tlocalhost\n") && made.contains("127.0.1.1\tbox\n"));
        let added = hosts_with("127.0.0.1 localhost", "box").unwrap();
        assert_eq!(added, "127.0.0.1 localhost\n127.0.1.1\tbox\n");
        let commented = hosts_with("10.0.0.1 other # box\n", "box").unwrap();
        assert!(commented.ends_with("127.0.1.1\tbox\n"));
        assert_eq!(hosts_with("10.0.0.1 a box b\n", "box"), None);
        assert_eq!(hosts_with("10.0.0.1 a\n", ""), None);
    }
}
