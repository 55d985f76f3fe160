//! What a tunnel counted, in Prometheus' text format 0.0.4: the names that wireguard_exporter made usual, and `fv_…`
//! for what only this program knows.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use forestvpn_quantum::config::DeviceSnapshot;
use forestvpn_quantum::{Counters, Discard, Status};

use crate::key::public_text;

/// What is told of one tunnel.
#[derive(Debug)]
pub(crate) struct Numbers<'a> {
    pub(crate) interface: &'a str,
    pub(crate) device: &'a DeviceSnapshot,
    pub(crate) status: &'a Status,
    pub(crate) counters: &'a Counters,
    /// Datagrams that the kernel threw away because a receive buffer was full.
    pub(crate) unread: u64,
}

/// The whole text. No secret is in it.
pub(crate) fn render(numbers: &Numbers<'_>) -> String {
    let Numbers { interface, device, status, counters, unread } = *numbers;
    let name = escaped(interface);
    let mut out = Text(String::with_capacity(16 << 10));
    let key = device.private_key.as_ref().map(|key| public_text(&key.public_key())).unwrap_or_default();
    out.family("wireguard_device_info", "gauge", "Metadata about a device.");
    out.sample("wireguard_device_info", &format!("device=\"{name}\",public_key=\"{key}\""), 1);
    peers(&mut out, &name, device);

    let device_label = format!("device=\"{name}\"");
    out.family("fv_info", "gauge", "Version of fv, and the code that encrypts data packets.");
    let cipher = escaped(status.cipher);
    let version = env!("CARGO_PKG_VERSION");
    out.sample("fv_info", &format!("{device_label},version=\"{version}\",cipher=\"{cipher}\""), 1);
    out.family("fv_up", "gauge", "1 when the interface is up.");
    out.sample("fv_up", &device_label, status.up.into());
    out.family("fv_feature_in_use", "gauge", "1 for each offload that is in use now.");
    let udp = status.udp.as_ref();
    for (feature, on) in [
        ("tun_header", status.tun.vnet),
        ("tun_tso", status.tun.tso),
        ("tun_uso", status.tun.uso),
        ("tun_joined_writes", status.merging),
        ("udp_segment", udp.is_some_and(|udp| udp.segments > 1)),
        ("udp_gro", udp.is_some_and(|udp| udp.gro)),
    ] {
        out.sample("fv_feature_in_use", &format!("{device_label},feature=\"{feature}\""), on.into());
    }
    out.family("fv_udp_buffer_bytes", "gauge", "Size of the socket buffers; 0 while the interface is down.");
    for (way, bytes) in [
        ("receive", udp.map_or(0, |udp| udp.buffers.receive)),
        ("send", udp.map_or(0, |udp| udp.buffers.send)),
    ] {
        out.sample("fv_udp_buffer_bytes", &format!("{device_label},direction=\"{way}\""), bytes as u64);
    }

    let reasons: BTreeSet<_> = Discard::ALL.iter().map(|&(_, name)| name).collect();
    out.family("fv_dropped_packets_total", "counter", "Packets that were not let through, by reason.");
    for (reason, value) in counters.iter().filter(|(name, _)| reasons.contains(name)) {
        out.sample("fv_dropped_packets_total", &format!("{device_label},reason=\"{reason}\""), value);
    }
    let others = counters.iter().filter(|(name, _)| !reasons.contains(name));
    for (counter, value) in others.chain([("udp_lost_unread", unread)]) {
        let metric = format!("fv_{counter}_total");
        out.family(&metric, "counter", help(counter));
        out.sample(&metric, &device_label, value);
    }
    out.0
}

