//! Load: when cookies are asked for, what a flood costs, and who still gets in.

use std::net::SocketAddr;

use forestvpn_quantum::batch::{Ecn, Endpoint};
use forestvpn_quantum::config::{DeviceUpdate, PeerUpdate};
use forestvpn_quantum::{DeviceConfig, Discard, PrivateKey};

use crate::cookies::{mac1, read_cookie, sign, source, strangers_initiation};
use crate::harness::*;

fn arrive(w: &mut World, host: usize, from: SocketAddr, bytes: &[u8]) {
    w.arrive(host, Endpoint::new(from), bytes, Ecn::NotEct);
}

/// How many handshake messages reached curve arithmetic at `host`: all of them come from strangers.
fn worked(w: &World, host: usize) -> u64 {
    w.discarded(host, Discard::UnknownPeer)
}

//@test C-LOAD-1
#[test]
fn load_begins_at_an_eighth_of_the_queue_whoever_fills_it() {
    let mut w = World::new(2);
    let junk = strangers_initiation(&w.hosts[B].public());
    for n in 0..128 {
        arrive(&mut w, B, source(n), &junk);
    }
    assert!(w.sent_by(B).is_empty(), "128 of 1024 may wait without anyone being asked for a cookie");
    // Every source is a new one: a count per source would see nothing.
    for n in 128..200 {
        arrive(&mut w, B, source(n), &junk);
    }
    assert_eq!(w.kind_by(B, 3).len(), 72);
    w.due(B);
    assert_eq!(worked(&w, B), 128);
}

//@test C-LOAD-1
#[test]
fn load_sticks_for_one_second_after_it_was_last_true() {
    for (after, asked) in [(0.999, true), (1.0, false)] {
        let mut w = World::new(2);
        let junk = strangers_initiation(&w.hosts[B].public());
        for n in 0..129 {
            arrive(&mut w, B, source(n), &junk);
        }
        // A message under sticky load does not make it stick longer: the queue is empty.
        w.due(B);
        w.t = secs(0.5);
        w.inject(B, source(1), &junk);
        assert_eq!(w.kind_by(B, 3).len(), 2);
        w.t = secs(after);
        w.inject(B, source(1), &junk);
        assert_eq!(w.kind_by(B, 3).len() == 3, asked, "{after} s later");
    }
}

// F163: another implementation answered with cookies for ever after 100 handshakes in total.
//@test C-LOAD-1
#[test]
fn five_hundred_handshakes_at_two_per_second_need_no_cookie() {
    let mut w = World::new(2);
    w.introduce(B, A, true);
    for n in 0..500 {
        w.t = secs(n as f64 * 0.5);
        let initiation = w.initiation(A, B);
        w.inject(B, w.hosts[A].addr, &initiation);
    }
    assert_eq!(w.kind_by(B, 2).len(), 500);
    assert!(w.kind_by(B, 3).is_empty());
}

/// B under load, its queue standing at 128; and the stranger's message signed for `from`.
fn signed_for(w: &mut World, from: SocketAddr) -> Vec<u8> {
    let mut junk = strangers_initiation(&w.hosts[B].public());
    for n in 0..128 {
        arrive(w, B, source(n), &junk);
    }
    arrive(w, B, from, &junk);
    let reply = w.last(B, 3);
    assert_eq!(reply.to, from);
    let cookie = read_cookie(&reply.bytes, &w.hosts[B].public(), &junk).unwrap();
    sign(&mut junk, &cookie);
    junk
}

//@test C-LOAD-2
#[test]
fn under_load_a_source_with_a_cookie_gets_five_handshakes_and_then_twenty_a_second() {
    let mut w = World::new(2);
    let from: SocketAddr = "198.51.100.9:9".parse().unwrap();
    let signed = signed_for(&mut w, from);
    let sent = w.log.len();
    let refused = |w: &World| w.discarded(B, Discard::UnderLoad);
    for _ in 0..5 {
        arrive(&mut w, B, from, &signed);
    }
    assert_eq!(refused(&w), 0, "a burst of five");
    arrive(&mut w, B, from, &signed);
    assert_eq!(refused(&w), 1, "the sixth finds the bucket empty");
    for n in 1..=20 {
        w.t = secs(n as f64 * 0.05);
        arrive(&mut w, B, from, &signed);
        assert_eq!(refused(&w), n, "one more every 50 ms");
        arrive(&mut w, B, from, &signed);
        assert_eq!(refused(&w), n + 1, "and not two");
    }
    assert_eq!(w.log.len(), sent, "neither is answered with a cookie");
    w.due(B);
    assert_eq!(worked(&w, B), 128 + 5 + 20);
}

