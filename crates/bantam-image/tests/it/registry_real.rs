//! Pulls from Debian's docker-registry, filled by skopeo.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use bantam_image::{Credential, ImageSource, NoProgress, Registries, ResolveOptions, Store};
use serde_json::json;
use tempfile::TempDir;

use crate::common::registry::{Messages, Reply, Server, pull, quick, which};
use crate::common::{Layout, Tar, have, read_erofs, run, skipped};
use crate::registry_host::pulled;

fn options() -> ResolveOptions {
    ResolveOptions {
        registries: quick(),
        ..ResolveOptions::default()
    }
}

/// Says so when one of these programs is missing.
pub(crate) fn have_all(programs: &[&str]) -> bool {
    let missing: Vec<_> = programs.iter().filter(|p| !have(p)).copied().collect();
    if !missing.is_empty() {
        skipped(&format!("not installed: {}", missing.join(", ")));
    }
    missing.is_empty()
}

/// docker-registry, until dropped.
pub(crate) struct RealRegistry {
    child: Child,
    pub(crate) address: String,
    pub(crate) dir: TempDir,
}

impl Drop for RealRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl RealRegistry {
    pub(crate) fn start() -> Self {
        Self::with(tempfile::tempdir().unwrap(), "", "", "")
    }

    /// With more lines for the configuration, below `http`, `storage` and at the end.
    pub(crate) fn with(dir: TempDir, http: &str, storage: &str, more: &str) -> Self {
        let data = dir.path().join("data");
        let config = format!(
            "version: 0.1\nlog: {{level: info, accesslog: {{disabled: true}}}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\n{storage}http:\n  addr: 127.0.0.1:0\n{http}{more}",
            data.display()
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
        let mut said = String::new();
        // The port is the system's choice, and known once the registry has it: one chosen here could be taken
        // by another test before the registry gets to it.
        let address = log.find_map(|line| {
            said = said.clone() + &line + "\n";
            Some(
                line.split_once("listening on ")?
                    .1
                    .split(['"', ','])
                    .next()?
                    .to_owned(),
            )
        });
        let address = address.unwrap_or_else(|| panic!("docker-registry does not start: {said}"));
        std::thread::spawn(move || log.for_each(drop));
        Self {
            child,
            address,
            dir,
        }
    }

    /// Puts a small image there.
    fn fill(&self, name: &str) {
        let mut layout = Layout::new();
        let layers = [Tar::new().file("which", "pulled").finish()];
        let manifest = layout.image(&layers);
        skopeo_copy(&layout, manifest, &format!("{}/{name}", self.address), &[]);
    }
}

fn skopeo_copy(layout: &Layout, mut manifest: serde_json::Value, to: &str, extra: &[&str]) {
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": "x"});
    let index = json!({"schemaVersion": 2, "manifests": [manifest]});
    fs::write(layout.path().join("index.json"), index.to_string()).unwrap();
    let from = format!("oci:{}:x", layout.path().display());
    let to = format!("docker://{to}");
    let mut args = vec!["copy", "--insecure-policy", "--dest-tls-verify=false"];
    args.extend(extra);
    args.extend([&*from, &*to]);
    run("skopeo", &args);
}

/// An authority's certificate, and what it certified for `localhost`, as PEM files in `dir`.
pub(crate) fn certificates(dir: &Path) {
    let at = |name: &str| dir.join(name).display().to_string();
    let key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
    ];
    let make = |args: &[&str]| run("openssl", args);
    let ca = [
        &["req", "-x509", "-days", "2", "-subj", "/CN=test authority"][..],
        &key,
        &["-keyout", &at("ca.key"), "-out", &at("ca.crt")],
    ];
    make(&ca.concat());
    for (name, san) in [
        ("localhost", "subjectAltName=DNS:localhost"),
        ("client", "extendedKeyUsage=clientAuth"),
    ] {
        let (subject, request) = (format!("/CN={name}"), at(&format!("{name}.csr")));
        let key_file = at(&format!("{name}.key"));
        let files = ["-keyout", &key_file, "-out", &request];
        make(&[&["req", "-subj", &subject][..], &key, &files].concat());
        let (extensions, out) = (at(&format!("{name}.ext")), at(&format!("{name}.cert")));
        fs::write(&extensions, san).unwrap();
        make(&[
            "x509",
            "-req",
            "-days",
            "2",
            "-in",
            &request,
            "-CA",
            &at("ca.crt"),
            "-CAkey",
            &at("ca.key"),
            "-CAcreateserial",
            "-extfile",
            &extensions,
            "-out",
            &out,
        ]);
    }
}

