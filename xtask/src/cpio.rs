//! The kernel's initramfs format: cpio "newc" (Linux
//! `Documentation/driver-api/early-userspace/buffer-format.rst`),
//! uncompressed and deterministic: no times, owner root, inodes in order.

/// What kind of file an entry is, with what it needs.
pub(crate) enum Entry<'a> {
    /// A folder.
    Dir,
    /// A file with these bytes; executable or not.
    File {
        /// The contents.
        data: &'a [u8],
        /// Permission bits.
        mode: u32,
    },
    /// A symbolic link to this path.
    Link(&'a str),
    /// A character device.
    Device {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
}

/// An archive under construction.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

/// An entry's bytes are too many for the format's 32-bit size field.
#[derive(Debug)]
pub(crate) struct TooLarge;

const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;
const S_IFCHR: u32 = 0o020_000;

impl Archive {
    /// Adds one entry; `path` has no leading slash, parents come first.
    pub(crate) fn add(&mut self, path: &str, entry: &Entry<'_>) -> Result<(), TooLarge> {
        let (mode, data, device): (u32, &[u8], _) = match entry {
            Entry::Dir => (S_IFDIR | 0o755, &[], (0, 0)),
            Entry::File { data, mode } => (S_IFREG | mode, data, (0, 0)),
            Entry::Link(to) => (S_IFLNK | 0o777, to.as_bytes(), (0, 0)),
            Entry::Device { major, minor } => (S_IFCHR | 0o600, &[], (*major, *minor)),
        };
        self.inode += 1;
        self.entry(path, self.inode, mode, data, device)
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>, TooLarge> {
        self.entry("TRAILER!!!", 0, 0, &[], (0, 0))?;
        Ok(self.bytes)
    }

    fn entry(
        &mut self,
        path: &str,
        inode: u32,
        mode: u32,
        data: &[u8],
        (major, minor): (u32, u32),
    ) -> Result<(), TooLarge> {
        let size = u32::try_from(data.len()).map_err(|_| TooLarge)?;
        let name = u32::try_from(path.len() + 1).map_err(|_| TooLarge)?;
        // ino mode uid gid nlink mtime filesize devmajor devminor
        // rdevmajor rdevminor namesize check
        let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
        Ok(())
    }

    /// Headers and contents start at multiples of four.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    fn sample() -> Vec<u8> {
        let mut archive = Archive::default();
        archive.add("dev", &Entry::Dir).unwrap();
        archive
            .add("dev/console", &Entry::Device { major: 5, minor: 1 })
            .unwrap();
        let file = Entry::File {
            data: b"hello",
            mode: 0o755,
        };
        archive.add("init", &file).unwrap();
        archive.add("bin", &Entry::Link("usr/bin")).unwrap();
        archive.finish().unwrap()
    }

    #[test]
    fn the_same_entries_give_the_same_bytes() {
        assert_eq!(sample(), sample());
    }

    #[test]
    fn cpio_lists_what_was_added() {
        let child = Command::new("cpio")
            .args(["--list", "--verbose", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            println!("skipped: cpio_lists_what_was_added: no cpio on this machine");
            return;
        };
        child.stdin.take().unwrap().write_all(&sample()).unwrap();
        let out = child.wait_with_output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(out.status.success());
        assert!(
            text.contains("crw-------") && text.contains("5,   1"),
            "{text}"
        );
        assert!(text.contains("-rwxr-xr-x"), "{text}");
        assert!(text.contains("bin -> usr/bin"), "{text}");
    }
}
