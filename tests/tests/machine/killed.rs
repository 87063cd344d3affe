//! Processes that are killed or stopped: nothing is orphaned, no record is lost, the next start
//! works.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bantam_e2e::{Running, TestHome, eventually, skip, tests_with_home};
use rustix::process::{Pid, Signal, kill_process};

use crate::LIMIT;

/// The process of a machine that is being started: the one whose command line says so.
fn vmm_process(home: &TestHome) -> Option<Pid> {
    let processes = home.processes();
    let found = processes
        .iter()
        .find(|(_, line)| line.contains(" vmm-process "));
    found.map(|(pid, _)| *pid)
}

fn wait_for_state(home: &TestHome, name: &str, state: &str) {
    eventually(LIMIT, state, || match home.state(name) {
        found if found == state => Ok(()),
        found => Err(found),
    });
}

/// What e2fsck finds in a machine's disk without writing, after the journal's replay if it has
/// to be replayed; `None` where there is no e2fsck.
fn check_disk(home: &TestHome, name: &str) -> Option<(bool, String)> {
    let program = ["/sbin/e2fsck", "/usr/sbin/e2fsck"].into_iter();
    let program = program.map(Path::new).find(|path| path.is_file())?;
    let disk = home.machine_dir(name).join("disk.ext4");
    let out = Command::new(program)
        .args(["-f", "-n"])
        .arg(disk)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
    Some((out.status.success(), said))
}

