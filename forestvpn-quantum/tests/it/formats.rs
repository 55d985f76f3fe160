//! Datagrams that are no message: dropped before any work, whatever their length (C-FMT).

use forestvpn_quantum::Discard;

use crate::harness::*;

/// One valid datagram of each type between the two hosts, which are left unused, with its receiver.
fn each_type(w: &mut World) -> Vec<Sent> {
    w.cut();
    w.send(A, &packet(A, B, b"x")).unwrap();
    let initiation = w.last(A, 1);
    w.deliver(&initiation);
    let response = w.last(B, 2);
    w.deliver(&response);
    w.heal();
    w.t += secs(1.0);
    let bytes = w.initiation(A, B);
    let mut cookie = response.clone();
    cookie.bytes.truncate(64);
    cookie.bytes[0] = 3;
    vec![Sent { bytes, ..initiation }, response, cookie, w.last(A, 4)]
}

//@test C-FMT-1
#[test]
fn reserved_bytes_that_are_not_zero_make_a_message_unknown() {
    let mut w = World::pair();
    let messages = each_type(&mut w);
    for (message, at) in messages.iter().flat_map(|m| (1..4).map(move |at| (m, at))) {
        let mut changed = message.clone();
        changed.bytes[at] = 1;
        let host = if changed.to == w.hosts[A].addr { A } else { B };
        let before = w.discarded(host, Discard::Malformed);
        w.deliver(&changed);
        assert_eq!(w.discarded(host, Discard::Malformed), before + 1);
    }
    w.deliver(&messages[3]);
    assert_eq!(w.payloads(B), [b"x"], "with zeros it is a message");
}

//@test C-FMT-2
#[test]
fn types_1_to_3_have_one_length_and_type_4_at_least_32_bytes() {
    let mut w = World::pair();
    let from = w.hosts[A].addr;
    let lengths = (0..200).chain([1500, 65_535]);
    for (kind, len) in (0..=255).flat_map(|kind| lengths.clone().map(move |len| (kind, len))) {
        let mut bytes = vec![0; len];
        if let Some(first) = bytes.first_mut() {
            *first = kind;
        }
        let message = matches!((kind, len), (1, 148) | (2, 92) | (3, 64) | (4, 32..));
        let before = w.discarded(B, Discard::Malformed);
        // An empty datagram is not worth counting.
        w.inject(B, from, &bytes);
        let malformed = w.discarded(B, Discard::Malformed) - before;
        assert_eq!(malformed, u64::from(!message && len != 0), "type {kind}, {len} bytes");
    }
    assert!(w.log.is_empty(), "nobody is answered");
}

/// boringtun does not pad.
//@test C-FMT-3
#[test]
fn data_need_not_be_padded() {
    let mut w = World::pair();
    // A TUN MTU just as long as the packet leaves no room for padding.
    let unpadded = packet(A, B, b"odd");
    w.with(A, |d, _, _| d.set_mtu(unpadded.len() as u16));
    w.send(A, &unpadded).unwrap();
    w.settle();
    assert_eq!(w.last(A, 4).bytes.len(), 32 + 31);
    assert_eq!(w.payloads(B), [b"odd"]);
}

/// F17: neither half of a datagram nor two in one is the shorter, valid one.
//@test C-FMT-4
#[test]
fn a_datagram_with_anything_appended_or_cut_off_is_refused_and_leaves_no_trace() {
    let mut w = World::pair();
    w.connect(A, B);
    w.cut();
    w.send(A, &packet(A, B, b"first")).unwrap();
    w.send(A, &packet(A, B, b"second")).unwrap();
    let [_, first, second] = &w.kind_by(A, 4)[..] else { panic!() };
    let from = first.from;
    let (half, joined) = (&first.bytes[..first.bytes.len() / 2], [&first.bytes[..], &second.bytes].concat());
    let padded = [&first.bytes[..], &vec![0; 65_535 - first.bytes.len()]].concat();
    for bad in [half, &joined, &padded] {
        w.inject(B, from, bad);
    }
    assert_eq!(w.payloads(B).len(), 1);
    w.deliver(first);
    w.deliver(second);
    assert_eq!(w.payloads(B)[1..], [b"first".to_vec(), b"second".to_vec()]);

    w.t += secs(1.0);
    let mut long = w.initiation(A, B);
    long.push(0);
    w.inject(B, from, &long);
    assert_eq!(w.kind_by(B, 2).len(), 1, "an initiation with a byte more is none");
}
