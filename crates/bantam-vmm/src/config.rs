//! What a machine is made of.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use bantam_arch::x86_64::Kernel;

use crate::{EngineChoice, VmmError};

/// Guest memory in MiB, within what the boot layout supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySize(u32);

impl MemorySize {
    /// The least memory that boots our kernel and leaves room for a command.
    pub const MIN_MIB: u32 = 64;
    /// 1 TiB: far above any host we know, far below any arithmetic limit.
    pub const MAX_MIB: u32 = 1024 * 1024;

    /// Checks a size in MiB.
    ///
    /// # Errors
    /// [`VmmError::Config`] outside [`Self::MIN_MIB`]..=[`Self::MAX_MIB`].
    pub fn from_mib(mib: u32) -> Result<Self, VmmError> {
        if (Self::MIN_MIB..=Self::MAX_MIB).contains(&mib) {
            Ok(Self(mib))
        } else {
            Err(VmmError::Config(format!(
                "memory of {mib} MiB is outside {} to {} MiB",
                Self::MIN_MIB,
                Self::MAX_MIB
            )))
        }
    }

    /// The size in MiB.
    #[must_use]
    pub fn mib(self) -> u32 {
        self.0
    }

    /// The size in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        u64::from(self.0) << 20
    }
}

/// The kernel and the initramfs a machine boots from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestKernel {
    /// An uncompressed ELF image or a bzImage.
    pub kernel: PathBuf,
    /// A newc cpio archive whose `/init` is the agent.
    pub initramfs: PathBuf,
}

impl GuestKernel {
    pub(crate) fn open(&self) -> Result<Kernel, VmmError> {
        Kernel::open(&self.kernel).map_err(|source| VmmError::Kernel {
            path: self.kernel.clone(),
            source,
        })
    }
}

/// A raw disk. The first is `/dev/vda` in the guest, the second `/dev/vdb`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The raw file.
    pub path: PathBuf,
    /// Enforced by the device on the host: the file is opened read-only, too.
    pub read_only: bool,
}

impl Disk {
    /// Opens the file. Whoever may write to it has it alone: two guests that write to one file
    /// system destroy it.
    pub(crate) fn open(&self) -> Result<File, VmmError> {
        self.open_locked().map_err(|source| VmmError::File {
            what: "disk",
            path: self.path.clone(),
            source,
        })
    }

    fn open_locked(&self) -> io::Result<File> {
        let file = File::options()
            .read(true)
            .write(!self.read_only)
            .open(&self.path)?;
        if !self.read_only {
            file.try_lock().map_err(|error| match error {
                TryLockError::WouldBlock => {
                    io::Error::new(io::ErrorKind::ResourceBusy, "another machine uses it")
                }
                TryLockError::Error(error) => error,
            })?;
        }
        Ok(file)
    }
}

/// Everything needed to start one virtual machine.
#[derive(Debug, Clone)]
pub struct VmConfig {
    /// Number of vCPUs, 1 to [`VmConfig::MAX_CPUS`].
    pub cpus: u8,
    /// Guest memory.
    pub memory: MemorySize,
    /// What to boot.
    pub guest: GuestKernel,
    /// Disks in guest order.
    pub disks: Vec<Disk>,
    /// Its network card, if it has one, and what is behind that.
    pub network: Option<bantam_net::Config>,
    /// Which engine may run it.
    pub engine: EngineChoice,
    /// Words appended to the kernel's command line.
    pub extra_cmdline: Option<String>,
}

impl VmConfig {
    /// The most vCPUs a machine may have.
    pub const MAX_CPUS: u8 = 32;
    /// The most disks a machine may have.
    pub const MAX_DISKS: usize = 4;

    /// Checks a number of vCPUs.
    ///
    /// # Errors
    /// [`VmmError::Config`] outside 1..=[`Self::MAX_CPUS`].
    pub fn check_cpus(cpus: u8) -> Result<(), VmmError> {
        if cpus == 0 || cpus > Self::MAX_CPUS {
            return Err(VmmError::Config(format!(
                "{cpus} vCPUs are outside 1 to {}",
                Self::MAX_CPUS
            )));
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), VmmError> {
        Self::check_cpus(self.cpus)?;
        if self.disks.len() > Self::MAX_DISKS {
            return Err(VmmError::Config(format!(
                "{} disks are more than {}",
                self.disks.len(),
                Self::MAX_DISKS
            )));
        }
        for (what, path) in [
            ("kernel", &self.guest.kernel),
            ("initramfs", &self.guest.initramfs),
        ] {
            readable(what, path)?;
        }
        Ok(())
    }
}

fn readable(what: &'static str, path: &Path) -> Result<(), VmmError> {
    File::open(path).map(drop).map_err(|source| VmmError::File {
        what,
        path: path.to_path_buf(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_outside_the_supported_range_is_refused() {
        for mib in [0, 1, 63, 1024 * 1024 + 1, u32::MAX] {
            assert!(MemorySize::from_mib(mib).is_err(), "{mib}");
        }
        assert_eq!(MemorySize::from_mib(64).unwrap().bytes(), 64 << 20);
        assert_eq!(
            MemorySize::from_mib(1024 * 1024).unwrap().bytes(),
            1_u64 << 40
        );
    }

    fn config(cpus: u8) -> VmConfig {
        VmConfig {
            cpus,
            memory: MemorySize::from_mib(64).unwrap(),
            guest: GuestKernel {
                kernel: "/nonexistent/vmlinux".into(),
                initramfs: "/nonexistent/initramfs".into(),
            },
            disks: Vec::new(),
            network: None,
            engine: EngineChoice::Auto,
            extra_cmdline: None,
        }
    }

    #[test]
    fn a_missing_kernel_is_named_in_the_error() {
        let error = config(1).check().unwrap_err().to_string();
        assert!(error.contains("/nonexistent/vmlinux"), "{error}");
    }

    #[test]
    fn a_disk_is_written_to_by_one_machine_at_a_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let disk = |read_only| Disk {
            path: file.path().to_path_buf(),
            read_only,
        };
        let first = disk(false).open().unwrap();
        let error = disk(false).open().unwrap_err();
        assert!(error.to_string().contains(file.path().to_str().unwrap()));
        let reason = std::error::Error::source(&error).unwrap().to_string();
        assert!(reason.contains("another machine"), "{reason}");
        drop(first);
        disk(false).open().unwrap();
        let (_one, _two) = (disk(true).open().unwrap(), disk(true).open().unwrap());
    }

    #[test]
    fn too_few_and_too_many_vcpus_are_refused() {
        for cpus in [0, VmConfig::MAX_CPUS + 1, u8::MAX] {
            assert!(matches!(config(cpus).check(), Err(VmmError::Config(_))));
        }
    }
}
