//! The template of machines' disks: the beginning of an empty ext4 file system.
//!
//! `images/disk/README.md` says what the settings are for.

use std::fs::File;
use std::process::Command;

use crate::error::{Error, Result};
use crate::host;

/// One block group: the smallest that has room for the journal.
const SIZE: u64 = 128 << 20;
const JOURNAL_MIB: u32 = 63;
const BLOCK: usize = 4096;

/// Fixed, so that the same mke2fs writes the same bytes. A guest sees one such disk.
const UUID: &str = "62616e74-616d-4469-a36b-000000000001";
const HASH_SEED: &str = "62616e74-616d-4469-a36b-000000000002";

/// Makes the file system and returns its bytes up to the last block that is not zero; what
/// follows is zero, however long the disk.
pub(crate) fn template() -> Result<Vec<u8>> {
    let dir = tempfile::tempdir().map_err(Error::file("creating", &std::env::temp_dir()))?;
    let path = dir.path().join("disk.ext4");
    File::create_new(&path)
        .and_then(|file| file.set_len(SIZE))
        .map_err(Error::file("creating", &path))?;
    let mut mke2fs = Command::new("mke2fs");
    mke2fs
        // Debian has it where only root's path leads.
        .env("PATH", path_with_sbin())
        .env(
            "MKE2FS_CONFIG",
            host::repo().join("images/disk/mke2fs.conf"),
        )
        .env("E2FSPROGS_FAKE_TIME", "1")
        .env("SOURCE_DATE_EPOCH", "1")
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-e", "remount-ro"])
        .args(["-L", "bantam", "-U", UUID])
        .args(["-J", &format!("size={JOURNAL_MIB}")])
        .arg("-E")
        .arg(format!(
            "hash_seed={HASH_SEED},root_owner=0:0,lazy_itable_init=0,lazy_journal_init=1,\
             assume_storage_prezeroed=1"
        ))
        .arg(&path);
    host::run_quiet(&mut mke2fs)?;
    let mut bytes = host::read(&path)?;
    let blocks = bytes
        .chunks(BLOCK)
        .rposition(|block| block.iter().any(|byte| *byte != 0))
        .map_or(0, |last| last + 1);
    bytes.truncate(blocks * BLOCK);
    Ok(bytes)
}

fn path_with_sbin() -> std::ffi::OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn e2fsck(path: &std::path::Path) -> std::process::Output {
        Command::new("e2fsck")
            .env("PATH", path_with_sbin())
            .args(["-f", "-n"])
            .arg(path)
            .output()
            .unwrap()
    }

    #[test]
    fn the_template_is_small_the_same_each_time_and_a_sound_file_system() {
        let bytes = template().unwrap();
        assert!(bytes.len() < 256 << 10, "{} bytes", bytes.len());
        assert!(bytes == template().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk");
        std::fs::write(&disk, &bytes).unwrap();
        File::options()
            .write(true)
            .open(&disk)
            .and_then(|file| file.set_len(SIZE))
            .unwrap();
        let out = e2fsck(&disk);
        assert!(
            out.status.success(),
            "{}",
            String::from_utf8_lossy(&out.stdout)
        );
    }
}
