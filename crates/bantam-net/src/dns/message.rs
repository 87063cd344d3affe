//! The little of DNS messages that a forwarder must understand (RFC 1035 §4).

use std::net::IpAddr;
use std::time::Duration;

use smoltcp::wire::{
    DnsFlags, DnsOpcode, DnsPacket, DnsQueryType, DnsQuestion, DnsRcode, DnsRecord, DnsRecordData,
};

use crate::policy::normal_name;

/// Longest query taken from a guest, in bytes. Real ones stay below 512.
pub(crate) const MAX_QUERY: usize = 4096;
/// Most records of an answer that are looked at.
const MAX_RECORDS: usize = 256;
const HEADER: usize = 12;

/// A question the guest asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Query {
    pub(crate) id: u16,
    /// Lower case, without the final dot; `None` when it is not a host's name, and may only be passed
    /// on.
    pub(crate) name: Option<String>,
    pub(crate) kind: DnsQueryType,
    /// The question section.
    question: Vec<u8>,
}

/// AXFR and IXFR (RFC 5936, RFC 1995).
const ZONE_TRANSFERS: [u16; 2] = [252, 251];

/// Reads a query; `None` for a transfer of a zone and for what is not one question of class IN.
pub(crate) fn parse_query(bytes: &[u8]) -> Option<Query> {
    if bytes.len() > MAX_QUERY {
        return None;
    }
    let packet = DnsPacket::new_checked(bytes).ok()?;
    if packet.flags().contains(DnsFlags::RESPONSE)
        || packet.opcode() != DnsOpcode::Query
        || packet.question_count() != 1
        || packet.answer_record_count() != 0
    {
        return None;
    }
    let (rest, question) = DnsQuestion::parse(packet.payload()).ok()?;
    // Whole zones are for name servers; some give them to every host they trust.
    if ZONE_TRANSFERS.contains(&u16::from(question.type_)) {
        return None;
    }
    let len = packet.payload().len() - rest.len();
    // A question's name has nothing to point to but the header, whose identifier changes on the way:
    // what was decided would not be what is asked.
    let name = if is_plain(question.name) {
        name(&packet, question.name)
    } else {
        None
    };
    Some(Query {
        id: packet.transaction_id(),
        name,
        kind: question.type_,
        question: packet.payload().get(..len)?.to_vec(),
    })
}

/// Whether a name is labels only, without a pointer.
fn is_plain(mut name: &[u8]) -> bool {
    while let [len @ 0..=63, rest @ ..] = name {
        match *len {
            0 => return rest.is_empty(),
            len => name = rest.get(usize::from(len)..).unwrap_or_default(),
        }
    }
    false
}

/// A name as rules compare it; the root and names with odd characters are none.
fn name(packet: &DnsPacket<&[u8]>, bytes: &[u8]) -> Option<String> {
    let mut text = String::new();
    for label in packet.parse_name(bytes) {
        if !text.is_empty() {
            text.push('.');
        }
        let label = label.ok()?;
        // A dot in a label would make it look like two.
        if label.contains(&b'.') {
            return None;
        }
        text.push_str(std::str::from_utf8(label).ok()?);
        if text.len() > crate::MAX_NAME {
            return None;
        }
    }
    normal_name(&text)
}

/// Whether `bytes` answer `query`, sent with the identifier `id`.
pub(crate) fn answers(bytes: &[u8], query: &Query, id: u16) -> bool {
    let Ok(packet) = DnsPacket::new_checked(bytes) else {
        return false;
    };
    packet.transaction_id() == id
        && packet.flags().contains(DnsFlags::RESPONSE)
        && packet.question_count() == 1
        && packet
            .payload()
            .get(..query.question.len())
            // Letters' case may differ, and no other byte of a question is a letter by accident that
            // matters.
            .is_some_and(|question| question.eq_ignore_ascii_case(&query.question))
}

/// The addresses in an answer to `query`, with the time for which they are valid.
pub(crate) fn addresses(bytes: &[u8], query: &Query) -> Vec<(IpAddr, Duration)> {
    let mut found = Vec::new();
    let Ok(packet) = DnsPacket::new_checked(bytes) else {
        return found;
    };
    if packet.rcode() != DnsRcode::NoError {
        return found;
    }
    let mut rest = packet
        .payload()
        .get(query.question.len()..)
        .unwrap_or_default();
    for _ in 0..usize::from(packet.answer_record_count()).min(MAX_RECORDS) {
        let Ok((after, record)) = DnsRecord::parse(rest) else {
            break;
        };
        rest = after;
        let address = match record.data {
            DnsRecordData::A(v4) => IpAddr::V4(v4),
            DnsRecordData::Aaaa(v6) => IpAddr::V6(v6),
            _ => continue,
        };
        found.push((address, Duration::from_secs(record.ttl.into())));
    }
    found
}

/// An answer without records.
pub(crate) fn answer_code(query: &Query, code: DnsRcode) -> Vec<u8> {
    answer(query, code, None)
}

/// An answer with one address, or with none when the guest asked for the other family.
pub(crate) fn answer_address(query: &Query, v4: [u8; 4], v6: [u8; 16]) -> Vec<u8> {
    let data: Option<&[u8]> = match query.kind {
        DnsQueryType::A => Some(&v4),
        DnsQueryType::Aaaa => Some(&v6),
        _ => None,
    };
    answer(query, DnsRcode::NoError, data)
}

fn answer(query: &Query, code: DnsRcode, data: Option<&[u8]>) -> Vec<u8> {
    /// Seconds for which the guest may remember the gateway's address.
    const TTL: u32 = 60;
    let mut bytes = Vec::with_capacity(HEADER + query.question.len() + 32);
    // QR, RD, RA.
    let flags = 0x8180 | u16::from(u8::from(code));
    let counts = [1, u16::from(data.is_some()), 0, 0];
    for word in [query.id, flags].into_iter().chain(counts) {
        bytes.extend(word.to_be_bytes());
    }
    bytes.extend(&query.question);
    if let Some(data) = data {
        // The question's name, its type, class IN.
        bytes.extend([0xc0, 12]);
        bytes.extend(u16::from(query.kind).to_be_bytes());
        bytes.extend(1u16.to_be_bytes());
        bytes.extend(TTL.to_be_bytes());
        bytes.extend(u16::try_from(data.len()).unwrap_or(0).to_be_bytes());
        bytes.extend(data);
    }
    bytes
}

/// Gives a message another identifier.
pub(crate) fn set_id(bytes: &mut [u8], id: u16) {
    if let Some(place) = bytes.get_mut(..2) {
        place.copy_from_slice(&id.to_be_bytes());
    }
}
