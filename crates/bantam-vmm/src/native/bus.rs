//! Which device answers which address.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bantam_arch::x86_64::layout::{self, MmioSlot};
use bantam_hypervisor::{DataMatch, EventFd, IoAddress, Vm};
use bantam_virtio::mmio::{self, MmioTransport};
use bantam_virtio::{GuestRam, VirtioDevice};

use vmm_sys_util::eventfd::EFD_NONBLOCK;

use super::serial;
use crate::{ConsoleLog, VmmError};

/// Everything a vCPU can reach outside its memory.
pub(super) struct Bus {
    transports: Vec<Mutex<MmioTransport>>,
    console: ConsoleLog,
}

impl Bus {
    /// Puts each device on virtio-mmio, its notifications on ioeventfds and its interrupt on an
    /// irqfd.
    pub(super) fn wire(
        vm: &dyn Vm,
        ram: &Arc<GuestRam>,
        devices: Vec<(&'static str, Box<dyn VirtioDevice>)>,
        console: ConsoleLog,
    ) -> Result<Self, VmmError> {
        let transports = (0..)
            .zip(devices)
            .map(|(index, (name, device))| {
                let slot = layout::mmio_slot(index).ok_or_else(|| VmmError::Device {
                    device: name,
                    reason: "no virtio-mmio slot is left".to_owned(),
                })?;
                wire_device(vm, ram, name, device, slot).map(Mutex::new)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            transports,
            console,
        })
    }

    pub(super) fn mmio_read(&self, addr: u64, data: &mut [u8]) {
        match self.transport(addr) {
            Some((mut transport, offset)) => transport.read(offset, data),
            // As on a PC, nothing drives the lines.
            None => data.fill(0xff),
        }
    }

    pub(super) fn mmio_write(&self, addr: u64, data: &[u8]) {
        if let Some((mut transport, offset)) = self.transport(addr) {
            transport.write(offset, data);
        }
    }

    pub(super) fn port_in(&self, port: u16, data: &mut [u8]) {
        let value = if serial::owns(port) {
            serial::read(port)
        } else {
            0xff
        };
        data.fill(value);
    }

    pub(super) fn port_out(&self, port: u16, data: &[u8]) {
        if serial::owns(port) {
            serial::write(port, data, &self.console);
        }
    }

    /// Stops every device and waits for its thread.
    pub(super) fn reset(&self) {
        for transport in &self.transports {
            lock(transport).reset();
        }
    }

    fn transport(&self, addr: u64) -> Option<(MutexGuard<'_, MmioTransport>, u64)> {
        let (index, offset) = layout::mmio_slot_at(addr)?;
        let transport = self.transports.get(usize::try_from(index).ok()?)?;
        Some((lock(transport), offset))
    }
}

fn lock(transport: &Mutex<MmioTransport>) -> MutexGuard<'_, MmioTransport> {
    transport.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wire_device(
    vm: &dyn Vm,
    ram: &Arc<GuestRam>,
    name: &'static str,
    device: Box<dyn VirtioDevice>,
    slot: MmioSlot,
) -> Result<MmioTransport, VmmError> {
    let fail = || VmmError::device(name);
    let line = EventFd::new(EFD_NONBLOCK).map_err(fail())?;
    vm.irqfd(slot.gsi, &line)?;
    let transport = MmioTransport::new(device, Arc::clone(ram), Arc::new(line)).map_err(fail())?;
    let notify = IoAddress::Mmio(slot.base + mmio::QUEUE_NOTIFY_OFFSET);
    for (queue, notifier) in (0..).zip(transport.notifiers()) {
        vm.ioeventfd(notify, DataMatch::U32(queue), notifier)?;
    }
    Ok(transport)
}
