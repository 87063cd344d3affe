//! Images that the demo and the tests run, made from Debian's packages, so
//! that nobody needs an account or a reachable registry.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;

use crate::error::{Error, Result};
use crate::host;
use crate::oci::{self, Config};
use crate::progress::{Progress, clock};

/// The images there are.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Which {
    /// Debian 12 with Python: what the demo runs (about 200 MB)
    Debian,
    /// busybox and bash, static: what the tests run (about 4 MB)
    Tiny,
    /// Debian 12 with curl, git, dig, ping, iperf3 and pip: what the tests of the network run
    /// (about 300 MB)
    Network,
}

/// Makes the image unless the cache has it; returns the archive's path.
pub(crate) fn make(which: Which, progress: &Progress) -> Result<PathBuf> {
    match which {
        Which::Debian => debian(&DEMO, progress),
        Which::Tiny => tiny(progress),
        Which::Network => debian(&NETWORK, progress),
    }
}

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// An image of Debian's packages.
struct Debian {
    /// Its directory in the cache.
    dir: &'static str,
    /// Its file there. What is there is kept, so other packages need another name.
    file: &'static str,
    reference: &'static str,
    what: &'static str,
    packages: &'static str,
}

const DEMO: Debian = Debian {
    dir: "demo",
    file: "debian-12-python.tar",
    reference: "debian-python:12",
    what: "Debian 12 with Python",
    packages: "python3",
};

const NETWORK: Debian = Debian {
    dir: "test-images",
    file: "network-1.tar",
    reference: "network:1",
    what: "Debian 12 with network clients",
    packages: "bind9-dnsutils,ca-certificates,curl,git,iperf3,iproute2,iputils-ping,\
               netcat-openbsd,openssl,python3-pip",
};

/// Debian's release and mirror.
const DEBIAN_SUITE: &str = "bookworm";
const DEBIAN_MIRROR: &str = "http://deb.debian.org/debian";

fn debian(image: &Debian, progress: &Progress) -> Result<PathBuf> {
    let dir = host::cache_dir()?.join(image.dir);
    let archive = dir.join(image.file);
    if archive.is_file() {
        return Ok(archive);
    }
    host::create_dir(&dir)?;
    let start = std::time::Instant::now();
    progress.update("image", format!("mmdebstrap ({})", image.what));
    let rootfs = host::partial_path(&dir.join("rootfs.tar"));
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap
        // Times in the archive; any fixed moment will do.
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .args(["--format=tar", "--variant=minbase"])
        .arg(format!("--include={}", image.packages))
        // What a container image leaves out.
        .arg("--dpkgopt=path-exclude=/usr/share/doc/*")
        .arg("--dpkgopt=path-exclude=/usr/share/man/*")
        .arg("--dpkgopt=path-exclude=/usr/share/locale/*")
        .arg(DEBIAN_SUITE)
        .arg(&rootfs)
        .arg(DEBIAN_MIRROR);
    let made = host::run_quiet(&mut mmdebstrap).and_then(|()| {
        let config = Config {
            reference: image.reference,
            cmd: &["bash"],
            env: &[PATH],
        };
        oci::write_archive(&rootfs, &config, &archive)
    });
    let _ = fs::remove_file(&rootfs);
    made?;
    progress.finish("image", &format!("made in {}", clock(start.elapsed())));
    Ok(archive)
}

fn tiny(progress: &Progress) -> Result<PathBuf> {
    let dir = host::cache_dir()?.join("test-images");
    let image = dir.join("tiny.tar");
    let busybox = static_program("busybox", "busybox-static")?;
    let bash = static_program("bash-static", "bash-static")?;
    if newer(&image, &[&busybox, &bash]) {
        return Ok(image);
    }
    host::create_dir(&dir)?;
    let layer = host::partial_path(&dir.join("layer.tar"));
    let made = tiny_layer(&layer, &busybox, &bash).and_then(|()| {
        let config = Config {
            reference: "tiny:1",
            cmd: &["bash"],
            env: &[PATH],
        };
        oci::write_archive(&layer, &config, &image)
    });
    let _ = fs::remove_file(&layer);
    made?;
    progress.say(&format!("image: {}", image.display()));
    Ok(image)
}

