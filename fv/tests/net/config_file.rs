//! `fv up FILE`: what wg-quick does, by one process, from the same files, on hosts with and without a resolver.

use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::host::{Host, ready, unique};
use crate::node::{Keys, Node, Program, within};

/// A configuration file that is called after an interface of its own, in a folder of its own.
struct ConfFile {
    name: String,
    path: PathBuf,
}

impl ConfFile {
    fn new(text: &str) -> Self {
        let name = format!("t{}", unique().replace('-', "n"));
        let folder = std::env::temp_dir().join(format!("fvt-{name}"));
        std::fs::create_dir(&folder).expect("folder");
        let path = folder.join(format!("{name}.conf"));
        std::fs::write(&path, text).expect("write");
        crate::host::sh(&format!("chmod 600 {}", path.display()));
        Self { name, path }
    }

    /// Up, on a host; with `mounts`, shell commands that run first, where only the new process sees their mounts.
    #[track_caller]
    fn up(&self, host: &Host, mounts: &str) -> Node {
        let mut command = host.command("unshare");
        command.args(["--mount", "sh", "-c"]);
        command.arg(format!("{mounts} exec {} up {}", Program::Fv.path().display(), self.path.display()));
        Node::start_with(Program::Fv, command, &self.name)
    }

    /// As `up` where it must end by itself.
    fn fails(&self, host: &Host) -> Output {
        host.try_run(&format!("timeout 5 {} up {}", Program::Fv.path().display(), self.path.display()))
    }
}

impl Drop for ConfFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.path.parent().expect("folder"));
    }
}

/// Two hosts on a cable and the keys of two ends; the right one is up from a plain file.
struct Street {
    left_keys: Keys,
    right_keys: Keys,
    _right: Node,
    _right_file: ConfFile,
    left: Host,
    right: Host,
}

impl Street {
    #[track_caller]
    fn new() -> Self {
        let (left, right) = (Host::new("left"), Host::new("right"));
        left.cable("wire", &["10.66.0.1/24", "fd66::1/64"], &right, &["10.66.0.2/24", "fd66::2/64"]);
        let (left_keys, right_keys) = (Keys::generate(), Keys::generate());
        let file = ConfFile::new(&format!(
            "[Interface]\nPrivateKey = {}\nAddress = 10.67.0.2/24, fd67::2/64\nListenPort = 51822\n[Peer]\nPublicKey = {}\nAllowedIPs = 10.67.0.1/32, fd67::1/128\n",
            right_keys.private, left_keys.public
        ));
        let node = file.up(&right, "");
        Self { left_keys, right_keys, _right: node, _right_file: file, left, right }
    }
}

/// Ends an interface of `fv up` and waits until nothing of it is left.
#[track_caller]
fn end(node: &mut Node, host: &Host) {
    node.signal(Signal::SIGTERM);
    let status = node.ended(Duration::from_secs(4));
    assert!(status.is_some_and(|status| status.success()), "{status:?}: {}", node.log());
    assert!(!host.ip("link show").contains(&node.name), "the interface stays");
    assert!(!node.socket().exists(), "the socket stays");
}

