//! Files of `/etc` that say who the guest is and whom it asks for names. Images have them stale,
//! empty, as links to what another system would make, or not at all.

use std::fmt::Write as _;
use std::fs::{OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read};
use std::net::IpAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use bantam_protocol::{Configure, GuestNetwork};
use nix::fcntl::OFlag;

/// Most bytes read of a file of the image's.
const MAX_LEN: u64 = 1 << 20;

const MACHINE_ID: &str = "/etc/machine-id";

/// Ends the lines of `/etc/hosts` that are ours to replace.
const OURS: &str = "# bantam";

/// Writes `/etc/hostname`, `/etc/hosts`, `/etc/resolv.conf` and, if there is none, `/etc/machine-id`;
/// gives what failed.
pub(crate) fn configure(configure: &Configure) -> Vec<(&'static str, io::Error)> {
    let hostname = configure.hostname.as_str();
    let current = read(Path::new("/etc/hosts")).unwrap_or_default();
    let current = String::from_utf8_lossy(&current).into_owned();
    let names = configure
        .network
        .as_ref()
        .map_or(&[][..], |network| &network.hosts);
    let hosts = hosts_with(&current, hostname, names);
    let resolv_conf = match &configure.network {
        Some(network) => Some(resolv_conf(network)),
        // It must be there; there is no name server to put in.
        None => (!Path::new("/etc/resolv.conf").exists()).then(String::new),
    };
    let files = [
        ("/etc/hostname", Some(format!("{hostname}\n"))),
        ("/etc/hosts", (hosts != current).then_some(hosts)),
        ("/etc/resolv.conf", resolv_conf),
    ];
    let written = files
        .into_iter()
        .filter_map(|(path, content)| Some((path, provide(Path::new(path), &content?))));
    written
        .chain([(MACHINE_ID, provide_machine_id(Path::new(MACHINE_ID)))])
        .filter_map(|(path, result)| Some((path, result.err()?)))
        .collect()
}

/// What is in a file, up to [`MAX_LEN`]. There may be anything in its place: opening a pipe must not
/// wait for its other end, and a device may have no end.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits())
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(ErrorKind::InvalidInput.into());
    }
    let mut bytes = Vec::new();
    file.take(MAX_LEN).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// `current` with lines for `localhost` and `hostname`, if they do not resolve, and with `names`
