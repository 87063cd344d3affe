//! PAX extended headers (POSIX.1 pax "Extended Header").

use std::collections::BTreeMap;

/// The records of one `x` header that matter here. Later records of the same key win.
#[derive(Debug, Default)]
pub(super) struct Pax {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) sparse: Sparse,
}

/// GNU's three ways to say where the data of a sparse file is.
#[derive(Debug, Default)]
pub(super) struct Sparse {
    pub(super) major: Option<u64>,
    pub(super) minor: Option<u64>,
    pub(super) name: Option<Vec<u8>>,
    pub(super) real_size: Option<u64>,
    /// Version 0.0 repeats offset and length records; version 0.1 lists them in one.
    pub(super) map: Vec<u64>,
    pub(super) has_map: bool,
}

impl Pax {
    /// Parses `LENGTH KEY=VALUE\n` records. `None` is a malformed header.
    pub(super) fn parse(mut rest: &[u8]) -> Option<Self> {
        let mut pax = Self::default();
        let mut libarchive = BTreeMap::new();
        while !rest.is_empty() {
            let space = rest.iter().take(20).position(|b| *b == b' ')?;
            let len = usize::try_from(decimal(&rest[..space])?).ok()?;
            let record = rest.get(space + 1..len)?.strip_suffix(b"\n")?;
            rest = &rest[len..];
            let equals = record.iter().position(|b| *b == b'=')?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            if key.is_empty() {
                return None;
            }
            if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                // An empty value is an empty attribute here, and values may hold any byte.
                pax.xattrs.insert(name.to_vec(), value.to_vec());
                continue;
            }
            if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
                libarchive.insert(percent_decode(name)?, base64(value)?);
                continue;
            }
            pax.record(key, value)?;
        }
        // bsdtar writes both forms of the same attribute.
        for (name, value) in libarchive {
            pax.xattrs.entry(name).or_insert(value);
        }
        Some(pax)
    }

    fn record(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        // An empty value takes back the record: the plain header's field counts.
        let empty = value.is_empty();
        let name = || {
            if value.contains(&0) {
                None
            } else {
                Some((!empty).then(|| value.to_vec()))
            }
        };
        let count = || {
            if empty {
                Some(None)
            } else {
                decimal(value).map(Some)
            }
        };
        match key {
            b"path" => self.path = name()?,
            b"linkpath" => self.link = name()?,
            b"size" => self.size = count()?,
            b"uid" => self.uid = count()?,
            b"gid" => self.gid = count()?,
            b"mtime" => self.mtime = if empty { None } else { Some(time(value)?) },
            b"GNU.sparse.major" => self.sparse.major = count()?,
            b"GNU.sparse.minor" => self.sparse.minor = count()?,
            b"GNU.sparse.name" => self.sparse.name = name()?,
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.sparse.real_size = count()?,
            b"GNU.sparse.numblocks" => self.sparse.has_map = true,
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => {
                let expect_offset = self.sparse.map.len().is_multiple_of(2);
                if expect_offset != key.ends_with(b"offset") {
                    return None;
                }
                self.sparse.has_map = true;
                self.sparse.map.push(decimal(value)?);
            }
            b"GNU.sparse.map" => {
                self.sparse.has_map = true;
                self.sparse.map = if empty {
                    Vec::new()
                } else {
                    value
                        .split(|b| *b == b',')
                        .map(decimal)
                        .collect::<Option<_>>()?
                };
            }
            _ => {}
        }
        Some(())
    }
}

/// An unsigned decimal number that fits.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0_u64, |value, b| match b {
        b'0'..=b'9' => value.checked_mul(10)?.checked_add(u64::from(b - b'0')),
        _ => None,
    })
}

/// `[-]SECONDS[.FRACTION]` as seconds, rounded down, and nanoseconds after that.
fn time(text: &[u8]) -> Option<(i64, u32)> {
    let (negative, digits) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (seconds, fraction) = match digits.iter().position(|b| *b == b'.') {
        Some(dot) => (&digits[..dot], &digits[dot + 1..]),
        None => (digits, &[][..]),
    };
    if seconds.is_empty() && fraction.is_empty() || !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let seconds = if seconds.is_empty() {
        0
    } else {
        i64::try_from(decimal(seconds)?).ok()?
    };
    let ns = (0..9).fold(0_u32, |ns, i| {
        ns * 10 + fraction.get(i).map_or(0, |b| u32::from(b - b'0'))
    });
    Some(match (negative, ns) {
        (false, ns) => (seconds, ns),
        (true, 0) => (-seconds, 0),
        (true, ns) => ((-seconds).checked_sub(1)?, 1_000_000_000 - ns),
    })
}

fn percent_decode(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first == b'%' {
            let hex = std::str::from_utf8(rest.get(..2)?).ok()?;
            out.push(u8::from_str_radix(hex, 16).ok()?);
            rest = &rest[2..];
        } else {
            out.push(*first);
        }
    }
    Some(out)
}

/// Base64 with the standard alphabet; libarchive leaves out the padding.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let text = text
        .strip_suffix(b"==")
        .or_else(|| text.strip_suffix(b"="))
        .unwrap_or(text);
    let mut out = Vec::with_capacity(text.len() * 3 / 4);
    let (mut bits, mut have) = (0_u32, 0);
    for byte in text {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(six);
        have += 6;
        if have >= 8 {
            have -= 8;
            out.push(u8::try_from((bits >> have) & 0xff).ok()?);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_with_any_byte_in_their_value_are_read() {
        let mut bytes = b"27 SCHILY.xattr.user.a=x\ny\n".to_vec();
        bytes.extend_from_slice(b"24 SCHILY.xattr.user.b=\n");
        bytes.extend_from_slice(b"34 LIBARCHIVE.xattr.user.%63=AGI=\n");
        bytes.extend_from_slice(b"32 LIBARCHIVE.xattr.user.a=AAAA\n");
        let pax = Pax::parse(&bytes).unwrap();
        assert_eq!(pax.xattrs[&b"user.a"[..]], b"x\ny");
        assert_eq!(pax.xattrs[&b"user.b"[..]], b"");
        assert_eq!(pax.xattrs[&b"user.c"[..]], b"\0b");
    }

    #[test]
    fn malformed_records_are_refused() {
        for bad in [
            &b"5 a=b\n"[..],
            b"7 a=b\n",
            b"6 a=bc",
            b"x a=b\n",
            b"6 =ab\n",
            b"0 \n",
            b"99999999999999999999999 a=b\n",
            b"18446744073709551615 a=b\n",
            b"12 path=a\0b\n",
            b"10 size=-1\n",
            b"11 mtime=x\n",
            b"11 mtime=-\n",
        ] {
            assert!(
                Pax::parse(bad).is_none(),
                "{:?}",
                String::from_utf8_lossy(bad)
            );
        }
    }

    #[test]
    fn an_empty_value_takes_a_record_back() {
        let pax = Pax::parse(b"10 path=x\n8 path=\n").unwrap();
        assert_eq!(pax.path, None);
    }

    #[test]
    fn times_round_down() {
        for (text, want) in [
            ("0", (0, 0)),
            ("1700000000.123456789", (1_700_000_000, 123_456_789)),
            ("1.1234567891", (1, 123_456_789)),
            ("-1", (-1, 0)),
            ("-1.5", (-2, 500_000_000)),
            ("-0.000000001", (-1, 999_999_999)),
            (".5", (0, 500_000_000)),
        ] {
            assert_eq!(time(text.as_bytes()), Some(want), "{text}");
        }
        assert_eq!(time(b"99999999999999999999"), None);
        assert_eq!(time(b"1.5x"), None);
    }
}
