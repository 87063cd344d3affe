//! Shared helpers of the end-to-end tests: they drive the program from outside and the library
//! as an embedder would.
//!
//! `cargo xtask test` sets the environment; a test that finds it unset says that it is skipped.
//!
//! | variable | meaning |
//! |---|---|
//! | `BANTAM_E2E_PROGRAM` | the program under test |
//! | `BANTAM_E2E_IMAGE` | an archive with bash and busybox |
//! | `BANTAM_E2E_NETWORK_IMAGE` | an archive with clients of networks: curl, git, dig, Python |
//! | `BANTAM_E2E_ENGINE` | `emulated` or `native` |
//! | `BANTAM_GUEST_DIR` | guest kernel and initramfs |
//! | `BANTAM_HOME` | the image store that the tests share |

mod dns;
mod home;
mod netlink;
mod world;

use std::env;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub use dns::{Asked, DnsServer, Reply};
pub use home::{MEMORY_MIB, SHARED, TestHome, eventually};
use rustix::process::Pid;
pub use world::{Server, World};

/// Begins the word by which the processes of one run are known.
const MARK: &str = "bantam_e2e=";

/// No single run of the program may take longer, even in the nested rig.
const LIMIT: Duration = Duration::from_secs(300);

/// What `cargo xtask test` set up.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The program under test.
    pub program: PathBuf,
    /// An archive with bash and busybox.
    pub image: PathBuf,
    /// The engine under test, by its name on the command line.
    pub engine: String,
}

/// The set-up, or a line that says why the test is skipped.
#[must_use]
pub fn setup(test: &str) -> Option<Setup> {
    let get = |name: &str| match env::var_os(name) {
        Some(value) => Some(value),
        None => {
            skip(test, &format!("{name} is not set (run `cargo xtask test`)"));
            None
        }
    };
    Some(Setup {
        program: get("BANTAM_E2E_PROGRAM")?.into(),
        image: get("BANTAM_E2E_IMAGE")?.into(),
        engine: get("BANTAM_E2E_ENGINE")?.to_string_lossy().into_owned(),
    })
}

/// Says that a test is skipped, in the form that `cargo xtask test` counts.
#[allow(clippy::print_stdout)] // the line is the test's result
pub fn skip(test: &str, why: &str) {
    println!("skipped: {test}: {why}");
}

/// A finished run of the program.
#[derive(Debug)]
pub struct Run {
    /// Its exit code; 128+n if signal n ended it.
    pub code: i32,
    /// Standard output, exactly.
    pub stdout: Vec<u8>,
    /// Standard error as text.
    pub stderr: String,
    /// From start to end.
    pub took: Duration,
}

impl Run {
    /// Standard output as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl Setup {
    /// `bantam ARGS`.
    pub fn bantam<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Run {
        self.start(args, Stdio::null()).finish()
    }

    /// `bantam run -I IMAGE --engine ENGINE ARGS`.
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Run {
        self.bantam(self.run_args(args))
    }

    /// As [`Setup::run`], with `input` on standard input.
    pub fn run_with_input<S: AsRef<OsStr>>(
        &self,
        input: &[u8],
        args: impl IntoIterator<Item = S>,
    ) -> Run {
        self.bantam_with_input(input, self.run_args(args))
    }

    /// As [`Setup::bantam`], with `input` on standard input.
    pub fn bantam_with_input<S: AsRef<OsStr>>(
        &self,
        input: &[u8],
        args: impl IntoIterator<Item = S>,
    ) -> Run {
        self.start(args, Stdio::piped()).finish_with_input(input)
    }

    /// `bantam ARGS`, not started.
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args);
        command
    }

    /// `run -I IMAGE --engine ENGINE ARGS`, with a word in the guest's command line, and so in
    /// that of QEMU, by which the processes of this run are known.
    pub fn run_args<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
    ) -> Vec<std::ffi::OsString> {
        static RUNS: AtomicU32 = AtomicU32::new(0);
        let run = RUNS.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{MARK}{}.{run}.", std::process::id());
        let mut all: Vec<std::ffi::OsString> = [
            "run",
            "--engine",
            &self.engine,
            "--kernel-args",
            &mark,
            "-I",
        ]
        .map(Into::into)
        .to_vec();
        all.push(self.image.clone().into());
        all.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        all
    }

    /// Starts the program in a process group of its own.
    pub fn start<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        stdin: Stdio,
    ) -> Running {
        Running::start(self.command(args).stdin(stdin))
    }
}

