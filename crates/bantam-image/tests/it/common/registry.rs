//! A registry that misbehaves as a test tells it.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bantam_image::{
    Error, Image, ImageSource, NoProgress, Progress, Registries, ResolveOptions, Store, Timeouts,
};
use serde_json::json;
use tempfile::TempDir;

use super::image::{OCI_CONFIG, OCI_LAYER, OCI_MANIFEST};
use super::{Layout, Tar, digest, gzip, read_erofs};

/// An address where nobody listens. A port that was free a moment ago might be another test's by now; this one is never
/// given out by itself.
pub(crate) const NOBODY: &str = "127.0.0.1:1";

/// A request as the server saw it. Header names are in lower case.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) body: String,
    pub(crate) headers: HashMap<String, String>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

#[derive(Clone, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Instead of the body's length.
    pub(crate) content_length: Option<usize>,
    /// The connection then stays open, and nothing more comes.
    pub(crate) stalls: bool,
}

impl Reply {
    pub(crate) fn ok(content_type: &str, body: &[u8]) -> Self {
        Self {
            status: 200,
            body: body.to_vec(),
            ..Self::default()
        }
        .header("Content-Type", content_type)
    }
    pub(crate) fn status(status: u16) -> Self {
        Self {
            status,
            ..Self::default()
        }
    }
    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }
    pub(crate) fn body(mut self, body: &str) -> Self {
        self.body = body.as_bytes().to_vec();
        self
    }
    pub(crate) fn json(body: &serde_json::Value) -> Self {
        Self::ok("application/json", body.to_string().as_bytes())
    }
    /// Announces the whole body and sends its first `bytes` only.
    pub(crate) fn cut(mut self, bytes: usize) -> Self {
        self.content_length = Some(self.body.len());
        self.body.truncate(bytes);
        self
    }
    /// The part of the body that a request's Range asks for.
    pub(crate) fn ranged(mut self, request: &Request) -> Self {
        let from = request
            .header("range")
            .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-'));
        if let Some(from) = from {
            let (from, size): (usize, _) = (from.parse().unwrap(), self.body.len());
            self.status = 206;
            self.body.drain(..from);
            let range = format!("bytes {from}-{}/{size}", size - 1);
            return self.header("Content-Range", range);
        }
        self
    }
}

/// An HTTP server for as long as the test runs.
pub(crate) struct Server {
    pub(crate) address: String,
    pub(crate) seen: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub(crate) fn start(handler: impl Fn(&Request, &str) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1", handler)
    }

    /// At an address of this host; that of IPv6 stands in brackets.
    pub(crate) fn start_at(
        ip: &str,
        handler: impl Fn(&Request, &str) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(format!("{ip}:0")).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let handler = Arc::new(handler);
        let (log, own) = (Arc::clone(&seen), address.clone());
        std::thread::spawn(move || {
            // A connection that the client gave up is an error here, and no reason to serve nobody else.
            for stream in listener.incoming().flatten() {
                let (handler, log, own) = (Arc::clone(&handler), Arc::clone(&log), own.clone());
                std::thread::spawn(move || serve(stream, &*handler, &log, &own));
            }
        });
        Self { address, seen }
    }

    pub(crate) fn seen(&self, part: &str) -> Vec<Request> {
        self.seen
            .lock()
            .unwrap()
            .iter()
            .filter(|r| r.path.contains(part))
            .cloned()
            .collect()
    }

    pub(crate) fn pull(&self, name: &str) -> Result<(Image, TempDir), Error> {
        self.pull_with(name, quick(), &NoProgress)
    }

    pub(crate) fn pull_with(
        &self,
        name: &str,
        registries: Registries,
        progress: &dyn Progress,
    ) -> Result<(Image, TempDir), Error> {
        pull(&format!("{}/{name}", self.address), registries, progress)
    }
}

/// Pulls into a store of its own.
pub(crate) fn pull(
    name: &str,
    registries: Registries,
    progress: &dyn Progress,
) -> Result<(Image, TempDir), Error> {
    let store = tempfile::tempdir().unwrap();
    let options = ResolveOptions {
        registries,
        ..ResolveOptions::default()
    };
    let image =
        Store::open(store.path())?.resolve(&ImageSource::parse(name)?, &options, progress)?;
    Ok((image, store))
}

