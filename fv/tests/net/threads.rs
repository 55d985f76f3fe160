//! Several threads: what one thread does right, more must too, above all the order of packets within a flow.

use std::time::Duration;

use crate::host::{ready, sh};
use crate::node::{Keys, Program, within};
use crate::pair::{LEFT4, Pair, RIGHT4, RIGHT6};
use crate::transfer::{tcp, turn};

/// How many threads: one, one for each direction, and several queues.
const COUNTS: [u8; 3] = [1, 2, 4];

fn pair(threads: u8) -> Pair {
    let pair = Pair::new(Program::FvThreads(threads), Program::FvThreads(threads));
    pair.ping_all(1);
    pair
}

/// When the left end last shook hands, in seconds since 1970.
fn handshake(pair: &Pair) -> u64 {
    pair.left.node.peer(pair.right_key(), "latest-handshakes").parse().expect("a number")
}

/// What iperf3 says of a run from left to right.
fn iperf(pair: &Pair, options: &str) -> serde_json::Value {
    let server = pair.right.host.command("iperf3").args(["-s", "-1", "-B", RIGHT4]).spawn();
    let mut server = server.expect("iperf3 runs");
    let listens = || pair.right.host.run("ss -Hltn sport = :5201").contains("5201");
    assert!(within(Duration::from_secs(10), listens), "iperf3 does not listen");
    let said = pair.left.host.run(&format!("iperf3 -c {RIGHT4} -J {options}"));
    server.wait().expect("iperf3 ends");
    serde_json::from_str(&said).expect("JSON")
}

#[test]
#[ignore = "needs root: task test:net"]
fn packets_of_a_flow_stay_in_order_and_arrive_whole_with_1_2_and_4_threads() {
    if !ready(&["iperf3", "ss"]) {
        return;
    }
    for threads in COUNTS {
        let _load = turn();
        let pair = pair(threads);
        // Well below what would drop: then nothing is lost, so nothing may come again or in another order.
        let udp = iperf(&pair, "-u -b 10M -P 8 -l 600 -t 1.5");
        for stream in udp["end"]["streams"].as_array().expect("streams") {
            let stream = &stream["udp"];
            assert!(stream["packets"].as_u64().expect("packets") > 1000, "{stream}");
            assert_eq!(stream["out_of_order"], 0, "{threads} threads: {stream}");
        }
        iperf(&pair, "-b 20M -P 8 -t 1.5");
        // What the sending kernel saw of answers that were not in the order of what it sent.
        let seen =
            pair.left.host.run("nstat -asz TcpExtTCPSACKReorder TcpExtTCPTSReorder TcpExtTCPRenoReorder");
        let counts = seen.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        assert_eq!(counts.collect::<Vec<_>>(), [0; 3], "{threads} threads: {seen}");
        tcp(&pair.left.host, &pair.right.host, RIGHT4, 64 << 20);
        tcp(&pair.right.host, &pair.left.host, LEFT4, 32 << 20);
        tcp(&pair.left.host, &pair.right.host, RIGHT6, 16 << 20);
        let many = iperf(&pair, "-P 50 -t 1");
        let bytes = many["end"]["sum_received"]["bytes"].as_u64().expect("bytes");
        assert!(bytes > 10 << 20, "50 flows brought {bytes} bytes");
        pair.ping_all(3);
    }
}

#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-6
fn what_other_threads_sent_is_counted_and_shown() {
    if !ready(&[]) {
        return;
    }
    for threads in COUNTS {
        let pair = pair(threads);
        let (rx, tx) = pair.left.node.transfer(pair.right_key());
        // 100 pings of 1028 bytes, padded to 1040, and 32 around them; answers of the same size.
        pair.left.host.run(&format!("ping -q -n -i 0.01 -c 100 -s 1000 {RIGHT4}"));
        let (rx2, tx2) = pair.left.node.transfer(pair.right_key());
        let expected = 100 * (1040 + 32);
        assert!((expected..expected + 1000).contains(&(tx2 - tx)), "{threads}: sent {}", tx2 - tx);
        assert!((expected..expected + 1000).contains(&(rx2 - rx)), "{threads}: received {}", rx2 - rx);
    }
}

/// The worker keeps the timers, the carriers send: data that nobody answers asks for a handshake after 15 s all the same,
/// and what was sent meanwhile counts as a sign of life to the other end.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-TMR-4
fn a_long_silence_after_data_of_another_thread_asks_for_a_handshake() {
    if !ready(&["nft"]) {
        return;
    }
    let pair = pair(2);
    let first = handshake(&pair);
    // The other end hears and cannot answer.
    pair.right.host.run(
        "nft 'table ip mute { chain o { type filter hook output priority 0; ip daddr 10.66.0.1 drop; }; }'",
    );
    assert_eq!(pair.left.host.pings(RIGHT4, 1), 0);
    std::thread::sleep(Duration::from_secs(14));
    pair.right.host.run("nft delete table ip mute");
    let renewed = || handshake(&pair) > first;
    assert!(within(Duration::from_secs(8), renewed), "no handshake 15 s after data without an answer");
}

