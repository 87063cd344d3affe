//! A home of its own for the named machines of one test, and the proof that nothing is left.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bantam::{EngineChoice, Home, Machine, MachineBuilder, MachineName, Machines};
use rustix::process::{Pid, Signal};
use serde_json::Value;

use crate::{Run, Running, Setup, setup};

/// Memory of a test's machine, in MiB.
pub const MEMORY_MIB: u32 = 256;

/// The machine of [`TestHome::shared`].
pub const SHARED: &str = "shared";

/// How long what ends with a machine may take to be gone.
const GONE_LIMIT: Duration = Duration::from_secs(15);

/// A `BANTAM_HOME` and a `TMPDIR` of one test.
///
/// Dropping it ends and removes whatever the test left, and fails the test if there was anything:
/// machines or half-made ones, pins in the store, processes, mounts, sockets, temporary files.
#[derive(Debug)]
pub struct TestHome {
    /// What the test was set up with.
    pub setup: Setup,
    dir: tempfile::TempDir,
    home: PathBuf,
    mark: String,
}

impl TestHome {
    /// A home; or a line that says why the test is skipped.
    #[must_use]
    pub fn new(test: &str) -> Option<Self> {
        Self::below(test, "home")
    }

    /// As [`TestHome::new`], at a path of the caller's choice below the test's directory.
    ///
    /// # Panics
    /// If the directories cannot be made.
    #[must_use]
    pub fn below(test: &str, path: &str) -> Option<Self> {
        Some(Self::with(setup(test)?, path, "tiny"))
    }

