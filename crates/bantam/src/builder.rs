//! Describing and starting a machine.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bantam_image::{
    Image, ImageSource, NoProgress, Platform, Progress, PullPolicy, Registries, ResolveOptions,
    Store,
};
use bantam_protocol::HOST_CONTROL_PORT;
use bantam_vmm::{Disk, EngineChoice, ExitCause, MemorySize, Phase, Timeline, Vm, VmConfig};

use crate::control::{Control, HelloError};
use crate::machine::CONSOLE_LINES;
use crate::{Error, Home, Machine, guest};

/// A machine that is yet to be started. See [`Machine::builder`].
#[derive(Clone)]
#[must_use = "nothing runs before start"]
pub struct MachineBuilder {
    image: Option<ImageChoice>,
    pull: PullPolicy,
    registries: Registries,
    platform: Option<Platform>,
    cpus: u8,
    memory_mib: u32,
    engine: EngineChoice,
    kernel: Option<PathBuf>,
    kernel_args: Option<String>,
    disk: Option<PathBuf>,
    home: Option<Home>,
    hostname: String,
    boot_timeout: Duration,
    progress: Arc<dyn Progress + Send + Sync>,
}

#[derive(Debug, Clone)]
enum ImageChoice {
    Text(String),
    Source(ImageSource),
}

impl std::fmt::Debug for MachineBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MachineBuilder")
            .field("image", &self.image)
            .field("cpus", &self.cpus)
            .field("memory_mib", &self.memory_mib)
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}

impl Default for MachineBuilder {
    fn default() -> Self {
        Self {
            image: None,
            pull: PullPolicy::default(),
            registries: Registries::default(),
            platform: None,
            cpus: Self::DEFAULT_CPUS,
            memory_mib: Self::DEFAULT_MEMORY_MIB,
            engine: EngineChoice::Auto,
            kernel: None,
            kernel_args: None,
            disk: None,
            home: None,
            hostname: "bantam".to_owned(),
            boot_timeout: Duration::from_secs(60),
            progress: Arc::new(NoProgress),
        }
    }
}

impl MachineBuilder {
    /// vCPUs of a machine that does not say.
    pub const DEFAULT_CPUS: u8 = 1;
    /// Memory in MiB of a machine that does not say.
    pub const DEFAULT_MEMORY_MIB: u32 = 512;

    /// The image: a registry reference (`python:3.12-slim`), an archive (`./image.tar`, from
    /// `docker save` or an OCI layout), a layout directory, a root directory, or `-` for an
    /// archive on standard input.
    pub fn image(mut self, image: impl Into<String>) -> Self {
        self.image = Some(ImageChoice::Text(image.into()));
        self
    }

    /// The image, already parsed.
    pub fn image_source(mut self, source: ImageSource) -> Self {
        self.image = Some(ImageChoice::Source(source));
        self
    }

    /// When to ask the registry. By default only for an image that is not in the store.
    pub fn pull(mut self, policy: PullPolicy) -> Self {
        self.pull = policy;
        self
    }

    /// How registries are reached: mirrors, credentials, authorities, time limits. By default the
    /// user's stored credentials are used.
    pub fn registries(mut self, registries: Registries) -> Self {
        self.registries = registries;
        self
    }

    /// The platform to choose from an image of several; the host's by default.
    pub fn platform(mut self, platform: Platform) -> Self {
        self.platform = Some(platform);
        self
    }

    /// The number of vCPUs, 1 to 32.
    pub fn cpus(mut self, cpus: u8) -> Self {
        self.cpus = cpus;
        self
    }

    /// Memory in MiB, at least 64. The host gives it page by page as the guest touches it.
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// The engine; by default the best that works on this host.
    pub fn engine(mut self, engine: EngineChoice) -> Self {
        self.engine = engine;
        self
    }

    /// Another guest kernel: an ELF image or a bzImage.
    pub fn kernel(mut self, path: impl Into<PathBuf>) -> Self {
        self.kernel = Some(path.into());
        self
    }

    /// Words appended to the kernel's command line, for debugging.
    pub fn kernel_args(mut self, args: impl Into<String>) -> Self {
        self.kernel_args = Some(args.into());
        self
    }

    /// Keeps what the machine writes on this ext4 file system, a raw file, which a later machine
    /// of the same image can go on with. Without it what is written is gone with the machine.
    pub fn disk(mut self, path: impl Into<PathBuf>) -> Self {
        self.disk = Some(path.into());
        self
    }

    /// Where images are kept; [`Home::from_env`] by default.
    pub fn home(mut self, home: Home) -> Self {
        self.home = Some(home);
        self
    }

    /// The guest's host name.
    pub fn hostname(mut self, name: impl Into<String>) -> Self {
        self.hostname = name.into();
        self
    }

    /// How long the guest may take to say hello. 60 s by default.
    pub fn boot_timeout(mut self, timeout: Duration) -> Self {
        self.boot_timeout = timeout;
        self
    }

    /// Who hears about the progress of pulls and conversions.
    pub fn progress(mut self, progress: Arc<dyn Progress + Send + Sync>) -> Self {
        self.progress = progress;
        self
    }

    /// Resolves the image, boots the machine and returns when its agent answers.
    ///
    /// # Errors
    /// [`Error`] says which step failed; nothing is left running then.
    pub fn start(self) -> Result<Machine, Error> {
        let timeline = Timeline::start();
        let guest = guest::find_guest(self.kernel.clone())?;
        let memory = MemorySize::from_mib(self.memory_mib)?;
        let image = self.resolve()?;
        timeline.mark(Phase::RootfsReady);
        let mut disks = vec![Disk {
            path: image.rootfs.clone(),
            read_only: true,
        }];
        disks.extend(self.disk.clone().map(|path| Disk {
            path,
            read_only: false,
        }));
        let config = VmConfig {
            cpus: self.cpus,
            memory,
            guest,
            disks,
            engine: self.engine,
            extra_cmdline: self.kernel_args.clone(),
        };
        let mut listener = None;
        let vm = Vm::start(&config, &timeline, |vsock| {
            listener = Some(vsock.listen(HOST_CONTROL_PORT)?);
            Ok(())
        })?;
        let listener = listener.ok_or_else(|| Error::Protocol("no control listener".into()))?;
        match Control::accept(&listener, self.boot_timeout, &self.hostname, &timeline) {
            Ok(control) => Ok(Machine::new(vm, control, image, timeline)),
            Err(HelloError::Library(error)) => Err(error),
            Err(HelloError::Failed(reason)) => Err(boot_error(&vm, reason)),
        }
    }

    fn resolve(&self) -> Result<Image, Error> {
        let source = match self.image.as_ref().ok_or(Error::NoImage)? {
            ImageChoice::Text(text) => ImageSource::parse(text)?,
            ImageChoice::Source(source) => source.clone(),
        };
        let home = self.home.clone().map_or_else(Home::from_env, Ok)?;
        let options = ResolveOptions {
            platform: self.platform.clone().unwrap_or_default(),
            pull: self.pull,
            registries: self.registries.clone(),
            ..ResolveOptions::default()
        };
        let store = Store::open(Path::new(home.images()))?;
        Ok(store.resolve(&source, &options, self.progress.as_ref())?)
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
