//! The cases of the kernel's own WireGuard test in namespaces, by number (protocol.md lists them). The picture is
//! the kernel's: both programs run in the middle host, their interfaces are moved out to the hosts left and right,
//! and the encrypted packets go over the middle host's loopback.
//!
//! ```text
//!  ┌─ left ────────────┐   ┌─ middle ─────────┐   ┌─ right ───────────┐
//!  │ 192.168.241.1     │   │ lo: port 1       │   │ 192.168.241.2     │
//!  │ fd00::1      left ◄───┤     port 2       ├───► right     fd00::2 │
//!  └───────────────────┘   └──────────────────┘   └───────────────────┘
//! ```

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::capture::Capture;
use crate::host::{Host, ready, sh};
use crate::node::{Keys, Node, Program, within};
use crate::transfer::alone;

const LEFT4: &str = "192.168.241.1";
const LEFT6: &str = "fd00::1";
const RIGHT4: &str = "192.168.241.2";
const RIGHT6: &str = "fd00::2";

struct Trio {
    left: Node,
    right: Node,
    left_keys: Keys,
    right_keys: Keys,
    psk: String,
    left_host: Host,
    right_host: Host,
    middle: Host,
}

impl Trio {
    #[track_caller]
    fn new() -> Self {
        let (middle, left_host, right_host) = (Host::new("middle"), Host::new("left"), Host::new("right"));
        let trio = Self {
            left: Node::start(Program::Fv, &middle),
            right: Node::start(Program::Fv, &middle),
            left_keys: Keys::generate(),
            right_keys: Keys::generate(),
            psk: sh("wg genpsk"),
            left_host,
            right_host,
            middle,
        };
        for (node, host, v4) in
            [(&trio.left, &trio.left_host, LEFT4), (&trio.right, &trio.right_host, RIGHT4)]
        {
            trio.middle.ip(&format!("link set {} netns {}", node.name, host.name()));
            host.address(&node.name, &format!("{v4}/24"));
        }
        let (lk, rk, psk) = (&trio.left_keys, &trio.right_keys, &trio.psk);
        trio.left.wg(&format!(
            "set private-key <(echo {}) listen-port 10001 peer {} preshared-key <(echo {psk}) allowed-ips {RIGHT4}/32,{RIGHT6}/128",
            lk.private, rk.public
        ));
        trio.right.wg(&format!(
            "set private-key <(echo {}) listen-port 10002 peer {} preshared-key <(echo {psk}) allowed-ips {LEFT4}/32,{LEFT6}/128",
            rk.private, lk.public
        ));
        for (node, host, v6) in
            [(&trio.left, &trio.left_host, LEFT6), (&trio.right, &trio.right_host, RIGHT6)]
        {
            host.ip(&format!("link set {} up", node.name));
            host.address(&node.name, &format!("{v6}/24"));
        }
        trio
    }

    #[track_caller]
    fn endpoints(&self, left: &str, right: &str) {
        self.right.wg(&format!("set peer {} endpoint {left}", self.left_keys.public));
        self.left.wg(&format!("set peer {} endpoint {right}", self.right_keys.public));
    }

    #[track_caller]
    fn mtu(&self, mtu: u32) {
        self.left_host.ip(&format!("link set {} mtu {mtu}", self.left.name));
        self.right_host.ip(&format!("link set {} mtu {mtu}", self.right.name));
    }

    #[track_caller]
    fn flood_all(&self) {
        flood(&self.right_host, LEFT4);
        flood(&self.left_host, RIGHT4);
        flood(&self.right_host, LEFT6);
        flood(&self.left_host, RIGHT6);
    }

    #[track_caller]
    fn load_all(&self) {
        let _alone = alone();
        load(&self.left_host, &self.right_host, RIGHT4, "-n 20M");
        load(&self.right_host, &self.left_host, LEFT6, "-n 20M");
        load(&self.left_host, &self.right_host, RIGHT4, "-u -b 0 -n 20M");
        load(&self.right_host, &self.left_host, LEFT6, "-u -b 0 -n 20M");
        for streams in [4, 5, 50] {
            load(&self.left_host, &self.right_host, RIGHT4, &format!("-n 10M -P {streams}"));
        }
    }
}

/// Ten pings as fast as they are answered, each within a second.
#[track_caller]
fn flood(host: &Host, to: &str) {
    host.run(&format!("ping -n -q -c 10 -f -W 1 {to}"));
}

