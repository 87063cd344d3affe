//! For which names the guest was given which addresses.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Shortest time for which an address stays known, whatever its answer said: programs keep addresses
/// longer than they may, and content networks answer with seconds.
pub(crate) const MIN_TTL: Duration = Duration::from_secs(300);
/// For how long after its use an address stays known at least: programs that look a name up once
/// reconnect to what they got.
pub(crate) const IN_USE: Duration = Duration::from_secs(60 * 60);
/// Longest time after the answer, in use or not.
pub(crate) const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// Most addresses known.
const MAX_ADDRESSES: usize = 8192;
/// Most names of one address: a content network has many behind one.
const MAX_NAMES: usize = 32;

/// A name that an address was given for.
struct Known {
    name: Arc<str>,
    until: Instant,
    /// The newest answer with it.
    answered: Instant,
}

/// Names by address.
#[derive(Default)]
pub(crate) struct Names {
    known: HashMap<IpAddr, Vec<Known>>,
}

impl Names {
    /// `name` has `address` for `ttl`.
    pub(crate) fn learn(&mut self, name: &Arc<str>, address: IpAddr, ttl: Duration, now: Instant) {
        let until = now + ttl.clamp(MIN_TTL, MAX_TTL);
        if !self.known.contains_key(&address) && self.known.len() >= MAX_ADDRESSES {
            self.make_room(now);
        }
        let names = self.known.entry(address).or_default();
        if let Some(known) = names.iter_mut().find(|known| known.name == *name) {
            known.until = known.until.max(until);
            known.answered = now;
            return;
        }
        if names.len() >= MAX_NAMES {
            names.retain(|known| known.until > now);
        }
        if names.len() >= MAX_NAMES
            && let Some(soonest) = (0..names.len()).min_by_key(|&i| names[i].until)
        {
            names.swap_remove(soonest);
        }
        names.push(Known {
            name: name.clone(),
            until,
            answered: now,
        });
    }

    /// The guest uses `address`.
    pub(crate) fn used(&mut self, address: IpAddr, now: Instant) {
        let names = self.known.get_mut(&address).into_iter().flatten();
        for known in names.filter(|known| known.until > now) {
            let until = (now + IN_USE).min(known.answered + MAX_TTL);
            known.until = known.until.max(until);
        }
    }

    /// The names for which the guest may use `address` now.
    pub(crate) fn of(&self, address: IpAddr, now: Instant) -> Vec<&str> {
        let names = self.known.get(&address).map_or(&[][..], Vec::as_slice);
        names
            .iter()
            .filter(|known| known.until > now)
            .map(|known| &*known.name)
            .collect()
    }

    /// Forgets what is over, or else an eighth: those that end soonest.
    fn make_room(&mut self, now: Instant) {
        let end = |names: &[Known]| names.iter().map(|known| known.until).max();
        self.known
            .retain(|_, names| end(names).is_some_and(|until| until > now));
        if self.known.len() < MAX_ADDRESSES {
            return;
        }
        let mut ends: Vec<_> = self.known.values().filter_map(|names| end(names)).collect();
        let (_, limit, _) = ends.select_nth_unstable(MAX_ADDRESSES / 8);
        let limit = *limit;
        self.known
            .retain(|_, names| end(names).is_some_and(|until| until > limit));
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1));

    #[test]
    fn an_address_keeps_all_names_it_was_given_for() {
        let mut names = Names::default();
        let now = Instant::now();
        names.learn(&"a.test".into(), ADDRESS, MIN_TTL, now);
        names.learn(&"b.test".into(), ADDRESS, MIN_TTL, now);
        names.learn(&"a.test".into(), ADDRESS, MIN_TTL, now);
        assert_eq!(names.of(ADDRESS, now), ["a.test", "b.test"]);
    }

    #[test]
    fn a_name_ends_with_its_time_but_not_before_the_floor() {
        let mut names = Names::default();
        let now = Instant::now();
        names.learn(&"short.test".into(), ADDRESS, Duration::ZERO, now);
        names.learn(&"long.test".into(), ADDRESS, 2 * MIN_TTL, now);
        names.learn(&"longest.test".into(), ADDRESS, Duration::MAX, now);
        let just_before = now + MIN_TTL - Duration::from_millis(1);
        assert_eq!(names.of(ADDRESS, just_before).len(), 3);
        assert_eq!(
            names.of(ADDRESS, now + MIN_TTL),
            ["long.test", "longest.test"]
        );
        assert!(names.of(ADDRESS, now + MAX_TTL).is_empty());
    }

    #[test]
    fn an_address_in_use_stays_known_for_an_hour_but_no_more_than_a_day() {
        let mut names = Names::default();
        let start = Instant::now();
        names.learn(&"a.test".into(), ADDRESS, IN_USE, start);
        let mut now = start;
        while now < start + MAX_TTL - IN_USE {
            now += IN_USE / 2;
            names.used(ADDRESS, now);
            now += IN_USE / 4;
            assert_eq!(names.of(ADDRESS, now), ["a.test"], "{:?}", now - start);
        }
        names.used(ADDRESS, start + MAX_TTL - Duration::from_secs(1));
        assert!(names.of(ADDRESS, start + MAX_TTL).is_empty());
        // What is over does not come back.
        names.used(ADDRESS, start + MAX_TTL);
        assert!(names.of(ADDRESS, start + MAX_TTL).is_empty());
    }

    #[test]
    fn tables_are_bounded_and_the_newest_stays() {
        let mut names = Names::default();
        let now = Instant::now();
        for i in 0..3 * u32::try_from(MAX_ADDRESSES).unwrap() {
            let later = now + Duration::from_millis(i.into());
            let address = IpAddr::V4(i.into());
            names.learn(&"a.test".into(), address, MIN_TTL, later);
            assert_eq!(names.of(address, later), ["a.test"]);
            assert!(names.known.len() <= MAX_ADDRESSES);
        }
        for i in 0..10 * MAX_NAMES {
            let name = Arc::from(format!("n{i}.test"));
            names.learn(&name, ADDRESS, MIN_TTL, now + Duration::from_secs(1));
            assert!(names.of(ADDRESS, now).contains(&&*name));
            assert!(names.of(ADDRESS, now).len() <= MAX_NAMES);
        }
    }

    #[test]
    fn a_full_table_of_one_moment_makes_room() {
        let mut names = Names::default();
        let now = Instant::now();
        for i in 0..=u32::try_from(MAX_ADDRESSES).unwrap() {
            names.learn(&"a.test".into(), IpAddr::V4(i.into()), MIN_TTL, now);
        }
        assert!(names.known.len() <= MAX_ADDRESSES);
    }
}
