//! Applying layers (OCI image-spec layer.md "Applying Changesets").

use crate::common::{Entry, Tar, apply, erofs::Files};

fn names(files: &Files) -> Vec<&str> {
    files
        .keys()
        .map(String::as_str)
        .filter(|n| !n.is_empty())
        .collect()
}

#[test]
fn a_whiteout_hides_a_lower_file() {
    let files = apply(&[
        Tar::new().file("a", "1").file("b", "2"),
        Tar::new().whiteout("a"),
    ])
    .unwrap();
    assert_eq!(names(&files), ["b"]);
}

#[test]
fn a_whiteout_spares_the_same_layers_file_wherever_it_stands() {
    let lower = || Tar::new().file("d/a", "old").file("d/b", "old");
    for upper in [
        Tar::new().file("d/a", "new").whiteout("d/a"),
        Tar::new().whiteout("d/a").file("d/a", "new"),
    ] {
        let files = apply(&[lower(), upper]).unwrap();
        assert_eq!(files["d/a"].text(), "new");
        assert_eq!(files["d/b"].text(), "old");
    }
}

#[test]
fn an_opaque_marker_hides_lower_entries_only_wherever_it_stands() {
    let lower = || {
        Tar::new()
            .dir_mode("d", 0o700)
            .file("d/old", "")
            .file("d/sub/old", "")
            .file("d/both", "old")
    };
    for upper in [
        Tar::new()
            .file("d/new", "n")
            .file("d/sub/new", "n")
            .file("d/both", "new")
            .opaque("d"),
        Tar::new()
            .opaque("d")
            .file("d/new", "n")
            .file("d/sub/new", "n")
            .file("d/both", "new"),
        Tar::new()
            .file("d/new", "n")
            .opaque("d")
            .file("d/sub/new", "n")
            .file("d/both", "new"),
    ] {
        let files = apply(&[lower(), upper]).unwrap();
        assert_eq!(
            names(&files),
            ["d", "d/both", "d/new", "d/sub", "d/sub/new"]
        );
        assert_eq!(files["d/both"].text(), "new");
        assert_eq!(
            files["d"].mode & 0o7777,
            0o700,
            "the directory itself stays"
        );
        assert_eq!(
            files["d/sub"].mode & 0o7777,
            0o755,
            "of the hidden directory nothing stays"
        );
    }
}

#[test]
fn a_whited_out_directory_takes_its_contents_along_and_comes_back_empty() {
    let lower = || {
        Tar::new()
            .dir_mode("d", 0o700)
            .file("d/old", "")
            .dir("d/e")
            .file("d/e/old", "")
    };
    let files = apply(&[lower(), Tar::new().whiteout("d")]).unwrap();
    assert_eq!(names(&files), [""; 0]);
    for upper in [
        Tar::new().whiteout("d").file("d/e/new", ""),
        Tar::new().file("d/e/new", "").whiteout("d"),
    ] {
        let files = apply(&[lower(), upper]).unwrap();
        assert_eq!(names(&files), ["d", "d/e", "d/e/new"]);
        assert_eq!(files["d"].mode & 0o7777, 0o755);
    }
    let files = apply(&[lower(), Tar::new().dir_mode("d", 0o711).whiteout("d")]).unwrap();
    assert_eq!(names(&files), ["d"]);
    assert_eq!(files["d"].mode & 0o7777, 0o711);
}

#[test]
fn a_whiteout_of_nothing_is_fine_and_creates_nothing() {
    let files = apply(&[
        Tar::new().file("a", ""),
        Tar::new()
            .whiteout("x")
            .whiteout("no/dir/x")
            .opaque("nodir"),
    ])
    .unwrap();
    assert_eq!(names(&files), ["a"]);
}

#[test]
fn a_whiteout_without_a_name_is_an_error() {
    for name in [".wh.", "d/.wh.", ".wh...", ".wh..", "a/.wh..."] {
        let error = apply(&[Tar::new().file(name, "")]).unwrap_err().to_string();
        assert!(
            error.contains("whiteout without a name") && error.contains(name),
            "{error}"
        );
    }
}

#[test]
fn a_whiteout_may_be_of_any_type_and_never_appears() {
    let lower = Tar::new()
        .file("a", "")
        .file("b", "")
        .file("c", "")
        .file("keep", "");
    let upper = Tar::new()
        .dir(".wh.a/")
        .file(".wh.a/inside", "x")
        .symlink(".wh.b", "keep")
        .hard_link(".wh.c", ".wh.b")
        .file(".wh..wh.plnk", "")
        .dir(".wh..wh.aufs");
    assert_eq!(names(&apply(&[lower, upper]).unwrap()), ["keep"]);
}

