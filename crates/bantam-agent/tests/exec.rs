//! Commands as users expect them, with real processes on this machine.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use bantam_protocol::{
    ExecRequest, Exit, ExitStatus, HostExec, Kind, MAX_DATA_LEN, STDIN_WINDOW, Size,
    StartFailedKind, write_frame,
};
use support::{Agent, Message, command, sh};

/// A FIFO of which the reading end ends when every process that holds it has ended.
struct Witness {
    path: std::path::PathBuf,
}

impl Witness {
    fn new(agent: &Agent) -> Self {
        let path = agent.dir().join("witness");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        Self { path }
    }

    /// A script whose processes all hold the FIFO.
    fn script(&self, script: &str) -> String {
        format!("exec 3>{}; {script}", self.path.display())
    }

    /// Blocks until they have ended; returns what they wrote.
    fn wait(self) -> String {
        std::fs::read_to_string(self.path).unwrap()
    }
}

#[test]
fn both_outputs_and_the_exit_code_arrive() {
    let output = Agent::start().sh("echo out; echo err >&2; exit 3");
    assert_eq!(output.stdout, b"out\n");
    assert_eq!(output.stderr, b"err\n");
    let exit = Exit {
        status: ExitStatus::Exited(3),
        timed_out: false,
        oom: false,
    };
    assert_eq!(output.end, Ok(exit));
}

#[test]
fn a_background_process_holding_the_output_does_not_hold_the_call() {
    let agent = Agent::start();
    let witness = Witness::new(&agent);
    let script = witness.script("sleep 600 & echo $!");
    let reader = std::thread::spawn(|| witness.wait());
    let output = agent.sh(&script);
    assert_eq!(output.status(), ExitStatus::Exited(0));
    // It outlives its call; end it here.
    let pid = output.text().trim().parse().unwrap();
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(pid),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    assert_eq!(reader.join().unwrap(), "");
}

#[test]
fn what_a_background_process_wrote_before_the_end_is_not_lost() {
    let agent = Agent::start();
    let done = agent.dir().join("done");
    let script = format!(
        "mkfifo {done}; (head -c 50000 /dev/zero; echo >{done}; exec sleep 600 <&- ) & \
         read x <{done}; kill -9 -0",
        done = done.display()
    );
    let output = agent.sh(&script);
    assert_eq!(output.status(), ExitStatus::Signaled(9));
    assert_eq!(output.stdout.len(), 50_000);
}

#[test]
fn no_output_is_lost_or_reordered_when_the_command_ends_at_once() {
    let agent = Agent::start();
    for _ in 0..20 {
        let output = agent.sh("head -c 500000 /dev/zero");
        assert_eq!(output.stdout.len(), 500_000);
    }
    let output = agent.sh("seq 1 100000");
    let expected: String = (1..=100_000).map(|n| format!("{n}\n")).collect();
    assert!(output.text() == expected, "seq came out changed");
}

#[test]
fn output_is_byte_exact() {
    let agent = Agent::start();
    let output = agent.sh(r"printf '\000\377\376\r\n\000'");
    assert_eq!(output.stdout, b"\0\xff\xfe\r\n\0");
}

#[test]
fn a_gigabyte_streams_through_bounded_memory() {
    let agent = Agent::start();
    let mut stream = agent.exec(sh("head -c 1073741824 /dev/zero"));
    let mut count = 0;
    loop {
        match stream.receive().unwrap() {
            Message::Stdout(bytes) => count += bytes.len(),
            Message::Exit(_) => break,
            _ => {}
        }
    }
    assert_eq!(count, 1 << 30);
    let peak = agent.peak_memory_kib();
    assert!(peak < 16 << 10, "the agent used {peak} KiB");
}

#[test]
fn without_stdin_a_command_reads_the_end_at_once() {
    let agent = Agent::start();
    let output = agent.sh("cat; readlink /proc/self/fd/0");
    assert_eq!(output.text(), "/dev/null\n");
}

#[test]
fn stdin_arrives_whole_and_its_end_too() {
    let agent = Agent::start();
    let input: Vec<u8> = (0..5_000_000u32).map(|n| (n % 251) as u8).collect();
    let request = ExecRequest {
        stdin: true,
        ..command(&["cat"])
    };
    let output = agent.exec(request.clone()).feed_and_finish(&input);
    assert!(output.stdout == input, "cat changed its input");
    let output = agent.exec(request).feed_and_finish(b"");
    assert_eq!(output.stdout, b"");
    assert_eq!(output.status(), ExitStatus::Exited(0));
}

