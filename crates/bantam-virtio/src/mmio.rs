//! The virtio-mmio transport, version 2 (virtio 1.3 §4.2).
//!
//! Control registers are 32 bits wide and the driver must access them so (§4.2.2.2). A read of any
//! width and alignment gives the bytes of the registers it covers; a write takes effect for every
//! register it covers wholly and is ignored for the rest. Configuration space at 0x100 takes any
//! width. Accesses beyond [`WINDOW`] read as zero and write nothing.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::queue::QueueWiring;
use crate::sys;
use crate::warned::Warned;
use crate::{
    Activation, DeviceType, EventFd, GuestRam, Interrupt, InterruptLine, QueueConfig, QueueCursor,
    SharedCursor, VirtioDevice, features,
};

/// Size of a device's register window in bytes.
pub const WINDOW: u64 = 0x1000;
/// Offset of the register to which the driver writes the index of a queue it filled. An ioeventfd
/// here, one a queue with the index as datamatch (4 bytes), saves the exit.
pub const QUEUE_NOTIFY_OFFSET: u64 = 0x50;

const CONFIG_SPACE: u64 = 0x100;
const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
const VENDOR: u32 = u32::from_le_bytes(*b"bntm");

/// Device status bits (virtio 1.3 §2.1).
mod status {
    use virtio_bindings::virtio_config as config;
    pub(super) const DRIVER_OK: u32 = config::VIRTIO_CONFIG_S_DRIVER_OK;
    pub(super) const FEATURES_OK: u32 = config::VIRTIO_CONFIG_S_FEATURES_OK;
    pub(super) const NEEDS_RESET: u32 = config::VIRTIO_CONFIG_S_NEEDS_RESET;
    /// What the driver can set.
    pub(super) const DRIVER_BITS: u32 = config::VIRTIO_CONFIG_S_ACKNOWLEDGE
        | config::VIRTIO_CONFIG_S_DRIVER
        | DRIVER_OK
        | FEATURES_OK
        | config::VIRTIO_CONFIG_S_FAILED;
}

/// Interrupt status bits (virtio 1.3 §4.2.2).
const USED_BUFFER: u32 = 1;
const CONFIG_CHANGE: u32 = 2;

/// Declares the registers: name, offset.
macro_rules! registers {
    ($($name:ident = $offset:literal),* $(,)?) => {
        /// A control register (virtio 1.3 table 4.1).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Register { $($name),* }

        impl Register {
            fn at(offset: u64) -> Option<Register> {
                match offset {
                    $($offset => Some(Register::$name),)*
                    _ => None,
                }
            }
        }
    };
}

registers! {
    MagicValue = 0x00,
    Version = 0x04,
    DeviceId = 0x08,
    VendorId = 0x0c,
    DeviceFeatures = 0x10,
    DeviceFeaturesSel = 0x14,
    DriverFeatures = 0x20,
    DriverFeaturesSel = 0x24,
    QueueSel = 0x30,
    QueueSizeMax = 0x34,
    QueueSize = 0x38,
    QueueReady = 0x44,
    QueueNotify = 0x50,
    InterruptStatus = 0x60,
    InterruptAck = 0x64,
    Status = 0x70,
    QueueDescLow = 0x80,
    QueueDescHigh = 0x84,
    QueueDriverLow = 0x90,
    QueueDriverHigh = 0x94,
    QueueDeviceLow = 0xa0,
    QueueDeviceHigh = 0xa4,
    ShmLenLow = 0xb0,
    ShmLenHigh = 0xb4,
    ShmBaseLow = 0xb8,
    ShmBaseHigh = 0xbc,
    ConfigGeneration = 0xfc,
}

/// The part of the transport that the worker reaches as well.
struct MmioInterrupt {
    line: Arc<dyn InterruptLine>,
    pending: AtomicU32,
    needs_reset: AtomicBool,
    config_generation: AtomicU32,
    device: DeviceType,
    /// The driver misbehaves.
    broken: Warned,
    /// A descriptor does.
    failed: Warned,
}

impl MmioInterrupt {
    fn raise(&self, cause: u32) {
        self.pending.fetch_or(cause, Ordering::SeqCst);
        if let Err(error) = self.line.trigger()
            && self.failed.first()
        {
            tracing::error!(%error, "triggering a virtio-mmio interrupt");
        }
    }
}

impl Interrupt for MmioInterrupt {
    fn used_queue(&self, _queue: u16) {
        self.raise(USED_BUFFER);
    }

    fn config_changed(&self) {
        self.config_generation.fetch_add(1, Ordering::SeqCst);
        self.raise(CONFIG_CHANGE);
    }

