//! A stranger learns nothing.

use std::net::SocketAddr;

use forestvpn_quantum::Discard;
use forestvpn_quantum::batch::{Ecn, Endpoint};

use crate::cookies::{mac, strangers_initiation};
use crate::harness::*;

fn stranger() -> SocketAddr {
    "203.0.113.13:1313".parse().unwrap()
}

/// Hands `bytes` to B as if from a stranger: nothing may be sent, armed, or moved.
fn ignored(w: &mut World, bytes: &[u8], what: &str) {
    let (sent, peer) = (w.log.len(), w.peer(B, A));
    let (deadline, delivered) = (w.hosts[B].device.poll_timeout(), w.hosts[B].delivered.len());
    w.inject(B, stranger(), bytes);
    assert_eq!(w.log.len(), sent, "{what}: an answer");
    assert_eq!(w.hosts[B].device.poll_timeout(), deadline, "{what}: a timer");
    assert_eq!(w.hosts[B].delivered.len(), delivered, "{what}: a packet");
    let after = w.peer(B, A);
    assert_eq!((after.endpoint, after.rx_bytes), (peer.endpoint, peer.rx_bytes), "{what}");
    assert_eq!(after.last_handshake, peer.last_handshake, "{what}");
}

/// Makes mac1 of a message to `host` right again.
fn sign(w: &World, host: usize, message: &mut [u8]) {
    use blake2::{Blake2s256, Digest};
    let key = Blake2s256::new()
        .chain_update(b"mac1----")
        .chain_update(w.hosts[host].public().as_bytes())
        .finalize();
    let at = message.len() - 32;
    let sum = mac(&key, &message[..at]);
    message[at..at + 16].copy_from_slice(&sum);
}

fn session() -> World {
    let mut w = World::pair();
    w.connect(A, B);
    w.t += secs(1.0);
    w.hosts[B].events();
    w
}

//@test C-SIL-1
#[test]
fn changed_initiations_are_ignored_with_and_without_a_right_mac1() {
    let mut w = session();
    let good = w.initiation(A, B);
    for at in 0..132 {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        ignored(&mut w, &bad, &format!("byte {at}"));
        // The sender index alone is authenticated by nothing but mac1: it is the stranger's own business.
        if (8..116).contains(&at) {
            sign(&w, B, &mut bad);
            ignored(&mut w, &bad, &format!("byte {at}, signed"));
        }
    }
    w.inject(B, w.hosts[A].addr, &good);
    assert_eq!(w.kind_by(B, 2).len(), 2, "unchanged it is answered");
}

//@test C-SIL-1
#[test]
fn unknown_peers_old_timestamps_and_floods_are_ignored() {
    let mut w = session();
    let unknown = strangers_initiation(&w.hosts[B].public());
    ignored(&mut w, &unknown, "unknown peer");
    assert_eq!(w.discarded(B, Discard::UnknownPeer), 1);
    let old = w.kind_by(A, 1)[0].bytes.clone();
    ignored(&mut w, &old, "old timestamp");
    assert_eq!(w.discarded(B, Discard::OldTimestamp), 1);
    let first = w.initiation(A, B);
    w.inject(B, w.hosts[A].addr, &first);
    // The sender's clock may have run on; the 20 ms are measured by ours.
    w.unix += secs(1.0);
    let soon = w.initiation(A, B);
    ignored(&mut w, &soon, "less than 20 ms later");
    assert_eq!(w.discarded(B, Discard::TooFrequent), 1);
}

//@test C-SIL-1
#[test]
fn data_with_a_wrong_index_counter_or_tag_is_ignored() {
    let mut w = session();
    w.send(A, &packet(A, B, b"good")).unwrap();
    let good = w.last(A, 4).bytes;
    w.drop_flying();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        ignored(&mut w, &bad, &format!("byte {at}"));
    }
    for counter in [u64::MAX, u64::MAX - (1 << 13), u64::MAX - (1 << 13) - 1, 1 << 40] {
        let mut bad = good.clone();
        bad[8..16].copy_from_slice(&counter.to_le_bytes());
        ignored(&mut w, &bad, &format!("counter {counter}"));
    }
    w.inject(B, w.hosts[A].addr, &good);
    assert_eq!(w.payloads(B).last().unwrap(), b"good", "after all that the packet is still accepted");
    ignored(&mut w, &good, "a replay");
}

//@test C-SIL-1
#[test]
fn responses_and_cookie_replies_nobody_waits_for_are_ignored() {
    let mut w = session();
    let mut response = w.kind_by(B, 2)[0].bytes.clone();
    sign(&w, B, &mut response);
    ignored(&mut w, &response, "a response to nothing");
    // To an initiation that exists, but forged.
    w.cut();
    w.jump(secs(181.0));
    w.due(B);
    w.send(B, &packet(B, A, b"x")).unwrap();
    w.due(B);
    let index = w.last(B, 1).bytes[4..8].to_vec();
    response[8..12].copy_from_slice(&index);
    sign(&w, B, &mut response);
    ignored(&mut w, &response, "a forged response");
    assert_eq!(w.discarded(B, Discard::BadTag), 1);
    let mut reply = vec![3; 64];
    reply[1..4].fill(0);
    ignored(&mut w, &reply, "a cookie reply to nothing");
    reply[4..8].copy_from_slice(&index);
    ignored(&mut w, &reply, "a forged cookie reply");
    assert_eq!(w.discarded(B, Discard::BadCookie), 1);
}

//@test C-SIL-1
#[test]
fn noise_of_any_length_is_ignored() {
    let mut w = session();
    let mut rng = Seeded(5);
    for len in (0..300).chain([1420, 1500, 9000, 65_507]) {
        for kind in 0..8 {
            let mut bytes = vec![0; len];
            forestvpn_quantum::time::Entropy::fill(&mut rng, &mut bytes);
            if let Some(first) = bytes.first_chunk_mut::<4>() {
                *first = [kind, 0, 0, 0];
            }
            ignored(&mut w, &bytes, &format!("type {kind}, {len} bytes"));
        }
    }
}

//@test C-SIL-1
#[test]
fn a_device_without_a_key_or_one_that_is_down_says_nothing() {
    use forestvpn_quantum::config::DeviceUpdate;
    let mut w = session();
    let initiation = w.initiation(A, B);
    w.with(B, |d, now, out| d.set_up(false, now, out));
    ignored(&mut w, &initiation, "down");
    assert_eq!(w.discarded(B, Discard::Down), 1);
    w.with(B, |d, now, out| d.set_up(true, now, out));
    w.configure(B, DeviceUpdate { private_key: Some(None), ..Default::default() });
    ignored(&mut w, &initiation, "no key");
    for n in 0..200 {
        w.arrive(B, Endpoint::new(crate::cookies::source(n)), &initiation, Ecn::NotEct);
    }
    assert!(w.kind_by(B, 3).is_empty(), "no cookie reply either");
}
