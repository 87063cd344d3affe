//! Requests to one registry for one repository.

use std::io::Read;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::Duration;

use serde::Deserialize;
use ureq::http::{Response, Uri, header};
use ureq::{Agent, Body};

use super::auth::{TokenReply, challenges};
use crate::config::or_default;
use crate::digest::{Digest, Hasher};
use crate::error::{Error, Result};
use crate::limits::{Limits, MAX_DOCUMENT, MAX_REPLY};
use crate::manifest::{
    Chosen, DOCKER_LIST, DOCKER_MANIFEST, Descriptor, Documents, OCI_INDEX, OCI_MANIFEST,
    check_document_size, choose,
};
use crate::platform::Platform;
use crate::reference::{DOCKER_HUB, Reference};

/// To reach a server at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Between a request and the first byte of its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two bytes of an answer.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_REDIRECTS: usize = 10;

/// How registries are reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registries {
    /// `HOST` or `HOST:PORT` of registries that are spoken to in the clear. Loopback addresses always are; others
    /// never are unless named here.
    pub plain_http: Vec<String>,
}

/// A client for one reference.
pub(crate) struct Client {
    agent: Agent,
    reference: Reference,
    /// `SCHEME://HOST[:PORT]`.
    origin: String,
    token: Mutex<Option<String>>,
    /// The manifest that the reference itself names, fetched once.
    root: Mutex<Option<(String, Vec<u8>, String)>>,
}

