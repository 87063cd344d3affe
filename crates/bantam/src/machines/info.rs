//! What is known of a machine from outside.

use std::collections::BTreeMap;
use std::time::Duration;

use bantam_vmm::EngineKind;

use super::attached::{self, Answer};
use super::dir::MachineDir;
use super::ipc::{Reply, Request, RunningStatus};
use super::name::MachineName;
use super::record::{EndKind, LastRun, Record, WorkloadEnd};
use crate::{Error, NetworkConfig};

/// How long a machine's process may take to say how it is before it counts as unreachable.
const STATUS_LIMIT: Duration = Duration::from_secs(1);

/// The state of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MachineState {
    /// It was never started.
    Created,
    /// Its agent takes commands.
    Running,
    /// It was stopped, or shut itself down.
    Stopped,
    /// It did not boot, or its process died.
    Failed,
    /// Its process is there and does not answer, or its record cannot be read.
    Unreachable,
}

impl MachineState {
    /// The name in tables and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Unreachable => "unreachable",
        }
    }
}

/// A named machine, as [`Machines::list`](crate::Machines::list) shows it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MachineInfo {
    /// Its name.
    pub name: MachineName,
    /// Its state.
    pub state: MachineState,
    /// More about the state, where there is more to say.
    pub state_reason: Option<String>,
    /// What its image was called when it was made.
    pub image: String,
    /// The image's digest.
    pub image_digest: String,
    /// The process that has it, while it runs.
    pub pid: Option<u32>,
    /// The engine, while it runs.
    pub engine: Option<EngineKind>,
    /// The release of its kernel, while it runs.
    pub kernel_release: Option<String>,
    /// Number of vCPUs.
    pub cpus: u8,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Size of its disk in GiB.
    pub disk_gib: u32,
    /// Its network, if it has one.
    pub network: Option<NetworkConfig>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// When it was made; unix seconds.
    pub created_at: u64,
    /// When it was last started; unix seconds.
    pub started_at: Option<u64>,
    /// It is removed when it ends.
    pub ephemeral: bool,
    /// What it runs when it is started, where that was given: the arguments.
    pub command: Vec<String>,
    /// And the entrypoint.
    pub entrypoint: Option<String>,
    /// The exit code of its workload, if that has ended since the last start.
    pub workload_exit: Option<u8>,
    /// Why its workload could not be executed at the last start, if it could not.
    pub workload_error: Option<String>,
}

/// What is the case, from most to least certain.
enum Seen {
    Running(RunningStatus),
    Starting,
    Unreachable(String, Option<u32>),
    Quiet(Option<LastRun>),
}

pub(super) fn info(dir: &MachineDir) -> Result<MachineInfo, Error> {
    let record = dir.record()?;
    let seen = look(dir)?;
    Ok(compose(record, seen))
}

/// As [`info`], for a list: a machine that is gone meanwhile is `None`, one whose record is
/// damaged is shown as such.
pub(super) fn listed(dir: &MachineDir) -> Option<MachineInfo> {
    match info(dir) {
        Ok(info) => Some(info),
        Err(Error::NoSuchMachine { .. }) => None,
        // Its directory may have gone between two looks.
        Err(_) if !dir.path().exists() => None,
        Err(error) => Some(damaged(dir.name(), error.to_string())),
    }
}

fn damaged(name: &MachineName, reason: String) -> MachineInfo {
    MachineInfo {
        name: name.clone(),
        state: MachineState::Unreachable,
        state_reason: Some(reason),
        image: String::new(),
        image_digest: String::new(),
        pid: None,
        engine: None,
        kernel_release: None,
        cpus: 0,
        memory_mib: 0,
        disk_gib: 0,
        network: None,
        labels: BTreeMap::new(),
        created_at: 0,
        started_at: None,
        ephemeral: false,
        command: Vec::new(),
        entrypoint: None,
        workload_exit: None,
        workload_error: None,
    }
}

