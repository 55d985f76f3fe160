//! The control socket under real conditions: changes on a live tunnel, two clients, errors, a busy data path.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::capture::{Capture, Seen};
use crate::host::{Host, ready, sh};
use crate::node::{Keys, Node, Program, within};
use crate::pair::{LEFT4, Pair, RIGHT4, RIGHT6};

/// A base64 key as the socket wants it.
#[track_caller]
fn hex(base64: &str) -> String {
    sh(&format!("base64 -d <<<{base64} | od -An -v -tx1 | tr -d ' \\n'"))
}

/// F61: each setting of a live peer can be changed, by itself and twice, and the session stays.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-HS-8
fn f61_changes_of_a_live_peer_are_applied_and_keep_the_session() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    let wire = Capture::on(&pair.left.host, 51822);
    pair.left.host.ping(RIGHT4, 1);
    let (node, peer) = (&pair.left.node, pair.right_key());
    let at = node.peer(peer, "latest-handshakes");
    let new_psk = sh("wg genpsk");
    for (change, field, shown) in [
        ("endpoint [fd66::2]:51822".into(), "endpoints", "[fd66::2]:51822"),
        ("endpoint 10.66.0.2:51822".into(), "endpoints", "10.66.0.2:51822"),
        ("persistent-keepalive 17".into(), "persistent-keepalive", "17"),
        ("persistent-keepalive off".into(), "persistent-keepalive", "off"),
        (format!("preshared-key <(echo {new_psk})"), "preshared-keys", new_psk.as_str()),
        (format!("preshared-key <(echo {})", pair.psk), "preshared-keys", pair.psk.as_str()),
        ("allowed-ips 0.0.0.0/0,::/0".into(), "allowed-ips", "0.0.0.0/0 ::/0"),
        (format!("allowed-ips {RIGHT4}/32"), "allowed-ips", "10.67.0.2/32"),
    ] {
        for _ in 0..2 {
            node.wg(&format!("set peer {peer} {change}"));
            assert_eq!(node.peer(peer, field), shown, "after {change}");
            assert_eq!(pair.left.host.pings(RIGHT4, 1), 1, "a ping after {change}");
        }
    }
    assert_eq!(node.peer(peer, "latest-handshakes"), at, "a new session was made");
    assert_eq!(wire.count(Seen::is_initiation), 1, "initiations");
}

/// F62: a thousand changes by two clients at once, under traffic, all succeed.
#[test]
#[ignore = "needs root: task test:net"]
fn f62_a_thousand_changes_by_two_clients_all_succeed() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    let key = hex(pair.right_key());
    std::thread::scope(|scope| {
        let pings = scope.spawn(|| pair.left.host.run(&format!("ping -n -q -i 0.005 -c 400 -W 2 {RIGHT4}")));
        for seconds in [20, 30] {
            let (node, key) = (&pair.left.node, &key);
            scope.spawn(move || {
                for n in 0..500 {
                    let reply = node.uapi(&format!(
                        "set=1\npublic_key={key}\nendpoint=10.66.0.2:51822\npersistent_keepalive_interval={}\n\n",
                        seconds + n % 2
                    ));
                    assert_eq!(reply, "errno=0\n\n", "change {n}");
                }
            });
        }
        let text = pings.join().expect("pings");
        assert!(text.contains(" 400 received"), "{text}");
    });
}

/// F63 and F64: `get` names the private key, and the last handshake as a time of day with nanoseconds.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-SES-9
fn f63_get_gives_the_private_key_and_handshake_times() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    let field = |name: &str| {
        let text = pair.left.node.uapi("get=1\n\n");
        let found =
            text.lines().find_map(|line| line.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')));
        found.unwrap_or_else(|| panic!("no {name} in {text}")).to_owned()
    };
    assert_eq!(field("private_key"), hex(&pair.left.keys.private));
    assert_eq!(
        (field("last_handshake_time_sec"), field("last_handshake_time_nsec")),
        ("0".into(), "0".into())
    );
    pair.left.host.ping(RIGHT4, 1);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let at: u64 = field("last_handshake_time_sec").parse().expect("seconds");
    assert!(now.abs_diff(at) <= 2, "{at}, now {now}");
    let nanos: u32 = field("last_handshake_time_nsec").parse().expect("nanoseconds");
    assert!((1..1_000_000_000).contains(&nanos), "{nanos}");
    assert_eq!(field("protocol_version"), "1");
    assert_eq!(field("errno"), "0");
}

