//! A vhost-user back-end: any device served to a front-end such as QEMU over a Unix socket.
//!
//! The front-end owns the virtio registers, tells us about guest memory, rings and event
//! descriptors, and we run the same device code as behind virtio-mmio. A device is activated when
//! every ring that was given a kick descriptor is enabled too, and reset when one is stopped. A ring
//! that the front-end keeps to itself (QEMU does so with the vsock event ring) is left out.
//!
//! QEMU acts on behalf of the guest, so what it says is checked as if the guest said it. Its memory
//! must be sealed against shrinking (`memory-backend-memfd` is), or a truncation would take our
//! process down with SIGBUS.

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::fs::SealFlags;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error as VhostError, GpuBackend, Result as VhostResult,
    VhostUserBackendReqHandlerMut,
};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion,
};

use crate::queue::QueueWiring;
use crate::sys;
use crate::{
    Activation, DeviceType, Error, EventFd, GuestRam, Interrupt, QueueConfig, QueueCursor,
    SharedCursor, VirtioDevice, features,
};

/// Most regions of guest memory a front-end may announce.
const MAX_REGIONS: usize = 32;
/// Largest ring. The front-end decides what the driver is offered, and QEMU's virtio-mmio offers this
/// much whatever the device wants.
const MAX_RING: u16 = 1024;
/// Largest piece of configuration space read or written at once, in bytes.
const MAX_CONFIG: u32 = 256;

/// A served device. Dropping it stops it, as [`stop`](Self::stop) does.
pub struct Server {
    socket: UnixStream,
    thread: Option<JoinHandle<()>>,
}

/// Serves `device` to the front-end at the other end of `socket`, on a thread of its own, until the
/// front-end hangs up or breaks the protocol, or the server is stopped. The device is dropped then.
///
/// # Errors
/// When the thread cannot be made.
pub fn serve(device: Box<dyn VirtioDevice>, socket: UnixStream) -> io::Result<Server> {
    let name = format!("vhost-{:?}", device.device_type()).to_lowercase();
    let backend = Arc::new(Mutex::new(Backend::new(device)));
    let (ours, theirs) = (socket.try_clone()?, socket.try_clone()?);
    let mut handler = BackendReqHandler::from_stream(socket, backend.clone());
    let thread = std::thread::Builder::new()
        .name(name.clone())
        .spawn(move || {
            loop {
                match handler.handle_request() {
                    Ok(()) => {}
                    Err(VhostError::SocketRetry(_)) => {}
                    // QEMU enables the rings of a network card before it says what it takes. Until
                    // it has, rings are enabled anyway, says the specification.
                    Err(VhostError::InactiveFeature(_)) => {
                        let mut backend = backend.lock().unwrap_or_else(PoisonError::into_inner);
                        backend.enable_rings();
                    }
                    Err(
                        VhostError::Disconnected
                        | VhostError::PartialMessage
                        | VhostError::SocketBroken(_),
                    ) => break,
                    Err(error) => {
                        tracing::warn!(device = name, %error, "vhost-user request failed; hanging up");
                        break;
                    }
                }
            }
            // The server has a copy of the socket: closing ours would tell nobody.
            let _ = theirs.shutdown(Shutdown::Both);
        })?;
    Ok(Server {
        socket: ours,
        thread: Some(thread),
    })
}

impl Server {
    /// Hangs up, stops the device and waits for both.
    pub fn stop(self) {}

    /// Whether serving has ended by itself.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails when the front-end hung up first.
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("vhost-user thread panicked");
        }
    }
}

/// The call and error descriptors, which may be exchanged while a device runs.
struct Calls {
    queues: Vec<Mutex<CallFds>>,
}

#[derive(Default)]
struct CallFds {
    call: Option<EventFd>,
    error: Option<EventFd>,
}

