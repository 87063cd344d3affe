//! One or two layers, as they come, applied and written as EROFS.
//!
//! The first byte's bits: 1, two layers; 2, leave checksums alone; 4, the first layer alone must give the same image
//! as the first and an empty one. The second byte says where the second layer begins, in blocks of an archive.

use std::io::Write;

use crate::image::{LIMITS, check, memory_file};
use crate::tarball::{Entry, GNU, Tar, V7};

const BLOCK: usize = 512;

pub fn run(data: &[u8]) {
    let [flags, cut, rest @ ..] = data else {
        return;
    };
    let mut rest = rest.to_vec();
    if flags & 2 == 0 {
        for block in rest.chunks_exact_mut(BLOCK) {
            repair(block);
        }
    }
    let cut = (usize::from(*cut) * BLOCK).min(rest.len());
    let (lower, upper) = rest.split_at(cut);
    let one = [&rest[..]];
    let two = [lower, upper];
    let layers: &[&[u8]] = if flags & 1 == 0 { &one } else { &two };
    let Ok((image, summary)) =
        bantam_image::fuzzing::apply(layers, LIMITS, memory_file(), memory_file())
    else {
        return;
    };
    assert_eq!(image.metadata().expect("fstat").len(), summary.bytes);
    let files = check(&image);
    for path in files.keys() {
        // AUFS's names and whiteouts are orders, never files.
        let hidden = path.split('/').any(|name| name.starts_with(".wh."));
        assert!(!hidden, "a file named {path:?}");
    }
    if flags & 4 != 0 && flags & 1 == 0 {
        let again =
            bantam_image::fuzzing::apply(&[&rest, &[]], LIMITS, memory_file(), memory_file());
        let (again, _) = again.expect("an empty layer on top of a good one");
        assert_eq!(check(&again), files, "an empty layer changed the image");
    }
}

/// Makes the checksum right where there is a header, so that mutations get past it.
fn repair(block: &mut [u8]) {
    if &block[257..262] != b"ustar" {
        return;
    }
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
    let text = format!("{sum:06o}\0 ");
    block[148..156].copy_from_slice(text.as_bytes());
}

pub fn seeds() -> Vec<Vec<u8>> {
    let device = |flag, name: &str| {
        let mut entry = Entry::new(flag, name);
        entry.device = (8, 1);
        entry
    };
    let mut old = Entry::new(b'0', "old");
    old.magic = V7;
    old.data = b"v7".to_vec();
    let mut gnu = Entry::new(b'0', "gnu");
    gnu.magic = GNU;
    let mut sparse = Entry::new(b'S', "sparse");
    sparse.magic = GNU;
    sparse.data = vec![1; 1024];
    let octal = |n: u32| format!("{n:011o}\0").into_bytes();
    let map = [octal(512), octal(512), octal(8192), octal(512)].concat();
    sparse.patches = vec![(386, map), (483, octal(16_384))];

    let lower = Tar::new()
        .dir("a/")
        .file("a/x", "one")
        .file("a/big", vec![7; 20_000])
        .hard_link("a/y", "a/x")
        .symlink("b", "a")
        .file("b/through", "link")
        .symlink("loop", "loop")
        .file("/../../etc/passwd", "root")
        .entry(&device(b'3', "dev/c"))
        .entry(&device(b'4', "dev/b"))
        .entry(&device(b'6', "dev/p"))
        .entry(&old)
        .entry(&gnu)
        .finish();
    let upper = Tar::new()
        .whiteout("a/x")
        .opaque("b")
        .hard_link("again", "a/y")
        .dir("b")
        .file("a", "now a file")
        .finish();
    let attributes = Tar::new()
        .pax(&[
            ("SCHILY.xattr.user.k", b"v\0w"),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("path", b"long/name"),
            ("size", b"3"),
            ("mtime", b"-1.5"),
            ("uid", b"4294967294"),
        ])
        .file("short", "abc")
        .global(&[("comment", b"hello")])
        .gnu_long(b'L', "long/".repeat(50))
        .file("x", "y")
        .gnu_long(b'K', "target/".repeat(40))
        .symlink("s", "t")
        .finish();
    let sparse_pax = Tar::new()
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"holes"),
            ("GNU.sparse.realsize", b"9000"),
        ])
        .file("f", {
            let mut map = b"1\n8192\n5\n".to_vec();
            map.resize(BLOCK, 0);
            map.extend(b"hello");
            map
        })
        .pax(&[
            ("GNU.sparse.size", b"9000"),
            ("GNU.sparse.numblocks", b"1"),
            ("GNU.sparse.map", b"4096,5"),
        ])
        .file("g", "hello")
        .finish();
    let sparse_gnu = Tar::new().entry(&sparse).finish();

    let blocks = (lower.len() / BLOCK).min(255) as u8;
    let both = [&[1, blocks][..], &lower, &upper].concat();
    let alone = |bytes: &[u8]| [&[4, 0][..], bytes].concat();
    vec![
        both,
        alone(&lower),
        alone(&upper),
        alone(&attributes),
        alone(&sparse_pax),
        alone(&sparse_gnu),
        [&[2, 0][..], &gzip(&lower)].concat(),
        [
            &[2, 0][..],
            &zstd::encode_all(&lower[..], 1).unwrap_or_default(),
        ]
        .concat(),
    ]
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("writing to memory");
    encoder.finish().expect("writing to memory")
}
