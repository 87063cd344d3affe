//! The handle by which others steer and watch a running network.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mio::Waker;

use crate::events::EventRing;
use crate::{EgressEvent, Policy, PortForward};

/// A running network, from outside. Clones are the same network.
#[derive(Clone)]
pub struct Network {
    pub(crate) shared: Arc<Shared>,
}

/// What the stack and its handles share.
pub(crate) struct Shared {
    pub(crate) waker: Waker,
    /// A policy that the stack has not taken yet.
    pub(crate) update: Mutex<Option<Policy>>,
    pub(crate) events: Mutex<EventRing>,
    pub(crate) counters: Counters,
    pub(crate) ports: Vec<PortForward>,
}

/// Counters, kept by the stack.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) frames_from_guest: AtomicU64,
    pub(crate) frames_to_guest: AtomicU64,
    pub(crate) bytes_from_guest: AtomicU64,
    pub(crate) bytes_to_guest: AtomicU64,
    pub(crate) dropped: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) tcp_flows: AtomicU64,
    pub(crate) datagram_flows: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Ordering::Relaxed);
    }
}

/// How much has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Frames the guest sent.
    pub frames_from_guest: u64,
    /// Frames the guest got.
    pub frames_to_guest: u64,
    /// Bytes of the frames the guest sent.
    pub bytes_from_guest: u64,
    /// Bytes of the frames the guest got.
    pub bytes_to_guest: u64,
    /// Frames and datagrams dropped: malformed, not from the guest's address, no room.
    pub dropped: u64,
    /// Flows, pings and names refused by the policy.
    pub refused: u64,
    /// TCP connections now.
    pub tcp_flows: u64,
    /// UDP flows and pings now.
    pub datagram_flows: u64,
}

impl Network {
    /// Sets a new policy. It holds for flows that exist, too: those it refuses are reset. Takes
    /// effect within the stack's next turn, for which it is woken.
    pub fn update(&self, policy: Policy) {
        *lock(&self.shared.update) = Some(policy);
        if let Err(error) = self.shared.waker.wake() {
            tracing::error!(%error, "waking the network for a new policy");
        }
    }

    /// What was refused, from sequence number `from` on; at most
    /// [`MAX_EVENTS`](crate::MAX_EVENTS), oldest first.
    pub fn events(&self, from: u64) -> Vec<EgressEvent> {
        lock(&self.shared.events).since(from)
    }

    /// Counters.
    pub fn stats(&self) -> Stats {
        let counters = &self.shared.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            frames_from_guest: get(&counters.frames_from_guest),
            frames_to_guest: get(&counters.frames_to_guest),
            bytes_from_guest: get(&counters.bytes_from_guest),
            bytes_to_guest: get(&counters.bytes_to_guest),
            dropped: get(&counters.dropped),
            refused: get(&counters.refused),
            tcp_flows: get(&counters.tcp_flows),
            datagram_flows: get(&counters.datagram_flows),
        }
    }

    /// The ports of the host that lead into the machine, with the port numbers that were taken.
    pub fn ports(&self) -> &[PortForward] {
        &self.shared.ports
    }

    /// The host's address and port of the forward to `guest_port`, if there is one.
    pub fn host_port(&self, guest_port: u16) -> Option<SocketAddr> {
        self.ports()
            .iter()
            .find(|port| port.guest_port == guest_port)
            .map(|port| port.listen)
    }
}

/// Locks; a panic elsewhere does not spread, since what is inside is always whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
