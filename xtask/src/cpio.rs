//! The kernel's initramfs format: cpio "newc" (Linux
//! `Documentation/driver-api/early-userspace/buffer-format.rst`),
//! uncompressed and deterministic: no times, owner root, inodes in order.
//!
//! The contents of files that have a page begin on one, so that the guest's kernel, which finds
//! the archive at the start of a page, can take them as they lie (`images/kernel/patches`). The
//! place is made by NULs behind the name.

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

/// Bytes of an entry's header.
const HEADER: usize = 110;
const PAGE: usize = 4096;
/// Most bytes of a name with the NULs behind it: Linux passes over an entry with more (`PATH_MAX`).
const NAME_MAX: usize = 4096;

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
        let name_len = self.name_len(path.len() + 1, data.len());
        let name = u32::try_from(name_len).map_err(|_| TooLarge)?;
        // ino mode uid gid nlink mtime filesize devmajor devminor
        // rdevmajor rdevminor namesize check
        let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        let nuls = name_len - path.len();
        self.bytes.resize(self.bytes.len() + nuls, 0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
        Ok(())
    }

    /// The length of the next entry's name, which takes `least` with its NUL, so that `data_len` bytes
    /// of contents start on a page. Less than a page of them starts anywhere, and so does what would
    /// need too long a name.
    fn name_len(&self, least: usize, data_len: usize) -> usize {
        let name = self.bytes.len() + HEADER;
        let aligned = (name + least).next_multiple_of(PAGE) - name;
        if data_len >= PAGE && aligned <= NAME_MAX {
            aligned
        } else {
            least
        }
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

    /// Where the contents of a file begin that comes after `before` bytes of another one.
    fn begin(before: usize, path: &str, data: &[u8]) -> usize {
        let mut archive = Archive::default();
        let first = vec![b'.'; before];
        for (path, data) in [("first", &*first), (path, data)] {
            archive
                .add(path, &Entry::File { data, mode: 0o644 })
                .unwrap();
        }
        let bytes = archive.finish().unwrap();
        let mut at = bytes.windows(data.len()).enumerate();
        at.find(|(_, window)| *window == data).unwrap().0
    }

    #[test]
    fn a_page_of_contents_begins_on_a_page_and_less_anywhere() {
        let page: Vec<u8> = (1..=u8::MAX).cycle().take(PAGE).collect();
        for before in [0, 1, 100, 2000, 3600, 3700, 3800, 5000] {
            assert_eq!(begin(before, "a", &page) % PAGE, 0, "{before}");
        }
        assert_eq!(begin(0, "a", &page), PAGE);
        assert_eq!(begin(0, "a", &page[1..]), 116 + 112);
    }

    #[test]
    fn no_name_is_longer_than_linux_takes() {
        let page: Vec<u8> = (1..=u8::MAX).cycle().take(PAGE).collect();
        let path = "a".repeat(101);
        // With its NUL, the name ends where a page ends, or four bytes later.
        let before = PAGE - 116 - HEADER - 102;
        assert_eq!(begin(before, &path, &page), PAGE);
        assert_eq!(begin(before + 4, &path, &page), PAGE + 4);
    }

    /// What `program` says of an archive on its standard input; nothing if there is none here.
    fn listed(program: &str, archive: &[u8]) -> Option<String> {
        let child = Command::new(program)
            .args(["-i", "-t", "-v", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            println!("skipped: {program}: not on this machine");
            return None;
        };
        child.stdin.take().unwrap().write_all(archive).unwrap();
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success());
        Some(String::from_utf8(out.stdout).unwrap())
    }

    #[test]
    fn a_name_with_nuls_behind_it_reads_as_any_other() {
        let page = [b'x'; PAGE + 1];
        let mut archive = Archive::default();
        let file = Entry::File {
            data: &page,
            mode: 0o755,
        };
        archive.add("init", &file).unwrap();
        archive.add("after", &Entry::Dir).unwrap();
        let archive = archive.finish().unwrap();
        for program in ["cpio", "bsdcpio"] {
            if let Some(text) = listed(program, &archive) {
                let names = text.lines().map(|line| line.rsplit(' ').next());
                assert!(names.eq([Some("init"), Some("after")]), "{text}");
                assert!(text.contains(" 4097 "), "{text}");
            }
        }
    }

    #[test]
    fn cpio_lists_what_was_added() {
        let Some(text) = listed("cpio", &sample()) else {
            return;
        };
        assert!(
            text.contains("crw-------") && text.contains("5,   1"),
            "{text}"
        );
        assert!(text.contains("-rwxr-xr-x"), "{text}");
        assert!(text.contains("bin -> usr/bin"), "{text}");
    }
}
