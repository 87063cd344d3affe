//! Collecting what a guest sends without letting it fill the host's memory.

use std::io::{self, Write};

/// Keeps the first bytes written to it and counts the rest.
#[derive(Debug)]
pub(crate) struct Capped {
    /// What is kept.
    pub(crate) bytes: Vec<u8>,
    limit: u64,
    total: u64,
}

impl Capped {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            bytes: Vec::new(),
            limit,
            total: 0,
        }
    }

    /// Whether something was dropped.
    pub(crate) fn truncated(&self) -> bool {
        self.total > self.limit
    }
}

impl Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = usize::try_from(self.limit.saturating_sub(self.total)).unwrap_or(usize::MAX);
        self.bytes.extend(&bytes[..bytes.len().min(room)]);
        self.total = self.total.saturating_add(bytes.len() as u64);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_the_limit_is_counted_and_dropped() {
        let mut capped = Capped::new(5);
        for _ in 0..3 {
            capped.write_all(b"abc").unwrap();
        }
        assert_eq!((capped.bytes.as_slice(), capped.total), (&b"abcab"[..], 9));
        assert!(capped.truncated());
        let mut exact = Capped::new(3);
        exact.write_all(b"abc").unwrap();
        assert!(!exact.truncated());
    }
}
