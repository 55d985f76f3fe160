//! What is sent when nobody asks for it: retries, keepalives, rekeys, wiping (C-TMR).
//!
//! The paper's numbers are written out here, so that a wrong constant shows.

use std::time::Duration;

use forestvpn_quantum::{Discard, Event};

use crate::harness::*;

/// Times at which `host` sent what `what` picks, in seconds.
fn times(w: &World, host: usize, what: impl Fn(&Sent) -> bool) -> Vec<f64> {
    w.sent_by(host).iter().filter(|s| what(s)).map(|s| s.at.as_secs_f64()).collect()
}

fn initiations(w: &World, host: usize) -> Vec<f64> {
    times(w, host, |s| s.kind() == 1)
}

fn keepalives(w: &World, host: usize) -> Vec<f64> {
    times(w, host, Sent::is_keepalive)
}

/// `t` lies in `at` to `at` + 333 ms of jitter.
fn near(t: f64, at: f64) -> bool {
    (at..at + 0.3331).contains(&t)
}

fn gaps(times: &[f64]) -> Vec<f64> {
    times.windows(2).map(|w| w[1] - w[0]).collect()
}

fn say(w: &mut World, from: usize, to: usize) {
    w.send(from, &packet(from, to, b"data")).unwrap();
    w.settle();
}

fn keep_alive(w: &mut World, host: usize, of: usize, seconds: u16) {
    w.update_peer(host, of, |p| p.persistent_keepalive = Some(seconds));
    w.settle();
}

/// F28.
//@test C-TMR-1
#[test]
fn an_unanswered_initiation_is_repeated_every_5_s_and_given_up_after_20() {
    let mut w = World::pair();
    w.cut();
    say(&mut w, A, B);
    w.run_until(secs(300.0));
    let sent = initiations(&w, A);
    assert_eq!(sent.len(), 20);
    assert!(gaps(&sent).iter().all(|gap| near(*gap, 5.0)), "{sent:?}");
    let jitter: std::collections::HashSet<u64> = gaps(&sent).iter().map(|g| (g * 1000.0) as u64).collect();
    assert!(jitter.len() > 10, "the jitter varies");
    assert_eq!(w.discarded(A, Discard::GivenUp), 1, "the packet that waited is dropped");
    assert!(w.hosts[A].events().iter().any(|e| matches!(e, Event::HandshakeFailed(_))));
    // F27: new data begins anew, and finds the peer when it is back.
    w.heal();
    w.connect(A, B);
    w.run_for(secs(30.0));
    assert_eq!(initiations(&w, A).len(), 21, "a completed handshake ends the repetition");
}

//@test C-TMR-1
#[test]
fn giving_up_takes_the_pending_keepalive_with_it() {
    let mut w = World::pair();
    w.connect(A, B);
    say(&mut w, B, A);
    w.cut();
    w.run_until(secs(1.0));
    say(&mut w, B, A);
    let late = w.last(B, 4);
    say(&mut w, A, B);
    while initiations(&w, A).len() < 1 + 20 {
        w.run_for(secs(1.0));
    }
    w.deliver(&late);
    assert_eq!(w.hosts[A].delivered.len(), 2, "the session lives");
    let before = keepalives(&w, A).len();
    w.run_for(secs(30.0));
    assert_eq!(keepalives(&w, A).len(), before);
}

//@test C-TMR-2
#[test]
fn fresh_packets_keep_the_handshake_trying_for_ever() {
    let mut w = World::pair();
    w.cut();
    for _ in 0..75 {
        say(&mut w, A, B);
        w.run_for(secs(4.0));
    }
    let sent = initiations(&w, A);
    assert!(sent.last().unwrap() > &290.0, "{sent:?}");
    w.run_for(secs(300.0));
    let after = initiations(&w, A).len() - sent.len();
    assert!((18..=20).contains(&after), "after the last packet, {after} more");
}

