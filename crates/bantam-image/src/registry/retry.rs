//! When to try again, and waiting until then.

use std::hash::{BuildHasher, Hasher};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const LONGEST_BACKOFF: Duration = Duration::from_secs(30);

/// Whether a status may pass by itself.
pub(super) fn may_pass(status: u16) -> bool {
    matches!(status, 408 | 429) || status >= 500 && status != 501 && status != 505
}

/// The pause before repetition number `attempt`, which counts from 1: doubling, and between half and all of that, so
/// that clients which failed together do not come back together.
pub(super) fn backoff(first: Duration, attempt: u32) -> Duration {
    let factor = 1_u32 << attempt.saturating_sub(1).min(16);
    let full = first.saturating_mul(factor).min(LONGEST_BACKOFF);
    // The standard library's only source of randomness.
    let random = std::hash::RandomState::new().build_hasher().finish();
    let thousandths = u32::try_from(random % 501).unwrap_or(0);
    full.mul_f64(f64::from(500 + thousandths) / 1000.0)
}

/// What `Retry-After` asks for: seconds, or a date (RFC 9110 §10.2.3).
pub(super) fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit()) {
        // More digits than fit are a long time too.
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let at = UNIX_EPOCH.checked_add(Duration::from_secs(http_date(value)?))?;
    Some(at.duration_since(now).unwrap_or_default())
}

/// Seconds since 1970 of an IMF-fixdate, `Sun, 06 Nov 1994 08:49:37 GMT`. The two obsolete forms are not known.
fn http_date(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let (_, rest) = text.split_once(", ")?;
    let words: Vec<&str> = rest.split(' ').collect();
    let [day, month, year, time, "GMT"] = words[..] else {
        return None;
    };
    let clock: Vec<u64> = time
        .split(':')
        .map(|part| part.parse().ok())
        .collect::<Option<_>>()?;
    let [hour, minute, second] = clock[..] else {
        return None;
    };
    let day: u64 = day.parse().ok()?;
    let month = 1 + u64::try_from(MONTHS.iter().position(|name| *name == month)?).ok()?;
    let year: u64 = year.parse().ok()?;
    if !(1970..=9999).contains(&year)
        || !(1..=31).contains(&day)
        || hour > 23
        || minute > 59
        || second > 60
    {
        return None;
    }
    // Years begin in March here, so that the leap day is the last.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let leap_days = year / 4 - year / 100 + year / 400;
    let days = year * 365 + leap_days + (month * 153 + 2) / 5 + day - 1;
    // Day 0 is 1 March of year 0.
    let days = days.checked_sub(719_468)?;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second)
}

/// Set once when a pull fails, which ends all waiting.
#[derive(Debug, Default)]
pub(super) struct Stop {
    set: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    pub(super) fn set(&self) {
        *self.set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    pub(super) fn is_set(&self) -> bool {
        *self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits, and says whether it was left alone that long.
    pub(super) fn wait(&self, pause: Duration) -> bool {
        let end = Instant::now().checked_add(pause);
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        while !*set {
            let left = match end {
                Some(end) => end.saturating_duration_since(Instant::now()),
                None => pause,
            };
            if left.is_zero() {
                return true;
            }
            set = self
                .changed
                .wait_timeout(set, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let seconds = |text, now| retry_after(text, at(now)).map(|pause| pause.as_secs());
        assert_eq!(seconds("120", 0), Some(120));
        assert_eq!(seconds(" 0 ", 0), Some(0));
        assert_eq!(seconds("99999999999999999999999", 0), Some(u64::MAX));
        // The example of RFC 9110.
        let date = "Sun, 06 Nov 1994 08:49:37 GMT";
        assert_eq!(seconds(date, 784_111_777), Some(0));
        assert_eq!(seconds(date, 784_111_700), Some(77));
        assert_eq!(seconds(date, 784_111_999), Some(0), "it has passed");
        assert_eq!(
            seconds("Thu, 29 Feb 2024 00:00:00 GMT", 0),
            Some(1_709_164_800)
        );
        assert_eq!(seconds("Thu, 01 Jan 1970 00:00:00 GMT", 0), Some(0));
        for bad in [
            "",
            "soon",
            "-1",
            "1.5",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 06 Nov 1994 8:49 GMT",
            "Sun, 99 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 0001 08:49:37 GMT",
            "Sun, 06 Nov 99999999999999999999 08:49:37 GMT",
        ] {
            assert_eq!(retry_after(bad, at(0)), None, "{bad}");
        }
    }

    #[test]
    fn pauses_double_vary_and_end_somewhere() {
        let first = Duration::from_millis(100);
        for (attempt, full) in [
            (1, 100),
            (2, 200),
            (5, 1600),
            (30, 30_000),
            (u32::MAX, 30_000),
        ] {
            let pauses: Vec<u128> = (0..50)
                .map(|_| backoff(first, attempt).as_millis())
                .collect();
            assert!(
                pauses.iter().all(|p| (full / 2..=full).contains(p)),
                "{attempt}: {pauses:?}"
            );
            assert!(
                pauses.iter().any(|p| *p != pauses[0]),
                "{attempt}: no two differ"
            );
        }
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        assert!([408, 429, 500, 502, 503, 504].iter().all(|s| may_pass(*s)));
        assert!(
            ![200, 206, 307, 400, 401, 403, 404, 416, 501]
                .iter()
                .any(|s| may_pass(*s))
        );
    }

    #[test]
    fn a_stop_ends_all_waiting() {
        let stop = Stop::default();
        assert!(stop.wait(Duration::ZERO));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| stop.wait(Duration::from_secs(3600)));
            stop.set();
            assert!(!waiter.join().unwrap());
        });
        assert!(stop.is_set());
    }
}
