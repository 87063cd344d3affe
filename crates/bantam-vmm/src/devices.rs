//! The devices of a machine that every engine has.

use bantam_net::Network;
use bantam_virtio::VirtioDevice;
use bantam_virtio::block::BlockDevice;
use bantam_virtio::net::NetDevice;
use bantam_virtio::vsock::{Vsock, VsockDevice};

use crate::network::StackBackend;
use crate::{VmConfig, VmmError};

/// The guest's vsock address. Machines do not see each other, so all may have the same.
const GUEST_CID: u32 = 3;

/// Which device stands at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    Block,
    Vsock,
    Net,
    Rng,
}

impl DeviceKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Vsock => "vsock",
            Self::Net => "net",
            Self::Rng => "rng",
        }
    }
}

/// The host's ends of devices.
pub(crate) struct Handles {
    pub(crate) vsock: Vsock,
    pub(crate) network: Option<Network>,
}

/// The closed list of them, in guest order.
pub(crate) struct DeviceSet(Vec<(DeviceKind, Box<dyn VirtioDevice>)>);

impl DeviceSet {
    /// Builds every device that `config` asks for. Ports of the host that lead to the machine are
    /// taken from now on.
    pub(crate) fn build(config: &VmConfig) -> Result<(Self, Handles), VmmError> {
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
        let mut network = None;
        if let Some(config) = &config.network {
            let (handle, stack) = bantam_net::open(config)?;
            let backend = Box::new(StackBackend(stack));
            let card = NetDevice::new(backend, config.addresses.guest_mac, config.mtu);
            devices.push((DeviceKind::Net, Box::new(card)));
            network = Some(handle);
        }
        Ok((Self(devices), Handles { vsock, network }))
    }

    pub(crate) fn into_devices(self) -> impl Iterator<Item = (DeviceKind, Box<dyn VirtioDevice>)> {
        self.0.into_iter()
    }
}
