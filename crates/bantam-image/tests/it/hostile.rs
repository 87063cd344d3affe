//! Images that mean harm: they stay inside the tree, hit a named bound, or are refused.

use std::fs;

use bantam_image::{Error, ImageSource, Limits, NoProgress, ResolveOptions, Store};
use serde_json::json;

use crate::common::image::{OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST};
use crate::common::registry::{Reply, Server};
use crate::common::{Entry, Layout, Tar, apply, apply_with, digest, gzip};

fn limited(limits: Limits) -> ResolveOptions {
    ResolveOptions {
        limits,
        ..ResolveOptions::default()
    }
}

#[test]
fn no_name_leads_out_of_the_tree() {
    // Whatever a host path of these names would hit, the tree takes it in; nothing is opened by these names.
    let probe = tempfile::tempdir().unwrap();
    let outside = probe.path().join("outside");
    fs::write(&outside, "untouched").unwrap();
    let abs = outside.to_str().unwrap().to_owned();
    let up = format!("{}{}", "../".repeat(9), abs.trim_start_matches('/'));
    let inside = abs.trim_start_matches('/');
    for (lower, upper, at) in [
        (Tar::new(), Tar::new().file(&up, "x"), inside),
        (Tar::new(), Tar::new().file(&abs, "x"), inside),
        (
            Tar::new().symlink("l", "/"),
            Tar::new().file(format!("l{abs}"), "x"),
            inside,
        ),
        (
            Tar::new().symlink("l", "../../../.."),
            Tar::new().file(format!("l{abs}"), "x"),
            inside,
        ),
        (
            Tar::new().symlink("d/l", probe.path().to_str().unwrap()),
            Tar::new().file("d/l/outside", "x"),
            inside,
        ),
        (
            Tar::new().dir("d"),
            Tar::new()
                .symlink("d", probe.path().to_str().unwrap())
                .file("d/outside", "x"),
            inside,
        ),
        (Tar::new().file("a/../../b", "x"), Tar::new(), "b"),
        (
            Tar::new().symlink("l", "."),
            Tar::new().file("l/l/l/b", "x"),
            "b",
        ),
    ] {
        let files = apply(&[lower, upper]).unwrap();
        assert_eq!(files[at].text(), "x", "{at}");
        assert_eq!(fs::read_to_string(&outside).unwrap(), "untouched");
    }
    let parent = probe.path().to_str().unwrap();
    let whiteout = Tar::new()
        .symlink("l", parent)
        .whiteout("l/outside")
        .opaque("l")
        .whiteout(&up);
    apply(&[Tar::new(), whiteout]).unwrap();
    assert!(outside.exists());
}

#[test]
fn a_hard_link_never_reaches_a_host_file() {
    for target in ["/etc/passwd", "../../../../etc/passwd", "l/passwd"] {
        let layer = Tar::new().symlink("l", "/etc").hard_link("stolen", target);
        let error = apply(&[layer]).unwrap_err().to_string();
        assert!(error.contains("missing"), "{error}");
    }
}

#[test]
fn the_root_stays_a_directory() {
    for entry in [
        Entry {
            link: b"/etc".to_vec(),
            ..Entry::new(b'2', ".")
        },
        Entry {
            link: b"/etc".to_vec(),
            ..Entry::new(b'2', "/.")
        },
        Entry {
            link: b"x".to_vec(),
            ..Entry::new(b'1', "a/..")
        },
        Entry::new(b'0', "./."),
        Entry {
            device: (8, 0),
            ..Entry::new(b'4', "..")
        },
    ] {
        let error = apply(&[Tar::new().file("x", "").entry(&entry)])
            .unwrap_err()
            .to_string();
        assert!(error.contains("root"), "{error}");
    }
}

#[test]
fn a_decompression_bomb_stops_at_the_bound() {
    // 256 MiB of zeros in very little.
    let mut plain = Tar::new()
        .entry(&Entry {
            size: Some(256 << 20),
            ..Entry::new(b'0', "zeros")
        })
        .0;
    plain.resize(512 + (256 << 20), 0);
    let blob = gzip(&plain);
    assert!(blob.len() < 8 << 20);
    let mut layout = Layout::new();
    let id = digest(&plain);
    let manifest = layout.manifest(&[(blob, id.clone())], &Layout::config(&[id]));
    layout.add(manifest);
    let options = limited(Limits {
        content_bytes: 32 << 20,
        ..Limits::default()
    });
    match layout.resolve(&options) {
        Err(Error::Limit { limit, .. }) => assert_eq!(limit, 32 << 20),
        other => panic!("{other:?}"),
    }
    layout
        .resolve(&ResolveOptions::default())
        .expect("within the default bounds it is an image");
}

