//! The devices of a machine, the same for every engine.

use bantam_virtio::VirtioDevice;
use bantam_virtio::block::BlockDevice;
use bantam_virtio::rng::RngDevice;
use bantam_virtio::vsock::{Vsock, VsockDevice};

use crate::{VmConfig, VmmError};

/// The guest's vsock address. Machines do not see each other, so all may have the same.
const GUEST_CID: u32 = 3;

/// Which device stands at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    Block,
    Vsock,
    Rng,
}

impl DeviceKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Vsock => "vsock",
            Self::Rng => "rng",
        }
    }
}

/// The closed list of a machine's devices, in guest order.
pub(crate) struct DeviceSet(Vec<(DeviceKind, Box<dyn VirtioDevice>)>);

impl DeviceSet {
    /// Builds every device that `config` asks for.
    pub(crate) fn build(config: &VmConfig) -> Result<(Self, Vsock), VmmError> {
        let (vsock_device, vsock) =
            VsockDevice::new(GUEST_CID).map_err(VmmError::device("vsock"))?;
        let mut devices: Vec<(DeviceKind, Box<dyn VirtioDevice>)> = Vec::new();
        for (index, disk) in config.disks.iter().enumerate() {
            let file = disk.open()?;
            let id = format!("disk{index}");
            let block =
                BlockDevice::new(file, disk.read_only, &id).map_err(|error| VmmError::Device {
                    device: "block",
                    reason: format!("{}: {error}", disk.path.display()),
                })?;
            devices.push((DeviceKind::Block, Box::new(block)));
        }
        devices.push((DeviceKind::Vsock, Box::new(vsock_device)));
        devices.push((DeviceKind::Rng, Box::new(RngDevice::new())));
        Ok((Self(devices), vsock))
    }

    pub(crate) fn into_devices(self) -> impl Iterator<Item = (DeviceKind, Box<dyn VirtioDevice>)> {
        self.0.into_iter()
    }
}
