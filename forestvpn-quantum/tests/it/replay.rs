//! The replay window through the device (C-RPL); the window's own table is in the crate.

use forestvpn_quantum::Discard;

use crate::harness::*;

/// A session from A to B, and `count` data messages with counters from 1 on that the link kept.
fn held(count: usize) -> (World, Vec<Sent>) {
    let mut w = World::pair();
    w.connect(A, B);
    w.cut();
    for i in 0..count {
        w.send(A, &packet(A, B, &(i as u32).to_be_bytes())).unwrap();
    }
    let sent = w.kind_by(A, 4).split_off(1);
    assert_eq!((sent[0].counter(), sent.len()), (1, count));
    (w, sent)
}

fn delivered(w: &World) -> usize {
    w.hosts[B].delivered.len() - 1
}

/// F05.
//@test C-RPL-1
#[test]
fn the_first_packet_of_a_session_is_accepted_once() {
    let mut w = World::pair();
    w.connect(A, B);
    let first = w.last(A, 4);
    assert_eq!(first.counter(), 0);
    w.deliver(&first);
    assert_eq!((delivered(&w), w.discarded(B, Discard::Replayed)), (0, 1));
}

/// F06.
//@test C-RPL-1
#[test]
fn packets_up_to_8128_late_are_accepted_exactly_once_in_any_order() {
    let (mut w, sent) = held(10_000);
    w.deliver(&sent[9_999]);
    for late in (9_999 - 8128..9_999).rev() {
        w.deliver(&sent[late]);
    }
    assert_eq!((delivered(&w), w.discarded(B, Discard::Replayed)), (8129, 0));
    for refused in [9_999 - 8129, 1_000, 9_999 - 8128, 5_000, 9_999] {
        w.deliver(&sent[refused]);
    }
    assert_eq!((delivered(&w), w.discarded(B, Discard::Replayed)), (8129, 5));
}

/// F07.
//@test C-RPL-2
#[test]
fn a_forged_counter_does_not_move_the_window() {
    let (mut w, sent) = held(10);
    for counter in [5, 10, 1 << 40, u64::MAX - (1 << 13) - 1] {
        let mut forged = sent[0].clone();
        forged.bytes[8..16].copy_from_slice(&u64::to_le_bytes(counter));
        w.deliver(&forged);
    }
    assert_eq!((delivered(&w), w.discarded(B, Discard::BadTag)), (0, 4));
    sent.iter().for_each(|s| w.deliver(s));
    assert_eq!(delivered(&w), 10);
}

//@test C-RPL-3
#[test]
fn counters_at_the_very_top_are_refused_before_anything_is_computed() {
    let (mut w, sent) = held(1);
    let limit = u64::MAX - (1 << 13);
    for counter in [limit, limit + 1, u64::MAX - 1, u64::MAX] {
        let mut forged = sent[0].clone();
        forged.bytes[8..16].copy_from_slice(&counter.to_le_bytes());
        w.deliver(&forged);
    }
    assert_eq!((w.discarded(B, Discard::KeyExpired), w.discarded(B, Discard::BadTag)), (4, 0));
    w.deliver(&sent[0]);
    assert_eq!(delivered(&w), 1);
}

//@test C-RPL-4
#[test]
fn a_packet_that_fails_the_inner_checks_has_used_its_counter() {
    let (mut w, _) = held(1);
    // The source address is nobody's.
    w.send(A, &packet(77, B, b"spoofed")).unwrap();
    let spoofed = w.last(A, 4);
    w.deliver(&spoofed);
    w.deliver(&spoofed);
    let refused = [Discard::Spoofed, Discard::Replayed].map(|why| w.discarded(B, why));
    assert_eq!((refused, delivered(&w)), ([1, 1], 0));
}
