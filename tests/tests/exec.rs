//! Commands in a running machine, through the program. All tests share one machine; each leaves
//! it as it was.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bantam_e2e::{Run, Running, SHARED, TestHome, eventually, skip};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Ends a wait for something that is sure to come.
const LIMIT: Duration = Duration::from_secs(60);

/// What is streamed each way: a gibibyte shows nothing that this does not, and an emulated guest
/// takes minutes for it. `cargo xtask bench --filter stream` measures more.
const STREAM_MIB: usize = 64;

macro_rules! in_shared_machine {
    ($($(#[$doc:meta])* fn $name:ident($home:ident) $body:block)*) => {
        $($(#[$doc])* #[test] fn $name() {
            let Some($home) = TestHome::shared(stringify!($name)) else { return };
            $body
        })*
    };
}

/// The arguments of `exec` in the shared machine.
fn exec<'a>(options: &[&'a str], command: &[&'a str]) -> Vec<&'a str> {
    [&["exec", "--name", SHARED], options, &["--"], command].concat()
}

fn bash(home: &TestHome, options: &[&str], script: &str) -> Run {
    home.bantam(exec(options, &["bash", "-c", script]))
}

/// `exec --json` of a script: the exit code and the object.
fn json(home: &TestHome, options: &[&str], script: &str) -> (i32, Value) {
    let run = bash(home, &[&["--json"], options].concat(), script);
    let object = serde_json::from_slice(&run.stdout);
    (
        run.code,
        object.unwrap_or_else(|error| panic!("{error}: {}{}", run.text(), run.stderr)),
    )
}

/// Waits until the guest has no process whose command line is `sleep SECONDS`.
fn wait_for_no_sleep(home: &TestHome, seconds: u32) {
    eventually(LIMIT, "the command's end", || {
        // The pattern does not match itself.
        let script = format!("grep -als 'sleep.{seconds}.$' /proc/[0-9]*/cmdline; true");
        match bash(home, &[], &script).text() {
            left if left.is_empty() => Ok(()),
            left => Err(left),
        }
    });
}

/// Bytes without a pattern.
fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for chunk in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    bytes
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The most memory that a process had, in KiB.
fn peak_kib(pid: Pid) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

// The end is the process's end.
in_shared_machine! {
    fn a_background_child_holds_up_nothing_and_loses_nothing(home) {
        let begun = Instant::now();
        let run = bash(home, &[], "sleep 301 & seq 20000; echo last >&2; exit 4");
        assert!(begun.elapsed() < LIMIT);
        assert_eq!(run.code, 4, "{}", run.stderr);
        let want: String = (1..=20_000).map(|n| format!("{n}\n")).collect();
        assert_eq!((run.text(), run.stderr.as_str()), (want, "last\n"));
        bash(home, &[], "kill $(pidof sleep)");
    }

    fn a_number_that_is_used_again_is_another_command(home) {
        // Every end is that of its own command, however quickly they follow each other.
        bash(home, &[], "echo 300 > /proc/sys/kernel/ns_last_pid 2>/dev/null; true");
        for code in 0..20 {
            let run = bash(home, &[], &format!("exit {code}"));
            assert_eq!(run.code, code, "{}", run.stderr);
        }
    }
}

// Nothing is lost.
in_shared_machine! {
    fn output_is_whole_and_in_order_however_fast_the_end(home) {
        for _ in 0..5 {
            let run = bash(home, &[], "head -c 500000 /dev/zero; printf end");
            assert_eq!(run.stdout.len(), 500_003);
            assert!(run.stdout.ends_with(b"\0end"));
        }
    }
}

// Standard input, and which streams there are.
in_shared_machine! {
    fn a_pipe_of_any_size_passes_both_ways_unharmed(home) {
        let input = noise(8 << 20);
        let run = home.bantam_with_input(&input, exec(&["-i"], &["tee", "/dev/stderr"]));
        assert_eq!(run.code, 0);
        let sum = hex(&Sha256::digest(&input));
        assert_eq!(hex(&Sha256::digest(&run.stdout)), sum);
        let run = home.bantam_with_input(&input, exec(&["-i"], &["sha256sum"]));
        assert_eq!(run.text(), format!("{sum}  -\n"), "{}", run.stderr);
    }

    fn every_byte_passes_as_it_is_on_every_stream(home) {
        let input: Vec<u8> = (0..=255).cycle().take(70_000).collect();
        let run = home.bantam_with_input(&input, exec(&["-i"], &["cat"]));
        assert!(run.stdout == input, "{} bytes", run.stdout.len());
        let (code, object) = json(home, &[], "printf '\\377\\0x'; printf '\\376' >&2");
        assert_eq!(code, 0);
        assert_eq!((&object["stdout_b64"], &object["stderr_b64"]), (&"/wB4".into(), &"/g==".into()));
    }

    fn the_end_of_input_is_passed_on_and_without_i_there_is_none(home) {
        let run = home.bantam_with_input(b"", exec(&["-i"], &["bash", "-c", "cat; echo end"]));
        assert_eq!(run.text(), "end\n", "{}", run.stderr);
        let run = home.bantam_with_input(b"secret", exec(&[], &["bash", "-c", "cat; echo end"]));
        assert_eq!(run.text(), "end\n", "{}", run.stderr);
        // An input that stays open is nothing to wait for.
        let mut running = home.start_with_pipe(exec(&[], &["bash", "-c", "cat; echo end"]));
        let open = running.child.stdin.take();
        assert_eq!(running.finish().text(), "end\n");
        drop(open);
    }

    fn a_command_that_does_not_read_neither_hangs_nor_is_hung(home) {
        let input = vec![b'x'; 4 << 20];
        let run = home.bantam_with_input(&input, exec(&["-i"], &["bash", "-c", "exit 3"]));
        assert_eq!(run.code, 3, "{}", run.stderr);
        let script = "exec 0<&-; sleep 0.2; echo closed";
        let run = home.bantam_with_input(&input, exec(&["-i"], &["bash", "-c", script]));
        assert_eq!((run.code, run.text().as_str()), (0, "closed\n"), "{}", run.stderr);
        // One that ends while its input is open, and nobody writes.
        let running = home.start_with_pipe(exec(&["-i"], &["bash", "-c", "read line; exit 5"]));
        let mut running = running;
        let mut open = running.child.stdin.take().unwrap();
        open.write_all(b"line\n").unwrap();
        assert_eq!(running.finish().code, 5);
        drop(open);
    }

    fn a_terminal_is_made_only_when_asked_for_and_only_of_a_terminal(home) {
        let run = bash(home, &["-i"], "test -t 0 || test -t 1 || test -t 2 || echo none");
        assert_eq!(run.text(), "none\n");
        let run = bash(home, &["-t"], "true");
        assert_eq!(run.code, 2);
        assert!(run.stderr.contains("terminal"), "{}", run.stderr);
        let run = bash(home, &["-i"], "echo out; echo err >&2");
        assert_eq!((run.text().as_str(), run.stderr.as_str()), ("out\n", "err\n"));
    }

    fn a_prompt_on_a_terminal_is_there_before_its_answer(home) {
        if Command::new("script").arg("-V").output().is_err() {
            skip("a_prompt_on_a_terminal_is_there_before_its_answer", "no script(1)");
            return;
        }
        let program = home.setup.program.display();
        let asks = "printf Password:; read -rs word; printf \"got \"; sleep 0.1; echo $word";
        let exec = format!("{program} exec --name {SHARED} -it -- bash -c '{asks}'");
        let shell = format!("{program} shell --name {SHARED}");
        let cases = [
            (exec, "Password:", "secret\n", "got secret"),
            (shell, "$ ", "echo $((6*7))\nexit\n", "42"),
        ];
        for (line, prompt, answer, said) in cases {
            let mut script = Command::new("script");
            home.put_into(&mut script);
            // util-linux's script gives the program a terminal.
            script.args(["-qec", &line, "/dev/null"]).stdin(Stdio::piped());
            let mut running = Running::start(&mut script);
            let mut stdout = running.child.stdout.take().unwrap();
            let (first, seen) = mpsc::channel();
            let reader = thread::spawn(move || {
                let (mut all, mut byte) = (Vec::new(), [0]);
                while stdout.read(&mut byte).is_ok_and(|count| count == 1) {
                    all.extend(byte);
                    if all.ends_with(prompt.as_bytes()) {
                        let _ = first.send(());
                    }
                }
                String::from_utf8_lossy(&all).into_owned()
            });
            // Nothing was typed yet.
            let prompted = seen.recv_timeout(LIMIT);
            let run = running.finish_with_input(answer.as_bytes());
            let text = reader.join().unwrap();
            assert!(prompted.is_ok(), "{line} gave no prompt: {text}{}", run.stderr);
            assert!(run.code == 0 && text.contains(said), "{}: {text}", run.code);
        }
    }

    fn a_file_is_copied_into_what_is_there(home) {
        let word = "copied";
        assert_eq!(bash(home, &[], &format!("printf {word} >/tmp/out-file")).code, 0);
        let dir = tempfile::tempdir_in(home.dir()).unwrap();
        let from = format!("{SHARED}:/tmp/out-file");
        let cp = |to: &Path| home.bantam(["cp", &from, to.to_str().unwrap()]);
        let file = dir.path().join("file");
        fs::write(&file, "longer than what comes").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::hard_link(&file, dir.path().join("other")).unwrap();
        let run = cp(&file);
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(fs::read_to_string(dir.path().join("other")).unwrap(), word);
        // Standard output, by what the system calls it. (Not by /dev/stdout: were it replaced, it
        // would be for everybody.)
        for stdout in ["/dev/fd/1", "/proc/self/fd/1"] {
            let run = cp(Path::new(stdout));
            assert_eq!((run.code, run.text().as_str()), (0, word), "{}", run.stderr);
        }
        let fifo = dir.path().join("fifo");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let reader = thread::spawn({
            let fifo = fifo.clone();
            move || fs::read_to_string(fifo).unwrap()
        });
        let run = cp(&fifo);
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert_eq!(reader.join().unwrap(), word);
        let link = dir.path().join("link");
        symlink("file", &link).unwrap();
        fs::write(&file, "old").unwrap();
        let run = cp(&link);
        assert!(run.code == 125 && run.stderr.contains("symbolic link"), "{}", run.stderr);
        assert_eq!(fs::read_to_string(&file).unwrap(), "old");
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("file"));
        assert_eq!(bash(home, &[], "rm /tmp/out-file").code, 0);
    }
}

// Exit codes.
in_shared_machine! {
    fn every_way_to_end_has_its_code(home) {
        for (script, code) in [
            ("exit 0", 0), ("exit 1", 1), ("exit 7", 7), ("exit 125", 125), ("exit 255", 255),
            ("kill -9 $$", 137), ("kill -15 $$", 143), ("kill -2 $$", 130),
        ] {
            let run = bash(home, &[], script);
            assert_eq!((run.code, run.stderr.as_str()), (code, ""), "{script}");
        }
        for (options, command, code, named) in [
            (&[][..], &["no-such-program"][..], 127, "no-such-program"),
            (&[], &["/etc"], 126, "/etc"),
            (&[], &["/no/such/file"], 127, "/no/such/file"),
            (&["-w", "/no/such/dir"], &["true"], 125, "/no/such/dir"),
            (&["-u", "nobody-here"], &["true"], 125, "nobody-here"),
        ] {
            let run = home.bantam(exec(options, command));
            assert_eq!(run.code, code, "{command:?}: {}", run.stderr);
            assert!(run.stderr.starts_with("error: "), "{}", run.stderr);
            assert!(run.stderr.contains(named), "{}", run.stderr);
            assert!(run.stdout.is_empty());
        }
        assert_eq!(home.bantam(["exec", "--name", SHARED]).code, 2);
        assert_eq!(home.bantam(exec(&["--no-such-option"], &["true"])).code, 2);
    }

    fn an_image_without_bash_is_told_how_to_get_it(home) {
        let script = "mkdir -p /tmp/bare/bin && cp /bin/busybox /tmp/bare/bin/ && \
                      ln -sf busybox /tmp/bare/bin/sh";
        assert_eq!(bash(home, &[], script).code, 0);
        let run = home.bantam(exec(&["-e", "PATH=/tmp/bare/bin"], &["bash", "-c", "true"]));
        assert_eq!(run.code, 127);
        assert!(run.stderr.contains("no bash") && run.stderr.contains("sh"), "{}", run.stderr);
        assert_eq!(home.bantam(exec(&["-e", "PATH=/tmp/bare/bin"], &["sh", "-c", "exit 3"])).code, 3);
    }
}

// Signals and timeouts reach the whole tree.
in_shared_machine! {
    fn a_timeout_is_124_keeps_what_was_written_and_kills_the_tree(home) {
        let script = "echo before; setsid sleep 302 & (sleep 302; true) & trap '' TERM; sleep 302";
        let run = bash(home, &["--timeout", "1s"], script);
        assert_eq!((run.code, run.text().as_str()), (124, "before\n"), "{}", run.stderr);
        assert!(run.took >= Duration::from_secs(1));
        wait_for_no_sleep(home, 302);
        let (code, object) = json(home, &["--timeout", "1"], "echo before; sleep 302");
        assert_eq!((code, &object["timed_out"], &object["ok"]), (124, &true.into(), &false.into()));
        assert_eq!((&object["stdout"], &object["exit_code"]), (&"before\n".into(), &124.into()));
        // One that is not needed is not felt.
        assert_eq!(bash(home, &["--timeout", "2m"], "exit 6").code, 6);
    }

    fn signals_to_the_client_reach_the_command(home) {
        for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
            let mut running = home.start(exec(&[], &["bash", "-c", "echo up; sleep 303"]));
            assert_eq!(running.read(3), "up\n");
            kill_process(Pid::from_child(&running.child), signal).unwrap();
            let run = running.finish();
            assert_eq!(run.code, code, "{}", run.stderr);
            wait_for_no_sleep(home, 303);
        }
        // The command may have plans of its own.
        let script = "trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.1; done";
        let mut running = home.start(exec(&[], &["bash", "-c", script]));
        assert_eq!(running.read(3), "up\n");
        kill_process(Pid::from_child(&running.child), Signal::TERM).unwrap();
        let run = running.finish();
        assert_eq!((run.code, run.text().as_str()), (9, "bye\n"), "{}", run.stderr);
    }

    fn a_client_that_is_killed_leaves_nothing_in_the_guest(home) {
        for _ in 0..3 {
            let script = "setsid sleep 304 & echo up; sleep 304";
            let mut running = home.start(exec(&[], &["bash", "-c", script]));
            assert_eq!(running.read(3), "up\n");
            running.child.kill().unwrap();
            assert_eq!(running.finish().code, 137);
        }
        wait_for_no_sleep(home, 304);
    }

    fn a_detached_command_says_its_number_and_lives_on(home) {
        let run = home.bantam(exec(&["-d"], &["bash", "-c", "echo $$ > /tmp/number; sleep 305"]));
        assert_eq!(run.code, 0, "{}", run.stderr);
        let number: u32 = run.text().trim().parse().unwrap();
        assert_eq!(run.text(), format!("{number}\n"));
        eventually(LIMIT, "its number", || {
            let said = bash(home, &[], "cat /tmp/number").text();
            if said == run.text() { Ok(()) } else { Err(said) }
        });
        assert_eq!(bash(home, &[], &format!("kill {number}")).code, 0);
        bash(home, &[], "kill $(pidof sleep)");
        let run = home.bantam(exec(&["-d"], &["no-such-program"]));
        assert_eq!((run.code, run.text().as_str()), (127, ""));
        let run = home.bantam(exec(&["-d", "--timeout", "1s"], &["sleep", "306"]));
        assert_eq!(run.code, 0);
        wait_for_no_sleep(home, 306);
        for conflict in ["-i", "-t", "--json"] {
            assert_eq!(home.bantam(exec(&["-d", conflict], &["true"])).code, 2, "{conflict}");
        }
    }
}