/// Pulls through TLS although the address is loopback: as the mirror of a registry that cannot be reached.
fn through_tls(host: &str, registries: Registries) -> Result<String, String> {
    let mut registries = registries;
    registries
        .mirrors
        .insert("registry.invalid".into(), vec![format!("https://{host}")]);
    let said = Messages::default();
    match pull("registry.invalid/lib/app:1", registries, &said) {
        Ok((image, _store)) => Ok(which(&image)),
        Err(_) => Err(said.text()),
    }
}

pub(crate) fn with_dirs(dirs: &[PathBuf]) -> Registries {
    Registries {
        certificate_dirs: Some(dirs.to_vec()),
        ..quick()
    }
}

#[test]
fn a_registry_with_an_authority_of_its_own_is_trusted_when_told() {
    if !have_all(&["docker-registry", "skopeo", "openssl"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let at = |name: &str| dir.path().join(name).display().to_string();
    let tls = format!(
        "  tls: {{certificate: {}, key: {}}}\n",
        at("localhost.cert"),
        at("localhost.key")
    );
    let authority = at("ca.crt");
    let registry = RealRegistry::with(dir, &tls, "", "");
    registry.fill("lib/app:1");
    let port = registry.address.rsplit(':').next().unwrap();
    let host = format!("localhost:{port}");

    // Nobody said that this authority is to be believed.
    let said = through_tls(&host, quick()).unwrap_err();
    assert!(
        said.contains("authority unknown here") && said.contains(&format!("certs.d/{host}")),
        "{said}"
    );
    // As docker and podman keep it.
    let certs = registry.dir.path().join("certs.d");
    for name in [&host, &registry.address] {
        fs::create_dir_all(certs.join(name)).unwrap();
        fs::copy(&authority, certs.join(name).join("ca.crt")).unwrap();
    }
    let trusting = with_dirs(&["/no/such/dir".into(), certs]);
    assert_eq!(
        through_tls(&host, trusting.clone()).as_deref(),
        Ok("pulled")
    );
    // It was certified under another name.
    let said = through_tls(&registry.address, trusting).unwrap_err();
    assert!(
        said.contains("not valid for") && said.contains("localhost"),
        "{said}"
    );

    // The same through the environment, for a registry that is no mirror.
    let home = tempfile::tempdir().unwrap();
    let (proxy, _) = crate::registry_host::proxy(registry.address.clone());
    let proxy = format!("http://{proxy}");
    let name = format!("bantam.localhost.invalid:{port}/lib/app:1");
    let env = [("HTTPS_PROXY", &*proxy), ("SSL_CERT_FILE", &*authority)];
    let said = pulled(&name, home.path(), &env);
    assert!(
        said.contains("not valid for"),
        "through the proxy, believed, and of another name: {said}"
    );
    let said = pulled(&name, home.path(), &env[..1]);
    assert!(said.contains("authority unknown"), "{said}");
}

#[test]
fn a_server_without_tls_is_recognised() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            let _ = client.read(&mut [0; 4096]);
        }
    });
    let said = through_tls(&address, quick()).unwrap_err();
    assert!(said.contains("does not speak TLS"), "{said}");
}

