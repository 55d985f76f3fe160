//! What the demo prints, and what must hold for it to count as a success.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use forestvpn_quantum::Counters;
use forestvpn_quantum::config::DeviceSnapshot;

use super::bulk::{Transfer, megabits};
use super::memory::{Flow, Report};
use super::ping::Pings;

const DIRECTIONS: [&str; 4] =
    ["left to right, IPv4", "left to right, IPv6", "right to left, IPv4", "right to left, IPv6"];

/// All figures of a run with TUN devices.
pub(crate) struct Tunnel {
    /// One ping that had to wait for the handshake.
    pub(crate) first: Pings,
    /// In the order of [`DIRECTIONS`].
    pub(crate) pings: Vec<Pings>,
    /// While the first transfer ran.
    pub(crate) beside: Pings,
    /// Left to right, right to left.
    pub(crate) transfers: [Transfer; 2],
    /// Processor time of both ends during the transfers.
    pub(crate) cpu: [Duration; 2],
    /// Both ends after the transfers.
    pub(crate) snapshots: [DeviceSnapshot; 2],
    /// What both ends counted.
    pub(crate) counters: [BTreeMap<String, u64>; 2],
}

/// Prints the pings.
pub(crate) fn latencies(first: &Pings, pings: &[Pings]) {
    if let Some(time) = first.times.first() {
        say!("Handshake and first answer: {}", milliseconds(*time));
    }
    say!("Round trips ({} echo)          answered       p50       p90       p99       max", first.kind);
    for (direction, pings) in DIRECTIONS.iter().zip(pings) {
        latency(direction, pings);
    }
}

fn latency(label: &str, pings: &Pings) {
    let answered = format!("{}/{}", pings.times.len(), pings.sent);
    let [p50, p90, p99, max] = [50, 90, 99, 100].map(|percent| milliseconds(pings.percentile(percent)));
    say!("  {label:<30}{answered:>9} {p50:>9} {p90:>9} {p99:>9} {max:>9}");
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

/// Prints the rest and gives what is wrong.
pub(crate) fn tunnel(figures: &Tunnel) -> Vec<String> {
    latency("round trips beside it, IPv4", &figures.beside);
    let [there, back] = &figures.transfers;
    let bits = (there.bytes + back.bytes) as f64 * 8.0;
    say!(
        "Throughput: {:.0} Mbit/s there, {:.0} Mbit/s back",
        megabits(there.bytes, there.time),
        megabits(back.bytes, back.time)
    );
    let cpu = figures.cpu.map(|time| time.as_secs_f64() / (bits / 1e9));
    say!(
        "Processor time: {:.2} s per Gbit (left {:.2}, right {:.2}); sender and receiver of the TCP stream not \
         counted",
        cpu[0] + cpu[1],
        cpu[0],
        cpu[1]
    );
    say!("SHA-256 of what arrived: {} there, {} back", matches(there.intact()), matches(back.intact()));
    print_counters(&figures.snapshots, &figures.counters);
    tunnel_problems(figures)
}

fn tunnel_problems(figures: &Tunnel) -> Vec<String> {
    let mut problems = peers_problems(&figures.snapshots);
    let pings = DIRECTIONS.iter().copied().zip(&figures.pings).chain([("the first ping", &figures.first)]);
    for (label, pings) in pings.filter(|(_, pings)| !pings.complete()) {
        problems.push(format!("{label}: {} of {} pings answered", pings.times.len(), pings.sent));
    }
    if figures.beside.times.is_empty() {
        problems.push("no ping was answered beside the transfer".to_owned());
    }
    for (label, transfer) in ["left to right", "right to left"].iter().zip(&figures.transfers) {
        if !transfer.intact() {
            problems.push(format!("{label}: what arrived is not what was sent"));
        }
    }
    // All of it went through the tunnel, and not round it.
    for (label, (end, transfer)) in
        ["left", "right"].iter().zip(figures.snapshots.iter().zip(&figures.transfers))
    {
        let sent: u64 = end.peers.iter().map(|peer| peer.tx_bytes).sum();
        if sent < transfer.bytes {
            problems.push(format!("{label}: {sent} bytes encrypted for {} sent", transfer.bytes));
        }
    }
    problems
}

fn peers_problems(ends: &[DeviceSnapshot; 2]) -> Vec<String> {
    let silent = |end: &DeviceSnapshot| end.peers.iter().all(|peer| peer.last_handshake.is_none());
    let labelled = ["left", "right"].iter().zip(ends).filter(|(_, end)| silent(end));
    labelled.map(|(label, _)| format!("{label}: no handshake")).collect()
}

/// Prints the run in memory and gives what is wrong.
pub(crate) fn memory(report: &Report) -> Vec<String> {
    say!("\nHandshake and first packet there: {}", milliseconds(report.handshake));
    say!("Round trips (one packet)            answered       p50       p90       p99       max");
    for (label, pings) in ["there and back, IPv4", "there and back, IPv6"].iter().zip(&report.pings) {
        latency(label, pings);
    }
    say!("\nThrough cipher and UDP");
    for (label, flow) in ["left to right, IPv4", "right to left, IPv6"].iter().zip(&report.flows) {
        say!(
            "  {label:<22} {} packets, {} bytes in {:.2} s: {:.0} Mbit/s, {:.0} packets/s; {} sent again; SHA-256 {}",
            flow.packets,
            flow.bytes,
            flow.time.as_secs_f64(),
            megabits(flow.bytes, flow.time),
            flow.packets as f64 / flow.time.as_secs_f64().max(1e-9),
            flow.again,
            matches(flow.intact())
        );
    }
    let named = |counters: &Counters| counters.iter().map(|(name, value)| (name.to_owned(), value)).collect();
    print_counters(&report.ends, &report.counters.each_ref().map(named));
    let mut problems = peers_problems(&report.ends);
    if !report.pings.iter().all(Pings::complete) {
        problems.push("a packet did not come back".to_owned());
    }
    if !report.flows.iter().all(Flow::intact) {
        problems.push("what arrived is not what was sent".to_owned());
    }
    problems
}

const fn matches(intact: bool) -> &'static str {
    if intact { "matches" } else { "DOES NOT MATCH" }
}

