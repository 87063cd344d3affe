//! `WWW-Authenticate` challenges (RFC 9110 §11.6.1) and the replies of token servers.

use std::time::Duration;

use serde::Deserialize;

use crate::config::or_default;

/// One challenge: its scheme in lower case and its parameters, names in lower case.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Challenge {
    pub(super) scheme: String,
    parameters: Vec<(String, String)>,
}

impl Challenge {
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.parameters
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }
}

/// All challenges of one header. What cannot be parsed is left out.
pub(super) fn challenges(header: &str) -> Vec<Challenge> {
    let mut out: Vec<Challenge> = Vec::new();
    let mut rest = header.trim_start();
    while !rest.is_empty() {
        let (word, after) = token(rest);
        if word.is_empty() {
            // A separator, or something that belongs nowhere.
            rest = rest.get(1..).unwrap_or("").trim_start();
            continue;
        }
        let after = after.trim_start();
        if let (Some(value), Some(challenge)) = (after.strip_prefix('='), out.last_mut()) {
            let (value, after) = parameter_value(value.trim_start());
            challenge
                .parameters
                .push((word.to_ascii_lowercase(), value));
            rest = after.trim_start();
        } else {
            out.push(Challenge {
                scheme: word.to_ascii_lowercase(),
                parameters: Vec::new(),
            });
            rest = after;
        }
    }
    out
}

/// Splits off an HTTP token.
fn token(text: &str) -> (&str, &str) {
    let end = text
        .find(|c: char| !(c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c)))
        .unwrap_or(text.len());
    text.split_at(end)
}

fn parameter_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let (value, rest) = token(text);
        return (value.to_owned(), rest);
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(chars.next().map(|(_, c)| c)),
            c => value.push(c),
        }
    }
    (value, "")
}

/// Of a token whose server does not say (distribution's "Token Authentication").
const DEFAULT_LIFETIME: f64 = 60.0;
/// What a server may say, in seconds.
const LONGEST_LIFETIME: f64 = 1e6;

/// A token server's reply.
#[derive(Deserialize)]
pub(super) struct TokenReply {
    #[serde(default, deserialize_with = "or_default")]
    token: String,
    #[serde(default, deserialize_with = "or_default")]
    access_token: String,
    /// Seconds; some send a fraction, some a string.
    #[serde(default)]
    expires_in: serde_json::Value,
}

impl TokenReply {
    /// The token and how long it is good for.
    pub(super) fn into_token(self) -> Option<(String, Duration)> {
        let token = if self.token.is_empty() {
            self.access_token
        } else {
            self.token
        };
        let said = match &self.expires_in {
            serde_json::Value::String(text) => text.parse().ok(),
            other => other.as_f64(),
        };
        let seconds = match said {
            Some(seconds) if seconds > 0.0 => seconds.min(LONGEST_LIFETIME),
            _ => DEFAULT_LIFETIME,
        };
        (!token.is_empty()).then_some((token, Duration::from_secs_f64(seconds)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_parsed_in_all_their_forms() {
        let got = challenges(
            r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push""#,
        );
        assert_eq!(got.len(), 1);
        assert_eq!(got[0].scheme, "bearer");
        assert_eq!(got[0].get("realm"), Some("https://auth.docker.io/token"));
        assert_eq!(got[0].get("scope"), Some("repository:a/b:pull,push"));

        let got =
            challenges(r#"Basic realm="a, b=c", BEARER Service=x , realm = "https://h/t\"q""#);
        assert_eq!(got.len(), 2);
        assert_eq!(got[0].get("realm"), Some("a, b=c"));
        assert_eq!(
            (got[1].scheme.as_str(), got[1].get("service")),
            ("bearer", Some("x"))
        );
        assert_eq!(got[1].get("realm"), Some("https://h/t\"q"));

        assert_eq!(challenges("Negotiate")[0].scheme, "negotiate");
        for odd in ["", ",,,", "=", "\"", "Bearer realm=\"open", "é=1", "a=b"] {
            let _ = challenges(odd);
        }
    }

    #[test]
    fn a_token_comes_under_either_name_and_lives_a_minute() {
        let parse = |text| {
            serde_json::from_str::<TokenReply>(text)
                .unwrap()
                .into_token()
                .map(|(token, lifetime)| (token, lifetime.as_secs()))
        };
        let token = |name: &str, seconds| Some((name.to_owned(), seconds));
        assert_eq!(parse(r#"{"token":"t"}"#), token("t", 60));
        assert_eq!(
            parse(r#"{"access_token":"a","token":null,"expires_in":300}"#),
            token("a", 300)
        );
        assert_eq!(
            parse(r#"{"token":"t","expires_in":"300"}"#),
            token("t", 300)
        );
        assert_eq!(parse(r#"{"token":"t","expires_in":"NaN"}"#), token("t", 60));
        assert_eq!(parse(r#"{"token":"t","expires_in":[]}"#), token("t", 60));
        assert_eq!(parse(r#"{"token":"t","expires_in":0}"#), token("t", 60));
        assert_eq!(parse(r#"{"token":"t","expires_in":-1}"#), token("t", 60));
        assert_eq!(
            parse(r#"{"token":"t","expires_in":1e300}"#),
            token("t", 1_000_000)
        );
        assert_eq!(parse("{}"), None);
    }
}
