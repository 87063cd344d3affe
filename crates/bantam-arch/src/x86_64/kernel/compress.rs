//! Unpacking kernels on the host.

use std::io::Read;

use crate::{ArchError, Result};

/// Most memory for an xz dictionary, in KiB; the kernel's build uses up to 128 MiB.
const XZ_MEMORY_KIB: u32 = 256 << 10;
/// Largest zstd window, as a power of 2; the kernel's build uses 128 MiB.
const ZSTD_WINDOW_LOG: u32 = 27;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    Gzip,
    Xz,
    Zstd,
    /// Known to Linux, but not unpacked here.
    Unsupported(&'static str),
}

impl Compression {
    /// Recognises a format by its first bytes (`lib/decompress.c`).
    pub(super) fn of(bytes: &[u8]) -> Option<Self> {
        const MAGICS: [(&[u8], Compression); 7] = [
            (&[0x1f, 0x8b], Compression::Gzip),
            (&[0xfd, b'7', b'z', b'X', b'Z', 0], Compression::Xz),
            (&[0x28, 0xb5, 0x2f, 0xfd], Compression::Zstd),
            (&[0x02, 0x21, 0x4c, 0x18], Compression::Unsupported("lz4")),
            (&[0x5d, 0x00, 0x00], Compression::Unsupported("lzma")),
            (&[0x42, 0x5a, 0x68], Compression::Unsupported("bzip2")),
            (&[0x89, 0x4c, 0x5a, 0x4f], Compression::Unsupported("lzo")),
        ];
        MAGICS
            .iter()
            .find(|(magic, _)| bytes.starts_with(magic))
            .map(|&(_, format)| format)
    }

    /// Unpacks the first stream of `packed`. What follows it is left alone: a bzImage appends the
    /// unpacked length.
    pub(super) fn unpack(self, packed: &[u8], limit: u64) -> Result<Vec<u8>> {
        match self {
            Self::Gzip => read_up_to("gzip", limit, flate2::read::GzDecoder::new(packed)),
            Self::Xz => {
                let reader = lzma_rust2::XzReader::new_mem_limit(packed, false, XZ_MEMORY_KIB);
                read_up_to("xz", limit, reader)
            }
            Self::Zstd => {
                let mut reader = zstd::stream::read::Decoder::with_buffer(packed)
                    .map_err(|e| ArchError::kernel(format!("zstd is not available: {e}")))?
                    .single_frame();
                reader
                    .window_log_max(ZSTD_WINDOW_LOG)
                    .map_err(|e| ArchError::kernel(format!("zstd is not available: {e}")))?;
                read_up_to("zstd", limit, reader)
            }
            Self::Unsupported(name) => Err(ArchError::kernel(format!(
                "it is compressed with {name}; gzip, xz and zstd are supported"
            ))),
        }
    }
}

fn read_up_to(name: &str, limit: u64, reader: impl Read) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader
        .take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|e| ArchError::kernel(format!("its {name} data is damaged: {e}")))?;
    if bytes.len() as u64 > limit {
        return Err(ArchError::Limit {
            what: "the unpacked kernel's size in bytes",
            value: bytes.len() as u64,
            limit,
        });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn unpacking_stops_at_the_limit() {
        const LIMIT: u64 = 1 << 20;
        let bytes = vec![0; 1 << 20];
        let pack = |bytes: &[u8]| {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            gzip.write_all(bytes).unwrap();
            let mut xz =
                lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(0))
                    .unwrap();
            xz.write_all(bytes).unwrap();
            [
                (Compression::Gzip, gzip.finish().unwrap()),
                (Compression::Zstd, zstd::encode_all(bytes, 1).unwrap()),
                (Compression::Xz, xz.finish().unwrap()),
            ]
        };
        for (format, packed) in pack(&bytes) {
            assert_eq!(Compression::of(&packed), Some(format));
            assert_eq!(
                format.unpack(&packed, LIMIT).unwrap().len(),
                1 << 20,
                "{format:?}"
            );
            let error = format.unpack(&packed, LIMIT - 1).unwrap_err();
            assert!(
                matches!(error, ArchError::Limit { .. }),
                "{format:?}: {error}"
            );
        }
    }

    #[test]
    fn what_follows_the_stream_is_left_alone() {
        let mut packed = zstd::encode_all(&b"kernel"[..], 1).unwrap();
        packed.extend([6, 0, 0, 0]);
        assert_eq!(Compression::Zstd.unpack(&packed, 100).unwrap(), b"kernel");
    }

    #[test]
    fn damaged_data_is_named() {
        let mut packed = zstd::encode_all(&[7; 1000][..], 1).unwrap();
        packed.truncate(packed.len() - 3);
        let error = Compression::Zstd.unpack(&packed, 10_000).unwrap_err();
        assert!(
            error.to_string().contains("zstd data is damaged"),
            "{error}"
        );
    }
}