#[test]
fn a_sparse_bomb_stops_at_the_bound() {
    let layer = || {
        (0..100).fold(Tar::new(), |tar, i| {
            tar.pax(&[
                ("GNU.sparse.size", b"1099511627776"),
                ("GNU.sparse.map", b"0,1"),
            ])
            .file(format!("f{i}"), "x")
        })
    };
    assert!(matches!(apply(&[layer()]), Err(Error::Limit { .. })));
}

#[test]
fn entries_names_and_layers_are_bounded() {
    let many = || (0..50).fold(Tar::new(), |tar, i| tar.file(format!("f{i}"), ""));
    let entries = limited(Limits {
        entries: 40,
        ..Limits::default()
    });
    assert!(matches!(
        apply_with(&[many()], &entries),
        Err(Error::Limit { .. })
    ));
    // Rewriting one file over and over is bounded as well.
    let same = (0..50).fold(Tar::new(), |tar, _| tar.file("f", ""));
    assert!(matches!(
        apply_with(&[same], &entries),
        Err(Error::Limit { .. })
    ));
    // So are directories that no entry names.
    let implied = Tar::new()
        .pax(&[("path", "d/".repeat(50).as_bytes())])
        .dir("x");
    assert!(matches!(
        apply_with(&[implied], &entries),
        Err(Error::Limit { .. })
    ));
    let names = limited(Limits {
        metadata_bytes: 50,
        ..Limits::default()
    });
    assert!(matches!(
        apply_with(&[many()], &names),
        Err(Error::Limit { .. })
    ));
    let xattr = Tar::new()
        .pax(&[("SCHILY.xattr.user.a", &[0; 100])])
        .file("f", "");
    assert!(matches!(
        apply_with(&[xattr], &names),
        Err(Error::Limit { .. })
    ));
    let target = Tar::new().symlink("f", "t".repeat(100));
    assert!(matches!(
        apply_with(&[target], &names),
        Err(Error::Limit { .. })
    ));
    let layers = limited(Limits {
        layers: 2,
        ..Limits::default()
    });
    assert!(matches!(
        apply_with(&vec![Tar::new(); 3], &layers),
        Err(Error::Limit { .. })
    ));
}

#[test]
fn removed_metadata_no_longer_counts() {
    let names = limited(Limits {
        metadata_bytes: 300,
        ..Limits::default()
    });
    let layers: Vec<Tar> = (0..20)
        .map(|i| {
            Tar::new()
                .opaque(".")
                .symlink(format!("l{i}"), "t".repeat(90))
                .file("same", "")
        })
        .collect();
    assert_eq!(apply_with(&layers, &names).unwrap().len(), 3);
}

#[test]
fn absurd_headers_are_errors_and_not_panics() {
    let long = vec![b'n'; 5000];
    for layer in [
        Tar::new().entry(&Entry {
            size: Some(u64::MAX),
            ..Entry::new(b'0', "f")
        }),
        Tar::new().entry(&Entry {
            size: Some(i64::MAX as u64),
            ..Entry::new(b'0', "f")
        }),
        Tar::new()
            .pax(&[("size", b"18446744073709551615")])
            .file("f", ""),
        Tar::new()
            .pax(&[("size", b"18446744073709551616")])
            .file("f", ""),
        Tar::new()
            .pax(&[("mtime", b"99999999999999999999")])
            .file("f", ""),
        Tar::new().pax(&[("path", &long)]).file("f", ""),
        Tar::new().pax(&[("linkpath", &long)]).symlink("f", ""),
        Tar::new().pax(&[("path", b"a\0b")]).file("f", ""),
        Tar::new().symlink("f", ""),
        Tar::new().entry(&Entry {
            size: Some(2 << 20),
            ..Entry::new(b'L', "x")
        }),
        Tar::new().entry(&Entry {
            size: Some(2 << 20),
            ..Entry::new(b'x', "x")
        }),
        Tar::new().entry(&Entry {
            size: Some(u64::MAX),
            ..Entry::new(b'x', "x")
        }),
        Tar::new().entry(&Entry {
            device: (5000, 0),
            ..Entry::new(b'3', "d")
        }),
        Tar::new().entry(&Entry {
            device: (0, 0x10_0000),
            ..Entry::new(b'3', "d")
        }),
        Tar::new().entry(&Entry {
            patches: vec![(100, b"999".to_vec())],
            ..Entry::new(b'0', "f")
        }),
        Tar::new().entry(&Entry {
            patches: vec![(136, vec![0x80, 0xff, 0xff, 0xff])],
            ..Entry::new(b'0', "f")
        }),
        Tar::new().raw(&[0xff; 512]),
        Tar::new().raw(b"<html>not an archive</html>"),
    ] {
        assert!(apply(&[layer]).is_err());
    }
    let extreme = Tar::new()
        .entry(&Entry {
            mtime: i64::MAX,
            ..Entry::new(b'0', "late")
        })
        .entry(&Entry {
            mtime: i64::MIN,
            ..Entry::new(b'0', "early")
        })
        .entry(&Entry {
            mode: 0o7777777,
            ..Entry::new(b'0', "mode")
        });
    let files = apply(&[extreme]).unwrap();
    assert_eq!(files["late"].mtime.0, i64::MAX);
    assert_eq!(files["early"].mtime.0, i64::MIN);
    assert_eq!(files["mode"].mode, 0o107_777);
}

