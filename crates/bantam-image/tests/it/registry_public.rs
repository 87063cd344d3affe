//! Pulls that may connect to addresses of the public internet only.
//!
//! The tests' servers are on this host, so a network namespace is made in which some public addresses are this host's.

use std::fs;
use std::process::Command;

use bantam_image::{NoProgress, Registries};
use serde_json::json;

use crate::common::registry::{Messages, Reply, Server, pull, quick, served, which};
use crate::common::{have, skipped};
use crate::registry_host::{proxy, pulled};

/// One per kind that the namespace has: loopback, link-local (a cloud's metadata) and private, and names for two.
const INSIDE: [&str; 6] = [
    "127.0.0.1",
    "169.254.169.254",
    "10.1.2.3",
    "[::1]",
    "[fd00:ec2::254]",
    "[::ffff:127.0.0.1]",
];
const PUBLIC: [&str; 2] = ["9.9.9.9", "[2620:fe::fe]"];

fn public_only(server: &Server) -> Registries {
    Registries {
        public_only: true,
        plain_http: vec![server.address.clone()],
        ..quick()
    }
}

#[test]
fn by_default_local_registries_are_reached() {
    let image = served();
    let server = Server::start(move |request, _| image.reply(request));
    assert!(!Registries::default().public_only);
    server.pull("lib/app:1").unwrap();
}

#[test]
fn only_public_addresses_are_connected_to_when_asked_for() {
    let image = served();
    let server = Server::start(move |request, _| image.reply(request));
    let port = server.address.rsplit_once(':').unwrap().1;
    // However it is written.
    for host in [
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
        "0.0.0.0",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
    ] {
        let host = format!("{host}:{port}");
        let mut registries = public_only(&server);
        registries.plain_http.push(host.clone());
        registries.mirrors.insert(
            "registry.invalid".to_owned(),
            vec![format!("http://{host}")],
        );
        let said = Messages::default();
        let start = std::time::Instant::now();
        pull("registry.invalid/lib/app:1", registries, &said).unwrap_err();
        let text = said.text();
        assert!(text.contains("is not an address of the public"), "{text}");
        assert!(!text.contains("trying again"), "{text}");
        assert!(start.elapsed().as_secs() < 30);
    }
    assert!(server.seen("").is_empty());
    let error = server
        .pull_with("lib/app:1", public_only(&server), &NoProgress)
        .unwrap_err()
        .to_string();
    assert!(error.contains("refused, as 127.0.0.1 is not"), "{error}");
}

#[test]
fn a_proxy_is_not_used_for_public_addresses_only() {
    let image = served();
    let server = Server::start(move |request, _| image.reply(request));
    let (proxy, asked) = proxy(server.address.clone());
    let home = tempfile::tempdir().unwrap();
    let proxy = format!("http://user:hunter2@{proxy}");
    let env = [
        ("TEST_PLAIN", "registry.invalid:5000"),
        ("HTTP_PROXY", &*proxy),
        ("TEST_PUBLIC_ONLY", "1"),
    ];
    let out = pulled("registry.invalid:5000/lib/app:1", home.path(), &env);
    assert!(
        out.contains("failed") && out.contains("the proxy that HTTP_PROXY names"),
        "{out}"
    );
    assert!(!out.contains("hunter2"), "{out}");
    assert!(asked.lock().unwrap().is_empty());
    let out = pulled("registry.invalid:5000/lib/app:1", home.path(), &env[..2]);
    assert!(out.contains("got pulled"), "{out}");
}

