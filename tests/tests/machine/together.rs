//! Many processes and the same machines.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bantam_e2e::{TestHome, tests_with_home};

/// How long lists are taken while machines come and go; longer by this variable.
const LIST_SECONDS: u64 = 10;
const LIST_SECONDS_VARIABLE: &str = "BANTAM_E2E_LIST_SECONDS";

/// The processes of machines, and of QEMU.
fn engines(home: &TestHome) -> (usize, usize) {
    let processes = home.processes();
    let vmm = |line: &str| line.contains(" vmm-process ");
    (
        processes.iter().filter(|(_, line)| vmm(line)).count(),
        processes
            .iter()
            .filter(|(_, line)| !vmm(line) && line.contains(home.mark()))
            .count(),
    )
}

tests_with_home! {
    fn many_that_start_one_machine_start_it_once(home) {
        home.create("m", &[]);
        let starts: Vec<_> = (0..6).map(|_| home.start(["start", "-n", "m"])).collect();
        let runs: Vec<_> = starts.into_iter().map(bantam_e2e::Running::finish).collect();
        for run in &runs {
            assert_eq!(run.code, 0, "{}", run.stderr);
        }
        let pid = format!("(PID: {})\n", home.pid("m").as_raw_nonzero());
        assert!(runs.iter().all(|run| run.text().ends_with(&pid)), "{runs:?}");
        let qemus = usize::from(home.setup.engine == "emulated");
        assert_eq!(engines(&home), (1, qemus), "{:?}", home.processes());
        // And many that stop it find it stopped.
        let stops: Vec<_> = (0..4).map(|_| home.start(["stop", "-n", "m"])).collect();
        for run in stops.into_iter().map(bantam_e2e::Running::finish) {
            assert_eq!(run.code, 0, "{}", run.stderr);
        }
        assert_eq!(home.state("m"), "stopped");
        home.delete("m");
    }

    fn of_many_that_create_one_name_one_does(home) {
        let label = |n: usize| home.create_args("m", &["--label", &format!("by={n}")]);
        let creates: Vec<_> = (0..8).map(|n| home.start(label(n))).collect();
        let runs: Vec<_> = creates.into_iter().map(bantam_e2e::Running::finish).collect();
        let winners: Vec<_> = (0..8).filter(|n| runs[*n].code == 0).collect();
        assert_eq!(winners.len(), 1, "{runs:?}");
        for run in runs.iter().filter(|run| run.code != 0) {
            assert_eq!(run.code, 125);
            assert!(run.stderr.contains("already exists"), "{}", run.stderr);
        }
        assert_eq!(home.find("m").unwrap()["labels"]["by"], winners[0].to_string());
        home.delete("m");
    }

    fn a_storm_of_starts_stops_and_deletes_ends_in_peace(home) {
        let names = ["x", "y"];
        thread::scope(|scope| {
            for worker in 0..3_u64 {
                let home = &home;
                scope.spawn(move || {
                    let mut dice = 0x9e37_79b9_7f4a_7c15 ^ (worker + 1);
                    for _ in 0..8 {
                        // Different on every thread, the same in every run.
                        dice ^= dice << 13;
                        dice ^= dice >> 7;
                        dice ^= dice << 17;
                        let name = names[usize::from(dice & 16 != 0)];
                        let args: Vec<OsString> = match dice % 6 {
                            0 | 1 => home.create_args(name, &[]),
                            2 | 3 => ["start", "-n", name].map(Into::into).to_vec(),
                            4 => ["stop", "-t", "1", "-n", name].map(Into::into).to_vec(),
                            _ => ["delete", "-f", "-n", name].map(Into::into).to_vec(),
                        };
                        let run = home.bantam(&args);
                        // Whoever lost a race is told so, and no more than that.
                        assert!([0, 125].contains(&run.code), "{args:?}: {}", run.stderr);
                        let said = &run.stderr;
                        let lost = ["not found", "already exists", "was stopped", "was killed", "is busy"];
                        assert!(run.code == 0 || lost.iter().any(|w| said.contains(w)), "{args:?}: {said}");
                    }
                });
            }
        });
        for machine in home.list() {
            let (name, state) = (machine["name"].as_str().unwrap(), machine["state"].as_str().unwrap());
            assert!(["created", "running", "stopped"].contains(&state), "{machine}");
            home.ok(["start", "-n", name]);
            assert_eq!(home.sh(name, "echo up"), "up\n");
            home.delete(name);
        }
        assert_eq!(engines(&home), (0, 0), "{:?}", home.processes());
    }

    fn lists_are_right_while_machines_come_and_go_and_disturb_none(home) {
        home.started("steady", &[]);
        home.create("idle", &[]);
        let pid = home.pid("steady").as_raw_pid();
        let seconds = std::env::var(LIST_SECONDS_VARIABLE).ok();
        let seconds = seconds.and_then(|s| s.parse().ok()).unwrap_or(LIST_SECONDS);
        let end = Instant::now() + Duration::from_secs(seconds);
        // What may be seen of the machine that comes and goes, in each of its phases.
        const PHASES: [(&str, &[&str]); 4] = [
            ("is gone or made", &["none", "created"]),
            ("is made or starts", &["created", "running"]),
            ("runs or stops", &["running", "stopped"]),
            ("is stopped or deleted", &["stopped", "none"]),
        ];
        let phase = AtomicU8::new(0);
        let over = AtomicBool::new(false);
        let (cycles, lists) = thread::scope(|scope| {
            let goer = scope.spawn(|| {
                let mut cycles = 0;
                while !over.load(Ordering::Acquire) || cycles == 0 {
                    for (number, args) in [
                        home.create_args("goer", &[]),
                        ["start", "-n", "goer"].map(Into::into).to_vec(),
                        ["stop", "-n", "goer"].map(Into::into).to_vec(),
                        ["delete", "-f", "-n", "goer"].map(Into::into).to_vec(),
                    ].into_iter().enumerate() {
                        phase.store(u8::try_from(number).unwrap(), Ordering::Release);
                        home.ok(args);
                    }
                    cycles += 1;
                }
                cycles
            });
            let worker = scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    assert_eq!(home.sh("steady", "echo undisturbed"), "undisturbed\n");
                }
            });
            let mut lists = 0;
            let looked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                while Instant::now() < end {
                    let next = Instant::now() + Duration::from_millis(50);
                    let before = phase.load(Ordering::Acquire);
                    let list = home.list();
                    let after = phase.load(Ordering::Acquire);
                    let state = |name: &str| {
                        let found = list.iter().find(|m| m["name"] == name);
                        found.map_or("none", |m| m["state"].as_str().unwrap()).to_owned()
                    };
                    assert_eq!((state("steady"), state("idle")), ("running".into(), "created".into()));
                    let steady = list.iter().find(|m| m["name"] == "steady").unwrap();
                    assert_eq!(steady["pid"], pid);
                    if before == after {
                        let (what, allowed) = PHASES[usize::from(before)];
                        let goer = state("goer");
                        assert!(allowed.contains(&goer.as_str()), "it {what} and is '{goer}': {list:?}");
                    }
                    assert_eq!(list.len() - usize::from(state("goer") != "none"), 2, "{list:?}");
                    lists += 1;
                    thread::sleep(next.saturating_duration_since(Instant::now()));
                }
            }));
            over.store(true, Ordering::Release);
            worker.join().unwrap();
            let cycles = goer.join().unwrap();
            if let Err(panic) = looked {
                std::panic::resume_unwind(panic);
            }
            (cycles, lists)
        });
        assert!(cycles > 0 && lists > 0, "{cycles} cycles, {lists} lists");
        home.delete("steady");
        home.delete("idle");
    }
}
