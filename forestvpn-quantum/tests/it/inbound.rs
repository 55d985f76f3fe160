//! From the wire to the TUN device.

use std::net::SocketAddr;

use forestvpn_quantum::batch::{Ecn, Endpoint, Received, Span};
use forestvpn_quantum::config::AllowedIp;
use forestvpn_quantum::{Discard, Event};

use crate::harness::*;

const ELSEWHERE: &str = "203.0.113.9:999";

fn elsewhere() -> SocketAddr {
    ELSEWHERE.parse().unwrap()
}

/// A pair with a session, both IP families allowed.
fn session() -> World {
    let mut w = World::pair();
    allow6(&mut w, A, B);
    allow6(&mut w, B, A);
    w.connect(A, B);
    w
}

/// What A would send for `inner`, taken off the wire.
fn sealed(w: &mut World, inner: &[u8]) -> Vec<u8> {
    w.send(A, inner).unwrap();
    w.drop_flying();
    w.last(A, 4).bytes
}

fn endpoint(w: &World) -> Option<SocketAddr> {
    w.peer(B, A).endpoint
}

//@test C-IN-1
#[test]
fn the_endpoint_follows_every_kind_of_authenticated_packet() {
    // Data.
    let mut w = session();
    w.hosts[B].events();
    let data = sealed(&mut w, &packet(A, B, b"x"));
    w.inject(B, elsewhere(), &data);
    assert_eq!(endpoint(&w), Some(elsewhere()));
    assert!(matches!(w.hosts[B].events()[..], [Event::EndpointChanged(_)]));
    w.send(B, &packet(B, A, b"x")).unwrap();
    assert_eq!(w.last(B, 4).to, elsewhere(), "and the answer goes there");
    // Keepalive.
    let mut w = session();
    w.cut();
    w.update_peer(A, B, |p| p.persistent_keepalive = Some(5));
    let keepalive = w.last(A, 4).bytes;
    assert_eq!(keepalive.len(), 32);
    w.inject(B, elsewhere(), &keepalive);
    assert_eq!(endpoint(&w), Some(elsewhere()));
    // Initiation: the response goes there too.
    let mut w = session();
    w.t += secs(1.0);
    let initiation = w.initiation(A, B);
    w.inject(B, elsewhere(), &initiation);
    assert_eq!(endpoint(&w), Some(elsewhere()));
    assert_eq!(w.last(B, 2).to, elsewhere());
    // Response.
    let mut w = World::pair();
    w.cut();
    w.send(B, &packet(B, A, b"x")).unwrap();
    let initiation = w.last(B, 1).bytes;
    w.inject(A, w.hosts[B].addr, &initiation);
    let response = w.last(A, 2).bytes;
    w.inject(B, elsewhere(), &response);
    assert_eq!(endpoint(&w), Some(elsewhere()));
    assert_eq!(w.last(B, 4).to, elsewhere(), "the waiting packet goes there");
}

//@test C-IN-1
#[test]
fn the_endpoint_never_follows_replays_forgeries_or_cookie_replies() {
    let mut w = session();
    let home = endpoint(&w);
    let initiation = w.kind_by(A, 1)[0].bytes.clone();
    let data = sealed(&mut w, &packet(A, B, b"x"));
    w.inject(B, w.hosts[A].addr, &data);
    w.inject(B, elsewhere(), &data);
    assert_eq!(w.discarded(B, Discard::Replayed), 1);
    w.inject(B, elsewhere(), &initiation);
    assert_eq!(w.discarded(B, Discard::OldTimestamp), 1);
    let mut forged = sealed(&mut w, &packet(A, B, b"y"));
    *forged.last_mut().unwrap() ^= 1;
    w.inject(B, elsewhere(), &forged);
    assert_eq!(w.discarded(B, Discard::BadTag), 1);
    w.t += secs(1.0);
    let mut initiation = w.initiation(A, B);
    initiation[100] ^= 1;
    w.inject(B, elsewhere(), &initiation);
    assert_eq!(endpoint(&w), home);
    // An initiation that comes too soon is not consumed either.
    let first = w.initiation(A, B);
    w.inject(B, w.hosts[A].addr, &first);
    w.t += secs(0.019);
    let second = w.initiation(A, B);
    w.inject(B, elsewhere(), &second);
    assert_eq!(w.discarded(B, Discard::TooFrequent) + w.discarded(B, Discard::OldTimestamp), 2);
    assert_eq!(endpoint(&w), home);
}

