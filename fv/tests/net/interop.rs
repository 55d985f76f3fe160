//! `fv` with every other implementation: either side opens the handshake, IPv4 or IPv6 outside, always with a
//! preshared key; pings, a checked TCP transfer, keepalives, changes of address and port, and a new session under way.

use std::time::{Duration, Instant};

use crate::capture::Capture;
use crate::host::{Host, ready};
use crate::node::{Program, within};
use crate::pair::{LEFT4, LEFT6, Outer, Pair, RIGHT4, RIGHT6};
use crate::transfer::{alone, tcp};

/// Which side speaks first; `fv` is always on the left.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Initiator,
    Responder,
}

/// The whole matrix: one test for each peer, role and IP version outside.
macro_rules! matrix {
    ($($name:ident: $peer:ident, $role:ident, $outer:ident;)*) => {$(
        #[test]
        #[ignore = "needs root: task test:net"]
        fn $name() {
            meet(Program::$peer, Role::$role, Outer::$outer);
        }
    )*};
}

matrix! {
    fv_initiates_to_wireguard_go_over_v4: WireguardGo, Initiator, V4;
    fv_initiates_to_wireguard_go_over_v6: WireguardGo, Initiator, V6;
    fv_responds_to_wireguard_go_over_v4: WireguardGo, Responder, V4;
    fv_responds_to_wireguard_go_over_v6: WireguardGo, Responder, V6;
    fv_initiates_to_boringtun_over_v4: Boringtun, Initiator, V4;
    fv_initiates_to_boringtun_over_v6: Boringtun, Initiator, V6;
    fv_responds_to_boringtun_over_v4: Boringtun, Responder, V4;
    fv_responds_to_boringtun_over_v6: Boringtun, Responder, V6;
    fv_initiates_to_gotatun_over_v4: Gotatun, Initiator, V4;
    fv_initiates_to_gotatun_over_v6: Gotatun, Initiator, V6;
    fv_responds_to_gotatun_over_v4: Gotatun, Responder, V4;
    fv_responds_to_gotatun_over_v6: Gotatun, Responder, V6;
    fv_initiates_to_fv_over_v4: Fv, Initiator, V4;
    fv_initiates_to_fv_over_v6: Fv, Initiator, V6;
}

fn meet(peer: Program, role: Role, outer: Outer) {
    if !ready(&[peer.tool(), "nft", "ethtool"]) {
        return;
    }
    let pair = strangers(peer, role, outer);
    let (fv, other) = (&pair.left, &pair.right);
    let wire = Capture::on(&fv.host, 51822);

    // The side that knows the other's endpoint speaks first; its first packet waits for the handshake.
    let (first, to4, back4, back6) =
        if role == Role::Initiator { (fv, RIGHT4, LEFT4, LEFT6) } else { (other, LEFT4, RIGHT4, RIGHT6) };
    let second = if role == Role::Initiator { other } else { fv };
    first.host.ping(to4, 5);
    second.host.ping(back4, 5);
    second.host.ping(back6, 5);
    let by_fv = || wire.count(|seen| seen.is_initiation() && seen.from.port() == 51821);
    assert_eq!(by_fv(), usize::from(role == Role::Initiator), "sessions opened by fv");

    {
        let _alone = alone();
        tcp(&fv.host, &other.host, RIGHT4, 8 << 20);
        tcp(&other.host, &fv.host, LEFT6, 8 << 20);
    }

    // fv moves to another port: the peer follows with the next packet. Then the peer moves: fv follows.
    fv.node.wg("set listen-port 51831");
    fv.host.ping(RIGHT4, 3);
    other.host.ping(LEFT4, 3);
    other.host.run("ethtool -K wire tx off");
    fv.host.run("ethtool -K wire tx off");
    // (Rewritten on the way out and in: gotatun may stop when its port is set while it runs.)
    other.host.run(
        "nft 'table inet move { \
           chain o { type filter hook output priority 300; udp sport 51822 udp sport set 51832; }; \
           chain i { type filter hook prerouting priority -300; udp dport 51832 udp dport set 51822; }; }'",
    );
    other.host.ping(LEFT4, 3);
    assert!(fv.node.peer(pair.right_key(), "endpoints").ends_with(":51832"), "fv did not follow");
    fv.host.ping(RIGHT6, 3);

    // The peer's address changes under way: its host has a second one, and loses the first.
    let (old, new) = match outer {
        Outer::V4 => ("10.66.0.2/24", "10.66.0.22/24"),
        Outer::V6 => ("fd66::2/64", "fd66::22/64"),
    };
    other.host.address("wire", new);
    other.host.ip(&format!("address delete {old} dev wire"));
    if outer == Outer::V4 {
        // Deleting a primary address takes the others of its subnet along.
        let kept = other.host.ip("-4 address show dev wire");
        if !kept.contains("10.66.0.22") {
            other.host.address("wire", new);
        }
    }
    let follows = || {
        other.host.pings(LEFT4, 1);
        fv.node.peer(pair.right_key(), "endpoints").contains("66.0.22:")
            || fv.node.peer(pair.right_key(), "endpoints").contains("::22]")
    };
    assert!(within(Duration::from_secs(20), follows), "fv did not follow the new address");
    fv.host.ping(RIGHT4, 3);
    assert_eq!(by_fv(), usize::from(role == Role::Initiator), "one session lasts through all of this");
}