/// Nothing of this host's, and no long pauses.
pub(crate) fn quick() -> Registries {
    Registries {
        credential_files: Some(Vec::new()),
        certificate_dirs: Some(Vec::new()),
        timeouts: Timeouts {
            backoff: Duration::from_millis(1),
            ..Timeouts::default()
        },
        ..Registries::default()
    }
}

fn serve(
    stream: TcpStream,
    handler: &dyn Fn(&Request, &str) -> Reply,
    log: &Mutex<Vec<Request>>,
    own: &str,
) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut lines = reader.by_ref().lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let mut request = Request {
        method: first.split(' ').next().unwrap_or("").to_owned(),
        path: first.split(' ').nth(1).unwrap_or("").to_owned(),
        ..Request::default()
    };
    for line in lines.by_ref().take_while(|line| !line.is_empty()) {
        if let Some((name, value)) = line.split_once(':') {
            request
                .headers
                .insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    drop(lines);
    let length = request.header("content-length").map(str::parse::<u64>);
    if let Some(Ok(length)) = length {
        let _ = reader.take(length).read_to_string(&mut request.body);
    }
    log.lock().unwrap().push(request.clone());
    let reply = handler(&request, own);
    let length = reply.content_length.unwrap_or(reply.body.len());
    let mut head = format!(
        "HTTP/1.1 {} X\r\nContent-Length: {length}\r\nConnection: close\r\n",
        reply.status
    );
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let mut stream = stream;
    let _ = stream.write_all(format!("{head}\r\n").as_bytes());
    let _ = stream.write_all(&reply.body);
    if reply.stalls {
        // Until the client has had enough.
        let _ = stream.read(&mut [0]);
    }
}

/// A one-layer image: by path below the repository, its content type and bytes.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) objects: HashMap<String, (String, Vec<u8>)>,
    pub(crate) layer: String,
    pub(crate) manifest: String,
}

pub(crate) fn served() -> Served {
    let plain = Tar::new()
        .file("which", "pulled")
        .file("big", vec![1; 400_000])
        .finish();
    let blob = gzip(&plain);
    let config = Layout::config(&[digest(&plain)]).to_string();
    let manifest = json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": digest(config.as_bytes()), "size": config.len()},
        "layers": [{"mediaType": OCI_LAYER, "digest": digest(&blob), "size": blob.len()}]})
    .to_string();
    let mut objects = HashMap::new();
    for tag in ["1".to_owned(), digest(manifest.as_bytes())] {
        objects.insert(
            format!("manifests/{tag}"),
            (OCI_MANIFEST.to_owned(), manifest.clone().into_bytes()),
        );
    }
    let octets = "application/octet-stream".to_owned();
    let layer = format!("blobs/{}", digest(&blob));
    objects.insert(layer.clone(), (octets.clone(), blob));
    objects.insert(
        format!("blobs/{}", digest(config.as_bytes())),
        (octets, config.into_bytes()),
    );
    Served {
        objects,
        layer,
        manifest: digest(manifest.as_bytes()),
    }
}

impl Served {
    pub(crate) fn reply(&self, request: &Request) -> Reply {
        match request
            .path
            .strip_prefix("/v2/lib/app/")
            .and_then(|path| self.objects.get(path))
        {
            Some((content_type, bytes)) => Reply::ok(content_type, bytes),
            None => Reply::status(404).body(
                r#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"no\u001b[31m such thing"}]}"#,
            ),
        }
    }
}

pub(crate) fn which(image: &Image) -> String {
    read_erofs(&image.rootfs)["which"].text()
}

/// Remembers what is said.
#[derive(Default)]
pub(crate) struct Messages(Mutex<String>);

impl Messages {
    pub(crate) fn text(&self) -> String {
        self.0.lock().unwrap().clone()
    }
}

impl Progress for Messages {
    fn message(&self, text: &str) {
        *self.0.lock().unwrap() += &format!("{text}\n");
    }
}
