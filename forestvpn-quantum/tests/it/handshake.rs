//! Initiation and response: who is answered, what is refused, what a retry looks like (C-HS, C-PRIM).

use forestvpn_quantum::config::{DeviceUpdate, PeerUpdate};
use forestvpn_quantum::{Discard, PresharedKey, PrivateKey, PublicKey};

use crate::harness::*;

const MAC1: usize = 148 - 32;

/// mac1 over a changed initiation, which anybody can compute who knows the responder's public key.
fn fix_mac1(message: &mut [u8], responder: &PublicKey) {
    use blake2::digest::{Digest, KeyInit, Mac, consts::U16};
    let key =
        blake2::Blake2s256::new().chain_update(b"mac1----").chain_update(responder.as_bytes()).finalize();
    let at = message.len() - 32;
    let mac =
        blake2::Blake2sMac::<U16>::new_from_slice(&key).unwrap().chain_update(&message[..at]).finalize();
    message[at..at + 16].copy_from_slice(&mac.into_bytes());
}

/// How many responses `B` has sent.
fn answers(w: &World) -> usize {
    w.kind_by(B, 2).len()
}

fn psk(byte: u8) -> Option<Option<PresharedKey>> {
    Some(Some(PresharedKey::new([byte; 32])))
}

//@test C-PRIM-7
#[test]
fn every_bit_of_mac1_counts() {
    let mut w = World::pair();
    let initiation = w.initiation(A, B);
    let from = w.hosts[A].addr;
    for bit in 0..128 {
        let mut forged = initiation.clone();
        forged[MAC1 + bit / 8] ^= 1 << (bit % 8);
        w.inject(B, from, &forged);
    }
    assert_eq!((w.discarded(B, Discard::BadMac1), answers(&w)), (128, 0));
}

//@test C-PRIM-5
#[test]
fn a_private_key_reads_back_clamped() {
    let mut w = World::new(1);
    let key = Some(Some(PrivateKey::new([0xff; 32])));
    w.configure(A, DeviceUpdate { private_key: key, ..Default::default() });
    let read = w.hosts[A].device.snapshot().private_key.unwrap();
    assert_eq!((read.as_bytes()[0], read.as_bytes()[31]), (0xf8, 0x7f));
}

//@test C-PRIM-4
#[test]
fn peers_with_low_order_keys_are_listed_but_nothing_is_ever_sent_to_them() {
    let mut w = World::new(1);
    let mut one = [0; 32];
    one[0] = 1;
    // 0, 1, p - 1, p and p + 1, without and with the bit that X25519 ignores.
    let mut points = vec![[0; 32], one];
    for low in 0xec..=0xee {
        let mut p = [0xff; 32];
        (p[0], p[31]) = (low, 0x7f);
        points.push(p);
        p[31] = 0xff;
        points.push(p);
    }
    let count = points.len();
    for (i, point) in points.into_iter().enumerate() {
        let mut peer = PeerUpdate::new(PublicKey(point));
        peer.endpoint = Some("192.0.2.99:1".parse().unwrap());
        peer.persistent_keepalive = Some(1);
        peer.allowed_ips = vec![allowed(i + 1)];
        w.configure(A, DeviceUpdate { peers: vec![peer], ..Default::default() });
        let _ = w.send(A, &packet(A, i + 1, b"x"));
    }
    w.run_for(secs(30.0));
    assert_eq!(w.hosts[A].device.snapshot().peers.len(), count);
    assert!(w.log.is_empty(), "{:?}", w.log);
}

//@test C-HS-2
#[test]
fn a_forged_initiation_changes_nothing_however_far_it_gets() {
    let mut w = World::pair();
    let initiation = w.initiation(A, B);
    let (from, b) = (w.hosts[A].addr, w.hosts[B].public());
    for at in [8, 40, 90, 115] {
        let mut forged = initiation.clone();
        forged[at] ^= 1;
        fix_mac1(&mut forged, &b);
        w.inject(B, "203.0.113.1:1".parse().unwrap(), &forged);
    }
    assert_eq!((w.discarded(B, Discard::BadTag), answers(&w)), (4, 0));
    assert_eq!(w.peer(B, A).endpoint, Some(from), "nobody moved");
    assert_eq!(w.peer(B, A).rx_bytes, 0);
    w.inject(B, from, &initiation);
    assert_eq!(answers(&w), 1, "the true one is as good as before");
}

