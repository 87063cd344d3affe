//! Proving who asks: challenges, tokens, stored credentials.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use bantam_image::{Credential, NoProgress, Registries};
use serde_json::json;

use crate::common::registry::{Messages, Reply, Request, Server, quick, served, which};

/// `me:s:secret`, which is the password `s:secret`.
const BASIC: &str = "Basic bWU6czpzZWNyZXQ=";
const AUTH: &str = "bWU6czpzZWNyZXQ=";

fn password() -> Credential {
    Credential::Password {
        username: "me".into(),
        password: "s:secret".into(),
    }
}

/// A registry that lets in who shows `wanted` in Authorization, and else answers with `challenge`, in which `OWN` is
/// the server's address. `token` answers whatever is below `/token`.
fn guarded(
    wanted: &'static str,
    challenge: &'static [&'static str],
    token: impl Fn(&Request) -> Reply + Send + Sync + 'static,
) -> Server {
    let image = served();
    Server::start(move |request, own| {
        if request.path.starts_with("/token") {
            return token(request);
        }
        if request.header("authorization") == Some(wanted) {
            return image.reply(request);
        }
        challenge
            .iter()
            .fold(Reply::status(401), |reply, challenge| {
                reply.header("WWW-Authenticate", challenge.replace("OWN", own))
            })
    })
}

