//! Callers of other programs, replayed with their own argument lists: only the program's path
//! is changed. What an option asks for is done, or refused by name; it is never ignored.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

use std::time::{SystemTime, UNIX_EPOCH};

use bantam_e2e::{Run, TestHome, tests_with_home};
use serde_json::Value;

/// `machine ARGS`.
fn machine(home: &TestHome, args: &[&str]) -> Run {
    home.bantam([&["machine"], args].concat())
}

/// `machine ARGS`, which must succeed.
fn ok(home: &TestHome, args: &[&str]) -> String {
    home.ok([&["machine"], args].concat())
}

/// `machine create ARGS`, with what these tests need beside what the caller says.
fn create(home: &TestHome, args: &[&str]) -> Run {
    let image = home.setup.image.to_str().unwrap();
    let ours = ["--engine", &home.setup.engine, "--kernel-args", home.mark()];
    let (before, command) = match args.iter().position(|arg| *arg == "--") {
        Some(at) => args.split_at(at),
        None => (args, &[][..]),
    };
    let before = before
        .iter()
        .map(|arg| if *arg == "IMAGE" { image } else { arg });
    let all = ["machine", "create"].into_iter().chain(before).chain(ours);
    home.bantam(all.chain(command.iter().copied()))
}

/// A machine was made that has a network as asked for; or the option was refused by name, and
/// nothing was made.
fn created_with_network_or_refused(home: &TestHome, args: &[&str], name: &str) {
    let run = create(home, args);
    if run.code == 0 {
        assert_eq!(home.find(name).unwrap()["network"], true);
        home.delete(name);
    } else {
        assert_refused(home, &run, name);
    }
}

fn assert_refused(home: &TestHome, run: &Run, name: &str) {
    assert_eq!(run.code, 125, "{}", run.stderr);
    assert!(run.stderr.contains("not supported yet"), "{}", run.stderr);
    assert!(home.find(name).is_none());
}

/// The only object of `--json`.
fn object(run: &Run) -> Value {
    serde_json::from_slice(&run.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}{}", run.text(), run.stderr))
}

