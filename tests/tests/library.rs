//! The library, as an embedder uses it.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

use bantam::{EngineChoice, Error, ExitCause, FileFailureKind, Machine, MachineBuilder};
use bantam_e2e::{Setup, setup};

fn builder(setup: &Setup) -> MachineBuilder {
    Machine::builder()
        .image(setup.image.to_str().unwrap())
        .memory_mib(256)
        .engine(setup.engine.parse::<EngineChoice>().unwrap())
        .boot_timeout(Duration::from_secs(120))
}

#[test]
fn a_machine_runs_commands_moves_files_and_reports() {
    let Some(setup) = setup("a_machine_runs_commands_moves_files_and_reports") else {
        return;
    };
    let machine = builder(&setup).hostname("sandbox").start().unwrap();

    let out = machine
        .exec(["bash", "-c", "echo $K; hostname; echo e >&2; exit 4"])
        .env("K", "v")
        .output()
        .unwrap();
    assert_eq!(out.status.exit_code(), 4);
    assert_eq!(out.stdout, b"v\nsandbox\n");
    assert_eq!(out.stderr, b"e\n");

    let out = machine
        .exec(["cat"])
        .stdin_bytes("from the host")
        .output()
        .unwrap();
    assert_eq!(out.stdout, b"from the host");

    let big: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    machine.write_file("/tmp/big", &big).unwrap();
    assert!(machine.read_file("/tmp/big").unwrap() == big);
    let size = machine.exec(["stat", "-c", "%s", "/tmp/big"]).output();
    assert_eq!(size.unwrap().stdout, b"12000000\n");

    let error = machine.read_file("/no/such/file").unwrap_err();
    assert!(matches!(&error, Error::File { .. }), "{error:?}");
    assert!(error.to_string().contains("/no/such/file"), "{error}");
    let error = machine.exec(["nosuch"]).output().unwrap_err();
    assert_eq!(error.exit_code(), 127, "{error}");
    assert!(matches!(
        machine.exec([""]).output(),
        Err(Error::InvalidCommand(_))
    ));

    let report = machine.stop().unwrap();
    assert_eq!(report.cause, ExitCause::GuestShutdown);
}

#[test]
fn a_spawned_command_has_streams_like_std_process() {
    let Some(setup) = setup("a_spawned_command_has_streams_like_std_process") else {
        return;
    };
    let machine = builder(&setup).start().unwrap();

    let mut child = machine.exec(["cat"]).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdin.write_all(b"ping").unwrap();
    let mut answer = [0; 4];
    stdout.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"ping");
    drop(stdin);
    assert!(child.wait().unwrap().success());

    let mut child = machine.exec(["sleep", "600"]).spawn().unwrap();
    child.signal(15).unwrap();
    assert_eq!(child.wait().unwrap().signal, Some(15));

    let mut child = machine
        .exec(["bash", "-c", "sleep 600 & sleep 600"])
        .spawn()
        .unwrap();
    child.kill();
    assert_eq!(child.wait().unwrap().signal, Some(9));

    drop(machine.exec(["sleep", "601"]).spawn().unwrap());
    let script =
        "for i in $(seq 200); do pgrep -f 'sleep 60[01]' || exit 0; sleep 0.05; done; exit 1";
    let left = machine.exec(["bash", "-c", script]).output().unwrap();
    assert_eq!(left.status.exit_code(), 0, "a command outlived its owner");
}

#[test]
fn waiting_for_a_command_whose_output_nobody_reads_ends() {
    let Some(setup) = setup("waiting_for_a_command_whose_output_nobody_reads_ends") else {
        return;
    };
    let machine = builder(&setup).start().unwrap();

    let mut child = machine.exec(["yes"]).spawn().unwrap();
    child.kill();
    assert_eq!(child.wait().unwrap().signal, Some(9));
    assert_eq!(child.wait().unwrap().signal, Some(9), "asked twice");
    child.kill();

    let exec = machine.exec(["yes"]).timeout(Duration::from_secs(1));
    assert!(exec.spawn().unwrap().wait().unwrap().timed_out);
    let mut child = machine
        .exec(["yes"])
        .timeout(Duration::from_secs(1))
        .spawn()
        .unwrap();
    let taken = child.stdout.take();
    assert!(child.wait().unwrap().timed_out, "taken and not read");
    drop(taken);

    let mut child = machine.exec(["seq", "100000"]).spawn().unwrap();
    assert!(child.wait().unwrap().success());

    let mut child = machine.exec(["yes"]).spawn().unwrap();
    machine.kill();
    assert!(matches!(child.wait(), Err(Error::MachineDied { .. })));
}

