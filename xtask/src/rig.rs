//! The nested rig: QEMU emulates an AMD machine with virtualization, whose
//! Linux has a real `/dev/kvm`, and one command runs in it.
//!
//! `images/rig/README.md` says what the settings are for.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use clap::Args;

use crate::cpio::{Archive, Entry, TooLarge};
use crate::error::{Error, Result};
use crate::host;
use crate::image::static_program;
use crate::kernel::{Options, RIG};
use crate::progress::Progress;

/// PID 1 of the outer machine.
const INIT: &str = include_str!("../../images/rig/init");

/// The C library of this machine: what is built here runs there.
const LIBRARIES: [&str; 7] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
];
const LIBRARY_DIRS: [&str; 4] = [
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
];

/// Variables of the caller that a test or the program listens to.
const PASSED_VARIABLES: [&str; 4] = ["BANTAM_", "RUST_", "XDG_CACHE_HOME", "NO_COLOR"];

/// Exit code of a command that ran past its time, as `timeout(1)` gives it.
pub(crate) const TIMED_OUT: u8 = 124;

/// A run in the rig.
#[derive(Args, Clone)]
pub(crate) struct RigArgs {
    /// CPUs of the outer machine (emulated one after the other)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(crate) cpus: u8,
    /// Memory of the outer machine in MiB
    #[arg(long, default_value_t = 2048)]
    pub(crate) mem: u32,
    /// Seconds after which everything is killed (exit code 124)
    #[arg(long, default_value_t = 600)]
    pub(crate) timeout: u64,
    /// Variables for the command (BANTAM_* and RUST_* are passed anyway)
    #[arg(long, short, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// Another folder that the command sees, read-only, at its own path (repeatable)
    #[arg(long, value_name = "DIR")]
    pub(crate) share: Vec<PathBuf>,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<String>,
}

/// What a run in the rig ended with.
pub(crate) struct Outcome {
    /// The command's exit code, or 124.
    pub(crate) code: u8,
}

/// Runs the command; its output goes to the writers, untouched.
pub(crate) fn run(
    args: &RigArgs,
    stdout: impl Write + Send + 'static,
    stderr: impl Write + Send + 'static,
    progress: &Progress,
) -> Result<Outcome> {
    let kernel = RIG.build(Options::default(), progress)?;
    let temp = tempfile::Builder::new()
        .prefix("bantam-rig-")
        .tempdir()
        .map_err(Error::file("creating", &std::env::temp_dir()))?;
    let shares = Shares::of_this_host(args)?;
    let initramfs = temp.path().join("initramfs.cpio");
    let bytes = initramfs_bytes(&shares.job(args)?)?;
    fs::write(&initramfs, bytes).map_err(Error::file("writing", &initramfs))?;
    let console = temp.path().join("console.log");

    let mut qemu = qemu(args, &kernel.vmlinux, &initramfs, &console);
    shares.add_to(&mut qemu);
    let out = Port::new(&mut qemu, temp.path(), "stdout", stdout)?;
    let err = Port::new(&mut qemu, temp.path(), "stderr", stderr)?;
    let (events, received) = mpsc::channel();
    let result = Port::new(&mut qemu, temp.path(), "result", Answers(events.clone()))?;

    // PR_SET_PDEATHSIG means the thread that spawns: this one, which waits.
    let mut child = qemu.spawn().map_err(host::start_error(&qemu))?;
    // QEMU's end is the end of its stderr.
    let said = child.stderr.take();
    thread::spawn(move || {
        let mut text = Vec::new();
        if let Some(mut said) = said {
            let _ = said.read_to_end(&mut text);
        }
        let _ = events.send(Event::Ended(text));
    });
    let mut watch = Watch::new(temp, &console);
    let in_time = watch.until_end(&received, Duration::from_secs(args.timeout));
    if !in_time {
        let _ = child.kill();
    }
    child
        .wait()
        .map_err(Error::file("waiting for", Path::new("QEMU")))?;
    for port in [out, err, result] {
        port.finish();
    }
    if !in_time {
        progress.say(&format!("rig: killed after {} s", args.timeout));
        return Ok(Outcome { code: TIMED_OUT });
    }
    // The port's last bytes may come after QEMU's end.
    for event in received.try_iter() {
        watch.take(event);
    }
    watch.outcome()
}

/// What the threads tell the one that waits.
enum Event {
    /// Bytes from the outer machine's PID 1.
    Answer(Vec<u8>),
    /// QEMU ended and said this.
    Ended(Vec<u8>),
}