fn peers(out: &mut Text, device_name: &str, device: &DeviceSnapshot) {
    let labels: Vec<_> = device
        .peers
        .iter()
        .map(|peer| format!("device=\"{device_name}\",public_key=\"{}\"", public_text(&peer.public_key)))
        .collect();
    let all = || device.peers.iter().zip(&labels);
    out.family("wireguard_peer_info", "gauge", "Metadata about a peer, whose key is public_key.");
    for (peer, labels) in all() {
        let endpoint = peer.endpoint.map(|endpoint| endpoint.to_string()).unwrap_or_default();
        out.sample("wireguard_peer_info", &format!("{labels},endpoint=\"{endpoint}\",name=\"\""), 1);
    }
    out.family("wireguard_peer_allowed_ips_info", "gauge", "A prefix that is routed to a peer.");
    for (peer, labels) in all() {
        for net in &peer.allowed_ips {
            out.sample("wireguard_peer_allowed_ips_info", &format!("{labels},allowed_ips=\"{net}\""), 1);
        }
    }
    out.family("wireguard_peer_receive_bytes_total", "counter", "Bytes received from a peer.");
    for (peer, labels) in all() {
        out.sample("wireguard_peer_receive_bytes_total", labels, peer.rx_bytes);
    }
    out.family("wireguard_peer_transmit_bytes_total", "counter", "Bytes sent to a peer.");
    for (peer, labels) in all() {
        out.sample("wireguard_peer_transmit_bytes_total", labels, peer.tx_bytes);
    }
    let text = "Time of the last handshake with a peer, in seconds since 1970; 0: none.";
    out.family("wireguard_peer_last_handshake_seconds", "gauge", text);
    for (peer, labels) in all() {
        let seconds = peer.last_handshake.map_or(0, |time| time.as_secs());
        out.sample("wireguard_peer_last_handshake_seconds", labels, seconds);
    }
}

/// A sentence for each counter; docs/tuning.md says more.
fn help(counter: &str) -> &'static str {
    match counter {
        "udp_received" => "Datagrams received; against udp_reads: datagrams a read.",
        "udp_reads" => "System calls that read datagrams.",
        "udp_sent" => "Datagrams sent; against udp_writes: datagrams a write.",
        "udp_writes" => "System calls that sent datagrams.",
        "udp_gso_fallbacks" => "Times that the kernel refused UDP_SEGMENT; the datagrams were sent singly.",
        "udp_lost_unread" => "Datagrams that the kernel dropped because the receive buffer was full.",
        "tun_read" => "Packets and super-packets read from the interface.",
        "tun_written" => "Packets written to the interface.",
        "tun_unreachable" => "Senders told by ICMP that there is no peer or endpoint for their packet.",
        "tun_merged_writes" => {
            "Writes of several joined packets; against tun_merged_packets: packets a write."
        }
        "tun_merged_packets" => "Packets that were written joined.",
        "tun_merge_fallbacks" => "Joined writes that the kernel refused; the packets were written singly.",
        _ => "See docs/tuning.md.",
    }
}

/// Lines of the format.
struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: u64) {
        let _ = writeln!(self.0, "{name}{{{labels}}} {value}");
    }
}

