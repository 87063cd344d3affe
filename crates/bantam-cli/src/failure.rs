//! How bantam's own failures are reported.

use std::error::Error as _;
use std::io::{ErrorKind, Write};

use serde::Serialize;

use crate::args::ErrorFormat;

/// A failure of bantam itself (a command that fails is none).
#[derive(Debug)]
pub(crate) enum Failure {
    /// From the library.
    Library(bantam::Error),
    /// The arguments make no sense together; exit code 2.
    Usage(String),
    /// Standard output cannot be written.
    Output(std::io::Error),
    /// What other programs of this kind do and this one does not do yet.
    NotYet(&'static str),
    /// It was not confirmed, and nobody could be asked.
    NotConfirmed(String),
}

impl From<bantam::Error> for Failure {
    fn from(error: bantam::Error) -> Self {
        Self::Library(error)
    }
}

#[derive(Serialize)]
struct Object<'a> {
    error: Body<'a>,
}

#[derive(Serialize)]
struct Body<'a> {
    code: &'a str,
    message: String,
    hint: Option<String>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    console: &'a [String],
}

impl Failure {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            // A name that cannot be one is a mistake on the command line.
            Self::Library(bantam::Error::BadName { .. }) | Self::Usage(_) => 2,
            Self::Library(error) => error.exit_code(),
            // What a program killed by SIGPIPE gives, which is what everyone expects here.
            Self::Output(error) if error.kind() == ErrorKind::BrokenPipe => 141,
            Self::Output(_) | Self::NotYet(_) | Self::NotConfirmed(_) => 125,
        }
    }

    /// Writes it to standard error. A closed standard output (`| head`) is no news.
    pub(crate) fn report(&self, format: ErrorFormat) {
        if let Self::Output(error) = self
            && error.kind() == ErrorKind::BrokenPipe
        {
            return;
        }
        let text = match format {
            ErrorFormat::Text => self.text(),
            ErrorFormat::Json => self.json(),
        };
        // If standard error is gone, there is nobody left to tell.
        let _ = writeln!(std::io::stderr().lock(), "{text}");
    }

    fn text(&self) -> String {
        let mut text = format!("error: {}", printable(&self.message()));
        let console = self.console();
        if !console.is_empty() {
            text.push_str("\nlast lines of the guest's console:");
            for line in console {
                text.push_str("\n  | ");
                text.push_str(line);
            }
        }
        if let Some(hint) = self.hint() {
            text.push_str("\nhint: ");
            text.push_str(&hint);
        }
        text
    }

    fn json(&self) -> String {
        let object = Object {
            error: Body {
                code: self.code(),
                message: self.message(),
                hint: self.hint(),
                console: self.console(),
            },
        };
        serde_json::to_string(&object).unwrap_or_else(|_| self.text())
    }

    fn message(&self) -> String {
        match self {
            Self::Library(error) => with_causes(error),
            Self::Usage(message) => message.clone(),
            Self::Output(error) => format!("cannot write to standard output: {error}"),
            Self::NotYet(what) => format!("{what} is not supported yet"),
            Self::NotConfirmed(message) => message.clone(),
        }
    }

    fn code(&self) -> &str {
        match self {
            Self::Library(error) => error.code(),
            Self::Usage(_) => "usage",
            Self::Output(_) => "io",
            Self::NotYet(_) => "not_yet",
            Self::NotConfirmed(_) => "not_confirmed",
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Library(error) => error.hint(),
            Self::Usage(_) => Some("see `bantam --help`".to_owned()),
            Self::Output(_) => None,
            Self::NotYet(_) => Some("nothing was done; run it without".to_owned()),
            Self::NotConfirmed(_) => {
                Some("pass --force to delete it without being asked".to_owned())
            }
        }
    }

    fn console(&self) -> &[String] {
        match self {
            Self::Library(error) => error.console(),
            _ => &[],
        }
    }
}

/// A message and those of its causes. A cause that its parent already quotes is not said twice.
pub(crate) fn with_causes(error: &bantam::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = error.source();
    }
    message
}

/// Messages quote guests, images and registries; none of them may talk to the terminal.
fn printable(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars() {
        if c.is_control() && c != '\n' && c != '\t' {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_cannot_talk_to_the_terminal() {
        let failure = Failure::Usage("bad \x1b[31mred\x07".into());
        assert!(!failure.text().contains(['\x1b', '\x07']));
        assert!(failure.text().starts_with("error: bad \\u{1b}[31mred"));
    }

    #[test]
    fn a_reader_that_went_away_is_141_as_with_sigpipe() {
        let failure = |kind: ErrorKind| Failure::Output(kind.into()).exit_code();
        assert_eq!(failure(ErrorKind::BrokenPipe), 141);
        assert_eq!(failure(ErrorKind::StorageFull), 125);
    }
}
