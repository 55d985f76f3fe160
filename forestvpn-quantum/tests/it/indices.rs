//! Session indices as they show on the wire (C-IDX).

use std::collections::HashSet;

use forestvpn_quantum::Discard;
use forestvpn_quantum::config::{DeviceUpdate, PeerUpdate};

use crate::harness::*;

/// F15, F19: 300 sessions, each one carrying a packet.
//@test C-IDX-1
#[test]
fn indices_show_no_sequence_and_every_value_works() {
    let mut w = World::pair();
    let mut seen = Vec::new();
    for i in 0..300 {
        w.connect(if i % 2 == 0 { A } else { B }, if i % 2 == 0 { B } else { A });
        let initiator = w.log.iter().rev().find(|s| s.kind() == 1).unwrap();
        let response = w.log.iter().rev().find(|s| s.kind() == 2).unwrap();
        seen.extend([initiator.index(), response.index()]);
        w.run_for(secs(200.0));
    }
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), 600);
    for bit in 0..32 {
        let ones = seen.iter().filter(|index| *index >> bit & 1 == 1).count();
        assert!((200..400).contains(&ones), "bit {bit} is set in {ones} of 600");
    }
    let steps: HashSet<u32> = seen.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect();
    assert_eq!(steps.len(), 599, "no step between two indices comes twice");
}

//@test C-IDX-2
#[test]
fn the_handshakes_index_becomes_the_sessions() {
    let mut w = World::pair();
    w.connect(A, B);
    w.send(B, &packet(B, A, b"x")).unwrap();
    assert_eq!(w.last(B, 4).index(), w.last(A, 1).index());
    assert_eq!(w.last(A, 4).index(), w.last(B, 2).index());
    let response = w.last(B, 2);
    w.deliver(&response);
    assert_eq!(w.discarded(A, Discard::UnknownIndex), 1, "there is no handshake of that name any more");
}

//@test C-IDX-2
#[test]
fn indices_go_with_the_peer_and_with_the_interface() {
    let end: [fn(&mut World); 2] = [
        |w| w.update_peer(B, A, |p| p.remove = true),
        |w| {
            w.with(B, |d, now, out| d.set_up(false, now, out));
            w.with(B, |d, now, out| d.set_up(true, now, out));
        },
    ];
    for end in end {
        let mut w = World::pair();
        w.connect(A, B);
        w.send(A, &packet(A, B, b"x")).unwrap();
        let data = w.last(A, 4);
        end(&mut w);
        w.deliver(&data);
        assert_eq!(w.discarded(B, Discard::UnknownIndex), 1);
    }
}

/// `message` with another receiver index, which is at offset 8 in a response and at 4 in the others.
fn to_index(message: &Sent, index: u32) -> Sent {
    let mut changed = message.clone();
    let at = if message.kind() == 2 { 8 } else { 4 };
    changed.bytes[at..at + 4].copy_from_slice(&index.to_le_bytes());
    changed
}

//@test C-IDX-3
#[test]
fn responses_find_handshakes_data_finds_sessions_and_cookie_replies_find_both() {
    let mut w = World::pair();
    w.connect(A, B);
    w.send(B, &packet(B, A, b"x")).unwrap();
    w.settle();
    let (session, data) = (w.last(A, 1).index(), w.last(B, 4));
    w.cut();
    w.jump(secs(200.0));
    w.send(A, &packet(A, B, b"x")).unwrap();
    let handshake = w.last(A, 1).index();
    assert_ne!(session, handshake);
    let mut cookie = data.clone();
    cookie.bytes.resize(64, 0);
    cookie.bytes[0] = 3;

    let refusals = |w: &World| {
        [Discard::UnknownIndex, Discard::BadCookie, Discard::KeyExpired].map(|d| w.discarded(A, d))
    };
    for (message, refused) in [
        (to_index(&data, handshake), [1, 0, 0]),
        (to_index(&data, session), [1, 0, 1]),
        (to_index(&cookie, handshake), [1, 1, 1]),
        (to_index(&cookie, session), [1, 2, 1]),
        (to_index(&cookie, session ^ 1), [2, 2, 1]),
    ] {
        w.deliver(&message);
        assert_eq!(refusals(&w), refused);
    }
}

/// F09, seen from outside; the size of the table is counted in the crate.
//@test C-IDX-4
#[test]
fn of_many_initiations_that_are_never_confirmed_only_the_newest_is_usable() {
    let mut w = World::pair();
    w.connect(A, B);
    let live = w.last(A, 1).index();
    w.cut();
    for _ in 0..200 {
        w.t += secs(0.02);
        let bytes = w.initiation(A, B);
        let from = w.hosts[A].addr;
        w.inject(B, from, &bytes);
    }
    let responses = w.kind_by(B, 2);
    assert_eq!(responses.len(), 201);
    let data = w.last(A, 4);
    for response in &responses[1..200] {
        w.deliver(&Sent { to: data.to, ..to_index(&data, response.index()) });
    }
    assert_eq!((w.discarded(B, Discard::UnknownIndex), w.discarded(B, Discard::BadTag)), (199, 0));
    w.deliver(&to_index(&data, responses[200].index()));
    assert_eq!(w.discarded(B, Discard::BadTag), 1, "the newest is known, if not to this key");
    w.heal();
    w.send(B, &packet(B, A, b"x")).unwrap();
    assert_eq!(w.last(B, 4).index(), live, "the session is not disturbed");
}

/// Keys that an attacker could choose to collide in a weak hash: alike but for one byte anywhere.
//@test C-IDX-5
#[test]
fn peers_with_almost_equal_keys_are_told_apart() {
    let mut w = World::new(1);
    let key = |at: usize, value: u8| {
        let mut key = [0x55; 32];
        key[at] = value;
        forestvpn_quantum::PublicKey(key)
    };
    let keys: HashSet<_> = (0..32).flat_map(|at| (0..32).map(move |v| key(at, v))).collect();
    let peers = keys.iter().map(|key| PeerUpdate::new(*key)).collect();
    w.configure(A, DeviceUpdate { peers, ..Default::default() });
    let device = &w.hosts[A].device;
    let ids: HashSet<_> = keys.iter().map(|key| device.peer(key).unwrap()).collect();
    assert_eq!((ids.len(), device.snapshot().peers.len()), (keys.len(), keys.len()));
    assert!(keys.iter().all(|key| device.public_key(device.peer(key).unwrap()) == Some(*key)));
}
