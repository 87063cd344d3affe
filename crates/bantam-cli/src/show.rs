//! How results are shown: text in columns, JSON, courtesies.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::HumanDuration;
use serde::Serialize;

use crate::Outcome;
use crate::args::Global;
use crate::failure::Failure;

/// Left-aligned columns, two spaces apart.
pub(crate) fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            // Writing to a String cannot fail.
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Foreign text for a terminal: guests, images and registries must neither talk to it nor begin
/// lines, so control characters are shown as escapes.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() && c != '\t' {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// How long ago a moment was.
pub(crate) fn ago(unix_seconds: u64) -> String {
    if unix_seconds == 0 {
        return "unknown".to_owned();
    }
    let then = UNIX_EPOCH + Duration::from_secs(unix_seconds);
    match SystemTime::now().duration_since(then) {
        Ok(since) if since.as_secs() == 0 => "just now".to_owned(),
        Ok(since) => format!("{} ago", HumanDuration(since)),
        Err(_) => "in the future".to_owned(),
    }
}

/// A value as JSON on standard output.
pub(crate) fn json(value: &impl Serialize) -> Outcome {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::Output(io::Error::other(error)))?;
    out(&format!("{text}\n"))?;
    Ok(0)
}

/// Text on standard output.
pub(crate) fn out(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(Failure::Output)
}

/// Standard output for what a machine or a store gives, byte for byte: every write goes out at
/// once and says itself whether it did. [`io::Stdout`] keeps what comes after the last newline,
/// and drops the error if that cannot be written at the end.
pub(crate) fn raw_stdout() -> Result<File, Failure> {
    let stdout = io::stdout().as_fd().try_clone_to_owned();
    stdout.map(File::from).map_err(Failure::Output)
}

/// A courtesy on standard error.
pub(crate) fn say(global: &Global, text: &str) {
    if !global.quiet {
        let _ = writeln!(io::stderr(), "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_end_without_blanks() {
        let rows = [["a", "bb"], ["cccc", ""]].map(|row| row.map(str::to_owned));
        assert_eq!(columns(&rows), "a     bb\ncccc\n");
    }

    #[test]
    fn foreign_text_cannot_drive_the_terminal() {
        assert_eq!(printable("a\u{1b}[31mb\n"), "a\\u{1b}[31mb\\n");
        assert_eq!(printable("\u{9b}é\t"), "\\u{9b}é\t");
    }

    #[test]
    fn what_is_new_was_made_just_now() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        // The clock of a host may be a second further by the time it is asked.
        let ago = ago(now.as_secs());
        assert!(["just now", "1 second ago"].contains(&&*ago), "{ago}");
    }
}
