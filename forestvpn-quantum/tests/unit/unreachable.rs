//! What is said about which packet, byte for byte where it matters.

use super::*;
use crate::harness::{A, B, inner, inner6, packet, packet6};

fn answer(packet: &[u8]) -> Option<Vec<u8>> {
    Unreachable::about(packet).map(|answer| answer.as_bytes().to_vec())
}

//@test C-OUT-3
#[test]
fn an_ipv4_sender_is_told_that_the_host_is_unreachable() {
    let refused = packet(A, B, b"hello");
    let answer = answer(&refused).unwrap();
    let (header, message) = answer.split_at(20);
    assert!(header.len() > 19);
    assert!(message.len() > 7);
    assert_eq!(header[..2], [0x45, 0xc0]);
    assert_eq!(usize::from(u16_at(header, 2)), answer.len());
    assert_eq!(header[6..10], [0, 0, 64, 1], "no fragment, 64 hops, ICMP");
    assert_eq!((&header[12..16], &header[16..20]), (&inner(B)[..], &inner(A)[..]));
    assert_eq!(checksum::sum(header, 0), 0xffff);
    assert_eq!(message[..2], [3, 1]);
    assert_eq!(message[4..8], [0; 4]);
    assert_eq!(checksum::sum(message, 0), 0xffff);
    assert_eq!(message[8..], refused);
}

//@test C-OUT-3
#[test]
fn an_ipv6_sender_is_told_that_the_address_is_unreachable() {
    let refused = packet6(A, B, b"hello");
    let answer = answer(&refused).unwrap();
    let (header, message) = answer.split_at(40);
    assert!(header.len() > 39);
    assert!(message.len() > 7);
    assert_eq!(header[..2], [0x6c, 0x00]);
    assert_eq!(usize::from(u16_at(header, 4)), message.len());
    assert_eq!(header[6..8], [58, 64]);
    assert_eq!((&header[8..24], &header[24..40]), (&inner6(B)[..], &inner6(A)[..]));
    assert_eq!(message[..2], [1, 3]);
    let pseudo = checksum::pseudo(&header[8..40], 58, message.len() as u16);
    assert!(checksum::valid(message, pseudo));
    assert_eq!(message[8..], refused);
}

//@test C-OUT-3
#[test]
fn no_more_is_quoted_than_a_small_link_carries() {
    for len in [0, 1, 519, 520, 521, 1203, 1204, 1205, 60_000] {
        let v4 = answer(&packet(A, B, &vec![1; len])).unwrap();
        assert_eq!(v4.len(), (28 + 28 + len).min(576));
        assert_eq!(checksum::sum(&v4[20..], 0), 0xffff, "{len}");
        let v6 = answer(&packet6(A, B, &vec![1; len])).unwrap();
        assert_eq!(v6.len(), (48 + 40 + len).min(1280));
        assert!(
            checksum::valid(&v6[40..], checksum::pseudo(&v6[8..40], 58, (v6.len() - 40) as u16)),
            "{len}"
        );
    }
}

//@test C-OUT-3
#[test]
fn what_must_not_be_answered_is_not() {
    let v4 = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut p = packet(A, B, &[0; 40]);
        change(&mut p);
        answer(&p).is_some()
    };
    assert!(v4(&|_| ()));
    // From no single host, or to many.
    for ip in [[0, 0, 0, 0], [127, 0, 0, 1], [224, 0, 0, 1], [239, 9, 9, 9], [240, 0, 0, 1], [255; 4]] {
        assert!(!v4(&|p| p[12..16].copy_from_slice(&ip)), "from {ip:?}");
        assert!(!v4(&|p| p[16..20].copy_from_slice(&ip)), "to {ip:?}");
    }
    // The first fragment is, later ones are not; DF and MF are no offset.
    for (field, answered) in
        [(0x4000, true), (0x2000, true), (0x2001, false), (0x0001, false), (0x1fff, false)]
    {
        assert_eq!(v4(&|p| put(p, 6, &u16::to_be_bytes(field))), answered, "{field:#x}");
    }
    for (kind, answered) in
        [(0, true), (3, false), (4, false), (5, false), (8, true), (11, false), (12, false), (13, true)]
    {
        assert_eq!(v4(&|p| (p[9], p[20]) = (1, kind)), answered, "ICMP {kind}");
        // The same behind options, and where the header says that there is no such byte.
        assert_eq!(
            v4(&|p| (p[0], p[9], p[20], p[24]) = (0x46, 1, 99, kind)),
            answered,
            "ICMP {kind} with options"
        );
    }
    assert!(!v4(&|p| {
        (p[0], p[9]) = (0x4f, 1);
        p.truncate(50);
    }));
    assert!(
        answer(&packet(A, B, b"")[..19]).is_none() && answer(&[]).is_none() && answer(&[0x55; 60]).is_none()
    );
}

//@test C-OUT-3
#[test]
fn what_must_not_be_answered_is_not_over_ipv6() {
    let v6 = |next: u8, payload: &[u8]| {
        let mut p = packet6(A, B, payload);
        p[6] = next;
        answer(&p).is_some()
    };
    for kind in [0, 1, 2, 3, 4, 100, 127, 137] {
        assert!(!v6(58, &[kind, 0, 0, 0]), "ICMPv6 {kind}");
        // Behind hop-by-hop options, a routing header, destination options of 16 bytes, and a first fragment.
        assert!(!v6(0, &[[58, 0, 1, 4, 0, 0, 0, 0], [kind, 0, 0, 0, 0, 0, 0, 0]].concat()));
        assert!(!v6(43, &[[58, 0, 0, 0, 0, 0, 0, 0], [kind, 0, 0, 0, 0, 0, 0, 0]].concat()));
        assert!(!v6(60, &[[58, 1, 0, 0, 0, 0, 0, 0], [0; 8], [kind, 0, 0, 0, 0, 0, 0, 0]].concat()));
        assert!(!v6(44, &[[58, 0, 0, 1, 0, 0, 0, 9], [kind, 0, 0, 0, 0, 0, 0, 0]].concat()));
    }
    for kind in [128, 129, 135, 255] {
        assert!(v6(58, &[kind, 0, 0, 0]), "ICMPv6 {kind}");
        assert!(v6(0, &[[58, 0, 1, 4, 0, 0, 0, 0], [kind, 0, 0, 0, 0, 0, 0, 0]].concat()));
        assert!(v6(44, &[[58, 0, 0, 1, 0, 0, 0, 9], [kind, 0, 0, 0, 0, 0, 0, 0]].concat()));
    }
    assert!(v6(6, &[1; 20]) && v6(59, &[]) && v6(17, &[]));
    assert!(!v6(44, &[6, 0, 0, 8, 0, 0, 0, 9, 1, 1]), "a later fragment");
    for cut in [&[][..], &[58], &[58, 0, 0, 0, 0, 0, 0, 0], &[0; 8], &[60, 255, 0, 0, 0, 0, 0, 0]] {
        assert!(!v6(0, cut), "not to be told: {cut:?}");
    }
    assert!(!v6(0, &[0; 1000]), "headers without end");
    for (at, ip) in [(8, [0; 16]), (8, Ipv6Addr::LOCALHOST.octets()), (8, [0xff; 16]), (24, [0xff; 16])] {
        let mut p = packet6(A, B, b"x");
        p[at..at + 16].copy_from_slice(&ip);
        assert!(answer(&p).is_none(), "{ip:?} at {at}");
    }
}
