//! The native engine: our own monitor on the host's hypervisor.
//!
//! The thread of the first vCPU owns the machine. When a vCPU has ended the guest, something has
//! failed or the owner kills it, that thread leaves the guest, stops every other vCPU, resets every
//! device (whose threads end with that), gives the memory back and reports. Queue notifications
//! and interrupts do not come by here: they travel between the kernel and the device threads over
//! ioeventfd and irqfd.

mod bus;
mod memory;
mod serial;
#[cfg(test)]
mod tests;
mod vcpu;

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use bantam_arch::x86_64::boot::{self, Entry, RNG_SEED_LEN};
use bantam_arch::x86_64::{self as arch, layout};
use bantam_hypervisor::{Hypervisor, VcpuBinder, VcpuKicker, Vm};
use bantam_virtio::{GuestRam, VirtioDevice};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::vm::{ExitCause, Kill, Running, StartContext};
use crate::{Phase, VmConfig, VmmError, cmdline};
use bus::Bus;

/// Starts a machine on the host's hypervisor.
pub(crate) fn start(config: &VmConfig, context: StartContext) -> Result<Running, VmmError> {
    start_on(bantam_hypervisor::open()?.as_ref(), config, context)
}

fn start_on(
    hypervisor: &dyn Hypervisor,
    config: &VmConfig,
    context: StartContext,
) -> Result<Running, VmmError> {
    let StartContext {
        devices,
        console,
        exit,
        timeline,
    } = context;
    let cpus = u32::from(config.cpus);
    // Before `vm`, so that an early return drops it after `vm`.
    let ram = memory::reserve(config.memory)?;
    let vm: Box<dyn Vm> = hypervisor.create_vm(&bantam_hypervisor::VmConfig::new(cpus))?;
    timeline.mark(Phase::VmCreated);

    map_ram(vm.as_ref(), &ram)?;
    let devices: Vec<(_, Box<dyn VirtioDevice>)> = devices
        .into_devices()
        .map(|(kind, device)| (kind.name(), device))
        .collect();
    let entry = load(config, devices.len(), &ram)?;
    timeline.mark(Phase::MemoryReady);

    let bus = Arc::new(Bus::wire(vm.as_ref(), &ram, devices, console)?);
    timeline.mark(Phase::DevicesReady);

    // All vCPUs exist before the first runs: it may start the others at once.
    let first = vm.create_vcpu(0)?;
    let others = (1..cpus)
        .map(|id| vm.create_vcpu(id))
        .collect::<Result<Vec<_>, _>>()?;
    let shared = vcpu::Shared {
        bus: Arc::clone(&bus),
        entry,
        cpus,
        ending: Arc::new(Ending::new(first.kicker())),
        timeline,
    };
    let ending = Arc::clone(&shared.ending);
    let machine = Machine {
        others: Others::start(others, &shared)?,
        bus,
        vm,
        ram: Arc::clone(&ram),
    };
    Ok(Running {
        machine: Box::new(Native(ending)),
        supervisor: vcpu::spawn_first(first, shared, machine, exit)?,
    })
}

#[allow(unsafe_code)] // the order of drops, which is this module's to guarantee
fn map_ram(vm: &dyn Vm, ram: &GuestRam) -> Result<(), VmmError> {
    // SAFETY: `start_on` declares its reference to the RAM before the `Vm` and the vCPUs, the first vCPU
    // is gone before its thread drops the `Machine`, and that drops the others and the `Vm` before its
    // own, so the RAM outlives all of them on every path.
    unsafe { memory::map(vm, ram) }
}

