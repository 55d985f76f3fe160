//! A tunnel that is looked after from outside: `fv health`, and counters for Prometheus.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Output;

use crate::place::{FV, Place, text, within};
use crate::up::{Site, peer};

impl Place {
    fn health(&self, words: &[&str]) -> Output {
        self.command(FV).args(["health", &self.name]).args(words).output().expect("fv runs")
    }

    /// What `http://127.0.0.1:9586/metrics` gives in this namespace.
    fn scrape(&self) -> String {
        self.inside(|| {
            let mut stream = TcpStream::connect("127.0.0.1:9586").expect("it listens");
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: fv\r\n\r\n").expect("sent");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("an answer");
            answer
        })
    }
}

#[test]
fn a_tunnel_is_healthy_while_its_peer_answers_and_its_counters_are_those_that_wg_shows() {
    let Some([server, client]) = Site::pair("ws", "wc") else { return };
    server.write(
        "ListenPort = 51820\nAddress = 10.8.0.1/24",
        &peer(&client.public, "AllowedIPs = 10.8.0.2/32"),
    );
    client.write(
        "Address = 10.8.0.2/24",
        &peer(
            &server.public,
            "Endpoint = 192.0.2.1:51820\nAllowedIPs = 10.8.0.1/32\nPersistentKeepalive = 25",
        ),
    );
    let alone = client.up_after("export FV_METRICS=127.0.0.1:9586");
    let silent = client.place.health(&[]);
    assert_eq!(silent.status.code(), Some(1));
    assert!(text(&silent.stdout).contains("SILENT: no handshake yet"), "{}", text(&silent.stdout));
    let _server = server.up();
    assert!(within(10, || client.pings("10.8.0.1")));
    for words in [&[][..], &["--max-age", "60"]] {
        let healthy = client.place.health(words);
        assert_eq!(healthy.status.code(), Some(0), "{}{}", text(&healthy.stdout), text(&healthy.stderr));
    }
    let json = client.place.health(&["--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!((&json[0]["healthy"], &json[0]["peers"][0]["state"]), (&true.into(), &"ok".into()));

    let same = |field: &str, column: usize| {
        within(5, || {
            let shown = client.wg("transfer");
            let shown = shown.split_whitespace().nth(column).expect("a number").to_owned();
            let line = format!(
                "wireguard_peer_{field}_bytes_total{{device=\"{}\",public_key=\"{}\"}} {shown}",
                client.place.name, server.public
            );
            client.place.scrape().lines().any(|found| found == line)
        })
    };
    assert!(same("receive", 1) && same("transmit", 2), "{}", client.place.scrape());
    assert!(client.place.scrape().contains("fv_dropped_packets_total{device="));

    client.place.run(&["ip", "link", "set", &client.place.name, "down"]);
    let down = || text(&client.place.health(&[]).stdout).contains("UNHEALTHY: the interface is down");
    assert!(within(5, down));
    drop(alone);
    let gone = client.place.health(&[]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(text(&gone.stderr).contains("no tunnel of this name runs"), "{}", text(&gone.stderr));
}

#[test]
fn nothing_listens_unless_asked_to_and_an_asked_for_address_reaches_the_process_in_the_background() {
    let Some(place) = Place::new("wb", &[]) else { return };
    place.run(&["ip", "link", "set", "lo", "up"]);
    let quiet = place.foreground(&[]);
    assert!(place.inside(|| TcpStream::connect("127.0.0.1:9586").is_err()));
    drop(quiet);
    assert!(within(5, || place.is_empty() || !place.has_interface()));
    let status = place.command(FV).args(["--metrics", "127.0.0.1:9586", &place.name]).status();
    assert!(status.expect("fv runs").success());
    assert!(place.scrape().contains("fv_up{device="));
    let again = place.command(FV).args(["-f", "--metrics", "127.0.0.1:9586", "wg-other"]).output();
    let again = again.expect("fv runs");
    assert!(!again.status.success());
    assert!(text(&again.stderr).contains("in use by another program"), "{}", text(&again.stderr));
    let wrong = place.command(FV).args(["-f", "wg-other"]).env("FV_METRICS", "9586").output();
    let wrong = text(&wrong.expect("fv runs").stderr);
    assert!(wrong.contains("FV_METRICS=9586: an address with a port"), "{wrong}");
}
