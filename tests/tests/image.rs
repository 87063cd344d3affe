//! `bantam image`, from outside. Each test has a store of its own.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bantam_e2e::{Run, Running, Setup, setup, skip};
use serde_json::Value;
use tempfile::TempDir;

/// The program with a store that no other test sees.
struct Bench {
    setup: Setup,
    dir: TempDir,
}

impl Bench {
    fn new(test: &str) -> Option<Self> {
        let setup = setup(test)?;
        let dir = tempfile::tempdir().unwrap();
        Some(Self { setup, dir })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn args(&self, args: &[&str]) -> Vec<String> {
        let home = self.path("home").to_str().unwrap().to_owned();
        let mut all = vec!["--state-dir".to_owned(), home];
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        all
    }

    /// `bantam ARGS`, with any result.
    fn try_run(&self, args: &[&str]) -> Run {
        self.setup.bantam(self.args(args))
    }

    /// `bantam ARGS`, which must succeed.
    fn run(&self, args: &[&str]) -> Run {
        let run = self.try_run(args);
        assert_eq!(run.code, 0, "{args:?}: {}", run.stderr);
        run
    }

    fn start(&self, args: &[&str]) -> Running {
        self.setup.start(self.args(args), Stdio::piped())
    }

    /// Loads the test image as `e2e:1` and returns its digest.
    fn load(&self) -> String {
        let image = self.setup.image.to_str().unwrap();
        let run = self.run(&["image", "load", "-i", image, "--name", "e2e:1"]);
        let text = run.text();
        let (name, digest) = text.trim_end().split_once('@').unwrap();
        assert_eq!(name, "docker.io/library/e2e:1");
        digest.to_owned()
    }

    /// `bantam run` of the image, never pulling.
    fn machine<'a>(&'a self, name: &'a str, command: &[&'a str]) -> Vec<&'a str> {
        let engine = self.setup.engine.as_str();
        let mut args = vec![
            "run", "--engine", engine, "--pull", "never", "-i", "-I", name,
        ];
        args.push("--");
        args.extend(command);
        args
    }

    fn ls(&self) -> Vec<Value> {
        let run = self.run(&["image", "ls", "--json"]);
        serde_json::from_slice(&run.stdout).unwrap()
    }
}

macro_rules! e2e {
    ($(fn $name:ident($bench:ident) $body:block)*) => {
        $(#[test] fn $name() {
            let Some($bench) = Bench::new(stringify!($name)) else { return };
            $body
        })*
    };
}

/// Whether a program is on the search path; says so if not.
fn have(program: &str, test: &str) -> bool {
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {program} >/dev/null 2>&1")])
        .status()
        .is_ok_and(|status| status.success());
    if !found {
        skip(test, &format!("{program} is not installed"));
    }
    found
}

