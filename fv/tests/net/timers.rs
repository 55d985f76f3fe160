//! When packets are sent without anybody asking, and when not: retries, keepalives, the link that is down.

use std::time::{Duration, Instant};

use crate::capture::{Capture, Seen};
use crate::host::ready;
use crate::node::{Program, within};
use crate::pair::{LEFT4, Outer, Pair, RIGHT4};

/// F28 and F27: one packet to a peer that is away is tried for 90 s, no longer; data after that starts afresh.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-TMR-1
//@test C-TMR-2
fn a_long_f28_retries_stop_and_f27_new_data_starts_afresh() {
    if !ready(&["nft"]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    let wire = Capture::on(&pair.left.host, 51822);
    pair.right.host.run("nft 'table inet lost { chain i { type filter hook prerouting priority -300; udp dport 51822 drop; }; }'");
    assert_eq!(pair.left.host.pings(RIGHT4, 1), 0);
    std::thread::sleep(Duration::from_secs(112));
    let tried = wire.seen(Seen::is_initiation);
    assert_eq!(tried.len(), 20, "initiations");
    for two in tried.windows(2) {
        let gap = two[1].at - two[0].at;
        assert!(
            (Duration::from_millis(4990)..Duration::from_millis(5600)).contains(&gap),
            "initiations {gap:?} apart"
        );
    }
    let quiet = tried[19].at.elapsed();
    assert!(quiet > Duration::from_secs(4), "given up only {quiet:?} ago");
    pair.right.host.run("nft delete table inet lost");
    pair.left.host.ping(RIGHT4, 2);
    let sent = wire.count(|seen| seen.is_data() && seen.from.port() == 51821);
    assert!(sent <= 3, "{sent} data messages: the packet that was given up must not come out of the past");
}

/// F29: a keepalive every second to a peer that is away means an initiation every five seconds, and no flood of log lines.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-TMR-3
fn f29_keepalives_to_an_absent_peer_flood_neither_wire_nor_log() {
    if !ready(&["nft"]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.right.host.run("nft 'table inet lost { chain i { type filter hook prerouting priority -300; udp dport 51822 drop; }; }'");
    let wire = Capture::on(&pair.left.host, 51822);
    let cpu = pair.left.node.cpu();
    pair.left.node.wg(&format!("set peer {} persistent-keepalive 1", pair.right_key()));
    std::thread::sleep(Duration::from_secs(24));
    let seen = wire.seen(|seen| seen.from.port() == 51821);
    let opened = seen.iter().filter(|seen| seen.is_initiation()).count();
    assert_eq!(seen.len(), opened, "only initiations may be sent");
    assert!((4..=5).contains(&opened), "{opened} initiations in 24 s");
    let lines = pair.left.node.log().lines().count();
    assert!(lines < 20, "{lines} lines in the log");
    let spent = pair.left.node.cpu() - cpu;
    assert!(spent < Duration::from_millis(200), "{spent:?} of processor time");
}

/// F33: a persistent keepalive of three seconds is an empty message every three seconds.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-TMR-6
fn f33_persistent_keepalives_are_sent_on_time() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    std::thread::sleep(Duration::from_millis(500));
    let wire = Capture::on(&pair.left.host, 51822);
    let (_, before) = pair.left.node.transfer(pair.right_key());
    pair.left.node.wg(&format!("set peer {} persistent-keepalive 3", pair.right_key()));
    std::thread::sleep(Duration::from_millis(19_500));
    let sent = wire.seen(|seen| seen.from.port() == 51821);
    assert!(sent.iter().all(Seen::is_keepalive), "only keepalives were due");
    // One at once when turned on, then one each 3 s; the peer's silence lets us send nothing else.
    assert!((6..=8).contains(&sent.len()), "{} keepalives in 19.5 s", sent.len());
    for two in sent.windows(2) {
        let gap = (two[1].at - two[0].at).as_secs_f64();
        assert!((2.9..=3.6).contains(&gap), "keepalives {gap} s apart");
    }
    let (_, after) = pair.left.node.transfer(pair.right_key());
    assert_eq!(after - before, 32 * sent.len() as u64);
}

/// F34 and F36: one packet received and nothing to answer brings one keepalive ten seconds later, and no answer to that.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-TMR-5
fn f36_one_packet_brings_one_keepalive_after_ten_seconds() {
    if !ready(&["nft"]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    // The ping's two sides both sent and received; wait until their own keepalives are over.
    std::thread::sleep(Duration::from_secs(12));
    pair.right.host.run("nft 'table inet mute { chain o { type filter hook output priority 0; icmp type echo-reply drop; }; }'");
    let wire = Capture::on(&pair.left.host, 51822);
    assert_eq!(pair.left.host.pings(RIGHT4, 1), 0);
    std::thread::sleep(Duration::from_secs(13));
    let seen = wire.seen(|_| true);
    let what: Vec<_> = seen.iter().map(|seen| (seen.from.port(), seen.payload.len())).collect();
    assert_eq!(what, [(51821, 128), (51822, 32)], "port and length of what was sent");
    let after = (seen[1].at - seen[0].at).as_secs_f64();
    assert!((9.9..=11.0).contains(&after), "the keepalive came after {after} s");
}

/// C-TMR-12: while the link is down nothing is sent and no socket is open; after that the tunnel works again.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-TMR-12
fn a_link_that_is_down_is_silent_and_comes_back() {
    if !ready(&["ss"]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.node.wg(&format!("set peer {} persistent-keepalive 1", pair.right_key()));
    pair.left.host.ping(RIGHT4, 1);
    let name = &pair.left.node.name;
    let sockets = || pair.left.host.run("ss -Hlun 'sport = 51821'").lines().count();
    assert_eq!(sockets(), 2, "one socket for IPv4, one for IPv6");
    pair.left.host.ip(&format!("link set {name} down"));
    assert!(within(Duration::from_secs(3), || sockets() == 0), "the sockets stay open");
    let wire = Capture::on(&pair.left.host, 51822);
    pair.right.host.try_run(&format!("ping -n -c 3 -i 0.3 -W 1 {LEFT4}"));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(wire.count(|seen| seen.from.port() == 51821), 0, "packets while down");
    assert_eq!(pair.left.node.wg("show listen-port"), "51821", "the port is remembered");
    let began = Instant::now();
    pair.left.host.ip(&format!("link set {name} up"));
    // The persistent keepalive is due at once and opens a session by itself.
    assert!(
        within(Duration::from_secs(5), || wire.count(|s| s.is_initiation() && s.from.port() == 51821) > 0)
    );
    assert!(began.elapsed() < Duration::from_secs(5));
    pair.left.host.ping(RIGHT4, 3);
    assert_eq!(pair.right.node.peer(pair.left_key(), "endpoints"), pair.endpoint_of_left(Outer::V4));
}