/// The small text files that programs look for.
const TINY_FILES: [(&str, &str); 6] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/bash\n",
    ),
    (
        "etc/group",
        "root:x:0:\nnogroup:x:65534:\nstaff:x:50:user\nuser:x:1000:\n",
    ),
    (
        "etc/os-release",
        "ID=tiny\nNAME=\"tiny\"\nPRETTY_NAME=\"busybox and bash, for tests\"\nVERSION_ID=1\n",
    ),
    ("etc/hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost\n"),
    ("etc/nsswitch.conf", "hosts: files dns\n"),
    ("etc/profile", "PS1='$ '\n"),
];

fn tiny_layer(layer: &Path, busybox: &Path, bash: &Path) -> Result<()> {
    let applets = host::capture(Command::new(busybox).arg("--list"))?;
    let applets = String::from_utf8_lossy(&applets).into_owned();
    let write = || -> io::Result<()> {
        let mut tar = tar::Builder::new(io::BufWriter::new(File::create(layer)?));
        let mut dir = |path: &str, mode, user| entry(&mut tar, path, Kind::Dir, mode, user);
        for path in [
            "bin", "dev", "etc", "home", "proc", "run", "sys", "usr", "usr/bin", "var",
        ] {
            dir(path, 0o755, 0)?;
        }
        dir("root", 0o700, 0)?;
        dir("home/user", 0o755, 1000)?;
        dir("tmp", 0o1777, 0)?;
        entry(
            &mut tar,
            "bin/busybox",
            Kind::File(&fs::read(busybox)?),
            0o755,
            0,
        )?;
        entry(&mut tar, "bin/bash", Kind::File(&fs::read(bash)?), 0o755, 0)?;
        for applet in applets.lines().filter(|name| *name != "busybox") {
            entry(
                &mut tar,
                &format!("bin/{applet}"),
                Kind::Link("busybox"),
                0o777,
                0,
            )?;
        }
        entry(
            &mut tar,
            "usr/bin/env",
            Kind::Link("/bin/busybox"),
            0o777,
            0,
        )?;
        for (path, text) in TINY_FILES {
            entry(&mut tar, path, Kind::File(text.as_bytes()), 0o644, 0)?;
        }
        io::Write::flush(&mut tar.into_inner()?)
    };
    write().map_err(Error::file("writing", layer))
}

enum Kind<'a> {
    Dir,
    File(&'a [u8]),
    Link(&'a str),
}

fn entry<W: io::Write>(
    tar: &mut tar::Builder<W>,
    path: &str,
    kind: Kind<'_>,
    mode: u32,
    user: u64,
) -> io::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_mode(mode);
    header.set_uid(user);
    header.set_gid(user);
    header.set_mtime(0);
    header.set_size(0);
    match kind {
        Kind::Dir => {
            header.set_entry_type(tar::EntryType::Directory);
            tar.append_data(&mut header, path, io::empty())
        }
        Kind::File(bytes) => {
            header.set_size(u64::try_from(bytes.len()).map_err(io::Error::other)?);
            tar.append_data(&mut header, path, bytes)
        }
        Kind::Link(to) => {
            header.set_entry_type(tar::EntryType::Symlink);
            tar.append_link(&mut header, path, to)
        }
    }
}

/// A statically linked program of this machine.
pub(crate) fn static_program(name: &str, package: &str) -> Result<PathBuf> {
    ["/bin", "/usr/bin"]
        .iter()
        .map(|dir| Path::new(dir).join(name))
        .find(|path| path.is_file())
        .ok_or_else(|| {
            Error::other(format!(
                "no {name} on this machine: `cargo xtask setup --all`, \
                 or `apt-get install {package}`"
            ))
        })
}

/// Whether `made` is there and not older than what it is made of, this
/// program included.
fn newer(made: &Path, from: &[&Path]) -> bool {
    let time = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
    let own = std::env::current_exe().ok();
    let Some(made) = time(made) else { return false };
    from.iter()
        .copied()
        .chain(own.as_deref())
        .all(|path| time(path).is_some_and(|t| t <= made))
}
