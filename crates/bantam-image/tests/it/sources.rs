//! Layouts, archives and root directories; which image of several.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use bantam_image::{Error, Image, ImageSource, NoProgress, Platform, ResolveOptions, Store};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::image::{OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST};
use crate::common::{Layout, Tar, digest, gzip, have, read_erofs, run, skipped};

const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

fn layer(text: &str) -> (Vec<u8>, String) {
    let bytes = Tar::new().file("which", text).finish();
    let id = digest(&bytes);
    (bytes, id)
}

/// A one-file image for a platform.
fn image(layout: &Layout, which: &str, architecture: &str, variant: Option<&str>) -> Value {
    let layer = layer(which);
    let mut config = Layout::config(std::slice::from_ref(&layer.1));
    config["architecture"] = json!(architecture);
    let mut manifest = layout.manifest(&[layer], &config);
    manifest["platform"] = json!({"os": "linux", "architecture": architecture});
    if let Some(variant) = variant {
        manifest["platform"]["variant"] = json!(variant);
    }
    manifest
}

fn named(mut descriptor: Value, name: &str) -> Value {
    descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": name});
    descriptor
}

fn options(platform: &str) -> ResolveOptions {
    ResolveOptions {
        platform: Platform::parse(platform).unwrap(),
        ..ResolveOptions::default()
    }
}

fn which(layout: &Layout, options: &ResolveOptions) -> Result<String, Error> {
    let (image, _store) = layout.resolve(options)?;
    Ok(read_erofs(&image.rootfs)["which"].text())
}

#[test]
fn the_first_entry_that_fits_the_platform_is_chosen_and_attestations_never_are() {
    let mut layout = Layout::new();
    let mut attestation = image(&layout, "attestation", "amd64", None);
    attestation["platform"] = json!({"os": "unknown", "architecture": "unknown"});
    layout.add(attestation);
    layout.add(
        json!({"mediaType": "application/vnd.in-toto+json", "digest": digest(b"?"), "size": 1}),
    );
    layout.add(json!({"mediaType": "x/y", "digest": "odd:!", "size": 1, "platform": {"os": "linux", "architecture": "amd64"}}));
    let mut windows = image(&layout, "windows", "amd64", None);
    windows["platform"]["os"] = json!("windows");
    layout.add(windows);
    for (text, architecture, variant) in [
        ("arm32", "arm", Some("v7")),
        ("arm64", "arm64", Some("v8")),
        ("amd64-v3", "amd64", Some("v3")),
        ("amd64", "amd64", None),
        ("amd64-again", "amd64", None),
    ] {
        let descriptor = image(&layout, text, architecture, variant);
        layout.add(descriptor);
    }
    for (platform, want) in [
        ("linux/amd64", "amd64"),
        ("linux/arm64", "arm64"),
        ("linux/arm64/v8", "arm64"),
        ("linux/arm/v7", "arm32"),
    ] {
        assert_eq!(
            which(&layout, &options(platform)).unwrap(),
            want,
            "{platform}"
        );
    }
}

#[test]
fn an_entry_without_variant_suits_a_v8_host_and_a_lone_higher_level_is_taken() {
    let mut layout = Layout::new();
    let descriptor = image(&layout, "plain", "arm64", None);
    layout.add(descriptor);
    let descriptor = image(&layout, "v3", "amd64", Some("v3"));
    layout.add(descriptor);
    assert_eq!(which(&layout, &options("linux/arm64/v8")).unwrap(), "plain");
    assert_eq!(which(&layout, &options("linux/amd64")).unwrap(), "v3");
}

#[test]
fn without_a_match_the_error_lists_what_is_on_offer() {
    let mut layout = Layout::new();
    let mut attestation = image(&layout, "attestation", "amd64", None);
    attestation["platform"] = json!({"os": "unknown", "architecture": "unknown"});
    layout.add(attestation);
    let descriptor = image(&layout, "arm", "arm64", None);
    layout.add(descriptor);
    let error = which(&layout, &options("linux/amd64")).unwrap_err();
    assert!(
        matches!(&error, Error::NoPlatform { offered, .. } if offered == &["linux/arm64"]),
        "{error:?}"
    );
    assert!(
        error
            .to_string()
            .contains("no image for linux/amd64; it offers linux/arm64"),
        "{error}"
    );
}