#[test]
fn a_command_that_does_not_read_its_input_still_ends_and_can_be_signalled() {
    let agent = Agent::start();
    let request = |script| ExecRequest {
        stdin: true,
        ..sh(script)
    };
    let mut stream = agent.exec(request("exec sleep 600"));
    for _ in 0..STDIN_WINDOW / MAX_DATA_LEN {
        write_frame(&mut stream.socket, Kind::Stdin, &[0; MAX_DATA_LEN]).unwrap();
    }
    stream.send(&HostExec::Signal(15));
    assert_eq!(stream.finish().status(), ExitStatus::Signaled(15));
    let output = agent
        .exec(request("exit 4"))
        .feed_and_finish(&[0; 4 * STDIN_WINDOW]);
    assert_eq!(output.status(), ExitStatus::Exited(4));
}

#[test]
fn the_host_learns_that_a_command_closed_its_input() {
    let agent = Agent::start();
    let mut stream = agent.exec(ExecRequest {
        stdin: true,
        ..sh("exec <&-; exec sleep 600")
    });
    while stream.receive().unwrap() != Message::StdinClosed {}
    stream.send(&HostExec::Kill);
    assert_eq!(stream.finish().status(), ExitStatus::Signaled(9));
}

#[test]
fn a_host_that_oversteps_the_window_is_cut_off() {
    let agent = Agent::start();
    let mut stream = agent.exec(ExecRequest {
        stdin: true,
        ..sh("exec sleep 600")
    });
    // The pipe itself takes one frame's worth.
    for _ in 0..STDIN_WINDOW / MAX_DATA_LEN + 2 {
        let _ = write_frame(&mut stream.socket, Kind::Stdin, &[0; MAX_DATA_LEN]);
    }
    let mut rest = Vec::new();
    let _ = stream.socket.read_to_end(&mut rest);
    assert!(rest.len() < 100, "only Started and credit can have come");
}

#[test]
fn exit_codes_and_signals_are_told_apart() {
    let agent = Agent::start();
    for (script, status) in [
        ("exit 0", ExitStatus::Exited(0)),
        ("exit 255", ExitStatus::Exited(255)),
        ("kill -TERM $$", ExitStatus::Signaled(15)),
        ("kill -KILL $$", ExitStatus::Signaled(9)),
        ("kill -INT $$", ExitStatus::Signaled(2)),
        ("kill -PIPE $$", ExitStatus::Signaled(13)),
        ("exit 137", ExitStatus::Exited(137)),
    ] {
        assert_eq!(agent.sh(script).status(), status, "{script}");
    }
}

#[test]
fn a_command_that_cannot_start_says_why() {
    let agent = Agent::start();
    let folder = agent.dir().to_str().unwrap().to_owned();
    let file = agent.dir().join("file");
    std::fs::write(&file, "data").unwrap();
    let file = file.to_str().unwrap().to_owned();
    let in_dir = |dir: &str| ExecRequest {
        cwd: Some(dir.into()),
        ..command(&["true"])
    };
    let as_user = |user: &str| ExecRequest {
        user: Some(user.into()),
        ..command(&["true"])
    };
    let no_path = ExecRequest {
        env: vec![b"PATH=/nonexistent".to_vec()],
        ..command(&["sh"])
    };
    let nul = ExecRequest {
        argv: vec![b"true".to_vec(), b"a\0b".to_vec()],
        ..ExecRequest::default()
    };
    let table = [
        (
            command(&["no-such-shell"]),
            StartFailedKind::NotFound,
            "no-such-shell",
        ),
        (
            command(&["/no/such/file"]),
            StartFailedKind::NotFound,
            "/no/such/file",
        ),
        (command(&[""]), StartFailedKind::NotFound, ""),
        (no_path, StartFailedKind::NotFound, "sh"),
        (
            command(&[&folder]),
            StartFailedKind::NotExecutable,
            "is a directory",
        ),
        (
            command(&[&file]),
            StartFailedKind::NotExecutable,
            "permission denied",
        ),
        (
            in_dir("/no/such/dir"),
            StartFailedKind::BadWorkingDir,
            "/no/such/dir",
        ),
        (in_dir(&file), StartFailedKind::BadWorkingDir, &file),
        (
            as_user("no-such-user"),
            StartFailedKind::BadUser,
            "no-such-user",
        ),
        (
            as_user("0:no-such-group"),
            StartFailedKind::BadUser,
            "no-such-group",
        ),
        (nul, StartFailedKind::Internal, "NUL"),
        (command(&[]), StartFailedKind::Internal, "no command"),
    ];
    for (request, kind, text) in table {
        let output = agent.run(request.clone());
        let failure = output.failure();
        assert_eq!(failure.kind, kind, "{request:?}: {}", failure.message);
        assert!(failure.message.contains(text), "{}", failure.message);
    }
    assert_eq!(agent.sh("exit 0").status(), ExitStatus::Exited(0));
}

