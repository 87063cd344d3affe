//! Operating system, architecture and variant, and which image entries fit a machine
//! (OCI image-spec image-index.md "platform").

use std::fmt;

use crate::error::{Error, Result};

/// What a machine can run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`, ... (Go's names).
    pub architecture: String,
    /// `v8`, ...; empty when the platform has none.
    pub variant: String,
}

impl Platform {
    /// Linux on this host's architecture.
    pub fn host() -> Self {
        Self::new("linux", std::env::consts::ARCH, "")
    }

    /// A platform with the usual other names for architectures folded into Go's.
    pub fn new(os: &str, architecture: &str, variant: &str) -> Self {
        let (architecture, implied) = match architecture.to_ascii_lowercase().as_str() {
            "x86_64" | "x86-64" | "amd64" => ("amd64".to_owned(), ""),
            "aarch64" | "arm64" => ("arm64".to_owned(), "v8"),
            "i386" | "i686" | "386" => ("386".to_owned(), ""),
            other => (other.to_owned(), ""),
        };
        let variant = match (architecture.as_str(), variant) {
            // arm64 is arm64/v8, and amd64 is amd64/v1.
            ("arm64", "" | "8") => implied.to_owned(),
            ("amd64", "v1") => String::new(),
            (_, v) => v.to_ascii_lowercase(),
        };
        Self {
            os: os.to_ascii_lowercase(),
            architecture,
            variant,
        }
    }

    /// Parses `OS/ARCH` or `OS/ARCH/VARIANT`.
    pub fn parse(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split('/').collect();
        match parts[..] {
            [os, arch] if !os.is_empty() && !arch.is_empty() => Ok(Self::new(os, arch, "")),
            [os, arch, variant] if !os.is_empty() && !arch.is_empty() => {
                Ok(Self::new(os, arch, variant))
            }
            _ => Err(Error::Name {
                text: text.to_owned(),
                why: "a platform is OS/ARCH or OS/ARCH/VARIANT".to_owned(),
            }),
        }
    }

    /// How well an entry for `offered` suits a machine of this platform: lower is better, `None` is not at all.
    pub(crate) fn rank(&self, offered: &Platform) -> Option<u32> {
        if self.os != offered.os || self.architecture != offered.architecture {
            return None;
        }
        if self.variant == offered.variant {
            return Some(0);
        }
        // An amd64 image built for a later level is worth trying when nothing plainer is offered.
        match (self.architecture.as_str(), offered.variant.as_str()) {
            ("amd64", "v2") => Some(2),
            ("amd64", "v3") => Some(3),
            ("amd64", "") => Some(1),
            _ => None,
        }
    }

    /// Whether a configuration for `offered` may run here. Unlike indexes, configurations often leave the variant out.
    pub(crate) fn fits_config(&self, offered: &Platform) -> bool {
        let unsaid = offered.variant.is_empty()
            && self.os == offered.os
            && self.architecture == offered.architecture;
        unsaid || self.rank(offered).is_some()
    }
}

impl Default for Platform {
    fn default() -> Self {
        Self::host()
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        if !self.variant.is_empty()
            && (self.architecture.as_str(), self.variant.as_str()) != ("arm64", "v8")
        {
            write!(f, "/{}", self.variant)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p(text: &str) -> Platform {
        Platform::parse(text).unwrap()
    }

    #[test]
    fn arm64_with_and_without_its_variant_is_one_platform() {
        assert_eq!(p("linux/arm64"), p("linux/arm64/v8"));
        assert_eq!(p("linux/aarch64").to_string(), "linux/arm64");
        assert_eq!(p("linux/arm64").rank(&p("linux/arm64/v8")), Some(0));
    }

    #[test]
    fn a_plain_amd64_entry_is_preferred_to_a_higher_level() {
        let host = p("linux/amd64");
        assert_eq!(host.rank(&p("linux/amd64/v1")), Some(0));
        assert!(host.rank(&p("linux/amd64")) < host.rank(&p("linux/amd64/v3")));
        assert_eq!(host.rank(&p("linux/arm64")), None);
        assert_eq!(host.rank(&p("windows/amd64")), None);
        assert_eq!(host.rank(&p("unknown/unknown")), None);
    }

    #[test]
    fn a_platform_needs_two_or_three_parts() {
        for bad in ["", "linux", "linux/", "/amd64", "a/b/c/d"] {
            assert!(Platform::parse(bad).is_err(), "{bad}");
        }
    }
}
