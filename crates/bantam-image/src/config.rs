//! The image configuration and how it becomes a process (OCI image-spec config.md).

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::platform::Platform;

/// The search path of a process whose image names none (Docker's default).
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What an image says about the process to run in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// `user`, `uid`, `user:group`, `uid:gid`, ...; looked up in the image's own passwd and group files.
    pub user: Option<String>,
    /// `NAME=value` entries.
    pub env: Vec<String>,
    /// The words that start every command.
    pub entrypoint: Vec<String>,
    /// The default arguments of the entrypoint, or the default command.
    pub cmd: Vec<String>,
    /// The directory the process starts in.
    pub working_dir: Option<String>,
    /// The signal that asks the process to end: `SIGTERM`, `15`, `SIGRTMIN+3`.
    pub stop_signal: Option<String>,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// Directories meant to hold data.
    pub volumes: Vec<String>,
    /// `PORT`, `PORT/tcp` or `PORT/udp`; information only.
    pub exposed_ports: Vec<String>,
    /// Go's name of the architecture.
    pub architecture: String,
    /// Go's name of the operating system.
    pub os: String,
}

/// What the image and the caller together ask to be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argv {
    /// Run these words; there is at least one.
    Run(Vec<Vec<u8>>),
    /// Neither the image nor the caller names a command: keep the machine up, to execute in.
    Idle,
}

impl ImageConfig {
    /// The command line, by Docker's rules: the caller's arguments replace `Cmd`; the caller's entrypoint
    /// replaces `Entrypoint` and drops the image's `Cmd`. An empty entrypoint, or a single empty word, clears it.
    /// Words are bytes, as `execve` takes them.
    pub fn process(&self, args: &[Vec<u8>], entrypoint: Option<&[Vec<u8>]>) -> Argv {
        let bytes = |words: &[String]| words.iter().map(|word| word.clone().into_bytes()).collect();
        let default_args: Vec<Vec<u8>> = match entrypoint {
            Some(_) => Vec::new(),
            None => bytes(&self.cmd),
        };
        let mut argv: Vec<Vec<u8>> = match entrypoint {
            Some([only]) if only.is_empty() => Vec::new(),
            Some(words) => words.to_vec(),
            None => bytes(&self.entrypoint),
        };
        argv.extend(if args.is_empty() {
            default_args
        } else {
            args.to_vec()
        });
        if argv.is_empty() {
            Argv::Idle
        } else {
            Argv::Run(argv)
        }
    }

    /// The environment: the image's entries, each overridden by the caller's of the same name, then the caller's
    /// others, then `PATH` if still missing. Entries without a name or without `=` are dropped; of two entries of
    /// one name the later value counts, at the earlier place. `HOME` is the guest's to add: it needs passwd.
    pub fn environment(&self, user: &[(Vec<u8>, Vec<u8>)]) -> Vec<Vec<u8>> {
        let mut merged: Vec<(&[u8], &[u8])> = Vec::new();
        let image = self.env.iter().filter_map(|entry| entry.split_once('='));
        let image = image.map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        let user = user
            .iter()
            .map(|(name, value)| (name.as_slice(), value.as_slice()));
        for (name, value) in image.chain(user).filter(|(name, _)| !name.is_empty()) {
            match merged.iter_mut().find(|(seen, _)| *seen == name) {
                Some(entry) => entry.1 = value,
                None => merged.push((name, value)),
            }
        }
        if !merged.iter().any(|(name, _)| *name == b"PATH") {
            merged.push((b"PATH", DEFAULT_PATH.as_bytes()));
        }
        merged
            .into_iter()
            .map(|(name, value)| [name, b"=", value].concat())
            .collect()
    }
}

