//! Many peers: what it costs to have them.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::host::{Host, ready, sh};
use crate::node::{Keys, Node, Program};
use crate::transfer::alone;

const PEERS: usize = 10_000;

/// 10 000 peers are configured, shown and removed in seconds, and cost next to nothing while they are idle.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-TMR-13
fn ten_thousand_peers_are_cheap() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let node = Node::start(Program::Fv, &host);
    host.ip(&format!("link set {} up", node.name));
    node.wg(&format!("set private-key <(echo {}) listen-port 48001", Keys::generate().private));
    let empty = node.memory();
    let mut text = String::new();
    // Any 32 bytes are a public key.
    let keys = sh(&format!("head -c {} /dev/urandom | base64 -w 44", PEERS * 33));
    for (n, key) in keys.lines().map(|line| format!("{}=", &line[..43])).take(PEERS).enumerate() {
        let (high, low) = (n / 256, n % 256);
        // The last character of a key carries four bits only.
        let key = format!("{}A=", &key[..42]);
        writeln!(
            text,
            "[Peer]\nPublicKey = {key}\nEndpoint = 127.0.0.1:9\nAllowedIPs = 10.{high}.{low}.0/24"
        )
        .expect("text");
    }
    let file = std::env::temp_dir().join(format!("{}.conf", node.name));
    std::fs::write(&file, text).expect("write");
    let _alone = alone();
    let timed = |what: &str, limit: f64, work: &mut dyn FnMut()| {
        let began = Instant::now();
        work();
        let took = began.elapsed().as_secs_f64();
        println!("{what}: {took:.2} s");
        assert!(took < limit, "{what} took {took:.2} s");
    };
    timed("addconf of 10 000 peers", 10.0, &mut || drop(node.wg(&format!("addconf {}", file.display()))));
    let bytes = (node.memory().saturating_sub(empty)) * 1024 / PEERS as u64;
    println!("{bytes} bytes a peer, {empty} KiB without any");
    assert!(bytes < 8192, "{bytes} bytes a peer");
    timed("wg show dump", 2.0, &mut || assert_eq!(node.wg("show dump").lines().count(), PEERS + 1));
    let cpu = node.cpu();
    std::thread::sleep(Duration::from_secs(5));
    let idle = node.cpu() - cpu;
    println!("idle for 5 s: {idle:?} of processor time");
    assert!(idle <= Duration::from_millis(50), "{idle:?} of processor time in 5 s of doing nothing");
    timed("removal of all", 10.0, &mut || {
        assert_eq!(node.uapi("set=1\nreplace_peers=true\n\n"), "errno=0\n\n");
    });
    assert_eq!(node.wg("show peers"), "");
    std::fs::remove_file(file).expect("remove");
}