/// F29, F26's other half: also after hours.
//@test C-TMR-2
//@test C-TMR-6
#[test]
fn a_persistent_keepalive_never_stops_trying_and_never_tries_more_than_once_in_5_s() {
    for seconds in [1, 25] {
        let mut w = World::pair();
        w.cut();
        keep_alive(&mut w, A, B, seconds);
        w.run_until(secs(3600.0));
        let sent = initiations(&w, A);
        // With 25 s each of the 20 tries puts the keepalive off, so it begins anew 25 s after the last one.
        assert!(sent.len() > 550 && sent.last().unwrap() > &3570.0, "{} at {seconds} s", sent.len());
        let gaps = gaps(&sent);
        assert!(gaps.iter().all(|gap| near(*gap, 5.0) || *gap == f64::from(seconds)), "{gaps:?}");
        assert_eq!(sent.len(), w.sent_by(A).len(), "nothing else goes out");
        w.heal();
        w.run_for(secs(26.0));
        assert!(w.peer(A, B).last_handshake.is_some());
    }
}

/// F23.
//@test C-TMR-3
#[test]
fn initiations_are_5_s_apart_however_often_somebody_asks() {
    let mut w = World::pair();
    w.cut();
    for i in 0..1000 {
        w.t = secs(f64::from(i) * 0.005);
        say(&mut w, A, B);
        w.with(A, |d, now, out| d.handle_timeout(now, out));
    }
    assert_eq!(initiations(&w, A), [0.0]);
    w.run_until(secs(5.4));
    assert_eq!(initiations(&w, A).len(), 2);
}

//@test C-TMR-3
#[test]
fn a_response_puts_off_our_own_initiation_for_5_s() {
    let mut w = World::pair();
    let initiation = w.initiation(A, B);
    let from = w.hosts[A].addr;
    w.cut();
    w.inject(B, from, &initiation);
    w.run_until(secs(4.9));
    say(&mut w, B, A);
    assert!(initiations(&w, B).is_empty());
    w.run_until(secs(5.0));
    say(&mut w, B, A);
    assert_eq!(initiations(&w, B), [5.0]);
}

/// Even when the rate limit swallows the retransmission: somebody has to go on.
//@test C-TMR-3
#[test]
fn a_retransmission_put_off_by_a_response_is_made_up_for() {
    let mut w = World::pair();
    w.cut();
    say(&mut w, A, B);
    w.run_until(secs(4.0));
    let initiation = w.initiation(B, A);
    let from = w.hosts[B].addr;
    w.inject(A, from, &initiation);
    w.run_until(secs(12.0));
    let sent = initiations(&w, A);
    // 5 s after the response, and spread twice: the calls have crossed.
    assert!(sent.len() == 2 && (9.0..9.6661).contains(&sent[1]), "{sent:?}");
}

/// F35: the time counts from the first packet that nobody answered.
//@test C-TMR-4
#[test]
fn data_without_an_answer_brings_a_handshake_after_15_s() {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_until(secs(20.0));
    w.cut();
    for _ in 0..6 {
        say(&mut w, A, B);
        w.run_for(secs(2.0));
    }
    w.run_until(secs(37.0));
    let sent = initiations(&w, A);
    assert!(sent.len() == 2 && near(sent[1], 35.0), "{sent:?}");
}

//@test C-TMR-4
#[test]
fn any_authenticated_answer_even_a_keepalive_is_a_sign_of_life() {
    let mut w = World::pair();
    w.connect(A, B);
    for _ in 0..20 {
        say(&mut w, A, B);
        w.run_for(secs(5.0));
    }
    assert!(w.kind_by(B, 4).iter().all(Sent::is_keepalive), "the peer has nothing to say");
    assert_eq!(initiations(&w, A), [0.0]);
}

//@test C-TMR-4
#[test]
fn what_is_forged_or_replayed_is_no_sign_of_life() {
    let mut w = World::pair();
    w.connect(B, A);
    let (initiation, data) = (w.last(B, 1), w.last(B, 4));
    let mut forged = data.clone();
    forged.bytes[8] += 7;
    w.run_until(secs(11.0));
    w.cut();
    say(&mut w, A, B);
    w.run_for(secs(14.0));
    [initiation, data, forged].iter().for_each(|s| w.deliver(s));
    w.run_for(secs(1.4));
    assert_eq!(initiations(&w, A).len(), 1);
}

