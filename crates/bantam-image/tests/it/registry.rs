//! Pulls from a real registry, and from one that misbehaves.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use bantam_image::{
    Error, Image, ImageSource, Layer, NoProgress, Progress, PullPolicy, ResolveOptions, Stage,
    Store,
};
use serde_json::json;
use tempfile::TempDir;

use crate::common::image::{OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST};
use crate::common::{Layout, Tar, digest, gzip, have, read_erofs, run, skipped};

/// A request as the server saw it. Header names are in lower case.
#[derive(Clone, Debug, Default)]
struct Request {
    path: String,
    headers: HashMap<String, String>,
}

#[derive(Clone, Default)]
struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Instead of the body's length.
    content_length: Option<usize>,
}

impl Reply {
    fn ok(content_type: &str, body: &[u8]) -> Self {
        Self {
            status: 200,
            body: body.to_vec(),
            ..Self::default()
        }
        .header("Content-Type", content_type)
    }
    fn status(status: u16) -> Self {
        Self {
            status,
            ..Self::default()
        }
    }
    fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }
    fn body(mut self, body: &str) -> Self {
        self.body = body.as_bytes().to_vec();
        self
    }
}

/// An HTTP server for as long as the test runs.
struct Server {
    address: String,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    fn start(handler: impl Fn(&Request, &str) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let handler = Arc::new(handler);
        let (log, own) = (Arc::clone(&seen), address.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (handler, log, own) = (Arc::clone(&handler), Arc::clone(&log), own.clone());
                std::thread::spawn(move || serve(stream, &*handler, &log, &own));
            }
        });
        Self { address, seen }
    }

    fn seen(&self, part: &str) -> Vec<Request> {
        self.seen
            .lock()
            .unwrap()
            .iter()
            .filter(|r| r.path.contains(part))
            .cloned()
            .collect()
    }

    fn pull(&self, name: &str) -> Result<(Image, TempDir), Error> {
        let store = tempfile::tempdir().unwrap();
        let source = ImageSource::parse(&format!("{}/{name}", self.address)).unwrap();
        let image =
            Store::open(store.path())?.resolve(&source, &ResolveOptions::default(), &NoProgress)?;
        Ok((image, store))
    }
}

fn serve(
    stream: TcpStream,
    handler: &dyn Fn(&Request, &str) -> Reply,
    log: &Mutex<Vec<Request>>,
    own: &str,
) {
    let mut lines = BufReader::new(stream.try_clone().unwrap())
        .lines()
        .map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let mut request = Request {
        path: first.split(' ').nth(1).unwrap_or("").to_owned(),
        ..Request::default()
    };
    for line in lines.take_while(|line| !line.is_empty()) {
        if let Some((name, value)) = line.split_once(':') {
            request
                .headers
                .insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    log.lock().unwrap().push(request.clone());
    let reply = handler(&request, own);
    let length = reply.content_length.unwrap_or(reply.body.len());
    let mut head = format!(
        "HTTP/1.1 {} X\r\nContent-Length: {length}\r\nConnection: close\r\n",
        reply.status
    );
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let mut stream = stream;
    let _ = stream.write_all(format!("{head}\r\n").as_bytes());
    let _ = stream.write_all(&reply.body);
}

/// A one-layer image: by path below the repository, its content type and bytes.
#[derive(Clone)]
struct Served {
    objects: HashMap<String, (String, Vec<u8>)>,
    layer: String,
    manifest: String,
}

fn served() -> Served {
    let plain = Tar::new()
        .file("which", "pulled")
        .file("big", vec![1; 400_000])
        .finish();
    let blob = gzip(&plain);
    let config = Layout::config(&[digest(&plain)]).to_string();
    let manifest = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": digest(config.as_bytes()), "size": config.len()},
        "layers": [{"mediaType": OCI_LAYER, "digest": digest(&blob), "size": blob.len()}]})
    .to_string();
    let mut objects = HashMap::new();
    for tag in ["1".to_owned(), digest(manifest.as_bytes())] {
        objects.insert(
            format!("manifests/{tag}"),
            (OCI_MANIFEST.to_owned(), manifest.clone().into_bytes()),
        );
    }
    let octets = "application/octet-stream".to_owned();
    let layer = format!("blobs/{}", digest(&blob));
    objects.insert(layer.clone(), (octets.clone(), blob));
    objects.insert(
        format!("blobs/{}", digest(config.as_bytes())),
        (octets, config.into_bytes()),
    );
    Served {
        objects,
        layer,
        manifest: digest(manifest.as_bytes()),
    }
}