/// F81, F85 and F86: several lists of allowed IPs, a peer without endpoint, an MTU; addresses, routes, and their end.
#[test]
#[ignore = "needs root: task test:net"]
fn f81_f85_f86_a_file_is_brought_up_whole_and_taken_down_whole() {
    if !ready(&[]) {
        return;
    }
    let street = Street::new();
    let stranger = Keys::generate().public;
    let before = street
        .left
        .run("ip -o addr; ip -4 route show table all; ip -6 route show table all; ip rule; ip -6 rule");
    let file = ConfFile::new(&format!(
        "[Interface]\nPrivateKey = {}\nAddress = 10.67.0.1/24\nAddress = fd67::1/64\nMTU = 1300\n\n[Peer]\nPublicKey = {}\nEndpoint = 10.66.0.2:51822\nAllowedIPs = 10.67.0.2/32\nAllowedIPs = fd67::2/128, 192.0.2.0/24\n\n[Peer]\nPublicKey = {stranger}\nAllowedIPs = 10.70.0.0/16\n",
        street.left_keys.private, street.right_keys.public
    ));
    let mut node = file.up(&street.left, "");
    assert!(within(Duration::from_secs(3), || street.left.pings("10.67.0.2", 1) == 1), "{}", node.log());
    street.left.ping("fd67::2", 2);
    street.right.ping("10.67.0.1", 2);
    assert_eq!(node.peer(&street.right_keys.public, "allowed-ips"), "10.67.0.2/32 fd67::2/128 192.0.2.0/24");
    assert_eq!(node.peer(&stranger, "endpoints"), "(none)");
    assert!(street.left.ip(&format!("link show {}", node.name)).contains("mtu 1300 "));
    for to in ["192.0.2.7", "10.70.3.4"] {
        assert!(street.left.ip(&format!("route get {to}")).contains(&node.name), "no route to {to}");
    }
    end(&mut node, &street.left);
    let after = street
        .left
        .run("ip -o addr; ip -4 route show table all; ip -6 route show table all; ip rule; ip -6 rule");
    assert_eq!(after, before, "something stays behind");
}

/// A default route in both families: everything goes through the tunnel, its own packets do not, and all is undone.
#[test]
#[ignore = "needs root: task test:net"]
fn a_default_route_is_made_and_undone() {
    if !ready(&[]) {
        return;
    }
    let street = Street::new();
    street.right.address("lo", "198.51.100.1/32");
    street.right.address("lo", "2001:db8::1/128");
    let before = street.left.run("ip -4 route show table all; ip -6 route show table all; ip rule; ip -6 rule; sysctl net.ipv4.conf.all.src_valid_mark");
    for endpoint in ["10.66.0.2:51822", "[fd66::2]:51822"] {
        let file = ConfFile::new(&format!(
            "[Interface]\nPrivateKey = {}\nAddress = 10.67.0.1/24, fd67::1/64\n[Peer]\nPublicKey = {}\nEndpoint = {endpoint}\nAllowedIPs = 0.0.0.0/0, ::/0\n",
            street.left_keys.private, street.right_keys.public
        ));
        let mut node = file.up(&street.left, "");
        let ready = || street.left.pings("198.51.100.1", 1) == 1;
        assert!(
            within(Duration::from_secs(3), ready),
            "{}{}",
            node.log(),
            street.left.run("ip rule; ip route show table all")
        );
        street.left.ping("2001:db8::1", 2);
        street.left.ping("10.66.0.2", 1); // what is on the cable stays on the cable
        assert!(street.left.ip("route get 198.51.100.1").contains(&node.name));
        end(&mut node, &street.left);
        let after = street.left.run("ip -4 route show table all; ip -6 route show table all; ip rule; ip -6 rule; sysctl net.ipv4.conf.all.src_valid_mark");
        assert_eq!(after, before, "something stays behind");
    }
}

/// F82, F83 and F84: the same file without spaces, with tabs, CRLF, comments and other capitals means the same.
#[test]
#[ignore = "needs root: task test:net"]
fn f82_f83_f84_spelling_does_not_matter() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let (own, peer) = (Keys::generate(), Keys::generate());
    let (k, p) = (&own.private, &peer.public);
    let plain = format!(
        "[Interface]\nPrivateKey = {k}\nListenPort = 45010\n[Peer]\nPublicKey = {p}\nEndpoint = 192.0.2.1:51820\nAllowedIPs = 10.1.0.0/16, fd01::/64\nPersistentKeepalive = 25\n"
    );
    let odd = format!(
        "# [Peer]\r\n[interface]\r\nPRIVATEKEY={k}\r\nlistenport\t=\t45010 # not a peer: [Peer]\r\n#[Peer]\r\n#PublicKey = nobody\r\n\r\n[PEER]\r\nPublickey={p}# mine\r\nEndpoint=192.0.2.1:51820\r\nAllowedIps=10.1.2.3/16,fd01::1/64\r\nPersistentKeepAlive=25"
    );
    let shown: Vec<String> = [plain, odd]
        .iter()
        .map(|text| {
            let file = ConfFile::new(text);
            let mut node = file.up(&host, "");
            let shown = node.wg("showconf");
            end(&mut node, &host);
            shown
        })
        .collect();
    assert_eq!(shown[0], shown[1]);
    assert_eq!(shown[0].matches("[Peer]").count(), 1);
}

