//! Archive formats and compression.

use std::io::Write;

use bantam_image::ResolveOptions;

use crate::common::tarball::{GNU, USTAR, V7};
use crate::common::{Entry, Layout, Tar, apply, digest, erofs::Files, gzip};

/// Octal, 11 digits and a blank.
fn octal(n: u64) -> Vec<u8> {
    format!("{n:011o} ").into_bytes()
}

#[test]
fn v7_headers_and_their_directories_are_read() {
    let layer = Tar::new()
        .entry(&Entry {
            magic: V7,
            ..Entry::new(0, "dir/")
        })
        .entry(&Entry {
            magic: V7,
            data: b"x".to_vec(),
            ..Entry::new(0, "dir/f")
        })
        .entry(&Entry {
            magic: V7,
            link: b"dir/f".to_vec(),
            ..Entry::new(b'1', "h")
        });
    let files = apply(&[layer]).unwrap();
    assert!(files["dir"].is_dir());
    assert_eq!(files["h"].nid, files["dir/f"].nid);
}

#[test]
fn posix_prefixes_lengthen_names_and_gnu_headers_have_none() {
    let layer = Tar::new()
        .entry(&Entry {
            prefix: b"some/prefix".to_vec(),
            ..Entry::new(b'0', "f")
        })
        .entry(&Entry {
            magic: GNU,
            patches: vec![(345, octal(1_700_000_000))],
            ..Entry::new(b'0', "g")
        });
    let files = apply(&[layer]).unwrap();
    assert!(files.contains_key("some/prefix/f"));
    assert!(
        files.contains_key("g"),
        "GNU keeps the access time where POSIX has the prefix"
    );
    let old_go = Entry {
        magic: GNU,
        prefix: b"some/prefix".to_vec(),
        ..Entry::new(b'0', "f")
    };
    assert!(
        apply(&[Tar::new().entry(&old_go)])
            .unwrap()
            .contains_key("some/prefix/f")
    );
}

#[test]
fn xstar_headers_keep_times_behind_a_shorter_prefix() {
    let prefix = [b'p'; 131];
    let star = Entry {
        prefix: prefix.to_vec(),
        patches: vec![(476, octal(1)), (488, octal(2)), (508, b"tar\0".to_vec())],
        ..Entry::new(b'0', "f")
    };
    let files = apply(&[Tar::new().entry(&star)]).unwrap();
    assert!(files.contains_key(&format!("{}/f", "p".repeat(131))));
}

#[test]
fn signed_checksums_are_accepted_and_wrong_ones_are_not() {
    let sun = Entry {
        signed_checksum: true,
        ..Entry::new(b'0', b"caf\xe9")
    };
    assert!(
        apply(&[Tar::new().entry(&sun)])
            .unwrap()
            .contains_key("caf\\xe9")
    );
    let mut bad = Tar::new().file("a", "x");
    bad.0[0] = b'b';
    let error = apply(&[bad]).unwrap_err().to_string();
    assert!(error.contains("checksum"), "{error}");
}

#[test]
fn gnu_long_names_are_for_the_next_entry_only() {
    let name = "n".repeat(200);
    let layer = Tar::new()
        .gnu_long(b'L', &name)
        .file("short", "1")
        .file("second", "2");
    let files = apply(&[layer]).unwrap();
    assert_eq!(files[&name].text(), "1");
    assert_eq!(files["second"].text(), "2");
}

#[test]
fn a_pax_header_is_for_the_next_file_and_not_for_a_long_name_between() {
    // Taken for the long name's size, "3" would cut it to three bytes and misread all that follows.
    let name = "n".repeat(150);
    let data = b"abc".to_vec();
    let layer = Tar::new()
        .pax(&[("size", b"3"), ("mtime", b"5")])
        .gnu_long(b'L', &name)
        .entry(&Entry {
            size: Some(0),
            data,
            ..Entry::new(b'0', "short")
        })
        .file("next", "y");
    let files = apply(&[layer]).unwrap();
    assert_eq!(files[&name].text(), "abc");
    assert_eq!(files[&name].mtime, (5, 0));
    assert_eq!(files["next"].text(), "y");
}

