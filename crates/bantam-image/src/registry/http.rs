//! Requests: redirects, repetitions, proxies, bounded bodies. Knows nothing of registries but how their errors look.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, Read};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::Deserialize;
use ureq::http::{HeaderName, Response, header};
use ureq::unversioned::transport::DefaultConnector;
use ureq::{Agent, Body, Proxy};

use super::address::{Address, resolve};
use super::options::Registries;
use super::public::PublicOnly;
use super::retry::{Stop, backoff, may_pass, retry_after};
use super::tls::{self, Tls};
use super::{options::Timeouts, proxy};
use crate::config::or_default;
use crate::limits::MAX_REPLY;
use crate::progress::{NoProgress, Progress};

const MAX_REDIRECTS: usize = 10;
/// Servers whose connections and certificates are kept. A registry may lead to ever new ones.
const MAX_AGENTS: usize = 16;

/// Why there is no answer, or none that serves.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) why: String,
    pub(super) status: Option<u16>,
    /// Whether it may pass by itself.
    passing: bool,
}

impl Failure {
    pub(super) fn new(why: impl Into<String>, status: Option<u16>) -> Self {
        Self {
            why: why.into(),
            status,
            passing: false,
        }
    }
}

/// A request that may be sent more than once.
pub(super) struct Request<'a> {
    pub(super) url: &'a str,
    pub(super) headers: Vec<(HeaderName, String)>,
    /// For the URL's own address only.
    pub(super) authorization: Option<&'a str>,
    /// Posted instead of a GET.
    pub(super) form: Option<String>,
    pub(super) retries: u32,
}

/// An answer and where it came from.
pub(super) struct Answer {
    pub(super) response: Response<Body>,
    pub(super) from: Address,
}

impl Answer {
    pub(super) fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    pub(super) fn header(&self, name: impl AsRef<str>) -> Option<&str> {
        self.response.headers().get(name.as_ref())?.to_str().ok()
    }

    /// The status in words and what the server says about it.
    pub(super) fn refusal(self, deadline: Instant) -> String {
        let status = self.response.status();
        let text = match status.canonical_reason() {
            Some(reason) => format!("{} {reason}", status.as_u16()),
            None => status.as_u16().to_string(),
        };
        format!("{text}{}", said(self.response, deadline))
    }
}

/// One pull's connections.
pub(super) struct Http<'a> {
    pub(super) timeouts: Timeouts,
    pub(super) progress: &'a dyn Progress,
    pub(super) stop: Stop,
    public_only: bool,
    tls: Tls,
    agents: Mutex<HashMap<Address, Agent>>,
}

impl<'a> Http<'a> {
    pub(super) fn new(registries: &Registries) -> Self {
        Self {
            timeouts: registries.timeouts,
            progress: &NoProgress,
            stop: Stop::default(),
            public_only: registries.public_only,
            tls: Tls::new(registries.certificate_dirs.as_deref()),
            agents: Mutex::default(),
        }
    }

    /// Gets an answer, trying again where that may help. An answer that still says so after that is an answer.
    pub(super) fn send(&self, request: &Request<'_>) -> Result<Answer, Failure> {
        let mut attempt = 0;
        loop {
            if self.stop.is_set() {
                return Err(Failure::new(STOPPED, None));
            }
            let result = self.follow(request);
            attempt += 1;
            let (why, asked) = match &result {
                Ok(answer) if may_pass(answer.status()) => {
                    let asked = answer
                        .header(header::RETRY_AFTER)
                        .and_then(|value| retry_after(value, SystemTime::now()));
                    (
                        format!("{} answers {}", answer.from, answer.status()),
                        asked,
                    )
                }
                Err(failure) if failure.passing => (failure.why.clone(), None),
                _ => return result,
            };
            if attempt > request.retries {
                return result;
            }
            if let Some(asked) = asked.filter(|asked| *asked > self.timeouts.longest_pause) {
                let status = result.ok().map(|answer| answer.status());
                let why = format!("{why}, and asks to be left alone for {} s", asked.as_secs());
                return Err(Failure::new(why, status));
            }
            // Connections are for reuse, not for waiting.
            drop(result);
            let pause = backoff(self.timeouts.backoff, attempt).max(asked.unwrap_or_default());
            self.pause(&why, pause)?;
        }
    }

