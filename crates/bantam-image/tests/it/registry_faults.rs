//! What goes wrong on the way, and how it is mended.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use bantam_image::{Error, NoProgress, Registries};
use serde_json::json;

use crate::common::image::{OCI_LAYER, OCI_MANIFEST};
use crate::common::registry::{
    Messages, NOBODY, Reply, Request, Server, pull, quick, served, which,
};
use crate::common::{Layout, Tar, digest};

fn status(error: &Error) -> Option<u16> {
    match error {
        Error::Registry { status, .. } => *status,
        _ => None,
    }
}

fn pull_into(
    store: &std::path::Path,
    server: &Server,
    name: &str,
    registries: Registries,
) -> Result<bantam_image::Image, Error> {
    let options = bantam_image::ResolveOptions {
        registries,
        ..Default::default()
    };
    let source = bantam_image::ImageSource::parse(&format!("{}/{name}", server.address))?;
    bantam_image::Store::open(store)?.resolve(&source, &options, &NoProgress)
}

fn tried(retries: u32) -> Registries {
    let mut registries = quick();
    registries.timeouts.retries = retries;
    registries
}

/// A server whose answer number `nth` (from 0) to a path with `part` in it is `fault`'s.
fn faulty(
    part: &'static str,
    nth: std::ops::Range<usize>,
    fault: impl Fn(&Request, Reply) -> Reply + Send + Sync + 'static,
) -> Server {
    let image = served();
    let count = AtomicUsize::new(0);
    Server::start(move |request, _| {
        let reply = image.reply(request);
        if request.path.contains(part) && nth.contains(&count.fetch_add(1, Ordering::SeqCst)) {
            return fault(request, reply);
        }
        reply
    })
}

#[test]
fn what_may_pass_is_tried_again() {
    for code in [408, 429, 500, 502, 503, 504] {
        let server = faulty("manifests", 0..2, move |_, _| Reply::status(code));
        let said = Messages::default();
        let result = server.pull_with("lib/app:1", quick(), &said);
        assert_eq!(which(&result.unwrap().0), "pulled");
        assert_eq!(server.seen("manifests").len(), 3, "{code}");
        let text = said.text();
        assert!(
            text.contains(&code.to_string()) && text.contains("trying again"),
            "{text}"
        );
    }
}

#[test]
fn what_will_not_pass_is_asked_once() {
    for code in [400, 403, 404, 405, 418, 501] {
        let server = faulty("", 0..99, move |_, _| Reply::status(code));
        let error = server.pull("lib/app:1").unwrap_err();
        assert_eq!(status(&error), Some(code));
        assert_eq!(server.seen("").len(), 1, "{code}");
    }
    let server = faulty("", 0..99, |_, _| {
        Reply::status(503).body(r#"{"errors":[{"code":"BUSY","message":"later"}]}"#)
    });
    let error = server
        .pull_with("lib/app:1", tried(2), &NoProgress)
        .unwrap_err();
    assert_eq!(server.seen("").len(), 3, "and not without end");
    assert!(
        error
            .to_string()
            .contains("503 Service Unavailable: BUSY later"),
        "{error}"
    );
}

#[test]
fn retry_after_is_waited_for_up_to_a_limit() {
    let server = faulty("manifests", 0..1, |_, _| {
        Reply::status(429).header("Retry-After", "1")
    });
    let said = Messages::default();
    let start = Instant::now();
    server.pull_with("lib/app:1", quick(), &said).unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1), "{}", said.text());
    assert!(
        said.text().contains("429; trying again in 1.0 s"),
        "{}",
        said.text()
    );

    // A date, in far too long a time.
    for long in ["3600", "Fri, 31 Dec 2999 23:59:59 GMT"] {
        let server = faulty("manifests", 0..9, move |_, _| {
            Reply::status(429).header("Retry-After", long)
        });
        let error = server.pull("lib/app:1").unwrap_err();
        assert_eq!(status(&error), Some(429));
        assert!(error.to_string().contains("left alone"), "{error}");
        assert_eq!(server.seen("").len(), 1);
    }
    // A date that has passed, and nonsense, are no reason to wait.
    for short in ["Sun, 06 Nov 1994 08:49:37 GMT", "soon"] {
        let server = faulty("manifests", 0..1, move |_, _| {
            Reply::status(503).header("Retry-After", short)
        });
        server.pull("lib/app:1").unwrap();
    }
}

