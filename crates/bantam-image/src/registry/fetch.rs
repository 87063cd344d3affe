//! Fetches layers into the store, several at a time ([`budget`](super::budget)).
//!
//! What has come of a layer lies in the store's `tmp` under the layer's digest, and stays there when a pull fails or
//! its process is killed: the next pull goes on from there. It is never taken for the layer, which gets its name only
//! once its digest is found right. What nobody asked for again within a day is removed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ureq::http::header;

use super::Client;
use super::budget::{LAYERS, PER_REGISTRY};
use super::endpoint::Endpoint;
use super::http::{Answer, Failure, STOPPED};
use super::retry::backoff;
use crate::digest::{Digest, Hasher};
use crate::error::{Error, Result};
use crate::manifest::{Chosen, Descriptor};
use crate::progress::{Layer, Progress, Stage};
use crate::store::{BlobDir, WorkDir, lock, open_or_create, publish};

/// How long the beginning of a layer is kept.
const PARTIAL_LIFETIME: Duration = Duration::from_secs(24 * 3600);

impl Client<'_> {
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
        // Makes `tmp` and removes what dead processes left in it.
        drop(WorkDir::new(store)?);
        remove_partials(store, PARTIAL_LIFETIME);
        let threads = wanted.len().min(PER_REGISTRY);
        let queue = Mutex::new(wanted.into_iter());
        let results = thread::scope(|scope| {
            let worker = || -> Result<()> {
                while !self.http.stop.is_set() {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some((digest, blob, layer)) = next else {
                        break;
                    };
                    let one = One {
                        client: self,
                        path: format!("blobs/{digest}"),
                        digest: &digest,
                        size: blob.size,
                        layer: &layer,
                        progress,
                    };
                    if let Err(error) = one.fetch(blobs, store) {
                        LAYERS.stop(&self.http.stop);
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
                    failure = failure.or(Some(Error::Registry {
                        what: "download of layers".to_owned(),
                        why: "a thread panicked".to_owned(),
                        status: None,
                    }));
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }
}

/// One blob on its way.
struct One<'a> {
    client: &'a Client<'a>,
    path: String,
    digest: &'a Digest,
    size: u64,
    layer: &'a Layer,
    progress: &'a dyn Progress,
}

/// What there is of it.
struct Partial {
    path: PathBuf,
    file: File,
    hasher: Hasher,
    got: u64,
    /// Whether some of it is from an earlier pull.
    is_inherited: bool,
}

impl Partial {
    fn open(store: &Path, digest: &Digest, size: u64) -> Result<Self> {
        let path = partials(store).join(format!("{PREFIX}{}", digest.file_name()));
        let file = open_or_create(&path)?;
        let mut partial = Self {
            path,
            file,
            hasher: Hasher::new(digest.algorithm()),
            got: 0,
            is_inherited: false,
        };
        partial
            .inherit(digest, size)
            .map_err(Error::io(format!("cannot go on with layer {digest}")))?;
        Ok(partial)
    }

    /// Takes over what an earlier pull has left.
    fn inherit(&mut self, digest: &Digest, size: u64) -> io::Result<()> {
        if self.file.metadata()?.len() > size {
            return self.discard(digest);
        }
        let mut buf = vec![0; 128 * 1024];
        loop {
            let n = self.file.read(&mut buf)?;
            if n == 0 {
                break;
            }
            self.hasher.update(&buf[..n]);
            self.got += n as u64;
        }
        self.is_inherited = self.got > 0;
        Ok(())
    }

    fn discard(&mut self, digest: &Digest) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.hasher = Hasher::new(digest.algorithm());
        self.got = 0;
        self.is_inherited = false;
        Ok(())
    }
}

const PREFIX: &str = "partial-";

fn partials(store: &Path) -> PathBuf {
    store.join("tmp")
}

/// Removes beginnings of layers that were last added to longer ago than that. In a day every pull has gone on or ended.
pub(crate) fn remove_partials(store: &Path, age: Duration) {
    let Ok(entries) = fs::read_dir(partials(store)) else {
        return;
    };
    for entry in entries.flatten() {
        let is_partial = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let changed = entry.metadata().and_then(|meta| meta.modified());
        let is_old = changed.is_ok_and(|at| at.elapsed().is_ok_and(|since| since >= age));
        if is_partial && is_old {
            let path = entry.path();
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove an old partial layer");
            }
        }
    }
}

