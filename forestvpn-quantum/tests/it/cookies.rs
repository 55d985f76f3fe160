//! mac1, mac2 and cookies, seen from the wire.

use std::net::SocketAddr;

use blake2::digest::{Digest, KeyInit, Mac};
use blake2::{Blake2s256, Blake2sMac};
use chacha20poly1305::XChaCha20Poly1305;
use chacha20poly1305::aead::{Aead, Payload};
use forestvpn_quantum::batch::{Ecn, Endpoint};
use forestvpn_quantum::{Discard, PublicKey};

use crate::harness::*;

fn hash(label: &[u8], key: &PublicKey) -> [u8; 32] {
    Blake2s256::new().chain_update(label).chain_update(key.as_bytes()).finalize().into()
}

pub fn mac(key: &[u8], data: &[u8]) -> [u8; 16] {
    let mut mac = <Blake2sMac<blake2::digest::consts::U16> as KeyInit>::new_from_slice(key).unwrap();
    mac.update(data);
    mac.finalize().into_bytes().into()
}

/// The mac1 that `message` to `to` must carry, computed by another route than the library's.
fn expected_mac1(to: &PublicKey, message: &[u8]) -> [u8; 16] {
    mac(&hash(b"mac1----", to), &message[..message.len() - 32])
}

pub fn mac1(message: &[u8]) -> &[u8] {
    &message[message.len() - 32..message.len() - 16]
}

pub fn mac2(message: &[u8]) -> &[u8] {
    &message[message.len() - 16..]
}

/// Reads a cookie reply as its receiver would.
pub fn read_cookie(reply: &[u8], from: &PublicKey, message: &[u8]) -> Option<[u8; 16]> {
    let cipher = XChaCha20Poly1305::new(&hash(b"cookie--", from).into());
    let (nonce, sealed) = reply[8..].split_first_chunk::<24>().unwrap();
    let plain = cipher.decrypt(nonce.into(), Payload { msg: sealed, aad: mac1(message) });
    plain.ok().map(|c| c.try_into().unwrap())
}

/// Puts a mac2 made with `cookie` under `message`.
pub fn sign(message: &mut [u8], cookie: &[u8; 16]) {
    let at = message.len() - 16;
    let mac2 = mac(cookie, &message[..at]);
    message[at..].copy_from_slice(&mac2);
}

/// An initiation with a right mac1 to `to` from somebody whom `to` does not know.
pub fn strangers_initiation(to: &PublicKey) -> Vec<u8> {
    use forestvpn_quantum::config::{DeviceUpdate, PeerUpdate};
    let mut w = World::new(10);
    let mut peer = PeerUpdate::new(*to);
    peer.endpoint = Some("198.51.100.1:1".parse().unwrap());
    peer.persistent_keepalive = Some(1);
    w.configure(9, DeviceUpdate { peers: vec![peer], ..Default::default() });
    w.due(9);
    w.log[0].bytes.clone()
}

pub fn source(n: usize) -> SocketAddr {
    let [_, a, b, c] = (n as u32).to_be_bytes();
    SocketAddr::from(([11, a, b, c], 1000))
}

/// Fills the handshake queue of `host` up to where it feels under load, and works it off: load sticks 1 s.
pub fn load(w: &mut World, host: usize) {
    let junk = strangers_initiation(&w.hosts[host].public());
    for n in 0..129 {
        w.arrive(host, Endpoint::new(source(n)), &junk, Ecn::NotEct);
    }
    assert_eq!(w.hosts[host].discarded(Discard::CookieSent), 1, "the 129th finds 128 waiting");
    w.due(host);
    w.log.retain(|s| s.kind() != 3);
    w.drop_flying();
}

/// Keeps `host` under load: fills the queue without working it off.
pub fn keep_loaded(w: &mut World, host: usize) {
    let junk = strangers_initiation(&w.hosts[host].public());
    for n in 0..129 {
        w.arrive(host, Endpoint::new(source(n)), &junk, Ecn::NotEct);
    }
}

