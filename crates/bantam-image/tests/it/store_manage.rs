//! Loading, saving, listing and removing images of the store, also while others use it and die in it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bantam_image::{
    Digest, Error, Image, ImageSource, Loaded, NoProgress, PullPolicy, Reference, ResolveOptions,
    Store,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Layout, Tar, digest, gzip, have, read_erofs, run, skipped};

const CHILD: &str = "BANTAM_IMAGE_TEST_MANAGER";
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// A store and the archives that a test makes.
struct Bench {
    dir: TempDir,
    store: Store,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        Self { dir, store }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn load(&self, source: &ImageSource) -> Result<Vec<Loaded>, Error> {
        self.store
            .load(source, None, &ResolveOptions::default(), &NoProgress)
    }

    fn load_one(&self, layout: &Layout) -> Image {
        let mut loaded = self.load(&layout.source()).unwrap();
        assert_eq!(loaded.len(), 1);
        loaded.remove(0).image
    }

    /// As `run --pull never` does.
    fn resolve(&self, name: &str) -> Result<Image, Error> {
        let options = ResolveOptions {
            pull: PullPolicy::Never,
            ..ResolveOptions::default()
        };
        let source = ImageSource::Registry(Reference::parse(name).unwrap());
        self.store.resolve(&source, &options, &NoProgress)
    }

    fn tar(&self, layout: &Layout, name: &str) -> ImageSource {
        let path = self.path(name);
        layout.pack(&path);
        ImageSource::Archive(path)
    }

    fn names(&self) -> Vec<String> {
        let images = self.store.list().unwrap();
        images.into_iter().flat_map(|image| image.names).collect()
    }

    fn remove(&self, name: &str) -> Result<bantam_image::Removed, Error> {
        self.store.remove(name, &NoProgress)
    }

    fn prune(&self, all: bool) -> bantam_image::Pruned {
        self.store.prune(all, &NoProgress).unwrap()
    }

    fn blobs(&self) -> usize {
        fs::read_dir(self.store.dir().join("blobs/sha256")).map_or(0, Iterator::count)
    }
}

/// Adds an image of gzip layers under a name.
fn add(layout: &mut Layout, name: &str, layers: &[Vec<u8>]) -> String {
    let stored: Vec<_> = layers.iter().map(|l| (gzip(l), digest(l))).collect();
    let ids: Vec<_> = layers.iter().map(|l| digest(l)).collect();
    let mut config = Layout::config(&ids);
    config["created"] = json!("2024-02-03T04:05:06Z");
    config["config"] = json!({"Cmd": [name], "Labels": {"k": "v"}});
    let mut manifest = layout.manifest(&stored, &config);
    manifest["annotations"] = json!({(REF_NAME): name});
    layout.add(manifest.clone());
    manifest["digest"].as_str().unwrap().to_owned()
}

fn named(name: &str) -> Layout {
    let mut layout = Layout::new();
    add(&mut layout, name, &[layer("which", name)]);
    layout
}

fn layer(file: &str, content: &str) -> Vec<u8> {
    Tar::new()
        .file(file, content)
        .file("filler", vec![7; 200_000])
        .finish()
}

fn which(image: &Image) -> String {
    read_erofs(&image.rootfs)["which"].text()
}

#[test]
fn a_loaded_image_resolves_by_its_name_without_a_registry() {
    let bench = Bench::new();
    let layout = named("app:1");
    let loaded = bench.load(&bench.tar(&layout, "a.tar")).unwrap();
    let names: Vec<_> = loaded[0].names.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["docker.io/library/app:1"]);
    let image = bench.resolve("app:1").unwrap();
    assert_eq!(image, loaded[0].image);
    assert_eq!(which(&image), "app:1");
    assert!(bench.resolve("app:2").is_err());

    // Under a name of the caller's choice, from a directory.
    let name = Reference::parse("localhost/other:x").unwrap();
    let options = ResolveOptions::default();
    let again = bench
        .store
        .load(&layout.source(), Some(&name), &options, &NoProgress)
        .unwrap();
    assert_eq!(again[0].image, image);
    assert_eq!(bench.resolve("localhost/other:x").unwrap(), image);
    assert_eq!(bench.store.list().unwrap()[0].names.len(), 2);
}

