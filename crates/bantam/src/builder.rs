//! Describing and starting a machine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bantam_image::{
    Image, ImageSource, NoProgress, Platform, Progress, PullPolicy, Registries, ResolveOptions,
    Store,
};
use bantam_vmm::{EngineChoice, Phase, Timeline};

use crate::home::absolute;
use crate::local::{Boot, Local};
use crate::machine::Facts;
use crate::machines::MachineName;
use crate::spec::{Spec, Workload};
use crate::{Error, Home, Machine, MachineInfo, Machines, NetworkConfig, guest, host_trust};

/// A machine that is yet to be started. See [`Machine::builder`].
#[derive(Clone)]
#[must_use = "nothing runs before start"]
pub struct MachineBuilder {
    image: Option<ImageChoice>,
    pull: PullPolicy,
    registries: Registries,
    platform: Option<Platform>,
    spec: Spec,
    name: Option<String>,
    ephemeral: bool,
    disk: Option<PathBuf>,
    home: Option<Home>,
    vmm_program: Option<PathBuf>,
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
            .field("name", &self.name)
            .field("cpus", &self.spec.cpus)
            .field("memory_mib", &self.spec.memory_mib)
            .field("engine", &self.spec.engine)
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
            spec: Spec::default(),
            name: None,
            ephemeral: false,
            disk: None,
            home: None,
            vmm_program: None,
            boot_timeout: Self::DEFAULT_BOOT_TIMEOUT,
            progress: Arc::new(NoProgress),
        }
    }
}