#[test]
fn a_directory_over_a_directory_keeps_children_and_takes_new_attributes() {
    let upper = Tar::new()
        .pax(&[("SCHILY.xattr.user.new", b"1"), ("mtime", b"7.5")])
        .entry(&Entry {
            mode: 0o1777,
            uid: 5,
            gid: 6,
            ..Entry::new(b'5', "d/")
        });
    let lower = Tar::new()
        .pax(&[("SCHILY.xattr.user.old", b"1")])
        .dir("d")
        .file("d/f", "x");
    let files = apply(&[lower, upper]).unwrap();
    let d = &files["d"];
    assert_eq!(
        (d.mode & 0o7777, d.uid, d.gid, d.mtime),
        (0o1777, 5, 6, (7, 500_000_000))
    );
    assert_eq!(d.xattrs.keys().collect::<Vec<_>>(), ["user.new"]);
    assert_eq!(files["d/f"].text(), "x");
}

#[test]
fn every_other_pair_of_types_replaces() {
    let make = |kind: &str| match kind {
        "file" => Tar::new().file("x", "f"),
        "dir" => Tar::new().dir("x").file("x/child", ""),
        "symlink" => Tar::new().symlink("x", "target"),
        "fifo" => Tar::new().entry(&Entry::new(b'6', "x")),
        "device" => Tar::new().entry(&Entry {
            device: (1, 3),
            ..Entry::new(b'3', "x")
        }),
        _ => Tar::new().file("t", "linked").hard_link("x", "t"),
    };
    let kinds = ["file", "dir", "symlink", "fifo", "device", "link"];
    let type_of = |kind| match kind {
        "dir" => 0o040_000,
        "symlink" => 0o120_000,
        "fifo" => 0o010_000,
        "device" => 0o020_000,
        _ => 0o100_000,
    };
    for lower in kinds {
        for upper in kinds {
            // In two layers, and twice in one.
            let mut both = make(lower);
            both.0.extend(make(upper).0);
            for files in [
                apply(&[make(lower), make(upper)]).unwrap(),
                apply(&[both]).unwrap(),
            ] {
                assert_eq!(files["x"].kind(), type_of(upper), "{upper} over {lower}");
                let child = upper == "dir";
                assert_eq!(files.contains_key("x/child"), child, "{upper} over {lower}");
                assert!(!files.contains_key("target"));
            }
        }
    }
}

#[test]
fn a_directory_entry_of_a_symlinks_name_replaces_the_symlink() {
    let lower = Tar::new()
        .dir("real")
        .file("real/f", "x")
        .symlink("link", "real");
    let files = apply(&[lower, Tar::new().dir("link/")]).unwrap();
    assert!(files["link"].is_dir());
    assert_eq!(names(&files), ["link", "real", "real/f"]);
}

#[test]
fn a_file_in_the_way_of_a_path_becomes_a_directory() {
    let files = apply(&[Tar::new().file("a", "x"), Tar::new().file("a/b/c", "y")]).unwrap();
    assert_eq!(names(&files), ["a", "a/b", "a/b/c"]);
}

#[test]
fn missing_parents_are_roots_and_0755_for_every_type() {
    let layer = Tar::new()
        .file("f", "x")
        .file("p1/q/f", "")
        .hard_link("p2/q/h", "f")
        .symlink("p3/q/s", "x")
        .entry(&Entry::new(b'6', "p4/q/fifo"))
        .dir_mode("p5/q/d", 0o700);
    let files = apply(&[layer]).unwrap();
    for p in ["p1", "p1/q", "p2/q", "p3/q", "p4/q", "p5/q"] {
        let n = &files[p];
        assert_eq!(
            (n.mode, n.uid, n.gid, n.mtime),
            (0o040_755, 0, 0, (0, 0)),
            "{p}"
        );
    }
    assert_eq!(files["p5/q/d"].mode, 0o040_700);
}

#[test]
fn a_hard_link_may_point_into_a_lower_layer() {
    let files = apply(&[
        Tar::new().file("d/a", "x"),
        Tar::new().hard_link("e/b", "d/a"),
    ])
    .unwrap();
    assert_eq!(files["d/a"].nid, files["e/b"].nid);
    assert_eq!(files["e/b"].nlink, 2);
}

