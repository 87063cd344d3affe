//! How often the socket device's worker is woken.
//!
//! A process of its own: the worker is found by its thread's name.
#![cfg(target_os = "linux")]
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation
)]

use std::fs;
use std::io::Read;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bantam_virtio::testing::{Buffer, Transport};

#[path = "it/vsock_driver.rs"]
mod vsock_driver;
use vsock_driver::{CREDIT_UPDATE, Driver, Packet, REQUEST, RESPONSE, RST, RW, SHUTDOWN};

/// Held by the test whose worker is looked at.
static ONE: Mutex<()> = Mutex::new(());

/// How often the thread called `name` has gone to sleep.
fn sleeps(name: &str) -> u64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let task = tasks
        .map(|task| task.unwrap().path())
        .find(|path| fs::read_to_string(path.join("comm")).unwrap().trim() == name)
        .expect("the thread runs");
    let status = fs::read_to_string(task.join("status")).unwrap();
    let count = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.unwrap().trim().parse().unwrap()
}

/// What the guest has to say, of which the device is told if it wants to be.
fn say(driver: &mut Driver, packet: &Packet) {
    let bytes = [packet.header(), packet.data.clone()].concat();
    let addr = driver.guest.place(&bytes);
    let ring = &mut driver.guest.rings[1];
    ring.add(&[Buffer::readable(addr, bytes.len() as u32)]);
    if ring.wants_kick() {
        ring.kick();
    }
}

/// A request, its answer after a while, the end. The guest says `resets` resets to an end; Linux says
/// two.
fn call(driver: &mut Driver, resets: usize, takes: Duration) {
    let mut opened = driver.vsock.connect_with(1025, b"request").unwrap();
    let mut request = None;
    let request = loop {
        let packet = driver.receive();
        match packet.op {
            REQUEST => request = Some(packet),
            // The end of the call before.
            SHUTDOWN => {
                for _ in 0..resets {
                    say(driver, &Packet::new(RST, 1025, packet.host_port));
                }
            }
            _ => break request.unwrap(),
        }
    };
    thread::sleep(takes);
    for op in [RESPONSE, CREDIT_UPDATE] {
        say(driver, &Packet::new(op, 1025, request.host_port));
    }
    say(
        driver,
        &Packet::new(RW, 1025, request.host_port).data(b"answer"),
    );
    opened.stream.read_exact(&mut [0; 6]).unwrap();
    driver.vsock.part(opened.id, opened.stream.into());
}

/// In some round of calls the worker sleeps at most so often. In any of them the host's scheduler may stop
/// somebody for so long that the worker looks.
fn sleeps_at_most(limit: u64, rounds: usize, mut round: impl FnMut()) {
    let counts: Vec<u64> = (0..rounds)
        .map(|_| {
            let before = sleeps("vsock");
            round();
            sleeps("vsock") - before
        })
        .collect();
    assert!(*counts.iter().min().unwrap() <= limit, "{counts:?}");
}

#[test]
fn a_call_after_another_wakes_the_worker_for_its_answer_alone() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut driver = Driver::ready(Transport::Direct);
    let at_once = Duration::ZERO;
    // Then the thread has its name.
    call(&mut driver, 2, at_once);
    sleeps_at_most(11, 20, || {
        (0..10).for_each(|_| call(&mut driver, 2, at_once))
    });

    // A guest that has never said less is waited for, and one that does so from now on only once.
    let begun = Instant::now();
    (0..500).for_each(|_| call(&mut driver, 1, at_once));
    assert!(begun.elapsed() < Duration::from_secs(8), "each waits 20 ms");
}

#[test]
fn a_slow_guest_is_waited_for_without_a_look() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut driver = Driver::ready(Transport::Direct);
    let slowly = Duration::from_millis(30);
    call(&mut driver, 2, slowly);
    sleeps_at_most(11, 10, || {
        (0..10).for_each(|_| call(&mut driver, 2, slowly))
    });
}

#[test]
fn a_lone_call_wakes_the_worker_for_its_answer_and_once_more() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut driver = Driver::ready(Transport::Direct);
    let mut lone = || {
        call(&mut driver, 0, Duration::ZERO);
        let end = driver.expect(SHUTDOWN);
        for _ in 0..2 {
            say(&mut driver, &Packet::new(RST, 1025, end.host_port));
        }
        // Until all that can wait is done.
        thread::sleep(Duration::from_millis(60));
    };
    lone();
    sleeps_at_most(11, 10, || (0..5).for_each(|_| lone()));
}
