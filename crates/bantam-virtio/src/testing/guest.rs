//! A guest with one device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use super::{Buffer, PATIENCE, TestRing, ram, take, wait_event};
use crate::mmio::{MmioTransport, QUEUE_NOTIFY_OFFSET};
use crate::queue::QueueWiring;
use crate::{
    Activation, EventFd, GuestRam, Interrupt, QueueConfig, SharedCursor, VirtioDevice, features,
    sys,
};

/// How the guest reaches its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// The device is activated by hand.
    Direct,
    /// The driver writes virtio-mmio registers.
    Mmio,
    /// The device is served over vhost-user, with the `vhost` crate as front-end.
    #[cfg(feature = "vhost-user")]
    VhostUser,
}

impl Transport {
    /// Every transport there is.
    pub const ALL: &[Transport] = &[
        Transport::Direct,
        Transport::Mmio,
        #[cfg(feature = "vhost-user")]
        Transport::VhostUser,
    ];
}

/// The device, attached.
enum Attached {
    Direct(Box<dyn VirtioDevice>, Arc<Events>),
    Mmio(Box<MmioTransport>, Arc<EventFd>),
    #[cfg(feature = "vhost-user")]
    VhostUser(Box<front_end::FrontEnd>),
}

/// Interrupts as event descriptors.
struct Events {
    used: Vec<EventFd>,
    needs_reset: AtomicBool,
    config: EventFd,
}

impl Interrupt for Events {
    fn used_queue(&self, queue: u16) {
        self.used[usize::from(queue)].write(1).unwrap();
    }

    fn config_changed(&self) {
        self.config.write(1).unwrap();
    }

    fn needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
        self.config.write(1).unwrap();
    }
}

/// A guest with fake RAM, one device and a driver for it.
pub struct Guest {
    /// Guest RAM, see [`ram`].
    pub memory: Arc<GuestRam>,
    /// The driver's side of each queue.
    pub rings: Vec<TestRing>,
    attached: Attached,
    next_buffer: u64,
}

/// Where the rings are.
const RINGS: u64 = 0x10000;
/// Where buffers are handed out from.
const BUFFERS: u64 = 1 << 20;

impl Guest {
    /// A guest whose driver set `device` up over `transport`, accepted all features, and is ready.
    pub fn start(transport: Transport, device: impl VirtioDevice + 'static) -> Guest {
        let mut guest = Guest::attach(transport, Box::new(device), u16::MAX);
        guest.activate(u64::MAX, &guest.configs());
        guest
    }

    /// A guest that has not begun with its device. Rings have at most `max_size` descriptors.
    pub fn attach(transport: Transport, device: Box<dyn VirtioDevice>, max_size: u16) -> Guest {
        let memory = ram();
        let sizes = device.queue_max_sizes().to_vec();
        let events = |count: usize| (0..count).map(|_| sys::event_fd().unwrap()).collect();
        let (attached, kicks): (Attached, Vec<EventFd>) = match transport {
            Transport::Direct => {
                let interrupt = Arc::new(Events {
                    used: events(sizes.len()),
                    needs_reset: AtomicBool::new(false),
                    config: sys::event_fd().unwrap(),
                });
                (Attached::Direct(device, interrupt), events(sizes.len()))
            }
            Transport::Mmio => {
                let line = Arc::new(sys::event_fd().unwrap());
                let mmio = MmioTransport::new(device, memory.clone(), line.clone()).unwrap();
                let kicks = mmio.notifiers();
                let kicks = kicks.iter().map(|kick| kick.try_clone().unwrap()).collect();
                (Attached::Mmio(Box::new(mmio), line), kicks)
            }
            #[cfg(feature = "vhost-user")]
            Transport::VhostUser => {
                let front_end = front_end::FrontEnd::new(device, &memory, sizes.len());
                let kicks = events(sizes.len());
                (Attached::VhostUser(Box::new(front_end)), kicks)
            }
        };
        let rings = (0..)
            .zip(sizes.iter().zip(kicks))
            .map(|(index, (&size, kick))| {
                let base = RINGS + index * TestRing::ROOM;
                TestRing::new(memory.clone(), base, size.min(max_size), kick)
            })
            .collect();
        Guest {
            memory,
            rings,
            attached,
            next_buffer: BUFFERS,
        }
    }

    /// The registers of all rings.
    pub fn configs(&self) -> Vec<QueueConfig> {
        self.rings.iter().map(TestRing::config).collect()
    }

