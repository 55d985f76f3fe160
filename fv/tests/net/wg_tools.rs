//! `wg` and `wg-quick` as a person uses them; wireguard-go under the same commands is the measure.

use std::time::Duration;

use crate::host::{Host, ready, unique};
use crate::node::{Keys, Node, Program, within};

/// A name for a file of this test.
fn file(name: &str) -> String {
    std::env::temp_dir().join(format!("fvt-{}-{name}", unique())).display().to_string()
}

/// Both programs, and what each shows after the same commands.
struct Twins {
    ours: Node,
    theirs: Node,
    our_host: Host,
    their_host: Host,
}

impl Twins {
    fn new() -> Self {
        let (a, b) = (Host::new("ours"), Host::new("theirs"));
        let twins = Self {
            ours: Node::start(Program::Fv, &a),
            theirs: Node::start(Program::WireguardGo, &b),
            our_host: a,
            their_host: b,
        };
        // A link that is up has its port, in both.
        for (host, node) in [(&twins.our_host, &twins.ours), (&twins.their_host, &twins.theirs)] {
            host.ip(&format!("link set {} up", node.name));
            // The peers' endpoints: reachable, and nobody there.
            for address in ["192.0.2.1/32", "192.0.2.9/32", "2001:db8::9/128"] {
                host.address("lo", address);
            }
        }
        twins
    }

    #[track_caller]
    fn same(&self, commands: &[&str]) {
        for command in commands {
            let ask = || {
                [&self.ours, &self.theirs].map(|node| {
                    let output = node.try_wg(command);
                    let text = format!(
                        "{}{}",
                        String::from_utf8_lossy(&output.stdout),
                        String::from_utf8_lossy(&output.stderr)
                    );
                    (output.status.code(), tidy(&text.replace(&node.name, "NAME")))
                })
            };
            let mut said = ask();
            // Each calls its peers when it comes to it, and again every five seconds or so: that counts as sent.
            if command.starts_with("show") {
                within(Duration::from_secs(12), || {
                    said = ask();
                    said[0] == said[1]
                });
            }
            assert_eq!(said[0], said[1], "`wg {command}`: left fv, right wireguard-go");
        }
    }
}

/// Allowed IPs in one order: fv lists them as they were given, wireguard-go as they lie in its tree.
fn tidy(text: &str) -> String {
    let sorted = |list: &str, separator: &str| {
        let mut ips: Vec<&str> = list.split(separator).collect();
        ips.sort_unstable();
        ips.join(separator)
    };
    let line = |line: &str| {
        for (mark, separator) in [("allowed ips: ", ", "), ("AllowedIPs = ", ", ")] {
            if let Some((head, ips)) = line.split_once(mark) {
                return format!("{head}{mark}{}", sorted(ips, separator));
            }
        }
        let fields: Vec<String> = line
            .split('\t')
            .map(|field| {
                if field.contains('/') && field.contains('.') {
                    sorted(&sorted(field, ","), " ")
                } else {
                    field.into()
                }
            })
            .collect();
        fields.join("\t")
    };
    // And its peers in any order: one a line, or a paragraph each.
    let separator = if text.contains("\n\n") { "\n\n" } else { "\n" };
    let mut parts: Vec<String> =
        text.split(separator).map(|part| part.lines().map(line).collect::<Vec<_>>().join("\n")).collect();
    parts.sort();
    parts.join(separator)
}

const SHOWN: [&str; 14] = [
    "show",
    "show dump",
    "show private-key",
    "show public-key",
    "show listen-port",
    "show fwmark",
    "show peers",
    "show preshared-keys",
    "show endpoints",
    "show allowed-ips",
    "show latest-handshakes",
    "show transfer",
    "show persistent-keepalive",
    "showconf",
];

/// 3.5: after every kind of change, each form of `wg show` and `wg showconf` says what it says of wireguard-go.
#[test]
#[ignore = "needs root: task test:net"]
fn wg_cannot_tell_fv_from_wireguard_go() {
    if !ready(&["wireguard-go"]) {
        return;
    }
    let twins = Twins::new();
    let (own, a, b, c) = (Keys::generate(), Keys::generate(), Keys::generate(), Keys::generate());
    let psk = crate::host::sh("wg genpsk");
    // A port of its own, or the two would show different random ones.
    twins.same(&["set listen-port 47001"]);
    twins.same(&SHOWN);
    let changes = [
        format!("set private-key <(echo {})", own.private),
        "set fwmark 0x1234".into(),
        format!("set peer {} allowed-ips 10.1.0.0/16,fd01::/64,192.0.2.1/32", a.public),
        format!("set peer {} endpoint 192.0.2.9:1234 persistent-keepalive 25", a.public),
        format!("set peer {} endpoint [2001:db8::9]:1234 preshared-key <(echo {psk})", b.public),
        format!("set peer {} allowed-ips 10.1.0.0/16", b.public),
        format!("set peer {} persistent-keepalive off preshared-key /dev/null", a.public),
        format!("set peer {} allowed-ips ''", b.public),
        format!(
            "set peer {} peer {} remove peer {} allowed-ips 0.0.0.0/0,::/0",
            c.public, a.public, b.public
        ),
        "set fwmark off".into(),
        format!("set peer {} remove peer {} remove", b.public, c.public),
        "set private-key /dev/null".into(),
    ];
    for change in &changes {
        twins.same(&[change]);
        twins.same(&SHOWN);
    }
}