#[test]
fn a_body_that_breaks_off_is_taken_up_where_it_broke() {
    let layer = served().layer;
    let size = served().objects[&layer].1.len();
    // The registry sends 100 bytes a time.
    let image = served();
    let key = layer.clone();
    let server = Server::start(move |request, _| {
        let reply = image.reply(request);
        if !request.path.ends_with(&key) {
            return reply;
        }
        let mut reply = reply.header("ETag", "\"tag\"").ranged(request);
        if reply.body.len() > 100 {
            reply = reply.cut(100);
        }
        reply
    });
    let said = Messages::default();
    let result = server.pull_with("lib/app:1", tried(0), &said);
    let error = result.unwrap_err().to_string();
    assert!(error.contains("100 of"), "{error}");

    let before = server.seen(&layer).len();
    let result = server.pull_with("lib/app:1", tried(1), &said);
    assert_eq!(which(&result.unwrap().0), "pulled");
    let asked = server.seen(&layer).split_off(before);
    assert_eq!(
        asked.len(),
        size.div_ceil(100),
        "progress counts as success"
    );
    assert!(asked[0].header("range").is_none());
    for (n, request) in asked.iter().enumerate().skip(1) {
        let want = format!("bytes={}-", n * 100);
        assert_eq!(request.header("range"), Some(&*want));
        assert_eq!(request.header("if-range"), Some("\"tag\""));
    }
}

#[test]
fn a_server_without_ranges_sends_all_again() {
    let server = faulty("/blobs/", 1..2, |_, reply| reply.cut(150));
    let result = server.pull_with("lib/app:1", tried(1), &NoProgress);
    assert_eq!(which(&result.unwrap().0), "pulled");
    let seen = server.seen("/blobs/");
    assert_eq!(seen[2].header("range"), Some("bytes=150-"));
    assert!(seen[2].header("if-range").is_none(), "it has no tag");
}

#[test]
fn a_pull_goes_on_where_an_earlier_one_was_ended() {
    // What is there already: a beginning, a wrong one, all, too much.
    let layer = served().layer;
    let blob = served().objects[&layer].1.clone();
    let size = blob.len();
    let mut wrong = blob[..100].to_vec();
    wrong[50] ^= 1;
    let too_much = [&blob[..], b"x"].concat();
    let from = |n: usize| Some(format!("bytes={n}-"));
    for (left, asked) in [
        (&blob[..100], vec![from(100)]),
        (&wrong, vec![from(100), None]),
        (&blob[..size - 1], vec![from(size - 1)]),
        (&blob, vec![]),
        (&too_much, vec![None]),
    ] {
        let image = served();
        let server = Server::start(move |request, _| image.reply(request).ranged(request));
        let store = tempfile::tempdir().unwrap();
        let name = format!(
            "partial-{}",
            layer.trim_start_matches("blobs/").replace(':', "-")
        );
        std::fs::create_dir(store.path().join("tmp")).unwrap();
        std::fs::write(store.path().join("tmp").join(&name), left).unwrap();
        let image = pull_into(store.path(), &server, "lib/app:1", quick()).unwrap();
        assert_eq!(which(&image), "pulled");
        let ranges = server
            .seen(&layer)
            .into_iter()
            .map(|r| r.headers.get("range").cloned());
        assert_eq!(ranges.collect::<Vec<_>>(), asked);
        assert!(!store.path().join("tmp").join(&name).exists());
    }
}

#[test]
fn a_failed_pull_keeps_what_it_has() {
    let layer = served().layer;
    let server = faulty("/blobs/", 1..2, |_, reply| reply.cut(150));
    let store = tempfile::tempdir().unwrap();
    let pull = || pull_into(store.path(), &server, "lib/app:1", tried(0));
    let error = pull().unwrap_err().to_string();
    assert!(error.contains("150 of"), "{error}");
    assert_eq!(which(&pull().unwrap()), "pulled");
    let asked = server.seen(&layer);
    assert_eq!(asked.len(), 2);
    assert_eq!(asked[1].header("range"), Some("bytes=150-"));
}

