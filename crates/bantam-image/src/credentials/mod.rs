//! What a registry is shown to prove who asks, and where users keep it.
//!
//! Looked up only when a registry asks, in this order; the first place that has something for the registry decides:
//!
//! 1. [`Registries::credentials`](crate::Registries::credentials), given by the program;
//! 2. the file that `$REGISTRY_AUTH_FILE` names;
//! 3. `$DOCKER_CONFIG/config.json`, if that variable is set;
//! 4. `$XDG_RUNTIME_DIR/containers/auth.json`, then `containers/auth.json` in `$XDG_CONFIG_HOME` or `~/.config`
//!    (podman, skopeo, buildah);
//! 5. `~/.docker/config.json`.
//!
//! Within a file a helper named for the registry (`credHelpers`) comes before the helper for all (`credsStore`), and
//! that before what the file itself holds (`auths`). A file that cannot be read and a helper that is missing, fails
//! or does not answer in time are reported and passed over.
//!
//! The `docker_credential` crate does not fit: it reads Docker's file only, waits for helpers without end, and knows
//! neither identity tokens in files nor podman's keys for parts of a registry.

mod file;
mod helper;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::reference::DOCKER_HUB;

/// What a registry is shown to prove who asks. `Debug` shows no secret.
#[derive(Clone, PartialEq, Eq)]
pub enum Credential {
    /// A name and a password or access token.
    Password {
        /// The account.
        username: String,
        /// The password or access token.
        password: String,
    },
    /// An OAuth2 refresh token, which token servers exchange for an access token.
    IdentityToken(String),
    /// A token to be sent as it is in `Authorization: Bearer`.
    Bearer(String),
}

impl Credential {
    /// What a helper or file means by a name and a secret: the name `<token>` marks an identity token.
    fn from_pair(username: String, secret: String) -> Option<Self> {
        if secret.is_empty() {
            return None;
        }
        Some(match username.as_str() {
            "<token>" => Self::IdentityToken(secret),
            _ => Self::Password {
                username,
                password: secret,
            },
        })
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Password { username, .. } => f
                .debug_struct("Password")
                .field("username", username)
                .finish_non_exhaustive(),
            Self::IdentityToken(_) => f.write_str("IdentityToken(..)"),
            Self::Bearer(_) => f.write_str("Bearer(..)"),
        }
    }
}

/// A credential and where it was found.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) credential: Credential,
    /// For messages. `None` for one that the program gave.
    pub(crate) place: Option<String>,
}

/// Where to look.
pub(crate) struct Finder<'a> {
    /// By registry, as the program wrote them.
    pub(crate) given: &'a BTreeMap<String, Credential>,
    /// In order.
    pub(crate) files: Vec<PathBuf>,
    pub(crate) helper_timeout: Duration,
}

impl Finder<'_> {
    /// The credential for a repository of a registry (`HOST[:PORT]`, `docker.io` for Docker Hub). What had to be passed
    /// over is told to `tell`.
    pub(crate) fn find(
        &self,
        registry: &str,
        repository: &str,
        tell: &dyn Fn(&str),
    ) -> Option<Found> {
        let given = self
            .given
            .iter()
            .find(|(key, _)| file::normalize(key) == registry);
        if let Some((_, credential)) = given {
            return Some(Found {
                credential: credential.clone(),
                place: None,
            });
        }
        self.files
            .iter()
            .find_map(|path| self.in_file(path, registry, repository, tell))
    }

    fn in_file(
        &self,
        path: &Path,
        registry: &str,
        repository: &str,
        tell: &dyn Fn(&str),
    ) -> Option<Found> {
        let file = match file::AuthFile::read(path) {
            Ok(file) => file?,
            Err(why) => {
                tell(&format!(
                    "ignoring credentials in {}: {why}",
                    path.display()
                ));
                return None;
            }
        };
        for helper in file.helpers(registry) {
            match helper::get(helper, server_name(registry), self.helper_timeout) {
                Ok(Some(credential)) => {
                    return Some(Found {
                        credential,
                        place: Some(format!("{} ({})", helper::program(helper), path.display())),
                    });
                }
                Ok(None) => {}
                Err(why) => tell(&format!(
                    "{why}, named in {}; going on without",
                    path.display()
                )),
            }
        }
        match file.stored(registry, repository) {
            Ok(credential) => Some(Found {
                credential: credential?,
                place: Some(path.display().to_string()),
            }),
            Err(why) => {
                tell(&format!(
                    "ignoring the credentials for {registry} in {}: {why}",
                    path.display()
                ));
                None
            }
        }
    }
}

/// What helpers know a registry as.
fn server_name(registry: &str) -> &str {
    match registry {
        DOCKER_HUB => "https://index.docker.io/v1/",
        other => other,
    }
}

/// The usual files, in order, from the environment.
pub(crate) fn usual_files(env: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let var = |name: &str| env(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = var("HOME");
    let docker = var("DOCKER_CONFIG");
    let config = var("XDG_CONFIG_HOME").or_else(|| home.as_ref().map(|home| home.join(".config")));
    let podman = "containers/auth.json";
    let docker_at_home = match &docker {
        Some(_) => None,
        None => home.as_ref().map(|home| home.join(".docker/config.json")),
    };
    [
        var("REGISTRY_AUTH_FILE"),
        docker.map(|dir| dir.join("config.json")),
        var("XDG_RUNTIME_DIR").map(|dir| dir.join(podman)),
        config.map(|dir| dir.join(podman)),
        docker_at_home,
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_files_come_in_order() {
        let env = |name: &str| -> Option<OsString> {
            match name {
                "HOME" => Some("/h".into()),
                "XDG_RUNTIME_DIR" => Some("/run/u".into()),
                "REGISTRY_AUTH_FILE" => Some(OsString::new()),
                _ => None,
            }
        };
        let want = [
            "/run/u/containers/auth.json",
            "/h/.config/containers/auth.json",
            "/h/.docker/config.json",
        ];
        assert_eq!(usual_files(&env), want.map(PathBuf::from));
        let env = |name: &str| -> Option<OsString> {
            match name {
                "HOME" => Some("/h".into()),
                "XDG_CONFIG_HOME" => Some("/c".into()),
                "REGISTRY_AUTH_FILE" => Some("/a.json".into()),
                "DOCKER_CONFIG" => Some("/d".into()),
                _ => None,
            }
        };
        let want = ["/a.json", "/d/config.json", "/c/containers/auth.json"];
        assert_eq!(usual_files(&env), want.map(PathBuf::from));
        assert!(usual_files(&|_| None).is_empty());
    }

    #[test]
    fn debug_output_shows_no_secret() {
        let found = Found {
            credential: Credential::Password {
                username: "me".into(),
                password: "hunter2".into(),
            },
            place: None,
        };
        let others = [
            Credential::IdentityToken("hunter2".into()),
            Credential::Bearer("hunter2".into()),
        ];
        let text = format!("{found:?} {others:?}");
        assert!(text.contains("me") && !text.contains("hunter2"), "{text}");
    }
}
