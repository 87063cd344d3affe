//! The emulated engine: QEMU runs the CPU, the memory and the interrupt controller.
//!
//! QEMU opens no disk, socket or network here: guest memory is a shared memfd, and every virtio
//! device is ours, reached over an inherited socket that speaks vhost-user. A supervisor thread
//! starts the process and waits for it; the kernel kills QEMU when that thread, and so when our
//! process, dies.

mod args;
mod process;
mod tsc;

use std::env;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use bantam_virtio::vhost_user::{self, Server};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::console::ConsoleLog;
use crate::devices::{DeviceKind, DeviceSet};
use crate::vm::{ExitCause, Kill, Running, StartContext};
use crate::{GuestKernel, Phase, VmConfig, VmmError};

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
    let kernel = KernelFile::prepare(&config.guest)?;
    let StartContext {
        devices,
        console,
        exit,
        timeline,
    } = context;
    let Wiring { servers, sockets } = Wiring::connect(devices)?;
    timeline.mark(Phase::DevicesReady);
    let numbers: Vec<_> = sockets
        .iter()
        .map(|(kind, fd)| (*kind, fd.as_raw_fd()))
        .collect();
    let args = args::build(config, &kernel.path(), &numbers);
    let inherited: Vec<_> = numbers
        .iter()
        .map(|(_, fd)| *fd)
        .chain(kernel.fd())
        .collect();

    let killed = Arc::new(AtomicBool::new(false));
    let (started, outcome) = mpsc::sync_channel::<io::Result<OwnedFd>>(1);
    let supervisor_killed = Arc::clone(&killed);
    let supervisor = thread::Builder::new()
        .name("vm".to_owned())
        .spawn(move || {
            let child = process::spawn(&qemu, &args, &inherited);
            // QEMU has its own copies now; ours would hide its death from the servers.
            drop((sockets, kernel));
            let child = child.and_then(|child| {
                let pid = Pid::from_child(&child);
                Ok((
                    rustix::process::pidfd_open(pid, PidfdFlags::empty())?,
                    child,
                ))
            });
            let child = match child {
                Ok((pidfd, child)) => {
                    // The receiver waits for this message, so it is there.
                    let _ = started.send(Ok(pidfd));
                    child
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                    return;
                }
            };
            let end = supervise(child, console);
            for server in servers {
                server.stop();
            }
            exit.set(exit_cause(end, supervisor_killed.load(Ordering::Acquire)));
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

/// The kernel as QEMU can load it: without firmware that is an ELF file only, so anything else
/// is unpacked into memory that QEMU inherits.
enum KernelFile {
    AsItIs(PathBuf),
    Unpacked(File),
}

impl KernelFile {
    fn prepare(guest: &GuestKernel) -> Result<Self, VmmError> {
        let kernel = guest.open()?;
        let Some(elf) = kernel.unpacked() else {
            return Ok(Self::AsItIs(guest.kernel.clone()));
        };
        let fail = || VmmError::io("cannot unpack the kernel into memory");
        let memory = rustix::fs::memfd_create("kernel", MemfdFlags::CLOEXEC)
            .map_err(io::Error::from)
            .map_err(fail())?;
        let mut file = File::from(memory);
        file.write_all(elf).map_err(fail())?;
        Ok(Self::Unpacked(file))
    }

    fn fd(&self) -> Option<RawFd> {
        match self {
            Self::AsItIs(_) => None,
            Self::Unpacked(file) => Some(file.as_raw_fd()),
        }
    }

    fn path(&self) -> PathBuf {
        match self {
            Self::AsItIs(path) => path.clone(),
            Self::Unpacked(file) => format!("/proc/self/fd/{}", file.as_raw_fd()).into(),
        }
    }
}

/// The devices' ends of the vhost-user sockets, and the ends for QEMU.
struct Wiring {
    servers: Vec<Server>,
    sockets: Vec<(DeviceKind, UnixStream)>,
}

impl Wiring {
    fn connect(devices: DeviceSet) -> Result<Self, VmmError> {
        let mut wiring = Self {
            servers: Vec::new(),
            sockets: Vec::new(),
        };
        for (kind, device) in devices.into_devices() {
            let fail = VmmError::device(kind.name());
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
    let readers: Vec<_> = [
        child.stdout.take().map(|pipe| drain(pipe, console)),
        child
            .stderr
            .take()
            .map(|pipe| drain(pipe, complaints.clone())),
    ]
    .into_iter()
    .flatten()
    .collect();
    let status = child.wait();
    for reader in readers {
        // A reader cannot panic; if it did, its text is what is missing.
        let _ = reader.join();
    }
    End {
        status,
        complaint: complaints.last_lines(3).join("; "),
    }
}

fn drain(
    mut pipe: impl Read + Send + 'static,
    mut log: ConsoleLog,
) -> thread::JoinHandle<io::Result<()>> {
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        loop {
            match pipe.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => log.write_all(&buffer[..n])?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    })
}

fn exit_cause(end: End, killed: bool) -> ExitCause {
    match end.status {
        _ if killed => ExitCause::Killed,
        Ok(status) if status.success() => ExitCause::GuestShutdown,
        Ok(status) if end.complaint.is_empty() => {
            ExitCause::Failed(format!("QEMU ended with {status}"))
        }
        Ok(status) => ExitCause::Failed(format!("QEMU ended with {status}: {}", end.complaint)),
        Err(error) => ExitCause::Failed(format!("cannot wait for QEMU: {error}")),
    }
}
