//! What `wg` sets and shows, on a tunnel that really runs.

use std::io::{Read, Write};
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::Signal;

use crate::place::{Place, Running, text, within};

// Key pairs of public test captures.
const KEYS: [(&str, &str); 2] = [
    ("AKeZaHwBxjiKLFnkY2unvEdOTtg4AL+M9dQXfopFVFk=", "Igge9KzRytKNwrgkzDE/8hrLu6Ly0OqVdvOPWhA5KR4="),
    ("cFIxTUyBs1Qil414hBwEgvasEax8CKJ5IS5ZougplWs=", "YDCttCs9e1J52/g9vEnwJJa+2x6RqaayAYMpSVQfGEY="),
];
const PEER: &str = KEYS[1].1;
const PSK: &str = "iIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIg=";

impl Place {
    /// `wg set` with keys from files that hold them.
    fn set(&self, words: &[&str]) {
        self.run(&[&["wg", "set", self.name.as_str()], words].concat());
    }

    fn show(&self, field: &str) -> String {
        self.run(&["wg", "show", &self.name, field])
    }

    fn ask(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).expect("it listens");
        stream.write_all(request.as_bytes()).expect("sent");
        stream.shutdown(std::net::Shutdown::Write).expect("shut");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// A running tunnel, up and with an address, and `wg set` done to it.
    fn up(&self, words: &[&str]) -> Running {
        let running = self.foreground(&[("LOG_LEVEL", "error")]);
        self.run(&["ip", "link", "set", "lo", "up"]);
        self.run(&["ip", "address", "add", "10.55.0.1/16", "dev", &self.name]);
        self.run(&["ip", "link", "set", &self.name, "up"]);
        self.set(words);
        running
    }

    /// Packets into the tunnel as fast as they can be made, until dropped.
    fn flood(&self) -> Flood {
        let mut command = self.command("ping");
        command.args(["-f", "-q", "-s", "1200", "10.55.0.2"]).stdout(Stdio::null()).stderr(Stdio::null());
        Flood(command.spawn().expect("ping"))
    }
}

struct Flood(Child);

impl Drop for Flood {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn file(content: &str) -> tempfile::TempPath {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(content.as_bytes()).expect("written");
    file.into_temp_path()
}

fn path(file: &Path) -> &str {
    file.to_str().expect("text")
}

#[test]
fn f61_each_change_of_a_peer_is_applied_and_the_rest_of_it_kept() {
    let Some(place) = Place::new("o", &[]) else { return };
    let psk = file(PSK);
    let running = place.up(&["peer", PEER, "allowed-ips", "10.55.0.2/32", "endpoint", "192.0.2.1:5"]);
    place.set(&["peer", PEER, "endpoint", "192.0.2.2:6"]);
    place.set(&["peer", PEER, "persistent-keepalive", "7"]);
    place.set(&["peer", PEER, "preshared-key", path(&psk)]);
    place.set(&["peer", PEER, "allowed-ips", "10.55.0.3/32,fd00::/64"]);
    let dump = place.show("dump");
    let peer = dump.lines().nth(1).expect("one peer");
    assert_eq!(peer, format!("{PEER}\t{PSK}\t192.0.2.2:6\t10.55.0.3/32,fd00::/64\t0\t0\t0\t7"));
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end(), (Some(0), String::new()));
}

#[test]
fn f54_one_allowed_ip_is_taken_away_and_everything_else_stays() {
    let Some(place) = Place::new("p", &[]) else { return };
    let _running =
        place.up(&["listen-port", "5511", "peer", PEER, "allowed-ips", "10.55.0.2/32,10.55.0.3/32"]);
    let hex = "6030adb42b3d7b5279dbf83dbc49f02496bedb1e91a9a6b201832949541f1846";
    let answer =
        place.ask(&format!("set=1\npublic_key={hex}\nupdate_only=true\nallowed_ip=-10.55.0.3/32\n\n"));
    assert_eq!(answer, "errno=0\n\n");
    assert_eq!(place.show("allowed-ips"), format!("{PEER}\t10.55.0.2/32\n"));
    assert_eq!(place.show("listen-port"), "5511\n");
    let absent = "11".repeat(32);
    assert_eq!(
        place.ask(&format!("set=1\npublic_key={absent}\nupdate_only=true\nallowed_ip=::/0\n\n")),
        "errno=0\n\n"
    );
    assert_eq!(place.show("peers"), format!("{PEER}\n"));
}

