//! A machine's own disk: what is written is there at the next start, whatever came between.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use bantam::{EngineChoice, Error, ExitCause, Machine, MachineBuilder, disk};
use bantam_e2e::{Setup, setup, skip};

/// A disk in a directory of its own, for machines on the engine under test.
struct Bench {
    setup: Setup,
    dir: tempfile::TempDir,
}

impl Bench {
    /// With a disk of `gib` GiB; or a line that says why the test is skipped.
    fn new(test: &str, gib: u32) -> Option<Self> {
        let setup = setup(test)?;
        let dir = tempfile::tempdir().unwrap();
        let bench = Self { setup, dir };
        let template = bantam::find_disk_template().unwrap();
        disk::create(&bench.disk(), gib, &template).unwrap();
        Some(bench)
    }

    fn disk(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    fn builder(&self) -> MachineBuilder {
        Machine::builder()
            .image(self.setup.image.to_str().unwrap())
            .memory_mib(256)
            .engine(self.setup.engine.parse::<EngineChoice>().unwrap())
            .boot_timeout(Duration::from_secs(120))
            .disk(self.disk())
    }

    fn start(&self) -> Machine {
        self.builder().start().unwrap()
    }

    /// Bytes that the disk takes on the host.
    fn allocated(&self) -> u64 {
        std::fs::metadata(self.disk()).unwrap().blocks() * 512
    }

    /// Whether the file system says of itself that it was unmounted: no journal to replay, no
    /// error, state clean.
    fn is_clean(&self) -> bool {
        const RECOVER: u32 = 4;
        const CLEAN: u16 = 1;
        let mut superblock = [0; 1024];
        let file = File::open(self.disk()).unwrap();
        file.read_exact_at(&mut superblock, 1024).unwrap();
        let state = u16::from_le_bytes(superblock[58..60].try_into().unwrap());
        let incompat = u32::from_le_bytes(superblock[96..100].try_into().unwrap());
        state == CLEAN && incompat & RECOVER == 0
    }

    /// What `e2fsck` finds without writing; `None` where there is none.
    fn e2fsck(&self) -> Option<(bool, String)> {
        let program = ["/sbin/e2fsck", "/usr/sbin/e2fsck"].into_iter();
        let program = program.map(Path::new).find(|path| path.is_file())?;
        let out = Command::new(program)
            .args(["-f", "-n"])
            .arg(self.disk())
            .output()
            .unwrap();
        let said = [out.stdout, out.stderr].concat();
        Some((
            out.status.success(),
            String::from_utf8_lossy(&said).into_owned(),
        ))
    }
}

/// Does something to a disk's file that its machine would not.
type Damage = fn(&File);

/// Runs a script and returns what it printed; it must succeed.
fn sh(machine: &Machine, script: &str) -> String {
    let out = machine.exec(["bash", "-c", script]).output().unwrap();
    let (stdout, stderr) = (
        String::from_utf8_lossy(&out.stdout).into_owned(),
        String::from_utf8_lossy(&out.stderr).into_owned(),
    );
    assert!(out.status.success(), "{script}: {stdout}{stderr}");
    stdout
}

/// The file system's size in the guest, in bytes.
fn size(machine: &Machine) -> u64 {
    let out = sh(machine, "stat -f -c '%b %S' /");
    let mut words = out.split_whitespace().map(|word| word.parse::<u64>());
    words.next().unwrap().unwrap() * words.next().unwrap().unwrap()
}

fn stop(machine: &Machine) {
    assert_eq!(machine.stop().unwrap().cause, ExitCause::GuestShutdown);
}

#[test]
fn what_is_written_to_a_disk_is_there_after_a_stop_and_a_new_start() {
    let test = "what_is_written_to_a_disk_is_there_after_a_stop_and_a_new_start";
    let Some(bench) = Bench::new(test, 1) else {
        return;
    };
    let machine = bench.start();
    sh(
        &machine,
        "set -e; mkdir -p /srv/new; echo kept > /srv/new/file; chown 12:34 /srv/new/file
         chmod 4711 /srv/new/file; ln -s file /srv/new/link; mkfifo /srv/new/pipe
         cp /bin/busybox /srv/busybox; mv /bin /moved; /moved/ln -s moved /bin",
    );
    machine
        .write_file("/srv/binary", vec![7_u8; 300_000])
        .unwrap();
    stop(&machine);
    assert!(bench.is_clean());

    let machine = bench.start();
    let out = sh(
        &machine,
        "stat -c '%a %u %g %s' /srv/new/file; readlink /srv/new/link; cat /srv/new/link
         test -p /srv/new/pipe; cmp /srv/busybox /bin/busybox && readlink /bin",
    );
    assert_eq!(out, "4711 12 34 5\nfile\nkept\nmoved\n");
    assert_eq!(machine.read_file("/srv/binary").unwrap(), vec![7; 300_000]);
    sh(&machine, "rm -r /srv/new; echo again > /srv/second");
    stop(&machine);
    assert!(bench.is_clean());

    let machine = bench.start();
    assert_eq!(sh(&machine, "ls /srv"), "binary\nbusybox\nsecond\n");
}

#[test]
fn a_stop_leaves_a_disk_in_which_e2fsck_finds_nothing_whatever_was_going_on() {
    let test = "a_stop_leaves_a_disk_in_which_e2fsck_finds_nothing_whatever_was_going_on";
    let Some(bench) = Bench::new(test, 2) else {
        return;
    };
    let machine = bench.start();
    // Writers, one of them deaf; a deleted file that stays open; a file system in a file; a loop
    // device with swap, which no process holds.
    let mut busy = Vec::new();
    for script in [
        "trap '' TERM; echo; while :; do echo x; done > /srv-deaf",
        "echo; while :; do cp /bin/busybox /copy; rm /copy; done",
        "exec 3> /deleted; rm /deleted; echo data >&3; echo; sleep 1000",
        "cd /var 2>/dev/null || cd /tmp; echo; exec sleep 1000",
    ] {
        let mut child = machine.exec(["bash", "-c", script]).spawn().unwrap();
        let mut ready = [0];
        let stdout = child.stdout.as_mut().unwrap();
        std::io::Read::read_exact(stdout, &mut ready).unwrap();
        busy.push(child);
    }
    let template = std::fs::read(bantam::find_disk_template().unwrap()).unwrap();
    machine.write_file("/inner", template).unwrap();
    let mount = "busybox mount -o loop -t ext4 /inner /mnt-inner";
    sh(
        &machine,
        &format!("truncate -s 128M /inner; mkdir /mnt-inner; {mount} && echo in > /mnt-inner/file"),
    );
    sh(
        &machine,
        "set -e; busybox dd if=/dev/zero of=/swap bs=1M count=8 2>/dev/null
         device=$(busybox losetup -f); busybox losetup $device /swap
         busybox mkswap $device >/dev/null; busybox swapon $device",
    );
    stop(&machine);
    assert!(bench.is_clean());
    let Some((sound, said)) = bench.e2fsck() else {
        skip(
            test,
            "no e2fsck here: the disk was checked by its superblock only",
        );
        return;
    };
    assert!(sound, "{said}");
    let machine = bench.start();
    let mounted = format!("{mount} && cat /mnt-inner/file");
    assert_eq!(sh(&machine, &mounted), "in\n");
}

#[test]
fn after_a_kill_the_disk_has_what_was_synced() {
    let Some(bench) = Bench::new("after_a_kill_the_disk_has_what_was_synced", 1) else {
        return;
    };
    for round in 0..3 {
        let machine = bench.start();
        for earlier in 0..round {
            let script = format!("cat /synced{earlier}; cmp /bin/busybox /big{earlier}");
            assert_eq!(sh(&machine, &script), format!("round {earlier}\n"));
        }
        let mut writer = machine
            .exec([
                "bash",
                "-c",
                "echo; while :; do cp -r /bin/busybox /junk$((n++ % 5)); mkdir -p /d/$n; done",
            ])
            .spawn()
            .unwrap();
        let mut ready = [0];
        std::io::Read::read_exact(writer.stdout.as_mut().unwrap(), &mut ready).unwrap();
        sh(
            &machine,
            &format!("echo round {round} > /synced{round}; cp /bin/busybox /big{round}; sync"),
        );
        machine.kill();
        assert!(!bench.is_clean());
    }
    let machine = bench.start();
    assert_eq!(sh(&machine, "cat /synced2"), "round 2\n");
    stop(&machine);
    assert!(bench.is_clean());
    assert!(bench.e2fsck().is_none_or(|(sound, said)| {
        assert!(sound, "{said}");
        sound
    }));
}

#[test]
fn a_disk_is_as_large_as_was_asked_and_grows_at_the_next_start() {
    let test = "a_disk_is_as_large_as_was_asked_and_grows_at_the_next_start";
    let Some(bench) = Bench::new(test, 20) else {
        return;
    };
    let nearly = |gib: u64| (gib << 30) * 97 / 100..=gib << 30;
    let machine = bench.start();
    let first = size(&machine);
    assert!(nearly(20).contains(&first), "{first}");
    sh(&machine, "echo kept > /kept");
    let error = disk::grow(&bench.disk(), 50).unwrap_err();
    assert!(matches!(error, Error::Disk { .. }), "{error:?}");
    stop(&machine);
    assert!(bench.allocated() < 16 << 20, "{}", bench.allocated());

    disk::grow(&bench.disk(), 50).unwrap();
    let machine = bench.start();
    let second = size(&machine);
    assert!(nearly(50).contains(&second), "{second}");
    assert_eq!(sh(&machine, "cat /kept"), "kept\n");
    stop(&machine);
    assert!(bench.e2fsck().is_none_or(|(sound, said)| {
        assert!(sound, "{said}");
        sound
    }));

    let machine = bench.start();
    assert_eq!(size(&machine), second);
}

#[test]
fn a_full_disk_is_an_error_of_the_command_and_no_more() {
    let Some(bench) = Bench::new("a_full_disk_is_an_error_of_the_command_and_no_more", 1) else {
        return;
    };
    let machine = bench.start();
    let out = sh(
        &machine,
        "free=$(stat -f -c '%a*%S' /); busybox fallocate -l $((free - (8 << 20))) /fill
         dd if=/dev/zero of=/more bs=1M 2>&1; echo status $?",
    );
    assert!(out.contains("No space left on device"), "{out}");
    assert!(out.contains("status 1"), "{out}");
    let error = machine.write_file("/over", vec![1; 1 << 20]).unwrap_err();
    assert!(matches!(error, Error::File { .. }), "{error:?}");
    sh(&machine, "rm /fill /more; echo fits > /after; sync");
    stop(&machine);
    assert!(bench.is_clean());
    let machine = bench.start();
    assert_eq!(sh(&machine, "cat /after"), "fits\n");
}

#[test]
fn a_disk_that_is_damaged_or_none_is_named_in_the_error() {
    let Some(bench) = Bench::new("a_disk_that_is_damaged_or_none_is_named_in_the_error", 1) else {
        return;
    };
    stop(&bench.start());
    // Its file system's metadata; nothing else was written.
    let mut start = vec![0; 16 << 20];
    let file = File::open(bench.disk()).unwrap();
    file.read_exact_at(&mut start, 0).unwrap();
    let damage: [(&str, Damage); 3] = [
        ("no superblock", |file| {
            file.write_all_at(&[0; 4096], 0).unwrap()
        }),
        ("other descriptors", |file| {
            file.write_all_at(&[0xa5; 4096], 4096).unwrap();
        }),
        ("shorter than its file system", |file| {
            file.set_len(600 << 20).unwrap();
        }),
    ];
    for (what, damage) in damage {
        let file = File::create(bench.disk()).unwrap();
        file.set_len(1 << 30).unwrap();
        file.write_all_at(&start, 0).unwrap();
        damage(&file);
        drop(file);
        match bench.builder().start() {
            Err(Error::Boot { reason, .. }) => {
                assert!(reason.contains("the machine's disk"), "{what}: {reason}");
                assert!(reason.contains("e2fsck"), "{what}: {reason}");
            }
            other => panic!("{what}: {other:?}"),
        }
    }
}

#[test]
fn deleting_from_a_disk_gives_the_host_its_room_back() {
    let Some(bench) = Bench::new("deleting_from_a_disk_gives_the_host_its_room_back", 4) else {
        return;
    };
    let machine = bench.start();
    let before = bench.allocated();
    sh(
        &machine,
        "for i in $(seq 64); do cat /bin/busybox; done > /big; sync",
    );
    let full = bench.allocated();
    assert!(full > before + (32 << 20), "{before} to {full}");
    sh(&machine, "rm /big; sync");
    // The file system says what is free a little after it is.
    let deadline = Instant::now() + Duration::from_secs(60);
    while bench.allocated() > before + (8 << 20) {
        assert!(Instant::now() < deadline, "{} of {full}", bench.allocated());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn two_machines_do_not_write_to_one_disk() {
    let Some(bench) = Bench::new("two_machines_do_not_write_to_one_disk", 1) else {
        return;
    };
    let first = bench.start();
    let error = bench.builder().start().unwrap_err();
    assert!(matches!(error, Error::Vm(_)), "{error:?}");
    let disk = bench.disk();
    assert!(
        error.to_string().contains(disk.to_str().unwrap()),
        "{error}"
    );
    sh(&first, "echo alive > /file; sync");
    stop(&first);
    // At once: nothing of the first may still hold it.
    let second = bench.start();
    assert_eq!(sh(&second, "cat /file"), "alive\n");
}

#[test]
fn a_disk_that_its_guest_filled_can_be_emptied_after_the_next_boot() {
    let test = "a_disk_that_its_guest_filled_can_be_emptied_after_the_next_boot";
    let Some(bench) = Bench::new(test, 1) else {
        return;
    };
    // Blocks that nobody writes to, for which the host needs no room.
    let fill_blocks = "mkdir -p /full; for mib in 512 256 128 64 32 16 8 4 2 1; do
        busybox fallocate -l $((mib << 20)) /full/$mib; done 2>/dev/null
        while echo x > /full/x$((n++)); do :; done 2>/dev/null; true";
    let fill_inodes = "mkdir -p /full; cd /full
        busybox seq 1 70000 | busybox xargs busybox touch 2>/dev/null; true";
    // Again and again: the reserve must be there each time.
    for fill in [fill_blocks, fill_inodes, fill_blocks] {
        let machine = bench.start();
        sh(&machine, fill);
        let full = "echo more > /more";
        let out = machine.exec(["bash", "-c", full]).output().unwrap();
        assert!(!out.status.success(), "there was room after {fill}");
        stop(&machine);

        let machine = bench.start();
        let left =
            "rm -rf /full /more && echo again > /file && cat /file && ls / | grep -c full || true";
        assert_eq!(sh(&machine, left), "again\n0\n", "{fill}");
        stop(&machine);
        assert!(bench.is_clean());
    }
}
