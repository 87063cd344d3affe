//! One image, whichever way it comes: the configuration and the process it gives are the same.

use std::fs;

use bantam_image::{
    Argv, DEFAULT_PATH, Image, ImageConfig, ImageSource, NoProgress, Platform, PullPolicy,
    Reference, ResolveOptions, Store,
};
use serde_json::{Value, json};

use crate::common::image::{OCI_CONFIG, OCI_LAYER, OCI_MANIFEST};
use crate::common::registry::{Reply, Server, quick};
use crate::common::{Layout, Tar, digest, gzip};

/// A configuration in which everything is said.
fn full() -> Value {
    json!({
        "User": "app:staff",
        "Env": ["PATH=/opt/bin", "EMPTY=", "NO_EQUALS", "LINES=a\nb=c"],
        "Entrypoint": ["/entry", "--flag"],
        "Cmd": ["one", "two words"],
        "WorkingDir": "/work/dir",
        "StopSignal": "SIGRTMIN+3",
        "Volumes": {"/data": {}, "/more": {}},
        "ExposedPorts": {"80/tcp": {}, "53/udp": {}},
        "Labels": {"a": "1", "b": ""},
    })
}

fn cmd_only() -> Value {
    json!({"Cmd": ["/bin/sh"], "Env": null, "User": "1000"})
}