/// Asks the machine's process, and reads what it left if there is none. A machine that starts or
/// ends between the two looks is looked at again.
fn look(dir: &MachineDir) -> Result<Seen, Error> {
    let mut last = None;
    for _ in 0..3 {
        match attached::ask(dir, &Request::Status, STATUS_LIMIT) {
            Ok(Some(Answer { reply, .. })) => {
                return match reply {
                    Reply::Running(status) => Ok(Seen::Running(status)),
                    Reply::Starting => Ok(Seen::Starting),
                    _ => Err(attached::strange()),
                };
            }
            Ok(None) => {}
            Err(error @ Error::Remote { .. }) => return Err(error),
            Err(error) => {
                let pid = dir.last_run().ok().flatten().map(|run| run.pid);
                return Ok(Seen::Unreachable(error.to_string(), pid));
            }
        }
        let run = match dir.last_run() {
            Ok(run) => run,
            Err(error) => return Ok(Seen::Unreachable(error.to_string(), None)),
        };
        let unfinished = run.as_ref().is_some_and(|run| run.end.is_none());
        last = run;
        if !unfinished {
            break;
        }
    }
    Ok(Seen::Quiet(last))
}

/// How a workload ended, in words.
fn workload_reason(end: &WorkloadEnd) -> String {
    let reason = end.reason.as_ref().map(|reason| format!(": {reason}"));
    format!(
        "its workload ended with code {}{}",
        end.exit_code,
        reason.unwrap_or_default()
    )
}

fn workload_error(end: &WorkloadEnd) -> Option<String> {
    end.refused.as_ref().map(|refused| refused.message.clone())
}

fn compose(record: Record, seen: Seen) -> MachineInfo {
    let workload = record.spec.workload.unwrap_or_default();
    let mut info = MachineInfo {
        name: record.name,
        state: MachineState::Created,
        state_reason: None,
        image: record.image,
        image_digest: record.image_digest,
        pid: None,
        engine: None,
        kernel_release: None,
        cpus: record.spec.cpus,
        memory_mib: record.spec.memory_mib,
        disk_gib: record.spec.disk_gib,
        network: record.spec.network,
        labels: record.spec.labels,
        created_at: record.created_at,
        started_at: None,
        ephemeral: record.ephemeral,
        command: workload.args,
        entrypoint: workload.entrypoint,
        workload_exit: None,
        workload_error: None,
    };
    match seen {
        Seen::Running(status) => {
            info.state = MachineState::Running;
            info.pid = Some(status.pid);
            info.engine = Some(status.engine);
            info.kernel_release = Some(status.kernel_release);
            info.started_at = Some(status.started_at);
            info.workload_exit = status.workload.as_ref().map(|end| end.exit_code);
            info.workload_error = status.workload.as_ref().and_then(workload_error);
            info.state_reason = status.workload.as_ref().map(workload_reason);
        }
        Seen::Starting => info.state_reason = Some("it is being started".to_owned()),
        Seen::Unreachable(reason, pid) => {
            info.state = MachineState::Unreachable;
            info.pid = pid;
            info.state_reason = Some(reason);
        }
        Seen::Quiet(None) => {}
        Seen::Quiet(Some(run)) => {
            info.started_at = Some(run.started_at);
            info.workload_exit = run.workload.as_ref().map(|end| end.exit_code);
            info.workload_error = run.workload.as_ref().and_then(workload_error);
            let (state, reason) = match run.end {
                None => (
                    MachineState::Failed,
                    format!("its process ({}) was killed", run.pid),
                ),
                Some(end) => match end.kind {
                    EndKind::Stopped | EndKind::Shutdown => (MachineState::Stopped, end.reason),
                    EndKind::Failed => (MachineState::Failed, end.reason),
                },
            };
            info.state = state;
            info.state_reason = Some(reason);
        }
    }
    info
}
