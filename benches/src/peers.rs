//! Other programs that do the same work: boot the same kernel or their own, run `echo hello` from
//! the same image. Measured in turns with ours.

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use bantam::{EngineKind, Machine, find_guest};

use crate::machine;
use crate::memory::Usage;
use crate::program::{self, Bench, MEMORY_MIB};
use crate::report::{Report, milliseconds};
use crate::{Error, Progress};

pub(crate) const QEMU: &str = "QEMU microvm";
const SMOLVM: &str = "smolvm";
const FIRST_OUTPUT: &str = "start to first output";
pub(crate) const BESIDE: &str = "resident: beside guest memory, all processes";
pub(crate) const TOUCHED: &str = "resident: guest memory touched";
/// What the guest does: its `/dev` is empty, as the image's is.
const HELLO: &str = "mount -t devtmpfs dev /dev; echo hello >/dev/ttyS0; exec sleep 9999";

/// QEMU's own microvm, with the kernel and root file system of our machines.
pub(crate) struct Microvm {
    program: PathBuf,
    engine: EngineKind,
    kernel: PathBuf,
    rootfs: PathBuf,
    /// The words that our engine gives this kernel, without its devices.
    words: String,
}

impl Microvm {
    /// Asks a machine of ours for its kernel's words and its image.
    pub(crate) fn new(bench: &Bench) -> Result<Self, Error> {
        let program = program::find("qemu-system-x86_64")?;
        let machine = machine::start(bench)?;
        let line = machine.exec(["cat", "/proc/cmdline"]).output()?.stdout;
        let rootfs = machine.image().rootfs.clone();
        machine.kill();
        let words: Vec<String> = String::from_utf8_lossy(&line)
            .split_ascii_whitespace()
            .filter(|word| !OUR_DEVICES.iter().any(|prefix| word.starts_with(prefix)))
            .map(str::to_owned)
            .collect();
        Ok(Self {
            program,
            engine: bench.engine,
            kernel: find_guest(None)?.kernel,
            rootfs,
            words: words.join(" "),
        })
    }

    /// The command that boots it and prints `hello`.
    pub(crate) fn command(&self) -> Command {
        // Its first device is at the last of its places. What follows `--` is the shell's, so QEMU
        // must not add words itself.
        let line = format!(
            "{} console=ttyS0 virtio_mmio.device=512@0xfeb00e00:12 root=/dev/vda rootfstype=erofs \
             ro init=/bin/sh -- -c \"{HELLO}\"",
            self.words
        );
        let (accelerator, cpu) = match self.engine {
            EngineKind::Native => ("kvm", "host"),
            EngineKind::Emulated => ("tcg", "max,-erms,-fsrm"),
        };
        let mut qemu = Command::new(&self.program);
        qemu.args(["-machine", &format!("{MICROVM},memory-backend=ram")])
            .args([
                "-object",
                &format!("memory-backend-memfd,id=ram,size={MEMORY_MIB}M"),
            ])
            .args([
                "-m",
                &format!("{MEMORY_MIB}M"),
                "-accel",
                accelerator,
                "-cpu",
                cpu,
            ])
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-no-reboot", "-serial", "stdio"])
            .arg("-drive")
            .arg(format!(
                "id=root,file={},format=raw,if=none,readonly=on",
                self.rootfs.display()
            ))
            .args(["-device", "virtio-blk-device,drive=root", "-append", &line])
            .arg("-kernel")
            .arg(&self.kernel)
            .stdin(Stdio::null());
        qemu
    }
}

/// Words about devices of ours, which the peer has not.
const OUR_DEVICES: [&str; 5] = [
    "8250.",
    "console=",
    "earlycon",
    "keep_bootcon",
    "virtio_mmio.",
];

/// As small as QEMU's documentation makes it; the clock saves the kernel a second of waiting.
const MICROVM: &str = "microvm,x-option-roms=off,pit=off,pic=off,rtc=on,isa-serial=on,acpi=off,auto-kernel-cmdline=off";