#[test]
fn all_images_of_an_archive_are_loaded_and_bare_tags_name_none() {
    let bench = Bench::new();
    let mut layout = Layout::new();
    for name in ["a/b:1", "latest", "c:2"] {
        add(&mut layout, name, &[layer("which", name)]);
    }
    let loaded = bench.load(&layout.source()).unwrap();
    assert_eq!(loaded.len(), 3);
    assert_eq!(which(&bench.resolve("a/b:1").unwrap()), "a/b:1");
    assert_eq!(which(&bench.resolve("c:2").unwrap()), "c:2");
    assert!(bench.resolve("latest").is_err());
    let nameless = loaded.iter().find(|one| one.names.is_empty()).unwrap();
    assert_eq!(which(&nameless.image), "latest");
    // Any name with the digest finds it.
    let by_digest = format!("x@{}", nameless.image.digest);
    assert_eq!(bench.resolve(&by_digest).unwrap(), nameless.image);
}

#[test]
fn an_image_that_is_saved_and_loaded_elsewhere_has_the_same_digest() {
    let (one, two) = (Bench::new(), Bench::new());
    let image = one.load_one(&named("app:1"));
    let file = one.path("out.tar");
    one.store.save_file("app:1", &file).unwrap();
    let mut bytes = Vec::new();
    one.store.save("app:1", &mut bytes).unwrap();
    assert!(fs::read(&file).unwrap() == bytes, "one image, two archives");

    let loaded = two.load(&ImageSource::Archive(file.clone())).unwrap();
    assert_eq!(loaded[0].image.digest, image.digest);
    assert_eq!(loaded[0].image.config, image.config);
    assert_eq!(
        fs::read(&loaded[0].image.rootfs).unwrap(),
        fs::read(&image.rootfs).unwrap()
    );
    assert_eq!(two.names(), ["docker.io/library/app:1"]);
    if !have("skopeo") {
        return skipped("skopeo is not installed");
    }
    let archive = format!("oci-archive:{}", file.display());
    let seen = run("skopeo", &["inspect", &archive]);
    let seen: Value = serde_json::from_str(&seen).unwrap();
    assert_eq!(seen["Digest"], *image.digest);
    assert_eq!(seen["Labels"]["k"], "v");
    let by_name = format!("{archive}:docker.io/library/app:1");
    run("skopeo", &["inspect", "--config", &by_name]);
    let copied = format!("dir:{}", one.path("copied").display());
    run("skopeo", &["copy", "--insecure-policy", &archive, &copied]);
}

#[test]
fn a_docker_save_archive_is_loaded_and_saved_as_an_oci_archive() {
    let bench = Bench::new();
    let (base, top) = (layer("base", "b"), layer("which", "top"));
    let config = Layout::config(&[digest(&base), digest(&top), digest(&base)]).to_string();
    let manifest = json!([{"Config": "c.json", "RepoTags": ["app:1", "app:old"],
        "Layers": ["1.tar", "2.tar", "1.tar"]}]);
    let saved = Tar::new()
        .file("1.tar", &base)
        .file("2.tar", gzip(&top))
        .file("c.json", &config)
        .file("manifest.json", manifest.to_string())
        .finish();
    let path = bench.path("saved.tar");
    fs::write(&path, gzip(&saved)).unwrap();
    let loaded = bench.load(&ImageSource::Archive(path)).unwrap();
    assert_eq!((loaded.len(), loaded[0].names.len()), (1, 2));
    assert_eq!(loaded[0].image.digest, digest(config.as_bytes()));
    let out = bench.path("out.tar");
    bench.store.save_file("app:old", &out).unwrap();
    let details = bench.store.inspect("app:1").unwrap();
    let types: Vec<_> = details
        .layers
        .iter()
        .map(|l| l.media_type.rsplit('.').next().unwrap())
        .collect();
    assert_eq!(types, ["tar", "tar+gzip", "tar"]);

    let other = Bench::new();
    let again = other.load(&ImageSource::Archive(out)).unwrap();
    assert_eq!(again[0].image.digest, details.manifest.unwrap().digest);
    assert_eq!(which(&again[0].image), "top");
}