/// The rekey at 120 s has had some of its tries when the silence is noticed.
//@test C-TMR-2
//@test C-TMR-4
#[test]
fn noticing_silence_is_a_fresh_reason_to_try() {
    let mut w = idle_until(120.0);
    w.cut();
    say(&mut w, A, B);
    w.run_until(secs(400.0));
    let tries = initiations(&w, A).len() - 1;
    assert!((22..=23).contains(&tries), "{tries}");
}

/// F36.
//@test C-TMR-5
#[test]
fn received_data_is_answered_with_one_keepalive_after_10_s() {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_until(secs(60.0));
    assert_eq!((keepalives(&w, A), keepalives(&w, B)), (vec![], vec![10.0]));
}

/// F34.
//@test C-TMR-5
#[test]
fn a_keepalive_is_never_answered_with_a_keepalive() {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_until(secs(1.0));
    say(&mut w, B, A);
    w.run_until(secs(61.0));
    // B's one packet took the place of its keepalive.
    assert_eq!((keepalives(&w, A), keepalives(&w, B)), (vec![11.0], vec![]));
}

//@test C-TMR-5
#[test]
fn whatever_is_sent_takes_the_place_of_the_passive_keepalive() {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_until(secs(9.0));
    let initiation = w.initiation(A, B);
    let from = w.hosts[A].addr;
    w.filter = Box::new(|s| if s.kind() == 2 { Fate::Drop } else { Fate::Pass });
    w.inject(B, from, &initiation);
    w.run_until(secs(60.0));
    assert!(keepalives(&w, B).is_empty(), "the response said it");
}

//@test C-TMR-5
#[test]
fn data_received_while_a_keepalive_is_pending_brings_another_one() {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_until(secs(3.0));
    say(&mut w, A, B);
    say(&mut w, A, B);
    w.run_until(secs(60.0));
    assert_eq!(keepalives(&w, B), [10.0, 20.0]);
}

/// F33.
//@test C-TMR-6
#[test]
fn a_persistent_keepalive_goes_out_at_its_interval_and_counts() {
    let mut w = World::pair();
    keep_alive(&mut w, A, B, 3);
    w.run_until(secs(20.0));
    let at: Vec<f64> = (0..7).map(|i| f64::from(i) * 3.0).collect();
    assert_eq!(keepalives(&w, A), at, "the first one confirms the session");
    assert_eq!(w.peer(A, B).tx_bytes, 148 + 7 * 32);
}

//@test C-TMR-6
#[test]
fn any_authenticated_packet_either_way_puts_off_the_persistent_keepalive() {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_until(secs(30.0));
    keep_alive(&mut w, A, B, 25);
    assert_eq!(keepalives(&w, A), [30.0], "turned on: at once");
    w.run_until(secs(40.0));
    say(&mut w, A, B);
    w.run_until(secs(45.0));
    say(&mut w, B, A);
    w.run_until(secs(46.0));
    say(&mut w, A, B);
    // B answers the last one at 56 s; that counts as well.
    w.run_until(secs(82.0));
    assert_eq!(keepalives(&w, B).last(), Some(&56.0));
    assert_eq!(keepalives(&w, A), [30.0, 81.0]);
}

//@test C-TMR-6
#[test]
fn the_persistent_keepalive_can_be_turned_off_and_setting_it_again_does_not_put_it_off() {
    let mut w = World::pair();
    keep_alive(&mut w, A, B, 10);
    for _ in 0..10 {
        w.run_for(secs(4.0));
        keep_alive(&mut w, A, B, 10);
    }
    assert_eq!(keepalives(&w, A), [0.0, 10.0, 20.0, 30.0, 40.0]);
    keep_alive(&mut w, A, B, 0);
    w.run_for(secs(100.0));
    assert_eq!(keepalives(&w, A).len(), 5);
}

/// A session that A began at 0 s and that has been idle since its passive keepalive.
fn idle_until(t: f64) -> World {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_until(secs(t));
    w
}

//@test C-TMR-7
//@test C-TMR-9
#[test]
fn the_initiator_renews_the_session_when_it_sends_at_120_s_or_later() {
    let mut w = idle_until(119.999);
    say(&mut w, A, B);
    assert_eq!(initiations(&w, A), [0.0]);
    w.run_until(secs(120.0));
    say(&mut w, A, B);
    assert_eq!(initiations(&w, A), [0.0, 120.0]);
    assert_eq!(w.payloads(B).len(), 3, "nothing waited for it");
}

