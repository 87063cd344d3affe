//! The store among processes: hits write nothing, work happens once, killed processes leave nothing.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Once;

use bantam_image::{
    Error, ImageSource, Layer, NoProgress, Progress, PullPolicy, ResolveOptions, Stage, Store,
};

use crate::common::{Layout, Tar, read_erofs, run};

const CHILD: &str = "BANTAM_IMAGE_TEST_CHILD";
/// A FIFO at which a child waits inside a layer, until it was opened for writing and closed again.
const GATE: &str = "BANTAM_IMAGE_TEST_GATE";
const NOBODY: u32 = 65_534;

struct Printing;

impl Progress for Printing {
    fn layer_advanced(&self, _: Stage, _: &Layer, _: u64) {
        static GATE_PASSED: Once = Once::new();
        if let Some(gate) = std::env::var_os(GATE) {
            GATE_PASSED.call_once(|| drop(fs::read(gate).unwrap()));
        }
    }

    fn message(&self, text: &str) {
        println!("message {text}");
    }
}

/// Not a test of its own: what the other tests run as another process.
#[test]
fn child() {
    let Ok(request) = std::env::var(CHILD) else {
        return;
    };
    let (store, source) = request.split_once('\n').unwrap();
    let result = ImageSource::parse(source).and_then(|source| {
        Store::open(Path::new(store))?.resolve(&source, &ResolveOptions::default(), &Printing)
    });
    match result {
        Ok(image) => println!("resolved {} {}", image.digest, image.rootfs.display()),
        Err(error) => println!("failed {error}"),
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    println!(
        "peak {}",
        status
            .lines()
            .find(|l| l.starts_with("VmHWM"))
            .unwrap_or("unknown")
    );
}

fn command(store: &Path, source: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "store::child", "--nocapture"])
        .env(CHILD, format!("{}\n{source}", store.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .current_dir("/");
    command
}

/// The line of a child's output that starts with `word`.
fn line(child: &mut Child, word: &str) -> String {
    let out = BufReader::new(child.stdout.as_mut().unwrap());
    for line in out.lines().map_while(Result::ok) {
        if let Some(at) = line.find(word) {
            return line[at..].to_owned();
        }
    }
    panic!("the child said no {word:?}");
}

/// Everything below a directory with what changes when it is written.
fn snapshot(dir: &Path) -> BTreeMap<PathBuf, (u64, i64, i64, u64)> {
    let mut out = BTreeMap::new();
    let mut pending = vec![dir.to_owned()];
    while let Some(path) = pending.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            pending.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
        out.insert(
            path,
            (meta.ino(), meta.mtime(), meta.ctime_nsec(), meta.len()),
        );
    }
    out
}

fn sample() -> Layout {
    let mut layout = Layout::new();
    layout.image(&[Tar::new().file("a", vec![5; 300_000]).finish()]);
    layout
}

/// A child that converts a layout and has begun to read its layer. It goes on when the file is closed.
fn inside_a_layer(store: &Path, layout: &Layout) -> (Child, fs::File) {
    let dir = tempfile::tempdir().unwrap();
    let gate = dir.path().join("gate");
    run("mkfifo", &[gate.to_str().unwrap()]);
    let child = command(store, &format!("oci:{}", layout.path().display()))
        .env(GATE, &gate)
        .spawn()
        .unwrap();
    // Opening waits until the child does. The layer is larger than what is read of it at once.
    let open = fs::File::options().write(true).open(&gate).unwrap();
    (child, open)
}

#[test]
fn the_store_is_private_and_made_when_needed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/b/store");
    let store = Store::open(&path).unwrap();
    assert!(!path.exists());
    let source = sample().source();
    assert!(
        store
            .resolve(&source, &ResolveOptions::default(), &NoProgress)
            .is_err(),
        "its directory is gone"
    );
    let layout = sample();
    store
        .resolve(&layout.source(), &ResolveOptions::default(), &NoProgress)
        .unwrap();
    for dir in ["", "images", "images/v1", "tmp", "locks"] {
        assert_eq!(
            fs::metadata(path.join(dir)).unwrap().mode() & 0o777,
            0o700,
            "{dir}"
        );
    }
    fs::write(dir.path().join("file"), "").unwrap();
    assert!(Store::open(&dir.path().join("file")).is_err());
}