#[test]
fn what_was_only_run_cannot_be_saved_until_it_is_loaded() {
    let bench = Bench::new();
    let archive = bench.tar(&named("app:1"), "a.tar");
    let options = ResolveOptions::default();
    let resolve = |source| {
        bench
            .store
            .resolve(source, &options, &NoProgress)
            .unwrap()
            .digest
    };
    let run_only = resolve(&archive);
    assert_eq!(bench.blobs(), 0, "the archive has them");
    let refused = |name: &str| bench.store.save(name, &mut Vec::new()).unwrap_err();
    assert!(matches!(refused(&run_only), Error::Unsupported { .. }));
    let file = bench.path("no.tar");
    assert!(bench.store.save_file(&run_only, &file).is_err());
    assert!(!file.exists());
    let details = bench.store.inspect(&run_only).unwrap();
    assert!(!details.image.can_save && details.sources[0].ends_with("a.tar"));

    let root = bench.path("root");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("f"), "x").unwrap();
    let root = ImageSource::RootDir(root);
    let root_digest = resolve(&root);
    let error = refused(&root_digest).to_string();
    assert!(error.contains("made from a directory"), "{error}");
    assert!(matches!(bench.load(&root), Err(Error::Unsupported { .. })));

    bench.load(&archive).unwrap();
    bench.store.save(&run_only, &mut Vec::new()).unwrap();
    assert!(bench.store.inspect("app:1").unwrap().image.can_save);
}

#[test]
fn a_damaged_blob_is_never_saved_and_is_loaded_again() {
    let bench = Bench::new();
    let layout = named("app:1");
    bench.load_one(&layout);
    let details = bench.store.inspect("app:1").unwrap();
    let hex = details.layers[0].digest.replace("sha256:", "");
    let blob = bench.store.dir().join("blobs/sha256").join(hex);
    let good = fs::read(&blob).unwrap();
    let mut bad = good.clone();
    bad[100] ^= 1;
    fs::write(&blob, bad).unwrap();
    let file = bench.path("out.tar");
    assert!(matches!(
        bench.store.save_file("app:1", &file),
        Err(Error::DigestMismatch { .. })
    ));
    assert_eq!(
        fs::read_dir(bench.dir.path()).unwrap().count(),
        1,
        "no file"
    );
    fs::write(&blob, &good[1..]).unwrap();
    bench.load_one(&layout);
    assert!(fs::read(&blob).unwrap() == good);
    bench.store.save_file("app:1", &file).unwrap();
}

#[test]
fn shared_layers_are_counted_once_and_stay_while_one_image_has_them() {
    let bench = Bench::new();
    let base = layer("base", "shared");
    let mut layout = Layout::new();
    add(&mut layout, "a:1", &[base.clone(), layer("which", "a")]);
    add(&mut layout, "b:1", &[base, layer("which", "b")]);
    drop(bench.load(&layout.source()).unwrap());
    let images = bench.store.list().unwrap();
    assert_eq!(images.len(), 2);
    let shared = images[0].shared_bytes;
    assert!(shared > 0 && shared < images[0].blob_bytes);
    let usage = bench.store.usage().unwrap();
    let sum: u64 = images.iter().map(|image| image.blob_bytes).sum();
    assert_eq!(usage.blob_bytes, sum - shared);
    assert_eq!((usage.unused_blob_bytes, usage.unfinished_bytes), (0, 0));

    let removed = bench.remove("a:1").unwrap();
    assert_eq!(removed.names, ["docker.io/library/a:1"]);
    let after = bench.store.usage().unwrap();
    assert_eq!(removed.bytes_freed, usage.bytes() - after.bytes());
    assert_eq!(bench.store.list().unwrap()[0].shared_bytes, 0);
    bench.store.save("b:1", &mut Vec::new()).unwrap();
    assert_eq!(which(&bench.resolve("b:1").unwrap()), "b");
}