impl Calls {
    fn with<T>(&self, index: usize, f: impl FnOnce(&mut CallFds) -> T) -> Option<T> {
        let fds = self.queues.get(index)?;
        Some(f(&mut fds.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl Interrupt for Calls {
    fn used_queue(&self, queue: u16) {
        self.with(queue.into(), |fds| signal(fds.call.as_ref()));
    }

    /// There is no way to tell without the back-end channel, which nothing here needs.
    fn config_changed(&self) {}

    fn needs_reset(&self) {
        for index in 0..self.queues.len() {
            self.with(index, |fds| signal(fds.error.as_ref()));
        }
    }
}

fn signal(event: Option<&EventFd>) {
    if let Some(event) = event
        && let Err(error) = event.write(1)
        // A counter that is full is readable all the same.
        && error.kind() != io::ErrorKind::WouldBlock
    {
        tracing::debug!(%error, "signalling the front-end");
    }
}

#[derive(Default)]
struct Ring {
    config: QueueConfig,
    enabled: bool,
    kick: Option<EventFd>,
    cursor: Arc<SharedCursor>,
}

/// A region of the front-end's own address space, in which it names ring addresses.
struct UserRegion {
    user: u64,
    guest: u64,
    len: u64,
}

struct Backend {
    device: Box<dyn VirtioDevice>,
    running: bool,
    features: u64,
    memory: Option<Arc<GuestRam>>,
    user_regions: Vec<UserRegion>,
    rings: Vec<Ring>,
    calls: Arc<Calls>,
}

impl Backend {
    fn new(device: Box<dyn VirtioDevice>) -> Backend {
        let rings: Vec<_> = device
            .queue_max_sizes()
            .iter()
            .map(|_| Ring::default())
            .collect();
        let calls = Calls {
            queues: rings.iter().map(|_| Mutex::default()).collect(),
        };
        Backend {
            device,
            running: false,
            features: 0,
            memory: None,
            user_regions: Vec::new(),
            rings,
            calls: Arc::new(calls),
        }
    }

    fn offered(&self) -> u64 {
        self.device.features()
            | features::TRANSPORT
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn enable_rings(&mut self) {
        for ring in &mut self.rings {
            ring.enabled = true;
        }
    }

    fn ring(&mut self, index: u32) -> VhostResult<&mut Ring> {
        usize::try_from(index)
            .ok()
            .and_then(|index| self.rings.get_mut(index))
            .ok_or(VhostError::InvalidParam)
    }

    fn to_guest(&self, user: u64) -> VhostResult<u64> {
        self.user_regions
            .iter()
            .find_map(|region| {
                let offset = user.checked_sub(region.user)?;
                (offset < region.len).then(|| region.guest + offset)
            })
            .ok_or(VhostError::InvalidParam)
    }

    fn stop(&mut self) {
        self.device.reset();
        self.running = false;
    }

    /// Activates the device if the front-end finished setting up.
    fn start_if_ready(&mut self) -> VhostResult<()> {
        let Some(memory) = self.memory.clone() else {
            return Ok(());
        };
        let mut with_kick = self.rings.iter().filter(|ring| ring.kick.is_some());
        if with_kick.clone().next().is_none() || !with_kick.all(|ring| ring.enabled) {
            return Ok(());
        }
        // A ring that joins late: begin again with all of them.
        self.stop();
        let mut queues = Vec::with_capacity(self.rings.len());
        for (index, ring) in (0..).zip(&self.rings) {
            let Some(kick) = &ring.kick else { continue };
            // Only one cursor is handed over; the used ring itself has the other.
            let used_idx = GuestAddress(ring.config.used_ring)
                .0
                .checked_add(2)
                .and_then(|addr| {
                    let value: Result<u16, _> = memory.load(GuestAddress(addr), Ordering::Acquire);
                    value.ok()
                })
                .ok_or(VhostError::InvalidParam)?;
            let next_avail = ring.cursor.get().next_avail;
            let cursor = QueueCursor {
                next_avail,
                next_used: u16::from_le(used_idx),
            };
            ring.cursor.set(cursor);
            let config = QueueConfig {
                ready: true,
                ..ring.config
            };
            let wiring = QueueWiring {
                index,
                max_size: MAX_RING,
                memory: memory.clone(),
                features: self.features,
                kick: kick.try_clone().map_err(VhostError::ReqHandlerError)?,
                interrupt: self.calls.clone(),
                cursor: ring.cursor.clone(),
            };
            // The front-end passes on what the guest's driver chose.
            let wrong = |error| VhostError::ReqHandlerError(io::Error::other(error));
            queues.push(config.activate(wiring).map_err(wrong)?);
        }
        let activation = Activation {
            memory,
            features: self.features,
            queues,
        };
        match self.device.activate(activation) {
            Ok(()) => {
                self.running = true;
                Ok(())
            }
            // Rings that were enabled before, as QEMU's network card leaves them, get their kick
            // descriptors one by one.
            Err(Error::MissingQueue { .. }) => Ok(()),
            Err(error) => Err(VhostError::ReqHandlerError(io::Error::other(error))),
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.device.reset();
    }
}

/// Maps one region that the front-end announced.
fn map(region: &VhostUserMemoryRegion, file: File) -> VhostResult<GuestRegionMmap<()>> {
    let seals = rustix::fs::fcntl_get_seals(&file)
        .map_err(|error| VhostError::ReqHandlerError(error.into()))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(VhostError::InvalidOperation(
            "guest memory is not sealed against shrinking",
        ));
    }
    let size = usize::try_from(region.memory_size).map_err(|_| VhostError::InvalidParam)?;
    // Mapping beyond the end succeeds; touching it is a SIGBUS.
    let len = file.metadata().map_err(VhostError::ReqHandlerError)?.len();
    let end = region.mmap_offset.checked_add(region.memory_size);
    if end.is_none_or(|end| end > len) {
        return Err(VhostError::InvalidOperation(
            "guest memory is longer than its file",
        ));
    }
    MmapRegion::from_file(FileOffset::new(file, region.mmap_offset), size)
        .map_err(|error| VhostError::ReqHandlerError(io::Error::other(error)))
        .and_then(|mapping| {
            GuestRegionMmap::new(mapping, GuestAddress(region.guest_phys_addr))
                .ok_or(VhostError::InvalidParam)
        })
}

fn unsupported<T>() -> VhostResult<T> {
    Err(VhostError::InvalidOperation("not supported"))
}

impl VhostUserBackendReqHandlerMut for Backend {
    fn set_owner(&mut self) -> VhostResult<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> VhostResult<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> VhostResult<()> {
        self.stop();
        for ring in &mut self.rings {
            *ring = Ring::default();
        }
        Ok(())
    }

    fn get_features(&mut self) -> VhostResult<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> VhostResult<()> {
        if features & !self.offered() != 0 {
            return Err(VhostError::FeatureMismatch);
        }
        self.features = features & !VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        ctx: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> VhostResult<Option<Vec<vhost::VhostUserMemoryRegionBase>>> {
        if ctx.len() > MAX_REGIONS || ctx.len() != files.len() {
            return Err(VhostError::InvalidParam);
        }
        let mut regions = Vec::with_capacity(ctx.len());
        let mut user_regions = Vec::with_capacity(ctx.len());
        for (region, file) in ctx.iter().zip(files) {
            regions.push(map(region, file)?);
            user_regions.push(UserRegion {
                user: region.user_addr,
                guest: region.guest_phys_addr,
                len: region.memory_size,
            });
        }
        regions.sort_by_key(|region| region.start_addr());
        let memory = GuestRam::from_regions(regions)
            .map_err(|error| VhostError::ReqHandlerError(io::Error::other(error)))?;
        tracing::debug!(regions = memory.num_regions(), "guest memory");
        let was_running = self.running;
        self.stop();
        self.memory = Some(Arc::new(memory));
        self.user_regions = user_regions;
        if was_running {
            self.start_if_ready()?;
        }
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> VhostResult<()> {
        let size = u16::try_from(num).map_err(|_| VhostError::InvalidParam)?;
        self.ring(index)?.config.size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> VhostResult<()> {
        let desc_table = self.to_guest(descriptor)?;
        let avail_ring = self.to_guest(available)?;
        let used_ring = self.to_guest(used)?;
        let config = &mut self.ring(index)?.config;
        config.desc_table = desc_table;
        config.avail_ring = avail_ring;
        config.used_ring = used_ring;
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> VhostResult<()> {
        let next_avail = u16::try_from(base).map_err(|_| VhostError::InvalidParam)?;
        self.ring(index)?.cursor = Arc::new(SharedCursor::new(QueueCursor {
            next_avail,
            next_used: next_avail,
        }));
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> VhostResult<VhostUserVringState> {
        self.ring(index)?;
        self.stop();
        let ring = self.ring(index)?;
        ring.kick = None;
        let next_avail = ring.cursor.get().next_avail;
        Ok(VhostUserVringState::new(index, next_avail.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> VhostResult<()> {
        // Without a descriptor we would have to poll the ring.
        let file = fd.ok_or(VhostError::InvalidParam)?;
        let event = sys::event_from_file(file).map_err(VhostError::ReqHandlerError)?;
        self.ring(index.into())?.kick = Some(event);
        self.start_if_ready()
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> VhostResult<()> {
        let event = fd
            .map(sys::event_from_file)
            .transpose()
            .map_err(VhostError::ReqHandlerError)?;
        self.calls
            .with(index.into(), |fds| {
                fds.call = event;
                // A call on the old descriptor may not have been passed on.
                signal(fds.call.as_ref());
            })
            .ok_or(VhostError::InvalidParam)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> VhostResult<()> {
        let event = fd
            .map(sys::event_from_file)
            .transpose()
            .map_err(VhostError::ReqHandlerError)?;
        self.calls
            .with(index.into(), |fds| fds.error = event)
            .ok_or(VhostError::InvalidParam)
    }

    fn get_protocol_features(&mut self) -> VhostResult<VhostUserProtocolFeatures> {
        let mut offered = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::RESET_DEVICE;
        // QEMU warns when a device of a kind that has no configuration offers it, or one whose
        // configuration QEMU keeps itself.
        if !matches!(
            self.device.device_type(),
            DeviceType::Entropy | DeviceType::Net
        ) {
            offered |= VhostUserProtocolFeatures::CONFIG;
        }
        Ok(offered)
    }

    fn set_protocol_features(&mut self, _features: u64) -> VhostResult<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> VhostResult<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> VhostResult<()> {
        let was_enabled = std::mem::replace(&mut self.ring(index)?.enabled, enable);
        if enable && was_enabled && self.running {
            Ok(())
        } else if enable {
            self.start_if_ready()
        } else {
            self.stop();
            Ok(())
        }
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> VhostResult<Vec<u8>> {
        if size > MAX_CONFIG {
            return Err(VhostError::InvalidParam);
        }
        let mut data = vec![0; size as usize];
        self.device.read_config(offset.into(), &mut data);
        Ok(data)
    }

    fn set_config(
        &mut self,
        offset: u32,
        buf: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> VhostResult<()> {
        self.device.write_config(offset.into(), buf);
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> VhostResult<()> {
        unsupported()
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> VhostResult<File> {
        unsupported()
    }

    fn get_inflight_fd(
        &mut self,
        _inflight: &VhostUserInflight,
    ) -> VhostResult<(VhostUserInflight, File)> {
        unsupported()
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> VhostResult<()> {
        unsupported()
    }

    fn get_max_mem_slots(&mut self) -> VhostResult<u64> {
        unsupported()
    }

    fn add_mem_region(
        &mut self,
        _region: &VhostUserSingleMemoryRegion,
        _fd: File,
        _postcopy_listening: Option<bool>,
    ) -> VhostResult<Option<vhost::VhostUserMemoryRegionBase>> {
        unsupported()
    }

    fn remove_mem_region(&mut self, _region: &VhostUserSingleMemoryRegion) -> VhostResult<()> {
        unsupported()
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> VhostResult<Option<File>> {
        unsupported()
    }

    fn check_device_state(&mut self) -> VhostResult<()> {
        unsupported()
    }

    fn get_shmem_config(&mut self) -> VhostResult<VhostUserShMemConfig> {
        unsupported()
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> VhostResult<()> {
        unsupported()
    }
}