    /// Sets the device up with the given registers and those of `wanted` features that it offers.
    /// Whether it worked shows in [`needs_reset`](Self::needs_reset).
    pub fn activate(&mut self, wanted: u64, configs: &[QueueConfig]) {
        match &mut self.attached {
            Attached::Direct(device, interrupt) => {
                let features = wanted & (device.features() | features::TRANSPORT);
                let queues = (0..)
                    .zip(&self.rings)
                    .zip(configs)
                    .map(|((index, ring), config)| {
                        config.activate(QueueWiring {
                            index,
                            max_size: ring.size(),
                            memory: self.memory.clone(),
                            features,
                            kick: ring.kick.try_clone().unwrap(),
                            interrupt: interrupt.clone(),
                            cursor: Arc::<SharedCursor>::default(),
                        })
                    })
                    .collect::<crate::Result<Vec<_>>>();
                let activated = queues.and_then(|queues| {
                    device.activate(Activation {
                        memory: self.memory.clone(),
                        features,
                        queues,
                    })
                });
                if activated.is_err() {
                    interrupt.needs_reset();
                }
            }
            Attached::Mmio(mmio, _) => mmio_activate(mmio, wanted, configs),
            #[cfg(feature = "vhost-user")]
            Attached::VhostUser(front_end) => {
                front_end.activate(&self.memory, wanted, configs, &self.rings);
            }
        }
    }

    /// A piece of guest RAM that nothing else uses, filled with `bytes`.
    pub fn place(&mut self, bytes: &[u8]) -> u64 {
        let addr = self.alloc(bytes.len() as u64);
        self.memory.write_slice(bytes, GuestAddress(addr)).unwrap();
        addr
    }

    /// A piece of guest RAM that nothing else uses.
    pub fn alloc(&mut self, len: u64) -> u64 {
        let addr = self.next_buffer;
        self.next_buffer = (addr + len).next_multiple_of(64);
        assert!(self.next_buffer <= super::LOW_END, "fake RAM is used up");
        addr
    }

    /// Writes bytes into guest RAM.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(addr)).unwrap();
    }

    /// Whether the device returned a chain on `queue` that was not looked at yet.
    pub fn has_used(&self, queue: usize) -> bool {
        self.rings[queue].has_used()
    }

    /// Bytes of guest RAM.
    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(&mut bytes, GuestAddress(addr))
            .unwrap();
        bytes
    }

    /// Publishes a chain on `queue` and kicks; gives its head.
    pub fn submit(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let head = self.rings[queue].add(buffers);
        self.rings[queue].kick();
        head
    }

    /// Submits a chain and waits for it; gives the bytes written.
    pub fn request(&mut self, queue: usize, buffers: &[Buffer]) -> u32 {
        let head = self.submit(queue, buffers);
        let (id, written) = self.wait_used(queue);
        assert_eq!(id, u32::from(head));
        written
    }

    /// Waits for the interrupt that says that the device returned a chain on `queue`.
    pub fn wait_used(&mut self, queue: usize) -> (u32, u32) {
        self.wait_used_for(queue, PATIENCE)
            .expect("the device returns the chain")
    }

    /// The same, for at most `patience`.
    pub fn wait_used_for(&mut self, queue: usize, patience: Duration) -> Option<(u32, u32)> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(used) = self.rings[queue].take_used() {
                return Some(used);
            }
            if !self.wait_interrupt(queue, deadline) {
                return None;
            }
        }
    }

    /// Waits for an interrupt of `queue`; false when `deadline` passed first.
    pub fn wait_interrupt(&mut self, queue: usize, deadline: Instant) -> bool {
        match &mut self.attached {
            Attached::Direct(_, events) => {
                let event = &events.used[queue];
                wait_event(event, deadline) && take(event)
            }
            Attached::Mmio(mmio, line) => {
                if !wait_event(line, deadline) {
                    return false;
                }
                take(line);
                // As the driver does: look, acknowledge, then serve the rings.
                let causes = read_register(mmio, 0x60);
                write_register(mmio, 0x64, causes);
                true
            }
            #[cfg(feature = "vhost-user")]
            Attached::VhostUser(front_end) => {
                let event = front_end.call(queue);
                wait_event(event, deadline) && take(event)
            }
        }
    }

    /// Whether the device asked for a reset, or (vhost-user) the back-end refused to start.
    pub fn needs_reset(&mut self) -> bool {
        match &mut self.attached {
            Attached::Direct(_, events) => events.needs_reset.load(Ordering::SeqCst),
            Attached::Mmio(mmio, _) => read_register(mmio, 0x70) & 0x40 != 0,
            #[cfg(feature = "vhost-user")]
            Attached::VhostUser(front_end) => front_end.needs_reset(),
        }
    }

    /// Waits until the device asked for a reset.
    pub fn wait_needs_reset(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.needs_reset() {
            let woken = match &self.attached {
                Attached::Direct(_, events) => {
                    wait_event(&events.config, deadline) && take(&events.config)
                }
                Attached::Mmio(_, line) => wait_event(line, deadline) && take(line),
                #[cfg(feature = "vhost-user")]
                Attached::VhostUser(front_end) => wait_event(front_end.error(), deadline),
            };
            assert!(woken, "the device asks for a reset");
        }
    }

    /// Resets the device, as the driver does.
    pub fn reset(&mut self) {
        match &mut self.attached {
            Attached::Direct(device, _) => device.reset(),
            Attached::Mmio(mmio, _) => write_register(mmio, 0x70, 0),
            #[cfg(feature = "vhost-user")]
            Attached::VhostUser(front_end) => front_end.stop(),
        }
    }

    /// Sets the device up again, with empty rings.
    pub fn restart(&mut self) {
        for ring in &mut self.rings {
            ring.clear();
        }
        self.activate(u64::MAX, &self.configs());
    }

    /// Reads the device's configuration space, with the transport's means.
    pub fn read_config(&mut self, offset: u32, data: &mut [u8]) {
        match &mut self.attached {
            Attached::Direct(device, _) => device.read_config(offset.into(), data),
            Attached::Mmio(mmio, _) => mmio.read(0x100 + u64::from(offset), data),
            #[cfg(feature = "vhost-user")]
            Attached::VhostUser(front_end) => front_end.read_config(offset, data),
        }
    }

    /// The virtio-mmio transport, where that is what there is.
    pub fn mmio(&mut self) -> Option<&mut MmioTransport> {
        match &mut self.attached {
            Attached::Mmio(mmio, _) => Some(mmio),
            _ => None,
        }
    }
}

