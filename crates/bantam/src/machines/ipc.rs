//! Messages between processes that share a machine: one JSON line each way, and with some a
//! descriptor.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use bantam_vmm::{EngineKind, GuestKernel};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::egress::EgressRecord;
use super::name::MachineName;
use super::record::{EndKind, WorkloadEnd};
use crate::{Error, Home, NetworkConfig};

/// The most bytes of a message.
const MAX_MESSAGE: usize = 1 << 20;

/// What is asked of the process that has a machine, over its control socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub(crate) enum Request {
    /// How it is.
    Status,
    /// A stream to the agent's exec port: the answer carries its descriptor.
    Connect,
    /// End the machine: processes have `grace_ms` to end, all of it `limit_ms`.
    Stop {
        /// Milliseconds.
        grace_ms: u64,
        /// Milliseconds.
        limit_ms: u64,
    },
    /// End it at once.
    Kill,
    /// Put another policy in force for its network, and into its record.
    SetPolicy {
        /// Only the policy of it is used.
        network: Box<NetworkConfig>,
        /// What it must be until then, if that matters.
        was: Option<Box<NetworkConfig>>,
    },
    /// What its network refused.
    EgressEvents,
}

/// The answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub(crate) enum Reply {
    /// To `Status`, and to a start that succeeded.
    Running(RunningStatus),
    /// To `Status` while the guest boots.
    Starting,
    /// To `Connect`; comes with a descriptor.
    Connected,
    /// To `Stop` and `Kill`.
    Ended {
        /// What sort of end.
        kind: EndKind,
    },
    /// To `SetPolicy`.
    PolicySet,
    /// To `EgressEvents`, the oldest first.
    EgressEvents {
        /// The events.
        events: Vec<EgressRecord>,
    },
    /// It did not work.
    Failed(RemoteError),
}

/// A machine that runs, as its process sees it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RunningStatus {
    pub(crate) pid: u32,
    pub(crate) started_at: u64,
    #[serde(with = "engine_kind")]
    pub(crate) engine: EngineKind,
    pub(crate) kernel_release: String,
    /// How the workload ended, if it has.
    pub(crate) workload: Option<WorkloadEnd>,
}

/// What a process that is to become a machine's is told, on its standard input. The machine's
/// lock comes with it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StartRequest {
    pub(crate) name: MachineName,
    pub(crate) home: Home,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    pub(crate) boot_timeout_ms: u64,
}

impl StartRequest {
    pub(crate) fn guest(&self) -> GuestKernel {
        GuestKernel {
            kernel: self.kernel.clone(),
            initramfs: self.initramfs.clone(),
        }
    }
}

/// An [`Error`] of another process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RemoteError {
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
    pub(crate) console: Vec<String>,
}

impl RemoteError {
    /// The error with the messages of its causes.
    pub(crate) fn new(error: &Error) -> Self {
        Self {
            code: error.code().to_owned(),
            message: error.message_with_causes(),
            hint: error.hint(),
            console: error.console().to_vec(),
        }
    }
}

impl From<RemoteError> for Error {
    fn from(error: RemoteError) -> Self {
        Self::Remote {
            code: error.code,
            message: error.message,
            hint: error.hint,
            console: error.console,
        }
    }
}

/// Sends a message, with a descriptor if there is one.
pub(crate) fn send(
    stream: &UnixStream,
    message: &impl Serialize,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(message)?;
    bytes.push(b'\n');
    let mut rest = &bytes[..];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let descriptors = descriptor.as_slice();
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    while !rest.is_empty() {
        let parts = [io::IoSlice::new(rest)];
        let sent = match rustix::net::sendmsg(stream, &parts, &mut ancillary, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result?,
        };
        rest = rest.get(sent..).unwrap_or_default();
        // The descriptor went with the first byte.
        ancillary.clear();
    }
    Ok(())
}

/// Receives one message and what came with it. The other side sends no second one before it is
/// answered.
pub(crate) fn receive<T: DeserializeOwned>(
    stream: &UnixStream,
) -> io::Result<(T, Option<OwnedFd>)> {
    let mut message = Vec::new();
    let mut descriptor = None;
    let mut chunk = [0; 4096];
    while message.last() != Some(&b'\n') {
        if message.len() > MAX_MESSAGE {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "message too long",
            ));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [io::IoSliceMut::new(&mut chunk)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = match rustix::net::recvmsg(stream, &mut parts, &mut ancillary, flags) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result?.bytes,
        };
        for part in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = part {
                descriptor = descriptors.last().or(descriptor);
            }
        }
        if received == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        message.extend_from_slice(chunk.get(..received).unwrap_or_default());
    }
    Ok((serde_json::from_slice(&message)?, descriptor))
}

mod engine_kind {
    use bantam_vmm::{EngineChoice, EngineKind};
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(
        kind: &EngineKind,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(kind.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<EngineKind, D::Error> {
        match String::deserialize(deserializer)?.parse() {
            Ok(EngineChoice::Only(kind)) => Ok(kind),
            Ok(EngineChoice::Auto) => Err(de::Error::custom("no engine")),
            Err(error) => Err(de::Error::custom(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_message_and_its_descriptor_arrive_together() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut kept, given) = UnixStream::pair().unwrap();
        send(&ours, &Reply::Connected, Some(given.as_fd())).unwrap();
        drop(given);
        let (reply, descriptor) = receive::<Reply>(&theirs).unwrap();
        assert!(matches!(reply, Reply::Connected));
        let mut passed = UnixStream::from(descriptor.unwrap());
        passed.write_all(b"x").unwrap();
        drop(passed);
        let mut text = String::new();
        kept.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn a_long_message_is_put_together_again() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let error = RemoteError {
            code: "boot".into(),
            message: "x".repeat(200_000),
            hint: None,
            console: Vec::new(),
        };
        let sender = std::thread::spawn(move || send(&ours, &Reply::Failed(error), None));
        let (reply, descriptor) = receive::<Reply>(&theirs).unwrap();
        assert!(matches!(reply, Reply::Failed(error) if error.message.len() == 200_000));
        assert!(descriptor.is_none());
        sender.join().unwrap().unwrap();
    }

    #[test]
    fn a_message_without_end_is_refused() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || {
            // The other side hangs up in the middle.
            let _ = ours.write_all(&vec![b'x'; 1 << 20]);
        });
        assert!(receive::<Reply>(&theirs).is_err());
        drop(theirs);
        sender.join().unwrap();
    }

    #[test]
    fn a_side_that_hangs_up_is_an_error_and_not_a_hang() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(ours);
        let error = receive::<Request>(&theirs).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