#[test]
fn beginnings_of_layers_go_after_a_day_or_when_pruned() {
    let image = served();
    let server = Server::start(move |request, _| image.reply(request));
    let dir = tempfile::tempdir().unwrap();
    let tmp = dir.path().join("tmp");
    std::fs::create_dir(&tmp).unwrap();
    for (name, age) in [("partial-old", 25), ("partial-new", 23)] {
        let file = std::fs::File::create(tmp.join(name)).unwrap();
        let hours = Duration::from_secs(age * 3600);
        file.set_modified(std::time::SystemTime::now() - hours)
            .unwrap();
    }
    pull_into(dir.path(), &server, "lib/app:1", quick()).unwrap();
    let there = |name: &str| tmp.join(name).exists();
    assert!(!there("partial-old") && there("partial-new"));
    let store = bantam_image::Store::open(dir.path()).unwrap();
    store.prune(false, &NoProgress).unwrap();
    assert!(!there("partial-new"));
}

#[test]
fn the_wrong_part_of_a_blob_is_refused() {
    for range in ["bytes 0-9/10", "bytes 150-200/999999", ""] {
        let count = AtomicUsize::new(0);
        let server = faulty("/blobs/", 1..9, move |_, reply| {
            if count.fetch_add(1, Ordering::SeqCst) == 0 {
                return reply.cut(150);
            }
            let mut reply = reply.header("Content-Range", range);
            reply.status = 206;
            reply
        });
        let error = server.pull("lib/app:1").unwrap_err().to_string();
        assert!(error.contains("asked for what follows byte 150"), "{error}");
    }
}

#[test]
fn a_server_that_falls_silent_is_given_up() {
    let mut registries = tried(1);
    registries.timeouts.stall = Duration::from_millis(100);
    registries.timeouts.answer = Duration::from_millis(100);
    for part in ["manifests", "/blobs/"] {
        let server = faulty(part, 0..99, |_, reply| {
            let mut reply = reply.cut(20);
            reply.stalls = true;
            reply
        });
        let start = Instant::now();
        let error = server
            .pull_with("lib/app:1", registries.clone(), &NoProgress)
            .unwrap_err();
        assert!(matches!(error, Error::Registry { .. }), "{error}");
        assert!(start.elapsed() < Duration::from_secs(5), "{part}");
    }
}

#[test]
fn a_server_that_drips_is_given_up() {
    // It sends one more byte a time, which is progress for ever; all of it must not take longer than this.
    let layer = served().layer;
    let image = served();
    let server = Server::start(move |request, _| {
        let reply = image.reply(request);
        match request.path.ends_with(&layer) {
            true => reply.ranged(request).cut(1),
            false => reply,
        }
    });
    let mut registries = quick();
    registries.timeouts.body = Duration::from_millis(100);
    registries.timeouts.backoff = Duration::from_millis(20);
    let error = server
        .pull_with("lib/app:1", registries, &NoProgress)
        .unwrap_err()
        .to_string();
    assert!(error.contains("bytes"), "{error}");
    assert!(server.seen("/blobs/").len() < 30);
}

/// A second image beside the first in the same registry: `layers` layers, none of which is there.
fn with_missing_layers(layers: usize) -> impl Fn(&Request) -> Option<Reply> {
    let plain = Tar::new().file("x", "x").finish();
    let config = Layout::config(&vec![digest(&plain); layers]).to_string();
    let layers: Vec<_> = (0..layers)
        .map(|i| json!({"mediaType": OCI_LAYER, "digest": digest(&[i as u8]), "size": 100}))
        .collect();
    let manifest = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": layers,
        "config": {"digest": digest(config.as_bytes()), "size": config.len()}})
    .to_string();
    move |request| {
        if request.path.contains("manifests") {
            return Some(Reply::ok(OCI_MANIFEST, manifest.as_bytes()));
        }
        request
            .path
            .ends_with(&digest(config.as_bytes()))
            .then(|| Reply::ok("", config.as_bytes()))
    }
}

