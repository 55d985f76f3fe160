//! `fv up FILE`: what it sets up, what it leaves behind (nothing), and what it says when something is wrong.

use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::place::{FV, Place, Running, text, within};

/// A place with a file for `fv up`.
pub(crate) struct Site {
    pub(crate) place: Place,
    folder: tempfile::TempDir,
    private: String,
    pub(crate) public: String,
}

impl Site {
    pub(crate) fn new(label: &str) -> Option<Self> {
        let place = Place::new(label, &["ping"])?;
        place.run(&["ip", "link", "set", "lo", "up"]);
        let private = place.run(&[FV, "genkey"]).trim().to_owned();
        let public = place.run(&["sh", "-c", &format!("echo {private} | wg pubkey")]).trim().to_owned();
        Some(Self { place, folder: tempfile::tempdir().expect("a folder"), private, public })
    }

    /// Two sites with a cable; the first has 192.0.2.1, the second 192.0.2.2 and a default route to the first.
    pub(crate) fn pair(first: &str, second: &str) -> Option<[Self; 2]> {
        let pair = [Self::new(first)?, Self::new(second)?];
        pair[0].place.cable("up0", "192.0.2.1/24", &pair[1].place, "192.0.2.2/24");
        pair[1].place.run(&["ip", "route", "add", "default", "via", "192.0.2.1"]);
        Some(pair)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join(format!("{}.conf", self.place.name))
    }

    /// Writes the file: our key, `interface` and then `peers`.
    pub(crate) fn write(&self, interface: &str, peers: &str) {
        let file = format!("[Interface]\nPrivateKey = {}\n{interface}\n{peers}", self.private);
        fs::write(self.path(), file).expect("written");
        fs::set_permissions(self.path(), fs::Permissions::from_mode(0o600)).expect("closed to others");
    }

