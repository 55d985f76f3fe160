//! Previous, current, next: which keys may send, which may receive, and until when (C-SES).

use forestvpn_quantum::{Discard, Event};

use crate::harness::*;

/// `host` sends a data message that the link keeps; it is given.
fn held(w: &mut World, host: usize, to: usize, payload: &[u8]) -> Sent {
    w.cut();
    w.send(host, &packet(host, to, payload)).unwrap();
    w.heal();
    let sent = w.sent_by(host).pop().unwrap();
    assert!(sent.is_data());
    sent
}

/// `host` sends an initiation that the link keeps: data that nobody answers makes it do so.
fn held_initiation(w: &mut World, host: usize, to: usize) -> Sent {
    let before = w.kind_by(host, 1).len();
    w.cut();
    w.send(host, &packet(host, to, b"unanswered")).unwrap();
    let limit = w.t + secs(16.0);
    while w.kind_by(host, 1).len() == before {
        let next = w.next().unwrap();
        assert!(next < limit);
        w.run_until(next);
    }
    w.heal();
    w.last(host, 1)
}

/// `host` answers `initiation`; the link keeps the response.
fn held_response(w: &mut World, host: usize, initiation: &Sent) -> Sent {
    w.cut();
    w.deliver(initiation);
    w.heal();
    w.last(host, 2)
}

/// Is `message` let through? Counts only what comes out of the tunnel.
fn opens(w: &mut World, message: &Sent) -> bool {
    let delivered = |w: &World| w.hosts.iter().map(|h| h.delivered.len()).sum::<usize>();
    let before = delivered(w);
    w.deliver(message);
    delivered(w) > before
}

//@test C-SES-1
//@test C-SES-3
#[test]
fn the_initiators_new_session_makes_the_old_one_previous_and_ends_what_was_previous() {
    let mut w = World::pair();
    let mut old = Vec::new();
    for _ in 0..3 {
        let initiation = held_initiation(&mut w, A, B);
        let response = held_response(&mut w, B, &initiation);
        w.deliver(&response);
        w.settle();
        old.push([held(&mut w, B, A, b"1"), held(&mut w, B, A, b"2")]);
    }
    assert!(!opens(&mut w, &old[0][0]), "two sessions back");
    assert_eq!(w.discarded(A, Discard::UnknownIndex), 1);
    assert!(opens(&mut w, &old[1][0]), "previous");
    assert!(opens(&mut w, &old[2][0]), "current");
    assert!(opens(&mut w, &old[1][1]), "previous still");
}

//@test C-SES-1
#[test]
fn an_unconfirmed_session_becomes_previous_when_our_own_handshake_overtakes_it() {
    let mut w = World::pair();
    w.connect(A, B);
    let first = held(&mut w, B, A, b"first");
    // B's session waits at A for its first packet...
    let from_b = held_initiation(&mut w, B, A);
    let response = held_response(&mut w, A, &from_b);
    w.cut();
    w.deliver(&response);
    let (unconfirmed, later) = (held(&mut w, B, A, b"unconfirmed"), held(&mut w, B, A, b"later"));
    // ...while A begins one of its own.
    let from_a = held_initiation(&mut w, A, B);
    let response = held_response(&mut w, B, &from_a);
    w.deliver(&response);
    assert!(!opens(&mut w, &first), "what was current is gone");
    assert!(opens(&mut w, &unconfirmed));
    let sent = held(&mut w, A, B, b"on the newest");
    assert_eq!(sent.index(), response.index(), "and it changes nothing about what we send with");
    assert!(opens(&mut w, &later));
}

/// F14.
//@test C-SES-2
#[test]
fn the_responder_sends_with_the_old_session_until_the_new_one_is_confirmed() {
    let mut w = World::pair();
    w.connect(A, B);
    let old = w.last(A, 1).index();
    let initiation = held_initiation(&mut w, A, B);
    let response = held_response(&mut w, B, &initiation);
    assert_eq!(held(&mut w, B, A, b"not yet").index(), old);
    let late = held(&mut w, A, B, b"late");
    w.deliver(&response);
    assert_eq!(held(&mut w, B, A, b"not yet").index(), old);
    let events = w.hosts[B].events().len();
    let confirmation = w.last(A, 4);
    assert!(confirmation.is_keepalive());
    w.deliver(&confirmation);
    assert_eq!(held(&mut w, B, A, b"now").index(), initiation.index());
    assert!(events > 0 && w.hosts[B].events().iter().any(|e| matches!(e, Event::SessionEstablished(_))));
    assert!(opens(&mut w, &late), "the previous session still receives");
}

