//! `bantam run`, from outside.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use bantam_e2e::{Setup, setup};
use sha2::{Digest, Sha256};

/// A directory whose `root` holds the programs and the configuration of the test image.
fn root_directory(setup: &Setup) -> tempfile::TempDir {
    let tree = setup.run(["--", "tar", "-c", "-C", "/", "bin", "etc"]);
    assert_eq!(tree.code, 0, "{}", tree.stderr);
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let archive = dir.path().join("root.tar");
    fs::write(&archive, &tree.stdout).unwrap();
    let tar = std::process::Command::new("tar")
        .arg("-xf")
        .arg(&archive)
        .arg("-C")
        .arg(&root)
        .status()
        .unwrap();
    assert!(tar.success());
    dir
}

macro_rules! e2e {
    ($($(#[$doc:meta])* fn $name:ident($setup:ident) $body:block)*) => {
        $($(#[$doc])* #[test] fn $name() {
            let Some($setup) = setup(stringify!($name)) else { return };
            $body
        })*
    };
}

e2e! {
    fn a_command_runs_under_its_own_kernel(setup) {
        let run = setup.run(["--", "bash", "-c", "uname -sr; cat /proc/1/comm"]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let text = run.text();
        assert!(text.starts_with("Linux 6.12"), "{text}");
        let host = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert!(!text.contains(host.trim()), "the host's kernel: {text}");
    }

    fn the_commands_exit_code_is_passed_on(setup) {
        assert_eq!(setup.run(["--", "bash", "-c", "exit 7"]).code, 7);
    }

    fn a_missing_command_is_127_and_named(setup) {
        let run = setup.run(["--", "nosuch"]);
        assert_eq!(run.code, 127);
        assert!(run.stderr.contains("nosuch"), "{}", run.stderr);
        assert!(run.stdout.is_empty());
    }

    fn a_directory_as_command_is_126(setup) {
        let run = setup.run(["--", "/etc"]);
        assert_eq!(run.code, 126);
        assert!(run.stderr.contains("/etc"), "{}", run.stderr);
    }

    fn a_killed_command_is_128_plus_the_signal(setup) {
        assert_eq!(setup.run(["--", "bash", "-c", "kill -9 $$"]).code, 137);
        assert_eq!(setup.run(["--", "bash", "-c", "kill -15 $$"]).code, 143);
    }

    fn a_timeout_is_124_and_keeps_what_was_written(setup) {
        let script = "echo before; sleep 60 & sleep 60";
        let run = setup.run(["--timeout", "2s", "--", "bash", "-c", script]);
        assert_eq!(run.code, 124, "{}", run.stderr);
        assert_eq!(run.text(), "before\n");
        assert!(run.took >= Duration::from_secs(2));
    }

    fn a_bad_image_path_is_125_and_named(setup) {
        let run = setup.bantam(["run", "-I", "./no/such/image.tar", "--", "true"]);
        assert_eq!(run.code, 125);
        assert!(run.stderr.starts_with("error: "), "{}", run.stderr);
        assert!(run.stderr.contains("./no/such/image.tar"), "{}", run.stderr);
    }

    fn a_usage_error_is_2(setup) {
        assert_eq!(setup.run(["--no-such-flag", "--", "true"]).code, 2);
        assert_eq!(setup.bantam(["run"]).code, 2);
        assert_eq!(setup.run(["-e", "=x", "--", "true"]).code, 2);
        assert_eq!(setup.run(["ls", "-la", "/etc/passwd"]).code, 0);
    }

    fn fifty_million_bytes_of_input_arrive_unharmed(setup) {
        let mut input = vec![0_u8; 50_000_000];
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for chunk in input.chunks_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
        }
        let run = setup.run_with_input(&input, ["-i", "--", "sha256sum"]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let hash: String = Sha256::digest(&input).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(run.text(), format!("{hash}  -\n"));
    }

    fn output_is_neither_capped_nor_reordered(setup) {
        let script = "seq 1 400000; echo done >&2";
        let run = setup.run(["--", "bash", "-c", script]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let want: String = (1..=400_000).map(|n| format!("{n}\n")).collect();
        assert!(run.stdout == want.as_bytes(), "{} bytes of {}", run.stdout.len(), want.len());
        assert!(run.stderr.contains("done\n"));
    }

    fn bytes_pass_exactly(setup) {
        let input: Vec<u8> = (0..=255).cycle().take(100_000).collect();
        let run = setup.run_with_input(&input, ["-i", "--", "cat"]);
        assert!(run.stdout == input, "{} bytes", run.stdout.len());
    }

    fn without_i_standard_input_is_empty(setup) {
        let run = setup.run_with_input(b"secret", ["--", "bash", "-c", "cat; echo end"]);
        assert_eq!(run.text(), "end\n");
    }

    fn a_command_that_does_not_read_its_input_ends_all_the_same(setup) {
        let run = setup.run_with_input(&vec![b'x'; 4 << 20], ["-i", "--", "bash", "-c", "exit 3"]);
        assert_eq!(run.code, 3, "{}", run.stderr);
    }

    fn a_background_child_does_not_hold_up_the_end(setup) {
        let run = setup.run(["--", "bash", "-c", "sleep 200 & echo out"]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert_eq!(run.text(), "out\n");
        assert!(run.took < Duration::from_secs(150), "{:?}", run.took);
    }

    fn environment_workdir_and_user_are_obeyed(setup) {
        let run = setup.run([
            "-e", "A=b=c d", "-w", "/tmp", "-u", "1234:567", "--",
            "bash", "-c", "echo \"$A|$PWD|$(id -u):$(id -g)|$HOME\"",
        ]);
        assert_eq!(run.text(), "b=c d|/tmp|1234:567|/\n", "{}", run.stderr);
    }

    fn a_missing_workdir_and_user_are_named(setup) {
        let run = setup.run(["-w", "/no/such", "--", "true"]);
        assert_eq!(run.code, 125);
        assert!(run.stderr.contains("/no/such"), "{}", run.stderr);
        let run = setup.run(["-u", "nobodyhere", "--", "true"]);
        assert_eq!(run.code, 125);
        assert!(run.stderr.contains("nobodyhere"), "{}", run.stderr);
    }

    fn two_and_four_cpus_come_up(setup) {
        for cpus in ["2", "4"] {
            let run = setup.run(["--cpus", cpus, "--", "nproc"]);
            assert_eq!(run.text(), format!("{cpus}\n"), "{}", run.stderr);
        }
    }

    fn memory_is_what_was_asked_for(setup) {
        let run = setup.run(["--mem", "1024", "--", "bash", "-c", "grep MemTotal /proc/meminfo"]);
        let kib: u64 = run.text().split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!((900 << 10..=1024 << 10).contains(&kib), "{kib} KiB");
    }

    /// The kernel makes its `struct page` of memory when that is first needed (patch 19).
    fn all_memory_is_free_from_the_beginning_and_can_be_used_without_reclaim(setup) {
        // Free is what the zones have and what a CPU keeps at hand of them, up to some megabytes.
        let script = "free() { \
                          k=$(sed -n 's/^MemFree: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo); \
                          for n in $(sed -n 's/^ *count: *//p' /proc/zoneinfo); do k=$((k + n * 4)); done; \
                          echo \"free $k\"; \
                      }; \
                      grep MemTotal /proc/meminfo; mkdir /filled; \
                      mount -t tmpfs -o size=95% none /filled; free; \
                      dd if=/dev/zero of=/filled/zeros bs=1M count=195 2>/dev/null && \
                      wc -c < /filled/zeros; free; rm /filled/zeros; free; \
                      grep -E '^(allocstall|pgscan|compact_stall|oom_kill|pageoutrun)' /proc/vmstat";
        let run = setup.run(["--mem", "256", "--", "bash", "-c", script]);
        let text = run.text();
        let numbers: Vec<u64> = text
            .lines()
            .take(5)
            .filter_map(|line| line.split_whitespace().find_map(|word| word.parse().ok()))
            .collect();
        let [total, free, filled, free_when_filled, free_after] = numbers[..] else {
            panic!("{text}{}", run.stderr)
        };
        let used = 195 << 10;
        // What is in no one's hands is what boot, the agent and the command do not use.
        assert!((236 << 10..=256 << 10).contains(&total), "{text}");
        assert!(free > total - (20 << 10) && free < total, "{text}");
        assert_eq!(filled, used << 10, "{text}");
        assert!((free - used).abs_diff(free_when_filled) < 2 << 10, "{text}");
        assert!(free.abs_diff(free_after) < 2 << 10, "{text}");
        // Nothing was reclaimed, waited for or killed while there was memory.
        let counts: Vec<&str> = text.lines().skip(5).collect();
        assert!(counts.len() > 5 && counts.iter().all(|line| line.ends_with(" 0")), "{text}");
    }

    fn memory_above_the_32_bit_hole_is_usable(setup) {
        let run = setup.run(["--mem", "5120", "--", "bash", "-c", "grep MemTotal /proc/meminfo"]);
        let kib: u64 = run.text().split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!((4900 << 10..=5120 << 10).contains(&kib), "{kib} KiB");
    }

    fn the_image_is_read_only_below_and_writable_above(setup) {
        let script = "echo x > /etc/new && cat /etc/new && grep -c ' / overlay ' /proc/mounts; \
                      dd if=/dev/zero of=/dev/vda bs=4096 count=1 2>&1";
        let run = setup.run(["--", "bash", "-c", script]);
        let text = run.text();
        assert!(text.starts_with("x\n1\n"), "{text}");
        assert!(text.contains("not permitted") || text.contains("Read-only"), "{text}");
    }

    fn nothing_written_in_one_machine_is_seen_in_the_next(setup) {
        let run = setup.run(["--", "bash", "-c", "echo mine > /etc/left-behind; ls /etc/left-behind"]);
        assert_eq!(run.text(), "/etc/left-behind\n", "{}", run.stderr);
        let run = setup.run(["--", "bash", "-c", "test ! -e /etc/left-behind && echo clean"]);
        assert_eq!(run.text(), "clean\n", "{}", run.stderr);
    }

    fn an_image_on_standard_input_boots(setup) {
        let image = fs::read(&setup.image).unwrap();
        let args = ["run", "--engine", &setup.engine, "-I", "-", "--", "cat", "/etc/hostname"];
        let run = setup.bantam_with_input(&image, args);
        assert_eq!((run.code, run.text().as_str()), (0, "bantam\n"), "{}", run.stderr);
    }

    fn a_root_directory_boots(setup) {
        let dir = root_directory(&setup);
        fs::write(dir.path().join("root/marker"), "from a directory\n").unwrap();
        let root = dir.path().join("root");
        let args = ["run", "--engine", &setup.engine, "-I", root.to_str().unwrap()];
        let run = setup.bantam(args.into_iter().chain(["--", "cat", "/marker"]));
        assert_eq!(run.text(), "from a directory\n", "{}", run.stderr);
    }

    fn an_image_that_cannot_be_set_up_says_what_is_wrong_with_it(setup) {
        let dir = root_directory(&setup);
        fs::write(dir.path().join("root/proc"), "no directory").unwrap();
        let root = dir.path().join("root");
        let args = ["run", "--engine", &setup.engine, "-I", root.to_str().unwrap()];
        let run = setup.bantam(args.into_iter().chain(["--", "true"]));
        assert_eq!(run.code, 125, "{}", run.stderr);
        assert!(run.stderr.contains("/proc"), "{}", run.stderr);
    }

    fn json_is_one_object_with_everything(setup) {
        let run = setup.run(["--json", "--", "bash", "-c", "echo out; echo err >&2; exit 3"]);
        assert_eq!(run.code, 3);
        let object: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
        assert_eq!(object["ok"], false);
        assert_eq!(object["exit_code"], 3);
        assert_eq!(object["stdout"], "out\n");
        assert_eq!(object["stderr"], "err\n");
        assert_eq!(object["timed_out"], false);
        assert_eq!(object["engine"], setup.engine.as_str());
        assert!(object["timings"]["agent_hello_ms"].as_f64().unwrap() > 0.0);
        assert!(object.get("stdout_b64").is_none());
    }

    fn json_carries_bytes_that_are_not_text(setup) {
        let run = setup.run(["--json", "--", "printf", "\\377x"]);
        let object: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
        assert_eq!(object["stdout_b64"], "/3g=");
    }

    fn errors_can_be_json(setup) {
        let run = setup.bantam(["--error-format", "json", "run", "-I", "./nope", "--", "true"]);
        assert_eq!(run.code, 125);
        let object: serde_json::Value = serde_json::from_str(run.stderr.trim()).unwrap();
        assert!(object["error"]["message"].as_str().unwrap().contains("./nope"));
        assert_eq!(object["error"]["code"], "image");
    }

    fn json_output_is_cut_where_asked_and_says_so(setup) {
        let run = setup.run(["--json", "--max-output", "10", "--", "seq", "100"]);
        let object: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
        assert_eq!(object["stdout"], "1\n2\n3\n4\n5\n");
        assert_eq!((&object["stdout_bytes"], &object["truncated"]), (&292.into(), &true.into()));
        assert_eq!(object["ok"], true);
    }

    fn a_slow_reader_of_the_output_gets_all_of_it_and_no_timeout(setup) {
        let mut running = setup.start(
            setup.run_args(["--timeout", "2s", "--", "seq", "1", "60000"]),
            Stdio::null(),
        );
        let mut stdout = running.child.stdout.take().unwrap();
        let mut first = [0; 2];
        std::io::Read::read_exact(&mut stdout, &mut first).unwrap();
        // The reader dawdles for longer than the timeout and its grace.
        std::thread::sleep(Duration::from_secs(5));
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut stdout, &mut rest).unwrap();
        assert_eq!(first.len() + rest.len(), 348_894);
        assert_eq!(running.finish().code, 0);
    }

    fn a_reader_that_went_away_ends_the_run_as_sigpipe_would(setup) {
        let mut running = setup.start(setup.run_args(["--", "yes"]), Stdio::null());
        let mut stdout = running.child.stdout.take().unwrap();
        std::io::Read::read_exact(&mut stdout, &mut [0; 2]).unwrap();
        drop(stdout);
        assert_eq!(running.finish().code, 141);
    }

    fn input_that_cannot_be_read_is_an_error(setup) {
        let directory = fs::File::open("/").unwrap();
        let args = setup.run_args(["-i", "--", "cat"]);
        let run = setup.start(args, directory.into()).finish();
        assert_eq!(run.code, 125);
        assert!(run.stderr.contains("standard input"), "{}", run.stderr);
    }

    fn an_interrupt_from_the_terminal_leaves_nothing(setup) {
        let mut running = setup.start(
            setup.run_args(["--", "bash", "-c", "echo up; sleep 100"]),
            Stdio::null(),
        );
        let mut stdout = running.child.stdout.take().unwrap();
        std::io::Read::read_exact(&mut stdout, &mut [0; 3]).unwrap();
        running.interrupt();
        assert_eq!(running.finish().code, 130);
    }

    fn a_terminal_that_is_none_is_refused(setup) {
        let run = setup.run(["-t", "--", "true"]);
        assert_eq!(run.code, 2);
        assert!(run.stderr.contains("terminal"), "{}", run.stderr);
    }

    fn a_command_on_a_terminal_has_one_and_its_code_is_passed_on(setup) {
        let mut line = vec![setup.program.clone().into_os_string()];
        let script = "tty; stty size; test -t 0 && test -t 1 && test -t 2 && exit 5";
        line.extend(setup.run_args(["-q", "-t", "--", "bash", "-c", &format!("'{script}'")]));
        let line: Vec<_> = line.iter().map(|word| word.to_str().unwrap()).collect();
        let line = format!("stty cols 91 rows 33; exec {}", line.join(" "));
        // util-linux's script gives the program a terminal.
        let output = std::process::Command::new("script")
            .args(["-qec", &line, "/dev/null"])
            .stdin(Stdio::null())
            .output();
        let Ok(output) = output else {
            bantam_e2e::skip("a_command_on_a_terminal_has_one_and_its_code_is_passed_on", "no script(1)");
            return;
        };
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(5), "{text}");
        assert!(text.contains("/dev/pts/0\r\n33 91\r\n"), "{text}");
    }

    fn timings_show_the_phases(setup) {
        let run = setup.run(["--timings", "--", "true"]);
        for phase in ["rootfs_ready", "agent_hello", "command_exit", "teardown"] {
            assert!(run.stderr.contains(phase), "{phase}: {}", run.stderr);
        }
    }

    fn a_kernel_that_is_none_is_refused_by_name(setup) {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, vec![0x55; 1 << 20]).unwrap();
        let path = file.path().to_str().unwrap();
        let run = setup.run(["--kernel", path, "--", "true"]);
        assert_eq!(run.code, 125, "{}", run.stderr);
        assert!(run.stderr.contains(path), "{}", run.stderr);
        let run = setup.run(["--kernel", "/no/such/vmlinux", "--", "true"]);
        assert_eq!(run.code, 125);
        assert!(run.stderr.contains("/no/such/vmlinux"), "{}", run.stderr);
    }

    fn a_guest_that_dies_is_never_success(setup) {
        let run = setup.run(["--", "bash", "-c", "sync; reboot -f || exit 42; sleep 100"]);
        assert_eq!(run.code, 125, "{}", run.stderr);
        assert!(run.stderr.contains("the machine ended"), "{}", run.stderr);
    }

    fn killing_the_program_leaves_no_process(setup) {
        let args = setup.run_args(["--", "bash", "-c", "echo up; sleep 100"]);
        let mut running = setup.start(args, Stdio::null());
        let mut first = [0; 3];
        let mut stdout = running.child.stdout.take().unwrap();
        std::io::Read::read_exact(&mut stdout, &mut first).unwrap();
        assert_eq!(&first, b"up\n");
        running.child.kill().unwrap();
        assert_eq!(running.finish().code, 137);
    }

    fn doctor_says_which_engine_works(setup) {
        let run = setup.bantam(["doctor", "--json"]);
        let object: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
        assert_eq!(object[&setup.engine]["ok"], true, "{object}");
        assert_eq!(run.code, 0);
        assert!(setup.bantam(["doctor"]).text().contains("engine"));
    }
}
