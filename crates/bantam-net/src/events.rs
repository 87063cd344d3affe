//! What was refused, for whoever asks.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::SystemTime;

use crate::{Protocol, Reason};

/// Most events kept; the oldest go first.
pub const MAX_EVENTS: usize = 1024;

/// One thing the guest tried and was refused, or the same thing several times in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressEvent {
    /// Counts up by one for each event; gaps show that events were lost.
    pub sequence: u64,
    /// When it happened last.
    pub time: SystemTime,
    /// How often in a row.
    pub count: u64,
    /// What it was.
    pub protocol: Protocol,
    /// Where it was meant to go; `None` for a name.
    pub address: Option<IpAddr>,
    /// The port, where the protocol has one.
    pub port: Option<u16>,
    /// The name, if it was a name, or the machine got the address for one.
    pub name: Option<String>,
    /// Why it was refused.
    pub reason: Reason,
}

/// The newest events.
#[derive(Debug, Default)]
pub(crate) struct EventRing {
    events: VecDeque<EgressEvent>,
    next: u64,
}

impl EventRing {
    pub(crate) fn push(
        &mut self,
        protocol: Protocol,
        address: Option<IpAddr>,
        port: Option<u16>,
        name: Option<String>,
        reason: Reason,
    ) {
        let event = EgressEvent {
            sequence: self.next,
            time: SystemTime::now(),
            count: 1,
            protocol,
            address,
            port,
            name,
            reason,
        };
        if let Some(last) = self.events.back_mut() {
            let same = EgressEvent {
                sequence: last.sequence,
                time: last.time,
                count: last.count,
                ..event.clone()
            };
            if same == *last {
                last.count = last.count.saturating_add(1);
                last.time = event.time;
                return;
            }
        }
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.next += 1;
        self.events.push_back(event);
    }

    /// Events from sequence number `from` on.
    pub(crate) fn since(&self, from: u64) -> Vec<EgressEvent> {
        self.events
            .iter()
            .filter(|event| event.sequence >= from)
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refuse(ring: &mut EventRing, port: u16) {
        ring.push(
            Protocol::Tcp,
            Some([10, 0, 0, 1].into()),
            Some(port),
            None,
            Reason::NotAllowed,
        );
    }

    #[test]
    fn the_same_refusal_again_is_counted_not_stored() {
        let mut ring = EventRing::default();
        for _ in 0..5 {
            refuse(&mut ring, 80);
        }
        refuse(&mut ring, 81);
        let events = ring.since(0);
        assert_eq!(events.len(), 2);
        assert_eq!((events[0].count, events[1].count), (5, 1));
        assert_eq!(ring.since(1)[0].port, Some(81));
    }

    #[test]
    fn a_flood_keeps_only_the_newest() {
        let mut ring = EventRing::default();
        for i in 0..3 * MAX_EVENTS {
            refuse(&mut ring, u16::try_from(i).unwrap());
        }
        let events = ring.since(0);
        assert_eq!(events.len(), MAX_EVENTS);
        assert_eq!(events[0].sequence, 2 * MAX_EVENTS as u64);
    }
}
