//! The native engine: our own monitor on the host's hypervisor.
//!
//! One supervisor thread owns the machine. It waits until a vCPU ends the guest, something
//! fails or the owner kills it; then it stops every vCPU, resets every device (whose threads
//! end with that), gives the memory back and reports. Queue notifications and interrupts do not
//! come by here: they travel between the kernel and the device threads over ioeventfd and irqfd.

mod bus;
mod memory;
mod serial;
#[cfg(test)]
mod tests;
mod vcpu;

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use bantam_arch::x86_64::boot::{self, Entry, RNG_SEED_LEN};
use bantam_arch::x86_64::{self as arch, layout};
use bantam_hypervisor::{Hypervisor, VcpuKicker, Vm};
use bantam_virtio::{GuestRam, VirtioDevice};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::devices::DeviceKind;
use crate::vm::{ExitCause, ExitGuard, Kill, Running, StartContext};
use crate::{Phase, Timeline, VmConfig, VmmError, cmdline};
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
        // The kernel gets a seed instead.
        .filter(|(kind, _)| *kind != DeviceKind::Rng)
        .map(|(kind, device)| (kind.name(), device))
        .collect();
    let entry = load(config, devices.len(), &ram)?;
    timeline.mark(Phase::MemoryReady);

    let bus = Arc::new(Bus::wire(vm.as_ref(), &ram, devices, console)?);
    timeline.mark(Phase::DevicesReady);

    let (events, ended) = mpsc::channel();
    let vcpus = Vcpus::create(vm.as_ref(), cpus, &bus, entry, &events, &timeline)?;
    let machine = Machine {
        vcpus,
        bus,
        vm,
        ram,
    };
    let supervisor = thread::Builder::new()
        .name("vm".to_owned())
        .spawn(move || machine.supervise(&ended, &ExitGuard(exit)))
        .map_err(VmmError::io("cannot start the supervisor thread"))?;
    Ok(Running {
        machine: Box::new(Native {
            events: Mutex::new(events),
        }),
        supervisor,
    })
}

#[allow(unsafe_code)] // the order of drops, which is this module's to guarantee
fn map_ram(vm: &dyn Vm, ram: &GuestRam) -> Result<(), VmmError> {
    // SAFETY: `start_on` declares its reference to the RAM before the `Vm`, and `Machine::supervise`
    // drops the vCPUs and the `Vm` before its own, so the RAM outlives both on every path.
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

/// Everything that must be gone before the machine is reported as ended; dropped in this order.
struct Machine {
    vcpus: Vcpus,
    bus: Arc<Bus>,
    vm: Box<dyn Vm>,
    ram: Arc<GuestRam>,
}

impl Machine {
    fn supervise(self, ended: &Receiver<ExitCause>, exit: &ExitGuard) {
        // The vCPU threads hold senders, so there is always a cause.
        let cause = ended.recv().unwrap_or(ExitCause::Killed);
        let Self {
            vcpus,
            bus,
            vm,
            ram,
        } = self;
        drop(vcpus);
        bus.reset();
        drop(vm);
        drop(bus);
        drop(ram);
        exit.0.set(cause);
    }
}

/// The vCPU threads. Dropping it stops them.
struct Vcpus {
    stop: Arc<AtomicBool>,
    kickers: Vec<Arc<dyn VcpuKicker>>,
    threads: Vec<JoinHandle<()>>,
}

impl Vcpus {
    fn create(
        vm: &dyn Vm,
        cpus: u32,
        bus: &Arc<Bus>,
        entry: Entry,
        events: &Sender<ExitCause>,
        timeline: &Timeline,
    ) -> Result<Self, VmmError> {
        // All vCPUs exist before the first runs: it may start the others at once.
        let binders = (0..cpus)
            .map(|id| vm.create_vcpu(id))
            .collect::<Result<Vec<_>, _>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let mut vcpus = Self {
            stop: Arc::clone(&stop),
            kickers: binders.iter().map(|binder| binder.kicker()).collect(),
            threads: Vec::new(),
        };
        for binder in binders {
            let shared = vcpu::Shared {
                bus: Arc::clone(bus),
                entry,
                cpus,
                stop: Arc::clone(&stop),
                events: events.clone(),
                timeline: timeline.clone(),
            };
            vcpus.threads.push(vcpu::spawn(binder, shared)?);
        }
        Ok(vcpus)
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        for kicker in &self.kickers {
            kicker.kick();
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has sent that as its cause.
            let _ = thread.join();
        }
    }
}

struct Native {
    events: Mutex<Sender<ExitCause>>,
}

impl Kill for Native {
    fn kill(&self) {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        // Fails only when the supervisor has ended, which is what is wanted.
        let _ = events.send(ExitCause::Killed);
    }
}
