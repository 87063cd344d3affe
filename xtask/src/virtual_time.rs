//! `cargo xtask virtual-time`: from the start of a program with a virtual machine in it to the guest's
//! `/init`, in a time that repeats.
//!
//! The nested rig's outer machine runs with `-icount`: its clock counts instructions, one a
//! nanosecond, of host and guest alike. Everything it needs is in its memory, so nothing waits for
//! this host. Exits and cache misses cost nothing in this time, so what it is good for is ratios.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;
use tempfile::TempDir;

use crate::bench;
use crate::cpio::{Archive, Entry, TooLarge};
use crate::demo;
use crate::error::{Error, Result};
use crate::guest;
use crate::host;
use crate::image::{self, Which, static_program};
use crate::kernel::{GUEST, Options, RIG};
use crate::profile::{Boot, Profile};
use crate::progress::Progress;
use crate::rig;

/// What the image is called in the store that is put into the machine.
const IMAGE: &str = "localhost/tiny:virtual-time";
/// Begins each line of the result.
const MARK: &str = "virtual-time:";

/// PID 1 of the outer machine.
const INIT: &str = "#!/bin/busybox sh
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs devtmpfs /dev
busybox mount -t tmpfs tmpfs /tmp
export BANTAM_HOME=/home BANTAM_GUEST_DIR=/guest HOME=/root
/job
busybox reboot -f
";

const DEFAULT_SECONDS: u32 = 900;

/// What to run.
#[derive(Args)]
pub(crate) struct VirtualTimeArgs {
    /// Machines that are booted, after one that does not count
    #[arg(long, default_value_t = 3)]
    runs: u32,
    /// Another guest kernel than this checkout's
    #[arg(long, value_name = "VMLINUX")]
    kernel: Option<PathBuf>,
    /// Say where the boots spend their instructions: functions of both kernels, initcalls, exits
    ///
    /// The tables are of the last boot. Reads the System.map beside the kernels.
    #[arg(long)]
    profile: bool,
    /// Seconds after which it is given up: everything takes some thousand times as long
    #[arg(long, default_value_t = DEFAULT_SECONDS)]
    timeout: u32,
}

impl VirtualTimeArgs {
    /// As many that count, of this checkout's kernel.
    pub(crate) fn boots(runs: u32) -> Self {
        Self {
            runs,
            kernel: None,
            profile: true,
            timeout: DEFAULT_SECONDS,
        }
    }
}

/// Prints a line for each boot: nanoseconds since the start of the program at which each phase was
/// reached.
pub(crate) fn run(args: &VirtualTimeArgs) -> Result<()> {
    let progress = Progress::new();
    let mut text = String::new();
    if args.profile {
        let boots = profiled(args, &progress)?;
        for (line, boot) in &boots {
            text.push_str(&format!(
                "{line} host_instructions={} guest_instructions={} exits={}\n",
                boot.host_instructions(),
                boot.guest_instructions(),
                boot.exits()
            ));
        }
        if let Some((_, last)) = boots.last() {
            text.push_str(&format!("\n{}", last.text()));
        }
    } else {
        for line in boots(args, None, &progress)? {
            text.push_str(&format!("{line}\n"));
        }
    }
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// The line of each boot, as [`run`] prints it, and what the boot took.
pub(crate) fn profiled(args: &VirtualTimeArgs, progress: &Progress) -> Result<Vec<(String, Boot)>> {
    let temp = temporary()?;
    let outer = RIG.build(Options::default(), progress)?;
    let guest = match &args.kernel {
        Some(kernel) => kernel.clone(),
        None => GUEST.build(Options::default(), progress)?.vmlinux,
    };
    let all = args.runs as usize + 1;
    let profile = Profile::create(temp.path(), &outer.vmlinux, &guest, all)?;
    let lines = boots(args, Some(&profile.words()), progress)?;
    let mut boots = profile.boots(all)?;
    // As for the lines.
    boots.remove(0);
    Ok(lines.into_iter().zip(boots).collect())
}

fn temporary() -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix("bantam-virtual-time-")
        .tempdir()
        .map_err(Error::file("creating", &std::env::temp_dir()))
}