/// Both ends side by side; what is zero at both is left out.
fn print_counters(ends: &[DeviceSnapshot; 2], counters: &[BTreeMap<String, u64>; 2]) {
    say!("\nCounters                              left           right");
    let row = |label: &str, values: [String; 2]| say!("  {label:<24} {:>15} {:>15}", values[0], values[1]);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    row(
        "last handshake",
        ends.each_ref().map(|end| {
            let last = end.peers.iter().filter_map(|peer| peer.last_handshake).max();
            last.map_or_else(
                || "never".to_owned(),
                |then| format!("{} s ago", now.saturating_sub(then).as_secs()),
            )
        }),
    );
    let sum = |of: fn(&forestvpn_quantum::config::PeerSnapshot) -> u64| {
        ends.each_ref().map(|end| end.peers.iter().map(of).sum::<u64>().to_string())
    };
    row("bytes sent", sum(|peer| peer.tx_bytes));
    row("bytes received", sum(|peer| peer.rx_bytes));
    let [left, right] = counters;
    for (name, value) in left {
        let values = [*value, right.get(name).copied().unwrap_or(0)];
        if values != [0, 0] {
            row(&name.replace('_', " "), values.map(|value| value.to_string()));
        }
    }
}

#[cfg(test)]
mod tests {
    use forestvpn_quantum::PublicKey;
    use forestvpn_quantum::config::PeerSnapshot;

    use super::*;

    fn pings() -> Pings {
        Pings { kind: "ICMP", sent: 1, times: vec![Duration::from_millis(1)] }
    }

    fn good() -> Tunnel {
        let transfer =
            || Transfer { bytes: 5, time: Duration::from_secs(1), sent: [1; 32], received: [1; 32] };
        let peer = || PeerSnapshot {
            public_key: PublicKey([1; 32]),
            preshared_key: None,
            endpoint: None,
            last_handshake: Some(Duration::from_secs(1)),
            tx_bytes: 9,
            rx_bytes: 9,
            persistent_keepalive: 0,
            allowed_ips: Vec::new(),
        };
        let end = || DeviceSnapshot { peers: vec![peer()], ..DeviceSnapshot::default() };
        Tunnel {
            first: pings(),
            pings: vec![pings(), pings(), pings(), pings()],
            beside: pings(),
            transfers: [transfer(), transfer()],
            cpu: [Duration::ZERO; 2],
            snapshots: [end(), end()],
            counters: [BTreeMap::new(), BTreeMap::new()],
        }
    }

    #[test]
    fn only_a_run_in_which_everything_holds_is_verified() {
        assert_eq!(tunnel_problems(&good()), [] as [String; 0]);
        let spoilt: [fn(&mut Tunnel); 6] = [
            |t| t.first.times.clear(),
            |t| t.pings[2].times.clear(),
            |t| t.beside.times.clear(),
            |t| t.transfers[1].received[7] ^= 1,
            |t| t.snapshots[0].peers[0].last_handshake = None,
            |t| t.snapshots[1].peers[0].tx_bytes = 4,
        ];
        for spoil in spoilt {
            let mut figures = good();
            spoil(&mut figures);
            assert_eq!(tunnel_problems(&figures).len(), 1);
        }
    }
}
