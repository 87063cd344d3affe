//! Whom to believe: the host's certificate authorities, those of one registry, and the certificate to show it.
//!
//! The host's are read from `$SSL_CERT_FILE` and `$SSL_CERT_DIR` if set, else from where distributions keep their
//! bundle. Without any, ureq's built-in copy of Mozilla's list serves (webpki-roots; it is part of its build anyway,
//! and rustls-native-certs would be one crate more for a list of paths).

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// Where distributions keep their bundle: Debian and Alpine, Fedora, SUSE, macOS and the BSDs.
const BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// A file of certificates.
const MAX_PEM: u64 = 16 << 20;

type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;
type Certificates = Vec<Certificate<'static>>;

pub(super) struct Tls {
    /// Directories of directories named `HOST[:PORT]`.
    dirs: Vec<PathBuf>,
    host: OnceLock<Certificates>,
}

impl Tls {
    pub(super) fn new(dirs: Option<&[PathBuf]>) -> Self {
        let usual = || {
            ["/etc/docker/certs.d", "/etc/containers/certs.d"]
                .map(PathBuf::from)
                .to_vec()
        };
        Self {
            dirs: dirs.map_or_else(usual, <[PathBuf]>::to_vec),
            host: OnceLock::new(),
        }
    }

    /// How to speak to `HOST[:PORT]`.
    pub(super) fn config(&self, authority: &str, env: Env<'_>) -> Result<TlsConfig, String> {
        let mut own = Certificates::new();
        let mut client = None;
        for dir in self.dirs.iter().map(|dir| dir.join(authority)) {
            for file in files(&dir)? {
                match file.extension().and_then(OsStr::to_str) {
                    Some("crt") => own.extend(read_certificates(&file)?),
                    Some("cert") if client.is_none() => client = Some(read_client(&file)?),
                    _ => {}
                }
            }
        }
        let mut roots = match self.host.get() {
            Some(roots) => roots.clone(),
            None => {
                let roots = host_roots(env)?;
                self.host.get_or_init(|| roots).clone()
            }
        };
        roots.append(&mut own);
        let roots = if roots.is_empty() {
            RootCerts::WebPki
        } else {
            RootCerts::from(roots)
        };
        Ok(TlsConfig::builder()
            .root_certs(roots)
            .client_cert(client)
            .build())
    }
}

fn host_roots(env: Env<'_>) -> Result<Certificates, String> {
    let var = |name| {
        env(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let (file, dir) = (var("SSL_CERT_FILE"), var("SSL_CERT_DIR"));
    let mut roots = Certificates::new();
    if let Some(file) = &file {
        roots.extend(read_certificates(file)?);
    }
    for path in dir.as_deref().map(files).transpose()?.unwrap_or_default() {
        // Certificates among other things, linked to under the hashes of their names too.
        if let (Ok(certificates), false) = (read_certificates(&path), path.is_symlink()) {
            roots.extend(certificates);
        }
    }
    if file.is_none() && dir.is_none() {
        let bundle = BUNDLES.iter().map(Path::new).find(|path| path.is_file());
        if let Some(bundle) = bundle {
            roots.extend(read_certificates(bundle)?);
        }
    }
    Ok(roots)
}

/// The directory's entries in order; none when it is missing.
fn files(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let mut paths = match fs::read_dir(dir) {
        Ok(entries) => entries
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<io::Result<Vec<_>>>(),
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(Vec::new())
        }
        Err(e) => Err(e),
    }
    .map_err(|e| format!("cannot read certificates in {}: {e}", dir.display()))?;
    paths.sort();
    Ok(paths)
}

fn read_certificates(path: &Path) -> Result<Certificates, String> {
    let items = read_pem(path)?;
    Ok(items
        .into_iter()
        .filter_map(|item| match item {
            PemItem::Certificate(certificate) => Some(certificate),
            _ => None,
        })
        .collect())
}

fn read_pem(path: &Path) -> Result<Vec<PemItem<'static>>, String> {
    let failed = |why: String| format!("cannot read certificates in {}: {why}", path.display());
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_PEM).read_to_end(&mut bytes))
        .map_err(|e| failed(e.to_string()))?;
    parse_pem(&bytes)
        .collect::<Result<_, _>>()
        .map_err(|_| failed("not PEM".to_owned()))
}

/// A certificate and, beside it, its key. ureq panics on a pair that does not fit, so it is tried here.
fn read_client(path: &Path) -> Result<ClientCert, String> {
    let certificates = read_certificates(path)?;
    let key_path = path.with_extension("key");
    let key = read_pem(&key_path)?
        .into_iter()
        .find_map(|item| match item {
            PemItem::PrivateKey(key) => Some(key),
            _ => None,
        })
        .ok_or_else(|| format!("{} holds no private key", key_path.display()))?;
    let chain: Vec<CertificateDer<'static>> = certificates
        .iter()
        .map(|certificate| CertificateDer::from(certificate.der().to_vec()))
        .collect();
    let provider = rustls::crypto::ring::default_provider();
    let fits = der(&key).and_then(|key| CertifiedKey::from_der(chain, key, &provider).ok());
    if certificates.is_empty() || fits.is_none() {
        return Err(format!(
            "{} and {} are not a certificate and its key",
            path.display(),
            key_path.display()
        ));
    }
    Ok(ClientCert::new_with_certs(&certificates, key))
}

fn der(key: &PrivateKey<'_>) -> Option<PrivateKeyDer<'static>> {
    PrivateKeyDer::try_from(key.der().to_vec()).ok()
}

/// What to tell about a certificate that is not believed, or a server that speaks no TLS. `None` for other errors.
pub(super) fn explain(error: &ureq::Error, host: &str) -> Option<String> {
    use rustls::CertificateError as Bad;
    use rustls::Error as Tls;
    let error = match error {
        ureq::Error::Rustls(error) => error,
        ureq::Error::Io(error) => error.get_ref()?.downcast_ref::<Tls>()?,
        _ => return None,
    };
    Some(match error {
        Tls::InvalidCertificate(Bad::UnknownIssuer) => format!(
            "its certificate is from an authority unknown here; put that authority's certificate into \
             /etc/docker/certs.d/{host}/ca.crt, or name its file in SSL_CERT_FILE"
        ),
        Tls::InvalidCertificate(
            Bad::Expired
            | Bad::ExpiredContext { .. }
            | Bad::NotValidYet
            | Bad::NotValidYetContext { .. },
        ) => format!("{error}; if the certificate is good, this machine's clock is wrong"),
        Tls::InvalidMessage(_) => format!(
            "it does not speak TLS ({error}); to reach it in the clear, name it as a plain HTTP registry"
        ),
        _ => error.to_string(),
    })
}
