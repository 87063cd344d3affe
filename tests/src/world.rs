//! A small internet: network namespaces in which a test's machine, its host and the servers it
//! speaks to live. There is no way out of them, so no test can reach a real address.

#![allow(unsafe_code)] // unshare(2)

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;

use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::netlink::Netlink;
use crate::{Setup, TestHome, setup, skip};

/// The addresses of the servers' side. Those of [`World::PUBLIC`] are somebody's in the real
/// internet, since the policy must take them for public.
const INTERNET: &[&str] = &[
    // Public.
    "9.9.9.9",
    "9.9.9.10",
    "9.9.9.11",
    "9.9.9.12",
    "2620:fe::9",
    "2620:fe::10",
    // A network behind the host's.
    "10.55.0.1",
    "172.20.0.1",
    "fd99::1",
    // A carrier's, a neighbour without DHCP, and a cloud's credentials.
    "100.64.0.7",
    "169.254.7.7",
    "169.254.169.254",
    "fd00:ec2::254",
];

/// A test's namespaces: "the host", in which the test, its machines and the program run, with one
/// cable to "the internet", in which nothing but the test's servers is.
pub struct World {
    /// For machines of the image with network clients.
    pub home: TestHome,
    internet: File,
    root: OnceLock<PathBuf>,
}

impl World {
    /// A public server.
    pub const PUBLIC: &'static str = "9.9.9.9";
    /// A public server by IPv6.
    pub const PUBLIC_V6: &'static str = "2620:fe::9";
    /// The host on its network.
    pub const HOST: &'static str = "192.168.77.2";
    /// The host on its network, by IPv6.
    pub const HOST_V6: &'static str = "fd77::2";
    /// An address of the host that looks like anybody's.
    pub const HOST_PUBLIC: &'static str = "9.9.8.2";
    /// The host's router, and a server on its network.
    pub const ROUTER: &'static str = "192.168.77.1";
    /// The same by IPv6.
    pub const ROUTER_V6: &'static str = "fd77::1";

    /// Runs a test in a world of its own, or says why not.
    ///
    /// # Panics
    /// If the test does, or the world cannot be made although the process may.
    pub fn run(test: &str, body: impl FnOnce(&World) + Send) {
        let Some(setup) = setup(test) else { return };
        let Some(image) = std::env::var_os("BANTAM_E2E_NETWORK_IMAGE") else {
            let why = "BANTAM_E2E_NETWORK_IMAGE is not set (run `cargo xtask test`)";
            return skip(test, why);
        };
        if !rustix::process::geteuid().is_root() {
            return skip(test, "making network namespaces needs root");
        }
        let setup = Setup {
            image: image.into(),
            ..setup
        };
        // Namespaces are a thread's, and of what the thread starts.
        let run = || {
            let internet = make_namespaces()
                .unwrap_or_else(|error| panic!("making network namespaces: {error}"));
            assert_no_way_out();
            let world = World {
                home: TestHome::with(setup, "home", "network"),
                internet,
                root: OnceLock::new(),
            };
            body(&world);
        };
        let ended = thread::scope(|scope| scope.spawn(run).join());
        if let Err(panic) = ended {
            std::panic::resume_unwind(panic);
        }
    }