/// A run of the program that has not ended.
#[derive(Debug)]
pub struct Running {
    /// The process.
    pub child: Child,
    group: Pid,
    mark: Option<String>,
    started: Instant,
}

impl Running {
    /// Starts a command in a process group of its own, its output piped.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(command: &mut Command) -> Self {
        let mark = command
            .get_args()
            .filter_map(OsStr::to_str)
            .find(|arg| arg.starts_with(MARK))
            .map(str::to_owned);
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        Self {
            group: Pid::from_child(&child),
            mark,
            started: Instant::now(),
            child,
        }
    }

    /// Waits for it to write so much, and returns that.
    ///
    /// # Panics
    /// If it ends before.
    pub fn read(&mut self, bytes: usize) -> String {
        let mut buffer = vec![0; bytes];
        let stdout = self.child.stdout.as_mut();
        let read = stdout.map(|stdout| stdout.read_exact(&mut buffer));
        if !matches!(read, Some(Ok(()))) {
            let mut said = String::new();
            // It is said as far as it can be read.
            let _ = self
                .child
                .stderr
                .as_mut()
                .map(|stderr| stderr.read_to_string(&mut said));
            panic!("the program ended before it wrote {bytes} bytes: {said}");
        }
        String::from_utf8_lossy(&buffer).into_owned()
    }

    /// As [`Running::finish`], with `input` on its standard input, which must be a pipe.
    #[must_use]
    pub fn finish_with_input(mut self, input: &[u8]) -> Run {
        let stdin = self.child.stdin.take();
        thread::scope(|scope| {
            scope.spawn(move || {
                // A program that does not read to the end is part of some tests.
                let _ = stdin.map(|mut stdin| stdin.write_all(input));
            });
            self.finish()
        })
    }

    /// Interrupts it as a terminal's Ctrl-C does: the whole foreground group.
    ///
    /// # Panics
    /// If it has ended.
    pub fn interrupt(&self) {
        rustix::process::kill_process_group(self.group, rustix::process::Signal::INT)
            .unwrap_or_else(|error| panic!("cannot interrupt the program: {error}"));
    }

    /// Waits for its end, and for proof that it left no process behind.
    ///
    /// # Panics
    /// If it takes too long, or leaves a process.
    #[must_use]
    pub fn finish(mut self) -> Run {
        let stdout = self.child.stdout.take().map(collect);
        let stderr = self.child.stderr.take().map(collect);
        let status = self.wait();
        let took = self.started.elapsed();
        assert_gone(self.group, self.mark.as_deref());
        let join = |reader: Option<thread::JoinHandle<Vec<u8>>>| {
            reader.map(|reader| reader.join().unwrap_or_default())
        };
        Run {
            code: status
                .code()
                .or(status.signal().map(|signal| 128 + signal))
                .unwrap_or(-1),
            stdout: join(stdout).unwrap_or_default(),
            stderr: String::from_utf8_lossy(&join(stderr).unwrap_or_default()).into_owned(),
            took,
        }
    }

    fn wait(&mut self) -> std::process::ExitStatus {
        let (done, watchdog) = std::sync::mpsc::channel::<()>();
        let group = self.group;
        let guard = thread::spawn(move || {
            if watchdog
                .recv_timeout(LIMIT)
                .is_err_and(|error| error == std::sync::mpsc::RecvTimeoutError::Timeout)
            {
                // The test fails by the exit code that follows.
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
        });
        let status = self
            .child
            .wait()
            .unwrap_or_else(|error| panic!("cannot wait for the program: {error}"));
        drop(done);
        guard
            .join()
            .unwrap_or_else(|_| panic!("the watchdog panicked"));
        status
    }
}

fn collect(mut stream: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // A read error leaves the bytes short, which the test's own check shows.
        let _ = stream.read_to_end(&mut bytes);
        bytes
    })
}

/// Fails the test if a process of the group, or one that carries the mark, is alive. The kernel
/// kills helpers a moment after their owner, so the check waits a little, but never for ever.
fn assert_gone(group: Pid, mark: Option<&str>) {
    let deadline = Instant::now() + Duration::from_secs(5);
    let alive =
        || rustix::process::test_kill_process_group(group).is_ok() || mark.is_some_and(is_carried);
    while alive() {
        assert!(
            Instant::now() < deadline,
            "the program left a process behind in group {group:?} or with {mark:?}"
        );
        thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process has the mark on its command line.
fn is_carried(mark: &str) -> bool {
    let carries = |entry: std::fs::DirEntry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(mark)
    };
    std::fs::read_dir("/proc").is_ok_and(|entries| entries.flatten().any(carries))
}
