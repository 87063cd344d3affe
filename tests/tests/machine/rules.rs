//! What holds for machines that never run: names, records, texts, modes. Nothing is booted.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use bantam_e2e::{Running, TestHome, skip, tests_with_home};
use serde_json::Value;

tests_with_home! {
    fn create_says_what_it_made(home) {
        let text = home.ok(home.create_args("web", &["--cpus", "2"]));
        assert!(text.starts_with("Created machine: web\n  CPUs: 2, Memory: 256 MiB\n"), "{text}");
        assert!(text.contains("machine start --name web"), "{text}");
        let web = home.find("web").unwrap();
        assert_eq!((&web["state"], &web["pid"]), (&"created".into(), &Value::Null));
        assert_eq!((&web["cpus"], &web["memory_mib"]), (&2.into(), &256.into()));
        assert_eq!(web["image"], home.setup.image.to_str().unwrap());
        assert_eq!(home.ok(home.create_args("quiet", &["-q"])), "quiet\n");
        home.delete("web");
        home.delete("quiet");
    }

    fn a_name_is_taken_once(home) {
        home.create("a", &["--label", "mine=1"]);
        let said = home.fails(home.create_args("a", &["--label", "mine=2"]));
        assert!(said.contains("'a' already exists"), "{said}");
        assert_eq!(home.find("a").unwrap()["labels"]["mine"], "1");
        home.delete("a");
        home.create("a", &[]);
        home.delete("a");
    }

    fn a_machine_that_is_not_named_gets_a_name(home) {
        let args = ["create".into()].into_iter().chain(home.machine_args());
        let text = home.ok(args);
        let line = text.lines().next().unwrap();
        let name = line.strip_prefix("Created machine: ").unwrap().to_owned();
        assert!(name.starts_with("vm-"), "{name}");
        assert_eq!(home.state(&name), "created");
        home.delete(&name);
    }

    fn what_cannot_be_a_name_is_a_mistake_of_the_caller(home) {
        let long = "a".repeat(76);
        for bad in ["", ".", "..", ".x", "_x", "a/b", "../x", "a b", "a\nb", "ä", &long] {
            let run = home.bantam(home.create_args(bad, &[]));
            assert_eq!(run.code, 2, "{bad:?}: {}", run.stderr);
            for command in ["start", "stop", "status", "delete"] {
                assert_eq!(home.bantam([command, "-n", bad]).code, 2, "{command} {bad:?}");
            }
        }
        assert_eq!(home.bantam(["create", "positional"]).code, 2);
        let longest = "a".repeat(75);
        home.create(&longest, &[]);
        home.create("A.b_c-9", &[]);
        home.delete(&longest);
        home.delete("A.b_c-9");
    }

    fn what_does_not_exist_is_not_found_by_every_command(home) {
        let commands: [&[&str]; 11] = [
            &["start"], &["stop"], &["restart"], &["status"], &["logs"], &["delete"],
            &["delete", "-f"], &["data-dir"], &["update", "--cpus", "2"], &["update"],
            &["exec", "--", "true"],
        ];
        for command in commands {
            let (verb, rest) = command.split_first().unwrap();
            let args = [&[*verb, "--name", "gone"], rest].concat();
            let said = home.fails(&args);
            assert!(said.contains("'gone' not found"), "{args:?}: {said}");
            assert!(said.contains("no such machine"), "{args:?}: {said}");
            let run = home.bantam([&["machine"][..], &args].concat());
            assert_eq!((run.code, run.stderr), (125, said), "{args:?}");
        }
        let run = home.bantam(["status", "--json", "-n", "gone"]);
        let object: Value = serde_json::from_str(run.stderr.trim()).unwrap();
        assert_eq!(object["error"]["code"], "machine_not_found");
        assert!(run.stdout.is_empty());
        assert!(!home.machine_dir("gone").exists());
    }

    fn a_name_comes_from_the_option_then_the_environment_then_is_default(home) {
        for name in ["a", "b", "c", "default"] {
            home.create(name, &[]);
        }
        let named = |variables: &[(&str, &str)], args: &[&str]| {
            let mut command = home.command(["status"]);
            command.args(args).envs(variables.iter().copied()).stdin(Stdio::null());
            let run = Running::start(&mut command).finish();
            assert_eq!(run.code, 0, "{}", run.stderr);
            run.text().split('\'').nth(1).unwrap().to_owned()
        };
        let (ours, theirs) = (("BANTAM_MACHINE_NAME", "b"), ("SMOLVM_MACHINE_NAME", "c"));
        assert_eq!(named(&[ours, theirs], &["-n", "a"]), "a");
        assert_eq!(named(&[ours, theirs], &[]), "b");
        assert_eq!(named(&[theirs], &[]), "c");
        assert_eq!(named(&[("BANTAM_MACHINE_NAME", ""), theirs], &[]), "c");
        assert_eq!(named(&[], &[]), "default");
        // What is better not done to the wrong machine needs a name.
        for command in [&["delete", "-f"][..], &["update", "--cpus", "2"], &["data-dir"]] {
            assert_eq!(home.bantam(command).code, 2, "{command:?}");
        }
        for name in ["a", "b", "c", "default"] {
            home.delete(name);
        }
    }

    fn delete_refuses_where_nobody_can_be_asked(home) {
        home.create("a", &[]);
        let said = home.fails(["delete", "-n", "a"]);
        assert!(said.contains("confirmation") && said.contains("--force"), "{said}");
        // A pipe is nobody, whatever it says.
        let run = home.bantam_with_input(b"y\n", ["delete", "-n", "a"]);
        assert_eq!(run.code, 125, "{}", run.stderr);
        assert_eq!(home.state("a"), "created");
        assert_eq!(home.ok(["rm", "--name", "a", "--force"]), "Deleted machine: a\n");
        assert_eq!(home.state("a"), "none");
    }

    fn delete_asks_on_a_terminal_and_takes_only_yes(home) {
        home.create("a", &[]);
        let answer = |answer: &str| {
            let line = format!("{} delete -n a", home.setup.program.display());
            let mut script = Command::new("script");
            home.put_into(&mut script);
            // util-linux's script gives the program a terminal.
            script.args(["-qec", &line, "/dev/null"]).stdin(Stdio::piped());
            Running::start(&mut script).finish_with_input(answer.as_bytes())
        };
        if Command::new("script").arg("-V").output().is_err() {
            skip("delete_asks_on_a_terminal_and_takes_only_yes", "no script(1)");
            home.delete("a");
            return;
        }
        for no in ["n\n", "\n", "yesterday\n"] {
            let run = answer(no);
            assert!(run.text().contains("[y/N]"), "{}", run.text());
            assert!(run.text().contains("Cancelled"), "{no:?}: {}", run.text());
            assert_eq!((run.code, home.state("a").as_str()), (0, "created"));
        }
        let run = answer("y\n");
        assert!(run.text().contains("Deleted machine: a"), "{}", run.text());
        assert_eq!((run.code, home.state("a").as_str()), (0, "none"));
    }

    fn a_change_is_shown_and_a_bad_one_changes_nothing(home) {
        home.create("a", &["--label", "x=1", "--storage", "3"]);
        assert_eq!(home.ok(["update", "-n", "a"]), "No changes specified.\n");
        let text = home.ok([
            "update", "-n", "a", "--cpus", "2", "--mem", "512", "--storage", "4", "--label", "y=2",
            "--remove-label", "x", "-e", "K=V", "-w", "/srv",
        ]);
        for line in [
            "Updated machine 'a':", "  cpus: 1 → 2", "  memory: 256 MiB → 512 MiB",
            "  storage: 3 GiB → 4 GiB", "  env: K", "  workdir: /srv",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}: {text}");
        }
        let changed = home.find("a").unwrap();
        assert_eq!(changed["labels"], serde_json::json!({"y": "2"}));
        assert_eq!(changed["storage_gb"], 4);
        for bad in [["--storage", "3"], ["--cpus", "0"], ["--mem", "1"]] {
            let run = home.bantam(["update", "-n", "a", bad[0], bad[1]]);
            assert_ne!(run.code, 0, "{bad:?}");
            assert_eq!(home.find("a").unwrap(), changed, "{bad:?}");
        }
        home.delete("a");
    }

    fn a_machine_that_no_start_could_start_is_not_made(home) {
        let bad: [&[&str]; 4] = [&["--cpus", "0"], &["--mem", "1"], &["--storage", "0"], &["-e", "=x"]];
        for more in bad {
            let args = ["create", "-n", "a", "-I", home.setup.image.to_str().unwrap()];
            let run = home.bantam([&args[..], more].concat());
            assert!([2, 125].contains(&run.code), "{more:?}: {}", run.stderr);
        }
        let args = ["create", "-n", "a", "-I", "./no/such/image.tar"];
        assert!(home.fails(args).contains("./no/such/image.tar"));
        assert!(home.list().is_empty());
        assert!(fs::read_dir(home.path().join("machines")).map_or(0, Iterator::count) == 0);
    }

    fn lists_are_for_people_and_for_programs(home) {
        assert_eq!(home.ok(["ls"]), "No machines found\n");
        assert_eq!(home.ok(["machine", "ls", "--json"]), "[]\n");
        assert_eq!(home.ok(["ls", "-q"]), "");
        home.create("b", &[]);
        home.create("a", &[]);
        assert_eq!(home.ok(["ls", "--quiet"]), "a\nb\n");
        let table = home.ok(["machine", "list"]);
        assert!(table.starts_with("NAME  STATE"), "{table}");
        assert_eq!(table.lines().count(), 3, "{table}");
        assert!(home.ok(["ls", "--json"]).contains("\"state\": \"created\""));
        assert_eq!(home.ok(["status", "-n", "a"]), "Machine 'a': created\n");
        let status: Value = serde_json::from_str(&home.ok(["status", "-n", "a", "--json"])).unwrap();
        assert_eq!(status, home.find("a").unwrap());
        home.delete("a");
        home.delete("b");
    }

    fn a_damaged_record_is_shown_hurts_nobody_and_can_be_deleted(home) {
        home.create("good", &[]);
        home.create("bad", &[]);
        fs::write(home.machine_dir("bad").join("machine.json"), "{\"version\": ").unwrap();
        let bad = home.find("bad").unwrap();
        assert_eq!(bad["state"], "unreachable");
        assert!(bad["state_reason"].as_str().unwrap().contains("machine.json"), "{bad}");
        assert_eq!(home.state("good"), "created");
        assert!(home.fails(["start", "-n", "bad"]).contains("machine.json"));
        home.delete("bad");
        // Its pin went with the record; the guard would take it for a leak.
        remove_orphaned_pins(&home, "good");
        home.delete("good");
    }

    fn what_is_written_down_is_for_its_owner_alone_whatever_the_umask(home) {
        let mut shell = Command::new("sh");
        home.put_into(&mut shell);
        shell.args(["-c", "umask 000; exec \"$@\"", "sh"]).arg(&home.setup.program);
        shell.args(home.create_args("a", &[])).stdin(Stdio::null());
        assert_eq!(Running::start(&mut shell).finish().code, 0);
        assert_private(&home.path().join("machines"));
        home.delete("a");
    }
}

/// A directory of ours is 0700 and holds files of 0600 and such directories.
pub(crate) fn assert_private(dir: &Path) {
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(dir), 0o700, "{}", dir.display());
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            assert_private(&path);
        } else {
            assert_eq!(mode(&path), 0o600, "{}", path.display());
        }
    }
}

/// Removes pins that are not of the machine `kept`.
fn remove_orphaned_pins(home: &TestHome, kept: &str) {
    let record = fs::read(home.machine_dir(kept).join("machine.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    let id = record["id"].as_str().unwrap();
    for pin in fs::read_dir(home.path().join("images/pins")).unwrap() {
        let pin = pin.unwrap().path();
        if !fs::read_to_string(&pin).unwrap().contains(id) {
            fs::remove_file(pin).unwrap();
        }
    }
}
