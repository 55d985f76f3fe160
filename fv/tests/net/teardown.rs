//! Ends: by signal, by deletion, under load, with unfinished work, and the start after a bad end.

use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::host::{Host, ready, unique};
use crate::node::{Keys, Node, Program, within};
use crate::pair::{LEFT4, Outer, Pair, RIGHT4, RIGHT6};
use crate::transfer::alone;

/// What must be true when it has ended: quickly, with success, and without leaving anything.
#[track_caller]
fn ends_cleanly(node: &mut Node, host: &Host, how: &str) {
    let status = node.ended(Duration::from_secs(3));
    let status = status.unwrap_or_else(|| panic!("{how}: still running after 3 s: {}", node.log()));
    assert!(status.success(), "{how}: ended with {status} (signal {:?}): {}", status.signal(), node.log());
    assert!(!node.socket().exists(), "{how}: the socket stays behind");
    assert!(!host.ip("link show").contains(&node.name), "{how}: the interface stays behind");
    assert!(!node.log().contains("panicked"), "{how}: {}", node.log());
}

#[test]
#[ignore = "needs root: task test:net"]
fn signals_deletion_of_interface_or_socket_all_end_it_cleanly() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    for up in [false, true] {
        for how in ["SIGTERM", "SIGINT", "interface deleted", "socket removed"] {
            let mut node = Node::start(Program::Fv, &host);
            if up {
                host.ip(&format!("link set {} up", node.name));
                node.wg(&format!("set private-key <(echo {}) listen-port 0", Keys::generate().private));
            }
            match how {
                "SIGTERM" => node.signal(Signal::SIGTERM),
                "SIGINT" => node.signal(Signal::SIGINT),
                "interface deleted" => drop(host.ip(&format!("link delete {}", node.name))),
                _ => std::fs::remove_file(node.socket()).expect("remove"),
            }
            ends_cleanly(&mut node, &host, how);
        }
    }
}

/// The same while the interface lives in another network namespace than the process.
#[test]
#[ignore = "needs root: task test:net"]
fn deleting_an_interface_that_was_moved_away_ends_it() {
    if !ready(&[]) {
        return;
    }
    let (host, away) = (Host::new("one"), Host::new("away"));
    let mut node = Node::start(Program::Fv, &host);
    host.ip(&format!("link set {} netns {}", node.name, away.name()));
    away.ip(&format!("link set {} up", node.name));
    std::thread::sleep(Duration::from_millis(1500));
    assert!(node.running(), "moving the interface ended it: {}", node.log());
    away.ip(&format!("link delete {}", node.name));
    ends_cleanly(&mut node, &host, "deleted elsewhere");
}

/// F141: peers come and go, and the interface goes, under full traffic both ways.
#[test]
#[ignore = "needs root: task test:net"]
fn f141_removal_under_full_traffic_breaks_nothing() {
    if !ready(&["iperf3", "ss"]) {
        return;
    }
    let mut pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    let _alone = alone();
    let server = |host: &Host, address: &str| {
        let child = host
            .command("timeout")
            .args(["40", "iperf3", "-s", "-B", address])
            .stdout(std::process::Stdio::null())
            .spawn();
        child.expect("iperf3")
    };
    let mut servers = [server(&pair.right.host, RIGHT4), server(&pair.left.host, LEFT4)];
    std::thread::sleep(Duration::from_millis(500));
    std::thread::scope(|scope| {
        let (left, right) = (&pair.left.host, &pair.right.host);
        scope.spawn(|| left.try_run(&format!("timeout 7 iperf3 -c {RIGHT4} -t 6 -P 2")));
        scope.spawn(|| right.try_run(&format!("timeout 7 iperf3 -u -b 300M -c {LEFT4} -t 6")));
        std::thread::sleep(Duration::from_millis(800));
        for _ in 0..15 {
            pair.left.node.wg(&format!("set peer {} remove", pair.right_key()));
            std::thread::sleep(Duration::from_millis(50));
            pair.introduce(&pair.left, pair.endpoint_of_right(Outer::V4));
            std::thread::sleep(Duration::from_millis(150));
        }
        std::thread::sleep(Duration::from_millis(200));
        pair.left.host.ip(&format!("link delete {}", pair.left.node.name));
    });
    ends_cleanly(&mut pair.left.node, &pair.left.host, "deleted under load");
    assert!(pair.right.node.running());
    pair.right.node.signal(Signal::SIGTERM);
    ends_cleanly(&mut pair.right.node, &pair.right.host, "SIGTERM");
    for child in &mut servers {
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// F142: with a flood of packets waiting for a peer that is away, removing it takes less than a second.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-STG-2
fn f142_a_peer_with_waiting_packets_is_removed_at_once() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    let (node, peer) = (&pair.left.node, pair.right_key());
    node.wg(&format!("set peer {peer} endpoint 10.66.0.77:1 persistent-keepalive 1"));
    let before = node.memory();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| pair.left.host.try_run(&format!("ping -n -q -f -s 1300 -w 4 {RIGHT4}")));
        }
        std::thread::sleep(Duration::from_secs(3));
        let grown = node.memory().saturating_sub(before);
        assert!(grown < 4096, "{grown} KiB for packets that wait");
        let began = Instant::now();
        node.wg(&format!("set peer {peer} remove"));
        assert!(began.elapsed() < Duration::from_secs(1), "removal took {:?}", began.elapsed());
    });
}