#[test]
fn a_hard_link_outlives_the_path_it_was_made_from() {
    let big = vec![7; 100_000];
    let files = apply(&[
        Tar::new().file("a", &big),
        Tar::new().hard_link("b", "a"),
        Tar::new().whiteout("a"),
    ])
    .unwrap();
    assert_eq!(names(&files), ["b"]);
    assert_eq!((files["b"].nlink, files["b"].data == big), (1, true));
}

#[test]
fn a_hard_link_to_a_symlink_links_the_symlink() {
    let layer = Tar::new()
        .file("f", "x")
        .symlink("s", "f")
        .hard_link("h", "s");
    let files = apply(&[layer]).unwrap();
    assert_eq!(files["h"].nid, files["s"].nid);
    assert_eq!(files["h"].text(), "f");
}

#[test]
fn a_hard_links_target_is_found_through_symlinked_directories() {
    let layer = Tar::new()
        .file("usr/bin/x", "x")
        .symlink("bin", "usr/bin")
        .hard_link("y", "/bin/x");
    let files = apply(&[layer]).unwrap();
    assert_eq!(files["y"].nid, files["usr/bin/x"].nid);
}

#[test]
fn a_hard_link_onto_itself_changes_nothing() {
    let files = apply(&[Tar::new().file("a", "x").hard_link("a", "./a")]).unwrap();
    assert_eq!((files["a"].text(), files["a"].nlink), ("x".into(), 1));
}

