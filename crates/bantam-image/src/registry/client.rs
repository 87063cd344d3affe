//! Requests for one reference, to mirrors and the registry itself.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use ureq::http::header;

use super::endpoint::Endpoint;
use super::http::{Failure, Http, STOPPED, env, read_bounded};
use super::options::Registries;
use crate::credentials::{Finder, usual_files};
use crate::digest::{Algorithm, Digest, Hasher};
use crate::error::{Error, Result};
use crate::limits::{Limits, MAX_DOCUMENT};
use crate::manifest::{
    Chosen, DOCKER_LIST, DOCKER_MANIFEST, Descriptor, Documents, OCI_INDEX, OCI_MANIFEST,
    check_document_size, choose,
};
use crate::platform::Platform;
use crate::progress::Progress;
use crate::reference::Reference;

/// A client for one reference.
pub(crate) struct Client<'a> {
    pub(super) http: Http<'a>,
    reference: Reference,
    registries: &'a Registries,
    /// From `registries`, or the usual ones.
    credential_files: Vec<PathBuf>,
    /// Mirrors, then the registry.
    endpoints: Vec<Endpoint>,
    /// The manifest that the reference itself names, fetched once.
    root: Mutex<Option<Manifest>>,
}

#[derive(Clone)]
struct Manifest {
    bytes: Vec<u8>,
    content_type: String,
    digest: Digest,
}

impl<'a> Client<'a> {
    pub(crate) fn new(reference: &Reference, registries: &'a Registries) -> Result<Self> {
        let invalid = |what: &str| Error::Registry {
            what: reference.to_string(),
            why: format!("{what:?} is not the address of a registry"),
            status: None,
        };
        let mirrors = registries
            .mirrors
            .get(reference.registry())
            .map_or(&[][..], Vec::as_slice);
        let mut endpoints = Vec::with_capacity(mirrors.len() + 1);
        for mirror in mirrors {
            let endpoint = Endpoint::mirror(mirror, reference, registries);
            endpoints.push(endpoint.ok_or_else(|| invalid(mirror))?);
        }
        let origin = Endpoint::origin(reference, registries);
        endpoints.push(origin.ok_or_else(|| invalid(reference.registry()))?);
        let usual = || usual_files(&|name: &str| -> Option<OsString> { env(name) });
        Ok(Self {
            http: Http::new(registries),
            reference: reference.clone(),
            registries,
            credential_files: registries.credential_files.clone().unwrap_or_else(usual),
            endpoints,
            root: Mutex::new(None),
        })
    }

    /// Tells what is worth a person's attention.
    pub(crate) fn telling(mut self, progress: &'a dyn Progress) -> Self {
        self.http.progress = progress;
        self
    }

    /// Fetches the manifests and the configuration of the image for `platform`.
    pub(crate) fn choose(&self, platform: &Platform, limits: &Limits) -> Result<Chosen> {
        let name = self.reference.manifest_name();
        let wanted = self.reference.digest();
        let manifest = self.each(&mut |endpoint| self.get_manifest(endpoint, &name, wanted))?;
        let root = Descriptor::new(&manifest.digest, manifest.bytes.len() as u64);
        *self.root.lock().unwrap_or_else(PoisonError::into_inner) = Some(manifest);
        choose(self, &self.reference.to_string(), &[root], platform, limits)
    }