/// setconf, addconf and syncconf from the same file come to the same state, and showconf gives the file back.
#[test]
#[ignore = "needs root: task test:net"]
fn configurations_go_in_and_come_out_the_same() {
    if !ready(&["wireguard-go"]) {
        return;
    }
    let twins = Twins::new();
    let (own, a, b) = (Keys::generate(), Keys::generate(), Keys::generate());
    let whole = format!(
        "[Interface]\nListenPort = 47002\nPrivateKey = {}\nFwMark = 0x77\n\n[Peer]\nPublicKey = {}\nAllowedIPs = 10.1.2.3/16, fd01::1/64\nEndpoint = 192.0.2.1:51820\nPersistentKeepalive = 15\n",
        own.private, a.public
    );
    let more = format!("[Peer]\nPublicKey = {}\nAllowedIPs = 10.2.0.0/16\n", b.public);
    let other = format!(
        "[Interface]\nListenPort = 47002\nPrivateKey = {}\n\n[Peer]\nPublicKey = {}\nAllowedIPs = 10.3.0.0/16\n",
        own.private, b.public
    );
    // Without any keys: `wg` then sends a zero private key and port 0 ahead of the peers.
    let bare = format!("[Peer]\nPublicKey = {}\nAllowedIPs = 10.4.0.0/16\n", a.public);
    for (verb, text) in [
        ("setconf", &whole),
        ("addconf", &more),
        ("syncconf", &other),
        ("syncconf", &whole),
        ("addconf", &more),
    ] {
        let path = file("conf");
        std::fs::write(&path, text).expect("write");
        twins.same(&[&format!("{verb} {path}")]);
        twins.same(&SHOWN);
        std::fs::remove_file(path).expect("remove");
    }
    let path = file("conf");
    let before = twins.ours.wg("showconf");
    std::fs::write(&path, &before).expect("write");
    twins.ours.wg(&format!("setconf {path}"));
    assert_eq!(twins.ours.wg("showconf"), before, "what showconf says can be set");
    std::fs::write(&path, bare).expect("write");
    twins.ours.wg(&format!("setconf {path}"));
    assert_eq!(twins.ours.wg("show private-key"), "(none)");
    assert_ne!(twins.ours.wg("show listen-port"), "0", "port 0 means any port");
    std::fs::remove_file(path).expect("remove");
}

/// The configuration of one end, for wg-quick.
fn quick_file(name: &str, own: &Keys, address: &str, port: u16, peer: &Keys, rest: &str) -> String {
    let dir = std::env::temp_dir().join(format!("fvt-{}", unique()));
    std::fs::create_dir(&dir).expect("folder");
    let path = dir.join(format!("{name}.conf"));
    let text = format!(
        "[Interface]\nPrivateKey = {}\nAddress = {address}\nListenPort = {port}\n\n[Peer]\nPublicKey = {}\n{rest}",
        own.private, peer.public
    );
    std::fs::write(&path, text).expect("write");
    crate::host::sh(&format!("chmod 600 {}", path.display()));
    path.display().to_string()
}

/// `WG_QUICK_USERSPACE_IMPLEMENTATION=fv wg-quick up`, a ping each way, a default route, and `wg-quick down`.
#[test]
#[ignore = "needs root: task test:net"]
fn wg_quick_brings_it_up_and_down() {
    if !ready(&["wg-quick", "nft"]) {
        return;
    }
    let (left, right) = (Host::new("left"), Host::new("right"));
    left.cable("wire", &["10.66.0.1/24"], &right, &["10.66.0.2/24"]);
    let (lk, rk) = (Keys::generate(), Keys::generate());
    let names = [0, 1].map(|_| format!("t{}", unique().replace('-', "n")));
    let confs = [
        quick_file(
            &names[0],
            &lk,
            "10.67.0.1/24, fd67::1/64",
            51821,
            &rk,
            "Endpoint = 10.66.0.2:51822\nAllowedIPs = 0.0.0.0/0, ::/0\n",
        ),
        quick_file(
            &names[1],
            &rk,
            "10.67.0.2/24, fd67::2/64",
            51822,
            &lk,
            "AllowedIPs = 10.67.0.1/32, fd67::1/128\n",
        ),
    ];
    // wg-quick asks all sockets of the machine, and `wg` removes one that another test has made but does not
    // listen on yet: so these two have a folder of their own in that place.
    let sockets = tempfile::tempdir().expect("folder");
    let quick = |host: &Host, verb: &str, conf: &str| {
        let (place, fv) = (sockets.path().display(), Program::Fv.path());
        host.run(&format!(
            "mkdir -p /run/wireguard && unshare --mount bash -c 'mount --bind {place} /run/wireguard && WG_QUICK_USERSPACE_IMPLEMENTATION={} wg-quick {verb} {conf}'",
            fv.display()
        ))
    };
    for _ in 0..2 {
        quick(&right, "up", &confs[1]);
        quick(&left, "up", &confs[0]);
        right.address("lo", "192.0.2.1/32");
        left.ping("10.67.0.2", 2);
        right.ping("fd67::1", 2);
        // Only the default route leads there.
        left.ping("192.0.2.1", 2);
        right.ip("address delete 192.0.2.1/32 dev lo");
        quick(&left, "down", &confs[0]);
        quick(&right, "down", &confs[1]);
        for (host, name) in [(&left, &names[0]), (&right, &names[1])] {
            assert!(!host.ip("link show").contains(name.as_str()), "the interface stays");
            let gone = || !sockets.path().join(format!("{name}.sock")).exists();
            assert!(within(Duration::from_secs(3), gone), "the socket stays");
        }
        assert!(!left.ip("rule show").contains("51821"), "rules stay");
    }
    for conf in confs {
        std::fs::remove_dir_all(std::path::Path::new(&conf).parent().expect("folder")).expect("remove");
    }
}