/// Killed when dropped.
pub(crate) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Until a peer is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts a command and waits for its first byte.
pub(crate) fn first_byte(command: &mut Command) -> Result<(Running, f64), Error> {
    let start = Instant::now();
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(Error::start(command))?;
    let mut running = Running(child);
    let (sender, received) = mpsc::channel();
    let stdout = running.0.stdout.take();
    // It ends with the program, whose output it keeps open until then.
    thread::spawn(move || {
        let mut byte = [0; 1];
        let got = stdout.map(|mut stdout| (stdout.read(&mut byte), stdout));
        let _ = sender.send((matches!(got, Some((Ok(1), _))), start.elapsed()));
        drop(got.map(|(_, mut stdout)| io::copy(&mut stdout, &mut io::sink())));
    });
    match received.recv_timeout(PATIENCE) {
        Ok((true, took)) => Ok((running, milliseconds(took))),
        Ok((false, _)) => Err(Error::Other(format!("{command:?} printed nothing"))),
        Err(_) => Err(Error::Other(format!(
            "{command:?} printed nothing for {} s",
            PATIENCE.as_secs()
        ))),
    }
}

/// Whether ours goes first in a turn: A B, B A, A B, and so on. Whoever is second finds the host as the
/// first left it.
pub(crate) fn ours_is_first(turn: usize) -> bool {
    turn.is_multiple_of(2)
}

/// One turn: both, in the order of this turn. An error of the first ends it.
pub(crate) fn in_turn<A, B, E>(
    turn: usize,
    ours: impl FnOnce() -> Result<A, E>,
    theirs: impl FnOnce() -> Result<B, E>,
) -> Result<(A, B), E> {
    if ours_is_first(turn) {
        let ours = ours()?;
        Ok((ours, theirs()?))
    } else {
        let theirs = theirs()?;
        Ok((ours()?, theirs))
    }
}

/// Start to first output and memory of ours and of QEMU's microvm, in turns.
pub(crate) fn microvm(
    bench: &Bench,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    let peer = Microvm::new(bench)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let (mut beside, mut touched) = (Vec::new(), Vec::new());
    // The first turn brings the files into the page cache.
    for run in 0..=runs {
        progress.say(&format!("beside {QEMU}: {run}/{runs}"));
        let our_turn = || {
            let (mut running, took) = first_byte(&mut bench.run(1, &["echo", "hello"]))?;
            let _ = running.0.wait();
            Ok(took)
        };
        let their_turn = || {
            let (running, took) = first_byte(&mut peer.command())?;
            Ok((took, Usage::of(running.0.id(), MEMORY_MIB)?))
        };
        let (took, (their_took, usage)) = in_turn::<_, _, Error>(run, our_turn, their_turn)?;
        if run > 0 {
            ours.push(took);
            theirs.push(their_took);
            touched.push(usage.guest_mib());
            beside.push(usage.beside_guest_mib());
        }
    }
    let engine = bench.engine.name();
    report.add(format!("{FIRST_OUTPUT}, side by side"), engine, "ms", ours);
    for (name, unit, values) in [
        (format!("{FIRST_OUTPUT}, side by side"), "ms", theirs),
        (BESIDE.to_owned(), "MiB", beside),
        (TOUCHED.to_owned(), "MiB", touched),
    ] {
        report.add_peer(QEMU, name, engine, unit, values);
    }
    Ok(())
}

/// Runs in smolvm's Python package and prints one line of JSON for each machine.
const SMOLVM_SCRIPT: &str = include_str!("../peers/smolvm.py");

/// How many turns there are at most for each that counts.
const SMOLVM_TURNS: usize = 5;

/// How long one of its machines may take. Before the first one it unpacks the image in a machine of its
/// own with four vCPUs: in the rig 46 s in all, on a busy host 90 s.
const SMOLVM_PATIENCE: Duration = Duration::from_secs(400);

/// What the script says of one machine, times in milliseconds.
#[derive(serde::Deserialize)]
struct SmolvmRun {
    output: f64,
    exec: Vec<f64>,
    pid: u32,
    connections: usize,
}