/// iperf3 from one host to the other, to the end and without an error.
#[track_caller]
pub(crate) fn load(from: &Host, to: &Host, address: &str, how: &str) {
    let mut server =
        to.command("timeout").args(["90", "iperf3", "-s", "-1", "-B", address]).spawn().expect("iperf3");
    let up =
        within(Duration::from_secs(5), || !to.run(&format!("ss -Hltn 'src [{address}]:5201'")).is_empty());
    assert!(up, "iperf3 does not listen");
    from.run(&format!("timeout 60 iperf3 -c {address} {how}"));
    server.wait().expect("iperf3");
}

/// N1: ten flood pings over IPv4 and IPv6, both ways, are all answered.
#[test]
#[ignore = "needs root: task test:net"]
fn n01_flood_pings_are_answered_both_ways() {
    if !ready(&[]) {
        return;
    }
    let trio = Trio::new();
    trio.endpoints("127.0.0.1:10001", "127.0.0.1:10002");
    trio.flood_all();
    trio.endpoints("[::1]:10001", "[::1]:10002");
    trio.flood_all();
}

/// N2: after the first ten pings the byte counters are exactly what the protocol says.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-6
//@test C-IN-7
fn n02_counters_after_the_first_pings_are_exact() {
    if !ready(&[]) {
        return;
    }
    let trio = Trio::new();
    trio.endpoints("127.0.0.1:10001", "127.0.0.1:10002");
    flood(&trio.right_host, LEFT4);
    let (received, sent) = trio.right.transfer(&trio.left_keys.public);
    assert_eq!(received, 92 + 10 * 128, "received by the side that pinged");
    assert!([148 + 10 * 128, 148 + 10 * 128 + 32].contains(&sent), "sent by the side that pinged: {sent}");
    assert_eq!(trio.left.transfer(&trio.right_keys.public), (sent, received), "the mirror on the other side");
}

/// N3: the time of the latest handshake is nothing before and about now after the first ping.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-SES-9
fn n03_latest_handshake_is_zero_before_and_now_after() {
    if !ready(&[]) {
        return;
    }
    let trio = Trio::new();
    trio.endpoints("127.0.0.1:10001", "127.0.0.1:10002");
    assert_eq!(trio.left.peer(&trio.right_keys.public, "latest-handshakes"), "0");
    flood(&trio.left_host, RIGHT4);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    for (node, peer) in [(&trio.left, &trio.right_keys), (&trio.right, &trio.left_keys)] {
        let at: u64 = node.peer(&peer.public, "latest-handshakes").parse().expect("seconds");
        assert!(now.abs_diff(at) <= 2, "handshake at {at}, now {now}");
    }
}

/// N4: TCP and UDP loads over both IP versions, with up to fifty streams, run to their end.
#[test]
#[ignore = "needs root: task test:net"]
fn n04_loads_of_many_kinds_run_to_their_end() {
    if !ready(&["iperf3", "ss"]) {
        return;
    }
    let trio = Trio::new();
    trio.endpoints("127.0.0.1:10001", "127.0.0.1:10002");
    trio.load_all();
    trio.endpoints("[::1]:10001", "[::1]:10002");
    trio.load_all();
}

/// N5: all of that with an interface MTU near 35 000 bytes.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-5
fn n05_a_huge_mtu_changes_nothing() {
    if !ready(&["iperf3", "ss"]) {
        return;
    }
    let trio = Trio::new();
    trio.endpoints("127.0.0.1:10001", "127.0.0.1:10002");
    trio.mtu(65535 - 20 - 8 - 32 - 30741); // 34 734, what the kernel's test comes to
    trio.flood_all();
    trio.load_all();
    trio.endpoints("[::1]:10001", "[::1]:10002");
    trio.flood_all();
    trio.load_all();
}

/// N7: after a change of local address and port the other side follows.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-IN-1
fn n07_the_peer_follows_a_new_address_and_port() {
    if !ready(&[]) {
        return;
    }
    let trio = Trio::new();
    trio.endpoints("127.0.0.1:10001", "127.0.0.1:10002");
    trio.left_host.ping(RIGHT4, 1);
    trio.middle.ip("address delete 127.0.0.1/8 dev lo");
    trio.middle.address("lo", "127.212.121.99/8");
    trio.left.wg("set listen-port 9999");
    trio.left.wg(&format!("set peer {} endpoint 127.0.0.1:10002", trio.right_keys.public));
    trio.left_host.ping(RIGHT4, 1);
    assert_eq!(trio.right.peer(&trio.left_keys.public, "endpoints"), "127.212.121.99:9999");
    trio.left.wg("set listen-port 9998");
    trio.left.wg(&format!("set peer {} endpoint [::1]:10002", trio.right_keys.public));
    trio.left_host.ping(RIGHT4, 1);
    assert_eq!(trio.right.peer(&trio.left_keys.public, "endpoints"), "[::1]:9998");
}

