//! Local images whose files have no end, no writer or a hole without bottom: an error that names them, at once.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bantam_image::{Error, ImageSource, Limits, NoProgress, ResolveOptions, Store};
use serde_json::{Value, json};

use crate::common::image::{OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST};
use crate::common::{Entry, Layout, Tar, digest, gzip, read_erofs, run};

/// Long enough for a busy host, too short to read what [`Limits`] allow.
const AT_ONCE: Duration = Duration::from_secs(10);

/// What no file system is asked to give room for.
const HOLE: u64 = 1 << 40;

/// Resolves and loads `source`, each in a store of its own, and returns both errors.
fn refused(source: &ImageSource, what: &str) -> [Error; 2] {
    type Call = fn(&Store, &ImageSource) -> Result<(), Error>;
    let calls: [Call; 2] = [
        |store, source| {
            let options = ResolveOptions::default();
            store.resolve(source, &options, &NoProgress).map(drop)
        },
        |store, source| {
            let options = ResolveOptions::default();
            store.load(source, None, &options, &NoProgress).map(drop)
        },
    ];
    calls.map(|call| {
        let (done, result) = mpsc::channel();
        let source = source.clone();
        thread::spawn(move || {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::open(dir.path()).unwrap();
            // Nobody listens any more if it took too long.
            let _ = done.send(call(&store, &source));
        });
        match result.recv_timeout(AT_ONCE) {
            Ok(Err(error)) => error,
            Ok(Ok(())) => panic!("{what}: was taken for an image"),
            Err(_) => panic!("{what}: no end after {AT_ONCE:?}"),
        }
    })
}

/// A layout of one image with one layer, and the paths in it that are read.
fn layout(stored: &[u8], plain: &[u8]) -> (Layout, [String; 4]) {
    let mut layout = Layout::new();
    let layer = layout.blob(OCI_LAYER, stored);
    let config = layout.json(OCI_CONFIG, &Layout::config(&[digest(plain)]));
    let manifest = layout.json(
        OCI_MANIFEST,
        &json!({"schemaVersion": 2, "config": config, "layers": [layer]}),
    );
    layout.add(manifest.clone());
    let blob = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap();
        format!("blobs/{}", digest.replace(':', "/"))
    };
    let paths = [
        "index.json".to_owned(),
        blob(&manifest),
        blob(&config),
        blob(&layer),
    ];
    (layout, paths)
}

fn plain() -> Vec<u8> {
    Tar::new().file("which", "x").finish()
}

#[test]
fn what_is_no_regular_file_is_never_read() {
    type Put = fn(&Path);
    let substitutes: [(&str, Put); 6] = [
        ("a FIFO", |path| {
            drop(run("mkfifo", &[path.to_str().unwrap()]))
        }),
        ("a link to a FIFO", |path| {
            let fifo = path.with_extension("fifo");
            run("mkfifo", &[fifo.to_str().unwrap()]);
            symlink(fifo, path).unwrap();
        }),
        ("a link to zeros without end", |path| {
            symlink("/dev/zero", path).unwrap();
        }),
        ("a link to the terminal", |path| {
            symlink("/dev/tty", path).unwrap();
        }),
        ("a directory", |path| fs::create_dir(path).unwrap()),
        ("a link to itself", |path| symlink(path, path).unwrap()),
    ];
    for (kind, substitute) in substitutes {
        for at in 0..4 {
            let (layout, paths) = layout(&plain(), &plain());
            let path = layout.path().join(&paths[at]);
            fs::remove_file(&path).unwrap();
            substitute(&path);
            for error in refused(&layout.source(), &format!("{kind} at {}", paths[at])) {
                let text = error.to_string();
                assert!(text.contains(path.to_str().unwrap()), "{kind}: {text}");
                let opened = text.contains("not a regular file");
                assert!(opened || kind == "a link to itself", "{kind}: {text}");
            }
        }
    }
}

