//! The guest's wall clock when the host's jumps, as it does after a sleep of the host. A program of
//! its own: other tests measure time by that clock.
#![allow(clippy::unwrap_used)] // test helpers, which clippy does not take for tests

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bantam_e2e::{TestHome, eventually, skip, tests_with_home};
use rustix::time::{ClockId, Timespec, clock_settime};

const JUMP: Duration = Duration::from_secs(3 * 3600);

/// Seconds since 1970, there and here.
fn clocks(home: &TestHome) -> (u64, u64) {
    let there = home.sh("m", "date +%s").trim().parse().unwrap();
    let here = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    (there, here.as_secs())
}

fn set(time: SystemTime) {
    let since = time.duration_since(UNIX_EPOCH).unwrap();
    clock_settime(ClockId::Realtime, Timespec::try_from(since).unwrap()).unwrap();
}

tests_with_home! {
    fn the_guest_follows_when_the_hosts_clock_jumps(home) {
        if std::env::var_os("RIG").is_none() {
            skip(
                "the_guest_follows_when_the_hosts_clock_jumps",
                "it sets the host's clock, and this host is not the rig",
            );
            return;
        }
        home.started("m", &[]);
        for forward in [true, false] {
            let now = SystemTime::now();
            // Not all the way back: the rig begins in 1970, and no clock may be set before its boot.
            set(if forward { now + JUMP } else { now - JUMP / 2 });
            eventually(Duration::from_secs(30), "the guest's clock", || {
                let (there, here) = clocks(&home);
                match there.abs_diff(here) {
                    0..=1 => Ok(()),
                    off => Err(format!("it is {off} s off")),
                }
            });
        }
        home.delete("m");
    }
}
