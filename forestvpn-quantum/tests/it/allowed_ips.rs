//! Allowed IPs as the configuration changes them. The table itself is tested in the crate.

use forestvpn_quantum::Discard;
use forestvpn_quantum::config::{AllowedIp, DeviceUpdate, PeerUpdate};

use crate::harness::*;

fn change(net: &str, remove: bool) -> AllowedIp {
    AllowedIp { net: net.parse().unwrap(), remove }
}

/// One device with three peers that are named by their host number, without allowed IPs.
fn device() -> World {
    let mut w = World::new(4);
    for of in 1..4 {
        let addr = w.hosts[of].addr;
        w.update_peer(A, of, |p| p.endpoint = Some(addr));
    }
    w
}

fn set(w: &mut World, of: usize, changes: &[AllowedIp]) {
    w.update_peer(A, of, |p| p.allowed_ips = changes.to_vec());
}

fn list(w: &World, of: usize) -> Vec<String> {
    w.peer(A, of).allowed_ips.iter().map(ToString::to_string).collect()
}

/// The peer that a packet to `to` is meant for.
fn route(w: &mut World, to: [u8; 4]) -> Option<usize> {
    let mut p = packet(A, B, b"x");
    p[16..20].copy_from_slice(&to);
    match w.send(A, &p) {
        Err(Discard::NoRoute) => None,
        Err(other) => panic!("{other:?}"),
        Ok(_) => {
            // An initiation tells; interface down and up lets the next one go at once.
            let to = w.last(A, 1).to;
            w.with(A, |d, now, out| {
                d.set_up(false, now, out);
                d.set_up(true, now, out);
            });
            w.drop_flying();
            w.hosts.iter().position(|h| h.addr == to)
        }
    }
}

// F51: the same prefix on two peers.
//@test C-AIP-1
#[test]
fn a_prefix_that_is_given_again_moves_to_the_new_peer() {
    let mut w = device();
    for net in ["0.0.0.0/0", "::/0", "10.0.0.0/8"] {
        set(&mut w, 1, &[change(net, false)]);
    }
    assert_eq!(route(&mut w, [10, 1, 1, 1]), Some(1));
    set(&mut w, 2, &[change("0.0.0.0/0", false), change("10.0.0.0/8", false), change("::/0", false)]);
    assert_eq!(list(&w, 1), [""; 0]);
    assert_eq!(list(&w, 2), ["0.0.0.0/0", "10.0.0.0/8", "::/0"]);
    assert_eq!(route(&mut w, [10, 1, 1, 1]), Some(2));
    assert_eq!(route(&mut w, [1, 1, 1, 1]), Some(2));
}

// F52: host bits kept, the same prefix not recognised later.
//@test C-AIP-1
#[test]
fn host_bits_are_masked_away() {
    let mut w = device();
    set(&mut w, 1, &[change("10.3.7.8/8", false), change("fd00::1234/16", false)]);
    assert_eq!(list(&w, 1), ["10.0.0.0/8", "fd00::/16"]);
    set(&mut w, 2, &[change("10.9.9.9/8", false)]);
    assert_eq!(list(&w, 1), ["fd00::/16"]);
    assert_eq!(list(&w, 2), ["10.0.0.0/8"]);
}

//@test C-AIP-1
#[test]
fn an_ipv4_mapped_prefix_is_ipv6() {
    let mut w = device();
    set(&mut w, 1, &[change("::ffff:10.0.0.0/104", false)]);
    assert_eq!(route(&mut w, [10, 0, 0, 1]), None);
    assert_eq!(list(&w, 1), ["::ffff:10.0.0.0/104"]);
}

//@test C-AIP-2
#[test]
fn removal_takes_exactly_that_prefix_of_exactly_that_peer() {
    let mut w = device();
    set(&mut w, 1, &[change("10.0.0.0/8", false), change("10.1.0.0/16", false), change("fd00::/64", false)]);
    for (of, net) in
        [(1, "10.0.0.0/9"), (2, "10.0.0.0/8"), (1, "10.2.0.0/16"), (1, "fd00::/65"), (2, "fd00::/64")]
    {
        set(&mut w, of, &[change(net, true)]);
    }
    assert_eq!(list(&w, 1).len(), 3, "no-ops");
    set(&mut w, 1, &[change("10.1.9.9/16", true), change("fd00::9/64", true)]);
    assert_eq!(list(&w, 1), ["10.0.0.0/8"]);
    assert_eq!(route(&mut w, [10, 1, 0, 1]), Some(1), "the shorter one remains");
    set(&mut w, 1, &[change("10.0.0.0/8", true)]);
    assert_eq!(route(&mut w, [10, 1, 0, 1]), None);
}