/// Puts kernel, initramfs and boot data into RAM.
fn load(config: &VmConfig, devices: usize, ram: &Arc<GuestRam>) -> Result<Entry, VmmError> {
    let mapper = memory::Mapper(ram);
    let kernel = config.guest.open()?.load_with(ram, &mapper)?;
    let initramfs = &config.guest.initramfs;
    let mut file = File::open(initramfs).map_err(|source| VmmError::File {
        what: "initramfs",
        path: initramfs.clone(),
        source,
    })?;
    let initrd = boot::load_initrd(ram, &kernel, &mut file)?;
    let slots: Vec<_> = (0..).map_while(layout::mmio_slot).take(devices).collect();
    let cmdline = cmdline::build(config, &slots, &[serial::CMDLINE]);
    Ok(boot::prepare(
        ram,
        &arch::Boot {
            kernel: &kernel,
            cmdline: &cmdline,
            initrd: Some(initrd),
            vcpus: u32::from(config.cpus),
            devices: u32::try_from(slots.len()).unwrap_or(u32::MAX),
            rng_seed: Some(rng_seed()?),
        },
    )?)
}

/// Randomness for the guest's kernel, new at every start.
fn rng_seed() -> Result<[u8; RNG_SEED_LEN], VmmError> {
    let mut seed = [0; RNG_SEED_LEN];
    // Up to 256 bytes come whole (`man 2 getrandom`).
    getrandom(&mut seed, GetRandomFlags::empty()).map_err(|error| {
        VmmError::io("cannot get a seed for the guest's randomness")(error.into())
    })?;
    Ok(seed)
}

/// Everything but the first vCPU that must be gone before the machine is reported as ended; dropped
/// in this order.
struct Machine {
    others: Others,
    bus: Arc<Bus>,
    vm: Box<dyn Vm>,
    ram: Arc<GuestRam>,
}

impl Machine {
    /// Takes all of it away. The first vCPU is gone.
    fn take_down(self) {
        // Should one of these panic, they go in the opposite order of their names here: RAM last.
        let Self {
            ram,
            vm,
            bus,
            others,
        } = self;
        drop(others);
        bus.reset();
        drop(vm);
        drop(bus);
        drop(ram);
    }
}

/// That a machine is to end, and why.
struct Ending {
    cause: Mutex<Option<ExitCause>>,
    decided: AtomicBool,
    /// Of the vCPU whose thread takes the machine down.
    first: Arc<dyn VcpuKicker>,
}

impl Ending {
    fn new(first: Arc<dyn VcpuKicker>) -> Self {
        Self {
            cause: Mutex::new(None),
            decided: AtomicBool::new(false),
            first,
        }
    }

    /// Ends the machine, if nothing else has: the first cause counts.
    fn end(&self, cause: ExitCause) {
        self.lock().get_or_insert(cause);
        self.decided.store(true, Ordering::Release);
        self.first.kick();
    }

    fn is_decided(&self) -> bool {
        self.decided.load(Ordering::Acquire)
    }

    fn cause(&self) -> ExitCause {
        self.lock().clone().unwrap_or(ExitCause::Killed)
    }

    fn lock(&self) -> MutexGuard<'_, Option<ExitCause>> {
        self.cause.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads of all vCPUs but the first. Dropping it stops them.
struct Others {
    ending: Arc<Ending>,
    kickers: Vec<Arc<dyn VcpuKicker>>,
    threads: Vec<JoinHandle<()>>,
}

impl Others {
    fn start(binders: Vec<Box<dyn VcpuBinder>>, shared: &vcpu::Shared) -> Result<Self, VmmError> {
        let mut others = Self {
            ending: Arc::clone(&shared.ending),
            kickers: binders.iter().map(|binder| binder.kicker()).collect(),
            threads: Vec::new(),
        };
        for binder in binders {
            let thread = vcpu::spawn_other(binder, shared.clone())?;
            others.threads.push(thread);
        }
        Ok(others)
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        // Has been decided, unless the start failed.
        self.ending.end(ExitCause::Killed);
        for kicker in &self.kickers {
            kicker.kick();
        }
        for thread in self.threads.drain(..) {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

struct Native(Arc<Ending>);

impl Kill for Native {
    fn kill(&self) {
        self.0.end(ExitCause::Killed);
    }
}
