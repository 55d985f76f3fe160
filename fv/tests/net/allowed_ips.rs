//! Which addresses belong to which peer, as `wg` sees it and as packets do.

use crate::host::{Host, ready};
use crate::node::{Keys, Node, Program};
use crate::pair::{Pair, RIGHT4, RIGHT6};

/// F51 and F52: a prefix given to another peer moves there, host bits do not count.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-AIP-1
fn f51_a_prefix_moves_to_the_peer_that_got_it_last() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let node = Node::start(Program::Fv, &host);
    let (a, b) = (Keys::generate().public, Keys::generate().public);
    for (first, second, shown) in [
        ("0.0.0.0/0", "0.0.0.0/0", "0.0.0.0/0"),
        ("::/0", "::/0", "::/0"),
        ("10.3.7.8/8", "10.9.9.9/8", "10.0.0.0/8"),
        ("fd00:1::1/32", "fd00:1:ffff::/32", "fd00:1::/32"),
        ("192.0.2.7", "192.0.2.7/32", "192.0.2.7/32"),
    ] {
        node.wg(&format!("set peer {a} allowed-ips {first}"));
        assert_eq!(node.peer(&a, "allowed-ips"), shown);
        node.wg(&format!("set peer {b} allowed-ips {second}"));
        assert_eq!(node.peer(&a, "allowed-ips"), "(none)", "{first} stayed behind");
        assert_eq!(node.peer(&b, "allowed-ips"), shown);
    }
}

/// F53: IPv6 packets that are little more than a header pass both ways.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-IN-3
//@test C-OUT-1
fn f53_the_shortest_ipv6_packets_pass() {
    if !ready(&["python3"]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT6, 1);
    // Protocol 253 is for experiments: a bare header, one byte, fourteen bytes.
    let listen = "import socket
s = socket.socket(socket.AF_INET6, socket.SOCK_RAW, 253); s.settimeout(5); print('up', flush=True)
print(sorted(len(s.recv(99)) for _ in range(3)))";
    let send = |to: &str| {
        format!(
            "python3 -c \"import socket
s = socket.socket(socket.AF_INET6, socket.SOCK_RAW, 253)
for n in (0, 1, 14): s.sendto(b'x' * n, ('{to}', 0))\""
        )
    };
    for (from, to, address) in
        [(&pair.left.host, &pair.right.host, RIGHT6), (&pair.right.host, &pair.left.host, crate::pair::LEFT6)]
    {
        std::thread::scope(|scope| {
            let (up, is_up) = std::sync::mpsc::channel();
            let heard = scope.spawn(move || {
                use std::io::BufRead as _;
                let mut child = to
                    .command("python3")
                    .args(["-c", listen])
                    .stdout(std::process::Stdio::piped())
                    .spawn()
                    .expect("python3");
                let mut lines = std::io::BufReader::new(child.stdout.take().expect("piped")).lines();
                up.send(lines.next().is_some()).expect("the test waits");
                let lengths = lines.next().and_then(Result::ok);
                child.wait().expect("python3");
                lengths
            });
            assert!(is_up.recv().expect("a listener"));
            from.run(&send(address));
            assert_eq!(heard.join().expect("listener").as_deref(), Some("[0, 1, 14]"));
        });
    }
}

/// F54: taking one address from a peer, or giving it a new list, keeps session, port and counters; only that way stops.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-AIP-2
//@test C-AIP-3
fn f54_removing_one_address_stops_only_that_way() {
    if !ready(&[]) {
        return;
    }
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.left.host.ping(RIGHT4, 2);
    pair.left.host.ping(RIGHT6, 2);
    let state = || {
        let node = &pair.left.node;
        (
            node.peer(pair.right_key(), "latest-handshakes"),
            node.wg("show listen-port"),
            node.peer(pair.right_key(), "endpoints"),
        )
    };
    let (before, (rx, tx)) = (state(), pair.left.node.transfer(pair.right_key()));
    let key = crate::host::sh(&format!("base64 -d <<<{} | od -An -v -tx1 | tr -d ' \\n'", pair.right_key()));
    let reply = pair
        .left
        .node
        .uapi(&format!("set=1\npublic_key={key}\nupdate_only=true\nallowed_ip=-{RIGHT4}/32\n\n"));
    assert_eq!(reply, "errno=0\n\n");
    assert_eq!(pair.left.host.pings(RIGHT4, 2), 0, "the way that was taken still works");
    pair.left.host.ping(RIGHT6, 2);
    assert_eq!(state(), before);
    let (rx2, tx2) = pair.left.node.transfer(pair.right_key());
    assert!(rx2 > rx && tx2 > tx, "the counters started anew");
    // And with a list that replaces.
    pair.left.node.wg(&format!("set peer {} allowed-ips {RIGHT4}/32", pair.right_key()));
    assert_eq!(pair.left.host.pings(RIGHT6, 2), 0, "the way that was taken still works");
    pair.left.host.ping(RIGHT4, 2);
    assert_eq!(state(), before);
}