// F54: taking one address away must not touch the rest.
//@test C-AIP-2
#[test]
fn removing_one_prefix_keeps_session_counters_and_the_other_routes() {
    let mut w = World::pair();
    allow(&mut w, A, B, "10.7.0.0/16");
    w.connect(A, B);
    let before = w.peer(A, B);
    let initiations = w.kind_by(A, 1).len();
    w.update_peer(A, B, |p| {
        p.update_only = true;
        p.allowed_ips = vec![change("10.7.0.0/16", true)];
    });
    let after = w.peer(A, B);
    assert_eq!(
        (after.tx_bytes, after.rx_bytes, after.last_handshake),
        (before.tx_bytes, before.rx_bytes, before.last_handshake)
    );
    let mut p = packet(A, B, b"x");
    p[16..20].copy_from_slice(&[10, 7, 0, 1]);
    assert_eq!(w.send(A, &p), Err(Discard::NoRoute));
    assert_eq!(w.send(A, &packet(A, B, b"still")), Ok(1));
    w.settle();
    assert_eq!(w.payloads(B).last().unwrap(), b"still");
    assert_eq!(w.kind_by(A, 1).len(), initiations, "on the same session");
    // The same by replacing the list.
    w.update_peer(A, B, |p| {
        p.replace_allowed_ips = true;
        p.allowed_ips = vec![change("10.0.0.2/32", false)];
    });
    assert_eq!(w.send(A, &packet(A, B, b"again")), Ok(1));
    assert_eq!(w.kind_by(A, 1).len(), initiations);
}

//@test C-AIP-3
#[test]
fn replacing_removes_all_of_this_peer_before_it_adds() {
    let mut w = device();
    set(&mut w, 1, &[change("10.0.0.0/8", false), change("10.1.0.0/16", false)]);
    set(&mut w, 2, &[change("10.2.0.0/16", false)]);
    w.update_peer(A, 1, |p| {
        p.replace_allowed_ips = true;
        p.allowed_ips = vec![change("10.3.0.0/16", false), change("10.1.0.0/16", false)];
    });
    assert_eq!(list(&w, 1), ["10.3.0.0/16", "10.1.0.0/16"]);
    assert_eq!(list(&w, 2), ["10.2.0.0/16"], "others keep theirs");
    assert_eq!(route(&mut w, [10, 9, 0, 1]), None);
    w.update_peer(A, 1, |p| p.replace_allowed_ips = true);
    assert_eq!(list(&w, 1), [""; 0], "nothing to add is a clean sweep");
    w.update_peer(A, 2, |p| p.remove = true);
    assert_eq!(route(&mut w, [10, 2, 0, 1]), None, "a peer takes its prefixes with it");
}

//@test C-AIP-4
#[test]
fn the_list_is_in_order_of_insertion_and_a_moved_prefix_goes_last() {
    let mut w = device();
    let nets = ["10.9.0.0/16", "fd00::/16", "10.1.0.0/16", "0.0.0.0/0"];
    set(&mut w, 1, &nets.map(|n| change(n, false)));
    assert_eq!(list(&w, 1), nets);
    set(&mut w, 1, &[change("10.9.0.0/16", false)]);
    assert_eq!(list(&w, 1), ["fd00::/16", "10.1.0.0/16", "0.0.0.0/0", "10.9.0.0/16"]);
    set(&mut w, 2, &[change("10.8.0.0/16", false), change("10.1.0.0/16", false)]);
    assert_eq!(list(&w, 2), ["10.8.0.0/16", "10.1.0.0/16"]);
}

//@test C-AIP-5
#[test]
fn a_change_holds_for_the_very_next_packet() {
    // The same destination over and over, so that a remembered route would show.
    let mut w = World::new(3);
    for of in [1, 2] {
        let addr = w.hosts[of].addr;
        w.update_peer(A, of, |p| p.endpoint = Some(addr));
    }
    let to = |w: &mut World| {
        let mut p = packet(A, B, b"x");
        p[16..20].copy_from_slice(&[10, 5, 5, 5]);
        let sent = w.send(A, &p);
        sent.map(|_| w.hosts[A].device.staged_bytes())
    };
    assert_eq!(to(&mut w), Err(Discard::NoRoute));
    set(&mut w, 1, &[change("10.0.0.0/8", false)]);
    assert_eq!(to(&mut w), Ok(29), "waits for peer 1");
    set(&mut w, 2, &[change("10.5.0.0/16", false)]);
    assert_eq!(to(&mut w), Ok(58));
    w.update_peer(A, 1, |p| p.remove = true);
    assert_eq!(w.hosts[A].device.staged_bytes(), 29, "the second one waits for peer 2");
    assert_eq!(to(&mut w), Ok(58));
    w.update_peer(A, 2, |p| p.remove = true);
    assert_eq!(to(&mut w), Err(Discard::NoRoute));
    // And inward: a prefix taken away stops the next packet of a live session.
    let mut w = World::pair();
    w.connect(A, B);
    set_at(&mut w, B, A, &[change("10.0.0.1/32", true)]);
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.settle();
    assert_eq!(w.discarded(B, Discard::Spoofed), 1);
    let gone = w.hosts[A].public();
    w.configure(
        B,
        DeviceUpdate {
            peers: vec![PeerUpdate { remove: true, ..PeerUpdate::new(gone) }],
            ..Default::default()
        },
    );
    w.send(A, &packet(A, B, b"x")).unwrap();
    w.settle();
    assert_eq!(w.discarded(B, Discard::UnknownIndex), 1, "the session went with the peer");
}

fn set_at(w: &mut World, host: usize, of: usize, changes: &[AllowedIp]) {
    w.update_peer(host, of, |p| p.allowed_ips = changes.to_vec());
}