    /// A home for machines of an image of the caller's choice, `setup.image`, of which a store is
    /// kept under the name `store`.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    pub fn with(setup: Setup, path: &str, store: &str) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("bantam-e2e-")
            .tempdir()
            .unwrap_or_else(|error| panic!("cannot make a directory: {error}"));
        let home = dir.path().join(path);
        copy_tree(&filled_store(&setup, store), &home.join("images"));
        fs::create_dir(dir.path().join("tmp"))
            .unwrap_or_else(|error| panic!("cannot make a directory: {error}"));
        let name = dir.path().file_name().unwrap_or_default();
        let mark = format!("bantam_e2e_home={}.", name.to_string_lossy());
        Self {
            setup,
            home,
            mark,
            dir,
        }
    }

    /// A home with a running machine of the name [`SHARED`], for all tests of a program that do
    /// not change it. A process of its own removes both when this one has ended, however that
    /// was.
    ///
    /// # Panics
    /// If the machine does not start.
    #[must_use]
    pub fn shared(test: &str) -> Option<&'static Self> {
        static HOME: OnceLock<TestHome> = OnceLock::new();
        setup(test)?;
        let make = || {
            let home = Self::new(test).unwrap_or_else(|| panic!("the set-up is gone"));
            home.started(SHARED, &[]);
            let mut cleaner = Command::new("sh");
            home.put_into(&mut cleaner);
            let script = "cat; \"$0\" delete -n \"$1\" -f; rm -rf \"$2\"";
            let cleaner = cleaner
                .args(["-c", script])
                .arg(&home.setup.program)
                .args([OsStr::new(SHARED), home.dir.path().as_os_str()])
                .process_group(0)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            // Its input ends with this process.
            std::mem::forget(cleaner.unwrap_or_else(|error| panic!("cannot start sh: {error}")));
            home
        };
        Some(HOME.get_or_init(make))
    }

    /// The `BANTAM_HOME`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.home
    }

    /// The `TMPDIR`.
    #[must_use]
    pub fn tmp(&self) -> PathBuf {
        self.dir.path().join("tmp")
    }

    /// A directory for what the test itself makes.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The directory of a machine.
    #[must_use]
    pub fn machine_dir(&self, name: &str) -> PathBuf {
        self.home.join("machines").join(name)
    }

    /// The word on the guest's command line, and so on QEMU's, by which this home's machines are
    /// known.
    #[must_use]
    pub fn mark(&self) -> &str {
        &self.mark
    }

    /// The library's view.
    #[must_use]
    pub fn machines(&self) -> Machines {
        Machines::open(&Home::at(&self.home)).vmm_program(&self.setup.program)
    }

    /// A machine of the tests' image, for the library.
    ///
    /// # Panics
    /// If the engine is none.
    pub fn builder(&self) -> MachineBuilder {
        let engine = self.setup.engine.parse::<EngineChoice>();
        Machine::builder()
            .image(self.setup.image.to_string_lossy())
            .memory_mib(MEMORY_MIB)
            .engine(engine.unwrap_or_else(|error| panic!("{error}")))
            .kernel_args(&self.mark)
            .home(Home::at(&self.home))
            .vmm_program(&self.setup.program)
    }

    /// `bantam ARGS` in this home.
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.setup.command(args);
        self.put_into(&mut command);
        command
    }

    /// Lets a program find this home.
    pub fn put_into(&self, command: &mut Command) {
        command
            .env("BANTAM_HOME", &self.home)
            .env("TMPDIR", self.tmp())
            .env_remove("BANTAM_MACHINE_NAME")
            .env_remove("SMOLVM_MACHINE_NAME");
    }

    /// Starts `bantam ARGS` with nothing on standard input.
    pub fn start<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Running {
        Running::start(self.command(args).stdin(Stdio::null()))
    }

    /// Starts `bantam ARGS` with a pipe on standard input.
    pub fn start_with_pipe<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Running {
        Running::start(self.command(args).stdin(Stdio::piped()))
    }

    /// `bantam ARGS`.
    pub fn bantam<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Run {
        self.start(args).finish()
    }

    /// `bantam ARGS`, with `input` on standard input.
    pub fn bantam_with_input<S: AsRef<OsStr>>(
        &self,
        input: &[u8],
        args: impl IntoIterator<Item = S>,
    ) -> Run {
        self.start_with_pipe(args).finish_with_input(input)
    }

    /// `bantam ARGS`, which must succeed; its standard output.
    ///
    /// # Panics
    /// If it fails.
    pub fn ok<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> String {
        let args: Vec<_> = args.into_iter().map(|a| a.as_ref().to_owned()).collect();
        let run = self.bantam(&args);
        assert_eq!(run.code, 0, "{args:?}: {}{}", run.text(), run.stderr);
        run.text()
    }

    /// `bantam ARGS`, which must fail with 125; what it said.
    ///
    /// # Panics
    /// If it does not.
    pub fn fails<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> String {
        let args: Vec<_> = args.into_iter().map(|a| a.as_ref().to_owned()).collect();
        let run = self.bantam(&args);
        assert_eq!(run.code, 125, "{args:?}: {}{}", run.text(), run.stderr);
        assert!(
            run.stderr.starts_with("error: "),
            "{args:?}: {}",
            run.stderr
        );
        run.stderr
    }

    /// The options that make a machine of the tests' image on the engine under test.
    #[must_use]
    pub fn machine_args(&self) -> Vec<OsString> {
        let mut args: Vec<OsString> = ["--engine", &self.setup.engine, "--mem", "256"]
            .map(Into::into)
            .to_vec();
        args.extend(["--kernel-args", &self.mark, "-I"].map(Into::into));
        args.push(self.setup.image.clone().into());
        args
    }

    /// The arguments of `create -n NAME` with `more`.
    #[must_use]
    pub fn create_args(&self, name: &str, more: &[&str]) -> Vec<OsString> {
        let mut args: Vec<OsString> = ["create", "-n", name].map(Into::into).to_vec();
        args.extend(self.machine_args());
        args.extend(more.iter().map(Into::into));
        args
    }

    /// Makes a machine.
    pub fn create(&self, name: &str, more: &[&str]) {
        self.ok(self.create_args(name, more));
    }

    /// Makes and starts a machine.
    pub fn started(&self, name: &str, more: &[&str]) {
        self.create(name, more);
        self.ok(["start", "-n", name]);
    }

    /// Ends and removes a machine.
    pub fn delete(&self, name: &str) {
        self.ok(["delete", "-n", name, "-f"]);
    }

    /// `exec -n NAME -- bash -c SCRIPT`.
    pub fn exec(&self, name: &str, script: &str) -> Run {
        self.bantam(["exec", "-n", name, "--", "bash", "-c", script])
    }

    /// What a script in a machine prints; it must succeed.
    ///
    /// # Panics
    /// If it fails.
    pub fn sh(&self, name: &str, script: &str) -> String {
        let run = self.exec(name, script);
        assert_eq!(run.code, 0, "{script}: {}{}", run.text(), run.stderr);
        run.text()
    }

    /// `ls --json`, in which every machine must look like one.
    ///
    /// # Panics
    /// If it does not.
    pub fn list(&self) -> Vec<Value> {
        let text = self.ok(["ls", "--json"]);
        let list: Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let list = list
            .as_array()
            .unwrap_or_else(|| panic!("no array: {text}"));
        for machine in list {
            assert!(machine["name"].is_string(), "{machine}");
            assert!(machine["state"].is_string(), "{machine}");
        }
        list.clone()
    }

    /// A machine in `ls --json`.
    pub fn find(&self, name: &str) -> Option<Value> {
        self.list().into_iter().find(|m| m["name"] == name)
    }

    /// A machine's state.
    pub fn state(&self, name: &str) -> String {
        self.find(name).map_or_else(
            || "none".to_owned(),
            |m| m["state"].as_str().unwrap_or_default().to_owned(),
        )
    }

    /// The process of a running machine.
    ///
    /// # Panics
    /// If it does not run.
    pub fn pid(&self, name: &str) -> Pid {
        let machine = self.find(name);
        machine
            .as_ref()
            .and_then(|m| i32::try_from(m["pid"].as_i64()?).ok())
            .and_then(Pid::from_raw)
            .unwrap_or_else(|| panic!("{name} has no process: {machine:?}"))
    }

    /// Sends a signal to a machine's process.
    ///
    /// # Panics
    /// If it cannot be sent.
    pub fn signal(&self, name: &str, signal: Signal) {
        rustix::process::kill_process(self.pid(name), signal)
            .unwrap_or_else(|error| panic!("cannot signal {name}: {error}"));
    }

    /// The processes of this home's machines and commands, each with its command line: those
    /// that were started with it as `BANTAM_HOME`, have the mark on their command line, or hold
    /// one of its files open.
    #[must_use]
    pub fn processes(&self) -> Vec<(Pid, String)> {
        let own = rustix::process::getpid();
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        entries
            .filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
            .filter(|pid| *pid != own)
            .filter_map(|pid| self.as_ours(pid))
            .collect()
    }

    /// The process and its command line, if it is this home's.
    fn as_ours(&self, pid: Pid) -> Option<(Pid, String)> {
        let proc = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        let line = fs::read(proc.join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let environment = fs::read(proc.join("environ")).unwrap_or_default();
        let variable = [b"BANTAM_HOME=", self.home.as_os_str().as_encoded_bytes()].concat();
        let started_in = environment.split(|byte| *byte == 0).any(|v| v == variable);
        let holds = || {
            let open = fs::read_dir(proc.join("fd"));
            open.into_iter()
                .flatten()
                .flatten()
                .filter_map(|fd| fs::read_link(fd.path()).ok())
                .any(|file| file.starts_with(self.dir.path()))
        };
        (started_in || line.contains(&self.mark) || holds()).then_some((pid, line))
    }

    /// Waits until no process of this home is left.
    ///
    /// # Panics
    /// If one stays.
    pub fn wait_for_no_process(&self) {
        eventually(GONE_LIMIT, "no process", || match self.processes() {
            left if left.is_empty() => Ok(()),
            left => Err(format!("{left:?}")),
        });
    }

    /// What is there that must not be.
    fn left_behind(&self) -> Vec<String> {
        let deadline = Instant::now() + GONE_LIMIT;
        let mut processes = self.processes();
        while !processes.is_empty() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
            processes = self.processes();
        }
        let mut left: Vec<_> = processes
            .iter()
            .map(|(pid, line)| format!("process {}: {line}", pid.as_raw_nonzero()))
            .collect();
        let files = |what: &str, dir: PathBuf| {
            let entries = fs::read_dir(dir).into_iter().flatten().flatten();
            let what = what.to_owned();
            entries.map(move |entry| format!("{what} {}", entry.path().display()))
        };
        left.extend(files("machine", self.home.join("machines")));
        left.extend(files("pin", self.home.join("images/pins")));
        left.extend(files("temporary file", self.tmp()));
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let ours = self.dir.path().to_string_lossy();
        left.extend(
            mounts
                .lines()
                .filter(|line| line.contains(&*ours))
                .map(|line| format!("mount {line}")),
        );
        sockets(self.dir.path(), &mut left);
        left
    }
}