//@test C-SES-2
#[test]
fn a_responder_without_a_session_keeps_its_packets_until_the_first_one_is_confirmed() {
    let mut w = World::pair();
    w.filter = Box::new(|s| if s.kind() == 4 { Fate::Drop } else { Fate::Pass });
    w.send(A, &packet(A, B, b"confirms")).unwrap();
    w.settle();
    w.send(B, &packet(B, A, b"1")).unwrap();
    w.send(B, &packet(B, A, b"2")).unwrap();
    w.settle();
    assert!(w.kind_by(B, 4).is_empty());
    w.heal();
    let confirmation = w.last(A, 4);
    w.deliver(&confirmation);
    w.settle();
    assert_eq!(w.payloads(A), [b"1", b"2"]);
}

//@test C-SES-2
#[test]
fn a_newer_initiation_replaces_the_unconfirmed_session_and_ends_the_previous_one() {
    let mut w = World::pair();
    w.connect(A, B);
    let initiation = held_initiation(&mut w, A, B);
    let response = held_response(&mut w, B, &initiation);
    w.deliver(&response);
    w.settle();
    // Now B has previous and current. Two handshakes that nobody confirms come.
    let current = held(&mut w, A, B, b"current");
    for _ in 0..2 {
        w.t += secs(1.0);
        let bytes = w.initiation(A, B);
        w.inject(B, current.from, &bytes);
    }
    assert!(opens(&mut w, &current));
    let stale = w.log.iter().find(|s| s.is_data() && s.from == current.from).unwrap().clone();
    let before = w.discarded(B, Discard::UnknownIndex);
    w.deliver(&stale);
    assert_eq!(w.discarded(B, Discard::UnknownIndex), before + 1, "previous is gone");
}

//@test C-SES-4
#[test]
fn after_the_response_waiting_packets_go_or_else_one_keepalive() {
    let mut w = World::pair();
    w.send(A, &packet(A, B, b"1")).unwrap();
    w.send(A, &packet(A, B, b"2")).unwrap();
    w.settle();
    let data: Vec<bool> = w.kind_by(A, 4).iter().map(Sent::is_keepalive).collect();
    assert_eq!(data, [false, false]);

    let mut w = World::pair();
    w.update_peer(A, B, |p| p.persistent_keepalive = Some(3600));
    w.settle();
    let data: Vec<bool> = w.kind_by(A, 4).iter().map(Sent::is_keepalive).collect();
    assert_eq!(data, [true]);
}

/// F24.
//@test C-SES-5
#[test]
fn a_session_sends_until_it_is_180_s_old_and_then_the_packet_waits_for_a_new_one() {
    let mut w = World::pair();
    w.connect(B, A);
    w.run_until(secs(179.9));
    w.filter = Box::new(|s| if s.kind() == 1 { Fate::Drop } else { Fate::Pass });
    w.connect(A, B);
    assert_eq!(w.kind_by(A, 1).len(), 0);
    w.run_until(secs(180.0));
    w.cut();
    w.send(A, &packet(A, B, b"on a new one")).unwrap();
    assert_eq!(w.sent_by(A).last().unwrap().kind(), 1);
    w.heal();
    w.run_for(secs(5.4));
    assert_eq!(w.payloads(B).iter().filter(|p| *p == b"on a new one").count(), 1);
}

//@test C-SES-6
#[test]
fn a_session_receives_until_it_is_180_s_old() {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_until(secs(170.0));
    let (young, old) = (held(&mut w, B, A, b"young"), held(&mut w, B, A, b"old"));
    w.t = secs(180.0) - std::time::Duration::from_nanos(1);
    assert!(opens(&mut w, &young));
    w.t = secs(180.0);
    assert!(!opens(&mut w, &old));
    assert_eq!(w.discarded(A, Discard::KeyExpired), 1);
}