const BEARER: &[&str] = &[r#"Bearer realm="http://OWN/token",service="s""#];

fn token(text: &str) -> Reply {
    Reply::json(&json!({ "token": text }))
}

fn given(server: &Server, credential: Credential) -> Registries {
    let mut registries = quick();
    registries
        .credentials
        .insert(server.address.clone(), credential);
    registries
}

/// As a user has it stored: a `config.json` for `server`.
fn stored(server: &Server, entry: &serde_json::Value) -> (Registries, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.json");
    fs::write(
        &file,
        json!({"auths": {server.address.as_str(): entry}}).to_string(),
    )
    .unwrap();
    let registries = Registries {
        credential_files: Some(vec![PathBuf::from("/no/such/file"), file]),
        ..quick()
    };
    (registries, dir)
}

#[test]
fn challenges_are_followed_in_all_their_forms() {
    for challenge in [
        &[r#"Bearer realm="http://OWN/token""#][..],
        &[r#"bearer Service="a, b" , Realm="http://OWN/token""#],
        &[
            "Negotiate",
            r#"Basic realm="x, y""#,
            r#"Bearer realm="http://OWN/token""#,
        ],
        &[r#"Basic realm="x", Bearer scope="",realm="http://OWN/token""#],
        &[r#"Bearer error="invalid_token",realm="http://OWN/token?x=1",scope="a:b:pull c:d:pull""#],
    ] {
        let server = guarded("Bearer sesame", challenge, |_| token("sesame"));
        let (image, _store) = server
            .pull("lib/app:1")
            .unwrap_or_else(|e| panic!("{challenge:?}: {e}"));
        assert_eq!(which(&image), "pulled");
        let asked = server.seen("/token");
        assert_eq!(asked.len(), 1, "{challenge:?}");
        let path = &asked[0].path;
        if challenge[0].contains("x=1") {
            let want = "/token?x=1&scope=a%3Ab%3Apull&scope=c%3Ad%3Apull";
            assert_eq!(path, want, "each scope in a parameter of its own");
        } else {
            assert!(
                path.contains("scope=repository%3Alib%2Fapp%3Apull"),
                "{path}"
            );
        }
        assert!(asked[0].header("authorization").is_none());
    }
}

#[test]
fn a_challenge_without_a_usable_token_server_is_an_error() {
    for challenge in [
        &["Bearer"][..],
        &[r#"Bearer realm="""#],
        &[r#"Bearer realm="ftp://OWN/token""#],
        &[r#"Bearer realm="http://user:pass@OWN/token""#],
    ] {
        let server = guarded("Bearer sesame", challenge, |_| token("sesame"));
        let error = server.pull("lib/app:1").unwrap_err().to_string();
        assert!(error.contains("token server"), "{challenge:?}: {error}");
    }
}

#[test]
fn basic_credentials_are_sent_when_they_are_asked_for() {
    let server = guarded(BASIC, &[r#"Basic realm="r""#], |_| Reply::status(404));
    let error = server.pull("lib/app:1").unwrap_err().to_string();
    assert!(error.contains("docker login"), "{error}");
    let (stored, _dir) = stored(&server, &json!({ "auth": AUTH }));
    for registries in [given(&server, password()), stored] {
        let before = server.seen("").len();
        let result = server.pull_with("lib/app:1", registries, &NoProgress);
        assert_eq!(which(&result.unwrap().0), "pulled");
        let seen = server.seen("").split_off(before);
        assert!(seen[0].header("authorization").is_none(), "first without");
        assert_eq!(seen.len(), 4, "the challenge is answered once");
    }
}

#[test]
fn an_open_registry_sees_no_credentials() {
    let image = served();
    let server = Server::start(move |request, _| image.reply(request));
    server
        .pull_with("lib/app:1", given(&server, password()), &NoProgress)
        .unwrap();
    assert!(
        server
            .seen("")
            .iter()
            .all(|request| request.header("authorization").is_none())
    );
}

#[test]
fn a_password_gets_a_token_and_an_identity_token_gets_one_by_post() {
    let server = guarded("Bearer sesame", BEARER, |request| {
        match request.header("authorization") {
            Some(BASIC) if request.path.contains("account=me") => token("sesame"),
            _ => token("anonymous"),
        }
    });
    let result = server.pull_with("lib/app:1", given(&server, password()), &NoProgress);
    assert_eq!(which(&result.unwrap().0), "pulled");

    for entry in [
        json!({"identitytoken": "id&1", "auth": AUTH}),
        json!({"username": "<token>", "password": "id&1"}),
    ] {
        let server = guarded("Bearer sesame", BEARER, |request| {
            let fits = request.method == "POST"
                && request.path == "/token"
                && request.header("content-type") == Some("application/x-www-form-urlencoded")
                && [
                    "grant_type=refresh_token",
                    "refresh_token=id%261",
                    "service=s",
                    "client_id=",
                    "scope=repository%3Alib%2Fapp%3Apull",
                ]
                .iter()
                .all(|part| request.body.contains(part));
            match fits {
                true => Reply::json(&json!({"access_token": "sesame", "expires_in": 300.5})),
                false => Reply::status(400),
            }
        });
        let (registries, _dir) = stored(&server, &entry);
        let result = server.pull_with("lib/app:1", registries, &NoProgress);
        assert_eq!(which(&result.unwrap().0), "pulled");
    }
}

#[test]
fn a_given_bearer_token_is_sent_as_it_is() {
    let server = guarded("Bearer mine", BEARER, |_| token("other"));
    let credential = Credential::Bearer("mine".into());
    let result = server.pull_with("lib/app:1", given(&server, credential), &NoProgress);
    assert_eq!(which(&result.unwrap().0), "pulled");
    assert!(server.seen("/token").is_empty());
}

#[test]
fn a_token_that_runs_out_during_a_pull_is_renewed_once() {
    // Each token is good for one request.
    let image = served();
    let issued = AtomicUsize::new(0);
    let used = AtomicUsize::new(0);
    let server = Server::start(move |request, own| {
        if request.path.starts_with("/token") {
            return token(&issued.fetch_add(1, Ordering::SeqCst).to_string());
        }
        let fresh = used.load(Ordering::SeqCst);
        if request.header("authorization") == Some(&format!("Bearer {fresh}")) {
            used.fetch_add(1, Ordering::SeqCst);
            return image.reply(request);
        }
        Reply::status(401).header("WWW-Authenticate", BEARER[0].replace("OWN", own))
    });
    assert_eq!(which(&server.pull("lib/app:1").unwrap().0), "pulled");
    assert_eq!(server.seen("/token").len(), 3);

    // One that is never accepted is not asked for again and again.
    let server = guarded("Bearer sesame", BEARER, |_| token("wrong"));
    let error = server.pull("lib/app:1").unwrap_err().to_string();
    assert!(error.contains("401"), "{error}");
    assert_eq!(server.seen("/token").len(), 1);
}

#[test]
fn a_token_is_not_used_beyond_its_time() {
    let image = served();
    let server = Server::start(move |request, own| {
        if request.path.starts_with("/token") {
            return Reply::json(&json!({"token": "sesame", "expires_in": 0.000_001}));
        }
        match request.header("authorization") {
            Some(_) => image.reply(request),
            None => Reply::status(401).header("WWW-Authenticate", BEARER[0].replace("OWN", own)),
        }
    });
    assert_eq!(which(&server.pull("lib/app:1").unwrap().0), "pulled");
    assert_eq!(
        server.seen("/token").len(),
        3,
        "manifest, configuration, layer"
    );
}

#[test]
fn bad_stored_credentials_do_not_hide_a_public_image() {
    // Refused by the token server, or by the registry that gets the token.
    for refused_by_registry in [false, true] {
        let server = guarded("Bearer public", BEARER, move |request| {
            match request.header("authorization") {
                Some(_) if refused_by_registry => token("useless"),
                Some(_) => Reply::status(401)
                    .body(r#"{"errors":[{"code":"UNAUTHORIZED","message":"wrong password"}]}"#),
                None => token("public"),
            }
        });
        let (registries, dir) = stored(&server, &json!({ "auth": AUTH }));
        let said = Messages::default();
        let result = server.pull_with("lib/app:1", registries, &said);
        assert_eq!(which(&result.unwrap().0), "pulled");
        let text = said.text();
        let place = dir.path().join("config.json").display().to_string();
        assert!(
            text.contains(&place) && text.contains("not accepted"),
            "{text}"
        );
        assert_eq!(text.matches("not accepted").count(), 1, "{text}");
        assert!(!text.contains("secret") && !text.contains(AUTH), "{text}");
    }
}

#[test]
fn bad_credentials_for_a_private_image_are_named() {
    let refuse = |_: &Request| Reply::status(403);
    let server = guarded("Bearer sesame", BEARER, refuse);
    let (registries, dir) = stored(&server, &json!({ "auth": AUTH }));
    let error = server
        .pull_with("lib/app:1", registries, &NoProgress)
        .unwrap_err()
        .to_string();
    let place = dir.path().join("config.json").display().to_string();
    assert!(error.contains(&place) && error.contains("403"), "{error}");

    // Those that the program gives are its decision.
    for (challenge, status) in [(BEARER, "403"), (&["Basic realm=x"][..], "401")] {
        let server = guarded("Bearer sesame", challenge, refuse);
        let error = server
            .pull_with("lib/app:1", given(&server, password()), &NoProgress)
            .unwrap_err()
            .to_string();
        assert!(error.contains(status), "{error}");
        let tokens = server.seen("/token");
        assert!(
            tokens
                .iter()
                .all(|request| request.header("authorization").is_some())
        );
    }
}

#[test]
fn a_damaged_credential_file_is_reported_and_passed_over() {
    let server = guarded("Bearer sesame", BEARER, |_| token("sesame"));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.json");
    fs::write(&file, r#"{"auths": {"x": "hunter2"}}"#).unwrap();
    let registries = Registries {
        credential_files: Some(vec![file.clone()]),
        ..quick()
    };
    let said = Messages::default();
    let result = server.pull_with("lib/app:1", registries, &said);
    assert_eq!(which(&result.unwrap().0), "pulled");
    let text = said.text();
    assert!(
        text.contains(&file.display().to_string()) && !text.contains("hunter2"),
        "{text}"
    );
}
