//! The emulated engine: QEMU runs the CPU, the memory and the interrupt controller.
//!
//! QEMU opens no disk or network here: guest memory is a shared memfd, and every virtio
//! device is ours, reached over an inherited socket that speaks vhost-user. A supervisor thread
//! starts the process and waits for it; the kernel kills QEMU when that thread, and so when our
//! process, dies.

mod args;
mod process;
mod rendezvous;
mod tsc;

use std::env;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use bantam_virtio::VirtioDevice;
use bantam_virtio::rng::RngDevice;
use bantam_virtio::vhost_user::{self, Server};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::console::ConsoleLog;
use crate::devices::{DeviceKind, DeviceSet};
use crate::vm::{ExitCause, ExitGuard, Kill, Running, StartContext};
use crate::{GuestKernel, Phase, VmConfig, VmmError};
use args::Socket;
use rendezvous::Rendezvous;

/// Names QEMU where it is not on the `PATH`.
const QEMU_VARIABLE: &str = "BANTAM_QEMU";

/// Finds QEMU, or says how to get it.
pub(crate) fn find_qemu() -> Result<PathBuf, String> {
    if let Some(path) = env::var_os(QEMU_VARIABLE) {
        let path = PathBuf::from(path);
        return if is_executable(&path) {
            Ok(path)
        } else {
            Err(format!(
                "{} (from {QEMU_VARIABLE}) is not an executable file",
                path.display()
            ))
        };
    }
    let program = "qemu-system-x86_64";
    env::split_paths(&env::var_os("PATH").unwrap_or_default())
        .map(|dir| dir.join(program))
        .find(|candidate| is_executable(candidate))
        .ok_or_else(|| format!("{program} was not found; Debian: apt-get install qemu-system-x86"))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// Starts a machine in a QEMU process.
pub(crate) fn start(config: &VmConfig, context: StartContext) -> Result<Running, VmmError> {
    let qemu = find_qemu().map_err(|reason| VmmError::EngineUnavailable {
        engine: "emulated",
        reason,
    })?;
    let files = BootFiles::prepare(&config.guest)?;
    let StartContext {
        devices,
        console,
        exit,
        timeline,
    } = context;
    let Wiring {
        mut servers,
        sockets,
        card,
    } = Wiring::connect(devices)?;
    timeline.mark(Phase::DevicesReady);
    let inherited = args::Inherited {
        kernel: files.kernel.as_raw_fd(),
        initramfs: files.initramfs.as_raw_fd(),
        devices: sockets
            .iter()
            .map(|(kind, socket)| (*kind, Socket::Inherited(socket.as_raw_fd())))
            .chain(card.iter().map(|card| {
                let name = card.meeting.name().to_owned();
                (DeviceKind::Net, Socket::Named(name))
            }))
            .collect(),
    };
    let args = args::build(config, &inherited);

    let killed = Arc::new(AtomicBool::new(false));
    let (started, outcome) = mpsc::sync_channel::<io::Result<OwnedFd>>(1);
    let supervisor_killed = Arc::clone(&killed);
    let supervisor = thread::Builder::new()
        .name("vm".to_owned())
        .spawn(move || {
            let child = process::spawn(&qemu, &args, &inherited.all());
            // QEMU has its own copies now; ours would hide its death from the servers.
            drop((sockets, files));
            let (pidfd, child) = match child.and_then(with_pidfd) {
                Ok((pidfd, child)) => {
                    // The receiver waits for this message, so it is there.
                    let _ = started.send(pidfd.try_clone());
                    (pidfd, child)
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                    return;
                }
            };
            let exit = ExitGuard(exit);
            let end = match card.map(|card| card.serve(&child, &pidfd)).transpose() {
                Ok(card) => {
                    servers.extend(card.flatten());
                    supervise(child, console)
                }
                Err(error) => give_up(child, error),
            };
            for server in servers {
                server.stop();
            }
            exit.0
                .set(exit_cause(end, supervisor_killed.load(Ordering::Acquire)));
        })
        .map_err(VmmError::io("cannot start the supervisor thread"))?;
    let pidfd = outcome
        .recv()
        .map_err(|_| VmmError::Io {
            what: "cannot start QEMU",
            source: io::ErrorKind::BrokenPipe.into(),
        })?
        .map_err(VmmError::io("cannot start QEMU"))?;
    timeline.mark(Phase::VmCreated);
    Ok(Running {
        machine: Box::new(Qemu { pidfd, killed }),
        supervisor,
    })
}

/// Adds the handle through which the child can be killed without a race with its number.
fn with_pidfd(mut child: Child) -> io::Result<(OwnedFd, Child)> {
    match rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
        Ok(pidfd) => Ok((pidfd, child)),
        Err(error) => {
            // Fails only if it has ended; then there is nothing to kill, and it is reaped anyway.
            let _ = child.kill();
            let _ = child.wait();
            Err(error.into())
        }
    }
}

/// Kernel and initramfs as QEMU inherits them. Without firmware QEMU loads ELF kernels only, so
/// anything else is unpacked into memory.
struct BootFiles {
    kernel: File,
    initramfs: File,
}

