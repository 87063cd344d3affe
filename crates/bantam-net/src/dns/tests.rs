use smoltcp::wire::{DnsQueryType, DnsRcode};

use super::message::{self, MAX_QUERY};
use super::*;

fn query(name: &[u8], kind: u16) -> Vec<u8> {
    let mut bytes = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    bytes.extend(name);
    bytes.extend(kind.to_be_bytes());
    bytes.extend([0, 1]);
    bytes
}

fn name_of(name: &[u8]) -> Option<String> {
    parse_query(&query(name, 1)).expect("a query").name
}

#[test]
fn names_are_read_as_rules_compare_them() {
    assert_eq!(name_of(b"\x03WWW\x04test\0").as_deref(), Some("www.test"));
    assert_eq!(name_of(b"\x04_tcp\x01a\0").as_deref(), Some("_tcp.a"));
    for odd in [
        &b"\0"[..],
        b"\x03a b\0",
        b"\x03a.b\0",
        b"\x02\xff\xfe\0",
        b"\x02\0a\0",
    ] {
        assert_eq!(name_of(odd), None, "{odd:?}");
    }
    let label = [&[63][..], &[b'a'; 63]].concat();
    assert!(name_of(&[&label.repeat(3)[..], &[61], &[b'a'; 61], &[0]].concat()).is_some());
    assert!(name_of(&[&label.repeat(4)[..], &[0]].concat()).is_none());
}

#[test]
fn a_question_that_points_elsewhere_has_no_name_to_decide_by() {
    // To the identifier, which is another one when the question is passed on.
    let mut bytes = query(b"\xc0\0", 1);
    bytes[0] = 0;
    assert_eq!(parse_query(&bytes).unwrap().name, None);
    assert_eq!(parse_query(&query(b"\x01a\xc0\x0c", 1)).unwrap().name, None);
}

#[test]
fn what_is_not_one_question_is_not_a_query() {
    let good = query(b"\x01a\0", 1);
    assert!(parse_query(&good).is_some());
    for len in 0..good.len() {
        assert!(parse_query(&good[..len]).is_none(), "{len} bytes");
    }
    let altered = |at: usize, byte| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    for (bytes, what) in [
        (altered(2, 0x81), "an answer"),
        (altered(2, 0x11), "another operation"),
        (altered(5, 2), "two questions"),
        (altered(5, 0), "no question"),
        (altered(7, 1), "a question with an answer"),
        (altered(18, 3), "another class"),
    ] {
        assert!(parse_query(&bytes).is_none(), "{what}");
    }
    let long = [good, vec![0; MAX_QUERY]].concat();
    assert!(parse_query(&long).is_none());
}

#[test]
fn only_the_answer_to_the_question_counts() {
    let asked = query(b"\x01a\0", 1);
    let parsed = parse_query(&asked).unwrap();
    let answer = answer_address(&parsed, [192, 0, 2, 1], [0; 16]);
    assert!(message::answers(&answer, &parsed, 0xabcd));
    assert!(!message::answers(&answer, &parsed, 0xabce));
    assert!(!message::answers(&asked, &parsed, 0xabcd), "not an answer");
    let other = parse_query(&query(b"\x01b\0", 1)).unwrap();
    assert!(!message::answers(&answer, &other, 0xabcd));
    let found = message::addresses(&answer, &parsed);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].0, std::net::IpAddr::from([192, 0, 2, 1]));
    // A name's case is the asker's to mix.
    let mixed = parse_query(&query(b"\x01A\0", 1)).unwrap();
    assert!(message::answers(&answer, &mixed, 0xabcd));
}

#[test]
fn the_other_family_is_answered_with_nothing() {
    for (kind, records) in [(1, 1), (28, 1), (15, 0), (65, 0)] {
        let parsed = parse_query(&query(b"\x01a\0", kind)).unwrap();
        let answer = answer_address(&parsed, [192, 0, 2, 1], [7; 16]);
        assert_eq!(answer[6..8], [0, records], "{kind}");
        assert_eq!(
            message::addresses(&answer, &parsed).len(),
            usize::from(records)
        );
    }
    let parsed = parse_query(&query(b"\x01a\0", DnsQueryType::Aaaa.into())).unwrap();
    let refused = answer_code(&parsed, DnsRcode::NXDomain);
    assert_eq!(refused[3] & 15, 3);
    assert!(message::addresses(&refused, &parsed).is_empty());
}

#[test]
fn records_that_lie_about_their_length_end_the_answer() {
    let parsed = parse_query(&query(b"\x01a\0", 1)).unwrap();
    let answer = answer_address(&parsed, [192, 0, 2, 1], [0; 16]);
    for len in 0..answer.len() {
        let _ = message::addresses(&answer[..len], &parsed);
    }
    let mut many = answer.clone();
    many[6..8].copy_from_slice(&[0xff, 0xff]);
    assert_eq!(message::addresses(&many, &parsed).len(), 1);
    // An owner that points to itself.
    let mut looped = answer;
    let at = 12 + 7;
    looped[at..at + 2].copy_from_slice(&[0xc0, u8::try_from(at).unwrap()]);
    let _ = message::addresses(&looped, &parsed);
}

#[test]
fn whole_zones_are_not_asked_for() {
    for kind in [251, 252] {
        assert!(parse_query(&query(b"\x01a\0", kind)).is_none());
    }
    // ANY is one answer.
    assert!(parse_query(&query(b"\x01a\0", 255)).is_some());
}
