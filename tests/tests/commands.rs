//! What only a real guest shows of commands: its mounts and limits, memory that runs out, what is
//! killed, and copies of whole trees.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bantam::{CopyOptions, EngineChoice, Error, FileFailureKind, FileKind, Machine};
use bantam_e2e::{setup, skip};

fn machine(test: &str) -> Option<Machine> {
    let setup = setup(test)?;
    let machine = Machine::builder()
        .image(setup.image.to_str().unwrap())
        .memory_mib(256)
        .engine(setup.engine.parse::<EngineChoice>().unwrap())
        .boot_timeout(Duration::from_secs(120))
        .start();
    Some(machine.unwrap())
}

fn sh(machine: &Machine, script: &str) -> String {
    let out = machine.exec(["bash", "-c", script]).output().unwrap();
    assert!(out.status.success(), "{script}: {out:?}");
    String::from_utf8(out.stdout).unwrap()
}

/// Waits for what a guest does by itself.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not come true");
        thread::sleep(Duration::from_millis(20));
    }
}

fn wall_clock() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}

#[test]
fn a_command_finds_what_a_running_system_has() {
    let Some(machine) = machine("a_command_finds_what_a_running_system_has") else {
        return;
    };
    let mounts = sh(&machine, "cat /proc/self/mounts");
    for mount in [
        "proc /proc proc ",
        "sysfs /sys sysfs ",
        "devpts /dev/pts devpts ",
        "tmpfs /dev/shm tmpfs ",
        "mqueue /dev/mqueue mqueue ",
        "tmpfs /run tmpfs ",
        "cgroup2 /sys/fs/cgroup cgroup2 ",
    ] {
        assert!(mounts.contains(mount), "{mount} is not in {mounts}");
    }
    let limits = sh(&machine, "ulimit -Sn; ulimit -Hn");
    for limit in limits.lines() {
        assert!(limit.parse::<u64>().unwrap() >= 65_536, "{limits}");
    }
    assert_eq!(sh(&machine, "echo x | cat /dev/fd/0 /dev/stdin"), "x\n");
    assert_eq!(sh(&machine, "cat /sys/class/net/lo/operstate"), "unknown\n");
    let names = sh(
        &machine,
        "h=$(cat /etc/hostname); grep -c \"[[:space:]]$h\\$\" /etc/hosts",
    );
    assert_eq!(names, "1\n");
    let id = sh(&machine, "cat /etc/machine-id");
    assert_eq!(id.trim().len(), 32, "{id}");
    assert_eq!(sh(&machine, "head -c 32 /dev/random | wc -c").trim(), "32");
    // A command's own cgroup, and nothing of the agent's.
    let cgroup = sh(&machine, "cat /proc/self/cgroup");
    assert!(cgroup.starts_with("0::/exec-"), "{cgroup}");

    let before = wall_clock();
    let guest: u64 = sh(&machine, "date +%s").trim().parse().unwrap();
    let (before, after) = (before.as_secs(), wall_clock().as_secs());
    assert!(
        guest + 1 >= before && guest <= after + 1,
        "{before} {guest} {after}"
    );

    let stats = machine.stats().unwrap();
    assert!(
        stats.memory_total > 128 << 20 && stats.memory_total <= 256 << 20,
        "{stats:?}"
    );
    assert!(stats.memory_available > 0 && stats.memory_available < stats.memory_total);
    assert_eq!((stats.cpus, stats.processes), (1, 1), "{stats:?}");
    assert!(
        stats.uptime_ns > 0 && stats.cpu_ns > 0 && stats.disk.total > 0,
        "{stats:?}"
    );
}

#[test]
fn a_command_that_uses_up_the_memory_is_told_so_and_the_machine_goes_on() {
    let name = "a_command_that_uses_up_the_memory_is_told_so_and_the_machine_goes_on";
    let Some(machine) = machine(name) else {
        return;
    };
    // Keeps what it reads until a line ends, which is never.
    let out = machine
        .exec(["tail", "-n", "1", "/dev/zero"])
        .output()
        .unwrap();
    assert!(out.status.oom, "{:?}", out.status);
    assert_eq!(out.status.exit_code(), 137);
    let out = machine.exec(["bash", "-c", "exit 137"]).output().unwrap();
    assert!(!out.status.oom);
}

#[test]
fn nothing_is_left_of_a_command_that_is_killed_whatever_it_did_to_get_away() {
    let name = "nothing_is_left_of_a_command_that_is_killed_whatever_it_did_to_get_away";
    let Some(machine) = machine(name) else {
        return;
    };
    let script =
        "trap '' TERM HUP INT; setsid sleep 600 & (setsid sleep 600 &) ; echo up; sleep 600";
    let left = || machine.stats().unwrap().processes == 1;
    for _ in 0..3 {
        let out = machine
            .exec(["bash", "-c", script])
            .timeout(Duration::from_secs(2))
            .output()
            .unwrap();
        assert!(out.status.timed_out && out.stdout == b"up\n", "{out:?}");
        eventually("the timeout kills all", left);
        let mut child = machine.exec(["bash", "-c", script]).spawn().unwrap();
        let mut up = [0; 3];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
        drop(child);
        eventually("hanging up kills all", left);
    }
}

