//! Commands whose start nobody waits for.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::io::Read;
use std::time::Duration;

use bantam_protocol::{Decoder, ExecRequest, GuestExec, HostExec};
use support::{Agent, Message, command, sh};

fn lazy(request: ExecRequest) -> ExecRequest {
    ExecRequest {
        lazy_started: true,
        ..request
    }
}

#[test]
fn start_output_and_end_of_a_short_command_come_in_one_piece() {
    let agent = Agent::start();
    let mut stream = agent.exec(lazy(sh("echo out; echo err >&2")));
    // The shell's two writes may be seen before its end: then they are pieces of their own.
    let mut frames = Vec::new();
    let mut pieces = 0;
    let mut decoder = Decoder::new();
    let mut buffer = [0; 4096];
    loop {
        let count = stream.socket.read(&mut buffer).unwrap();
        if count == 0 {
            break;
        }
        pieces += 1;
        let mut bytes = &buffer[..count];
        while let Some(frame) = decoder.next_frame(&mut bytes).unwrap() {
            frames.push(match GuestExec::decode(&frame).unwrap() {
                GuestExec::Started { .. } => "started",
                GuestExec::Stdout(_) => "stdout",
                GuestExec::Stderr(_) => "stderr",
                GuestExec::Exit(_) => "exit",
                other => panic!("unexpected {other:?}"),
            });
        }
    }
    frames[1..3].sort_unstable_by(|a, b| b.cmp(a));
    assert_eq!(frames, ["started", "stdout", "stderr", "exit"]);
    assert!(pieces <= 3, "{pieces} pieces");
}

#[test]
fn a_command_that_says_nothing_is_announced_all_the_same() {
    let agent = Agent::start();
    let mut stream = agent.exec(lazy(command(&["/bin/sleep", "600"])));
    stream
        .socket
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    assert!(matches!(stream.receive(), Some(Message::Started(_))));
    stream.send(&HostExec::Kill);
    assert!(matches!(stream.receive(), Some(Message::Exit(_))));
}

#[test]
fn why_a_command_was_not_started_is_told() {
    let agent = Agent::start();
    let mut stream = agent.exec(lazy(command(&["/nonexistent"])));
    assert!(matches!(stream.receive(), Some(Message::StartFailed(_))));
    assert_eq!(stream.receive(), None);
}

#[test]
fn much_output_arrives_after_the_start() {
    let agent = Agent::start();
    let output = agent.run(lazy(sh("head -c 3000000 /dev/zero; echo end >&2")));
    assert_eq!(output.stdout.len(), 3_000_000);
    assert_eq!(output.stderr, b"end\n");
}

#[test]
fn hanging_up_kills_a_command_that_was_not_announced() {
    let agent = Agent::start();
    let fifo = agent.dir().join("witness");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    let stream = agent.exec(lazy(sh(&format!("exec 3>{}; sleep 600", fifo.display()))));
    // Opening waits for the command to open its end; reading, for it to be gone.
    let mut witness = std::fs::File::open(&fifo).unwrap();
    drop(stream);
    let mut rest = Vec::new();
    witness.read_to_end(&mut rest).unwrap();
}

/// What a short command costs: one wake-up for the request and one for the end; a Unix socket has
/// one more, because the connection is there before the request's bytes.
#[test]
fn a_short_command_wakes_the_agent_three_times() {
    const COMMANDS: u64 = 100;
    let agent = Agent::start();
    let run = || {
        let output = agent.run(lazy(command(&["/bin/true"])));
        assert!(output.end.is_ok());
    };
    run();
    let before = agent.times_slept();
    (0..COMMANDS).for_each(|_| run());
    let slept = agent.times_slept() - before;
    // A tenth for what else makes a process wait, such as its memory.
    assert!(slept <= COMMANDS * 33 / 10, "slept {slept} times");
}