    fn needs_reset(&self) {
        if self.broken.first() {
            tracing::warn!(device = ?self.device, "the driver broke the device; it needs a reset");
        }
        self.needs_reset.store(true, Ordering::SeqCst);
        self.raise(CONFIG_CHANGE);
    }
}

struct QueueSlot {
    max_size: u16,
    config: QueueConfig,
    kick: EventFd,
    cursor: Arc<SharedCursor>,
}

/// The registers of a transport as plain data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MmioState {
    /// Device status, with DEVICE_NEEDS_RESET.
    pub status: u32,
    /// Features the driver accepted so far.
    pub driver_features: u64,
    /// Pending interrupt causes.
    pub interrupt_status: u32,
    /// The value of QueueSel.
    pub queue_sel: u32,
    /// The registers and the position of each queue.
    pub queues: Vec<(QueueConfig, QueueCursor)>,
}

/// One device behind virtio-mmio registers.
pub struct MmioTransport {
    device: Box<dyn VirtioDevice>,
    memory: Arc<GuestRam>,
    interrupt: Arc<MmioInterrupt>,
    queues: Vec<QueueSlot>,
    status: u32,
    device_features: u64,
    device_features_sel: u32,
    driver_features: u64,
    driver_features_sel: u32,
    queue_sel: u32,
}