/// Builds what is needed and boots one machine more than asked for; a line for each but that one.
/// `plugin` is one of QEMU's, with its words.
pub(crate) fn boots(
    args: &VirtualTimeArgs,
    plugin: Option<&str>,
    progress: &Progress,
) -> Result<Vec<String>> {
    let outer = RIG.build(Options::default(), progress)?;
    let guest = guest::build(Options::default(), progress)?;
    let kernel = args.kernel.clone().unwrap_or_else(|| guest.join("vmlinux"));
    let tiny = image::make(Which::Tiny, progress)?;
    let program = demo::build_program(progress)?;
    let bench = bench::build_bench(progress)?;

    let temp = temporary()?;
    let store = temp.path().join("home");
    let mut load = Command::new(&program);
    load.args(["image", "load", "--name", IMAGE, "--input"])
        .arg(&tiny)
        .env("BANTAM_HOME", &store);
    host::run_quiet(&mut load)?;

    let mut files = vec![
        host_file(
            "bin/busybox",
            &static_program("busybox", "busybox-static")?,
            0o755,
        )?,
        host_file("bin/bench", &bench, 0o755)?,
        // Read-only, as installed: of such a kernel most is mapped, others are copied.
        host_file("guest/vmlinux", &kernel, 0o444)?,
        host_file("guest/initramfs.cpio", &guest.join("initramfs.cpio"), 0o444)?,
    ];
    for (path, bytes) in rig::libraries()? {
        files.push((path, bytes, 0o755));
    }
    // As on any host: without it the linker looks into one folder after the other.
    let cache = Path::new("/etc/ld.so.cache");
    if cache.exists() {
        files.push(host_file("etc/ld.so.cache", cache, 0o644)?);
    }
    collect(&store, "home", &mut files)?;
    let job = format!(
        "#!/bin/busybox sh\n/bin/bench --virtual-time {IMAGE} {} </dev/null\n\
         echo {MARK} ended with $?\n",
        args.runs
    );
    files.push(("job".to_owned(), job.into_bytes(), 0o755));
    files.push(("init".to_owned(), INIT.as_bytes().to_vec(), 0o755));
    let initramfs = temp.path().join("initramfs.cpio");
    let bytes = archive(&files).map_err(|TooLarge| Error::other("a file is too large"))?;
    fs::write(&initramfs, bytes).map_err(Error::file("writing", &initramfs))?;

    progress.update("virtual time", format!("{} boots", args.runs + 1));
    let mut qemu = qemu(&outer.vmlinux, &initramfs, args.timeout);
    if let Some(plugin) = plugin {
        qemu.args(["-plugin", plugin]);
    }
    let output = host::capture(&mut qemu)?;
    progress.forget("virtual time");
    let text = String::from_utf8_lossy(&output);
    let mut lines: Vec<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix(MARK))
        .map(|line| line.trim().to_owned())
        .collect();
    // The last is the end.
    if lines.pop().is_none() || lines.is_empty() {
        return Err(Error::other(format!(
            "the outer machine measured nothing\n{}",
            host::last_lines(&text, 40)
        )));
    }
    // It brings everything into memory.
    lines.remove(0);
    Ok(lines)
}

/// Path in the outer machine, contents, permission bits.
type File = (String, Vec<u8>, u32);

fn host_file(path: &str, from: &Path, mode: u32) -> Result<File> {
    Ok((path.to_owned(), host::read(from)?, mode))
}

/// Adds every file below `dir` as `at/...`, with its permission bits.
fn collect(dir: &Path, at: &str, files: &mut Vec<File>) -> Result<()> {
    let entries = fs::read_dir(dir).map_err(Error::file("reading", dir))?;
    for entry in entries {
        let path = entry.map_err(Error::file("reading", dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let inside = format!("{at}/{name}");
        let metadata = fs::metadata(&path).map_err(Error::file("reading", &path))?;
        if metadata.is_dir() {
            collect(&path, &inside, files)?;
        } else {
            let mode = metadata.permissions().mode() & 0o777;
            files.push((inside, host::read(&path)?, mode));
        }
    }
    Ok(())
}

fn archive(files: &[File]) -> std::result::Result<Vec<u8>, TooLarge> {
    let mut archive = Archive::default();
    let mut dirs = Vec::new();
    let parents = |path: &str| -> Vec<String> {
        let parts = path.match_indices('/').map(|(at, _)| path[..at].to_owned());
        parts.collect()
    };
    let mounts = ["dev/x", "proc/x", "sys/x", "tmp/x", "root/x"];
    let paths = files.iter().map(|(path, ..)| path.as_str());
    for dir in mounts.into_iter().chain(paths).flat_map(parents) {
        if !dirs.contains(&dir) {
            archive.add(&dir, &Entry::Dir)?;
            dirs.push(dir);
        }
    }
    archive.add("dev/console", &Entry::Device { major: 5, minor: 1 })?;
    for (path, data, mode) in files {
        archive.add(path, &Entry::File { data, mode: *mode })?;
    }
    archive.finish()
}

fn qemu(kernel: &Path, initramfs: &Path, seconds: u32) -> Command {
    let mut qemu = Command::new("timeout");
    qemu.arg(seconds.to_string())
        .args(["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"])
        .args(["-icount", "shift=0,sleep=off", "-smp", "1", "-m", "2048"])
        .args(["-serial", "stdio"]);
    // Under -icount the TSC counts nanoseconds.
    rig::outer_machine(&mut qemu, kernel, initramfs, "tsc_early_khz=1000000");
    qemu.stdin(Stdio::null()).stderr(Stdio::inherit());
    qemu
}