tests_with_home! {
    fn killing_the_command_that_starts_leaves_nothing(home) {
        home.create("m", &[]);
        // As soon as there is a process, and as soon as it says what it does.
        for moment in ["process", "listening", "at once"] {
            let mut start = home.start(["start", "-n", "m"]);
            match moment {
                "process" => eventually(LIMIT, moment, || vmm_process(&home).map(drop).ok_or("none".into())),
                "listening" => eventually(LIMIT, moment, || {
                    let there = home.machine_dir("m").join("control.sock").exists();
                    if there { Ok(()) } else { Err("no socket".into()) }
                }),
                _ => {}
            }
            start.child.kill().unwrap();
            let run = start.finish();
            if run.code == 137 {
                home.wait_for_no_process();
                let state = home.state("m");
                assert!(["created", "stopped", "failed"].contains(&state.as_str()), "{moment}: {state}");
            } else {
                // It was quicker than we were.
                assert_eq!(run.code, 0, "{moment}: {}", run.stderr);
                home.ok(["stop", "-n", "m"]);
            }
        }
        home.ok(["start", "-n", "m"]);
        assert_eq!(home.sh("m", "echo up"), "up\n");
        home.delete("m");
    }

    fn killing_the_command_that_creates_leaves_no_half_a_machine(home) {
        let machines = home.path().join("machines");
        let left = || -> Vec<_> {
            let entries = std::fs::read_dir(&machines).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect()
        };
        for round in 0..10 {
            let mut create = home.start(home.create_args("m", &[]));
            // At once, or when something of it is there.
            let deadline = Instant::now() + Duration::from_secs(if round % 2 == 0 { 0 } else { 10 });
            while left().is_empty() && Instant::now() < deadline {
                std::thread::yield_now();
            }
            create.child.kill().unwrap();
            let _ = create.finish();
            // Whole or not at all; and the name is free or taken, but not stuck.
            if home.state("m") == "none" {
                home.create("m", &[]);
            }
            assert_eq!(home.state("m"), "created");
            home.delete("m");
            // What has no lock yet is given a minute; the rest is swept by the next maker.
            for path in left() {
                assert!(!path.join("lock").exists(), "{}", path.display());
                std::fs::remove_dir_all(path).unwrap();
            }
        }
    }

    fn a_machine_whose_process_was_killed_failed_and_starts_again(home) {
        home.started("m", &[]);
        home.sh("m", "echo synced > /root/note; sync");
        let mut exec = home.start(["exec", "-n", "m", "--", "bash", "-c", "echo up; sleep 1000"]);
        assert_eq!(exec.read(3), "up\n");
        let pid = home.pid("m").as_raw_nonzero();
        home.signal("m", Signal::KILL);
        let run = exec.finish();
        assert_eq!(run.code, 125, "the machine died under a command: {}", run.stderr);
        assert!(run.stderr.contains("killed"), "{}", run.stderr);
        home.wait_for_no_process();
        let machine = home.find("m").unwrap();
        assert_eq!(machine["state"], "failed");
        assert!(machine["state_reason"].as_str().unwrap().contains(&pid.to_string()), "{machine}");
        let said = home.fails(["exec", "-n", "m", "--", "true"]);
        assert!(said.contains("not running"), "{said}");

        home.ok(["start", "-n", "m"]);
        assert_eq!(home.sh("m", "cat /root/note"), "synced\n");

        // Asked politely, it writes everything back.
        home.sh("m", "echo unsynced > /root/note");
        home.signal("m", Signal::TERM);
        home.wait_for_no_process();
        assert_eq!(home.state("m"), "stopped");
        match check_disk(&home, "m") {
            Some((clean, said)) => assert!(clean, "{said}"),
            None => skip("a_machine_whose_process_was_killed_failed_and_starts_again", "no e2fsck"),
        }
        home.ok(["start", "-n", "m"]);
        assert_eq!(home.sh("m", "cat /root/note"), "unsynced\n");
        home.delete("m");
    }

    fn a_signal_during_the_start_ends_it(home) {
        home.create("m", &[]);
        let start = home.start(["start", "-n", "m"]);
        let pid = eventually(LIMIT, "a process", || vmm_process(&home).ok_or("none".into()));
        // It may be over already.
        let _ = kill_process(pid, Signal::TERM);
        let run = start.finish();
        if run.code == 0 {
            // It came up before the signal was looked at, and then stops.
            wait_for_state(&home, "m", "stopped");
        } else {
            assert_eq!(run.code, 125, "{}", run.stderr);
        }
        home.wait_for_no_process();
        home.ok(["start", "-n", "m"]);
        home.delete("m");
    }

    fn a_command_whose_client_was_killed_is_gone_from_the_guest(home) {
        home.started("m", &[]);
        for _ in 0..3 {
            let script = "sleep 1001 & setsid sleep 1002 & echo up; sleep 1003";
            let mut exec = home.start(["exec", "-n", "m", "--", "bash", "-c", script]);
            assert_eq!(exec.read(3), "up\n");
            exec.child.kill().unwrap();
            assert_eq!(exec.finish().code, 137);
            eventually(LIMIT, "the commands' end", || {
                let left = home.exec("m", "pidof sleep").text();
                if left.is_empty() { Ok(()) } else { Err(left) }
            });
        }
        home.delete("m");
    }

    fn a_process_that_does_not_answer_is_unreachable_and_ended_by_force(home) {
        home.create("a", &[]);
        home.create("c", &[]);
        home.started("stuck", &[]);
        home.started("z", &[]);
        home.signal("stuck", Signal::STOP);
        let begun = Instant::now();
        let list = home.list();
        let took = begun.elapsed();
        let states: Vec<_> = list.iter().map(|m| m["state"].as_str().unwrap()).collect();
        assert_eq!(states, ["created", "created", "unreachable", "running"]);
        // The limit is a second; the rest is for a busy host. Without it this hangs for good.
        assert!(took < Duration::from_secs(6), "{took:?}");
        assert!(home.ok(["status", "-n", "stuck"]).starts_with("Machine 'stuck': unreachable"));
        assert_eq!(home.sh("z", "echo fine"), "fine\n");

        assert_eq!(home.ok(["stop", "-n", "stuck", "-t", "0"]), "Stopped machine: stuck\n");
        assert!(vmm_process(&home).is_some(), "the other machine is gone, too");
        assert_ne!(home.state("stuck"), "unreachable");
        home.ok(["start", "-n", "stuck"]);
        assert_eq!(home.sh("stuck", "echo fine"), "fine\n");

        home.signal("stuck", Signal::STOP);
        home.delete("stuck");
        assert_eq!(home.state("z"), "running");
        for name in ["a", "c", "z"] {
            home.delete(name);
        }
    }

    fn a_machine_that_an_embedder_owns_ends_with_it_however_it_dies(home) {
        let mut embedder = Command::new(std::env::current_exe().unwrap());
        home.put_into(&mut embedder);
        embedder
            .args(["--exact", "killed::embedder", "--nocapture"])
            .env("BANTAM_E2E_EMBEDDER", home.mark())
            .stdin(Stdio::null());
        let mut running = Running::start(&mut embedder);
        let mut lines = BufReader::new(running.child.stdout.take().unwrap()).lines();
        let up = lines.any(|line| line.is_ok_and(|line| line.contains("machine up")));
        assert!(up, "{}", running.finish().stderr);
        running.child.kill().unwrap();
        assert_eq!(running.finish().code, 137);
        home.wait_for_no_process();
        assert!(home.list().is_empty());
    }
}

/// Not a test: the embedder that the test above kills, in a process of its own.
#[test]
#[allow(clippy::print_stdout)] // how it says that the machine is up
fn embedder() {
    let Ok(mark) = std::env::var("BANTAM_E2E_EMBEDDER") else {
        return;
    };
    let setup = bantam_e2e::setup("embedder").unwrap();
    let machine = bantam::Machine::builder()
        .image(setup.image.to_string_lossy())
        .memory_mib(bantam_e2e::MEMORY_MIB)
        .engine(setup.engine.parse::<bantam::EngineChoice>().unwrap())
        .kernel_args(mark)
        .start()
        .unwrap();
    let mut child = machine
        .exec(["bash", "-c", "echo up; sleep 1000"])
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    println!("machine {line}");
    let _ = child.wait();
}