#[test]
fn a_single_manifest_must_be_for_the_platform_too() {
    let mut layout = Layout::new();
    let mut descriptor = image(&layout, "arm", "arm64", None);
    descriptor.as_object_mut().unwrap().remove("platform");
    layout.add(descriptor);
    assert_eq!(which(&layout, &options("linux/arm64")).unwrap(), "arm");
    assert!(matches!(
        which(&layout, &options("linux/amd64")),
        Err(Error::NoPlatform { .. })
    ));
}

#[test]
fn indexes_nest_to_a_bound() {
    let mut layout = Layout::new();
    let mut inner = image(&layout, "inner", "amd64", None);
    for _ in 0..3 {
        inner = layout.json(
            OCI_INDEX,
            &json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [inner]}),
        );
    }
    layout.add(inner.clone());
    assert_eq!(which(&layout, &options("linux/amd64")).unwrap(), "inner");
    for _ in 0..3 {
        inner = layout.json(
            OCI_INDEX,
            &json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [inner]}),
        );
    }
    let mut layout_deep = layout;
    fs::remove_file(layout_deep.path().join("index.json")).unwrap();
    layout_deep.add(inner);
    // The shallow one is still listed first; a layout of only the deep one is refused.
    let index = json!({"schemaVersion": 2, "manifests": [serde_json::from_slice::<Value>(&fs::read(layout_deep.path().join("index.json")).unwrap()).unwrap()["manifests"][1]]});
    fs::write(layout_deep.path().join("index.json"), index.to_string()).unwrap();
    assert!(matches!(
        which(&layout_deep, &options("linux/amd64")),
        Err(Error::Limit { .. })
    ));
}

#[test]
fn docker_types_equal_oci_types_and_lists_may_mix_them() {
    let mut layout = Layout::new();
    let (bytes, id) = layer("docker");
    let blob = layout.blob(
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
        &gzip(&bytes),
    );
    let mut config = Layout::config(&[id]);
    config["architecture"] = json!("amd64");
    let config = layout.json(DOCKER_CONFIG, &config);
    let manifest = json!({"schemaVersion": 2, "mediaType": DOCKER_MANIFEST, "config": config, "layers": [blob]});
    let mut docker = layout.json(DOCKER_MANIFEST, &manifest);
    docker["platform"] = json!({"os": "linux", "architecture": "amd64"});
    let oci = image(&layout, "oci", "arm64", Some("v8"));
    let list = json!({"schemaVersion": 2, "mediaType": DOCKER_LIST, "manifests": [docker, oci]});
    let list = layout.json(DOCKER_LIST, &list);
    layout.add(list);
    assert_eq!(which(&layout, &options("linux/amd64")).unwrap(), "docker");
    assert_eq!(which(&layout, &options("linux/arm64")).unwrap(), "oci");
}

#[test]
fn a_media_type_may_be_missing_but_not_contradict() {
    let (bytes, id) = layer("x");
    let build = |media_type: Option<&str>, announced: &str| {
        let mut layout = Layout::new();
        let blob = layout.blob(OCI_LAYER, &bytes);
        let config = layout.json(OCI_CONFIG, &Layout::config(std::slice::from_ref(&id)));
        let mut manifest = json!({"schemaVersion": 2, "config": config, "layers": [blob]});
        if let Some(media_type) = media_type {
            manifest["mediaType"] = json!(media_type);
        }
        let descriptor = layout.json(announced, &manifest);
        layout.add(descriptor);
        which(&layout, &ResolveOptions::default())
    };
    assert_eq!(build(None, OCI_MANIFEST).unwrap(), "x");
    assert_eq!(build(Some(OCI_MANIFEST), OCI_MANIFEST).unwrap(), "x");
    for (inside, announced) in [(OCI_INDEX, OCI_MANIFEST), (OCI_MANIFEST, DOCKER_MANIFEST)] {
        let error = build(Some(inside), announced).unwrap_err().to_string();
        assert!(error.contains("was announced as"), "{error}");
    }
}

#[test]
fn a_document_that_is_both_index_and_manifest_is_refused() {
    let mut layout = Layout::new();
    let (bytes, id) = layer("x");
    let blob = layout.blob(OCI_LAYER, &bytes);
    let config = layout.json(OCI_CONFIG, &Layout::config(&[id]));
    let both = json!({"schemaVersion": 2, "config": config, "layers": [blob], "manifests": []});
    let descriptor = layout.json(OCI_MANIFEST, &both);
    layout.add(descriptor);
    assert!(
        which(&layout, &ResolveOptions::default())
            .unwrap_err()
            .to_string()
            .contains("both")
    );
}