/// N8: a packet whose inner source belongs to another peer is dropped, but as it was authentic its sender is followed.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-IN-4
//@test C-IN-1
fn n08_crypto_rp_filter_drops_but_endpoint_roams() {
    if !ready(&["socat"]) {
        return;
    }
    let trio = Trio::new();
    trio.endpoints("127.0.0.1:10001", "127.0.0.1:10002");
    trio.left.wg(&format!("set peer {} allowed-ips 192.168.241.0/24", trio.right_keys.public));
    let arrives = || {
        let mut heard = trio
            .left_host
            .command("timeout")
            .args(["1.5", "socat", "-u", "UDP-RECV:1111", "STDOUT"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("socat");
        let open = || !trio.left_host.run("ss -Hlun 'sport = 1111'").is_empty();
        assert!(within(Duration::from_secs(1), open), "socat does not listen");
        trio.right_host.run(&format!("echo X | socat -u STDIN UDP-SENDTO:{LEFT4}:1111"));
        let mut text = String::new();
        std::io::Read::read_to_string(heard.stdout.as_mut().expect("piped"), &mut text).expect("read");
        heard.wait().expect("socat");
        text.starts_with('X')
    };
    assert!(arrives(), "the allowed packet must arrive");
    let other = Keys::generate();
    trio.left.wg(&format!("set peer {} allowed-ips {RIGHT4}/32", other.public));
    trio.right.wg("set listen-port 9997");
    assert!(!arrives(), "the packet from a stolen address must not arrive");
    assert_eq!(trio.left.peer(&trio.right_keys.public, "endpoints"), "127.0.0.1:9997");
}

/// N9: a new private key works at once, without waiting out the handshake interval.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-HS-10
fn n09_a_changed_private_key_handshakes_at_once() {
    if !ready(&[]) {
        return;
    }
    let trio = Trio::new();
    trio.endpoints("127.0.0.1:10001", "127.0.0.1:10002");
    trio.left_host.ping(RIGHT4, 1);
    let new = Keys::generate();
    trio.left.wg(&format!("set private-key <(echo {})", new.private));
    trio.right.wg(&format!(
        "set peer {} preshared-key <(echo {}) allowed-ips {LEFT4}/32 peer {} remove",
        new.public, trio.psk, trio.left_keys.public
    ));
    trio.left_host.ping(RIGHT4, 1);
}

/// N10: a tunnel inside the tunnel carries everything.
#[test]
#[ignore = "needs root: task test:net"]
fn n10_a_tunnel_inside_a_tunnel_carries_everything() {
    if !ready(&["iperf3", "ss"]) {
        return;
    }
    let outer = Trio::new();
    outer.endpoints("127.0.0.1:10001", "127.0.0.1:10002");
    let inner = inner_tunnel(&outer);
    outer.left_host.ping("192.168.242.2", 10);
    outer.right_host.ping("fd01::1", 10);
    let _alone = alone();
    load(&outer.left_host, &outer.right_host, "192.168.242.2", "-n 20M");
    load(&outer.right_host, &outer.left_host, "fd01::1", "-n 20M -P 4");
    load(&outer.left_host, &outer.right_host, "192.168.242.2", "-u -b 0 -n 10M");
    drop(inner);
}

/// Interfaces 192.168.242.1/2 and fd01::1/2, MTU 1340, whose packets go through the tunnel of `outer`.
#[track_caller]
fn inner_tunnel(outer: &Trio) -> (Node, Node) {
    let (left, right) =
        (Node::start(Program::Fv, &outer.left_host), Node::start(Program::Fv, &outer.right_host));
    let (lk, rk) = (Keys::generate(), Keys::generate());
    for (node, host, own, peer, port, n, endpoint) in [
        (&left, &outer.left_host, &lk, &rk, 10003, 1, format!("{RIGHT4}:10004")),
        (&right, &outer.right_host, &rk, &lk, 10004, 2, format!("{LEFT4}:10003")),
    ] {
        let m = 3 - n;
        node.wg(&format!(
            "set private-key <(echo {}) listen-port {port} peer {} endpoint {endpoint} allowed-ips 192.168.242.{m}/32,fd01::{m}/128",
            own.private, peer.public
        ));
        host.address(&node.name, &format!("192.168.242.{n}/24"));
        host.ip(&format!("link set {} mtu 1340 up", node.name));
        host.address(&node.name, &format!("fd01::{n}/64"));
    }
    (left, right)
}

/// N10: two tunnels routed through each other do not start a storm, neither while each keeps to the way that its
/// peer answered on nor once the endpoints are set anew.
#[test]
#[ignore = "needs root: task test:net"]
fn n10_a_routing_loop_starts_no_storm() {
    if !ready(&[]) {
        return;
    }
    for set_anew in [false, true] {
        storm(set_anew);
    }
}

fn storm(set_anew: bool) {
    let near = Host::new("near");
    let far = Host::new("far");
    near.cable("wire", &["10.66.0.1/24", "10.66.1.1/24"], &far, &["10.66.0.2/24", "10.66.1.2/24"]);
    // Two tunnels with live sessions, each to an address of its own on the far side.
    let mut nodes = Vec::new();
    for n in 0..2_u16 {
        let (a, b) = (Node::start(Program::Fv, &near), Node::start(Program::Fv, &far));
        let (ak, bk) = (Keys::generate(), Keys::generate());
        a.wg(&format!(
            "set private-key <(echo {}) listen-port 5000{n} peer {} endpoint 10.66.{n}.2:6000{n} allowed-ips 0.0.0.0/0",
            ak.private, bk.public
        ));
        b.wg(&format!(
            "set private-key <(echo {}) listen-port 6000{n} peer {} allowed-ips 0.0.0.0/0",
            bk.private, ak.public
        ));
        for (node, host, last) in [(&a, &near, 1), (&b, &far, 2)] {
            host.address(&node.name, &format!("192.168.{}.{last}/24", 10 + n));
            host.ip(&format!("link set {} up", node.name));
        }
        near.ping(&format!("192.168.{}.2", 10 + n), 1);
        nodes.push((a, b, bk));
    }
    near.ip(&format!("route add 10.66.0.2/32 dev {}", nodes[1].0.name));
    near.ip(&format!("route add 10.66.1.2/32 dev {}", nodes[0].0.name));
    if set_anew {
        for (n, (a, _, key)) in nodes.iter().enumerate() {
            a.wg(&format!("set peer {} endpoint 10.66.{n}.2:6000{n}", key.public));
        }
    }
    let sent = || nodes.iter().map(|(a, _, key)| a.transfer(&key.public).1).sum::<u64>();
    let before = sent();
    near.pings("192.168.10.2", 10);
    std::thread::sleep(Duration::from_secs(1));
    let grown = sent() - before;
    assert!(grown < 2 * 70_000, "{grown} bytes sent round the loop");
    // And the programs still answer, and work again when the loop is gone.
    near.ip(&format!("route delete 10.66.0.2/32 dev {}", nodes[1].0.name));
    near.ip(&format!("route delete 10.66.1.2/32 dev {}", nodes[0].0.name));
    assert!(within(Duration::from_secs(20), || near.pings("192.168.10.2", 1) == 1), "dead after the loop");
}

/// N11: with persistent keepalives a peer behind a NAT with short memory stays reachable from outside.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-TMR-6
fn n11_keepalives_hold_a_nat_open() {
    if !ready(&["nft"]) {
        return;
    }
    let (client, router, server) = (Host::new("client"), Host::new("router"), Host::new("server"));
    client.cable("lan", &["192.168.1.100/24"], &router, &["192.168.1.1/24"]);
    router.cable("wan", &["10.0.0.1/24"], &server, &["10.0.0.100/24"]);
    client.ip("route add default via 192.168.1.1");
    router.run("sysctl -qw net.ipv4.ip_forward=1");
    router.run("nft 'table ip n { chain p { type nat hook postrouting priority 100; ip saddr 192.168.1.0/24 oifname wan masquerade random; }; }'");
    router.run(
        "sysctl -qw net.netfilter.nf_conntrack_udp_timeout=2 net.netfilter.nf_conntrack_udp_timeout_stream=2",
    );
    let (c, s) = (Node::start(Program::Fv, &client), Node::start(Program::Fv, &server));
    let (ck, sk) = (Keys::generate(), Keys::generate());
    s.wg(&format!(
        "set private-key <(echo {}) listen-port 10002 peer {} allowed-ips 192.168.241.1/32",
        sk.private, ck.public
    ));
    server.address(&s.name, "192.168.241.2/24");
    server.ip(&format!("link set {} up", s.name));
    c.wg(&format!(
        "set private-key <(echo {}) peer {} endpoint 10.0.0.100:10002 persistent-keepalive 1 allowed-ips 192.168.241.2/32",
        ck.private, sk.public
    ));
    client.address(&c.name, "192.168.241.1/24");
    client.ip(&format!("link set {} up", c.name));
    client.ping("192.168.241.2", 1);
    std::thread::sleep(Duration::from_secs(3)); // longer than the router remembers
    server.ping("192.168.241.1", 1);
    let seen = s.peer(&ck.public, "endpoints");
    assert!(seen.starts_with("10.0.0.1:"), "the server sees the router, not {seen}");
}

/// N12: a ping bound to the interface works, with and without a firewall mark on the packets.
#[test]
#[ignore = "needs root: task test:net"]
fn n12_a_ping_bound_to_the_interface_works() {
    if !ready(&["nft"]) {
        return;
    }
    let trio = Trio::new();
    trio.endpoints("127.0.0.1:10001", "127.0.0.1:10002");
    let ping = format!("ping -n -q -c 1 -W 1 -I {} {RIGHT4}", trio.left.name);
    trio.left_host.run(&ping);
    trio.left_host
        .run("nft 'table ip m { chain o { type route hook output priority -150; meta mark set 1; }; }'");
    trio.left_host.run(&ping);
    trio.left_host.run("nft delete table ip m");
    trio.left_host.run(&ping);
}

/// N13: a peer whose endpoint lies behind another peer of the same interface is reached; one whose endpoint lies
/// inside its own allowed IPs is not, and costs nothing.
#[test]
#[ignore = "needs root: task test:net"]
fn n13_onion_works_and_a_self_loop_does_not_spin() {
    if !ready(&[]) {
        return;
    }
    let (here, next, last) = (Host::new("here"), Host::new("next"), Host::new("last"));
    here.cable("wire", &["10.66.0.1/24"], &next, &["10.66.0.2/24"]);
    next.cable("back", &["10.66.1.2/24"], &last, &["10.66.1.3/24"]);
    next.run("sysctl -qw net.ipv4.ip_forward=1");
    last.ip("route add default via 10.66.1.2");
    let (a, b, c) =
        (Node::start(Program::Fv, &here), Node::start(Program::Fv, &next), Node::start(Program::Fv, &last));
    let (ak, bk, ck) = (Keys::generate(), Keys::generate(), Keys::generate());
    // The endpoint of `last`, 10.66.1.3, is reached through `next`, over the same interface.
    a.wg(&format!(
        "set private-key <(echo {}) listen-port 50001 peer {} endpoint 10.66.0.2:50002 allowed-ips 192.168.99.2/32,10.66.1.0/24 peer {} endpoint 10.66.1.3:50003 allowed-ips 192.168.99.3/32",
        ak.private, bk.public, ck.public
    ));
    b.wg(&format!(
        "set private-key <(echo {}) listen-port 50002 peer {} allowed-ips 192.168.99.1/32,10.66.2.1/32",
        bk.private, ak.public
    ));
    c.wg(&format!(
        "set private-key <(echo {}) listen-port 50003 peer {} allowed-ips 192.168.99.1/32",
        ck.private, ak.public
    ));
    for (node, host, n) in [(&a, &here, 1), (&b, &next, 2), (&c, &last, 3)] {
        host.address(&node.name, &format!("192.168.99.{n}/24"));
        host.ip(&format!("link set {} up", node.name));
    }
    // What goes to `last` outside has an address of its own, which `last` answers by way of `next`.
    here.address(&a.name, "10.66.2.1/32");
    here.ip(&format!("route add 10.66.1.0/24 dev {} src 10.66.2.1", a.name));
    next.ip(&format!("route add 10.66.2.1/32 dev {}", b.name));
    here.ping("192.168.99.2", 1);
    here.ping("192.168.99.3", 3);
    // Now the first hop's endpoint itself is routed into the tunnel.
    a.wg(&format!("set peer {} allowed-ips 192.168.99.2/32,10.66.0.0/16", bk.public));
    here.ip(&format!("route add 10.66.0.2/32 dev {}", a.name));
    a.wg(&format!("set peer {} endpoint 10.66.0.2:50002", bk.public));
    let (cpu, sent) = (a.cpu(), a.transfer(&bk.public).1);
    assert_eq!(here.pings("192.168.99.2", 5), 0, "a loop cannot answer");
    std::thread::sleep(Duration::from_secs(1));
    let (spent, grown) = (a.cpu() - cpu, a.transfer(&bk.public).1 - sent);
    assert!(spent < Duration::from_millis(500), "the loop cost {spent:?} of processor time");
    assert!(grown < 70_000, "{grown} bytes sent round the loop");
    here.ip(&format!("route delete 10.66.0.2/32 dev {}", a.name));
    assert!(within(Duration::from_secs(20), || here.pings("192.168.99.2", 1) == 1), "dead after the loop");
}

/// N14: the default-route set-up of wg-quick: marked packets go outside, all others through the tunnel.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-8
fn n14_policy_routing_as_wg_quick_sets_it_up() {
    if !ready(&[]) {
        return;
    }
    let (left, right) = (Host::new("left"), Host::new("right"));
    left.cable("wire", &["10.0.0.1/24", "fd00:aa::1/64"], &right, &["10.0.0.2/24", "fd00:aa::2/64"]);
    let (l, r) = (Node::start(Program::Fv, &left), Node::start(Program::Fv, &right));
    let (lk, rk) = (Keys::generate(), Keys::generate());
    l.wg(&format!(
        "set private-key <(echo {}) listen-port 10001 fwmark 51820 peer {} endpoint 10.0.0.2:10002 allowed-ips 0.0.0.0/0,::/0",
        lk.private, rk.public
    ));
    r.wg(&format!(
        "set private-key <(echo {}) listen-port 10002 peer {} allowed-ips 192.168.241.1/32,fd01::1/128",
        rk.private, lk.public
    ));
    left.address(&l.name, "192.168.241.1/32");
    right.address(&r.name, "192.168.241.2/24");
    // The right one first: the left one's own IPv6 packets open a session as soon as its link is up.
    for (node, host) in [(&r, &right), (&l, &left)] {
        host.ip(&format!("link set {} up", node.name));
    }
    left.address(&l.name, "fd01::1/128");
    right.address(&r.name, "fd01::2/64");
    for family in ["-4", "-6"] {
        left.ip(&format!("{family} route add default dev {} table 51820", l.name));
        left.ip(&format!("{family} rule add not fwmark 51820 table 51820"));
        left.ip(&format!("{family} rule add table main suppress_prefixlength 0"));
    }
    // Without the mark the encrypted packets would go into the tunnel again.
    left.run("ping -n -q -c 100 -f -W 1 192.168.241.2");
    left.run("ping -n -q -c 100 -f -W 1 fd01::2");
    right.run("ping -n -q -c 100 -f -W 1 192.168.241.1");
    right.run("ping -n -q -c 100 -f -W 1 fd01::1");
    // The same over IPv6 outside: the mark is on that socket too.
    l.wg(&format!("set peer {} endpoint [fd00:aa::2]:10002", rk.public));
    left.run("ping -n -q -c 100 -f -W 1 192.168.241.2");
    assert_eq!(r.peer(&lk.public, "endpoints"), "[fd00:aa::1]:10001");
}

/// N15: who sends into a tunnel that has no peer for it, or no endpoint, is told: this host, and one behind it.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-3
fn n15_senders_without_a_peer_are_told() {
    if !ready(&[]) {
        return;
    }
    let (client, router) = (Host::new("client"), Host::new("router"));
    client.cable("lan", &["192.168.1.100/24", "fd01::100/64"], &router, &["192.168.1.1/24", "fd01::1/64"]);
    client.ip("route add default via 192.168.1.1");
    client.ip("-6 route add default via fd01::1");
    router.run("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
    let node = Node::start(Program::Fv, &router);
    let peer = Keys::generate();
    node.wg(&format!(
        "set private-key <(wg genkey) peer {} allowed-ips 192.168.241.2/32,fd00::2/128",
        peer.public
    ));
    router.address(&node.name, "192.168.241.1/24");
    router.address(&node.name, "fd00::1/64");
    router.ip(&format!("link set {} up", node.name));
    for host in [&router, &client] {
        // No endpoint, and no peer.
        for (to, said) in [
            ("192.168.241.2", "Destination Host Unreachable"),
            ("192.168.241.3", "Destination Host Unreachable"),
            ("fd00::2", "Destination unreachable: Address unreachable"),
            ("fd00::3", "Destination unreachable: Address unreachable"),
        ] {
            let told = || {
                let output = host.try_run(&format!("ping -n -c 1 -W 2 {to}"));
                String::from_utf8_lossy(&output.stdout).contains(said)
            };
            assert!(within(Duration::from_secs(5), told), "{} was not told of {to}", host.name());
        }
    }
}

/// N19: very many allowed IPs on one peer, and rows of peers with fifty each.
#[test]
#[ignore = "needs root: task test:net"]
fn n19_very_large_configurations_are_kept_and_shown() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let node = Node::start(Program::Fv, &host);
    let key = || Keys::generate().public;
    let mut config = format!("[Peer]\nPublicKey = {}\n", key());
    for i in 1..=255 {
        for j in 0..=255 {
            config += &format!("AllowedIPs = {i}.{j}.0.0/16,{i:x}:{j:x}::/128\n");
        }
    }
    let file = std::env::temp_dir().join(format!("{}.conf", node.name));
    let words = |text: &str| text.split_whitespace().count();
    std::fs::write(&file, &config).expect("write");
    node.wg(&format!("setconf {}", file.display()));
    let shown = node.wg("show allowed-ips");
    assert_eq!((shown.lines().count(), words(&shown)), (1, 255 * 256 * 2 + 1));

    for (peers, each) in [(40, 52), (30, 52)] {
        config.clear();
        for p in 0..peers {
            config += &format!("[Peer]\nPublicKey = {}\nAllowedIPs = ", key());
            let ips: Vec<String> =
                (0..each / 2).map(|n| format!("10.{p}.{n}.1/32,fd00:{p:x}:{n:x}::/48")).collect();
            config += &ips.join(",");
            config.push('\n');
        }
        std::fs::write(&file, &config).expect("write");
        node.wg(&format!("setconf {}", file.display()));
        let shown = node.wg("show allowed-ips");
        assert_eq!(shown.lines().count(), peers);
        for line in shown.lines() {
            assert_eq!(words(line), each + 1, "{line}");
        }
        assert_eq!(node.wg("showconf").matches("[Peer]").count(), peers);
    }
    std::fs::remove_file(file).expect("remove");
}

/// N20: a peer without allowed IPs shows "(none)", another all of its 197.
#[test]
#[ignore = "needs root: task test:net"]
fn n20_a_peer_without_allowed_ips_shows_none() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let node = Node::start(Program::Fv, &host);
    let (empty, full) = (Keys::generate().public, Keys::generate().public);
    let ips: Vec<String> = (1..=197).map(|n| format!("abcd:{n:x}::/128")).collect();
    node.wg(&format!("set peer {empty} peer {full} allowed-ips {}", ips.join(",")));
    assert_eq!(node.peer(&empty, "allowed-ips"), "(none)");
    assert_eq!(node.peer(&full, "allowed-ips").split(' ').count(), 197);
}

/// N21: single allowed IPs of both families can be taken away from a long list.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-AIP-2
fn n21_single_allowed_ips_can_be_removed() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let node = Node::start(Program::Fv, &host);
    let peer = Keys::generate();
    let ips: Vec<String> = (1..=197).map(|n| format!("192.168.0.{n}/32,abcd::{n:x}/128")).collect();
    node.wg(&format!("set peer {} allowed-ips {}", peer.public, ips.join(",")));
    let gone = [
        "192.168.0.1/32",
        "192.168.0.20/32",
        "192.168.0.100/32",
        "abcd::1/128",
        "abcd::14/128",
        "abcd::64/128",
    ];
    // This `wg` has no word for it yet, so the request is written by hand.
    let lines: String = gone.iter().map(|ip| format!("allowed_ip=-{ip}\n")).collect();
    let hex = sh(&format!("base64 -d <<<{} | od -An -v -tx1 | tr -d ' \\n'", peer.public));
    assert_eq!(node.uapi(&format!("set=1\npublic_key={hex}\nupdate_only=true\n{lines}\n")), "errno=0\n\n");
    let left = node.peer(&peer.public, "allowed-ips");
    let left: Vec<&str> = left.split(' ').collect();
    assert_eq!(left.len(), 388);
    assert!(gone.iter().all(|ip| !left.contains(ip)), "some were not removed");
}

