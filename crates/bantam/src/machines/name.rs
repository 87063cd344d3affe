//! What machines may be called.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Error;

/// The name of a machine; also that of its directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MachineName(String);

impl MachineName {
    /// The most bytes in a name.
    pub const MAX_LEN: usize = 75;
    /// The name that commands mean when none is given.
    pub const DEFAULT: &'static str = "default";

    /// Checks a name: ASCII letters, digits, `.`, `_` and `-`, the first a letter or digit, at
    /// most [`MachineName::MAX_LEN`] bytes.
    ///
    /// # Errors
    /// [`Error::BadName`].
    pub fn parse(name: &str) -> Result<Self, Error> {
        let bad = |reason: &'static str| {
            Err(Error::BadName {
                name: name.to_owned(),
                reason,
            })
        };
        let bytes = name.as_bytes();
        match bytes.first() {
            None => return bad("is empty"),
            Some(first) if !first.is_ascii_alphanumeric() => {
                return bad("does not start with a letter or digit");
            }
            Some(_) => {}
        }
        if bytes.len() > Self::MAX_LEN {
            return bad("is longer than 75 bytes");
        }
        let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
        if !bytes.iter().all(fits) {
            return bad("holds other characters than letters, digits, '.', '_' and '-'");
        }
        Ok(Self(name.to_owned()))
    }

    /// A name that no machine has, such as `vm-3f9c1a20`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system gives no random bytes.
    pub fn generate() -> Result<Self, Error> {
        Ok(Self(format!("vm-{}", super::random_hex(4)?)))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for MachineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for MachineName {
    type Error = Error;

    fn try_from(name: String) -> Result<Self, Error> {
        Self::parse(&name)
    }
}

impl From<MachineName> for String {
    fn from(name: MachineName) -> Self {
        name.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_lead_out_of_its_directory() {
        for bad in [
            "", ".", "..", ".x", "-x", "_x", "a/b", "a\\b", "a b", "a\0b", "a\n", "ä", "x:y",
        ] {
            assert!(MachineName::parse(bad).is_err(), "{bad:?}");
        }
        assert!(MachineName::parse(&"a".repeat(76)).is_err());
        for good in ["a", "0", "A.b_c-d", &"a".repeat(75), "default"] {
            assert_eq!(MachineName::parse(good).unwrap().as_str(), good);
        }
    }

    #[test]
    fn generated_names_are_names_and_differ() {
        let name = MachineName::generate().unwrap();
        assert_eq!(MachineName::parse(name.as_str()).unwrap(), name);
        assert_ne!(MachineName::generate().unwrap(), name);
    }
}