#[test]
fn a_client_certificate_is_shown_to_the_registry_that_wants_it() {
    if !have_all(&["docker-registry", "skopeo", "openssl"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let at = |name: &str| dir.path().join(name).display().to_string();
    let plain = RealRegistry::start();
    plain.fill("lib/app:1");
    let tls = format!(
        "  tls: {{certificate: {}, key: {}, clientcas: [{}]}}\n",
        at("localhost.cert"),
        at("localhost.key"),
        at("ca.crt"),
    );
    // Its content is the other's, which skopeo can fill without a certificate.
    let proxied = format!("proxy: {{remoteurl: \"http://{}\"}}\n", plain.address);
    let registry = RealRegistry::with(dir, &tls, "", &proxied);
    let host = format!("localhost:{}", registry.address.rsplit(':').next().unwrap());
    let certs = registry.dir.path().join("certs.d");
    let own = certs.join(&host);
    fs::create_dir_all(&own).unwrap();
    let copy = |name: &str, to: &str| {
        fs::copy(registry.dir.path().join(name), own.join(to)).unwrap();
    };
    copy("ca.crt", "ca.crt");
    let registries = with_dirs(std::slice::from_ref(&certs));
    let said = through_tls(&host, registries.clone()).unwrap_err();
    assert!(said.contains("ertificate"), "it wants one: {said}");

    copy("client.cert", "client.cert");
    let said = through_tls(&host, registries.clone()).unwrap_err();
    assert!(said.contains("client.key"), "the key is missing: {said}");
    copy("localhost.key", "client.key");
    let said = through_tls(&host, registries.clone()).unwrap_err();
    assert!(said.contains("not a certificate and its key"), "{said}");
    copy("client.key", "client.key");
    assert_eq!(through_tls(&host, registries).as_deref(), Ok("pulled"));
}

#[test]
fn a_registry_with_htpasswd_takes_a_login() {
    if !have_all(&["docker-registry", "skopeo", "htpasswd"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let users = dir.path().join("htpasswd");
    fs::write(&users, run("htpasswd", &["-Bbn", "me", "s:secret"]).trim()).unwrap();
    let auth = format!(
        "auth: {{htpasswd: {{realm: \"a, realm\", path: {}}}}}\n",
        users.display()
    );
    let registry = RealRegistry::with(dir, "", "", &auth);
    let mut layout = Layout::new();
    let manifest = layout.image(&[Tar::new().file("which", "pulled").finish()]);
    let to = format!("{}/lib/app:1", registry.address);
    skopeo_copy(&layout, manifest, &to, &["--dest-creds", "me:s:secret"]);

    let error = pull(&to, quick(), &NoProgress).unwrap_err().to_string();
    assert!(
        error.contains("401") && error.contains("UNAUTHORIZED"),
        "{error}"
    );
    for (password, good) in [("s:secret", true), ("wrong", false)] {
        let mut registries = quick();
        registries.credentials.insert(
            registry.address.clone(),
            Credential::Password {
                username: "me".into(),
                password: password.into(),
            },
        );
        let result = pull(&to, registries, &NoProgress);
        assert_eq!(result.is_ok(), good, "{password}");
    }
    // As skopeo stores a login.
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("auth.json").display().to_string();
    run(
        "skopeo",
        &[
            "login",
            "--tls-verify=false",
            "--authfile",
            &file,
            "-u",
            "me",
            "-p",
            "s:secret",
            &registry.address,
        ],
    );
    let said = pulled(&to, home.path(), &[("REGISTRY_AUTH_FILE", &file)]);
    assert!(said.contains("got pulled"), "{said}");
}

#[test]
fn a_pull_through_mirror_serves_what_the_registry_has() {
    if !have_all(&["docker-registry", "skopeo"]) {
        return;
    }
    let origin = RealRegistry::start();
    origin.fill("lib/app:1");
    let proxied = format!("proxy: {{remoteurl: \"http://{}\"}}\n", origin.address);
    let mirror = RealRegistry::with(tempfile::tempdir().unwrap(), "", "", &proxied);
    let mut registries = quick();
    registries
        .mirrors
        .insert("registry.invalid".into(), vec![mirror.address.clone()]);
    let (image, _store) = pull("registry.invalid/lib/app:1", registries, &NoProgress).unwrap();
    assert_eq!(which(&image), "pulled");
}

#[test]
fn a_blob_behind_a_redirect_is_fetched_without_credentials() {
    if !have_all(&["docker-registry", "skopeo", "htpasswd"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let users = dir.path().join("htpasswd");
    fs::write(&users, run("htpasswd", &["-Bbn", "me", "pw"]).trim()).unwrap();
    let auth = format!(
        "auth: {{htpasswd: {{realm: x, path: {}}}}}\n",
        users.display()
    );
    // Serves the registry's own files, by the paths that the redirect names.
    let data = dir.path().join("data");
    let cdn = Server::start(move |request, _| {
        let path = request
            .path
            .split('?')
            .next()
            .unwrap()
            .trim_start_matches('/');
        fs::read(data.join(path)).map_or(Reply::status(404), |bytes| Reply::ok("", &bytes))
    });
    let redirect = format!(
        "middleware: {{storage: [{{name: redirect, options: {{baseurl: \"http://{}/\"}}}}]}}\n",
        cdn.address
    );
    let registry = RealRegistry::with(dir, "", "", &(auth + &redirect));
    let mut layout = Layout::new();
    let manifest = layout.image(&[Tar::new().file("which", "pulled").finish()]);
    let to = format!("{}/lib/app:1", registry.address);
    skopeo_copy(&layout, manifest, &to, &["--dest-creds", "me:pw"]);
    let before = cdn.seen("").len();
    let mut registries = quick();
    registries.credentials.insert(
        registry.address.clone(),
        Credential::Password {
            username: "me".into(),
            password: "pw".into(),
        },
    );
    let (image, _store) = pull(&to, registries, &NoProgress).unwrap();
    assert_eq!(which(&image), "pulled");
    let asked = cdn.seen("").split_off(before);
    assert_eq!(asked.len(), 2, "configuration and layer");
    assert!(asked.iter().all(|r| r.header("authorization").is_none()));
}

#[test]
fn one_wrong_byte_of_any_object_in_the_registry_is_found() {
    if !have_all(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = RealRegistry::start();
    registry.fill("lib/app:1");
    let blobs = registry
        .dir
        .path()
        .join("data/docker/registry/v2/blobs/sha256");
    let mut checked = 0;
    for prefix in fs::read_dir(&blobs).unwrap() {
        for blob in fs::read_dir(prefix.unwrap().path()).unwrap() {
            let path = blob.unwrap().path().join("data");
            let good = fs::read(&path).unwrap();
            let mut bad = good.clone();
            // Of the same size, and still JSON if it was.
            let at = bad.len() / 2;
            bad[at] = if bad[at] == b'a' { b'b' } else { b'a' };
            fs::write(&path, &bad).unwrap();
            let name = format!("{}/lib/app:1", registry.address);
            assert!(
                pull(&name, quick(), &NoProgress).is_err(),
                "{}",
                path.display()
            );
            fs::write(&path, good).unwrap();
            assert!(pull(&name, quick(), &NoProgress).is_ok());
            checked += 1;
        }
    }
    assert_eq!(checked, 3, "manifest, configuration, layer");
}

#[test]
fn images_in_all_manifest_formats_are_pulled_from_docker_registry() {
    if !have_all(&["docker-registry", "skopeo"]) {
        return;
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
    let manifest = layout.image(&layers);
    for (tag, format) in [("oci", "oci"), ("s2", "v2s2")] {
        let to = format!("{}/debian/py:{tag}", registry.address);
        skopeo_copy(&layout, manifest.clone(), &to, &["--format", format]);
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