//@test C-LOAD-2
#[test]
fn addresses_of_one_ipv6_64_share_a_bucket() {
    let mut w = World::new(2);
    let at = |a: &str| -> SocketAddr { format!("[{a}]:9").parse().unwrap() };
    let mut signed = Vec::new();
    for a in ["2001:db8:0:1::1", "2001:db8:0:1:ffff::2", "2001:db8:0:2::1"] {
        let message = if signed.is_empty() {
            signed_for(&mut w, at(a))
        } else {
            let mut junk = strangers_initiation(&w.hosts[B].public());
            arrive(&mut w, B, at(a), &junk);
            let cookie = read_cookie(&w.last(B, 3).bytes, &w.hosts[B].public(), &junk).unwrap();
            sign(&mut junk, &cookie);
            junk
        };
        signed.push((at(a), message));
    }
    for _ in 0..5 {
        arrive(&mut w, B, signed[0].0, &signed[0].1);
    }
    arrive(&mut w, B, signed[1].0, &signed[1].1);
    assert_eq!(w.discarded(B, Discard::UnderLoad), 1, "another address of the same /64");
    arrive(&mut w, B, signed[2].0, &signed[2].1);
    assert_eq!(w.discarded(B, Discard::UnderLoad), 1, "another /64");
}

// F160: what arrives faster than it can be worked off is dropped, not kept.
//@test C-LOAD-3
#[test]
fn the_handshake_queue_is_bounded_and_data_passes_it_by() {
    let mut w = World::bounded(2, DeviceConfig { handshake_queue: 16, ..DeviceConfig::default() });
    w.introduce(A, B, true);
    w.introduce(B, A, true);
    w.connect(A, B);
    // A valid cookie for each of many sources, so that only the queue itself can say no.
    let junk = strangers_initiation(&w.hosts[B].public());
    let mut signed = Vec::new();
    for n in 0..40 {
        arrive(&mut w, B, source(n), &junk);
        if let Some(reply) = w.kind_by(B, 3).pop().filter(|r| r.to == source(n)) {
            let mut message = junk.clone();
            sign(&mut message, &read_cookie(&reply.bytes, &w.hosts[B].public(), &junk).unwrap());
            signed.push((source(n), message));
        }
    }
    assert_eq!(signed.len(), 38, "two wait, an eighth of the queue");
    for (from, message) in &signed {
        arrive(&mut w, B, *from, message);
    }
    assert_eq!(w.discarded(B, Discard::QueueFull), 38 - 14);
    // Data does not stand in that queue.
    w.send(A, &packet(A, B, b"past the queue")).unwrap();
    let data = w.last(A, 4).bytes;
    w.arrive(B, Endpoint::new(w.hosts[A].addr), &data, Ecn::NotEct);
    assert_eq!(w.payloads(B).last().unwrap(), b"past the queue");
    // And one call works off only a few.
    let before = worked(&w, B);
    w.with(B, |d, now, out| d.handle_timeout(now, out));
    assert_eq!(worked(&w, B) - before, 4);
    w.due(B);
    assert_eq!(worked(&w, B), 16);
}

//@test C-LOAD-4
#[test]
fn nothing_is_answered_with_more_bytes_than_it_had() {
    let mut w = World::pair();
    let initiation = w.initiation(A, B);
    let from = w.hosts[A].addr;
    w.inject(B, from, &initiation);
    assert_eq!(w.last(B, 2).bytes.len(), 92);
    let mut response = w.last(B, 2).bytes;
    let junk = strangers_initiation(&w.hosts[B].public());
    for n in 0..129 {
        arrive(&mut w, B, source(n), &junk);
    }
    // A response under load, with a mac1 for B.
    let key = blake2_mac1_key(&w.hosts[B].public());
    let sum = crate::cookies::mac(&key, &response[..60]);
    response[60..76].copy_from_slice(&sum);
    let before = w.log.len();
    arrive(&mut w, B, from, &response);
    assert_eq!(w.log.len(), before + 1);
    assert_eq!(w.last(B, 3).bytes.len(), 64);
    // Everything else stays without an answer.
    let before = w.log.len();
    let reply = w.last(B, 3).bytes;
    for kind in 0..=255_u8 {
        for len in [1, 4, 31, 32, 64, 92, 148, 1500] {
            let mut bytes = vec![0; len];
            bytes[0] = kind;
            arrive(&mut w, B, from, &bytes);
        }
    }
    arrive(&mut w, B, from, &reply);
    assert_eq!(w.log.len(), before);
}

