//! The block device (virtio 1.3 §5.2) over a raw file.

use std::fs::File;
use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use vm_memory::VolatileSlice;

use crate::device::read_config_bytes;
use crate::sys;
use crate::warned::Warned;
use crate::worker::{RequestHandler, Worker, serve_requests};
use crate::{Activation, Chain, DeviceType, Error, GuestRam, Result, VirtioDevice};

/// Bytes in a sector, the unit of every address (§5.2.4).
pub const SECTOR: u64 = 512;
/// Most bytes of one request; a longer one fails. Linux keeps to [`MAX_SEGMENTS`] pages of 64 KiB.
pub const MAX_REQUEST: u32 = 32 << 20;
/// Most data buffers the driver is told to put into a request.
pub const MAX_SEGMENTS: u32 = 254;
/// Most sectors of one discard or write-zeroes segment.
pub const MAX_DISCARD_SECTORS: u32 = 1 << 22;

const NAME: &str = "blk";
const QUEUE_SIZES: &[u16] = &[256];

/// Feature bits (§5.2.3).
mod feature {
    use virtio_bindings::virtio_blk as blk;
    pub(super) const SEG_MAX: u64 = 1 << blk::VIRTIO_BLK_F_SEG_MAX;
    pub(super) const RO: u64 = 1 << blk::VIRTIO_BLK_F_RO;
    pub(super) const FLUSH: u64 = 1 << blk::VIRTIO_BLK_F_FLUSH;
    pub(super) const DISCARD: u64 = 1 << blk::VIRTIO_BLK_F_DISCARD;
    pub(super) const WRITE_ZEROES: u64 = 1 << blk::VIRTIO_BLK_F_WRITE_ZEROES;
}

/// A request's answer (§5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Status {
    Ok = 0,
    IoErr = 1,
    Unsupported = 2,
}

const HEADER: u32 = 16;
const ID_BYTES: usize = 20;

/// A disk.
pub struct BlockDevice {
    disk: Arc<Disk>,
    config: Vec<u8>,
    worker: Option<Worker>,
    failed: Arc<Warned>,
}

struct Disk {
    file: File,
    read_only: bool,
    sectors: u64,
    id: [u8; ID_BYTES],
    /// Whether it was said that the host has no room.
    said_full: Warned,
}

impl BlockDevice {
    /// A disk whose sectors are those of `file`, a regular file or a block device; bytes past the
    /// last whole sector are not part of it. The format is raw: nothing in the file is interpreted.
    ///
    /// With `read_only` every write is refused here, whatever the guest believes; open the file
    /// without write access as well. The first 20 bytes of `id` are the disk's serial number.
    ///
    /// # Errors
    /// [`Error::Backing`] when the file's size cannot be found out.
    pub fn new(mut file: File, read_only: bool, id: &str) -> Result<BlockDevice> {
        use std::io::{Seek, SeekFrom};
        // Unlike metadata, this knows the size of a block device too.
        let bytes = file
            .seek(SeekFrom::End(0))
            .map_err(|source| Error::Backing {
                id: id.to_owned(),
                source,
            })?;
        let mut serial = [0; ID_BYTES];
        let len = id.len().min(ID_BYTES);
        serial[..len].copy_from_slice(&id.as_bytes()[..len]);
        let disk = Disk {
            file,
            read_only,
            sectors: bytes / SECTOR,
            id: serial,
            said_full: Warned::default(),
        };
        Ok(BlockDevice {
            config: disk.config(),
            disk: Arc::new(disk),
            worker: None,
            failed: Arc::default(),
        })
    }
}

impl VirtioDevice for BlockDevice {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }

    fn queue_max_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        if self.disk.read_only {
            feature::SEG_MAX | feature::RO
        } else {
            feature::SEG_MAX | feature::FLUSH | feature::DISCARD | feature::WRITE_ZEROES
        }
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<()> {
        if self.worker.is_some() {
            return Err(Error::AlreadyActive { device: NAME });
        }
        let disk = self.disk.clone();
        self.worker = Some(Worker::spawn(NAME, &self.failed, move |stop| {
            serve_requests(stop, activation.queues, Requests { disk })
        })?);
        Ok(())
    }

    fn reset(&mut self) {
        self.worker = None;
    }
}

