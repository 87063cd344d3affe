//! A real Linux on a real QEMU finds our devices behind vhost-user.
//!
//! Needs `BANTAM_TEST_KERNEL` (an x86_64 ELF kernel with the PVH note and virtio-mmio, block, vsock and
//! hw_random drivers built in), `qemu-system-x86_64`, `musl-gcc` and `cpio`; says so where they are
//! missing.
#![cfg(all(feature = "vhost-user", target_os = "linux", target_arch = "x86_64"))]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bantam_virtio::vhost_user::{Server, serve};
use bantam_virtio::{BlockDevice, RngDevice, VirtioDevice, VsockDevice};

/// Kills QEMU when the test fails.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Builds the initramfs in `dir`; None where the tools are missing.
fn initramfs(dir: &Path) -> Option<()> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/guest/init.c");
    let compiled = Command::new("musl-gcc")
        .args(["-static", "-O2", "-o", "init", source])
        .current_dir(dir)
        .status()
        .ok()?;
    assert!(compiled.success());
    let packed = Command::new("sh")
        .args(["-c", "echo init | cpio -o -H newc --quiet > initramfs"])
        .current_dir(dir)
        .status()
        .ok()?;
    assert!(packed.success());
    Some(())
}

fn attach(
    qemu: &mut Command,
    id: &str,
    device: impl VirtioDevice + 'static,
    model: &str,
) -> (Server, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty()).unwrap();
    qemu.arg("-chardev")
        .arg(format!("socket,id={id},fd={}", theirs.as_raw_fd()))
        .arg("-device")
        .arg(format!("{model},chardev={id}"));
    (serve(Box::new(device), ours).unwrap(), theirs)
}

#[test]
fn linux_on_qemu_uses_disk_entropy_and_sockets() {
    let Some(kernel) = std::env::var_os("BANTAM_TEST_KERNEL") else {
        println!("skipped: BANTAM_TEST_KERNEL is not set");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    if initramfs(dir.path()).is_none() {
        println!("skipped: no musl-gcc or cpio");
        return;
    }
    let bytes: Vec<u8> = (0..32_u32 << 20).map(|i| (i ^ i >> 9) as u8).collect();
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    let sum = bytes.iter().fold(0_u64, |sum, &byte| {
        sum.wrapping_mul(31).wrapping_add(byte.into())
    });

    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args([
        "-M",
        "microvm,x-option-roms=off,rtc=off,isa-serial=on,acpi=off,memory-backend=mem0",
        "-object",
        "memory-backend-memfd,id=mem0,size=256M,share=on",
        "-m",
        "256",
        "-accel",
        "tcg",
        "-cpu",
        "max",
        "-global",
        "virtio-mmio.force-legacy=false",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-serial",
        "stdio",
        "-append",
        "console=ttyS0 quiet reboot=t panic=-1 rdinit=/init",
    ])
    .arg("-kernel")
    .arg(kernel)
    .arg("-initrd")
    .arg(dir.path().join("initramfs"))
    .stdin(Stdio::null());
    let (device, vsock) = VsockDevice::new(3).unwrap();
    let disk = BlockDevice::new(file, true, "root").unwrap();
    let servers = [
        attach(&mut qemu, "c0", device, "vhost-user-vsock-device"),
        attach(&mut qemu, "c1", disk, "vhost-user-blk,num-queues=1"),
        attach(&mut qemu, "c2", RngDevice::new(), "vhost-user-rng"),
    ];
    let listener = vsock.listen(1024).unwrap();
    let start = Instant::now();
    let mut qemu = match qemu.spawn() {
        Ok(child) => Qemu(child),
        Err(error) => {
            println!("skipped: no qemu-system-x86_64: {error}");
            return;
        }
    };
    // Only QEMU may hold the other ends now, or nobody would notice that it went.
    let servers = servers.map(|(server, _theirs)| server);

    let mut control = listener.accept_timeout(Duration::from_secs(60)).unwrap();
    println!("hello after {:?}", start.elapsed());
    let mut hello = [0; 23];
    control.read_exact(&mut hello).unwrap();
    assert_eq!(
        String::from_utf8_lossy(&hello),
        format!("hello {sum:016x}\n")
    );

    // Echo, with a half-close.
    for _ in 0..3 {
        let begun = Instant::now();
        let mut echo = vsock.connect(1025).unwrap();
        echo.write_all(b"eping").unwrap();
        echo.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        echo.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "ping");
        println!("connect, echo, end: {:?}", begun.elapsed());
    }

    // Bytes to the guest.
    let begun = Instant::now();
    let mut sink = vsock.connect(1025).unwrap();
    sink.write_all(b"r").unwrap();
    let block = vec![0x5a; 1 << 20];
    for _ in 0..256 {
        sink.write_all(&block).unwrap();
    }
    sink.shutdown(Shutdown::Write).unwrap();
    let mut count = [0; 8];
    sink.read_exact(&mut count).unwrap();
    assert_eq!(u64::from_le_bytes(count), 256 << 20);
    println!("256 MiB to the guest: {:?}", begun.elapsed());

    // Bytes from the guest, with a connection that nobody reads beside it.
    let mut idle = vsock.connect(1025).unwrap();
    idle.write_all(b"s").unwrap();
    let begun = Instant::now();
    let mut source = vsock.connect(1025).unwrap();
    source.write_all(b"s").unwrap();
    let mut received = 0;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match source.read(&mut buffer).unwrap() {
            0 => break,
            n => received += n,
        }
    }
    assert_eq!(received, 256 << 20);
    println!("256 MiB from the guest: {:?}", begun.elapsed());
    drop(idle);

    // A port where nobody listens.
    let mut refused = vsock.connect(9).unwrap();
    assert_eq!(refused.read(&mut [0; 1]).unwrap(), 0);

    // The end: the guest hears ours, says goodbye and powers off.
    control.shutdown(Shutdown::Write).unwrap();
    let mut bye = String::new();
    control.read_to_string(&mut bye).unwrap();
    assert_eq!(bye, "bye\n");
    assert!(qemu.0.wait().unwrap().success());
    for server in servers {
        server.stop();
    }
}