/// F80: what is wrong is named by line and key, secrets are not shown, and no interface is left.
#[test]
#[ignore = "needs root: task test:net"]
fn f80_mistakes_are_named_by_line_and_nothing_is_left() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let key = Keys::generate().private;
    let head = format!("[Interface]\nPrivateKey = {key}\n[Peer]\nPublicKey = {}\n", Keys::generate().public);
    for (line, word) in [
        ("PresharedKey=", "PresharedKey"),
        ("AllowedIPs = 10.0.0.0/33", "10.0.0.0/33"),
        ("Endpoint = 10.0.0.1", "10.0.0.1"),
        ("PersistentKeepalive = often", "often"),
        ("Colour = blue", "Colour"),
    ] {
        let file = ConfFile::new(&format!("{head}{line}\n"));
        let output = file.fails(&host);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {text}");
        assert!(text.contains("line 5") && text.contains(word), "{line}: {text}");
        assert!(!text.contains(&key), "shows the private key");
        assert_eq!(host.ip("-o link show").lines().count(), 1, "an interface was left");
    }
    // A port in use, seen only when everything else was right.
    let taken = host.enter(|| UdpSocket::bind("0.0.0.0:45011").expect("port"));
    let file = ConfFile::new(&format!("[Interface]\nPrivateKey = {key}\nListenPort = 45011\n"));
    let output = file.fails(&host);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("45011"), "does not name the port: {text}");
    assert_eq!(host.ip("-o link show").lines().count(), 1, "an interface was left");
    drop(taken);
}

/// Hooks run in wg-quick's order, with the interface's name for %i.
#[test]
#[ignore = "needs root: task test:net"]
fn hooks_run_in_order() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let log = std::env::temp_dir().join(format!("fvt-{}-hooks", unique()));
    let note = |what: &str| {
        format!(
            "{what} = echo {what} %i $(ip link show %i >/dev/null 2>&1 && echo there) >> {}\n",
            log.display()
        )
    };
    let file = ConfFile::new(&format!(
        "[Interface]\nPrivateKey = {}\n{}{}{}{}",
        Keys::generate().private,
        note("PreUp"),
        note("PostUp"),
        note("PreDown"),
        note("PostDown")
    ));
    let mut node = file.up(&host, "");
    let lines = || std::fs::read_to_string(&log).unwrap_or_default();
    assert!(within(Duration::from_secs(3), || lines().lines().count() == 2), "{}", node.log());
    end(&mut node, &host);
    let name = &file.name;
    assert_eq!(
        lines(),
        format!("PreUp {name}\nPostUp {name} there\nPreDown {name} there\nPostDown {name}\n")
    );
    std::fs::remove_file(log).expect("remove");
}

/// Answers every question for an IPv4 address with 10.66.0.2, and every other with nothing, while `serving`.
fn name_server(host: &Host, serving: &AtomicBool, done: &AtomicBool) {
    host.enter(|| {
        let socket = UdpSocket::bind("127.0.0.1:53").expect("port 53");
        socket.set_read_timeout(Some(Duration::from_millis(100))).expect("timeout");
        let mut buffer = [0; 512];
        while !done.load(Ordering::Relaxed) {
            let Ok((len, from)) = socket.recv_from(&mut buffer) else { continue };
            if !serving.load(Ordering::Relaxed) {
                continue;
            }
            // The question ends behind its name, type and class; whatever follows it is left out.
            let name = buffer[12..len].iter().position(|byte| *byte == 0).expect("a name");
            let end = 12 + name + 5;
            let is_a = buffer[end - 3] == 1;
            let mut reply = buffer[..end].to_vec();
            reply[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
            if is_a {
                reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 10, 66, 0, 2]);
            }
            let _ = socket.send_to(&reply, from);
        }
    });
}

