//! What a machine is made of.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bantam_vmm::{EngineChoice, MemorySize, VmConfig};
use serde::{Deserialize, Serialize};

use crate::{Error, MachineBuilder, NetworkConfig, disk};

/// The description of a machine, without its image: what [`MachineBuilder`] collects and a
/// machine's record keeps.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) cpus: u8,
    pub(crate) memory_mib: u32,
    #[serde(with = "engine", default)]
    pub(crate) engine: EngineChoice,
    #[serde(default)]
    pub(crate) kernel: Option<PathBuf>,
    #[serde(default)]
    pub(crate) kernel_args: Option<String>,
    /// The network card, if there is to be one.
    #[serde(default)]
    pub(crate) network: Option<NetworkConfig>,
    /// The host's certificates are put into the machine at each start.
    #[serde(default)]
    pub(crate) trust_host_certs: bool,
    /// The guest's host name; a named machine's is its name unless it says otherwise.
    #[serde(default)]
    pub(crate) hostname: Option<String>,
    /// Size of the machine's own disk in GiB, for a named machine.
    pub(crate) disk_gib: u32,
    #[serde(default)]
    pub(crate) defaults: CommandDefaults,
    #[serde(default)]
    pub(crate) workload: Option<Workload>,
    /// Stop the machine when the workload ends.
    #[serde(default)]
    pub(crate) stop_on_exit: bool,
    #[serde(default)]
    pub(crate) labels: BTreeMap<String, String>,
}

/// What every command in the machine gets unless it says otherwise; over the image's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CommandDefaults {
    #[serde(default)]
    pub(crate) env: Vec<(String, String)>,
    #[serde(default)]
    pub(crate) workdir: Option<String>,
    #[serde(default)]
    pub(crate) user: Option<String>,
}

/// What a named machine runs whenever it is started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Workload {
    /// Arguments to the entrypoint; empty for the image's own.
    #[serde(default)]
    pub(crate) args: Vec<String>,
    /// Replaces the image's entrypoint; empty for none.
    #[serde(default)]
    pub(crate) entrypoint: Option<String>,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            cpus: MachineBuilder::DEFAULT_CPUS,
            memory_mib: MachineBuilder::DEFAULT_MEMORY_MIB,
            engine: EngineChoice::Auto,
            kernel: None,
            kernel_args: None,
            network: None,
            trust_host_certs: false,
            hostname: None,
            disk_gib: MachineBuilder::DEFAULT_DISK_GIB,
            defaults: CommandDefaults::default(),
            workload: None,
            stop_on_exit: false,
            labels: BTreeMap::new(),
        }
    }
}

impl Spec {
    /// Refuses what no start could ever do, while nothing has happened yet.
    pub(crate) fn check(&self) -> Result<(), Error> {
        MemorySize::from_mib(self.memory_mib)?;
        VmConfig::check_cpus(self.cpus)?;
        disk::check_size(self.disk_gib)
    }
}

/// An engine choice by its name on the command line.
mod engine {
    use bantam_vmm::EngineChoice;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(
        choice: &EngineChoice,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(match choice {
            EngineChoice::Auto => "auto",
            EngineChoice::Only(kind) => kind.name(),
        })
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<EngineChoice, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}