impl Client {
    pub(crate) fn new(reference: &Reference, registries: &Registries) -> Result<Self> {
        let host = reference.registry();
        let plain = is_loopback(host) || registries.plain_http.iter().any(|named| named == host);
        let address = if host == DOCKER_HUB {
            "registry-1.docker.io"
        } else {
            host
        };
        let origin = format!("{}://{address}", if plain { "http" } else { "https" });
        let agent = Agent::config_builder()
            .user_agent(concat!("bantam/", env!("CARGO_PKG_VERSION")))
            // Blobs have the digest of the bytes as stored: nothing may be decoded on the way.
            .accept_encoding(ureq::config::AutoHeaderValue::None)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(ANSWER_TIMEOUT))
            .timeout_per_read(Some(STALL_TIMEOUT))
            .build()
            .new_agent();
        Ok(Self {
            agent,
            reference: reference.clone(),
            origin,
            token: Mutex::new(None),
            root: Mutex::new(None),
        })
    }

    /// Fetches the manifests and the configuration of the image for `platform`.
    pub(crate) fn choose(&self, platform: &Platform, limits: &Limits) -> Result<Chosen> {
        let name = self.reference.manifest_name();
        let (bytes, content_type, header_digest) = self.get_manifest(&name)?;
        let what = format!("{}: manifest", self.reference);
        let algorithm = match (self.reference.digest(), &header_digest) {
            (Some(digest), _) | (None, Some(digest)) => digest.algorithm(),
            (None, None) => crate::digest::Algorithm::Sha256,
        };
        let mut hasher = Hasher::new(algorithm);
        hasher.update(&bytes);
        let digest = hasher.finish();
        for claimed in self.reference.digest().into_iter().chain(&header_digest) {
            if claimed.algorithm() == algorithm {
                claimed.expect(&what, &digest)?;
            }
        }
        let root = Descriptor::new(&digest, bytes.len() as u64);
        *lock(&self.root) = Some((digest.to_string(), bytes, content_type));
        choose(self, &self.reference.to_string(), &[root], platform, limits)
    }

    /// The bytes of a manifest, its Content-Type, and the digest the registry says it has.
    fn get_manifest(&self, name: &str) -> Result<(Vec<u8>, String, Option<Digest>)> {
        const ACCEPT: [&str; 4] = [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];
        let path = format!("manifests/{name}");
        let response = self.get(&path, &ACCEPT.join(", "))?;
        let text = |key| {
            response
                .headers()
                .get(key)
                .and_then(|v| v.to_str().ok())
                .map(str::to_owned)
        };
        let content_type = text(header::CONTENT_TYPE.as_str()).unwrap_or_default();
        let claimed = match text("docker-content-digest") {
            Some(digest) => Some(Digest::parse(&digest)?),
            None => None,
        };
        let bytes = self.read_document(&path, response)?;
        Ok((bytes, content_type, claimed))
    }

    fn read_document(&self, path: &str, response: Response<Body>) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut body = response.into_body().into_reader().take(MAX_DOCUMENT + 1);
        body.read_to_end(&mut bytes)
            .map_err(|e| self.failed(path, e.to_string(), None))?;
        check_document_size(&self.what(path), bytes.len() as u64)?;
        Ok(bytes)
    }

    /// Starts reading a blob.
    pub(super) fn blob(&self, digest: &Digest) -> Result<impl Read + use<>> {
        let response = self.get(&format!("blobs/{digest}"), "*/*")?;
        Ok(response.into_body().into_reader())
    }

    /// GETs `path` of the repository, with a token if the registry asks for one. The answer is a success.
    fn get(&self, path: &str, accept: &str) -> Result<Response<Body>> {
        let url = format!("{}/v2/{}/{path}", self.origin, self.reference.repository());
        let token = lock(&self.token).clone();
        let (mut response, from) = self.follow(path, &url, accept, token.as_deref())?;
        // Where a redirect led is not the registry, and its challenges are not to be answered.
        if response.status() == 401 && self.is_own(&from) {
            let token = self.fetch_token(path, &response)?;
            *lock(&self.token) = Some(token.clone());
            (response, _) = self.follow(path, &url, accept, Some(&token))?;
        }
        if response.status().is_success() {
            return Ok(response);
        }
        Err(self.refused(path, response))
    }

    /// Follows redirects to an answer and where it came from. The token goes to the registry's own origin only, and
    /// https never leads to http.
    fn follow(
        &self,
        path: &str,
        url: &str,
        accept: &str,
        token: Option<&str>,
    ) -> Result<(Response<Body>, String)> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&url).header(header::ACCEPT, accept);
            if let (Some(token), true) = (token, self.is_own(&url)) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            let response = request
                .call()
                .map_err(|e| self.failed(path, describe(&url, &e), None))?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok((response, url));
            }
            let location = response
                .headers()
                .get(header::LOCATION)
                .and_then(|v| v.to_str().ok());
            let next = location.and_then(|location| resolve(&url, location));
            let next = next.ok_or_else(|| {
                self.failed(path, "redirected to no valid address".to_owned(), None)
            })?;
            if url.starts_with("https://") && !next.starts_with("https://") {
                return Err(self.failed(path, "redirected from https to http".to_owned(), None));
            }
            url = next;
        }
        Err(self.failed(path, format!("more than {MAX_REDIRECTS} redirects"), None))
    }

    /// Answers a challenge with an anonymous token.
    fn fetch_token(&self, path: &str, response: &Response<Body>) -> Result<String> {
        let mut bearer = None;
        for value in response.headers().get_all(header::WWW_AUTHENTICATE) {
            let found = challenges(value.to_str().unwrap_or(""))
                .into_iter()
                .find(|c| c.scheme == "bearer");
            bearer = bearer.or(found);
        }
        let bearer = bearer.ok_or_else(|| {
            self.failed(path, "the registry wants credentials".to_owned(), Some(401))
        })?;
        let realm = bearer
            .get("realm")
            .filter(|r| r.starts_with("https://") || self.may_be_plain(r));
        let realm = realm.ok_or_else(|| {
            self.failed(
                path,
                "no usable token server is named".to_owned(),
                Some(401),
            )
        })?;
        let default_scope = format!("repository:{}:pull", self.reference.repository());
        let mut request = self
            .agent
            .get(realm)
            .query("scope", bearer.get("scope").unwrap_or(&default_scope));
        if let Some(service) = bearer.get("service") {
            request = request.query("service", service);
        }
        let response = request
            .call()
            .map_err(|e| self.failed(path, describe(realm, &e), None))?;
        if !response.status().is_success() {
            let status = response.status().as_u16();
            let why = format!("token server {realm} answers {status}{}", message(response));
            return Err(self.failed(path, why, Some(status)));
        }
        let mut bytes = Vec::new();
        let mut body = response.into_body().into_reader().take(MAX_REPLY);
        body.read_to_end(&mut bytes)
            .map_err(|e| self.failed(path, e.to_string(), None))?;
        serde_json::from_slice::<TokenReply>(&bytes)
            .ok()
            .and_then(TokenReply::into_token)
            .ok_or_else(|| self.failed(path, format!("token server {realm} gives no token"), None))
    }

    fn is_own(&self, url: &str) -> bool {
        origin_of(url).as_deref() == Some(&self.origin)
    }

    /// A registry that is itself spoken to in the clear may name such a token server.
    fn may_be_plain(&self, url: &str) -> bool {
        self.origin.starts_with("http://") && url.starts_with("http://")
    }

    fn refused(&self, path: &str, response: Response<Body>) -> Error {
        let status = response.status();
        let text = match status.canonical_reason() {
            Some(reason) => format!("{} {reason}", status.as_u16()),
            None => status.as_u16().to_string(),
        };
        let why = format!("registry answers {text}{}", message(response));
        self.failed(path, why, Some(status.as_u16()))
    }

    fn what(&self, path: &str) -> String {
        let host = self.origin.split_once("://").map_or("", |(_, host)| host);
        format!("{}: {path} from {host}", self.reference)
    }

    pub(super) fn failed(&self, path: &str, why: String, status: Option<u16>) -> Error {
        Error::Registry {
            what: self.what(path),
            why,
            status,
        }
    }
}

