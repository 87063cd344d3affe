//! Files in a machine.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use bantam_protocol::{GuestExec, HostExec, ReadFile, WriteFile};
use std::os::unix::ffi::OsStrExt;

use crate::Error;
use crate::machine::{Inner, REQUEST_LIMIT};
use crate::wire::{self, FrameReceiver, FrameSender, ReceiveError};

enum Answer {
    Opened,
    Data(io::Result<()>),
    Done,
    Failed(Error),
}

struct Transfer {
    machine: Arc<Inner>,
    sender: FrameSender,
    receiver: FrameReceiver,
    what: String,
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.sender.hang_up();
    }
}

impl Transfer {
    fn open(machine: &Arc<Inner>, request: &HostExec<'_>, what: String) -> Result<Self, Error> {
        let (sender, receiver) = wire::split(machine.connect_exec()?, wire::UNLIMITED)?;
        let transfer = Self {
            machine: Arc::clone(machine),
            sender,
            receiver,
            what,
        };
        transfer
            .sender
            .send_request(request, REQUEST_LIMIT)
            .map_err(|_| transfer.gone())?;
        Ok(transfer)
    }

    fn gone(&self) -> Error {
        self.machine.died(self.what.clone())
    }

    fn answer(&mut self, sink: &mut dyn Write) -> Result<Answer, Error> {
        let received = self.receiver.receive(None, |frame| {
            Ok(match GuestExec::decode(&frame)? {
                GuestExec::FileOpened(_) => Answer::Opened,
                GuestExec::Stdout(bytes) => Answer::Data(sink.write_all(bytes)),
                GuestExec::FileDone => Answer::Done,
                GuestExec::FileFailed(failure) => Answer::Failed(Error::File {
                    kind: failure.kind,
                    message: failure.message,
                }),
                other => Answer::Failed(Error::Protocol(format!("{other:?} in a file transfer"))),
            })
        });
        match received {
            Ok(answer) => Ok(answer),
            Err(ReceiveError::Protocol(error)) => Err(Error::Protocol(error.to_string())),
            Err(ReceiveError::Gone | ReceiveError::TimedOut) => Err(self.gone()),
        }
    }
}

pub(crate) fn write(
    machine: &Arc<Inner>,
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
    let mut transfer = Transfer::open(machine, &request, what)?;
    // Without the end of the input the guest leaves the file as it was.
    wire::send_all(content, &transfer.sender)
        .map_err(Error::io("cannot read the bytes for a file in the guest"))?;
    // If this fails the answer, or its absence, says why.
    let _ = transfer.sender.send(&HostExec::StdinEof);
    loop {
        match transfer.answer(&mut io::sink())? {
            Answer::Opened | Answer::Data(_) => {}
            Answer::Done => return Ok(()),
            Answer::Failed(error) => return Err(error),
        }
    }
}

pub(crate) fn read(machine: &Arc<Inner>, path: &Path, sink: &mut dyn Write) -> Result<(), Error> {
    let request = HostExec::ReadFile(ReadFile {
        path: path.as_os_str().as_bytes().to_vec(),
    });
    let what = format!("'{}' was read", path.display());
    let mut transfer = Transfer::open(machine, &request, what)?;
    loop {
        match transfer.answer(sink)? {
            Answer::Opened => {}
            Answer::Data(result) => {
                result.map_err(Error::io("cannot pass on a file from the guest"))?;
            }
            Answer::Done => return Ok(()),
            Answer::Failed(error) => return Err(error),
        }
    }
}