impl One<'_> {
    fn fetch(&self, blobs: &BlobDir, store: &Path) -> Result<()> {
        let _lock = lock(store, &format!("blob-{}", self.digest.file_name()), || {
            self.progress
                .message("another process is fetching a layer of this image; waiting for it");
        })?;
        if blobs.has(self.digest, self.size) {
            return Ok(());
        }
        // After the lock, so that nobody has a share who waits for another process.
        let Some(_share) = LAYERS.take(self.client.registry(), &self.client.http.stop) else {
            return Err(Error::Registry {
                what: format!("layer {}", self.digest),
                why: STOPPED.to_owned(),
                status: None,
            });
        };
        self.progress.layer_started(Stage::Download, self.layer);
        let mut partial = Partial::open(store, self.digest, self.size)?;
        if partial.is_inherited {
            self.progress
                .layer_advanced(Stage::Download, self.layer, partial.got);
        }
        let result = self
            .client
            .each(&mut |endpoint| self.complete(endpoint, &mut partial))
            .and_then(|()| partial.file.sync_all().map_err(self.not_stored()));
        if let Err(error) = result {
            // A full disk is not to be kept full.
            if partial.got == 0 || matches!(error, Error::Io { .. }) {
                let _ = fs::remove_file(&partial.path);
            }
            return Err(error);
        }
        publish(&partial.path, &blobs.path(self.digest))?;
        self.progress.layer_finished(Stage::Download, self.layer);
        Ok(())
    }

    /// Gets from `endpoint` what is missing, and checks the whole. What another endpoint sent of it stays if the
    /// connection broke off, and goes if it was wrong.
    fn complete(&self, endpoint: &Endpoint, partial: &mut Partial) -> Result<()> {
        let client = self.client;
        let timeouts = &client.http.timeouts;
        let deadline = client.http.deadline(self.size);
        let mut etag = None;
        let mut idle = 0;
        // Nothing can be asked for beyond the end.
        while partial.got < self.size || partial.got == 0 {
            let before = partial.got;
            let Err(why) = self.read_on(endpoint, partial, &mut etag, deadline)? else {
                break;
            };
            idle = if partial.got > before { 1 } else { idle + 1 };
            let (got, size) = (partial.got, self.size);
            let why = format!("{why} after {got} of {size} bytes");
            if idle > timeouts.retries || Instant::now() > deadline {
                return Err(self.failed(endpoint, Failure::new(why, None)));
            }
            let what = client.what(endpoint, &self.path);
            client
                .http
                .pause(&format!("{what}: {why}"), backoff(timeouts.backoff, idle))
                .map_err(|failure| self.failed(endpoint, failure))?;
        }
        let hasher = std::mem::replace(&mut partial.hasher, Hasher::new(self.digest.algorithm()));
        let what = client.what(endpoint, &self.path);
        let Err(error) = self.digest.expect(&what, &hasher.finish()) else {
            return Ok(());
        };
        let was_inherited = partial.is_inherited;
        self.discard(partial)?;
        if was_inherited {
            // It may have been wrong before, as when power failed. This is tried without, once.
            return self.complete(endpoint, partial);
        }
        Err(error)
    }

    /// Reads from where the blob stops here. The inner error says why a body broke off, which may be mended.
    fn read_on(
        &self,
        endpoint: &Endpoint,
        partial: &mut Partial,
        etag: &mut Option<String>,
        deadline: Instant,
    ) -> Result<Result<(), String>> {
        let client = self.client;
        let mut headers = vec![(header::ACCEPT, "*/*".to_owned())];
        if partial.got > 0 {
            headers.push((header::RANGE, format!("bytes={}-", partial.got)));
            if let Some(etag) = etag {
                headers.push((header::IF_RANGE, etag.clone()));
            }
        }
        let answer = endpoint
            .get(&client.http, &client.finder(), &self.path, &headers)
            .map_err(|failure| self.failed(endpoint, failure))?;
        // A weak tag does not say that the bytes are the same.
        *etag = answer
            .header(header::ETAG)
            .filter(|tag| tag.starts_with('"'))
            .map(str::to_owned);
        // A server may know no ranges and send all of it: what is here already is then read over.
        let mut over = match answer.status() {
            206 => {
                self.check_range(endpoint, partial, &answer)?;
                0
            }
            _ => partial.got,
        };
        let mut body = answer.response.into_body().into_reader();
        let mut buf = vec![0; 128 * 1024];
        loop {
            if client.http.stop.is_set() {
                return Err(self.failed(endpoint, Failure::new(STOPPED, None)));
            }
            let n = match body.read(&mut buf) {
                Ok(0) if partial.got == self.size => return Ok(Ok(())),
                Ok(0) => return Ok(Err("ends".to_owned())),
                Ok(n) => n,
                Err(_) if partial.got == self.size => return Ok(Ok(())),
                Err(e) => return Ok(Err(format!("breaks off ({e})"))),
            };
            let known = usize::try_from(over).map_or(n, |over| over.min(n));
            over -= known as u64;
            let fresh = &buf[known..n];
            if partial.got + fresh.len() as u64 > self.size {
                self.discard(partial)?;
                let why = format!("sends more than the {} bytes of the layer", self.size);
                return Err(self.failed(endpoint, Failure::new(why, None)));
            }
            partial.file.write_all(fresh).map_err(self.not_stored())?;
            partial.hasher.update(fresh);
            partial.got += fresh.len() as u64;
            self.progress
                .layer_advanced(Stage::Download, self.layer, fresh.len() as u64);
            if Instant::now() > deadline {
                return Ok(Err("comes too slowly, and is given up".to_owned()));
            }
        }
    }

    /// A part must be the one that was asked for, of a blob of this size.
    fn check_range(&self, endpoint: &Endpoint, partial: &Partial, answer: &Answer) -> Result<()> {
        let range = answer.header(header::CONTENT_RANGE).unwrap_or_default();
        let start = format!("bytes {}-", partial.got);
        let size = range.rsplit_once('/').map(|(_, size)| size);
        let fits = range.starts_with(&start)
            && size.is_some_and(|size| size == "*" || size.parse() == Ok(self.size));
        if fits {
            return Ok(());
        }
        let why = format!(
            "asked for what follows byte {}, it sends {range:?}",
            partial.got
        );
        Err(self.failed(endpoint, Failure::new(why, Some(206))))
    }

    fn discard(&self, partial: &mut Partial) -> Result<()> {
        partial.discard(self.digest).map_err(self.not_stored())
    }

    fn not_stored(&self) -> impl FnOnce(io::Error) -> Error + use<> {
        Error::io(format!("cannot store layer {}", self.digest))
    }

    fn failed(&self, endpoint: &Endpoint, failure: Failure) -> Error {
        self.client.failed(endpoint, &self.path, failure)
    }
}