/// N22: asking about an interface that is not there fails.
#[test]
#[ignore = "needs root: task test:net"]
fn n22_showing_an_unknown_interface_fails() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let mut node = Node::start(Program::Fv, &host);
    node.wg("show");
    node.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(node.ended(Duration::from_secs(3)).is_some(), "it does not stop");
    assert!(!node.try_wg("show").status.success(), "it is gone, yet shown");
}

/// N23: private and preshared keys can be cleared.
#[test]
#[ignore = "needs root: task test:net"]
fn n23_keys_can_be_cleared() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let node = Node::start(Program::Fv, &host);
    let (own, peer, psk) = (Keys::generate(), Keys::generate(), sh("wg genpsk"));
    node.wg(&format!(
        "set private-key <(echo {}) peer {} preshared-key <(echo {psk})",
        own.private, peer.public
    ));
    assert_eq!(node.wg("show private-key"), own.private);
    assert_eq!(node.wg("show public-key"), own.public);
    assert_eq!(node.peer(&peer.public, "preshared-keys"), psk);
    node.wg(&format!("set private-key /dev/null peer {} preshared-key /dev/null", peer.public));
    assert_eq!(node.wg("show private-key"), "(none)");
    assert_eq!(node.peer(&peer.public, "preshared-keys"), "(none)");
}

