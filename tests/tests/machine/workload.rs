//! What a machine is for: run at every start, its output kept.

use std::ffi::OsString;

use bantam_e2e::{TestHome, eventually, tests_with_home};

use crate::LIMIT;

/// Waits until the machine's log is as `done` says, and returns it.
fn wait_for_log(home: &TestHome, name: &str, done: impl Fn(&str) -> bool) -> String {
    eventually(LIMIT, "the log", || {
        let log = home.ok(["logs", "-n", name]);
        if done(&log) { Ok(log) } else { Err(log) }
    })
}

fn run_detached(home: &TestHome, options: &[&str], command: &[&str]) -> Vec<OsString> {
    let mut args: Vec<OsString> = ["run", "-d"].map(Into::into).to_vec();
    args.extend(options.iter().map(Into::into));
    args.extend(home.machine_args());
    args.push("--".into());
    args.extend(command.iter().map(Into::into));
    args
}

tests_with_home! {
    fn a_workload_runs_at_every_start_and_its_output_is_kept(home) {
        let script = "echo out $(($(cat /root/n 2>/dev/null) + 1)) | tee /root/l; \
                      sed 's/out //' /root/l > /root/n; echo err >&2; exit 3";
        home.create("m", &["--", "bash", "-c", script]);
        assert_eq!(home.find("m").unwrap()["cmd"][0], "bash");
        assert_eq!(home.ok(["logs", "-n", "m"]), "");
        home.ok(["start", "-n", "m"]);
        wait_for_log(&home, "m", |log| log.contains("out 1\n") && log.contains("err\n"));
        eventually(LIMIT, "the workload's end", || {
            let machine = home.find("m").unwrap();
            let ended = machine["workload_exit_code"] == 3;
            if ended { Ok(()) } else { Err(machine.to_string()) }
        });
        // The machine stays.
        assert_eq!(home.state("m"), "running");
        home.sh("m", "true");
        home.ok(["restart", "-n", "m"]);
        let log = wait_for_log(&home, "m", |log| log.matches("err\n").count() == 2);
        assert!(log.contains("out 1\n") && log.contains("out 2\n"), "{log}");
        assert_eq!(log.lines().count(), 4, "{log}");
        assert_eq!(home.ok(["logs", "-n", "m", "--tail", "1"]).lines().count(), 1);
        assert_eq!(home.ok(["logs", "-n", "m", "--tail", "0"]), "");
        // Of a stopped machine there is nothing to wait for.
        home.ok(["stop", "-n", "m"]);
        assert_eq!(home.ok(["logs", "-n", "m", "-f"]), log);
        home.delete("m");
    }

    fn following_a_log_ends_with_the_machine(home) {
        home.create("m", &["--", "bash", "-c", "while echo tick; do sleep 0.2; done"]);
        home.ok(["start", "-n", "m"]);
        let mut follower = home.start(["logs", "-n", "m", "-f"]);
        assert_eq!(follower.read(20), "tick\ntick\ntick\ntick\n");
        home.ok(["stop", "-n", "m"]);
        let run = follower.finish();
        assert_eq!(run.code, 0, "{}", run.stderr);
        // A reader that went away is no error to speak of.
        home.ok(["start", "-n", "m"]);
        let mut follower = home.start(["logs", "-n", "m", "-f"]);
        follower.read(5);
        drop(follower.child.stdout.take());
        let run = follower.finish();
        assert_eq!((run.code, run.stderr.as_str()), (141, ""));
        home.delete("m");
    }

    fn a_machine_can_stop_with_its_workload(home) {
        home.create("m", &["--stop-on-exit", "--", "bash", "-c", "echo done >> /root/log; cat /root/log"]);
        for count in 1..=2 {
            home.ok(["start", "-n", "m"]);
            eventually(LIMIT, "the machine's end", || match home.state("m").as_str() {
                "stopped" => Ok(()),
                state => Err(state.to_owned()),
            });
            home.wait_for_no_process();
            let log = home.ok(["logs", "-n", "m"]);
            assert_eq!(log.lines().count(), count * (count + 1) / 2, "{log}");
            assert_eq!(home.find("m").unwrap()["workload_exit_code"], 0);
        }
        home.delete("m");
    }

    fn run_detached_leaves_a_machine_with_the_command_in_it(home) {
        let command = ["bash", "-c", "echo \"$A in $PWD\"; sleep 1000"];
        let text = home.ok(run_detached(&home, &["-n", "bg", "-e", "A=b", "-w", "/tmp"], &command));
        assert!(text.starts_with("Machine 'bg' running in background\n"), "{text}");
        assert!(text.contains("exec --name bg") && text.contains("stop --name bg"), "{text}");
        wait_for_log(&home, "bg", |log| log == "b in /tmp\n");
        assert_eq!(home.sh("bg", "pidof sleep >/dev/null && echo $A"), "b\n");
        let said = home.fails(run_detached(&home, &["-n", "bg"], &["true"]));
        assert!(said.contains("'bg' already exists"), "{said}");
        assert_eq!(home.state("bg"), "running");
        let both = home.bantam(run_detached(&home, &["-i", "-n", "other"], &["cat"]));
        assert_eq!(both.code, 2);
        home.delete("bg");
    }

    fn a_machine_that_is_to_be_removed_is_removed_however_it_ends(home) {
        home.ok(run_detached(&home, &["--rm", "-n", "short"], &["bash", "-c", "exit 0"]));
        eventually(LIMIT, "the removal", || match home.find("short") {
            None => Ok(()),
            Some(machine) => Err(machine.to_string()),
        });
        home.ok(run_detached(&home, &["--rm", "-n", "long"], &["sleep", "1000"]));
        assert_eq!(home.find("long").unwrap()["ephemeral"], true);
        assert_eq!(home.ok(["stop", "-n", "long"]), "Stopped machine: long\n");
        assert_eq!(home.state("long"), "none");
        assert!(home.fails(["start", "-n", "long"]).contains("not found"));
    }

    fn a_workload_that_cannot_be_started_is_said_to_have_failed(home) {
        home.create("m", &["--", "no-such-program"]);
        for command in ["start", "restart"] {
            let run = home.bantam([command, "-n", "m"]);
            assert_eq!(run.code, 0, "{}", run.stderr);
            assert!(run.stderr.contains("warning: its workload does not run"), "{}", run.stderr);
            assert!(run.stderr.contains("no-such-program"), "{}", run.stderr);
            // It was known when the command returned; the machine stays, to be mended.
            let machine = home.find("m").unwrap();
            assert_eq!(machine["workload_exit_code"], 127, "{machine}");
            assert_eq!(machine["state"], "running", "{machine}");
        }
        home.sh("m", "ln -s /bin/busybox /usr/local/bin/no-such-program || \
                      { mkdir -p /usr/local/bin; ln -s /bin/busybox /usr/local/bin/no-such-program; }");
        let run = home.bantam(["restart", "-n", "m"]);
        assert!(!run.stderr.contains("warning"), "{}", run.stderr);
        home.delete("m");
    }

    fn run_detached_of_what_cannot_be_executed_fails_as_in_the_foreground_and_leaves_nothing(home) {
        for rm in [&[][..], &["--rm"]] {
            let options = [&["-n", "bg"][..], rm].concat();
            for (command, code) in [("no-such-program", 127), ("/etc", 126)] {
                let run = home.bantam(run_detached(&home, &options, &[command]));
                assert_eq!(run.code, code, "{}", run.stderr);
                assert!(run.stderr.contains(&format!("cannot run '{command}'")), "{}", run.stderr);
                assert_eq!(run.text(), "");
                assert_eq!(home.state("bg"), "none");
                home.wait_for_no_process();
            }
        }
        // What was executed and ended with such a code was executed.
        let args = run_detached(&home, &["-n", "bg"], &["bash", "-c", "exit 127"]);
        assert!(home.ok(args).starts_with("Machine 'bg' running"));
        home.delete("bg");
    }
}
