//! Connections that are opened with their first bytes, and parted with in the end.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use bantam_virtio::testing::{Buffer, Guest, PATIENCE, Transport};
use bantam_virtio::vsock::{EARLY_DATA, MAX_CONNECTIONS, Opened};
use bantam_virtio::{
    Activation, EventFd, GuestRam, Interrupt, QueueWiring, VirtioDevice, Vsock, VsockDevice,
    features,
};
use vm_memory::{Bytes, GuestAddress};

use crate::vsock_driver::{
    CREDIT_REQUEST, CREDIT_UPDATE, Driver, Packet, REQUEST, RESPONSE, RST, RW, SHUTDOWN,
};

const PORT: u32 = 1025;

/// What the guest sends next on the connection of `request`.
fn answer(request: &Packet, op: u16) -> Packet {
    Packet::new(op, request.guest_port, request.host_port)
}

/// A connection with `bytes` that the guest accepted, and its request.
fn called(driver: &mut Driver, bytes: &[u8]) -> (Opened, Packet) {
    let opened = driver.vsock.connect_with(PORT, bytes).unwrap();
    assert_eq!(opened.sent, bytes.len());
    let request = driver.expect(REQUEST);
    assert_eq!(driver.expect_data(bytes.len()), bytes);
    driver.send(&answer(&request, RESPONSE));
    (opened, request)
}