#[test]
fn a_name_goes_alone_while_the_image_has_another() {
    let bench = Bench::new();
    let layout = named("app:1");
    let digest = bench.load_one(&layout).digest;
    let name = Reference::parse("app:2").unwrap();
    let load = || {
        let options = ResolveOptions::default();
        let loaded = bench
            .store
            .load(&layout.source(), Some(&name), &options, &NoProgress);
        drop(loaded.unwrap());
    };
    load();
    let removed = bench.remove("app:1").unwrap();
    assert_eq!((removed.names.len(), removed.images.len()), (1, 0));
    assert_eq!(bench.names(), ["docker.io/library/app:2"]);
    assert!(matches!(
        bench.remove("app:1"),
        Err(Error::NoSuchImage { .. })
    ));
    bench.load_one(&layout);
    // The first digits of the digest are enough, and take all names.
    let removed = bench.remove(&digest["sha256:".len()..][..8]).unwrap();
    assert_eq!((removed.names.len(), removed.images), (2, vec![digest]));
    assert!(bench.store.list().unwrap().is_empty());
    assert_eq!(bench.store.usage().unwrap().bytes(), 0);
}

#[test]
fn an_image_in_use_is_not_removed_and_a_pinned_one_neither() {
    let bench = Bench::new();
    let image = bench.load_one(&named("app:1"));
    let held = image.clone();
    drop(image);
    for name in ["app:1", &held.digest.clone()] {
        let error = bench.remove(name).unwrap_err();
        assert!(matches!(&error, Error::InUse { .. }), "{error}");
    }
    let pruned = bench.prune(true);
    assert_eq!(pruned.in_use, std::slice::from_ref(&held.digest));
    assert_eq!(bench.resolve("app:1").unwrap(), held, "not even its name");

    bench.store.pin(&held, "machine one").unwrap();
    drop(held);
    let error = bench.remove("app:1").unwrap_err().to_string();
    assert!(error.contains("machine one"), "{error}");
    assert!(bench.prune(true).images.is_empty());
    assert_eq!(bench.store.list().unwrap()[0].pinned_by, ["machine one"]);
    bench.store.unpin("machine one").unwrap();
    bench.store.unpin("machine one").unwrap();
    assert_eq!(bench.remove("app:1").unwrap().images.len(), 1);
}

#[test]
fn an_image_that_was_dropped_is_free_though_a_new_process_has_copies_of_our_files() {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let bench = Bench::new();
    let image = bench.load_one(&named("app:1"));
    // As another thread has them for a moment that starts a program: between fork and exec.
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let copies: Vec<_> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .flatten()
        .filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == image.rootfs))
        .map(|fd| fd.file_name().to_str().unwrap().parse().unwrap())
        .map(|fd| pidfd_getfd(&own, fd, PidfdGetfdFlags::empty()).unwrap())
        .collect();
    assert!(!copies.is_empty());
    assert!(matches!(bench.remove("app:1"), Err(Error::InUse { .. })));
    drop(image);
    bench.remove("app:1").unwrap();
    drop(copies);
}

