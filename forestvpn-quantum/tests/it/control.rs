//! Configuration and the state of the interface.

use forestvpn_quantum::config::{DeviceUpdate, PeerUpdate};
use forestvpn_quantum::{ConfigError, Discard, PrivateKey, PublicKey};

use crate::harness::*;

fn down(w: &mut World, host: usize) {
    w.with(host, |d, now, out| d.set_up(false, now, out));
}

fn up(w: &mut World, host: usize) {
    w.with(host, |d, now, out| d.set_up(true, now, out));
}

fn set_key(w: &mut World, host: usize, key: &PrivateKey) {
    w.configure(host, DeviceUpdate { private_key: Some(Some(key.clone())), ..Default::default() });
}

fn names(w: &World, host: usize) -> Vec<PublicKey> {
    w.hosts[host].device.snapshot().peers.iter().map(|p| p.public_key).collect()
}

//@test C-TMR-12
#[test]
fn an_interface_that_is_down_is_silent_and_deaf() {
    let mut w = World::pair();
    w.update_peer(A, B, |p| p.persistent_keepalive = Some(5));
    w.connect(A, B);
    w.send(B, &packet(B, A, b"on its way")).unwrap();
    let data = w.last(B, 4).bytes;
    w.drop_flying();
    down(&mut w, A);
    let sent = w.sent_by(A).len();
    assert_eq!(w.send(A, &packet(A, B, b"x")), Err(Discard::Down));
    w.inject(A, w.hosts[B].addr, &data);
    assert!(w.payloads(A).is_empty());
    w.run_for(secs(700.0));
    assert_eq!(w.sent_by(A).len(), sent, "no keepalive, no retransmission, no answer");
    assert_eq!(w.hosts[A].device.poll_timeout(), None, "and nothing is armed");
    assert!(!w.hosts[A].device.is_up());
}

//@test C-TMR-12
#[test]
fn down_forgets_sessions_and_handshakes_and_up_starts_at_once() {
    let mut w = World::pair();
    w.connect(A, B);
    w.send(B, &packet(B, A, b"old session")).unwrap();
    let data = w.last(B, 4).bytes;
    w.drop_flying();
    w.t += secs(0.5);
    down(&mut w, A);
    up(&mut w, A);
    w.inject(A, w.hosts[B].addr, &data);
    assert_eq!(w.discarded(A, Discard::UnknownIndex), 1, "the keys are gone");
    // The initiation of half a second ago does not hold back the next one.
    w.send(A, &packet(A, B, b"new session")).unwrap();
    w.settle();
    assert_eq!(w.kind_by(A, 1).len(), 2);
    assert_eq!(w.payloads(B), [&b"connect"[..], b"new session"]);
    // An outstanding initiation is forgotten too: its response comes too late.
    let mut w = World::pair();
    w.cut();
    w.send(A, &packet(A, B, b"x")).unwrap();
    let initiation = w.last(A, 1).bytes;
    w.inject(B, w.hosts[A].addr, &initiation);
    let response = w.last(B, 2).bytes;
    down(&mut w, A);
    up(&mut w, A);
    w.inject(A, w.hosts[B].addr, &response);
    assert_eq!(w.discarded(A, Discard::UnknownIndex), 1);
    assert!(w.kind_by(A, 4).is_empty());
}

//@test C-TMR-12
#[test]
fn up_sends_persistent_keepalives_at_once_and_the_next_ones_in_time() {
    let mut w = World::pair();
    down(&mut w, A);
    w.update_peer(A, B, |p| p.persistent_keepalive = Some(10));
    w.run_for(secs(60.0));
    assert!(w.log.is_empty(), "turned on while down: nothing yet");
    up(&mut w, A);
    w.settle();
    assert_eq!(w.kind_by(A, 1).len(), 1);
    assert_eq!(w.keepalives_by(A).len(), 1);
    w.run_for(secs(20.0));
    assert_eq!(w.keepalives_by(A).len(), 3);
    // Up again does nothing.
    let sent = w.log.len();
    up(&mut w, A);
    w.settle();
    assert_eq!(w.log.len(), sent);
}