/// The configuration file as registries hold it: every field may be missing or null.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct ConfigFile {
    #[serde(default, deserialize_with = "or_default")]
    architecture: String,
    #[serde(default, deserialize_with = "or_default")]
    variant: String,
    #[serde(default, deserialize_with = "or_default")]
    os: String,
    #[serde(default, deserialize_with = "or_default")]
    config: Execution,
    #[serde(default)]
    pub(crate) rootfs: Option<RootFs>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Execution {
    #[serde(rename = "User", default, deserialize_with = "or_default")]
    user: String,
    #[serde(rename = "Env", default, deserialize_with = "or_default")]
    env: Vec<String>,
    #[serde(rename = "Entrypoint", default, deserialize_with = "or_default")]
    entrypoint: Vec<String>,
    #[serde(rename = "Cmd", default, deserialize_with = "or_default")]
    cmd: Vec<String>,
    #[serde(rename = "WorkingDir", default, deserialize_with = "or_default")]
    working_dir: String,
    #[serde(rename = "StopSignal", default, deserialize_with = "or_default")]
    stop_signal: String,
    #[serde(rename = "Labels", default, deserialize_with = "or_default")]
    labels: BTreeMap<String, Option<String>>,
    #[serde(rename = "Volumes", default, deserialize_with = "or_default")]
    volumes: BTreeMap<String, serde::de::IgnoredAny>,
    #[serde(rename = "ExposedPorts", default, deserialize_with = "or_default")]
    exposed_ports: BTreeMap<String, serde::de::IgnoredAny>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct RootFs {
    #[serde(rename = "type", default, deserialize_with = "or_default")]
    pub(crate) kind: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) diff_ids: Vec<String>,
}

/// Reads null as the default value.
pub(crate) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

impl ConfigFile {
    /// The platform the image is for, if it says.
    pub(crate) fn platform(&self) -> Option<Platform> {
        if self.os.is_empty() || self.architecture.is_empty() {
            return None;
        }
        Some(Platform::new(&self.os, &self.architecture, &self.variant))
    }
}