impl MmioTransport {
    /// Puts registers before `device`. The device works on `memory` and raises `line`.
    ///
    /// # Errors
    /// When the notifiers cannot be made (the process is out of descriptors).
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: Arc<GuestRam>,
        line: Arc<dyn InterruptLine>,
    ) -> io::Result<MmioTransport> {
        let queues = device
            .queue_max_sizes()
            .iter()
            .map(|&max_size| {
                Ok(QueueSlot {
                    max_size,
                    config: QueueConfig::default(),
                    kick: sys::event_fd()?,
                    cursor: Arc::default(),
                })
            })
            .collect::<io::Result<_>>()?;
        let device_features = device.features() | features::TRANSPORT;
        Ok(MmioTransport {
            memory,
            interrupt: Arc::new(MmioInterrupt {
                line,
                pending: AtomicU32::new(0),
                needs_reset: AtomicBool::new(false),
                config_generation: AtomicU32::new(0),
                device: device.device_type(),
                broken: Warned::default(),
                failed: Warned::default(),
            }),
            device,
            queues,
            status: 0,
            device_features,
            device_features_sel: 0,
            driver_features: 0,
            driver_features_sel: 0,
            queue_sel: 0,
        })
    }

    /// One descriptor a queue, by index, to be bound to [`QUEUE_NOTIFY_OFFSET`]. They stay the same
    /// for the life of the transport.
    pub fn notifiers(&self) -> Vec<&EventFd> {
        self.queues.iter().map(|queue| &queue.kick).collect()
    }

    /// Answers a read of `data.len()` bytes at `offset` in the window.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Some((controls, config)) = split_at_config(offset, data.len()) else {
            return;
        };
        let (control_data, rest) = data.split_at_mut(controls);
        let mut register: Option<(u64, [u8; 4])> = None;
        for (at, byte) in (offset..).zip(control_data) {
            let base = at & !3;
            let bytes = match register {
                Some((known, bytes)) if known == base => bytes,
                _ => {
                    let value =
                        Register::at(base).map_or(0, |register| self.read_register(register));
                    value.to_le_bytes()
                }
            };
            register = Some((base, bytes));
            *byte = bytes[usize::from((at & 3) as u8)];
        }
        if config > 0 {
            let start = offset.max(CONFIG_SPACE) - CONFIG_SPACE;
            self.device.read_config(start, &mut rest[..config]);
        }
    }

    /// Performs a write of `data` at `offset` in the window.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let Some((controls, config)) = split_at_config(offset, data.len()) else {
            return;
        };
        let (control_data, rest) = data.split_at(controls);
        // Only registers that are covered wholly: skip to the first word boundary.
        let skip = (offset.wrapping_neg() & 3) as usize;
        if let Some(words) = control_data.get(skip..) {
            for (at, word) in (offset + skip as u64..)
                .step_by(4)
                .zip(words.chunks_exact(4))
            {
                if let (Some(register), &[a, b, c, d]) = (Register::at(at), word) {
                    self.write_register(register, u32::from_le_bytes([a, b, c, d]));
                }
            }
        }
        if config > 0 {
            let start = offset.max(CONFIG_SPACE) - CONFIG_SPACE;
            self.device.write_config(start, &rest[..config]);
        }
    }

    /// Resets the device as a guest's write of 0 to Status does.
    pub fn reset(&mut self) {
        self.device.reset();
        self.status = 0;
        self.device_features_sel = 0;
        self.driver_features = 0;
        self.driver_features_sel = 0;
        self.queue_sel = 0;
        for queue in &mut self.queues {
            queue.config = QueueConfig::default();
            queue.cursor = Arc::default();
            if let Err(error) = sys::drain(&queue.kick)
                && self.interrupt.failed.first()
            {
                tracing::error!(%error, "draining a queue's notifier");
            }
        }
        self.interrupt.pending.store(0, Ordering::SeqCst);
        self.interrupt.needs_reset.store(false, Ordering::SeqCst);
    }

    /// The registers as plain data.
    pub fn state(&self) -> MmioState {
        MmioState {
            status: self.full_status(),
            driver_features: self.driver_features,
            interrupt_status: self.interrupt.pending.load(Ordering::SeqCst),
            queue_sel: self.queue_sel,
            queues: self
                .queues
                .iter()
                .map(|queue| (queue.config, queue.cursor.get()))
                .collect(),
        }
    }

    fn full_status(&self) -> u32 {
        if self.interrupt.needs_reset.load(Ordering::SeqCst) {
            self.status | status::NEEDS_RESET
        } else {
            self.status
        }
    }

    fn selected(&self) -> Option<&QueueSlot> {
        self.queues.get(usize::try_from(self.queue_sel).ok()?)
    }

    fn read_register(&self, register: Register) -> u32 {
        match register {
            Register::MagicValue => MAGIC,
            Register::Version => VERSION,
            Register::DeviceId => self.device.device_type().id(),
            Register::VendorId => VENDOR,
            Register::DeviceFeatures => half(self.device_features, self.device_features_sel),
            Register::QueueSizeMax => self.selected().map_or(0, |queue| queue.max_size.into()),
            Register::QueueReady => self.selected().map_or(0, |queue| queue.config.ready.into()),
            Register::InterruptStatus => self.interrupt.pending.load(Ordering::SeqCst),
            Register::Status => self.full_status(),
            // "No such region": all ones.
            Register::ShmLenLow
            | Register::ShmLenHigh
            | Register::ShmBaseLow
            | Register::ShmBaseHigh => u32::MAX,
            Register::ConfigGeneration => self.interrupt.config_generation.load(Ordering::SeqCst),
            // Write-only.
            Register::DeviceFeaturesSel
            | Register::DriverFeatures
            | Register::DriverFeaturesSel
            | Register::QueueSel
            | Register::QueueSize
            | Register::QueueNotify
            | Register::InterruptAck
            | Register::QueueDescLow
            | Register::QueueDescHigh
            | Register::QueueDriverLow
            | Register::QueueDriverHigh
            | Register::QueueDeviceLow
            | Register::QueueDeviceHigh => 0,
        }
    }

    fn write_register(&mut self, register: Register, value: u32) {
        match register {
            Register::DeviceFeaturesSel => self.device_features_sel = value,
            Register::DriverFeaturesSel => self.driver_features_sel = value,
            Register::DriverFeatures => self.write_driver_features(value),
            Register::QueueSel => self.queue_sel = value,
            Register::QueueNotify => self.notify(value),
            Register::InterruptAck => {
                self.interrupt.pending.fetch_and(!value, Ordering::SeqCst);
            }
            Register::Status => self.write_status(value),
            Register::QueueSize
            | Register::QueueReady
            | Register::QueueDescLow
            | Register::QueueDescHigh
            | Register::QueueDriverLow
            | Register::QueueDriverHigh
            | Register::QueueDeviceLow
            | Register::QueueDeviceHigh => self.write_queue(register, value),
            // Read-only.
            Register::MagicValue
            | Register::Version
            | Register::DeviceId
            | Register::VendorId
            | Register::DeviceFeatures
            | Register::QueueSizeMax
            | Register::InterruptStatus
            | Register::ShmLenLow
            | Register::ShmLenHigh
            | Register::ShmBaseLow
            | Register::ShmBaseHigh
            | Register::ConfigGeneration => {}
        }
    }

    fn write_driver_features(&mut self, value: u32) {
        // Settled by FEATURES_OK (virtio 1.3 §3.1.1).
        if self.status & status::FEATURES_OK == 0 {
            match self.driver_features_sel {
                0 => self.driver_features = self.driver_features & !0xffff_ffff | u64::from(value),
                1 => {
                    self.driver_features =
                        self.driver_features & 0xffff_ffff | u64::from(value) << 32;
                }
                _ => {}
            }
        }
    }

    fn write_queue(&mut self, register: Register, value: u32) {
        // Between FEATURES_OK and DRIVER_OK only: a running queue is not to be reconfigured.
        if self.status & (status::FEATURES_OK | status::DRIVER_OK) != status::FEATURES_OK {
            return;
        }
        let Some(queue) = usize::try_from(self.queue_sel)
            .ok()
            .and_then(|index| self.queues.get_mut(index))
        else {
            return;
        };
        let config = &mut queue.config;
        if register == Register::QueueReady {
            config.ready = value & 1 != 0;
            return;
        }
        // "The driver MUST NOT write" while the queue is ready (§4.2.2.2).
        if config.ready {
            return;
        }
        match register {
            // An impossible size stays impossible, and fails at activation.
            Register::QueueSize => config.size = u16::try_from(value).unwrap_or(0),
            Register::QueueDescLow => set_low(&mut config.desc_table, value),
            Register::QueueDescHigh => set_high(&mut config.desc_table, value),
            Register::QueueDriverLow => set_low(&mut config.avail_ring, value),
            Register::QueueDriverHigh => set_high(&mut config.avail_ring, value),
            Register::QueueDeviceLow => set_low(&mut config.used_ring, value),
            Register::QueueDeviceHigh => set_high(&mut config.used_ring, value),
            _ => {}
        }
    }

    fn notify(&self, index: u32) {
        if self.status & status::DRIVER_OK == 0 {
            return;
        }
        if let Some(queue) = usize::try_from(index)
            .ok()
            .and_then(|index| self.queues.get(index))
            && let Err(error) = queue.kick.write(1)
            && self.interrupt.failed.first()
        {
            tracing::error!(index, %error, "notifying a queue");
        }
    }

    fn write_status(&mut self, value: u32) {
        if value == 0 {
            self.reset();
            return;
        }
        let mut new = value & status::DRIVER_BITS;
        // Bits are only ever added; a reset takes them all.
        new |= self.status;
        let added = new & !self.status;
        if added & status::FEATURES_OK != 0 && !self.features_are_acceptable() {
            new &= !status::FEATURES_OK;
        }
        if new & status::FEATURES_OK == 0 {
            new &= !status::DRIVER_OK;
        }
        let start = new & !self.status & status::DRIVER_OK != 0;
        self.status = new;
        if start {
            self.activate();
        }
    }

    fn features_are_acceptable(&self) -> bool {
        self.driver_features & !self.device_features == 0
            && self.driver_features & features::VERSION_1 != 0
    }

    fn activate(&mut self) {
        let wire = |(index, queue): (u16, &QueueSlot)| {
            let kick = queue
                .kick
                .try_clone()
                .map_err(|source| crate::Error::Worker {
                    device: "virtio-mmio",
                    source,
                })?;
            queue.config.activate(QueueWiring {
                index,
                max_size: queue.max_size,
                memory: self.memory.clone(),
                features: self.driver_features,
                kick,
                interrupt: self.interrupt.clone(),
                cursor: queue.cursor.clone(),
            })
        };
        let activated = (0..)
            .zip(&self.queues)
            .filter(|(_, queue)| queue.config.ready)
            .map(wire)
            .collect::<crate::Result<Vec<_>>>()
            .and_then(|queues| {
                self.device.activate(Activation {
                    memory: self.memory.clone(),
                    features: self.driver_features,
                    queues,
                })
            });
        if let Err(error) = activated {
            tracing::debug!(device = ?self.device.device_type(), %error, "activation failed");
            self.interrupt.needs_reset();
        }
    }
}

impl Drop for MmioTransport {
    fn drop(&mut self) {
        self.device.reset();
    }
}

/// How many of `len` bytes at `offset` lie in the control registers, and how many in configuration
/// space; the rest is outside the window. None when all is.
fn split_at_config(offset: u64, len: usize) -> Option<(usize, usize)> {
    let left = usize::try_from(WINDOW.checked_sub(offset)?).ok()?;
    let len = len.min(left);
    let controls = usize::try_from(CONFIG_SPACE.saturating_sub(offset))
        .ok()?
        .min(len);
    Some((controls, len - controls))
}

/// 32 bits of a 64-bit set.
fn half(features: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = features.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

fn set_low(address: &mut u64, value: u32) {
    *address = *address & !0xffff_ffff | u64::from(value);
}

fn set_high(address: &mut u64, value: u32) {
    *address = *address & 0xffff_ffff | u64::from(value) << 32;
}