fn blake2_mac1_key(key: &forestvpn_quantum::PublicKey) -> [u8; 32] {
    use blake2::{Blake2s256, Digest};
    Blake2s256::new().chain_update(b"mac1----").chain_update(key.as_bytes()).finalize().into()
}

//@test C-LOAD-3
#[test]
fn a_flood_from_many_spoofed_sources_costs_no_curve_arithmetic_beyond_the_queue() {
    let mut w = World::new(2);
    let junk = strangers_initiation(&w.hosts[B].public());
    for n in 0..100_000 {
        let mut bytes = junk.clone();
        w.with(B, |d, now, _| {
            use forestvpn_quantum::batch::Received;
            let rx =
                Received { bytes: &mut bytes, stride: 148, from: Endpoint::new(source(n)), ecn: Ecn::NotEct };
            d.inbound(now, rx, &mut Vec::new(), &mut Collect::default());
        });
    }
    w.due(B);
    assert_eq!(worked(&w, B), 128);
    assert_eq!(w.discarded(B, Discard::CookieSent), 100_000 - 128);
}

// F165: one flooding source used up a budget that all shared.
//@test C-LOAD-2
#[test]
fn an_honest_peer_gets_in_within_three_tries_while_another_source_floods() {
    let mut w = World::new(2);
    w.introduce(A, B, true);
    w.introduce(B, A, false);
    let junk = strangers_initiation(&w.hosts[B].public());
    let flooder = source(66);
    w.send(A, &packet(A, B, b"let me in")).unwrap();
    // 2000 messages a second from the flooder, which answers its cookies too.
    let mut signed = junk.clone();
    let mut since = 0;
    for ms in 0..11_000 {
        w.t = secs(ms as f64 / 1000.0);
        for _ in 0..2 {
            arrive(&mut w, B, flooder, if ms % 2 == 0 { &junk } else { &signed });
        }
        if let Some(reply) = w.log[since..].iter().rfind(|s| s.kind() == 3 && s.to == flooder) {
            signed.copy_from_slice(&junk);
            sign(&mut signed, &read_cookie(&reply.bytes, &w.hosts[B].public(), &junk).unwrap());
        }
        since = w.log.len();
        // A slow machine: one call of four handshakes each 100 ms.
        if ms % 100 == 0 {
            w.with(B, |d, now, out| d.handle_timeout(now, out));
        }
        w.due(A);
        w.fly(B, false);
        w.fly(A, true);
    }
    let tries = w.kind_by(A, 1);
    assert!(tries.len() <= 3, "{} tries", tries.len());
    assert!(tries.iter().all(|t| mac1(&t.bytes) != [0; 16]));
    assert_eq!(w.payloads(B), [b"let me in"]);
    assert!(w.discarded(B, Discard::UnderLoad) > 5_000, "the flooder was held back");
}

// C-LOAD-3 again, from inside: many peers that all call at once are worked off a few at a time.
#[test]
fn many_peers_turned_on_at_once_do_not_make_one_long_call() {
    let mut w = World::new(1);
    let mut update = DeviceUpdate::default();
    for n in 0..500_u32 {
        let mut bytes = [7; 32];
        bytes[8..12].copy_from_slice(&n.to_le_bytes());
        let mut peer = PeerUpdate::new(PrivateKey::new(bytes).public_key());
        peer.endpoint = Some(source(n as usize));
        peer.persistent_keepalive = Some(25);
        update.peers.push(peer);
    }
    w.configure(A, update);
    assert!(w.log.len() <= 64, "{} initiations in one call", w.log.len());
    w.due(A);
    assert_eq!(w.kind_by(A, 1).len(), 500, "every one of them in the end");
    w.with(A, |d, now, out| d.set_up(false, now, out));
    w.run_for(secs(10.0));
    let before = w.log.len();
    w.with(A, |d, now, out| d.set_up(true, now, out));
    assert!(w.log.len() - before <= 64);
    w.due(A);
    assert_eq!(w.log.len() - before, 500);
}
