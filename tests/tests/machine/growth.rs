//! Nothing grows with the number of machines that were.

use std::fs;
use std::process::{Command, Stdio};

use bantam::{Error, Machine, MachineName};
use bantam_e2e::{Running, TestHome};

/// How often; `cargo xtask bench --filter cycles` does two hundred and prints what it sees.
const CYCLES: usize = 10;

/// What a process has: descriptors, threads, children, anonymous memory in KiB.
fn held() -> [u64; 4] {
    let count = |dir: &str| fs::read_dir(dir).unwrap().count() as u64;
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let memory = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let children = tasks
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .map(|children| children.split_whitespace().count() as u64)
        .sum();
    [
        count("/proc/self/fd"),
        count("/proc/self/task"),
        children,
        memory,
    ]
}

fn files(home: &TestHome) -> usize {
    fn below(dir: &std::path::Path) -> usize {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            .map(|entry| match entry.file_type() {
                Ok(kind) if kind.is_dir() => 1 + below(&entry.path()),
                _ => 1,
            })
            .sum()
    }
    below(home.dir())
}

fn cycle(home: &TestHome) -> Result<(), Error> {
    let name = MachineName::parse("m")?;
    let machines = home.machines();
    home.builder().name("m").create()?;
    let machine = machines.start(&name)?;
    assert!(machine.exec(["true"]).output()?.status.success());
    machines.stop(&name, Machine::STOP_GRACE)?;
    machines.delete(&name)
}

#[test]
fn a_process_that_makes_and_removes_machines_does_not_grow() {
    let test = "growth::a_process_that_makes_and_removes_machines_does_not_grow";
    // Only in a process of its own are the numbers this test's alone.
    if std::env::var_os("BANTAM_E2E_ALONE").is_none() {
        if bantam_e2e::setup(test).is_none() {
            return;
        }
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone
            .args(["--exact", test])
            .env("BANTAM_E2E_ALONE", "1")
            .stdin(Stdio::null());
        let run = Running::start(&mut alone).finish();
        assert_eq!(run.code, 0, "{}{}", run.text(), run.stderr);
        return;
    }
    let home = TestHome::new(test).unwrap();
    // The first ones bring in what stays: threads of the runtime, the allocator's memory.
    cycle(&home).unwrap();
    cycle(&home).unwrap();
    home.wait_for_no_process();
    let (before, files_before) = (held(), files(&home));
    for _ in 0..CYCLES {
        cycle(&home).unwrap();
    }
    home.wait_for_no_process();
    let after = bantam_e2e::eventually(crate::LIMIT, "what it holds", || {
        let held = held();
        // Reapers end a moment after the processes they wait for.
        if held[..3] == before[..3] {
            Ok(held)
        } else {
            Err(format!("{before:?} {held:?}"))
        }
    });
    assert_eq!(files(&home), files_before);
    let grown = after[3].saturating_sub(before[3]);
    assert!(grown < 1024, "{grown} KiB in {CYCLES} cycles");
}