// Output without a limit, or with the limit that was asked for.
in_shared_machine! {
    fn a_stream_of_any_length_passes_in_bounded_memory(home) {
        let bytes = STREAM_MIB << 20;
        let count = (bytes).to_string();
        let mut running = home.start(exec(&[], &["head", "-c", &count, "/dev/zero"]));
        let (mut stdout, pid) = (running.child.stdout.take().unwrap(), Pid::from_child(&running.child));
        let mut buffer = vec![0; 1 << 20];
        let (mut got, mut peak) = (0, 0);
        while got < bytes {
            let more = stdout.read(&mut buffer).unwrap();
            assert_ne!(more, 0, "{got} of {bytes} bytes");
            assert!(buffer[..more].iter().all(|byte| *byte == 0));
            got += more;
            if got < bytes {
                peak = peak_kib(pid);
            }
        }
        assert_eq!(running.finish().code, 0);
        assert!(peak < 32 << 10, "{peak} KiB");
        // And in, to one that reads slowly.
        let input = vec![7; bytes];
        let run = home.bantam_with_input(&input, exec(&["-i"], &["bash", "-c", "sleep 1; wc -c"]));
        assert_eq!(run.text().trim(), bytes.to_string(), "{}", run.stderr);
    }

    fn a_limit_is_kept_and_what_was_dropped_is_counted(home) {
        let (code, object) = json(home, &["--max-output", "10"], "seq 100; seq 3 >&2; exit 2");
        assert_eq!(code, 2);
        assert_eq!((&object["stdout"], &object["stderr"]), (&"1\n2\n3\n4\n5\n".into(), &"1\n2\n3\n".into()));
        assert_eq!((&object["stdout_bytes"], &object["stderr_bytes"]), (&292.into(), &6.into()));
        assert_eq!((&object["truncated"], &object["exit_code"]), (&true.into(), &2.into()));
        let (_, object) = json(home, &["--max-output", "0"], "seq 100");
        assert_eq!((&object["stdout"], &object["truncated"]), (&"".into(), &true.into()));
        let (_, object) = json(home, &[], "seq 100");
        assert_eq!((&object["stdout_bytes"], &object["truncated"]), (&292.into(), &false.into()));
        assert_eq!((&object["machine"], &object["signal"]), (&SHARED.into(), &Value::Null));
    }
}

