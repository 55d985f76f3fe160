//! What a running tunnel says of itself when it is asked over its control socket.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use forestvpn_quantum::config::DeviceSnapshot;
use forestvpn_quantum::io::Kernel;
use serde::Serialize;

use super::advice;
use super::equipment::{Equipment, Joining};
use super::finding::{Finding, State, lines};
use super::report::Report;
use crate::show;

/// A session is made anew after two minutes; a peer that is in use had a handshake since.
const FRESH: Duration = Duration::from_secs(180);

/// All that it said, and what it means.
#[derive(Debug, Serialize)]
pub(super) struct Running {
    interface: String,
    fv: String,
    in_use: Vec<Finding>,
    counters: BTreeMap<String, u64>,
    /// In the worker's order, for people.
    #[serde(skip)]
    ordered: Vec<(String, u64)>,
    wrong: Vec<Finding>,
}

/// Asks the tunnel of `ifname`.
///
/// # Errors
/// One sentence: nobody answers, or something that is no `fv`.
pub(super) fn ask(directory: &Path, ifname: &str) -> Result<Running, String> {
    let answer = show::exchange(directory, ifname, "fv=1")?;
    let report = Report::parse(&answer).ok_or_else(|| {
        format!(
            "{ifname}: what runs it is not fv, or an older one: it does not know what the doctor asks; \
             `fv show {ifname}` works with every implementation"
        )
    })?;
    let device = show::ask(directory, ifname)?;
    Ok(explain(ifname, report, &device, Kernel::running()))
}

fn explain(ifname: &str, report: Report, device: &DeviceSnapshot, kernel: Kernel) -> Running {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut in_use = vec![link(ifname, &report, device)];
    in_use.extend(key(ifname, device));
    in_use.push(Finding::new("threads", State::Ok, threads(&report.threads)));
    in_use.push(Finding::new("cipher", State::Ok, format!("ChaCha20-Poly1305 by {}", report.cipher)));
    in_use.push(peers(device, now));
    let joining = if report.joining {
        Joining::Works
    } else if report.counter("tun_merge_fallbacks") > 0 {
        Joining::Refused("while it ran".into())
    } else {
        Joining::Untried("it is off")
    };
    let joined_datagrams =
        if report.joining_udp { Some("UDP datagrams of one flow are written as one") } else { None };
    let Report { offloads, tun, udp, .. } = report;
    in_use.extend(Equipment { kernel, offloads, tun: Some(tun), joining, udp }.findings());
    in_use.extend(joined_datagrams.map(|text| Finding::new("joined datagrams", State::Ok, text)));
    Running {
        interface: ifname.to_owned(),
        wrong: advice::wrong(&report).into_iter().chain(forwarding(&report)).collect(),
        in_use,
        counters: report.counters.iter().cloned().collect(),
        fv: report.version,
        ordered: report.counters,
    }
}

fn link(ifname: &str, report: &Report, device: &DeviceSnapshot) -> Finding {
    if report.up {
        return Finding::new("link", State::Ok, format!("up, UDP port {}", device.listen_port));
    }
    Finding::new("link", State::Look, "down: no packet passes")
        .advise(format!("ip link set {ifname} up; if it is up, the log of fv says what is wrong"))
}

fn key(ifname: &str, device: &DeviceSnapshot) -> Option<Finding> {
    let advice = format!("wg set {ifname} private-key FILE");
    let missing = || Finding::new("key", State::Look, "there is no private key: no handshake").advise(advice);
    device.private_key.is_none().then(missing)
}

/// Where joined packets are passed on, some network cards and bridges mishandle them. Nothing here shows that.
fn forwarding(report: &Report) -> Option<Finding> {
    let written = report.counter("tun_merged_writes");
    let settings = ["/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"];
    let forwards =
        settings.iter().any(|path| std::fs::read_to_string(path).is_ok_and(|text| text.trim() == "1"));
    (written > 0 && forwards).then(|| {
        Finding::new("tun_merged_writes", State::Note, format!("{written}: and this host forwards packets"))
            .advise("if TCP that is forwarded stalls, while TCP to this host is fast: FV_NO_OFFLOAD=tun-gro")
    })
}

fn peers(device: &DeviceSnapshot, now: Duration) -> Finding {
    let all = device.peers.len();
    let fresh = |then: &Duration| now.saturating_sub(*then) < FRESH;
    let talking = device.peers.iter().filter(|peer| peer.last_handshake.as_ref().is_some_and(fresh)).count();
    let text = format!("{talking} of {all} had a handshake in the last three minutes");
    match (all, talking) {
        (0, _) => Finding::new("peers", State::Note, "there are none"),
        (_, 0) => Finding::new("peers", State::Note, text)
            .advise("fine while nothing is sent; else look at `fv show`, the endpoints and the keys"),
        _ => Finding::new("peers", State::Ok, text),
    }
}

