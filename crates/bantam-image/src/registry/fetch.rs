//! Fetches layers into the store, several at a time.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::Client;
use crate::digest::{Digest, HashingReader};
use crate::error::{Error, Result};
use crate::manifest::{Chosen, Descriptor};
use crate::progress::{Layer, Progress, Stage};
use crate::store::{BlobDir, WorkDir, lock, publish};

/// Layers on the way at once.
const PARALLEL: usize = 3;

impl Client {
    /// Makes sure that every layer's blob is in `blobs`. Each is fetched once, by one process.
    pub(crate) fn fetch(
        &self,
        chosen: &Chosen,
        blobs: &BlobDir,
        store: &Path,
        progress: &dyn Progress,
    ) -> Result<()> {
        let mut wanted: Vec<(Digest, &Descriptor, Layer)> = Vec::new();
        let mut seen = BTreeSet::new();
        for (index, layer) in chosen.layers.iter().enumerate() {
            let Some(blob) = &layer.blob else { continue };
            let digest = blob.digest()?;
            if seen.insert(digest.clone()) && !blobs.has(&digest, blob.size) {
                let layer = Layer {
                    index,
                    digest: digest.to_string(),
                    size: blob.size,
                };
                wanted.push((digest, blob, layer));
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let work = WorkDir::new(store)?;
        let threads = wanted.len().min(PARALLEL);
        let queue = Mutex::new(wanted.into_iter());
        let stop = AtomicBool::new(false);
        let results = thread::scope(|scope| {
            let worker = || -> Result<()> {
                while !stop.load(Ordering::Relaxed) {
                    let next = queue
                        .lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner)
                        .next();
                    let Some((digest, blob, layer)) = next else {
                        break;
                    };
                    let one = One {
                        client: self,
                        digest: &digest,
                        size: blob.size,
                        layer: &layer,
                        stop: &stop,
                    };
                    if let Err(error) = one.fetch(blobs, store, &work, progress) {
                        stop.store(true, Ordering::Relaxed);
                        return Err(error);
                    }
                }
                Ok(())
            };
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
            workers.into_iter().map(|w| w.join()).collect::<Vec<_>>()
        });
        let mut failure = None;
        for result in results {
            match result {
                Ok(Ok(())) => {}
                // Others only stopped because of the first.
                Ok(Err(Error::Registry { why, .. })) if why == STOPPED => {}
                Ok(Err(error)) => failure = failure.or(Some(error)),
                Err(_) => {
                    failure = failure.or(Some(self.failed(
                        "blobs",
                        "a download thread panicked".into(),
                        None,
                    )))
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }
}

const STOPPED: &str = "stopped, as another layer failed";

/// One blob on its way.
struct One<'a> {
    client: &'a Client,
    digest: &'a Digest,
    size: u64,
    layer: &'a Layer,
    stop: &'a AtomicBool,
}

impl One<'_> {
    fn fetch(
        &self,
        blobs: &BlobDir,
        store: &Path,
        work: &WorkDir,
        progress: &dyn Progress,
    ) -> Result<()> {
        let _lock = lock(store, &format!("blob-{}", self.digest.file_name()), || {
            progress.message("another process is fetching a layer of this image; waiting for it");
        })?;
        if blobs.has(self.digest, self.size) {
            return Ok(());
        }
        progress.layer_started(Stage::Download, self.layer);
        let path = format!("blobs/{}", self.digest);
        let mut body = HashingReader::new(self.client.blob(self.digest)?, self.digest.algorithm());
        let name = self.digest.file_name();
        let mut file = work.create(&name)?;
        let store_failed = || Error::io(format!("cannot store layer {}", self.digest));
        let mut buf = vec![0; 128 * 1024];
        let mut got = 0_u64;
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(self.client.failed(&path, STOPPED.to_owned(), None));
            }
            let n = body
                .read(&mut buf)
                .map_err(|e| self.client.failed(&path, e.to_string(), None))?;
            if n == 0 {
                break;
            }
            got += n as u64;
            if got > self.size {
                let why = format!("sends more than the {} bytes of the layer", self.size);
                return Err(self.client.failed(&path, why, None));
            }
            file.write_all(&buf[..n]).map_err(store_failed())?;
            progress.layer_advanced(Stage::Download, self.layer, n as u64);
        }
        if got != self.size {
            let why = format!("ends after {got} of {} bytes", self.size);
            return Err(self.client.failed(&path, why, None));
        }
        self.digest.expect(
            &format!("layer {} from the registry", self.digest),
            &body.finish().0,
        )?;
        file.sync_all().map_err(store_failed())?;
        publish(&work.path().join(&name), &blobs.path(self.digest))?;
        progress.layer_finished(Stage::Download, self.layer);
        Ok(())
    }
}