    /// Does something in the internet, such as making a socket or starting a process, which then
    /// is there.
    ///
    /// # Panics
    /// If `body` does.
    pub fn internet<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        let run = || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(self.internet.as_fd(), kind)
                .unwrap_or_else(|error| panic!("moving into the internet: {error}"));
            body()
        };
        let ended = thread::scope(|scope| scope.spawn(run).join());
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// The image's file system, mounted for programs of it that run in the internet; its `/tmp`
    /// can be written to.
    ///
    /// # Panics
    /// If it cannot be mounted.
    pub fn root(&self) -> &Path {
        self.root.get_or_init(|| {
            let image = find(&self.home.path().join("images"), "rootfs.erofs")
                .unwrap_or_else(|| panic!("no image in the store"));
            // Not in the home's directory, which is removed with what is in it.
            let root = tempfile::Builder::new()
                .prefix("bantam-e2e-root-")
                .tempdir();
            let root = root.unwrap_or_else(|error| panic!("making a directory: {error}"));
            let root = root.keep();
            let mounted = Command::new("mount")
                .args(["-t", "erofs", "-o", "ro,loop"])
                .args([&image, &root])
                .output();
            assert!(
                mounted.as_ref().is_ok_and(|out| out.status.success()),
                "mounting the image: {mounted:?}"
            );
            mount(
                "tmpfs",
                root.join("tmp"),
                "tmpfs",
                MountFlags::empty(),
                None,
            )
            .unwrap_or_else(|error| panic!("mounting into the image: {error}"));
            root
        })
    }

    /// A command of the image, to be run by this host's kernel.
    #[must_use]
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new("chroot");
        command.arg(self.root()).args(args);
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Starts a server of the image in the internet. It ends with the value, or with the test's
    /// process.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn serve(&self, args: &[&str]) -> Server {
        let script = "\"$@\" </dev/null & cat >/dev/null; kill $!";
        let mut command = self.command(["bash", "-c", script, "server"]);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = self.internet(move || command.spawn());
        Server(child.unwrap_or_else(|error| panic!("starting {args:?}: {error}")))
    }

    /// Lets the host's `/etc/resolv.conf` say this, for this test alone.
    ///
    /// # Panics
    /// If it cannot be.
    pub fn set_resolv_conf(&self, text: &str) {
        let file = self.home.dir().join("resolv.conf");
        let real = Path::new("/etc/resolv.conf");
        let set = || -> io::Result<()> {
            fs::write(&file, text)?;
            if !real.exists() {
                // The rig's, which is for this run only.
                fs::write(real, "")?;
            }
            Ok(mount_bind(&file, real)?)
        };
        set().unwrap_or_else(|error| panic!("setting the host's resolv.conf: {error}"));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(root) = self.root.get() {
            // Both vanish with the namespace; the directory stays if it is not empty then.
            let _ = unmount(root, UnmountFlags::DETACH);
            let _ = fs::remove_dir(root);
        }
    }
}

/// A server's process, until dropped.
pub struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It ends when its standard input does; how is nobody's concern.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Moves the calling thread into a namespace of a host, with mounts of its own; returns that of
/// its internet.
fn make_namespaces() -> io::Result<File> {
    // SAFETY: descriptors stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWNET)? };
    mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )?;
    let internet = File::open("/proc/thread-self/ns/net")?;
    let there = Netlink::open()?;
    there.up("lo")?;
    for address in INTERNET {
        let address: IpAddr = address.parse().map_err(io::Error::other)?;
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        there.add_address("lo", address, prefix)?;
    }

    // SAFETY: descriptors stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET)? };
    let here = Netlink::open()?;
    here.up("lo")?;
    here.add_veth("host0", "inet0", internet.as_fd(), 1500)?;
    for (address, prefix) in [
        (World::HOST, 24),
        (World::HOST_V6, 64),
        (World::HOST_PUBLIC, 32),
    ] {
        here.add_address("host0", address.parse().map_err(io::Error::other)?, prefix)?;
    }
    here.up("host0")?;
    thread::scope(|scope| {
        let connect = || -> io::Result<()> {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(internet.as_fd(), kind)?;
            let there = Netlink::open()?;
            for (address, prefix) in [(World::ROUTER, 24), (World::ROUTER_V6, 64)] {
                let address = address.parse().map_err(io::Error::other)?;
                there.add_address("inet0", address, prefix)?;
            }
            // To the host's other address.
            there.up("inet0")?;
            there.add_route(
                "inet0",
                World::HOST_PUBLIC.parse().map_err(io::Error::other)?,
            )
        };
        let connected = scope.spawn(connect).join();
        connected.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    for gateway in [World::ROUTER, World::ROUTER_V6] {
        here.add_default_route(gateway.parse().map_err(io::Error::other)?)?;
    }
    // Programs may ping, as on most systems.
    fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")?;
    Ok(internet)
}

/// Fails the test if the calling thread's namespace has a link to anything but the internet of
/// the test.
fn assert_no_way_out() {
    let links = fs::read_to_string("/proc/thread-self/net/dev")
        .unwrap_or_else(|error| panic!("reading the links: {error}"));
    let mut names: Vec<_> = links
        .lines()
        .filter_map(|line| Some(line.split_once(':')?.0.trim()))
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["host0", "lo"]);
}

fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(dir).ok()?.flatten().find_map(|entry| {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            return find(&path, name);
        }
        (entry.file_name() == name).then_some(path)
    })
}

/// Tests that get a world of their own.
#[macro_export]
macro_rules! tests_with_world {
    ($($(#[$doc:meta])* fn $name:ident($world:ident) $body:block)*) => {
        $($(#[$doc])* #[test] fn $name() {
            $crate::World::run(stringify!($name), |$world| $body)
        })*
    };
}