/// What is known of a run so far.
struct Watch {
    /// Removed as soon as the outer machine is up, so that nothing stays even
    /// when this process is killed.
    temp: Option<tempfile::TempDir>,
    console_path: PathBuf,
    console: Option<fs::File>,
    answer: Vec<u8>,
    said: Vec<u8>,
}

impl Watch {
    fn new(temp: tempfile::TempDir, console: &Path) -> Self {
        Self {
            temp: Some(temp),
            console_path: console.to_path_buf(),
            console: None,
            answer: Vec::new(),
            said: Vec::new(),
        }
    }

    /// Handles events until QEMU's end; `false` when the time is over first.
    fn until_end(&mut self, events: &mpsc::Receiver<Event>, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(event) = events.recv_timeout(left) else {
                return false;
            };
            if self.take(event) {
                return true;
            }
        }
    }

    /// Takes one event; tells whether it was the end.
    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Answer(bytes) => {
                self.answer.extend(bytes);
                if let Some(temp) = self.temp.take() {
                    self.console = fs::File::open(&self.console_path).ok();
                    drop(temp);
                }
                false
            }
            Event::Ended(said) => {
                self.said = said;
                true
            }
        }
    }

    /// The exit code that PID 1 gave after its `ready`.
    fn outcome(self) -> Result<Outcome> {
        let answer = String::from_utf8_lossy(&self.answer).into_owned();
        if let Some(Ok(code)) = answer.lines().nth(1).map(str::parse) {
            return Ok(Outcome { code });
        }
        let mut console = Vec::new();
        if let Some(mut file) = self
            .console
            .or_else(|| fs::File::open(self.console_path).ok())
        {
            let _ = file.read_to_end(&mut console);
        }
        Err(Error::other(format!(
            "the rig's outer machine ended without an exit code\n{}{}",
            String::from_utf8_lossy(&self.said),
            host::last_lines(&String::from_utf8_lossy(&console), 40)
        )))
    }
}

