//! Images that buildah makes and pushes to Debian's docker-registry, and what umoci and skopeo read of them there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bantam_image::{Credential, Digest, ImageConfig, NoProgress, Platform, Registries};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::registry::{pull, quick};
use crate::common::{Tar, gzip, read_erofs, run, skipped};
use crate::real_images::{Made, Tree};
use crate::registry_real::{RealRegistry, certificates, have_all, with_dirs};

/// buildah, with images of its own.
struct Buildah {
    dir: TempDir,
}

impl Buildah {
    /// Says so where it cannot work.
    fn new(others: &[&str]) -> Option<Self> {
        if !have_all(&[&["buildah", "docker-registry"], others].concat()) {
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            skipped("buildah keeps owners and makes devices only for root");
            return None;
        }
        let buildah = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        let policy = r#"{"default": [{"type": "insecureAcceptAnything"}]}"#;
        fs::write(buildah.dir.path().join("policy"), policy).unwrap();
        Some(buildah)
    }

    fn at(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// `buildah COMMAND ARGS`, and what it prints.
    fn run(&self, command: &[&str], args: &[&str]) -> String {
        let out = Command::new("buildah")
            // Needs no mounts and no kernel module.
            .args(["--storage-driver", "vfs", "--root", &self.at("root")])
            .args(["--runroot", &self.at("run")])
            .args(command)
            .args(args)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{command:?} {args:?}: {said}");
        String::from_utf8(out.stdout).unwrap().trim().to_owned()
    }

    /// The same of the commands that ask whose images to trust, which not every host has configured.
    fn trusting(&self, command: &[&str], args: &[&str]) -> String {
        let policy = ["--signature-policy", &self.at("policy")];
        self.run(&[command, &policy].concat(), args)
    }

    fn commit(&self, container: &str, format: &str, image: &str) {
        let args = ["--quiet", "--format", format, container, image];
        self.trusting(&["commit"], &args);
    }

    /// Makes `container` from an image and lets `edit` have its files.
    fn edit(&self, image: &str, container: &str, time: u32, edit: impl Fn(&Path)) {
        let args = ["--pull-never", "--name", container, image];
        self.trusting(&["from"], &args);
        let root = self.run(&["mount"], &[container]);
        edit(Path::new(&root));
        // Whatever is of today was just written. With times of the past, umoci's own work is told from these.
        let (today, time) = (format!("@{}", LAYER_TIME + 1000), format!("@{time}"));
        let touch = ["-exec", "touch", "-h", "-d", &time, "{}", "+"];
        run("find", &[&[&root, "-newermt", &today][..], &touch].concat());
        self.run(&["umount"], &[container]);
    }

    /// A container of three layers; `second` removes and replaces, the third brings back.
    fn make(&self) {
        let new = PathBuf::from(self.at("new"));
        fs::create_dir_all(new.join("etc")).unwrap();
        fs::write(new.join("etc/passwd"), "app:x:7:8::/home/app:/bin/sh\n").unwrap();
        let archive = Tar::new()
            .file("usr/which", "first")
            .file("usr/gone", "until the third")
            .hard_link("usr/linked", "usr/which")
            .file("opt/dir/old", "1")
            .file("opt/dir/older", "2")
            .file("srv/sub/file", "3")
            .file("var/file", "becomes a directory")
            .dir("var/dir")
            .file("var/dir/file", "4")
            .symlink("usr/link", "../etc/passwd")
            .finish();
        fs::write(self.at("new.tar.gz"), gzip(&archive)).unwrap();
        self.run(&["from"], &["--name", "first", "scratch"]);
        let history = ["--add-history", "--chown", "7:8", "first"];
        let copied = [new.to_str().unwrap(), "/"];
        self.run(&["copy"], &[&history[..], &copied].concat());
        self.run(
            &["add", "--add-history", "first"],
            &[&self.at("new.tar.gz"), "/"],
        );
        self.commit("first", "oci", "first");

        self.edit("localhost/first", "second", LAYER_TIME + 2, |root| {
            fs::remove_file(root.join("usr/gone")).unwrap();
            fs::remove_dir_all(root.join("opt/dir")).unwrap();
            fs::create_dir(root.join("opt/dir")).unwrap();
            fs::write(root.join("opt/dir/young"), "5").unwrap();
            fs::remove_dir_all(root.join("srv/sub")).unwrap();
            fs::remove_file(root.join("var/file")).unwrap();
            fs::create_dir_all(root.join("var/file/now")).unwrap();
            fs::remove_dir_all(root.join("var/dir")).unwrap();
            fs::write(root.join("var/dir"), "now a file").unwrap();
        });
        self.commit("second", "oci", "second");

        self.edit("localhost/second", "app", LAYER_TIME + 3, |root| {
            fs::write(root.join("usr/gone"), "is back").unwrap();
            fs::write(root.join("usr/which"), "pulled").unwrap();
            let set_id = root.join("usr/set-id");
            fs::write(&set_id, "6").unwrap();
            let set_id = set_id.to_str().unwrap();
            run("chown", &["0:8", set_id]);
            run("chmod", &["4750", set_id]);
            let null = root.join("etc/null").display().to_string();
            run("mknod", &[&null, "c", "1", "3"]);
        });
        let config = [
            ["--user", "app:8"],
            ["--env", "PATH=/opt/bin"],
            ["--env", "GREETING=hello, world"],
            ["--workingdir", "/srv/made here"],
            ["--entrypoint", r#"["/entry", "--flag"]"#],
            ["--cmd", "one 'two words'"],
            ["--stop-signal", "SIGRTMIN+3"],
            ["--label", "a=1"],
            ["--volume", "/data"],
            ["--port", "53/udp"],
            ["--history-comment", "configured"],
        ];
        let args = [&["--add-history"], config.as_flattened(), &["app"]].concat();
        self.run(&["config"], &args);
    }
}

/// Of what the layers' own files are from, in seconds since 1970.
const LAYER_TIME: u32 = 1_700_000_000;

/// What skopeo says is the configuration of an image in a plain registry, and all of its document.
fn configured(name: &str) -> (ImageConfig, Value) {
    let name = format!("docker://{name}");
    let args = ["inspect", "--config", "--tls-verify=false", &name];
    let document: Value = serde_json::from_str(&run("skopeo", &args)).unwrap();
    let config = &document["config"];
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let list = |name: &str| config[name].as_array().unwrap().iter().filter_map(text);
    let map = |name: &str| config[name].as_object().unwrap().clone().into_iter();
    let described = ImageConfig {
        user: text(&config["User"]),
        env: list("Env").collect(),
        entrypoint: list("Entrypoint").collect(),
        cmd: list("Cmd").collect(),
        working_dir: text(&config["WorkingDir"]),
        stop_signal: text(&config["StopSignal"]),
        labels: map("Labels")
            .filter_map(|(name, value)| Some((name, text(&value)?)))
            .collect(),
        volumes: map("Volumes").map(|(name, _)| name).collect(),
        exposed_ports: map("ExposedPorts").map(|(name, _)| name).collect(),
        architecture: text(&document["architecture"]).unwrap(),
        os: text(&document["os"]).unwrap(),
    };
    (described, document)
}

/// That the tree is the one that was made, whoever has unpacked it.
fn is_what_was_made(files: &Tree) {
    for gone in ["opt/dir/old", "opt/dir/older", "srv/sub", "var/dir/file"] {
        assert!(!files.contains_key(gone), "{gone}");
    }
    let digest = |text: &str| Digest::of(text.as_bytes()).to_string();
    for (path, text) in [
        ("usr/gone", "is back"),
        ("usr/which", "pulled"),
        ("opt/dir/young", "5"),
        ("var/dir", "now a file"),
    ] {
        assert_eq!(files[path].head, digest(text), "{path}");
    }
    assert_eq!(files["usr/linked"].same_as, files["usr/which"].same_as);
    assert!(files["var/file/now"].mode >> 12 == 0o4);
    assert_eq!(files["etc/passwd"].owner, (7, 8));
    assert_eq!(files["usr/link"].head, "../etc/passwd");
    let set_id = &files["usr/set-id"];
    assert_eq!((set_id.mode, set_id.owner), (0o104_750, (0, 8)));
    assert_eq!(files["etc/null"].mode >> 12, 0o2);
}

#[test]
fn what_buildah_makes_is_what_umoci_unpacks_and_skopeo_says() {
    let Some(buildah) = Buildah::new(&["skopeo", "umoci", "fsck.erofs"]) else {
        return;
    };
    buildah.make();
    for (format, compression) in [("oci", "gzip"), ("docker", "gzip"), ("oci", "zstd")] {
        // In the one before are the same layers, which would be taken however they are compressed.
        let registry = RealRegistry::start();
        let what = format!("{format}-{compression}");
        let name = format!("{}/made/by-buildah:{what}", registry.address);
        buildah.commit("app", format, &what);
        let to = format!("docker://{name}");
        let options = ["--tls-verify=false", "--compression-format", compression];
        buildah.trusting(
            &["push", "--quiet"],
            &[&options[..], &[&what, &to]].concat(),
        );
        let args = ["inspect", "--raw", "--tls-verify=false", &to];
        let manifest: Value = serde_json::from_str(&run("skopeo", &args)).unwrap();
        let is_of = |value: &Value, kind: &str| value["mediaType"].as_str().unwrap().contains(kind);
        let of_docker = is_of(&manifest, "vnd.docker.");
        assert_eq!(of_docker, format == "docker", "{manifest}");
        let layers = manifest["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 3);
        let compressed = layers.iter().all(|layer| is_of(layer, compression));
        assert!(compressed, "{manifest}");

        let (image, _store) = pull(&name, quick(), &NoProgress).unwrap();
        let (config, document) = configured(&name);
        assert_eq!(image.config, config, "{what}");
        assert_eq!(config.entrypoint, ["/entry", "--flag"]);
        assert_eq!(config.cmd, ["one", "two words"]);
        assert_eq!(config.env, ["PATH=/opt/bin", "GREETING=hello, world"]);
        assert_eq!(config.user.as_deref(), Some("app:8"));
        assert_eq!(config.working_dir.as_deref(), Some("/srv/made here"));
        assert_eq!(config.stop_signal.as_deref(), Some("SIGRTMIN+3"));
        assert_eq!(config.labels["a"], "1");
        assert_eq!(config.volumes, ["/data"]);
        assert_eq!(config.exposed_ports, ["53/udp"]);
        let history = document["history"].to_string();
        assert!(history.contains("configured"), "{history}");

        // The layers as they came, whatever compresses them: umoci knows gzip only.
        let made = Made {
            dir: tempfile::tempdir().unwrap(),
        };
        let oci = format!("oci:{}:x", made.at("oci"));
        let copy = ["copy", "--insecure-policy", "--src-tls-verify=false"];
        let as_gzip = ["--dest-compress-format", "gzip", "--format", "oci"];
        run("skopeo", &[&copy[..], &as_gzip, &[&to, &oci]].concat());
        is_what_was_made(&made.compare(&image.rootfs, 15));
    }
}

#[test]
fn what_buildah_pushes_with_a_login_through_tls_is_pulled_with_both() {
    let Some(buildah) = Buildah::new(&["openssl", "htpasswd"]) else {
        return;
    };
    buildah.make();
    buildah.commit("app", "docker", "app");
    // An index, as one is made for several platforms; the other is never fetched.
    buildah.run(&["manifest", "create"], &["index"]);
    let other = ["--arch", "s390x", "index", "localhost/second"];
    buildah.run(&["manifest", "add"], &other);
    let arch = Platform::host().architecture;
    let own = ["--arch", &arch, "index", "localhost/app"];
    buildah.run(&["manifest", "add"], &own);

    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let at = |name: &str| dir.path().join(name).display().to_string();
    fs::write(
        at("htpasswd"),
        run("htpasswd", &["-Bbn", "me", "pw"]).trim(),
    )
    .unwrap();
    let tls = format!(
        "  tls: {{certificate: {}, key: {}}}\n",
        at("localhost.cert"),
        at("localhost.key")
    );
    let auth = format!(
        "auth: {{htpasswd: {{realm: x, path: {}}}}}\n",
        at("htpasswd")
    );
    let registry = RealRegistry::with(dir, &tls, "", &auth);
    let host = format!("localhost:{}", registry.address.rsplit(':').next().unwrap());
    let certs = registry.dir.path().join("certs.d");
    fs::create_dir_all(certs.join(&host)).unwrap();
    let authority = certs.join(&host).join("ca.crt");
    fs::copy(registry.dir.path().join("ca.crt"), &authority).unwrap();

    let known = certs.join(&host).display().to_string();
    let login = ["--creds", "me:pw", "--cert-dir", &known];
    let to = |tag: &str| format!("docker://{host}/made/by-buildah:{tag}");
    let what = ["app", &to("app")];
    buildah.trusting(&["push", "--quiet"], &[&login[..], &what].concat());
    let what = ["--all", "index", &to("index")];
    buildah.trusting(&["manifest", "push"], &[&login[..], &what].concat());

    // As a mirror, for which TLS is asked for although the address is loopback.
    let pull = |tag: &str, credentials: &[(String, Credential)]| {
        let registries = Registries {
            credentials: credentials.iter().cloned().collect(),
            mirrors: [("registry.invalid".into(), vec![format!("https://{host}")])].into(),
            ..with_dirs(std::slice::from_ref(&certs))
        };
        let name = format!("registry.invalid/made/by-buildah:{tag}");
        pull(&name, registries, &NoProgress)
    };
    let credential = Credential::Password {
        username: "me".into(),
        password: "pw".into(),
    };
    for tag in ["app", "index"] {
        let (image, _store) = pull(tag, &[(host.clone(), credential.clone())]).unwrap();
        assert_eq!(read_erofs(&image.rootfs)["usr/which"].text(), "pulled");
        assert_eq!(image.config.entrypoint, ["/entry", "--flag"], "{tag}");
    }
    assert!(pull("app", &[]).is_err(), "without the login");
}