//@test C-TMR-7
#[test]
fn a_keepalive_renews_the_session_as_data_does() {
    let mut w = World::pair();
    keep_alive(&mut w, A, B, 50);
    w.run_until(secs(151.0));
    assert_eq!(initiations(&w, A), [0.0, 150.0]);
}

/// F22.
//@test C-TMR-9
#[test]
fn the_responder_never_renews_a_session_because_of_its_age() {
    let mut w = idle_until(100.0);
    keep_alive(&mut w, B, A, 5);
    w.filter = Box::new(|s| if s.kind() == 1 { Fate::Drop } else { Fate::Pass });
    w.run_until(secs(179.0));
    assert!(initiations(&w, B).is_empty());
    w.heal();
    w.run_until(secs(186.0));
    assert!(initiations(&w, B).len() <= 1, "only without a usable key it must");
}

//@test C-TMR-8
#[test]
fn the_initiator_that_only_receives_renews_the_session_at_165_s() {
    let mut w = idle_until(164.999);
    // Answers to its own passive keepalive would do it otherwise.
    say(&mut w, B, A);
    assert_eq!(initiations(&w, A), [0.0]);
    w.run_until(secs(165.0));
    say(&mut w, B, A);
    assert_eq!(initiations(&w, A), [0.0, 165.0]);
}

/// Were each packet a fresh reason, there would be more than 20 tries.
//@test C-TMR-8
#[test]
fn receiving_asks_for_a_renewal_only_once_per_session() {
    let mut w = idle_until(165.0);
    w.filter = Box::new(|s| if s.kind() == 1 { Fate::Drop } else { Fate::Pass });
    for second in 165..180 {
        w.run_until(secs(f64::from(second)));
        say(&mut w, B, A);
    }
    assert_eq!(w.hosts[A].delivered.len(), 15);
    w.run_until(secs(400.0));
    assert_eq!(initiations(&w, A)[1..].len(), 20);
}

//@test C-TMR-8
#[test]
fn every_session_may_be_renewed_by_receiving() {
    let mut w = idle_until(165.0);
    say(&mut w, B, A);
    w.run_until(secs(330.0));
    say(&mut w, B, A);
    assert_eq!(initiations(&w, A), [0.0, 165.0, 330.0]);
}

//@test C-TMR-10
#[test]
fn the_responder_wipes_540_s_after_its_response_though_nobody_confirmed_it() {
    let mut w = World::pair();
    let initiation = w.initiation(A, B);
    let from = w.hosts[A].addr;
    w.inject(B, from, &initiation);
    let expired = |w: &mut World| w.hosts[B].events().iter().any(|e| matches!(e, Event::SessionExpired(_)));
    w.run_until(secs(539.999));
    assert!(!expired(&mut w));
    w.run_until(secs(540.0));
    assert!(expired(&mut w));
}

//@test C-TMR-10
#[test]
fn a_packet_that_waits_while_the_keys_are_wiped_is_still_delivered() {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_until(secs(539.0));
    w.filter = Box::new(|s| if s.kind() == 2 { Fate::Delay(secs(2.0)) } else { Fate::Pass });
    say(&mut w, A, B);
    w.run_until(secs(550.0));
    assert_eq!(w.payloads(B).len(), 2);
}

/// The packet comes from a new place, confirms the session, and its inner source address is a lie.
//@test C-TMR-11
#[test]
fn a_packet_that_fails_the_inner_checks_has_done_all_that_an_authenticated_one_does() {
    let mut w = World::pair();
    w.send(A, &packet(77, B, b"spoofed")).unwrap();
    w.filter = Box::new(|s| if s.kind() == 4 { Fate::Drop } else { Fate::Pass });
    w.settle();
    say(&mut w, B, A);
    assert!(w.kind_by(B, 4).is_empty(), "it waits for the confirmation");
    let spoofed = w.last(A, 4);
    w.inject(B, "203.0.113.9:9".parse().unwrap(), &spoofed.bytes);
    assert_eq!(w.discarded(B, Discard::Spoofed), 1);
    assert_eq!(w.peer(B, A).endpoint, Some("203.0.113.9:9".parse().unwrap()));
    assert_eq!(w.last(B, 4).to, "203.0.113.9:9".parse().unwrap(), "the flush knows the new place");
    assert!(w.peer(B, A).last_handshake.is_some());
    w.run_until(secs(1.0));
    w.send(A, &packet(77, B, b"spoofed")).unwrap();
    let spoofed = w.last(A, 4);
    w.deliver(&spoofed);
    w.run_until(secs(12.0));
    assert_eq!(keepalives(&w, B), [11.0], "and it wants an answer");
}