#[test]
fn a_pax_size_beats_the_headers() {
    // The header claims a size under which the data hides an entry of its own.
    let hidden = Tar::new().file("smuggled", "").0;
    let layer = Tar::new()
        .pax(&[("size", hidden.len().to_string().as_bytes())])
        .entry(&Entry {
            size: Some(0),
            data: hidden.clone(),
            ..Entry::new(b'0', "carrier")
        });
    let files = apply(&[layer]).unwrap();
    assert!(!files.contains_key("smuggled"));
    assert_eq!(files["carrier"].data, hidden);
}

#[test]
fn global_pax_headers_change_nothing() {
    let layer = Tar::new()
        .global(&[
            ("comment", b"deadbeef"),
            ("path", b"evil"),
            ("size", b"1"),
            ("uid", b"9"),
        ])
        .file("a", "xyz")
        .file("b", "");
    let files = apply(&[layer]).unwrap();
    assert_eq!(files["a"].text(), "xyz");
    assert_eq!((files.len(), files["a"].uid), (3, 0));
}

#[test]
fn only_files_have_data_whatever_the_header_says() {
    let layer = Tar::new()
        .entry(&Entry {
            size: Some(5000),
            ..Entry::new(b'5', "d")
        })
        .entry(&Entry {
            size: Some(5000),
            link: b"x".to_vec(),
            ..Entry::new(b'2', "s")
        })
        .file("f", "1")
        .entry(&Entry {
            size: Some(5000),
            link: b"f".to_vec(),
            ..Entry::new(b'1', "h")
        })
        .pax(&[("size", b"4096")])
        .entry(&Entry::new(b'6', "p"))
        .file("last", "2");
    let files = apply(&[layer]).unwrap();
    assert_eq!(files["last"].text(), "2");
    assert_eq!(files.len(), 7);
}

#[test]
fn a_file_named_like_a_directory_is_one_only_without_contents() {
    let named = |flag, data: &[u8]| {
        Tar::new()
            .entry(&Entry {
                data: data.to_vec(),
                ..Entry::new(flag, "x/")
            })
            .file("next", "")
    };
    for flag in [b'0', 0] {
        assert!(apply(&[named(flag, b"")]).unwrap()["x"].is_dir());
        let error = apply(&[named(flag, b"data")]).unwrap_err().to_string();
        assert!(error.contains("directory with contents"), "{error}");
    }
}

#[test]
fn contiguous_files_dump_directories_and_volume_labels_are_understood() {
    let layer = Tar::new()
        .entry(&Entry {
            data: b"x".to_vec(),
            ..Entry::new(b'V', "label")
        })
        .entry(&Entry {
            data: b"x".to_vec(),
            ..Entry::new(b'7', "contiguous")
        })
        .entry(&Entry {
            data: b"Yname\0\0".to_vec(),
            magic: GNU,
            ..Entry::new(b'D', "dumped/")
        })
        .file("f", "y");
    let files = apply(&[layer]).unwrap();
    assert_eq!(files["contiguous"].text(), "x");
    assert!(files["dumped"].is_dir());
    assert!(!files.contains_key("label"));
    assert_eq!(files["f"].text(), "y");
}

#[test]
fn unknown_entry_types_are_errors_that_name_them() {
    let error = apply(&[Tar::new().entry(&Entry::new(b'Z', "odd"))])
        .unwrap_err()
        .to_string();
    assert!(error.contains("odd") && error.contains("'Z'"), "{error}");
}

/// "head", a hole, "tail" at the very end of 10000 bytes.
fn check_sparse(files: &Files, name: &str) {
    let node = &files[name];
    let mut want = vec![0; 10_000];
    want[..4].copy_from_slice(b"head");
    want[9996..].copy_from_slice(b"tail");
    assert_eq!(node.size, 10_000, "{name}");
    assert!(node.data == want, "{name}");
    assert_eq!(files["after"].text(), "after");
}