#[test]
fn a_signal_reaches_a_command_that_is_waited_for_and_a_second_one_can_kill() {
    let name = "a_signal_reaches_a_command_that_is_waited_for_and_a_second_one_can_kill";
    let Some(machine) = machine(name) else {
        return;
    };
    /// Acts when the command is ready to be signalled.
    struct OnOutput<F>(F);
    impl<F: FnMut()> Write for OnOutput<F> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            (self.0)();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let script = "trap 'exit 7' INT; echo up; while :; do sleep 0.1; done";
    let running = machine.exec(["bash", "-c", script]).start().unwrap();
    assert!(running.id() > 1);
    let handle = running.handle();
    let mut interrupt = OnOutput(|| handle.signal(2).unwrap());
    let finished = running.pipe(&mut interrupt, &mut io::sink()).unwrap();
    assert_eq!(finished.status.exit_code(), 7);
    let running = machine
        .exec(["bash", "-c", "trap '' INT; echo up; sleep 600"])
        .start()
        .unwrap();
    let handle = running.handle();
    let mut kill = OnOutput(|| {
        handle.signal(2).unwrap();
        handle.kill().unwrap();
    });
    let finished = running.pipe(&mut kill, &mut io::sink()).unwrap();
    assert_eq!(finished.status.exit_code(), 137);
    assert!(handle.kill().is_err() || finished.status.signal == Some(9));
}

#[test]
fn a_detached_command_outlives_its_call() {
    let Some(machine) = machine("a_detached_command_outlives_its_call") else {
        return;
    };
    let script = "mkfifo /tmp/go; echo > /tmp/ready; read x < /tmp/go; echo $$ > /tmp/done";
    let pid = machine.exec(["bash", "-c", script]).detach().unwrap();
    eventually("it is ready", || machine.read_file("/tmp/ready").is_ok());
    // Its own and process 1, when what read the file is gone.
    eventually("only it runs", || machine.stats().unwrap().processes == 2);
    sh(&machine, "echo > /tmp/go");
    eventually("it is done", || {
        machine
            .read_file("/tmp/done")
            .is_ok_and(|done| done == format!("{pid}\n").into_bytes())
    });
    let timed = machine
        .exec(["sleep", "600"])
        .timeout(Duration::from_secs(2))
        .detach();
    assert!(timed.unwrap() > 1);
    eventually("its time is over", || {
        machine.stats().unwrap().processes == 1
    });
    let error = machine.exec(["cat"]).stdin_bytes("x").detach().unwrap_err();
    assert!(matches!(error, Error::InvalidCommand(_)), "{error}");
}

/// What a copy must keep of everything in a tree: type and mode, size, time, content or target.
fn tree(root: &Path) -> BTreeMap<PathBuf, (u32, i64, Vec<u8>)> {
    let mut things = BTreeMap::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(path) = todo.pop() {
        let metadata = path.symlink_metadata().unwrap();
        let content = if metadata.is_dir() {
            todo.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
            Vec::new()
        } else if metadata.is_symlink() {
            fs::read_link(&path)
                .unwrap()
                .into_os_string()
                .into_encoded_bytes()
        } else {
            fs::read(&path).unwrap()
        };
        let name = path.strip_prefix(root).unwrap().to_path_buf();
        things.insert(name, (metadata.mode() & !0o7000, metadata.mtime(), content));
    }
    things
}

