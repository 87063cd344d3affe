//! What must hold for any bytes and any message on the wire.
#![allow(clippy::unwrap_used)]

use std::io::Cursor;
use std::net::{Ipv4Addr, Ipv6Addr};

use bantam_protocol::{
    BootTimings, Configure, Decoder, DiskUse, Error, ExecRequest, Exit, ExitStatus, FileEntry,
    FileFailure, FileFailureKind, FileInfo, FileKind, FileRequest, Frame, FrameHeader,
    GuestControl, GuestExec, GuestNetwork, GuestStats, Hello, HostControl, HostExec, Kind,
    MAX_DATA_LEN, MAX_MESSAGE_LEN, MAX_REQUEST_LEN, MAX_TEXT_LEN, ReadFile, ReadTree, Size,
    StartFailed, StartFailedKind, TreePlace, TreeSummary, WriteFile, WriteTree, clip_text,
    read_frame, write_frame,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

/// Feeds `bytes` in pieces of the given sizes; the kinds and payloads that come out.
fn decode_in_pieces(bytes: &[u8], sizes: &[usize]) -> Result<Vec<(Kind, Vec<u8>)>, Error> {
    let mut decoder = Decoder::new();
    let mut frames = Vec::new();
    let mut rest = bytes;
    let mut sizes = sizes.iter().copied().cycle();
    while !rest.is_empty() {
        let size = sizes.next().unwrap_or(1).clamp(1, rest.len());
        let (mut piece, after) = rest.split_at(size);
        rest = after;
        while let Some(frame) = decoder.next_frame(&mut piece)? {
            frames.push((frame.kind, frame.payload.to_vec()));
        }
        assert!(piece.is_empty(), "a decoder that wants more has used all");
    }
    Ok(frames)
}

fn one_frame(bytes: &[u8]) -> Frame<'_> {
    let (head, payload) = bytes.split_first_chunk().unwrap();
    let header = FrameHeader::decode(*head).unwrap();
    assert_eq!(header.payload_len(), payload.len());
    Frame {
        kind: header.kind(),
        payload,
    }
}

fn exec_requests() -> impl Strategy<Value = ExecRequest> {
    (
        vec(vec(any::<u8>(), 0..20), 0..5),
        vec(vec(any::<u8>(), 0..20), 0..5),
        option::of(vec(any::<u8>(), 0..20)),
        any::<bool>(),
        option::of(".{0,10}"),
        option::of((any::<u16>(), any::<u16>())),
        any::<bool>(),
        option::of(any::<u64>()),
        any::<(bool, bool)>(),
    )
        .prop_map(
            |(argv, env, cwd, create_cwd, user, tty, stdin, timeout_ms, (detach, lazy_started))| {
                ExecRequest {
                    argv,
                    env,
                    cwd,
                    create_cwd,
                    user,
                    tty: tty.map(|(cols, rows)| Size { cols, rows }),
                    stdin,
                    timeout_ms,
                    detach,
                    lazy_started,
                }
            },
        )
}

proptest! {
    #[test]
    fn an_exec_request_survives_the_wire(request in exec_requests()) {
        let message = HostExec::Exec(request);
        let bytes = message.encode().unwrap();
        prop_assert_eq!(HostExec::decode(&one_frame(&bytes)).unwrap(), message);
    }

    #[test]
    fn frames_come_out_as_they_went_in_however_the_stream_is_cut(
        payloads in vec(vec(any::<u8>(), 0..300), 0..20),
        sizes in vec(1usize..400, 1..10),
    ) {
        let mut wire = Vec::new();
        for payload in &payloads {
            write_frame(&mut wire, Kind::Stdout, payload).unwrap();
        }
        let frames = decode_in_pieces(&wire, &sizes).unwrap();
        prop_assert!(frames.iter().all(|(kind, _)| *kind == Kind::Stdout));
        let out: Vec<_> = frames.into_iter().map(|(_, payload)| payload).collect();
        prop_assert_eq!(&out, &payloads);

        let mut reader = Cursor::new(wire);
        let mut buffer = Vec::new();
        for payload in &payloads {
            let frame = read_frame(&mut reader, &mut buffer).unwrap().unwrap();
            prop_assert_eq!(frame.payload, &payload[..]);
        }
        prop_assert!(read_frame(&mut reader, &mut buffer).unwrap().is_none());
    }

    #[test]
    fn arbitrary_bytes_are_frames_or_an_error_and_never_a_panic(
        bytes in vec(any::<u8>(), 0..2000),
        sizes in vec(1usize..100, 1..5),
    ) {
        let _ = decode_in_pieces(&bytes, &sizes);
        let mut buffer = Vec::new();
        let _ = read_frame(&mut Cursor::new(&bytes), &mut buffer);
        prop_assert!(buffer.capacity() <= MAX_REQUEST_LEN);
    }

    #[test]
    fn an_arbitrary_payload_of_any_kind_is_a_message_or_an_error(
        kind in any::<u8>(),
        payload in vec(any::<u8>(), 0..200),
    ) {
        if let Ok(kind) = Kind::try_from(kind) {
            let frame = Frame { kind, payload: &payload };
            let _ = HostExec::decode(&frame);
            let _ = GuestExec::decode(&frame);
            let _ = HostControl::decode(&frame);
            let _ = GuestControl::decode(&frame);
        }
    }
}