//@test C-HS-2
#[test]
fn an_initiation_from_a_stranger_is_dropped_in_silence() {
    let mut w = World::new(2);
    let initiation = w.initiation(A, B);
    let from = w.hosts[A].addr;
    w.inject(B, from, &initiation);
    assert_eq!((w.discarded(B, Discard::UnknownPeer), w.log.len()), (1, 0));
}

/// F12, F18: also when the older one is only late.
//@test C-HS-3
#[test]
fn only_a_greater_timestamp_is_answered_and_the_session_lives_on() {
    let mut w = World::pair();
    let older = w.initiation(A, B);
    w.t += secs(1.0);
    w.connect(A, B);
    let replayed = w.last(A, 1).bytes;
    w.t += secs(1.0);
    let from = w.hosts[A].addr;
    w.inject(B, from, &older);
    w.inject(B, from, &replayed);
    assert_eq!((w.discarded(B, Discard::OldTimestamp), answers(&w)), (2, 1));
    w.send(A, &packet(A, B, b"still here")).unwrap();
    w.settle();
    assert_eq!(w.payloads(B).last().unwrap(), b"still here");
    let newer = w.initiation(A, B);
    w.inject(B, from, &newer);
    assert_eq!(answers(&w), 2);
}

//@test C-HS-3
#[test]
fn the_accepted_timestamp_survives_a_change_of_the_peer_and_goes_with_the_peer() {
    let mut w = World::pair();
    let initiation = w.initiation(A, B);
    let from = w.hosts[A].addr;
    w.inject(B, from, &initiation);
    w.update_peer(B, A, |p| {
        (p.persistent_keepalive, p.preshared_key, p.replace_allowed_ips) = (Some(25), psk(1), true);
    });
    w.run_for(secs(1.0));
    w.inject(B, from, &initiation);
    assert_eq!((w.discarded(B, Discard::OldTimestamp), answers(&w)), (1, 1));
    w.update_peer(B, A, |p| p.remove = true);
    w.introduce(B, A, false);
    w.inject(B, from, &initiation);
    assert_eq!(answers(&w), 2, "a peer that is new has accepted nothing yet");
}

/// A responder that knows only the last timestamp refuses whatever is not greater.
//@test C-HS-4
#[test]
fn the_wall_clock_is_read_for_each_initiation_and_may_step_back() {
    let mut w = World::pair();
    w.connect(A, B);
    w.unix -= secs(3600.0);
    w.run_for(secs(200.0));
    w.connect(A, B);
    assert_eq!((answers(&w), w.discarded(B, Discard::OldTimestamp)), (2, 0));
    // Had the clock been read once only, this would be older than what the step back left behind.
    w.unix += secs(3600.0);
    w.run_for(secs(200.0));
    let initiation = w.initiation(A, B);
    w.connect(A, B);
    assert_eq!(answers(&w), 3);
    let from = w.hosts[A].addr;
    w.t += secs(1.0);
    w.inject(B, from, &initiation);
    assert_eq!(w.discarded(B, Discard::OldTimestamp), 1, "made at the same time, after the step");
}

/// A restart does not lock out the peers that were called last: their timestamps did not run ahead.
//@test C-HS-4
#[test]
fn calling_many_peers_at_once_does_not_date_initiations_into_the_future() {
    let mut w = World::new(41);
    for of in 1..=40 {
        w.introduce(A, of, true);
        w.introduce(of, A, true);
        w.connect(A, of);
    }
    w.t += secs(0.1);
    w.restart(A, 40);
    w.connect(A, 40);
}

//@test C-HS-5
#[test]
fn initiations_of_one_peer_less_than_20_ms_apart_are_dropped() {
    let mut w = World::pair();
    let from = w.hosts[A].addr;
    let later = |w: &mut World, ms: u64| {
        w.t += std::time::Duration::from_millis(ms);
        // Timestamps of one and the same 16.7 ms would be equal.
        w.unix += secs(1.0);
        let initiation = w.initiation(A, B);
        w.inject(B, from, &initiation);
        (answers(w), w.discarded(B, Discard::TooFrequent))
    };
    assert_eq!(later(&mut w, 0), (1, 0));
    assert_eq!(later(&mut w, 19), (1, 1));
    assert_eq!(later(&mut w, 1), (2, 1));
    assert_eq!(later(&mut w, 20), (3, 1));
}

//@test C-HS-6
#[test]
fn a_response_to_an_initiation_that_was_replaced_is_dropped() {
    let mut w = World::pair();
    w.filter = Box::new(|s| if s.kind() == 2 { Fate::Drop } else { Fate::Pass });
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.run_for(secs(5.4));
    let responses = w.kind_by(B, 2);
    assert_eq!(responses.len(), 2);
    w.heal();
    w.deliver(&responses[0]);
    assert_eq!((w.discarded(A, Discard::UnknownIndex), w.kind_by(A, 4).len()), (1, 0));
    w.deliver(&responses[1]);
    w.settle();
    assert_eq!(w.payloads(B), [b"x"]);
}