//@test C-IN-2
#[test]
fn an_empty_packet_is_a_keepalive_of_32_bytes_and_is_not_delivered() {
    let mut w = session();
    let before = (w.peer(B, A).rx_bytes, w.hosts[B].delivered.len());
    w.update_peer(A, B, |p| p.persistent_keepalive = Some(600));
    w.settle();
    assert_eq!(w.last(A, 4).bytes.len(), 32);
    assert_eq!((w.peer(B, A).rx_bytes, w.hosts[B].delivered.len()), (before.0 + 32, before.1));
    assert_eq!(w.hosts[B].device.discards().iter().sum::<u64>(), 0);
}

//@test C-IN-3
#[test]
fn the_inner_length_decides_what_is_delivered() {
    let mut w = session();
    // 60 bytes of packet become 64 of plaintext; the header may claim anything.
    for (claimed, delivered) in [
        (0_u16, None),
        (19, None),
        (20, Some(20)),
        (21, Some(21)),
        (60, Some(60)),
        (63, Some(63)),
        (64, Some(64)),
        (65, None),
        (65535, None),
    ] {
        let mut p = packet(A, B, &[7; 32]);
        p[2..4].copy_from_slice(&claimed.to_be_bytes());
        let data = sealed(&mut w, &p);
        let (before, bad) = (w.hosts[B].delivered.len(), w.discarded(B, Discard::NotIp));
        w.inject(B, w.hosts[A].addr, &data);
        let got = w.hosts[B].delivered[before..].first().map(|(_, p)| p.len());
        assert_eq!(got, delivered, "v4 that claims {claimed}");
        assert_eq!(w.discarded(B, Discard::NotIp) - bad, u64::from(delivered.is_none()));
    }
    for (claimed, delivered) in [
        (0_u16, Some(40)),
        (20, Some(60)),
        (24, Some(64)),
        (25, None),
        (65495, None),
        (65496, None),
        (65535, None),
    ] {
        let mut p = packet6(A, B, &[7; 20]);
        p[4..6].copy_from_slice(&claimed.to_be_bytes());
        let data = sealed(&mut w, &p);
        let before = w.hosts[B].delivered.len();
        w.inject(B, w.hosts[A].addr, &data);
        let got = w.hosts[B].delivered[before..].first().map(|(_, p)| p.len());
        assert_eq!(got, delivered, "v6 whose payload claims {claimed}");
    }
}

// F53: valid IPv6 packets of 40 to 53 bytes were dropped.
//@test C-IN-3
#[test]
fn the_smallest_ipv6_packets_pass_both_ways() {
    let mut w = session();
    for extra in 0..14 {
        let payload = vec![5; extra];
        w.send(A, &packet6(A, B, &payload)).unwrap();
        w.send(B, &packet6(B, A, &payload)).unwrap();
        w.settle();
        assert_eq!(w.hosts[B].delivered.last().unwrap().1, packet6(A, B, &payload));
        assert_eq!(w.hosts[A].delivered.last().unwrap().1, packet6(B, A, &payload));
    }
}

/// A and a third host are peers of B, both with sessions; A has 10.1.0.0/16, the third 10.1.2.0/24.
fn neighbours() -> World {
    let mut w = World::new(3);
    for of in [A, 2] {
        w.introduce(B, of, true);
        w.introduce(of, B, true);
    }
    allow(&mut w, B, A, "10.1.0.0/16");
    allow(&mut w, B, 2, "10.1.2.0/24");
    w.connect(A, B);
    w.connect(2, B);
    w
}

fn from_address(source: [u8; 4]) -> Vec<u8> {
    let mut p = packet(A, B, b"who am I?");
    p[12..16].copy_from_slice(&source);
    p
}