    /// `fv up`, after some words of shell.
    pub(crate) fn command(&self, before: &str) -> Command {
        let line = format!("{before}\nexec {FV} up {}", self.path().display());
        let mut command = self.place.command("sh");
        command.args(["-c", &line]).env("PATH", self.search_path());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// Programs of the test's own in the folder come first.
    fn search_path(&self) -> String {
        format!("{}:{}", self.folder.path().display(), std::env::var("PATH").unwrap_or_default())
    }

    /// A program of our own that comes before the machine's.
    fn program(&self, name: &str, script: &str) {
        let path = self.folder.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    }

    /// Started and done with everything.
    pub(crate) fn up_after(&self, before: &str) -> Running {
        let mut running = Running(self.command(before).spawn().expect("it runs"));
        if !within(10, || self.place.answers() && self.is_up()) {
            let _ = running.0.kill();
            let (_, said) = running.end();
            panic!("it is not up: {said}");
        }
        running
    }

    pub(crate) fn up(&self) -> Running {
        self.up_after("")
    }

    fn is_up(&self) -> bool {
        let shown = self.place.command("ip").args(["link", "show", "up", &self.place.name]).output();
        shown.is_ok_and(|output| !output.stdout.is_empty())
    }

    /// `fv up` that must fail by itself, with nothing left behind.
    pub(crate) fn fails(&self, before: &str) -> String {
        let start = self.state();
        let output = self.command(before).stdin(Stdio::null()).output().expect("it runs");
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(self.state(), start, "{said}");
        assert!(!self.place.socket().exists());
        said
    }

    /// All that `fv up` may touch on this host.
    pub(crate) fn state(&self) -> String {
        self.place.run(&[
            "sh",
            "-c",
            "ip -o link; ip address; ip rule; ip -6 rule; ip route show table all; ip -6 route show table all
             cd /proc/sys/net/ipv4/conf; grep . all/src_valid_mark */rp_filter",
        ])
    }

    pub(crate) fn wg(&self, what: &str) -> String {
        self.place.run(&["wg", "show", &self.place.name, what])
    }

    pub(crate) fn pings(&self, to: &str) -> bool {
        let output = self.place.command("ping").args(["-n", "-c", "3", "-i", "0.1", "-W", "2", to]).output();
        output.expect("ping").status.success()
    }
}

pub(crate) fn peer(key: &str, lines: &str) -> String {
    format!("[Peer]\nPublicKey = {key}\n{lines}\n")
}

/// A key that is nobody's.
const STRANGER: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";

#[test]
fn a_full_tunnel_carries_everything_even_past_a_strict_reverse_path_filter_and_is_undone() {
    let Some([server, client]) = Site::pair("us", "uc") else { return };
    server.place.run(&["ip", "address", "add", "198.51.100.1/32", "dev", "lo"]);
    server.write(
        "ListenPort = 51820\nAddress = 10.8.0.1/24, fd08::1/64",
        &peer(&client.public, "AllowedIPs = 10.8.0.2/32, fd08::2/128"),
    );
    client.write(
        "Address = 10.8.0.2/24, fd08::2/64",
        &peer(&server.public, "Endpoint = 192.0.2.1:51820\nAllowedIPs = 0.0.0.0/0, ::/0"),
    );
    client.place.run(&["sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/up0/rp_filter"]);
    let before = [server.state(), client.state()];
    let running = [server.up(), client.up()];
    assert!(within(5, || client.place.run(&["ip", "-6", "rule"]).contains("lookup 51820")));
    for to in ["10.8.0.1", "fd08::1", "198.51.100.1", "192.0.2.1"] {
        assert!(client.pings(to), "{to}");
    }
    let way = |to: &str| client.place.run(&["ip", "route", "get", to]);
    assert!(way("198.51.100.1").contains(&client.place.name) && way("192.0.2.1").contains("up0"));
    assert_eq!(client.wg("fwmark").trim(), "0xca6c");
    let link = client.place.run(&["ip", "link", "show", &client.place.name]);
    assert!(link.contains("mtu 1420"), "{link}");
    for process in running {
        process.signal(Signal::SIGTERM);
        assert_eq!(process.end().0, Some(0));
    }
    assert_eq!([server.state(), client.state()], before);
}

#[test]
fn each_way_to_end_it_is_a_success_and_leaves_nothing() {
    let Some(site) = Site::new("ue") else { return };
    site.write("Address = 10.8.0.2/24", &peer(STRANGER, "AllowedIPs = 0.0.0.0/0, 10.9.0.0/16, ::/0"));
    let before = site.state();
    let ways: [fn(&Site, &Running); 4] = [
        |_, running| running.signal(Signal::SIGINT),
        |_, running| running.signal(Signal::SIGTERM),
        |site, _| drop(site.place.run(&["ip", "link", "delete", &site.place.name])),
        |site, _| fs::remove_file(site.place.socket()).expect("removed"),
    ];
    for end in ways {
        let running = site.up();
        assert!(within(5, || site.place.run(&["ip", "rule"]).contains("suppress_prefixlength")));
        end(&site, &running);
        let (code, said) = running.end();
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(site.state(), before, "{said}");
        assert!(!site.place.socket().exists());
    }
}

#[test]
fn a_failing_step_ends_it_with_a_sentence_and_leaves_nothing() {
    let Some(site) = Site::new("uf") else { return };
    let full = peer(STRANGER, "AllowedIPs = 0.0.0.0/0, ::/0");
    site.write("Address = 10.8.0.2/24\nPostUp = true\nPostUp = exit 7", &full);
    let said = site.fails("");
    assert!(said.contains("line 5: PostUp failed (exit status: 7)"), "{said}");

    site.write("PreUp = false", &full);
    assert!(site.fails("").contains("line 3: PreUp failed"));

    let taken = site.place.inside(|| UdpSocket::bind("0.0.0.0:51777").expect("bound"));
    site.write("ListenPort = 51777", &full);
    let said = site.fails("");
    assert!(said.contains("UDP port 51777 is in use"), "{said}");
    drop(taken);

    site.program("resolvconf", "exit 5");
    site.write("DNS = 10.8.0.1", &full);
    let said = site.fails("");
    assert!(said.contains("cannot set the DNS servers: resolvconf failed (exit status: 5)"), "{said}");

    site.write("", &full);
    site.place.run(&["ip", "link", "add", &site.place.name, "type", "veth", "peer", "name", "far"]);
    let said = site.fails("");
    assert!(said.contains("exists already"), "{said}");
}

#[test]
fn f80_a_bad_file_names_every_bad_line_and_nothing_is_done() {
    let Some(site) = Site::new("ub") else { return };
    let lines = "PresharedKey =\nAllowedIPs = 10.0.0.0/33\nEndpoint = here";
    site.write("PreUp = touch touched", &peer(STRANGER, lines));
    let said = site.fails(&format!("cd {}", site.folder.path().display()));
    for line in ["nothing was done", "line 6: PresharedKey", "line 7: AllowedIPs", "line 8: Endpoint"] {
        assert!(said.contains(line), "{line} not in {said}");
    }
    assert!(!site.folder.path().join("touched").exists());
}

#[test]
fn f85_f86_a_peer_without_endpoint_is_fine_and_mtu_and_table_are_obeyed() {
    let Some(site) = Site::new("um") else { return };
    site.write("Address = 10.8.0.2/24\nMTU = 1300\nTable = 1234", &peer(STRANGER, "AllowedIPs = 0.0.0.0/0"));
    let running = site.up();
    assert!(site.place.run(&["ip", "link", "show", &site.place.name]).contains("mtu 1300"));
    assert!(within(5, || site
        .place
        .run(&["ip", "route", "show", "table", "1234"])
        .starts_with("default dev")));
    assert!(!site.place.run(&["ip", "rule"]).contains("1234"));
    assert_eq!(site.wg("endpoints").trim(), format!("{STRANGER}\t(none)"));
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end().0, Some(0));
}

