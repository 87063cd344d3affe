//! Commands that live on without the host that started them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use bantam_protocol::{ExecRequest, HostExec, Size, StartFailedKind};
use support::{Agent, Message, command, sh};

/// A FIFO of which the reading end ends when every process that holds it has ended.
fn fifo(agent: &Agent, name: &str) -> std::path::PathBuf {
    let path = agent.dir().join(name);
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    path
}

fn detached(script: &str) -> ExecRequest {
    ExecRequest {
        detach: true,
        ..sh(script)
    }
}

#[test]
fn a_detached_command_lives_on_when_the_host_has_hung_up() {
    let agent = Agent::start();
    let (go, witness) = (fifo(&agent, "go"), fifo(&agent, "witness"));
    let script = format!(
        "read x <{}; echo noise; echo noise >&2; echo $$ >{}",
        go.display(),
        witness.display()
    );
    let mut stream = agent.exec(detached(&script));
    let Some(Message::Started(pid)) = stream.receive() else {
        panic!("it did not start");
    };
    assert_eq!(stream.receive(), None, "Started is the end");
    drop(stream);
    // The agent has seen it all: it answers another.
    assert_eq!(agent.sh("echo here").text(), "here\n");
    std::fs::write(&go, "\n").unwrap();
    let written = std::fs::read_to_string(&witness).unwrap();
    assert_eq!(written, format!("{pid}\n"));
}

#[test]
fn a_host_that_hangs_up_before_the_answer_changes_nothing() {
    let agent = Agent::start();
    let witness = fifo(&agent, "witness");
    let script = format!("echo ran >{}", witness.display());
    drop(agent.exec(detached(&script)));
    assert_eq!(std::fs::read_to_string(&witness).unwrap(), "ran\n");
}

#[test]
fn its_standard_streams_are_null() {
    let agent = Agent::start();
    let witness = fifo(&agent, "witness");
    let script = format!(
        "x=$(readlink /proc/$$/fd/0 /proc/$$/fd/1 /proc/$$/fd/2); echo \"$x\" >{}",
        witness.display()
    );
    let mut stream = agent.exec(detached(&script));
    assert!(matches!(stream.receive(), Some(Message::Started(_))));
    let streams = std::fs::read_to_string(&witness).unwrap();
    assert_eq!(streams, "/dev/null\n/dev/null\n/dev/null\n");
}

#[test]
fn the_timeout_of_a_detached_command_still_holds() {
    let agent = Agent::start();
    let witness = fifo(&agent, "witness");
    let script = format!(
        "exec 3>{}; trap '' TERM HUP; sleep 600 & sleep 600",
        witness.display()
    );
    drop(agent.exec(ExecRequest {
        timeout_ms: Some(2000),
        ..detached(&script)
    }));
    // It ends when the last process that holds it has ended.
    assert_eq!(std::fs::read_to_string(&witness).unwrap(), "");
}

#[test]
fn a_detached_command_that_cannot_start_says_so() {
    let agent = Agent::start();
    let output = agent.run(ExecRequest {
        detach: true,
        ..command(&["no-such-command"])
    });
    assert_eq!(output.failure().kind, StartFailedKind::NotFound);
    for request in [
        ExecRequest {
            tty: Some(Size { cols: 80, rows: 24 }),
            ..detached("exit 0")
        },
        ExecRequest {
            stdin: true,
            ..detached("exit 0")
        },
    ] {
        let output = agent.run(request);
        assert_eq!(output.failure().kind, StartFailedKind::Internal);
    }
}

#[test]
fn many_detached_commands_leave_nothing_in_the_agent() {
    let agent = Agent::start();
    assert_eq!(agent.sh("echo here").text(), "here\n");
    let before = agent.open_descriptors();
    for _ in 0..50 {
        let mut stream = agent.exec(detached("exit 0"));
        assert!(matches!(stream.receive(), Some(Message::Started(_))));
        assert_eq!(stream.receive(), None);
    }
    let mut stream = agent.connect();
    stream.send(&HostExec::Exec(sh("exit 0")));
    stream.finish();
    let after = agent.open_descriptors();
    assert!(after < before + 8, "{before} descriptors became {after}");
}