#[test]
fn a_hard_link_to_nothing_or_to_a_directory_is_an_error() {
    for (layer, why) in [
        (Tar::new().hard_link("a", "missing"), "missing"),
        (Tar::new().dir("d").hard_link("a", "d"), "directory"),
        (Tar::new().hard_link("a", "/"), "root"),
        (Tar::new().file("a", "").hard_link("a/b", "a"), "directory"),
    ] {
        let error = apply(&[layer]).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_long_link_name_reaches_its_long_target() {
    let target = format!("{}/{}", "d".repeat(150), "t".repeat(200));
    let name = "l".repeat(180);
    let gnu = Tar::new()
        .gnu_long(b'L', &target)
        .file("short", "x")
        .gnu_long(b'K', &target)
        .gnu_long(b'L', &name)
        .hard_link("short2", "short3");
    let pax = Tar::new()
        .pax(&[("path", target.as_bytes())])
        .file("short", "x")
        .pax(&[("path", name.as_bytes()), ("linkpath", target.as_bytes())])
        .hard_link("short2", "short3");
    for layer in [gnu, pax] {
        let files = apply(&[layer]).unwrap();
        assert_eq!(files[&name].nid, files[&target].nid);
    }
}

#[test]
fn layers_apply_from_the_bottom() {
    // Read from the top, the link's target would be gone before it is seen.
    let files = apply(&[
        Tar::new().file("a", "first"),
        Tar::new().hard_link("keep", "a").file("a", "second"),
        Tar::new().whiteout("a").file("c", "third"),
    ])
    .unwrap();
    assert_eq!(names(&files), ["c", "keep"]);
    assert_eq!(files["keep"].text(), "first");
}

#[test]
fn entries_below_a_symlink_go_to_its_target_inside_the_image() {
    for target in [
        "usr/bin",
        "/usr/bin",
        "/../../usr/bin",
        "../usr/bin",
        "./usr//bin/",
    ] {
        let lower = Tar::new().dir("usr/bin").symlink("bin", target);
        let files = apply(&[lower.clone(), Tar::new().file("bin/sh", "x")]).unwrap();
        assert_eq!(files["usr/bin/sh"].text(), "x", "{target}");
        assert_eq!(files["bin"].kind(), 0o120_000, "{target}");
        let mut same = lower;
        same.0.extend(Tar::new().file("bin/sh", "x").0);
        assert_eq!(
            apply(&[same]).unwrap()["usr/bin/sh"].text(),
            "x",
            "{target}"
        );
    }
    let files = apply(&[Tar::new()
        .symlink("a/b", "../c/d")
        .symlink("c/d", "/e")
        .file("a/b/f", "x")])
    .unwrap();
    assert_eq!(
        files["e/f"].text(),
        "x",
        "a dangling target is made, inside"
    );
}

#[test]
fn a_symlink_loop_is_an_error() {
    let error = apply(&[Tar::new()
        .symlink("a", "b")
        .symlink("b", "a")
        .file("a/x", "")])
    .unwrap_err()
    .to_string();
    assert!(
        error.contains("too many levels of symbolic links"),
        "{error}"
    );
}

#[test]
fn one_file_has_many_spellings_and_the_last_entry_wins() {
    let layer = Tar::new()
        .file("x", "1")
        .file("./x", "2")
        .file("/x", "3")
        .file("d/../x", "4")
        .file("x", "last")
        .dir("./dir/")
        .dir("/dir");
    let files = apply(&[layer]).unwrap();
    assert_eq!(names(&files), ["dir", "x"]);
    assert_eq!(files["x"].text(), "last");
}

#[test]
fn names_are_bytes() {
    let long = "n".repeat(255);
    let layer = Tar::new()
        .file(b"caf\xe9", "latin-1")
        .file("new\nline", "x")
        .pax(&[("path", long.as_bytes())])
        .file("s", "y")
        .file("!", "")
        .file("+x", "")
        .file("-", "");
    let files = apply(&[layer]).unwrap();
    assert_eq!(files["caf\\xe9"].text(), "latin-1");
    assert_eq!(files["new\nline"].text(), "x");
    assert_eq!(files[&long].text(), "y");
    let too_long = "n".repeat(256);
    let error = apply(&[Tar::new()
        .pax(&[("path", too_long.as_bytes())])
        .file("s", "")])
    .unwrap_err()
    .to_string();
    assert!(error.contains("255 bytes"), "{error}");
}

#[test]
fn the_roots_own_entry_sets_its_attributes() {
    for name in ["./", ".", "/"] {
        let layer = Tar::new()
            .entry(&Entry {
                mode: 0o711,
                uid: 3,
                mtime: 9,
                ..Entry::new(b'5', name)
            })
            .file("a", "");
        let root = &apply(&[layer]).unwrap()[""];
        assert_eq!((root.mode & 0o7777, root.uid, root.mtime.0), (0o711, 3, 9));
    }
}

#[test]
fn owners_survive_to_the_largest() {
    let top = u32::MAX - 1;
    // The kernel shows it as nobody's; that is no reason to refuse the image.
    let invalid = u32::MAX;
    let layer = Tar::new()
        .entry(&Entry {
            uid: 1000,
            gid: 100,
            ..Entry::new(b'0', "small")
        })
        .entry(&Entry {
            uid: top.into(),
            gid: 70_000,
            ..Entry::new(b'0', "base256")
        })
        .pax(&[("uid", top.to_string().as_bytes()), ("gid", b"65536")])
        .file("pax", "")
        .entry(&Entry {
            uid: invalid.into(),
            ..Entry::new(b'0', "invalid")
        });
    let files = apply(&[layer]).unwrap();
    assert_eq!(files["invalid"].uid, invalid);
    assert_eq!((files["small"].uid, files["small"].gid), (1000, 100));
    assert_eq!((files["base256"].uid, files["base256"].gid), (top, 70_000));
    assert_eq!((files["pax"].uid, files["pax"].gid), (top, 65_536));
}

#[test]
fn owners_out_of_range_are_errors() {
    for id in [1 << 32, 1 << 40, u64::MAX] {
        let error = apply(&[Tar::new().entry(&Entry {
            uid: id,
            ..Entry::new(b'0', "f")
        })])
        .unwrap_err()
        .to_string();
        assert!(error.contains("owner"), "{error}");
        let error = apply(&[Tar::new()
            .pax(&[("gid", id.to_string().as_bytes())])
            .file("f", "")])
        .unwrap_err();
        assert!(error.to_string().contains("owner"), "{error}");
    }
}

#[test]
fn set_id_bits_and_capabilities_survive_an_owner() {
    let capability = [
        1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    let layer = Tar::new()
        .entry(&Entry {
            mode: 0o4755,
            uid: 1,
            ..Entry::new(b'0', "suid")
        })
        .entry(&Entry {
            mode: 0o2755,
            gid: 8,
            ..Entry::new(b'0', "sgid")
        })
        .entry(&Entry {
            mode: 0o3777,
            uid: 7,
            ..Entry::new(b'5', "sticky")
        })
        .entry(&Entry {
            mode: 0o000,
            ..Entry::new(b'0', "none")
        })
        .pax(&[("SCHILY.xattr.security.capability", &capability)])
        .entry(&Entry {
            uid: 5,
            mode: 0o755,
            ..Entry::new(b'0', "ping")
        });
    let files = apply(&[layer]).unwrap();
    assert_eq!(files["suid"].mode, 0o104_755);
    assert_eq!(files["sgid"].mode, 0o102_755);
    assert_eq!(files["sticky"].mode, 0o043_777);
    assert_eq!(files["none"].mode, 0o100_000);
    assert_eq!(files["ping"].xattrs["security.capability"], capability);
}

#[test]
fn extended_attributes_survive_with_any_value() {
    let acl = [2, 0, 0, 0, 1, 0, 6, 0, 0xff, 0xff, 0xff, 0xff];
    let layer = Tar::new()
        .pax(&[
            ("SCHILY.xattr.user.empty", b""),
            ("SCHILY.xattr.user.nul", b"a\0b\nc=d"),
            ("SCHILY.xattr.trusted.t", b"t"),
            ("SCHILY.xattr.system.posix_acl_access", &acl),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("LIBARCHIVE.xattr.user.arch%3dive", b"AGE"),
            ("LIBARCHIVE.xattr.user.nul", b"WFhY"),
        ])
        .dir("d")
        .file("after", "");
    let files = apply(&[layer]).unwrap();
    let x = &files["d"].xattrs;
    assert_eq!(x["user.empty"], b"");
    assert_eq!(x["user.nul"], b"a\0b\nc=d");
    assert_eq!(x["trusted.t"], b"t");
    assert_eq!(x["system.posix_acl_access"], acl);
    assert_eq!(x["user.arch=ive"], b"\0a");
    assert!(
        !x.contains_key("trusted.overlay.opaque"),
        "the guest's overlayfs would obey it"
    );
    assert_eq!(x.len(), 5);
    assert!(files["after"].xattrs.is_empty());
}

#[test]
fn attributes_larger_than_a_block_survive() {
    let value = vec![b'v'; 60_000];
    let layer = Tar::new()
        .pax(&[("SCHILY.xattr.user.big", &value)])
        .file("f", "contents")
        .pax(&[("SCHILY.xattr.user.big", &value[..4000])])
        .symlink("s", "target")
        .pax(&[("linkpath", &[b't'; 4095])])
        .symlink("longest", "")
        .file("g", "x");
    let files = apply(&[layer]).unwrap();
    assert_eq!(files["f"].xattrs["user.big"], value);
    assert_eq!(files["f"].text(), "contents");
    assert_eq!(files["s"].text(), "target");
    assert_eq!(files["longest"].data, [b't'; 4095]);
    assert_eq!(files["g"].text(), "x");
}

#[test]
fn device_nodes_and_pipes_need_no_privilege() {
    let layer = Tar::new()
        .entry(&Entry {
            mode: 0o666,
            device: (1, 3),
            ..Entry::new(b'3', "null")
        })
        .entry(&Entry {
            mode: 0o660,
            device: (259, 70_000),
            gid: 6,
            ..Entry::new(b'4', "disk")
        })
        .entry(&Entry {
            mode: 0o600,
            ..Entry::new(b'6', "pipe")
        });
    let files = apply(&[layer]).unwrap();
    assert_eq!((files["null"].mode, files["null"].rdev), (0o020_666, 0x103));
    let encoded = (70_000 & 0xff) | (259 << 8) | ((70_000 & !0xff) << 12);
    assert_eq!(
        (files["disk"].mode, files["disk"].rdev, files["disk"].gid),
        (0o060_660, encoded, 6)
    );
    assert_eq!(files["pipe"].mode, 0o010_600);
}

#[test]
fn times_survive_with_nanoseconds_before_1970_and_after_2038() {
    let layer = Tar::new()
        .entry(&Entry {
            mtime: 1_700_000_000,
            ..Entry::new(b'0', "plain")
        })
        .entry(&Entry {
            mtime: 0,
            ..Entry::new(b'0', "zero")
        })
        .entry(&Entry {
            mtime: -5,
            ..Entry::new(b'0', "negative")
        })
        .entry(&Entry {
            mtime: 1 << 40,
            ..Entry::new(b'0', "far")
        })
        .pax(&[("mtime", b"1700000000.123456789")])
        .symlink("ns", "x")
        .pax(&[("mtime", b"-1.25")])
        .dir("before")
        .pax(&[("mtime", b"4294967296.5")])
        .file("after", "");
    let files = apply(&[layer]).unwrap();
    for (name, want) in [
        ("plain", (1_700_000_000, 0)),
        ("zero", (0, 0)),
        ("negative", (-5, 0)),
        ("far", (1 << 40, 0)),
        ("ns", (1_700_000_000, 123_456_789)),
        ("before", (-2, 750_000_000)),
        ("after", (4_294_967_296, 500_000_000)),
    ] {
        assert_eq!(files[name].mtime, want, "{name}");
    }
}

#[test]
fn contents_of_every_size_around_the_blocks_survive() {
    let sizes = [
        0, 1, 31, 32, 4031, 4032, 4033, 4095, 4096, 4097, 8191, 8192, 12_289, 16_383, 16_384,
        16_385, 100_001,
    ];
    let content = |n: usize| (0..n).map(|i| (i * 7 + n) as u8).collect::<Vec<_>>();
    let layer = sizes
        .iter()
        .fold(Tar::new(), |tar, n| tar.file(format!("f{n}"), content(*n)));
    let files = apply(&[layer]).unwrap();
    for n in sizes {
        assert_eq!(files[&format!("f{n}")].data, content(n), "{n} bytes");
    }
}

#[test]
fn large_directories_are_whole() {
    let layer = (0..3000).fold(Tar::new(), |tar, i| {
        tar.file(format!("d/{i:0width$}", width = 1 + i % 90), "")
    });
    let expected: std::collections::BTreeSet<_> = (0..3000)
        .map(|i| format!("d/{i:0width$}", width = 1 + i % 90))
        .collect();
    let files = apply(&[layer]).unwrap();
    assert_eq!(files.len(), expected.len() + 2);
    assert!(expected.iter().all(|name| files.contains_key(name)));
}

#[test]
fn deep_trees_are_whole() {
    // A path at the bound, then deeper by way of a symlink into it.
    let deep = vec!["d"; 2000].join("/");
    let layer = Tar::new()
        .pax(&[("path", deep.as_bytes())])
        .dir("x")
        .pax(&[("linkpath", deep.as_bytes())])
        .symlink("l", "x")
        .file(format!("l/{}", vec!["e"; 40].join("/")), "bottom");
    let options = bantam_image::ResolveOptions::default();
    let mut layout = crate::common::Layout::new();
    layout.image(&[layer.finish()]);
    let (image, _store) = layout.resolve(&options).unwrap();
    // Reading that back recursively needs a stack of its own.
    let files = std::thread::Builder::new()
        .stack_size(256 << 20)
        .spawn(move || crate::common::read_erofs(&image.rootfs))
        .unwrap()
        .join()
        .unwrap();
    assert_eq!(
        files[&format!("{deep}/{}", vec!["e"; 40].join("/"))].text(),
        "bottom"
    );
}

#[test]
fn equal_layers_give_equal_bytes() {
    let layers: Vec<Vec<u8>> = vec![
        Tar::new()
            .file("a", vec![1; 50_000])
            .file("b", "x")
            .dir("d")
            .symlink("s", "a")
            .finish(),
        Tar::new().whiteout("a").file("c", vec![2; 20_000]).finish(),
    ];
    let bytes = || {
        let mut layout = crate::common::Layout::new();
        layout.image(&layers);
        let (image, _store) = layout
            .resolve(&bantam_image::ResolveOptions::default())
            .unwrap();
        std::fs::read(&image.rootfs).unwrap()
    };
    let first = bytes();
    assert!(first == bytes());
}

#[test]
fn contents_that_a_later_layer_removed_are_not_in_the_file() {
    let secret = b"correct horse battery staple".repeat(2000);
    let layers: Vec<Vec<u8>> = vec![
        Tar::new()
            .file("secret", &secret)
            .file("short-secret", &secret[..100])
            .file("replaced", &secret)
            .finish(),
        Tar::new()
            .whiteout("secret")
            .whiteout("short-secret")
            .file("replaced", "now harmless")
            .finish(),
    ];
    let mut layout = crate::common::Layout::new();
    layout.image(&layers);
    let (image, _store) = layout
        .resolve(&bantam_image::ResolveOptions::default())
        .unwrap();
    let bytes = std::fs::read(&image.rootfs).unwrap();
    assert!(
        !bytes.windows(13).any(|w| w == b"correct horse"),
        "removed contents are still there"
    );
}

#[test]
fn an_image_without_layers_is_an_empty_root() {
    assert_eq!(names(&apply(&[]).unwrap()), [""; 0]);
    assert_eq!(names(&apply(&[Tar::new()]).unwrap()), [""; 0]);
}

#[test]
fn the_same_layer_twice_is_applied_twice() {
    let base = || Tar::new().file("a", "x");
    let files = apply(&[base(), Tar::new().whiteout("a"), base()]).unwrap();
    assert_eq!(names(&files), ["a"]);
}
