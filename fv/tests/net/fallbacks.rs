//! Whatever a kernel, a link or a sender does, packets arrive once and in order, or are counted as lost. The table of
//! docs/fallbacks.md names these tests.

use std::process::{Child, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::host::{Host, ready, try_sh, unique};
use crate::node::{Node, Program, within};
use crate::pair::{LEFT4, Pair, RIGHT4};
use crate::transfer::{tcp, turn};

/// A running strace that has the kernel's answers changed.
struct Tampered(Child);

impl Tampered {
    /// From here on `node`'s system calls are tampered with as strace's `options` say.
    #[track_caller]
    fn with(node: &Node, options: &str) -> Self {
        let line = format!("exec strace -f -qq -o /dev/null {options} -p {}", node.pid());
        let mut strace = std::process::Command::new("bash");
        let child = strace.args(["-c", &line]).stderr(Stdio::null()).spawn().expect("strace runs");
        let tasks =
            || std::fs::read_dir(format!("/proc/{}/task", node.pid())).into_iter().flatten().flatten();
        let traced = |task: std::fs::DirEntry| {
            let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
            !status.contains("TracerPid:\t0\n")
        };
        assert!(within(Duration::from_secs(5), || tasks().all(traced)), "strace does not come");
        Self(child)
    }
}

impl Drop for Tampered {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

/// The counters of a node, by name.
#[track_caller]
fn counters(node: &Node) -> Value {
    let output = try_sh(&format!("{} doctor {} --json", Program::Fv.path().display(), node.name));
    let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    said["counters"].clone()
}

#[track_caller]
fn count(node: &Node, name: &str) -> u64 {
    counters(node)[name].as_u64().unwrap_or_else(|| panic!("no counter {name}"))
}

/// Datagrams that the node says it could not send, and packets that it could not write to its interface.
#[track_caller]
fn lost(node: &Node) -> u64 {
    let all = counters(node);
    ["udp_lost_full", "udp_lost_refused", "udp_lost_no_socket", "tun_lost_down", "tun_lost_refused"]
        .iter()
        .map(|name| all[name].as_u64().expect("a counter"))
        .sum()
}

#[track_caller]
fn connected() -> Pair {
    let pair = Pair::new(Program::Fv, Program::Fv);
    pair.ping_all(1);
    pair
}

/// Every answer of the kernel that says "not now" or "not like that": TCP arrives byte for byte, both ways, the program lives,
/// and pings pass at once when the kernel is itself again.
#[test]
#[ignore = "needs root: task test:net"]
fn no_answer_of_the_kernel_to_a_system_call_ends_or_corrupts_anything() {
    if !ready(&["strace"]) {
        return;
    }
    let sends = [
        "EIO",
        "EINVAL",
        "EMSGSIZE",
        "EAGAIN",
        "ENOBUFS",
        "ENOMEM",
        "EPERM",
        "ENETUNREACH",
        "EHOSTUNREACH",
        "EADDRNOTAVAIL",
        "ECONNREFUSED",
        "EINTR",
    ];
    let receives = ["EINTR", "ENOMEM", "ENOBUFS", "ECONNREFUSED", "EHOSTUNREACH", "EIO"];
    let writes = ["EINVAL", "ENOMEM", "ENOBUFS", "EAGAIN", "EINTR", "EIO"];
    let reads = ["ENOMEM", "EINTR", "EIO", "EINVAL"];
    let tun = "-P /dev/net/tun";
    let mut cases = Vec::new();
    for error in sends {
        cases.push((
            format!("-e trace=sendmsg,sendmmsg -e inject=sendmsg,sendmmsg:error={error}:when=3+9"),
            error,
        ));
    }
    for error in receives {
        cases.push((format!("-e trace=recvmmsg -e inject=recvmmsg:error={error}:when=2+5"), error));
    }
    for error in writes {
        cases.push((
            format!("{tun} -e trace=write,writev -e inject=write,writev:error={error}:when=3+11"),
            error,
        ));
    }
    for error in reads {
        cases
            .push((format!("{tun} -e trace=read,readv -e inject=read,readv:error={error}:when=3+11"), error));
    }
    for error in ["EINTR", "ENOSYS", "ENOMEM"] {
        cases.push((
            format!(
                "-e trace=epoll_wait,epoll_pwait -e inject=epoll_wait,epoll_pwait:error={error}:when=2+3"
            ),
            error,
        ));
    }
    for error in ["ENOSYS", "EINVAL"] {
        cases.push((
            format!("-e trace=timerfd_settime -e inject=timerfd_settime:error={error}:when=1+2"),
            error,
        ));
    }
    let pair = connected();
    let (left, right) = (&pair.left, &pair.right);
    for (options, _) in &cases {
        {
            let _load = turn();
            let _at_left = Tampered::with(&left.node, options);
            tcp(&left.host, &right.host, RIGHT4, 1 << 20);
            tcp(&right.host, &left.host, LEFT4, 1 << 20);
        }
        let fine = within(Duration::from_secs(3), || left.host.pings(RIGHT4, 1) == 1);
        assert!(fine, "after {options}");
    }
    pair.ping_all(2);
}

/// A trick that the kernel refuses costs no packet: the same datagrams go singly, each once and in order.
#[test]
#[ignore = "needs root: task test:net"]
fn trains_that_the_kernel_refuses_to_cut_are_sent_again_without_a_loss() {
    if !ready(&["strace", "iperf3", "ss"]) {
        return;
    }
    for (error, whens) in [("EIO", &["1", "2+3"][..]), ("EINVAL", &["1", "5+2"]), ("EMSGSIZE", &["1"])] {
        for &when in whens {
            let _load = turn();
            let pair = connected();
            let tampered = Tampered::with(
                &pair.left.node,
                &format!("-e trace=sendmmsg -e inject=sendmmsg:error={error}:when={when}"),
            );
            let said = udp(&pair, "-b 15M -P 4 -l 1300 -t 1.5");
            drop(tampered);
            let (got_lost, disorder, packets) = said;
            let counted = lost(&pair.left.node) + lost(&pair.right.node);
            assert!(packets > 2000, "{packets}");
            assert_eq!(disorder, 0, "{error} {when}");
            // Refused again as a single datagram, it is lost; the control connection of iperf3 goes the same way.
            let all = got_lost..=got_lost + 5;
            assert!(all.contains(&counted), "{error} {when}: {got_lost} lost, {counted} counted");
            assert!(when != "1" || got_lost <= 1, "{error}: {got_lost} lost");
        }
    }
}

/// Runs UDP from left to right; packets lost by the two ends, packets out of order, and all. What the kernel dropped before or
/// behind them, and counted, as somebody was too slow to read, is not theirs.
#[track_caller]
fn udp(pair: &Pair, options: &str) -> (u64, u64, u64) {
    let unread = || {
        let said = pair.right.host.run("nstat -asz UdpRcvbufErrors Udp6RcvbufErrors");
        let reader: u64 =
            said.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum();
        // What waited for the left end beyond the queue of its interface, and for the right one beyond its socket's buffer.
        let link: Value =
            serde_json::from_str(&pair.left.host.ip(&format!("-s -j link show {}", pair.left.node.name)))
                .expect("JSON");
        let queue = link[0]["stats64"]["tx"]["dropped"].as_u64().expect("a number");
        reader + queue + count(&pair.right.node, "udp_lost_unread")
    };
    let mut server = pair.right.host.command("iperf3");
    let mut server =
        server.args(["-s", "-1", "-B", RIGHT4]).stdout(Stdio::null()).spawn().expect("iperf3 runs");
    let listens = || pair.right.host.run("ss -Hltn sport = :5201").contains("5201");
    assert!(within(Duration::from_secs(10), listens), "iperf3 does not listen");
    let before = unread();
    let said = pair.left.host.run(&format!("iperf3 -u -c {RIGHT4} -J {options}"));
    server.wait().expect("iperf3 ends");
    let unread = unread() - before;
    let said: Value = serde_json::from_str(&said).expect("JSON");
    let streams = said["end"]["streams"].as_array().expect("streams").iter().map(|stream| &stream["udp"]);
    let number = |value: &Value| value.as_u64().expect("a number");
    let (lost, disorder, packets) = streams.fold((0, 0, 0), |(lost, disorder, packets), udp| {
        (
            lost + number(&udp["lost_packets"]),
            disorder + number(&udp["out_of_order"]),
            packets + number(&udp["packets"]),
        )
    });
    (lost.saturating_sub(unread), disorder, packets)
}

/// What the kernel refuses outright is lost, as on a network; then each loss is in a counter, and nothing is out of order.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-6
fn each_datagram_that_the_kernel_refuses_is_counted() {
    if !ready(&["strace", "iperf3", "ss"]) {
        return;
    }
    for (call, error) in [
        ("sendmsg,sendmmsg", "EPERM"),
        ("sendmsg,sendmmsg", "ENETUNREACH"),
        ("sendmsg,sendmmsg", "EAGAIN"),
        ("sendmsg,sendmmsg", "ENOBUFS"),
    ] {
        let _load = turn();
        let pair = connected();
        let (before_l, before_r) = (lost(&pair.left.node), lost(&pair.right.node));
        let tampered = Tampered::with(
            &pair.left.node,
            &format!("-e trace={call} -e inject={call}:error={error}:when=100+30"),
        );
        let (got_lost, disorder, packets) = udp(&pair, "-b 4M -P 4 -l 600 -t 1.5");
        drop(tampered);
        let (left, right) = (lost(&pair.left.node) - before_l, lost(&pair.right.node) - before_r);
        assert!(packets > 2000, "{packets}");
        assert_eq!(disorder, 0, "{error}");
        // The control connection of iperf3 goes the same way: a few of the counted losses are its.
        assert!(
            left + right >= got_lost && left + right <= got_lost + 40,
            "{error}: {got_lost} lost, {left} + {right} counted"
        );
    }
}

/// The size of a packet inside meets all kinds of links.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-5
fn every_mtu_from_68_to_65000_carries_what_fits_and_nothing_breaks() {
    if !ready(&[]) {
        return;
    }
    let pair = connected();
    let (left, right) = (&pair.left, &pair.right);
    for mtu in [65_000_u32, 9000, 1500, 1421, 1420, 1419, 1280, 576, 129, 68] {
        let _load = turn();
        for end in [left, right] {
            end.host.ip(&format!("link set {} mtu {mtu}", end.node.name));
        }
        for size in [mtu - 28, mtu - 29, mtu / 2, 0] {
            let ping = format!("ping -n -q -c 2 -i 0.01 -W 2 -M do -s {size} {RIGHT4}");
            let answered = || left.host.try_run(&ping).status.success();
            assert!(within(Duration::from_secs(5), answered), "{size} bytes at MTU {mtu}");
        }
        tcp(&left.host, &right.host, RIGHT4, if mtu < 500 { 1 << 17 } else { 4 << 20 });
        tcp(&right.host, &left.host, LEFT4, if mtu < 500 { 1 << 17 } else { 4 << 20 });
    }
}

/// Outside, the path may be narrower than a datagram, and change while it is used.
#[test]
#[ignore = "needs root: task test:net"]
//@test C-OUT-5
fn a_path_that_narrows_or_goes_away_under_load_costs_time_and_nothing_else() {
    if !ready(&[]) {
        return;
    }
    let pair = connected();
    let (left, right) = (&pair.left, &pair.right);
    std::thread::scope(|scope| {
        let changes = scope.spawn(|| {
            for mtu in [1400, 1280, 600, 1500, 900, 1500] {
                for end in [left, right] {
                    end.host.ip(&format!("link set wire mtu {mtu}"));
                    std::thread::sleep(Duration::from_millis(40));
                }
            }
            for _ in 0..3 {
                left.host.ip("link set wire down");
                std::thread::sleep(Duration::from_millis(150));
                left.host.ip("link set wire up");
                std::thread::sleep(Duration::from_millis(250));
            }
            for mtu in [1300, 1420, 700, 1420] {
                left.host.ip(&format!("link set {} mtu {mtu}", left.node.name));
                std::thread::sleep(Duration::from_millis(40));
            }
        });
        while !changes.is_finished() {
            let _load = turn();
            tcp(&left.host, &right.host, RIGHT4, 16 << 20);
            tcp(&right.host, &left.host, LEFT4, 16 << 20);
        }
    });
    left.host.ping(RIGHT4, 3);
    assert_eq!(count(&right.node, "bad_tag") + count(&left.node, "bad_tag"), 0);
}

/// Opt-in: UDP datagrams of a flow joined for the interface. The reading program sees each by itself, in order; and when
/// the kernel refuses, the same datagrams go singly.
#[test]
#[ignore = "needs root: task test:net"]
fn joined_datagrams_arrive_each_by_itself_and_in_order() {
    if !ready(&["iperf3", "ss", "strace"]) {
        return;
    }
    for refused in [false, true] {
        let _load = turn();
        let mut pair = Pair::unconfigured(Program::Fv, Program::Fv);
        let name = format!("t{}", unique().replace('-', "n"));
        let mut command = pair.right.host.command(Program::Fv.path().to_str().expect("a plain path"));
        command.args(["-f", &name]).env("FV_OFFLOAD", "tun-udp-gro").env("LOG_LEVEL", "info");
        pair.right.node = Node::start_with(Program::Fv, command, &name);
        pair.configure();
        pair.ping_all(1);
        let refusing = "-P /dev/net/tun -e trace=writev -e inject=writev:error=EINVAL:when=1+7";
        let tampered = refused.then(|| Tampered::with(&pair.right.node, refusing));
        // A traced program is slow, and so is whoever reads beside it.
        let rate = if refused { "-b 10M" } else { "-b 100M" };
        let (got_lost, disorder, packets) = udp(&pair, &format!("{rate} -P 2 -l 1200 -t 1.5"));
        drop(tampered);
        let all = counters(&pair.right.node);
        let counted = lost(&pair.left.node) + lost(&pair.right.node);
        assert!(packets > 2000 && disorder == 0, "{packets} packets, {disorder} in disorder");
        assert!(
            got_lost <= counted + all["udp_lost_unread"].as_u64().unwrap_or(0),
            "{got_lost} lost, {counted} counted"
        );
        if refused {
            assert!(all["tun_merge_fallbacks"].as_u64() >= Some(1), "{all}");
            assert!(pair.right.node.log().contains("joined writes"), "{}", pair.right.node.log());
        } else {
            assert!(all["tun_merged_packets"].as_u64() >= Some(100), "{all}");
        }
    }
}

/// Small segments make the largest super-packets: hundreds of segments in one.
#[test]
#[ignore = "needs root: task test:net"]
fn super_packets_of_hundreds_of_small_segments_arrive_whole() {
    if !ready(&[]) {
        return;
    }
    let pair = connected();
    let (left, right) = (&pair.left, &pair.right);
    for mss in [536, 100, 88, 49] {
        let _load = turn();
        for (end, to) in [(left, RIGHT4), (right, LEFT4)] {
            end.host.ip(&format!("route replace {to}/32 dev {} advmss {mss}", end.node.name));
        }
        tcp(&left.host, &right.host, RIGHT4, 1 << 20);
        tcp(&right.host, &left.host, LEFT4, 1 << 20);
    }
}

/// Packets as no ordinary sender makes them pass unchanged: options, fragments, extension headers, no checksum.
#[test]
#[ignore = "needs root: task test:net"]
fn odd_packets_pass_unchanged_byte_for_byte() {
    if !ready(&["python3"]) {
        return;
    }
    let pair = connected();
    let (left, right) = (&pair.left, &pair.right);
    let listener =
        right.host.command("python3").args(["-c", LISTEN, &right.node.name]).stdout(Stdio::piped()).spawn();
    let listener = listener.expect("python3 runs");
    std::thread::sleep(Duration::from_millis(500));
    let sent = say(&left.host, &left.node.name);
    let output = listener.wait_with_output().expect("python3 ends");
    let heard = String::from_utf8_lossy(&output.stdout).into_owned();
    let heard: Vec<&str> = heard.lines().collect();
    let sent: Vec<&str> = sent.lines().collect();
    assert!(sent.len() >= 14, "{sent:?}");
    for packet in &sent {
        assert!(heard.contains(packet), "{packet} did not arrive unchanged; {heard:?}");
    }
    let order: Vec<&&str> = heard.iter().filter(|packet| sent.contains(packet)).collect();
    assert_eq!(order, sent.iter().collect::<Vec<_>>(), "once each, and in order");
    // What is no IP packet, or lies about its length, does not pass and is counted.
    assert!(count(&left.node, "not_ip") >= 2);
    pair.ping_all(1);
}

#[track_caller]
fn say(host: &Host, interface: &str) -> String {
    host.run(&format!("python3 -c '{SAY}' {interface}"))
}

/// Writes each packet of the test's own that comes by the interface, in hex, for three seconds.
const LISTEN: &str = r#"
import socket, sys, time
s = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
s.bind((sys.argv[1], 0))
end = time.time() + 3
while time.time() < end:
    s.settimeout(max(0.01, end - time.time()))
    try: packet, where = s.recvfrom(65536)
    except OSError: break
    if where[2] != 4: print(packet.hex(), flush=True)
"#;

/// Puts odd packets on the interface, and writes those that are to pass in hex.
const SAY: &str = r#"
import socket, struct, sys, time
s = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
def inet(data):
    if len(data) % 2: data += b"\0"
    sum = 0
    for i in range(0, len(data), 2): sum += data[i] << 8 | data[i + 1]
    while sum >> 16: sum = (sum & 65535) + (sum >> 16)
    return sum ^ 65535
def v4(payload, proto=17, options=b"", fragment=0, tos=0):
    head = struct.pack(">BBHHHBBH4s4s", 0x40 | 5 + len(options) // 4, tos, 20 + len(options) + len(payload), 77,
        fragment, 64, proto, 0, bytes([10, 67, 0, 1]), bytes([10, 67, 0, 2])) + options
    return head[:10] + struct.pack(">H", inet(head)) + head[12:] + payload
a, b = bytes.fromhex("fd67" + "0" * 27 + "1"), bytes.fromhex("fd67" + "0" * 27 + "2")
def v6(payload, next=17):
    return struct.pack(">IHBB", 6 << 28, len(payload), next, 64) + a + b + payload
def udp(payload, sum=0):
    return struct.pack(">HHHH", 4000, 4001, 8 + len(payload), sum) + payload
long = bytes(range(250)) * 5
passing = [
    v4(udp(b"no checksum")),
    v4(udp(b"wrong checksum", 0x1234)),
    v4(udp(b"router alert"), options=bytes([148, 4, 0, 0])),
    v4(udp(b"nops"), options=bytes([1] * 40)),
    v4(udp(long)[:800], fragment=0x2000),
    v4(udp(long)[800:], fragment=100),
    v4(b"protocol 253", proto=253),
    v4(b"", proto=59),
    v4(udp(b"not ect, dscp"), tos=0xb8),
    v6(udp(b"v6, no checksum")),
    v6(bytes([17, 0, 1, 4, 0, 0, 0, 0]) + udp(b"hop by hop"), next=0),
    v6(bytes([17, 1, 1, 12] + [0] * 12) + udp(b"destination options"), next=60),
    v6(bytes([17, 0, 0, 1, 0, 0, 0, 9]) + udp(long)[:1000], next=44),
    v6(bytes([17, 0, 3, 232, 0, 0, 0, 9]) + udp(long)[1000:], next=44),
    v6(b"", next=59),
    v6(bytes([59, 0, 0, 0, 0, 0, 0, 0]), next=43),
]
def put(packet, kind): s.sendto(packet, (sys.argv[1], kind))
for packet in passing:
    put(packet, 0x86dd if packet[0] >> 4 == 6 else 0x0800)
    print(packet.hex())
put(b"\x50" + passing[0][1:], 0x0800)
put(passing[0][:19], 0x0800)
put(passing[9][:39], 0x86dd)
"#;
