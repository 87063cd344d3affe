//! The guest's console: a bounded tail in memory, shown when a machine does not boot.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The last bytes a guest wrote to its console; clones share them. Older bytes are dropped, so that a
/// guest that writes without end costs the host nothing.
#[derive(Debug, Clone)]
pub struct ConsoleLog(Arc<Mutex<VecDeque<u8>>>);

impl Default for ConsoleLog {
    fn default() -> Self {
        let bytes = VecDeque::with_capacity(Self::CAPACITY);
        Self(Arc::new(Mutex::new(bytes)))
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
        String::from_utf8_lossy(self.bytes().make_contiguous()).into_owned()
    }

    fn bytes(&self) -> MutexGuard<'_, VecDeque<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Never blocks and never fails.
impl Write for ConsoleLog {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let newest = &data[data.len().saturating_sub(Self::CAPACITY)..];
        let mut bytes = self.bytes();
        let excess = (bytes.len() + newest.len()).saturating_sub(Self::CAPACITY);
        bytes.drain(..excess);
        bytes.extend(newest);
        Ok(data.len())
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