#[test]
fn a_tree_goes_in_and_comes_out_as_it_was() {
    let Some(machine) = machine("a_tree_goes_in_and_comes_out_as_it_was") else {
        return;
    };
    let options = CopyOptions::default();
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    fs::create_dir_all(from.join("sub/empty")).unwrap();
    for n in 0..500 {
        fs::write(from.join(format!("sub/{n}")), n.to_string()).unwrap();
    }
    fs::write(from.join("large"), vec![7; 5_000_001]).unwrap();
    fs::write(from.join("n".repeat(255)), "a long name").unwrap();
    fs::set_permissions(from.join("large"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("sub/1", from.join("link")).unwrap();
    symlink("/nowhere", from.join("dangling")).unwrap();

    let copied = machine.copy_in(&from, "/tmp/tree", &options).unwrap();
    assert_eq!(copied.entries, 507);
    let back = dir.path().join("back");
    let came = machine.copy_out("/tmp/tree", &back, &options).unwrap();
    assert_eq!(came, copied);
    assert!(tree(&from) == tree(&back), "it came back changed");
    // Commands see the same, with the owner and the mode.
    let seen = sh(
        &machine,
        "stat -c '%a %u %s' /tmp/tree/large; cat /tmp/tree/link",
    );
    assert_eq!(seen, "640 0 5000001\n1");

    machine
        .copy_in(from.join("large"), "/tmp", &options)
        .unwrap();
    assert_eq!(sh(&machine, "stat -c %s /tmp/large"), "5000001\n");
    machine
        .copy_in(from.join("sub/."), "/tmp/contents", &options)
        .unwrap();
    assert_eq!(sh(&machine, "cat /tmp/contents/499"), "499");
    machine
        .copy_out("/etc/hostname", dir.path(), &options)
        .unwrap();
    assert!(dir.path().join("hostname").is_file());

    let mut archive = Vec::new();
    machine
        .copy_out_tar("/tmp/contents", &mut archive, &options)
        .unwrap();
    sh(&machine, "mkdir /tmp/again");
    machine
        .copy_in_tar(&mut &archive[..], "/tmp/again")
        .unwrap();
    sh(&machine, "diff -r /tmp/contents /tmp/again/contents");

    let error = machine
        .copy_out("/no/such/tree", dir.path().join("x"), &options)
        .unwrap_err();
    let not_found = FileFailureKind::NotFound;
    assert!(
        matches!(&error, Error::File { kind, .. } if *kind == not_found),
        "{error}"
    );
    assert!(error.to_string().contains("/no/such/tree"), "{error}");
    let error = machine
        .copy_in(&from, "/etc/hostname", &options)
        .unwrap_err();
    assert!(error.to_string().contains("/etc/hostname"), "{error}");
    let error = machine
        .copy_in("/no/such/source", "/tmp", &options)
        .unwrap_err();
    assert!(error.to_string().contains("/no/such/source"), "{error}");
}

#[test]
fn a_copy_of_the_whole_root_leaves_out_what_the_kernel_makes_up() {
    let Some(machine) = machine("a_copy_of_the_whole_root_leaves_out_what_the_kernel_makes_up")
    else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("root");
    machine.copy_out("/", &to, &CopyOptions::default()).unwrap();
    assert!(to.join("etc/hostname").is_file());
    for empty in ["proc", "sys", "dev/pts"] {
        assert_eq!(fs::read_dir(to.join(empty)).unwrap().count(), 0, "{empty}");
    }
}

#[test]
fn a_tree_of_the_host_comes_back_as_it_was() {
    const TEST: &str = "a_tree_of_the_host_comes_back_as_it_was";
    let real = Path::new("/usr/share/zoneinfo");
    if !real.is_dir() {
        return skip(TEST, "there is no /usr/share/zoneinfo");
    }
    let Some(machine) = machine(TEST) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let options = CopyOptions::default();
    machine
        .copy_in(real.join("."), "/tmp/real", &options)
        .unwrap();
    let back = dir.path().join("back");
    machine.copy_out("/tmp/real/.", &back, &options).unwrap();
    let (mut real, mut back) = (tree(real), tree(&back));
    // The directories themselves were made by the copies.
    real.remove(Path::new(""));
    back.remove(Path::new(""));
    assert_eq!(real.len(), back.len());
    for (path, thing) in &real {
        assert!(
            back.get(path) == Some(thing),
            "{} came back changed",
            path.display()
        );
    }
}

#[test]
fn files_are_looked_at_and_changed_without_a_shell() {
    let Some(machine) = machine("files_are_looked_at_and_changed_without_a_shell") else {
        return;
    };
    machine.make_dir("/tmp/a/b", true).unwrap();
    machine.write_file("/tmp/a/file", "12345").unwrap();
    sh(&machine, "ln -s file /tmp/a/link; chmod 4711 /tmp/a/file");
    let names: Vec<_> = machine
        .list_dir("/tmp/a")
        .unwrap()
        .into_iter()
        .map(|info| (info.name.into_string().unwrap(), info.kind))
        .collect();
    let expected = [
        ("b", FileKind::Directory),
        ("file", FileKind::File),
        ("link", FileKind::Symlink),
    ];
    assert_eq!(names, expected.map(|(name, kind)| (name.to_owned(), kind)));
    let info = machine.stat("/tmp/a/link", true).unwrap();
    assert_eq!(
        (info.kind, info.size, info.mode, info.uid),
        (FileKind::File, 5, 0o4711, 0)
    );
    let link = machine.stat("/tmp/a/link", false).unwrap();
    assert_eq!(link.target.as_deref(), Some(Path::new("file")));
    machine.rename("/tmp/a/file", "/tmp/a/moved").unwrap();
    assert!(!machine.exists("/tmp/a/link").unwrap() && machine.exists("/tmp/a/moved").unwrap());
    assert!(machine.remove("/tmp/a", false).is_err());
    machine.remove("/tmp/a", true).unwrap();
    assert!(!machine.exists("/tmp/a").unwrap());
}
