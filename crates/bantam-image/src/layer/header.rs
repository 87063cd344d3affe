//! Fields of a 512-byte tar header.
//!
//! Layouts come from the `tar` crate. Its numbers do not: they have no sign, and archives carry negative times
//! and checksums summed over signed bytes.

use tar::{GnuHeader, Header};

pub(super) const BLOCK: usize = 512;

/// What a number field holds: octal text, or base-256 when the top bit of its first byte is set.
pub(super) fn number(field: &[u8]) -> Option<i64> {
    match field.first() {
        Some(first) if first & 0x80 != 0 => {
            let negative = first & 0x40 != 0;
            let start: i128 = if negative { -1 } else { 0 };
            let mut value = start;
            for (i, byte) in field.iter().enumerate() {
                // The marker bit is not part of the value; the bit below it is the sign.
                let byte = match (i, negative) {
                    (0, true) => byte | 0x80,
                    (0, false) => byte & 0x7f,
                    _ => *byte,
                };
                value = (value << 8) | i128::from(byte);
                i64::try_from(value).ok()?;
            }
            i64::try_from(value).ok()
        }
        _ => octal(field),
    }
}

fn octal(field: &[u8]) -> Option<i64> {
    let blank = |b: &u8| matches!(b, b' ' | 0);
    let start = field.iter().position(|b| !blank(b)).unwrap_or(field.len());
    let digits = &field[start..];
    let end = digits.iter().position(blank).unwrap_or(digits.len());
    digits[..end].iter().try_fold(0_i64, |value, b| match b {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(b - b'0')),
        _ => None,
    })
}

/// Whether the checksum is right, summed over unsigned or (old Sun tar) signed bytes.
pub(super) fn checksum_ok(header: &Header) -> bool {
    let Some(want) = number(&header.as_old().cksum) else {
        return false;
    };
    let mut unsigned = 0_i64;
    let mut signed = 0_i64;
    for (i, byte) in header.as_bytes().iter().enumerate() {
        let byte = if (148..156).contains(&i) { b' ' } else { *byte };
        unsigned += i64::from(byte);
        signed += i64::from(i8::from_ne_bytes([byte]));
    }
    want == unsigned || want == signed
}

/// Text up to the first NUL.
pub(super) fn text(field: &[u8]) -> &[u8] {
    &field[..field.iter().position(|b| *b == 0).unwrap_or(field.len())]
}

/// The name, with the prefix of POSIX headers.
pub(super) fn path(header: &Header) -> Vec<u8> {
    let name = text(&header.as_old().name);
    let prefix = match (header.as_ustar(), header.as_gnu()) {
        // xstar keeps times in the last 24 bytes of the prefix and marks that at the end of the header.
        (Some(ustar), _) if header.as_bytes()[508..] == *b"tar\0" => text(&ustar.prefix[..131]),
        (Some(ustar), _) => text(&ustar.prefix),
        (None, Some(gnu)) => misplaced_prefix(header, gnu),
        (None, None) => &[],
    };
    if prefix.is_empty() {
        return name.to_vec();
    }
    [prefix, b"/", name].concat()
}

/// GNU headers keep times where POSIX has the prefix. Go before 1.8, and so older Docker, wrote a prefix there all
/// the same, which shows in that the times are no numbers.
fn misplaced_prefix<'a>(header: &'a Header, gnu: &GnuHeader) -> &'a [u8] {
    let is_text = |field: &[u8]| field.first() != Some(&0) && number(field).is_none();
    let prefix = text(&header.as_bytes()[345..500]);
    if prefix.is_ascii() && (is_text(&gnu.atime) || is_text(&gnu.ctime)) {
        prefix
    } else {
        &[]
    }
}

/// Device numbers of POSIX and GNU headers.
pub(super) fn device(header: &Header) -> Option<(i64, i64)> {
    // Both kinds have them in the same place.
    let bytes = header.as_bytes();
    if header.as_ustar().is_none() && header.as_gnu().is_none() {
        return Some((0, 0));
    }
    Some((number(&bytes[329..337])?, number(&bytes[337..345])?))
}

/// The data extents in a GNU sparse header, and whether more blocks of them follow.
pub(super) fn gnu_sparse(header: &GnuHeader) -> Option<(Vec<(u64, u64)>, bool)> {
    let mut extents = Vec::new();
    for sparse in &header.sparse {
        if !push_extent(&mut extents, &sparse.offset, &sparse.numbytes)? {
            break;
        }
    }
    Some((extents, header.isextended[0] != 0))
}

/// The extents in a block that continues a GNU sparse header.
pub(super) fn gnu_sparse_more(block: &[u8; BLOCK], extents: &mut Vec<(u64, u64)>) -> Option<bool> {
    for sparse in block[..504].chunks_exact(24) {
        if !push_extent(extents, &sparse[..12], &sparse[12..])? {
            break;
        }
    }
    Some(block[504] != 0)
}

fn push_extent(extents: &mut Vec<(u64, u64)>, offset: &[u8], len: &[u8]) -> Option<bool> {
    if offset.first() == Some(&0) || len.first() == Some(&0) {
        return Some(false);
    }
    extents.push((
        u64::try_from(number(offset)?).ok()?,
        u64::try_from(number(len)?).ok()?,
    ));
    Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_base_256() {
        let table: &[(&[u8], Option<i64>)] = &[
            (b"0000644\0", Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"00000001357", Some(0o1357)),
            (b"\0\0\0\0", Some(0)),
            (b"        ", Some(0)),
            (b"", Some(0)),
            (b"644x", None),
            (b"99", None),
            (b"-1", None),
            (&[0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0], Some(2 << 32)),
            (&[0xff; 12], Some(-1)),
            (
                &[
                    0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, 0x00,
                ],
                Some(-512),
            ),
            (
                &[
                    0x80, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                ],
                None,
            ),
            (
                &[
                    0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                ],
                Some(i64::MAX),
            ),
            (
                &[0x80, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xfe],
                Some(0x00ff_ffff_fffe),
            ),
            (b"777777777777777777777777", None),
        ];
        for (field, want) in table {
            assert_eq!(number(field), *want, "{field:?}");
        }
    }
}
