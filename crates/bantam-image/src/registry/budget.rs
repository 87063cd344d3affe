//! How many layers are on the way at once.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::retry::Stop;

/// Layers that this process fetches from one registry at once, whatever number of pulls it makes: registries limit
/// their clients. Docker's daemon has the same number.
pub(super) const PER_REGISTRY: usize = 3;
/// And from all registries, as a host has only so many sockets. One registry that is slow, or means to be, holds up
/// nobody else's pulls.
const IN_ALL: usize = 12;

pub(super) static LAYERS: Budget = Budget::new(PER_REGISTRY, IN_ALL);

/// Shares, of which each is one layer on its way.
pub(super) struct Budget {
    per_registry: usize,
    in_all: usize,
    /// Shares that are taken, by registry; none of them zero.
    taken: Mutex<BTreeMap<String, usize>>,
    changed: Condvar,
}

/// Given back when dropped.
pub(super) struct Share<'a> {
    budget: &'a Budget,
    registry: String,
}

impl Budget {
    const fn new(per_registry: usize, in_all: usize) -> Self {
        Self {
            per_registry,
            in_all,
            taken: Mutex::new(BTreeMap::new()),
            changed: Condvar::new(),
        }
    }

    /// Waits for a share. `None` once the pull is stopped.
    pub(super) fn take(&self, registry: &str, stop: &Stop) -> Option<Share<'_>> {
        let mut taken = self.taken();
        while !stop.is_set() {
            let own = taken.get(registry).copied().unwrap_or(0);
            if own < self.per_registry && taken.values().sum::<usize>() < self.in_all {
                let registry = registry.to_owned();
                taken.insert(registry.clone(), own + 1);
                return Some(Share {
                    budget: self,
                    registry,
                });
            }
            taken = self
                .changed
                .wait(taken)
                .unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Stops a pull, those of its threads that wait here included.
    pub(super) fn stop(&self, stop: &Stop) {
        // Under the lock, so that nobody finds the pull going on and waits after this.
        let _taken = self.taken();
        stop.set();
        self.changed.notify_all();
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        let mut taken = self.budget.taken();
        match taken.get_mut(&self.registry) {
            Some(own) if *own > 1 => *own -= 1,
            _ => {
                taken.remove(&self.registry);
            }
        }
        // All, as the one that wakes may be of a stopped pull, or of a registry that has its shares.
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_waited_for_until_one_is_given_back() {
        let (budget, stop) = (Budget::new(2, 9), Stop::default());
        let first = budget.take("a", &stop).unwrap();
        let _second = budget.take("a", &stop).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| budget.take("a", &stop).is_some());
            // Another registry has its own.
            assert!(budget.take("b", &stop).is_some());
            drop(first);
            assert!(waiter.join().unwrap());
        });
        assert_eq!(*budget.taken(), BTreeMap::from([("a".to_owned(), 1)]));
    }

    #[test]
    fn all_registries_together_have_a_bound() {
        let (budget, stop) = (Budget::new(2, 3), Stop::default());
        let shares: Vec<_> = ["a", "a", "b"]
            .map(|registry| budget.take(registry, &stop).unwrap())
            .into_iter()
            .collect();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| budget.take("c", &stop).is_some());
            drop(shares);
            assert!(waiter.join().unwrap());
        });
        assert!(budget.taken().is_empty());
    }

    #[test]
    fn a_stopped_pull_waits_for_no_share_and_others_do() {
        let (budget, stopped, other) = (Budget::new(1, 1), Stop::default(), Stop::default());
        let share = budget.take("a", &other).unwrap();
        std::thread::scope(|scope| {
            let waiters: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| budget.take("a", &stopped).is_none()))
                .collect();
            let patient = scope.spawn(|| budget.take("a", &other).is_some());
            budget.stop(&stopped);
            for waiter in waiters {
                assert!(waiter.join().unwrap());
            }
            drop(share);
            assert!(patient.join().unwrap());
        });
        assert!(budget.take("a", &stopped).is_none());
    }
}