//@test C-MAC-1
#[test]
fn initiation_and_response_carry_mac1_for_their_receiver_and_no_mac2() {
    let mut w = World::pair();
    w.connect(A, B);
    let (initiation, response) = (&w.log[0].bytes, &w.log[1].bytes);
    assert_eq!((initiation.len(), response.len()), (148, 92));
    assert_eq!(mac1(initiation), expected_mac1(&w.hosts[B].public(), initiation));
    assert_eq!(mac1(response), expected_mac1(&w.hosts[A].public(), response));
    assert_eq!((mac2(initiation), mac2(response)), (&[0; 16][..], &[0; 16][..]));
}

//@test C-MAC-1
#[test]
fn a_wrong_mac1_ends_all_work_in_silence() {
    let mut w = World::pair();
    w.filter = Box::new(|_| Fate::Drop);
    w.send(A, &packet(A, B, b"x")).unwrap();
    let (from, good) = (w.hosts[A].addr, w.log[0].bytes.clone());
    for bit in 0..128 {
        let mut bad = good.clone();
        bad[116 + bit / 8] ^= 1 << (bit % 8);
        w.arrive(B, Endpoint::new(from), &bad, Ecn::NotEct);
    }
    assert_eq!(w.hosts[B].discarded(Discard::BadMac1), 128);
    assert!(w.hosts[B].device.poll_timeout().is_none(), "nothing was queued for curve arithmetic");
    assert!(w.sent_by(B).is_empty());
    w.inject(B, from, &good);
    assert_eq!(w.kind_by(B, 2).len(), 1, "untouched it is answered");
    // The same for a response.
    let response = w.kind_by(B, 2)[0].bytes.clone();
    let mut bad = response.clone();
    bad[60] ^= 1;
    w.inject(A, w.hosts[B].addr, &bad);
    assert_eq!(w.hosts[A].discarded(Discard::BadMac1), 1);
    w.inject(A, w.hosts[B].addr, &response);
    assert_eq!(w.kind_by(A, 4).len(), 1);
}

//@test C-MAC-1
#[test]
fn a_message_for_another_public_key_is_dropped_by_its_mac1() {
    let mut w = World::new(3);
    w.introduce(A, B, true);
    w.introduce(2, A, true);
    w.filter = Box::new(|_| Fate::Drop);
    w.send(A, &packet(A, B, b"x")).unwrap();
    let (from, initiation) = (w.hosts[A].addr, w.log[0].bytes.clone());
    w.inject(2, from, &initiation);
    assert_eq!(w.hosts[2].discarded(Discard::BadMac1), 1);
}

//@test C-MAC-2
#[test]
fn mac2_is_not_looked_at_without_load() {
    let mut w = World::pair();
    w.filter = Box::new(|_| Fate::Drop);
    w.send(A, &packet(A, B, b"x")).unwrap();
    let mut initiation = w.log[0].bytes.clone();
    initiation[132..].fill(0x55);
    w.inject(B, w.hosts[A].addr, &initiation);
    assert_eq!(w.kind_by(B, 2).len(), 1);
}

//@test C-MAC-2
#[test]
fn a_cookie_signs_messages_until_it_is_115_seconds_old() {
    for (age, signed) in [(114.999, true), (115.0, false)] {
        let mut w = World::pair();
        load(&mut w, B);
        w.send(A, &packet(A, B, b"x")).unwrap();
        w.settle();
        assert_eq!(w.kind_by(B, 3).len(), 1, "B under load asks for the cookie");
        assert_eq!(mac2(&w.kind_by(A, 1)[0].bytes), [0; 16]);
        // Silence on the link; A keeps trying, the last initiation at exactly that age of the cookie.
        w.filter = Box::new(|_| Fate::Drop);
        w.jump(secs(age));
        w.due(A);
        let last = w.kind_by(A, 1).pop().unwrap();
        assert_eq!(last.at, secs(age));
        assert_eq!(mac2(&last.bytes) != [0; 16], signed, "at {age}");
        if signed {
            let (first, reply) = (w.kind_by(A, 1).remove(0), w.kind_by(B, 3).remove(0));
            let cookie = read_cookie(&reply.bytes, &w.hosts[B].public(), &first.bytes).unwrap();
            assert_eq!(mac2(&last.bytes), mac(&cookie, &last.bytes[..132]), "over the message with mac1");
        }
    }
}