/// F65: the firewall mark is on the sockets of both IP versions, shown, kept through a change of port, and taken off.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-8
fn f65_the_firewall_mark_is_on_every_socket() {
    if !ready(&["ss", "nft"]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    let marks = |port: u16| {
        let text = pair.left.host.run(&format!("ss -Hluen 'sport = {port}'"));
        text.lines().filter(|line| line.contains("fwmark:0xca6c")).count()
    };
    // What counts is the mark on the packets, not what the program says.
    pair.left.host.run("nft 'table inet count { counter marked { }; chain o { type filter hook output priority 0; meta l4proto udp meta mark 0xca6c counter name marked; }; }'");
    let marked = || {
        let text = pair.left.host.run("nft list counter inet count marked");
        let packets = text.split_whitespace().skip_while(|word| *word != "packets").nth(1).expect("a count");
        packets.parse::<u32>().expect("a number")
    };
    pair.left.host.ping(RIGHT4, 2);
    assert_eq!((marks(51821), marked()), (0, 0));
    pair.left.node.wg("set fwmark 0xca6c");
    assert_eq!(pair.left.node.wg("show fwmark"), "0xca6c");
    assert_eq!(marks(51821), 2);
    pair.left.host.ping(RIGHT4, 2);
    assert!(marked() >= 2, "packets carry no mark");
    pair.left.node.wg("set listen-port 51841");
    assert_eq!(marks(51841), 2, "lost when the port changed");
    let name = &pair.left.node.name;
    pair.left.host.ip(&format!("link set {name} down"));
    pair.left.host.ip(&format!("link set {name} up"));
    assert!(within(Duration::from_secs(3), || marks(51841) == 2), "lost when the link went down and up");
    pair.left.node.wg(&format!("set peer {} endpoint [fd66::2]:51822", pair.right_key()));
    let before = marked();
    pair.left.host.ping(RIGHT4, 2);
    assert!(marked() >= before + 2, "IPv6 packets carry no mark");
    pair.left.node.wg("set fwmark off");
    assert_eq!((pair.left.node.wg("show fwmark").as_str(), marks(51841)), ("off", 0));
}

/// F67 and its kind: a bad request is refused with the right number and changes nothing.
#[test]
#[ignore = "needs root: task test:net"]
fn f67_bad_requests_are_refused_and_change_nothing() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    let node = &pair.left.node;
    let (key, other) = (hex(pair.right_key()), hex(&Keys::generate().public));
    let before = node.wg("show dump");
    for body in [
        "replace_peers=false\n".to_owned(),
        "replace_peers=1\n".into(),
        "listen_port=65536\n".into(),
        "listen_port=-1\n".into(),
        "listen_port=\n".into(),
        "fwmark=4294967296\n".into(),
        "private_key=00\n".into(),
        format!("private_key={}\n", "g".repeat(64)),
        format!("public_key={}\n", &key[1..]),
        "no_such_key=1\n".into(),
        "remove=true\n".into(),
        format!("listen_port=4\npublic_key={key}\nremove=true\npublic_key={other}\nendpoint=nowhere\n"),
        format!("public_key={key}\nremove=false\n"),
        format!("public_key={key}\nupdate_only=yes\n"),
        format!("public_key={key}\nreplace_allowed_ips=false\n"),
        format!("public_key={key}\nendpoint=10.0.0.1\n"),
        format!("public_key={key}\nendpoint=10.0.0.1:0\n"),
        format!("public_key={key}\nendpoint=10.0.0.1:65536\n"),
        format!("public_key={key}\nendpoint=fd00::1:51820\n"),
        format!("public_key={key}\nendpoint=host.example:51820\n"),
        format!("public_key={key}\nallowed_ip=10.0.0.0\n"),
        format!("public_key={key}\nallowed_ip=10.0.0.0/33\n"),
        format!("public_key={key}\nallowed_ip=fd00::/129\n"),
        format!("public_key={key}\nallowed_ip=10.0.0.0/8/8\n"),
        format!("public_key={key}\npersistent_keepalive_interval=65536\n"),
        format!("public_key={key}\npreshared_key=xyz\n"),
        "listen_port=1\u{0}2\n".into(),
    ] {
        let reply = node.uapi(&format!("set=1\n{body}\n"));
        assert_eq!(reply, "errno=-22\n\n", "the answer to {body:?}");
        assert_eq!(node.wg("show dump"), before, "{body:?} changed something");
    }
    assert_eq!(node.uapi(&format!("set=1\npublic_key={key}\nprotocol_version=2\n\n")), "errno=-96\n\n");
    assert_eq!(node.uapi("set=1\nno equals sign\n\n"), "errno=-71\n\n");
    assert_eq!(node.uapi("hello=1\n\n"), "errno=-22\n\n");
    assert_eq!(node.wg("show dump"), before);
    pair.left.host.ping(RIGHT4, 1);
}

/// F68: a changed preshared key counts from the next handshake on: the session goes on, a mismatch makes no new one.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-HS-8
fn f68_a_changed_preshared_key_counts_at_the_next_handshake() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    let psk = sh("wg genpsk");
    pair.left.node.wg(&format!("set peer {} preshared-key <(echo {psk})", pair.right_key()));
    pair.ping_all(1);
    // Down and up again: the left forgets its sessions and needs a new handshake.
    let name = &pair.left.node.name;
    pair.left.host.ip(&format!("link set {name} down"));
    pair.left.host.ip(&format!("link set {name} up"));
    assert_eq!(pair.left.host.pings(RIGHT4, 2), 0, "a session with different preshared keys");
    pair.right.node.wg(&format!("set peer {} preshared-key <(echo {psk})", pair.left_key()));
    assert!(
        within(Duration::from_secs(8), || pair.left.host.pings(RIGHT4, 1) == 1),
        "no session with equal ones"
    );
    pair.right.host.ping(LEFT4, 1);
}