impl Served {
    fn reply(&self, request: &Request) -> Reply {
        match request
            .path
            .strip_prefix("/v2/lib/app/")
            .and_then(|path| self.objects.get(path))
        {
            Some((content_type, bytes)) => Reply::ok(content_type, bytes),
            None => Reply::status(404).body(
                r#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"no\u001b[31m such thing"}]}"#,
            ),
        }
    }
}

fn which(image: &Image) -> String {
    read_erofs(&image.rootfs)["which"].text()
}

#[test]
fn an_image_is_pulled_once_and_then_needs_no_registry() {
    let image = served();
    let server = Server::start(move |request, _| image.reply(request));
    let store_dir = tempfile::tempdir().unwrap();
    let store = Store::open(store_dir.path()).unwrap();
    let source = ImageSource::parse(&format!("{}/lib/app:1", server.address)).unwrap();
    let resolve = |pull| {
        store.resolve(
            &source,
            &ResolveOptions {
                pull,
                ..ResolveOptions::default()
            },
            &NoProgress,
        )
    };
    let first = resolve(PullPolicy::Missing).unwrap();
    assert_eq!(which(&first), "pulled");
    let requests = server.seen("").len();
    for kind in [
        "application/vnd.oci.image.index",
        "application/vnd.oci.image.manifest",
        "manifest.list.v2",
        "manifest.v2",
    ] {
        assert!(
            server.seen("manifests")[0].headers["accept"].contains(kind),
            "{kind}"
        );
    }
    assert!(
        server
            .seen("")
            .iter()
            .all(|r| !r.headers.contains_key("accept-encoding"))
    );
    for pull in [PullPolicy::Missing, PullPolicy::Never] {
        assert_eq!(resolve(pull).unwrap(), first);
    }
    assert_eq!(server.seen("").len(), requests, "the store knows it");
    assert_eq!(resolve(PullPolicy::Always).unwrap(), first);
    assert!(server.seen("").len() > requests);
    assert_eq!(
        server.seen("blobs").len(),
        3,
        "configuration twice, layer once"
    );
}