/// How many connections its agent may serve before the first command. A machine that is not ready after
/// 5 s is asked anew every few milliseconds. An answer is waited for 10 ms, but the agent answers all that
/// was asked, one after the other, before it comes to the command. Hardware is never that slow; in the rig
/// a start has 9 or 10, and one that ran into this up to some hundreds, each of 33 ms: half a second
/// of some twelve is let pass.
const SMOLVM_CONNECTIONS: usize = 24;

/// That the script's machine is gone.
#[derive(serde::Deserialize)]
struct Deleted {}

/// smolvm's own library, in one process that makes all machines, beside ours in another.
pub(crate) fn smolvm(
    bench: &Bench,
    package: &Path,
    runs: usize,
    report: &mut Report,
    progress: Progress,
) -> Result<(), Error> {
    if !package.join("smol").is_dir() {
        return Err(Error::Missing(format!(
            "smolvm is not at {} (`cargo xtask bench --peers` fetches it)",
            package.display()
        )));
    }
    if bench.engine == EngineKind::Emulated {
        return Err(Error::Missing(
            "smolvm needs a KVM on which Linux boots".to_owned(),
        ));
    }
    program::find("python3")?;
    let temp = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
    // It runs its monitor as another user.
    fs::set_permissions(temp.path(), Permissions::from_mode(0o755))
        .map_err(Error::file("opening to others", temp.path()))?;
    let home = temp.path().join("home");
    fs::create_dir(&home).map_err(Error::file("creating", &home))?;
    let script = temp.path().join("smolvm.py");
    fs::write(&script, SMOLVM_SCRIPT).map_err(Error::file("writing", &script))?;
    let mut python = Command::new("python3");
    python
        .arg(&script)
        .arg(package)
        .arg(&bench.image)
        .arg(MEMORY_MIB.to_string())
        .env("HOME", &home)
        // The rig is slow; its own limit is half a minute.
        .env("SMOLVM_START_TIMEOUT_SECS", "300")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = Running(python.spawn().map_err(Error::start(&python))?);
    let mut lines = Lines::of(&mut child.0)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let (mut our_exec, mut their_exec) = (Vec::new(), Vec::new());
    let (mut usages, mut their_usages) = (Vec::new(), Vec::new());
    let mut held_up = Vec::new();
    for turn in 0..=SMOLVM_TURNS * runs {
        progress.say(&format!("beside {SMOLVM}: {}/{runs}", ours.len()));
        // One that was held up is made again in the same order.
        let order = if turn == 0 { 0 } else { ours.len() + 1 };
        let ((took, times, usage), (their, their_usage)) = in_turn::<_, _, Error>(
            order,
            || our_machine(bench),
            || {
                let their: SmolvmRun = lines.answer_to("start")?;
                let usage = Usage::of(their.pid, MEMORY_MIB)?;
                let Deleted {} = lines.answer_to("delete")?;
                Ok((their, usage))
            },
        )?;
        if turn == 0 {
            continue;
        }
        if their.connections > SMOLVM_CONNECTIONS {
            held_up.push(their.connections);
        } else {
            ours.push(took);
            our_exec.extend(times);
            theirs.push(their.output);
            their_exec.extend(their.exec);
            usages.push(usage);
            their_usages.push(their_usage);
        }
        if ours.len() == runs {
            break;
        }
    }
    if ours.is_empty() {
        return Err(Error::Other(format!(
            "all of smolvm's starts were held up by its own questions whether they are ready \
             ({held_up:?} connections before the first command): this host is too busy"
        )));
    }
    if !held_up.is_empty() {
        report.skip(
            "some starts of smolvm",
            format!("its own questions held them up: {held_up:?} connections"),
        );
    }
    let engine = bench.engine.name();
    let start = "start call to a command's output, library";
    let exec = "exec `true` round trip";
    report.add(start, engine, "ms", ours);
    report.add_peer(SMOLVM, start, engine, "ms", theirs);
    report.add(format!("{exec}, side by side"), engine, "ms", our_exec);
    report.add_peer(
        SMOLVM,
        format!("{exec}, side by side"),
        engine,
        "ms",
        their_exec,
    );
    for (name, mib) in [
        (BESIDE, Usage::beside_guest_mib as fn(&Usage) -> f64),
        (TOUCHED, Usage::guest_mib),
    ] {
        let name = format!("{name}, side by side");
        let ours = usages.iter().map(mib).collect();
        report.add(&name, engine, "MiB", ours);
        let theirs = their_usages.iter().map(mib).collect();
        report.add_peer(SMOLVM, name, engine, "MiB", theirs);
    }
    Ok(())
}