#[test]
fn pruning_takes_what_nothing_refers_to_and_leaves_the_rest() {
    let bench = Bench::new();
    assert_eq!(bench.prune(false), bantam_image::Pruned::default());
    assert!(!bench.store.dir().exists());

    bench.load_one(&named("keep:1"));
    let archive = bench.tar(&named("other:1"), "other.tar");
    let options = ResolveOptions::default();
    let nameless = bench
        .store
        .resolve(&archive, &options, &NoProgress)
        .unwrap();
    // A blob of no image, a file that is no blob, work of a dead process, a damaged image.
    let blobs = bench.store.dir().join("blobs/sha256");
    fs::write(blobs.join(Digest::of(b"stray").hex()), "stray").unwrap();
    fs::write(blobs.join("junk"), "junk").unwrap();
    fs::create_dir(bench.store.dir().join("tmp/work-dead")).unwrap();
    fs::write(bench.store.dir().join("tmp/work-dead/part"), vec![1; 5000]).unwrap();
    let damaged = format!("images/v1/sha256-{}", Digest::of(b"x").hex());
    fs::create_dir(bench.store.dir().join(&damaged)).unwrap();
    let usage = bench.store.usage().unwrap();
    assert!(usage.unused_blob_bytes > 0 && usage.unfinished_bytes > 0);

    let digest = nameless.digest.clone();
    assert_eq!(bench.prune(false).in_use, std::slice::from_ref(&digest));
    drop(nameless);
    let pruned = bench.prune(false);
    assert_eq!(pruned.images, [digest]);
    assert!(pruned.names.is_empty() && pruned.bytes_freed > 0);
    let after = bench.store.usage().unwrap();
    assert_eq!((after.unused_blob_bytes, after.unfinished_bytes), (0, 0));
    assert!(!bench.store.dir().join(damaged).exists());
    assert_eq!(bench.names(), ["docker.io/library/keep:1"]);
    bench.store.save("keep:1", &mut Vec::new()).unwrap();

    let pruned = bench.prune(true);
    assert_eq!(pruned.names, ["docker.io/library/keep:1"]);
    assert_eq!(bench.store.usage().unwrap().bytes(), 0);
    assert!(bench.resolve("keep:1").is_err());
}

#[test]
fn an_image_that_was_resolved_is_there_however_much_is_pruned_meanwhile() {
    let bench = Bench::new();
    let mut layout = Layout::new();
    let layers = [layer("base", "shared"), layer("which", "still here")];
    add(&mut layout, "app:1", &layers);
    let source = bench.tar(&layout, "a.tar");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let pruner = scope.spawn(|| {
            let mut removed = 0;
            while !done.load(Ordering::Relaxed) {
                removed += bench.prune(true).images.len();
                // Names that nobody has now are no concern here.
                removed += bench.remove("app:1").map_or(0, |r| r.images.len());
            }
            removed
        });
        let users: Vec<_> = (0..2)
            .map(|n| {
                let (bench, source) = (&bench, &source);
                scope.spawn(move || {
                    for _ in 0..40 {
                        let image = if n == 0 {
                            bench.load(source).unwrap().remove(0).image
                        } else {
                            let options = ResolveOptions::default();
                            bench.store.resolve(source, &options, &NoProgress).unwrap()
                        };
                        assert_eq!(which(&image), "still here");
                        if n == 0 {
                            bench.store.save(&image.digest, &mut Vec::new()).unwrap();
                        }
                    }
                })
            })
            .collect();
        let ended: Vec<_> = users.into_iter().map(|user| user.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok));
        assert!(pruner.join().unwrap() > 0, "nothing was ever removed");
    });
}

/// Not a test of its own: what is killed below.
#[test]
fn child() {
    let Ok(request) = std::env::var(CHILD) else {
        return;
    };
    let (dir, archive) = request.split_once('\n').unwrap();
    let store = Store::open(Path::new(dir)).unwrap();
    let source = ImageSource::Archive(archive.into());
    loop {
        let options = ResolveOptions::default();
        store
            .load(&source, None, &options, &NoProgress)
            .map(drop)
            .unwrap();
        store.remove("a:1", &NoProgress).unwrap();
        store.prune(true, &NoProgress).unwrap();
    }
}