/// A keepalive does the same, but wants no answer.
//@test C-TMR-11
#[test]
fn a_keepalive_moves_the_endpoint_and_stops_there() {
    let mut w = World::pair();
    keep_alive(&mut w, A, B, 20);
    w.run_until(secs(1.0));
    w.cut();
    w.run_until(secs(20.0));
    let keepalive = w.last(A, 4);
    w.inject(B, "203.0.113.9:9".parse().unwrap(), &keepalive.bytes);
    assert_eq!(w.peer(B, A).endpoint, Some("203.0.113.9:9".parse().unwrap()));
    w.run_until(secs(39.0));
    assert!(keepalives(&w, B).is_empty());
}

//@test C-TMR-12
#[test]
fn taking_the_interface_down_forgets_sessions_packets_and_timers() {
    let mut w = World::pair();
    w.connect(A, B);
    keep_alive(&mut w, A, B, 5);
    w.run_until(secs(7.0));
    let late = w.last(A, 4);
    w.with(B, |d, now, out| d.set_up(false, now, out));
    let (before, now) = (w.log.len(), w.t);
    w.run_until(now + secs(600.0));
    assert!(w.log[before..].iter().all(|s| s.from == w.hosts[A].addr), "B is silent");
    assert!(w.discarded(B, Discard::Down) > 0);
    assert_eq!(w.send(B, &packet(B, A, b"x")), Err(Discard::Down));
    w.with(B, |d, now, out| d.set_up(true, now, out));
    w.deliver(&late);
    assert_eq!(w.discarded(B, Discard::UnknownIndex), 1);
}

//@test C-TMR-12
//@test C-TMR-3
#[test]
fn an_interface_that_comes_up_may_initiate_at_once_and_sends_its_persistent_keepalives() {
    let mut w = World::pair();
    w.cut();
    keep_alive(&mut w, A, B, 25);
    say(&mut w, A, B);
    w.run_until(secs(1.0));
    w.with(A, |d, now, out| d.set_up(false, now, out));
    assert_eq!(w.discarded(A, Discard::GivenUp), 2, "keepalive and packet");
    w.run_until(secs(2.0));
    w.heal();
    w.with(A, |d, now, out| d.set_up(true, now, out));
    w.settle();
    assert_eq!(initiations(&w, A), [0.0, 2.0]);
    assert_eq!(keepalives(&w, A), [2.0]);
    w.run_until(secs(28.0));
    assert_eq!(keepalives(&w, A), [2.0, 27.0]);
}

/// F25: a driver that knows only the deadline sees the same as one that asks all the time.
//@test C-TMR-13
#[test]
fn following_the_deadline_sends_the_same_as_polling() {
    let script = |poll: bool| {
        let mut w = World::pair();
        w.hosts.iter().for_each(|h| assert_eq!(h.device.poll_timeout(), None, "idle means idle"));
        keep_alive(&mut w, A, B, 25);
        for (until, from, to) in [(3.0, A, B), (47.0, B, A), (125.0, A, B), (400.0, B, A), (1200.0, A, B)] {
            while poll && w.t + secs(0.01) < secs(until) {
                w.t += secs(0.01);
                w.settle();
            }
            w.run_until(secs(until));
            w.filter = Box::new(move |_| if until == 125.0 { Fate::Drop } else { Fate::Pass });
            say(&mut w, from, to);
        }
        w.log.iter().map(|s| (s.at, s.from, s.kind(), s.bytes.len())).collect::<Vec<_>>()
    };
    let (exact, polled) = (script(false), script(true));
    assert_eq!(exact.len(), polled.len());
    for (e, p) in exact.iter().zip(&polled) {
        assert_eq!((e.1, e.2, e.3), (p.1, p.2, p.3), "{e:?} {p:?}");
        assert!(p.0 >= e.0.saturating_sub(secs(1.0)) && p.0 <= e.0 + secs(1.0), "{e:?} {p:?}");
    }
}

