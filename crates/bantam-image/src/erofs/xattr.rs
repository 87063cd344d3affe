//! Extended attributes, kept in their on-disk form from the start.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::limits::{MAX_XATTR_VALUE, MAX_XATTRS};

/// Name prefixes that have a number on disk. The ACL names are whole names.
const PREFIXES: [(&[u8], u8); 5] = [
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"user.", 1),
    (b"trusted.", 4),
    (b"security.", 6),
];

/// The extended attributes of one file, encoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Xattrs(Box<[u8]>);

impl Xattrs {
    /// Encodes full names (`user.x`, `security.capability`, `system.posix_acl_access`) and their values.
    ///
    /// Names outside the namespaces that Linux keeps on disk are left out, as are `trusted.overlay.*`: those
    /// would be orders to the guest's overlayfs, not data.
    pub fn encode(what: &str, attributes: &BTreeMap<Vec<u8>, Vec<u8>>) -> Result<Self> {
        let mut out = Vec::new();
        for (name, value) in attributes {
            let Some((index, suffix)) = split(name) else {
                tracing::debug!(file = what, name = %String::from_utf8_lossy(name), "extended attribute left out");
                continue;
            };
            let (Ok(name_len), Ok(value_len)) =
                (u8::try_from(suffix.len()), u16::try_from(value.len()))
            else {
                return Err(Error::Limit {
                    what: format!(
                        "{what}: extended attribute {}",
                        String::from_utf8_lossy(name)
                    ),
                    limit: MAX_XATTR_VALUE as u64,
                    unit: "bytes (255 for its name)",
                });
            };
            if out.is_empty() {
                // The header: no name filter, no shared attributes.
                out.extend_from_slice(&[0; 12]);
            }
            out.extend_from_slice(&[name_len, index]);
            out.extend_from_slice(&value_len.to_le_bytes());
            out.extend_from_slice(suffix);
            out.extend_from_slice(value);
            out.resize(out.len().next_multiple_of(4), 0);
            if out.len() > MAX_XATTRS {
                return Err(Error::Limit {
                    what: format!("{what}: extended attributes"),
                    limit: MAX_XATTRS as u64,
                    unit: "bytes",
                });
            }
        }
        Ok(Self(out.into()))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The encoded length in bytes; 0 when there are none.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    if name.starts_with(b"trusted.overlay.") {
        return None;
    }
    PREFIXES.iter().find_map(|(prefix, index)| {
        let suffix = name.strip_prefix(*prefix)?;
        // ACL names are complete; the others need something after the dot.
        (suffix.is_empty() == matches!(index, 2 | 3)).then_some((*index, suffix))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(pairs: &[(&str, &[u8])]) -> Xattrs {
        let map = pairs
            .iter()
            .map(|(n, v)| (n.as_bytes().to_vec(), v.to_vec()))
            .collect();
        Xattrs::encode("f", &map).unwrap()
    }

    #[test]
    fn an_attribute_is_header_entry_and_padding() {
        let x = encode(&[("user.ab", b"\0c")]);
        let mut want = vec![0; 12];
        want.extend_from_slice(&[2, 1, 2, 0, b'a', b'b', 0, b'c']);
        assert_eq!(x.bytes(), want);
        assert_eq!(
            encode(&[("system.posix_acl_access", b"x")]).bytes()[12..16],
            [0, 2, 1, 0]
        );
    }

    #[test]
    fn orders_to_overlayfs_and_foreign_names_are_left_out() {
        let x = encode(&[
            ("trusted.overlay.opaque", b"y"),
            ("trusted.overlay.redirect", b"/etc"),
            ("com.apple.quarantine", b"x"),
            ("user.", b""),
            ("system.posix_acl_access_not", b""),
        ]);
        assert_eq!(x.len(), 0);
        assert_ne!(encode(&[("trusted.overlayish", b"")]).len(), 0);
    }

    #[test]
    fn oversized_attributes_are_refused() {
        let map = BTreeMap::from([(b"user.a".to_vec(), vec![0; 65_536])]);
        assert!(matches!(
            Xattrs::encode("f", &map),
            Err(Error::Limit { .. })
        ));
        let map = BTreeMap::from([(format!("user.{}", "n".repeat(256)).into_bytes(), vec![])]);
        assert!(matches!(
            Xattrs::encode("f", &map),
            Err(Error::Limit { .. })
        ));
        let map = (0..5)
            .map(|i| (format!("user.{i}").into_bytes(), vec![0; 65_000]))
            .collect();
        assert!(matches!(
            Xattrs::encode("f", &map),
            Err(Error::Limit { .. })
        ));
    }
}