/// F143: adding and removing a peer over and over while it initiates hangs nothing, and disturbs nobody else.
#[test]
#[ignore = "needs root: task test:net"]
fn f143_adding_and_removing_a_peer_in_its_handshake_hangs_nothing() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    // A third end on the right host, which wants to talk to the left all the time.
    let third = Node::start(Program::Fv, &pair.right.host);
    let keys = Keys::generate();
    third.wg(&format!(
        "set private-key <(echo {}) listen-port 51833 peer {} endpoint 10.66.0.1:51821 persistent-keepalive 1 allowed-ips 10.99.0.0/24",
        keys.private,
        pair.left_key()
    ));
    pair.right.host.ip(&format!("link set {} up", third.name));
    std::thread::scope(|scope| {
        let pings = scope.spawn(|| pair.left.host.run(&format!("ping -n -q -i 0.02 -c 200 -W 2 {RIGHT4}")));
        for _ in 0..200 {
            pair.left.node.wg(&format!(
                "set peer {} endpoint 10.66.0.2:51833 persistent-keepalive 1 allowed-ips 10.99.0.3/32",
                keys.public
            ));
            pair.left.node.wg(&format!("set peer {} remove", keys.public));
        }
        let text = pings.join().expect("pings");
        assert!(text.contains(" 200 received"), "the other peer was disturbed: {text}");
    });
    pair.left.node.wg(&format!(
        "set peer {} endpoint 10.66.0.2:51833 persistent-keepalive 1 allowed-ips 10.99.0.3/32",
        keys.public
    ));
    let met = || pair.left.node.peer(&keys.public, "latest-handshakes") != "0";
    assert!(within(Duration::from_secs(12), met), "the peer that came and went gets no session any more");
}

/// F146: stopping, continuing and tracing the process is not noticed by the tunnel.
#[test]
#[ignore = "needs root: task test:net"]
fn f146_stop_continue_and_a_tracer_go_unnoticed() {
    if !ready(&["strace"]) {
        return;
    }
    let mut pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    for _ in 0..3 {
        pair.left.node.signal(Signal::SIGSTOP);
        std::thread::sleep(Duration::from_millis(200));
        pair.left.node.signal(Signal::SIGCONT);
        for signal in [Signal::SIGWINCH, Signal::SIGURG, Signal::SIGCHLD] {
            pair.left.node.signal(signal);
        }
        pair.left.host.ping(RIGHT4, 2);
    }
    let _ = crate::host::try_sh(&format!("timeout 1 strace -f -o /dev/null -p {}", pair.left.node.pid()));
    assert!(pair.left.node.running(), "{}", pair.left.node.log());
    pair.left.node.wg("show");
    pair.ping_all(2);
}

/// F147: after kill -9 the next start replaces the stale socket; a live one is refused and not disturbed.
#[test]
#[ignore = "needs root: task test:net"]
fn f147_a_stale_socket_is_replaced_and_a_live_one_refused() {
    if !ready(&[]) {
        return;
    }
    let (host, other) = (Host::new("one"), Host::new("other"));
    let mut node = Node::start(Program::Fv, &host);
    assert!(node.socket().exists());
    for _ in 0..3 {
        node.kill_and_restart(&host);
    }
    node.wg("set listen-port 45001");
    // The same name again: on the same host the interface is taken, on another the socket is.
    for place in [&host, &other] {
        let output = place.try_run(&format!("{} -f {}", Program::Fv.path().display(), node.name));
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert!(words.contains(&node.name), "does not name the interface: {words}");
        assert_eq!(words.lines().count(), 1, "more than a sentence: {words}");
    }
    assert!(!other.ip("link show").contains(&node.name), "the refused one left an interface behind");
    assert!(node.running());
    assert_eq!(node.wg("show listen-port"), "45001");
}

/// F148: it starts without any environment, as in a bare container.
#[test]
#[ignore = "needs root: task test:net"]
fn f148_no_environment_is_needed() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let name = format!("t{}", unique().replace('-', "n"));
    let mut command = host.command("env");
    // An empty /etc hides the list of users too.
    command.args(["-i", "/usr/bin/unshare", "--mount", "/bin/sh", "-c"]);
    command.arg(format!("mount -t tmpfs tmpfs /etc && exec {} -f {name}", Program::Fv.path().display()));
    let mut node = Node::start_with(Program::Fv, command, &name);
    node.wg("set listen-port 45002");
    node.signal(Signal::SIGTERM);
    ends_cleanly(&mut node, &host, "SIGTERM");
}

/// Nothing is lost in a life of changes: descriptors and threads are as many as at the start.
#[test]
#[ignore = "needs root: task test:net"]
fn changes_leak_no_descriptors_and_no_threads() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 1);
    let node = &pair.left.node;
    let threads = || std::fs::read_dir(format!("/proc/{}/task", node.pid())).expect("process").count();
    let settled = |want| within(Duration::from_secs(5), || (node.descriptors(), threads()) == want);
    std::thread::sleep(Duration::from_millis(500));
    let start = (node.descriptors(), threads());
    for n in 0..30 {
        node.wg(&format!("set listen-port {} fwmark {n}", 46_000 + n));
        pair.left.host.ip(&format!("link set {} down", node.name));
        pair.left.host.ip(&format!("link set {} up", node.name));
    }
    assert!(settled(start), "{start:?} at the start, {:?} now", (node.descriptors(), threads()));
    pair.left.host.address(&node.name, "fd67::1/64");
    assert!(within(Duration::from_secs(8), || pair.left.host.pings(RIGHT6, 1) == 1));
}