//@test C-HS-10
#[test]
fn setting_the_same_private_key_changes_nothing() {
    let mut w = World::pair();
    w.connect(A, B);
    let key = w.hosts[A].key.clone();
    set_key(&mut w, A, &key);
    w.send(A, &packet(A, B, b"same session")).unwrap();
    w.settle();
    assert_eq!(w.payloads(B).last().unwrap(), b"same session");
    assert_eq!(w.kind_by(A, 1).len(), 1);
}

//@test C-HS-10
#[test]
fn a_new_private_key_stops_sending_keeps_receiving_and_calls_again_at_once() {
    let mut w = World::pair();
    w.connect(A, B);
    let (old, new) = (w.hosts[A].public(), PrivateKey::new([0x31; 32]));
    w.t += secs(1.0);
    set_key(&mut w, A, &new);
    assert_eq!(w.hosts[A].device.snapshot().private_key.unwrap(), new);
    // Receiving goes on under the old session.
    w.send(B, &packet(B, A, b"still heard")).unwrap();
    w.settle();
    assert_eq!(w.payloads(A), [b"still heard"]);
    // Sending needs a new one, and does not wait for the 5 s to pass.
    let data = w.kind_by(A, 4).len();
    assert_eq!(w.send(A, &packet(A, B, b"new me")), Ok(0));
    w.settle();
    assert_eq!(w.kind_by(A, 4).len(), data, "nothing under the old key");
    assert_eq!(w.kind_by(A, 1).len(), 2);
    assert_eq!(w.discarded(B, Discard::UnknownPeer), 1, "B does not know the new key yet");
    // B learns it: within one retransmission all is well (N9: the kernel's test does it in the other order).
    let allowed = w.peer(B, A).allowed_ips;
    let mut peer = PeerUpdate::new(new.public_key());
    peer.allowed_ips =
        allowed.iter().map(|net| forestvpn_quantum::config::AllowedIp { net: *net, remove: false }).collect();
    let gone = PeerUpdate { remove: true, ..PeerUpdate::new(old) };
    w.configure(B, DeviceUpdate { peers: vec![gone, peer], ..Default::default() });
    w.run_for(secs(5.4));
    assert_eq!(w.payloads(B).last().unwrap(), b"new me");
}

//@test C-HS-10
#[test]
fn a_new_private_key_ends_handshakes_under_way_and_renews_mac1() {
    let mut w = World::pair();
    w.cut();
    w.send(A, &packet(A, B, b"x")).unwrap();
    let initiation = w.last(A, 1).bytes;
    w.inject(B, w.hosts[A].addr, &initiation);
    let response = w.last(B, 2).bytes;
    let to_old_key = w.initiation(B, A);
    set_key(&mut w, A, &PrivateKey::new([0x32; 32]));
    w.inject(A, w.hosts[B].addr, &response);
    assert_eq!(w.discarded(A, Discard::BadMac1), 1, "mac1 is for the old key");
    w.inject(A, w.hosts[B].addr, &to_old_key);
    assert_eq!(w.discarded(A, Discard::BadMac1), 2);
    assert!(w.kind_by(A, 4).is_empty() && w.kind_by(A, 2).is_empty());
}

// The kernel's self test N24.
//@test C-HS-10
//@test C-HS-11
#[test]
fn our_own_public_key_is_never_a_peer() {
    let mut w = World::pair();
    let (a, b) = (w.hosts[A].public(), w.hosts[B].public());
    w.connect(A, B);
    let key = w.hosts[B].key.clone();
    set_key(&mut w, A, &key);
    assert_eq!(names(&w, A), [], "the peer that is now ourselves is gone");
    w.configure(A, DeviceUpdate { peers: vec![PeerUpdate::new(b)], ..Default::default() });
    assert_eq!(names(&w, A), [], "and adding it is ignored");
    let key = w.hosts[A].key.clone();
    set_key(&mut w, A, &key);
    w.configure(
        A,
        DeviceUpdate { peers: vec![PeerUpdate::new(b), PeerUpdate::new(a)], ..Default::default() },
    );
    assert_eq!(names(&w, A), [b]);
    // Key and peer in one update: the key counts first.
    let key = w.hosts[B].key.clone();
    let update = DeviceUpdate {
        private_key: Some(Some(key)),
        replace_peers: true,
        peers: vec![PeerUpdate::new(b), PeerUpdate::new(a)],
        ..Default::default()
    };
    w.configure(A, update);
    assert_eq!(names(&w, A), [a]);
}

