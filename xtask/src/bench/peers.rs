//! Other programs to measure beside ours, fetched only when that is asked for.

use std::path::PathBuf;
use std::process::Command;

use crate::error::Result;
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
    progress.update("peers", format!("fetching {SMOLVM}"));
    let partial = host::partial_path(&dir);
    host::create_dir(&partial)?;
    // A wheel is an archive of Python modules; its dependencies are not needed here.
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:"])
        .args(["--python-version=3.11", "--abi=abi3"])
        .args(["--platform=manylinux_2_28_x86_64", "--dest"])
        .arg(&partial)
        .arg(SMOLVM);
    host::run_quiet(&mut pip)?;
    let mut unpack = Command::new("sh");
    unpack.args(["-c", UNPACK]).current_dir(&partial);
    host::run_quiet(&mut unpack)?;
    // One that an earlier version of this left, without the disks.
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::rename(&partial, &dir).map_err(crate::error::Error::file("renaming", &partial))?;
    progress.forget("peers");
    Ok(())
}