e2e! {
    fn an_empty_store_has_a_header_and_an_empty_array(bench) {
        let run = bench.run(&["image", "ls"]);
        assert_eq!(run.text().lines().count(), 1);
        assert!(run.text().starts_with("REFERENCE"), "{}", run.text());
        assert!(run.stderr.is_empty(), "{}", run.stderr);
        assert_eq!(bench.run(&["image", "ls", "--json"]).text(), "[]\n");
        assert_eq!(bench.run(&["image", "ls", "-q"]).text(), "");
        bench.run(&["image", "prune", "--all"]);
        assert!(!bench.path("home").exists(), "looking makes nothing");
    }

    fn an_image_from_standard_input_runs_without_a_registry(bench) {
        let archive = fs::read(&bench.setup.image).unwrap();
        let args = bench.args(&["image", "load", "--name", "e2e:1"]);
        let run = bench.setup.bantam_with_input(&archive, args);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let text = run.text();
        let pinned = text.trim_end();
        assert!(pinned.starts_with("docker.io/library/e2e:1@sha256:"), "{pinned}");
        let digest = pinned.split_once('@').unwrap().1;
        for name in ["e2e:1", pinned, digest] {
            let run = bench.run(&bench.machine(name, &["echo", "ran"]));
            assert_eq!(run.text(), "ran\n");
        }
    }

    fn a_saved_image_is_the_same_image_elsewhere(bench) {
        let digest = bench.load();
        let file = bench.path("out.tar");
        let path = file.to_str().unwrap();
        bench.run(&["image", "save", "e2e:1", "-o", path]);
        let streamed = bench.run(&["image", "save", &digest, "-o", "-"]);

        let other = Bench::new("a_saved_image_is_the_same_image_elsewhere").unwrap();
        let run = other.run(&["image", "load", "-i", path]);
        assert_eq!(run.text(), format!("docker.io/library/e2e:1@{digest}\n"));
        other.run(&["image", "rm", "e2e:1"]);
        let args = other.args(&["image", "load"]);
        let run = other.setup.bantam_with_input(&streamed.stdout, args);
        // By digest it was saved without a name.
        assert_eq!(run.text(), format!("{digest}\n"), "{}", run.stderr);

        if have("skopeo", "a_saved_image_is_the_same_image_elsewhere") {
            let archive = format!("oci-archive:{path}");
            let seen = Command::new("skopeo").args(["inspect", &archive]).output().unwrap();
            let text = String::from_utf8_lossy(&seen.stderr);
            assert!(seen.status.success(), "{text}");
            let seen: Value = serde_json::from_slice(&seen.stdout).unwrap();
            assert_eq!(seen["Digest"], *digest);
        }
    }

    fn listing_and_inspecting_tell_the_same(bench) {
        let digest = bench.load();
        let list = bench.ls();
        assert_eq!(list.len(), 1);
        assert_eq!(list[0]["digest"], *digest);
        assert_eq!(list[0]["names"][0], "docker.io/library/e2e:1");
        assert_eq!(list[0]["can_save"], true);
        assert!(list[0]["rootfs_bytes"].as_u64() > Some(0));
        assert_eq!(bench.run(&["image", "ls", "-q"]).text(), format!("{digest}\n"));
        let table = bench.run(&["image", "ls"]);
        assert!(table.text().contains(&digest["sha256:".len()..][..12]), "{}", table.text());
        assert!(table.stderr.contains("1 image"), "{}", table.stderr);

        let short = &digest["sha256:".len()..][..10];
        let run = bench.run(&["image", "inspect", short, "--json"]);
        let details: Value = serde_json::from_slice(&run.stdout).unwrap();
        assert_eq!(details["digest"], *digest);
        assert_eq!(details["manifest"]["digest"], *digest);
        assert!(!details["layers"].as_array().unwrap().is_empty());
        assert!(details["config"]["env"].is_array());
        let text = bench.run(&["image", "inspect", "e2e:1"]).text();
        assert!(text.contains("Digest:") && text.contains("Layers:"), "{text}");
    }

    fn an_image_in_use_stays_and_its_machine_goes_on(bench) {
        let digest = bench.load();
        let script = "echo ready; read line; sha256sum /bin/* >/dev/null && echo read";
        let mut running = bench.start(&bench.machine("e2e:1", &["bash", "-c", script]));
        let mut stdout = running.child.stdout.take().unwrap();
        let mut ready = [0; 6];
        stdout.read_exact(&mut ready).unwrap();
        assert_eq!(&ready, b"ready\n");

        let run = bench.try_run(&["image", "rm", "e2e:1"]);
        assert_eq!(run.code, 125);
        assert!(run.stderr.starts_with("error: e2e:1: in use by"), "{}", run.stderr);
        let run = bench.run(&["image", "prune", "--all"]);
        assert_eq!(run.text(), "");
        assert!(run.stderr.contains(&format!("kept {digest}")), "{}", run.stderr);
        assert_eq!(bench.ls()[0]["names"][0], "docker.io/library/e2e:1");

        running.child.stdin.take().unwrap().write_all(b"go on\n").unwrap();
        running.child.stdout = Some(stdout);
        let run = running.finish();
        assert_eq!((run.code, run.text().as_str()), (0, "read\n"), "{}", run.stderr);
        let run = bench.run(&["image", "prune", "--all", "--json"]);
        let pruned: Value = serde_json::from_slice(&run.stdout).unwrap();
        assert_eq!(pruned["images"][0], *digest);
        assert!(pruned["bytes_freed"].as_u64() > Some(0));
        assert!(bench.ls().is_empty());
        let run = bench.try_run(&bench.machine("e2e:1", &["true"]));
        assert_eq!(run.code, 125, "{}", run.stderr);
    }

    fn a_name_that_is_not_there_is_said(bench) {
        for command in ["rm", "inspect", "save"] {
            let run = bench.try_run(&["image", command, "nosuch:1"]);
            assert_eq!(run.code, 125);
            assert!(run.stderr.starts_with("error: nosuch:1: no such image"), "{}", run.stderr);
        }
        let run = bench.try_run(&["--error-format", "json", "image", "rm", "nosuch:1"]);
        let error: Value = serde_json::from_str(&run.stderr).unwrap();
        assert_eq!(error["error"]["code"], "image");
        let run = bench.try_run(&["image", "inspect", "--json", "nosuch:1"]);
        assert!(run.stderr.starts_with('{'), "{}", run.stderr);
        assert_eq!(bench.try_run(&["image", "rm"]).code, 2);
        let run = bench.try_run(&["image", "load", "-i", "./nosuch.tar"]);
        assert_eq!(run.code, 125);
        assert!(run.stderr.contains("./nosuch.tar"), "{}", run.stderr);
    }

    fn two_pulls_at_once_fetch_each_layer_once(bench) {
        let test = "two_pulls_at_once_fetch_each_layer_once";
        if !have("docker-registry", test) || !have("skopeo", test) {
            return;
        }
        let registry = Registry::start(&bench.path("registry"));
        let name = format!("{}/e2e/app:1", registry.address);
        let from = format!("oci-archive:{}", bench.setup.image.display());
        let pushed = Command::new("skopeo")
            .args(["copy", "--insecure-policy", "--dest-tls-verify=false", &from])
            .arg(format!("docker://{name}"))
            .output()
            .unwrap();
        assert!(pushed.status.success(), "{}", String::from_utf8_lossy(&pushed.stderr));

        let pulls = [(); 2].map(|()| bench.start(&["image", "pull", &name]));
        let [one, two] = pulls.map(Running::finish);
        assert_eq!((one.code, two.code), (0, 0), "{}{}", one.stderr, two.stderr);
        assert_eq!(one.text(), two.text());
        assert!(one.text().starts_with(&format!("{name}@sha256:")), "{}", one.text());
        let run = bench.run(&["image", "inspect", &name, "--json"]);
        let details: Value = serde_json::from_slice(&run.stdout).unwrap();
        let layers = details["layers"].as_array().unwrap();
        assert!(!layers.is_empty());
        for layer in layers {
            let digest = layer["digest"].as_str().unwrap();
            assert_eq!(registry.fetches(digest), 1, "{digest}");
        }

        // Nothing is fetched again, and with the registry gone the image runs and is saved.
        bench.run(&["image", "pull", &name]);
        assert_eq!(registry.fetches(layers[0]["digest"].as_str().unwrap()), 1);
        drop(registry);
        let run = bench.run(&bench.machine(&name, &["echo", "ran"]));
        assert_eq!(run.text(), "ran\n");
        bench.run(&["image", "save", &name, "-o", bench.path("out.tar").to_str().unwrap()]);
        assert_eq!(bench.try_run(&["image", "pull", &name]).code, 125);
        assert_eq!(bench.ls().len(), 1);
    }

    fn the_configured_process_runs_as_well_from_the_store_as_from_the_registry(bench) {
        let test = "the_configured_process_runs_as_well_from_the_store_as_from_the_registry";
        if ["docker-registry", "skopeo", "umoci"].iter().any(|program| !have(program, test)) {
            return;
        }
        // The first run pulls; for the second there is only what the first has stored.
        let registry = Registry::start(&bench.path("registry"));
        let name = format!("{}/e2e/configured:1", registry.address);
        configured_image(&bench, &name);

        let engine = bench.setup.engine.clone();
        let run = bench.run(&["run", "--engine", &engine, "-i", "-I", &name]);
        let process = "1234\n2345\n2345 3456\n/srv/made/here 755 0\nhello /home/app /opt/bin\n";
        assert_eq!(run.text(), format!("{process}default words\n"), "{}", run.stderr);

        drop(registry);
        let other = ["run", "--engine", &engine, "--pull", "never", "-i", "-I", &name, "--", "mine"];
        let run = bench.run(&other);
        assert_eq!(run.text(), format!("{process}mine\n"), "{}", run.stderr);

        let run = bench.run(&["image", "inspect", &name, "--json"]);
        let details: Value = serde_json::from_slice(&run.stdout).unwrap();
        assert_eq!(details["config"]["stop_signal"], "SIGRTMIN+3");
        assert_eq!(details["config"]["user"], "app");
    }

    fn an_image_that_buildah_made_runs_as_it_says(bench) {
        let test = "an_image_that_buildah_made_runs_as_it_says";
        if ["docker-registry", "buildah"].iter().any(|program| !have(program, test)) {
            return;
        }
        if !rustix::process::geteuid().is_root() {
            return skip(test, "buildah keeps owners only for root");
        }
        let registry = Registry::start(&bench.path("registry"));
        let name = format!("{}/e2e/built:1", registry.address);
        buildah_image(&bench, &name);
        let run = bench.run(&["run", "--engine", &bench.setup.engine, "-i", "-I", &name]);
        let process = "1234\n2345\n/srv/made here\nhello, world\nkept replaced\n2345 new\n";
        assert_eq!(run.text(), format!("{process}default two words\n"), "{}", run.stderr);
    }
}