#[test]
fn the_first_error_ends_a_pull() {
    // Of many layers one is gone, and the others ask for patience; nobody waits for those.
    let known = with_missing_layers(30);
    let server = Server::start(move |request, _| {
        known(request).unwrap_or_else(|| match request.path.ends_with(&digest(&[1])) {
            true => Reply::status(404),
            false => Reply::status(429).header("Retry-After", "50"),
        })
    });
    let start = Instant::now();
    let error = server.pull("lib/app:1").unwrap_err();
    assert_eq!(status(&error), Some(404), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(server.seen("/blobs/").len() < 10, "no new ones are begun");
}

#[test]
fn a_process_asks_a_registry_for_three_layers_at_once_whatever_it_pulls() {
    // In a process of its own, as the tests of this one pull, too.
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture"])
        .arg("registry_faults::pulls_at_once")
        .env("TEST_PULLS_AT_ONCE", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("1 passed"), "{text}");
}

/// Not a test: what the test above runs.
#[test]
#[ignore = "another test of this module runs it"]
fn pulls_at_once() {
    /// Layers being sent, and the most there have been.
    type Count = (Mutex<(usize, usize)>, Condvar);
    if std::env::var("TEST_PULLS_AT_ONCE").is_err() {
        return crate::common::skipped("another test runs this one in a process of its own");
    }
    let known = with_missing_layers(20);
    let count: Arc<Count> = Arc::default();
    let seen = Arc::clone(&count);
    let server = Server::start(move |request, _| {
        known(request).unwrap_or_else(|| {
            let (now, changed) = &*seen;
            let mut counts = now.lock().unwrap();
            counts.0 += 1;
            counts.1 = counts.1.max(counts.0);
            changed.notify_all();
            // None is answered before three have come together, and then a fourth has time to.
            let (counts, _) = changed
                .wait_timeout_while(counts, Duration::from_secs(60), |(_, most)| *most < 3)
                .unwrap();
            let wait = Duration::from_millis(50);
            let (mut counts, _) = changed
                .wait_timeout_while(counts, wait, |(_, most)| *most < 4)
                .unwrap();
            counts.0 -= 1;
            Reply::ok("", &[0; 50]).cut(50)
        })
    });
    // Into stores of their own, so that none waits for another's layer.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                server
                    .pull_with("lib/app:1", tried(2), &NoProgress)
                    .unwrap_err()
            });
        }
    });
    assert_eq!(count.0.lock().unwrap().1, 3);
}

#[test]
fn credentials_stay_with_the_registry_on_every_kind_of_redirect() {
    for code in [301, 302, 303, 307, 308] {
        let image = served();
        let blobs = image.clone();
        // Another port is another host.
        let cdn = Server::start(move |request, _| {
            let path = format!("blobs/{}", request.path.trim_start_matches("/cdn/"));
            Reply::ok("", &blobs.objects[&path].1).ranged(request)
        });
        let to = cdn.address.clone();
        let server = Server::start(move |request, _| {
            if request.header("authorization").is_none() {
                return Reply::status(401).header("WWW-Authenticate", "Basic realm=x");
            }
            if let Some(blob) = request.path.strip_prefix("/v2/lib/app/blobs/") {
                // First within the registry, relative to the blob.
                return Reply::status(code).header("Location", format!("../moved/{blob}"));
            }
            match request.path.split_once("/moved/") {
                Some((_, blob)) => {
                    Reply::status(code).header("Location", format!("http://{to}/cdn/{blob}"))
                }
                None => image.reply(request),
            }
        });
        let mut registries = quick();
        registries.credentials.insert(
            server.address.clone(),
            bantam_image::Credential::Password {
                username: "u".into(),
                password: "p".into(),
            },
        );
        let result = server.pull_with("lib/app:1", registries, &NoProgress);
        assert_eq!(which(&result.unwrap().0), "pulled", "{code}");
        assert_eq!(cdn.seen("/cdn/").len(), 2);
        assert!(
            cdn.seen("")
                .iter()
                .all(|r| r.header("authorization").is_none())
        );
        let moved = server.seen("/moved/");
        assert!(moved.iter().all(|r| r.header("authorization").is_some()));
    }
}