/// The cookie that `host` gives to `from` for the stranger's message.
fn cookie_for(w: &mut World, host: usize, from: &str, message: &[u8]) -> [u8; 16] {
    w.arrive(host, Endpoint::new(from.parse().unwrap()), message, Ecn::NotEct);
    let reply = w.kind_by(host, 3).pop().unwrap();
    assert_eq!(reply.to, from.parse().unwrap());
    read_cookie(&reply.bytes, &w.hosts[host].public(), message).unwrap()
}

//@test C-CK-1
#[test]
fn a_cookie_belongs_to_one_address_and_port() {
    let mut w = World::new(2);
    let message = strangers_initiation(&w.hosts[B].public());
    load(&mut w, B);
    let base = cookie_for(&mut w, B, "198.51.100.7:4000", &message);
    assert_eq!(cookie_for(&mut w, B, "198.51.100.7:4000", &message), base);
    let others = ["198.51.100.7:4001", "198.51.100.8:4000", "[2001:db8::1]:4000", "[2001:db8::1]:4001"];
    let mut seen = vec![base];
    for other in others {
        let cookie = cookie_for(&mut w, B, other, &message);
        assert!(!seen.contains(&cookie), "{other}");
        seen.push(cookie);
    }
    // And it opens the door to nobody else.
    let mut signed = message;
    sign(&mut signed, &base);
    let before = w.hosts[B].discarded(Discard::UnknownPeer);
    w.inject(B, "198.51.100.7:4001".parse().unwrap(), &signed);
    assert_eq!(w.hosts[B].discarded(Discard::UnknownPeer), before, "right address, wrong port");
    w.inject(B, "198.51.100.7:4000".parse().unwrap(), &signed);
    assert_eq!(w.hosts[B].discarded(Discard::UnknownPeer), before + 1, "let through to the curve");
}

//@test C-CK-1
#[test]
fn the_cookie_secret_lives_120_seconds() {
    let mut w = World::new(2);
    let message = strangers_initiation(&w.hosts[B].public());
    keep_loaded(&mut w, B);
    let at = |w: &mut World, t: f64| {
        w.t = secs(t);
        cookie_for(w, B, "198.51.100.7:4000", &message)
    };
    let first = at(&mut w, 0.0);
    assert_eq!(at(&mut w, 119.999), first);
    let second = at(&mut w, 120.0);
    assert_ne!(second, first);
    assert_eq!(at(&mut w, 239.999), second);
    assert_ne!(at(&mut w, 240.0), second);
}

//@test C-CK-2
#[test]
fn a_cookie_reply_is_64_bytes_bound_to_the_message_it_answers() {
    let mut w = World::new(2);
    let message = strangers_initiation(&w.hosts[B].public());
    keep_loaded(&mut w, B);
    let from: SocketAddr = "198.51.100.7:4000".parse().unwrap();
    for _ in 0..2 {
        w.arrive(B, Endpoint::new(from), &message, Ecn::Ce);
    }
    let replies = w.kind_by(B, 3);
    let [first, second] = &replies[replies.len() - 2..] else { panic!() };
    assert_eq!(first.bytes.len(), 64);
    assert_eq!(first.bytes[..4], [3, 0, 0, 0]);
    assert_eq!(first.bytes[4..8], message[4..8], "receiver is the sender of the message");
    assert_eq!(first.ecn, Ecn::NotEct);
    assert_ne!(first.bytes[8..32], second.bytes[8..32], "the nonce is fresh");
    assert!(read_cookie(&first.bytes, &w.hosts[B].public(), &message).is_some());
    let mut other = message.clone();
    other[116] ^= 1;
    assert!(read_cookie(&first.bytes, &w.hosts[B].public(), &other).is_none(), "mac1 is authenticated");
    assert!(read_cookie(&first.bytes, &w.hosts[A].public(), &message).is_none(), "the replier's key");
}

/// A has sent an initiation to B under load; gives B's cookie reply, not delivered yet.
fn cookie_on_its_way() -> (World, Vec<u8>) {
    let mut w = World::pair();
    load(&mut w, B);
    w.filter = Box::new(|s| if s.kind() == 3 { Fate::Drop } else { Fate::Pass });
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.settle();
    let reply = w.kind_by(B, 3).pop().unwrap().bytes;
    w.filter = Box::new(|_| Fate::Drop);
    (w, reply)
}