//@test C-IN-4
#[test]
fn a_source_address_must_be_routed_to_its_sender_in_the_table_of_the_whole_device() {
    let mut w = neighbours();
    let mut expect = |source, ok: bool, why: &str| {
        let (before, spoofed) = (w.hosts[B].delivered.len(), w.discarded(B, Discard::Spoofed));
        w.send(A, &from_address(source)).unwrap();
        w.settle();
        assert_eq!(w.hosts[B].delivered.len() - before, usize::from(ok), "{why}");
        assert_eq!(w.discarded(B, Discard::Spoofed) - spoofed, u64::from(!ok), "{why}");
    };
    expect([10, 1, 1, 1], true, "A's own");
    expect([10, 1, 2, 1], false, "inside A's /16, but the longer prefix is another peer's");
    expect([10, 0, 0, 3], false, "another peer's");
    expect([192, 168, 0, 1], false, "nobody's");
    // The longer prefix goes away: A's /16 covers it.
    w.update_peer(B, 2, |p| {
        p.allowed_ips = vec![AllowedIp { net: "10.1.2.0/24".parse().unwrap(), remove: true }];
    });
    w.send(A, &from_address([10, 1, 2, 1])).unwrap();
    w.settle();
    assert_eq!(w.payloads(B).last().unwrap(), b"who am I?");
}

// The kernel's self test N8: the filter looks at addresses, roaming only at keys.
//@test C-IN-4
//@test C-IN-1
#[test]
fn a_packet_with_a_foreign_source_is_dropped_but_its_sender_still_roams() {
    let mut w = neighbours();
    let before = (w.peer(B, A).rx_bytes, w.hosts[B].delivered.len());
    w.send(A, &from_address([10, 1, 2, 1])).unwrap();
    let data = w.last(A, 4).bytes;
    w.drop_flying();
    w.inject(B, elsewhere(), &data);
    assert_eq!(w.hosts[B].delivered.len(), before.1);
    assert_eq!(endpoint(&w), Some(elsewhere()));
    //@test C-IN-7
    assert_eq!(w.peer(B, A).rx_bytes, before.0, "dishonest packets are not counted as received");
}

/// The one's complement sum of a header.
fn sum(header: &[u8]) -> u16 {
    let words = header.as_chunks::<2>().0.iter().map(|word| u32::from(u16::from_be_bytes(*word)));
    let sum: u32 = words.sum();
    ((sum & 0xffff) + (sum >> 16)) as u16
}

fn checksum_ok(header: &[u8]) -> bool {
    sum(header) == 0xffff
}

fn with_checksum(mut p: Vec<u8>) -> Vec<u8> {
    p[10..12].fill(0);
    let sum = !sum(&p[..20]);
    p[10..12].copy_from_slice(&sum.to_be_bytes());
    p
}

// F171: RFC 6040 as the kernel does it.
//@test C-IN-5
#[test]
fn congestion_marks_of_the_outer_header_reach_the_inner_one() {
    const NOT: u8 = 0;
    const ECT1: u8 = 1;
    const ECT0: u8 = 2;
    const CE: u8 = 3;
    let mut w = session();
    for (inner, outer, result) in [
        (NOT, Ecn::NotEct, NOT),
        (NOT, Ecn::Ect0, NOT),
        (NOT, Ecn::Ect1, NOT),
        (NOT, Ecn::Ce, NOT),
        (ECT0, Ecn::NotEct, ECT0),
        (ECT0, Ecn::Ect0, ECT0),
        (ECT0, Ecn::Ect1, ECT1),
        (ECT0, Ecn::Ce, CE),
        (ECT1, Ecn::NotEct, ECT1),
        (ECT1, Ecn::Ect0, ECT1),
        (ECT1, Ecn::Ect1, ECT1),
        (ECT1, Ecn::Ce, CE),
        (CE, Ecn::NotEct, CE),
        (CE, Ecn::Ect0, CE),
        (CE, Ecn::Ect1, CE),
        (CE, Ecn::Ce, CE),
    ] {
        for dscp in [0, 0xb8, 0xfc] {
            // Many identifications, so that the checksum passes through its corners.
            for id in [0_u16, 1, 0x4d1c, 0x7fff, 0xffff] {
                let mut p = packet(A, B, b"marked");
                p[1] = dscp | inner;
                p[4..6].copy_from_slice(&id.to_be_bytes());
                let p = with_checksum(p);
                let data = sealed(&mut w, &p);
                w.inject_ecn(B, w.hosts[A].addr, &data, outer);
                let got = &w.hosts[B].delivered.last().unwrap().1;
                assert_eq!(got[1], dscp | result, "v4 {inner} in {outer:?}");
                assert!(checksum_ok(&got[..20]), "v4 {inner} in {outer:?}");
                assert_eq!((&got[2..10], &got[12..]), (&p[2..10], &p[12..]), "nothing else changes");
            }
            let mut p = packet6(A, B, b"marked");
            let class = dscp | inner;
            (p[0], p[1]) = (0x60 | (class >> 4), (class << 4) | 0x9);
            let data = sealed(&mut w, &p);
            w.inject_ecn(B, w.hosts[A].addr, &data, outer);
            let got = &w.hosts[B].delivered.last().unwrap().1;
            let class = dscp | result;
            assert_eq!(got[..2], [0x60 | (class >> 4), (class << 4) | 0x9], "v6 {inner} in {outer:?}");
            assert_eq!(got[2..], p[2..]);
        }
    }
}