/// instead of those that an earlier start put in.
fn hosts_with(current: &str, hostname: &str, names: &[(IpAddr, String)]) -> String {
    let mut hosts: String = current
        .split_inclusive('\n')
        .filter(|line| !line.trim_end().ends_with(OURS))
        .collect();
    let resolves = |name: &str| {
        hosts
            .lines()
            .map(|line| line.split('#').next().unwrap_or_default())
            .any(|line| line.split_whitespace().skip(1).any(|known| known == name))
    };
    let mut lines = String::new();
    if !resolves("localhost") {
        lines.push_str("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    }
    if !resolves(hostname) && !hostname.is_empty() {
        // Writing to a string cannot fail.
        let _ = writeln!(lines, "127.0.1.1\t{hostname}");
    }
    for (address, name) in names {
        let _ = writeln!(lines, "{address}\t{name}\t{OURS}");
    }
    if !lines.is_empty() && !hosts.is_empty() && !hosts.ends_with('\n') {
        hosts.push('\n');
    }
    hosts.push_str(&lines);
    hosts
}

/// Gives the machine an identity of its own, unless it has one already: its disk may keep it.
fn provide_machine_id(path: &Path) -> io::Result<()> {
    // What images ship for first boots: nothing, an empty file, or this word.
    match read(path) {
        Ok(id) if !matches!(id.trim_ascii(), b"" | b"uninitialized") => return Ok(()),
        _ => {}
    }
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    provide(path, &machine_id(&uuid))
}

/// A random UUID as machine-id(5) writes it.
fn machine_id(uuid: &str) -> String {
    uuid.chars()
        .filter(char::is_ascii_hexdigit)
        .chain(['\n'])
        .collect()
}

/// resolv.conf(5).
fn resolv_conf(network: &GuestNetwork) -> String {
    let mut text = String::new();
    for server in &network.name_servers {
        let _ = writeln!(text, "nameserver {server}");
    }
    if !network.search.is_empty() {
        let _ = writeln!(text, "search {}", network.search.join(" "));
    }
    text
}

/// Makes `path` a file with `content` that everybody may read. A link is replaced, not followed:
/// where it leads, if anywhere, is somebody else's. So is an empty directory, which is what is left
/// where something was mounted when the image was made, and whatever else is no file.
fn provide(path: &Path, content: &str) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(there) if there.is_dir() => std::fs::remove_dir(path)?,
        Ok(there) if !there.is_file() => std::fs::remove_file(path)?,
        _ => {}
    }
    let written = match std::fs::write(path, content) {
        Err(error) if error.kind() == ErrorKind::NotFound => path
            .parent()
            .map_or(Err(error), std::fs::create_dir)
            .and_then(|()| std::fs::write(path, content)),
        result => result,
    };
    written.and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(0o644)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_machine_id_is_32_lower_case_digits() {
        let id = machine_id("01234567-89ab-cdef-0123-456789abcdef\n");
        assert_eq!(id, "0123456789abcdef0123456789abcdef\n");
    }

    #[test]
    fn the_host_name_resolves_whatever_hosts_file_the_image_has() {
        let made = hosts_with("", "box", &[]);
        assert!(made.contains("127.0.0.1\tlocalhost\n") && made.contains("127.0.1.1\tbox\n"));
        let added = hosts_with("127.0.0.1 localhost", "box", &[]);
        assert_eq!(added, "127.0.0.1 localhost\n127.0.1.1\tbox\n");
        let commented = hosts_with("10.0.0.1 other # box\n", "box", &[]);
        assert!(commented.ends_with("127.0.1.1\tbox\n"));
        for same in ["::1 localhost a box b\n", "::1 box localhost"] {
            assert_eq!(hosts_with(same, "box", &[]), same);
        }
        assert_eq!(hosts_with("::1 localhost\n", "", &[]), "::1 localhost\n");
        let without = hosts_with("10.0.0.1 a # localhost", "", &[]);
        assert!(
            without.starts_with("10.0.0.1 a # localhost\n127.0.0.1\tlocalhost\n"),
            "{without}"
        );
    }

    #[test]
    fn names_of_an_earlier_start_are_replaced() {
        let names = |address: &str| [(address.parse().unwrap(), "host.internal".to_owned())];
        let first = hosts_with("127.0.0.1 localhost box\n", "box", &names("10.0.0.1"));
        assert_eq!(
            first,
            "127.0.0.1 localhost box\n10.0.0.1\thost.internal\t# bantam\n"
        );
        let second = hosts_with(&first, "box", &names("fd00::1"));
        assert_eq!(
            second,
            "127.0.0.1 localhost box\nfd00::1\thost.internal\t# bantam\n"
        );
        assert_eq!(hosts_with(&second, "box", &[]), "127.0.0.1 localhost box\n");
    }

    #[test]
    fn name_servers_and_search_domains_are_told() {
        let network = GuestNetwork {
            name_servers: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            search: vec!["a.example".into(), "b.example".into()],
            ..GuestNetwork::default()
        };
        assert_eq!(
            resolv_conf(&network),
            "nameserver 10.0.0.1\nnameserver fd00::1\nsearch a.example b.example\n"
        );
    }

    #[test]
    fn a_file_is_right_whatever_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let etc = dir.path().join("etc");
        let file = etc.join("resolv.conf");
        let target = dir.path().join("target");
        let check = || {
            provide(&file, "nameserver ::1\n").unwrap();
            assert_eq!(std::fs::read_to_string(&file).unwrap(), "nameserver ::1\n");
            let metadata = std::fs::symlink_metadata(&file).unwrap();
            assert!(metadata.is_file());
            assert_eq!(metadata.permissions().mode() & 0o777, 0o644);
        };
        // No directory; there already; a link to nowhere; a link to a file; not for everybody; a
        // directory with nothing in it.
        check();
        check();
        std::fs::remove_file(&file).unwrap();
        symlink("../run/systemd/resolve/stub-resolv.conf", &file).unwrap();
        check();
        std::fs::write(&target, "other").unwrap();
        std::fs::remove_file(&file).unwrap();
        symlink(&target, &file).unwrap();
        check();
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "other");
        std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        check();
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        check();
        // A pipe that nobody reads, and a socket.
        std::fs::remove_file(&file).unwrap();
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(read(&file).is_err());
        check();
        std::fs::remove_file(&file).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(&file).unwrap();
        check();
    }

    #[test]
    fn a_file_without_end_is_not_read_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("machine-id");
        std::fs::File::create(&file)
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        assert_eq!(read(&file).unwrap().len() as u64, MAX_LEN);
        assert!(read(Path::new("/dev/zero")).is_err());
        // It is some identity, and the image's own.
        provide_machine_id(&file).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().len(), 1 << 40);
    }
}
