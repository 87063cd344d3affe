//! A machine whose virtual machine runs in this process.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bantam_image::Image;
use bantam_net::Network;
use bantam_protocol::{GUEST_EXEC_PORT, HOST_CONTROL_PORT};
use bantam_virtio::vsock::{ConnectionId, Opened};
use bantam_vmm::{Disk, EngineKind, ExitCause, GuestKernel, MemorySize, Timeline, Vm, VmConfig};

use crate::Error;
use crate::control::{Control, HelloError};
use crate::host::{CONSOLE_LINES, Ended, ExecStream, Host};
use crate::spec::Spec;
use crate::watch::{GuestWatch, News};

/// Characters of the longest host name that Linux takes.
const HOST_NAME_MAX: usize = 64;

/// Characters of a kernel's release that are kept; Linux has room for 64.
const MAX_RELEASE: usize = 64;

/// How long a guest may take from the end of its control stream to the end of its machine. One that
/// reboots needs a moment for it. One that powers off or halts never gets there: there is nothing that
/// it could switch off with.
const HALT_LIMIT: Duration = Duration::from_millis(500);

/// A virtual machine of this process, and the control stream of its agent. It ends with its
/// owner: the engine's threads are this process's, and the kernel kills QEMU with them.
#[derive(Debug)]
pub(crate) struct Local {
    vm: Vm,
    kernel_release: String,
    control: Arc<Control>,
    /// Ends after the machine, whose end frees it from whatever it waits for.
    _watch: GuestWatch,
}

/// What is needed to boot beside the description of the machine.
pub(crate) struct Boot<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) guest: GuestKernel,
    pub(crate) image: &'a Image,
    /// The ext4 disk that keeps what is written; without one it stays in memory.
    pub(crate) disk: Option<PathBuf>,
    pub(crate) hostname: &'a str,
    /// How long the guest may take to say hello.
    pub(crate) timeout: Duration,
}

impl Local {
    /// Boots and returns when the agent answers. Nothing is left running after an error.
    pub(crate) fn boot(boot: Boot<'_>, timeline: &Timeline) -> Result<Arc<Self>, Error> {
        let mut disks = vec![Disk {
            path: boot.image.rootfs.clone(),
            read_only: true,
        }];
        disks.extend(boot.disk.map(|path| Disk {
            path,
            read_only: false,
        }));
        let network = boot
            .spec
            .network
            .as_ref()
            .map(|network| (network, network.config()));
        let config = VmConfig {
            cpus: boot.spec.cpus,
            memory: MemorySize::from_mib(boot.spec.memory_mib)?,
            guest: boot.guest,
            disks,
            network: network.as_ref().map(|(_, config)| config.clone()),
            engine: boot.spec.engine,
            extra_cmdline: boot.spec.kernel_args.clone(),
        };
        let mut listener = None;
        let vm = Vm::start(&config, timeline, |vsock| {
            listener = Some(vsock.listen(HOST_CONTROL_PORT)?);
            Ok(())
        })?;
        let listener = listener.ok_or_else(|| Error::Protocol("no control listener".into()))?;
        let hostname = boot.hostname.chars();
        let hostname: String = hostname.take(HOST_NAME_MAX).collect();
        let guest_network = network.map(|(network, config)| network.guest(&config));
        match Control::accept(&listener, boot.timeout, &hostname, guest_network, timeline) {
            Ok(control) => Self::new(vm, control).map(Arc::new),
            Err(HelloError::Library(error)) => Err(error),
            Err(HelloError::Failed(reason)) => Err(boot_error(&vm, reason)),
        }
    }

    fn new(vm: Vm, control: Control) -> Result<Self, Error> {
        const CANNOT: &str = "cannot watch the guest";
        // The guest's word, which people are shown.
        let printable = |c: &char| c.is_ascii_graphic();
        let release = control.hello.kernel_release.chars();
        let kernel_release = release.filter(printable).take(MAX_RELEASE).collect();
        let stream = control.stream().map_err(Error::io(CANNOT))?;
        let control = Arc::new(control);
        let told = Arc::clone(&control);
        let halted = vm.halted();
        let watch = GuestWatch::start(stream.into(), move |news| match news {
            // A guest that cannot be told is at its end, or has no use for the time.
            News::Clock => drop(told.set_clock()),
            // The agent never hangs up, and a kernel that goes down resets its devices. It may be
            // us who hung up: then all is written back, and the guest is about to go.
            News::HungUp => halted.end(HALT_LIMIT),
        });
        Ok(Self {
            vm,
            kernel_release,
            control,
            _watch: watch.map_err(Error::io(CANNOT))?,
        })
    }

    /// Waits for the end of the machine; `None` if it still runs after `timeout`.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Option<ExitCause> {
        self.vm.wait(timeout)
    }

    /// The engine that runs it.
    pub(crate) fn engine(&self) -> EngineKind {
        self.vm.engine()
    }

    /// The release of the guest's kernel.
    pub(crate) fn kernel_release(&self) -> &str {
        &self.kernel_release
    }

    /// The last lines of the guest's console.
    pub(crate) fn console(&self) -> Vec<String> {
        self.vm.console().last_lines(CONSOLE_LINES)
    }
}

impl Host for Local {
    fn connect_exec(&self) -> io::Result<UnixStream> {
        self.vm.vsock().connect_on_write(GUEST_EXEC_PORT)
    }

    fn request_exec(&self, request: &[u8]) -> io::Result<ExecStream> {
        let opened = self.vm.vsock().connect_with(GUEST_EXEC_PORT, request)?;
        let Opened { stream, sent, id } = opened;
        let id = Some(id);
        Ok(ExecStream { stream, sent, id })
    }

    fn part(&self, id: ConnectionId, stream: Arc<UnixStream>) {
        self.vm.vsock().part(id, stream);
    }

    fn ended(&self, patience: Duration) -> Option<Ended> {
        let exit = self.vm.wait(Some(patience))?;
        let last_words = self.control.last_words();
        let cause = last_words.unwrap_or_else(|| match exit {
            ExitCause::GuestShutdown => "the guest shut down or its kernel panicked".into(),
            ExitCause::Killed => "it was stopped".into(),
            ExitCause::Failed(reason) => reason,
        });
        Some(Ended {
            cause,
            console: self.console(),
        })
    }

    fn stop(&self, grace: Duration, limit: Duration) -> Result<ExitCause, Error> {
        let begun = Instant::now();
        let asked = self.control.shutdown(grace, limit);
        let left = limit.saturating_sub(begun.elapsed());
        // If the agent is gone, so is its machine, or there is nobody to ask; nor is there if it takes
        // nothing.
        Ok(asked
            .ok()
            .and_then(|()| self.vm.wait(Some(left)))
            .unwrap_or_else(|| self.vm.kill()))
    }

    fn network(&self) -> Option<Network> {
        self.vm.network().cloned()
    }

    fn kill(&self) -> ExitCause {
        self.vm.kill()
    }
}

/// What is known of a guest that did not come up.
fn boot_error(vm: &Vm, reason: String) -> Error {
    let ended = vm.wait(Some(Duration::from_millis(200)));
    let reason = match ended {
        Some(ExitCause::Failed(engine)) => format!("{reason}: {engine}"),
        Some(ExitCause::GuestShutdown | ExitCause::Killed) | None => reason,
    };
    Error::Boot {
        reason,
        engine: vm.engine(),
        console: vm.console().last_lines(CONSOLE_LINES),
    }
}
