//! Content digests (OCI image-spec descriptor.md "Digests").

use std::fmt::{self, Write as _};
use std::io::{self, Read};

use sha2::{Digest as _, Sha256, Sha512};

use crate::error::{Error, Result};

/// The digest algorithms OCI registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// SHA-256, 64 hex digits.
    Sha256,
    /// SHA-512, 128 hex digits.
    Sha512,
}

impl Algorithm {
    /// The name used before the colon and as a directory name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }
}

/// A checked `algorithm:hex` digest. Its parts are safe to use as file names.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest {
    algorithm: Algorithm,
    hex: String,
}

impl Digest {
    /// Parses `sha256:` or `sha512:` followed by lower-case hex of the right length.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::Name {
            text: text.to_owned(),
            why: why.to_owned(),
        };
        let (name, hex) = text
            .split_once(':')
            .ok_or_else(|| bad("a digest is ALGORITHM:HEX"))?;
        let (algorithm, len) = match name {
            "sha256" => (Algorithm::Sha256, 64),
            "sha512" => (Algorithm::Sha512, 128),
            _ => return Err(bad("the digest algorithm is neither sha256 nor sha512")),
        };
        if hex.len() != len || !hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(bad("the digest is not lower-case hex of the right length"));
        }
        Ok(Self {
            algorithm,
            hex: hex.to_owned(),
        })
    }

    /// The SHA-256 digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::new(Algorithm::Sha256);
        hasher.update(bytes);
        hasher.finish()
    }

    /// The algorithm.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The hex part.
    pub fn hex(&self) -> &str {
        &self.hex
    }

    /// A file name that holds both parts.
    pub(crate) fn file_name(&self) -> String {
        format!("{}-{}", self.algorithm.name(), self.hex)
    }

    /// Fails unless `bytes` have this digest.
    pub(crate) fn check(&self, what: &str, bytes: &[u8]) -> Result<()> {
        let mut hasher = Hasher::new(self.algorithm);
        hasher.update(bytes);
        self.expect(what, &hasher.finish())
    }

    /// Fails unless `actual` is this digest.
    pub(crate) fn expect(&self, what: &str, actual: &Digest) -> Result<()> {
        if actual == self {
            return Ok(());
        }
        Err(Error::DigestMismatch {
            what: what.to_owned(),
            expected: self.to_string(),
            actual: actual.to_string(),
        })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex)
    }
}

/// A running digest.
pub(crate) enum Hasher {
    Sha256(Box<Sha256>),
    Sha512(Box<Sha512>),
}

impl Hasher {
    pub(crate) fn new(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Sha256 => Self::Sha256(Box::new(Sha256::new())),
            Algorithm::Sha512 => Self::Sha512(Box::new(Sha512::new())),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(h) => h.update(bytes),
            Self::Sha512(h) => h.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> Digest {
        match self {
            Self::Sha256(h) => Digest {
                algorithm: Algorithm::Sha256,
                hex: hex(&h.finalize()),
            },
            Self::Sha512(h) => Digest {
                algorithm: Algorithm::Sha512,
                hex: hex(&h.finalize()),
            },
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut out, b| {
            // Writing to a String cannot fail.
            let _ = write!(out, "{b:02x}");
            out
        })
}

/// Hashes and counts what passes through it.
pub(crate) struct HashingReader<R> {
    inner: R,
    hasher: Hasher,
    bytes: u64,
}

impl<R: Read> HashingReader<R> {
    pub(crate) fn new(inner: R, algorithm: Algorithm) -> Self {
        Self {
            inner,
            hasher: Hasher::new(algorithm),
            bytes: 0,
        }
    }

    /// Reads to the end of the stream so that the digest covers all of it.
    pub(crate) fn drain(&mut self) -> io::Result<()> {
        let mut buf = vec![0; 64 * 1024];
        while self.read(&mut buf)? != 0 {}
        Ok(())
    }

    /// The digest and the number of bytes seen.
    pub(crate) fn finish(self) -> (Digest, u64) {
        (self.hasher.finish(), self.bytes)
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.hasher.update(&buf[..n]);
        self.bytes = self.bytes.saturating_add(n as u64);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_well_formed_digests_become_file_names() {
        let good = format!("sha256:{}", "a".repeat(64));
        assert_eq!(Digest::parse(&good).unwrap().to_string(), good);
        for bad in [
            "",
            "sha256",
            "sha256:",
            "md5:d41d8cd98f00b204e9800998ecf8427e",
            "sha256:../../../../etc/passwd",
            &format!("sha256:{}", "A".repeat(64)),
            &format!("sha256:{}", "a".repeat(63)),
            &format!("sha512:{}", "a".repeat(64)),
        ] {
            assert!(Digest::parse(bad).is_err(), "{bad}");
        }
        assert!(Digest::parse(&format!("sha512:{}", "0".repeat(128))).is_ok());
    }

    #[test]
    fn the_digest_of_nothing_is_the_well_known_one() {
        assert!(Digest::of(b"").hex().starts_with("e3b0c44298fc1c14"));
    }
}