    /// Asks one endpoint after the other until one has an answer.
    pub(super) fn each<T>(&self, ask: &mut dyn FnMut(&Endpoint) -> Result<T>) -> Result<T> {
        let mut failed = None;
        for endpoint in &self.endpoints {
            if endpoint.is_mirror && endpoint.is_dead.load(Ordering::Relaxed) {
                continue;
            }
            if let Some(error) = failed.take() {
                let next = &endpoint.address;
                self.http.tell(&format!("{error}; asking {next} instead"));
            }
            let error = match ask(endpoint) {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            match &error {
                // Nobody else can help with those.
                Error::Io { .. } | Error::Limit { .. } => return Err(error),
                Error::Registry { why, .. } if why == STOPPED => return Err(error),
                Error::Registry { status: None, .. } => endpoint.set_dead(),
                _ => {}
            }
            failed = Some(error);
        }
        // The last endpoint is the registry, which is always asked.
        Err(failed.unwrap_or_else(|| Error::Registry {
            what: self.reference.to_string(),
            why: "nobody to ask".to_owned(),
            status: None,
        }))
    }

    /// A manifest by tag or digest, checked against `wanted` and what the registry itself says it is.
    fn get_manifest(
        &self,
        endpoint: &Endpoint,
        name: &str,
        wanted: Option<&Digest>,
    ) -> Result<Manifest> {
        const ACCEPT: [&str; 4] = [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];
        let path = format!("manifests/{name}");
        let headers = [(header::ACCEPT, ACCEPT.join(", "))];
        let answer = endpoint
            .get(&self.http, &self.finder(), &path, &headers)
            .map_err(|failure| self.failed(endpoint, &path, failure))?;
        let content_type = answer.header(header::CONTENT_TYPE).unwrap_or_default();
        let content_type = content_type.to_owned();
        let claimed = answer.header("docker-content-digest").map(Digest::parse);
        let claimed = claimed.transpose()?;
        let bytes = self.read_document(endpoint, &path, answer)?;
        let algorithm = wanted
            .or(claimed.as_ref())
            .map_or(Algorithm::Sha256, Digest::algorithm);
        let mut hasher = Hasher::new(algorithm);
        hasher.update(&bytes);
        let digest = hasher.finish();
        let what = self.what(endpoint, &path);
        for expected in wanted.into_iter().chain(&claimed) {
            if expected.algorithm() == algorithm {
                expected.expect(&what, &digest)?;
            }
        }
        Ok(Manifest {
            bytes,
            content_type,
            digest,
        })
    }

    fn read_document(
        &self,
        endpoint: &Endpoint,
        path: &str,
        answer: super::http::Answer,
    ) -> Result<Vec<u8>> {
        let deadline = self.http.deadline(0);
        let bytes = read_bounded(answer.response, MAX_DOCUMENT + 1, deadline)
            .map_err(|e| self.failed(endpoint, path, Failure::new(e.to_string(), None)))?;
        check_document_size(&self.what(endpoint, path), bytes.len() as u64)?;
        Ok(bytes)
    }

    pub(super) fn registry(&self) -> &str {
        self.reference.registry()
    }

    pub(super) fn finder(&self) -> Finder<'_> {
        Finder {
            given: &self.registries.credentials,
            files: self.credential_files.clone(),
            helper_timeout: self.http.timeouts.helper,
        }
    }

    pub(super) fn what(&self, endpoint: &Endpoint, path: &str) -> String {
        format!(
            "{}: {path} from {}",
            self.reference,
            endpoint.address.authority()
        )
    }

    pub(super) fn failed(&self, endpoint: &Endpoint, path: &str, failure: Failure) -> Error {
        Error::Registry {
            what: self.what(endpoint, path),
            why: failure.why,
            status: failure.status,
        }
    }
}

impl Documents for Client<'_> {
    fn manifest(&self, descriptor: &Descriptor) -> Result<(Vec<u8>, String)> {
        let digest = descriptor.digest()?;
        if let Some(root) = &*self.root.lock().unwrap_or_else(PoisonError::into_inner)
            && root.digest == digest
        {
            return Ok((root.bytes.clone(), root.content_type.clone()));
        }
        let name = digest.to_string();
        check_document_size(&format!("{}: {name}", self.reference), descriptor.size)?;
        let manifest =
            self.each(&mut |endpoint| self.get_manifest(endpoint, &name, Some(&digest)))?;
        Ok((manifest.bytes, manifest.content_type))
    }

    fn config(&self, descriptor: &Descriptor) -> Result<Vec<u8>> {
        let digest = descriptor.digest()?;
        let path = format!("blobs/{digest}");
        check_document_size(&format!("{}: {path}", self.reference), descriptor.size)?;
        self.each(&mut |endpoint| {
            let headers = [(header::ACCEPT, "*/*".to_owned())];
            let answer = endpoint
                .get(&self.http, &self.finder(), &path, &headers)
                .map_err(|failure| self.failed(endpoint, &path, failure))?;
            let bytes = self.read_document(endpoint, &path, answer)?;
            digest.check(&self.what(endpoint, &path), &bytes)?;
            Ok(bytes)
        })
    }
}