/// A label's value: backslash, quote and line feed may not stand as they are.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use forestvpn_quantum::config::PeerSnapshot;
    use forestvpn_quantum::io::TunCaps;
    use forestvpn_quantum::{Device, DeviceConfig, PresharedKey, PrivateKey, PublicKey, Worker};

    use super::*;

    /// What a scrape of a tunnel with one peer gives.
    fn scraped() -> String {
        use forestvpn_quantum::io::BootClock;
        use forestvpn_quantum::io::mem;
        use forestvpn_quantum::time::OsEntropy;
        let device = Device::new(DeviceConfig::default(), Box::new(OsEntropy));
        let (tun, _) = mem::tun_pair(1);
        let here = "127.0.0.1:1".parse().expect("an address");
        let (udp, _) = mem::udp_pair(here, here, 1);
        let (mut worker, handle) = Worker::new(device, tun, udp, BootClock::default()).expect("a worker");
        let thread = std::thread::spawn(move || worker.run());
        let (status, counters) = (handle.status().expect("there"), handle.counters().expect("there"));
        handle.stop();
        thread.join().expect("ended").expect("in order");
        let snapshot = DeviceSnapshot {
            private_key: Some(PrivateKey::new([0x51; 32])),
            peers: vec![PeerSnapshot {
                public_key: PublicKey([4; 32]),
                preshared_key: Some(PresharedKey::new([0x52; 32])),
                endpoint: Some("[2001:db8::1]:5".parse().expect("an endpoint")),
                last_handshake: Some(Duration::from_millis(1_588_274_629_500)),
                tx_bytes: 76_200,
                rx_bytes: 76_728,
                persistent_keepalive: 0,
                allowed_ips: vec!["10.0.0.0/8".parse().expect("a net"), "::/0".parse().expect("a net")],
            }],
            ..DeviceSnapshot::default()
        };
        let status = Status { tun: TunCaps { vnet: true, ..status.tun }, ..status };
        render(&Numbers {
            interface: "w\"\\g",
            device: &snapshot,
            status: &status,
            counters: &counters,
            unread: 3,
        })
    }

    /// Name to kind, and every sample as name and the rest, as a strict reader of the format takes them.
    pub(crate) fn parsed(text: &str) -> (HashMap<String, String>, Vec<(String, String)>) {
        let (mut kinds, mut samples) = (HashMap::new(), Vec::new());
        let mut last = String::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').expect("a kind");
                assert!(kinds.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
                last = name.to_owned();
            } else if !line.starts_with("# HELP ") {
                let (name, rest) = line.split_once('{').expect("labels");
                assert_eq!(name, last, "a sample away from its family");
                let (labels, value) = rest.rsplit_once("} ").expect("a value");
                value.parse::<f64>().unwrap_or_else(|_| panic!("{line}"));
                samples.push((name.to_owned(), labels.to_owned()));
            }
        }
        (kinds, samples)
    }

    #[test]
    fn the_names_and_labels_are_those_of_wireguard_exporter_and_no_secret_is_told() {
        let text = scraped();
        let key = "BAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQ=";
        let labels = format!("device=\"w\\\"\\\\g\",public_key=\"{key}\"");
        for line in [
            format!("wireguard_peer_info{{{labels},endpoint=\"[2001:db8::1]:5\",name=\"\"}} 1"),
            format!("wireguard_peer_allowed_ips_info{{{labels},allowed_ips=\"10.0.0.0/8\"}} 1"),
            format!("wireguard_peer_receive_bytes_total{{{labels}}} 76728"),
            format!("wireguard_peer_transmit_bytes_total{{{labels}}} 76200"),
            format!("wireguard_peer_last_handshake_seconds{{{labels}}} 1588274629"),
            "fv_udp_lost_unread_total{device=\"w\\\"\\\\g\"} 3".to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        for secret in [[0x51; 32], [0x52; 32]] {
            assert!(!text.contains(&public_text(&PublicKey(secret))));
        }
        parsed(&text);
    }

    #[test]
    fn every_reason_for_a_drop_and_every_other_counter_is_told() {
        let (kinds, samples) = parsed(&scraped());
        let reasons = samples.iter().filter(|(name, _)| name == "fv_dropped_packets_total").count();
        assert_eq!(reasons, Discard::COUNT);
        for name in ["fv_udp_reads_total", "fv_udp_gso_fallbacks_total", "fv_tun_merge_fallbacks_total"] {
            assert_eq!(kinds.get(name).map(String::as_str), Some("counter"), "{name}");
        }
    }

    #[test]
    fn the_dashboard_asks_for_nothing_that_is_not_told() {
        let (kinds, _) = parsed(&scraped());
        let json = include_str!("../../dist/grafana/fv.json");
        let board: serde_json::Value = serde_json::from_str(json).expect("JSON");
        let mut asked = 0;
        for panel in board["panels"].as_array().expect("panels") {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let query = target["expr"].as_str().expect("a query");
                let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                for name in words.filter(|word| word.starts_with("fv_") || word.starts_with("wireguard_")) {
                    assert!(kinds.contains_key(name), "{name} in {query}");
                    asked += 1;
                }
            }
        }
        assert!(asked >= 15, "{asked}");
    }
}