#[test]
fn commands_that_are_over_at_once_never_confuse_the_host() {
    let Some(setup) = setup("commands_that_are_over_at_once_never_confuse_the_host") else {
        return;
    };
    let machine = builder(&setup).start().unwrap();
    for _ in 0..100 {
        let child = machine.exec(["true"]).spawn().unwrap();
        let (status, stdout, stderr) = child.wait_with_output().unwrap();
        assert!(status.success());
        assert!(stdout.is_empty() && stderr.is_empty());
    }
}

#[test]
fn a_file_whose_new_content_fails_stays_as_it_was() {
    let Some(setup) = setup("a_file_whose_new_content_fails_stays_as_it_was") else {
        return;
    };
    struct Failing(bool);
    impl Read for Failing {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            if std::mem::replace(&mut self.0, true) {
                return Err(std::io::Error::other("on purpose"));
            }
            buffer[..4].copy_from_slice(b"part");
            Ok(4)
        }
    }
    let machine = builder(&setup).start().unwrap();
    machine.write_file("/tmp/f", "the old content").unwrap();
    let result = machine.write_file_from("/tmp/f", None, &mut Failing(false));
    assert!(matches!(result, Err(Error::Io { .. })), "{result:?}");
    assert_eq!(machine.read_file("/tmp/f").unwrap(), b"the old content");
}

#[test]
fn output_over_the_limit_is_counted_and_dropped() {
    let Some(setup) = setup("output_over_the_limit_is_counted_and_dropped") else {
        return;
    };
    let machine = builder(&setup).start().unwrap();
    let out = machine.exec(["seq", "100"]).max_output(4).output().unwrap();
    assert_eq!(
        (out.stdout.as_slice(), out.stdout_bytes),
        (&b"1\n2\n"[..], 292)
    );
    assert!(out.truncated && out.status.success());
}

#[test]
fn many_commands_at_once_do_not_disturb_each_other() {
    let Some(setup) = setup("many_commands_at_once_do_not_disturb_each_other") else {
        return;
    };
    let machine = builder(&setup).start().unwrap();
    thread::scope(|scope| {
        for n in 0..20 {
            let machine = &machine;
            scope.spawn(move || {
                let script = format!("seq 1 2000; exit {n}");
                let out = machine.exec(["bash", "-c", &script]).output().unwrap();
                assert_eq!(i32::from(out.status.exit_code()), n);
                assert_eq!(out.stdout.split(|byte| *byte == b'\n').count(), 2001);
            });
        }
    });
}

#[test]
fn two_machines_live_in_one_process() {
    let Some(setup) = setup("two_machines_live_in_one_process") else {
        return;
    };
    let (one, two) = thread::scope(|scope| {
        let one = scope.spawn(|| builder(&setup).hostname("one").start().unwrap());
        let two = scope.spawn(|| builder(&setup).hostname("two").start().unwrap());
        (one.join().unwrap(), two.join().unwrap())
    });
    one.write_file("/tmp/mine", "1").unwrap();
    assert!(matches!(
        two.read_file("/tmp/mine"),
        Err(Error::File {
            kind: FileFailureKind::NotFound,
            ..
        })
    ));
    let name = |machine: &Machine| machine.exec(["hostname"]).output().unwrap().stdout;
    assert_eq!(name(&one), b"one\n");
    drop(one);
    assert_eq!(name(&two), b"two\n");
}

#[test]
fn a_machine_that_dies_under_a_command_is_an_error_and_not_success() {
    let Some(setup) = setup("a_machine_that_dies_under_a_command_is_an_error_and_not_success")
    else {
        return;
    };
    let machine = builder(&setup).start().unwrap();
    let killer = "sync; reboot -f; sleep 600";
    let result = machine.exec(["bash", "-c", killer]).output();
    assert!(
        matches!(result, Err(Error::MachineDied { .. })),
        "{result:?}"
    );
    assert!(matches!(
        machine.exec(["true"]).output(),
        Err(Error::MachineDied { .. })
    ));
}

#[test]
fn threads_and_descriptors_are_given_back() {
    let Some(setup) = setup("threads_and_descriptors_are_given_back") else {
        return;
    };
    // Only in a process of its own are the numbers this test's alone.
    if std::env::var_os("BANTAM_E2E_ALONE").is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "threads_and_descriptors_are_given_back"])
            .env("BANTAM_E2E_ALONE", "1")
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let cycle = || {
        let machine = builder(&setup).start().unwrap();
        assert!(machine.exec(["true"]).output().unwrap().status.success());
    };
    let count = |dir| std::fs::read_dir(dir).unwrap().count();
    cycle();
    let before = (count("/proc/self/fd"), count("/proc/self/task"));
    for _ in 0..3 {
        cycle();
    }
    assert_eq!((count("/proc/self/fd"), count("/proc/self/task")), before);
}