fn read_register(mmio: &mut MmioTransport, offset: u64) -> u32 {
    let mut data = [0; 4];
    mmio.read(offset, &mut data);
    u32::from_le_bytes(data)
}

fn write_register(mmio: &mut MmioTransport, offset: u64, value: u32) {
    mmio.write(offset, &value.to_le_bytes());
}

/// The register sequence of virtio 1.3 §3.1.1 and §4.2.3.
fn mmio_activate(mmio: &mut MmioTransport, wanted: u64, configs: &[QueueConfig]) {
    assert_eq!(read_register(mmio, 0x00), 0x7472_6976);
    assert_eq!(read_register(mmio, 0x04), 2);
    write_register(mmio, 0x70, 0);
    write_register(mmio, 0x70, 1 | 2);
    for half in 0..2 {
        write_register(mmio, 0x14, half);
        let offered = read_register(mmio, 0x10);
        write_register(mmio, 0x24, half);
        let wanted = u32::try_from(wanted >> (32 * half) & 0xffff_ffff).unwrap();
        write_register(mmio, 0x20, offered & wanted);
    }
    write_register(mmio, 0x70, 1 | 2 | 8);
    assert_eq!(read_register(mmio, 0x70), 1 | 2 | 8);
    for (index, config) in (0..).zip(configs) {
        write_register(mmio, 0x30, index);
        assert_eq!(read_register(mmio, 0x44), 0);
        assert!(read_register(mmio, 0x34) >= u32::from(config.size));
        write_register(mmio, 0x38, config.size.into());
        for (offset, addr) in [
            (0x80, config.desc_table),
            (0x90, config.avail_ring),
            (0xa0, config.used_ring),
        ] {
            write_register(mmio, offset, u32::try_from(addr & 0xffff_ffff).unwrap());
            write_register(mmio, offset + 4, u32::try_from(addr >> 32).unwrap());
        }
        write_register(mmio, 0x44, config.ready.into());
    }
    write_register(mmio, 0x70, 1 | 2 | 8 | 4);
}

// The offset that a trapped notification takes is the constant the VMM binds.
const _: () = assert!(QUEUE_NOTIFY_OFFSET == 0x50);

#[cfg(feature = "vhost-user")]
mod front_end {
    use std::os::unix::net::UnixStream;