#[test]
#[ignore = "needs root: task test:net"]
//@test C-SES-7
fn a_removed_peer_gets_nothing_more_and_another_one_goes_on() {
    if !ready(&["iperf3", "ss"]) {
        return;
    }
    for threads in [2, 4] {
        let _load = turn();
        let pair = pair(threads);
        let key = pair.right_key().to_owned();
        let listen = "timeout 20 iperf3 -s -1 >/dev/null 2>&1 & sleep 0.5; echo";
        pair.right.host.run(listen);
        let load = format!("timeout 6 iperf3 -c {RIGHT4} -P 4 -t 5 >/dev/null 2>&1 & sleep 1; echo");
        pair.left.host.run(&load);
        pair.left.node.wg(&format!("set peer {key} remove"));
        // From the answer on, not a byte.
        let sent = || {
            let said: serde_json::Value =
                serde_json::from_str(&pair.left.host.ip("-s -j link show wire")).expect("JSON");
            said[0]["stats64"]["tx"]["packets"].as_u64().expect("a number")
        };
        std::thread::sleep(Duration::from_millis(50));
        let before = sent();
        std::thread::sleep(Duration::from_millis(500));
        let after = sent();
        assert!(
            after - before < 10,
            "{threads} threads: {} packets after the peer was removed",
            after - before
        );
        // Back again, with the same allowed addresses, and a stranger that takes them for a moment.
        let stranger = Keys::generate();
        pair.left.node.wg(&format!("set peer {} allowed-ips {RIGHT4}/32", stranger.public));
        assert_eq!(pair.left.host.pings(RIGHT4, 1), 0, "these addresses are the stranger's");
        pair.left.node.wg(&format!("set peer {} remove", stranger.public));
        pair.introduce(&pair.left, "10.66.0.2:51822");
        pair.ping_all(2);
    }
}

#[test]
#[ignore = "needs root: task test:net"]
//@test C-TMR-12
fn links_ports_and_keys_change_under_the_load_of_several_threads() {
    if !ready(&["iperf3", "ss"]) {
        return;
    }
    for threads in [2, 4] {
        let _load = turn();
        let pair = pair(threads);
        let node = &pair.left.node;
        pair.right.host.run("timeout 60 iperf3 -s -1 >/dev/null 2>&1 & sleep 0.5; echo");
        pair.left.host.run(&format!("timeout 40 iperf3 -c {RIGHT4} -P 4 -t 8 >/dev/null 2>&1 & echo"));
        for round in 0..30 {
            node.wg(&format!("set listen-port {}", 51821 + round % 3));
            node.wg(&format!("set fwmark {}", round % 2));
            if round % 10 == 9 {
                pair.left.host.ip(&format!("link set {} down", node.name));
                pair.left.host.ip(&format!("link set {} up", node.name));
            }
            if round % 8 == 7 {
                pair.left.host.ip(&format!("link set {} mtu {}", node.name, 1280 + round));
            }
        }
        node.wg("set listen-port 51821");
        // (With the link its IPv6 addresses went.)
        pair.left.host.ping(RIGHT4, 3);
        // Both keys anew, while it goes on.
        let (l, r) = (Keys::generate(), Keys::generate());
        let (old_l, old_r) = (pair.left_key(), pair.right_key());
        node.wg(&format!(
            "set private-key <(echo {}) peer {old_r} remove peer {} endpoint 10.66.0.2:51822 allowed-ips {RIGHT4}/32,{RIGHT6}/128",
            l.private, r.public
        ));
        pair.right.node.wg(&format!(
            "set private-key <(echo {}) peer {old_l} remove peer {} endpoint 10.66.0.1:51821 allowed-ips {LEFT4}/32",
            r.private, l.public
        ));
        pair.left.host.ping(RIGHT4, 3);
    }
}

#[test]
#[ignore = "needs root: task test:net"]
fn the_doctor_names_the_threads_and_the_end_leaves_none() {
    if !ready(&[]) {
        return;
    }
    for threads in COUNTS {
        let pair = pair(threads);
        let said = sh(&format!("{} doctor {}", Program::Fv.path().display(), pair.left.node.name));
        let expected = match threads {
            1 => "1 carries packets",
            2 => "2 carry packets, one for each direction",
            _ => "4 carry packets, one of them inward",
        };
        assert!(said.contains(expected), "{said}");
        let tasks = format!("/proc/{}/task", pair.left.node.pid());
        let carriers = || {
            let tasks = std::fs::read_dir(&tasks).into_iter().flatten().flatten();
            let names =
                tasks.map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default());
            names.filter(|name| name.starts_with("carrier")).count()
        };
        assert_eq!(carriers(), usize::from(threads) - 1);
        pair.left.host.ip(&format!("link delete {}", pair.left.node.name));
        let gone = || !std::fs::exists(pair.left.node.socket()).unwrap_or(true);
        assert!(
            within(Duration::from_secs(5), gone),
            "{threads} threads: it does not end with its interface"
        );
    }
}