#[test]
fn one_flipped_byte_in_any_object_is_found_and_nothing_is_stored() {
    let layer = Tar::new()
        .file("a", (0..4000).map(|i| (i % 251) as u8).collect::<Vec<_>>())
        .finish();
    let id = digest(&layer);
    for make in [gzip as fn(&[u8]) -> Vec<u8>, <[u8]>::to_vec] {
        let mut layout = Layout::new();
        let manifest = layout.manifest(
            &[(make(&layer), id.clone())],
            &Layout::config(std::slice::from_ref(&id)),
        );
        layout.add(manifest);
        assert!(layout.files().is_ok());
        for blob in fs::read_dir(layout.path().join("blobs/sha256")).unwrap() {
            let path = blob.unwrap().path();
            let good = fs::read(&path).unwrap();
            for at in [
                0,
                1,
                good.len() / 3,
                good.len() / 2,
                good.len() - 9,
                good.len() - 1,
            ] {
                let mut bad = good.clone();
                bad[at] ^= 0x20;
                fs::write(&path, &bad).unwrap();
                let store = tempfile::tempdir().unwrap();
                let result = Store::open(store.path()).unwrap().resolve(
                    &layout.source(),
                    &ResolveOptions::default(),
                    &NoProgress,
                );
                assert!(
                    matches!(result, Err(Error::DigestMismatch { .. })),
                    "{path:?} at {at}: {result:?}"
                );
                let images =
                    fs::read_dir(store.path().join("images/v1")).map_or(0, Iterator::count);
                let work = fs::read_dir(store.path().join("tmp")).map_or(0, Iterator::count);
                assert_eq!((images, work), (0, 0));
            }
            fs::write(&path, &good).unwrap();
        }
    }
}

#[test]
fn a_wrong_diff_id_a_wrong_size_and_a_wrong_count_are_found() {
    let layer = Tar::new().file("a", "x").finish();
    let id = digest(&layer);
    let other = digest(b"other");
    let try_image = |config: serde_json::Value, layers: &[(Vec<u8>, String)]| {
        let mut layout = Layout::new();
        let manifest = layout.manifest(layers, &config);
        layout.add(manifest);
        layout.files().map(|_| ()).map_err(|e| e.to_string())
    };
    let layers = [(layer.clone(), id.clone())];
    let error = try_image(Layout::config(&[other]), &layers).unwrap_err();
    assert!(error.contains("uncompressed"), "{error}");
    for ids in [&[][..], &[id.clone(), id.clone()]] {
        let error = try_image(Layout::config(ids), &layers).unwrap_err();
        assert!(error.contains("lists"), "{error}");
    }
    let mut config = Layout::config(std::slice::from_ref(&id));
    config["rootfs"]["type"] = json!("other");
    assert!(try_image(config, &layers).unwrap_err().contains("rootfs"));

    let mut layout = Layout::new();
    let mut blob = layout.blob(OCI_LAYER, &layer);
    blob["size"] = json!(layer.len() + 1);
    let config = layout.json(OCI_CONFIG, &Layout::config(&[id]));
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": [blob]});
    let manifest = layout.json(OCI_MANIFEST, &manifest);
    layout.add(manifest);
    let error = layout.files().unwrap_err().to_string();
    assert!(error.contains("descriptor says"), "{error}");
}