#[test]
fn a_signal_reaches_the_whole_process_group() {
    let agent = Agent::start();
    let witness = Witness::new(&agent);
    let script = witness.script("sleep 600 & echo ready; wait");
    let reader = std::thread::spawn(|| witness.wait());
    let mut stream = agent.exec(sh(&script));
    stream.read_to("ready");
    stream.send(&HostExec::Signal(15));
    assert_eq!(stream.finish().status(), ExitStatus::Signaled(15));
    reader.join().unwrap();
}

#[test]
fn a_host_that_hangs_up_leaves_nothing_running() {
    let agent = Agent::start();
    let witness = Witness::new(&agent);
    let script = witness.script("trap '' HUP INT TERM; sleep 600 & echo ready; wait");
    let reader = std::thread::spawn(|| witness.wait());
    let mut stream = agent.exec(sh(&script));
    stream.read_to("ready");
    drop(stream);
    reader.join().unwrap();
}

#[test]
fn a_timeout_kills_everything_and_is_reported() {
    let agent = Agent::start();
    let witness = Witness::new(&agent);
    let script = witness.script("trap '' TERM; sleep 600 & sleep 600");
    let reader = std::thread::spawn(|| witness.wait());
    let begun = Instant::now();
    let output = agent.run(ExecRequest {
        timeout_ms: Some(100),
        ..sh(&script)
    });
    let exit = output.end.unwrap();
    assert!(exit.timed_out);
    assert_eq!(exit.status, ExitStatus::Signaled(9));
    assert!(begun.elapsed() >= Duration::from_millis(100));
    reader.join().unwrap();
    // An ordinary end within its time is not one.
    let output = agent.run(ExecRequest {
        timeout_ms: Some(u64::MAX),
        ..sh("exit 0")
    });
    assert!(!output.end.unwrap().timed_out);
}

#[test]
fn a_hundred_commands_run_side_by_side() {
    let agent = Agent::start();
    assert_eq!(agent.sh("exit 0").status(), ExitStatus::Exited(0));
    let before = agent.open_descriptors();
    let mut streams: Vec<_> = (0..100)
        .map(|n| {
            agent.exec(ExecRequest {
                stdin: true,
                ..sh(&format!("echo {n}; cat"))
            })
        })
        .collect();
    // Each runs before any may end.
    for (n, stream) in streams.iter_mut().enumerate() {
        assert_eq!(stream.read_to("\n"), format!("{n}\n"));
    }
    for (n, stream) in streams.into_iter().enumerate() {
        let output = stream.feed_and_finish(n.to_string().as_bytes());
        assert_eq!(output.text(), n.to_string());
    }
    // All is given back, but for what the last one is just giving back.
    let after = agent.open_descriptors();
    assert!(after < before + 8, "{before} descriptors became {after}");
}

#[test]
fn a_reader_that_does_not_read_holds_up_no_one_else() {
    let agent = Agent::start();
    let mut slow = agent.exec(command(&["yes"]));
    slow.read_to("y\ny\n");
    for _ in 0..10 {
        let output = agent.sh("head -c 1000000 /dev/zero");
        assert_eq!(output.stdout.len(), 1_000_000);
    }
    slow.send(&HostExec::Kill);
    assert_eq!(slow.finish().status(), ExitStatus::Signaled(9));
}

#[test]
fn a_terminal_has_its_size_before_the_first_byte_and_follows_changes() {
    let agent = Agent::start();
    let mut stream = agent.exec(ExecRequest {
        tty: Some(Size {
            cols: 123,
            rows: 45,
        }),
        ..sh("stty size; trap 'stty size; exit 7' WINCH; echo ready; while :; do sleep 0.05; done")
    });
    assert!(stream.read_to("ready\r\n").starts_with("45 123\r\n"));
    stream.send(&HostExec::Resize(Size { cols: 80, rows: 24 }));
    let output = stream.finish();
    assert_eq!(output.text(), "24 80\r\n");
    assert_eq!(output.status(), ExitStatus::Exited(7));
}

