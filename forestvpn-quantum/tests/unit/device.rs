//! What of a device cannot be seen from outside: counters near their limits, the size of the index table.

use crate::harness::{A, B, World, packet, secs};
use crate::timers::{REJECT_AFTER_MESSAGES, REKEY_AFTER_MESSAGES};

/// The session that `host` sends with gives out `counter` next.
fn set_counter(w: &mut World, host: usize, counter: u64) {
    let device = &mut w.hosts[host].device;
    let ids = device.peers.ids();
    device.peers.get(ids[0]).unwrap().peer.set_sent(counter);
}

fn say(w: &mut World, from: usize, to: usize) {
    w.send(from, &packet(from, to, b"data")).unwrap();
    w.settle();
}

fn indices(w: &World, host: usize) -> usize {
    w.hosts[host].device.indices.len()
}

/// F04: 32-bit machines used to wrap here.
//@test C-SES-5
#[test]
fn counters_cross_32_bits() {
    let mut w = World::pair();
    w.connect(A, B);
    set_counter(&mut w, A, (1 << 32) - 2);
    (0..4).for_each(|_| say(&mut w, A, B));
    let counters: Vec<u64> = w.kind_by(A, 4).iter().map(|s| s.counter()).collect();
    assert_eq!(counters, [0, 0xffff_fffe, 0xffff_ffff, 0x1_0000_0000, 0x1_0000_0001]);
    assert_eq!(w.payloads(B).len(), 5);
}

//@test C-SES-5
#[test]
fn the_last_counter_is_one_below_the_limit_and_then_a_new_session_is_needed() {
    let mut w = World::pair();
    w.connect(A, B);
    w.run_for(secs(6.0));
    set_counter(&mut w, A, REJECT_AFTER_MESSAGES - 1);
    w.filter =
        Box::new(|s| if s.kind() == 1 { crate::harness::Fate::Drop } else { crate::harness::Fate::Pass });
    say(&mut w, A, B);
    assert_eq!(w.last(A, 4).counter(), u64::MAX - (1 << 13) - 1);
    assert_eq!(w.payloads(B).len(), 2);
    let before = w.kind_by(A, 4).len();
    say(&mut w, A, B);
    assert_eq!(w.kind_by(A, 4).len(), before, "it waits");
    w.heal();
    w.run_for(secs(6.0));
    assert_eq!((w.last(A, 4).counter(), w.payloads(B).len()), (0, 3));
}

/// C-TMR-9: this is the one age that the responder minds as well.
//@test C-TMR-7
//@test C-TMR-9
#[test]
fn either_side_renews_the_session_after_2_to_the_60_messages() {
    for (host, other) in [(A, B), (B, A)] {
        let mut w = World::pair();
        w.connect(A, B);
        w.run_for(secs(6.0));
        let before = w.kind_by(host, 1).len();
        set_counter(&mut w, host, REKEY_AFTER_MESSAGES - 1);
        say(&mut w, host, other);
        assert_eq!(w.kind_by(host, 1).len(), before);
        say(&mut w, host, other);
        assert_eq!(w.kind_by(host, 1).len(), before + 1);
    }
}

/// F09.
//@test C-IDX-4
#[test]
fn a_peer_has_at_most_four_indices_whatever_it_does() {
    let mut w = World::pair();
    for i in 0..5 {
        let (from, to) = if i % 2 == 0 { (A, B) } else { (B, A) };
        w.connect(from, to);
        w.run_for(secs(170.0));
        say(&mut w, from, to);
        w.run_for(secs(20.0));
        assert!(indices(&w, A) <= 3 && indices(&w, B) <= 3);
    }
    w.cut();
    w.run_for(secs(200.0));
    w.send(B, &packet(B, A, b"x")).unwrap();
    let from = w.hosts[A].addr;
    for _ in 0..300 {
        w.t += secs(0.021);
        let initiation = w.initiation(A, B);
        w.inject(B, from, &initiation);
        let _ = w.send(B, &packet(B, A, b"x"));
        assert!(indices(&w, B) <= 4, "{}", indices(&w, B));
    }
    assert!(w.kind_by(B, 2).len() > 300);
}

//@test C-IDX-2
#[test]
fn no_index_outlives_what_it_stands_for() {
    let ends: [fn(&mut World); 4] = [
        |w| w.update_peer(A, B, |p| p.remove = true),
        |w| w.with(A, |d, now, out| d.set_up(false, now, out)),
        |w| w.run_for(secs(2.0 * 540.0 + 110.0)),
        |w| {
            let update = crate::config::DeviceUpdate { replace_peers: true, ..Default::default() };
            w.configure(A, update);
        },
    ];
    for end in ends {
        let mut w = World::pair();
        w.connect(A, B);
        w.cut();
        w.run_for(secs(200.0));
        w.send(A, &packet(A, B, b"x")).unwrap();
        let initiation = w.initiation(B, A);
        let from = w.hosts[B].addr;
        w.inject(A, from, &initiation);
        w.run_for(secs(6.0));
        assert_eq!(indices(&w, A), 3, "a session, an unconfirmed one, a handshake");
        end(&mut w);
        assert_eq!(indices(&w, A), 0);
    }
}

//@test C-IDX-2
//@test C-HS-10
#[test]
fn a_new_private_key_frees_the_handshakes_index_and_keeps_the_sessions() {
    let mut w = World::pair();
    w.connect(A, B);
    w.cut();
    w.run_for(secs(200.0));
    w.send(A, &packet(A, B, b"x")).unwrap();
    assert_eq!(indices(&w, A), 2);
    let key = crate::PrivateKey::new([9; 32]);
    let update = crate::config::DeviceUpdate { private_key: Some(Some(key)), ..Default::default() };
    w.configure(A, update);
    assert_eq!(indices(&w, A), 1);
}
