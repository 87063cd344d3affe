//! Image references: `host[:port]/path[:tag][@digest]`
//! (grammar: OCI distribution-spec "Pulling manifests"; defaults: Docker's).

use std::fmt;

use crate::digest::Digest;
use crate::error::{Error, Result};

/// Docker Hub's name in references.
pub const DOCKER_HUB: &str = "docker.io";
const MAX_TAG: usize = 128;
const MAX_REPOSITORY: usize = 255;

/// A registry image, by tag, by digest, or by both (the digest then decides).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

impl Reference {
    /// Parses a reference and fills in Docker's defaults: `docker.io`, `library/`, `:latest`.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::Name {
            text: text.to_owned(),
            why: why.to_owned(),
        };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (
                rest,
                Some(
                    Digest::parse(digest)
                        .map_err(|_| bad("what follows @ is not a sha256 or sha512 digest"))?,
                ),
            ),
            None => (text, None),
        };
        // A colon after the last slash starts a tag; an earlier one belongs to the port.
        let name_start = rest.rfind('/').map_or(0, |i| i + 1);
        let (name, tag) = match rest[name_start..].find(':') {
            Some(i) => (&rest[..name_start + i], Some(&rest[name_start + i + 1..])),
            None => (rest, None),
        };
        if let Some(tag) = tag {
            check_tag(tag).map_err(bad)?;
        }
        let (registry, repository) = match name.split_once('/') {
            Some((host, path)) if looks_like_host(host) => (host, path),
            _ => (DOCKER_HUB, name),
        };
        check_host(registry).map_err(bad)?;
        let registry = match registry {
            "index.docker.io" | "registry-1.docker.io" => DOCKER_HUB,
            other => other,
        };
        let mut repository = repository.to_owned();
        if registry == DOCKER_HUB && !repository.contains('/') && !repository.is_empty() {
            repository.insert_str(0, "library/");
        }
        check_repository(&repository).map_err(bad)?;
        let tag = match (&tag, &digest) {
            (None, None) => Some("latest".to_owned()),
            (tag, _) => tag.map(str::to_owned),
        };
        Ok(Self {
            registry: registry.to_owned(),
            repository,
            tag,
            digest,
        })
    }

    /// The registry's host and optional port, as written (`docker.io` for Docker Hub).
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// The repository's path in the registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest.
    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// What to ask a registry for: the digest if there is one, else the tag.
    pub(crate) fn manifest_name(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => "latest".to_owned(),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

/// Docker's rule for the first component: a dot, a colon, an upper-case letter or `localhost` make it a host.
fn looks_like_host(component: &str) -> bool {
    component == "localhost"
        || component.contains(['.', ':', '['])
        || component.bytes().any(|b| b.is_ascii_uppercase())
}

fn check_tag(tag: &str) -> Result<(), &'static str> {
    let mut bytes = tag.bytes();
    let first = bytes.next().ok_or("the tag after : is empty")?;
    if tag.len() > MAX_TAG {
        return Err("the tag is longer than 128 characters");
    }
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    if !word(first) || !bytes.all(|b| word(b) || b == b'.' || b == b'-') {
        return Err("a tag is letters, digits, _, . and -, and starts with none of . and -");
    }
    Ok(())
}

fn check_host(registry: &str) -> Result<(), &'static str> {
    const WHY: &str = "the registry is not HOST or HOST:PORT";
    let (host, port) = match registry.strip_prefix('[') {
        Some(rest) => {
            let (inside, after) = rest.split_once(']').ok_or(WHY)?;
            if inside.is_empty()
                || !inside
                    .bytes()
                    .all(|b| b.is_ascii_hexdigit() || b == b':' || b == b'.')
            {
                return Err(WHY);
            }
            return match after.strip_prefix(':') {
                Some(port) => check_port(port),
                None if after.is_empty() => Ok(()),
                None => Err(WHY),
            };
        }
        None => match registry.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (registry, None),
        },
    };
    if let Some(port) = port {
        check_port(port)?;
    }
    let label = |l: &str| {
        !l.is_empty()
            && !l.starts_with('-')
            && !l.ends_with('-')
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    if host.split('.').all(label) {
        Ok(())
    } else {
        Err(WHY)
    }
}

fn check_port(port: &str) -> Result<(), &'static str> {
    match port.parse::<u16>() {
        Ok(1..) if port.bytes().all(|b| b.is_ascii_digit()) => Ok(()),
        _ => Err("the registry's port is not a number from 1 to 65535"),
    }
}

fn check_repository(repository: &str) -> Result<(), &'static str> {
    if repository.is_empty() {
        return Err("the repository is empty");
    }
    if repository.len() > MAX_REPOSITORY {
        return Err("the repository is longer than 255 characters");
    }
    if repository.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err("the repository must be lower case");
    }
    if repository.split('/').all(is_path_component) {
        Ok(())
    } else {
        Err(
            "repository components are lower-case letters and digits, separated by one ., one or two _, or any number of -",
        )
    }
}