#[test]
fn a_second_resolve_writes_nothing() {
    let layout = sample();
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("image.tar");
    layout.pack(&archive);
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("f"), "x").unwrap();
    let path = dir.path().join("store");
    let store = Store::open(&path).unwrap();
    for source in [
        layout.source(),
        ImageSource::Archive(archive.clone()),
        ImageSource::RootDir(root),
    ] {
        let first = store
            .resolve(&source, &ResolveOptions::default(), &NoProgress)
            .unwrap();
        let before = snapshot(&path);
        assert_eq!(
            store
                .resolve(&source, &ResolveOptions::default(), &NoProgress)
                .unwrap(),
            first
        );
        assert_eq!(snapshot(&path), before, "{source}");
        assert_eq!(store.stored(&first.digest).unwrap(), Some(first));
    }
    // The archive is known by its times, inode and size: not even its contents are read again.
    let (size, mtime) = (
        fs::metadata(&archive).unwrap().len(),
        fs::metadata(&archive).unwrap().modified().unwrap(),
    );
    assert!(size > 0 && mtime.elapsed().is_ok());
    let mut other = Layout::new();
    let manifest = other.image(&[Tar::new().file("other", "x").finish()]);
    other.pack(&archive);
    let changed = store
        .resolve(
            &ImageSource::Archive(archive),
            &ResolveOptions::default(),
            &NoProgress,
        )
        .unwrap();
    assert_eq!(changed.digest, manifest["digest"]);
}

#[test]
fn a_damaged_entry_of_the_store_is_made_again() {
    let layout = sample();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let resolve = || {
        store
            .resolve(&layout.source(), &ResolveOptions::default(), &NoProgress)
            .unwrap()
    };
    let image = resolve();
    let good = fs::read(&image.rootfs).unwrap();
    let record = image.rootfs.with_file_name("image.json");
    type Damage<'a> = &'a dyn Fn();
    let damages: [Damage<'_>; 4] = [
        &|| {
            fs::remove_file(&image.rootfs).unwrap();
            fs::write(&image.rootfs, &good[..4096]).unwrap();
        },
        &|| fs::remove_file(&image.rootfs).unwrap(),
        &|| fs::write(&record, "{").unwrap(),
        &|| fs::remove_file(&record).unwrap(),
    ];
    for damage in damages {
        damage();
        assert_eq!(store.stored(&image.digest).unwrap(), None);
        assert_eq!(resolve(), image);
        assert!(fs::read(&image.rootfs).unwrap() == good);
    }
}

#[test]
fn what_is_not_in_the_store_is_not_pulled_against_the_policy() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let options = ResolveOptions {
        pull: PullPolicy::Never,
        ..ResolveOptions::default()
    };
    let source = ImageSource::parse("registry.invalid/x:1").unwrap();
    let error = store.resolve(&source, &options, &NoProgress).unwrap_err();
    assert!(
        matches!(&error, Error::NotStored { image } if image == "registry.invalid/x:1"),
        "{error}"
    );
}

#[test]
fn a_killed_process_leaves_no_image_and_its_work_is_removed() {
    let layout = sample();
    let dir = tempfile::tempdir().unwrap();
    let (mut child, gate) = inside_a_layer(dir.path(), &layout);
    child.kill().unwrap();
    child.wait().unwrap();
    drop(gate);
    let leftovers = || fs::read_dir(dir.path().join("tmp")).unwrap().count();
    assert_eq!(leftovers(), 1);
    assert!(!dir.path().join("images/v1").exists());

    let store = Store::open(dir.path()).unwrap();
    let image = store
        .resolve(&layout.source(), &ResolveOptions::default(), &NoProgress)
        .unwrap();
    assert_eq!(read_erofs(&image.rootfs)["a"].size, 300_000);
    assert_eq!(leftovers(), 0);
}

#[test]
fn two_processes_convert_an_image_once() {
    let layout = sample();
    let dir = tempfile::tempdir().unwrap();
    let (mut first, gate) = inside_a_layer(dir.path(), &layout);
    let source = format!("oci:{}", layout.path().display());
    let mut second = command(dir.path(), &source).spawn().unwrap();
    assert!(line(&mut second, "message").contains("another process"));
    drop(gate);
    let (one, two) = (line(&mut first, "resolved"), line(&mut second, "resolved"));
    assert_eq!(one, two);
    assert!(first.wait().unwrap().success() && second.wait().unwrap().success());
}

#[test]
fn the_work_of_a_living_process_is_left_alone() {
    let layout = sample();
    let dir = tempfile::tempdir().unwrap();
    let (mut child, gate) = inside_a_layer(dir.path(), &layout);
    // Other work in the same store looks around for dead work.
    let mut other = Layout::new();
    other.image(&[Tar::new().file("other", "x").finish()]);
    Store::open(dir.path())
        .unwrap()
        .resolve(&other.source(), &ResolveOptions::default(), &NoProgress)
        .unwrap();
    drop(gate);
    line(&mut child, "resolved");
    assert!(child.wait().unwrap().success());
}