    /// Says something that a person may want to know.
    pub(super) fn tell(&self, text: &str) {
        tracing::info!("{text}");
        self.progress.message(text);
    }

    /// Waits, having said why.
    pub(super) fn pause(&self, why: &str, pause: Duration) -> Result<(), Failure> {
        let seconds = pause.as_secs_f32();
        self.tell(&format!("{why}; trying again in {seconds:.1} s"));
        if self.stop.wait(pause) {
            Ok(())
        } else {
            Err(Failure::new(STOPPED, None))
        }
    }

    /// Follows redirects. The authorization goes to the first address only, and https never leads to http.
    fn follow(&self, request: &Request<'_>) -> Result<Answer, Failure> {
        let invalid = || Failure::new(format!("{:?} is not a valid address", request.url), None);
        let own = Address::parse(request.url).ok_or_else(invalid)?;
        let mut url = request.url.to_owned();
        let mut at = own.clone();
        for _ in 0..=MAX_REDIRECTS {
            let authorization = request.authorization.filter(|_| at == own);
            let response = self.once(&url, &at, request, authorization)?;
            let is_redirect = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
            if !is_redirect || request.form.is_some() {
                return Ok(Answer { response, from: at });
            }
            let next = response
                .headers()
                .get(header::LOCATION)
                .and_then(|location| resolve(&url, location.to_str().ok()?))
                .and_then(|url| Some((Address::parse(&url)?, url)));
            let Some((next, next_url)) = next else {
                let why = format!("{at} redirects to no valid address");
                return Err(Failure::new(why, None));
            };
            if at.scheme == "https" && next.scheme != "https" {
                let why = format!("{at} redirects to {next}, from https to http");
                return Err(Failure::new(why, None));
            }
            (at, url) = (next, next_url);
        }
        Err(Failure::new(
            format!("{own} makes more than {MAX_REDIRECTS} redirects"),
            None,
        ))
    }

    fn once(
        &self,
        url: &str,
        at: &Address,
        request: &Request<'_>,
        authorization: Option<&str>,
    ) -> Result<Response<Body>, Failure> {
        let agent = self.agent(at).map_err(|why| Failure::new(why, None))?;
        let mut headers = request.headers.clone();
        if let Some(authorization) = authorization {
            headers.push((header::AUTHORIZATION, authorization.to_owned()));
        }
        let result = match &request.form {
            None => headers
                .into_iter()
                .fold(agent.get(url), |get, (name, value)| get.header(name, value))
                .call(),
            Some(form) => headers
                .into_iter()
                .fold(agent.post(url), |post, (name, value)| {
                    post.header(name, value)
                })
                .content_type("application/x-www-form-urlencoded")
                .send(form.as_bytes()),
        };
        result.map_err(|error| self.describe(at, &error))
    }

    /// What reaches an address: each may have certificates and a proxy of its own.
    fn agent(&self, address: &Address) -> Result<Agent, String> {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(agent) = agents.get(address) {
            return Ok(agent.clone());
        }
        let proxy = match proxy::choose(&env_text, address) {
            Some((_, variable)) if self.public_only => {
                return Err(format!(
                    "{address}: refused, as only addresses of the public internet may be connected to, and the \
                     proxy that {variable} names connects to what it likes"
                ));
            }
            Some((proxy, variable)) => Some(parse_proxy(&proxy, variable)?),
            None => None,
        };
        let config = Agent::config_builder()
            .user_agent(concat!("bantam/", env!("CARGO_PKG_VERSION")))
            // Blobs have the digest of the bytes as stored: nothing may be decoded on the way.
            .accept_encoding(ureq::config::AutoHeaderValue::None)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(proxy)
            .timeout_connect(Some(self.timeouts.connect))
            .timeout_recv_response(Some(self.timeouts.answer))
            .timeout_per_read(Some(self.timeouts.stall))
            .timeout_per_write(Some(self.timeouts.stall));
        let config = match address.scheme.as_str() {
            "https" => config.tls_config(self.tls.config(&address.authority(), &env)?),
            _ => config,
        };
        let config = config.build();
        let agent = match self.public_only {
            true => Agent::with_parts(config, DefaultConnector::default(), PublicOnly::default()),
            false => config.new_agent(),
        };
        if agents.len() >= MAX_AGENTS {
            agents.clear();
        }
        agents.insert(address.clone(), agent.clone());
        Ok(agent)
    }

