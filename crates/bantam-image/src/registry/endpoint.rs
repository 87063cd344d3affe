//! One registry or mirror, asked for one repository: where it is, and proving who asks.
//!
//! Every request is first sent with what the registry accepted last, or nothing, and its challenge is followed: no
//! address of a token server and no scheme is assumed. A credential is looked up when the first challenge comes, and
//! never sent in the clear to another machine.
//!
//! Stored credentials that a registry does not accept are reported, and the pull goes on without them, as a public
//! image needs none (docker fails here, and leaves its user to find an old login). If that fails too, the error names
//! the place of the credentials. Credentials given by the program are its decision: they must be accepted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ureq::http::{HeaderName, header};

use super::address::{Address, form, is_loopback, with_query};
use super::auth::{Challenge, TokenReply, challenges};
use super::http::{Answer, Failure, Http, Request, read_bounded};
use super::options::Registries;
use crate::credentials::{Credential, Finder, Found};
use crate::limits::MAX_REPLY;
use crate::reference::{DOCKER_HUB, Reference};

pub(super) struct Endpoint {
    pub(super) address: Address,
    /// What credentials know it as.
    registry: String,
    /// With a mirror's prefix.
    repository: String,
    pub(super) is_mirror: bool,
    /// A mirror that could not be reached is not tried for every blob again.
    pub(super) is_dead: AtomicBool,
    credential: OnceLock<Option<Found>>,
    access: Mutex<Access>,
}

/// What the registry let us in with.
#[derive(Default)]
struct Access {
    /// Counts answers to challenges, so that of several requests refused together only one is answered.
    generation: u64,
    authorization: Option<String>,
    expires: Option<Instant>,
    /// The stored credential was refused and is left out.
    anonymous: bool,
}

impl Endpoint {
    /// The registry that a reference names.
    pub(super) fn origin(reference: &Reference, registries: &Registries) -> Option<Self> {
        let registry = reference.registry();
        let host = match registry {
            DOCKER_HUB => "registry-1.docker.io",
            other => other,
        };
        let scheme = scheme_for(registry, registries);
        let address = Address::parse(&format!("{scheme}://{host}"))?;
        Some(Self::new(
            address,
            registry.to_owned(),
            reference.repository().to_owned(),
            false,
        ))
    }