//@test C-SES-7
//@test C-TMR-10
#[test]
fn all_keys_are_wiped_540_s_after_the_last_session_was_derived() {
    let mut w = World::pair();
    w.connect(A, B);
    let packet = held(&mut w, A, B, b"x");
    w.run_until(secs(100.0));
    let initiation = held_initiation(&mut w, A, B);
    let response = held_response(&mut w, B, &initiation);
    w.deliver(&response);
    let derived = w.t;
    w.run_until(derived + secs(539.9));
    let expired = |w: &mut World, host: usize| {
        w.hosts[host].events().iter().any(|e| matches!(e, Event::SessionExpired(_)))
    };
    assert!(!expired(&mut w, A) && !expired(&mut w, B), "a new session begins the time anew");
    w.deliver(&packet);
    assert_eq!(w.discarded(B, Discard::KeyExpired), 1, "the index is known yet");
    w.run_until(derived + secs(540.0));
    assert!(expired(&mut w, A) && expired(&mut w, B));
    w.deliver(&packet);
    assert_eq!(w.discarded(B, Discard::UnknownIndex), 1);
    assert!(w.peer(A, B).last_handshake.is_some(), "the peer itself stays");
    w.connect(A, B);
}

//@test C-SES-7
#[test]
fn a_handshake_that_was_given_up_is_wiped_540_s_later() {
    let mut w = World::pair();
    w.cut();
    w.send(A, &packet(A, B, b"x")).unwrap();
    let known = |w: &mut World| {
        // A response is refused as unknown only when its handshake is forgotten.
        let mut response = [0; 92].to_vec();
        response[0] = 3;
        response.truncate(64);
        let index = w.last(A, 1).index();
        response[4..8].copy_from_slice(&index.to_le_bytes());
        let before = w.discarded(A, Discard::UnknownIndex);
        let from = w.hosts[B].addr;
        w.inject(A, from, &response);
        w.discarded(A, Discard::UnknownIndex) == before
    };
    w.run_until(secs(110.0));
    assert!(w.hosts[A].events().iter().any(|e| matches!(e, Event::HandshakeFailed(_))));
    let given_up = w.last(A, 1).at + secs(5.0);
    w.run_until(given_up + secs(539.9));
    assert!(known(&mut w));
    w.run_until(given_up + secs(540.4));
    assert!(!known(&mut w));
}

/// The clock is the suspend-aware one; here that is all there is to see.
//@test C-SES-8
#[test]
fn keys_age_while_nobody_runs() {
    let mut w = World::pair();
    w.connect(A, B);
    let packet_before = held(&mut w, A, B, b"before");
    w.jump(secs(180.0));
    w.deliver(&packet_before);
    assert_eq!(w.discarded(B, Discard::KeyExpired), 1);
    w.send(A, &packet(A, B, b"after")).unwrap();
    assert_eq!(w.sent_by(A).last().unwrap().kind(), 1);
}

//@test C-SES-9
#[test]
fn the_last_handshake_is_the_wall_clock_of_its_completion_on_either_side() {
    let mut w = World::pair();
    w.filter = Box::new(|_| Fate::Delay(secs(1.0)));
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.run_until(secs(1.9));
    assert_eq!((w.peer(A, B).last_handshake, w.peer(B, A).last_handshake), (None, None));
    w.run_until(secs(2.9));
    assert_eq!(w.peer(A, B).last_handshake, Some(EPOCH + secs(2.0)), "the response");
    assert_eq!(w.peer(B, A).last_handshake, None, "not confirmed yet");
    w.run_until(secs(100.0));
    assert_eq!(w.peer(B, A).last_handshake, Some(EPOCH + secs(3.0)), "the first data");
    assert_eq!(w.peer(A, B).last_handshake, Some(EPOCH + secs(2.0)));
}

/// F16.
#[test]
fn both_sides_initiating_at_once_over_a_lossy_link_always_end_in_a_working_session() {
    for seed in 0..20 {
        let mut w = World::pair();
        let mut coin = Seeded(seed);
        w.filter = Box::new(move |_| match coin.next() % 2 {
            0 => Fate::Drop,
            _ => Fate::Delay(secs(0.03)),
        });
        w.send(A, &packet(A, B, b"x")).unwrap();
        w.send(B, &packet(B, A, b"y")).unwrap();
        w.run_for(secs(30.0));
        w.heal();
        w.run_for(secs(20.0));
        let before = [A, B].map(|h| w.hosts[h].delivered.len());
        w.send(A, &packet(A, B, b"x")).unwrap();
        w.send(B, &packet(B, A, b"y")).unwrap();
        w.run_for(secs(11.0));
        let after = [A, B].map(|h| w.hosts[h].delivered.len());
        assert!(after[0] > before[0] && after[1] > before[1], "seed {seed}: {before:?} {after:?}");
    }
}
