//! From the kernel's first instruction for PID 1 to `Hello`: only what must be there
//! for the host to go on. The rest is [`setup`](crate::setup)'s.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};

use bantam_protocol::{
    BootTimings, GUEST_EXEC_PORT, GuestControl, HOST_CONTROL_PORT, Hello, PROTOCOL_VERSION,
};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::libc;
use nix::mount::{MsFlags, mount};
use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, VsockAddr, bind, connect, listen, send,
    socket,
};
use nix::sys::stat::Mode;
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::sys::utsname::uname;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{chdir, chroot, dup2_stderr, mkdir};

use crate::cpus;
use crate::disk::{Disk, MOUNT_POINT, mount_disk};

/// The image, read-only.
const IMAGE: &str = "/dev/vda";

/// Where things are mounted in the initramfs, which no one sees after the boot.
const LOWER: &str = "/lower";
const ROOT: &str = "/root";

/// * `redirect_dir=on`: a directory of the image can be renamed (else EXDEV, which
///   package managers stumble over);
/// * `xino=on`: one device number and stable inode numbers for all of the root;
/// * `index=off`, `metacopy=off`: what they add is paid for at each copy-up, and no one
///   else writes to the upper directory or exports it.
const OVERLAY_OPTIONS: &str = "lowerdir=/lower,upperdir=/disk/upper,workdir=/disk/work,\
    redirect_dir=on,xino=on,index=off,metacopy=off";

/// What most likely keeps an overlay from a disk that could be mounted.
const FULL: &str = "the machine's disk is full, or is damaged \
    (a larger one has room: `bantam machine update --storage`)";

/// A step of the boot that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {}", error.desc())]
pub(crate) struct StepFailed {
    step: String,
    error: Errno,
}

impl StepFailed {
    /// Names the step that an error belongs to.
    pub(crate) fn at(step: impl Into<String>) -> impl FnOnce(Errno) -> Self {
        let step = step.into();
        |error| Self { step, error }
    }

    /// Says what the error means there.
    pub(crate) fn explained(mut self, why: &str) -> Self {
        self.step = format!("{why}: {}", self.step);
        self
    }
}

/// What the boot leaves to the rest of the agent.
pub(crate) struct Booted {
    /// The connected control stream; `Hello` was said.
    pub(crate) control: OwnedFd,
    /// The listening exec port.
    pub(crate) listener: OwnedFd,
    /// The machine's own disk, if it has one.
    pub(crate) disk: Option<Disk>,
}

/// Boots up to `Hello`.
///
/// # Errors
/// The step that failed. The host was told if it could be reached.
pub(crate) fn boot() -> Result<Booted, StepFailed> {
    let init_ns = monotonic_ns();
    mount_root()
        .and_then(|disk| greet(init_ns, disk))
        .inspect_err(|failed| {
            if let Ok(control) = connect_control() {
                let _ = say(&control, &GuestControl::BootFailed(failed.to_string()));
            }
        })
}

/// Mounts `source` on `target`, making that directory if it is missing.
///
/// # Errors
/// The mount as the step that failed.
pub(crate) fn mount_at(
    source: &str,
    target: &str,
    fstype: &str,
    flags: MsFlags,
    options: &str,
) -> Result<(), StepFailed> {
    let attempt = || mount(Some(source), target, Some(fstype), flags, Some(options));
    let result = match attempt() {
        Err(Errno::ENOENT) => {
            mkdir(target, Mode::from_bits_truncate(0o755)).and_then(|()| attempt())
        }
        result => result,
    };
    result.map_err(StepFailed::at(format!(
        "mount {source} ({fstype}) on {target}"
    )))
}

fn mount_root() -> Result<Option<Disk>, StepFailed> {
    mount_at(
        "devtmpfs",
        "/dev",
        "devtmpfs",
        MsFlags::MS_NOSUID,
        "mode=755",
    )?;
    occupy_standard_descriptors().map_err(StepFailed::at("open /dev/null"))?;
    mount_at(IMAGE, LOWER, "erofs", MsFlags::MS_RDONLY, "")?;
    let disk = mount_upper()?;
    mount_overlay().map_err(|failed| match disk {
        Some(_) => failed.explained(FULL),
        None => failed,
    })?;
    move_mount("/dev", "/root/dev")?;
    // As switch_root does; the initramfs itself cannot be unmounted.
    chdir(ROOT).map_err(StepFailed::at("enter the root filesystem"))?;
    move_mount(".", "/")?;
    chroot(".").map_err(StepFailed::at("switch to the root filesystem"))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount_at("sysfs", "/sys", "sysfs", flags, "")?;
    cpus::bring_up();
    Ok(disk)
}