//@test C-IN-6
#[test]
fn a_train_of_datagrams_comes_out_in_its_order_and_one_bad_one_stops_nothing() {
    let mut w = session();
    let mut train = Vec::new();
    for n in 0..8_u8 {
        let mut data = sealed(&mut w, &packet(A, B, &[n; 100]));
        if n == 3 {
            data[40] ^= 1;
        }
        train.extend(data);
    }
    let last = sealed(&mut w, &packet(A, B, &[8; 30]));
    train.extend(&last);
    let (mut plain, before): (Vec<Span>, u64) = (Vec::new(), w.discarded(B, Discard::BadTag));
    let from = Endpoint::new(w.hosts[A].addr);
    w.with(B, |d, now, out| {
        let rx = Received { bytes: &mut train, stride: 128 + 32, from, ecn: Ecn::NotEct };
        d.inbound(now, rx, &mut plain, out);
    });
    let got: Vec<&[u8]> = plain.iter().map(|s| &train[s.at as usize..][..s.len as usize]).collect();
    let expected: Vec<Vec<u8>> = [0, 1, 2, 4, 5, 6, 7]
        .into_iter()
        .map(|n| packet(A, B, &[n; 100]))
        .chain([packet(A, B, &[8; 30])])
        .collect();
    assert_eq!(got, expected);
    assert_eq!(w.discarded(B, Discard::BadTag) - before, 1);
    assert!(plain.iter().all(|s| s.at >= 16), "room for a header before each");
}

// F17: two datagrams joined, or one cut in half, are errors that leave no trace.
#[test]
fn joined_and_cut_datagrams_do_not_harm_the_whole_ones() {
    let mut w = session();
    let (first, second) = (sealed(&mut w, &packet(A, B, b"first")), sealed(&mut w, &packet(A, B, b"second")));
    let from = w.hosts[A].addr;
    w.inject(B, from, &[&first[..], &second[..]].concat());
    w.inject(B, from, &first[..first.len() / 2]);
    let before = w.hosts[B].delivered.len();
    w.inject(B, from, &first);
    w.inject(B, from, &second);
    assert_eq!(w.hosts[B].delivered.len() - before, 2);
}

//@test C-IN-7
#[test]
fn rx_bytes_counts_whole_udp_payloads_of_what_was_accepted() {
    let mut w = World::pair();
    w.connect(A, B);
    assert_eq!((w.peer(B, A).rx_bytes, w.peer(A, B).rx_bytes), (148 + 32 + 48, 92));
    let data = sealed(&mut w, &packet(A, B, &[0; 56]));
    w.inject(B, w.hosts[A].addr, &data);
    assert_eq!(w.peer(B, A).rx_bytes, 148 + 80 + 128, "84 bytes, padded to 96, and 32");
    w.inject(B, w.hosts[A].addr, &data);
    let mut bad = sealed(&mut w, &packet(A, B, &[0; 56]));
    bad[20] ^= 1;
    w.inject(B, w.hosts[A].addr, &bad);
    w.t += secs(1.0);
    let mut initiation = w.initiation(A, B);
    initiation[90] ^= 1;
    w.inject(B, w.hosts[A].addr, &initiation);
    assert_eq!(w.peer(B, A).rx_bytes, 148 + 80 + 128, "replays and forgeries do not count");
    // A cookie reply neither.
    w.cut();
    crate::cookies::load(&mut w, B);
    let initiation = w.initiation(A, B);
    w.inject(B, w.hosts[A].addr, &initiation);
    let (reply, before) = (w.last(B, 3).bytes, w.peer(A, B).rx_bytes);
    w.inject(A, w.hosts[B].addr, &reply);
    assert_eq!(w.peer(A, B).rx_bytes, before);
}

