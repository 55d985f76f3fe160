//! `fv doctor IFNAME` asks a running tunnel, and its log says what was given up.

use std::time::Duration;

use serde_json::Value;

use crate::host::{ready, try_sh, unique};
use crate::node::{Node, Program, within};
use crate::pair::{LEFT4, LEFT6, Pair, RIGHT4, RIGHT6};
use crate::transfer::tcp;

fn fv() -> String {
    Program::Fv.path().display().to_string()
}

/// What the doctor says of `node`.
#[track_caller]
fn examine(node: &Node) -> Value {
    let output = try_sh(&format!("{} doctor {} --json", fv(), node.name));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[track_caller]
fn find<'a>(list: &'a Value, what: &str) -> &'a Value {
    let found = list.as_array().expect("a list").iter().find(|finding| finding["what"] == what);
    found.unwrap_or_else(|| panic!("no {what}: {list}"))
}

/// A pair whose left end was started with more environment.
#[track_caller]
fn pair_with(environment: &[(&str, &str)]) -> Pair {
    let mut pair = Pair::unconfigured(Program::Fv, Program::Fv);
    let name = format!("t{}", unique().replace('-', "n"));
    let mut command = pair.left.host.command(&fv());
    command.args(["-f", &name]).envs(environment.iter().copied());
    pair.left.node = Node::start_with(Program::Fv, command, &name);
    pair.configure();
    pair
}

/// Does `work` while `node` is traced with the options `inject`.
#[track_caller]
fn traced(node: &Node, inject: &str, work: impl FnOnce()) {
    let strace = format!("timeout 3 strace -f -o /dev/null -p {} {inject}", node.pid());
    let status = || std::fs::read_to_string(format!("/proc/{}/status", node.pid())).unwrap_or_default();
    std::thread::scope(|scope| {
        scope.spawn(|| try_sh(&strace));
        let there = within(Duration::from_secs(2), || !status().contains("TracerPid:\t0\n"));
        assert!(there, "strace does not come");
        // It goes from thread to thread.
        std::thread::sleep(Duration::from_millis(200));
        work();
    });
}

/// Sends a megabyte of TCP from left to right through the tunnel.
#[track_caller]
fn move_data(pair: &Pair) {
    tcp(&pair.left.host, &pair.right.host, RIGHT4, 1 << 20);
}

#[test]
#[ignore = "needs root: task test:net"]
fn a_running_tunnel_tells_what_it_has_in_use_and_what_it_counted() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.ping_all(2);
    // For nobody, and from nobody.
    pair.left.host.try_run("ping -c 1 -W 1 10.67.0.99");
    let said = examine(&pair.left.node);
    assert_eq!(find(&said["in_use"], "link")["state"], "ok");
    assert!(find(&said["in_use"], "peers")["text"].as_str().expect("text").starts_with("1 of 1"));
    for what in ["TCP super-packets", "joined writes", "UDP_GRO", "UDP_SEGMENT", "receive buffer"] {
        assert_eq!(find(&said["in_use"], what)["state"], "ok", "{what}");
    }
    let counter = |name: &str| said["counters"][name].as_u64().unwrap_or_else(|| panic!("no {name}"));
    assert!(counter("udp_sent") >= 5 && counter("udp_received") >= 5 && counter("tun_written") >= 4);
    assert_eq!((counter("spoofed"), counter("udp_lost_full"), counter("udp_lost_unread")), (0, 0, 0));
    assert!(counter("no_route") >= 1);
    assert_eq!(find(&said["wrong"], "no_route")["state"], "note");
    let text = String::from_utf8(try_sh(&format!("{} doctor {}", fv(), pair.left.node.name)).stdout);
    assert!(text.expect("text").ends_with("Nothing looks wrong.\n"));
}

#[test]
#[ignore = "needs root: task test:net"]
fn a_link_that_is_down_and_a_program_that_is_not_fv_are_named() {
    if !ready(&["wireguard-go", "boringtun-cli", "gotatun"]) {
        return;
    }
    for other in [Program::WireguardGo, Program::Boringtun, Program::Gotatun] {
        let pair = Pair::unconfigured(Program::Fv, other);
        let link = find(&examine(&pair.left.node)["in_use"], "link").clone();
        assert_eq!(link["state"], "look");
        assert!(link["advice"].as_str().expect("advice").starts_with("ip link set"));
        let output = try_sh(&format!("{} doctor {}", fv(), pair.right.node.name));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code() == Some(1) && said.contains("is not fv, or an older one"),
            "{other:?}: {said}"
        );
        pair.right.node.wg("show");
    }
}

