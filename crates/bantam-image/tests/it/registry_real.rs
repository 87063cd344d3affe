//! Pulls from Debian's docker-registry, filled by skopeo.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use bantam_image::{ImageSource, NoProgress, ResolveOptions, Store};
use serde_json::json;
use tempfile::TempDir;

use crate::common::registry::quick;
use crate::common::{Layout, Tar, have, read_erofs, run, skipped};

fn options() -> ResolveOptions {
    ResolveOptions {
        registries: quick(),
        ..ResolveOptions::default()
    }
}

/// Debian's docker-registry, until dropped.
struct RealRegistry {
    child: Child,
    address: String,
    _dir: TempDir,
}

impl Drop for RealRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl RealRegistry {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // The port is free now; if it is taken in between, the registry says so and the test fails.
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let address = format!("127.0.0.1:{port}");
        let config = format!(
            "version: 0.1\nlog: {{level: info, accesslog: {{disabled: true}}}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\nhttp:\n  addr: {address}\n",
            dir.path().join("data").display()
        );
        let file = dir.path().join("config.yml");
        fs::write(&file, config).unwrap();
        let mut child = Command::new("docker-registry")
            .arg("serve")
            .arg(&file)
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap())
            .lines()
            .map_while(Result::ok);
        assert!(
            log.any(|line| line.contains("listening on")),
            "docker-registry does not start"
        );
        std::thread::spawn(move || log.for_each(drop));
        Self {
            child,
            address,
            _dir: dir,
        }
    }
}

#[test]
fn images_in_all_manifest_formats_are_pulled_from_docker_registry() {
    if !have("docker-registry") || !have("skopeo") {
        return skipped("docker-registry or skopeo is not installed");
    }
    let registry = RealRegistry::start();
    let mut layout = Layout::new();
    let layers: Vec<Vec<u8>> = (0..6)
        .map(|i| {
            Tar::new()
                .file(format!("f{i}"), vec![i; 50_000])
                .file("which", i.to_string())
                .finish()
        })
        .collect();
    let mut manifest = layout.image(&layers);
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": "x"});
    fs::remove_file(layout.path().join("index.json")).unwrap();
    let index = json!({"schemaVersion": 2, "manifests": [manifest]});
    fs::write(layout.path().join("index.json"), index.to_string()).unwrap();
    let from = format!("oci:{}:x", layout.path().display());
    for (tag, extra) in [("oci", &["--format", "oci"]), ("s2", &["--format", "v2s2"])] {
        let to = format!("docker://{}/debian/py:{tag}", registry.address);
        let mut args = vec!["copy", "--insecure-policy", "--dest-tls-verify=false"];
        args.extend(extra);
        args.extend([&*from, &*to]);
        run("skopeo", &args);
    }
    let store_dir = tempfile::tempdir().unwrap();
    let store = Store::open(store_dir.path()).unwrap();
    let mut digests = Vec::new();
    for tag in ["oci", "s2"] {
        let source = ImageSource::parse(&format!("{}/debian/py:{tag}", registry.address)).unwrap();
        let image = store.resolve(&source, &options(), &NoProgress).unwrap();
        let files = read_erofs(&image.rootfs);
        assert_eq!(files["which"].text(), "5");
        assert!((0..6_u8).all(|i| files[&format!("f{i}")].data == vec![i; 50_000]));
        let by_digest = format!("{}/debian/py@{}", registry.address, image.digest);
        let source = ImageSource::parse(&by_digest).unwrap();
        assert_eq!(
            store.resolve(&source, &options(), &NoProgress).unwrap(),
            image
        );
        digests.push(image.digest);
    }
    assert_ne!(digests[0], digests[1]);
    let missing = ImageSource::parse(&format!("{}/debian/py:nope", registry.address)).unwrap();
    let error = store
        .resolve(&missing, &options(), &NoProgress)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("404") && error.to_lowercase().contains("unknown"),
        "{error}"
    );
}