//@test C-HS-6
#[test]
fn answering_an_initiation_ends_our_own_outstanding_one() {
    let mut w = World::pair();
    w.cut();
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.send(B, &packet(B, A, b"y")).unwrap();
    let (from_a, from_b) = (w.last(A, 1), w.last(B, 1));
    w.t += secs(0.1);
    w.deliver(&from_a);
    let response = w.last(B, 2);
    w.deliver(&from_b);
    w.deliver(&response);
    assert_eq!(w.discarded(A, Discard::UnknownIndex), 1);
    assert_eq!(w.kind_by(A, 4).len(), 0, "no session came of it");
}

/// F16 begins like this.
//@test C-HS-7
#[test]
fn simultaneous_initiations_converge_within_two_retransmissions() {
    let mut w = World::pair();
    w.filter = Box::new(|_| Fate::Delay(secs(0.05)));
    w.send(A, &packet(A, B, b"from a")).unwrap();
    w.send(B, &packet(B, A, b"from b")).unwrap();
    w.run_for(secs(2.0 * 5.4));
    assert_eq!((w.payloads(A), w.payloads(B)), (vec![b"from b".to_vec()], vec![b"from a".to_vec()]));
}

//@test C-HS-8
#[test]
fn a_preshared_key_counts_from_the_next_handshake_on_and_leaves_the_session_alone() {
    let mut w = World::pair();
    w.connect(A, B);
    w.update_peer(A, B, |p| p.preshared_key = psk(1));
    w.connect(A, B);
    assert_eq!(w.kind_by(A, 1).len(), 1, "the session goes on");
    w.run_for(secs(200.0));
    w.send(A, &packet(A, B, b"one-sided")).unwrap();
    w.settle();
    assert_eq!(w.discarded(A, Discard::BadTag), 1, "only one of the two has the key");
    w.update_peer(B, A, |p| p.preshared_key = psk(1));
    w.run_for(secs(6.0));
    assert_eq!(w.payloads(B).last().unwrap(), b"one-sided");
}

//@test C-HS-8
#[test]
fn a_preshared_key_set_while_the_initiation_is_under_way_is_used() {
    let mut w = World::pair();
    w.update_peer(B, A, |p| p.preshared_key = psk(1));
    w.filter = Box::new(|_| Fate::Delay(secs(0.1)));
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.update_peer(A, B, |p| p.preshared_key = psk(1));
    w.run_for(secs(1.0));
    assert_eq!(w.payloads(B), [b"x"]);
}

//@test C-HS-8
#[test]
fn a_preshared_key_of_zeros_is_none() {
    let mut w = World::pair();
    w.update_peer(A, B, |p| p.preshared_key = psk(0));
    w.connect(A, B);
}

//@test C-HS-9
#[test]
fn every_retransmission_is_a_fresh_initiation() {
    let mut w = World::pair();
    w.cut();
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.run_for(secs(30.0));
    let sent = w.kind_by(A, 1);
    assert!(sent.len() >= 5);
    for (i, one) in sent.iter().enumerate() {
        for other in &sent[..i] {
            assert_ne!(one.index(), other.index());
            assert_ne!(one.bytes[8..40], other.bytes[8..40], "ephemeral");
            assert_ne!(one.bytes[88..116], other.bytes[88..116], "timestamp");
        }
    }
}

fn set_key(w: &mut World, host: usize, byte: u8) {
    let key = PrivateKey::new([byte; 32]);
    w.hosts[host].key = key.clone();
    w.configure(host, DeviceUpdate { private_key: Some(Some(key)), ..Default::default() });
}

//@test C-HS-10
#[test]
fn setting_the_same_private_key_changes_nothing() {
    let mut w = World::pair();
    w.connect(A, B);
    set_key(&mut w, A, 1);
    w.connect(A, B);
    assert_eq!(w.kind_by(A, 1).len(), 1);
}