#[test]
fn a_challenge_is_answered_with_an_anonymous_token() {
    let image = served();
    let server = Server::start(move |request, own| {
        if request.path.starts_with("/token") {
            return Reply::ok(
                "application/json",
                br#"{"access_token":"sesame","expires_in":60}"#,
            );
        }
        match request.headers.get("authorization").map(String::as_str) {
            Some("Bearer sesame") => image.reply(request),
            _ => Reply::status(401).header("WWW-Authenticate", "Negotiate").header(
                "WWW-Authenticate",
                format!(r#"Bearer service="a, b",scope="repository:lib/app:pull", realm="http://{own}/token""#),
            ),
        }
    });
    assert_eq!(which(&server.pull("lib/app:1").unwrap().0), "pulled");
    let token = &server.seen("/token");
    assert_eq!(token.len(), 1, "one token serves all requests");
    assert!(
        token[0]
            .path
            .contains("scope=repository%3Alib%2Fapp%3Apull")
            || token[0].path.contains("scope=repository:lib/app:pull"),
        "{}",
        token[0].path
    );
    assert!(token[0].path.contains("service=a"), "{}", token[0].path);
}

#[test]
fn a_redirect_to_another_host_carries_no_token() {
    let image = served();
    let blobs = image.clone();
    let cdn = Server::start(move |request, _| {
        let path = request.path.trim_start_matches("/cdn/").replace("%3A", ":");
        Reply::ok("application/octet-stream", &blobs.objects[&path].1)
    });
    let cdn_address = cdn.address.clone();
    let server = Server::start(move |request, own| {
        if request.path.starts_with("/token") {
            return Reply::ok("application/json", br#"{"token":"sesame"}"#);
        }
        if !request.headers.contains_key("authorization") {
            return Reply::status(401).header(
                "WWW-Authenticate",
                format!(r#"Bearer realm="http://{own}/token""#),
            );
        }
        match request.path.strip_prefix("/v2/lib/app/blobs/") {
            Some(blob) => Reply::status(307)
                .header("Location", format!("http://{cdn_address}/cdn/blobs/{blob}")),
            None => image.reply(request),
        }
    });
    assert_eq!(which(&server.pull("lib/app:1").unwrap().0), "pulled");
    assert_eq!(cdn.seen("/cdn").len(), 2);
    assert!(
        cdn.seen("")
            .iter()
            .all(|request| !request.headers.contains_key("authorization"))
    );
}

#[test]
fn a_challenge_from_where_a_redirect_led_is_not_answered() {
    let image = served();
    let cdn = Server::start(|request, own| match request.path.as_str() {
        "/token" => Reply::ok("application/json", br#"{"token":"x"}"#),
        _ => Reply::status(401).header(
            "WWW-Authenticate",
            format!(r#"Bearer realm="http://{own}/token""#),
        ),
    });
    let cdn_address = cdn.address.clone();
    let server = Server::start(move |request, _| match request.path.contains("blobs") {
        true => Reply::status(307).header("Location", format!("http://{cdn_address}/blob")),
        false => image.reply(request),
    });
    assert!(matches!(
        server.pull("lib/app:1"),
        Err(Error::Registry {
            status: Some(401),
            ..
        })
    ));
    assert!(cdn.seen("/token").is_empty());
}

#[test]
fn relative_redirects_are_followed_and_endless_ones_are_not() {
    let image = served();
    let server = Server::start(move |request, _| {
        if let Some(rest) = request.path.strip_prefix("/v2/lib/app/moved/") {
            let request = Request {
                path: format!("/v2/lib/app/blobs/{rest}"),
                ..request.clone()
            };
            return image.reply(&request);
        }
        match request.path.strip_prefix("/v2/lib/app/blobs/") {
            Some(blob) => {
                Reply::status(302).header("Location", format!("/v2/lib/app/moved/{blob}"))
            }
            None if request.path.contains("loop") => {
                Reply::status(307).header("Location", request.path.clone())
            }
            None => image.reply(request),
        }
    });
    assert_eq!(which(&server.pull("lib/app:1").unwrap().0), "pulled");
    let error = server.pull("lib/loop:1").unwrap_err().to_string();
    assert!(error.contains("redirects"), "{error}");
}

#[test]
fn a_refusal_is_told_with_status_and_the_registrys_words() {
    let image = served();
    let server = Server::start(move |request, _| image.reply(request));
    let error = server.pull("lib/missing:1").unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(
            error,
            Error::Registry {
                status: Some(404),
                ..
            }
        ),
        "{error:?}"
    );
    for part in [
        "lib/missing:1",
        &server.address,
        "404",
        "MANIFEST_UNKNOWN no",
        "such thing",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(
        !text.contains('\x1b'),
        "control characters reach the terminal"
    );
    let basic =
        Server::start(|_, _| Reply::status(401).header("WWW-Authenticate", "Basic realm=\"x\""));
    let error = basic.pull("lib/app:1").unwrap_err().to_string();
    assert!(error.contains("credentials"), "{error}");
}

#[test]
fn nobody_listening_is_a_readable_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let server = Server {
        address: address.to_string(),
        seen: Arc::default(),
    };
    let error = server.pull("x:1").unwrap_err().to_string();
    assert!(
        error.contains(&address.to_string()) && error.contains("refused"),
        "{error}"
    );
}

#[test]
fn altered_cut_and_overlong_bodies_leave_nothing_in_the_store() {
    type Fault = fn(&mut Reply);
    let faults: [(&str, Fault); 3] = [
        ("altered", |reply| reply.body[40] ^= 1),
        ("cut", |reply| {
            reply.content_length = Some(reply.body.len());
            reply.body.truncate(reply.body.len() / 2);
        }),
        ("overlong", |reply| reply.body.extend([0; 10])),
    ];
    let keys: Vec<String> = served().objects.into_keys().collect();
    for (name, fault) in faults {
        for key in &keys {
            // By tag alone nothing says what the manifest should be.
            let by_digest = format!("lib/app@{}", served().manifest);
            let (image, key2) = (served(), key.clone());
            let server = Server::start(move |request, _| {
                let mut reply = image.reply(request);
                if request.path.ends_with(&key2) {
                    fault(&mut reply);
                }
                reply
            });
            if key == "manifests/1" {
                continue;
            }
            let store = tempfile::tempdir().unwrap();
            let source = ImageSource::parse(&format!("{}/{by_digest}", server.address)).unwrap();
            let result = Store::open(store.path()).unwrap().resolve(
                &source,
                &ResolveOptions::default(),
                &NoProgress,
            );
            assert!(result.is_err(), "{name} {key}");
            for dir in ["blobs/sha256", "images/v1", "tmp", "refs"] {
                let left = fs::read_dir(store.path().join(dir)).map_or(0, Iterator::count);
                assert_eq!(left, 0, "{name} {key}: {dir}");
            }
        }
    }
}

#[test]
fn a_wrong_digest_header_is_an_error_and_a_missing_one_is_not() {
    let wrong = digest(b"something else");
    for (header, good) in [
        (None, true),
        (Some(served().manifest), true),
        (Some(wrong), false),
        (Some("junk".into()), false),
    ] {
        let image = served();
        let claimed = header.clone();
        let server = Server::start(move |request, _| {
            let reply = image.reply(request);
            match &claimed {
                Some(value) if request.path.contains("manifests") => {
                    reply.header("Docker-Content-Digest", value.clone())
                }
                _ => reply,
            }
        });
        assert_eq!(server.pull("lib/app:1").is_ok(), good, "{header:?}");
    }
}

#[test]
fn a_listed_manifest_that_is_missing_is_named() {
    let child = digest(b"gone");
    let index = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [
        {"mediaType": OCI_MANIFEST, "digest": child, "size": 4,
         "platform": {"os": "linux", "architecture": bantam_image::Platform::host().architecture}}]})
    .to_string();
    let server = Server::start(move |request, _| match request.path.as_str() {
        "/v2/lib/app/manifests/1" => {
            Reply::ok(&format!("{OCI_INDEX}; charset=utf-8"), index.as_bytes())
        }
        _ => Reply::status(404),
    });
    let error = server.pull("lib/app:1").unwrap_err().to_string();
    assert!(error.contains(&child) && error.contains("404"), "{error}");
}

#[test]
fn huge_documents_are_cut_off() {
    let server = Server::start(|_, _| Reply::ok(OCI_MANIFEST, &vec![b' '; 5 << 20]));
    assert!(matches!(server.pull("lib/app:1"), Err(Error::Limit { .. })));
}

#[test]
fn other_hosts_are_never_spoken_to_in_the_clear_unasked() {
    let image = served();
    let server = Server::start(move |request, _| image.reply(request));
    // A name of this machine that is not a loopback address is not reachable in a test; naming the registry is.
    let store = tempfile::tempdir().unwrap();
    let source = ImageSource::parse("registry.invalid:5000/lib/app:1").unwrap();
    let error = Store::open(store.path())
        .unwrap()
        .resolve(&source, &ResolveOptions::default(), &NoProgress)
        .unwrap_err();
    assert!(
        error.to_string().contains("https://registry.invalid:5000"),
        "{error}"
    );
    let mut options = ResolveOptions::default();
    options
        .registries
        .plain_http
        .push("registry.invalid:5000".into());
    let error = Store::open(store.path())
        .unwrap()
        .resolve(&source, &options, &NoProgress)
        .unwrap_err();
    assert!(
        error.to_string().contains("http://registry.invalid:5000"),
        "{error}"
    );
    assert!(server.seen("").is_empty());
}

#[test]
fn a_blob_labelled_with_a_content_encoding_is_stored_as_it_is() {
    let image = served();
    let server = Server::start(move |request, _| {
        let reply = image.reply(request);
        match request.path.contains("blobs") && reply.body.starts_with(&[0x1f, 0x8b]) {
            true => reply.header("Content-Encoding", "gzip"),
            false => reply,
        }
    });
    assert_eq!(which(&server.pull("lib/app:1").unwrap().0), "pulled");
}

#[derive(Default)]
struct Recorded(Mutex<HashMap<String, u64>>);

impl Recorded {
    fn add(&self, what: &str, stage: Stage, bytes: u64) {
        *self
            .0
            .lock()
            .unwrap()
            .entry(format!("{what} {stage:?}"))
            .or_default() += bytes;
    }
}

impl Progress for Recorded {
    fn layer_started(&self, stage: Stage, layer: &Layer) {
        self.add("announced", stage, layer.size);
    }
    fn layer_advanced(&self, stage: Stage, _: &Layer, bytes: u64) {
        self.add("done", stage, bytes);
    }
    fn layer_finished(&self, stage: Stage, _: &Layer) {
        self.add("finished", stage, 1);
    }
}

#[test]
fn progress_adds_up() {
    let image = served();
    let size = image.objects[&image.layer].1.len() as u64;
    let server = Server::start(move |request, _| image.reply(request));
    let store = tempfile::tempdir().unwrap();
    let source = ImageSource::parse(&format!("{}/lib/app:1", server.address)).unwrap();
    let recorded = Recorded::default();
    Store::open(store.path())
        .unwrap()
        .resolve(&source, &ResolveOptions::default(), &recorded)
        .unwrap();
    let recorded = recorded.0.into_inner().unwrap();
    for stage in ["Download", "Apply"] {
        assert_eq!(recorded[&format!("announced {stage}")], size);
        assert_eq!(recorded[&format!("done {stage}")], size);
        assert_eq!(recorded[&format!("finished {stage}")], 1);
    }
}

#[test]
fn a_layer_listed_twice_is_fetched_once() {
    let mut image = served();
    let (kind, manifest) = image.objects["manifests/1"].clone();
    let mut manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let layer = manifest["layers"][0].clone();
    manifest["layers"] = json!([layer, layer]);
    let (_, blob) = &image.objects[&image.layer];
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&blob[..])
        .read_to_end(&mut plain)
        .unwrap();
    let config = Layout::config(&[digest(&plain), digest(&plain)]).to_string();
    manifest["config"]["digest"] = json!(digest(config.as_bytes()));
    manifest["config"]["size"] = json!(config.len());
    image.objects.insert(
        format!("blobs/{}", digest(config.as_bytes())),
        (String::new(), config.into_bytes()),
    );
    image.objects.insert(
        "manifests/1".into(),
        (kind, manifest.to_string().into_bytes()),
    );
    let layer = image.layer.clone();
    let server = Server::start(move |request, _| image.reply(request));
    assert_eq!(which(&server.pull("lib/app:1").unwrap().0), "pulled");
    assert_eq!(server.seen(&layer).len(), 1);
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
        let image = store
            .resolve(&source, &ResolveOptions::default(), &NoProgress)
            .unwrap();
        let files = read_erofs(&image.rootfs);
        assert_eq!(files["which"].text(), "5");
        assert!((0..6_u8).all(|i| files[&format!("f{i}")].data == vec![i; 50_000]));
        let by_digest = format!("{}/debian/py@{}", registry.address, image.digest);
        let source = ImageSource::parse(&by_digest).unwrap();
        assert_eq!(
            store
                .resolve(&source, &ResolveOptions::default(), &NoProgress)
                .unwrap(),
            image
        );
        digests.push(image.digest);
    }
    assert_ne!(digests[0], digests[1]);
    let missing = ImageSource::parse(&format!("{}/debian/py:nope", registry.address)).unwrap();
    let error = store
        .resolve(&missing, &ResolveOptions::default(), &NoProgress)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("404") && error.to_lowercase().contains("unknown"),
        "{error}"
    );
}