impl BootFiles {
    fn prepare(guest: &GuestKernel) -> Result<Self, VmmError> {
        let kernel = guest.open()?;
        Ok(Self {
            kernel: match kernel.unpacked() {
                None => open("kernel", &guest.kernel)?,
                Some(elf) => memory_file(elf)
                    .map_err(VmmError::io("cannot unpack the kernel into memory"))?,
            },
            initramfs: open("initramfs", &guest.initramfs)?,
        })
    }
}

fn memory_file(content: &[u8]) -> io::Result<File> {
    let memory = rustix::fs::memfd_create("kernel", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    file.write_all(content)?;
    Ok(file)
}

fn open(what: &'static str, path: &Path) -> Result<File, VmmError> {
    File::open(path).map_err(|source| VmmError::File {
        what,
        path: path.to_path_buf(),
        source,
    })
}

/// The devices' ends of the vhost-user sockets, and the ends for QEMU.
struct Wiring {
    servers: Vec<Server>,
    sockets: Vec<(DeviceKind, UnixStream)>,
    card: Option<Card>,
}

/// The network card, until QEMU connects to it.
struct Card {
    meeting: Rendezvous,
    device: Box<dyn VirtioDevice>,
}

impl Card {
    /// Waits for QEMU and serves it; `None` if it ended first, of which it says why.
    fn serve(self, qemu: &Child, pidfd: &OwnedFd) -> io::Result<Option<Server>> {
        match self.meeting.accept(Pid::from_child(qemu), pidfd.as_fd())? {
            Some(stream) => vhost_user::serve(self.device, stream).map(Some),
            None => Ok(None),
        }
    }
}

impl Wiring {
    fn connect(devices: DeviceSet) -> Result<Self, VmmError> {
        let mut wiring = Self {
            servers: Vec::new(),
            sockets: Vec::new(),
            card: None,
        };
        // QEMU enters the kernel through PVH, which has no place for a seed.
        let rng: Box<dyn VirtioDevice> = Box::new(RngDevice::new());
        for (kind, device) in devices.into_devices().chain([(DeviceKind::Rng, rng)]) {
            let fail = VmmError::device(kind.name());
            if kind == DeviceKind::Net {
                let meeting = Rendezvous::open().map_err(fail)?;
                wiring.card = Some(Card { meeting, device });
                continue;
            }
            let (ours, theirs) = UnixStream::pair()
                .map_err(VmmError::io("cannot create a socket pair for a device"))?;
            wiring
                .servers
                .push(vhost_user::serve(device, ours).map_err(fail)?);
            wiring.sockets.push((kind, theirs));
        }
        Ok(wiring)
    }
}

struct Qemu {
    pidfd: OwnedFd,
    killed: Arc<AtomicBool>,
}

impl Kill for Qemu {
    fn kill(&self) {
        self.killed.store(true, Ordering::Release);
        // Fails only when the process has ended, which is what is wanted.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

struct End {
    status: io::Result<ExitStatus>,
    complaint: String,
}

/// Drains QEMU's output until it ends, then reaps it.
fn supervise(mut child: Child, console: ConsoleLog) -> End {
    let complaints = ConsoleLog::new();
    let pipes: [Option<(Box<dyn Read + Send>, ConsoleLog)>; 2] = [
        child
            .stdout
            .take()
            .map(|pipe| (Box::new(pipe) as _, console)),
        child
            .stderr
            .take()
            .map(|pipe| (Box::new(pipe) as _, complaints.clone())),
    ];
    let readers: io::Result<Vec<_>> = pipes
        .into_iter()
        .flatten()
        .map(|(pipe, log)| {
            thread::Builder::new()
                .name("console".to_owned())
                .spawn(move || drain(pipe, log))
        })
        .collect();
    let status = match readers {
        Ok(readers) => {
            let status = child.wait();
            for reader in readers {
                // A reader that panicked has lost its text, nothing else.
                let _ = reader.join();
            }
            status
        }
        // Without a reader QEMU would stall on its output.
        Err(error) => return give_up(child, error),
    };
    End {
        status,
        complaint: complaints.last_lines(3).join("; "),
    }
}

/// Ends a child that cannot be looked after.
fn give_up(mut child: Child, error: io::Error) -> End {
    // These fail only if it has ended.
    let _ = child.kill();
    let _ = child.wait();
    End {
        status: Err(error),
        complaint: String::new(),
    }
}

fn drain(mut pipe: impl Read, mut log: ConsoleLog) {
    let mut buffer = [0; 4096];
    loop {
        match pipe.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return,
            // Writing to memory cannot fail.
            Ok(count) => drop(log.write_all(&buffer[..count])),
        }
    }
}

fn exit_cause(end: End, killed: bool) -> ExitCause {
    match end.status {
        _ if killed => ExitCause::Killed,
        Ok(status) if status.success() => ExitCause::GuestShutdown,
        Ok(status) if end.complaint.is_empty() => {
            ExitCause::Failed(format!("QEMU ended with {status}"))
        }
        Ok(status) => ExitCause::Failed(format!("QEMU ended with {status}: {}", end.complaint)),
        Err(error) => ExitCause::Failed(format!("cannot look after QEMU: {error}")),
    }
}
