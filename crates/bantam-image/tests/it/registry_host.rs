//! What a pull takes from the host: credential files and helpers, proxies, authorities.
//!
//! These come from the environment, which a test cannot change for itself alone: each pull is made by this test program
//! run once more, with an environment of its own.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bantam_image::{Registries, Timeouts};
use serde_json::json;
use tempfile::TempDir;

use crate::common::registry::{Messages, Reply, Server, pull, served, which};
use crate::common::skipped;

/// Not a test: what the tests here run.
#[test]
#[ignore = "the other tests of this module run it"]
fn pull_as_the_environment_says() {
    let Ok(name) = std::env::var("TEST_PULL") else {
        return skipped("other tests run this one, and say what to pull");
    };
    let said = Messages::default();
    let registries = Registries {
        plain_http: std::env::var("TEST_PLAIN").into_iter().collect(),
        public_only: std::env::var("TEST_PUBLIC_ONLY").is_ok(),
        timeouts: Timeouts {
            helper: Duration::from_millis(300),
            retries: 0,
            ..Timeouts::default()
        },
        ..Registries::default()
    };
    let result = pull(&name, registries, &said);
    print!("{}", said.text());
    match result {
        Ok((image, _store)) => println!("got {}", which(&image)),
        Err(e) => println!("failed: {e}"),
    }
}

/// What a pull says, in an environment of `HOME`, `PATH` and these.
pub(crate) fn pulled(name: &str, home: &Path, env: &[(&str, &str)]) -> String {
    let path = format!(
        "{}:{}",
        home.join("bin").display(),
        std::env::var("PATH").unwrap()
    );
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture"])
        .arg("registry_host::pull_as_the_environment_says")
        .env_clear()
        .env("HOME", home)
        .env("PATH", path)
        .env("TEST_PULL", name)
        .envs(env.iter().copied())
        .output()
        .unwrap();
    String::from_utf8(out.stdout).unwrap()
}

/// `Basic` of `NAME:pw`.
const NAMES: [(&str, &str); 6] = [
    ("a", "YTpwdw=="),
    ("b", "Yjpwdw=="),
    ("c", "Yzpwdw=="),
    ("d", "ZDpwdw=="),
    ("e", "ZTpwdw=="),
    ("f", "Zjpwdw=="),
];

/// A registry with an image for whoever has any name.
fn private() -> Server {
    let image = served();
    Server::start(move |request, _| match request.header("authorization") {
        Some(_) => image.reply(request),
        None => Reply::status(401).header("WWW-Authenticate", "Basic realm=x"),
    })
}

