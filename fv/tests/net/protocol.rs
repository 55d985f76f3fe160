//! What has gone wrong with sessions elsewhere, seen from outside: silence, replays, a peer that restarts.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use crate::capture::{Capture, Seen};
use crate::host::{Host, ready};
use crate::node::{Program, within};
use crate::pair::{LEFT4, Outer, Pair, RIGHT4, RIGHT6};

/// Sends datagrams from a fresh port of `host` and returns what comes back within half a second.
fn answers(host: &Host, to: &str, datagrams: &[Vec<u8>]) -> Vec<Vec<u8>> {
    host.enter(|| {
        let socket = UdpSocket::bind(("0.0.0.0", 0)).expect("socket");
        socket.set_read_timeout(Some(Duration::from_millis(500))).expect("timeout");
        for datagram in datagrams {
            socket.send_to(datagram, to).expect("send");
        }
        let (mut all, mut buffer) = (Vec::new(), [0; 2048]);
        while let Ok(len) = socket.recv(&mut buffer) {
            all.push(buffer[..len].to_vec());
        }
        all
    })
}

/// F11: with keepalives of 25 s every one of forty requests is answered, and no second handshake is made.
#[test]
#[ignore = "needs root: task test:net"]
fn a_long_f11_the_peer_never_goes_quiet_between_handshakes() {
    if !ready(&["wireguard-go"]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::WireguardGo);
    let wire = Capture::on(&pair.left.host, 51822);
    pair.left.node.wg(&format!("set peer {} persistent-keepalive 25", pair.right_key()));
    pair.right.node.wg(&format!("set peer {} persistent-keepalive 25", pair.left_key()));
    pair.left.host.ping(RIGHT4, 1);
    let text = pair.left.host.run(&format!("ping -n -q -c 40 -i 1.5 -W 1 {RIGHT4}"));
    assert!(text.contains(" 40 received"), "{text}");
    let opened = wire.seen(|seen| seen.is_initiation() && seen.from.port() == 51821);
    assert!(opened.len() <= 1, "fv opened {} sessions in a minute", opened.len());
}

/// F12: an initiation sent again by somebody else changes nothing: no answer, no new endpoint, no new session.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-HS-3
fn f12_a_replayed_initiation_is_ignored() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    let wire = Capture::on(&pair.left.host, 51822);
    pair.left.host.ping(RIGHT4, 2);
    let old = wire.seen(Seen::is_initiation);
    let at = pair.right.node.peer(pair.left_key(), "latest-handshakes");
    let back = answers(&pair.left.host, "10.66.0.2:51822", &[old[0].payload.clone()]);
    assert!(back.is_empty(), "a replay was answered");
    assert_eq!(pair.right.node.peer(pair.left_key(), "endpoints"), "10.66.0.1:51821");
    assert_eq!(pair.right.node.peer(pair.left_key(), "latest-handshakes"), at);
    pair.ping_all(2);
}

/// A data message sent again from elsewhere is dropped, and its sender is not followed.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-IN-1
//@test C-RPL-2
fn replayed_data_is_dropped_and_its_sender_not_followed() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    let wire = Capture::on(&pair.left.host, 51822);
    pair.left.host.ping(RIGHT4, 3);
    let data: Vec<_> = wire.seen(|seen| seen.is_data() && seen.from.port() == 51821);
    let (received, _) = pair.right.node.transfer(pair.left_key());
    let again: Vec<_> = data.iter().map(|seen| seen.payload.clone()).collect();
    assert!(answers(&pair.left.host, "10.66.0.2:51822", &again).is_empty());
    // A wrong tag on a counter far ahead must not move the window either.
    let mut forged = again[0].clone();
    forged[8..16].copy_from_slice(&(1_u64 << 40).to_le_bytes());
    assert!(answers(&pair.left.host, "10.66.0.2:51822", &[forged]).is_empty());
    assert_eq!(pair.right.node.transfer(pair.left_key()).0, received, "a replay was counted");
    assert_eq!(pair.right.node.peer(pair.left_key(), "endpoints"), "10.66.0.1:51821");
    pair.ping_all(2);
}