    fn describe(&self, at: &Address, error: &ureq::Error) -> Failure {
        if let Some(why) = tls::explain(error, &at.authority()) {
            return Failure::new(format!("{at}: {why}"), None);
        }
        let through = match proxy::choose(&env_text, at) {
            Some((_, variable)) => format!(", through the proxy that {variable} names"),
            None => String::new(),
        };
        let why = match error {
            ureq::Error::Timeout(_) => format!("{at} does not answer in time ({error}){through}"),
            ureq::Error::Other(why) => format!("{at}: {why}"),
            _ => format!("{at}: {error}{through}"),
        };
        let passing = match error {
            // A name that does not exist will not do so soon; one that cannot be looked up just now may.
            ureq::Error::Io(e) => {
                let text = e.to_string();
                !text.contains("failed to lookup") || text.contains("emporary")
            }
            ureq::Error::Timeout(_) | ureq::Error::ConnectionFailed => true,
            ureq::Error::Protocol(_) | ureq::Error::BodyStalled => true,
            _ => false,
        };
        Failure {
            why,
            status: None,
            passing,
        }
    }

    /// A moment after which a body of `size` bytes is too late.
    pub(super) fn deadline(&self, size: u64) -> Instant {
        let now = Instant::now();
        now.checked_add(self.timeouts.for_body(size)).unwrap_or(now)
    }
}

/// Why a request ends that others were stopped for.
pub(super) const STOPPED: &str = "stopped, as another layer failed";

pub(super) fn env(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

fn env_text(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Errors name the variable, not its value, which may hold a password.
fn parse_proxy(proxy: &str, variable: &str) -> Result<Proxy, String> {
    let parsed = Proxy::new(proxy).map_err(|_| format!("{variable} is not the URL of a proxy"))?;
    match parsed.protocol() {
        ureq::ProxyProtocol::Http | ureq::ProxyProtocol::Https => Ok(parsed),
        _ => Err(format!(
            "{variable} names a SOCKS proxy, and only http and https proxies can be used"
        )),
    }
}

/// Reads a body of at most `max` bytes; a longer one is cut off.
pub(super) fn read_bounded(
    response: Response<Body>,
    max: u64,
    deadline: Instant,
) -> io::Result<Vec<u8>> {
    let mut body = response.into_body().into_reader().take(max);
    let mut bytes = Vec::new();
    let mut buf = vec![0; 16 << 10];
    loop {
        match body.read(&mut buf)? {
            0 => return Ok(bytes),
            n => bytes.extend_from_slice(&buf[..n]),
        }
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "sent too slowly"));
        }
    }
}

/// The server's own words, for the end of an error message.
fn said(response: Response<Body>, deadline: Instant) -> String {
    #[derive(Deserialize)]
    struct Reply {
        #[serde(default, deserialize_with = "or_default")]
        errors: Vec<ReplyError>,
        #[serde(default, deserialize_with = "or_default")]
        details: String,
        // Token servers speak OAuth2.
        #[serde(default, deserialize_with = "or_default")]
        error: String,
        #[serde(default, deserialize_with = "or_default")]
        error_description: String,
    }
    #[derive(Default, Deserialize)]
    struct ReplyError {
        #[serde(default, deserialize_with = "or_default")]
        code: String,
        #[serde(default, deserialize_with = "or_default")]
        message: String,
    }
    let Ok(bytes) = read_bounded(response, MAX_REPLY, deadline) else {
        return String::new();
    };
    let Ok(reply) = serde_json::from_slice::<Reply>(&bytes) else {
        return String::new();
    };
    let mut said: Vec<String> = reply
        .errors
        .into_iter()
        .map(|e| format!("{} {}", e.code, e.message))
        .collect();
    said.extend([reply.details, reply.error, reply.error_description]);
    said.retain(|text| !text.trim().is_empty());
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
    fn ever_new_servers_take_no_ever_more_memory() {
        let http = Http::new(&Registries::default());
        for i in 0..10 * MAX_AGENTS {
            let address = Address::parse(&format!("http://127.0.0.1:{}", 1000 + i)).unwrap();
            http.agent(&address).unwrap();
            assert!(http.agents.lock().unwrap().contains_key(&address));
        }
        assert!(http.agents.lock().unwrap().len() <= MAX_AGENTS);
    }
}