#[test]
fn schema_1_and_artifacts_are_refused_by_name() {
    let mut layout = Layout::new();
    let old = layout.json(
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
        &json!({"schemaVersion": 1, "fsLayers": []}),
    );
    layout.add(old);
    let error = which(&layout, &ResolveOptions::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("schema 1"), "{error}");

    let mut layout = Layout::new();
    let config = layout.json("application/vnd.cncf.helm.config.v1+json", &json!({}));
    let chart = layout.blob(
        "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
        b"chart",
    );
    let helm = layout.json(
        OCI_MANIFEST,
        &json!({"schemaVersion": 2, "config": config, "layers": [chart]}),
    );
    layout.add(helm);
    let error = which(&layout, &ResolveOptions::default()).unwrap_err();
    assert!(
        matches!(error, Error::Unsupported { .. }) && error.to_string().contains("helm"),
        "{error}"
    );
}

#[test]
fn several_images_need_a_name() {
    let mut layout = Layout::new();
    for name in ["one", "two"] {
        let descriptor = named(image(&layout, name, "amd64", None), name);
        layout.add(descriptor);
    }
    let mut full = image(&layout, "three", "amd64", None);
    full["annotations"] = json!({"io.containerd.image.name": "docker.io/library/three:latest", "org.opencontainers.image.ref.name": "latest"});
    layout.add(full);
    let mut options = options("linux/amd64");
    let error = which(&layout, &options).unwrap_err();
    assert!(
        matches!(&error, Error::Ambiguous { names, .. } if names.len() == 3),
        "{error:?}"
    );
    for (name, want) in [
        ("two", "two"),
        ("latest", "three"),
        ("docker.io/library/three:latest", "three"),
    ] {
        options.ref_name = Some(name.to_owned());
        assert_eq!(which(&layout, &options).unwrap(), want);
    }
    options.ref_name = Some("four".to_owned());
    let error = which(&layout, &options).unwrap_err().to_string();
    assert!(
        error.contains("named four") && error.contains("one, two"),
        "{error}"
    );
}

#[test]
fn history_and_media_types_of_layers_decide_nothing() {
    let mut layout = Layout::new();
    let (bytes, id) = layer("x");
    let blob = layout.blob(
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        &bytes,
    );
    let mut config = Layout::config(&[id]);
    config["history"] = json!([{"empty_layer": true}, {"empty_layer": true}, {}, {}]);
    let config = layout.json(OCI_CONFIG, &config);
    let mut manifest = json!({"schemaVersion": 2, "config": config, "layers": [blob]});
    manifest["layers"][0]["urls"] = json!(["https://example.invalid/x"]);
    manifest["layers"][0]["data"] = json!("AAAA");
    let descriptor = layout.json(OCI_MANIFEST, &manifest);
    layout.add(descriptor);
    assert_eq!(which(&layout, &ResolveOptions::default()).unwrap(), "x");
}

/// An archive of a layout, its entries in the given order.
fn archive_of(layout: &Layout, reverse: bool) -> Vec<u8> {
    let mut paths: Vec<PathBuf> = vec!["oci-layout".into(), "index.json".into()];
    for blob in fs::read_dir(layout.path().join("blobs/sha256")).unwrap() {
        paths.push(Path::new("blobs/sha256").join(blob.unwrap().file_name()));
    }
    paths.sort();
    if reverse {
        paths.reverse();
    }
    paths
        .iter()
        .fold(Tar::new(), |tar, path| {
            tar.file(
                format!("./{}", path.display()),
                fs::read(layout.path().join(path)).unwrap(),
            )
        })
        .finish()
}

struct Files {
    dir: TempDir,
    store: Store,
}

impl Files {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        Self { dir, store }
    }

    fn archive(&self, bytes: &[u8]) -> Result<Image, Error> {
        self.archive_with(bytes, &ResolveOptions::default())
    }

    fn archive_with(&self, bytes: &[u8], options: &ResolveOptions) -> Result<Image, Error> {
        let path = self.dir.path().join("image.tar");
        fs::write(&path, bytes).unwrap();
        self.store
            .resolve(&ImageSource::Archive(path), options, &NoProgress)
    }
}