#[test]
fn mirrors_are_asked_in_order_and_the_registry_last() {
    let image = served();
    let origin = Server::start(move |request, _| image.reply(request));
    // Nobody there; knows nothing; knows the manifest only, and has an altered layer below a prefix.
    let nobody_there = NOBODY.to_owned();
    let empty = Server::start(|_, _| Reply::status(404));
    let image = served();
    let altered = Server::start(move |request, _| {
        let Some(path) = request.path.strip_prefix("/v2/some/prefix/") else {
            return Reply::status(404);
        };
        let request = Request {
            path: format!("/v2/{path}"),
            ..request.clone()
        };
        let mut reply = image.reply(&request);
        if request.path.ends_with(&image.layer) {
            reply.body[40] ^= 1;
        }
        reply
    });
    let mut registries = tried(1);
    registries.mirrors.insert(
        origin.address.clone(),
        vec![
            nobody_there.clone(),
            empty.address.clone(),
            format!("http://{}/some/prefix/", altered.address),
        ],
    );
    let said = Messages::default();
    let result = origin.pull_with("lib/app:1", registries.clone(), &said);
    assert_eq!(which(&result.unwrap().0), "pulled");
    let text = said.text();
    let dead = format!("http://{nobody_there}");
    assert!(text.contains(&dead) && text.contains("digest"), "{text}");
    assert_eq!(
        text.matches("refused").count(),
        2,
        "a dead mirror is left alone: {text}"
    );
    assert_eq!(empty.seen("").len(), 3);
    assert_eq!(altered.seen("").len(), 3);
    assert_eq!(origin.seen("").len(), 1, "only what nobody else had");

    registries.mirrors.clear();
    registries
        .mirrors
        .insert(origin.address.clone(), vec!["http://a b/".into()]);
    let error = origin
        .pull_with("lib/app:1", registries, &NoProgress)
        .unwrap_err();
    assert!(error.to_string().contains("a b"), "{error}");
}

#[test]
fn a_download_that_breaks_off_at_a_mirror_goes_on_at_the_registry() {
    let layer = served().layer;
    let image = served();
    let origin = Server::start(move |request, _| image.reply(request).ranged(request));
    let mirror = faulty("/blobs/", 1..99, |_, reply| {
        reply.ranged(&Request::default()).cut(100)
    });
    let mut registries = tried(0);
    registries
        .mirrors
        .insert(origin.address.clone(), vec![mirror.address.clone()]);
    let result = origin.pull_with("lib/app:1", registries, &NoProgress);
    assert_eq!(which(&result.unwrap().0), "pulled");
    assert_eq!(origin.seen(&layer)[0].header("range"), Some("bytes=100-"));
}

#[test]
fn hub_names_are_one_registry_with_a_library() {
    let image = served();
    let server = Server::start(move |request, _| {
        let path = request.path.replace("/library/app/", "/lib/app/");
        image.reply(&Request {
            path,
            ..request.clone()
        })
    });
    let mut registries = quick();
    registries
        .mirrors
        .insert("docker.io".into(), vec![server.address.clone()]);
    for name in ["app:1", "docker.io/app:1", "index.docker.io/library/app:1"] {
        let (image, _store) = pull(name, registries.clone(), &NoProgress).unwrap();
        assert_eq!(which(&image), "pulled", "{name}");
    }
    assert_eq!(server.seen("/v2/library/app/manifests/1").len(), 3);
}

#[test]
fn two_pulls_of_one_image_fetch_each_layer_once() {
    let image = served();
    let layer = image.layer.clone();
    let server = Server::start(move |request, _| image.reply(request));
    let store = tempfile::tempdir().unwrap();
    let source = format!("{}/lib/app:1", server.address);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let store = bantam_image::Store::open(store.path()).unwrap();
                let options = bantam_image::ResolveOptions {
                    registries: quick(),
                    ..Default::default()
                };
                let source = bantam_image::ImageSource::parse(&source).unwrap();
                store.resolve(&source, &options, &NoProgress).unwrap();
            });
        }
    });
    assert_eq!(server.seen(&layer).len(), 1);
}