impl From<ConfigFile> for ImageConfig {
    fn from(file: ConfigFile) -> Self {
        let some = |text: String| (!text.is_empty()).then_some(text);
        let c = file.config;
        Self {
            user: some(c.user),
            env: c.env,
            entrypoint: c.entrypoint,
            cmd: c.cmd,
            working_dir: some(c.working_dir),
            stop_signal: some(c.stop_signal),
            labels: c
                .labels
                .into_iter()
                .map(|(k, v)| (k, v.unwrap_or_default()))
                .collect(),
            volumes: c.volumes.into_keys().collect(),
            exposed_ports: c.exposed_ports.into_keys().collect(),
            architecture: file.architecture,
            os: file.os,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn bytes(text: &str) -> Vec<Vec<u8>> {
        words(text).into_iter().map(String::into_bytes).collect()
    }

    #[test]
    fn entrypoint_and_cmd_combine_by_dockers_rules() {
        // entrypoint, cmd, user's entrypoint, user's args -> argv
        let table: &[(&str, &str, Option<&str>, &str, &str)] = &[
            ("", "", None, "", ""),
            ("", "bash", None, "", "bash"),
            ("", "bash", None, "ls -l", "ls -l"),
            ("tini --", "bash", None, "", "tini -- bash"),
            ("tini --", "bash", None, "ls", "tini -- ls"),
            ("tini", "", None, "", "tini"),
            ("tini", "bash", Some("sh"), "", "sh"),
            ("tini", "bash", Some("sh"), "-c true", "sh -c true"),
            ("tini", "bash", Some(""), "", ""),
            ("tini", "bash", Some(""), "ls", "ls"),
        ];
        for (entrypoint, cmd, over, args, want) in table {
            let config = ImageConfig {
                entrypoint: words(entrypoint),
                cmd: words(cmd),
                ..ImageConfig::default()
            };
            let over = over.map(bytes);
            let want = bytes(want);
            let want = if want.is_empty() {
                Argv::Idle
            } else {
                Argv::Run(want)
            };
            assert_eq!(
                config.process(&bytes(args), over.as_deref()),
                want,
                "{entrypoint}|{cmd}|{over:?}|{args}"
            );
        }
        let config = ImageConfig {
            entrypoint: words("tini"),
            ..ImageConfig::default()
        };
        assert_eq!(
            config.process(&bytes("ls"), Some(&[Vec::new()])),
            Argv::Run(bytes("ls"))
        );
    }

    #[test]
    fn the_users_environment_wins_and_path_is_never_missing() {
        let path = format!("PATH={DEFAULT_PATH}");
        type Row<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a [&'a str]);
        let table: &[Row<'_>] = &[
            (&[], &[], &[&path]),
            (&["PATH=/x", "A=1"], &[], &["PATH=/x", "A=1"]),
            (
                &["A=1", "PATH=/x"],
                &[("A", "2"), ("B", "3")],
                &["A=2", "PATH=/x", "B=3"],
            ),
            (&["A=1"], &[("PATH", "/y")], &["A=1", "PATH=/y"]),
            (&["A=b=c\nd", "EMPTY="], &[], &["A=b=c\nd", "EMPTY=", &path]),
            (
                &["NOEQUALS", "=noname", "A=1", "A=2"],
                &[("", "x")],
                &["A=2", &path],
            ),
            (&["PATH="], &[], &["PATH="]),
        ];
        for (image, user, want) in table {
            let config = ImageConfig {
                env: image.iter().map(|s| (*s).to_owned()).collect(),
                ..ImageConfig::default()
            };
            let user: Vec<_> = user
                .iter()
                .map(|(k, v)| (k.as_bytes().to_vec(), v.as_bytes().to_vec()))
                .collect();
            let want: Vec<_> = want.iter().map(|entry| entry.as_bytes()).collect();
            assert_eq!(config.environment(&user), want, "{image:?} {user:?}");
        }
    }

    #[test]
    fn every_optional_field_may_be_null_or_absent() {
        let nulls = r#"{"architecture":"amd64","os":"linux","created":null,"author":null,"variant":null,
            "config":{"User":null,"ExposedPorts":null,"Env":null,"Entrypoint":null,"Cmd":null,"Volumes":null,
            "WorkingDir":null,"Labels":null,"StopSignal":null,"ArgsEscaped":null,"Memory":null,"Healthcheck":null},
            "rootfs":{"type":"layers","diff_ids":null},"history":null,"unknown":{"x":[1]}}"#;
        let file: ConfigFile = serde_json::from_str(nulls).unwrap();
        assert_eq!(
            ImageConfig::from(file),
            ImageConfig {
                architecture: "amd64".into(),
                os: "linux".into(),
                ..ImageConfig::default()
            }
        );
        let file: ConfigFile = serde_json::from_str(r#"{"config":null}"#).unwrap();
        assert_eq!(ImageConfig::from(file), ImageConfig::default());
    }

    #[test]
    fn a_full_configuration_is_read() {
        let text = r#"{"architecture":"amd64","os":"linux","config":{"User":"1:2","ExposedPorts":{"80/tcp":{}},
            "Env":["A=1"],"Entrypoint":["e"],"Cmd":["c"],"Volumes":{"/v":{}},"WorkingDir":"/w",
            "Labels":{"k":"v","n":null},"StopSignal":"SIGRTMIN+3"},"rootfs":{"type":"layers","diff_ids":[]}}"#;
        let config = ImageConfig::from(serde_json::from_str::<ConfigFile>(text).unwrap());
        assert_eq!(config.user.as_deref(), Some("1:2"));
        assert_eq!(config.volumes, ["/v"]);
        assert_eq!(config.exposed_ports, ["80/tcp"]);
        assert_eq!(config.labels["k"], "v");
        assert_eq!(config.labels["n"], "");
        assert_eq!(config.stop_signal.as_deref(), Some("SIGRTMIN+3"));
        assert_eq!(config.working_dir.as_deref(), Some("/w"));
    }
}
