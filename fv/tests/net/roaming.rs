//! Addresses and ports that change under a live session, and errors the network reports meanwhile.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::host::{Host, ready};
use crate::node::{Program, within};
use crate::pair::{LEFT4, Outer, Pair, RIGHT4, RIGHT6};
use crate::transfer::{alone, tcp};

/// The host's datagrams from port `from` leave it from port `to`, as behind a NAT that forgot.
#[track_caller]
pub(crate) fn move_port(host: &Host, from: u16, to: u16) {
    host.run("ethtool -K wire tx off");
    host.try_run("nft delete table inet move");
    host.run(&format!(
        "nft 'table inet move {{ \
           chain o {{ type filter hook output priority 300; udp sport {from} udp sport set {to}; }}; \
           chain i {{ type filter hook prerouting priority -300; udp dport {to} udp dport set {from}; }}; }}'"
    ));
}

/// F41: the next data message from another port moves the endpoint at once, without a handshake.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-IN-1
fn f41_the_next_message_from_another_port_moves_the_endpoint() {
    if !ready(&["nft", "ethtool"]) {
        return;
    }
    for outer in [Outer::V4, Outer::V6] {
        let pair = Pair::over(Program::Fv, Program::Fv, outer);
        pair.left.host.run("ethtool -K wire tx off");
        pair.right.host.ping(LEFT4, 1);
        let at = pair.left.node.peer(pair.right_key(), "latest-handshakes");
        for port in [40_001, 40_002, 40_003] {
            move_port(&pair.right.host, 51822, port);
            pair.right.host.ping(LEFT4, 1);
            let endpoint = pair.left.node.peer(pair.right_key(), "endpoints");
            assert!(endpoint.ends_with(&format!(":{port}")), "{endpoint} after a packet from port {port}");
            pair.left.host.ping(RIGHT6, 1);
        }
        assert_eq!(pair.left.node.peer(pair.right_key(), "latest-handshakes"), at, "a new session was made");
    }
}

/// F42: a transfer goes on while the sender's address changes under it.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-7
fn f42_a_transfer_goes_on_through_a_change_of_address() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    let _alone = alone();
    std::thread::scope(|scope| {
        let flow = scope.spawn(|| tcp(&pair.left.host, &pair.right.host, RIGHT4, 64 << 20));
        std::thread::sleep(Duration::from_millis(150));
        pair.left.host.ip("address add 10.66.0.11/32 dev wire");
        pair.left.host.ip("address delete 10.66.0.1/24 dev wire");
        pair.left.host.ip("address add 10.66.0.11/24 dev wire");
        flow.join().expect("the transfer");
    });
    pair.left.host.ping(RIGHT4, 2);
    assert_eq!(pair.right.node.peer(pair.left_key(), "endpoints"), "10.66.0.11:51821");
    pair.right.host.ping(LEFT4, 2);
}

/// F45: neither "port unreachable" nor "network unreachable" ends anything, and what was not sent is not counted.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-6
fn f45_unreachable_ports_and_networks_are_got_over() {
    if !ready(&[]) {
        return;
    }
    let mut pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    // The network goes away for a while: its route and the cable itself.
    let sent = |pair: &Pair| pair.left.node.transfer(pair.right_key()).1;
    let before = sent(&pair);
    pair.left.host.ip("link set wire down");
    assert_eq!(pair.left.host.pings(RIGHT4, 10), 0);
    assert!(pair.left.node.running(), "ended by an unreachable network");
    assert_eq!(sent(&pair), before, "counted what was not sent");
    pair.left.host.ip("link set wire up");
    assert!(within(Duration::from_secs(8), || pair.left.host.pings(RIGHT4, 1) == 1), "no way back");
    pair.right.host.ping(LEFT4, 1);
    // The peer's process goes away: its host answers with ICMP.
    pair.right.node.signal(Signal::SIGKILL);
    assert!(pair.right.node.ended(Duration::from_secs(3)).is_some());
    assert_eq!(pair.left.host.pings(RIGHT4, 20), 0);
    assert!(pair.left.node.running(), "ended by an unreachable port");
    pair.right.node.kill_and_restart(&pair.right.host);
    pair.right.node.wg(&format!("set listen-port 51822 private-key <(echo {})", pair.right.keys.private));
    pair.introduce(&pair.right, pair.endpoint_of_left(Outer::V4));
    pair.right.link_up(RIGHT4, RIGHT6, 1420);
    pair.right.host.ping(LEFT4, 2);
    pair.left.host.ping(RIGHT4, 2);
}

/// F47: an IPv4 address written as IPv6 is IPv4.
#[test]
#[ignore = "needs root: task test:net"]
fn f47_a_mapped_endpoint_is_an_ipv4_endpoint() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.node.wg(&format!("set peer {} endpoint [::ffff:10.66.0.2]:51822", pair.right_key()));
    assert_eq!(pair.left.node.peer(pair.right_key(), "endpoints"), "10.66.0.2:51822");
    pair.left.host.ping(RIGHT4, 2);
    assert_eq!(pair.left.node.peer(pair.right_key(), "endpoints"), "10.66.0.2:51822");
    assert_eq!(pair.right.node.peer(pair.left_key(), "endpoints"), "10.66.0.1:51821");
}

/// F48: setting the port that is in use already keeps the sockets and loses nothing.
#[test]
#[ignore = "needs root: task test:net"]
fn f48_setting_the_same_port_changes_nothing() {
    if !ready(&["ss"]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    let sockets = || {
        let text = pair.left.host.run("ss -Hluen 'sport = 51821'");
        let mut inodes: Vec<_> =
            text.split_whitespace().filter(|word| word.starts_with("ino:")).map(str::to_owned).collect();
        inodes.sort();
        inodes
    };
    let before = sockets();
    assert_eq!(before.len(), 2, "one socket for IPv4, one for IPv6");
    std::thread::scope(|scope| {
        let pings = scope.spawn(|| pair.left.host.run(&format!("ping -n -q -i 0.01 -c 200 -W 1 {RIGHT4}")));
        for _ in 0..20 {
            pair.left.node.wg("set listen-port 51821");
        }
        let text = pings.join().expect("pings");
        assert!(text.contains(" 200 received"), "{text}");
    });
    assert_eq!(sockets(), before, "the sockets were made anew");
}