impl Drop for TestHome {
    fn drop(&mut self) {
        let left = if thread::panicking() {
            // What is left is the failure's, and has to go all the same.
            Vec::new()
        } else {
            self.left_behind()
        };
        for _ in 0..100 {
            let processes = self.processes();
            if processes.is_empty() {
                break;
            }
            for (pid, _) in processes {
                // It may just have ended.
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            thread::sleep(Duration::from_millis(20));
        }
        assert!(left.is_empty(), "the test left behind: {left:#?}");
    }
}

fn sockets(dir: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_socket() => {
                found.push(format!("socket {}", entry.path().display()));
            }
            Ok(kind) if kind.is_dir() => sockets(&entry.path(), found),
            _ => {}
        }
    }
}

/// A store that has the set-up's image and nothing else; made once, kept beside the shared store.
fn filled_store(setup: &Setup, name: &str) -> PathBuf {
    static STORES: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let make = || {
        let shared = std::env::var_os("BANTAM_HOME").map(PathBuf::from);
        let shared = shared.unwrap_or_else(std::env::temp_dir);
        let at = shared.join(name);
        let name = format!("warm-{}", std::process::id());
        let home = Home::at(&at);
        // Making a machine brings its image into the store.
        let made = Machine::builder()
            .image(setup.image.to_string_lossy())
            .home(home.clone())
            .name(&name)
            .create()
            .and_then(|_| Machines::open(&home).delete(&MachineName::parse(&name)?));
        made.unwrap_or_else(|error| panic!("cannot fill the store {}: {error}", at.display()));
        at.join("images")
    };
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    stores.entry(name.to_owned()).or_insert_with(make).clone()
}