#[test]
fn an_archived_layout_is_the_layout_in_any_order_and_compression() {
    let mut layout = Layout::new();
    let manifest = layout.image(&[layer("x").0]);
    for bytes in [
        archive_of(&layout, false),
        archive_of(&layout, true),
        gzip(&archive_of(&layout, false)),
        zstd::stream::encode_all(&*archive_of(&layout, true), 1).unwrap(),
    ] {
        let files = Files::new();
        let image = files.archive(&bytes).unwrap();
        assert_eq!(image.digest, manifest["digest"]);
        assert_eq!(read_erofs(&image.rootfs)["which"].text(), "x");
        assert_eq!(image.size, fs::metadata(&image.rootfs).unwrap().len());
    }
}

/// What `docker save` wrote for years: a directory for each layer, equal layers as symlinks.
fn docker_save(tags: Value) -> Vec<u8> {
    let base = Tar::new().file("base", "b").file("which", "lower").finish();
    let top = Tar::new().file("which", "upper").finish();
    let mut config = Layout::config(&[digest(&base), digest(&top), digest(&base), digest(&top)]);
    config["config"] = json!({"Cmd": ["sh"], "Env": ["A=1"]});
    let config = config.to_string();
    let name = digest(config.as_bytes()).replace("sha256:", "") + ".json";
    let manifest = json!([{"Config": name, "RepoTags": tags,
        "Layers": ["aaa/layer.tar", "bbb/layer.tar", "ccc/layer.tar", "./ddd/layer.tar"]}]);
    Tar::new()
        .dir("aaa/")
        .symlink("ccc/layer.tar", "../aaa/layer.tar")
        .file("aaa/layer.tar", &base)
        .file("bbb/layer.tar", gzip(&top))
        .hard_link("ddd/layer.tar", "bbb/layer.tar")
        .file("repositories", "{}")
        .file(&name, &config)
        .file("manifest.json", manifest.to_string())
        .finish()
}

#[test]
fn a_docker_save_archive_is_read_with_its_links() {
    let files = Files::new();
    for tags in [json!(["app:1"]), Value::Null] {
        let image = files.archive(&docker_save(tags)).unwrap();
        assert_eq!(image.config.cmd, ["sh"]);
        assert_eq!(image.config.env, ["A=1"]);
        let tree = read_erofs(&image.rootfs);
        assert_eq!(
            (tree["which"].text(), tree["base"].text()),
            ("upper".into(), "b".into())
        );
    }
}

#[test]
fn a_saved_layer_that_is_not_the_configurations_is_found() {
    let mut bytes = docker_save(json!(["app:1"]));
    let at = bytes.windows(5).position(|w| w == b"lower").unwrap();
    bytes[at] = b'L';
    assert!(matches!(
        Files::new().archive(&bytes),
        Err(Error::DigestMismatch { .. })
    ));
}

#[test]
fn an_image_of_a_docker_save_archive_is_chosen_by_tag() {
    let config = |which: &str| {
        let (_, id) = layer(which);
        Layout::config(&[id]).to_string()
    };
    let bytes = Tar::new()
        .file("1.json", config("one"))
        .file("2.json", config("two"))
        .file("1.tar", layer("one").0)
        .file("2.tar", layer("two").0)
        .file(
            "manifest.json",
            json!([{"Config": "1.json", "RepoTags": ["app:1", "app:old"], "Layers": ["1.tar"]},
                   {"Config": "2.json", "RepoTags": ["docker.io/library/app:2"], "Layers": ["2.tar"]}])
            .to_string(),
        )
        .finish();
    let files = Files::new();
    assert!(matches!(
        files.archive(&bytes),
        Err(Error::Ambiguous { .. })
    ));
    for (name, want) in [
        ("app:old", "one"),
        ("app:2", "two"),
        ("docker.io/library/app:1", "one"),
    ] {
        let options = ResolveOptions {
            ref_name: Some(name.into()),
            ..ResolveOptions::default()
        };
        let image = files.archive_with(&bytes, &options).unwrap();
        assert_eq!(read_erofs(&image.rootfs)["which"].text(), want);
    }
    let options = ResolveOptions {
        ref_name: Some("nope:1".into()),
        ..ResolveOptions::default()
    };
    let error = files
        .archive_with(&bytes, &options)
        .unwrap_err()
        .to_string();
    assert!(error.contains("app:old"), "{error}");
}