#[test]
fn all_four_sparse_formats_are_read() {
    let data = b"headtail".to_vec();
    let mut old = vec![];
    for (at, (offset, len)) in [(386, (0, 4)), (410, (9996, 4))] {
        old.push((at, [octal(offset), octal(len)].concat()));
    }
    old.push((483, octal(10_000)));
    let old = Entry {
        magic: GNU,
        data: data.clone(),
        patches: old,
        ..Entry::new(b'S', "old")
    };
    check_sparse(
        &apply(&[Tar::new().entry(&old).file("after", "after")]).unwrap(),
        "old",
    );

    let v00 = Tar::new()
        .pax(&[
            ("GNU.sparse.size", b"10000"),
            ("GNU.sparse.numblocks", b"2"),
            ("GNU.sparse.offset", b"0"),
            ("GNU.sparse.numbytes", b"4"),
            ("GNU.sparse.offset", b"9996"),
            ("GNU.sparse.numbytes", b"4"),
        ])
        .file("v00", &data)
        .file("after", "after");
    check_sparse(&apply(&[v00]).unwrap(), "v00");

    let v01 = Tar::new()
        .pax(&[
            ("GNU.sparse.size", b"10000"),
            ("GNU.sparse.numblocks", b"2"),
            ("GNU.sparse.map", b"0,4,9996,4"),
            ("GNU.sparse.name", b"dir/v01"),
        ])
        .file("GNUSparseFile.1/v01", &data)
        .file("after", "after");
    check_sparse(&apply(&[v01]).unwrap(), "dir/v01");

    let mut mapped = b"2\n0\n4\n9996\n4\n".to_vec();
    mapped.resize(512, 0);
    mapped.extend_from_slice(&data);
    let v10 = Tar::new()
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.realsize", b"10000"),
            ("GNU.sparse.name", b"v10"),
        ])
        .file("GNUSparseFile.1/v10", &mapped)
        .file("after", "after");
    check_sparse(&apply(&[v10]).unwrap(), "v10");
}

#[test]
fn small_files_that_are_all_hole_are_zeros() {
    let hole = |name: &str| {
        Tar::new()
            .pax(&[
                ("GNU.sparse.size", b"100"),
                ("GNU.sparse.numblocks", b"0"),
                ("GNU.sparse.map", b""),
            ])
            .file(name, "")
    };
    let mut layer = Tar::new().file("data", "x");
    layer.0.extend(hole("a").0);
    layer.0.extend(hole("last").0);
    let files = apply(&[layer]).unwrap();
    assert_eq!(files["a"].data, [0; 100]);
    assert_eq!(files["last"].data, [0; 100]);
}

#[test]
fn old_sparse_headers_continue_in_further_blocks() {
    let extents: Vec<(u64, u64)> = (0..60).map(|i| (i * 1000, 1)).collect();
    let pair = |(offset, len): &(u64, u64)| [octal(*offset), octal(*len)].concat();
    let mut patches: Vec<(usize, Vec<u8>)> = extents[..4]
        .iter()
        .enumerate()
        .map(|(i, e)| (386 + 24 * i, pair(e)))
        .collect();
    patches.push((482, vec![1]));
    patches.push((483, octal(60_000)));
    let mut data = Vec::new();
    for (i, chunk) in extents[4..].chunks(21).enumerate() {
        let mut block: Vec<u8> = chunk.iter().flat_map(pair).collect();
        block.resize(512, 0);
        block[504] = u8::from((i + 1) * 21 < 56);
        data.extend(block);
    }
    let stored: Vec<u8> = (1..=60).collect();
    data.extend(&stored);
    let entry = Entry {
        magic: GNU,
        data,
        size: Some(60),
        patches,
        ..Entry::new(b'S', "s")
    };
    let files = apply(&[Tar::new().entry(&entry).file("after", "after")]).unwrap();
    assert_eq!(files["s"].size, 60_000);
    assert!((0..60).all(|i| files["s"].data[i * 1000] == stored[i]));
    assert_eq!(files["after"].text(), "after");
}

#[test]
fn a_large_sparse_file_takes_no_space_on_the_host() {
    use std::os::unix::fs::MetadataExt;
    let layer = Tar::new()
        .pax(&[
            ("GNU.sparse.size", b"17179869184"),
            ("GNU.sparse.numblocks", b"1"),
            ("GNU.sparse.map", b"17179869180,4"),
        ])
        .file("s", "tail")
        .finish();
    let mut layout = Layout::new();
    layout.image(&[layer]);
    let (image, _store) = layout.resolve(&ResolveOptions::default()).unwrap();
    let meta = std::fs::metadata(&image.rootfs).unwrap();
    assert!(meta.len() > 16 << 30);
    assert!(
        meta.blocks() * 512 < 1 << 20,
        "{} bytes allocated",
        meta.blocks() * 512
    );
}