    /// A mirror, as [`Registries::mirrors`] describes it.
    pub(super) fn mirror(
        mirror: &str,
        reference: &Reference,
        registries: &Registries,
    ) -> Option<Self> {
        let (scheme, rest) = match mirror.split_once("://") {
            Some((scheme, rest)) => (Some(scheme), rest),
            None => (None, mirror),
        };
        let (host, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let scheme = scheme.unwrap_or_else(|| scheme_for(host, registries));
        let address = Address::parse(&format!("{scheme}://{host}"))?;
        let prefix = prefix.trim_matches('/');
        let repository = match prefix {
            "" => reference.repository().to_owned(),
            prefix => format!("{prefix}/{}", reference.repository()),
        };
        let harmless = |b: u8| b.is_ascii_alphanumeric() || b"./_-".contains(&b);
        if !prefix.bytes().all(harmless) || prefix.split('/').any(|part| part == "..") {
            return None;
        }
        Some(Self::new(address, host.to_owned(), repository, true))
    }

    fn new(address: Address, registry: String, repository: String, is_mirror: bool) -> Self {
        Self {
            address,
            registry,
            repository,
            is_mirror,
            is_dead: AtomicBool::new(false),
            credential: OnceLock::new(),
            access: Mutex::default(),
        }
    }

    /// GETs `path` of the repository. The answer is a success.
    pub(super) fn get(
        &self,
        http: &Http<'_>,
        finder: &Finder<'_>,
        path: &str,
        headers: &[(HeaderName, String)],
    ) -> Result<Answer, Failure> {
        let url = format!("{}/v2/{}/{path}", self.address, self.repository);
        let retries = http.timeouts.retries;
        let send = |authorization: Option<&str>| {
            http.send(&Request {
                url: &url,
                headers: headers.to_vec(),
                authorization,
                form: None,
                retries: if self.is_mirror {
                    retries.min(1)
                } else {
                    retries
                },
            })
        };
        let (mut generation, mut authorization) = self.current();
        let mut answer = send(authorization.as_deref())?;
        for again in [false, true] {
            // Where a redirect led is not the registry, and its challenges are not to be answered.
            if answer.status() != 401 || answer.from != self.address {
                break;
            }
            let offered = offered(&answer);
            let Some(next) = self.authorize(http, finder, &offered, generation, again)? else {
                break;
            };
            (generation, authorization) = next;
            answer = send(authorization.as_deref())?;
        }
        if answer.response.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        let hint = if status == 401 && answer.from == self.address {
            self.hint()
        } else {
            String::new()
        };
        let by = match answer.from == self.address {
            true => "registry".to_owned(),
            false => answer.from.to_string(),
        };
        let refusal = answer.refusal(http.deadline(0));
        Err(Failure::new(
            format!("{by} answers {refusal}{hint}"),
            Some(status),
        ))
    }

    fn current(&self) -> (u64, Option<String>) {
        let mut access = self.access();
        if access.expires.is_some_and(|end| end <= Instant::now()) {
            access.authorization = None;
            access.expires = None;
        }
        (access.generation, access.authorization.clone())
    }

    fn access(&self) -> MutexGuard<'_, Access> {
        self.access.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers challenges to a request that was sent with the answer number `refused`, which `again` says was made for
    /// that request. `None` when there is no better answer.
    fn authorize(
        &self,
        http: &Http<'_>,
        finder: &Finder<'_>,
        offered: &[Challenge],
        refused: u64,
        again: bool,
    ) -> Result<Option<(u64, Option<String>)>, Failure> {
        // Held throughout: others who were refused wait for this answer.
        let mut access = self.access();
        if access.generation != refused {
            return Ok(Some((access.generation, access.authorization.clone())));
        }
        let found = self.credential(http, finder);
        if again {
            match found {
                Some(found) if found.place.is_some() && !access.anonymous => {
                    self.give_up_on(found, "401 Unauthorized", http, &mut access);
                }
                _ => return Ok(None),
            }
        }
        let bearer = offered.iter().find(|c| c.scheme == "bearer");
        let basic = offered.iter().any(|c| c.scheme == "basic");
        let usable = found.filter(|_| !access.anonymous);
        let (authorization, lifetime) = match (usable.map(|found| &found.credential), bearer) {
            (Some(Credential::Bearer(token)), _) => (format!("Bearer {token}"), None),
            (_, Some(bearer)) => {
                let (token, lifetime) = self.bearer(http, bearer, usable, &mut access)?;
                (format!("Bearer {token}"), Some(lifetime))
            }
            (Some(Credential::Password { username, password }), None) if basic => {
                let pair = BASE64_STANDARD.encode(format!("{username}:{password}"));
                (format!("Basic {pair}"), None)
            }
            _ => {
                access.authorization = None;
                return Ok(None);
            }
        };
        access.generation += 1;
        access.authorization = Some(authorization);
        access.expires = lifetime.and_then(|lifetime| Instant::now().checked_add(lifetime));
        Ok(Some((access.generation, access.authorization.clone())))
    }

    /// Gets a token; without the stored credential if the server does not accept that.
    fn bearer(
        &self,
        http: &Http<'_>,
        challenge: &Challenge,
        found: Option<&Found>,
        access: &mut Access,
    ) -> Result<(String, std::time::Duration), Failure> {
        let result = self.token(http, challenge, found.map(|found| &found.credential));
        match (result, found) {
            (Err(failure), Some(found))
                if found.place.is_some() && matches!(failure.status, Some(400 | 401 | 403)) =>
            {
                self.give_up_on(found, &failure.why, http, access);
                self.token(http, challenge, None).map_err(|mut failure| {
                    failure.why.push_str(&self.refused_hint(found));
                    failure
                })
            }
            (result, _) => result,
        }
    }

    fn give_up_on(&self, found: &Found, why: &str, http: &Http<'_>, access: &mut Access) {
        access.anonymous = true;
        let place = found.place.as_deref().unwrap_or_default();
        http.tell(&format!(
            "{}: the credentials from {place} are not accepted ({why}); going on without",
            self.registry
        ));
    }

    fn token(
        &self,
        http: &Http<'_>,
        challenge: &Challenge,
        credential: Option<&Credential>,
    ) -> Result<(String, std::time::Duration), Failure> {
        let realm = challenge.get("realm").unwrap_or_default();
        // A registry that is itself spoken to in the clear may name such a token server.
        let server = Address::parse(realm)
            .filter(|server| server.scheme == "https" || self.address.scheme == "http")
            .ok_or_else(|| Failure::new("no usable token server is named", Some(401)))?;
        if credential.is_some() && !server.is_private() {
            let why = format!("token server {server} would get the credentials in the clear");
            return Err(Failure::new(why, None));
        }
        let default_scope = format!("repository:{}:pull", self.repository);
        let scope = challenge.get("scope").filter(|scope| !scope.is_empty());
        let scope = scope.unwrap_or(&default_scope);
        let mut query: Vec<(&str, &str)> = Vec::new();
        if let Some(service) = challenge.get("service") {
            query.push(("service", service));
        }
        let mut basic = None;
        let mut body = None;
        let url = match credential {
            Some(Credential::IdentityToken(token)) => {
                query.push(("scope", scope));
                query.extend([
                    ("grant_type", "refresh_token"),
                    ("client_id", "bantam"),
                    ("refresh_token", token),
                ]);
                body = Some(form(&query));
                realm.to_owned()
            }
            credential => {
                query.extend(scope.split(' ').map(|scope| ("scope", scope)));
                if let Some(Credential::Password { username, password }) = credential {
                    query.push(("account", username));
                    let pair = BASE64_STANDARD.encode(format!("{username}:{password}"));
                    basic = Some(format!("Basic {pair}"));
                }
                with_query(realm, &query)
            }
        };
        let answer = http.send(&Request {
            url: &url,
            headers: vec![(header::ACCEPT, "application/json".to_owned())],
            authorization: basic.as_deref(),
            form: body,
            retries: http.timeouts.retries,
        })?;
        let deadline = http.deadline(0);
        if !answer.response.status().is_success() {
            let status = answer.status();
            let why = format!("token server {server} answers {}", answer.refusal(deadline));
            return Err(Failure::new(why, Some(status)));
        }
        let bytes = read_bounded(answer.response, MAX_REPLY, deadline)
            .map_err(|e| Failure::new(format!("token server {server}: {e}"), None))?;
        serde_json::from_slice::<TokenReply>(&bytes)
            .ok()
            .and_then(TokenReply::into_token)
            .ok_or_else(|| Failure::new(format!("token server {server} gives no token"), None))
    }

    /// Looked up once. None for a registry that would get it in the clear.
    fn credential(&self, http: &Http<'_>, finder: &Finder<'_>) -> Option<&Found> {
        let find = || {
            let tell = |text: &str| http.tell(text);
            let found = finder.find(&self.registry, &self.repository, &tell)?;
            if self.address.is_private() {
                return Some(found);
            }
            tell(&format!(
                "{}: credentials are not sent in the clear; going on without",
                self.registry
            ));
            None
        };
        self.credential.get_or_init(find).as_ref()
    }

    /// What an error message for 401 ends with.
    fn hint(&self) -> String {
        match self.credential.get() {
            Some(Some(found)) => self.refused_hint(found),
            _ => format!(
                "; it wants credentials, or there is no such repository, and none are stored for {} \
                 (docker login, podman login)",
                self.registry
            ),
        }
    }

    fn refused_hint(&self, found: &Found) -> String {
        match &found.place {
            Some(place) => format!("; the credentials from {place} are not accepted"),
            None => "; the given credentials are not accepted".to_owned(),
        }
    }

    pub(super) fn set_dead(&self) {
        self.is_dead.store(true, Ordering::Relaxed);
    }
}

fn scheme_for(registry: &str, registries: &Registries) -> &'static str {
    match is_loopback(registry) || registries.plain_http.iter().any(|named| named == registry) {
        true => "http",
        false => "https",
    }
}

fn offered(answer: &Answer) -> Vec<Challenge> {
    answer
        .response
        .headers()
        .get_all(header::WWW_AUTHENTICATE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(challenges)
        .collect()
}