#[test]
fn archives_that_skopeo_and_umoci_write_are_read() {
    if !have("umoci") || !have("skopeo") {
        return skipped("umoci or skopeo is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(at("layer.tar"), layer("umoci").0).unwrap();
    run("umoci", &["init", "--layout", &at("oci")]);
    let image = format!("{}:base", at("oci"));
    run("umoci", &["new", "--image", &image]);
    run(
        "umoci",
        &["raw", "add-layer", "--image", &image, &at("layer.tar")],
    );
    let arch = Platform::host().architecture;
    run(
        "umoci",
        &[
            "config",
            "--image",
            &image,
            "--config.cmd",
            "sh",
            "--architecture",
            &arch,
            "--os",
            "linux",
        ],
    );
    for (kind, name) in [("docker-archive", "a.tar"), ("oci-archive", "b.tar")] {
        let target = format!("{kind}:{}:app:1", at(name));
        run(
            "skopeo",
            &[
                "copy",
                "--insecure-policy",
                &format!("oci:{image}"),
                &target,
            ],
        );
    }
    let store = Store::open(&dir.path().join("store")).unwrap();
    for source in [
        format!("oci:{}", at("oci")),
        at("a.tar"),
        format!("docker-archive:{}", at("a.tar")),
        at("b.tar"),
    ] {
        let source = ImageSource::parse(&source).unwrap();
        let image = store
            .resolve(&source, &ResolveOptions::default(), &NoProgress)
            .unwrap();
        assert_eq!(
            read_erofs(&image.rootfs)["which"].text(),
            "umoci",
            "{source}"
        );
        assert_eq!(image.config.cmd, ["sh"]);
    }
}

#[test]
fn a_root_directory_becomes_the_same_tree() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("etc/sub")).unwrap();
    fs::write(root.join("etc/passwd"), "root:x:0:0").unwrap();
    fs::write(root.join("big"), vec![9; 70_000]).unwrap();
    fs::hard_link(root.join("big"), root.join("etc/big2")).unwrap();
    symlink("/etc/shadow", root.join("abs")).unwrap();
    symlink("../../../..", root.join("etc/up")).unwrap();
    fs::set_permissions(root.join("etc/sub"), fs::Permissions::from_mode(0o1750)).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(root.join("sock")).unwrap();
    let has_xattr = rustix::fs::lsetxattr(
        root.join("big"),
        "user.k",
        b"v\0",
        rustix::fs::XattrFlags::empty(),
    )
    .is_ok();
    run("mkfifo", &[root.join("pipe").to_str().unwrap()]);
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        run(
            "mknod",
            &[root.join("null").to_str().unwrap(), "c", "1", "3"],
        );
        std::os::unix::fs::chown(root.join("etc/sub"), Some(4_000_000_000), Some(70_000)).unwrap();
    }
    let store = Store::open(&dir.path().join("store")).unwrap();
    let resolve = || {
        store.resolve(
            &ImageSource::RootDir(root.clone()),
            &ResolveOptions::default(),
            &NoProgress,
        )
    };
    let first = resolve().unwrap();
    let files = read_erofs(&first.rootfs);
    assert_eq!(files["etc/passwd"].text(), "root:x:0:0");
    assert_eq!(files["big"].nid, files["etc/big2"].nid);
    assert_eq!(files["abs"].text(), "/etc/shadow");
    assert_eq!(files["etc/up"].text(), "../../../..");
    assert_eq!(files["etc/sub"].mode, 0o041_750);
    assert_eq!(files["sock"].kind(), 0o140_000);
    assert_eq!(files["pipe"].kind(), 0o010_000);
    assert_eq!(files["big"].xattrs.contains_key("user.k"), has_xattr);
    if is_root {
        assert_eq!(
            (files["null"].kind(), files["null"].rdev),
            (0o020_000, 0x103)
        );
        assert_eq!(
            (files["etc/sub"].uid, files["etc/sub"].gid),
            (4_000_000_000, 70_000)
        );
    }
    let meta = fs::symlink_metadata(root.join("abs")).unwrap();
    use std::os::unix::fs::MetadataExt;
    assert_eq!(files["abs"].mtime, (meta.mtime(), meta.mtime_nsec() as u32));

    assert_eq!(resolve().unwrap(), first, "unchanged, it is the same image");
    fs::write(root.join("etc/passwd"), "root:y:0:0").unwrap();
    let second = resolve().unwrap();
    assert_ne!(second.digest, first.digest);
    assert_eq!(
        read_erofs(&second.rootfs)["etc/passwd"].text(),
        "root:y:0:0"
    );
}