/// Bytes of a file from which on it is not copied if that can be helped.
const LARGE: u64 = 16 << 20;

/// Copies a store, but for what is unfinished or locked.
fn copy_tree(from: &Path, to: &Path) {
    let copy = || -> std::io::Result<()> {
        fs::create_dir_all(to)?;
        fs::set_permissions(to, fs::metadata(from)?.permissions())?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            let to = to.join(entry.file_name());
            if !entry.file_type()?.is_dir() {
                // Images are large, and nobody changes them.
                let large = entry.metadata()?.len() > LARGE;
                if !large || fs::hard_link(entry.path(), &to).is_err() {
                    fs::copy(entry.path(), to)?;
                }
            } else if !["tmp", "locks", "pins"]
                .iter()
                .any(|n| entry.file_name() == *n)
            {
                copy_tree(&entry.path(), &to);
            }
        }
        Ok(())
    };
    copy().unwrap_or_else(|error| panic!("cannot copy {}: {error}", from.display()));
}

/// Tests that get a home of their own.
#[macro_export]
macro_rules! tests_with_home {
    ($($(#[$doc:meta])* fn $name:ident($home:ident) $body:block)*) => {
        $($(#[$doc])* #[test] fn $name() {
            let Some($home) = $crate::TestHome::new(stringify!($name)) else { return };
            $body
        })*
    };
}

/// Waits until `done` is so, and panics with what it says if that takes longer than `limit`,
/// which is there to end a hang.
///
/// # Panics
/// After `limit`.
pub fn eventually<T>(
    limit: Duration,
    what: &str,
    mut done: impl FnMut() -> Result<T, String>,
) -> T {
    let deadline = Instant::now() + limit;
    loop {
        match done() {
            Ok(value) => return value,
            Err(state) => assert!(Instant::now() < deadline, "waiting for {what}: {state}"),
        }
        thread::sleep(Duration::from_millis(20));
    }
}
