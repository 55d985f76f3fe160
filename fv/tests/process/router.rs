//! `fv up` on a router: a LAN behind it, and no packet filter that could help.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::socket::{getsockopt, sockopt::TcpMaxSeg};

use crate::place::{Place, Running, text, within};
use crate::up::{Site, peer};

/// A server, and a router with a LAN (10.9.0.0/24) of one host behind it: both are up, the router with `before` in its
/// environment and a smaller MTU than all others have.
struct Street {
    _server_runs: Running,
    router_runs: Running,
    server: Site,
    router: Site,
    lan: Place,
    state: String,
}

impl Street {
    fn new(label: &str, before: &str, allowed: &str) -> Option<Self> {
        let [server, router] = Site::pair(&format!("{label}s"), &format!("{label}r"))?;
        let lan = Place::new(&format!("{label}l"), &[])?;
        router.place.cable("lan0", "10.9.0.1/24", &lan, "10.9.0.2/24");
        lan.run(&["ip", "route", "add", "default", "via", "10.9.0.1"]);
        server.place.run(&["ip", "address", "add", "198.51.100.1/32", "dev", "lo"]);
        server.write(
            "ListenPort = 51820\nMTU = 1420\nAddress = 10.8.0.1/24",
            &peer(&router.public, "AllowedIPs = 10.8.0.2/32, 10.9.0.0/24"),
        );
        router.write(
            "MTU = 1300\nAddress = 10.8.0.2/24",
            &peer(&server.public, &format!("Endpoint = 192.0.2.1:51820\nAllowedIPs = {allowed}")),
        );
        let state = router.state();
        let server_runs = server.up();
        let router_runs = router.up_after(before);
        Some(Self { _server_runs: server_runs, router_runs, server, router, lan, state })
    }

    /// What both ends of a connection from the LAN to the server agree on: bytes a segment, at most.
    fn agreed(&self, to: &str) -> Option<[u32; 2]> {
        let address: SocketAddr = format!("{to}:8080").parse().expect("an address");
        let listener = self.server.place.inside(|| TcpListener::bind(address).expect("bound"));
        let here = self.lan.inside(|| TcpStream::connect_timeout(&address, Duration::from_secs(5))).ok()?;
        let (there, _) = listener.accept().expect("connected");
        Some([&here, &there].map(|end| getsockopt(&end.as_fd(), TcpMaxSeg).expect("a size")))
    }
}

/// TCP's time stamps take twelve bytes of each segment.
const STAMPS: u32 = 12;

#[test]
fn both_ends_of_a_connection_through_a_router_agree_on_segments_that_fit_its_tunnel() {
    for (label, before, fits) in
        [("ma", "export FV_MSS=auto", 1260), ("mb", "export FV_MSS=1000", 1000), ("mc", "", 1380)]
    {
        let before = format!("{before}\necho 1 > /proc/sys/net/ipv4/ip_forward");
        let Some(street) = Street::new(label, &before, "10.8.0.1/32") else { return };
        assert_eq!(street.agreed("10.8.0.1"), Some([fits - STAMPS; 2]), "{before}");
    }
}

#[test]
fn what_comes_in_from_the_lan_goes_through_the_tunnel_and_nothing_else_and_all_is_undone() {
    let Some(street) = Street::new("rf", "export FV_ROUTE_FROM=lan0 FV_MSS=auto", "0.0.0.0/0") else {
        return;
    };
    let Street { router, lan, .. } = &street;
    assert_eq!(street.agreed("198.51.100.1"), Some([1260 - STAMPS; 2]));
    let way = |words: &[&str]| router.place.run(&[&["ip", "route", "get"], words].concat());
    assert!(way(&["198.51.100.1", "from", "10.9.0.2", "iif", "lan0"]).contains(&router.place.name));
    // The router's own packets, the tunnel's among them, and what the router knows better stay outside.
    for to in ["198.51.100.1", "192.0.2.1"] {
        assert!(way(&[to]).contains("up0"), "{}", way(&[to]));
    }
    assert!(way(&["192.0.2.1", "from", "10.9.0.2", "iif", "lan0"]).contains("up0"));
    assert_eq!(router.wg("fwmark").trim(), "off");
    assert_eq!(router.place.run(&["cat", "/proc/sys/net/ipv4/ip_forward"]).trim(), "1");
    assert!(lan.run(&["ping", "-n", "-c", "1", "-W", "5", "198.51.100.1"]).contains("1 received"));
    street.router_runs.signal(Signal::SIGTERM);
    assert_eq!(street.router_runs.end().0, Some(0));
    assert_eq!(street.router.state(), street.state);
    assert_eq!(street.router.place.run(&["cat", "/proc/sys/net/ipv4/ip_forward"]).trim(), "0");
}