impl Running {
    pub(super) fn as_text(&self) -> String {
        let mut out = format!("{}: fv {}\n{}\ncounters\n", self.interface, self.fv, lines(&self.in_use));
        let (zero, some): (Vec<_>, Vec<_>) = self.ordered.iter().partition(|(_, value)| *value == 0);
        let width = some.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, value) in some {
            let _ = writeln!(out, "  {name:width$}  {value}");
        }
        out += "  zero:";
        // In lines that fit a screen.
        let mut start = out.len();
        for (name, _) in zero {
            if out.len() - start > 90 {
                out += "\n       ";
                start = out.len();
            }
            let _ = write!(out, " {name}");
        }
        out.push('\n');
        let looks = |findings: &[Finding]| findings.iter().any(|finding| finding.state == State::Look);
        if self.wrong.is_empty() {
            out += "\nNothing was lost or refused.\n";
        } else {
            let _ = write!(out, "\nwhat the counters say\n{}", lines(&self.wrong));
        }
        if !looks(&self.wrong) && !looks(&self.in_use) {
            out += "\nNothing looks wrong.\n";
        }
        out
    }

    pub(super) fn as_json(&self) -> Result<String, String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n").map_err(|e| e.to_string())
    }
}

/// Who carries packets, in words.
fn threads(count: &str) -> String {
    match count {
        "1" => "1 carries packets".into(),
        "2" => "2 carry packets, one for each direction".into(),
        more => format!("{more} carry packets, one of them inward"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forestvpn_quantum::config::PeerSnapshot;
    use forestvpn_quantum::{PrivateKey, PublicKey};

    const UP: &str = "fv=0.1.0\nup=true\nswitched_off=\ncipher=ring\nthreads=1\ntun_header=true\ntun_tso=true\n\
                      tun_uso=true\ntun_joining=true\nudp_ipv4=true\nudp_ipv6=true\nudp_receive_buffer=4194304\n\
                      udp_send_buffer=1048576\nudp_segments_granted=64\nudp_segments=64\n\
                      udp_paths_without_segments=0\nudp_gro=true\n";

    fn said(report: &str, device: &DeviceSnapshot) -> String {
        let report = Report::parse(&format!("{report}errno=0\n\n")).expect("an answer");
        explain("wg0", report, device, Kernel(6, 18, 0)).as_text()
    }

    #[test]
    fn a_tunnel_without_losses_looks_right() {
        let device =
            DeviceSnapshot { private_key: Some(PrivateKey::new([1; 32])), ..DeviceSnapshot::default() };
        let text = said(&format!("{UP}counter_udp_sent=5\ncounter_spoofed=0\n"), &device);
        assert!(text.starts_with("wg0: fv 0.1.0\n") && text.ends_with("Nothing looks wrong.\n"), "{text}");
        assert!(text.contains("udp_sent  5\n  zero: spoofed\n") && !text.contains("LOOK"), "{text}");
    }

    #[test]
    fn a_link_that_is_down_and_refused_writes_are_named() {
        let lost = "tun_joining=false\ncounter_tun_merge_fallbacks=1\ncounter_udp_lost_full=3\n";
        let report = UP.replace("up=true", "up=false").replace("tun_joining=true\n", lost);
        let text = said(&report, &DeviceSnapshot::default());
        for part in [
            "wg set wg0 private-key",
            "ip link set wg0 up",
            "the kernel refused one",
            "3: datagrams were not sent",
            "1: joined writes",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("Nothing looks wrong"), "{text}");
    }

    #[test]
    fn peers_that_were_heard_lately_are_counted() {
        let now = Duration::from_secs(10_000);
        let peer = |ago| PeerSnapshot {
            public_key: PublicKey([0; 32]),
            preshared_key: None,
            endpoint: None,
            last_handshake: Some(now - Duration::from_secs(ago)),
            tx_bytes: 0,
            rx_bytes: 0,
            persistent_keepalive: 0,
            allowed_ips: Vec::new(),
        };
        let device = DeviceSnapshot { peers: vec![peer(179), peer(180)], ..DeviceSnapshot::default() };
        assert!(peers(&device, now).text.starts_with("1 of 2 had"));
        assert_eq!(peers(&device, now + FRESH).state, State::Note);
    }
}