impl Drop for Disk {
    /// A child process that is just being started has a copy of the descriptor until it executes
    /// its program; with it, closing ours would not end a lock of the caller's on the file.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

impl Disk {
    /// The configuration space (§5.2.4).
    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; 60];
        let mut put = |offset: usize, value: &[u8]| {
            config[offset..offset + value.len()].copy_from_slice(value);
        };
        put(0, &self.sectors.to_le_bytes());
        put(12, &MAX_SEGMENTS.to_le_bytes());
        if !self.read_only {
            put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
            put(40, &1_u32.to_le_bytes()); // max_discard_seg
            put(44, &1_u32.to_le_bytes()); // discard_sector_alignment
            put(48, &MAX_DISCARD_SECTORS.to_le_bytes());
            put(52, &1_u32.to_le_bytes()); // max_write_zeroes_seg
            put(56, &[1]); // write_zeroes_may_unmap
        }
        config
    }

    /// The byte offset of a range of the disk, if all of it exists.
    fn range(&self, sector: u64, bytes: u64) -> Option<i64> {
        let start = sector.checked_mul(SECTOR)?;
        let end = start.checked_add(bytes)?;
        if end > self.sectors.checked_mul(SECTOR)? {
            return None;
        }
        i64::try_from(start).ok()
    }

    fn failed(&self, what: &str, sector: u64, error: &io::Error) -> (Status, u32) {
        let full = error.kind() == io::ErrorKind::StorageFull;
        if full && self.said_full.first() {
            // The guest only sees an I/O error.
            let id = String::from_utf8_lossy(&self.id);
            let id = id.trim_end_matches('\0');
            tracing::warn!("{id}: the host has no room for what the guest writes");
        }
        tracing::debug!(sector, %error, "disk {what} failed");
        (Status::IoErr, 0)
    }
}

struct Requests {
    disk: Arc<Disk>,
}

impl RequestHandler for Requests {
    fn handle(&mut self, _queue: u16, chain: &Chain, memory: &GuestRam) -> io::Result<u32> {
        // The last writable byte is the status; without it there is nobody to tell.
        let Some(room) = chain.writable().len().checked_sub(1) else {
            return Ok(0);
        };
        let (status, written) = self.perform(chain, memory, room);
        chain.writable().write_at(memory, room, &[status as u8]);
        // "Used length" counts from the front (§2.7.8): with data missing, the status byte behind
        // it cannot be counted.
        Ok(if written == room { room + 1 } else { written })
    }
}

impl Requests {
    /// Performs a request with `room` bytes to write to; gives how many were.
    fn perform(&self, chain: &Chain, memory: &GuestRam, room: u32) -> (Status, u32) {
        let mut header = [0; HEADER as usize];
        if chain.readable().read_at(memory, 0, &mut header) < header.len() {
            return (Status::IoErr, 0);
        }
        let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        let payload = chain.readable().len() - HEADER;
        let disk = &*self.disk;
        match u32::from_le_bytes([t0, t1, t2, t3]) {
            VIRTIO_BLK_T_IN => match self.read(chain, memory, sector, room) {
                Ok(()) => (Status::Ok, room),
                Err(error) => disk.failed("read", sector, &error),
            },
            VIRTIO_BLK_T_GET_ID => {
                let written = chain.writable().write_at(memory, 0, &disk.id);
                (Status::Ok, room.min(u32::try_from(written).unwrap_or(room)))
            }
            // A read-only disk has nothing to flush.
            VIRTIO_BLK_T_FLUSH if disk.read_only => (Status::Ok, 0),
            VIRTIO_BLK_T_OUT | VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES
                if disk.read_only =>
            {
                (Status::IoErr, 0)
            }
            VIRTIO_BLK_T_FLUSH => match disk.file.sync_data() {
                Ok(()) => (Status::Ok, 0),
                Err(error) => disk.failed("flush", sector, &error),
            },
            VIRTIO_BLK_T_OUT => match self.write(chain, memory, sector, payload) {
                Ok(()) => (Status::Ok, 0),
                Err(error) => disk.failed("write", sector, &error),
            },
            kind @ (VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES) => {
                (self.zero(chain, memory, kind == VIRTIO_BLK_T_DISCARD), 0)
            }
            // SCSI commands among them.
            _ => (Status::Unsupported, 0),
        }
    }

