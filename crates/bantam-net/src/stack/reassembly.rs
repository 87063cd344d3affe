//! Fragments of the guest put together (RFC 791 §3.2, RFC 8200 §4.5). Bounded in number, size and
//! time; overlapping fragments end their datagram (RFC 5722).

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Most datagrams being put together; the oldest makes room.
const MAX_DATAGRAMS: usize = 16;
/// Most fragments of one datagram that are not yet joined.
const MAX_PIECES: usize = 64;
/// Largest datagram, in bytes.
const MAX_DATAGRAM: usize = 65_535;
/// For how long fragments wait for the others.
const PATIENCE: Duration = Duration::from_secs(15);

/// What the fragments of one datagram have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
    pub(super) protocol: u8,
    pub(super) id: u32,
}

struct Partial {
    data: Vec<u8>,
    /// Byte ranges that have come, ascending, not touching each other.
    have: Vec<(usize, usize)>,
    total: Option<usize>,
    since: Instant,
}

#[derive(Default)]
pub(super) struct Reassembly {
    partials: HashMap<Key, Partial>,
}

impl Reassembly {
    /// Adds a fragment; gives the datagram's payload when this was the last one missing.
    pub(super) fn add(
        &mut self,
        key: Key,
        offset: usize,
        more: bool,
        piece: &[u8],
        now: Instant,
    ) -> Option<Vec<u8>> {
        let end = offset + piece.len();
        if piece.is_empty() || end > MAX_DATAGRAM || (more && !piece.len().is_multiple_of(8)) {
            return None;
        }
        self.partials
            .retain(|_, partial| now.saturating_duration_since(partial.since) < PATIENCE);
        if !self.partials.contains_key(&key)
            && self.partials.len() >= MAX_DATAGRAMS
            && let Some(oldest) = self
                .partials
                .iter()
                .min_by_key(|(_, partial)| partial.since)
                .map(|(key, _)| *key)
        {
            self.partials.remove(&oldest);
        }
        let partial = self.partials.entry(key).or_insert_with(|| Partial {
            data: Vec::new(),
            have: Vec::new(),
            total: None,
            since: now,
        });
        if !partial.add(offset, end, more, piece) {
            self.partials.remove(&key);
            return None;
        }
        let complete = partial
            .total
            .is_some_and(|total| partial.have == [(0, total)]);
        complete
            .then(|| self.partials.remove(&key))
            .flatten()
            .map(|partial| partial.data)
    }
}

impl Partial {
    /// False when the fragment does not fit the others.
    fn add(&mut self, offset: usize, end: usize, more: bool, piece: &[u8]) -> bool {
        let last = self.have.last().map_or(0, |&(_, end)| end);
        if !more {
            if self.total.is_some_and(|total| total != end) || last > end {
                return false;
            }
            self.total = Some(end);
        } else if self.total.is_some_and(|total| end > total) {
            return false;
        }
        let at = self.have.partition_point(|&(start, _)| start < offset);
        let before = at.checked_sub(1).and_then(|i| self.have.get(i).copied());
        let after = self.have.get(at).copied();
        if before.is_some_and(|(_, before)| before > offset)
            || after.is_some_and(|(after, _)| after < end)
        {
            return false;
        }
        if self.data.len() < end {
            self.data.resize(end, 0);
        }
        if let Some(place) = self.data.get_mut(offset..end) {
            place.copy_from_slice(piece);
        }
        self.have.insert(at, (offset, end));
        self.have.dedup_by(|next, joined| {
            let touch = joined.1 == next.0;
            if touch {
                joined.1 = next.1;
            }
            touch
        });
        self.have.len() <= MAX_PIECES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: u32) -> Key {
        Key {
            from: [10, 0, 0, 2].into(),
            to: [10, 0, 0, 1].into(),
            protocol: 17,
            id,
        }
    }

    #[test]
    fn fragments_in_any_order_make_the_datagram() {
        let data: Vec<u8> = (0..100).collect();
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]] {
            let mut reassembly = Reassembly::default();
            let now = Instant::now();
            let mut whole = None;
            for i in order {
                let (start, end) = (i * 40, (i * 40 + 40).min(100));
                whole = reassembly.add(key(1), start, i < 2, &data[start..end], now);
            }
            assert_eq!(whole.as_deref(), Some(&data[..]), "{order:?}");
            assert!(reassembly.partials.is_empty());
        }
    }

    #[test]
    fn overlaps_end_the_datagram() {
        let mut reassembly = Reassembly::default();
        let now = Instant::now();
        assert!(reassembly.add(key(1), 0, true, &[0; 16], now).is_none());
        assert!(reassembly.add(key(1), 8, false, &[0; 16], now).is_none());
        assert!(reassembly.partials.is_empty());
        // The same fragment twice is an overlap, too.
        reassembly.add(key(2), 8, true, &[0; 8], now);
        reassembly.add(key(2), 8, true, &[0; 8], now);
        assert!(reassembly.partials.is_empty());
    }

    #[test]
    fn unfinished_datagrams_are_bounded_in_number_and_time() {
        let mut reassembly = Reassembly::default();
        let now = Instant::now();
        for id in 0..1000 {
            reassembly.add(key(id), 65_000, true, &[0; 8], now);
            assert!(reassembly.partials.len() <= MAX_DATAGRAMS);
        }
        reassembly.add(key(5000), 0, true, &[0; 8], now + PATIENCE);
        assert_eq!(reassembly.partials.len(), 1);
    }

    #[test]
    fn scattered_fragments_are_bounded() {
        let mut reassembly = Reassembly::default();
        let now = Instant::now();
        for i in 0..4000 {
            reassembly.add(key(1), i * 16, true, &[0; 8], now);
            let pieces = reassembly
                .partials
                .values()
                .next()
                .map_or(0, |p| p.have.len());
            assert!(pieces <= MAX_PIECES);
        }
    }

    #[test]
    fn a_ping_of_death_is_dropped() {
        let mut reassembly = Reassembly::default();
        let now = Instant::now();
        assert!(reassembly.add(key(1), 65_528, true, &[0; 8], now).is_none());
        assert!(
            reassembly
                .add(key(1), 65_528, false, &[0; 1000], now)
                .is_none()
        );
        assert!(reassembly.partials.is_empty());
    }
}
