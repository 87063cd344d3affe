//! What a machine takes over from its host: the certificates it trusts and the proxies it uses.

use std::env;
use std::fs::File;
use std::path::PathBuf;

use crate::{Error, Machine};

/// Where the host's certificates are in the machine. `/run` is made anew at each start.
const DIR: &str = "/run/bantam";
const BUNDLE: &str = "/run/bantam/host-ca.crt";

/// By which variables programs find a bundle of certificates: OpenSSL and what is made with it,
/// curl, Python's requests and pip, Node.js, git, cargo.
const BUNDLE_VARIABLES: [&str; 7] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
];

/// Where hosts have their bundle: Debian, Fedora, openSUSE, Alpine and macOS.
const HOST_BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The variables of proxies, of which either case is in use.
const PROXY_VARIABLES: [&str; 4] = ["http_proxy", "https_proxy", "all_proxy", "no_proxy"];

/// The host, by its name in the machine.
const HOST_NAME: &str = "host.bantam.internal";

/// The variables by which programs in the machine find the host's certificates.
pub(crate) fn certificate_variables() -> impl Iterator<Item = (String, String)> {
    BUNDLE_VARIABLES
        .iter()
        .map(|name| ((*name).to_owned(), BUNDLE.to_owned()))
}

/// Puts the host's certificates into a machine that has just started.
pub(crate) fn install_certificates(machine: &Machine) -> Result<(), Error> {
    let bundle = host_bundle()?;
    let mut file = File::open(&bundle).map_err(|source| Error::State {
        what: "read",
        path: bundle,
        source,
    })?;
    machine.make_dir(DIR, true)?;
    machine.write_file_from(BUNDLE, Some(0o644), &mut file)
}

/// The host's bundle: `$SSL_CERT_FILE`, or where hosts have it.
pub(crate) fn host_bundle() -> Result<PathBuf, Error> {
    let named = env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    named
        .into_iter()
        .chain(HOST_BUNDLES.iter().map(PathBuf::from))
        .find(|path| path.is_file())
        .ok_or(Error::NoHostCertificates)
}

/// The proxies of this process, for programs in the machine.
pub(crate) fn proxy_variables() -> Vec<(String, String)> {
    from_host(|name| env::var(name).ok())
}

fn from_host(get: impl Fn(&str) -> Option<String>) -> Vec<(String, String)> {
    let mut variables = Vec::new();
    for name in PROXY_VARIABLES {
        let upper = name.to_ascii_uppercase();
        let set = get(name).or_else(|| get(&upper));
        let Some(value) = set.filter(|value| !value.is_empty()) else {
            continue;
        };
        let value = match name {
            "no_proxy" => value,
            _ => seen_from_inside(&value),
        };
        variables.push((name.to_owned(), value.clone()));
        variables.push((upper, value));
    }
    variables
}

/// A proxy on the host's loopback has another name in the machine.
fn seen_from_inside(proxy: &str) -> String {
    let (scheme, rest) = match proxy.split_once("://") {
        Some((scheme, rest)) => (format!("{scheme}://"), rest),
        None => (String::new(), proxy),
    };
    let (user, address) = match rest.rsplit_once('@') {
        Some((user, address)) => (format!("{user}@"), address),
        None => (String::new(), rest),
    };
    for loopback in ["localhost", "127.0.0.1", "[::1]"] {
        if let Some(rest) = address.strip_prefix(loopback)
            && (rest.is_empty() || rest.starts_with([':', '/']))
        {
            return format!("{scheme}{user}{HOST_NAME}{rest}");
        }
    }
    proxy.to_owned()
}

/// Whether a proxy of the machine is on the host, whose services must be granted then.
pub(crate) fn needs_host(variables: &[(String, String)]) -> bool {
    variables.iter().any(|(_, value)| value.contains(HOST_NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_on_the_hosts_loopback_is_named_as_the_machine_sees_it() {
        let table = [
            ("http://localhost:3128", "http://host.bantam.internal:3128"),
            ("127.0.0.1:8080", "host.bantam.internal:8080"),
            ("http://u:p@[::1]:1/", "http://u:p@host.bantam.internal:1/"),
            ("http://localhost.example:1", "http://localhost.example:1"),
            ("http://10.0.0.1:3128", "http://10.0.0.1:3128"),
        ];
        for (given, seen) in table {
            assert_eq!(seen_from_inside(given), seen);
        }
    }

    #[test]
    fn proxies_are_set_in_both_cases_and_exceptions_stay() {
        let get = |name: &str| match name {
            "HTTPS_PROXY" => Some("http://localhost:1".to_owned()),
            "no_proxy" => Some("localhost,.example".to_owned()),
            "http_proxy" => Some(String::new()),
            _ => None,
        };
        let variables = from_host(get);
        let value = |name: &str| {
            let found = variables.iter().find(|(other, _)| other == name);
            found.map(|(_, value)| value.as_str())
        };
        assert_eq!(value("https_proxy"), Some("http://host.bantam.internal:1"));
        assert_eq!(value("HTTPS_PROXY"), value("https_proxy"));
        assert_eq!(value("NO_PROXY"), Some("localhost,.example"));
        assert_eq!(value("http_proxy"), None);
        assert!(needs_host(&variables));
    }
}