/// Makes an image of two layers of the test image with buildah, in Docker's format, and pushes it.
fn buildah_image(bench: &Bench, name: &str) {
    let at = |name: &str| bench.path(name).display().to_string();
    let policy = r#"{"default": [{"type": "insecureAcceptAnything"}]}"#;
    fs::write(at("policy"), policy).unwrap();
    let buildah = |args: &[&str]| {
        // Needs no mounts and no kernel module.
        let store = ["--storage-driver", "vfs", "--root", &at("root")];
        let run = ["--runroot", &at("run")];
        tool("buildah", &[&store[..], &run, args].concat())
    };
    // Of the commands that ask whose images to trust, which not every host has configured.
    let trusting = |command: &str, args: &[&str]| {
        buildah(
            &[
                &[command, "--quiet", "--signature-policy", &at("policy")],
                args,
            ]
            .concat(),
        )
    };
    let new = bench.path("new");
    fs::create_dir_all(new.join("etc")).unwrap();
    fs::create_dir_all(new.join("srv/built")).unwrap();
    let users = "root:x:0:0::/root:/bin/sh\napp:x:1234:2345::/home/app:/bin/sh\n";
    fs::write(new.join("etc/passwd"), users).unwrap();
    fs::write(new.join("etc/group"), "root:x:0:\napp:x:2345:\n").unwrap();
    for name in ["gone", "kept", "replaced"] {
        fs::write(new.join("srv/built").join(name), "old").unwrap();
    }
    let archive = format!("oci-archive:{}", bench.setup.image.display());
    trusting("from", &["--name", "lower", &archive]);
    buildah(&["copy", "lower", &at("new"), "/"]);
    // In one layer, as buildah wants a history of each, which the test image has not.
    trusting("commit", &["--squash", "lower", "lower"]);

    trusting(
        "from",
        &["--pull-never", "--name", "upper", "localhost/lower"],
    );
    let root = PathBuf::from(buildah(&["mount", "upper"]).trim());
    fs::remove_file(root.join("srv/built/gone")).unwrap();
    let replaced = root.join("srv/built/replaced");
    fs::remove_file(&replaced).unwrap();
    fs::write(&replaced, "new").unwrap();
    tool("chown", &["0:2345", replaced.to_str().unwrap()]);
    tool("chmod", &["640", replaced.to_str().unwrap()]);
    buildah(&["umount", "upper"]);
    let script = "export PATH=$PATH:/bin; id -u; id -g; pwd; echo $GREETING; cd /srv/built; \
                  echo *; echo $(stat -c %g replaced) $(cat replaced); echo $*";
    let entrypoint = serde_json::json!(["/bin/sh", "-c", script, "entrypoint"]).to_string();
    let config = [
        ["--user", "app"],
        ["--env", "GREETING=hello, world"],
        ["--workingdir", "/srv/made here"],
        ["--entrypoint", &entrypoint],
        ["--cmd", "default 'two words'"],
        ["--stop-signal", "SIGRTMIN+3"],
    ];
    buildah(&[&["config"], config.as_flattened(), &["upper"]].concat());
    trusting("commit", &["--format", "docker", "upper", "upper"]);
    let to = format!("docker://{name}");
    trusting("push", &["--tls-verify=false", "upper", &to]);
}

