//! Landlock for files and signals, seccomp for system calls.

use std::collections::BTreeMap;
use std::env::consts::ARCH;
use std::io;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use super::{Confinement, Grant, Right};

/// The newest version of Landlock whose rights are asked for (Linux 6.12). Of an older kernel's the
/// crate asks for what there is.
const LANDLOCK: ABI = ABI::V6;

/// System calls that neither bantam nor QEMU makes: those that reach into other processes, change
/// the host, or have been the way into the kernel too often. They fail with EPERM.
const NEVER: [libc::c_long; 59] = [
    // Other processes.
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    libc::SYS_process_madvise,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    // Mounts and namespaces.
    libc::SYS_chroot,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_pivot_root,
    libc::SYS_setns,
    libc::SYS_umount2,
    libc::SYS_unshare,
    // The machine that this runs on.
    libc::SYS_acct,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_init_module,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    // Large parts of the kernel that are not needed.
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_keyctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_msgget,
    libc::SYS_perf_event_open,
    libc::SYS_request_key,
    libc::SYS_semget,
    libc::SYS_shmget,
    libc::SYS_userfaultfd,
    // Other identities.
    libc::SYS_setfsgid,
    libc::SYS_setfsuid,
    libc::SYS_setgroups,
];

const PROGRAMS: [libc::c_long; 2] = [libc::SYS_execve, libc::SYS_execveat];

pub(super) fn probe() -> Confinement {
    let files = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))
        .and_then(Ruleset::create);
    Confinement {
        files: files.is_ok(),
        system_calls: can_filter(),
    }
}

fn can_filter() -> bool {
    Path::new("/proc/sys/kernel/seccomp/actions_avail").exists()
}

/// Confines the calling thread, and every thread and process that it starts from here on. A kernel
/// that cannot do a part of it leaves that part out, and the result says so.
pub(crate) fn confine(grants: &[Grant]) -> io::Result<Confinement> {
    let files = restrict_files(grants).map_err(io::Error::other)?;
    let system_calls = can_filter();
    if system_calls {
        seccompiler::apply_filter(&filter_of(&NEVER)?).map_err(io::Error::other)?;
    }
    Ok(Confinement {
        files,
        system_calls,
    })
}

/// Refuses to start programs from here on, in all threads.
pub(crate) fn start_no_more_programs() -> io::Result<()> {
    if !can_filter() {
        return Ok(());
    }
    seccompiler::apply_filter_all_threads(&filter_of(&PROGRAMS)?).map_err(io::Error::other)
}

fn filter_of(system_calls: &[libc::c_long]) -> io::Result<BpfProgram> {
    let errno = u32::try_from(libc::EPERM).map_err(io::Error::other)?;
    // No conditions on arguments: the call matches whatever they are.
    let rules: BTreeMap<_, _> = system_calls.iter().map(|call| (*call, vec![])).collect();
    let arch = ARCH.try_into().map_err(io::Error::other)?;
    SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(errno),
        arch,
    )
    .and_then(BpfProgram::try_from)
    .map_err(io::Error::other)
}

fn restrict_files(grants: &[Grant]) -> Result<bool, landlock::RulesetError> {
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?;
    for grant in grants {
        // What is not there cannot be reached either.
        let Ok(path) = PathFd::new(&grant.path) else {
            continue;
        };
        let mut access = access(grant.right);
        if !grant.path.is_dir() {
            access &= AccessFs::from_file(LANDLOCK);
        }
        ruleset = ruleset.add_rule(PathBeneath::new(path, access))?;
    }
    let status = ruleset.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

fn access(right: Right) -> BitFlags<AccessFs> {
    match right {
        Right::Read => AccessFs::ReadFile | AccessFs::ReadDir,
        Right::Run => AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::Execute,
        Right::Device => AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev,
        Right::Own => AccessFs::from_all(LANDLOCK) & !AccessFs::Execute,
        Right::Remove => {
            AccessFs::ReadDir | AccessFs::RemoveDir | AccessFs::RemoveFile | AccessFs::MakeDir
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::process::{Command, Stdio};
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Names the directory that [`helper`] works in; without it that does nothing.
    const DIR: &str = "BANTAM_TEST_CONFINED";

    /// Runs [`helper`] in a process of its own, as nothing can be taken back.
    fn run_helper(dir: &Path) {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["confine::sys::tests::helper", "--exact", "--nocapture"])
            .env(DIR, dir)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("1 passed"), "{said}");
    }

    #[test]
    fn a_confined_process_reaches_what_it_was_granted_and_nothing_else() {
        if !probe().files || !probe().system_calls {
            println!(
                "skipped: this kernel has no Landlock or no seccomp ({:?})",
                probe()
            );
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        for name in ["own", "read", "other", "shared", "shared/theirs"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("file"), name).unwrap();
        }
        run_helper(dir.path());
        assert_eq!(fs::read(dir.path().join("own/new")).unwrap(), b"x");
        assert_eq!(fs::read(dir.path().join("read/file")).unwrap(), b"read");
        assert!(!dir.path().join("shared/theirs").exists());
    }

    /// What the test above runs in a process that is then confined.
    #[test]
    fn helper() {
        let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else {
            println!("skipped: another test runs this");
            return;
        };
        let grants = [
            Grant::new(Right::Own, dir.join("own")),
            Grant::new(Right::Read, dir.join("read")),
            Grant::new(Right::Remove, dir.join("shared")),
            Grant::new(Right::Run, "/usr"),
            Grant::new(Right::Run, "/bin"),
            Grant::new(Right::Run, "/lib64"),
            Grant::new(Right::Run, "/lib"),
            Grant::new(Right::Device, "/dev/null"),
            Grant::new(Right::Read, dir.join("not there")),
        ];
        let denied = |result: io::Result<()>| {
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        };
        // Ends with its input.
        let mut outside = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();

        let confined = confine(&grants).unwrap();
        assert!(confined.files && confined.system_calls);

        fs::write(dir.join("own/new"), "x").unwrap();
        fs::rename(dir.join("own/file"), dir.join("own/renamed")).unwrap();
        assert_eq!(fs::read(dir.join("read/file")).unwrap(), b"read");
        denied(fs::write(dir.join("read/file"), "x"));
        denied(fs::read(dir.join("other/file")).map(drop));
        denied(fs::read_dir(&dir).map(drop));
        denied(fs::read("/etc/passwd").map(drop));
        denied(fs::read(dir.join("shared/theirs/file")).map(drop));
        denied(fs::write(dir.join("shared/theirs/file"), "x"));
        fs::rename(dir.join("shared/theirs"), dir.join("shared/gone")).unwrap();
        fs::remove_dir_all(dir.join("shared/gone")).unwrap();

        denied(outside.kill());
        outside.wait().unwrap();
        denied(rustix::process::chroot("/usr").map_err(io::Error::from));
        assert!(Command::new("true").status().unwrap().success());
        // A program that is started is confined as well.
        let read = Command::new("cat").arg("/etc/passwd").output().unwrap();
        assert!(!read.status.success());

        // Threads that run already are not forgotten.
        let (go, wait) = mpsc::channel::<()>();
        let worker = thread::spawn(move || {
            wait.recv().unwrap();
            Command::new("true").status().map(drop)
        });
        start_no_more_programs().unwrap();
        denied(Command::new("true").status().map(drop));
        go.send(()).unwrap();
        denied(worker.join().unwrap());
    }
}