impl MachineBuilder {
    /// vCPUs of a machine that does not say.
    pub const DEFAULT_CPUS: u8 = 1;
    /// Memory in MiB of a machine that does not say.
    pub const DEFAULT_MEMORY_MIB: u32 = 512;
    /// Size in GiB of the disk of a named machine that does not say. The host gives it block by
    /// block as the guest writes.
    pub const DEFAULT_DISK_GIB: u32 = 20;
    /// How long a guest may take to say hello unless told otherwise.
    pub const DEFAULT_BOOT_TIMEOUT: Duration = Duration::from_secs(60);

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
        self.spec.cpus = cpus;
        self
    }

    /// Memory in MiB, at least 64. The host gives it page by page as the guest touches it.
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.spec.memory_mib = mib;
        self
    }

    /// The engine; by default the best that works on this host.
    pub fn engine(mut self, engine: EngineChoice) -> Self {
        self.spec.engine = engine;
        self
    }

    /// Another guest kernel: an ELF image or a bzImage.
    pub fn kernel(mut self, path: impl Into<PathBuf>) -> Self {
        self.spec.kernel = Some(absolute(path.into()));
        self
    }

    /// Words appended to the kernel's command line, for debugging.
    pub fn kernel_args(mut self, args: impl Into<String>) -> Self {
        self.spec.kernel_args = Some(args.into());
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

    /// Gives the machine a network card. Without this it has none.
    pub fn network(mut self, network: NetworkConfig) -> Self {
        self.spec.network = Some(network);
        self
    }

    /// The guest's host name; by default a named machine's is its name.
    pub fn hostname(mut self, name: impl Into<String>) -> Self {
        self.spec.hostname = Some(name.into());
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

    /// Names the machine. A named machine is kept: it has a record and a disk of its own, on
    /// which what it writes survives [`Machine::stop`] and the next start, and it runs in a
    /// process of its own, where others find it by its name ([`Machine::connect`],
    /// [`Machines`]). See [`MachineName::parse`] for what a name may be.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// A named machine that is removed when it ends, and ends when its workload does.
    pub fn ephemeral(mut self, ephemeral: bool) -> Self {
        self.ephemeral = ephemeral;
        self
    }

    /// Stops a named machine when its workload ends; otherwise it stays for further commands.
    pub fn stop_on_exit(mut self, stop: bool) -> Self {
        self.spec.stop_on_exit = stop;
        self
    }

    /// Attaches a label to a named machine, for whoever manages machines.
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.spec.labels.insert(key.into(), value.into());
        self
    }

    /// The size of a named machine's disk in GiB.
    pub fn disk_gib(mut self, gib: u32) -> Self {
        self.spec.disk_gib = gib;
        self
    }

    /// Sets a variable for every command in the machine, over the image's.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.spec.defaults.env.push((name.into(), value.into()));
        self
    }

    /// The working directory of every command in the machine that does not say.
    pub fn workdir(mut self, dir: impl Into<String>) -> Self {
        self.spec.defaults.workdir = Some(dir.into());
        self
    }

    /// The user of every command in the machine that does not say, as for
    /// [`Exec::user`](crate::Exec::user).
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.spec.defaults.user = Some(user.into());
        self
    }

    /// What a named machine runs whenever it is started, as [`Machine::workload`] says: `args`
    /// follow the image's entrypoint or the one given here. What it writes goes to the machine's
    /// log.
    pub fn workload<I>(mut self, args: I, entrypoint: Option<&str>) -> Self
    where
        I: IntoIterator<Item: Into<String>>,
    {
        self.spec.workload = Some(Workload {
            args: args.into_iter().map(Into::into).collect(),
            entrypoint: entrypoint.map(str::to_owned),
        });
        self
    }

    /// The program that a named machine's process runs: `bantam`, or another that calls
    /// [`VmmProcess`](crate::VmmProcess). See [`Machines::vmm_program`] for the default.
    pub fn vmm_program(mut self, program: impl Into<PathBuf>) -> Self {
        self.vmm_program = Some(program.into());
        self
    }

    /// Lets programs in the machine trust what the host trusts: its bundle of certificates is put
    /// into the machine at each start, and the variables by which programs find one lead to it.
    ///
    /// # Errors
    /// [`Error::NoHostCertificates`] if the host has none in any known place.
    pub fn trust_host_certs(mut self) -> Result<Self, Error> {
        host_trust::host_bundle()?;
        self.spec.trust_host_certs = true;
        // Before what else is set, which must win.
        let variables = host_trust::certificate_variables();
        self.spec.defaults.env.splice(0..0, variables);
        Ok(self)
    }

    /// Lets programs in the machine use the proxies that this process is told to use by
    /// `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`. The network must grant their
    /// addresses. One on the host's loopback is known in the machine as `host.bantam.internal`.
    ///
    /// # Errors
    /// [`Error::ProxyOnHost`] if there is such a one and the network, which must be set before,
    /// does not grant the host's services.
    pub fn use_host_proxy(mut self) -> Result<Self, Error> {
        let variables = host_trust::proxy_variables();
        let granted = self
            .spec
            .network
            .as_ref()
            .is_some_and(|network| network.policy.allow_host_loopback);
        if host_trust::needs_host(&variables) && !granted {
            return Err(Error::ProxyOnHost);
        }
        self.spec.defaults.env.splice(0..0, variables);
        Ok(self)
    }

    /// Makes a named machine without starting it; [`Machines::start`] does.
    ///
    /// # Errors
    /// [`Error::MachineExists`], [`Error::BadName`], and what can fail with the image. Nothing is
    /// left then.
    pub fn create(self) -> Result<MachineInfo, Error> {
        let name = MachineName::parse(self.name.as_deref().unwrap_or_default())?;
        self.spec.check()?;
        let (image, source) = self.resolve()?;
        let machines = self.machines()?;
        machines.make(&name, self.spec, &image, source, self.ephemeral)?;
        machines.inspect(&name)
    }

    /// Resolves the image, boots the machine and returns when its agent answers. A machine with
    /// a name is made first, and its workload runs at the return.
    ///
    /// # Errors
    /// [`Error`] says which step failed, the start of the workload among them; nothing is left running
    /// then, and no record.
    pub fn start(self) -> Result<Machine, Error> {
        if let Some(name) = &self.name {
            let name = MachineName::parse(name)?;
            let (machines, boot_timeout) = (self.machines()?, self.boot_timeout);
            self.create()?;
            let started = machines.start_to_work(&name, boot_timeout);
            let started = started.and_then(|(machine, refused)| match refused {
                None => Ok(machine),
                Some(error) => Err(error),
            });
            return started.inspect_err(|_| {
                // The error that the caller gets says more than one about removing would.
                let _ = machines.delete(&name);
            });
        }
        let timeline = Timeline::start();
        self.spec.check()?;
        let guest = guest::find_guest(self.spec.kernel.clone())?;
        let (image, called) = self.resolve()?;
        timeline.mark(Phase::RootfsReady);
        let boot = Boot {
            spec: &self.spec,
            guest,
            image: &image,
            disk: self.disk.clone(),
            hostname: self.spec.hostname.as_deref().unwrap_or("bantam"),
            timeout: self.boot_timeout,
        };
        let local = Local::boot(boot, &timeline)?;
        let facts = Facts {
            name: None,
            image,
            called,
            engine: local.engine(),
            kernel_release: local.kernel_release().to_owned(),
            has_network: self.spec.network.is_some(),
            defaults: self.spec.defaults,
        };
        let machine = Machine::owned(local, facts, timeline);
        if self.spec.trust_host_certs {
            host_trust::install_certificates(&machine)?;
        }
        Ok(machine)
    }

    fn machines(&self) -> Result<Machines, Error> {
        let mut machines = Machines::open(&self.resolve_home()?);
        if let Some(program) = &self.vmm_program {
            machines = machines.vmm_program(program);
        }
        Ok(machines)
    }

    fn resolve_home(&self) -> Result<Home, Error> {
        self.home.clone().map_or_else(Home::from_env, Ok)
    }

    /// The image, and what it was called.
    fn resolve(&self) -> Result<(Image, String), Error> {
        let source = match self.image.as_ref().ok_or(Error::NoImage)? {
            ImageChoice::Text(text) => ImageSource::parse(text)?,
            ImageChoice::Source(source) => source.clone(),
        };
        let options = ResolveOptions {
            platform: self.platform.clone().unwrap_or_default(),
            pull: self.pull,
            registries: self.registries.clone(),
            ..ResolveOptions::default()
        };
        let store = Store::open(self.resolve_home()?.images())?;
        let image = store.resolve(&source, &options, self.progress.as_ref())?;
        let called = match self.image.as_ref() {
            Some(ImageChoice::Text(text)) => text.clone(),
            _ => image.digest.clone(),
        };
        Ok((image, called))
    }
}