#[test]
fn hooks_run_in_their_order_and_predown_still_has_the_tunnel() {
    let Some(site) = Site::new("uh") else { return };
    let log = site.folder.path().join("log");
    let hook = |key: &str| {
        let test = "wg show %i public-key > /dev/null 2>&1 && echo yes || echo no";
        format!("{key} = echo {key} %i $({test}) >> {}\n", log.display())
    };
    let hooks: String = ["PostDown", "PreDown", "PostUp", "PreUp"].map(hook).concat();
    site.write(&format!("{hooks}PostUp = exec 2>&-; echo second >> {}", log.display()), "");
    let running = site.up();
    assert!(within(5, || fs::read_to_string(&log).is_ok_and(|log| log.contains("second"))));
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end().0, Some(0));
    let name = &site.place.name;
    assert_eq!(
        fs::read_to_string(&log).expect("written"),
        format!("PreUp {name} no\nPostUp {name} yes\nsecond\nPreDown {name} yes\nPostDown {name} no\n")
    );
}

#[test]
fn a_second_signal_does_not_keep_it_from_undoing_everything_and_says_so() {
    let Some(site) = Site::new("u2") else { return };
    let log = site.folder.path().join("log");
    let hook = format!("PreDown = echo begun >> {0}; sleep 2; echo done >> {0}", log.display());
    site.write(&format!("Address = 10.8.0.2/24\n{hook}"), &peer(STRANGER, "AllowedIPs = 0.0.0.0/0, ::/0"));
    let before = site.state();
    let said = |part: &str| fs::read_to_string(&log).is_ok_and(|log| log.contains(part));
    let running = site.up();
    assert!(within(5, || site.place.run(&["ip", "rule"]).contains("suppress_prefixlength")));
    running.signal(Signal::SIGINT);
    assert!(within(5, || said("begun")));
    running.signal(Signal::SIGINT);
    let (code, text) = running.end();
    assert_eq!(code, Some(0), "{text}");
    assert!(said("done") && text.contains("still undoing what was set up"), "{text}");
    assert_eq!(site.state(), before, "{text}");
}

#[test]
fn a_third_signal_ends_it_at_once() {
    let Some(site) = Site::new("u3") else { return };
    let log = site.folder.path().join("log");
    site.write(
        &format!("Address = 10.8.0.2/24\nPreDown = exec 2>&-; echo begun >> {}; sleep 8", log.display()),
        "",
    );
    let running = site.up();
    assert!(within(5, || site.place.run(&["ip", "address"]).contains("10.8.0.2")));
    std::thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    // One after the other: signals that come together count once.
    for _ in 0..3 {
        running.signal(Signal::SIGINT);
        assert!(within(5, || log.exists()), "PreDown does not run");
        std::thread::sleep(Duration::from_millis(200));
    }
    let (code, text) = running.end();
    assert_eq!(code, Some(130), "{text}");
    assert!(begun.elapsed() < Duration::from_secs(6) && text.contains("one more ends at once"), "{text}");
}

#[test]
fn dns_goes_to_resolvconf_and_is_taken_back_and_without_it_that_is_said() {
    let Some(site) = Site::new("ud") else { return };
    let log = site.folder.path().join("log");
    site.program("resolvconf", &format!("{{ echo \"$@\"; [ \"$1\" = -d ] || cat; }} >> {}", log.display()));
    site.write("DNS = 10.8.0.1, example.org\nDNS = fd08::1", "");
    let running = site.up();
    assert!(within(5, || fs::read_to_string(&log).is_ok_and(|log| log.contains("search"))));
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end().0, Some(0));
    let name = &site.place.name;
    let log = fs::read_to_string(&log).expect("written");
    let expected = format!(
        "{name} -m 0 -x\nnameserver 10.8.0.1\nnameserver fd08::1\nsearch example.org\n-d {name} -f\n"
    );
    // Debian's resolvconf wants a prefix, where it is installed.
    assert_eq!(log.replace("tun.", ""), format!("-a {expected}"));

    fs::remove_file(site.folder.path().join("resolvconf")).expect("removed");
    let running = site.up_after("export PATH=/nowhere");
    running.signal(Signal::SIGTERM);
    let (code, said) = running.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("DNS was not set") && said.contains("nameserver 10.8.0.1"), "{said}");
}