/// `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*`
fn is_path_component(component: &str) -> bool {
    let alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let mut rest = component.as_bytes();
    loop {
        let word = rest.iter().take_while(|b| alnum(**b)).count();
        if word == 0 {
            return false;
        }
        rest = &rest[word..];
        if rest.is_empty() {
            return true;
        }
        let separator = rest.iter().take_while(|b| !alnum(**b)).count();
        let legal = matches!(&rest[..separator], b"." | b"_" | b"__")
            || rest[..separator].iter().all(|b| *b == b'-');
        if !legal {
            return false;
        }
        rest = &rest[separator..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn references_parse_as_docker_users_expect() {
        let at = format!("sha256:{HEX}");
        let table: &[(&str, &str, &str, Option<&str>, bool)] = &[
            (
                "alpine",
                "docker.io",
                "library/alpine",
                Some("latest"),
                false,
            ),
            (
                "alpine:3.20",
                "docker.io",
                "library/alpine",
                Some("3.20"),
                false,
            ),
            (
                "python:3.12-slim",
                "docker.io",
                "library/python",
                Some("3.12-slim"),
                false,
            ),
            ("user/app", "docker.io", "user/app", Some("latest"), false),
            (
                "docker.io/alpine",
                "docker.io",
                "library/alpine",
                Some("latest"),
                false,
            ),
            (
                "index.docker.io/library/alpine",
                "docker.io",
                "library/alpine",
                Some("latest"),
                false,
            ),
            (
                "registry-1.docker.io/u/a:1",
                "docker.io",
                "u/a",
                Some("1"),
                false,
            ),
            ("localhost/app", "localhost", "app", Some("latest"), false),
            (
                "localhost:5000/app",
                "localhost:5000",
                "app",
                Some("latest"),
                false,
            ),
            (
                "localhost:5000/app:v1",
                "localhost:5000",
                "app",
                Some("v1"),
                false,
            ),
            (
                "127.0.0.1:5055/debian/py:12",
                "127.0.0.1:5055",
                "debian/py",
                Some("12"),
                false,
            ),
            ("[::1]:5000/a", "[::1]:5000", "a", Some("latest"), false),
            ("host:5000/x", "host:5000", "x", Some("latest"), false),
            (
                "ghcr.io/a/b/c-d__e.f",
                "ghcr.io",
                "a/b/c-d__e.f",
                Some("latest"),
                false,
            ),
            ("Host/app", "Host", "app", Some("latest"), false),
            ("alpine@{at}", "docker.io", "library/alpine", None, true),
            (
                "alpine:3@{at}",
                "docker.io",
                "library/alpine",
                Some("3"),
                true,
            ),
            ("h:1/x:t_._-@{at}", "h:1", "x", Some("t_._-"), true),
        ];
        for (text, registry, repository, tag, digest) in table {
            let text = text.replace("{at}", &at);
            let r = Reference::parse(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(r.registry(), *registry, "{text}");
            assert_eq!(r.repository(), *repository, "{text}");
            assert_eq!(r.tag(), *tag, "{text}");
            assert_eq!(r.digest().is_some(), *digest, "{text}");
            assert_eq!(
                Reference::parse(&r.to_string()).unwrap(),
                r,
                "{text} does not survive printing"
            );
        }
    }

    #[test]
    fn bad_references_are_refused_with_a_reason() {
        let long_tag = format!("a:{}", "t".repeat(129));
        let long_name = "a/".repeat(130) + "b";
        for text in [
            "",
            ":",
            "@",
            "a:",
            "a@",
            "/a",
            "a/",
            "a//b",
            "Alpine",
            "docker.io/Alpine",
            "a:b:c",
            "a b",
            "a:tag with space",
            "a:-x",
            "a:.x",
            "a___b",
            "a..b",
            "-a",
            "a-",
            "a/../b",
            "..",
            ".",
            "host:0/x",
            "host:99999/x",
            "host:+5/x",
            "host:/x",
            "-h.io/x",
            "h..io/x",
            "[::1/x",
            "[]:1/x",
            "a@sha256:xyz",
            "a@md5:00",
            "http://x/y",
            "a\n",
            "é",
            &long_tag,
            &long_name,
        ] {
            assert!(
                Reference::parse(text).is_err(),
                "{text:?} parsed as {:?}",
                Reference::parse(text)
            );
        }
        let message = Reference::parse("Alpine").unwrap_err().to_string();
        assert!(message.contains("lower case"), "{message}");
    }

    #[test]
    fn a_digest_beats_a_tag() {
        let r = Reference::parse(&format!("a:1@sha256:{HEX}")).unwrap();
        assert_eq!(r.manifest_name(), format!("sha256:{HEX}"));
    }
}
