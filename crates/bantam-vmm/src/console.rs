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

    /// The last `lines` lines that are not blank.
    #[must_use]
    pub fn last_lines(&self, lines: usize) -> Vec<String> {
        let text = self.text();
        let mut last: Vec<String> = text
            .lines()
            .rev()
            .map(str::trim_end)
            .filter(|line| !line.is_empty())
            .take(lines)
            .map(str::to_owned)
            .collect();
        last.reverse();
        last
    }
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
    fn one_write_above_the_capacity_keeps_its_tail() {
        let mut log = ConsoleLog::new();
        let mut flood = vec![b'a'; 3 * ConsoleLog::CAPACITY];
        flood.extend(b"\r\n\r\nend\r\n");
        log.write_all(&flood).unwrap();
        assert_eq!(log.text().len(), ConsoleLog::CAPACITY);
        assert_eq!(log.last_lines(5).last().map(String::as_str), Some("end"));
    }
}
