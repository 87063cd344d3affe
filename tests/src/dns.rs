//! A name server that gives exactly the answers a test wants, over UDP and TCP.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

const A: u16 = 1;
const CNAME: u16 = 5;
const PTR: u16 = 12;
const AAAA: u16 = 28;

/// A question that was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The name, lower case, without the final dot.
    pub name: String,
    /// The type's number (RFC 1035 §3.2.2).
    pub kind: u16,
    /// Over TCP.
    pub tcp: bool,
}

impl Asked {
    /// Whether it is for an IPv4 address.
    #[must_use]
    pub fn is_a(&self) -> bool {
        self.kind == A
    }
}

/// What to answer.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    records: Vec<(String, u16, u32, Vec<u8>)>,
    code: u8,
    truncated: bool,
    silent: bool,
}

impl Reply {
    /// The name is there, and has nothing of that type.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// There is no such name.
    #[must_use]
    pub fn nxdomain() -> Self {
        Self {
            code: 3,
            ..Self::default()
        }
    }

    /// The server failed.
    #[must_use]
    pub fn failure() -> Self {
        Self {
            code: 2,
            ..Self::default()
        }
    }

    /// The addresses of the type that was asked for, of `asked`, for 60 seconds.
    #[must_use]
    pub fn addresses(asked: &Asked, addresses: &[&str]) -> Self {
        Self::default().with(asked, &asked.name, 60, addresses)
    }

    /// As it is, with addresses of `name`, for `ttl` seconds.
    ///
    /// # Panics
    /// If they are none.
    #[must_use]
    pub fn with(mut self, asked: &Asked, name: &str, ttl: u32, addresses: &[&str]) -> Self {
        for address in addresses {
            let (kind, data) = match address.parse() {
                Ok(IpAddr::V4(v4)) => (A, v4.octets().to_vec()),
                Ok(IpAddr::V6(v6)) => (AAAA, v6.octets().to_vec()),
                Err(error) => panic!("{address}: {error}"),
            };
            if kind == asked.kind {
                self.records.push((name.to_owned(), kind, ttl, data));
            }
        }
        self
    }

    /// As it is, after an alias.
    #[must_use]
    pub fn alias(mut self, name: &str, to: &str) -> Self {
        self.records.push((name.to_owned(), CNAME, 60, encode(to)));
        self
    }

    /// The name of an address.
    #[must_use]
    pub fn pointer(asked: &Asked, to: &str) -> Self {
        let mut reply = Self::default();
        if asked.kind == PTR {
            reply
                .records
                .push((asked.name.clone(), PTR, 60, encode(to)));
        }
        reply
    }

    /// Cut off over UDP; whole over TCP.
    #[must_use]
    pub fn truncated(mut self) -> Self {
        self.truncated = true;
        self
    }

    /// No answer at all.
    #[must_use]
    pub fn silence() -> Self {
        Self {
            silent: true,
            ..Self::default()
        }
    }
}

/// The server. Its threads end with the test's process.
pub struct DnsServer(Arc<Mutex<Vec<Asked>>>);

impl DnsServer {
    /// Answers on these sockets.
    pub fn start(
        udp: UdpSocket,
        tcp: TcpListener,
        answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let answer = Arc::new(answer);
        let (log, respond) = (asked.clone(), answer.clone());
        thread::spawn(move || {
            let mut query = [0; 4096];
            while let Ok((len, client)) = udp.recv_from(&mut query) {
                if let Some(bytes) = reply(&query[..len], false, &log, &*respond) {
                    // A client that has gone is not this server's concern.
                    let _ = udp.send_to(&bytes, client);
                }
            }
        });
        let log = asked.clone();
        thread::spawn(move || {
            for stream in tcp.incoming().flatten() {
                let (log, answer) = (log.clone(), answer.clone());
                thread::spawn(move || serve(stream, &log, &*answer));
            }
        });
        Self(asked)
    }

    /// What was asked since the last call.
    #[must_use]
    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn serve(mut stream: TcpStream, log: &Mutex<Vec<Asked>>, answer: &dyn Fn(&Asked) -> Reply) {
    let mut len = [0; 2];
    while stream.read_exact(&mut len).is_ok() {
        let mut query = vec![0; u16::from_be_bytes(len).into()];
        if stream.read_exact(&mut query).is_err() {
            return;
        }
        let Some(bytes) = reply(&query, true, log, answer) else {
            return;
        };
        let len = u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_be_bytes();
        if stream.write_all(&[&len[..], &bytes].concat()).is_err() {
            return;
        }
    }
}

/// RFC 1035 §4.1.
fn reply(
    query: &[u8],
    tcp: bool,
    log: &Mutex<Vec<Asked>>,
    answer: &dyn Fn(&Asked) -> Reply,
) -> Option<Vec<u8>> {
    let mut at = 12;
    let mut labels = Vec::new();
    while let len @ 1.. = usize::from(*query.get(at)?) {
        labels.push(String::from_utf8_lossy(query.get(at + 1..=at + len)?).to_lowercase());
        at += 1 + len;
    }
    let question = query.get(12..at + 5)?;
    let asked = Asked {
        name: labels.join("."),
        kind: u16::from_be_bytes([question[question.len() - 4], question[question.len() - 3]]),
        tcp,
    };
    log.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(asked.clone());
    let reply = answer(&asked);
    if reply.silent {
        return None;
    }
    let cut = reply.truncated && !tcp;
    let records = if cut { &[][..] } else { &reply.records };
    let mut bytes = query[..2].to_vec();
    bytes.extend([0x81 | u8::from(cut) << 1, 0x80 | reply.code, 0, 1]);
    bytes.extend(u16::try_from(records.len()).ok()?.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(question);
    for (name, kind, ttl, data) in records {
        bytes.extend(encode(name));
        bytes.extend(kind.to_be_bytes());
        bytes.extend([0, 1]);
        bytes.extend(ttl.to_be_bytes());
        bytes.extend(u16::try_from(data.len()).ok()?.to_be_bytes());
        bytes.extend(data);
    }
    Some(bytes)
}

fn encode(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        bytes.push(u8::try_from(label.len()).unwrap_or(63));
        bytes.extend(label.bytes());
    }
    bytes.push(0);
    bytes
}