#[test]
fn malformed_sparse_maps_are_errors() {
    let pax = |map: &'static [u8], size: &'static [u8]| {
        Tar::new()
            .pax(&[
                ("GNU.sparse.size", size),
                ("GNU.sparse.numblocks", b"1"),
                ("GNU.sparse.map", map),
            ])
            .file("s", "12345678")
    };
    for layer in [
        pax(b"0,4,2,4", b"100"),
        pax(b"4,4,0,4", b"100"),
        pax(b"0,8", b"7"),
        pax(b"0,4", b"100"),
        pax(b"0,18446744073709551615", b"100"),
        pax(b"18446744073709551615,8", b"18446744073709551615"),
        pax(b"0,4,4", b"100"),
        pax(b"x", b"100"),
        Tar::new()
            .pax(&[("GNU.sparse.map", b"0,8")])
            .file("s", "12345678"),
        Tar::new()
            .pax(&[
                ("GNU.sparse.major", b"1"),
                ("GNU.sparse.minor", b"0"),
                ("GNU.sparse.realsize", b"9"),
            ])
            .file("s", "999999999999\n"),
        Tar::new()
            .pax(&[
                ("GNU.sparse.major", b"1"),
                ("GNU.sparse.minor", b"0"),
                ("GNU.sparse.realsize", b"9"),
            ])
            .file("s", vec![b'1'; 512]),
        Tar::new().entry(&Entry {
            magic: USTAR,
            ..Entry::new(b'S', "s")
        }),
    ] {
        assert!(apply(&[layer]).is_err());
    }
}

#[test]
fn an_archive_may_lack_its_end_mark_but_not_its_contents() {
    let whole = Tar::new().file("a", vec![1; 3000]).0;
    let try_layer = |bytes: &[u8]| {
        let mut layout = Layout::new();
        layout.image(&[bytes.to_vec()]);
        layout.files()
    };
    assert!(try_layer(&whole).is_ok());
    // The contents are complete, their padding is not there: what umoci's `insert` writes.
    assert!(try_layer(&whole[..512 + 3000]).is_ok());
    for cut in [1, 511, 513, 2000, 3500, whole.len() - 1] {
        let error = try_layer(&whole[..cut]).unwrap_err().to_string();
        assert!(error.contains("ends"), "cut at {cut}: {error}");
    }
    let mut lone = vec![0; 512];
    lone.extend(&whole);
    assert!(
        try_layer(&lone)
            .unwrap_err()
            .to_string()
            .contains("zero block")
    );
    assert!(try_layer(&Tar::new().pax(&[("path", b"x")]).finish()).is_err());
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(bytes, 1).unwrap()
}

/// Stores `blob` as a layer whose uncompressed form is `plain`, under a media type that need not be true.
fn compressed(blob: Vec<u8>, plain: &[u8]) -> Result<Files, bantam_image::Error> {
    let mut layout = Layout::new();
    let id = digest(plain);
    let manifest = layout.manifest(&[(blob, id.clone())], &Layout::config(&[id]));
    layout.add(manifest);
    layout.files()
}

#[test]
fn compression_is_told_by_the_bytes() {
    let plain = Tar::new().file("a", "x").finish();
    for blob in [plain.clone(), gzip(&plain), zstd(&plain)] {
        assert_eq!(compressed(blob, &plain).unwrap()["a"].text(), "x");
    }
}

#[test]
fn all_gzip_members_and_all_zstd_frames_are_read() {
    let plain = Tar::new().file("a", vec![3; 5000]).file("b", "y").finish();
    let (one, two) = plain.split_at(2222);
    assert_eq!(
        compressed([gzip(one), gzip(two)].concat(), &plain).unwrap()["b"].text(),
        "y"
    );
    let mut skippable = 0x184d_2a50_u32.to_le_bytes().to_vec();
    skippable.extend([4, 0, 0, 0, 1, 2, 3, 4]);
    for blob in [
        [zstd(one), zstd(two)].concat(),
        [zstd(one), skippable.clone(), zstd(two), skippable.clone()].concat(),
        [skippable, zstd(&plain)].concat(),
    ] {
        assert_eq!(compressed(blob, &plain).unwrap()["b"].text(), "y");
    }
}

