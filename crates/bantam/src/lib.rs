//! A sandbox with its own Linux kernel, for any Rust program.
//!
//! [`Machine::builder`] boots an OCI image in a microVM; [`Machine::exec`] runs commands in it.
//! There is no daemon, no container engine and no need for root. Everything blocks; no async
//! runtime is involved. Nothing in this library prints, exits, or changes signal handling.
//!
//! ```no_run
//! use std::time::Duration;
//! use bantam::Machine;
//!
//! let machine = Machine::builder().image("python:3.12-slim").memory_mib(512).start()?;
//! let out = machine
//!     .exec(["bash", "-c", "uname -a"])
//!     .env("GREETING", "hello")
//!     .timeout(Duration::from_secs(120))
//!     .output()?;
//! println!("{}", String::from_utf8_lossy(&out.stdout));
//! machine.write_file("/tmp/in", b"bytes")?;
//! assert_eq!(machine.read_file("/tmp/in")?, b"bytes");
//! let report = machine.stop()?;
//! println!("ended: {:?}", report.cause);
//! # Ok::<(), bantam::Error>(())
//! ```
//!
//! Dropping a [`Machine`] ends it and leaves nothing behind. A machine with a name is kept: see
//! [`MachineBuilder::name`] and [`Machines`].

mod builder;
mod capped;
mod child;
mod command;
mod confine;
mod control;
mod copy;
pub mod disk;
mod error;
mod files;
mod guest;
mod home;
mod host;
mod host_trust;
mod images;
mod local;
mod machine;
mod machines;
mod network;
mod spec;
mod started;
mod status;
#[cfg(test)]
mod testing;
mod transfer;
mod watch;
mod wire;

pub use bantam_archive::Error as ArchiveError;
pub use bantam_image::Error as ImageError;
pub use bantam_image::{
    BlobInfo, Credential, Image, ImageConfig, ImageDetails, ImageSource, Layer, Loaded, NoProgress,
    Platform, Progress, Pruned, PullPolicy, Reference, Registries, Removed, ResolveOptions, Stage,
    StoredImage, Timeouts, Usage,
};
pub use bantam_net::{
    Cidr, CidrRule, EgressEvent, Error as NetworkError, HostRule, Network, Policy, PortForward,
    Ports, Protocol, Stats as NetworkStats,
};
pub use bantam_protocol::{DiskUse, FileFailureKind, FileKind, GuestStats, Size, StartFailedKind};
pub use bantam_vmm::{
    Availability, EngineChoice, EngineKind, EngineReport, ExitCause, GuestKernel, Phase, Timeline,
    VmmError, probe_engines,
};
pub use builder::MachineBuilder;
pub use child::{Child, ChildHandle, ChildStderr, ChildStdin, ChildStdout};
pub use command::{Exec, Running};
pub use confine::Confinement;
pub use copy::{Copied, CopyOptions};
pub use error::Error;
pub use files::FileInfo;
pub use guest::{find_disk_template, find_guest, guest_search_path};
pub use home::Home;
pub use images::Images;
pub use machine::{Machine, Report};
pub use machines::{
    Changes, EgressRecord, LogOptions, MachineInfo, MachineName, MachineState, MachineStats,
    Machines, Stopped, Stopper, VmmProcess,
};
pub use network::{NetworkConfig, raise_descriptor_limit};
pub use status::{Finished, Output, Status};