/// mac2 of the next initiation that A sends.
fn next_mac2(w: &mut World) -> [u8; 16] {
    let before = w.kind_by(A, 1).len();
    w.run_for(secs(5.4));
    let sent = w.kind_by(A, 1);
    assert_eq!(sent.len(), before + 1, "one retransmission");
    mac2(&sent[before].bytes).try_into().unwrap()
}

//@test C-CK-3
#[test]
fn a_cookie_reply_is_taken_once_and_does_not_hurry_the_next_initiation() {
    let (mut w, reply) = cookie_on_its_way();
    let before = w.hosts[A].peer(&w.hosts[B].public());
    let deadline = w.hosts[A].device.poll_timeout();
    let stranger: SocketAddr = "203.0.113.66:6".parse().unwrap();
    let sent = w.log.len();
    w.inject(A, stranger, &reply);
    assert_eq!(w.log.len(), sent, "nothing goes out at once");
    let after = w.hosts[A].peer(&w.hosts[B].public());
    assert_eq!(after.endpoint, before.endpoint, "not authenticated: no roaming");
    assert_eq!(after.rx_bytes, before.rx_bytes);
    assert_eq!(w.hosts[A].device.poll_timeout(), deadline, "no timer moved");
    assert_eq!(w.hosts[A].discarded(Discard::BadCookie), 0);
    w.inject(A, stranger, &reply);
    assert_eq!(w.hosts[A].discarded(Discard::BadCookie), 1, "the second copy is one too many");
    assert_ne!(next_mac2(&mut w), [0; 16]);
}

//@test C-CK-3
#[test]
fn forged_and_stale_cookie_replies_change_nothing() {
    let (mut w, reply) = cookie_on_its_way();
    let from = w.hosts[B].addr;
    for at in 8..64 {
        let mut forged = reply.clone();
        forged[at] ^= 1;
        w.inject(A, from, &forged);
    }
    assert_eq!(w.hosts[A].discarded(Discard::BadCookie), 56);
    let mut elsewhere = reply.clone();
    elsewhere[4] ^= 1;
    w.inject(A, from, &elsewhere);
    assert_eq!(w.hosts[A].discarded(Discard::UnknownIndex), 1);
    assert_eq!(next_mac2(&mut w), [0; 16], "no forgery was believed");
    // The genuine reply belongs to the message before; its index died with it.
    w.inject(A, from, &reply);
    assert_eq!(next_mac2(&mut w), [0; 16]);
}

//@test C-CK-3
#[test]
fn the_genuine_cookie_reply_is_still_taken_after_forgeries() {
    let (mut w, reply) = cookie_on_its_way();
    let from = w.hosts[B].addr;
    let mut forged = reply.clone();
    forged[40] ^= 1;
    w.inject(A, from, &forged);
    w.inject(A, from, &reply);
    assert_ne!(next_mac2(&mut w), [0; 16]);
}

//@test C-CK-4
#[test]
fn a_handshake_completes_when_both_ends_are_under_load() {
    // wireguard-rs calls this the exchange under load: cookie for the initiation, cookie for the response,
    // then both carry mac2.
    let mut w = World::pair();
    load(&mut w, B);
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.settle();
    assert_eq!(w.kind_by(B, 3).len(), 1);
    w.run_until(w.hosts[A].device.poll_timeout().map(World::virtual_time).unwrap() - secs(0.001));
    load(&mut w, A);
    keep_loaded(&mut w, B);
    w.run_for(secs(0.002));
    assert_eq!(w.kind_by(B, 2).len(), 1, "the initiation with mac2 is answered under load");
    assert_eq!(w.kind_by(A, 3).len(), 1, "the response is asked for a cookie too");
    assert!(w.payloads(B).is_empty());
    assert_eq!(mac2(&w.kind_by(B, 2)[0].bytes), [0; 16]);
    w.run_for(secs(4.9));
    load_again(&mut w, A);
    w.run_for(secs(0.6));
    let responses = w.kind_by(B, 2);
    assert_eq!(responses.len(), 2);
    assert_ne!(mac2(&responses[1].bytes), [0; 16]);
    assert_eq!(w.payloads(B), [b"x"]);
}

fn load_again(w: &mut World, host: usize) {
    keep_loaded(w, host);
    w.due(host);
    w.log.retain(|s| s.kind() != 3 || s.to.port() != 1000);
    w.drop_flying();
}