/// As estargz stores a layer: a gzip member for each of `parts`, and one without contents that says where the table of
/// contents is.
fn estargz(parts: &[Tar]) -> (Vec<u8>, Vec<u8>) {
    let (mut blob, mut plain) = (Vec::new(), Vec::new());
    let mut toc_at = 0;
    for (i, part) in parts.iter().enumerate() {
        let mut bytes = part.0.clone();
        if i + 1 == parts.len() {
            toc_at = blob.len();
            bytes.extend([0; 1024]);
        }
        blob.extend(gzip(&bytes));
        plain.extend(bytes);
    }
    let mut extra = b"SG\x16\0".to_vec();
    extra.extend(format!("{toc_at:016x}STARGZ").as_bytes());
    let footer = flate2::GzBuilder::new()
        .extra(extra)
        .write(Vec::new(), flate2::Compression::none());
    blob.extend(footer.finish().unwrap());
    (blob, plain)
}

#[test]
fn the_marks_of_lazily_pulled_layers_are_ordinary_files() {
    let toc = |n: u8| format!("{{\"version\":1,\"entries\":[],\"layer\":{n}}}");
    let (one, one_plain) = estargz(&[
        Tar::new().file(".prefetch.landmark", [0xf]),
        Tar::new().dir("bin/").file("bin/a", vec![5; 10_000]),
        Tar::new().file("stargz.index.json", toc(1)),
    ]);
    let (two, two_plain) = estargz(&[
        Tar::new().file(".no.prefetch.landmark", [0xf]),
        Tar::new().file("bin/b", "two"),
        Tar::new().file("stargz.index.json", toc(2)),
    ]);
    assert!(
        one.ends_with(&[0; 4]),
        "the footer is a member without contents"
    );
    // Whatever else is between them: the last layer is an ordinary one that removes a mark.
    let three = Tar::new().whiteout(".prefetch.landmark").finish();
    let layers = [
        (one, digest(&one_plain)),
        (two, digest(&two_plain)),
        (three.clone(), digest(&three)),
    ];
    let mut layout = Layout::new();
    let ids: Vec<_> = layers.iter().map(|(_, id)| id.clone()).collect();
    let manifest = layout.manifest(&layers, &Layout::config(&ids));
    layout.add(manifest);
    let files = layout.files().unwrap();
    assert_eq!(files["stargz.index.json"].text(), toc(2));
    assert_eq!(files[".no.prefetch.landmark"].data, [0xf]);
    assert!(!files.contains_key(".prefetch.landmark"));
    assert_eq!(files["bin/a"].data, vec![5; 10_000]);
    assert_eq!(files["bin/b"].text(), "two");
}

#[test]
fn truncated_compression_is_an_error() {
    let plain = Tar::new()
        .file("a", (0..9000).map(|i| (i * i) as u8).collect::<Vec<_>>())
        .finish();
    for blob in [gzip(&plain), zstd(&plain)] {
        for cut in [5, 20, blob.len() / 2, blob.len() - 1] {
            let error = compressed(blob[..cut].to_vec(), &plain)
                .unwrap_err()
                .to_string();
            assert!(error.starts_with("layer sha256:"), "{error}");
        }
    }
}

#[test]
fn what_follows_the_archives_end_counts_for_the_diff_id() {
    let mut plain = Tar::new().file("a", "x").finish();
    plain.extend(vec![0; 10 * 1024]);
    plain.extend(b"trailing garbage");
    assert_eq!(compressed(gzip(&plain), &plain).unwrap()["a"].text(), "x");
    assert!(compressed(gzip(&plain), &plain[..plain.len() - 1]).is_err());
}

#[test]
fn an_empty_blob_is_an_empty_layer() {
    assert_eq!(compressed(Vec::new(), b"").unwrap().len(), 1);
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(b"").unwrap();
    assert_eq!(compressed(gz.finish().unwrap(), b"").unwrap().len(), 1);
}