#[test]
fn an_interface_that_is_not_there_is_named_and_auto_takes_that_of_the_default_route() {
    let Some(site) = Site::new("ra") else { return };
    site.write("", "");
    for (word, part) in
        [("lan7", "route-from lan7: there is no such interface"), ("auto", "there is no default route")]
    {
        let said = site.fails(&format!("export FV_ROUTE_FROM={word}"));
        assert!(said.contains(part), "{said}");
    }
    site.place.run(&["ip", "link", "add", "lan0", "type", "veth", "peer", "name", "lan1"]);
    site.place.run(&["ip", "address", "add", "192.0.2.9/24", "dev", "lan0"]);
    site.place.run(&["ip", "link", "set", "lan0", "up"]);
    site.place.run(&["ip", "route", "add", "default", "via", "192.0.2.1"]);
    let _running = site.up_after("export FV_ROUTE_FROM=auto");
    let rules = || text(site.place.run(&["ip", "rule"]).as_bytes());
    assert!(within(5, || rules().contains("300:\tfrom all iif lan0 lookup 51820")), "{}", rules());
}

#[test]
fn f88_a_peer_that_moved_is_found_by_its_name_again_and_f90_in_the_other_family() {
    let Some([server, client]) = Site::pair("ns", "nc") else { return };
    let cables = [(&server, "fdee::1/64"), (&client, "fdee::2/64")];
    for (site, address) in cables {
        site.place.run(&["ip", "address", "add", address, "dev", "up0", "nodad"]);
    }
    server.write(
        "ListenPort = 51820\nAddress = 10.8.0.1/24",
        &peer(&client.public, "AllowedIPs = 10.8.0.2/32"),
    );
    client.write(
        "Address = 10.8.0.2/24",
        &peer(&server.public, "Endpoint = peer.test:51820\nAllowedIPs = 10.8.0.1/32"),
    );
    // Two addresses, one of each family; at first both are right.
    let hosts = client.path().with_extension("hosts");
    std::fs::write(&hosts, "192.0.2.1 peer.test\n").expect("written");
    let mount = format!("mount --bind {} /etc/hosts", hosts.display());
    let _server = server.up();
    let _client = client.up_after(&mount);
    assert!(within(5, || client.pings("10.8.0.1")));
    assert!(client.wg("endpoints").contains("192.0.2.1:51820"));
    // The server goes to another address, and in the old one's place is nobody.
    server.place.run(&["ip", "address", "add", "192.0.2.8/24", "dev", "up0"]);
    server.place.run(&["ip", "address", "delete", "192.0.2.1/24", "dev", "up0"]);
    std::fs::write(&hosts, "192.0.2.1 peer.test\nfdee::1 peer.test\n").expect("written");
    let port = client.wg("listen-port");
    assert!(within(90, || client.pings("10.8.0.1")), "{}", client.wg("endpoints"));
    assert!(client.wg("endpoints").contains("[fdee::1]:51820"), "{}", client.wg("endpoints"));
    assert_ne!(client.wg("listen-port"), port, "a port that nobody chose stays although nobody answers");
}

#[test]
fn f12_a_client_whose_clock_is_behind_after_a_restart_is_taken_when_it_could_remember() {
    let Some([server, client]) = Site::pair("ts", "tc") else { return };
    server.write(
        "ListenPort = 51820\nAddress = 10.8.0.1/24",
        &peer(&client.public, "AllowedIPs = 10.8.0.2/32"),
    );
    client.write(
        "Address = 10.8.0.2/24",
        &peer(&server.public, "Endpoint = 192.0.2.1:51820\nAllowedIPs = 10.8.0.1/32"),
    );
    let _server = server.up();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join(format!("{}.clock", client.place.name));
    let tomorrow = std::time::SystemTime::now() + Duration::from_secs(86_400);
    let tomorrow = tomorrow.duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
    std::fs::write(&file, format!("{tomorrow} ended\n")).expect("written");
    let before = format!("export FV_CLOCK_WAIT=0 FV_STATE={}", folder.path().display());
    // The clock was used until tomorrow, and now it is a day behind.
    for _ in 0..2 {
        let running = client.up_after(&before);
        assert!(within(10, || client.pings("10.8.0.1")), "a day behind, and remembered");
        running.signal(Signal::SIGTERM);
        let (code, said) = running.end();
        assert!(code == Some(0) && said.contains("the clock is still behind"), "{said}");
        let mark = std::fs::read_to_string(&file).expect("there");
        let seconds: u64 = mark.strip_suffix(" ended\n").expect("ended").parse().expect("a number");
        assert!(seconds > tomorrow, "{mark}");
    }
    let _forgetful = client.up();
    assert!(!client.pings("10.8.0.1"), "a day behind, and not remembered: the server must refuse it");
}
