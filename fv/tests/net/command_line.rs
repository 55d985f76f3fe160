//! What `fv` says when it cannot start: one sentence that names the cause, exit code 1, and nothing left behind.

use std::process::Output;

use crate::host::{Host, ready, unique};
use crate::node::Program;

fn fv() -> String {
    Program::Fv.path().display().to_string()
}

/// Must have failed with a sentence that holds all of `words`.
#[track_caller]
fn refused(output: &Output, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it was not refused");
    assert_ne!(output.status.code(), Some(124), "it hung: {text}");
    for word in words {
        assert!(text.contains(word), "says nothing of {word:?}: {text}");
    }
    assert!(!text.contains("panicked") && !text.contains("Os {"), "not plain words: {text}");
}

/// F72: names that cannot be an interface's are refused before anything is touched.
#[test]
#[ignore = "needs root: task test:net"]
fn f72_impossible_names_are_refused_with_the_reason() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    for (name, word) in [
        ("sixteencharacter", "15"),
        ("a/b", "/"),
        ("''", "empty"),
        (".", "."),
        ("..", ".."),
        ("'a b'", "space"),
    ] {
        for front in ["-f", ""] {
            refused(&host.try_run(&format!("timeout 5 {} {front} {name}", fv())), &[word]);
        }
    }
    assert_eq!(host.ip("-o link show").lines().count(), 1, "an interface was made");
}

/// An interface that exists already is left alone.
#[test]
#[ignore = "needs root: task test:net"]
fn a_taken_name_is_refused() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let name = format!("t{}", unique().replace('-', "n"));
    host.ip(&format!("link add {name} type veth peer name other"));
    for front in ["-f", ""] {
        refused(&host.try_run(&format!("timeout 5 {} {front} {name}", fv())), &[&name]);
    }
    assert!(host.ip("-d link show").contains("veth"), "the interface was touched");
    assert!(!std::path::Path::new(&format!("/var/run/wireguard/{name}.sock")).exists(), "a socket was left");
}

/// F149: without the device node, and without the capability, the sentence says which is missing.
#[test]
#[ignore = "needs root: task test:net"]
fn f149_a_missing_device_or_capability_is_named() {
    if !ready(&["setpriv", "unshare"]) {
        return;
    }
    let host = Host::new("one");
    let name = format!("t{}", unique().replace('-', "n"));
    for front in ["-f", ""] {
        // (With CAP_MKNOD it would make the node itself.)
        let hidden = format!(
            "unshare --mount setpriv --bounding-set=-mknod sh -c 'mount -t tmpfs tmpfs /dev/net && timeout 5 {} {front} {name}'",
            fv()
        );
        refused(&host.try_run(&hidden), &["/dev/net/tun"]);
        let weak = format!(
            "timeout 5 setpriv --bounding-set=-net_admin --inh-caps=-net_admin {} {front} {name}",
            fv()
        );
        refused(&host.try_run(&weak), &["CAP_NET_ADMIN"]);
    }
    assert!(!std::path::Path::new(&format!("/var/run/wireguard/{name}.sock")).exists(), "a socket was left");
    assert_eq!(host.ip("-o link show").lines().count(), 1, "an interface was left");
}

/// In the background: the parent is gone, with success, exactly when `wg` can talk to the interface.
#[test]
#[ignore = "needs root: task test:net"]
fn the_parent_ends_when_the_interface_is_ready() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    for _ in 0..5 {
        let name = format!("t{}", unique().replace('-', "n"));
        // Its output is a pipe: it must not be held open by what goes on in the background.
        host.run(&format!(
            "timeout 5 {} {name} && wg set {name} listen-port 45003 && ip link set {name} up",
            fv()
        ));
        assert_eq!(crate::host::sh(&format!("wg show {name} listen-port")), "45003");
        host.ip(&format!("link delete {name}"));
        let gone = || !std::path::Path::new(&format!("/var/run/wireguard/{name}.sock")).exists();
        assert!(
            crate::node::within(std::time::Duration::from_secs(3), gone),
            "still there after its interface"
        );
    }
}

/// F170: where the kernel has no IPv6 at all it runs on IPv4.
#[test]
#[ignore = "needs root: task test:net"]
fn f170_without_ipv6_it_runs_on_ipv4() {
    if !ready(&["python3", "ss"]) {
        return;
    }
    let mut pair = crate::pair::Pair::unconfigured(Program::Fv, Program::Fv);
    // socket(AF_INET6, …) answers EAFNOSUPPORT, as with ipv6.disable=1.
    let rules = "(0x15, 0, 3, number), (0x20, 0, 0, 16), (0x15, 0, 1, 10), (0x06, 0, 0, 0x50000 + 97), (0x06, 0, 0, 0x7fff0000)";
    pair.left.node = crate::node::Node::start_filtered(&pair.left.host, [41, 198], rules);
    let (l, r) = (&pair.left, &pair.right);
    l.node.wg(&format!("set listen-port 51821 private-key <(echo {})", l.keys.private));
    r.node.wg(&format!("set listen-port 51822 private-key <(echo {})", r.keys.private));
    pair.introduce(l, "10.66.0.2:51822");
    pair.introduce(r, "");
    l.link_up(crate::pair::LEFT4, crate::pair::LEFT6, 1420);
    r.link_up(crate::pair::RIGHT4, crate::pair::RIGHT6, 1420);
    assert_eq!(l.host.run("ss -Hlun 'sport = 51821'").lines().count(), 1, "sockets");
    pair.ping_all(2);
    // A peer behind IPv6 is out of reach, the others are not.
    let key = crate::node::Keys::generate().public;
    l.node.wg(&format!(
        "set peer {key} endpoint [fd66::2]:51899 allowed-ips 10.88.0.0/24 persistent-keepalive 1"
    ));
    pair.ping_all(2);
}

/// Where only the addresses are switched off it runs too.
#[test]
#[ignore = "needs root: task test:net"]
fn f170_with_ipv6_disabled_on_the_host_it_runs_on_ipv4() {
    if !ready(&[]) {
        return;
    }
    let pair = crate::pair::Pair::unconfigured(Program::Fv, Program::Fv);
    for end in [&pair.left, &pair.right] {
        end.host.run("sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1");
    }
    let (l, r) = (&pair.left, &pair.right);
    l.node.wg(&format!("set listen-port 51821 private-key <(echo {})", l.keys.private));
    r.node.wg(&format!("set listen-port 51822 private-key <(echo {})", r.keys.private));
    pair.introduce(l, "10.66.0.2:51822");
    pair.introduce(r, "");
    for (end, address) in [(l, crate::pair::LEFT4), (r, crate::pair::RIGHT4)] {
        end.host.address(&end.node.name, &format!("{address}/24"));
        end.host.ip(&format!("link set {} up", end.node.name));
    }
    l.host.ping(crate::pair::RIGHT4, 2);
    r.host.ping(crate::pair::LEFT4, 2);
}