#[test]
fn empty_and_malformed_images_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store")).unwrap();
    let resolve =
        |source: &ImageSource| store.resolve(source, &ResolveOptions::default(), &NoProgress);
    let file = dir.path().join("image.tar");
    for bytes in [
        &b""[..],
        &[0; 512],
        &[0; 10_240],
        b"not an archive",
        &Tar::new().file("manifest.json", "[]").finish(),
        &Tar::new().file("manifest.json", "{}").finish(),
        &Tar::new()
            .file(
                "manifest.json",
                r#"[{"Config":"../../etc/passwd","Layers":[]}]"#,
            )
            .finish(),
        &Tar::new().file("index.json", "{}").finish(),
        &Tar::new()
            .file("oci-layout", "{}")
            .file("index.json", "")
            .finish(),
        &Tar::new()
            .file("oci-layout", "{}")
            .file("index.json", r#"{"manifests":[]}"#)
            .finish(),
        &Tar::new()
            .file("oci-layout", "{}")
            .file("index.json", r#"{"manifests":null}"#)
            .finish(),
        &Tar::new()
            .symlink("manifest.json", "manifest.json")
            .finish(),
        &Tar::new()
            .file("etc/passwd", "a root file system, not an image")
            .finish(),
        &gzip(b""),
        &gzip(b"text"),
        &gzip(&[0; 4096])[..20],
        &[0x28, 0xb5, 0x2f, 0xfd],
    ] {
        fs::write(&file, bytes).unwrap();
        let result = resolve(&ImageSource::Archive(file.clone()));
        assert!(result.is_err(), "{result:?}");
    }
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    assert!(resolve(&ImageSource::RootDir(empty.clone())).is_err());
    assert!(resolve(&ImageSource::OciLayoutDir(empty)).is_err());
    assert!(
        resolve(&ImageSource::RootDir("/".into()))
            .unwrap_err()
            .to_string()
            .contains("host's own root")
    );
    assert!(
        resolve(&ImageSource::RootDir("/../etc/..".into()))
            .unwrap_err()
            .to_string()
            .contains("host's own root")
    );
    assert!(
        resolve(&ImageSource::RootDir(dir.path().into()))
            .unwrap_err()
            .to_string()
            .contains("image store")
    );
    assert!(!dir.path().join("store/images").exists());
}

#[test]
fn hiding_the_same_directory_again_and_again_takes_no_longer() {
    const MANY: usize = 20_000;
    let files = || {
        (0..MANY).fold(Tar::new(), |layer, i| {
            layer.file(format!("d/{}/f{i}", i % 7), "")
        })
    };
    let took = |layer: Tar| {
        let lower = Tar::new().file("d/lower", "").file("d/1/lower", "");
        let start = std::time::Instant::now();
        let files = apply(&[lower, layer]).unwrap();
        (files, start.elapsed())
    };
    // Each marker alone is a walk over all of its layer's files.
    let hiding = (0..MANY).fold(files(), |layer, i| match i % 3 {
        0 => layer.opaque("d"),
        1 => layer.whiteout("d"),
        _ => layer.opaque(&format!("d/{}", i % 7)),
    });
    let harmless = (0..MANY).fold(files(), |layer, i| layer.whiteout(&format!("d/none{i}")));
    let (_, usual) = took(harmless);
    let (files, hiding) = took(hiding);
    assert_eq!(files.len(), 1 + 1 + 7 + MANY);
    // It was some hundred times as long.
    assert!(hiding < usual * 10, "{hiding:?}, and {usual:?} without");
}

#[test]
fn links_through_links_end_somewhere() {
    // Short enough for each link, and too long together.
    let up = "../".repeat(1000);
    let detour = |links: usize| {
        let mut layer = Tar::new().dir("d");
        for i in 0..links {
            let name = format!("l{i}");
            layer = match i {
                0 => layer.symlink(name, "d"),
                _ => layer
                    .gnu_long(b'K', format!("{up}l{}", i - 1))
                    .symlink(name, "x"),
            };
        }
        layer.file(format!("l{}/f", links - 1), "through")
    };
    assert_eq!(apply(&[detour(3)]).unwrap()["d/f"].text(), "through");
    let error = apply(&[detour(5)]).unwrap_err().to_string();
    assert!(error.contains("too many levels"), "{error}");
}

#[test]
fn indexes_that_multiply_are_not_followed_without_end() {
    let mut layout = Layout::new();
    // Of a platform that nobody wants, as only its configuration tells.
    let layer = Tar::new().file("x", "").finish();
    let mut config = Layout::config(&[digest(&layer)]);
    config["architecture"] = json!("s390x");
    let mut inner = layout.manifest(&[(layer.clone(), digest(&layer))], &config);
    for _ in 0..3 {
        let index =
            json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": vec![inner; 100]});
        inner = layout.json(OCI_INDEX, &index);
    }
    layout.add(inner);
    match layout.files() {
        Err(Error::Limit { unit, .. }) => assert_eq!(unit, "manifests to look at"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn layers_that_claim_more_than_an_image_may_hold_are_not_fetched() {
    let layer = Tar::new().file("x", "").finish();
    let config = Layout::config(&[digest(&layer), digest(&layer)]).to_string();
    for sizes in [[1 << 40, 10], [40 << 30, 40 << 30], [u64::MAX, u64::MAX]] {
        let layers = sizes.map(|size| json!({"digest": digest(&layer), "size": size}));
        let manifest = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": layers,
            "config": {"digest": digest(config.as_bytes()), "size": config.len()}})
        .to_string();
        let server = Server::start(move |_, _| Reply::ok(OCI_MANIFEST, manifest.as_bytes()));
        let result = server.pull("lib/app:1");
        assert!(matches!(result, Err(Error::Limit { .. })), "{result:?}");
        assert!(server.seen("/blobs/").is_empty());
    }
}