/// F69: a port that somebody else has is refused with the system's reason, and the old port still works.
#[test]
#[ignore = "needs root: task test:net"]
fn f69_a_busy_port_is_refused_and_the_old_one_kept() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    let before = pair.left.node.wg("show dump");
    for (address, family) in [("0.0.0.0", "IPv4"), ("::", "IPv6")] {
        let taken = pair.left.host.enter(|| UdpSocket::bind((address, 0)).expect("a port"));
        let port = taken.local_addr().expect("address").port();
        let output = pair.left.node.try_wg(&format!("set listen-port {port}"));
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && words.contains("Address already in use"), "{family}: {words}");
        let key = hex(pair.right_key());
        let reply = pair
            .left
            .node
            .uapi(&format!("set=1\nlisten_port={port}\nfwmark=7\npublic_key={key}\nremove=true\n\n"));
        assert_eq!(reply, "errno=-98\n\n");
        let state = |dump: &str| {
            dump.lines().map(|l| l.split('\t').take(4).collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(
            state(&pair.left.node.wg("show dump")),
            state(&before),
            "a refused change was applied in part"
        );
        pair.ping_all(1);
    }
}

/// F71: with a peer that does not answer and a busy tunnel, questions are answered within a second.
#[test]
#[ignore = "needs root: task test:net"]
fn f71_questions_are_answered_within_a_second_under_load() {
    if !ready(&["iperf3", "ss"]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    pair.left
        .node
        .wg(&format!("set peer {} endpoint 10.66.0.77:1 allowed-ips 10.88.0.0/16", Keys::generate().public));
    pair.left.host.ip(&format!("route add 10.88.0.0/16 dev {}", pair.left.node.name));
    let _alone = crate::transfer::alone();
    std::thread::scope(|scope| {
        scope.spawn(|| crate::kernel_suite::load(&pair.left.host, &pair.right.host, RIGHT4, "-t 4 -P 4"));
        scope.spawn(|| pair.left.host.try_run("ping -n -q -f -w 4 10.88.0.1"));
        let end = Instant::now() + Duration::from_secs(4);
        let mut slowest = Duration::ZERO;
        while Instant::now() < end {
            let asked = Instant::now();
            assert!(pair.left.node.uapi("get=1\n\n").ends_with("errno=0\n\n"));
            slowest = slowest.max(asked.elapsed());
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(slowest < Duration::from_secs(1), "the slowest answer took {slowest:?}");
    });
}

/// Several requests may come on one connection, and a connection that says nothing keeps nobody waiting.
#[test]
#[ignore = "needs root: task test:net"]
fn one_connection_carries_many_requests_and_idle_ones_block_nobody() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let mut node = Node::start(Program::Fv, &host);
    let idle: Vec<_> = (0..8).map(|_| UnixStream::connect(node.socket()).expect("connect")).collect();
    let mut stream = UnixStream::connect(node.socket()).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(5))).expect("timeout");
    let mut ask = |request: &str| {
        stream.write_all(request.as_bytes()).expect("write");
        let (mut reply, mut byte) = (String::new(), [0]);
        while !reply.ends_with("\n\n") {
            stream.read_exact(&mut byte).expect("read");
            reply.push(char::from(byte[0]));
        }
        reply
    };
    assert_eq!(ask("set=1\nlisten_port=45678\n\n"), "errno=0\n\n");
    let mut text = String::new();
    for n in 0..50 {
        write!(text, "{}", ask("get=1\n\n")).expect("text");
        assert_eq!(ask(&format!("set=1\nfwmark={n}\n\n")), "errno=0\n\n");
    }
    assert_eq!(text.matches("listen_port=45678\n").count(), 50);
    node.wg("show");
    // And they do not keep the process from ending.
    node.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(
        node.ended(Duration::from_secs(3)).is_some_and(|status| status.success()),
        "idle clients keep it alive"
    );
    drop(idle);
}

/// F71: a peer that is removed gets nothing any more once the answer is there.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-AIP-5
fn a_removed_peer_gets_nothing_any_more() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    let wire = Capture::on(&pair.left.host, 51822);
    std::thread::scope(|scope| {
        scope.spawn(|| pair.left.host.try_run(&format!("ping -n -q -i 0.005 -w 2 {RIGHT4}")));
        scope.spawn(|| pair.left.host.try_run(&format!("ping -n -q -i 0.005 -w 2 {RIGHT6}")));
        std::thread::sleep(Duration::from_millis(700));
        pair.left.node.wg(&format!("set peer {} remove", pair.right_key()));
        let gone = Instant::now();
        std::thread::sleep(Duration::from_secs(1));
        let late = wire.count(|seen| seen.from.port() == 51821 && seen.at > gone + Duration::from_millis(20));
        assert_eq!(late, 0, "packets after the peer was removed");
    });
}
