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
use std::time::{Duration, Instant};

use bantam_virtio::testing::{Buffer, Transport};

#[path = "it/vsock_driver.rs"]
mod vsock_driver;
use vsock_driver::{CREDIT_UPDATE, Driver, Packet, REQUEST, RESPONSE, RST, RW, SHUTDOWN};

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

/// A request, its answer, the end. The guest says `resets` resets to an end; Linux says two.
fn call(driver: &mut Driver, resets: usize) {
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

#[test]
fn a_call_after_another_wakes_the_worker_for_its_answer_alone() {
    let mut driver = Driver::ready(Transport::Direct);
    // Then the thread has its name.
    call(&mut driver, 2);
    // Any of them may be the one that the host's scheduler stops for so long that the worker looks.
    let mut ten = || {
        let before = sleeps("vsock");
        (0..10).for_each(|_| call(&mut driver, 2));
        sleeps("vsock") - before
    };
    let counts: Vec<u64> = (0..20).map(|_| ten()).collect();
    let least = *counts.iter().min().unwrap();
    assert!(least <= 11, "{counts:?}");

    // A guest that has never said less is waited for, and one that does so from now on only once.
    let begun = Instant::now();
    (0..500).for_each(|_| call(&mut driver, 1));
    assert!(begun.elapsed() < Duration::from_secs(8), "each waits 20 ms");
}
