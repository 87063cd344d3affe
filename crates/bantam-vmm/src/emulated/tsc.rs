//! The rate of the time-stamp counter that QEMU's TCG shows the guest: the host's own.
//!
//! The emulated machine has nothing a kernel could calibrate it against. Without the rate the
//! guest's clock runs on timer ticks, 10 ms coarse, and gains or loses time under load.
#![allow(unsafe_code)]

use std::arch::x86_64::_rdtsc;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// How long the counter is watched. A reading is good to some 50 ns, so the rate is good to
/// 10 ppm, which is better than the crystal behind it.
const WINDOW: Duration = Duration::from_millis(5);

/// The rate in kHz, measured once in the life of this process.
pub(super) fn khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(measure)
}

fn measure() -> u64 {
    let (start_ticks, start) = sample();
    thread::sleep(WINDOW);
    let (end_ticks, end) = sample();
    let ticks = u128::from(end_ticks.saturating_sub(start_ticks));
    let nanos = end.duration_since(start).as_nanos().max(1);
    u64::try_from(ticks * 1_000_000 / nanos).unwrap_or(u64::MAX)
}

/// The counter and the clock at one moment: of a few tries the one that took the shortest, which
/// was not interrupted.
fn sample() -> (u64, Instant) {
    let read = || {
        // SAFETY: RDTSC exists on every x86_64 CPU and has no effect but its result.
        let ticks = unsafe { _rdtsc() };
        let now = Instant::now();
        // SAFETY: as above.
        let took = unsafe { _rdtsc() }.saturating_sub(ticks);
        (took, (ticks + took / 2, now))
    };
    let mut best = read();
    for _ in 0..8 {
        best = std::cmp::min_by_key(best, read(), |(took, _)| *took);
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_a_cpu() {
        // A wide range: no test here may depend on how busy the machine is.
        let rate = measure();
        assert!((100_000..20_000_000).contains(&rate), "{rate} kHz");
        assert_eq!(khz(), khz());
    }
}