/// Whatever a stranger sends, nothing comes back and nothing is said about it.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-SIL-1
//@test C-FMT-2
//@test C-FMT-4
fn strangers_get_no_answer_and_leave_no_trace() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    let wire = Capture::on(&pair.left.host, 51822);
    pair.left.host.ping(RIGHT4, 1);
    let initiation = wire.seen(Seen::is_initiation)[0].payload.clone();
    let mut all = vec![
        Vec::new(),
        vec![0],
        vec![1, 0, 0, 0],
        vec![4; 31],
        vec![0xff; 148],
        vec![7; 1400],
        vec![4; 65_000],
    ];
    for kind in 0..=5_u8 {
        for len in [0, 31, 32, 63, 64, 65, 91, 92, 93, 147, 148, 149, 1452] {
            let mut datagram = vec![0; len];
            if let Some(first) = datagram.first_mut() {
                *first = kind;
            }
            all.push(datagram);
        }
    }
    let mut wrong_mac = initiation.clone();
    wrong_mac[120] ^= 1;
    let mut reserved = initiation;
    reserved[2] = 1;
    all.extend([wrong_mac, reserved]);
    let log = pair.right.node.log();
    assert!(answers(&pair.left.host, "10.66.0.2:51822", &all).is_empty(), "a stranger got an answer");
    assert_eq!(pair.right.node.log(), log, "a stranger can write into the log");
    pair.ping_all(2);
}

/// F13: one end is killed and started anew; under a ping a second the tunnel is back within the protocol's time.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-TMR-4
fn f13_a_restarted_peer_is_back_within_twenty_seconds() {
    if !ready(&[]) {
        return;
    }
    let mut pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 2);
    pair.right.node.kill_and_restart(&pair.right.host);
    pair.right.node.wg(&format!("set listen-port 51822 private-key <(echo {})", pair.right.keys.private));
    // It does not know where the left is, so it can only wait for the left to notice.
    pair.introduce(&pair.right, "");
    pair.right.link_up(RIGHT4, RIGHT6, 1420);
    let began = Instant::now();
    let back = within(Duration::from_secs(30), || {
        std::thread::sleep(Duration::from_millis(500));
        pair.left.host.pings(RIGHT4, 1) == 1
    });
    let took = began.elapsed();
    assert!(back && took < Duration::from_secs(22), "back after {took:?}: {back}");
    pair.right.host.ping(LEFT4, 2);
}

/// A handshake whose messages take seconds to arrive still completes (F10).
#[test]
#[ignore = "needs root: task test:net"]
fn f10_a_lost_initiation_is_repeated_until_it_arrives() {
    if !ready(&["nft"]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    let wire = Capture::on(&pair.left.host, 51822);
    pair.right.host.run("nft 'table inet lost { chain i { type filter hook prerouting priority -300; udp dport 51822 drop; }; }'");
    assert_eq!(pair.left.host.pings(RIGHT4, 3), 0);
    pair.right.host.run("nft delete table inet lost");
    let back = within(Duration::from_secs(7), || pair.left.host.pings(RIGHT4, 1) == 1);
    assert!(back, "no session after the loss ended");
    let opened = wire.seen(Seen::is_initiation);
    assert!(opened.len() >= 2);
    for two in opened.windows(2) {
        let gap = two[1].at - two[0].at;
        assert!(gap >= Duration::from_millis(4990), "initiations {gap:?} apart");
        assert_ne!(two[0].payload[8..40], two[1].payload[8..40], "the same ephemeral key twice");
        assert_ne!(two[0].payload[4..8], two[1].payload[4..8], "the same index twice");
    }
}

/// The inner ECN bits show outside, the inner DSCP does not, in both IP versions.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-4
fn the_inner_dscp_stays_inside_and_ecn_shows() {
    if !ready(&[]) {
        return;
    }
    for outer in [Outer::V4, Outer::V6] {
        let pair = Pair::over(Program::Fv, Program::Fv, outer);
        pair.left.host.ping(RIGHT4, 1);
        for to in [RIGHT4, RIGHT6] {
            // Expedited forwarding with each ECN mark; congestion met inside is not carried outside.
            for (mark, shown) in [(0, 0), (1, 1), (2, 2), (3, 2)] {
                let wire = Capture::on(&pair.left.host, 51822);
                pair.left.host.run(&format!("ping -n -q -c 1 -W 1 -Q {} {to}", 0xb8 + mark));
                let sent = wire.seen(|seen| seen.is_data() && seen.from.port() == 51821);
                assert_eq!(sent.len(), 1);
                assert_eq!(sent[0].class, shown, "inner mark {mark} to {to} over {outer:?}");
            }
        }
    }
}
