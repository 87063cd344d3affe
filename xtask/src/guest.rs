//! The guest artefacts: kernel, initramfs and disk template, where the library finds them.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;

use crate::cpio::{Archive, Entry, TooLarge};
use crate::disk;
use crate::error::{Error, Result};
use crate::host;
use crate::kernel::{GUEST, Options};
use crate::progress::Progress;

/// The agent runs on a bare kernel, so it links everything statically.
const AGENT_TARGET: &str = "x86_64-unknown-linux-gnu";
const AGENT_FLAGS: &str = "-C target-feature=+crt-static -C relocation-model=static";

/// What the folder holds.
pub(crate) const FILES: [&str; 3] = ["vmlinux", "initramfs.cpio", "disk.ext4"];

/// The folder with [`FILES`]; the library looks beside the program's folder.
pub(crate) fn dir() -> PathBuf {
    host::target_dir().join("guest")
}

/// Builds what is missing or out of date and returns the folder.
pub(crate) fn build(options: Options, progress: &Progress) -> Result<PathBuf> {
    let (agent, kernel) = thread::scope(|scope| {
        let agent = scope.spawn(|| build_agent(progress));
        let kernel = GUEST.build(options, progress);
        (agent.join(), kernel)
    });
    let agent = agent.unwrap_or_else(|_| Err(Error::other("building the agent panicked")))?;
    let kernel = kernel?;
    let dir = dir();
    host::create_dir(&dir)?;
    let initramfs = initramfs(&host::read(&agent)?)
        .map_err(|TooLarge| Error::other("the agent does not fit into an initramfs"))?;
    host::write_atomic(&dir.join("initramfs.cpio"), &initramfs)?;
    host::write_atomic(&dir.join("disk.ext4"), &disk::template()?)?;
    install_if_changed(&kernel.vmlinux, &dir.join("vmlinux"))?;
    for file in ["vmlinux", "initramfs.cpio"] {
        make_read_only(&dir.join(file))?;
    }
    Ok(dir)
}

/// Machines map files that nobody may write to, and copy others.
fn make_read_only(file: &Path) -> Result<()> {
    std::fs::set_permissions(file, Permissions::from_mode(0o444))
        .map_err(Error::file("making read-only", file))
}

/// The agent's program, built for the guest.
fn build_agent(progress: &Progress) -> Result<PathBuf> {
    progress.update("agent", "building".to_owned());
    // A target folder of its own: other flags, so nothing could be shared,
    // and cargo's lock on the main one stays free.
    let target_dir = host::target_dir().join("agent");
    let mut cargo = host::cargo();
    cargo
        .args(["build", "--quiet", "--package", "bantam-agent"])
        .args(["--profile", "agent", "--target", AGENT_TARGET])
        .arg("--target-dir")
        .arg(&target_dir)
        .env("RUSTFLAGS", AGENT_FLAGS)
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .stdin(Stdio::null());
    host::run(&mut cargo)?;
    let agent = target_dir.join(AGENT_TARGET).join("agent/bantam-agent");
    let size = std::fs::metadata(&agent)
        .map_err(Error::file("reading", &agent))?
        .len();
    progress.finish("agent", &format!("{} KiB, static", size / 1024));
    Ok(agent)
}

/// The first root file system of a guest: the agent as PID 1, a console for
/// what it says before devtmpfs is there, and the mount points it needs.
fn initramfs(agent: &[u8]) -> std::result::Result<Vec<u8>, TooLarge> {
    let mut archive = Archive::default();
    // Where the agent mounts: devices, image, upper layer, and both together.
    for dir in ["dev", "lower", "disk", "root"] {
        archive.add(dir, &Entry::Dir)?;
    }
    archive.add("dev/console", &Entry::Device { major: 5, minor: 1 })?;
    let init = Entry::File {
        data: agent,
        mode: 0o755,
    };
    archive.add("init", &init)?;
    archive.finish()
}

/// Copies unless the file is there already, so that its time stays.
fn install_if_changed(from: &Path, to: &Path) -> Result<()> {
    let same = std::fs::read(to).is_ok_and(|old| std::fs::read(from).is_ok_and(|new| old == new));
    if same {
        Ok(())
    } else {
        host::copy_atomic(from, to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_begins_on_a_page_of_the_initramfs() {
        let agent = [0xa5; 5000];
        let bytes = initramfs(&agent).unwrap();
        let at = bytes
            .windows(agent.len())
            .position(|window| window == agent);
        assert_eq!(at, Some(4096));
    }
}
