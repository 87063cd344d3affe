//! What a front-end does besides starting a device: stopping, resuming, exchanging descriptors, going
//! away, and lying.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bantam_virtio::testing::{Buffer, Guest, PATIENCE, Transport, ram, wait_readable};
use bantam_virtio::vhost_user::{Server, serve};
use bantam_virtio::{EventFd, GuestRam, RngDevice};
use rustix::fs::{MemfdFlags, memfd_create};
use std::os::fd::{AsRawFd, BorrowedFd};
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use crate::net_driver::card;

/// A front-end up to the point where features are settled.
fn front_end() -> (Frontend, Server) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = serve(Box::new(RngDevice::new()), theirs).unwrap();
    let mut front_end = Frontend::from_stream(ours, 1);
    front_end.set_owner().unwrap();
    let features = front_end.get_features().unwrap();
    let protocol = front_end.get_protocol_features().unwrap();
    front_end.set_protocol_features(protocol).unwrap();
    front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    front_end.set_features(features).unwrap();
    (front_end, server)
}

fn share(front_end: &Frontend, memory: &GuestRam) {
    let regions: Vec<_> = memory
        .iter()
        .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
        .collect();
    front_end.set_mem_table(&regions).unwrap();
}

/// Sets up the one ring of an entropy device, to go on at `base`.
fn start(
    front_end: &mut Frontend,
    guest: &Guest,
    memory: &GuestRam,
    base: u16,
    kick: &EventFd,
    call: &EventFd,
) {
    set_up(front_end, guest, memory, 0, base, kick, call);
    front_end.set_vring_enable(0, true).unwrap();
}

/// Sets up a ring, to go on at `base`.
fn set_up(
    front_end: &Frontend,
    guest: &Guest,
    memory: &GuestRam,
    ring: usize,
    base: u16,
    kick: &EventFd,
    call: &EventFd,
) {
    let config = guest.configs()[ring];
    let user = |addr| memory.get_host_address(GuestAddress(addr)).unwrap() as u64;
    let addresses = VringConfigData {
        queue_max_size: config.size,
        queue_size: config.size,
        flags: 0,
        desc_table_addr: user(config.desc_table),
        used_ring_addr: user(config.used_ring),
        avail_ring_addr: user(config.avail_ring),
        log_addr: None,
    };
    front_end.set_vring_num(ring, config.size).unwrap();
    front_end.set_vring_base(ring, base).unwrap();
    front_end.set_vring_addr(ring, &addresses).unwrap();
    front_end.set_vring_call(ring, call).unwrap();
    front_end.set_vring_kick(ring, kick).unwrap();
}

fn event() -> EventFd {
    EventFd::new(libc::EFD_NONBLOCK).unwrap()
}

fn signalled(event: &EventFd) -> bool {
    // SAFETY: `event` owns the descriptor and outlives the borrow.
    #[allow(unsafe_code)]
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    wait_readable(fd, Instant::now() + PATIENCE) && event.read().is_ok()
}

fn finished(server: &Server) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while !server.is_finished() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    server.is_finished()
}

/// A guest whose rings only are used: its device is another one.
fn rings() -> (Guest, Arc<GuestRam>) {
    let guest = Guest::attach(Transport::Direct, Box::new(RngDevice::new()), 16);
    let memory = guest.memory.clone();
    (guest, memory)
}

/// QEMU's network card: enables its rings before it says what it takes, and gives them their
/// descriptors one by one afterwards; a second time, too.
#[test]
fn rings_may_be_enabled_before_the_features_are_known() {
    let (device, network) = card();
    let mut guest = Guest::attach(Transport::Direct, Box::new(card().0), 16);
    let memory = guest.memory.clone();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut raw = ours.try_clone().unwrap();
    let _server = serve(Box::new(device), theirs).unwrap();
    let mut front_end = Frontend::from_stream(ours, 2);
    front_end.set_owner().unwrap();
    let features = front_end.get_features().unwrap();
    let protocol = front_end.get_protocol_features().unwrap();
    front_end.set_protocol_features(protocol).unwrap();
    for ring in [0, 1] {
        // SET_VRING_ENABLE, version 1, 8 bytes: the ring, 1.
        // In one piece: the other end takes what there is for a message.
        let message = [18_u32, 1, 8, ring, 1].map(u32::to_le_bytes).concat();
        raw.write_all(&message).unwrap();
    }
    front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let (kicks, calls) = ([event(), event()], [event(), event()]);
    let packet = guest.place(&[0; 72]);
    for base in [0, 1] {
        front_end.set_features(features).unwrap();
        share(&front_end, &memory);
        for ring in [0, 1] {
            let base = if ring == 1 { base } else { 0 };
            set_up(
                &front_end,
                &guest,
                &memory,
                ring,
                base,
                &kicks[ring],
                &calls[ring],
            );
        }
        guest.rings[1].add(&[Buffer::readable(packet, 72)]);
        kicks[1].write(1).unwrap();
        while guest.rings[1].take_used().is_none() {
            assert!(signalled(&calls[1]));
        }
        assert_eq!(network.received().unwrap().0, [0; 60]);
        for ring in [0, 1] {
            front_end.get_vring_base(ring).unwrap();
        }
    }
    assert_eq!(network.resets().len(), 2, "each start is one");
}