#[test]
fn what_is_longer_than_announced_is_not_read_to_its_end() {
    let zeros = vec![0; 1024];
    for (stored, plain) in [
        (plain(), plain()),
        (gzip(&plain()), plain()),
        // Ends the archive before anything came.
        (zeros.clone(), zeros),
    ] {
        for at in 0..4 {
            for more in [1, HOLE] {
                let (layout, paths) = layout(&stored, &plain);
                if (at, more) == (0, 1) {
                    // Nothing announces the length of the index.
                    continue;
                }
                let file = OpenOptions::new()
                    .write(true)
                    .open(layout.path().join(&paths[at]))
                    .unwrap();
                let len = file.metadata().unwrap().len();
                file.set_len(len + more).unwrap();
                for error in refused(&layout.source(), &format!("{more} more at {}", paths[at])) {
                    let text = error.to_string();
                    let said = match at {
                        3 => text.contains(&format!("more than the {len} bytes")),
                        // Documents have a bound of their own.
                        _ if more == HOLE => text.contains("more than 4194304 bytes"),
                        _ => text.contains(&format!("more than the {len} bytes")),
                    };
                    assert!(said, "{text}");
                }
            }
        }
    }
}

#[test]
fn a_layer_of_an_archive_is_as_long_as_announced() {
    let (layout, paths) = layout(&gzip(&plain()), &plain());
    let path = layout.path().join(&paths[3]);
    let mut bytes = fs::read(&path).unwrap();
    let len = bytes.len();
    bytes.push(0);
    fs::write(&path, bytes).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("image.tar");
    layout.pack(&archive);
    for error in refused(&ImageSource::Archive(archive), "an archive") {
        let text = error.to_string();
        assert!(
            text.contains(&format!("more than the {len} bytes")),
            "{text}"
        );
    }
}

#[test]
fn saved_layers_together_are_no_larger_than_an_image_may_be() {
    let config = Layout::config(&[digest(b""), digest(b"")]).to_string();
    for (name, size) in [
        ("one", HOLE),
        ("two", Limits::default().content_bytes / 2 + 1),
    ] {
        let layers = if name == "one" {
            ["hole", "empty"]
        } else {
            ["hole", "hole"]
        };
        let manifest = json!([{"Config": "config.json", "RepoTags": ["app:1"], "Layers": layers}]);
        let archive = Tar::new()
            .file("manifest.json", manifest.to_string())
            .file("config.json", &config)
            .file("empty", "")
            .pax(&[("size", size.to_string().as_bytes())])
            .entry(&Entry {
                size: Some(0),
                ..Entry::new(b'0', "hole")
            })
            .0;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.tar");
        fs::write(&path, &archive).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len((archive.len() as u64 + size).next_multiple_of(512))
            .unwrap();
        for error in refused(&ImageSource::Archive(path.clone()), name) {
            assert!(
                matches!(error, Error::Limit { limit, .. } if limit == Limits::default().content_bytes),
                "{error}"
            );
        }
    }
}

#[test]
fn a_bound_is_named_also_where_only_padding_reaches_it() {
    let mut plain = plain();
    plain.resize(64 << 20, 0);
    let (layout, _) = layout(&gzip(&plain), &plain);
    let options = ResolveOptions {
        limits: Limits {
            content_bytes: 32 << 20,
            ..Limits::default()
        },
        ..ResolveOptions::default()
    };
    let error = layout.resolve(&options).unwrap_err();
    assert!(
        matches!(error, Error::Limit { limit, .. } if limit == 32 << 20),
        "{error}"
    );
}

#[test]
fn what_an_archive_holds_beside_its_blobs_is_passed_over() {
    let config = Layout::config(&[digest(&plain())]).to_string();
    let manifest = json!([{"Config": "config.json", "RepoTags": ["app:1"], "Layers": ["layer"]}]);
    let start = Tar::new()
        .file("config.json", config)
        .file("layer", plain());
    for flag in [b'0', b'D', b'g', b'V'] {
        let hole = Entry {
            patches: vec![(124, vec![0x80, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0])],
            ..Entry::new(flag, "hole")
        };
        let before = start.clone().entry(&hole).0;
        let after = Tar::new()
            .file("manifest.json", manifest.to_string())
            .finish();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.tar");
        fs::write(&path, &before).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&after, before.len() as u64 + HOLE)
            .unwrap();
        let (done, result) = mpsc::channel();
        thread::spawn(move || {
            let store = Store::open(&dir.path().join("store")).unwrap();
            let options = ResolveOptions::default();
            let image = store.resolve(&ImageSource::Archive(path), &options, &NoProgress);
            let _ = done.send(image.map(|image| read_erofs(&image.rootfs)["which"].text()));
        });
        let which = result.recv_timeout(AT_ONCE).unwrap();
        assert_eq!(which.unwrap(), "x", "{}", char::from(flag));
    }
}