/// N24: a device is never its own peer.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-HS-11
//@test C-HS-10
fn n24_a_device_is_never_its_own_peer() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let node = Node::start(Program::Fv, &host);
    let (one, two) = (Keys::generate(), Keys::generate());
    node.wg(&format!("set private-key <(echo {}) peer {}", one.private, two.public));
    assert_eq!(node.wg("show peers"), two.public);
    node.wg(&format!("set private-key <(echo {})", two.private));
    assert_eq!(node.wg("show peers"), "", "the peer with our new key goes");
    node.wg(&format!("set peer {}", two.public));
    assert_eq!(node.wg("show peers"), "", "our own key is not taken as a peer");
    node.wg(&format!("set private-key <(echo {}) peer {}", one.private, two.public));
    assert_eq!(node.wg("show peers"), two.public);
}

/// N25: a private key is clamped when it is set.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-PRIM-5
fn n25_a_private_key_reads_back_clamped() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let node = Node::start(Program::Fv, &host);
    let key = Keys::generate().private;
    node.wg(&format!("set private-key <(echo /{})", &key[1..]));
    assert_eq!(node.wg("show private-key"), format!("+{}", &key[1..]));
}

/// N26: nested prefixes may be replaced over and over.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-AIP-3
fn n26_nested_allowed_ips_can_be_replaced_repeatedly() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let node = Node::start(Program::Fv, &host);
    let peer = Keys::generate().public;
    for ips in [
        "0.0.0.0/0,::/0",
        "0.0.0.0/0",
        "10.0.0.0/8,10.0.0.0/16,10.0.0.0/24",
        "10.0.0.0/24",
        "10.0.0.0/24,10.0.0.0/8",
        "10.0.0.0/25,10.0.0.128/25,10.0.0.0/24",
        "::/0,::/1,8000::/1",
        "fd00::/8,fd00::/16,fd00::1/128",
        "0.0.0.0/0,1.0.0.0/8,1.1.0.0/16",
    ] {
        node.wg(&format!("set peer {peer} allowed-ips {ips}"));
        let mut have: Vec<String> = node.peer(&peer, "allowed-ips").split(' ').map(str::to_owned).collect();
        let mut want: Vec<String> = ips.split(',').map(str::to_owned).collect();
        have.sort();
        want.sort();
        assert_eq!(have, want);
    }
    node.wg(&format!("set peer {peer} allowed-ips ''"));
    assert_eq!(node.peer(&peer, "allowed-ips"), "(none)");
}