// Many at once.
in_shared_machine! {
    fn a_hundred_commands_at_once_each_get_their_own(home) {
        // Two processes at a time, and the rest through the library: the guest is what is tested.
        let name = bantam::MachineName::parse(SHARED).unwrap();
        let machine = home.machines().connect(&name).unwrap();
        thread::scope(|scope| {
            let slow = home.start(exec(&[], &["bash", "-c", "seq 100000; exit 8"]));
            let workers: Vec<_> = (0..100).map(|n| {
                let machine = &machine;
                scope.spawn(move || {
                    let script = format!("read line; echo $line {n}; exit {n}");
                    machine.exec(["bash", "-c", &script]).stdin_bytes(*b"line\n").output().unwrap()
                })
            }).collect();
            for (n, worker) in workers.into_iter().enumerate() {
                let output = worker.join().unwrap();
                assert_eq!(output.stdout, format!("line {n}\n").as_bytes());
                assert_eq!(usize::from(output.status.code.unwrap()), n);
            }
            // Nobody has read a byte of this one so far.
            let run = slow.finish();
            assert_eq!((run.code, run.stdout.len()), (8, 588_895));
        });
        assert_eq!(home.state(SHARED), "running");
    }

    fn twenty_clients_at_once_each_get_their_own(home) {
        let clients: Vec<_> = (0..20).map(|n| {
            let script = format!("echo {n}; exit {n}");
            home.start(exec(&[], &["bash", "-c", &script]))
        }).collect();
        for (n, client) in clients.into_iter().enumerate() {
            let run = client.finish();
            assert_eq!(run.text(), format!("{n}\n"), "{}", run.stderr);
            assert_eq!(usize::try_from(run.code).unwrap(), n);
        }
    }
}