tests_with_home! {
    // A terminal backend: a machine for each session, found again by whoever has its name.
    fn a_terminal_backend_keeps_a_machine_per_session(home) {
        let session = "hermes-4f2a9c";
        // Another process each time: nothing but the name is remembered.
        let execute = |script: &str, directory: &str, input: &[u8]| {
            let args = [
                "machine", "exec", "--name", session, "-i", "-w", directory, "--timeout", "120s",
                "--", "bash", "-c", script,
            ];
            home.bantam_with_input(input, args)
        };
        assert_eq!(create(&home, &["--name", session, "--image", "IMAGE", "--mem", "256",
            "--label", "owner=hermes"]).code, 0);
        assert_eq!(machine(&home, &["start", "--name", session]).code, 0);
        let run = execute("cat > /root/script.sh; echo wrote >&2", "/", b"echo from $PWD; exit 7\n");
        assert_eq!((run.code, run.stderr.as_str()), (0, "wrote\n"));
        let run = execute("bash /root/script.sh", "/tmp", b"");
        assert_eq!((run.code, run.text().as_str()), (7, "from /tmp\n"));
        let run = home.bantam(["machine", "exec", "--name", session, "--timeout", "1s", "--",
            "bash", "-c", "echo partial; sleep 100"]);
        assert_eq!((run.code, run.text().as_str()), (124, "partial\n"));
        // A new process, perhaps after the old one crashed, looks for the sessions that are its.
        let mine = home.list().into_iter().find(|m| m["labels"]["owner"] == "hermes").unwrap();
        assert_eq!((&mine["name"], &mine["state"]), (&session.into(), &"running".into()));
        assert_eq!(machine(&home, &["status", "--name", session]).code, 0);
        ok(&home, &["stop", "--name", session]);
        assert_eq!(machine(&home, &["status", "--name", session]).code, 0);
        ok(&home, &["start", "--name", session]);
        assert_eq!(execute("cat script.sh", "/root", b"").text(), "echo from $PWD; exit 7\n");
        ok(&home, &["delete", "--name", session, "-f"]);
        assert_ne!(machine(&home, &["status", "--name", session]).code, 0);
    }

    // An agent's tool: everything by shelling out, results as JSON, output bounded.
    fn an_agents_tool_shells_out_and_reads_json(home) {
        let limits = ["--json", "--timeout", "120s", "--max-output", "20000"];
        let one_off = home.machine_args().into_iter().map(|a| a.into_string().unwrap());
        let args = ["run".to_owned()].into_iter().chain(one_off);
        let args = args.chain(limits.map(str::to_owned));
        let run = home.bantam(args.chain(["--", "bash", "-c", "seq 9999"].map(str::to_owned)));
        let result = object(&run);
        assert_eq!((run.code, &result["ok"], &result["truncated"]), (0, &true.into(), &true.into()));
        assert_eq!(result["stdout"].as_str().unwrap().len(), 20_000);
        assert_eq!(result["stdout_bytes"], 48_888);

        assert_eq!(create(&home, &["--name", "tool", "--image", "IMAGE", "--cpus", "1", "--mem", "256"]).code, 0);
        ok(&home, &["start", "--name", "tool"]);
        let exec = |options: &[&str], script: &str| {
            let head = ["exec", "--name", "tool"];
            machine(&home, &[&head[..], &limits, options, &["--", "bash", "-c", script]].concat())
        };
        let run = exec(&[], "echo out; echo err >&2; exit 3");
        let result = object(&run);
        assert_eq!((run.code, &result["exit_code"], &result["ok"]), (3, &3.into(), &false.into()));
        assert_eq!((&result["stdout"], &result["stderr"]), (&"out\n".into(), &"err\n".into()));
        assert_eq!(result["machine"], "tool");
        let run = machine(&home, &["exec", "--name", "tool", "--json", "--timeout", "1s", "--",
            "bash", "-c", "echo begun; sleep 100"]);
        let result = object(&run);
        assert_eq!((run.code, &result["timed_out"]), (124, &true.into()));
        assert_eq!(result["stdout"], "begun\n");
        let run = machine(&home, &["exec", "--name", "none", "--json", "--", "true"]);
        assert_eq!((run.code, run.stdout.as_slice()), (125, &b""[..]));
        let error: Value = serde_json::from_str(run.stderr.trim()).unwrap();
        assert_eq!(error["error"]["code"], "machine_not_found");
        let names: Vec<_> = home.list().iter().map(|m| m["name"].clone()).collect();
        assert_eq!(names, ["tool"]);
        ok(&home, &["stop", "--name", "tool"]);
        ok(&home, &["delete", "--name", "tool", "--force"]);
        assert_eq!(ok(&home, &["ls", "--json"]), "[]\n");
    }

    // A sandbox runtime that starts a stopped machine and tries once more.
    fn a_runtime_that_restarts_what_was_stopped(home) {
        let run = home.bantam(["--version"]);
        assert_eq!(run.code, 0);
        // Another caller takes three numbers out of it.
        let text = run.text();
        let version = text.split_whitespace().last().unwrap();
        assert_eq!(version.split('.').filter(|n| n.parse::<u32>().is_ok()).count(), 3, "{text}");

        let name = "forge";
        let net = ["--name", name, "--net", "--image", "IMAGE", "--allow-host", "example.org"];
        created_with_network_or_refused(&home, &net, name);
        let mount = ["--name", name, "--image", "IMAGE", "-v", "/usr:/usr:ro"];
        let run = create(&home, &mount);
        if run.code == 0 {
            assert_eq!(home.find(name).unwrap()["mounts"], 1);
            home.delete(name);
        } else {
            assert_refused(&home, &run, name);
        }
        assert_eq!(create(&home, &["--name", name, "--image", "IMAGE", "--cpus", "1", "--mem", "256"]).code, 0);
        let exec = ["machine", "exec", "-i", "--name", name, "--", "sh", "-c", "cat; exit 5"];
        let run = home.bantam_with_input(b"input", exec);
        // How it tells that from a command that failed.
        let said = run.text() + &run.stderr;
        assert!(run.code != 0 && said.to_lowercase().contains("not running"), "{said}");
        ok(&home, &["start", "--name", name]);
        let run = home.bantam_with_input(b"input", exec);
        assert_eq!((run.code, run.text().as_str()), (5, "input"));
        ok(&home, &["delete", "--name", name, "-f"]);
        let run = machine(&home, &["delete", "--name", name, "-f"]);
        assert!(run.code != 0 && run.stderr.contains("no such machine"), "{}", run.stderr);
    }

    // An orchestrator that streams, and reads the list.
    fn an_orchestrator_that_streams_and_reads_the_list(home) {
        let name = "colony-1";
        for more in [&["--net", "--net-backend", "virtio-net"][..], &["--net", "--dns", "1.1.1.1"],
            &["--net", "-p", "18080:80"]] {
            let args = [&["--name", name, "--image", "IMAGE"][..], more].concat();
            let run = create(&home, &args);
            if run.code == 0 {
                assert_eq!(home.find(name).unwrap()["network"], true, "{more:?}");
                home.delete(name);
            } else {
                assert_ne!(run.code, 2, "{more:?}: {}", run.stderr);
                assert!(home.find(name).is_none(), "{more:?}");
            }
        }
        assert_eq!(create(&home, &["--name", name, "--image", "IMAGE", "--mem", "256", "--cpus", "1"]).code, 0);
        ok(&home, &["start", "--name", name]);
        let run = machine(&home, &["exec", "--stream", "--name", name, "--workdir", "/tmp",
            "--env", "K=V", "--", "sh", "-c", "echo $K $PWD"]);
        assert_eq!((run.code, run.text().as_str()), (0, "V /tmp\n"), "{}", run.stderr);
        let list = home.list();
        let found = list.iter().find(|m| m["name"] == name).unwrap();
        assert_eq!(found["state"], "running");
        assert!(found["image"].is_string(), "{found}");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let created = found["created_at"].as_u64().unwrap();
        assert!((now.saturating_sub(3600)..=now).contains(&created), "{created} {now}");
        assert!(found["mounts"].is_u64() && found["network"].is_boolean(), "{found}");
        let fork = machine(&home, &["fork", "--golden", name, "--name", "colony-2"]);
        assert_eq!(fork.code, 125);
        assert!(fork.stderr.contains("not supported yet"), "{}", fork.stderr);
        ok(&home, &["delete", "--name", name, "-f"]);
        let run = machine(&home, &["delete", "--name", name, "-f"]);
        assert!(run.code == 125 && run.stderr.contains("no such machine"), "{}", run.stderr);
    }

    // A development machine that exists when `status` says so, and is filled by `cp`.
    fn a_development_machine_by_status_and_cp(home) {
        let name = "devvm";
        assert_ne!(machine(&home, &["status", "--name", name]).code, 0);
        let args = ["--name", name, "--image", "IMAGE", "--cpus", "4", "--mem", "256",
            "--storage", "50", "--env", "SMOLVM_GUEST=1"];
        assert_eq!(create(&home, &args).code, 0);
        assert_eq!(machine(&home, &["status", "--name", name]).code, 0);
        ok(&home, &["start", "--name", name]);
        let file = home.dir().join("file");
        std::fs::write(&file, "copied\n").unwrap();
        ok(&home, &["cp", file.to_str().unwrap(), &format!("{name}:/root/file")]);
        for options in [&["--stream"][..], &["-i", "--stream"], &[]] {
            let head = ["exec", "--name", name];
            let command = ["--", "env", "SMOLVM_GUEST=1", "cat", "/root/file"];
            let run = machine(&home, &[&head[..], options, &command].concat());
            assert_eq!((run.code, run.text().as_str()), (0, "copied\n"), "{}", run.stderr);
        }
        ok(&home, &["cp", &format!("{name}:/root/file"), home.dir().join("back").to_str().unwrap()]);
        assert_eq!(std::fs::read(home.dir().join("back")).unwrap(), b"copied\n");
        let state = &home.find(name).unwrap()["state"];
        assert_eq!(state, "running");
        ok(&home, &["stop", "--name", name]);
        // A stopped one still exists; and without a terminal nothing is deleted unasked.
        assert_eq!(machine(&home, &["status", "--name", name]).code, 0);
        assert_ne!(machine(&home, &["delete", "--name", name]).code, 0);
        assert_eq!(machine(&home, &["status", "--name", name]).code, 0);
        ok(&home, &["rm", "--name", name, "--force"]);
    }

    // Two more that shell out: one with long options throughout, one that reads the help.
    fn callers_with_long_options_and_help(home) {
        let name = "zooid";
        let socket = ["--name", name, "--image", "IMAGE", "--mount-socket", "/run/x:/run/x"];
        assert_refused(&home, &create(&home, &socket), name);
        let from = ["--name", name, "--image", "IMAGE", "--from", "/no/pack"];
        assert_refused(&home, &create(&home, &from), name);
        assert_eq!(create(&home, &["--name", name, "--image", "IMAGE", "--cpus", "1", "--mem",
            "256", "--storage", "2", "--", "sleep", "1000"]).code, 0);
        let help = machine(&home, &["create", "--help"]);
        assert!(help.code == 0 && help.text().contains("--image"), "{}", help.text());
        ok(&home, &["start", "--name", name]);
        assert_eq!(machine(&home, &["exec", "--name", name, "--", "sleep", "1"]).code, 0);
        let run = machine(&home, &["exec", "--name", name, "--", "sh", "-c", "pidof sleep >/dev/null"]);
        assert_eq!(run.code, 0);
        ok(&home, &["stop", "--name", name]);
        assert_eq!(ok(&home, &["ls", "--quiet"]), "zooid\n");
        assert!(ok(&home, &["ls", "--json"]).contains("\"name\": \"zooid\""));
        ok(&home, &["delete", "--name", name, "--force"]);
        let run = machine(&home, &["rm", "--name", name, "--force"]);
        let said = (run.text() + &run.stderr).to_lowercase();
        assert!(run.code != 0 && said.contains("not found"), "{said}");
        // A probe.
        let args = home.machine_args().into_iter().map(|a| a.into_string().unwrap());
        let args = ["machine", "run"].map(str::to_owned).into_iter().chain(args);
        let run = home.bantam(args.chain(["--", "sh", "-c", "echo ok"].map(str::to_owned)));
        assert_eq!((run.code, run.text().as_str()), (0, "ok\n"), "{}", run.stderr);
    }
}