#[test]
fn an_oversized_datagram_is_one_bad_packet() {
    let mut w = session();
    let mut huge = vec![4; 65_507];
    huge[1..4].fill(0);
    w.inject(B, w.hosts[A].addr, &huge);
    assert_eq!(w.discarded(B, Discard::UnknownIndex), 1);
    let good = sealed(&mut w, &packet(A, B, b"still here"));
    let mut stretched = good.clone();
    stretched.resize(65_507, 0);
    w.inject(B, w.hosts[A].addr, &stretched);
    assert_eq!(w.discarded(B, Discard::BadTag), 1);
    w.inject(B, w.hosts[A].addr, &good);
    assert_eq!(w.payloads(B).last().unwrap(), b"still here");
}

/// What can be seen of B after a batch of datagrams came in, in one train or one by one.
fn outcome(seed: u64, whole: bool) -> impl PartialEq + std::fmt::Debug {
    let mut w = World::pair();
    let mut chance = Seeded(seed);
    // The responder's session is not confirmed yet: one of the datagrams does that, in the midst of a train.
    w.send(A, &packet(A, B, b"call")).unwrap();
    w.filter = Box::new(|s| if s.is_data() { Fate::Drop } else { Fate::Pass });
    w.settle();
    let older: Vec<_> = (0..3).map(|n| sealed(&mut w, &packet(A, B, &[n; 100]))).collect();
    if seed.is_multiple_of(2) {
        // Both sessions of a renewed key in one train.
        w.t += secs(130.0);
        w.send(A, &packet(A, B, b"call")).unwrap();
        w.settle();
    }
    let mut train = Vec::new();
    for n in 0..70_u8 {
        let mut data = match chance.next() % 8 {
            0 => older[chance.next() as usize % 3].clone(),
            1 if !train.is_empty() => {
                let again = chance.next() as usize % (train.len() / 160);
                train[again * 160..][..160].to_vec()
            }
            2 => {
                let mut foreign = packet(A, B, &[n; 100]);
                foreign[12] = 99;
                sealed(&mut w, &foreign)
            }
            _ => sealed(&mut w, &packet(A, B, &[n; 100])),
        };
        match chance.next() % 12 {
            0 => data[16 + chance.next() as usize % 144] ^= 1,
            1 => data[4] ^= 1,
            2 => data[0] = 9,
            // A counter far ahead is forged, whatever the window says.
            3 => data[13] = 1,
            _ => {}
        }
        train.extend(data);
    }
    train.truncate(train.len() - 100);
    let (mut got, from) = (Vec::new(), Endpoint::new(w.hosts[A].addr));
    let sizes = if whole { train.len() } else { 160 };
    for bytes in train.chunks_mut(sizes) {
        let mut plain: Vec<Span> = Vec::new();
        w.with(B, |d, now, out| {
            let rx = Received { bytes, stride: 160, from, ecn: Ecn::NotEct };
            d.inbound(now, rx, &mut plain, out);
        });
        got.extend(plain.iter().map(|s| bytes[s.at as usize..][..s.len as usize].to_vec()));
    }
    let (sent, peer) = (w.sent_by(B).len(), w.peer(B, A));
    (got, *w.hosts[B].device.discards(), w.hosts[B].events(), sent, (peer.rx_bytes, peer.tx_bytes))
}

//@test C-IN-6
//@test C-RPL-2
#[test]
fn a_train_is_taken_as_the_same_datagrams_one_by_one() {
    for seed in 0..40 {
        assert_eq!(outcome(seed, true), outcome(seed, false), "seed {seed}");
    }
}