#[test]
#[ignore = "needs root: task test:net"]
fn what_is_switched_off_is_shown_as_switched_off_and_is_not_used() {
    if !ready(&[]) {
        return;
    }
    let pair = pair_with(&[("FV_NO_OFFLOAD", "udp-gso,tun-gro")]);
    move_data(&pair);
    let said = examine(&pair.left.node);
    for (what, state) in
        [("UDP_SEGMENT", "off"), ("joined writes", "off"), ("UDP_GRO", "ok"), ("TCP super-packets", "ok")]
    {
        assert_eq!(find(&said["in_use"], what)["state"], state, "{what}");
    }
    assert_eq!(said["counters"]["tun_merged_writes"], 0);
    assert_eq!(said["counters"]["udp_gso_fallbacks"], 0);
}

#[test]
#[ignore = "needs root: task test:net"]
fn segmentation_that_the_kernel_refuses_is_logged_once_and_named_by_the_doctor() {
    if !ready(&["strace"]) {
        return;
    }
    for (error, when, line, text) in [
        ("EIO", "10", "UDP_SEGMENT is given up (", "could not cut a train"),
        (
            "EINVAL",
            "10",
            "UDP_SEGMENT is given up towards 10.66.0.2:51822",
            "given up towards some addresses (1)",
        ),
    ] {
        let pair = pair_with(&[("LOG_LEVEL", "info")]);
        pair.ping_all(1);
        // Which send is a train is up to TCP.
        for _ in 0..10 {
            let inject = format!("-e trace=sendmmsg -e inject=sendmmsg:error={error}:when={when}");
            traced(&pair.left.node, &inject, || tcp(&pair.left.host, &pair.right.host, RIGHT4, 4 << 20));
            if examine(&pair.left.node)["counters"]["udp_gso_fallbacks"] != 0 {
                break;
            }
        }
        let said = examine(&pair.left.node);
        let found = find(&said["in_use"], "UDP_SEGMENT");
        assert_eq!(found["state"], "look", "{error}: {said}");
        assert!(found["text"].as_str().expect("text").contains(text), "{found}");
        assert_eq!(find(&said["wrong"], "udp_gso_fallbacks")["state"], "look");
        let log = pair.left.node.log();
        assert_eq!(log.matches(line).count(), 1, "{log}");
        pair.ping_all(1);
    }
}

#[test]
#[ignore = "needs root: task test:net"]
fn joined_writes_that_the_kernel_refuses_are_logged_once_and_named_by_the_doctor() {
    if !ready(&["strace"]) {
        return;
    }
    let pair = pair_with(&[]);
    pair.ping_all(1);
    traced(&pair.left.node, "-e trace=writev -e inject=writev:error=EINVAL:when=1", || {
        tcp(&pair.right.host, &pair.left.host, LEFT4, 1 << 20);
    });
    let said = examine(&pair.left.node);
    assert_eq!(find(&said["in_use"], "joined writes")["state"], "no", "{said}");
    assert_eq!(find(&said["wrong"], "tun_merge_fallbacks")["state"], "look");
    assert_eq!(said["counters"]["tun_merge_fallbacks"], 1);
    let log = pair.left.node.log();
    assert_eq!(log.matches("joined writes to the interface are given up").count(), 1, "{log}");
}

#[test]
#[ignore = "needs root: task test:net"]
fn buffers_smaller_than_wanted_are_logged_with_the_setting_when_the_link_comes_up() {
    if !ready(&["python3"]) {
        return;
    }
    let mut pair = Pair::unconfigured(Program::Fv, Program::Fv);
    // setsockopt(SOL_SOCKET, SO_RCVBUFFORCE or SO_RCVBUF, …) is refused, as where the system's limit is low.
    let rules = "(0x15, 0, 5, number), (0x20, 0, 0, 24), (0x15, 0, 3, 1), (0x20, 0, 0, 32), (0x15, 2, 0, 33), (0x15, 1, 0, 8), (0x06, 0, 0, 0x7fff0000), (0x06, 0, 0, 0x50001)";
    pair.left.node = Node::start_filtered(&pair.left.host, [54, 208], rules);
    let name = pair.left.node.name.clone();
    assert!(!pair.left.node.log().contains("rmem_max"), "the link is down yet");
    pair.left.link_up(LEFT4, LEFT6, 1420);
    assert!(within(Duration::from_secs(5), || pair.left.node.log().contains("net.core.rmem_max=4194304")));
    for state in ["mtu 1400", "down", "up"] {
        pair.left.host.ip(&format!("link set {name} {state}"));
        std::thread::sleep(Duration::from_millis(300));
    }
    assert_eq!(pair.left.node.log().matches("rmem_max").count(), 1, "said once: {}", pair.left.node.log());
    let said = examine(&pair.left.node);
    let found = find(&said["in_use"], "receive buffer");
    assert_eq!(found["state"], "no");
    assert!(found["advice"].as_str().expect("advice").contains("rmem_max"), "{found}");
    // The other end got what it wanted.
    pair.right.link_up(RIGHT4, RIGHT6, 1420);
    assert!(within(Duration::from_secs(5), || find(&examine(&pair.right.node)["in_use"], "link")["state"]
        == "ok"));
    assert!(!pair.right.node.log().contains("rmem_max"));
}
