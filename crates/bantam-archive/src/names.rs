//! Names in an archive, made safe to walk.

use crate::{Error, MAX_NAME};

/// The components of an entry's name or of a hard link's target, without `.` and empty ones.
///
/// # Errors
/// A name that is absolute, too long, or has a `..` or a NUL byte.
pub(crate) fn components(name: &[u8]) -> Result<Vec<&[u8]>, Error> {
    check_text(name)?;
    if name.first() == Some(&b'/') {
        return Err(Error::archive("holds an absolute name", name));
    }
    let mut components = Vec::new();
    for component in name.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => return Err(Error::archive("holds a name with '..'", name)),
            _ => components.push(component),
        }
    }
    Ok(components)
}

/// What any name or target must be.
///
/// # Errors
/// A text that is too long, or has a NUL byte.
pub(crate) fn check_text(text: &[u8]) -> Result<(), Error> {
    if text.len() > MAX_NAME {
        let beginning = text.get(..80).unwrap_or(text);
        return Err(Error::archive("holds too long a name", beginning));
    }
    if text.contains(&0) {
        return Err(Error::archive("holds a name with a NUL byte", text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_stay_below_have_components() {
        let parts = |name: &[u8]| components(name).map(|parts| parts.concat());
        assert_eq!(parts(b"./a//b/./c/").unwrap(), b"abc");
        assert_eq!(parts(b"./").unwrap(), b"");
        assert_eq!(parts(b"..a/b..").unwrap(), b"..ab..");
        for bad in [&b"/a"[..], b"..", b"a/../b", b"a/..", b"a\0b", b"//"] {
            assert!(parts(bad).is_err(), "{bad:?}");
        }
        assert!(parts(&[b'a'; MAX_NAME]).is_ok());
        assert!(parts(&[b'a'; MAX_NAME + 1]).is_err());
    }
}