//@test C-HS-10
#[test]
fn a_new_private_key_ends_sending_at_once_but_not_receiving() {
    let mut w = World::pair();
    w.connect(A, B);
    w.t += secs(1.0);
    set_key(&mut w, A, 9);
    w.send(B, &packet(B, A, b"on the old session")).unwrap();
    w.settle();
    assert_eq!(w.payloads(A), [b"on the old session"]);
    w.update_peer(B, A, |_| {});
    w.introduce(B, A, true);
    w.send(A, &packet(A, B, b"on a new one")).unwrap();
    w.settle();
    assert_eq!(w.kind_by(A, 1).len(), 2, "not kept back for 5 s");
    assert_eq!(w.payloads(B).last().unwrap(), b"on a new one");
}

//@test C-HS-10
#[test]
fn a_new_private_key_ends_the_handshake_under_way_and_makes_new_macs() {
    let mut w = World::pair();
    w.cut();
    w.send(A, &packet(A, B, b"x")).unwrap();
    let initiation = w.last(A, 1);
    w.deliver(&initiation);
    let (response, to_old_key) = (w.last(B, 2), w.initiation(B, A));
    set_key(&mut w, A, 9);
    w.deliver(&response);
    assert_eq!(w.discarded(A, Discard::BadMac1), 1, "a response to the old key");
    let from = w.hosts[B].addr;
    w.inject(A, from, &to_old_key);
    assert_eq!(w.discarded(A, Discard::BadMac1), 2);
    w.t += secs(1.0);
    let to_new_key = w.initiation(B, A);
    w.inject(A, from, &to_new_key);
    assert_eq!(w.kind_by(A, 2).len(), 1);
}

//@test C-HS-10
//@test C-HS-3
#[test]
fn the_accepted_timestamp_survives_a_change_of_the_private_key_and_back() {
    let mut w = World::pair();
    w.connect(A, B);
    let old = w.last(A, 1);
    w.t += secs(1.0);
    set_key(&mut w, B, 9);
    set_key(&mut w, B, 2);
    w.deliver(&old);
    assert_eq!((w.discarded(B, Discard::OldTimestamp), answers(&w)), (1, 1));
}

//@test C-HS-10
#[test]
fn the_first_private_key_lets_waiting_packets_go() {
    let mut w = World::pair();
    w.configure(A, DeviceUpdate { private_key: Some(None), ..Default::default() });
    w.send(A, &packet(A, B, b"early")).unwrap();
    w.settle();
    assert!(w.log.is_empty());
    set_key(&mut w, A, 1);
    w.settle();
    assert_eq!(w.payloads(B), [b"early"]);
}

//@test C-HS-10
//@test C-HS-11
#[test]
fn nobody_is_a_peer_of_itself() {
    let mut w = World::pair();
    let (a, b) = (w.hosts[A].public(), w.hosts[B].public());
    w.configure(A, DeviceUpdate { peers: vec![PeerUpdate::new(a)], ..Default::default() });
    assert!(w.hosts[A].device.peer(&a).is_none(), "added: ignored");
    let key = w.hosts[B].key.clone();
    w.configure(A, DeviceUpdate { private_key: Some(Some(key)), ..Default::default() });
    assert!(w.hosts[A].device.peer(&b).is_none(), "the key becomes ours: removed");
    assert!(w.send(A, &packet(A, B, b"x")).is_err(), "and its routes with it");
    w.configure(A, DeviceUpdate { peers: vec![PeerUpdate::new(a)], ..Default::default() });
    assert!(w.hosts[A].device.peer(&a).is_some(), "the old key is anybody's now");
}

/// F10.
#[test]
fn a_slow_answer_completes_the_handshake() {
    for delay in [0.1, 0.3, 1.0, 4.5] {
        let mut w = World::pair();
        w.filter = Box::new(move |s| if s.kind() == 2 { Fate::Delay(secs(delay)) } else { Fate::Pass });
        w.send(A, &packet(A, B, b"x")).unwrap();
        w.run_for(secs(delay));
        assert_eq!((w.payloads(B).len(), w.kind_by(A, 1).len()), (1, 1), "{delay} s");
    }
}

/// F13: nothing tells the other side; its new handshake timer finds out.
#[test]
fn traffic_comes_back_within_20_s_after_one_side_restarts() {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_for(secs(10.0));
    w.restart(B, A);
    let before = w.log.len();
    for i in 0..20 {
        w.send(A, &packet(A, B, &[i])).unwrap();
        w.run_for(secs(1.0));
    }
    let silent: Vec<_> = w.log[before..].iter().take_while(|s| s.kind() == 4).collect();
    assert!(silent.iter().all(|s| s.from == w.hosts[A].addr), "an unknown index is not answered");
    assert_eq!(w.discarded(B, Discard::UnknownIndex), silent.len() as u64);
    assert_eq!(w.payloads(B).last().unwrap(), &[19]);
}