#[test]
fn f62_two_clients_that_set_without_pause_are_never_refused_while_packets_come() {
    let Some(place) = Place::new("q", &["ping"]) else { return };
    let _running = place.up(&["peer", PEER, "allowed-ips", "10.55.0.2/32"]);
    let _flood = place.flood();
    let hex = "22".repeat(32);
    std::thread::scope(|scope| {
        for port in [5, 6] {
            let (place, hex) = (&place, &hex);
            scope.spawn(move || {
                for _ in 0..500 {
                    let request = format!("set=1\npublic_key={hex}\nendpoint=192.0.2.1:{port}\n\n");
                    assert_eq!(place.ask(&request), "errno=0\n\n");
                }
            });
        }
    });
}

#[test]
fn f64_the_own_public_key_is_shown() {
    let Some(place) = Place::new("r", &[]) else { return };
    let key = file(KEYS[0].0);
    let _running = place.up(&["private-key", path(&key)]);
    assert_eq!(place.show("public-key"), format!("{}\n", KEYS[0].1));
}

//@test C-OUT-8
#[test]
fn f65_the_mark_is_on_both_sockets_also_after_they_are_bound_anew_and_zero_takes_it_off() {
    let Some(place) = Place::new("s", &["ss"]) else { return };
    let _running = place.up(&["listen-port", "5512", "fwmark", "0xca6c"]);
    let marks = |port: &str| {
        let shown = place.run(&["ss", "-Hulne", "sport", "=", port]);
        (shown.lines().count(), shown.matches("fwmark:0xca6c").count())
    };
    assert_eq!(place.show("fwmark"), "0xca6c\n");
    assert_eq!(marks("5512"), (2, 2));
    place.set(&["listen-port", "5513"]);
    assert_eq!(marks("5513"), (2, 2));
    place.set(&["fwmark", "0"]);
    assert_eq!((marks("5513"), place.show("fwmark")), ((2, 0), "off\n".to_owned()));
}

#[test]
fn f67_replace_peers_with_another_value_than_true_is_refused() {
    let Some(place) = Place::new("t", &[]) else { return };
    let _running = place.up(&["peer", PEER]);
    assert_eq!(place.ask("set=1\nreplace_peers=false\n\n"), "errno=-22\n\n");
    assert_eq!(place.show("peers"), format!("{PEER}\n"));
}

#[test]
fn f69_a_port_in_use_is_told_and_the_old_one_keeps_working() {
    let Some(place) = Place::new("h", &[]) else { return };
    let running = place.up(&["listen-port", "5555"]);
    let _holder = place.inside(|| UdpSocket::bind("0.0.0.0:7777").expect("free"));
    let refused =
        place.command("wg").args(["set", &place.name, "listen-port", "7777", "fwmark", "1"]).output();
    let refused = refused.expect("wg");
    assert!(text(&refused.stderr).contains("Address already in use"), "{}", text(&refused.stderr));
    assert_eq!(place.show("dump"), "(none)\t(none)\t5555\toff\n");
    running.signal(Signal::SIGTERM);
    let (code, said) = running.end();
    assert_eq!(code, Some(0));
    assert!(said.contains("7777") && said.starts_with(&format!("fv {}: error: ", place.name)), "{said}");
}

