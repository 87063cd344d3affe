//! Pulls from a registry, and from one that misbehaves.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::sync::{Arc, Mutex};

use bantam_image::{
    Error, ImageSource, Layer, NoProgress, Progress, PullPolicy, ResolveOptions, Stage, Store,
};
use serde_json::json;

use crate::common::image::{OCI_CONFIG, OCI_INDEX, OCI_MANIFEST};
use crate::common::registry::{NOBODY, Reply, Request, Server, quick, served, which};
use crate::common::{Layout, Tar, digest};

fn options() -> ResolveOptions {
    ResolveOptions {
        registries: quick(),
        ..ResolveOptions::default()
    }
}

#[test]
fn an_image_is_pulled_once_and_then_needs_no_registry() {
    let image = served();
    let server = Server::start(move |request, _| image.reply(request));
    let store_dir = tempfile::tempdir().unwrap();
    let store = Store::open(store_dir.path()).unwrap();
    let source = ImageSource::parse(&format!("{}/lib/app:1", server.address)).unwrap();
    let resolve = |pull| store.resolve(&source, &ResolveOptions { pull, ..options() }, &NoProgress);
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
    let server = Server {
        address: NOBODY.to_owned(),
        seen: Arc::default(),
    };
    let error = server.pull("x:1").unwrap_err().to_string();
    assert!(
        error.contains(NOBODY) && error.contains("refused"),
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
    let image_layer = served().layer;
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
            let result =
                Store::open(store.path())
                    .unwrap()
                    .resolve(&source, &options(), &NoProgress);
            assert!(result.is_err(), "{name} {key}");
            for dir in ["blobs/sha256", "images/v1", "tmp", "refs"] {
                let left = fs::read_dir(store.path().join(dir)).map_or(0, Iterator::count);
                // The beginning of a layer is for the next pull.
                let kept = usize::from(dir == "tmp" && name == "cut" && *key == image_layer);
                assert_eq!(left, kept, "{name} {key}: {dir}");
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
        .resolve(&source, &options(), &NoProgress)
        .unwrap_err();
    assert!(
        error.to_string().contains("https://registry.invalid:5000"),
        "{error}"
    );
    let mut options = options();
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
        .resolve(&source, &options(), &recorded)
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

#[test]
fn a_digest_in_the_reference_is_asked_for_and_never_the_tag() {
    let image = served();
    let manifest = image.manifest.clone();
    let mut moved = image.clone();
    // The tag means something else by now.
    let other = ("text/plain".to_owned(), b"{}".to_vec());
    moved.objects.insert("manifests/1".to_owned(), other);
    let server = Server::start(move |request, _| moved.reply(request));
    for name in [
        format!("lib/app:1@{manifest}"),
        format!("lib/app@{manifest}"),
    ] {
        let (image, _store) = server.pull(&name).unwrap();
        assert_eq!(image.digest, manifest);
    }
    let asked = server.seen("manifests");
    assert!(asked.iter().all(|r| r.path.ends_with(&manifest)));
    assert!(server.seen("").iter().all(|r| r.method == "GET"));
}

#[test]
fn sha512_names_everything_as_well() {
    use sha2::{Digest as _, Sha512};
    let sha512 = |bytes: &[u8]| {
        let hex = Sha512::digest(bytes)
            .iter()
            .fold(String::new(), |hex, b| format!("{hex}{b:02x}"));
        format!("sha512:{hex}")
    };
    let plain = Tar::new().file("which", "pulled").finish();
    let config = Layout::config(&[sha512(&plain)]).to_string().into_bytes();
    // A layer of a kind that may come from elsewhere is asked of the registry first.
    let manifest = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": sha512(&config), "size": config.len()},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.nondistributable.v1.tar",
            "urls": ["http://127.0.0.1:1/x"], "digest": sha512(&plain), "size": plain.len()}]})
    .to_string()
    .into_bytes();
    let digest = sha512(&manifest);
    let objects = [&config, &plain, &manifest].map(|bytes| (sha512(bytes), bytes.clone()));
    let flipped = Arc::new(Mutex::new(None));
    let flip = Arc::clone(&flipped);
    let server = Server::start(move |request, _| {
        let Some((name, bytes)) = objects
            .iter()
            .find(|(name, _)| request.path.ends_with(name))
        else {
            return Reply::status(404);
        };
        let mut bytes = bytes.clone();
        if flip.lock().unwrap().as_ref() == Some(name) {
            *bytes.last_mut().unwrap() ^= 1;
        }
        Reply::ok(OCI_MANIFEST, &bytes).header("Docker-Content-Digest", name.clone())
    });
    let name = format!("lib/app@{digest}");
    let (image, store) = server.pull(&name).unwrap();
    assert_eq!(
        (which(&image), &image.digest),
        ("pulled".to_owned(), &digest)
    );
    let store = Store::open(store.path()).unwrap();
    assert_eq!(store.stored(&digest).unwrap(), Some(image));
    for broken in [sha512(&config), sha512(&plain), digest] {
        *flipped.lock().unwrap() = Some(broken.clone());
        let result = server.pull(&name);
        assert!(
            matches!(result, Err(Error::DigestMismatch { .. })),
            "{result:?}"
        );
    }
}