/// N27: peers whose public key is of low order are listed, but nothing is ever sent to them.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-PRIM-4
fn n27_nothing_is_sent_to_peers_with_low_order_keys() {
    const LOW: [&str; 7] = [
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
        "AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
        "4Ot6fDtBuK4WVuP68Z/EatoJjeucMrH9hmIFFl9JuAA=",
        "X5yVvKNQjCSx0LFVnIPvWwREXMRYHI6G2CJO3dCfEVc=",
        "7P///////////////////////////////////////38=",
        "7f///////////////////////////////////////38=",
        "7v///////////////////////////////////////38=",
    ];
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let node = Node::start(Program::Fv, &host);
    let capture = Capture::on(&host, 0);
    node.wg(&format!("set private-key <(echo {}) listen-port 10001", Keys::generate().private));
    host.ip(&format!("link set {} up", node.name));
    for key in LOW {
        node.wg(&format!(
            "set peer {key} persistent-keepalive 1 endpoint 127.0.0.1:1111 allowed-ips 10.9.0.0/24"
        ));
    }
    let shown = node.wg("show peers");
    assert!(LOW.iter().all(|key| shown.contains(key)), "not all are listed: {shown}");
    let began = Instant::now();
    std::thread::sleep(Duration::from_secs(2));
    let sent = capture.seen(|seen| seen.to.port() == 1111);
    assert!(sent.is_empty(), "{} packets in {:?}", sent.len(), began.elapsed());
}
