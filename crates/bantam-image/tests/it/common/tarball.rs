//! Writes archives byte by byte, the malformed ones too.

const BLOCK: usize = 512;

/// A header's fields, in plain octal unless said otherwise.
#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) name: Vec<u8>,
    pub(crate) flag: u8,
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) mtime: i64,
    pub(crate) link: Vec<u8>,
    pub(crate) device: (u32, u32),
    pub(crate) data: Vec<u8>,
    /// Instead of the length of `data`.
    pub(crate) size: Option<u64>,
    pub(crate) magic: &'static [u8; 8],
    pub(crate) prefix: Vec<u8>,
    /// Bytes written over the finished header, before its checksum.
    pub(crate) patches: Vec<(usize, Vec<u8>)>,
    pub(crate) signed_checksum: bool,
}

pub(crate) const USTAR: &[u8; 8] = b"ustar\x0000";
pub(crate) const GNU: &[u8; 8] = b"ustar  \0";
pub(crate) const V7: &[u8; 8] = &[0; 8];

impl Entry {
    pub(crate) fn new(flag: u8, name: impl AsRef<[u8]>) -> Self {
        Self {
            name: name.as_ref().to_vec(),
            flag,
            mode: if flag == b'5' { 0o755 } else { 0o644 },
            uid: 0,
            gid: 0,
            mtime: 0,
            link: Vec::new(),
            device: (0, 0),
            data: Vec::new(),
            size: None,
            magic: USTAR,
            prefix: Vec::new(),
            patches: Vec::new(),
            signed_checksum: false,
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut h = vec![0_u8; BLOCK];
        let put = |h: &mut Vec<u8>, at: usize, bytes: &[u8]| {
            h[at..at + bytes.len()].copy_from_slice(bytes)
        };
        put(&mut h, 0, &self.name[..self.name.len().min(100)]);
        put(&mut h, 100, &number(self.mode.into(), 8));
        put(&mut h, 108, &number(self.uid.into(), 8));
        put(&mut h, 116, &number(self.gid.into(), 8));
        let size = self.size.unwrap_or(self.data.len() as u64);
        put(&mut h, 124, &number(size.into(), 12));
        put(&mut h, 136, &number(self.mtime.into(), 12));
        h[156] = self.flag;
        put(&mut h, 157, &self.link[..self.link.len().min(100)]);
        put(&mut h, 257, self.magic);
        if self.magic != V7 {
            put(&mut h, 329, &number(self.device.0.into(), 8));
            put(&mut h, 337, &number(self.device.1.into(), 8));
        }
        put(&mut h, 345, &self.prefix);
        for (at, bytes) in &self.patches {
            put(&mut h, *at, bytes);
        }
        put(&mut h, 148, b"        ");
        let sum: i64 = h
            .iter()
            .map(|b| {
                if self.signed_checksum {
                    i64::from(*b as i8)
                } else {
                    i64::from(*b)
                }
            })
            .sum();
        put(&mut h, 148, format!("{sum:06o}\0 ").as_bytes());
        h
    }
}

/// Octal if it fits, else base-256.
fn number(value: i128, len: usize) -> Vec<u8> {
    let octal = format!("{value:0width$o}\0", width = len - 1);
    if value >= 0 && octal.len() == len {
        return octal.into_bytes();
    }
    let mut bytes = value.to_be_bytes()[16 - len..].to_vec();
    bytes[0] |= 0x80;
    bytes
}

/// An archive being written.
#[derive(Clone, Default)]
pub(crate) struct Tar(pub(crate) Vec<u8>);

impl Tar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn entry(mut self, entry: &Entry) -> Self {
        self.0.extend_from_slice(&entry.encode());
        self.0.extend_from_slice(&entry.data);
        self.pad()
    }

    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self.pad()
    }

    fn pad(mut self) -> Self {
        self.0.resize(self.0.len().next_multiple_of(BLOCK), 0);
        self
    }

    pub(crate) fn file(self, name: impl AsRef<[u8]>, data: impl AsRef<[u8]>) -> Self {
        self.entry(&Entry {
            data: data.as_ref().to_vec(),
            ..Entry::new(b'0', name)
        })
    }

    pub(crate) fn dir(self, name: impl AsRef<[u8]>) -> Self {
        self.entry(&Entry::new(b'5', name))
    }

    pub(crate) fn dir_mode(self, name: &str, mode: u32) -> Self {
        self.entry(&Entry {
            mode,
            ..Entry::new(b'5', name)
        })
    }

    pub(crate) fn symlink(self, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        self.entry(&Entry {
            link: target.as_ref().to_vec(),
            ..Entry::new(b'2', name)
        })
    }

    pub(crate) fn hard_link(self, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        self.entry(&Entry {
            link: target.as_ref().to_vec(),
            ..Entry::new(b'1', name)
        })
    }

    /// Hides `dir/name`.
    pub(crate) fn whiteout(self, path: &str) -> Self {
        let (dir, name) = path.rsplit_once('/').map_or(("", path), |(d, n)| (d, n));
        let slash = if dir.is_empty() { "" } else { "/" };
        self.file(format!("{dir}{slash}.wh.{name}"), "")
    }

    pub(crate) fn opaque(self, dir: &str) -> Self {
        self.file(format!("{dir}/.wh..wh..opq"), "")
    }

    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        self.extension(b'x', records)
    }

    pub(crate) fn global(self, records: &[(&str, &[u8])]) -> Self {
        self.extension(b'g', records)
    }

    fn extension(self, flag: u8, records: &[(&str, &[u8])]) -> Self {
        let mut data = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut len = rest;
            while len != rest + len.to_string().len() {
                len = rest + len.to_string().len();
            }
            data.extend_from_slice(format!("{len} {key}=").as_bytes());
            data.extend_from_slice(value);
            data.push(b'\n');
        }
        self.entry(&Entry {
            data,
            ..Entry::new(flag, "PaxHeaders/x")
        })
    }

    /// A GNU long name (`L`) or link target (`K`) for the next entry.
    pub(crate) fn gnu_long(self, flag: u8, text: impl AsRef<[u8]>) -> Self {
        let mut data = text.as_ref().to_vec();
        data.push(0);
        self.entry(&Entry {
            data,
            magic: GNU,
            ..Entry::new(flag, "././@LongLink")
        })
    }

    /// The archive with its end mark.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.0.extend_from_slice(&[0; 2 * BLOCK]);
        self.0
    }
}
