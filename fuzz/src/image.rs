//! Checks of finished images.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use bantam_image::Limits;
use rustix::fs::MemfdFlags;

use crate::erofs::{Files, read_erofs};

pub(crate) const LIMITS: Limits = Limits {
    layers: 2,
    entries: 128,
    metadata_bytes: 64 << 10,
    content_bytes: 4 << 20,
};

/// Besides contents: each entry's inode, its attributes, its directory's block.
const METADATA: u64 = LIMITS.entries * 32 * 4096;

/// A file in memory, so that an input costs no disk.
pub(crate) fn memory_file() -> File {
    let fd: OwnedFd = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("memfd_create");
    fd.into()
}

/// Reads the image back with the reader of the tests, which checks the format as it goes.
pub(crate) fn check(image: &File) -> Files {
    let len = image.metadata().expect("fstat").len();
    assert!(
        len <= LIMITS.content_bytes + METADATA,
        "an image of {len} bytes"
    );
    let path = PathBuf::from(format!("/proc/self/fd/{}", image.as_raw_fd()));
    let files = read_erofs(&path);
    for path in files.keys().filter(|path| !path.is_empty()) {
        for name in path.split('/') {
            assert!(
                !name.is_empty() && name != "." && name != "..",
                "a file named {path:?}"
            );
        }
    }
    files
}
