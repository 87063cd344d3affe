//! Files in a machine, and how it fares.

use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Instant;

use bantam_protocol::{GuestStats, HostExec, ReadFile, WriteFile};

use crate::Error;
use crate::machine::REQUEST_LIMIT;
use crate::transfer::{Answer, Guest, Transfer};
use crate::wire;

pub(crate) fn write(
    guest: &dyn Guest,
    path: &Path,
    mode: Option<u32>,
    content: &mut dyn Read,
) -> Result<(), Error> {
    let request = HostExec::WriteFile(WriteFile {
        path: path.as_os_str().as_bytes().to_vec(),
        mode,
        create_parents: false,
    });
    let what = format!("'{}' was written", path.display());
    let mut transfer = Transfer::open(guest, &request, what)?;
    // Without the end of the input the guest leaves the file as it was.
    wire::send_all(content, &transfer.sender)
        .map_err(Error::io("cannot read the bytes for a file in the guest"))?;
    transfer.end();
    let done = transfer.answer(None, |answer| matches!(answer, Answer::Done))?;
    if done {
        Ok(())
    } else {
        Err(transfer.unexpected())
    }
}

pub(crate) fn read(guest: &dyn Guest, path: &Path, sink: &mut dyn Write) -> Result<(), Error> {
    let request = HostExec::ReadFile(ReadFile {
        path: path.as_os_str().as_bytes().to_vec(),
    });
    let what = format!("'{}' was read", path.display());
    let mut transfer = Transfer::open(guest, &request, what)?;
    let opened = transfer.answer(None, |answer| matches!(answer, Answer::Opened))?;
    if !opened {
        return Err(transfer.unexpected());
    }
    while let Some(written) = transfer
        .answer(None, |answer| match answer {
            Answer::Data(bytes) => Ok(Some(sink.write_all(bytes))),
            Answer::Done => Ok(None),
            _ => Err(()),
        })?
        .map_err(|()| transfer.unexpected())?
    {
        written.map_err(Error::io("cannot pass on a file from the guest"))?;
    }
    Ok(())
}

pub(crate) fn stats(guest: &dyn Guest) -> Result<GuestStats, Error> {
    let what = "it was asked how it fares".to_owned();
    let mut transfer = Transfer::open(guest, &HostExec::GetStats, what)?;
    let deadline = Instant::now().checked_add(REQUEST_LIMIT);
    transfer
        .answer(deadline, |answer| match answer {
            Answer::Stats(stats) => Some(stats),
            _ => None,
        })?
        .ok_or_else(|| transfer.unexpected())
}
