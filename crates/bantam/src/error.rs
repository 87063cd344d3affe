//! The library's error.

use std::io;
use std::path::PathBuf;

use bantam_image::Error as ImageError;
use bantam_protocol::{FileFailureKind, StartFailedKind};
use bantam_vmm::VmmError;

use crate::MachineName;

/// Codes that exit codes are told by, too.
const COMMAND_NOT_FOUND: &str = "command_not_found";
const COMMAND_NOT_EXECUTABLE: &str = "command_not_executable";

/// What can fail between a call and its result.
///
/// A message starts with what failed; [`Error::hint`] says what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No image was named.
    #[error("no image was given")]
    NoImage,
    /// The image could not be resolved, pulled, read or converted.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The virtual machine could not be started.
    #[error(transparent)]
    Vm(#[from] VmmError),
    /// The guest kernel or the initramfs was not found.
    #[error("the guest kernel and initramfs were not found (looked in {})", join(.searched))]
    GuestNotFound {
        /// Every directory that was tried.
        searched: Vec<PathBuf>,
    },
    /// The guest did not come up.
    #[error("the machine did not boot: {reason} ({engine} engine)")]
    Boot {
        /// What happened.
        reason: String,
        /// The engine.
        engine: bantam_vmm::EngineKind,
        /// The last lines of the guest's console.
        console: Vec<String>,
    },
    /// The agent in the guest is not the one this library was built with.
    #[error("the initramfs is of another version: it speaks protocol {found}, not {expected}")]
    AgentVersion {
        /// The guest's protocol version.
        found: u32,
        /// Ours.
        expected: u32,
    },
    /// A command could not be started.
    #[error("cannot run '{command}': {message}")]
    Start {
        /// The command's name.
        command: String,
        /// What sort of failure.
        kind: StartFailedKind,
        /// Why.
        message: String,
    },
    /// A file in the guest could not be read or written.
    #[error("{message}")]
    File {
        /// What sort of failure.
        kind: FileFailureKind,
        /// What happened, naming the path.
        message: String,
    },
    /// A network's rule, setting or port is wrong or cannot be had.
    #[error(transparent)]
    Network(#[from] bantam_net::Error),
    /// Files on the host could not be copied, or the guest's archive of them is malformed.
    #[error(transparent)]
    Archive(#[from] bantam_archive::Error),
    /// A file in the guest is larger than a call that returns it whole takes.
    #[error("'{path}' is larger than {limit} bytes")]
    TooLarge {
        /// The path in the guest.
        path: String,
        /// The limit in bytes.
        limit: u64,
    },
    /// The machine ended while it was needed.
    #[error("the machine ended while {what}: {cause}")]
    MachineDied {
        /// What was going on.
        what: String,
        /// Why it ended, as far as is known.
        cause: String,
        /// The last lines of the guest's console.
        console: Vec<String>,
    },
    /// The agent in a machine that still runs did not do its part.
    #[error("the agent in the machine {reason} while {what}")]
    Agent {
        /// What was going on.
        what: String,
        /// What the agent did or did not do.
        reason: String,
    },
    /// The guest sent something that makes no sense.
    #[error("the guest broke the protocol: {0}")]
    Protocol(String),
    /// A command is empty or holds a NUL byte.
    #[error("invalid command: {0}")]
    InvalidCommand(String),
    /// What a machine was to be called is no name.
    #[error("'{name}' is no name for a machine: it {reason}")]
    BadName {
        /// What was given.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// There is no such machine.
    #[error("machine '{name}' not found: there is no such machine")]
    NoSuchMachine {
        /// Its name.
        name: String,
    },
    /// There is a machine of that name.
    #[error("machine '{name}' already exists")]
    MachineExists {
        /// Its name.
        name: String,
    },
    /// The machine must run for that.
    #[error("machine '{name}' is not running (it is {state})")]
    NotRunning {
        /// Its name.
        name: String,
        /// Its state.
        state: String,
    },
    /// The machine must not run for that.
    #[error("machine '{name}' is running, and can be changed only when it is stopped")]
    MachineRuns {
        /// Its name.
        name: String,
    },
    /// Another process is doing something with the machine, and takes too long.
    #[error("machine '{name}' is busy: another process starts, changes or removes it")]
    MachineBusy {
        /// Its name.
        name: String,
    },
    /// The process that has the machine does not answer.
    #[error("machine '{name}' is unreachable: its process does not answer")]
    Unreachable {
        /// Its name.
        name: String,
    },
    /// The image of a machine is no longer in the store.
    #[error("image '{image}' is not in the store any more")]
    ImageGone {
        /// What it was called.
        image: String,
    },
    /// The host has no bundle of certificates to trust.
    #[error("this host has no bundle of certificates in any known place")]
    NoHostCertificates,
    /// A proxy is on the host, whose services are not granted.
    #[error("the proxy listens on this host, and the machine may not reach this host")]
    ProxyOnHost,
    /// A change to a machine that cannot be made.
    #[error("cannot change the machine: {0}")]
    BadChange(String),
    /// No program was found to run a machine's process.
    #[error("no program 'bantam' was found to run the machine's process")]
    NoVmmProgram,
    /// A file that describes a machine makes no sense.
    #[error("cannot use {}: {reason}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of a machine could not be handled.
    #[error("cannot {what} {}", path.display())]
    State {
        /// What was attempted.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// What went wrong in the process of a machine.
    #[error("{message}")]
    Remote {
        /// As of [`Error::code`].
        code: String,
        /// What happened, with its causes.
        message: String,
        /// As of [`Error::hint`].
        hint: Option<String>,
        /// As of [`Error::console`].
        console: Vec<String>,
    },
    /// Bytes could not be moved to or from the caller's side.
    #[error("{what}")]
    Io {
        /// What was attempted.
        what: &'static str,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A machine's disk could not be made or grown.
    #[error("{what} {}", path.display())]
    Disk {
        /// What was attempted.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// No disk has this size.
    #[error(
        "a disk of {gib} GiB is outside {} to {} GiB",
        crate::disk::MIN_GIB,
        crate::disk::MAX_GIB
    )]
    DiskSize {
        /// The size asked for, in GiB.
        gib: u32,
    },
    /// The file system that disks are made of was not found.
    #[error("the template of disks was not found (looked for disk.ext4 in {})", join(.searched))]
    DiskTemplateNotFound {
        /// Every directory that was tried.
        searched: Vec<PathBuf>,
    },
    /// No directory for state could be determined.
    #[error(
        "cannot tell where to keep images and machines: neither BANTAM_HOME, HOME, nor XDG_CACHE_HOME and XDG_DATA_HOME are set"
    )]
    NoHome,
}

fn join(paths: &[PathBuf]) -> String {
    let shown: Vec<_> = paths
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    shown.join(", ")
}

impl Error {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }

    /// The message, and after it those of its causes. A cause that its parent quotes already is not
    /// said twice.
    ///
    /// It may quote what a guest, an image or a registry said: escape control characters before you
    /// show it on a terminal.
    #[must_use]
    pub fn message_with_causes(&self) -> String {
        let mut message = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let text = error.to_string();
            if !message.contains(&text) {
                message = format!("{message}: {text}");
            }
            cause = error.source();
        }
        message
    }

    /// What the user can do next, where that is known.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NoImage => Some("name one, for example --image debian:12 or --image ./image.tar".into()),
            Self::GuestNotFound { .. } | Self::DiskTemplateNotFound { .. } => Some(
                "build them with `cargo xtask guest`, or name a directory in BANTAM_GUEST_DIR".into(),
            ),
            Self::AgentVersion { .. } => {
                Some("rebuild the guest with `cargo xtask guest`".into())
            }
            Self::Start { command, kind: StartFailedKind::NotFound, .. } if command == "bash" => Some(
                "the image may have no bash: use sh, or install bash in the image (Alpine: apk add bash)".into(),
            ),
            Self::Vm(VmmError::NoEngine(_) | VmmError::EngineUnavailable { .. }) => {
                Some("`bantam doctor` shows what this host offers".into())
            }
            Self::NoSuchMachine { name } if name == MachineName::DEFAULT => Some(
                "`bantam machine ls` shows all machines; this one is meant where no --name is given".into(),
            ),
            Self::NoSuchMachine { .. } => Some("`bantam machine ls` shows all machines".into()),
            Self::MachineExists { name } => Some(format!(
                "start it with `bantam machine start --name {name}`, or remove it with `bantam machine delete --name {name}`"
            )),
            Self::NotRunning { name, .. } => Some(format!(
                "use `bantam machine start --name {name}` first"
            )),
            Self::MachineRuns { name } => Some(format!("`bantam machine stop --name {name}` stops it")),
            Self::Unreachable { name } => Some(format!(
                "`bantam machine stop --name {name}` ends it by force; what its guest had not written back is lost"
            )),
            Self::ImageGone { .. } => Some(
                "pull the image again if the name still means the same, or make the machine anew".into(),
            ),
            Self::NoHostCertificates => Some("name one in SSL_CERT_FILE".into()),
            Self::ProxyOnHost => Some("grant it with --allow-host-loopback".into()),
            Self::NoVmmProgram => Some(
                "install bantam, or name a program in BANTAM_PROGRAM".into(),
            ),
            Self::Record { .. } => Some(
                "repair the file, or remove the machine with `bantam machine delete`".into(),
            ),
            Self::Remote { hint, .. } => hint.clone(),
            Self::TooLarge { .. } => Some("stream it instead of reading it whole".into()),
            Self::NoHome => Some("set BANTAM_HOME to a directory".into()),
            _ => None,
        }
    }

    /// The last lines of the guest's console, where the error is about a guest that ended.
    #[must_use]
    pub fn console(&self) -> &[String] {
        match self {
            Self::Boot { console, .. }
            | Self::MachineDied { console, .. }
            | Self::Remote { console, .. } => console,
            _ => &[],
        }
    }

    /// A short name for programs.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::NoImage | Self::InvalidCommand(_) => "usage",
            Self::Image(_) => "image",
            Self::Network(_) | Self::Vm(VmmError::Network(_)) => "network",
            Self::Vm(_) => "vm",
            Self::GuestNotFound { .. } => "guest_not_found",
            Self::Boot { .. } => "boot",
            Self::AgentVersion { .. } => "agent_version",
            Self::Start { kind, .. } => match kind {
                StartFailedKind::NotFound => COMMAND_NOT_FOUND,
                StartFailedKind::NotExecutable => COMMAND_NOT_EXECUTABLE,
                StartFailedKind::BadWorkingDir => "bad_working_dir",
                StartFailedKind::BadUser => "bad_user",
                StartFailedKind::Internal => "start_failed",
            },
            Self::File { .. } => "file",
            Self::Archive(_) => "copy",
            Self::MachineDied { .. } => "machine_died",
            Self::Agent { .. } => "agent",
            Self::TooLarge { .. } => "too_large",
            Self::Protocol(_) => "protocol",
            Self::Io { .. } => "io",
            Self::Disk { .. } | Self::DiskSize { .. } => "disk",
            Self::DiskTemplateNotFound { .. } => "disk_template_not_found",
            Self::BadName { .. } => "bad_name",
            Self::NoSuchMachine { .. } => "machine_not_found",
            Self::MachineExists { .. } => "machine_exists",
            Self::NotRunning { .. } => "machine_not_running",
            Self::MachineRuns { .. } => "machine_running",
            Self::MachineBusy { .. } => "machine_busy",
            Self::Unreachable { .. } => "machine_unreachable",
            Self::ImageGone { .. } => "image_gone",
            Self::BadChange(_) => "bad_change",
            Self::NoHostCertificates => "no_host_certificates",
            Self::ProxyOnHost => "proxy_on_host",
            Self::NoVmmProgram => "no_vmm_program",
            Self::Record { .. } => "record",
            Self::State { .. } => "state",
            Self::Remote { code, .. } => code,
            Self::NoHome => "no_home",
        }
    }

    /// The exit code of a program whose command failed so: 127 for a command that does not
    /// exist, 126 for one that cannot be executed, 125 for everything else.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Start {
                kind: StartFailedKind::NotFound,
                ..
            } => 127,
            Self::Start {
                kind: StartFailedKind::NotExecutable,
                ..
            } => 126,
            // A workload's that its machine's process could not start.
            Self::Remote { code, .. } if code == COMMAND_NOT_FOUND => 127,
            Self::Remote { code, .. } if code == COMMAND_NOT_EXECUTABLE => 126,
            _ => 125,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let error = Error::State {
            what: "open",
            path: "/x".into(),
            source: io::Error::other("no room"),
        };
        assert_eq!(error.message_with_causes(), "cannot open /x: no room");
        let quotes = Error::Io {
            what: "cannot go on: no room",
            source: io::Error::other("no room"),
        };
        assert_eq!(quotes.message_with_causes(), "cannot go on: no room");
    }
}