/// Runs a program, which must succeed, and returns its output.
fn tool(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{program} {args:?}: {text}");
    String::from_utf8(out.stdout).unwrap()
}

/// Pushes the test image with a user of its own and a configuration in which everything is said.
fn configured_image(bench: &Bench, name: &str) {
    let layout = bench.path("layout");
    let image = format!("{}:x", layout.display());
    let etc = bench.path("layer/etc");
    fs::create_dir_all(&etc).unwrap();
    let users = "root:x:0:0::/root:/bin/sh\napp:x:1234:2345::/home/app:/bin/sh\n";
    fs::write(etc.join("passwd"), users).unwrap();
    let groups = "root:x:0:\napp:x:2345:\nmore:x:3456:root,app\nother:x:4567:root\n";
    fs::write(etc.join("group"), groups).unwrap();
    let layer = bench.path("layer.tar");
    let (from, layer) = (bench.path("layer"), layer.to_str().unwrap());
    let owner = ["--owner=0", "--group=0", "--mode=u=rwX,go=rX"];
    let what = ["-C", from.to_str().unwrap(), "-cf", layer, "etc"];
    tool("tar", &[&owner[..], &what].concat());

    let archive = format!("oci-archive:{}", bench.setup.image.display());
    let copy = ["copy", "--insecure-policy", "--dest-tls-verify=false"];
    tool(
        "skopeo",
        &[&copy[..], &[&archive, &format!("oci:{image}")]].concat(),
    );
    tool("umoci", &["raw", "add-layer", "--image", &image, layer]);
    let script = "export PATH=$PATH:/bin; id -u; id -g; id -G; echo $(pwd) $(stat -c '%a %u' .); \
                  echo $GREETING $HOME ${PATH%:/bin}; echo $*";
    let config = [
        ["--config.user", "app"],
        ["--config.env", "GREETING=hello"],
        ["--config.env", "PATH=/opt/bin"],
        ["--config.entrypoint", "/bin/sh"],
        ["--config.entrypoint", "-c"],
        ["--config.entrypoint", script],
        ["--config.entrypoint", "entrypoint"],
        ["--config.cmd", "default"],
        ["--config.cmd", "words"],
        ["--config.workingdir", "/srv/made/here"],
        ["--config.stopsignal", "SIGRTMIN+3"],
    ];
    tool(
        "umoci",
        &[&["config", "--image", &image], config.as_flattened()].concat(),
    );
    tool(
        "skopeo",
        &[
            &copy[..],
            &[&format!("oci:{image}"), &format!("docker://{name}")],
        ]
        .concat(),
    );
}