/// Only the process sees this: a resolver on the host itself, and no local names.
const RESOLVER: &str = "mount -t tmpfs tmpfs /mnt && echo nameserver 127.0.0.1 > /mnt/resolv.conf && echo hosts: dns > /mnt/nsswitch.conf && mount --bind /mnt/resolv.conf /etc/resolv.conf && mount --bind /mnt/nsswitch.conf /etc/nsswitch.conf &&";

/// F87 and F89: while names cannot be looked up, everything else works; when they can, the peer is reached.
#[test]
#[ignore = "needs root: task test:net"]
fn f87_f89_names_that_cannot_be_looked_up_hold_up_nothing_else() {
    if !ready(&[]) {
        return;
    }
    let street = Street::new();
    let (serving, done) = (AtomicBool::new(false), AtomicBool::new(false));
    // A third end, which is known by its address.
    let third_keys = Keys::generate();
    let third_file = ConfFile::new(&format!(
        "[Interface]\nPrivateKey = {}\nAddress = 10.68.0.3/24\nListenPort = 51833\n[Peer]\nPublicKey = {}\nAllowedIPs = 10.68.0.1/32\n",
        third_keys.private, street.left_keys.public
    ));
    let _third = third_file.up(&street.right, "");
    let file = ConfFile::new(&format!(
        "[Interface]\nPrivateKey = {}\nAddress = 10.67.0.1/24, 10.68.0.1/24\n[Peer]\nPublicKey = {}\nEndpoint = right.example:51822\nAllowedIPs = 10.67.0.2/32\nPersistentKeepalive = 1\n[Peer]\nPublicKey = {}\nEndpoint = 10.66.0.2:51833\nAllowedIPs = 10.68.0.3/32\n",
        street.left_keys.private, street.right_keys.public, third_keys.public
    ));
    std::thread::scope(|scope| {
        scope.spawn(|| name_server(&street.left, &serving, &done));
        let began = Instant::now();
        let mut node = file.up(&street.left, RESOLVER);
        assert!(began.elapsed() < Duration::from_secs(3), "up after {:?}", began.elapsed());
        let check = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            assert!(
                within(Duration::from_secs(2), || street.left.pings("10.68.0.3", 1) == 1),
                "{}",
                node.log()
            );
            let asked = Instant::now();
            assert_eq!(node.peer(&street.right_keys.public, "endpoints"), "(none)");
            assert!(asked.elapsed() < Duration::from_secs(1), "`wg` waits for the resolver");
            let mute = street.left.run("ping -n -q -c 30 -i 0.1 -W 1 10.68.0.3");
            assert!(mute.contains(" 30 received"), "{mute}");
            serving.store(true, Ordering::Relaxed);
            let found = || node.peer(&street.right_keys.public, "endpoints") == "10.66.0.2:51822";
            assert!(within(Duration::from_secs(45), found), "not looked up: {}", node.log());
            assert!(within(Duration::from_secs(3), || street.left.pings("10.67.0.2", 1) == 1));
            let lines = node.log().lines().count();
            assert!(lines < 20, "{lines} lines in the log");
        }));
        done.store(true, Ordering::Relaxed);
        if let Err(panic) = check {
            std::panic::resume_unwind(panic);
        }
        end(&mut node, &street.left);
    });
}

/// F89: a resolver that never answers does not keep it from ending either.
#[test]
#[ignore = "needs root: task test:net"]
fn f89_it_ends_at_once_while_a_lookup_hangs() {
    if !ready(&[]) {
        return;
    }
    let host = Host::new("one");
    let (serving, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let file = ConfFile::new(&format!(
        "[Interface]\nPrivateKey = {}\n[Peer]\nPublicKey = {}\nEndpoint = right.example:51822\nAllowedIPs = 0.0.0.0/0\n",
        Keys::generate().private,
        Keys::generate().public
    ));
    std::thread::scope(|scope| {
        scope.spawn(|| name_server(&host, &serving, &done));
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut node = file.up(&host, RESOLVER);
            std::thread::sleep(Duration::from_millis(500));
            end(&mut node, &host);
        }));
        done.store(true, Ordering::Relaxed);
        if let Err(panic) = ended {
            std::panic::resume_unwind(panic);
        }
    });
}
