//! Which proxy leads to a server: `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`, in either case.
//!
//! ureq takes the first of these that is set, for whatever scheme, and knows no networks in `NO_PROXY`. So the choice
//! is made here, as Go's programs (docker, skopeo) make it.

use std::net::IpAddr;

use super::address::{Address, in_network, is_loopback};

/// The proxy for `address`, and the variable that names it. None leads to this machine.
pub(super) fn choose(
    env: &dyn Fn(&str) -> Option<String>,
    address: &Address,
) -> Option<(String, &'static str)> {
    let first = |names: &[&'static str]| {
        names.iter().find_map(|name| {
            let value = env(name)?.trim().to_owned();
            (!value.is_empty()).then_some((value, *name))
        })
    };
    if is_loopback(&address.host) {
        return None;
    }
    let exempt = first(&["NO_PROXY", "no_proxy"]).is_some_and(|(list, _)| {
        list.split([',', ' '])
            .any(|entry| matches(entry.trim(), address))
    });
    if exempt {
        return None;
    }
    let own: &[&str] = match address.scheme.as_str() {
        "https" => &["HTTPS_PROXY", "https_proxy"],
        // A server for CGI programs sets HTTP_PROXY from a request's header.
        _ if env("REQUEST_METHOD").is_some() => &["http_proxy"],
        _ => &["HTTP_PROXY", "http_proxy"],
    };
    first(own).or_else(|| first(&["ALL_PROXY", "all_proxy"]))
}

/// Whether an entry of `NO_PROXY` stands for `address`: `*`, a network, an address, or a domain and all below it (only
/// what is below it with a dot or `*.` in front), each but networks perhaps with a port.
fn matches(entry: &str, address: &Address) -> bool {
    if entry == "*" {
        return true;
    }
    let ip: Option<IpAddr> = address.bare_host().parse().ok();
    if let Some((network, length)) = entry.split_once('/') {
        let (Some(ip), Ok(network), Ok(length)) = (ip, network.parse(), length.parse()) else {
            return false;
        };
        return in_network(ip, network, length);
    }
    if let (Ok(entry), Some(ip)) = (entry.parse::<IpAddr>(), ip) {
        return entry == ip;
    }
    let host_and_port = match entry.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => Some((host, port)),
        _ => None,
    };
    let name = match host_and_port {
        Some((host, port)) if port.parse() == Ok(address.port) => host,
        Some(_) => return false,
        None => entry,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    let name = name.strip_prefix('*').unwrap_or(name).to_ascii_lowercase();
    let host = address.bare_host().to_ascii_lowercase();
    if name.is_empty() {
        return false;
    }
    if name.starts_with('.') {
        return host.ends_with(&name);
    }
    host == name
        || host
            .strip_suffix(&name)
            .is_some_and(|rest| rest.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(set: &[(&str, &str)], url: &str) -> Option<String> {
        let env = |name: &str| {
            set.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        };
        choose(&env, &Address::parse(url).unwrap()).map(|(proxy, _)| proxy)
    }

    #[test]
    fn a_proxy_is_chosen_by_scheme() {
        let both = [("HTTPS_PROXY", "http://s"), ("http_proxy", "http://p")];
        assert_eq!(chosen(&both, "https://r.io").as_deref(), Some("http://s"));
        assert_eq!(chosen(&both, "http://r.io").as_deref(), Some("http://p"));
        let http = [("HTTP_PROXY", "http://p")];
        assert_eq!(chosen(&http, "https://r.io"), None);
        let all = [("all_proxy", "http://a"), ("https_proxy", " ")];
        assert_eq!(chosen(&all, "https://r.io").as_deref(), Some("http://a"));
        let cgi = [("HTTP_PROXY", "http://evil"), ("REQUEST_METHOD", "GET")];
        assert_eq!(chosen(&cgi, "http://r.io"), None);
    }

    #[test]
    fn no_proxy_is_obeyed_in_all_its_forms() {
        let table = [
            ("r.io", "https://r.io", true),
            ("r.io", "https://a.r.io", true),
            ("r.io", "https://bar.io", false),
            ("R.IO", "https://r.io:5000", true),
            (".r.io", "https://a.r.io", true),
            (".r.io", "https://r.io", false),
            ("*.r.io", "https://a.b.r.io", true),
            ("*", "https://r.io", true),
            ("r.io:443", "https://r.io", true),
            ("r.io:443", "https://r.io:5000", false),
            ("x, r.io ,y", "https://r.io", true),
            ("x r.io", "https://r.io", true),
            ("10.0.0.0/8", "https://10.9.8.7:5000", true),
            ("10.0.0.0/8", "https://11.9.8.7", false),
            ("10.0.0.0/33", "https://10.0.0.0", false),
            ("0.0.0.0/0", "https://11.9.8.7", true),
            ("fd00::/8", "https://[fd00::1]:5000", true),
            ("::/0", "https://[fd00::1]", true),
            ("fd00::1", "https://[fd00::1]", true),
            ("[fd00::1]:443", "https://[fd00::1]", true),
            ("10.1.2.3", "https://10.1.2.3", true),
            ("10.1.2.3", "https://10.1.2.4", false),
            ("10.0.0.0/8", "https://ten.r.io", false),
            ("", "https://r.io", false),
            (",,:,/,.", "https://r.io", false),
        ];
        for (no_proxy, url, exempt) in table {
            for name in ["NO_PROXY", "no_proxy"] {
                let set = [("HTTPS_PROXY", "http://p"), (name, no_proxy)];
                assert_eq!(chosen(&set, url).is_none(), exempt, "{no_proxy} {url}");
            }
        }
    }

    #[test]
    fn no_proxy_leads_to_this_machine() {
        let set = [("ALL_PROXY", "http://p")];
        for url in [
            "http://127.0.0.1:5000",
            "https://localhost",
            "https://[::1]:1",
            "http://127.8.8.8",
        ] {
            assert_eq!(chosen(&set, url), None, "{url}");
        }
    }
}