#[test]
fn every_other_message_survives_the_wire() {
    let host = [
        HostExec::WriteFile(WriteFile {
            path: b"/a\xff".to_vec(),
            mode: Some(0o4755),
            create_parents: true,
        }),
        HostExec::ReadFile(ReadFile {
            path: b"/b".to_vec(),
        }),
        HostExec::ReadTree(ReadTree {
            path: b"/c\xff/.".to_vec(),
            follow_link: true,
        }),
        HostExec::WriteTree(WriteTree {
            path: b"/d".to_vec(),
            place: TreePlace::One {
                name: b"\xfe".to_vec(),
                directory: true,
            },
            owners: true,
        }),
        HostExec::GetStats,
        HostExec::File(FileRequest::Rename {
            from: b"/e".to_vec(),
            to: b"/f\xff".to_vec(),
        }),
        HostExec::Stdin(b"\0\xff"),
        HostExec::StdinEof,
        HostExec::Resize(Size { cols: 80, rows: 24 }),
        HostExec::Signal(15),
        HostExec::Kill,
    ];
    for message in host {
        let bytes = message.encode().unwrap();
        assert_eq!(HostExec::decode(&one_frame(&bytes)).unwrap(), message);
    }
    let guest = [
        GuestExec::Started { pid: 42 },
        GuestExec::StartFailed(StartFailed {
            kind: StartFailedKind::BadUser,
            message: "no user nobody2".into(),
        }),
        GuestExec::Stdout(b"out"),
        GuestExec::Stderr(b""),
        GuestExec::StdinCredit(65_536),
        GuestExec::StdinClosed,
        GuestExec::Exit(Exit {
            status: ExitStatus::Signaled(9),
            timed_out: true,
            oom: false,
        }),
        GuestExec::FileOpened(FileInfo {
            size: u64::MAX,
            mode: 0o644,
        }),
        GuestExec::FileDone,
        GuestExec::FileFailed(FileFailure {
            kind: FileFailureKind::NoSpace,
            message: "full".into(),
        }),
        GuestExec::TreeDone(TreeSummary {
            entries: u64::MAX,
            bytes: 1,
            skipped: 2,
        }),
        GuestExec::FileEntry(FileEntry {
            name: b"n\xff".to_vec(),
            kind: FileKind::Symlink,
            mode: 0o777,
            uid: 1,
            gid: u32::MAX,
            size: u64::MAX,
            modified: i64::MIN,
            target: Some(b"t".to_vec()),
        }),
        GuestExec::Stats(GuestStats {
            memory_total: u64::MAX,
            cpus: 2,
            load_hundredths: [1, 2, 3],
            disk: DiskUse {
                total: 3,
                ..DiskUse::default()
            },
            ..GuestStats::default()
        }),
    ];
    for message in guest {
        let bytes = message.encode().unwrap();
        assert_eq!(GuestExec::decode(&one_frame(&bytes)).unwrap(), message);
    }
    let control = [
        GuestControl::Hello(Hello {
            protocol_version: 1,
            agent_version: "0.1.0".into(),
            kernel_release: "6.12".into(),
            timings: BootTimings {
                init_ns: 1,
                rootfs_ns: 2,
                hello_ns: 3,
            },
        }),
        GuestControl::BootFailed("mount /dev/vda".into()),
        GuestControl::ShuttingDown,
    ];
    for message in control {
        let bytes = message.encode().unwrap();
        assert_eq!(GuestControl::decode(&one_frame(&bytes)).unwrap(), message);
    }
    let control = [
        HostControl::Configure(Configure {
            hostname: "box".into(),
            wall_clock_ns: 1_700_000_000_000_000_000,
            network: None,
        }),
        HostControl::Configure(Configure {
            hostname: String::new(),
            wall_clock_ns: 0,
            network: Some(GuestNetwork {
                addresses: vec![
                    (Ipv4Addr::new(10, 0, 0, 2).into(), 30),
                    (Ipv6Addr::LOCALHOST.into(), 64),
                ],
                gateways: vec![Ipv4Addr::new(10, 0, 0, 1).into()],
                name_servers: vec![Ipv4Addr::new(10, 0, 0, 1).into()],
                search: vec!["example.org".into()],
                hosts: vec![(Ipv4Addr::LOCALHOST.into(), "host".into())],
                route_loopback: true,
            }),
        }),
        HostControl::Shutdown { grace_ms: 2_000 },
        HostControl::SetClock {
            wall_clock_ns: u64::MAX,
        },
    ];
    for message in control {
        let bytes = message.encode().unwrap();
        assert_eq!(HostControl::decode(&one_frame(&bytes)).unwrap(), message);
    }
}