#[test]
fn f71_f142_an_unreachable_peer_and_a_flood_delay_no_answer_no_removal_and_no_end() {
    let Some(place) = Place::new("u", &["ping"]) else { return };
    let key = file(KEYS[0].0);
    let running = place.up(&[
        "private-key",
        path(&key),
        "peer",
        PEER,
        "allowed-ips",
        "10.55.0.0/16",
        "endpoint",
        "127.0.0.1:9",
        "persistent-keepalive",
        "1",
    ]);
    let _flood = place.flood();
    let quick = |what: &str, work: &dyn Fn()| {
        let begun = Instant::now();
        work();
        assert!(begun.elapsed() < Duration::from_secs(1), "{what} took {:?}", begun.elapsed());
    };
    for _ in 0..20 {
        quick("wg show", &|| drop(place.show("transfer")));
        std::thread::sleep(Duration::from_millis(50));
    }
    quick("removal", &|| place.set(&["peer", PEER, "remove"]));
    let begun = Instant::now();
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end(), (Some(0), String::new()));
    assert!(begun.elapsed() < Duration::from_secs(1), "the end took {:?}", begun.elapsed());
}

#[test]
fn f143_a_peer_that_comes_and_goes_while_it_calls_delays_nothing_and_works_in_the_end() {
    let Some(a) = Place::new("z", &[]) else { return };
    let keys = KEYS.map(|(private, _)| file(private));
    let _a = a.up(&["private-key", path(&keys[0]), "listen-port", "5516"]);
    let b = a.neighbour("0");
    let _b = b.foreground(&[]);
    a.run(&["ip", "link", "set", &b.name, "up"]);
    b.set(&["private-key", path(&keys[1])]);
    let begun = Instant::now();
    for _ in 0..200 {
        a.set(&["peer", KEYS[1].1, "allowed-ips", "10.55.0.2/32"]);
        // Each time a new peer with a new call, in the middle of which the other side forgets it.
        b.set(&["peer", KEYS[0].1, "remove"]);
        b.set(&["peer", KEYS[0].1, "endpoint", "127.0.0.1:5516", "persistent-keepalive", "1"]);
        a.set(&["peer", KEYS[1].1, "remove"]);
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "800 changes took {:?}", begun.elapsed());
    a.set(&["peer", KEYS[1].1]);
    assert!(within(12, || b
        .show("latest-handshakes")
        .trim_end()
        .split('\t')
        .nth(1)
        .is_some_and(|time| time != "0")));
}

#[test]
fn f63_f68_a_handshake_is_shown_as_its_time_and_needs_equal_preshared_keys_from_the_next_one_on() {
    let (Some(a), Some(psk)) = (Place::new("v", &[]), Some(file(PSK))) else { return };
    let keys = KEYS.map(|(private, _)| file(private));
    let _a = a.up(&["private-key", path(&keys[0]), "listen-port", "5514", "peer", KEYS[1].1]);
    // The second tunnel is in the same namespace; the two speak over loopback.
    let b = a.neighbour("w");
    let _b = b.foreground(&[]);
    a.run(&["ip", "link", "set", &b.name, "up"]);
    b.set(&["private-key", path(&keys[1]), "listen-port", "5515"]);
    assert_eq!(a.show("latest-handshakes"), format!("{}\t0\n", KEYS[1].1));

    let toward_a = ["peer", KEYS[0].1, "endpoint", "127.0.0.1:5514", "persistent-keepalive", "1"];
    let shaken = |place: &Place| place.show("latest-handshakes").split('\t').nth(1).map(|t| t.trim() != "0");
    b.set(&toward_a);
    assert!(within(5, || shaken(&a) == Some(true) && shaken(&b) == Some(true)));
    let seconds: u64 =
        a.show("latest-handshakes").split('\t').nth(1).expect("a time").trim().parse().expect("a number");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs();
    assert!(seconds.abs_diff(now) < 10, "{seconds} is not about {now}");

    // A new peer on b's side has to shake hands anew, and now with a key that a lacks.
    b.set(&["peer", KEYS[0].1, "remove"]);
    b.set(&[&toward_a[..], &["preshared-key", path(&psk)]].concat());
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(shaken(&b), Some(false), "unequal preshared keys must not agree");
    a.set(&["peer", KEYS[1].1, "preshared-key", path(&psk)]);
    assert!(within(12, || shaken(&b) == Some(true)), "equal preshared keys must agree");
}