fn read_to_end(mut stream: &UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn first_bytes_go_out_with_the_request_and_others_follow() {
    for &transport in Transport::ALL {
        let mut driver = Driver::ready(transport);
        for n in 0..100 {
            let bytes = format!("request {n}");
            let (opened, request) = called(&mut driver, bytes.as_bytes());
            assert_eq!(request.guest_port, PORT);
            let mut stream = opened.stream;
            stream.write_all(b"more").unwrap();
            assert_eq!(driver.expect(RW).data, b"more");
            driver.send(&answer(&request, RW).data(b"an answer"));
            let mut bytes = [0; 9];
            stream.read_exact(&mut bytes).unwrap();
            assert_eq!(&bytes, b"an answer");
            drop(stream);
            while driver.expect(SHUTDOWN).flags != 3 {}
            driver.send(&answer(&request, RST));
        }
    }
}

#[test]
fn first_bytes_may_be_more_than_a_socket_takes_and_than_the_guest_takes_unasked() {
    let mut driver = Driver::ready(Transport::Direct);
    let bytes: Vec<u8> = (0..4 << 20).map(|n: u32| (n % 251) as u8).collect();
    let opened = driver.vsock.connect_with(PORT, &bytes).unwrap();
    assert!(opened.sent >= EARLY_DATA as usize && opened.sent < bytes.len());
    let request = driver.expect(REQUEST);
    let mut received = driver.expect_data(EARLY_DATA as usize);
    assert_eq!(received.len(), EARLY_DATA as usize);
    let credit = bytes.len() as u32;
    driver.send(&answer(&request, RESPONSE).credit(credit, 0));
    let mut stream = opened.stream;
    let rest = bytes[opened.sent..].to_vec();
    let writer = std::thread::spawn(move || stream.write_all(&rest));
    received.extend(driver.expect_data(bytes.len() - received.len()));
    writer.join().unwrap().unwrap();
    assert!(received == bytes);
}

#[test]
fn what_is_opened_with_bytes_before_the_guest_runs_is_sent_then() {
    let (device, vsock) = bantam_virtio::VsockDevice::new(3).unwrap();
    let _opened = vsock.connect_with(PORT, b"early").unwrap();
    let mut driver = Driver::with_device(Transport::Mmio, device, vsock);
    driver.post(8);
    driver.expect(REQUEST);
    assert_eq!(driver.expect(RW).data, b"early");
    let vsock = driver.vsock.clone();
    drop(driver);
    let error = vsock.connect_with(PORT, b"late").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
}

#[test]
fn calls_of_many_threads_beside_a_busy_stream_all_arrive_whole() {
    const THREADS: usize = 8;
    const CALLS: usize = 20;
    let mut driver = Driver::ready(Transport::Direct);
    let (opened, _) = called(&mut driver, b"the stream");
    let mut stream = opened.stream;
    let streamer = std::thread::spawn(move || while stream.write(&[7; 4096]).is_ok() {});
    let callers: Vec<_> = (0..THREADS)
        .map(|thread| {
            let vsock = driver.vsock.clone();
            std::thread::spawn(move || -> Vec<Opened> {
                (0..CALLS)
                    .map(|call| {
                        let bytes = format!("{thread} {call}");
                        vsock.connect_with(PORT, bytes.as_bytes()).unwrap()
                    })
                    .collect()
            })
        })
        .collect();
    let mut requests = Vec::new();
    let mut calls = Vec::new();
    let mut streamed = 0;
    while calls.len() < THREADS * CALLS {
        let packet = driver.receive();
        match packet.op {
            REQUEST => requests.push(packet.host_port),
            _ if requests.contains(&packet.host_port) => {
                calls.push(String::from_utf8(packet.data).unwrap());
            }
            _ => {
                // The busy one: it goes on for as long as there is credit.
                streamed += packet.len;
                let credit = Packet::new(CREDIT_UPDATE, PORT, packet.host_port);
                driver.send(&credit.credit(1 << 20, streamed));
            }
        }
    }
    calls.sort();
    let mut wanted: Vec<String> = (0..THREADS)
        .flat_map(|thread| (0..CALLS).map(move |call| format!("{thread} {call}")))
        .collect();
    wanted.sort();
    assert_eq!(calls, wanted);
    let opened: Vec<_> = callers.into_iter().map(|it| it.join().unwrap()).collect();
    drop(driver);
    streamer.join().unwrap();
    for opened in opened.iter().flatten() {
        assert!(read_to_end(&opened.stream).is_empty());
    }
}

#[test]
fn a_call_waits_for_receive_buffers_without_holding_up_its_caller() {
    let mut driver = Driver::start(Transport::Direct);
    let first = driver.vsock.connect_with(PORT, b"first").unwrap();
    let second = driver.vsock.connect_with(PORT, b"second").unwrap();
    driver.post(4);
    let mut received = Vec::new();
    while received.len() < 4 {
        received.push(driver.receive());
    }
    let mut data: Vec<_> = received.iter().map(|packet| packet.data.clone()).collect();
    data.sort();
    assert_eq!(data, [&b""[..], b"", b"first", b"second"]);
    drop((first, second));
}

#[test]
fn buffers_without_room_do_not_keep_a_call_from_the_guest() {
    let mut driver = Driver::start(Transport::Direct);
    let room = driver.guest.alloc(64);
    for _ in 0..100 {
        driver.guest.rings[0].add(&[Buffer::writable(room, 44)]);
    }
    let _opened = driver.vsock.connect_with(PORT, b"call").unwrap();
    for _ in 0..100 {
        assert_eq!(driver.guest.wait_used(0).1, 0);
    }
    driver.post(2);
    driver.expect(REQUEST);
    assert_eq!(driver.expect(RW).data, b"call");
}

#[test]
fn a_call_that_the_guest_refuses_is_at_its_end_whatever_else_it_was_expected_to_say() {
    for &transport in Transport::ALL {
        let mut driver = Driver::ready(transport);
        // A guest that tells its credit is expected to do so again.
        let (opened, request) = called(&mut driver, b"hello");
        driver.send(&answer(&request, CREDIT_UPDATE));
        let refused = driver.vsock.connect_with(PORT, b"hello?").unwrap();
        let request = driver.expect(REQUEST);
        driver.expect(RW);
        // Not kicked for if the device does not ask for it.
        let header = answer(&request, RST).header();
        let addr = driver.guest.place(&header);
        driver.guest.rings[1].add(&[Buffer::readable(addr, header.len() as u32)]);
        if driver.guest.rings[1].wants_kick() {
            driver.guest.rings[1].kick();
        }
        assert!(read_to_end(&refused.stream).is_empty());
        drop(opened);
    }
}

#[test]
fn what_was_parted_with_ends_for_all_though_nothing_follows() {
    for &transport in Transport::ALL {
        let mut driver = Driver::ready(transport);
        let (opened, request) = called(&mut driver, b"call");
        driver.send(&answer(&request, RW).data(b"unread"));
        let stream = Arc::new(opened.stream);
        driver.vsock.part(opened.id, stream.clone());
        while driver.expect(SHUTDOWN).flags != 3 {}
        assert!((&*stream).write(b"x").is_err());
        driver.send(&answer(&request, RST));
        // Its ports are unknown by now.
        driver.send(&answer(&request, CREDIT_REQUEST));
        driver.expect(RST);
    }
}

#[test]
fn what_was_written_before_the_parting_arrives_before_the_end() {
    let mut driver = Driver::ready(Transport::Direct);
    let (opened, _) = called(&mut driver, b"call");
    (&opened.stream).write_all(b"last words").unwrap();
    driver.vsock.part(opened.id, opened.stream.into());
    assert_eq!(driver.expect(RW).data, b"last words");
    while driver.expect(SHUTDOWN).flags != 3 {}
}

#[test]
fn connections_that_are_parted_with_leave_room_for_others_however_many() {
    let mut driver = Driver::ready(Transport::Direct);
    let mut parted = 0;
    for n in 0..2 * MAX_CONNECTIONS {
        let opened = driver.vsock.connect_with(PORT, b"call").unwrap();
        let mut accepted = false;
        while !accepted {
            let packet = driver.receive();
            match packet.op {
                REQUEST => driver.send(&answer(&packet, RESPONSE)),
                RW => accepted = true,
                _ => {
                    assert_eq!((packet.op, packet.flags), (SHUTDOWN, 3));
                    driver.send(&answer(&packet, RST));
                    parted += 1;
                }
            }
        }
        driver.vsock.part(opened.id, opened.stream.into());
        assert!(n + 1 - parted <= 16, "{parted} of {n}");
    }
    while parted < 2 * MAX_CONNECTIONS {
        let packet = driver.expect(SHUTDOWN);
        driver.send(&answer(&packet, RST));
        parted += 1;
    }
}

#[test]
fn a_reset_ends_what_was_parted_with_and_leaves_the_device_usable() {
    for &transport in Transport::ALL {
        let mut driver = Driver::ready(transport);
        let (opened, request) = called(&mut driver, b"call");
        // More than a socket holds; nobody reads it.
        for _ in 0..4 {
            driver.send(&answer(&request, RW).data(&[7; 60_000]));
        }
        let stream = Arc::new(opened.stream);
        driver.vsock.part(opened.id, stream.clone());
        driver.guest.reset();
        assert!((&*stream).write(b"x").is_err());
        // Without a guest it ends at once.
        driver.vsock.part(opened.id, stream.clone());
        driver.restart();
        driver.post(8);
        // Of the connection before, nothing is known any more.
        driver.vsock.part(opened.id, stream);
        called(&mut driver, b"another");
    }
}

#[test]
fn a_reset_while_callers_call_loses_no_thread_and_no_stream() {
    let mut driver = Driver::start(Transport::Direct);
    let vsock = driver.vsock.clone();
    let caller = std::thread::spawn(move || {
        let mut streams = Vec::new();
        loop {
            let error = match vsock.connect_with(PORT, b"call") {
                Ok(opened) => {
                    let stream = Arc::new(opened.stream);
                    vsock.part(opened.id, stream.clone());
                    streams.push(stream);
                    None
                }
                Err(error) => Some(error),
            };
            if streams.len() == 64 || error.is_some() {
                for stream in streams.drain(..) {
                    // With its end, or an error if no device ever took what was written.
                    assert!(!matches!((&*stream).read(&mut [0]), Ok(1..)));
                }
            }
            match error.map(|error| error.kind()) {
                None => {}
                Some(ErrorKind::QuotaExceeded) => std::thread::yield_now(),
                kind => return kind,
            }
        }
    });
    for _ in 0..50 {
        driver.post(8);
        for _ in 0..20 {
            driver.receive();
        }
        driver.guest.reset();
        driver.restart();
    }
    drop(driver);
    assert_eq!(caller.join().unwrap(), Some(ErrorKind::BrokenPipe));
}

#[test]
fn who_calls_again_and_again_does_not_keep_another_streams_answer_waiting() {
    const CALLS: usize = 150;
    let mut driver = Driver::ready(Transport::Direct);
    // The device learns that this guest tells its credit, and expects a packet more from then on.
    let (mut other, request) = called(&mut driver, b"the other");
    driver.send(&answer(&request, CREDIT_UPDATE));
    // Until it has nothing to look after.
    std::thread::sleep(Duration::from_millis(100));
    let vsock = driver.vsock.clone();
    let arrived = Arc::new(AtomicBool::new(false));
    let caller = std::thread::spawn({
        let arrived = arrived.clone();
        move || {
            let mut opened = Vec::new();
            while opened.len() < CALLS && !arrived.load(Ordering::Acquire) {
                opened.push(vsock.connect_with(PORT, b"call").unwrap());
                std::thread::sleep(Duration::from_millis(5));
            }
            opened.len()
        }
    });
    for _ in 0..10 {
        driver.expect(REQUEST);
        driver.expect(RW);
    }
    // A guest that does not kick when it was not asked to, and answers none of the calls.
    let bytes = [answer(&request, RW).data(b"x").header(), b"x".to_vec()].concat();
    let len = u32::try_from(bytes.len()).unwrap();
    let addr = driver.guest.place(&bytes);
    driver.guest.rings[1].add(&[Buffer::readable(addr, len)]);
    if driver.guest.rings[1].wants_kick() {
        driver.guest.rings[1].kick();
    }
    let reader = std::thread::spawn(move || {
        let read = other.stream.read_exact(&mut [0]);
        arrived.store(true, Ordering::Release);
        read
    });
    // The callers' packets need room, so that nothing else holds them up.
    while !reader.is_finished() {
        driver.receive_for(Duration::from_millis(20));
    }
    reader.join().unwrap().unwrap();
    assert!(
        caller.join().unwrap() < CALLS,
        "it came when the calls ended"
    );
}

/// An interrupt line that panics when it is told to.
struct Broken(AtomicBool);

impl Interrupt for Broken {
    fn used_queue(&self, _: u16) {
        assert!(
            !self.0.load(Ordering::Acquire),
            "a bug in the worker's pass"
        );
    }
    fn config_changed(&self) {}
    fn needs_reset(&self) {}
}

/// A device whose interrupts go to `interrupt`, a guest with its rings, and their kicks.
fn wired(interrupt: Arc<dyn Interrupt>) -> (VsockDevice, Vsock, Guest, Vec<EventFd>) {
    let (mut device, vsock) = VsockDevice::new(3).unwrap();
    // Its rings and memory are what is wanted of it.
    let (unused, _) = VsockDevice::new(3).unwrap();
    let guest = Guest::attach(Transport::Direct, Box::new(unused), u16::MAX);
    let features = device.features() | features::TRANSPORT;
    let kicks: Vec<_> = (0..3)
        .map(|_| EventFd::new(libc::EFD_NONBLOCK).unwrap())
        .collect();
    let wiring = |index: u16| QueueWiring {
        index,
        max_size: guest.rings[usize::from(index)].size(),
        memory: guest.memory.clone(),
        features,
        kick: kicks[usize::from(index)].try_clone().unwrap(),
        interrupt: interrupt.clone(),
        cursor: Arc::default(),
    };
    let queues = (0..3).zip(guest.configs());
    let queues = queues.map(|(index, config)| config.activate(wiring(index)).unwrap());
    let queues = queues.collect();
    let memory = guest.memory.clone();
    device
        .activate(Activation {
            memory,
            features,
            queues,
        })
        .unwrap();
    (device, vsock, guest, kicks)
}

#[test]
fn streams_end_when_the_worker_panics() {
    let broken = Arc::new(Broken(AtomicBool::new(false)));
    let (_device, vsock, mut guest, kicks) = wired(broken.clone());
    let room = guest.alloc(8 * 4096);
    for n in 0..8 {
        guest.rings[0].add(&[Buffer::writable(room + n * 4096, 4096)]);
    }
    kicks[0].write(1).unwrap();
    let mut opened = vsock.connect_with(PORT, b"call").unwrap();
    broken.0.store(true, Ordering::Release);
    // Whatever it is: the guest is told that its buffer was used.
    let addr = guest.alloc(64);
    guest.rings[1].add(&[Buffer::readable(addr, 44)]);
    kicks[1].write(1).unwrap();
    let patience = Some(Duration::from_secs(20));
    opened.stream.set_read_timeout(patience).unwrap();
    assert_eq!(opened.stream.read(&mut [0]).unwrap(), 0);
}

/// An interrupt line whose guest notes for which of its packets it would kick.
#[derive(Default)]
struct Prompt {
    ring: OnceLock<(Arc<GuestRam>, u64)>,
    /// `avail_event` at each interrupt for packets.
    events: Mutex<Vec<u16>>,
}

impl Interrupt for Prompt {
    fn used_queue(&self, queue: u16) {
        if queue == 0
            && let Some((memory, at)) = self.ring.get()
        {
            let event: u16 = memory.load(GuestAddress(*at), Ordering::SeqCst).unwrap();
            self.events.lock().unwrap().push(event);
        }
    }
    fn config_changed(&self) {}
    fn needs_reset(&self) {}
}

#[test]
fn a_guest_that_answers_at_once_knows_already_what_nobody_need_be_woken_for() {
    let prompt = Arc::new(Prompt::default());
    let (_device, vsock, mut guest, kicks) = wired(prompt.clone());
    let tx = guest.rings[1].config();
    let avail_event = tx.used_ring + 4 + 8 * u64::from(tx.size);
    let ring = (guest.memory.clone(), avail_event);
    assert!(prompt.ring.set(ring).is_ok());
    let room = guest.alloc(8 * 4096);
    for n in 0..8 {
        guest.rings[0].add(&[Buffer::writable(room + n * 4096, 4096)]);
    }
    kicks[0].write(1).unwrap();
    let deadline = Instant::now() + PATIENCE;
    let until = |found: &mut dyn FnMut() -> bool| {
        while !found() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
    };
    let _first = vsock.connect_with(PORT, b"call").unwrap();
    let mut packets = 0;
    until(&mut || {
        packets += usize::from(guest.rings[0].take_used().is_some());
        packets == 2
    });
    // As Linux does. The first connection has the first of the host's ports.
    let mut said = 0;
    for op in [RESPONSE, CREDIT_UPDATE] {
        let header = Packet::new(op, PORT, 1 << 30).header();
        let addr = guest.place(&header);
        guest.rings[1].add(&[Buffer::readable(addr, header.len() as u32)]);
        kicks[1].write(1).unwrap();
        said += 1;
        until(&mut || guest.rings[1].take_used().is_some());
    }
    // Asks for an interrupt at the next one.
    assert!(guest.rings[0].take_used().is_none());
    prompt.events.lock().unwrap().clear();
    let _second = vsock.connect_with(PORT, b"call").unwrap();
    until(&mut || !prompt.events.lock().unwrap().is_empty());
    let event = prompt.events.lock().unwrap()[0];
    assert_eq!(
        event,
        said + 2,
        "the two answers to the second call wake nobody"
    );
}

#[test]
#[allow(unsafe_code)]
fn a_forked_child_does_not_write_into_its_parents_rings() {
    let driver = Driver::ready(Transport::Direct);
    // SAFETY: what the child calls takes no lock before it fails, and it ends without any cleanup.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = driver.vsock.connect_with(PORT, b"call").is_err();
        // SAFETY: ends the process.
        unsafe { libc::_exit(if refused { 7 } else { 8 }) };
    }
    let mut status = 0;
    // SAFETY: `status` is a place for the child's status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 7);
}