    fn read(&self, chain: &Chain, memory: &GuestRam, sector: u64, len: u32) -> io::Result<()> {
        let offset = self.checked_range(sector, len)?;
        let mut slices = Vec::with_capacity(16);
        chain.writable().slices(memory, 0, len, &mut slices);
        transfer(&mut slices, offset, |slices, offset| {
            sys::read_vectored_at(&self.disk.file, slices, offset)
        })
    }

    fn write(&self, chain: &Chain, memory: &GuestRam, sector: u64, len: u32) -> io::Result<()> {
        let offset = self.checked_range(sector, len)?;
        let mut slices = Vec::with_capacity(16);
        chain.readable().slices(memory, HEADER, len, &mut slices);
        transfer(&mut slices, offset, |slices, offset| {
            sys::write_vectored_at(&self.disk.file, slices, offset)
        })
    }

    fn checked_range(&self, sector: u64, len: u32) -> io::Result<i64> {
        if len > MAX_REQUEST || !u64::from(len).is_multiple_of(SECTOR) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.disk
            .range(sector, len.into())
            .ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Discard or write zeroes: one segment of sector, count and flags (§5.2.6).
    fn zero(&self, chain: &Chain, memory: &GuestRam, discard: bool) -> Status {
        const UNMAP: u32 = 1;
        let mut segment = [0; 16];
        let got = chain.readable().read_at(memory, HEADER, &mut segment);
        if got < segment.len() || chain.readable().len() != HEADER + 16 {
            return Status::IoErr;
        }
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = segment;
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let count = u32::from_le_bytes([n0, n1, n2, n3]);
        let flags = u32::from_le_bytes(flags);
        let known = if discard { 0 } else { UNMAP };
        if flags & !known != 0 {
            return Status::Unsupported;
        }
        let bytes = u64::from(count) * SECTOR;
        let Some(offset) = self
            .disk
            .range(sector, bytes)
            .filter(|_| count <= MAX_DISCARD_SECTORS)
            .and_then(|offset| u64::try_from(offset).ok())
        else {
            return Status::IoErr;
        };
        if bytes == 0 {
            return Status::Ok;
        }
        let done = if discard || flags & UNMAP != 0 {
            sys::punch_hole(&self.disk.file, offset, bytes)
        } else {
            sys::zero_range(&self.disk.file, offset, bytes)
        };
        match done {
            Ok(()) => Status::Ok,
            // The file system cannot; the driver stops asking.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Status::Unsupported,
            Err(error) => self.disk.failed("discard", sector, &error).0,
        }
    }
}

/// Repeats `step` until all of `slices` is transferred.
fn transfer(
    slices: &mut Vec<VolatileSlice<'_, ()>>,
    mut offset: i64,
    step: impl Fn(&[VolatileSlice<'_, ()>], i64) -> io::Result<usize>,
) -> io::Result<()> {
    while !slices.is_empty() {
        let done = match step(slices, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(done) => done,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        offset += i64::try_from(done).map_err(io::Error::other)?;
        let mut left = done;
        let whole = slices
            .iter()
            .take_while(|slice| {
                let fits = slice.len() <= left;
                if fits {
                    left -= slice.len();
                }
                fits
            })
            .count();
        slices.drain(..whole);
        if left > 0
            && let Some(first) = slices.first_mut()
        {
            *first = first.offset(left).map_err(io::Error::other)?;
        }
    }
    Ok(())
}