#[test]
fn removing_the_private_key_stops_everything_and_setting_it_lets_it_go_on() {
    let mut w = World::pair();
    w.connect(A, B);
    w.configure(A, DeviceUpdate { private_key: Some(None), ..Default::default() });
    assert_eq!(w.hosts[A].device.snapshot().private_key, None);
    w.send(A, &packet(A, B, b"waits")).unwrap();
    let sent = w.sent_by(A).len();
    w.run_for(secs(20.0));
    assert_eq!(w.sent_by(A).len(), sent);
    let key = w.hosts[A].key.clone();
    set_key(&mut w, A, &key);
    w.settle();
    assert_eq!(w.payloads(B).last().unwrap(), b"waits");
}

#[test]
fn updates_do_what_their_fields_say_in_the_documented_order() {
    let mut w = World::new(4);
    let key = |n: usize| PrivateKey::new([n as u8 + 1; 32]).public_key();
    let set = |w: &mut World, replace_peers, peers| {
        w.configure(A, DeviceUpdate { replace_peers, peers, ..Default::default() });
    };
    set(&mut w, false, vec![PeerUpdate::new(key(3)), PeerUpdate::new(key(1)), PeerUpdate::new(key(2))]);
    assert_eq!(names(&w, A), [key(3), key(1), key(2)], "in order of creation");
    set(
        &mut w,
        false,
        vec![PeerUpdate { update_only: true, persistent_keepalive: Some(7), ..PeerUpdate::new(key(9)) }],
    );
    assert_eq!(names(&w, A).len(), 3, "update_only creates nothing");
    set(
        &mut w,
        false,
        vec![PeerUpdate { update_only: true, persistent_keepalive: Some(7), ..PeerUpdate::new(key(1)) }],
    );
    assert_eq!(w.peer(A, 1).persistent_keepalive, 7);
    set(&mut w, false, vec![PeerUpdate { remove: true, ..PeerUpdate::new(key(9)) }]);
    set(
        &mut w,
        false,
        vec![PeerUpdate { remove: true, persistent_keepalive: Some(1), ..PeerUpdate::new(key(3)) }],
    );
    assert_eq!(names(&w, A), [key(1), key(2)]);
    // F47: an IPv4-mapped endpoint is IPv4.
    let endpoint = Some("[::ffff:192.0.2.7]:1".parse().unwrap());
    set(&mut w, false, vec![PeerUpdate { endpoint, ..PeerUpdate::new(key(1)) }]);
    assert_eq!(w.peer(A, 1).endpoint.unwrap().to_string(), "192.0.2.7:1");
    set(&mut w, true, vec![PeerUpdate::new(key(2))]);
    assert_eq!(names(&w, A), [key(2)]);
    // Removed and added again it is a new peer.
    set(&mut w, false, vec![PeerUpdate { remove: true, ..PeerUpdate::new(key(2)) }, PeerUpdate::new(key(2))]);
    assert_eq!(w.peer(A, 2).persistent_keepalive, 0);
}

#[test]
fn too_many_peers_are_refused_before_anything_is_changed() {
    let mut w = World::pair();
    let key = w.hosts[A].key.clone();
    let peers = vec![PeerUpdate::new(PublicKey([3; 32])); (1 << 20) + 1];
    for replace_peers in [false, true] {
        let update = DeviceUpdate {
            private_key: Some(Some(PrivateKey::new([9; 32]))),
            replace_peers,
            peers: peers.clone(),
            ..Default::default()
        };
        let refused = w.with(A, |d, now, out| d.configure(&update, now, out));
        assert_eq!(refused, Err(ConfigError::TooManyPeers));
        assert_eq!(w.hosts[A].device.snapshot().private_key, Some(key.clone()));
        assert_eq!(names(&w, A), [w.hosts[B].public()]);
    }
}
