//! Every device does its work over every transport.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use bantam_virtio::testing::{Buffer, Guest, INDIRECT, Transport};
use bantam_virtio::{BlockDevice, RngDevice, VsockDevice};

/// A disk of 64 sectors; sector n is filled with n.
fn disk(read_only: bool) -> (BlockDevice, File) {
    let file = tempfile::tempfile().unwrap();
    for sector in 0..64_u8 {
        file.write_all_at(&[sector; 512], u64::from(sector) * 512)
            .unwrap();
    }
    let device = BlockDevice::new(file.try_clone().unwrap(), read_only, "disk-0").unwrap();
    (device, file)
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

/// Performs a block request; gives the status.
fn block(guest: &mut Guest, kind: u32, sector: u64, data: &[Buffer]) -> (u8, u32) {
    let header = guest.place(&header(kind, sector));
    let status = guest.place(&[0xff]);
    let mut buffers = vec![Buffer::readable(header, 16)];
    buffers.extend(data);
    buffers.push(Buffer::writable(status, 1));
    let written = guest.request(0, &buffers);
    (guest.read(status, 1)[0], written)
}

#[test]
fn a_disk_reads_what_its_file_holds() {
    for &transport in Transport::ALL {
        let (device, _file) = disk(true);
        let mut guest = Guest::start(transport, device);
        let mut capacity = [0; 8];
        guest.read_config(0, &mut capacity);
        assert_eq!(u64::from_le_bytes(capacity), 64);
        let (a, b) = (guest.alloc(512), guest.alloc(1024));
        let data = [Buffer::writable(a, 512), Buffer::writable(b, 1024)];
        assert_eq!(block(&mut guest, 0, 7, &data), (0, 1537));
        assert_eq!(guest.read(a, 512), [7; 512]);
        assert_eq!(guest.read(b, 512), [8; 512]);
        assert_eq!(guest.read(b + 512, 512), [9; 512]);
    }
}

#[test]
fn a_disk_keeps_what_is_written() {
    for &transport in Transport::ALL {
        let (device, file) = disk(false);
        let mut guest = Guest::start(transport, device);
        let data = guest.place(&[0xab; 1024]);
        let data = [Buffer::readable(data, 1024)];
        assert_eq!(block(&mut guest, 1, 62, &data), (0, 1));
        assert_eq!(block(&mut guest, 4, 0, &[]), (0, 1));
        let mut bytes = [0; 1024];
        file.read_exact_at(&mut bytes, 62 * 512).unwrap();
        assert_eq!(bytes, [0xab; 1024]);
    }
}

#[test]
fn a_read_only_disk_refuses_every_kind_of_write() {
    for &transport in Transport::ALL {
        let (device, file) = disk(true);
        let mut guest = Guest::start(transport, device);
        let data = guest.place(&[0xab; 512]);
        let range = guest.place(&[0; 16]);
        assert_eq!(block(&mut guest, 1, 1, &[Buffer::readable(data, 512)]).0, 1);
        for discard in [11, 13] {
            let range = [Buffer::readable(range, 16)];
            assert_eq!(block(&mut guest, discard, 0, &range).0, 1);
        }
        let mut bytes = [0; 512];
        file.read_exact_at(&mut bytes, 512).unwrap();
        assert_eq!(bytes, [1; 512]);
    }
}

#[test]
fn a_lock_on_a_disk_ends_with_the_device() {
    let (device, file) = disk(false);
    // One open file, as in a child process that has not executed its program yet.
    file.try_lock().unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let other = File::options().write(true).open(path).unwrap();
    other.try_lock().unwrap_err();
    drop(device);
    other.try_lock().unwrap();
}

#[test]
fn a_disk_ends_where_its_file_does() {
    for &transport in Transport::ALL {
        let (device, file) = disk(false);
        let mut guest = Guest::start(transport, device);
        let room = guest.alloc(1024);
        let read = [Buffer::writable(room, 1024)];
        let write = [Buffer::readable(room, 1024)];
        for sector in [63, 64, u64::MAX / 512, u64::MAX] {
            assert_eq!(block(&mut guest, 0, sector, &read).0, 1, "{sector}");
            assert_eq!(block(&mut guest, 1, sector, &write).0, 1, "{sector}");
        }
        assert_eq!(block(&mut guest, 0, 62, &read).0, 0);
        assert_eq!(file.metadata().unwrap().len(), 64 * 512);
    }
}

#[test]
fn a_transfer_that_is_no_whole_number_of_sectors_fails() {
    let (device, _file) = disk(true);
    let mut guest = Guest::start(Transport::Direct, device);
    let room = guest.alloc(1024);
    for len in [1, 511, 513] {
        assert_eq!(block(&mut guest, 0, 0, &[Buffer::writable(room, len)]).0, 1);
    }
}

#[test]
fn a_disk_tells_its_serial_number() {
    let (device, _file) = disk(true);
    let mut guest = Guest::start(Transport::Mmio, device);
    let room = guest.alloc(20);
    assert_eq!(
        block(&mut guest, 8, 0, &[Buffer::writable(room, 20)]),
        (0, 21)
    );
    assert_eq!(&guest.read(room, 20), b"disk-0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn discarded_and_zeroed_sectors_read_as_zeroes() {
    let requests = [(11, 0_u32), (13, 0), (13, 1)];
    for (transport, (kind, flags)) in Transport::ALL
        .iter()
        .flat_map(|transport| requests.map(|request| (*transport, request)))
    {
        let (device, file) = disk(false);
        let mut guest = Guest::start(transport, device);
        let mut range = 8_u64.to_le_bytes().to_vec();
        range.extend(16_u32.to_le_bytes());
        range.extend(flags.to_le_bytes());
        let range = guest.place(&range);
        let (status, _) = block(&mut guest, kind, 0, &[Buffer::readable(range, 16)]);
        if status == 2 {
            println!("skipped: this file system cannot punch holes");
            continue;
        }
        assert_eq!(status, 0);
        let mut bytes = [0xff; 512];
        file.read_exact_at(&mut bytes, 8 * 512).unwrap();
        assert_eq!(bytes, [0; 512]);
        file.read_exact_at(&mut bytes, 24 * 512).unwrap();
        assert_eq!(bytes, [24; 512], "the sector after the range");
    }
}

#[test]
fn a_transfer_of_more_buffers_than_one_system_call_takes_is_complete() {
    let (device, _file) = disk(true);
    let mut guest = Guest::start(Transport::Direct, device);
    // 254 pieces and then the rest, from an indirect table longer than the ring.
    let room = guest.alloc(64 * 512);
    let header = guest.place(&header(0, 0));
    let status = guest.place(&[0xff]);
    let mut buffers = vec![Buffer::readable(header, 16)];
    buffers.extend((0..512).map(|i| Buffer::writable(room + i * 64, 64)));
    buffers.push(Buffer::writable(status, 1));
    let table = guest.alloc(16 * buffers.len() as u64);
    let last = buffers.len() - 1;
    for (i, buffer) in buffers.iter().enumerate() {
        let index = u16::try_from(i).unwrap();
        let next = u16::from(i != last);
        guest.rings[0].write_descriptor_at(table, index, *buffer, next, index + 1);
    }
    let len = 16 * u32::try_from(buffers.len()).unwrap();
    guest.rings[0].write_descriptor(0, Buffer::readable(table, len), INDIRECT, 0);
    guest.rings[0].publish(0);
    guest.rings[0].kick();
    assert_eq!(guest.wait_used(0), (0, 64 * 512 + 1));
    assert_eq!(guest.read(status, 1), [0]);
    for sector in 0..64 {
        let bytes = guest.read(room + sector * 512, 512);
        assert_eq!(bytes, [u8::try_from(sector).unwrap(); 512]);
    }
}

#[test]
fn a_disk_goes_on_after_a_reset() {
    for &transport in Transport::ALL {
        let (device, _file) = disk(true);
        let mut guest = Guest::start(transport, device);
        let room = guest.alloc(512);
        let data = [Buffer::writable(room, 512)];
        assert_eq!(block(&mut guest, 0, 3, &data).0, 0);
        guest.reset();
        guest.restart();
        assert_eq!(block(&mut guest, 0, 4, &data).0, 0);
        assert_eq!(guest.read(room, 512), [4; 512]);
    }
}

#[test]
fn entropy_fills_the_buffers_and_differs() {
    for &transport in Transport::ALL {
        let mut guest = Guest::start(transport, RngDevice::new());
        let (a, b) = (guest.alloc(32), guest.alloc(32));
        assert_eq!(guest.request(0, &[Buffer::writable(a, 32)]), 32);
        assert_eq!(guest.request(0, &[Buffer::writable(b, 32)]), 32);
        assert_ne!(guest.read(a, 32), [0; 32]);
        assert_ne!(guest.read(a, 32), guest.read(b, 32));
    }
}

#[test]
fn one_interrupt_serves_a_batch() {
    let mut guest = Guest::attach(Transport::Direct, Box::new(RngDevice::new()), 64);
    let room = guest.alloc(64);
    for _ in 0..32 {
        guest.rings[0].add(&[Buffer::writable(room, 64)]);
    }
    // Ask for an interrupt at the first one used, before the device starts.
    assert!(guest.rings[0].take_used().is_none());
    guest.activate(u64::MAX, &guest.configs());
    let mut interrupts = 0;
    let mut used = 0;
    while used < 32 {
        let deadline = std::time::Instant::now() + bantam_virtio::testing::PATIENCE;
        assert!(guest.wait_interrupt(0, deadline));
        interrupts += 1;
        while guest.rings[0].take_used().is_some() {
            used += 1;
        }
    }
    assert_eq!(interrupts, 1);
}

#[test]
fn the_guest_finds_its_cid() {
    for &transport in Transport::ALL {
        let (device, _vsock) = VsockDevice::new(42).unwrap();
        let mut guest = Guest::start(transport, device);
        let mut cid = [0xff; 16];
        guest.read_config(0, &mut cid);
        assert_eq!(cid[..8], 42_u64.to_le_bytes());
        assert_eq!(cid[8..], [0; 8], "bytes beyond the end are zero");
    }
}

#[test]
fn a_stopped_device_closes_its_streams() {
    let (device, vsock) = VsockDevice::new(3).unwrap();
    let mut stream = vsock.connect(1).unwrap();
    let listener = vsock.listen(1024).unwrap();
    let guest = Guest::start(Transport::Direct, device);
    drop(guest);
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    assert!(listener.accept().is_err());
    assert!(vsock.connect(1).is_err());
}
