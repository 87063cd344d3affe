//! Docker's `config.json` and podman's `auth.json`, which are the same format (containers-auth.json(5)).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::Deserialize;

use super::Credential;
use crate::config::or_default;
use crate::limits::MAX_DOCUMENT;
use crate::reference::DOCKER_HUB;

/// Padding is left out by some hands.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

#[derive(Default, Deserialize)]
pub(super) struct AuthFile {
    #[serde(default, deserialize_with = "or_default")]
    auths: BTreeMap<String, Option<Entry>>,
    #[serde(rename = "credsStore", default, deserialize_with = "or_default")]
    creds_store: String,
    #[serde(rename = "credHelpers", default, deserialize_with = "or_default")]
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
struct Entry {
    #[serde(default, deserialize_with = "or_default")]
    auth: String,
    #[serde(default, deserialize_with = "or_default")]
    username: String,
    #[serde(default, deserialize_with = "or_default")]
    password: String,
    #[serde(default, deserialize_with = "or_default")]
    identitytoken: String,
    #[serde(default, deserialize_with = "or_default")]
    registrytoken: String,
}

impl AuthFile {
    /// `None` when there is no such file. An error quotes nothing of the content.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, String> {
        let mut bytes = Vec::new();
        match File::open(path) {
            Ok(file) => file.take(MAX_DOCUMENT).read_to_end(&mut bytes),
            Err(e) => Err(e),
        }
        .map_or_else(
            |e| match e.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(None),
                _ => Err(e.to_string()),
            },
            |_| Self::parse(&bytes).map(Some),
        )
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.trim_ascii().is_empty() {
            return Ok(Self::default());
        }
        serde_json::from_slice(bytes).map_err(|e| {
            let (line, column) = (e.line(), e.column());
            format!("not what such a file holds, at line {line}, column {column}")
        })
    }

    /// The suffixes of the helper programs to ask, in order.
    pub(super) fn helpers(&self, registry: &str) -> impl Iterator<Item = &str> {
        let own = self
            .cred_helpers
            .iter()
            .find(|(key, _)| normalize(key) == registry)
            .map(|(_, helper)| helper.as_str());
        [own, Some(self.creds_store.as_str())]
            .into_iter()
            .flatten()
            .filter(|name| !name.is_empty())
    }

    /// What the file itself holds, for the longest part of `REGISTRY/REPOSITORY` that it knows.
    pub(super) fn stored(
        &self,
        registry: &str,
        repository: &str,
    ) -> Result<Option<Credential>, String> {
        let full = format!("{registry}/{repository}");
        let best = self
            .auths
            .iter()
            .filter_map(|(key, entry)| Some((normalize(key), entry.as_ref()?)))
            .filter(|(key, entry)| !entry.is_empty() && covers(key, &full))
            .max_by_key(|(key, _)| key.len());
        match best {
            Some((_, entry)) => entry.credential(),
            None => Ok(None),
        }
    }
}

impl Entry {
    /// What `docker login` leaves in the file for a registry whose secret a helper keeps.
    fn is_empty(&self) -> bool {
        [
            &self.auth,
            &self.username,
            &self.password,
            &self.identitytoken,
            &self.registrytoken,
        ]
        .iter()
        .all(|text| text.is_empty())
    }

    fn credential(&self) -> Result<Option<Credential>, String> {
        if !self.registrytoken.is_empty() {
            return Ok(Some(Credential::Bearer(self.registrytoken.clone())));
        }
        if !self.identitytoken.is_empty() {
            return Ok(Some(Credential::IdentityToken(self.identitytoken.clone())));
        }
        let (username, password) = if self.auth.is_empty() {
            (self.username.clone(), self.password.clone())
        } else {
            let decoded = BASE64
                .decode(self.auth.trim())
                .ok()
                .and_then(|bytes| String::from_utf8(bytes).ok())
                .ok_or("auth is not base64")?;
            // Only the first colon separates; Docker pads with NUL.
            let (username, password) = decoded
                .split_once(':')
                .ok_or("auth is not the base64 of USER:PASSWORD")?;
            let password = password.trim_end_matches('\0');
            (username.to_owned(), password.to_owned())
        };
        Ok(Credential::from_pair(username, password))
    }
}

