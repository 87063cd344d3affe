//! Starting the process of a machine.

use std::env;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Machines;
use super::dir::{MachineDir, MachineLock};
use super::ipc::{self, Reply, RunningStatus, StartRequest};
use super::record::LastRun;
use super::vmm::VmmProcess;
use crate::home::variable;
use crate::machine::REQUEST_LIMIT;
use crate::{Error, guest};

/// How much longer than the guest its process may take to say how the boot went: what follows the
/// boot, a question to the agent and the start of the workload, has a time limit of its own.
const MARGIN: Duration = REQUEST_LIMIT
    .saturating_mul(2)
    .saturating_add(Duration::from_secs(30));

/// How long a process that could not start its machine may take to be gone.
const EXIT_LIMIT: Duration = Duration::from_secs(5);

/// How much of what a process said before it died is quoted.
const LOG_LINES: usize = 5;

/// What of the environment a machine's process gets: where programs and certificates are, what is
/// set for bantam, what it writes to its log. Whatever else the caller has there, secrets among it,
/// is no business of a process that lives longer.
fn is_kept(name: &str) -> bool {
    matches!(name, "PATH" | "SSL_CERT_FILE")
        || ["BANTAM_", "RUST_"]
            .iter()
            .any(|kept| name.starts_with(kept))
}

/// Starts the machine in `dir` in a process of its own, which gets the lock.
pub(super) fn start(
    machines: &Machines,
    dir: &MachineDir,
    lock: MachineLock,
    boot_timeout: Duration,
) -> Result<RunningStatus, Error> {
    let record = dir.record()?;
    let guest = guest::find_guest(record.spec.kernel.clone())?;
    let request = StartRequest {
        name: record.name,
        home: machines.home.clone(),
        kernel: guest.kernel,
        initramfs: guest.initramfs,
        boot_timeout_ms: u64::try_from(boot_timeout.as_millis()).unwrap_or(u64::MAX),
    };
    let program = match &machines.vmm_program {
        Some(program) => program.clone(),
        None => find_program()?,
    };
    let (ours, theirs) = UnixStream::pair().map_err(Error::io("cannot make a socket pair"))?;
    let since = super::now();
    let mut child = spawn(&program, dir, theirs).map_err(|source| Error::State {
        what: "start",
        path: program,
        source,
    })?;
    let answer = ours
        .set_read_timeout(boot_timeout.checked_add(MARGIN))
        .and_then(|()| ipc::send(&ours, &request, Some(lock.file().as_fd())))
        .and_then(|()| ipc::receive::<Reply>(&ours));
    // From here on the process alone has it.
    drop(lock);
    match answer {
        Ok((Reply::Running(status), _)) => {
            reap(child);
            Ok(status)
        }
        other => {
            // It hears that nobody waits, and exits if it has not.
            drop(ours);
            end(&mut child);
            Err(match other {
                Ok((Reply::Failed(error), _)) => error.into(),
                Ok(_) => super::attached::strange(),
                Err(error) => gone(dir, child.id(), since, &error),
            })
        }
    }
}

/// Waits for the process a little, and kills it.
fn end(child: &mut Child) {
    let deadline = Instant::now() + EXIT_LIMIT;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > deadline {
            // A process in the kernel's hands ends when that lets go of it.
            let _ = child.kill();
            break;
        }
        thread::sleep(super::dir::PAUSE);
    }
}

/// The process ended without an answer: what it wrote last is all there is.
fn gone(dir: &MachineDir, pid: u32, since: u64, error: &io::Error) -> Error {
    let reason = match dir.last_run() {
        Ok(Some(LastRun {
            pid: of,
            end: Some(end),
            ..
        })) if of == pid => end.reason,
        // Others were quicker: they ended it, and have removed it or started it again since.
        Ok(None) if !dir.path().exists() => return dir.not_found(),
        Ok(Some(run)) if run.pid != pid && run.started_at >= since => {
            "it was stopped while it was being started".to_owned()
        }
        _ if matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
        ) =>
        {
            "its process did not say in time whether it runs".to_owned()
        }
        _ => format!("its process ended without a word ({error})"),
    };
    let log = fs::read_to_string(dir.vmm_log()).unwrap_or_default();
    let said: Vec<_> = log.lines().take(LOG_LINES).collect();
    let mut message = format!("cannot start machine '{}': {reason}", dir.name());
    if !said.is_empty() {
        message = format!("{message}; its log begins: {}", said.join(" / "));
    }
    Error::Remote {
        code: "vm".to_owned(),
        message,
        hint: None,
        console: Vec::new(),
    }
}

fn spawn(program: &Path, dir: &MachineDir, starter: UnixStream) -> io::Result<Child> {
    let log = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(dir.vmm_log())?;
    let kept = env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy();
        is_kept(&name)
    });
    let mut command = Command::new(program);
    bantam_vmm::inherit_nothing(&mut command);
    command
        .arg0("bantam")
        .arg(VmmProcess::ARGUMENT)
        // For people who look at the list of processes.
        .arg(dir.name().as_str())
        .env_clear()
        .envs(kept)
        .current_dir("/")
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(starter)))
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
}

/// A process that outlives its parent is no zombie, and one that does not must not become one.
fn reap(mut child: Child) {
    // Without a thread for it, it is reaped when this process ends.
    let _ = thread::Builder::new()
        .name("reaper".to_owned())
        .spawn(move || child.wait());
}

fn find_program() -> Result<PathBuf, Error> {
    if let Some(program) = variable("BANTAM_PROGRAM") {
        return Ok(program);
    }
    let beside = env::current_exe().ok();
    let beside = beside.as_deref().and_then(Path::parent);
    let path = env::var_os("PATH").unwrap_or_default();
    beside
        .map(Path::to_path_buf)
        .into_iter()
        .chain(env::split_paths(&path).filter(|dir| dir.is_absolute()))
        .map(|dir| dir.join("bantam"))
        .find(|program| program.is_file())
        .ok_or(Error::NoVmmProgram)
}