/// Who the registry last saw.
fn seen(server: &Server) -> String {
    let requests = server.seen("");
    let Some(authorization) = requests.last().and_then(|r| r.header("authorization")) else {
        return "nobody".to_owned();
    };
    let encoded = authorization.trim_start_matches("Basic ");
    let known = NAMES.iter().find(|(_, base64)| *base64 == encoded);
    known.map_or(encoded.to_owned(), |(name, _)| (*name).to_owned())
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A home with credential helpers in its `bin`: by name, a shell script.
fn home(helpers: &[(&str, &str)]) -> TempDir {
    let home = tempfile::tempdir().unwrap();
    for (name, script) in helpers {
        let path = home.path().join(format!("bin/docker-credential-{name}"));
        write(&path, &format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    home
}

#[test]
fn credential_files_are_found_in_order() {
    let server = private();
    let home = home(&[]);
    let file = |path: &str, name: usize| {
        let auths = json!({"auths": {server.address.as_str(): {"auth": NAMES[name].1}}});
        write(&home.path().join(path), &auths.to_string());
    };
    let pull = |env: &[(&str, &str)]| {
        let out = pulled(&format!("{}/lib/app:1", server.address), home.path(), env);
        assert!(out.contains("got pulled"), "{out}");
        seen(&server)
    };
    let at = |path: &str| home.path().join(path).display().to_string();
    file(".docker/config.json", 0);
    assert_eq!(pull(&[]), "a");
    file(".config/containers/auth.json", 1);
    assert_eq!(pull(&[]), "b");
    file("run/containers/auth.json", 2);
    let mut env = vec![("XDG_RUNTIME_DIR", at("run"))];
    let env_of = |env: &[(&'static str, String)]| -> String {
        let env: Vec<(&str, &str)> = env.iter().map(|(k, v)| (*k, v.as_str())).collect();
        pull(&env)
    };
    assert_eq!(env_of(&env), "c");
    file("docker/config.json", 3);
    env.push(("DOCKER_CONFIG", at("docker")));
    assert_eq!(env_of(&env), "d");
    file("auth.json", 4);
    env.push(("REGISTRY_AUTH_FILE", at("auth.json")));
    assert_eq!(env_of(&env), "e");
}

#[test]
fn helpers_come_before_files_and_the_registrys_own_before_the_general_one() {
    let answer = |name: &str| {
        format!(
            r#"cat >"$HOME/server"; echo '{{"Username":"{name}","Secret":"pw","ServerURL":"x"}}'"#
        )
    };
    let home = home(&[("own", &answer("a")), ("all", &answer("b"))]);
    let server = private();
    let name = format!("{}/lib/app:1", server.address);
    let config = home.path().join(".docker/config.json");
    let mut json = json!({"auths": {server.address.as_str(): {"auth": NAMES[2].1}}});
    for (key, value, want) in [
        ("x", json!(null), "c"),
        ("credsStore", json!("all"), "b"),
        ("credHelpers", json!({server.address.as_str(): "own"}), "a"),
    ] {
        json[key] = value;
        write(&config, &json.to_string());
        let out = pulled(&name, home.path(), &[]);
        assert!(out.contains("got pulled"), "{out}");
        assert_eq!(seen(&server), want);
    }
    let asked = fs::read_to_string(home.path().join("server")).unwrap();
    assert_eq!(asked, server.address, "what the helper is asked for");
}

#[test]
fn helpers_that_are_missing_fail_hang_or_babble_are_passed_over() {
    let home = home(&[
        ("fails", "echo hunter2; exit 1"),
        ("hangs", "sleep 600"),
        ("babbles", "echo hunter2"),
        (
            "empty",
            "echo 'credentials not found in native keychain'; exit 1",
        ),
        ("deaf", r#"exec <&-; echo '{"Username":"b","Secret":"pw"}'"#),
    ]);
    let server = private();
    let name = format!("{}/lib/app:1", server.address);
    for (helper, says, who) in [
        (
            "desktop.exe",
            "docker-credential-desktop.exe is not installed",
            "c",
        ),
        ("fails", "docker-credential-fails fails", "c"),
        (
            "hangs",
            "docker-credential-hangs does not answer within 0.3 s",
            "c",
        ),
        (
            "babbles",
            "docker-credential-babbles gives no valid answer",
            "c",
        ),
        ("../x", "is not the name of a credential helper", "c"),
        ("empty", "", "c"),
        ("deaf", "", "b"),
    ] {
        let json =
            json!({"auths": {server.address.as_str(): {"auth": NAMES[2].1}}, "credsStore": helper});
        write(&home.path().join(".docker/config.json"), &json.to_string());
        let start = Instant::now();
        let out = pulled(&name, home.path(), &[]);
        assert!(
            out.contains("got pulled") && out.contains(says),
            "{helper}: {out}"
        );
        assert!(!out.contains("hunter2"), "{out}");
        assert_eq!(out.contains("going on without"), !says.is_empty(), "{out}");
        assert_eq!(seen(&server), who, "{helper}");
        assert!(start.elapsed() < Duration::from_secs(60), "{helper}");
    }
}

#[test]
fn an_identity_token_from_a_helper_is_one() {
    let image = served();
    let server = Server::start(move |request, own| {
        if request.path.starts_with("/token") {
            let fits = request.method == "POST" && request.body.contains("refresh_token=id");
            return match fits {
                true => Reply::json(&json!({"access_token": "sesame"})),
                false => Reply::status(400),
            };
        }
        match request.header("authorization") {
            Some("Bearer sesame") => image.reply(request),
            _ => Reply::status(401).header(
                "WWW-Authenticate",
                format!("Bearer realm=\"http://{own}/token\""),
            ),
        }
    });
    let home = home(&[("acr", r#"echo '{"Username":"<token>","Secret":"id"}'"#)]);
    let json = json!({"credHelpers": {server.address.as_str(): "acr"}});
    write(&home.path().join(".docker/config.json"), &json.to_string());
    let out = pulled(&format!("{}/lib/app:1", server.address), home.path(), &[]);
    assert!(out.contains("got pulled"), "{out}");
}

/// A proxy that leads every CONNECT to one address, and what it was asked.
pub(crate) fn proxy(to: String) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let mut head = Vec::new();
            let mut reader = BufReader::new(client.try_clone().unwrap());
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|n| n > 2) {
                head.push(std::mem::take(&mut line));
            }
            log.lock().unwrap().push(head.concat());
            let server = TcpStream::connect(&to).unwrap();
            (&client).write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
            for (mut from, mut to) in [
                (client.try_clone().unwrap(), server.try_clone().unwrap()),
                (server, client),
            ] {
                std::thread::spawn(move || {
                    let mut buf = [0; 4096];
                    while let Ok(n @ 1..) = from.read(&mut buf) {
                        if to.write_all(&buf[..n]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    (address, asked)
}

#[test]
fn proxies_are_taken_from_the_environment() {
    let image = served();
    let server = Server::start(move |request, _| image.reply(request));
    let (proxy, asked) = proxy(server.address.clone());
    let home = home(&[]);
    let with_password = format!("http://user:hunter2@{proxy}");
    // No such host: what arrives came through the proxy.
    let (name, plain) = ("registry.invalid:5000/lib/app:1", "registry.invalid:5000");
    let pull = |name: &str, env: &[(&str, &str)]| {
        asked.lock().unwrap().clear();
        let env = [env, &[("TEST_PLAIN", plain)]].concat();
        pulled(name, home.path(), &env)
    };
    for variable in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
        let out = pull(name, &[(variable, &with_password)]);
        assert!(out.contains("got pulled"), "{variable}: {out}");
        let asked = asked.lock().unwrap().concat();
        assert!(asked.contains("CONNECT registry.invalid:5000"), "{asked}");
        // user:hunter2
        assert!(asked.contains("Basic dXNlcjpodW50ZXIy"), "{asked}");
    }
    // That for https is not for this; and some hosts need none.
    for env in [
        &[("HTTPS_PROXY", &*with_password)][..],
        &[("HTTP_PROXY", &*with_password), ("NO_PROXY", "x,.invalid")],
        &[
            ("http_proxy", &*with_password),
            ("no_proxy", "registry.invalid"),
        ],
    ] {
        let out = pull(name, env);
        assert!(
            out.contains("failed") && asked.lock().unwrap().is_empty(),
            "{out}"
        );
    }
    let own = format!("{}/lib/app:1", server.address);
    let out = pull(&own, &[("ALL_PROXY", &with_password)]);
    assert!(
        out.contains("got pulled") && asked.lock().unwrap().is_empty(),
        "{out}"
    );
    // Errors name the variable and keep the password.
    for proxy in [
        "socks5://user:hunter2@x",
        "http://user:hunter2@",
        "http://user:hunter2@127.0.0.1:1",
    ] {
        let out = pull(name, &[("ALL_PROXY", proxy)]);
        assert!(out.contains("failed") && out.contains("ALL_PROXY"), "{out}");
        assert!(!out.contains("hunter2"), "{out}");
    }
}

#[test]
fn credentials_are_never_sent_in_the_clear() {
    let image = served();
    let server = Server::start(move |request, _| {
        if request.path.starts_with("/token") {
            return Reply::json(&json!({"token": "sesame"}));
        }
        let challenge = match request.path.starts_with("/v2/lib/basic") {
            true => "Basic realm=x",
            false => "Bearer realm=\"http://registry.invalid:5000/token\"",
        };
        match request.header("authorization") {
            Some("Bearer sesame") => image.reply(request),
            _ => Reply::status(401).header("WWW-Authenticate", challenge),
        }
    });
    // A host that is not this machine, as far as anyone can tell.
    let (proxy, _) = proxy(server.address.clone());
    let home = home(&[]);
    let json = json!({"auths": {"registry.invalid:5000": {"auth": NAMES[0].1}}});
    write(&home.path().join(".docker/config.json"), &json.to_string());
    let env = [
        ("TEST_PLAIN", "registry.invalid:5000"),
        ("HTTP_PROXY", &*format!("http://{proxy}")),
    ];
    for (name, says) in [("app", "got pulled"), ("basic", "401")] {
        let name = format!("registry.invalid:5000/lib/{name}:1");
        let out = pulled(&name, home.path(), &env);
        assert!(out.contains("in the clear") && out.contains(says), "{out}");
    }
    assert_eq!(server.seen("/token").len(), 1);
    let seen = server.seen("");
    assert!(
        seen.iter()
            .all(|r| matches!(r.header("authorization"), None | Some("Bearer sesame")))
    );
    assert!(server.seen("/token")[0].header("authorization").is_none());
}

#[test]
fn a_certificate_file_that_cannot_be_used_is_named() {
    let home = home(&[]);
    for (name, text) in [
        ("missing.pem", None),
        ("bad.pem", Some("-----BEGIN CERTIFICATE-----\n!\n")),
    ] {
        let path = home.path().join(name);
        if let Some(text) = text {
            write(&path, text);
        }
        let path = path.display().to_string();
        let out = pulled(
            "127.0.0.1.invalid/x:1",
            home.path(),
            &[("SSL_CERT_FILE", &path)],
        );
        assert!(out.contains(&path), "{out}");
    }
}