/// Whether a key stands for a repository or something that it is in.
fn covers(key: &str, full: &str) -> bool {
    full.strip_prefix(key)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// `HOST[:PORT][/PATH]` of a key in one of the forms that tools have written: with and without scheme, with the API's
/// version behind it, and under any of Docker Hub's names.
pub(super) fn normalize(key: &str) -> String {
    let bare = match key.split_once("://") {
        // A URL stands for its host.
        Some((_, rest)) => rest.split('/').next().unwrap_or(""),
        None => {
            let rest = key.trim_end_matches('/');
            let rest = rest.strip_suffix("/v1").unwrap_or(rest);
            rest.strip_suffix("/v2").unwrap_or(rest)
        }
    };
    let (host, path) = match bare.find('/') {
        Some(at) => bare.split_at(at),
        None => (bare, ""),
    };
    match host {
        "index.docker.io" | "registry-1.docker.io" => format!("{DOCKER_HUB}{path}"),
        _ => bare.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn basic(username: &str, password: &str) -> Option<Credential> {
        Some(Credential::Password {
            username: username.into(),
            password: password.into(),
        })
    }

    fn stored(json: &str, registry: &str, repository: &str) -> Option<Credential> {
        AuthFile::parse(json.as_bytes())
            .unwrap()
            .stored(registry, repository)
            .unwrap()
    }

    #[test]
    fn keys_are_understood_in_all_their_forms() {
        for key in [
            "r.io",
            "r.io/",
            "https://r.io",
            "https://r.io/",
            "http://r.io/v1/",
            "https://r.io/v2/",
            "r.io/v1",
            "r.io/v2/",
        ] {
            assert_eq!(normalize(key), "r.io", "{key}");
            // dTpwOnc= is u:p:w.
            let json = format!(r#"{{"auths":{{"{key}":{{"auth":"dTpwOnc="}}}}}}"#);
            assert_eq!(stored(&json, "r.io", "a/b"), basic("u", "p:w"), "{key}");
            assert_eq!(stored(&json, "r.io:5000", "a/b"), None, "{key}");
            assert_eq!(stored(&json, "other.r.io", "a/b"), None, "{key}");
        }
        for key in [
            "docker.io",
            "https://index.docker.io/v1/",
            "index.docker.io",
            "registry-1.docker.io",
        ] {
            assert_eq!(normalize(key), "docker.io", "{key}");
        }
        assert_eq!(normalize("https://r.io:5000/v1/"), "r.io:5000");
    }

    #[test]
    fn the_longest_part_of_a_repository_decides() {
        let json = r#"{"auths":{
            "r.io":{"username":"host","password":"x"},
            "r.io/team":{"username":"team","password":"x"},
            "r.io/team/app":{"username":"app","password":"x"},
            "r.io/empty":{}, "r.io/null":null}}"#;
        for (repository, user) in [
            ("team/app", "app"),
            ("team/app/x", "app"),
            ("team/apple", "team"),
            ("teams/app", "host"),
            ("empty/x", "host"),
            ("null/x", "host"),
        ] {
            assert_eq!(
                stored(json, "r.io", repository),
                basic(user, "x"),
                "{repository}"
            );
        }
    }

    #[test]
    fn tokens_come_before_passwords() {
        let json = r#"{"auths":{"a":{"auth":"dTpw","identitytoken":"id"},"b":{"registrytoken":"reg"},
            "c":{"auth":"PHRva2VuPjppZA=="},"d":{"auth":"dTpwAAA"}}}"#;
        assert_eq!(
            stored(json, "a", "x"),
            Some(Credential::IdentityToken("id".into()))
        );
        assert_eq!(
            stored(json, "b", "x"),
            Some(Credential::Bearer("reg".into()))
        );
        assert_eq!(
            stored(json, "c", "x"),
            Some(Credential::IdentityToken("id".into()))
        );
        assert_eq!(stored(json, "d", "x"), basic("u", "p"));
    }

    #[test]
    fn helpers_come_in_order() {
        let json = r#"{"credsStore":"all","credHelpers":{"https://index.docker.io/v1/":"hub","r.io":"ecr"}}"#;
        let file = AuthFile::parse(json.as_bytes()).unwrap();
        assert_eq!(
            file.helpers("docker.io").collect::<Vec<_>>(),
            ["hub", "all"]
        );
        assert_eq!(file.helpers("r.io").collect::<Vec<_>>(), ["ecr", "all"]);
        assert_eq!(file.helpers("x.io").collect::<Vec<_>>(), ["all"]);
    }

    #[test]
    fn damaged_files_are_refused_without_quoting_them() {
        for json in [
            r#"{"auths":{"r.io":{"auth":"hunter2"#,
            r#"{"auths":{"r.io":"hunter2"}}"#,
            r#"{"auths":"hunter2"}"#,
            "hunter2",
        ] {
            let Err(why) = AuthFile::parse(json.as_bytes()) else {
                panic!("{json} is accepted")
            };
            assert!(!why.contains("hunter2"), "{why}");
        }
        for auth in ["hunter2!", "aHVudGVyMg==", "/////w=="] {
            let json = format!(r#"{{"auths":{{"r.io":{{"auth":"{auth}"}}}}}}"#);
            let file = AuthFile::parse(json.as_bytes()).unwrap();
            let why = file.stored("r.io", "x").unwrap_err();
            assert!(!why.contains(auth) && !why.contains("hunter2"), "{why}");
        }
        assert!(AuthFile::parse(b" \n").is_ok());
        assert!(
            AuthFile::read(Path::new("/no/such/file"))
                .unwrap()
                .is_none()
        );
        assert!(AuthFile::read(Path::new("/")).is_err());
    }
}