/// Words that give `fv up` its own /etc/hosts and a resolver at 127.0.0.1.
fn names(site: &Site, hosts: &str) -> String {
    let folder = site.folder.path().display();
    fs::write(site.folder.path().join("hosts"), hosts).expect("written");
    fs::write(site.folder.path().join("resolv.conf"), "nameserver 127.0.0.1\n").expect("written");
    format!(
        "mount --bind {folder}/hosts /etc/hosts && mount --bind {folder}/resolv.conf /etc/resolv.conf || exit 9"
    )
}

#[test]
fn f87_a_name_is_tried_until_it_resolves_while_the_device_is_up_and_other_peers_work() {
    let Some([server, client]) = Site::pair("uns", "unc") else { return };
    server.write(
        "ListenPort = 51820\nAddress = 10.8.0.1/24",
        &peer(&client.public, "AllowedIPs = 10.8.0.2/32"),
    );
    // The named peer has the default route: it has to wait, or nobody could ask for the name.
    let log = client.folder.path().join("log");
    client.write(
        &format!("Address = 10.8.0.2/24\nPostUp = echo done > {}", log.display()),
        &format!(
            "{}{}",
            peer(&server.public, "Endpoint = 192.0.2.1:51820\nAllowedIPs = 10.8.0.1/32"),
            peer(STRANGER, "Endpoint = vpn.test:7\nAllowedIPs = 0.0.0.0/0\nPersistentKeepalive = 25")
        ),
    );
    let running = [server.up(), client.up_after(&names(&client, "127.0.0.1 localhost\n"))];
    assert!(client.pings("10.8.0.1"));
    assert!(client.place.run(&["ip", "route", "get", "203.0.113.1"]).contains("up0"));
    std::thread::sleep(Duration::from_secs(2));
    assert!(client.wg("endpoints").contains(&format!("{STRANGER}\t(none)")));
    assert!(!log.exists());

    fs::write(client.folder.path().join("hosts"), "192.0.2.1 vpn.test\n").expect("written");
    assert!(within(20, || client.wg("endpoints").contains(&format!("{STRANGER}\t192.0.2.1:7"))));
    assert!(within(5, || log.exists()));
    assert!(client.place.run(&["ip", "route", "get", "203.0.113.1"]).contains(&client.place.name));
    // Its keepalive is due at once and not only after 25 s: it calls.
    let sent = || {
        let transfer = client.wg("transfer");
        let line = transfer.lines().find(|line| line.starts_with(STRANGER)).expect("listed").to_owned();
        line.split('\t').nth(2).and_then(|bytes| bytes.parse::<u64>().ok()).expect("bytes")
    };
    assert!(within(5, || sent() >= 148), "{}", sent());
    for process in running {
        process.signal(Signal::SIGTERM);
        let (code, said) = process.end();
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(
            said.matches("cannot find the address of vpn.test").count(),
            usize::from(said.contains("vpn"))
        );
    }
}

#[test]
fn f89_a_resolver_that_never_answers_holds_up_nothing_and_not_the_end() {
    let Some(site) = Site::new("ur") else { return };
    let silent = site.place.inside(|| UdpSocket::bind("127.0.0.1:53").expect("bound"));
    site.write("Address = 10.8.0.2/24", &peer(STRANGER, "Endpoint = vpn.test:7\nAllowedIPs = 10.9.0.0/16"));
    let running = site.up_after(&names(&site, ""));
    assert!(within(5, || site.place.run(&["ip", "route"]).contains("10.9.0.0/16")));
    let mut query = [0; 512];
    silent.set_read_timeout(Some(Duration::from_secs(5))).expect("set");
    silent.recv(&mut query).expect("it asks");
    for _ in 0..10 {
        let start = Instant::now();
        assert!(site.place.answers() && start.elapsed() < Duration::from_secs(1));
    }
    let start = Instant::now();
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end().0, Some(0));
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

