//! Other programs to measure beside ours, fetched only when that is asked for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::host;
use crate::progress::Progress;

/// smolvm as its makers publish it for Python, with its own kernel inside.
const SMOLVM: &str = "smolmachines==1.32.2";

/// Where smolvm is, if it was fetched.
pub(super) fn smolvm() -> PathBuf {
    host::target_dir().join("peers/smolvm")
}

/// Unpacks the package in the folder. A wheel that was only unpacked has lost its program's mode. Its
/// disks are 30 GiB of zeros with a little in between: smolvm unpacks them before its first machine,
/// which takes the nested rig minutes, but takes them as they are when they lie beside the archives.
const UNPACK: &str = "python3 -m zipfile -e ./*.whl . && rm ./*.whl && chmod 755 smol/smol-vmm \
                      && zstd --quiet --decompress --sparse smol/*-template.ext4.zst";

/// Fetches what is not there yet.
pub(super) fn fetch(progress: &Progress) -> Result<()> {
    let dir = smolvm();
    if dir.join("smol/storage-template.ext4").is_file() {
        return Ok(());
    }
    // Before the download.
    if !host::has_program("zstd") {
        return Err(Error::other(
            "no zstd on this machine, which unpacks smolvm's disks: `cargo xtask setup --all`, \
             or `apt-get install zstd`",
        ));
    }
    progress.update("peers", format!("fetching {SMOLVM}"));
    made_whole(&dir, download)?;
    progress.forget("peers");
    Ok(())
}

/// Puts the package's files into the folder.
fn download(dir: &Path) -> Result<()> {
    // A wheel is an archive of Python modules; its dependencies are not needed here.
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:"])
        .args(["--python-version=3.11", "--abi=abi3"])
        .args(["--platform=manylinux_2_28_x86_64", "--dest"])
        .arg(dir)
        .arg(SMOLVM);
    host::run_quiet(&mut pip)?;
    let mut unpack = Command::new("sh");
    unpack.args(["-c", UNPACK]).current_dir(dir);
    host::run_quiet(&mut unpack)
}

/// Makes a folder, in place of one that may be there. Of one that cannot be filled nothing stays.
fn made_whole(dir: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let partial = host::partial_path(dir);
    host::create_dir(&partial)?;
    let made = fill(&partial).and_then(|()| {
        // One that an earlier version of this left, without the disks.
        host::remove_dir(dir)?;
        fs::rename(&partial, dir).map_err(Error::file("renaming", &partial))
    });
    if made.is_err() {
        // Why it failed is what to say; on a full disk this is what helps.
        let _ = fs::remove_dir_all(&partial);
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_filled_leaves_nothing_behind() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("peer");
        let fill = |name: &'static str| {
            move |dir: &Path| fs::write(dir.join(name), "").map_err(Error::file("writing", dir))
        };
        made_whole(&dir, fill("old")).unwrap();
        made_whole(&dir, |partial| {
            fill("half")(partial)?;
            Err(Error::other("the disk is full"))
        })
        .unwrap_err();
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
        assert!(dir.join("old").is_file());
        made_whole(&dir, fill("new")).unwrap();
        assert!(dir.join("new").is_file() && !dir.join("old").exists());
    }
}