/// A root that is read-only is of no use: nothing in it can make room either.
fn mount_overlay() -> Result<(), StepFailed> {
    let none = MsFlags::empty();
    mount_at("overlay", ROOT, "overlay", none, OVERLAY_OPTIONS)?;
    let flags = statvfs(ROOT).map(|root| root.flags());
    match flags.map_err(StepFailed::at("look at the root filesystem"))? {
        flags if flags.contains(FsFlags::ST_RDONLY) => Err(StepFailed::at(
            "make the root filesystem writable",
        )(Errno::EROFS)),
        _ => Ok(()),
    }
}

/// Mounts what the overlay writes to: the disk if there is one, else memory.
fn mount_upper() -> Result<Option<Disk>, StepFailed> {
    let disk = mount_disk()?;
    if disk.is_none() {
        mount_at("tmpfs", MOUNT_POINT, "tmpfs", MsFlags::empty(), "mode=755")?;
    }
    for path in ["/disk/upper", "/disk/work"] {
        match mkdir(path, Mode::from_bits_truncate(0o755)) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(error) => return Err(StepFailed::at(format!("make {path}"))(error)),
        }
    }
    Ok(disk)
}

fn move_mount(from: &str, to: &str) -> Result<(), StepFailed> {
    let none = None::<&str>;
    let attempt = || mount(Some(from), to, none, MsFlags::MS_MOVE, none);
    let result = match attempt() {
        Err(Errno::ENOENT) => mkdir(to, Mode::from_bits_truncate(0o755)).and_then(|()| attempt()),
        result => result,
    };
    result.map_err(StepFailed::at(format!("move {from} to {to}")))
}

/// Descriptors 0 to 2 must not become anything else: commands get theirs there. Standard error becomes
/// the kernel's log, which reaches the console of a machine that has one for its kernel only, if there
/// is one that may be written to: `printk.devkmsg=off` forbids it.
fn occupy_standard_descriptors() -> nix::Result<()> {
    loop {
        let fd = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
        if fd.as_raw_fd() > 2 {
            break;
        }
        let _ = fd.into_raw_fd();
    }
    let log = open(
        "/dev/kmsg",
        OFlag::O_WRONLY | OFlag::O_CLOEXEC,
        Mode::empty(),
    );
    log.map_or(Ok(()), |log| dup2_stderr(&log))
}

/// Opens the exec port, then says hello.
fn greet(init_ns: u64, disk: Option<Disk>) -> Result<Booted, StepFailed> {
    let rootfs_ns = monotonic_ns();
    let listener = listen_exec().map_err(StepFailed::at("listen on the exec port"))?;
    let control = connect_control().map_err(StepFailed::at("connect to the host"))?;
    let kernel_release = uname()
        .map(|names| names.release().to_string_lossy().into_owned())
        .unwrap_or_default();
    let hello = GuestControl::Hello(Hello {
        protocol_version: PROTOCOL_VERSION,
        agent_version: env!("CARGO_PKG_VERSION").into(),
        kernel_release,
        timings: BootTimings {
            init_ns,
            rootfs_ns,
            hello_ns: monotonic_ns(),
        },
    });
    say(&control, &hello).map_err(StepFailed::at("say hello to the host"))?;
    fcntl(&control, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
        .map_err(StepFailed::at("set up the control stream"))?;
    Ok(Booted {
        control,
        listener,
        disk,
    })
}

fn listen_exec() -> nix::Result<OwnedFd> {
    let listener = vsock(SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK)?;
    let address = VsockAddr::new(libc::VMADDR_CID_ANY, GUEST_EXEC_PORT);
    bind(listener.as_raw_fd(), &address)?;
    listen(&listener, Backlog::new(128)?)?;
    Ok(listener)
}

fn connect_control() -> nix::Result<OwnedFd> {
    let control = vsock(SockFlag::SOCK_CLOEXEC)?;
    let address = VsockAddr::new(libc::VMADDR_CID_HOST, HOST_CONTROL_PORT);
    connect(control.as_raw_fd(), &address)?;
    Ok(control)
}

fn vsock(flags: SockFlag) -> nix::Result<OwnedFd> {
    socket(AddressFamily::Vsock, SockType::Stream, flags, None)
}

/// Sends a message on the control stream while that is still blocking.
fn say(control: &OwnedFd, message: &GuestControl) -> nix::Result<()> {
    let frame = message.encode().map_err(|_| Errno::EMSGSIZE)?;
    let mut rest = &frame[..];
    while !rest.is_empty() {
        let sent = send(control.as_raw_fd(), rest, MsgFlags::MSG_NOSIGNAL)?;
        rest = rest.get(sent..).unwrap_or_default();
    }
    Ok(())
}

/// Nanoseconds of the monotonic clock, which starts with the kernel.
fn monotonic_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(|time| std::time::Duration::from(time).as_nanos())
        .ok()
        .and_then(|nanos| u64::try_from(nanos).ok())
        .unwrap_or_default()
}