/// Debian's docker-registry, until dropped.
struct Registry {
    child: Child,
    address: String,
    log: Arc<Mutex<Vec<String>>>,
    marks: AtomicUsize,
}

impl Registry {
    fn start(dir: &std::path::Path) -> Self {
        fs::create_dir(dir).unwrap();
        let config = format!(
            "version: 0.1\nlog: {{level: info}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\nhttp:\n  addr: 127.0.0.1:0\n",
            dir.join("data").display()
        );
        let file = dir.join("config.yml");
        fs::write(&file, config).unwrap();
        let mut child = Command::new("docker-registry")
            .arg("serve")
            .arg(&file)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        // The port is the system's choice; one chosen here could be taken before the registry gets to it.
        let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
            let address = line.split_once("listening on ")?.1;
            Some(address.split(['"', ',']).next()?.to_owned())
        });
        let address = address.unwrap_or_else(|| panic!("docker-registry does not start"));
        let log = Arc::new(Mutex::new(Vec::new()));
        let requests = BufReader::new(child.stdout.take().unwrap()).lines();
        for lines in [
            Box::new(lines) as Box<dyn Iterator<Item = _> + Send>,
            Box::new(requests),
        ] {
            let log = Arc::clone(&log);
            std::thread::spawn(move || {
                for line in lines.map_while(Result::ok) {
                    log.lock().unwrap().push(line);
                }
            });
        }
        Self {
            child,
            address,
            log,
            marks: AtomicUsize::new(0),
        }
    }

    /// How often a blob was asked for, by the access log. The log is behind: a request of this
    /// function's own shows when it has everything.
    fn fetches(&self, digest: &str) -> usize {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let mark = format!(
            "/v2/mark/{}/tags/list",
            self.marks.fetch_add(1, Ordering::Relaxed)
        );
        let request = format!("GET {mark} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap();
        let gets = |part: &str| {
            let line = format!("{part} HTTP/");
            let log = self.log.lock().unwrap();
            log.iter()
                .filter(|l| l.contains("\"GET ") && l.contains(&line))
                .count()
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        while gets(&mark) == 0 {
            assert!(Instant::now() < deadline, "no access log");
            std::thread::sleep(Duration::from_millis(5));
        }
        gets(&format!("blobs/{digest}"))
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