/// F25: every call at the deadline moves it, so a driver never spins.
//@test C-TMR-13
#[test]
fn a_deadline_that_was_served_lies_in_the_future() {
    let mut w = World::pair();
    keep_alive(&mut w, A, B, 1);
    let mut wakeups = 0;
    let mut filter = Seeded(1);
    w.filter = Box::new(move |_| if filter.next().is_multiple_of(2) { Fate::Drop } else { Fate::Pass });
    while w.t < secs(600.0) {
        let next = w.next().unwrap();
        w.run_until(next);
        let now = w.now().mono;
        assert!(w.hosts.iter().all(|h| h.device.poll_timeout().is_none_or(|at| at > now)));
        wakeups += 1;
    }
    assert!(wakeups < 3 * w.log.len() + 100, "{wakeups} for {} datagrams", w.log.len());
}

/// F11: boringtun 0.7.1 lost one request in seven here.
#[test]
fn a_request_every_3_s_is_always_answered_and_needs_no_handshake_before_120_s() {
    let mut w = World::pair();
    keep_alive(&mut w, A, B, 25);
    for i in 0..40 {
        w.run_until(secs(f64::from(i) * 3.0));
        say(&mut w, A, B);
        say(&mut w, B, A);
    }
    assert_eq!((w.hosts[A].delivered.len(), w.hosts[B].delivered.len()), (40, 40));
    assert_eq!(w.log.iter().filter(|s| s.kind() != 4).count(), 2);
}

/// F22.
#[test]
fn with_keepalives_on_both_sides_only_the_initiator_renews_and_nothing_is_lost() {
    let mut w = World::pair();
    w.filter = Box::new(|_| Fate::Delay(secs(0.04)));
    keep_alive(&mut w, A, B, 25);
    w.run_until(secs(10.0));
    keep_alive(&mut w, B, A, 25);
    let mut sent = 0;
    while w.t < secs(400.0) {
        w.run_for(secs(7.0));
        for (from, to) in [(A, B), (B, A)] {
            w.send(from, &packet(from, to, b"x")).unwrap();
        }
        sent += 1;
    }
    w.run_for(secs(1.0));
    assert_eq!((w.hosts[A].delivered.len(), w.hosts[B].delivered.len()), (sent, sent));
    assert!(initiations(&w, B).is_empty());
    let gaps = gaps(&initiations(&w, A));
    assert!(gaps.len() == 3 && gaps.iter().all(|gap| (120.0..127.1).contains(gap)), "{gaps:?}");
}

/// F26.
#[test]
fn a_tunnel_with_keepalive_is_back_at_the_first_call_after_a_long_suspend() {
    for away in [181.0, 540.0, 600.0, 86_400.0] {
        let mut w = World::pair();
        keep_alive(&mut w, A, B, 25);
        w.run_until(secs(60.0));
        w.jump(secs(away));
        let before = initiations(&w, A).len();
        w.due(A);
        assert_eq!(initiations(&w, A).len(), before + 1, "{away} s");
        w.settle();
        say(&mut w, B, A);
        assert_eq!(w.payloads(A), [b"data"]);
    }
}

/// F27.
#[test]
fn a_peer_that_was_away_is_found_again_by_the_next_packet() {
    let mut w = World::pair();
    w.connect(A, B);
    w.cut();
    w.run_until(secs(10.0));
    say(&mut w, A, B);
    w.run_until(secs(210.0));
    w.heal();
    w.connect(A, B);
}

/// F31.
#[test]
fn a_clock_that_steps_back_neither_panics_nor_storms() {
    let mut w = World::pair();
    keep_alive(&mut w, A, B, 1);
    w.run_until(secs(500.0));
    let before = w.log.len();
    for step in [1.0, 100.0, 399.0] {
        w.t -= secs(step).min(w.t);
        w.settle();
        say(&mut w, A, B);
        say(&mut w, B, A);
        let now = w.t;
        w.run_until(now + Duration::from_millis(500));
    }
    assert!(w.log.len() - before < 20, "{} datagrams", w.log.len() - before);
    assert_eq!(w.hosts[A].delivered.len(), 3);
}