#[test]
fn a_terminal_carries_input_control_characters_and_the_end() {
    let agent = Agent::start();
    let request = |script| ExecRequest {
        tty: Some(Size { cols: 80, rows: 24 }),
        stdin: true,
        ..sh(script)
    };
    let mut stream = agent.exec(request("stty -echo; echo ready; cat; echo over"));
    stream.read_to("ready\r\n");
    stream.send(&HostExec::Stdin(b"line\n"));
    stream.send(&HostExec::StdinEof);
    let output = stream.finish();
    assert_eq!(output.text(), "line\r\nover\r\n");
    let mut stream = agent.exec(request("echo ready; exec sleep 600"));
    stream.read_to("ready\r\n");
    stream.send(&HostExec::Stdin(b"\x03"));
    assert_eq!(stream.finish().status(), ExitStatus::Signaled(2));
}

#[test]
fn the_last_words_on_a_terminal_are_not_lost() {
    let agent = Agent::start();
    for _ in 0..20 {
        let output = agent.run(ExecRequest {
            tty: Some(Size { cols: 80, rows: 24 }),
            ..sh("seq 1 2000")
        });
        let expected: String = (1..=2000).map(|n| format!("{n}\r\n")).collect();
        assert!(
            output.text() == expected,
            "{} bytes came",
            output.stdout.len()
        );
    }
}

#[test]
fn environment_and_working_directory_are_the_requests_own() {
    let agent = Agent::start();
    let cwd = agent.dir().join("a/b");
    let output = agent.run(ExecRequest {
        env: vec![
            b"PATH=/usr/bin:/bin".to_vec(),
            b"A=b=c\nd".to_vec(),
            b"noequals".to_vec(),
            b"RAW=\xff".to_vec(),
        ],
        cwd: Some(cwd.to_str().unwrap().into()),
        create_cwd: true,
        ..command(&["/bin/sh", "-c", "pwd; env -0; umask"])
    });
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with(cwd.to_str().unwrap()));
    assert!(text.contains("A=b=c\nd\0"));
    assert!(output.stdout.windows(6).any(|piece| piece == b"RAW=\xff\0"));
    assert!(text.contains("HOME=/"));
    assert!(!text.contains("CARGO"), "the agent's own environment leaks");
}

#[test]
fn a_relative_command_is_found_in_the_working_directory() {
    let agent = Agent::start();
    let script = agent.dir().join("script");
    std::fs::write(&script, "#!/bin/sh\necho found\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = agent.run(ExecRequest {
        cwd: Some(agent.dir().to_str().unwrap().into()),
        ..command(&["./script"])
    });
    assert_eq!(output.text(), "found\n");
}

#[test]
fn a_command_has_nothing_of_the_agents() {
    let agent = Agent::start();
    let _other = agent.exec(command(&["sleep", "600"]));
    let output = agent.sh("ls /proc/self/fd; grep -E 'Sig(Blk|Ign)' /proc/self/status");
    // The fourth is the directory that ls reads.
    let (descriptors, signals) = output.text().split_once("Sig").unwrap();
    assert_eq!(descriptors, "0\n1\n2\n3\n");
    assert!(signals.contains("Blk:\t0000000000000000"));
    let ignored = signals.split_once("SigIgn:\t").unwrap().1.trim();
    let ignored = u64::from_str_radix(ignored, 16).unwrap();
    assert_eq!(ignored & 1 << 12, 0, "SIGPIPE is ignored");
}

#[test]
fn another_user_gets_its_groups_and_can_reopen_its_output() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let agent = Agent::start();
    let request = |user: &str, script| ExecRequest {
        user: Some(user.into()),
        ..sh(script)
    };
    let output = agent.run(request("1234:5678", "id -u; id -g; id -G; echo $HOME"));
    assert_eq!(output.text(), "1234\n5678\n5678\n/\n");
    let output = agent.run(request(
        "1234",
        "echo out >/dev/stdout; echo err >/dev/stderr",
    ));
    assert_eq!(output.text(), "out\n");
    assert_eq!(output.stderr, b"err\n");
}

#[test]
fn garbage_instead_of_a_request_ends_only_that_stream() {
    let agent = Agent::start();
    let mut stream = agent.connect();
    stream.socket.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stream.socket.read_to_end(&mut answer);
    assert!(answer.is_empty());
    let mut stream = agent.exec(sh("exec sleep 600"));
    assert!(matches!(stream.receive(), Some(Message::Started(_))));
    stream.send(&HostExec::Exec(sh("exit 0")));
    assert_eq!(stream.receive(), None);
    assert_eq!(agent.sh("exit 0").status(), ExitStatus::Exited(0));
}