#[test]
fn a_layout_of_links_to_files_is_one() {
    let (layout, paths) = layout(&gzip(&plain()), &plain());
    for path in paths {
        let path = layout.path().join(path);
        let real = path.with_extension("real");
        fs::rename(&path, &real).unwrap();
        symlink(real, path).unwrap();
    }
    assert_eq!(layout.files().unwrap()["which"].text(), "x");
}

#[test]
fn no_archive_is_loaded_for_more_names_than_a_thousand() {
    let manifest: Value = json!([{"Config": "config.json", "Layers": ["layer.tar"],
        "RepoTags": (0..1001).map(|n| format!("app:{n}")).collect::<Vec<_>>()}]);
    let saved = Tar::new()
        .file("manifest.json", manifest.to_string())
        .file(
            "config.json",
            Layout::config(&[digest(&plain())]).to_string(),
        )
        .file("layer.tar", plain())
        .finish();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("saved.tar");
    fs::write(&path, saved).unwrap();

    let (layout, _) = layout(&plain(), &plain());
    let index = fs::read(layout.path().join("index.json")).unwrap();
    let mut index: Value = serde_json::from_slice(&index).unwrap();
    let names = (0..1001).map(|n| {
        let mut named = index["manifests"][0].clone();
        named["annotations"] = json!({"org.opencontainers.image.ref.name": format!("app:{n}")});
        named
    });
    index["manifests"] = names.collect();
    fs::write(layout.path().join("index.json"), index.to_string()).unwrap();

    for source in [ImageSource::Archive(path), layout.source()] {
        let store = tempfile::tempdir().unwrap();
        let store = Store::open(store.path()).unwrap();
        let all = ResolveOptions::default();
        let error = store.load(&source, None, &all, &NoProgress).unwrap_err();
        assert!(matches!(error, Error::Limit { limit: 1000, .. }), "{error}");
        assert!(store.list().unwrap().is_empty());
        let one = ResolveOptions {
            ref_name: Some("app:1000".to_owned()),
            ..ResolveOptions::default()
        };
        let loaded = store.load(&source, None, &one, &NoProgress).unwrap();
        assert_eq!(loaded[0].names[0].to_string(), "docker.io/library/app:1000");
    }
}

#[test]
fn manifests_are_looked_at_to_a_bound_over_all_images() {
    let mut layout = Layout::new();
    let mut config = Layout::config(&[digest(&plain())]);
    config["architecture"] = json!("other");
    let manifest = layout.manifest(&[(plain(), digest(&plain()))], &config);
    let inner = layout.json(
        OCI_INDEX,
        &json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": vec![manifest; 990]}),
    );
    for n in 0..11 {
        let mut named = inner.clone();
        named["annotations"] = json!({"org.opencontainers.image.ref.name": format!("app:{n}")});
        layout.add(named);
    }
    let store = tempfile::tempdir().unwrap();
    let store = Store::open(store.path()).unwrap();
    let load = |options: &ResolveOptions| store.load(&layout.source(), None, options, &NoProgress);
    let error = load(&ResolveOptions::default()).unwrap_err();
    assert!(
        matches!(error, Error::Limit { limit: 10_000, .. }),
        "{error}"
    );
    let one = ResolveOptions {
        ref_name: Some("app:10".to_owned()),
        ..ResolveOptions::default()
    };
    let error = load(&one).unwrap_err();
    assert!(matches!(error, Error::NoPlatform { .. }), "{error}");
}
