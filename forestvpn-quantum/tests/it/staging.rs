//! Packets that wait for a session.

use forestvpn_quantum::batch::Ecn;
use forestvpn_quantum::config::{DeviceUpdate, PeerUpdate};
use forestvpn_quantum::{DeviceConfig, Discard, Event, PrivateKey};

use crate::harness::*;

fn numbered(n: u32, len: usize) -> Vec<u8> {
    let mut payload = vec![0; len.max(4)];
    payload[..4].copy_from_slice(&n.to_be_bytes());
    packet(A, B, &payload)
}

fn numbers(w: &World, host: usize) -> Vec<u32> {
    w.payloads(host).iter().map(|p| u32::from_be_bytes(p[..4].try_into().unwrap())).collect()
}

//@test C-STG-1
#[test]
fn at_most_128_packets_wait_and_the_oldest_are_dropped_first() {
    let mut w = World::pair();
    w.cut();
    for n in 0..200 {
        assert_eq!(w.send(A, &numbered(n, 100)), Ok(0));
    }
    assert_eq!(w.discarded(A, Discard::StagingFull), 72);
    assert_eq!(w.hosts[A].device.staged_bytes(), 128 * 128);
    w.heal();
    w.run_for(secs(5.4));
    assert_eq!(numbers(&w, B), (72..200).collect::<Vec<_>>(), "the youngest 128, in order");
    assert_eq!(w.hosts[A].device.staged_bytes(), 0);
}

//@test C-STG-2
#[test]
fn at_most_256_kib_of_one_peer_wait() {
    let mut w = World::pair();
    w.cut();
    for n in 0..40 {
        w.send(A, &numbered(n, 9000 - 28)).unwrap();
    }
    assert_eq!(w.hosts[A].device.staged_bytes(), 29 * 9000, "29 of 9000 bytes fit 262144");
    assert_eq!(w.discarded(A, Discard::StagingFull), 11);
    w.heal();
    w.run_for(secs(5.4));
    assert_eq!(numbers(&w, B), (11..40).collect::<Vec<_>>());
}

//@test C-STG-2
#[test]
fn all_peers_together_stay_within_the_budget_of_the_device() {
    let budget = 1 << 20;
    let mut w = World::bounded(1, DeviceConfig { staging_bytes: budget, ..DeviceConfig::default() });
    let mut update = DeviceUpdate::default();
    for n in 0..100_u8 {
        let mut peer = PeerUpdate::new(
            PrivateKey::new([
                n, 9, 9, 9, 9, 9, 9, 9, n, 9, 9, 9, 9, 9, 9, 9, n, 9, 9, 9, 9, 9, 9, 9, n, 9, 9, 9, 9, 9, 9,
                9,
            ])
            .public_key(),
        );
        peer.endpoint = Some(format!("198.51.100.{n}:1").parse().unwrap());
        let net = format!("10.1.{n}.0/24").parse().unwrap();
        peer.allowed_ips = vec![forestvpn_quantum::config::AllowedIp { net, remove: false }];
        update.peers.push(peer);
    }
    w.configure(A, update);
    let mut sent = 0;
    for round in 0..50_u8 {
        for n in 0..100_u8 {
            let mut p = packet(A, B, &[round; 1372]);
            p[16..20].copy_from_slice(&[10, 1, n, 1]);
            w.send(A, &p).unwrap();
            sent += 1;
            assert!(w.hosts[A].device.staged_bytes() <= budget);
        }
    }
    let staged = w.hosts[A].device.staged_bytes();
    assert_eq!(staged, budget / 1400 * 1400, "and use it up");
    assert_eq!(w.discarded(A, Discard::StagingFull), sent - (staged / 1400) as u64);
    // What is given up comes back to the budget.
    w.configure(A, DeviceUpdate { replace_peers: true, ..Default::default() });
    assert_eq!(w.hosts[A].device.staged_bytes(), 0);
}