#[test]
fn no_redirect_mirror_or_token_server_leads_inside() {
    for program in ["unshare", "ip", "mount"] {
        if !have(program) {
            return skipped(&format!("{program} is not installed"));
        }
    }
    let works = Command::new("unshare")
        .args(["-rnm", "true"])
        .output()
        .is_ok_and(|out| out.status.success());
    if !works {
        return skipped("this user may not make namespaces");
    }
    let dir = tempfile::tempdir().unwrap();
    let hosts = dir.path().join("hosts");
    let names = "9.9.9.9 public.test\n127.0.0.1 inside.test\n\
                 9.9.9.9 both.test\n127.0.0.1 both.test\n127.0.0.1 localhost\n";
    fs::write(&hosts, names).unwrap();
    let addresses: Vec<String> = PUBLIC
        .iter()
        .chain(&INSIDE[1..3])
        .chain(&INSIDE[4..5])
        .map(|ip| ip.trim_matches(['[', ']']))
        .map(|ip| match ip.contains(':') {
            true => format!("ip addr add {ip}/128 dev lo nodad"),
            false => format!("ip addr add {ip}/32 dev lo"),
        })
        .collect();
    let script = format!(
        "set -e; ip link set lo up; {}; mount --bind {} /etc/hosts; exec \"$0\" --exact --ignored --nocapture \
         registry_public::in_a_namespace",
        addresses.join("; "),
        hosts.display()
    );
    let out = Command::new("unshare")
        .args(["-rnm", "sh", "-c", &script])
        .arg(std::env::current_exe().unwrap())
        .env("TEST_IN_NAMESPACE", "1")
        .output()
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    assert!(out.status.success() && text.contains("1 passed"), "{text}");
}

/// Not a test: what the test above runs, where public addresses are this host's.
#[test]
#[ignore = "another test of this module runs it"]
fn in_a_namespace() {
    if std::env::var("TEST_IN_NAMESPACE").is_err() {
        return skipped("another test runs this one in a namespace");
    }
    for public in PUBLIC {
        let image = served();
        let server = Server::start_at(public, move |request, _| image.reply(request));
        let result = server.pull_with("lib/app:1", public_only(&server), &NoProgress);
        assert_eq!(which(&result.unwrap().0), "pulled", "{public}");
    }
    for inside in INSIDE {
        leads_nowhere(inside, inside);
    }
    leads_nowhere("127.0.0.1", "inside.test");
    leads_nowhere("127.0.0.1", "both.test");
    // And a name of a public address serves.
    let image = served();
    let server = Server::start_at("9.9.9.9", move |request, _| image.reply(request));
    let port = server.address.rsplit_once(':').unwrap().1;
    let name = format!("public.test:{port}");
    let mut registries = public_only(&server);
    registries.plain_http.push(name.clone());
    let (image, _store) = pull(&format!("{name}/lib/app:1"), registries, &NoProgress).unwrap();
    assert_eq!(which(&image), "pulled");
}

/// A public registry leads to a server at the address `ip`, called `name`, in every way there is.
fn leads_nowhere(ip: &str, name: &str) {
    let image = served();
    let secret = Server::start_at(ip, move |request, _| match request.path.as_str() {
        "/token" => Reply::json(&json!({"token": "t"})),
        _ => image.reply(request),
    });
    let port = secret.address.rsplit_once(':').unwrap().1.to_owned();
    let inside = format!("{name}:{port}");
    for part in ["manifests", "blobs", "token"] {
        let (to, image) = (inside.clone(), served());
        let server = Server::start_at("9.9.9.9", move |request, _| {
            if part == "token" {
                let challenge = format!("Bearer realm=\"http://{to}/token\"");
                Reply::status(401).header("WWW-Authenticate", challenge)
            } else if request.path.contains(part) {
                Reply::status(307).header("Location", format!("http://{to}{}", request.path))
            } else {
                image.reply(request)
            }
        });
        let result = server.pull_with("lib/app:1", public_only(&server), &NoProgress);
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("is not an address of the public internet"),
            "{name} {part}: {error}"
        );
        assert!(error.contains(&inside), "{name} {part}: {error}");
        assert!(secret.seen("").is_empty(), "{name} {part}");
        // So it did lead there.
        let mut anywhere = public_only(&server);
        anywhere.public_only = false;
        if part != "token" {
            server
                .pull_with("lib/app:1", anywhere, &NoProgress)
                .unwrap();
        } else {
            let _ = server.pull_with("lib/app:1", anywhere, &NoProgress);
        }
        assert!(!secret.seen("").is_empty(), "{name} {part}");
        secret.seen.lock().unwrap().clear();
    }
    let image = served();
    let origin = Server::start_at("9.9.9.9", move |request, _| image.reply(request));
    let mut registries = public_only(&origin);
    registries
        .mirrors
        .insert(origin.address.clone(), vec![format!("http://{inside}")]);
    let said = Messages::default();
    origin.pull_with("lib/app:1", registries, &said).unwrap();
    assert!(said.text().contains("is not an address"), "{}", said.text());
    assert!(secret.seen("").is_empty(), "{name}");
}
