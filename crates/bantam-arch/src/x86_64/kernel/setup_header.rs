//! The setup header of a bzImage (`Documentation/arch/x86/boot.rst`): where the payload is.

use std::ops::Range;

use linux_loader::bootparam::setup_header;
use vm_memory::ByteValued;

use super::source::Source;
use crate::{ArchError, Result};

const HEADER_OFFSET: u64 = 0x1f1;
const HEADER_MAGIC: u32 = 0x5372_6448; // "HdrS"
/// The first version whose header says where the payload is.
const VERSION_2_08: u16 = 0x0208;
const SECTOR: u64 = 512;
/// What 0 in `setup_sects` means.
const DEFAULT_SETUP_SECTORS: u8 = 4;

/// Where a bzImage's compressed kernel is in the file.
pub(super) fn payload(source: &Source) -> Result<Range<u64>> {
    let mut header = setup_header::default();
    source
        .read_at(HEADER_OFFSET, header.as_mut_slice())
        .map_err(|_| unknown())?;
    if { header.header } != HEADER_MAGIC {
        return Err(unknown());
    }
    let version = header.version;
    if version < VERSION_2_08 {
        return Err(ArchError::kernel(format!(
            "its boot protocol {}.{:02} is older than 2.08",
            version >> 8,
            version & 0xff
        )));
    }
    let sectors = match header.setup_sects {
        0 => DEFAULT_SETUP_SECTORS,
        sectors => sectors,
    };
    // One more: the boot sector itself.
    let start = (u64::from(sectors) + 1) * SECTOR + u64::from(header.payload_offset);
    let end = start + u64::from(header.payload_length);
    if header.payload_length == 0 || end > source.len() {
        return Err(ArchError::kernel(
            "its payload extends beyond the end of the file",
        ));
    }
    Ok(start..end)
}

fn unknown() -> ArchError {
    ArchError::kernel("it is neither an ELF file, nor a compressed one, nor a bzImage")
}