#[test]
fn f90_a_host_without_ipv6_takes_the_ipv4_address_of_a_name() {
    let Some([_server, client]) = Site::pair("u4s", "u4c") else { return };
    client.write("Address = 10.8.0.2/24", &peer(STRANGER, "Endpoint = vpn.test:7\nAllowedIPs = 10.9.0.0/16"));
    let running = client.up_after(&names(&client, "2001:db8::7 vpn.test\n192.0.2.1 vpn.test\n"));
    assert!(within(10, || client.wg("endpoints").trim() == format!("{STRANGER}\t192.0.2.1:7")));
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end().0, Some(0));
}

#[test]
fn ipv6_switched_off_leaves_ipv4_working_with_one_warning() {
    let Some([server, client]) = Site::pair("u6s", "u6c") else { return };
    client.place.run(&[
        "sh",
        "-c",
        "for i in default all; do echo 1 > /proc/sys/net/ipv6/conf/$i/disable_ipv6; done",
    ]);
    server.write(
        "ListenPort = 51820\nAddress = 10.8.0.1/24",
        &peer(&client.public, "AllowedIPs = 10.8.0.2/32"),
    );
    client.write(
        "Address = 10.8.0.2/24, fd08::2/64",
        &peer(&server.public, "Endpoint = 192.0.2.1:51820\nAllowedIPs = 0.0.0.0/0, ::/0"),
    );
    let before = client.state();
    let running = [server.up(), client.up()];
    assert!(client.pings("10.8.0.1"));
    for (process, warnings) in running.into_iter().zip([0, 1]) {
        process.signal(Signal::SIGTERM);
        let (code, said) = process.end();
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(said.matches("IPv6 is switched off here").count(), warnings, "{said}");
    }
    assert_eq!(client.state(), before);
}

#[test]
fn f147_after_a_kill_it_starts_again_and_what_was_left_behind_is_cleared() {
    let Some(site) = Site::new("uk") else { return };
    site.write("Address = 10.8.0.2/24", &peer(STRANGER, "AllowedIPs = 0.0.0.0/0, ::/0"));
    let before = site.state();
    let both = || site.place.run(&["sh", "-c", "ip rule; ip -6 rule"]).matches("lookup 51820").count();
    let running = site.up();
    assert!(within(5, || both() == 2));
    running.signal(Signal::SIGKILL);
    assert_eq!(running.end().0, None);
    assert!(within(5, || !site.place.has_interface()));
    assert_eq!(both(), 2, "nobody could remove them");
    let running = site.up();
    assert!(within(5, || both() == 2 && site.place.run(&["ip", "rule"]).matches("suppress").count() == 1));
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end().0, Some(0));
    // Only the setting for marks stays as the killed one left it.
    let mend = |state: String| state.replace("src_valid_mark:0", "src_valid_mark:1");
    assert_eq!(mend(site.state()), mend(before));
}

#[test]
fn what_is_no_file_for_it_is_refused_in_a_sentence() {
    let run = |args: &[&str]| -> Output {
        Command::new(FV).args(args).stdin(Stdio::null()).output().expect("fv runs")
    };
    for (file, part) in [
        ("/nowhere/wg0.conf", "cannot read /nowhere/wg0.conf"),
        ("/nowhere/wg0.txt", "ends in .conf"),
        ("/nowhere/a-name-of-17-byte.conf", "it has 17 bytes"),
        ("nosuchtunnel", "/etc/wireguard/nosuchtunnel.conf"),
    ] {
        let output = run(&["up", file]);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(part), "{said}");
    }
}

#[test]
fn without_a_file_the_environment_describes_the_tunnel_and_mistakes_are_told_by_variable() {
    let Some(site) = Site::new("ue") else { return };
    let name = &site.place.name;
    let command = |address: &str| {
        let mut command = site.place.command(FV);
        command.arg("up").stderr(Stdio::piped());
        command.env("FV_INTERFACE", name).env("FV_PRIVATE_KEY", &site.private).env("FV_ADDRESS", address);
        command.env("FV_PEER_PUBLIC_KEY", STRANGER).env("FV_PEER_ALLOWED_IPS", "10.9.0.0/16");
        command
    };
    let running = Running(command("10.8.0.1/24").spawn().expect("it runs"));
    assert!(within(10, || site.place.answers() && site.is_up()));
    assert!(within(5, || site.place.run(&["ip", "route"]).contains(&format!("10.9.0.0/16 dev {name}"))));
    assert_eq!(site.wg("public-key").trim(), site.public);
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end().0, Some(0));
    let wrong = command("10.8.0.1/33").output().expect("it runs");
    let said = text(&wrong.stderr);
    assert!(!wrong.status.success() && said.contains("FV_ADDRESS: Address = 10.8.0.1/33"), "{said}");
    assert!(!said.contains(&site.private));
}
