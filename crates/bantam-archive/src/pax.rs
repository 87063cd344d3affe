//! Records of pax extended headers: `LENGTH KEYWORD=VALUE\n` (pax(1)).

use crate::Error;

/// Most bytes of an extended header: a few names of the longest kind. Attributes, which could
/// be longer, are not taken over.
pub(crate) const MAX_HEADER: u64 = 1 << 20;

/// Appends one record.
pub(crate) fn push(records: &mut Vec<u8>, keyword: &str, value: &[u8]) {
    let rest = keyword.len() + value.len() + 3;
    // The length counts its own digits.
    let mut length = rest;
    while length != rest + digits(length) {
        length = rest + digits(length);
    }
    records.extend_from_slice(format!("{length} {keyword}=").as_bytes());
    records.extend_from_slice(value);
    records.push(b'\n');
}

fn digits(number: usize) -> usize {
    number.to_string().len()
}

/// Calls `take` with the keyword and the value of each record.
///
/// # Errors
/// Records that are not well-formed, and as `take` says.
pub(crate) fn parse<'a>(
    mut records: &'a [u8],
    mut take: impl FnMut(&'a [u8], &'a [u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let malformed = || Error::archive("has a malformed pax header", b"");
    while !records.is_empty() {
        let space = records
            .iter()
            .position(|byte| *byte == b' ')
            .ok_or_else(malformed)?;
        let length = records
            .get(..space)
            .and_then(|text| str::from_utf8(text).ok())
            .and_then(|text| text.parse::<usize>().ok())
            .filter(|length| *length > space)
            .ok_or_else(malformed)?;
        let (record, rest) = records.split_at_checked(length).ok_or_else(malformed)?;
        records = rest;
        let record = record
            .get(space + 1..)
            .and_then(|record| record.strip_suffix(b"\n"))
            .ok_or_else(malformed)?;
        let equals = record
            .iter()
            .position(|byte| *byte == b'=')
            .ok_or_else(malformed)?;
        let (keyword, value) = record.split_at(equals);
        take(keyword, value.get(1..).unwrap_or_default())?;
    }
    Ok(())
}

/// A decimal number.
///
/// # Errors
/// Anything else.
pub(crate) fn number(value: &[u8]) -> Result<u64, Error> {
    str::from_utf8(value)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| Error::archive("has a malformed number in a pax header", b""))
}

/// A time: seconds, perhaps negative, perhaps with a fraction. Seconds and nanoseconds (0 to
/// 999,999,999) after them.
///
/// # Errors
/// Anything else.
pub(crate) fn time(value: &[u8]) -> Result<(i64, u32), Error> {
    let malformed = || Error::archive("has a malformed time in a pax header", b"");
    let text = str::from_utf8(value).map_err(|_| malformed())?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().map_err(|_| malformed())?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(malformed());
    }
    let digits: String = fraction
        .chars()
        .chain("000000000".chars())
        .take(9)
        .collect();
    let nanos: u32 = digits.parse().map_err(|_| malformed())?;
    if whole.starts_with('-') && nanos > 0 {
        // -1.25 is 0.75 after -2.
        let seconds = seconds.checked_sub(1).ok_or_else(malformed)?;
        return Ok((seconds, 1_000_000_000 - nanos));
    }
    Ok((seconds, nanos))
}

/// The text that [`time`] reads.
pub(crate) fn time_text(seconds: i64, nanos: u32) -> String {
    match (seconds, nanos) {
        (_, 0) => seconds.to_string(),
        (0.., _) => format!("{seconds}.{nanos:09}"),
        _ => format!(
            "-{}.{:09}",
            (seconds + 1).unsigned_abs(),
            1_000_000_000 - nanos
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_every_length_come_back() {
        for length in (0..120).chain([990, 991, 992, 993, 9_985, 9_986, 9_987]) {
            let value = vec![b'\n'; length];
            let mut records = Vec::new();
            push(&mut records, "path", &value);
            push(&mut records, "size", b"7");
            let mut seen = Vec::new();
            parse(&records, |keyword, value| {
                seen.push((keyword, value.to_vec()));
                Ok(())
            })
            .unwrap();
            assert_eq!(seen, [(&b"path"[..], value), (b"size", b"7".to_vec())]);
        }
    }

    #[test]
    fn malformed_records_are_errors() {
        for bad in [
            &b"5"[..],
            b"x a=b\n",
            b"0 a=b\n",
            b"2 a=b\n",
            b"99 a=b\n",
            b"6 a=bc",
            b"6 abc\n",
            b"-6 a=b\n",
            b"99999999999999999999999 a=b\n",
            b"18446744073709551615 a=b\n",
        ] {
            assert!(parse(bad, |_, _| Ok(())).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn times_of_either_sign_survive() {
        for time_of in [
            (0, 0),
            (1, 500_000_000),
            (-1, 0),
            (-1, 750_000_000),
            (-2, 1),
            (1_700_000_000, 123_456_789),
            (i64::MAX, 999_999_999),
            (i64::MIN, 0),
        ] {
            let text = time_text(time_of.0, time_of.1);
            assert_eq!(time(text.as_bytes()).unwrap(), time_of, "{text}");
        }
        assert_eq!(time(b"1.25").unwrap(), (1, 250_000_000));
        assert_eq!(time(b"-0.25").unwrap(), (-1, 750_000_000));
        assert_eq!(time(b"1.1234567899").unwrap(), (1, 123_456_789));
        for bad in [&b""[..], b"a", b"1.-5", b"1e3", b"99999999999999999999"] {
            assert!(time(bad).is_err(), "{bad:?}");
        }
    }
}