/// A machine of ours through the same that the script does with one of theirs: milliseconds from the
/// call to the command's output, those of each `true`, and this process's memory then.
fn our_machine(bench: &Bench) -> Result<(f64, Vec<f64>, Usage), Error> {
    let start = Instant::now();
    let machine = machine::start(bench)?;
    machine.exec(["echo", "hello"]).output()?;
    let took = milliseconds(start.elapsed());
    let times = round_trips(&machine)?;
    let usage = Usage::of(std::process::id(), MEMORY_MIB)?;
    machine.kill();
    Ok((took, times, usage))
}

/// How often `true` is run in each machine.
const ROUND_TRIPS: usize = 10;

fn round_trips(machine: &Machine) -> Result<Vec<f64>, Error> {
    (0..ROUND_TRIPS)
        .map(|_| {
            let start = Instant::now();
            machine::run_true(machine)?;
            Ok(milliseconds(start.elapsed()))
        })
        .collect()
}

/// The script's side: it does nothing but what it is told, and answers each order with a line.
struct Lines {
    answers: mpsc::Receiver<String>,
    orders: std::process::ChildStdin,
    complaints: Arc<Mutex<String>>,
}

impl Lines {
    fn of(child: &mut Child) -> Result<Self, Error> {
        let (Some(stdout), Some(orders), Some(stderr)) =
            (child.stdout.take(), child.stdin.take(), child.stderr.take())
        else {
            return Err(Error::Other("the script has no pipes".to_owned()));
        };
        // Both threads end with the script.
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let complaints = Arc::new(Mutex::new(String::new()));
        let last = Arc::clone(&complaints);
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if !line.trim().is_empty() {
                    *last.lock().unwrap_or_else(PoisonError::into_inner) = line;
                }
            }
        });
        Ok(Self {
            answers,
            orders,
            complaints,
        })
    }

    fn answer_to<T: serde::de::DeserializeOwned>(&mut self, order: &str) -> Result<T, Error> {
        let _ = writeln!(self.orders, "{order}");
        let why = match self.answers.recv_timeout(SMOLVM_PATIENCE) {
            Ok(line) => match serde_json::from_str(&line) {
                Ok(answer) => return Ok(answer),
                Err(_) => format!("said {line}"),
            },
            Err(mpsc::RecvTimeoutError::Disconnected) => "ended".to_owned(),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                format!("did not answer for {} s", SMOLVM_PATIENCE.as_secs())
            }
        };
        // What it said last may still be on its way from the thread that reads it.
        thread::sleep(Duration::from_millis(100));
        let said = (self.complaints.lock()).unwrap_or_else(PoisonError::into_inner);
        Err(Error::Other(format!("smolvm: {order}: {why}: {said}")))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn who_goes_first_changes_with_each_turn() {
        let order = RefCell::new(String::new());
        let go = |who: char| {
            order.borrow_mut().push(who);
            Ok::<_, ()>(who)
        };
        for turn in 0..4 {
            let both = in_turn(turn, || go('a'), || go('b'));
            assert_eq!(both, Ok(('a', 'b')));
        }
        assert_eq!(order.into_inner(), "abbaabba");
    }

    #[test]
    fn a_turn_ends_with_the_first_error() {
        let fails = || Err::<(), _>("no");
        let never = || -> Result<(), &str> { unreachable!("the turn has ended") };
        assert_eq!(in_turn(0, fails, never), Err("no"));
        assert_eq!(in_turn(1, never, fails), Err("no"));
    }
}