#[test]
fn a_stopped_ring_is_resumed_where_it_was() {
    let (mut guest, memory) = rings();
    let (mut front_end, _server) = front_end();
    share(&front_end, &memory);
    let (kick, call) = (event(), event());
    let room = guest.alloc(8);
    start(&mut front_end, &guest, &memory, 0, &kick, &call);
    for _ in 0..3 {
        guest.rings[0].add(&[Buffer::writable(room, 8)]);
    }
    kick.write(1).unwrap();
    let mut used = 0;
    while used < 3 {
        used += std::iter::from_fn(|| guest.rings[0].take_used()).count();
        assert!(used == 3 || signalled(&call));
    }
    assert_eq!(front_end.get_vring_base(0).unwrap(), 3);
    // What becomes available meanwhile waits.
    guest.rings[0].add(&[Buffer::writable(room, 8)]);
    kick.write(1).unwrap();
    assert!(guest.rings[0].take_used().is_none());
    start(&mut front_end, &guest, &memory, 3, &kick, &call);
    while guest.rings[0].take_used().is_none() {
        assert!(signalled(&call));
    }
}

#[test]
fn a_call_descriptor_exchanged_while_running_is_signalled_at_once() {
    let (mut guest, memory) = rings();
    let (mut front_end, _server) = front_end();
    share(&front_end, &memory);
    let (kick, first) = (event(), event());
    start(&mut front_end, &guest, &memory, 0, &kick, &first);
    let second = event();
    front_end.set_vring_call(0, &second).unwrap();
    assert!(signalled(&second), "an interrupt may have been missed");
    let room = guest.alloc(8);
    assert!(guest.rings[0].take_used().is_none());
    guest.rings[0].add(&[Buffer::writable(room, 8)]);
    kick.write(1).unwrap();
    assert!(signalled(&second));
    assert!(guest.rings[0].take_used().is_some());
}

#[test]
fn new_memory_while_running_is_used_from_then_on() {
    let (mut guest, memory) = rings();
    let (mut front_end, _server) = front_end();
    share(&front_end, &memory);
    let (kick, call) = (event(), event());
    start(&mut front_end, &guest, &memory, 0, &kick, &call);
    // The same rings are elsewhere now: nothing of the old memory is touched any more.
    let other = ram();
    share(&front_end, &other);
    let room = guest.alloc(8);
    guest.rings[0].add(&[Buffer::writable(room, 8)]);
    kick.write(1).unwrap();
    assert_eq!(front_end.get_vring_base(0).unwrap(), 0);
    assert!(guest.rings[0].take_used().is_none());
}

#[test]
fn a_front_end_that_hangs_up_ends_the_server() {
    let (front_end, server) = front_end();
    drop(front_end);
    assert!(finished(&server));
}

#[test]
fn stopping_the_server_hangs_up() {
    let (front_end, server) = front_end();
    server.stop();
    assert!(front_end.get_features().is_err());
}

/// Unsealed memory could be truncated under our mapping; too short a file is truncated already.
#[test]
fn memory_that_could_vanish_is_refused() {
    let unsealed = File::from(memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap());
    unsealed.set_len(1 << 20).unwrap();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let short = File::from(memfd_create("short", flags).unwrap());
    short.set_len(4096).unwrap();
    rustix::fs::fcntl_add_seals(&short, rustix::fs::SealFlags::SHRINK).unwrap();
    let regular = tempfile::tempfile().unwrap();
    regular.set_len(1 << 20).unwrap();
    for file in [unsealed, short, regular] {
        let (front_end, server) = front_end();
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: 1 << 20,
            userspace_addr: 0x1000_0000,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        assert!(front_end.set_mem_table(&[region]).is_err());
        assert!(finished(&server));
    }
}

#[test]
fn rings_that_are_not_in_memory_are_refused() {
    let (guest, memory) = rings();
    let config = guest.configs()[0];
    for wrong in [0, 0x10, !15] {
        let (front_end, server) = front_end();
        share(&front_end, &memory);
        front_end.set_vring_num(0, config.size).unwrap();
        let addresses = VringConfigData {
            queue_max_size: config.size,
            queue_size: config.size,
            flags: 0,
            desc_table_addr: wrong,
            used_ring_addr: wrong,
            avail_ring_addr: wrong,
            log_addr: None,
        };
        assert!(front_end.set_vring_addr(0, &addresses).is_err());
        assert!(finished(&server));
    }
}