// What a command finds.
in_shared_machine! {
    fn a_command_finds_the_usual_mounts_and_limits(home) {
        let script = "for f in /dev/pts/ptmx /dev/fd/0 /dev/mqueue /dev/shm /proc/self /sys/kernel \
                      /sys/fs/cgroup/cgroup.controllers /run /tmp; do test -e $f || echo no $f; done; \
                      test $(ulimit -Hn) -ge 65536 || echo nofile; grep -q lo: /proc/net/dev || echo lo; \
                      echo < /dev/null > /dev/null || echo null";
        let run = bash(home, &[], script);
        assert_eq!((run.text().as_str(), run.stderr.as_str()), ("", ""));
    }

    fn the_clock_is_the_hosts(home) {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let before = now();
        let guest: u64 = bash(home, &[], "date +%s").text().trim().parse().unwrap();
        assert!((before.saturating_sub(1)..=now() + 1).contains(&guest), "{before} {guest}");
    }

    fn entropy_is_there_and_differs(home) {
        let read = || bash(home, &["--timeout", "60s"], "head -c 32 /dev/random | sha256sum").text();
        let all: BTreeSet<_> = (0..3).map(|_| read()).collect();
        assert_eq!(all.len(), 3, "{all:?}");
        assert_eq!(bash(home, &[], "cat /proc/sys/kernel/random/entropy_avail").text(), "256\n");
        // What the boot protocol gave a native kernel for it (type 9) is not left behind.
        let left = "cd /sys/kernel/boot_params/ && cat setup_data/*/type 2>/dev/null; \
                    cat setup_data/*/data 2>/dev/null | wc -c; ls /dev/mem";
        let seed = if home.setup.engine == "native" { "0x9\n0\n" } else { "0\n" };
        assert_eq!(bash(home, &[], left).text(), seed);
    }

    fn environment_directory_and_user_are_each_commands_own(home) {
        let show = "echo \"$A|$PWD|$(id -u):$(id -g)|${SECRET-unset}|${TZ-unset}\"";
        let mut command = home.command(exec(
            &["-e", "A=b=c d", "-e", "SECRET", "-e", "NOT_SET_ANYWHERE", "-w", "/tmp", "-u", "7:8"],
            &["bash", "-c", show],
        ));
        command.env("SECRET", "from here").env("TZ", "Mars/Base").stdin(Stdio::null());
        let run = Running::start(&mut command).finish();
        assert_eq!(run.text(), "b=c d|/tmp|7:8|from here|unset\n", "{}", run.stderr);
        assert_eq!(bash(home, &[], show).text(), "|/|0:0|unset|unset\n");
        let run = bash(home, &["-e", "PATH=/bin"], "echo $PATH");
        assert_eq!(run.text(), "/bin\n");
        assert_eq!(bash(home, &["-e", "=x"], "true").code, 2);
    }
}

