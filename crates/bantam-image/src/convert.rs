//! Turns a chosen image's layers into one EROFS file.

use std::fs::File;
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use crate::digest::{Algorithm, Digest, HashingReader};
use crate::erofs::{self, DataArea, Summary};
use crate::error::{Error, Result};
use crate::layer::{Applier, Bounded, TarReader, decoder, read_failed};
use crate::limits::Limits;
use crate::manifest::{Chosen, Layer, check_size};
use crate::progress::{self, Progress, Stage};

/// Decompressed bytes handed over at a time, and how many such pieces may wait.
const PIECE: usize = 256 * 1024;
const PIECES: usize = 8;

/// Where the bytes of layers come from.
pub(crate) trait LayerBlobs: Sync {
    /// The layer as stored, perhaps compressed; `index` counts from the bottom.
    fn open(&self, index: usize, layer: &Layer) -> Result<Box<dyn Read + Send + '_>>;
}

/// Applies all layers. `image` and `spool` are empty files; the image is complete, but not yet synced, on return.
pub(crate) fn layers_to_erofs(
    blobs: &dyn LayerBlobs,
    chosen: &Chosen,
    image: File,
    spool: File,
    limits: &Limits,
    progress: &dyn Progress,
) -> Result<(File, Summary)> {
    let mut applier = Applier::new(DataArea::new(image, spool, limits.content_bytes), *limits);
    let mut left = limits.content_bytes;
    let mut seed = Vec::new();
    for (index, layer) in chosen.layers.iter().enumerate() {
        let job = LayerJob {
            blobs,
            layer,
            index,
            limits,
            progress,
        };
        job.run(&mut applier, &mut left)?;
        seed.extend_from_slice(layer.diff_id.to_string().as_bytes());
    }
    erofs::write(&applier.tree, applier.data, &seed)
}

struct LayerJob<'a> {
    blobs: &'a dyn LayerBlobs,
    layer: &'a Layer,
    index: usize,
    limits: &'a Limits,
    progress: &'a dyn Progress,
}

impl LayerJob<'_> {
    /// Reads, checks and decompresses in one thread while this one applies.
    fn run(&self, applier: &mut Applier, left: &mut u64) -> Result<()> {
        let blob = self.layer.blob.as_ref();
        let shown = progress::Layer {
            index: self.index,
            digest: blob.map_or_else(|| self.layer.diff_id.to_string(), |b| b.digest.clone()),
            size: blob.map_or(0, |b| b.size),
        };
        let what = format!("layer {}", shown.digest);
        self.progress.layer_started(Stage::Apply, &shown);
        thread::scope(|scope| {
            let (sender, receiver) = sync_channel(PIECES);
            let reading = scope.spawn(|| self.read(&what, &shown, left, sender));
            let mut archive = TarReader::new(Pieces::new(receiver), &what);
            // What follows the archive's end counts for the digest of the layer, so it is read too.
            let applied = applier.apply(&mut archive, &what).and_then(|()| {
                io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(read_failed(&what))
            });
            let read = reading.join().unwrap_or_else(|_| {
                Err(Error::malformed(&what, "the thread that read it panicked"))
            });
            // Where both failed, the archive ended or made no sense because of what the reader found.
            read.and(applied.map(drop))
        })?;
        self.progress.layer_finished(Stage::Apply, &shown);
        Ok(())
    }

    fn read(
        &self,
        what: &str,
        shown: &progress::Layer,
        left: &mut u64,
        sender: SyncSender<io::Result<Vec<u8>>>,
    ) -> Result<()> {
        let blob = self.layer.blob.as_ref();
        let want = blob.map(|b| b.digest()).transpose()?;
        let algorithm = want.as_ref().map_or(Algorithm::Sha256, Digest::algorithm);
        // One byte more than announced shows that it is too long, however much follows. A blob that nothing was
        // announced of is part of an archive, whose size bounds it.
        let most = blob.map_or(u64::MAX, |blob| blob.size.saturating_add(1));
        let opened = self.blobs.open(self.index, self.layer)?.take(most);
        let mut stored = HashingReader::new(
            Reported {
                inner: opened,
                layer: shown,
                progress: self.progress,
            },
            algorithm,
        );
        let decoded = self.decode(&mut stored, left, sender);
        // A damaged blob rarely decompresses; say that it is damaged, not how.
        if let (Some(want), Some(blob)) = (&want, blob) {
            stored.drain().map_err(read_failed(what))?;
            let (digest, size) = stored.finish();
            if size <= blob.size {
                want.expect(what, &digest)?;
            }
            check_size(what, size, blob.size)?;
        }
        let diff_id = decoded.map_err(read_failed(what))?;
        match diff_id {
            Some(diff_id) => self
                .layer
                .diff_id
                .expect(&format!("{what}, uncompressed"), &diff_id),
            // The other side gave up, and says why.
            None => Ok(()),
        }
    }

    /// Sends the decompressed layer and returns its digest; `None` when nobody listens any more.
    fn decode(
        &self,
        stored: &mut impl Read,
        left: &mut u64,
        sender: SyncSender<io::Result<Vec<u8>>>,
    ) -> io::Result<Option<Digest>> {
        let bounded = Bounded::new(decoder(stored)?, left, self.limits.content_bytes);
        let mut plain = HashingReader::new(bounded, self.layer.diff_id.algorithm());
        loop {
            let mut piece = Vec::with_capacity(PIECE);
            if let Err(error) = plain.by_ref().take(PIECE as u64).read_to_end(&mut piece) {
                // The receiver only needs to stop; this side reports the cause.
                let _ = sender.send(Err(io::ErrorKind::UnexpectedEof.into()));
                return Err(error);
            }
            if piece.is_empty() {
                return Ok(Some(plain.finish().0));
            }
            if sender.send(Ok(piece)).is_err() {
                return Ok(None);
            }
        }
    }
}

/// The receiving end of the pieces, as a reader.
struct Pieces {
    receiver: Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    position: usize,
}

impl Pieces {
    fn new(receiver: Receiver<io::Result<Vec<u8>>>) -> Self {
        Self {
            receiver,
            piece: Vec::new(),
            position: 0,
        }
    }
}

impl Read for Pieces {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.position == self.piece.len() {
            match self.receiver.recv() {
                Ok(piece) => self.piece = piece?,
                // The sender is gone: the end, or an error that it reports itself.
                Err(_) => return Ok(0),
            }
            self.position = 0;
        }
        let rest = &self.piece[self.position..];
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        self.position += n;
        Ok(n)
    }
}

/// Reports what passes through it.
struct Reported<'a, R> {
    inner: R,
    layer: &'a progress::Layer,
    progress: &'a dyn Progress,
}

impl<R: Read> Read for Reported<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.progress
            .layer_advanced(Stage::Apply, self.layer, n as u64);
        Ok(n)
    }
}