/// QEMU without the devices that depend on the run.
fn qemu(args: &RigArgs, kernel: &Path, initramfs: &Path, console: &Path) -> Command {
    // setpriv: whatever ends this process ends QEMU too.
    let mut qemu = Command::new("setpriv");
    qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
    outer_machine(&mut qemu, kernel, initramfs, RIG_CLOCK);
    qemu.args(["-smp", &args.cpus.to_string(), "-m", &args.mem.to_string()])
        .arg("-serial")
        .arg(joined("file:", console))
        .args(["-device", "virtio-serial-device,id=ports"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    qemu
}

/// The outer kernel cannot measure what its TSC counts. On a busy host the timer's ticks get lost, and a
/// kernel that compares the TSC with them takes the ticks for its clock: ten milliseconds each.
const RIG_CLOCK: &str = "tsc_early_khz=2445400 tsc=reliable";

/// What every outer machine is, for QEMU. `clock` are the kernel's words about its processors' TSC.
pub(crate) fn outer_machine(qemu: &mut Command, kernel: &Path, initramfs: &Path, clock: &str) {
    qemu.args([
        "-M",
        "microvm,x-option-roms=off,rtc=off,isa-serial=on,acpi=off,pit=on,pic=on",
    ])
    .args(["-accel", "tcg,thread=single", "-cpu", "max,-erms,-fsrm"])
    .args(["-nodefaults", "-no-user-config", "-display", "none"])
    .args(["-no-reboot", "-device", "virtio-rng-device", "-kernel"])
    .arg(kernel)
    .arg("-initrd")
    .arg(initramfs)
    .arg("-append")
    .arg(format!(
        "console=ttyS0 quiet reboot=t panic=-1 mitigations=off rootfstype=tmpfs \
         {clock}"
    ));
}

fn joined(prefix: &str, path: &Path) -> OsString {
    let mut word = OsString::from(prefix);
    word.push(path);
    word
}

/// Folders of this host that the outer machine sees, read-only, at their own
/// paths.
struct Shares {
    dirs: Vec<PathBuf>,
    /// The one that the outer machine may add to, in its own memory.
    store: PathBuf,
}

impl Shares {
    fn of_this_host(args: &RigArgs) -> Result<Self> {
        let given = args
            .env
            .iter()
            .find_map(|pair| pair.strip_prefix("BANTAM_HOME="));
        let home = given
            .map(OsString::from)
            .or_else(|| std::env::var_os("BANTAM_HOME"));
        let store = match home {
            Some(home) if !home.is_empty() => PathBuf::from(home),
            _ => host::cache_dir()?,
        };
        host::create_dir(&store)?;
        let mut dirs = vec![host::repo(), store.clone()];
        let more = [host::target_dir(), host::cache_dir()?];
        for dir in more.into_iter().chain(args.share.clone()) {
            if dir.is_dir() && !dirs.iter().any(|shared| dir.starts_with(shared)) {
                dirs.push(dir);
            }
        }
        // A path with these would break the mount list or QEMU's options.
        for dir in &dirs {
            let text = dir.to_string_lossy();
            if text.contains([' ', ',', ':', '\n']) {
                return Err(Error::other(format!(
                    "sharing {text} with the rig: no spaces, commas or colons in paths, please"
                )));
            }
        }
        Ok(Self { dirs, store })
    }

    fn add_to(&self, qemu: &mut Command) {
        for (n, dir) in self.dirs.iter().enumerate() {
            let fsdev =
                format!("local,id=share{n},security_model=none,readonly=on,multidevs=remap,path=");
            qemu.arg("-fsdev")
                .arg(joined(&fsdev, dir))
                .arg("-device")
                .arg(format!(
                    "virtio-9p-device,fsdev=share{n},mount_tag=share{n}"
                ));
        }
    }

    /// The script that tells PID 1 what to mount and run.
    fn job(&self, args: &RigArgs) -> Result<String> {
        let mut script = String::new();
        let mounts: Vec<String> = self
            .dirs
            .iter()
            .enumerate()
            .map(|(n, dir)| format!("share{n}:{}", dir.display()))
            .collect();
        let home = host::home()?.display().to_string();
        let here = std::env::current_dir()
            .ok()
            .filter(|dir| self.dirs.iter().any(|shared| dir.starts_with(shared)))
            .unwrap_or_else(host::repo);
        let words: Vec<String> = args.command.iter().map(|word| quoted(word)).collect();
        let mut line = |text: String| {
            let _ = writeln!(script, "{text}");
        };
        line(format!("MOUNTS={}", quoted(&mounts.join(" "))));
        line(format!(
            "OVERLAY={}",
            quoted(&self.store.display().to_string())
        ));
        line(format!("export HOME={} USER=root RIG=1", quoted(&home)));
        for (name, value) in passed_variables() {
            line(format!("export {name}={}", quoted(&value)));
        }
        for pair in &args.env {
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| Error::other(format!("--env {pair}: expected NAME=VALUE")))?;
            line(format!("export {name}={}", quoted(value)));
        }
        line(format!("mkdir -p {}", quoted(&home)));
        line(format!(
            "job() {{ cd {} && {}; }}",
            quoted(&here.display().to_string()),
            words.join(" ")
        ));
        Ok(script)
    }
}

fn passed_variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars().filter(|(name, _)| {
        PASSED_VARIABLES.iter().any(|p| name.starts_with(p)) && name.bytes().all(is_name_byte)
    })
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// A word that the shell takes as it is.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The outer machine's root: busybox, bash, this machine's C library.
fn initramfs_bytes(job: &str) -> Result<Vec<u8>> {
    let busybox = static_program("busybox", "busybox-static")?;
    let bash = static_program("bash-static", "bash-static")?;
    let applets = host::capture(Command::new(&busybox).arg("--list"))?;
    let (busybox, bash) = (host::read(&busybox)?, host::read(&bash)?);
    let libraries = libraries()?;
    let build = || -> std::result::Result<Vec<u8>, TooLarge> {
        let mut archive = Archive::default();
        for dir in [
            "bin",
            "dev",
            "etc",
            "lib",
            "lib/x86_64-linux-gnu",
            "lib64",
            "proc",
            "run",
            "sys",
            "tmp",
            "usr",
            "usr/bin",
            "usr/lib",
            "usr/lib/x86_64-linux-gnu",
            "usr/lib64",
            "var",
        ] {
            archive.add(dir, &Entry::Dir)?;
        }
        archive.add("dev/console", &Entry::Device { major: 5, minor: 1 })?;
        let program = |data| Entry::File { data, mode: 0o755 };
        archive.add("bin/busybox", &program(&busybox))?;
        archive.add("bin/bash", &program(&bash))?;
        for applet in String::from_utf8_lossy(&applets).lines() {
            if applet != "busybox" {
                archive.add(&format!("bin/{applet}"), &Entry::Link("busybox"))?;
            }
        }
        archive.add("usr/bin/env", &Entry::Link("/bin/busybox"))?;
        for (path, bytes) in &libraries {
            archive.add(path, &program(bytes))?;
        }
        archive.add("etc/passwd", &program(b"root:x:0:0:root:/root:/bin/bash\n"))?;
        archive.add("etc/group", &program(b"root:x:0:\n"))?;
        archive.add("job", &program(job.as_bytes()))?;
        archive.add("init", &program(INIT.as_bytes()))?;
        archive.finish()
    };
    build().map_err(|TooLarge| Error::other("the rig's initramfs is too large"))
}

/// Paths (without the leading slash) and contents of the C library.
pub(crate) fn libraries() -> Result<Vec<(String, Vec<u8>)>> {
    LIBRARIES
        .iter()
        .map(|name| {
            let path = LIBRARY_DIRS
                .iter()
                .map(|dir| Path::new(dir).join(name))
                .find(|path| path.is_file())
                .ok_or_else(|| {
                    Error::other(format!("no {name} on this machine (package libc6)"))
                })?;
            let bytes = host::read(&path)?;
            let path = path.to_string_lossy().trim_start_matches('/').to_owned();
            Ok((path, bytes))
        })
        .collect()
}

/// One byte stream from the outer machine: a virtio-serial port that QEMU
/// connects to a socket of ours.
struct Port {
    socket: PathBuf,
    thread: JoinHandle<()>,
}

impl Port {
    fn new(
        qemu: &mut Command,
        dir: &Path,
        name: &str,
        mut to: impl Write + Send + 'static,
    ) -> Result<Self> {
        let socket = dir.join(name);
        let listener = UnixListener::bind(&socket).map_err(Error::file("binding", &socket))?;
        qemu.arg("-chardev")
            .arg(joined(&format!("socket,id={name},path="), &socket))
            .arg("-device")
            .arg(format!(
                "virtserialport,bus=ports.0,chardev={name},name={name}"
            ));
        let thread = thread::spawn(move || {
            if let Ok((mut stream, _)) = listener.accept() {
                copy(&mut stream, &mut to);
            }
        });
        Ok(Self { socket, thread })
    }

    /// Waits for the last byte, after QEMU's end.
    fn finish(self) {
        // Where QEMU ended before it connected, this ends the wait for it.
        drop(UnixStream::connect(&self.socket));
        let _ = self.thread.join();
    }
}

/// Copies as bytes come; a reader that went away does not stop the run.
fn copy(from: &mut UnixStream, to: &mut impl Write) {
    let mut chunk = vec![0; 64 << 10];
    while let Ok(n) = from.read(&mut chunk) {
        if n == 0 {
            return;
        }
        let _ = to.write_all(&chunk[..n]).and_then(|()| to.flush());
    }
}

/// Bytes from PID 1, as events.
struct Answers(mpsc::Sender<Event>);

impl Write for Answers {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .send(Event::Answer(bytes.to_vec()))
            .map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch_of(answer: &[u8]) -> Watch {
        let temp = tempfile::tempdir().unwrap();
        let console = temp.path().join("console.log");
        fs::write(&console, "Kernel panic: why\n").unwrap();
        let mut watch = Watch::new(temp, &console);
        assert!(!watch.take(Event::Answer(answer.to_vec())));
        assert!(!console.exists());
        assert!(watch.take(Event::Ended(b"qemu said".to_vec())));
        watch
    }

    #[test]
    fn the_exit_code_follows_ready() {
        assert_eq!(watch_of(b"ready\n7\n").outcome().unwrap().code, 7);
    }

    #[test]
    fn an_end_without_an_exit_code_shows_the_console() {
        let error = watch_of(b"ready\n").outcome().err().unwrap().to_string();
        assert!(error.contains("qemu said"), "{error}");
        assert!(error.contains("Kernel panic: why"), "{error}");
    }

    #[test]
    fn a_quoted_word_survives_the_shell() {
        for word in [
            "plain",
            "a b",
            "it's",
            "$HOME `id`",
            "\"\\",
            "line\nline",
            "",
        ] {
            let out = Command::new("sh")
                .arg("-c")
                .arg(format!("printf %s {}", quoted(word)))
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(out.stdout).unwrap(), word);
        }
    }
}