impl Documents for Client {
    fn manifest(&self, descriptor: &Descriptor) -> Result<(Vec<u8>, String)> {
        if let Some((digest, bytes, content_type)) = &*lock(&self.root)
            && *digest == descriptor.digest
        {
            return Ok((bytes.clone(), content_type.clone()));
        }
        let digest = descriptor.digest()?;
        check_document_size(&self.what(&digest.to_string()), descriptor.size)?;
        let (bytes, content_type, _) = self.get_manifest(&digest.to_string())?;
        Ok((bytes, content_type))
    }

    fn config(&self, descriptor: &Descriptor) -> Result<Vec<u8>> {
        let digest = descriptor.digest()?;
        let path = format!("blobs/{digest}");
        check_document_size(&self.what(&path), descriptor.size)?;
        let response = self.get(&path, "*/*")?;
        self.read_document(&path, response)
    }
}

/// A panic elsewhere leaves these values whole.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Whether `HOST[:PORT]` is this machine.
fn is_loopback(registry: &str) -> bool {
    let host = match registry.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => registry.split(':').next().unwrap_or(""),
    };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Scheme, host and port of an absolute URL.
fn origin_of(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    Some(format!("{}://{}", uri.scheme_str()?, uri.authority()?))
}

/// A redirect's target (RFC 3986 §5, without dot segments).
fn resolve(base: &str, location: &str) -> Option<String> {
    let url = if location.starts_with("http://") || location.starts_with("https://") {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{}://{rest}", base.split_once("://")?.0)
    } else if location.starts_with('/') {
        format!("{}{location}", origin_of(base)?)
    } else {
        let base = base.split(['?', '#']).next()?;
        format!("{}/{location}", base.rsplit_once('/')?.0)
    };
    url.parse::<Uri>().ok()?.host()?;
    Some(url)
}

fn describe(url: &str, error: &ureq::Error) -> String {
    let host = origin_of(url).unwrap_or_default();
    match error {
        ureq::Error::Timeout(_) => format!("{host} does not answer in time ({error})"),
        _ => format!("{host}: {error}"),
    }
}

/// The registry's own words, for the end of an error message.
fn message(response: Response<Body>) -> String {
    #[derive(Deserialize)]
    struct Reply {
        #[serde(default, deserialize_with = "or_default")]
        errors: Vec<ReplyError>,
        #[serde(default, deserialize_with = "or_default")]
        details: String,
    }
    #[derive(Default, Deserialize)]
    struct ReplyError {
        #[serde(default, deserialize_with = "or_default")]
        code: String,
        #[serde(default, deserialize_with = "or_default")]
        message: String,
    }
    let mut bytes = Vec::new();
    if response
        .into_body()
        .into_reader()
        .take(MAX_REPLY)
        .read_to_end(&mut bytes)
        .is_err()
    {
        return String::new();
    }
    let Ok(reply) = serde_json::from_slice::<Reply>(&bytes) else {
        return String::new();
    };
    let mut said: Vec<String> = reply
        .errors
        .into_iter()
        .map(|e| format!("{} {}", e.code, e.message))
        .collect();
    if !reply.details.is_empty() {
        said.push(reply.details);
    }
    // Foreign text goes to terminals: no control characters, and not a page of it.
    let said: String = said
        .join("; ")
        .chars()
        .filter(|c| !c.is_control())
        .take(500)
        .collect();
    if said.trim().is_empty() {
        String::new()
    } else {
        format!(": {}", said.trim())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for host in [
            "localhost",
            "localhost:5000",
            "127.0.0.1:1",
            "127.9.9.9",
            "[::1]:5000",
            "[::1]",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "docker.io",
            "10.0.0.1:5000",
            "localhost.example.com",
            "127.0.0.1.example.com",
            "[::2]:1",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn redirects_resolve_against_where_they_came_from() {
        let base = "https://r.io/v2/a/blobs/x?y=1";
        for (location, want) in [
            ("https://cdn.io/z", Some("https://cdn.io/z")),
            ("//cdn.io/z", Some("https://cdn.io/z")),
            ("/z?k=v", Some("https://r.io/z?k=v")),
            ("z", Some("https://r.io/v2/a/blobs/z")),
            ("ht tp://x", None),
            ("https://", None),
        ] {
            assert_eq!(resolve(base, location).as_deref(), want, "{location}");
        }
    }

    #[test]
    fn another_port_is_another_origin() {
        assert_ne!(
            origin_of("https://r.io/x"),
            origin_of("https://r.io:8443/x")
        );
        assert_ne!(origin_of("https://r.io/x"), origin_of("http://r.io/x"));
        assert_ne!(origin_of("https://r.io/x"), origin_of("https://cdn.r.io/x"));
    }
}