#[test]
fn a_length_over_the_cap_of_its_kind_is_refused_before_any_payload_arrives() {
    for (kind, max) in [
        (Kind::Stdout, MAX_DATA_LEN),
        (Kind::Exec, MAX_REQUEST_LEN),
        (Kind::Hello, MAX_MESSAGE_LEN),
    ] {
        assert!(FrameHeader::new(kind, max).is_ok());
        let mut head = FrameHeader::new(kind, max).unwrap().encode();
        let over = u32::try_from(max + 1).unwrap().to_le_bytes();
        head[..4].copy_from_slice(&over);
        let refused = Decoder::new().next_frame(&mut &head[..]).map(|_| ());
        assert!(matches!(refused, Err(Error::TooLong { .. })));
        let mut buffer = Vec::new();
        let refused = read_frame(&mut &head[..], &mut buffer).map(|_| ());
        assert!(matches!(refused, Err(Error::TooLong { .. })));
        assert_eq!(buffer.capacity(), 0);
    }
}

#[test]
fn a_stream_that_ends_inside_a_frame_is_truncated_not_ended() {
    let wire = HostExec::Stdin(b"hello").encode().unwrap();
    for cut in 1..wire.len() {
        let mut buffer = Vec::new();
        let result = read_frame(&mut &wire[..cut], &mut buffer).map(|_| ());
        assert!(matches!(result, Err(Error::Truncated)), "cut at {cut}");
        let mut decoder = Decoder::new();
        assert!(decoder.next_frame(&mut &wire[..cut]).unwrap().is_none());
        assert!(!decoder.is_between_frames());
    }
}

#[test]
fn bytes_after_a_structured_payload_are_malformed() {
    let bytes = HostExec::Resize(Size { cols: 1, rows: 1 })
        .encode()
        .unwrap();
    let mut payload = one_frame(&bytes).payload.to_vec();
    payload.push(0);
    let frame = Frame {
        kind: Kind::Resize,
        payload: &payload,
    };
    assert!(matches!(
        HostExec::decode(&frame),
        Err(Error::Malformed { kind: Kind::Resize })
    ));
}

#[test]
fn a_frame_of_the_other_direction_is_unexpected() {
    let bytes = GuestExec::FileDone.encode().unwrap();
    assert!(matches!(
        HostExec::decode(&one_frame(&bytes)),
        Err(Error::Unexpected(Kind::FileDone))
    ));
}

#[test]
fn a_claimed_length_does_not_allocate_until_bytes_arrive() {
    // An argument list that claims 2^32 - 1 entries in a payload of five bytes.
    let frame = Frame {
        kind: Kind::Exec,
        payload: &[0xff, 0xff, 0xff, 0xff, 0x0f],
    };
    assert!(matches!(
        HostExec::decode(&frame),
        Err(Error::Malformed { .. })
    ));
}

#[test]
fn long_text_is_clipped_between_characters() {
    assert_eq!(clip_text("short".into()), "short");
    let clipped = clip_text("é".repeat(MAX_TEXT_LEN));
    assert!(clipped.len() <= MAX_TEXT_LEN);
    assert!(clipped.ends_with('…'));
}