/// By what way an image came, and the image.
type Came = Vec<(&'static str, Image)>;

/// Takes an image with this `config` along every way there is.
fn all_ways(config: &Value) -> (Came, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let plain = Tar::new().dir("bin/").file("bin/sh", "x").finish();
    let mut document = Layout::config(&[digest(&plain)]);
    document["config"] = config.clone();
    let mut layout = Layout::new();
    let mut manifest = layout.manifest(&[(gzip(&plain), digest(&plain))], &document);
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": "app:1"});
    layout.add(manifest.clone());

    let blob = |digest: &str| fs::read(layout.blob_path(digest)).unwrap();
    let digest_of = |value: &Value| value["digest"].as_str().unwrap().to_owned();
    let manifest_bytes = blob(&digest_of(&manifest));
    let parsed: Value = serde_json::from_slice(&manifest_bytes).unwrap();
    assert_eq!(parsed["layers"][0]["mediaType"], OCI_LAYER);
    assert_eq!(parsed["config"]["mediaType"], OCI_CONFIG);
    let blobs: Vec<(String, Vec<u8>)> = [&parsed["config"], &parsed["layers"][0]]
        .map(|descriptor| (digest_of(descriptor), blob(&digest_of(descriptor))))
        .to_vec();
    let server = Server::start(move |request, _| {
        if request.path.contains("manifests") {
            return Reply::ok(OCI_MANIFEST, &manifest_bytes);
        }
        let known = blobs.iter().find(|(d, _)| request.path.ends_with(d));
        known.map_or(Reply::status(404), |(_, bytes)| Reply::ok("", bytes))
    });

    let new_store = |name: &str| Store::open(&dir.path().join(name)).unwrap();
    let options = |pull| ResolveOptions {
        pull,
        registries: quick(),
        ..ResolveOptions::default()
    };
    let resolve = |store: &Store, source: &ImageSource, pull| {
        store.resolve(source, &options(pull), &NoProgress).unwrap()
    };
    let mut came = Came::new();

    let store = new_store("pulled");
    let name = format!("{}/lib/app:1", server.address);
    let reference = ImageSource::parse(&name).unwrap();
    let pulled = resolve(&store, &reference, PullPolicy::Missing);
    let stored = resolve(&store, &reference, PullPolicy::Never);
    let by_digest = ImageSource::parse(&pulled.digest).unwrap();
    came.push((
        "by its digest",
        resolve(&store, &by_digest, PullPolicy::Never),
    ));
    let again = resolve(&store, &reference, PullPolicy::Always);
    came.extend([
        ("pulled", pulled),
        ("stored", stored),
        ("pulled again", again),
    ]);

    let saved = dir.path().join("saved.tar");
    store.save_file(&name, &saved).unwrap();
    let saved = ImageSource::Archive(saved);
    came.push((
        "saved",
        resolve(&new_store("saved"), &saved, PullPolicy::Never),
    ));
    let store = new_store("loaded");
    let loaded = store.load(
        &saved,
        Some(&Reference::parse("l:1").unwrap()),
        &options(PullPolicy::Never),
        &NoProgress,
    );
    came.push(("loaded", loaded.unwrap().remove(0).image));
    let name = ImageSource::parse("l:1").unwrap();
    came.push((
        "loaded, by name",
        resolve(&store, &name, PullPolicy::Missing),
    ));

    let store = new_store("layout");
    came.push((
        "layout",
        resolve(&store, &layout.source(), PullPolicy::Missing),
    ));
    came.push((
        "layout, again",
        resolve(&store, &layout.source(), PullPolicy::Missing),
    ));

    let archive = dir.path().join("archive.tar");
    layout.pack(&archive);
    let archive = ImageSource::Archive(archive);
    let store = new_store("archive");
    came.push(("archive", resolve(&store, &archive, PullPolicy::Missing)));
    came.push((
        "archive, again",
        resolve(&store, &archive, PullPolicy::Missing),
    ));

    let docker = dir.path().join("docker.tar");
    let described = json!([{"Config": "c.json", "RepoTags": ["app:1"], "Layers": ["l.tar"]}]);
    let bytes = Tar::new()
        .file("c.json", document.to_string())
        .file("l.tar", &plain)
        .file("manifest.json", described.to_string());
    fs::write(&docker, bytes.finish()).unwrap();
    let docker = ImageSource::Archive(docker);
    let store = new_store("docker");
    came.push(("docker save", resolve(&store, &docker, PullPolicy::Missing)));
    came.push((
        "docker save, again",
        resolve(&store, &docker, PullPolicy::Missing),
    ));
    (came, dir)
}

fn words(words: &[&str]) -> Vec<Vec<u8>> {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

/// What is run for no and some arguments, without and with an entrypoint of the caller's.
fn processes(config: &ImageConfig) -> [Argv; 4] {
    let (args, entrypoint) = (words(&["x"]), words(&["/e"]));
    [
        config.process(&[], None),
        config.process(&args, None),
        config.process(&[], Some(&entrypoint)),
        config.process(&args, Some(&entrypoint)),
    ]
}

#[test]
fn an_image_gives_the_same_process_whichever_way_it_comes() {
    for document in [full(), cmd_only(), json!(null)] {
        let (came, _dir) = all_ways(&document);
        assert_eq!(came.len(), 13);
        let (_, first) = &came[0];
        for (way, image) in &came {
            assert_eq!(image.config, first.config, "{way}: {document}");
            assert_eq!(processes(&image.config), processes(&first.config), "{way}");
            let user = [(b"EMPTY".to_vec(), b"full".to_vec())];
            for user in [&user[..], &[]] {
                let environment = image.config.environment(user);
                assert_eq!(environment, first.config.environment(user), "{way}");
            }
        }
    }
}

#[test]
fn what_the_configuration_says_is_what_is_run() {
    let (came, _dir) = all_ways(&full());
    let config = &came[0].1.config;
    assert_eq!(config.user.as_deref(), Some("app:staff"));
    assert_eq!(config.working_dir.as_deref(), Some("/work/dir"));
    assert_eq!(config.stop_signal.as_deref(), Some("SIGRTMIN+3"));
    assert_eq!(config.volumes, ["/data", "/more"]);
    assert_eq!(config.exposed_ports, ["53/udp", "80/tcp"]);
    assert_eq!(config.labels["a"], "1");
    let run = |argv: &[&str]| Argv::Run(words(argv));
    assert_eq!(
        processes(config),
        [
            run(&["/entry", "--flag", "one", "two words"]),
            run(&["/entry", "--flag", "x"]),
            run(&["/e"]),
            run(&["/e", "x"]),
        ]
    );
    let environment = config.environment(&[]);
    assert_eq!(
        environment,
        words(&["PATH=/opt/bin", "EMPTY=", "LINES=a\nb=c"])
    );
}

#[test]
fn a_root_directory_runs_with_the_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::write(root.join("bin/sh"), "x").unwrap();
    let store = Store::open(&dir.path().join("store")).unwrap();
    for _ in ["made", "found"] {
        let image = store.resolve(
            &ImageSource::RootDir(root.clone()),
            &ResolveOptions::default(),
            &NoProgress,
        );
        let config = image.unwrap().config;
        let host = Platform::host();
        let want = ImageConfig {
            architecture: host.architecture,
            os: host.os,
            ..ImageConfig::default()
        };
        // Nobody's but root's, no command, no directory: as an image whose configuration says nothing.
        assert_eq!(config, want);
        let run = |argv: &[&str]| Argv::Run(words(argv));
        let want = [Argv::Idle, run(&["x"]), run(&["/e"]), run(&["/e", "x"])];
        assert_eq!(processes(&config), want);
        let path = format!("PATH={DEFAULT_PATH}");
        assert_eq!(config.environment(&[]), words(&[&path]));
        assert_eq!(all_ways(&json!(null)).0[0].1.config, config);
    }
}
