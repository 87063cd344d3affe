//! How registries are reached.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::credentials::Credential;

/// How registries are reached.
///
/// Registries are named here as in references: `HOST` or `HOST:PORT`, `docker.io` for Docker Hub.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registries {
    /// Registries that are spoken to in the clear. Loopback addresses always are; others never are unless named here.
    /// Those get no credentials.
    pub plain_http: Vec<String>,
    /// Where to ask before the registry itself, in order: `[SCHEME://]HOST[:PORT][/PREFIX]`, where PREFIX comes before
    /// the repository. A mirror that says `http://` is spoken to in the clear. Whatever a mirror sends must have the
    /// digest that the image gives it; which image a tag means is for the first to say that knows it.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// Credentials for registries and mirrors. These are used before any the user has stored.
    pub credentials: BTreeMap<String, Credential>,
    /// Files in the format of Docker's `config.json` and podman's `auth.json`, in order. `None` means the usual ones
    /// (`$REGISTRY_AUTH_FILE`, `$DOCKER_CONFIG`, podman's, Docker's).
    pub credential_files: Option<Vec<PathBuf>>,
    /// Directories of directories named for registries, with authorities that these may be certified by (`*.crt`) and a
    /// client certificate and its key (`*.cert`, `*.key`), all in PEM. `None` means `/etc/docker/certs.d` and
    /// `/etc/containers/certs.d`.
    pub certificate_dirs: Option<Vec<PathBuf>>,
    /// Connect to addresses of the public internet only: for programs that pull what strangers name, who might mean a
    /// service of the program's own network or its cloud's metadata. Off by default, as many registries are local.
    ///
    /// It holds for the addresses that names are found to have when they are connected to, of registries, mirrors, token
    /// servers and whatever they redirect to. A proxy would do its own looking up, so with this a pull that would use
    /// one fails. Public addresses of the program's own hosts are public; keep those apart by firewall.
    pub public_only: bool,
    /// How long and how often to try.
    pub timeouts: Timeouts,
}

/// How long and how often to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// To reach a server: its name, connection, proxy and TLS.
    pub connect: Duration,
    /// Between a request and the head of its answer.
    pub answer: Duration,
    /// Between two bytes of an answer.
    pub stall: Duration,
    /// For all of a body, to which a second is added for each 16 KiB of it.
    pub body: Duration,
    /// For a credential helper.
    pub helper: Duration,
    /// How often a request is sent again, or a body that breaks off is taken up again without one more byte. Mirrors
    /// are tried again once at most.
    pub retries: u32,
    /// The pause before the first repetition. It doubles with each, up to 30 s, and varies by half at random.
    pub backoff: Duration,
    /// The longest pause that a registry may ask for (`Retry-After`). If it asks for more, the pull fails.
    pub longest_pause: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(20),
            answer: Duration::from_secs(60),
            stall: Duration::from_secs(30),
            body: Duration::from_secs(300),
            helper: Duration::from_secs(60),
            retries: 3,
            backoff: Duration::from_millis(500),
            longest_pause: Duration::from_secs(60),
        }
    }
}

impl Timeouts {
    /// For a body of `size` bytes.
    pub(super) fn for_body(&self, size: u64) -> Duration {
        const SLOWEST: u64 = 16 << 10;
        self.body
            .saturating_add(Duration::from_secs(size / SLOWEST))
    }
}