#[test]
fn a_process_killed_at_any_time_leaves_no_bad_data() {
    let bench = Bench::new();
    let mut layout = Layout::new();
    let base = layer("base", "shared");
    add(&mut layout, "a:1", &[base.clone(), layer("which", "a")]);
    add(&mut layout, "b:1", &[base, layer("which", "b")]);
    let source = bench.tar(&layout, "a.tar");
    let mut seen = BTreeSet::new();
    for round in 0..60_u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "store_manage::child", "--nocapture"])
            .env(
                CHILD,
                format!(
                    "{}\n{}",
                    bench.store.dir().display(),
                    bench.path("a.tar").display()
                ),
            )
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Not to wait for something: to be in the middle of anything.
        std::thread::sleep(Duration::from_micros(3_000 + 1_700 * round));
        child.kill().unwrap();
        assert_eq!(
            child.wait().unwrap().signal(),
            Some(9),
            "it ended by itself"
        );
        for image in bench.store.list().unwrap() {
            seen.insert((image.names.len(), image.can_save));
            assert!(image.can_save, "{image:?}");
            bench.store.save(&image.digest, &mut Vec::new()).unwrap();
        }
        for name in bench.names() {
            let image = bench.resolve(&name).unwrap();
            assert!(name.contains(&format!("/{}:", which(&image))), "{name}");
        }
    }
    let loaded = bench.load(&source).unwrap();
    assert_eq!(loaded.len(), 2);
    let digests: BTreeSet<_> = loaded.iter().map(|l| l.image.digest.clone()).collect();
    assert_eq!(digests.len(), 2);
    drop(loaded);
    bench.prune(false);
    let usage = bench.store.usage().unwrap();
    assert_eq!((usage.unused_blob_bytes, usage.unfinished_bytes), (0, 0));
    assert!(!seen.is_empty(), "no child ever came to anything");
    bench.prune(true);
    assert_eq!(bench.store.usage().unwrap().bytes(), 0);
}

/// A small file system of its own, until dropped.
struct Small(TempDir);

impl Small {
    fn new(options: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(dir.path())
            .output();
        mounted
            .is_ok_and(|out| out.status.success())
            .then_some(Self(dir))
    }

    fn remount(&self, options: &str) {
        let path = self.0.path().to_str().unwrap();
        run("mount", &["-o", &format!("remount,{options}"), path]);
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_and_a_read_only_store_say_where_and_why() {
    let Some(small) = Small::new("size=300k") else {
        return skipped("a small file system cannot be mounted here");
    };
    let path = small.0.path().join("store");
    let store = Store::open(&path).unwrap();
    // Contents that compress and repeat nowhere.
    let mut state = 1_u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .take(64 * 1024)
    .flatten()
    .collect();
    let mut layout = Layout::new();
    let root_dir = tempfile::tempdir().unwrap();
    fs::write(root_dir.path().join("noise"), &noise).unwrap();
    let root = ImageSource::RootDir(root_dir.path().to_owned());
    let plain = Tar::new().file("noise", noise).finish();
    add(&mut layout, "big:1", &[plain]);
    let options = ResolveOptions::default();
    let chain = |error: Error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        format!("{error}: {}", cause.unwrap_or_default())
    };
    let load = || store.load(&layout.source(), None, &options, &NoProgress);
    let resolve = || store.resolve(&layout.source(), &options, &NoProgress);
    let errors = [
        load().unwrap_err(),
        resolve().unwrap_err(),
        store.resolve(&root, &options, &NoProgress).unwrap_err(),
    ];
    for error in errors.map(chain) {
        assert!(
            error.contains(path.to_str().unwrap()) && error.contains("No space left"),
            "{error}"
        );
    }
    assert!(store.list().unwrap().is_empty());
    let leftovers = || fs::read_dir(path.join("tmp")).unwrap().count();
    assert_eq!(leftovers(), 0);

    small.remount("size=4m");
    drop(load().unwrap());
    let full = Path::new("/dev/full");
    if full.exists() {
        let error = chain(store.save_file("big:1", full).unwrap_err());
        assert!(
            error.contains("/dev/full") && error.contains("No space left"),
            "{error}"
        );
    }
    small.remount("ro");
    let image = resolve().unwrap();
    assert_eq!(store.list().unwrap().len(), 1);
    assert_eq!(store.inspect("big:1").unwrap().image.digest, image.digest);
    store.save("big:1", &mut Vec::new()).unwrap();
    drop(image);
    let errors = [
        store.remove("big:1", &NoProgress).unwrap_err(),
        store.prune(true, &NoProgress).unwrap_err(),
    ];
    for error in errors {
        let error = chain(error);
        assert!(
            error.contains(path.to_str().unwrap()) && error.contains("Read-only"),
            "{error}"
        );
    }
}