    use vhost::vhost_user::message::{
        VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
        VhostUserVirtioFeatures,
    };
    use vhost::vhost_user::{Frontend, VhostUserFrontend};
    use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
    use vm_memory::{GuestAddress, GuestMemoryBackend};

    use super::{EventFd, GuestRam, QueueConfig, TestRing, VirtioDevice, sys, take};
    use crate::vhost_user::{Server, serve};

    /// Plays QEMU.
    pub(super) struct FrontEnd {
        front_end: Frontend,
        server: Option<Server>,
        features: u64,
        calls: Vec<EventFd>,
        error: EventFd,
        needs_reset: bool,
    }

    impl FrontEnd {
        pub(super) fn new(
            device: Box<dyn VirtioDevice>,
            memory: &GuestRam,
            queues: usize,
        ) -> FrontEnd {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let server = serve(device, theirs).unwrap();
            let mut front_end = Frontend::from_stream(ours, queues as u64);
            front_end.set_owner().unwrap();
            let features = front_end.get_features().unwrap();
            let protocol = front_end.get_protocol_features().unwrap();
            assert!(
                protocol
                    .contains(VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK)
            );
            front_end.set_protocol_features(protocol).unwrap();
            front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            assert_eq!(front_end.get_queue_num().unwrap(), queues as u64);
            let regions: Vec<_> = memory
                .iter()
                .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
                .collect();
            front_end.set_features(features).unwrap();
            front_end.set_mem_table(&regions).unwrap();
            FrontEnd {
                front_end,
                server: Some(server),
                features,
                calls: (0..queues).map(|_| sys::event_fd().unwrap()).collect(),
                error: sys::event_fd().unwrap(),
                needs_reset: false,
            }
        }

        pub(super) fn activate(
            &mut self,
            memory: &GuestRam,
            wanted: u64,
            configs: &[QueueConfig],
            rings: &[TestRing],
        ) {
            let outcome = self.try_activate(memory, wanted, configs, rings);
            self.needs_reset = outcome.is_err();
        }

        fn try_activate(
            &mut self,
            memory: &GuestRam,
            wanted: u64,
            configs: &[QueueConfig],
            rings: &[TestRing],
        ) -> vhost::Result<()> {
            let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
            let front_end = &mut self.front_end;
            front_end.set_features(self.features & (wanted | protocol))?;
            // An address outside of RAM has no user address: one that is certainly wrong.
            let user = |addr| {
                memory
                    .get_host_address(GuestAddress(addr))
                    .map_or(0, |pointer| pointer as u64)
            };
            for (index, config) in configs.iter().enumerate() {
                front_end.set_vring_num(index, config.size)?;
                front_end.set_vring_base(index, 0)?;
                let addresses = VringConfigData {
                    queue_max_size: rings[index].size(),
                    queue_size: config.size,
                    flags: 0,
                    desc_table_addr: user(config.desc_table),
                    used_ring_addr: user(config.used_ring),
                    avail_ring_addr: user(config.avail_ring),
                    log_addr: None,
                };
                front_end.set_vring_addr(index, &addresses)?;
                front_end.set_vring_call(index, &self.calls[index])?;
                front_end.set_vring_err(index, &self.error)?;
                front_end.set_vring_kick(index, &rings[index].kick)?;
            }
            for index in 0..configs.len() {
                front_end.set_vring_enable(index, true)?;
            }
            Ok(())
        }

        pub(super) fn call(&self, queue: usize) -> &EventFd {
            &self.calls[queue]
        }

        pub(super) fn error(&self) -> &EventFd {
            &self.error
        }

        pub(super) fn needs_reset(&mut self) -> bool {
            self.needs_reset |= take(&self.error);
            self.needs_reset
        }

        pub(super) fn stop(&mut self) {
            for index in 0..self.calls.len() {
                // Fails when the back-end hung up, which stops it too.
                let _ = self.front_end.set_vring_enable(index, false);
                let _ = self.front_end.get_vring_base(index);
            }
            self.needs_reset = false;
            take(&self.error);
        }

        pub(super) fn read_config(&mut self, offset: u32, data: &mut [u8]) {
            let size = u32::try_from(data.len()).unwrap();
            let flags = VhostUserConfigFlags::WRITABLE;
            let (_, read) = self
                .front_end
                .get_config(offset, size, flags, data)
                .unwrap();
            data.copy_from_slice(&read);
        }
    }

    impl Drop for FrontEnd {
        fn drop(&mut self) {
            if let Some(server) = self.server.take() {
                server.stop();
            }
        }
    }
}