#[test]
fn an_archive_on_standard_input_is_read() {
    let layout = sample();
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("image.tar.gz");
    layout.pack(&archive);
    let mut child = command(&dir.path().join("store"), "-")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let bytes = fs::read(&archive).unwrap();
    child.stdin.take().unwrap().write_all(&bytes).unwrap();
    let resolved = line(&mut child, "resolved");
    child.wait().unwrap();
    let rootfs = resolved.split(' ').nth(2).unwrap();
    assert_eq!(read_erofs(Path::new(rootfs))["a"].size, 300_000);
}

#[test]
fn nobody_can_build_and_use_images_with_all_owners_and_devices() {
    // As root, become nobody with an unhelpful umask; otherwise this user is unprivileged already.
    let is_root = rustix::process::geteuid().is_root();
    let dir = tempfile::tempdir().unwrap();
    let mut layout = Layout::new();
    let owned = crate::common::Entry {
        uid: 12,
        gid: 34,
        mode: 0o4755,
        ..crate::common::Entry::new(b'0', "suid")
    };
    let device = crate::common::Entry {
        device: (1, 3),
        ..crate::common::Entry::new(b'3', "null")
    };
    layout.image(&[Tar::new().entry(&owned).entry(&device).finish()]);
    let open = fs::Permissions::from_mode(0o755);
    for path in [dir.path(), layout.path()] {
        fs::set_permissions(path, open.clone()).unwrap();
    }
    let exe = dir.path().join("exe");
    fs::copy(std::env::current_exe().unwrap(), &exe).unwrap();
    let home = dir.path().join("home");
    fs::create_dir(&home).unwrap();
    if is_root {
        chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let store = home.join("store");
    let spawn = |command: &mut Command| {
        command.env(
            CHILD,
            format!("{}\noci:{}", store.display(), layout.path().display()),
        );
        command
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .current_dir("/");
        if is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.spawn().unwrap()
    };
    let script = r#"umask 077; exec "$0" --exact store::child --nocapture"#;
    let mut child = spawn(Command::new("sh").args(["-c", script]).arg(&exe));
    let resolved = line(&mut child, "resolved");
    child.wait().unwrap();
    let files = read_erofs(Path::new(resolved.split(' ').nth(2).unwrap()));
    assert_eq!(
        (files["suid"].uid, files["suid"].gid, files["suid"].mode),
        (12, 34, 0o104_755)
    );
    assert_eq!(files["null"].rdev, 0x103);

    // A store without write permission still serves what it has.
    run("chmod", &["-R", "a-w", store.to_str().unwrap()]);
    let mut child = spawn(Command::new("sh").args(["-c", script]).arg(&exe));
    assert_eq!(line(&mut child, "resolved"), resolved);
    child.wait().unwrap();
    run("chmod", &["-R", "u+w", store.to_str().unwrap()]);
}

#[test]
fn an_archive_in_a_named_pipe_is_read() {
    let layout = sample();
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("image.tar");
    layout.pack(&archive);
    let mut bytes = Vec::new();
    fs::File::open(&archive)
        .unwrap()
        .read_to_end(&mut bytes)
        .unwrap();
    let pipe = dir.path().join("pipe");
    run("mkfifo", &[pipe.to_str().unwrap()]);
    let writer = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::write(pipe, bytes).unwrap()
    });
    let store = Store::open(&dir.path().join("store")).unwrap();
    let image = store
        .resolve(
            &ImageSource::Archive(pipe),
            &ResolveOptions::default(),
            &NoProgress,
        )
        .unwrap();
    writer.join().unwrap();
    assert_eq!(read_erofs(&image.rootfs)["a"].size, 300_000);
}

#[test]
fn memory_does_not_grow_with_contents() {
    let mut layout = Layout::new();
    // Not zeros, which would be skipped; not in one entry, and compressed.
    let tar = (0..8_u8).fold(Tar::new(), |tar, i| {
        tar.file(format!("f{i}"), vec![i + 1; 16 << 20])
    });
    let plain = tar.finish();
    let id = crate::common::digest(&plain);
    let manifest = layout.manifest(
        &[(crate::common::gzip(&plain), id.clone())],
        &Layout::config(&[id]),
    );
    layout.add(manifest);
    let dir = tempfile::tempdir().unwrap();
    let mut child = command(dir.path(), &format!("oci:{}", layout.path().display()))
        .spawn()
        .unwrap();
    let peak = line(&mut child, "peak");
    child.wait().unwrap();
    let digits: String = peak.chars().filter(char::is_ascii_digit).collect();
    let Ok(kib) = digits.parse::<u64>() else {
        return crate::common::skipped("no /proc here");
    };
    assert!(dir.path().join("images/v1").exists());
    assert!(kib < 32 * 1024, "{kib} KiB for 128 MiB of contents");
}
