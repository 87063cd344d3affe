//! The guest's console: a bounded tail in memory, shown when a machine does not boot.

use std::io::{self, Write};

use bantam_virtio::ConsoleRing;

/// The last bytes a guest wrote to its console. Older bytes are dropped, so that a guest that
/// writes without end costs the host nothing.
#[derive(Debug, Clone)]
pub struct ConsoleLog(ConsoleRing);

impl Default for ConsoleLog {
    fn default() -> Self {
        Self(ConsoleRing::new(Self::CAPACITY))
    }
}

impl ConsoleLog {
    /// How many bytes are kept.
    pub const CAPACITY: usize = 64 * 1024;

    /// An empty log.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What is kept, oldest byte first, with invalid UTF-8 replaced.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.tail()).into_owned()
    }

    /// The last `lines` lines that are not blank, fit to be shown: control characters are escaped
    /// (a guest must not talk to the user's terminal) and long lines cut.
    #[must_use]
    pub fn last_lines(&self, lines: usize) -> Vec<String> {
        let text = self.text();
        let mut last: Vec<String> = text
            .lines()
            .rev()
            .map(str::trim_end)
            .filter(|line| !line.is_empty())
            .take(lines)
            .map(printable)
            .collect();
        last.reverse();
        last
    }
}

/// The most characters of a line that are shown.
const LINE_LIMIT: usize = 300;

fn printable(line: &str) -> String {
    let mut shown = String::new();
    for c in line.chars().take(LINE_LIMIT) {
        if c.is_control() && c != '\t' {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

impl Write for ConsoleLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_bytes_of_a_flood_are_kept() {
        let mut log = ConsoleLog::new();
        for _ in 0..100 {
            log.write_all(&vec![b'x'; ConsoleLog::CAPACITY / 3])
                .unwrap();
        }
        log.write_all(b"\nlast words\n").unwrap();
        assert_eq!(log.text().len(), ConsoleLog::CAPACITY);
        assert_eq!(log.last_lines(1), ["last words"]);
    }

    #[test]
    fn a_guest_cannot_talk_to_the_terminal_through_its_last_lines() {
        let mut log = ConsoleLog::new();
        log.write_all(b"\x1b]0;title\x07 text\r\n").unwrap();
        log.write_all(&[b'y'; 10_000]).unwrap();
        let lines = log.last_lines(2);
        assert_eq!(lines[0], "\\u{1b}]0;title\\u{7} text");
        assert_eq!(lines[1].len(), 300);
    }

    #[test]
    fn one_write_above_the_capacity_keeps_its_tail() {
        let mut log = ConsoleLog::new();
        let mut flood = vec![b'a'; 3 * ConsoleLog::CAPACITY];
        flood.extend(b"\r\n\r\nend\r\n");
        log.write_all(&flood).unwrap();
        assert_eq!(log.text().len(), ConsoleLog::CAPACITY);
        assert_eq!(log.last_lines(5).last().map(String::as_str), Some("end"));
    }
}
