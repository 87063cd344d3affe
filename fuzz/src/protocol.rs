//! Frames, in one piece and in small ones, and the messages in them.

use bantam_protocol::{Decoder, Frame, GuestControl, GuestExec, HostControl, HostExec, Kind};

pub fn run(data: &[u8]) {
    let [step, stream @ ..] = data else {
        return;
    };
    let whole = decode(stream, stream.len().max(1));
    let pieces = decode(stream, usize::from(*step) % 64 + 1);
    assert_eq!(whole, pieces, "it matters how the stream is cut");
    for (kind, payload) in &whole.0 {
        messages(&Frame {
            kind: *kind,
            payload,
        });
    }
}

/// All frames, and whether an error ended them.
fn decode(stream: &[u8], step: usize) -> (Vec<(Kind, Vec<u8>)>, bool) {
    let mut decoder = Decoder::new();
    let mut frames = Vec::new();
    for mut chunk in stream.chunks(step) {
        loop {
            match decoder.next_frame(&mut chunk) {
                Ok(Some(frame)) => frames.push((frame.kind, frame.payload.to_vec())),
                Ok(None) => break,
                Err(_) => return (frames, true),
            }
        }
    }
    (frames, false)
}

/// A message that decodes is encoded as a frame that decodes to the same.
fn messages(frame: &Frame<'_>) {
    macro_rules! survives {
        ($kind:ty) => {
            if let Ok(message) = <$kind>::decode(frame) {
                let bytes = message.encode().expect("what was decoded can be encoded");
                let mut decoder = Decoder::new();
                let mut rest = &bytes[..];
                let again = decoder
                    .next_frame(&mut rest)
                    .expect("an encoded frame")
                    .expect("a whole one");
                let again = <$kind>::decode(&again).expect("an encoded message");
                assert_eq!(format!("{again:?}"), format!("{message:?}"));
            }
        };
    }
    survives!(GuestControl);
    survives!(HostControl);
    survives!(GuestExec<'_>);
    survives!(HostExec<'_>);
}

pub fn seeds() -> Vec<Vec<u8>> {
    let messages = [
        HostExec::Stdin(b"hello").encode(),
        HostExec::StdinEof.encode(),
        HostExec::Signal(15).encode(),
        HostExec::Kill.encode(),
        GuestExec::Stdout(b"out").encode(),
    ];
    let frames: Vec<Vec<u8>> = messages.into_iter().filter_map(Result::ok).collect();
    let mut seeds: Vec<Vec<u8>> = (0..=32)
        .map(|kind| [&[3, 4, 0, 0, 0, kind][..], &[1; 64]].concat())
        .collect();
    seeds.push([&[3][..], &frames.concat()].concat());
    seeds
}
