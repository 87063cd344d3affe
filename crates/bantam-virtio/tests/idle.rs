//! A worker with nothing it can do sleeps.
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
use std::io::Write;
use std::time::Duration;

use bantam_virtio::testing::{Buffer, Transport};

#[path = "it/net_driver.rs"]
mod net_driver;
#[path = "it/vsock_driver.rs"]
mod vsock_driver;
use vsock_driver::{CREDIT_UPDATE, Driver, Packet, REQUEST, RESPONSE, RW};

/// Time that the thread called `name` has spent on a CPU so far.
fn cpu_time(name: &str) -> Duration {
    let mut total = None;
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let path = task.unwrap().path();
        if fs::read_to_string(path.join("comm")).unwrap().trim() == name {
            assert!(total.is_none(), "one {name} thread");
            let schedstat = fs::read_to_string(path.join("schedstat")).unwrap();
            let on_cpu = schedstat.split_whitespace().next().unwrap();
            total = Some(Duration::from_nanos(on_cpu.parse().unwrap()));
        }
    }
    total.expect("the thread runs")
}

/// It comes to rest: a while in which it does nothing, sooner or later.
fn assert_rests(name: &str) {
    let window = Duration::from_millis(200);
    let at_rest = (0..50).any(|_| {
        let before = cpu_time(name);
        std::thread::sleep(window);
        cpu_time(name) - before < window / 200
    });
    assert!(at_rest, "the worker does not come to rest");
}

/// Frames wait for a guest that posts too little room for the first of them, over and over.
#[test]
fn a_card_with_frames_it_cannot_deliver_sleeps() {
    let (mut guest, mut network) = net_driver::start(Transport::Direct);
    for _ in 0..300 {
        network.send(&[1; 60_000]);
    }
    let room = guest.alloc(64);
    for _ in 0..100 {
        guest.submit(0, &[Buffer::writable(room, 64)]);
        net_driver::transmit(&mut guest, b"frame");
    }
    assert_rests("net");
    assert_eq!(network.waiting(), 300);
}

/// Row 46 of the bug classes: readiness that is reported again and again with nothing to do.
#[test]
fn a_worker_with_data_it_cannot_move_sleeps() {
    let mut driver = Driver::ready(Transport::Direct);
    let listener = driver.vsock.listen(1024).unwrap();
    let open = |driver: &mut Driver, port| {
        driver.send(&Packet::new(REQUEST, port, 1024));
        while driver.receive().op != RESPONSE {}
        listener.accept().unwrap()
    };
    // Bytes for a guest without credit; then the host closes as well.
    let mut no_credit = open(&mut driver, 1);
    driver.send(&Packet::new(CREDIT_UPDATE, 1, 1024).credit(0, 0));
    no_credit.write_all(&[1; 4096]).unwrap();
    let mut closed = open(&mut driver, 2);
    driver.send(&Packet::new(CREDIT_UPDATE, 2, 1024).credit(0, 0));
    closed.write_all(&[2; 4096]).unwrap();
    drop(closed);
    // Bytes for a host that does not read.
    let unread = open(&mut driver, 3);
    for _ in 0..4 {
        driver.send(&Packet::new(RW, 3, 1024).data(&[3; 65536]));
    }
    // Bytes for a guest that posts no more buffers: use those there are.
    let mut no_buffers = open(&mut driver, 4);
    no_buffers.set_nonblocking(true).unwrap();
    while no_buffers.write(&[4; 4096]).is_ok() {}

    assert_rests("vsock");
    drop(unread);
}