// The client is only a client.
in_shared_machine! {
    fn a_failed_command_and_a_dead_client_leave_the_machine_running(home) {
        let pid = home.pid(SHARED);
        bash(home, &[], "exit 1");
        home.bantam(exec(&[], &["no-such-program"]));
        let mut running = home.start(exec(&[], &["yes"]));
        running.read(2);
        running.child.kill().unwrap();
        let _ = running.finish();
        assert_eq!(bash(home, &[], "echo up").text(), "up\n");
        assert_eq!(home.pid(SHARED), pid);
    }

    fn standard_output_is_the_commands_alone_and_a_closed_one_is_quiet(home) {
        let run = bash(home, &["--timings"], "echo only this");
        assert_eq!(run.text(), "only this\n");
        assert!(run.stderr.contains("timings"), "{}", run.stderr);
        let mut running = home.start(exec(&[], &["yes"]));
        running.read(2);
        drop(running.child.stdout.take());
        let run = running.finish();
        assert_eq!((run.code, run.stderr.as_str()), (141, ""));
        let (_, object) = json(home, &[], "echo x");
        assert!(object.is_object());
    }
}

// These end machines or their memory, so each has its own.
bantam_e2e::tests_with_home! {
    fn a_command_that_runs_out_of_memory_is_137_and_says_so_and_the_machine_goes_on(home) {
        home.started("small", &[]);
        let args = ["exec", "-n", "small", "--json", "--", "bash", "-c",
            "x=x; while :; do x=$x$x; done"];
        let run = home.bantam(args);
        let object: Value = serde_json::from_slice(&run.stdout).unwrap_or_else(|error| {
            panic!("{error}: {} {}{}", run.code, run.text(), run.stderr)
        });
        assert_eq!((run.code, &object["exit_code"]), (137, &137.into()), "{object}");
        assert_eq!((&object["oom"], &object["signal"]), (&true.into(), &9.into()), "{object}");
        assert_eq!(object["ok"], false);
        assert_eq!(home.sh("small", "echo up"), "up\n");
        assert_eq!(home.state("small"), "running");
        home.delete("small");
    }

    fn the_death_of_the_machine_under_a_command_is_never_success(home) {
        home.started("m", &[]);
        let run = home.exec("m", "echo before; sync; reboot -f; sleep 100");
        assert_eq!(run.code, 125, "{}", run.stderr);
        assert_eq!(run.text(), "before\n");
        assert!(run.stderr.contains("the machine ended"), "{}", run.stderr);
        eventually(LIMIT, "the machine's end", || match home.state("m").as_str() {
            "stopped" => Ok(()),
            state => Err(state.to_owned()),
        });
        home.ok(["start", "-n", "m"]);
        home.delete("m");
    }

    fn a_kernel_that_dies_long_after_its_boot_leaves_its_last_words(home) {
        home.started("m", &[]);
        let die = "echo 2 > /proc/sys/vm/panic_on_oom; echo before; x=x; while :; do x=$x$x; done";
        let run = home.exec("m", die);
        assert_eq!(run.code, 125, "{}", run.stderr);
        assert_eq!(run.text(), "before\n");
        assert!(run.stderr.contains("Kernel panic - not syncing: Out of memory"), "{}", run.stderr);
        home.delete("m");
    }

    /// Each costs the guest exits. That the host keeps the newest 64 KiB only is a test of bantam-vmm.
    fn a_flood_of_kernel_messages_harms_nobody(home) {
        home.started("m", &[]);
        let flood = "echo on > /proc/sys/kernel/printk_devkmsg; echo 8 > /proc/sys/kernel/printk
            line=$(printf '%0200d' 0); for i in $(seq 100); do echo \"<2>$line\"; done > /dev/kmsg; echo done";
        assert_eq!(home.sh("m", flood), "done\n");
        assert_eq!(home.sh("m", "echo up"), "up\n");
        home.delete("m");
    }
}