/// Both ends up; only the side that shall speak first knows where the other is.
#[track_caller]
fn strangers(peer: Program, role: Role, outer: Outer) -> Pair {
    let pair = Pair::unconfigured(Program::Fv, peer);
    let (l, r) = (&pair.left, &pair.right);
    l.node.wg(&format!("set listen-port 51821 private-key <(echo {})", l.keys.private));
    r.node.wg(&format!("set listen-port 51822 private-key <(echo {})", r.keys.private));
    let (to_right, to_left) = (pair.endpoint_of_right(outer), pair.endpoint_of_left(outer));
    pair.introduce(l, if role == Role::Initiator { to_right } else { "" });
    pair.introduce(r, if role == Role::Responder { to_left } else { "" });
    l.link_up(LEFT4, LEFT6, 1420);
    r.link_up(RIGHT4, RIGHT6, 1420);
    pair
}

macro_rules! keepalives {
    ($($name:ident: $peer:ident;)*) => {$(
        #[test]
        #[ignore = "needs root: task test:net"]
        fn $name() {
            keep_alive(Program::$peer);
        }
    )*};
}

keepalives! {
    keepalives_with_wireguard_go_keep_both_sides_informed: WireguardGo;
    keepalives_with_boringtun_keep_both_sides_informed: Boringtun;
    keepalives_with_gotatun_keep_both_sides_informed: Gotatun;
}

/// Persistent keepalives open the session without any traffic, go both ways, and each side counts the other's.
fn keep_alive(peer: Program) {
    if !ready(&[peer.tool()]) {
        return;
    }
    let pair = Pair::unconfigured(Program::Fv, peer);
    let (l, r) = (&pair.left, &pair.right);
    l.node.wg(&format!("set listen-port 51821 private-key <(echo {})", l.keys.private));
    r.node.wg(&format!("set listen-port 51822 private-key <(echo {})", r.keys.private));
    l.link_up(LEFT4, LEFT6, 1420);
    r.link_up(RIGHT4, RIGHT6, 1420);
    let wire = Capture::on(&l.host, 51822);
    let psk = &pair.psk;
    r.node.wg(&format!(
        "set peer {} preshared-key <(echo {psk}) endpoint {} persistent-keepalive 2 allowed-ips {LEFT4}/32",
        pair.left_key(),
        pair.endpoint_of_left(Outer::V4)
    ));
    l.node.wg(&format!(
        "set peer {} preshared-key <(echo {psk}) endpoint {} persistent-keepalive 1 allowed-ips {RIGHT4}/32",
        pair.right_key(),
        pair.endpoint_of_right(Outer::V4)
    ));
    let alive = |port| wire.count(|seen| seen.is_keepalive() && seen.from.port() == port);
    assert!(within(Duration::from_secs(8), || alive(51821) >= 4), "fv sent {} keepalives", alive(51821));
    let received = l.node.transfer(pair.right_key()).0;
    if peer == Program::Boringtun || alive(51822) > 1 {
        // (wireguard-go and the kernel put their keepalive off while packets arrive.)
        assert!(received >= 92 || l.node.transfer(pair.right_key()).1 > 0);
    }
    assert!(
        wire.count(|seen| seen.is_data() && !seen.is_keepalive()) == 0,
        "nothing but keepalives was to be sent"
    );
    l.host.ping(RIGHT4, 3);
    r.host.ping(LEFT4, 3);
}

macro_rules! rekeys {
    ($($name:ident: $peer:ident, $role:ident;)*) => {$(
        #[test]
        #[ignore = "needs root: task test:net"]
        fn $name() {
            rekey(Program::$peer, Role::$role);
        }
    )*};
}

// Named so that they come first in the runner's order: they take longest, and the rest runs beside them.
rekeys! {
    a_long_rekey_by_fv_with_wireguard_go_loses_nothing: WireguardGo, Initiator;
    a_long_rekey_by_fv_with_boringtun_loses_nothing: Boringtun, Initiator;
    a_long_rekey_by_fv_with_gotatun_loses_nothing: Gotatun, Initiator;
    a_long_rekey_by_wireguard_go_loses_nothing: WireguardGo, Responder;
}

/// Under continuous traffic both ways the initiator makes a new session at 120 s; not one packet is lost.
fn rekey(peer: Program, role: Role) {
    if !ready(&[peer.tool()]) {
        return;
    }
    let pair = strangers(peer, role, Outer::V4);
    let wire = Capture::on(&pair.left.host, 51822);
    let (first, target) = if role == Role::Initiator { (&pair.left, RIGHT4) } else { (&pair.right, LEFT4) };
    let began = Instant::now();
    first.host.ping(target, 1);
    let steady = |host: &Host, to: &str| {
        let text = host.run(&format!("timeout 170 ping -n -q -i 0.05 -w 135 {to}"));
        assert!(text.contains(" 0% packet loss"), "{text}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| steady(&pair.left.host, RIGHT4));
        scope.spawn(|| steady(&pair.right.host, LEFT4));
    });
    let opened = wire.seen(crate::capture::Seen::is_initiation);
    let at: Vec<(u64, u16)> =
        opened.iter().map(|seen| (seen.at.duration_since(began).as_secs(), seen.from.port())).collect();
    let port = if role == Role::Initiator { 51821 } else { 51822 };
    assert!(at.iter().all(|&(_, from)| from == port), "the responder opened a session: {at:?} (s, port)");
    assert!(
        at.last().is_some_and(|&(second, _)| (119..=126).contains(&second)),
        "the last of {at:?} (s, port)"
    );
    if role == Role::Initiator {
        // wireguard-go sometimes sends a second initiation at 5 s although it was answered.
        assert_eq!(at.len(), 2, "{at:?} (s, port)");
        assert_eq!(wire.count(crate::capture::Seen::is_response), 2, "responses");
    }
}
