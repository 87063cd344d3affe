//! A machine's life: started, stopped, changed, started again.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use bantam::Confinement;
use bantam_e2e::{Running, TestHome, skip, tests_with_home};

use crate::rules::assert_private;

/// A few MiB, where a home has its machines.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(home: &TestHome) -> Option<Self> {
        let at = home.path().join("machines");
        fs::create_dir_all(&at).unwrap();
        let mut mount = Command::new("mount");
        let mount = mount
            .args(["-t", "tmpfs", "-o", "size=8m,mode=700", "small"])
            .arg(&at);
        mount.status().unwrap().success().then_some(Self(at))
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    /// Leaves no room at all.
    fn fill(&self) {
        let mut file = File::create(self.filler()).unwrap();
        let error = loop {
            if let Err(error) = file.write_all(&[1; 4096]) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    }

    fn empty(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // What stays mounted fails the test: the home looks.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

tests_with_home! {
    fn a_machine_keeps_what_it_wrote_until_it_is_deleted(home) {
        home.create("m", &[]);
        let text = home.ok(["start", "-n", "m"]);
        let pid = home.pid("m");
        let raw = pid.as_raw_nonzero();
        assert_eq!(text, format!("Machine 'm' running (PID: {raw})\n"));
        let text = home.ok(["start", "-n", "m"]);
        assert_eq!(text, format!("Machine 'm' already running (PID: {raw})\n"));
        let text = home.ok(["status", "-n", "m"]);
        assert!(text.starts_with(&format!("Machine 'm': running (PID: {raw})\n")), "{text}");
        assert_eq!(home.sh("m", "uname -n; cat /etc/hostname"), "m\nm\n");
        home.sh("m", "echo kept > /root/note; echo lost > /tmp/note");

        let said = home.fails(["update", "-n", "m", "--cpus", "2"]);
        assert!(said.contains("is running"), "{said}");
        home.fails(["delete", "-n", "m"]);
        assert_eq!(home.pid("m"), pid, "a refused delete touched the machine");

        assert_eq!(home.ok(["stop", "-n", "m"]), "Stopped machine: m\n");
        home.wait_for_no_process();
        assert_eq!(home.ok(["stop", "-n", "m"]), "Machine 'm' is not running (state: stopped)\n");
        assert_eq!(home.ok(["status", "-n", "m"]), "Machine 'm': stopped\n");
        let said = home.fails(["exec", "-n", "m", "--", "true"]);
        assert!(said.contains("is not running") && said.contains("start --name m"), "{said}");

        home.ok(["start", "-n", "m"]);
        assert_ne!(home.pid("m"), pid);
        assert_eq!(home.sh("m", "cat /root/note"), "kept\n");
        assert_eq!(home.ok(["restart", "-n", "m"]), "Restarted machine: m\n");
        assert_eq!(home.sh("m", "cat /root/note"), "kept\n");
        assert_eq!(home.ok(["delete", "-n", "m", "-f"]), "Deleted machine: m\n");
        home.wait_for_no_process();
        assert!(!home.machine_dir("m").exists());
        home.create("m", &[]);
        home.delete("m");
    }

    fn the_processes_of_a_machine_have_given_up_what_it_does_not_need(home) {
        let can = Confinement::probe();
        if !can.files || !can.system_calls {
            skip("confinement", "this kernel has no Landlock or no seccomp");
            return;
        }
        home.create("m", &["--net"]);
        home.ok(["start", "-n", "m"]);
        let processes = home.processes();
        assert!(!processes.is_empty());
        for (pid, line) in processes {
            let status = format!("/proc/{}/status", pid.as_raw_nonzero());
            let status = fs::read_to_string(status).unwrap();
            for expected in ["NoNewPrivs:\t1\n", "Seccomp:\t2\n"] {
                assert!(status.contains(expected), "{line}: {status}");
            }
        }
        // It would say so if a part of it were missing.
        let log = fs::read_to_string(home.machine_dir("m").join("vmm.log")).unwrap();
        assert_eq!(log, "");
        home.delete("m");
    }

    fn a_guest_that_ends_by_itself_ends_its_machine_however_it_does(home) {
        home.create("m", &[]);
        for how in ["poweroff", "halt", "reboot"] {
            home.ok(["start", "-n", "m"]);
            home.sh("m", &format!("echo {how} > /root/how; sync"));
            let run = home.exec("m", &format!("busybox {how} -f; sleep 1000"));
            assert_eq!(run.code, 125, "{how}: {}", run.stderr);
            assert!(run.stderr.contains("the guest shut down"), "{how}: {}", run.stderr);
            home.wait_for_no_process();
            let machine = home.find("m").unwrap();
            assert_eq!(machine["state"], "stopped", "{how}: {machine}");
            let reason = machine["state_reason"].as_str().unwrap();
            assert!(reason.contains("the guest shut down"), "{how}: {machine}");
            let said = home.fails(["exec", "-n", "m", "--", "true"]);
            assert!(said.contains("not running"), "{how}: {said}");
            home.ok(["start", "-n", "m"]);
            assert_eq!(home.sh("m", "cat /root/how"), format!("{how}\n"));
            home.ok(["stop", "-n", "m"]);
        }
        home.delete("m");
    }

    fn a_stop_on_a_full_disk_of_the_host_is_no_crash(home) {
        let Some(full) = SmallDisk::mount(&home) else {
            return skip("a_stop_on_a_full_disk_of_the_host_is_no_crash", "mounting needs root");
        };
        home.started("m", &[]);
        full.fill();
        assert_eq!(home.ok(["stop", "-n", "m"]), "Stopped machine: m\n");
        let machine = home.find("m").unwrap();
        assert_eq!(machine["state"], "stopped", "{machine}");
        assert_eq!(machine["state_reason"], "it was stopped", "{machine}");
        home.wait_for_no_process();
        full.empty();
        // The next end has its room again.
        home.ok(["start", "-n", "m"]);
        full.fill();
        home.ok(["stop", "-n", "m"]);
        assert_eq!(home.state("m"), "stopped");
        home.delete("m");
    }

    fn settings_reach_every_command_and_can_be_changed(home) {
        home.create("m", &[
            "-e", "A=1 one", "-e", "B=2", "-w", "/tmp", "-u", "1234:567", "--label", "k=v",
        ]);
        home.ok(["start", "-n", "m"]);
        let show = "echo \"$A|$B|$PWD|$(id -u):$(id -g)|$(nproc)\"";
        assert_eq!(home.sh("m", show), "1 one|2|/tmp|1234:567|1\n");
        let args = ["exec", "-n", "m", "-e", "A=9", "-w", "/", "-u", "0", "--", "bash", "-c", show];
        assert_eq!(home.ok(args), "9|2|/|0:0|1\n");
        assert_eq!(home.find("m").unwrap()["labels"]["k"], "v");
        home.ok(["stop", "-n", "m"]);
        home.ok([
            "update", "-n", "m", "-e", "A=3", "--remove-env", "B", "-w", "/", "-u", "0",
            "--cpus", "2", "--mem", "320", "--label", "k=w",
        ]);
        home.ok(["start", "-n", "m"]);
        assert_eq!(home.sh("m", show), "3||/|0:0|2\n");
        let kib = home.sh("m", "grep MemTotal /proc/meminfo");
        let kib: u64 = kib.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!((260 << 10..=320 << 10).contains(&kib), "{kib} KiB");
        assert_eq!(home.find("m").unwrap()["labels"]["k"], "w");
        home.delete("m");
    }

    fn a_start_that_fails_explains_itself_and_leaves_nothing(home) {
        let kernel = home.dir().join("not-a-kernel");
        fs::write(&kernel, vec![0x55; 1 << 20]).unwrap();
        let kernel = kernel.to_str().unwrap().to_owned();
        home.create("m", &["--kernel", &kernel]);
        for _ in 0..2 {
            let said = home.fails(["start", "-n", "m"]);
            assert!(said.contains(&kernel), "{said}");
            home.wait_for_no_process();
            let machine = home.find("m").unwrap();
            assert_eq!(machine["state"], "failed");
            assert!(machine["state_reason"].as_str().unwrap().contains(&kernel), "{machine}");
        }
        assert!(home.ok(["status", "-n", "m"]).contains(&kernel));
        assert!(home.fails(["exec", "-n", "m", "--", "true"]).contains("failed"));
        assert_eq!(home.ok(["stop", "-n", "m"]), "Machine 'm' is not running (state: failed)\n");
        home.delete("m");
        // One that is only made to run leaves no record either.
        let args = [vec!["run".into(), "-d".into(), "-n".into(), "m".into()], home.machine_args()];
        let args = args.concat().into_iter().chain(["--kernel", &kernel, "--", "true"].map(Into::into));
        assert!(home.fails(args).contains(&kernel));
        assert!(home.list().is_empty());
    }

    fn an_image_that_cannot_be_set_up_is_named_and_leaves_nothing(home) {
        let root = home.dir().join("root");
        fs::create_dir(&root).unwrap();
        for dir in ["bin", "etc", "usr"] {
            fs::create_dir(root.join(dir)).unwrap();
        }
        fs::write(root.join("proc"), "no directory").unwrap();
        let mut args = home.create_args("m", &[]);
        *args.last_mut().unwrap() = root.into();
        home.ok(args);
        let said = home.fails(["start", "-n", "m"]);
        assert!(said.contains("/proc"), "{said}");
        home.wait_for_no_process();
        assert_eq!(home.state("m"), "failed");
        home.delete("m");
    }

    fn a_machine_outlives_the_process_that_started_it_and_serves_others(home) {
        home.create("m", &[]);
        // A session of its own that ends at once, as a terminal that is closed.
        let mut shell = Command::new("setsid");
        home.put_into(&mut shell);
        let line = "\"$0\" start -n m >/dev/null 2>&1; kill -HUP 0";
        shell.args(["sh", "-c", line]).arg(&home.setup.program).stdin(Stdio::null());
        let _ = Running::start(&mut shell).finish();
        assert_eq!(home.state("m"), "running");
        let first = home.start_with_pipe(["exec", "-n", "m", "-i", "--", "bash", "-c",
            "until test -e /tmp/there; do sleep 0.1; done; cat"]);
        home.sh("m", "touch /tmp/there");
        let run = first.finish_with_input(b"both");
        assert_eq!((run.code, run.text().as_str()), (0, "both"), "{}", run.stderr);
        // And the library, from yet another process.
        let name = bantam::MachineName::parse("m").unwrap();
        let machine = home.machines().connect(&name).unwrap();
        assert_eq!(machine.exec(["cat", "/etc/hostname"]).output().unwrap().stdout, b"m\n");
        drop(machine);
        assert_eq!(home.state("m"), "running");
        home.delete("m");
    }

    fn what_a_running_machine_has_on_the_host_is_for_its_owner_alone(home) {
        home.create("m", &["--", "bash", "-c", "echo log"]);
        let mut shell = Command::new("sh");
        home.put_into(&mut shell);
        let line = "umask 000; exec \"$0\" start -n m";
        shell.args(["-c", line]).arg(&home.setup.program).stdin(Stdio::null());
        assert_eq!(Running::start(&mut shell).finish().code, 0);
        assert_private(&home.path().join("machines"));
        for entry in fs::read_dir(home.tmp()).unwrap() {
            let entry = entry.unwrap();
            let mode = entry.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{}", entry.path().display());
        }
        home.delete("m");
    }
}

#[test]
fn a_home_may_be_deeper_than_the_address_of_a_socket() {
    let deep: PathBuf = std::iter::repeat_n("d".repeat(60), 4).collect();
    let test = "a_home_may_be_deeper_than_the_address_of_a_socket";
    let Some(home) = TestHome::below(test, deep.to_str().unwrap()) else {
        return;
    };
    let name = "n".repeat(75);
    home.started(&name, &[]);
    assert_eq!(home.sh(&name, "uname -n | wc -c").trim(), "65");
    home.ok(["stop", "-n", &name]);
    assert_eq!(home.state(&name), "stopped");
    home.delete(&name);
}
