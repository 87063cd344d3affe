//! How a guest fares.

use serde::{Deserialize, Serialize};

/// What the guest's kernel says of itself. A value it does not give is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStats {
    /// Memory the kernel manages, in bytes.
    pub memory_total: u64,
    /// Memory that could be given to processes without swapping, in bytes.
    pub memory_available: u64,
    /// Processor time spent on anything but idling, of all CPUs together, since the boot, in
    /// nanoseconds.
    pub cpu_ns: u64,
    /// CPUs that are on.
    pub cpus: u32,
    /// Load averages of 1, 5 and 15 minutes, in hundredths.
    pub load_hundredths: [u32; 3],
    /// Time since the boot, in nanoseconds.
    pub uptime_ns: u64,
    /// Processes there are, the agent included.
    pub processes: u32,
    /// The root filesystem.
    pub disk: DiskUse,
}

/// How full a filesystem is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUse {
    /// Its size in bytes.
    pub total: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes that an ordinary user may still write.
    pub available: u64,
}