//@test C-STG-3
#[test]
fn padding_and_ecn_are_those_of_the_moment_of_sending_and_order_is_kept() {
    let mut w = World::pair();
    w.cut();
    for (n, tos) in [(0, 1), (1, 0), (2, 3), (3, 2)] {
        let mut p = numbered(n, 1320 - 28);
        p[1] = tos;
        w.send(A, &p).unwrap();
    }
    w.heal();
    w.hosts[A].device.set_mtu(1321);
    w.run_for(secs(5.4));
    assert_eq!(numbers(&w, B), [0, 1, 2, 3]);
    let data: Vec<_> = w.kind_by(A, 4);
    assert_eq!(data.iter().map(|d| d.bytes.len()).collect::<Vec<_>>(), [1321 + 32; 4], "not 1328, nor 1320");
    let marks: Vec<_> = data.iter().map(|d| d.ecn).collect();
    assert_eq!(marks, [Ecn::Ect1, Ecn::NotEct, Ecn::Ect0, Ecn::Ect0]);
}

//@test C-STG-3
#[test]
fn giving_up_removal_and_down_drop_what_waits() {
    // Given up after 20 initiations.
    let mut w = World::pair();
    w.cut();
    for n in 0..3 {
        w.send(A, &numbered(n, 10)).unwrap();
    }
    w.run_for(secs(120.0));
    assert!(w.hosts[A].events().iter().any(|e| matches!(e, Event::HandshakeFailed(_))));
    assert_eq!((w.hosts[A].device.staged_bytes(), w.discarded(A, Discard::GivenUp)), (0, 3));
    // Removal of the peer.
    w.send(A, &numbered(3, 10)).unwrap();
    let remove = |p: &mut PeerUpdate| p.remove = true;
    w.update_peer(A, B, remove);
    assert_eq!((w.hosts[A].device.staged_bytes(), w.discarded(A, Discard::GivenUp)), (0, 4));
    // Interface down.
    w.introduce(A, B, true);
    w.send(A, &numbered(4, 10)).unwrap();
    w.with(A, |d, now, out| d.set_up(false, now, out));
    assert_eq!((w.hosts[A].device.staged_bytes(), w.discarded(A, Discard::GivenUp)), (0, 5));
    w.with(A, |d, now, out| d.set_up(true, now, out));
    w.heal();
    w.run_for(secs(30.0));
    assert!(w.payloads(B).is_empty());
}

//@test C-STG-4
#[test]
fn a_packet_for_a_peer_without_an_endpoint_is_dropped_and_starts_nothing() {
    let mut w = World::new(2);
    w.introduce(A, B, false);
    w.introduce(B, A, true);
    assert_eq!(w.send(A, &numbered(0, 10)), Err(Discard::NoEndpoint));
    assert_eq!(w.discarded(A, Discard::NoEndpoint), 1);
    assert_eq!(w.hosts[A].device.staged_bytes(), 0);
    assert_eq!(w.hosts[A].device.poll_timeout(), None);
    assert!(w.log.is_empty());
    // Once the peer called, its address is known.
    w.connect(B, A);
    assert_eq!(w.send(A, &numbered(1, 10)), Ok(1));
    w.settle();
    assert_eq!(numbers(&w, B), [1]);
}

//@test C-STG-3
#[test]
fn waiting_packets_that_find_no_room_are_tried_again_in_order() {
    let mut w = World::pair();
    w.cut();
    for n in 0..4 {
        w.send(A, &numbered(n, 10)).unwrap();
    }
    w.heal();
    // The response comes while the outbox of A is full.
    let first = w.kind_by(A, 1)[0].clone();
    w.deliver(&first);
    let response = w.last(B, 2);
    w.drop_flying();
    let now = w.now();
    let mut bytes = response.bytes.clone();
    let mut full = Collect::full();
    let device = &mut w.hosts[A].device;
    let rx = forestvpn_quantum::batch::Received {
        bytes: &mut bytes,
        stride: 92,
        from: forestvpn_quantum::batch::Endpoint::new(response.from),
        ecn: Ecn::NotEct,
    };
    device.inbound(now, rx, &mut Vec::new(), &mut full);
    // As long as there is no room nothing is lost, and being due ends.
    for _ in 0..10 {
        device.handle_timeout(now, &mut full);
    }
    assert!(device.poll_timeout().unwrap() > now.mono, "a full outbox must not keep the device due");
    assert!(full.sent.is_empty());
    w.run_for(secs(0.01));
    w.send(A, &numbered(4, 10)).unwrap();
    w.settle();
    assert_eq!(numbers(&w, B), [0, 1, 2, 3, 4]);
}
